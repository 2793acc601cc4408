//! `cargo xtask kernel test`: the module `iwarp_rnic` in a Linux kernel, with the distribution's
//! programs on it.
//!
//! A case is a shell script that runs in the guest ([`script`]). The case fails if a command fails,
//! the guest's kernel reports a fault, the module is still loaded after the script, or the module
//! leaked memory.

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::Log;

use super::boot::{self, Boot};
use super::matrix::{self, Peer, Selection};
use super::script::{self, Bench, Script};
use super::{cuts, endings, guide, hostile, limits, storage};
use crate::case::{Case, Verdict, is_chosen};
use crate::guest::Guest;
use crate::guest::debian::{Kernel, NEWER};
use crate::guest::image::Image;
use crate::needs::{self, Suite};
use crate::rows::Rows;

/// Arguments of `cargo xtask kernel test`.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Run only the cases whose names contain one of these
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    only: Vec<String>,
    /// Load the module and run this command in the guest, instead of the cases
    #[arg(long, value_name = "COMMAND")]
    exec: Option<String>,
    /// Run programs between the module and these peers instead of the cases
    #[arg(long, value_enum, value_name = "PEER", num_args = 1..)]
    with: Vec<Peer>,
    /// Test kernel storage (NVMe, NFS, SMB, iSER and rnbd) instead. With `--with`, test it between
    /// the module and the peers
    #[arg(long, conflicts_with = "few")]
    storage: bool,
    /// With --storage: run NVMe, NFS and perftest concurrently for this many minutes instead, and
    /// check that memory and descriptors do not grow. At least 30, because NFS registers more
    /// regions in its first minutes
    #[arg(
        long,
        value_name = "MINUTES",
        requires = "storage",
        conflicts_with_all = ["with", "only"],
        value_parser = clap::value_parser!(u64).range(30..=1440)
    )]
    load: Option<u64>,
    /// With --with: run only a few of the programs
    #[arg(long, requires = "with")]
    few: bool,
    /// Exit with 77 if packages for the guest are missing, instead of installing them (for `cargo
    /// xtask test`)
    #[arg(long, hide = true)]
    step: bool,
    /// Number of ring entries that the hostile process writes
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    entries: u64,
    #[command(flatten)]
    boot: Boot,
}

impl TestArgs {
    fn cases(&self) -> Vec<Case<Bench>> {
        let lists: &[&[Script]] = if self.storage {
            &[storage::CASES]
        } else {
            &[CASES, endings::CASES, limits::CASES, hostile::CASES]
        };
        let variables = format!("ENTRIES={}", self.entries);
        let limit = self
            .boot
            .limit(CASE_LIMIT + self.entries / ENTRIES_PER_SECOND);
        let rows = lists.iter().flat_map(|rows| rows.iter());
        rows.filter(|(name, _)| is_chosen(name, &self.only))
            .map(|row| script::case(row, &variables, limit))
            .collect()
    }
}

