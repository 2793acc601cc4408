//! `cargo xtask kernel test`: the module `iwarp_rnic` in a Linux kernel, with the distribution's programs on it.
//!
//! A case is a shell script for the guest. After each the guest's kernel must not have complained, and a case that leaves the module
//! loaded fails: when it goes, it says whether memory is left.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use xtask::context::Context;
use xtask::kernel::module::{self, CLIENT, DEVICE};
use xtask::outcome::Outcome;
use xtask::process::Log;

use crate::boot::{Boot, Parts};
use crate::complaints;
use crate::cuts;
use crate::endings;
use crate::excuses;
use crate::guide;
use crate::hostile;
use crate::matrix::{self, Choice, Peer};
use crate::siw::debian::{Kernel, NEWER};
use crate::siw::guest::Guest;
use crate::siw::image::{self, Image};
use crate::siw::needs::{self, Needs};
use crate::storage;

/// Arguments of `cargo xtask kernel test`.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Run only the cases whose names contain one of these
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    only: Vec<String>,
    /// Run this command in the guest instead of the cases, with the module loaded
    #[arg(long, value_name = "COMMAND")]
    exec: Option<String>,
    /// Run programs between the module and these peers instead of the cases
    #[arg(long, value_enum, value_name = "PEER", num_args = 1..)]
    with: Vec<Peer>,
    /// Run storage of the kernel (NVMe, NFS, SMB, iSER and rnbd) instead: its own cases, or with peers disks and files between them
    #[arg(long, conflicts_with = "few")]
    storage: bool,
    /// With storage: run NVMe, NFS and perftest at the same time for so many minutes instead, and see that memory and descriptors stay as they are. NFS makes
    /// more regions in its first minutes
    #[arg(long, value_name = "MINUTES", requires = "storage", conflicts_with_all = ["with", "only"], value_parser = clap::value_parser!(u64).range(30..=1440))]
    load: Option<u64>,
    /// With peers: only a few programs
    #[arg(long, requires = "with")]
    few: bool,
    /// Exit with 77 if this machine lacks what a guest needs, instead of installing it; for a step of `cargo xtask test`
    #[arg(long, hide = true)]
    step: bool,
    /// How many entries of its rings a hostile process writes
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    entries: u64,
    #[command(flatten)]
    boot: Boot,
}

impl TestArgs {
    fn is_wanted(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }

    /// The cases to run.
    fn cases(&self) -> impl Iterator<Item = &'static Case> {
        let cases: &[&[Case]] = if self.storage {
            &[storage::CASES]
        } else {
            &[CASES, endings::CASES, hostile::CASES]
        };
        cases
            .iter()
            .flat_map(|cases| cases.iter())
            .filter(|(name, _)| self.is_wanted(name))
    }
}

/// Everything together; it only ends a hang.
const LIMIT: Duration = Duration::from_secs(3600);
/// Seconds for one case in the guest, which is emulated.
const CASE_LIMIT: u64 = 400;
/// Entries that a hostile process gets rid of at least.
const ENTRIES_PER_SECOND: u64 = 2000;
/// What the module says of memory that is left when it goes.
const LEFT: &str = "were not freed";
/// What the module says when it goes.
const GONE: &str = "no allocation of the engine is left";

/// For all cases: ends at the first command that fails, and knows the module's file. `links` makes two devices, `listening` waits until
/// somebody listens at a port (in hexadecimal), `pair` runs a server and its client, again if what failed is excused, and `unused`
/// waits until clients in the kernel have left the device, for at least 10 s or `TRIES` tenths of a second: what stays are completion queues that
/// it keeps for all of them.
const PRELUDE: &str = "set -e; MODULE=/lib/iwarp/iwarp_rnic.ko
links() {
    rdma link add iwarp0 type iwarp netdev user0
    rdma link add iwarp1 type iwarp netdev lo
    for i in $(seq 50); do if [ -e /dev/infiniband/rdma_cm ]; then break; fi; sleep 0.1; done
}
listening() {
    for i in $(seq 100); do if grep -q \":$1 0*:0000 0A\" /proc/net/tcp /proc/net/tcp6; then return 0; fi; sleep 0.1; done
    return 1
}
pair() {
    for attempt in $(seq $ATTEMPTS); do
        $1 & server=$!
        case \"$1\" in ucmatose*) listening 1D2F;; *) listening 1BBC;; esac
        if $2 >/tmp/client 2>&1; then cat /tmp/client; wait $server; return; fi
        cat /tmp/client
        excused /tmp/client || return 1
        kill -9 $server; wait $server || true
    done
    return 1
}
unused() {
    for i in $(seq ${TRIES:-100}); do
        if rdma resource | grep 'iwarp0: pd 0 cq [0-9]* qp 0 cm_id 0 mr 0'; then return; fi
        sleep 0.1
    done
    rdma resource
    return 1
}
";

