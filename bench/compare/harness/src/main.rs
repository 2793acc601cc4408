//! Builds the compared programs, runs them alternately and prints tables.
//!
//! A program that cannot be built or run is listed with its error. Each cell compares with tokio's
//! TCP in the same round, because other work on the machine changes from one round to the next.

mod programs;
mod run;
mod table;

use anyhow::Context as _;
use clap::Parser;
use compare_harness::Outcome;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Names of what the programs do, in the order of the tables.
const WORKS: [&str; 4] = ["echo", "get", "bulk64k", "bulk1m"];

/// Runs the same programs with several crates, alternately, and prints tables
#[derive(Parser)]
struct Options {
    /// Number of rounds; in each, every program runs once
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Only these programs (comma-separated folders); tcp always runs
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only this work: echo, get, bulk64k, bulk1m (comma-separated)
    #[arg(long, value_delimiter = ',', default_values = WORKS)]
    work: Vec<String>,
    /// The command that runs verbs programs on the software RNIC
    #[arg(long, default_value = "iwarp")]
    iwarp: PathBuf,
    /// Longest time of one run, in seconds
    #[arg(long, default_value_t = 60)]
    limit: u64,
}

/// Outcomes of each program and work, by round.
type Samples = BTreeMap<(&'static str, String), Vec<Option<Outcome>>>;

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let target = std::env::current_exe()?;
    let target = target
        .ancestors()
        .nth(2)
        .context("no target folder")?
        .to_owned();
    let mut failures = Vec::new();
    let mut programs = Vec::new();
    for program in programs::LIST {
        let chosen = options.only.is_empty() || options.only.iter().any(|o| o == program.folder);
        if !chosen && program.folder != "tcp" {
            continue;
        }
        eprintln!("building {}", program.folder);
        match programs::build(program, &target) {
            Ok(()) => programs.push(program),
            Err(error) => failures.push((program.name, "build".into(), format!("{error:#}"))),
        }
    }
    let mut samples = Samples::new();
    for round in 0..options.rounds {
        for work in &options.work {
            // Every second round runs in reverse order, so that no program always follows another.
            let mut order = programs.clone();
            if round % 2 == 1 {
                order.reverse();
            }
            for program in order {
                let outcome = run::measure(program, work, &target, &options.iwarp, options.limit);
                eprintln!("round {} {work} {}: {outcome:?}", round + 1, program.folder);
                let outcome = outcome.map_err(|error| {
                    failures.push((program.name, work.clone(), format!("{error:#}")));
                });
                samples
                    .entry((program.name, work.clone()))
                    .or_default()
                    .push(outcome.ok());
            }
        }
    }
    table::print(&programs, &options.work, &samples);
    for (name, what, error) in failures {
        println!("- **{name}**, {what}: {error}");
    }
    Ok(())
}
