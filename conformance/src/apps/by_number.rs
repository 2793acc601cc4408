//! perftest on a RoCE NIC without `-R`, where the programs exchange GIDs and queue pair numbers:
//! all options that exist for each operation and queue pair type. Also a message of 1 GiB with
//! `-R`.
//!
//! The programs do not support `-e` for RDMA Write, `-a` for atomics, and `--use-srq` except for
//! Sends. The latency programs support neither `-q` nor `-b`.
//!
//! The numbers of messages are odd, because with some even numbers `ib_send_bw` waits for a credit
//! that its server never sends. This happens on any device.

use anyhow::{Context as _, Result};

use crate::case::{Case, Verdict};

use super::perftest::{self, SIZES};
use super::stage::Stage;

/// Number of sizes with `-a` for datagrams: the powers of two from 2 bytes to the largest MTU,
/// 4096.
const DATAGRAM_SIZES: usize = 12;
/// Required memory for messages of 1 GiB: two such buffers at each end, and a reserve for the
/// system.
const GIGABYTE_NEEDS_KIB: u64 = 6 << 20;

/// The options with which each program runs, one case each.
const PROGRAMS: &[(&str, &[&str])] = &[
    (
        "ib_write_bw",
        &["-a", "-q 8", "-b", "-c UC", "-c UC -a", "-c UC -q 8 -b"],
    ),
    ("ib_read_bw", &["-a", "-e", "-q 8", "-b"]),
    (
        "ib_send_bw",
        &[
            "-a",
            "-e",
            "-q 8",
            "-b",
            "--use-srq",
            "-e -q 8 -b --use-srq",
            "-c UC",
            "-c UC -a",
            "-c UC -e",
            "-c UC -q 8 -b",
            "-c UC --use-srq",
            "-c UD",
            "-c UD -a",
            "-c UD -e",
            "-c UD -q 8 -b",
            "-c UD --use-srq",
        ],
    ),
    ("ib_atomic_bw", &["-e", "-q 8", "-b"]),
    ("ib_write_lat", &["-a", "-c UC", "-c UC -a"]),
    ("ib_read_lat", &["-a", "-e"]),
    (
        "ib_send_lat",
        &[
            "-a",
            "-e",
            "--use-srq",
            "-c UC",
            "-c UC -a",
            "-c UC -e",
            "-c UC --use-srq",
            "-c UD",
            "-c UD -a",
            "-c UD -e",
            "-c UD --use-srq",
        ],
    ),
    ("ib_atomic_lat", &["-e"]),
];

pub(super) fn cases() -> Vec<Case<Stage>> {
    let by_number = PROGRAMS
        .iter()
        .flat_map(|(name, all)| all.iter().map(|options| case(name, options)));
    let gigabyte = Case::new("ib_write_bw", "`-R -s 1073741824`", gigabyte)
        .needs(&["perftest"])
        .busy_polls()
        .long()
        .limit(300);
    by_number.chain([gigabyte]).collect()
}

fn case(name: &'static str, options: &'static str) -> Case<Stage> {
    let all_sizes = options.contains("-a");
    let rows = match (all_sizes, options.contains("UD")) {
        (false, _) => 1,
        (true, false) => SIZES,
        (true, true) => DATAGRAM_SIZES,
    };
    let what = match options.contains("-c ") {
        true => format!("`--as roce`, `{options}`"),
        false => format!("`--as roce`, without `-R`, `{options}`"),
    };
    let case = Case::new(name, what, move |stage| {
        // GID 1 is 127.0.0.1 with RoCE v2.
        let mut words = vec!["-x", "1", "-n", if all_sizes { "11" } else { "101" }];
        words.extend(options.split(' '));
        perftest::run(stage, name, "roce", &words, rows)
    });
    let case = case.needs(&["perftest"]).busy_polls().limit(240);
    // The programs calibrate the cycle counter for each size, which takes long.
    if all_sizes { case.long() } else { case }
}

/// The server initializes its buffer of 1 GiB before it accepts the connection, which takes
/// seconds.
fn gigabyte(stage: &Stage) -> Result<Verdict> {
    let available = available_kib()?;
    if available < GIGABYTE_NEEDS_KIB {
        return Ok(Verdict::skipped(format!(
            "needs {} GiB of memory, but only {} GiB are available",
            GIGABYTE_NEEDS_KIB >> 20,
            available >> 20
        )));
    }
    let options = ["-R", "-s", "1073741824", "-n", "5"];
    perftest::run(stage, "ib_write_bw", "rnic", &options, 1)
}

/// Returns the memory that is available without swapping (`proc_meminfo(5)`).
fn available_kib() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let number = line.and_then(|l| l.split_whitespace().next());
    let number = number.context("no MemAvailable in /proc/meminfo")?;
    Ok(number.parse()?)
}
