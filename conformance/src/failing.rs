//! The module where things go wrong that are not its fault: a kernel that has no memory.

use crate::device::Case;

/// The cases.
pub(crate) const CASES: &[Case] = &[(
    "no memory for a device, at any allocation of the engine",
    "insmod $MODULE
    n=0
    while true; do
    n=$((n+1)); echo $n > /sys/module/iwarp_rnic/parameters/fail_allocation
    if rdma link add iwarp0 type iwarp netdev user0; then break; fi
    ! rdma link | grep iwarp0
    grep -q '^0$' /sys/module/iwarp_rnic/parameters/fail_allocation
    done
    [ $n -gt 1 ]
    ! grep -q '^0$' /sys/module/iwarp_rnic/parameters/fail_allocation
    echo 0 > /sys/module/iwarp_rnic/parameters/fail_allocation
    rmmod iwarp_rnic",
)];
