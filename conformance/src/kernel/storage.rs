//! Kernel storage on the module while targets, links or the module are removed under load, and
//! storage features that the matrices do not cover.
//!
//! Client and server run in one guest; the cases that need two are in `cuts`. The guest's scripts
//! `nvme-target`, `nvme-disk`, `nfs-server`, `nfs-disk`, `iser-target` and `iser-disk` perform the
//! steps, and compare data by checksums. Storage between the module and other implementations is in
//! `programs`.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use xtask::process::Log;

use super::script::{Script, prelude, unload};
use crate::guest::Guest;

/// Time limits of a mixed load, in seconds: for start and end together, and for each round of a
/// minute. A round lasts longer than a minute, because it waits for running programs.
const LOAD_START_AND_END: u64 = 600;
const LOAD_ROUND: u64 = 240;

/// Returns the time limit of a mixed load of `minutes`.
pub(crate) fn load_limit(minutes: u64) -> Duration {
    Duration::from_secs(LOAD_START_AND_END + minutes * LOAD_ROUND)
}

/// Runs NVMe, NFS and perftest concurrently for `minutes`. Prints a table of free memory and open
/// objects after each minute.
///
/// Fails if a program fails, memory or descriptors have grown, or the kernel reports a fault.
pub(crate) fn load(guest: &Guest, minutes: u64, log: &mut Log) -> Result<()> {
    let script = format!(
        "cat > /tmp/prelude <<'END'\n{}END\nset -e; insmod /lib/iwarp/iwarp_rnic.ko
        rdma link add iwarp0 type iwarp netdev user0; mixed-load {minutes}",
        prelude()
    );
    let out = guest.run(&script, load_limit(minutes).as_secs())?;
    log.line(&out.text);
    for row in out.text.lines().filter(|line| line.starts_with('|')) {
        log.say(row);
    }
    if out.code != 0 {
        let last = out.text.lines().last().context("no output")?;
        bail!("exit {}: {last}", out.code);
    }
    unload(guest, LOAD_START_AND_END)
}

pub(crate) const CASES: &[Script] = &[
    (
        "NVMe over RDMA: IPv6 and a shared receive queue",
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
        "NVMe over RDMA: host and target authenticate each other",
        // After a failed attempt, a work item of the target closes the connection. If it runs
        // before the target's last response, the host waits for the response five times as long as
        // `admin_timeout`.
        "insmod $MODULE; links
        modprobe nvme_core
        echo 10 > /sys/module/nvme_core/parameters/admin_timeout
        nvme-disk host
        host=$(cat /etc/nvme/hostnqn)
        key=$(nvme gen-dhchap-key -m 1 -n $host)
        mine=$(nvme gen-dhchap-key -m 1 -n one)
        nvme-target up one 10.0.2.15 4420 32
        nvme-target secret one $host $key $mine
        refused nvme-disk connect 10.0.2.15 4420 one
        refused nvme-disk connect 10.0.2.15 4420 one --dhchap-secret=$mine
        refused nvme-disk connect 10.0.2.15 4420 one --dhchap-secret=$key --dhchap-ctrl-secret=$key
        echo 60 > /sys/module/nvme_core/parameters/admin_timeout
        disk=$(nvme-disk connect 10.0.2.15 4420 one --dhchap-secret=$key --dhchap-ctrl-secret=$mine)
        nvme-disk verify $disk
        nvme-disk disconnect
        nvme-target down one
        unused
        rmmod iwarp_rnic",
    ),
    (
        "NVMe over RDMA: the target's port is removed and restored under load",
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
        rdma link | refused grep iwarp0
        refused wait $load
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
        refused wait $load
        nvme-target down one
        rmmod nvme_rdma",
    ),
];
