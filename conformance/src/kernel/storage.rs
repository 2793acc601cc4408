//! Storage of the kernel on the module when something ends, and what is not in every matrix.
//!
//! Client and server are in one guest: what needs two is in `cuts`. The scripts `nvme-target`,
//! `nvme-disk`, `nfs-server`, `nfs-disk`, `iser-target` and `iser-disk` do the steps; what is
//! written is read back with checksums. Disks and files between the module and its peers are rows
//! of `programs`.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use xtask::process::Log;

use super::script::{Script, prelude, unload};
use crate::guest::Guest;

/// How long starting and ending of a mixed load may take, in seconds, and each of its minutes: a
/// round ends when what is under way has ended.
const LOAD_ENDS: u64 = 600;
const LOAD_MINUTE: u64 = 240;

/// The longest that a load of so many minutes may take.
pub(crate) fn longest_load(minutes: u64) -> Duration {
    Duration::from_secs(LOAD_ENDS + minutes * LOAD_MINUTE)
}

/// NVMe, NFS and perftest at the same time for so many minutes. Says a table of what was free and
/// open after each of them.
///
/// # Errors
/// When something of it fails, memory or descriptors have grown, or the kernel complains.
pub(crate) fn load(guest: &Guest, minutes: u64, log: &mut Log) -> Result<()> {
    let script = format!(
        "cat > /tmp/prelude <<'END'\n{}END\nset -e; insmod /lib/iwarp/iwarp_rnic.ko; rdma link add iwarp0 type iwarp netdev user0; mixed-load {minutes}",
        prelude()
    );
    let out = guest.run(&script, longest_load(minutes).as_secs())?;
    log.line(&out.text);
    for row in out.text.lines().filter(|line| line.starts_with('|')) {
        log.say(row);
    }
    if out.code != 0 {
        let last = out.text.lines().last().context("no output")?;
        bail!("exit {}: {last}", out.code);
    }
    unload(guest, LOAD_ENDS)
}

/// The cases.
pub(crate) const CASES: &[Script] = &[
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
        "NVMe over RDMA: host and target have to know each other's secret",
        // The target has a work end the connection before it answers the last message of an attempt
        // that failed. When that work is quicker, the answer is lost, and the host waits for it,
        // five times as long as this parameter says.
        "insmod $MODULE; links
        modprobe nvme_core
        echo 10 > /sys/module/nvme_core/parameters/admin_timeout
        nvme-disk host
        host=$(cat /etc/nvme/hostnqn)
        key=$(nvme gen-dhchap-key -m 1 -n $host)
        mine=$(nvme gen-dhchap-key -m 1 -n one)
        nvme-target up one 10.0.2.15 4420 32
        nvme-target secret one $host $key $mine
        ! nvme-disk connect 10.0.2.15 4420 one
        ! nvme-disk connect 10.0.2.15 4420 one --dhchap-secret=$mine
        ! nvme-disk connect 10.0.2.15 4420 one --dhchap-secret=$key --dhchap-ctrl-secret=$key
        echo 60 > /sys/module/nvme_core/parameters/admin_timeout
        disk=$(nvme-disk connect 10.0.2.15 4420 one --dhchap-secret=$key --dhchap-ctrl-secret=$mine)
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
        "NVMe over RDMA: the controller is reset under load",
        "insmod $MODULE; links
        nvme-target up one 10.0.2.15 4420 32
        disk=$(nvme-disk connect 10.0.2.15 4420 one)
        nvme-disk verify $disk --loops=9 & load=$!
        for i in 1 2 3; do
            sleep 1
            echo 1 > /sys/class/nvme/nvme0/reset_controller
            nvme-disk state live
        done
        kill -0 $load
        wait $load
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
];
