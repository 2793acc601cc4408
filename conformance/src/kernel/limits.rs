//! The module at limits: of memory, of the values of parameters, and of links.

use super::script::Script;

pub(super) const CASES: &[Script] = &[
    (
        "limits of memory cgroups, of locked memory and of the rdma cgroup end in errors",
        "insmod $MODULE; links
        chmod 666 /dev/infiniband/*
        mkdir -p /tmp/cg; mount -t cgroup2 none /tmp/cg
        echo '+memory +rdma' > /tmp/cg/cgroup.subtree_control
        mkdir /tmp/cg/small
        echo 64M > /tmp/cg/small/memory.max
        in_group() { (echo 0 > /tmp/cg/small/cgroup.procs; \"$@\"); }
        in_group limited cq 1000000 20 12
        in_group limited qp 32768 60 12
        cat /tmp/cg/small/memory.peak /tmp/cg/small/memory.current
        grep -q 'oom_kill 0' /tmp/cg/small/memory.events
        limited cq 100000 20 12 8000000
        limited qp 4096 20 12 8000000
        limited cq 16 20 12 65536
        echo 'iwarp0 hca_object=6' > /tmp/cg/small/rdma.max
        in_group limited cq 16 20 11
        in_group limited qp 16 20 11
        grep 'iwarp0 .*hca_object=0' /tmp/cg/small/rdma.current
        rmdir /tmp/cg/small
        umount /tmp/cg
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "parameters have valid values only",
        "insmod $MODULE
        revision=/sys/module/iwarp_rnic/parameters/mpa_revision
        for bad in 0 3 7 -1 x; do refused echo $bad > $revision; done
        for good in 1 2; do echo $good > $revision; grep \"^$good$\" $revision; done
        rmmod iwarp_rnic
        refused insmod $MODULE mpa_revision=7",
    ),
    (
        "a network device gets one link, although two are added at the same time",
        "insmod $MODULE
        for i in $(seq 40); do
            rdma link add one type iwarp netdev user0 & first=$!
            rdma link add two type iwarp netdev user0 & second=$!
            added=0
            if wait $first; then added=$((added+1)); fi
            if wait $second; then added=$((added+1)); fi
            [ $added = 1 ]
            [ $(rdma link | grep -c 'netdev user0') = 1 ]
            rdma link delete one || rdma link delete two
        done
        rmmod iwarp_rnic",
    ),
    (
        "memory is deregistered although the peer does not read it",
        "insmod $MODULE; links
        echo N > /sys/module/iwarp_rnic/parameters/peer_to_peer
        echo N > /sys/module/iwarp_rnic/parameters/mpa_crc
        withdrawing 10.0.2.15 7300 & server=$!
        listening 1C84
        python3 -c '
import socket, struct, time
s = socket.create_connection((\"10.0.2.15\", 7300), 30)
s.sendall(b\"MPA ID Req Frame\" + bytes([0, 1]) + struct.pack(\">H\", 0))
assert s.recv(20)[:16] == b\"MPA ID Rep Frame\"
s.sendall(struct.pack(\">HBBIQ\", 14, 0xc1, 0x40, 0, 0) + bytes(4))
time.sleep(60)
' & peer=$!
        wait $server
        kill $peer
        wait $peer || true
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
];
