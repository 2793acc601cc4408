//! gloo, PyTorch's library of collectives, over its `ibverbs` transport: four processes of a
//! program that checks every result (`gloo.cc`).
//!
//! gloo exchanges GIDs and queue pair numbers through files and connects the queue pairs itself.
//! The cases run the collectives that support this transport. gloo's newer interface
//! (`gloo::allreduce()` and others), which `torch.distributed` calls, does not support ibverbs.

use anyhow::Result;

use super::checks::expect;
use super::stage::{Stage, WIRE_V4, WIRE_V6};
use crate::case::{Case, Verdict};

const NEEDS: &[&str] = &["libgloo-dev", "libibverbs-dev", "g++"];
const SOURCE: &str = include_str!("gloo.cc");
const RANKS: usize = 4;
/// The collectives that each process reports when it has checked the results.
const COLLECTIVES: [&str; 10] = [
    "allreduce_ring",
    "allreduce_ring_chunked",
    "allreduce_halving_doubling",
    "allreduce_bcube",
    "allgather_ring",
    "broadcast_one_to_all",
    "reduce_scatter",
    "pairwise_exchange",
    "barrier_all_to_all",
    "barrier_all_to_one",
];

pub(super) fn cases() -> Vec<Case<Stage>> {
    let variants: [(&'static str, &'static [&'static str], &'static str); 3] = [
        ("4 processes, 10 collectives", &["--bind", WIRE_V4], "0"),
        ("IPv6", &["--bind", WIRE_V6], "0"),
        ("`--as roce`", &["--as", "roce", "--bind", WIRE_V4], "1"),
    ];
    variants
        .into_iter()
        .map(|(what, options, index)| {
            let case = Case::new("gloo", what, move |stage| {
                collectives(stage, options, index)
            });
            case.needs(NEEDS).wire()
        })
        .collect()
}

fn collectives(stage: &Stage, options: &[&str], index: &str) -> Result<Verdict> {
    std::fs::write(stage.dir().join("gloo.cc"), SOURCE)?;
    let compile = "g++ -std=c++14 -O1 -o collectives gloo.cc -lgloo -libverbs -pthread";
    let compile: Vec<&str> = compile.split(' ').collect();
    stage.start_plain(&compile)?.success()?;
    stage.start_plain(&["mkdir", "store"])?.success()?;
    let ranks = RANKS.to_string();
    let processes: Vec<_> = (0..RANKS)
        .map(|rank| {
            let rank = rank.to_string();
            let words = ["./collectives", "store", &rank, &ranks, "iwarp0", index];
            stage.start_with(options, None, &[], &words)
        })
        .collect::<Result<_>>()?;
    for process in processes {
        let output = process.success()?;
        for name in COLLECTIVES {
            expect(&output, &format!("{name}: correct\n"))?;
        }
    }
    Ok(Verdict::passed(format!("{RANKS} processes")))
}
