//! `cargo xtask fuzz`: builds the fuzz targets with libFuzzer, runs them, and measures which lines
//! their corpora reach.

mod coverage;
mod programs;
mod search;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use xtask::context::{Context, find_program};
use xtask::outcome::Outcome;
use xtask::process::{self, Log};

use programs::{GUIDE, PACKAGES, Target, build};
use search::Limit;

/// Arguments of `cargo xtask fuzz`.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// Target to run; may be repeated [default: all]
    #[arg(long = "target", value_name = "NAME")]
    targets: Vec<String>,
    /// Search for this many seconds per target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Search for this many executions per target, instead of --seconds
    #[arg(long)]
    executions: Option<u64>,
    /// Number of targets that run at a time; 0 means one per processor
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// Seed of the pseudo-random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only run the named target with this input file
    #[arg(long, value_name = "FILE", requires = "targets")]
    replay: Option<PathBuf>,
    /// Do not search; report the lines and regions of each source file that the seeds and the
    /// corpora reach
    #[arg(long)]
    coverage: bool,
    /// Print the names of the targets
    #[arg(long)]
    list: bool,
}

/// Runs the command. Returns `true` if no input failed.
pub(crate) fn command(args: &FuzzArgs) -> Result<bool> {
    let context = Context::new(false, false)?;
    if args.coverage {
        return coverage::coverage(&context).map(|()| true);
    }
    let mut missing = args.targets.clone();
    for package in PACKAGES {
        let mut targets = Target::all(&context.root, package)?;
        if args.list {
            targets
                .iter()
                .for_each(|target| println!("{}", target.name));
            continue;
        }
        missing.retain(|name| targets.iter().all(|target| target.name != *name));
        if !args.targets.is_empty() {
            targets.retain(|target| args.targets.contains(&target.name));
        }
        if targets.is_empty() {
            continue;
        }
        let fuzzer = build(&context, package.0, (GUIDE, "build"), &mut process::run)?;
        if let Some(file) = &args.replay {
            for target in &targets {
                process::run(fuzzer.command(target)?.arg(file))?;
            }
            continue;
        }
        let limit = match args.executions {
            Some(executions) => Limit::Executions(executions),
            None => Limit::Seconds(args.seconds),
        };
        let lines = fuzzer.search_all(&targets, args.jobs, limit, args.seed)?;
        lines.iter().for_each(|line| println!("{line}"));
    }
    if let Some(name) = missing.first().filter(|_| !args.list) {
        bail!("no target is called {name:?}; `cargo xtask fuzz --list` prints their names");
    }
    Ok(true)
}

/// The step of `cargo xtask test`: a short search. It omits the package whose dependencies take
/// minutes to build.
pub(crate) fn step(context: &Context, log: &mut Log) -> Result<Outcome> {
    if find_program("c++").is_none() {
        return Ok(Outcome::Skipped(
            "no C++ compiler is installed, which libFuzzer needs".into(),
        ));
    }
    let seconds = if context.quick { 1 } else { 3 };
    let fuzzer = build(context, PACKAGES[0].0, (GUIDE, "build"), &mut |command| {
        log.run(command)
    })?;
    let targets = Target::all(&context.root, PACKAGES[0])?;
    for line in fuzzer.search_all(&targets, 0, Limit::Seconds(seconds), 1)? {
        log.show(line);
    }
    Ok(Outcome::Passed)
}
