//! Storage of the kernel on the module when something ends, and what is not in every matrix.
//!
//! Client and server are in one guest. The scripts `nvme-target`, `nvme-disk`, `nfs-server`, `nfs-disk`, `iser-target` and `iser-disk` do the steps; what is
//! written is read back with checksums. Disks and files between the module and its peers are rows of `programs`.

use crate::device::Case;

/// The cases.
pub(crate) const CASES: &[Case] = &[
    (
        "NVMe over RDMA: IPv6, and receives that queues share",
        "insmod $MODULE; links
        /usr/bin/ip -6 addr add fd00::1/64 dev user0 nodad || true
        modprobe nvmet-rdma use_srq=1
        nvme-target up one fd00::1 4420 32
        disk=$(nvme-disk connect fd00::1 4420 one)
        nvme-disk verify $disk
        nvme-disk disconnect
        nvme-target down one
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NVMe over RDMA: the target leaves and comes back under load",
        "insmod $MODULE; links
        nvme-target up one 10.0.2.15 4420 32
        disk=$(nvme-disk connect 10.0.2.15 4420 one --reconnect-delay=1 --ctrl-loss-tmo=60)
        nvme-disk verify $disk --loops=2 & load=$!
        sleep 4
        nvme-target leave
        nvme-disk state connecting
        sleep 3
        nvme-target back one
        nvme-disk state live
        wait $load
        nvme-disk disconnect
        nvme-target down one
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NVMe over RDMA: the link is deleted under load",
        "insmod $MODULE; links
        nvme-target up one 10.0.2.15 4420 32
        disk=$(nvme-disk connect 10.0.2.15 4420 one --reconnect-delay=1 --ctrl-loss-tmo=5)
        nvme-disk verify $disk --loops=10 & load=$!
        sleep 4
        rdma link delete iwarp0
        ! rdma link | grep iwarp0
        ! wait $load
        nvme-target down one
        rmmod nvme_rdma
        rmmod iwarp_rnic",
    ),
    (
        "NVMe over RDMA: connections are reset under load",
        "insmod $MODULE; links
        nvme-target up one 10.0.2.15 4420 32
        disk=$(nvme-disk connect 10.0.2.15 4420 one --reconnect-delay=1 --ctrl-loss-tmo=60)
        nvme-disk verify $disk --loops=3 & load=$!
        for i in 1 2 3; do
            sleep 3
            ss -K dport = 4420
            nvme-disk state connecting
            nvme-disk state live
        done
        wait $load
        nvme-disk disconnect
        nvme-target down one
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NVMe over RDMA: the network is down for 5 s under load",
        "insmod $MODULE; links
        nvme-target up one 10.0.2.15 4420 32
        disk=$(nvme-disk connect 10.0.2.15 4420 one --reconnect-delay=1 --ctrl-loss-tmo=120)
        nvme-disk verify $disk --loops=2 & load=$!
        sleep 3
        ip link set user0 down
        sleep 5
        ip link set user0 up
        wait $load
        nvme-disk state live
        nvme-disk disconnect
        nvme-target down one
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NVMe over RDMA: the network is down for 60 s under load",
        "insmod $MODULE; links
        nvme-target up one 10.0.2.15 4420 32
        disk=$(nvme-disk connect 10.0.2.15 4420 one --reconnect-delay=1 --ctrl-loss-tmo=120)
        nvme-disk verify $disk --loops=2 & load=$!
        sleep 3
        ip link set user0 down
        sleep 60
        nvme-disk state connecting
        ip link set user0 up
        wait $load
        nvme-disk state live
        nvme-disk disconnect
        nvme-target down one
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NVMe over RDMA: the module is unloaded under load",
        "insmod $MODULE; links
        nvme-target up one 10.0.2.15 4420 32
        disk=$(nvme-disk connect 10.0.2.15 4420 one --reconnect-delay=1 --ctrl-loss-tmo=5)
        nvme-disk verify $disk --loops=10 & load=$!
        sleep 4
        rmmod iwarp_rnic
        ! wait $load
        nvme-target down one
        rmmod nvme_rdma",
    ),
    (
        "NFS over RDMA: the network is down for 5 s under load",
        "insmod $MODULE; links
        nfs-server up 20049
        nfs-disk mount 10.0.2.15 20049 4.2
        nfs-disk tree & load=$!
        sleep 1
        ip link set user0 down
        sleep 5
        ip link set user0 up
        wait $load
        nfs-disk unmount
        nfs-server down
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NFS over RDMA: the network is down for 60 s under load",
        "insmod $MODULE; links
        nfs-server up 20049
        nfs-disk mount 10.0.2.15 20049 3
        nfs-disk tree & load=$!
        sleep 1
        ip link set user0 down
        sleep 60
        ip link set user0 up
        wait $load
        nfs-disk unmount
        nfs-server down
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NFS over RDMA: connections are reset under load",
        "insmod $MODULE; links
        nfs-server up 20049
        nfs-disk mount 10.0.2.15 20049 4.2
        nfs-disk tree & load=$!
        for i in 1 2 3; do
            sleep 1
            ss -K dport = 20049 | grep 20049
        done
        wait $load
        nfs-disk unmount
        nfs-server down
        unused
        rmmod iwarp_rnic",
    ),
    (
        "iSER: the network is down for 5 s under load",
        "insmod $MODULE; links
        iser-target up iqn.2024-01.example:target 10.0.2.15 3260 96
        iser-disk daemon & daemon=$!
        iser-disk discover 10.0.2.15 3260
        disk=$(iser-disk login | sed -n 's/^disk //p')
        iser-disk fill $disk & load=$!
        sleep 2
        ip link set user0 down
        sleep 5
        ip link set user0 up
        wait $load
        iser-disk check $disk
        iser-disk logout
        iser-disk forget
        kill -9 $daemon
        wait $daemon || true
        iser-target down iqn.2024-01.example:target
        unused
        rmmod iwarp_rnic",
    ),
];