/// What all scripts begin with.
pub(crate) fn prelude() -> String {
    format!("{}{PRELUDE}", excuses::as_shell())
}

/// A case: its name, and what runs in the guest, where it loads and unloads the module. The shell takes busybox's programs before those of
/// Debian, unless they are named by their paths.
pub(crate) type Case = (&'static str, &'static str);

const CASES: &[Case] = &[
    (
        "loads and unloads",
        "insmod $MODULE
        grep -q '^iwarp_rnic ' /proc/modules
        rmmod iwarp_rnic",
    ),
    (
        "does not load beside siw, nor siw beside it",
        "insmod /lib/siw/siw.ko
        ! insmod $MODULE
        dmesg | grep 'iwarp_rnic: not loaded: siw is'
        rmmod siw
        insmod $MODULE
        ! insmod /lib/siw/siw.ko
        dmesg | grep 'iwarp_rnic: siw cannot be loaded'
        rmmod iwarp_rnic",
    ),
    (
        "a link for a card and one for the loopback device",
        "insmod $MODULE
        rdma link add iwarp0 type iwarp netdev user0
        rdma link add iwarp1 type iwarp netdev lo
        ! rdma link add iwarp2 type iwarp netdev user0
        rdma link | grep 'iwarp0/1 state ACTIVE physical_state LINK_UP netdev user0'
        rdma link | grep 'iwarp1/1 state ACTIVE physical_state LINK_UP netdev lo'
        rdma link delete iwarp1
        ! rdma link | grep iwarp1
        rmmod iwarp_rnic
        ! rdma link | grep iwarp",
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
        ! rdma link | grep iwarp7
        rmmod iwarp_rnic
        ip link delete br7",
    ),
    (
        "a network device that moves to another namespace leaves its link behind",
        "insmod $MODULE
        /usr/bin/ip netns add other
        ip link add link user0 name vlan7 type vlan id 7
        rdma link add iwarp7 type iwarp netdev vlan7
        /usr/bin/ip link set vlan7 netns other
        for i in $(seq 50); do rdma link | grep -q iwarp7 || break; sleep 0.1; done
        ! rdma link | grep iwarp7
        /usr/bin/ip netns delete other
        rmmod iwarp_rnic",
    ),
    (
        "receives are shared, and programs are told of limits and errors",
        "insmod $MODULE; links
        sharing 10.0.2.15 7300
        echo 0 > /sys/module/iwarp_rnic/parameters/rnr_wait_ms
        sharing 10.0.2.15 7300 impatient
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "a peer that knows MPA revision 1 only, and peers that give no answer",
        "insmod $MODULE; links
        elder 10.0.2.15 7300
        rdma resource | grep 'iwarp0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0'
        rmmod iwarp_rnic",
    ),
    (
        "a client in the kernel: requests in each context, registration, invalidation, shared receives",
        "insmod $MODULE; links
        insmod /lib/iwarp/iwarp_client_test.ko || true
        dmesg | grep 'iwarp_client_test: .* tests, 0 failed'
        ! dmesg | grep 'iwarp_client_test: FAILED'
        rmmod iwarp_rnic",
    ),
    (
        "rping between two programs, with both families",
        "insmod $MODULE; links
        pair 'rping -s -a 10.0.2.15 -p 7100 -C 10 -S 4000 -V' 'rping -c -a 10.0.2.15 -p 7100 -C 10 -S 4000 -V'
        /usr/bin/ip -6 addr add fd00::1/64 dev user0 nodad
        pair 'rping -s -a fd00::1 -p 7100 -C 10 -V' 'rping -c -a fd00::1 -p 7100 -C 10 -V'
        pair 'rping -s -a :: -p 7100 -C 10 -V' 'rping -c -a fd00::1 -p 7100 -C 10 -V'
        pair 'rping -s -a :: -p 7100 -C 10 -V' 'rping -c -a 10.0.2.15 -p 7100 -C 10 -V'
        rmmod iwarp_rnic",
    ),
    (
        "perftest: Writes, Reads and Sends, one way and both ways",
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
        "many connections, one after the other and at a time",
        "insmod $MODULE; links
        pair 'ucmatose -b 10.0.2.15 -c 20' 'ucmatose -s 10.0.2.15 -c 20 -C 10'
        rping -s -P -a 10.0.2.15 -p 7100 & server=$!
        listening 1BBC
        for i in $(seq 20); do
            rping -c -a 10.0.2.15 -p 7100 -C 1 >/tmp/client 2>&1 || { cat /tmp/client; excused /tmp/client; }
        done
        kill -9 $server
        wait $server || true
        rmmod iwarp_rnic",
    ),
    (
        "ports that rdma_cm chooses may be taken by TCP",
        "insmod $MODULE; links
        range=$(cat /proc/sys/net/ipv4/ip_local_port_range)
        echo 40000 40063 > /proc/sys/net/ipv4/ip_local_port_range
        for port in $(seq 40000 40031); do nc -l -p $port >/dev/null 2>&1 & taken=\"$taken $!\"; listening $(printf %X $port); done
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
        "requests come in the order of the calls, on a busy machine",
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
        "a program that is killed in the middle, on either side",
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

/// Builds, boots, and runs the cases.
///
/// # Errors
/// When something does not build, the guest does not start, or a case fails.
pub(crate) fn command(args: &TestArgs) -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let limit = LIMIT + storage::longest_load(args.load.unwrap_or(0));
    let mut log = Log::create(&context.log_dir().join("kernel-device.log"), limit)?;
    if args.step
        && let Some(why) = unable(&mut log)
    {
        return Ok(Outcome::Skipped(why));
    }
    needs::require_packages(Needs::Guest, &mut log)?;
    let (image, cache) = match prepare(&context, &args.boot, args.storage, &mut log)? {
        Ok(prepared) => prepared,
        Err(why) => return Ok(Outcome::Skipped(why)),
    };
    if !args.with.is_empty() {
        let choice = Choice {
            peers: &args.with,
            only: &args.only,
            few: args.few,
            storage: args.storage,
        };
        return match matrix::run(&context, &choice, &args.boot, &image, &cache, &mut log)? {
            0 => Ok(Outcome::Passed),
            failed => bail!("{failed} rows failed"),
        };
    }
    log.say(format!("booting Linux {}", image.release));
    let mut guest = start(&image, &cache, &args.boot, &mut log)?;
    if let Some(command) = &args.exec {
        let script = format!("{}insmod $MODULE; set +e\n{command}", prelude());
        println!("{}", guest.run(&script, LIMIT.as_secs())?.text);
        println!("{}", guest.kernel_messages());
        return Ok(Outcome::Passed);
    }
    if let Some(minutes) = args.load {
        storage::load(&guest, minutes, &mut log)?;
        args.boot.look_for_leaks(&guest, &mut log)?;
        return Ok(Outcome::Passed);
    }
    let mut failed = 0;
    for (name, script) in args.cases() {
        let script = format!("ENTRIES={}\n{script}", args.entries);
        let limit = args
            .boot
            .limit(CASE_LIMIT + args.entries / ENTRIES_PER_SECOND);
        match case(&guest, &script, limit, &mut log) {
            Ok(()) => log.say(format!("passed  {name}")),
            Err(error) => {
                failed += 1;
                log.say(format!("FAILED  {name}: {error:#}"));
                // What it has left, a module that cannot be unloaded perhaps, is no matter of the next.
                drop(guest);
                guest = start(&image, &cache, &args.boot, &mut log)?;
            }
        }
    }
    if args.storage {
        let wanted = |name: &str| args.is_wanted(name);
        failed += cuts::run(&image, &cache, &args.boot, &wanted, &mut log)?;
    }
    if args.storage && args.is_wanted(guide::NAME) {
        match guide::run(&image, &cache, &args.boot, &mut log) {
            Ok(()) => log.say(format!("passed  {}", guide::NAME)),
            Err(error) => {
                failed += 1;
                log.say(format!("FAILED  {}: {error:#}", guide::NAME));
            }
        }
    }
    if failed > 0 {
        bail!("{failed} cases failed; log: {}", log.path().display());
    }
    args.boot.look_for_leaks(&guest, &mut log)?;
    Ok(Outcome::Passed)
}

/// Why no guest can be made on this machine, without installing anything.
fn unable(log: &mut Log) -> Option<String> {
    let lacking = needs::missing_packages(Needs::Guest);
    if !lacking.is_empty() {
        return Some(format!("not installed: {}", lacking.join(", ")));
    }
    // Other distributions have no such kernel.
    Kernel::newest(NEWER, log)
        .err()
        .map(|error| format!("{error:#}"))
}

/// Boots a guest, and forgets what it has said until then.
fn start(image: &Image, cache: &Path, boot: &Boot, log: &mut Log) -> Result<Guest> {
    let guest = Guest::start(image, cache, &boot.machine(), log)?;
    boot.forget_leaks(&guest)?;
    guest.kernel_messages();
    Ok(guest)
}

/// The guest's files, with what storage needs if that is wanted, or why they cannot be made here.
///
/// # Errors
/// When something does not build.
pub(crate) fn prepare(
    context: &Context,
    boot: &Boot,
    storage: bool,
    log: &mut Log,
) -> Result<Result<(Image, PathBuf), String>> {
    let Parts {
        kernel,
        object,
        dir,
        programs,
    } = match boot.parts(context, log)? {
        Ok(parts) => parts,
        Err(why) => return Ok(Err(why)),
    };
    log.say(format!("building the module for {}", kernel.name));
    let mut modules = Vec::new();
    for (module, folder) in [(DEVICE, "device"), (CLIENT, "client")] {
        let (headers, folder) = (&kernel.headers, dir.join(folder));
        modules.push(module::build(
            context, module, &object, headers, &folder, log,
        )?);
    }
    log.say("building the file system");
    let image = image::device(context, &dir, &programs, &kernel, &modules, storage, log)?;
    Ok(Ok((image, dir)))
}

/// Runs one case and looks at what the kernel says.
fn case(guest: &Guest, script: &str, limit: u64, log: &mut Log) -> Result<()> {
    // A shell does not end at a command that is denied, so this makes such a line fail by itself.
    let script: String = script.lines().map(expect_failure).collect();
    let out = guest.run(&format!("{}set -x\n{script}", prelude()), limit)?;
    let loaded = guest.run(&format!("grep -q '^{DEVICE} ' /proc/modules"), 20)?;
    if loaded.code == 0 {
        guest.run(&format!("rmmod {DEVICE}"), limit)?;
    }
    let said = guest.kernel_messages();
    log.line(&out.text);
    log.line(&said);
    if out.code != 0 {
        let last = out.text.lines().last().context("no output")?;
        bail!("exit {}: {last}", out.code);
    }
    verdict(&said)
}

/// Unloads the module, which must leave nothing.
///
/// # Errors
/// When it is still in use, or leaves memory.
pub(crate) fn unload(guest: &Guest, limit: u64) -> Result<()> {
    guest.must(&format!("rmmod {DEVICE}"), limit)?;
    verdict(&guest.kernel_messages())
}

/// One line of a script, with `! command` as a command that fails if `command` succeeds.
pub(crate) fn expect_failure(line: &str) -> String {
    match line.trim().strip_prefix("! ") {
        Some(command) => format!("if {command}; then exit 1; fi\n"),
        None => format!("{line}\n"),
    }
}

/// Whether the kernel is content, and the module has gone with all of its memory.
pub(crate) fn verdict(said: &str) -> Result<()> {
    let left = || said.lines().find(|line| line.contains(LEFT));
    if let Some(line) = complaints::first(said).or_else(left) {
        bail!("the guest's kernel: {line}");
    }
    if !said.contains(GONE) {
        bail!("the module did not say that its memory is free");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_that_leaves_memory_or_stays_fails() {
        let good = format!("[ 1.0] iwarp_rnic: unloaded, {GONE}\n");
        assert!(verdict(&good).is_ok());
        assert!(verdict("").is_err());
        assert!(verdict(&format!("[ 0.9] WARNING: CPU: 0\n{good}")).is_err());
        assert!(
            verdict("[ 1.0] iwarp_rnic: 3 allocations of the engine were not freed\n").is_err()
        );
    }

    #[test]
    fn a_denied_command_must_fail() {
        assert_eq!(expect_failure("  ! false"), "if false; then exit 1; fi\n");
        assert_eq!(expect_failure("true"), "true\n");
    }
}