/// Time limit of the whole run. It is long, and only stops a run that hangs.
const LIMIT: Duration = Duration::from_secs(3600);
/// Time limit of one case, in seconds.
const CASE_LIMIT: u64 = 400;
/// Number of ring entries that the hostile process writes per second on a slow machine.
const ENTRIES_PER_SECOND: u64 = 2000;
const CASES: &[Script] = &[
    (
        "loads and unloads",
        "insmod $MODULE
        grep -q '^iwarp_rnic ' /proc/modules
        rmmod iwarp_rnic",
    ),
    (
        "the module and siw refuse to load together",
        "insmod /lib/siw/siw.ko
        refused insmod $MODULE
        dmesg | grep 'iwarp_rnic: cannot be loaded beside siw'
        rmmod siw
        insmod $MODULE
        refused insmod /lib/siw/siw.ko
        dmesg | grep 'iwarp_rnic: siw cannot be loaded'
        rmmod iwarp_rnic",
    ),
    (
        "a link on a network card and one on the loopback device",
        "insmod $MODULE
        rdma link add iwarp0 type iwarp netdev user0
        rdma link add iwarp1 type iwarp netdev lo
        refused rdma link add iwarp2 type iwarp netdev user0
        rdma link | grep 'iwarp0/1 state ACTIVE physical_state LINK_UP netdev user0'
        rdma link | grep 'iwarp1/1 state ACTIVE physical_state LINK_UP netdev lo'
        rdma link delete iwarp1
        rdma link | refused grep iwarp1
        rmmod iwarp_rnic
        rdma link | refused grep iwarp",
    ),
    (
        "programs see the device through rdma-core's provider",
        "insmod $MODULE
        rdma link add iwarp0 type iwarp netdev user0
        for i in $(seq 50); do [ -e /dev/infiniband/uverbs0 ] && break; sleep 0.1; done
        ibv_devinfo -v -d iwarp0 | tee /tmp/info
        grep 'transport:.*iWARP' /tmp/info
        grep 'state:.*PORT_ACTIVE' /tmp/info
        grep 'max_sge:.*6' /tmp/info
        rmmod iwarp_rnic",
    ),
    (
        "the port follows the network device: down, up, renamed, removed",
        "insmod $MODULE
        ip link add name br7 type bridge
        rdma link add iwarp8 type iwarp netdev br7
        ip link add link user0 name vlan7 type vlan id 7
        ip link set vlan7 up
        rdma link add iwarp7 type iwarp netdev vlan7
        rdma link | grep 'iwarp7/1 state ACTIVE'
        ip link set vlan7 down
        rdma link | grep 'iwarp7/1 state DOWN physical_state DISABLED'
        ip link set vlan7 name vlan8
        rdma link | grep 'netdev vlan8'
        ip link set vlan8 up
        rdma link | grep 'iwarp7/1 state ACTIVE'
        ip link delete vlan8
        for i in $(seq 50); do rdma link | grep -q iwarp7 || break; sleep 0.1; done
        rdma link | refused grep iwarp7
        rmmod iwarp_rnic
        ip link delete br7",
    ),
    (
        "a link is deleted when its network device moves to another namespace",
        "insmod $MODULE
        /usr/bin/ip netns add other
        ip link add link user0 name vlan7 type vlan id 7
        rdma link add iwarp7 type iwarp netdev vlan7
        /usr/bin/ip link set vlan7 netns other
        for i in $(seq 50); do rdma link | grep -q iwarp7 || break; sleep 0.1; done
        rdma link | refused grep iwarp7
        /usr/bin/ip netns delete other
        rmmod iwarp_rnic",
    ),
    (
        "receives are shared, and programs get events for limits and errors",
        "insmod $MODULE; links
        sharing 10.0.2.15 7300
        echo 0 > /sys/module/iwarp_rnic/parameters/rnr_wait_ms
        sharing 10.0.2.15 7300 impatient
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "a peer that supports MPA revision 1 only, and peers that do not reply",
        "insmod $MODULE; links
        elder 10.0.2.15 7300
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "a client in the kernel: requests in each context, registration, invalidation, \
         shared receives",
        "insmod $MODULE; links
        insmod /lib/iwarp/iwarp_client_test.ko || true
        dmesg | grep 'iwarp_client_test: .* tests, 0 failed'
        dmesg | refused grep 'iwarp_client_test: FAILED'
        rmmod iwarp_rnic",
    ),
    (
        "rping over IPv4 and IPv6",
        "insmod $MODULE; links
        options='-a 10.0.2.15 -p 7100 -C 10 -S 4000 -V'
        pair \"rping -s $options\" \"rping -c $options\"
        /usr/bin/ip -6 addr add fd00::1/64 dev user0 nodad
        pair 'rping -s -a fd00::1 -p 7100 -C 10 -V' 'rping -c -a fd00::1 -p 7100 -C 10 -V'
        pair 'rping -s -a :: -p 7100 -C 10 -V' 'rping -c -a fd00::1 -p 7100 -C 10 -V'
        pair 'rping -s -a :: -p 7100 -C 10 -V' 'rping -c -a 10.0.2.15 -p 7100 -C 10 -V'
        rmmod iwarp_rnic",
    ),
    (
        "perftest: Writes, Reads and Sends, in one direction and in both",
        "insmod $MODULE; links
        for test in ib_write_lat ib_read_lat ib_send_lat; do
        pair \"$test -R -p 7100 -n 50\" \"$test -R -p 7100 -n 50 10.0.2.15\"
        done
        for test in ib_write_bw ib_read_bw ib_send_bw; do
        pair \"$test -R -p 7100 -n 100\" \"$test -R -p 7100 -n 100 10.0.2.15\"
        pair \"$test -R -p 7100 -n 100 -b -s 4096\" \"$test -R -p 7100 -n 100 -b -s 4096 10.0.2.15\"
        done
        rdma statistic | grep tx_fpdus
        rmmod iwarp_rnic",
    ),
    (
        "many connections, concurrently and one after the other",
        "insmod $MODULE; links
        pair 'ucmatose -b 10.0.2.15 -c 20' 'ucmatose -s 10.0.2.15 -c 20 -C 10'
        rping -s -P -a 10.0.2.15 -p 7100 & server=$!
        listening 1BBC
        for i in $(seq 20); do
            rping -c -a 10.0.2.15 -p 7100 -C 1 >/tmp/client 2>&1 ||
                { cat /tmp/client; excused /tmp/client; }
        done
        kill -9 $server
        wait $server || true
        rmmod iwarp_rnic",
    ),
    (
        "TCP sockets use some of the ports that rdma_cm chooses",
        "insmod $MODULE; links
        range=$(cat /proc/sys/net/ipv4/ip_local_port_range)
        echo 40000 40063 > /proc/sys/net/ipv4/ip_local_port_range
        for port in $(seq 40000 40031); do
            nc -l -p $port >/dev/null 2>&1 & taken=\"$taken $!\"
            listening $(printf %X $port)
        done
        for server_port in $(seq 7101 7112); do
            rping -s -a 10.0.2.15 -p $server_port -C 1 & server=$!
            listening $(printf %X $server_port)
            rping -c -a 10.0.2.15 -p $server_port -C 1
            wait $server
        done
        kill $taken
        echo $range > /proc/sys/net/ipv4/ip_local_port_range
        rmmod iwarp_rnic",
    ),
    (
        "connection requests arrive in the order of the calls, on a busy machine",
        "insmod $MODULE; links
        (set +x; while :; do :; done) & first=$!
        (set +x; while :; do :; done) & second=$!
        (set +x; while :; do :; done) & third=$!
        in_order 10.0.2.15 7300 10
        kill -9 $first $second $third
        wait $first $second $third || true
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "the client, and then the server, is killed under load",
        "insmod $MODULE; links
        rping -s -P -a 10.0.2.15 -p 7100 -S 60000 & server=$!
        listening 1BBC
        rping -c -a 10.0.2.15 -p 7100 -S 60000 & client=$!
        sleep 2; kill -9 $client
        wait $client || true
        rping -c -a 10.0.2.15 -p 7100 -S 60000 -C 3
        rping -c -a 10.0.2.15 -p 7100 -S 60000 & client=$!
        sleep 2; kill -9 $server
        wait $server || true
        wait $client || true
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
];

/// Builds the module, boots the guest, and runs the cases.
pub(crate) fn command(args: &TestArgs) -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let limit = LIMIT + storage::load_limit(args.load.unwrap_or(0));
    let mut log = Log::create(&context.log_dir().join("kernel-device.log"), limit)?;
    if args.step
        && let Some(why) = missing_requirement(&mut log)
    {
        return Ok(Outcome::Skipped(why));
    }
    needs::require_packages(Suite::Guest, &mut log)?;
    let (image, cache) = match boot::prepare(&context, &args.boot, args.storage, &mut log)? {
        Ok(prepared) => prepared,
        Err(why) => return Ok(Outcome::Skipped(why)),
    };
    if !args.with.is_empty() {
        let selection = Selection {
            peers: &args.with,
            only: &args.only,
            few: args.few,
            storage: args.storage,
        };
        return match matrix::run(&context, &selection, &args.boot, &image, &cache, &mut log)? {
            0 => Ok(Outcome::Passed),
            failed => bail!("{failed} rows of the matrix failed"),
        };
    }
    log.say(format!("booting Linux {}", image.release));
    let mut bench = start(&image, &cache, &args.boot, &mut log)?;
    if let Some(command) = &args.exec {
        let script = format!("{}insmod $MODULE; set +e\n{command}", script::prelude());
        println!("{}", bench.guest.run(&script, LIMIT.as_secs())?.text);
        println!("{}", bench.guest.kernel_messages());
        return Ok(Outcome::Passed);
    }
    if let Some(minutes) = args.load {
        storage::load(&bench.guest, minutes, &mut log)?;
        args.boot.check_leaks(&bench.guest, &mut log)?;
        return Ok(Outcome::Passed);
    }
    let mut rows = Rows::default();
    let no_excuse = |_: &str, _: &str| None;
    for case in args.cases() {
        let once = |_: &mut Log| {
            let result = (case.run)(&bench);
            Ok((result, bench.last_output.take()))
        };
        rows.run(case.name.clone(), &mut log, once, no_excuse, |_| None)?;
        if rows.last_failed() {
            // The module may still be loaded, so boot a new guest for the next case.
            drop(bench);
            bench = start(&image, &cache, &args.boot, &mut log)?;
        }
    }
    if args.storage {
        cuts::run(&image, &cache, &args.boot, &args.only, &mut rows, &mut log)?;
    }
    if args.storage && is_chosen(guide::NAME, &args.only) {
        let once = |log: &mut Log| {
            let result = guide::run(&image, &cache, &args.boot, log);
            Ok((result.map(|()| Verdict::passed("")), String::new()))
        };
        rows.run(guide::NAME.to_owned(), &mut log, once, no_excuse, |_| None)?;
    }
    let failed = rows.print(&mut log);
    if failed > 0 {
        bail!("{failed} cases failed");
    }
    args.boot.check_leaks(&bench.guest, &mut log)?;
    Ok(Outcome::Passed)
}

/// Returns why no guest can run without installing packages, or `None` if one can.
fn missing_requirement(log: &mut Log) -> Option<String> {
    let missing = needs::missing_for_guests();
    if missing.is_some() {
        return missing;
    }
    Kernel::newest(NEWER, log)
        .err()
        .map(|error| format!("{error:#}"))
}

/// Boots a guest, and discards the kernel messages of the boot.
fn start(image: &Image, cache: &Path, boot: &Boot, log: &mut Log) -> Result<Bench> {
    let guest = Guest::start(image, cache, &boot.machine(), log)?;
    boot.forget_leaks(&guest)?;
    guest.kernel_messages();
    Ok(Bench {
        guest,
        last_output: RefCell::default(),
    })
}
