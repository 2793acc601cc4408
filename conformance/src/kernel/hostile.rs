//! The module against malicious processes that write arbitrary ring entries, peers that send
//! arbitrary data, and failed allocations.

use super::script::Script;

/// The variable `ENTRIES` comes from the command line.
pub(super) const CASES: &[Script] = &[
    (
        "a hostile process: random entries, forged flags, wrong mappings",
        "insmod $MODULE; links
        hostile 10.0.2.15 7100 $ENTRIES
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "hostile processes are killed while they run",
        "insmod $MODULE; links
        for seed in 11 12 13 14; do
        hostile 10.0.2.15 7100 1000000000 $seed & hostile=$!
        sleep 2; kill -9 $hostile
        wait $hostile || true
        done
        for i in $(seq 100); do if rdma resource | grep 'ctx 0'; then break; fi; sleep 0.1; done
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "each protocol violation gets its Terminate, and other connections continue",
        "insmod $MODULE; links
        rping -s -a 10.0.2.15 -p 7200 -C 2000 -S 4096 & server=$!
        listening 1C20
        rping -c -a 10.0.2.15 -p 7200 -C 2000 -S 4096 -v >/dev/null & client=$!
        violating 10.0.2.15 7300
        wait $client; wait $server
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "the hostile suite: attacks on a server while it serves a good client",
        "insmod $MODULE; links
        iwarp-conformance hostile --quick --device 10.0.2.15 --granting /usr/bin/granting
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "each of the engine's memory allocations fails once",
        "insmod $MODULE; links
        failing 10.0.2.15 7100 /sys/module/iwarp_rnic/parameters/fail_allocation
        rdma link delete iwarp1
        n=0
        while true; do
        n=$((n+1)); echo $n > /sys/module/iwarp_rnic/parameters/fail_allocation
        if rdma link add iwarp1 type iwarp netdev lo; then break; fi
        grep -q '^0$' /sys/module/iwarp_rnic/parameters/fail_allocation
        done
        echo \"device: $((n-1)) allocations\"
        [ $n -gt 1 ]
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
];
