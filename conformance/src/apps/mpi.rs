//! Open MPI over libfabric over verbs, with a program that checks what it computes (`exchange.c`).
//!
//! Open MPI reaches libfabric by `--mca mtl ofi`. Its other way, `--mca btl ofi`, excludes the provider of reliable datagrams over
//! verbs (`verbs;ofi_rxm`) by name, and the other providers over verbs need unreliable datagrams, which iWARP does not have.

use anyhow::{Context as _, Result, bail};

use super::case::{Case, Verdict, expect};
use super::stage::{Stage, WIRE_V4, WIRE_V6};

const NEEDS: &[&str] = &["openmpi-bin", "libopenmpi-dev"];
const SOURCE: &str = include_str!("exchange.c");
/// The parts that `exchange.c` reports. It reports a part when all ranks have checked it.
const PARTS: [&str; 5] = ["ring", "allreduce", "alltoall", "neighbours", "windows"];

/// The cases of this file.
pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "mpirun",
            "`--mca mtl ofi`, 4 ranks: ring, allreduce, alltoall, neighbours, windows",
            |stage| exchange(stage, 4, 1 << 18, WIRE_V4),
        ),
        Case::new("mpirun", "IPv6", |stage| {
            exchange(stage, 4, 1 << 18, WIRE_V6)
        }),
        Case::new("mpirun", "8 ranks, messages up to 8 MiB", |stage| {
            exchange(stage, 8, 1 << 21, WIRE_V4)
        })
        .long(),
    ]
    .into_iter()
    .map(|case| case.needs(NEEDS).wire())
    .collect()
}

/// Runs `exchange.c`. `longest` is the length of the longest message to a neighbour, in words of 4 octets.
fn exchange(stage: &Stage, ranks: usize, longest: usize, address: &str) -> Result<Verdict> {
    std::fs::write(stage.dir().join("exchange.c"), SOURCE)?;
    stage
        .start_plain(&["mpicc", "-O2", "-o", "exchange", "exchange.c"])?
        .success()?;
    let (count, longest) = (ranks.to_string(), longest.to_string());
    let dir = stage.dir().display().to_string();
    // Offer a single address. Open MPI distributes the ranks over all devices, and ranks on devices of different address families
    // could not connect.
    let options = ["--bind", address, "--stats"];
    #[rustfmt::skip]
    let words = [
        "mpirun", "-np", &count, "--oversubscribe", "--mca", "plm", "isolated",
        "--mca", "pml", "cm", "--mca", "mtl", "ofi", "--mca", "mtl_ofi_provider_include", "verbs;ofi_rxm",
        // Without this, ranks on one machine use shared memory for put and get.
        "--mca", "osc", "pt2pt", "./exchange", &longest,
    ];
    let said = stage
        .start_with(&options, None, &[("TMPDIR", &dir)], &words)?
        .success()?;
    for part in PARTS {
        expect(&said, &format!("{part}: correct on {ranks} ranks"))?;
    }
    // Each rank's messages went through our library.
    let sent: Vec<u64> = said.lines().filter_map(octets_sent).collect();
    let busy = sent.iter().filter(|octets| **octets > 1 << 20).count();
    if busy != ranks {
        bail!("{busy} of {ranks} ranks sent more than a mebibyte");
    }
    let total: u64 = sent.iter().sum();
    Ok(Verdict::passed(format!("{} MiB sent", total >> 20)))
}

/// Returns the number of octets sent, from a line that `--stats` printed.
fn octets_sent(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("iwarp: process ")?;
    let (_, rest) = rest.split_once(" sent ")?;
    let number = rest.split(' ').next().context("a number").ok()?;
    number.parse().ok()
}
