//! The module when something that is in use goes away: peers, programs, links, network devices,
//! memory.

use super::script::Script;

pub(super) const CASES: &[Script] = &[
    (
        "programs exit although their peers never close, or reset the connection",
        "insmod $MODULE; links
        echo N > /sys/module/iwarp_rnic/parameters/peer_to_peer
        stubborn 10.0.2.15 7300
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "programs whose peers do not read do not block other programs",
        "insmod $MODULE; links
        echo N > /sys/module/iwarp_rnic/parameters/peer_to_peer
        rping -s -a 10.0.2.15 -p 7100 -C 20 -S 60000 & server=$!
        listening 1BBC
        stubborn 10.0.2.15 7300 40 rping -c -a 10.0.2.15 -p 7100 -C 20 -S 60000 -V
        wait $server
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "memory is deregistered under Writes, and completion queues overflow",
        "insmod $MODULE; links
        revoking 10.0.2.15 7300 20
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "a connection ends while megabytes of its data are unread",
        "echo 4096 4194304 6291456 > /proc/sys/net/ipv4/tcp_rmem
        insmod $MODULE rnr_wait_ms=500; links
        unread 10.0.2.15 7300
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic
        echo 4096 131072 6291456 > /proc/sys/net/ipv4/tcp_rmem",
    ),
    (
        "memory changes after Writes from it have completed, although the peer reads late",
        "echo 4096 6291456 16777216 > /proc/sys/net/ipv4/tcp_rmem
        echo 4096 4194304 16777216 > /proc/sys/net/ipv4/tcp_wmem
        insmod $MODULE; links
        echo N > /sys/module/iwarp_rnic/parameters/peer_to_peer
        echo N > /sys/module/iwarp_rnic/parameters/mpa_crc
        rewriting 10.0.2.15 7300 256 & server=$!
        listening 1C84
        late-reader 10.0.2.15 7300 256
        wait $server
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic
        echo 4096 131072 6291456 > /proc/sys/net/ipv4/tcp_rmem
        echo 4096 16384 4194304 > /proc/sys/net/ipv4/tcp_wmem",
    ),
    (
        "a lost last segment is sent again, and no socket and no namespace is left",
        "insmod $MODULE
        namespaces
        $tools -n far addr add 10.66.0.2/24 dev far0
        $tools -n near link set near0 up; $tools -n far link set far0 up
        $tools netns exec near rdma link add iwarp9 type iwarp netdev near0
        for i in $(seq 50); do if [ -e /dev/infiniband/rdma_cm ]; then break; fi; sleep 0.1; done
        hide='/usr/bin/ip -n near route add blackhole 10.66.0.2/32'
        show='/usr/bin/ip -n near route del blackhole 10.66.0.2/32'
        $tools netns exec near rejecting 10.66.0.1 7300 4 \"$hide\" \"$show\" & server=$!
        sleep 1
        $tools netns exec far python3 -c '
import socket, struct
for turn in range(4):
    s = socket.create_connection((\"10.66.0.1\", 7300), 30)
    s.sendall(b\"MPA ID Req Frame\" + bytes([0x40, 1]) + struct.pack(\">H\", 0))
    reply = s.recv(20)
    assert reply[:16] == b\"MPA ID Rep Frame\" and reply[16] & 0x20, reply
    s.close()
'
        wait $server
        open='NR > 1 && $4 != \"06\" { found = 1 } END { exit !found }'
        for i in $(seq 300); do
            if ! $tools netns exec near awk \"$open\" /proc/net/tcp; then break; fi
            sleep 0.1
        done
        refused $tools netns exec near awk \"$open\" /proc/net/tcp
        $tools netns delete near
        near_is_gone
        $tools netns delete far
        rmmod iwarp_rnic",
    ),
    (
        "a namespace is deleted although programs elsewhere use its device",
        "insmod $MODULE
        namespaces
        $tools -n near link set lo up; $tools -n near link set near0 up
        $tools -n far link set far0 up
        $tools netns exec near rdma link add iwarp9 type iwarp netdev near0
        for i in $(seq 50); do if [ -e /dev/infiniband/rdma_cm ]; then break; fi; sleep 0.1; done
        rping -s -P -p 7200 & listener=$!
        sleep 1
        $tools netns exec near grep ':1C20 .* 0A ' /proc/net/tcp /proc/net/tcp6
        $tools netns delete near
        near_is_gone
        kill -9 $listener
        wait $listener || true
        $tools netns delete far
        rmmod iwarp_rnic",
    ),
    (
        "peers that send half an FPDU use little memory, and others still connect",
        "insmod $MODULE; links
        ulimit -n 8192
        accepting 10.0.2.15 7300 1000 & server=$!
        listening 1C84
        half-fpdus 10.0.2.15 7300 1000 600 8192
        rping -s -a 10.0.2.15 -p 7100 -C 3 & ping=$!
        listening 1BBC
        half-fpdus 10.0.2.15 7300 200 32000 16384
        rping -c -a 10.0.2.15 -p 7100 -C 3 -V
        wait $ping
        kill $server
        wait $server || true
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "a link is deleted under load",
        "insmod $MODULE; links
        rping -s -P -a 10.0.2.15 -p 7100 -S 60000 & server=$!
        listening 1BBC
        rping -c -a 10.0.2.15 -p 7100 -S 60000 & client=$!
        ib_write_bw -R -p 7400 -D 100 & bandwidth=$!
        sleep 2
        ib_write_bw -R -p 7400 -D 100 10.0.2.15 & other=$!
        sleep 3
        rdma link delete iwarp0
        rdma link | refused grep iwarp0
        kill -9 $server $client $bandwidth $other || true
        wait $server $client $bandwidth $other || true
        rdma link add iwarp0 type iwarp netdev user0
        pair 'rping -s -a 10.0.2.15 -p 7100 -C 3 -V' 'rping -c -a 10.0.2.15 -p 7100 -C 3 -V'
        rmmod iwarp_rnic",
    ),
    (
        "the module is unloaded under load",
        "insmod $MODULE; links
        rping -s -P -a 10.0.2.15 -p 7100 -S 60000 & server=$!
        listening 1BBC
        rping -c -a 10.0.2.15 -p 7100 -S 60000 & client=$!
        ucmatose -b 10.0.2.15 -c 100 & waiting=$!
        sleep 3
        rmmod iwarp_rnic
        kill -9 $server $client $waiting || true
        wait $server $client $waiting || true",
    ),
    (
        "a network device is down for a while under load, and is removed under load",
        "insmod $MODULE; links
        rping -s -a 10.0.2.15 -p 7100 -S 60000 -C 300 & server=$!
        listening 1BBC
        rping -c -a 10.0.2.15 -p 7100 -S 60000 -C 300 & client=$!
        sleep 1
        ip link set user0 down
        sleep 2
        ip link set user0 up
        wait $client
        wait $server
        ip link add link user0 name vlan7 type vlan id 7
        ip addr add 10.0.7.15/24 dev vlan7
        ip link set vlan7 up
        rdma link add iwarp7 type iwarp netdev vlan7
        rping -s -P -a 10.0.7.15 -p 7100 -S 60000 & server=$!
        listening 1BBC
        rping -c -a 10.0.7.15 -p 7100 -S 60000 & client=$!
        sleep 2
        ip link delete vlan7
        for i in $(seq 100); do if ! rdma link | grep -q iwarp7; then break; fi; sleep 0.1; done
        rdma link | refused grep iwarp7
        kill -9 $server $client || true
        wait $server $client || true
        rmmod iwarp_rnic",
    ),
    (
        "a client connects although idle clients exceed the listener's backlog",
        "insmod $MODULE; links
        ucmatose -b 10.0.2.15 -c 1 & server=$!
        listening 1D2F
        for i in $(seq 150); do sleep 12 | nc 10.0.2.15 7471 & idle=\"$idle $!\"; done
        sleep 2
        ucmatose -s 10.0.2.15 -c 1
        wait $server
        kill $idle || true
        rmmod iwarp_rnic",
    ),
    (
        "a thousand connections are opened and closed",
        "insmod $MODULE; links
        for i in $(seq 10); do
            pair 'ucmatose -b 10.0.2.15 -c 100' 'ucmatose -s 10.0.2.15 -c 100'
        done
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
];
