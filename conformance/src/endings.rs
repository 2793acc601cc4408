//! The module when something ends that is in use: peers, programs, links, network devices, memory.

use crate::device::Case;

/// The cases.
pub(crate) const CASES: &[Case] = &[(
    "a peer that never closes does not keep a program that leaves",
    "insmod $MODULE; links
        echo N > /sys/module/iwarp_rnic/parameters/peer_to_peer
        stubborn 10.0.2.15 7300
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
)];
