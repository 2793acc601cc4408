//! The command `iwarp-sim`: runs many seeds, or replays one and prints its events.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::Parser;
use iwarp_sim::plant::Plant;
use iwarp_sim::reach::Summary;
use iwarp_sim::run::run;
use iwarp_sim::setup::sweep;
use iwarp_sim::world::Pool;

/// Runs random verbs programs on simulated RNICs, and checks every completion and every octet of
/// memory
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Number of seeds to run
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Replay only this seed, and print its events
    #[arg(long)]
    seed: Option<u64>,
    /// Number of threads; 0 means one per processor
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// Plant this bug, which the checks must find; `list` prints the names of all bugs
    #[arg(long, value_name = "BUG")]
    plant: Option<String>,
    /// Instead of running seeds, test connection set-up: in every mode, with a reset, a stall or a
    /// close after every octet in each direction
    #[arg(long)]
    setup: bool,
    /// Print how many seeds reached each state, operation, completion and error, and how many seeds
    /// are dull: they reached only what at least one in ten seeds reaches
    #[arg(long)]
    reach: bool,
    /// Stop after this many failures
    #[arg(long, alias = "failures", default_value_t = 10)]
    max_failures: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let plant = match args.plant.as_deref() {
        None => None,
        Some(name) => match Plant::named(name) {
            Some(plant) if plant.is_available() => Some(plant),
            found => {
                let names: Vec<_> = Plant::ALL.iter().map(|(name, _)| *name).collect();
                match found {
                    Some(_) => eprintln!("{name} needs a build with --features planted-bugs"),
                    None => eprintln!("the bugs that can be planted: {}", names.join(", ")),
                }
                return ExitCode::from(2);
            }
        },
    };
    if args.setup {
        return test_setup();
    }
    if let Some(seed) = args.seed {
        return match run(seed, plant, Pool::default(), true).failure {
            None => {
                println!("seed {seed} passed");
                ExitCode::SUCCESS
            }
            Some(text) => {
                println!("seed {seed} failed {text}");
                ExitCode::FAILURE
            }
        };
    }
    run_seeds(&args, plant)
}

fn test_setup() -> ExitCode {
    let start = Instant::now();
    let result = sweep(None);
    for failure in &result.failures {
        println!("{failure}");
    }
    let (runs, modes, failed) = (result.runs, result.modes, result.failures.len());
    let seconds = start.elapsed().as_secs_f64();
    println!("set-up: {runs} runs in {modes} modes, {failed} failed in {seconds:.1} s");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A run of at least this many seeds must reach everything that is reachable.
const SEEDS_FOR_FULL_COVERAGE: u64 = 10_000;

/// Runs the seeds on all threads, and prints the failures and a summary.
fn run_seeds(args: &Args, plant: Option<Plant>) -> ExitCode {
    let start = Instant::now();
    let next = AtomicU64::new(args.start);
    let end = args.start.saturating_add(args.seeds);
    let failed = AtomicU64::new(0);
    let passed = AtomicU64::new(0);
    let output_lock = Mutex::new(());
    let summary = Mutex::new(Summary::default());
    let jobs = match args.jobs {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                let mut pool = Pool::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || failed.load(Ordering::Relaxed) >= args.max_failures {
                        return;
                    }
                    let outcome = run(seed, plant, std::mem::take(&mut pool), false);
                    pool = outcome.pool;
                    if let Ok(mut summary) = summary.lock() {
                        summary.add(outcome.reached);
                    }
                    if let Some(text) = outcome.failure {
                        failed.fetch_add(1, Ordering::Relaxed);
                        let _guard = output_lock.lock();
                        println!("seed {seed} failed {text}");
                        println!("  replay: iwarp-sim --seed {seed}");
                    } else {
                        passed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let (passed, failed) = (passed.into_inner(), failed.into_inner());
    let seconds = start.elapsed().as_secs_f64();
    let summary = summary.into_inner().unwrap_or_default();
    if args.reach {
        summary.print();
    }
    let missing = if args.seeds >= SEEDS_FOR_FULL_COVERAGE && plant.is_none() {
        summary.missing()
    } else {
        Vec::new()
    };
    for name in &missing {
        println!("not reached by any seed: {name}");
    }
    for name in summary.reached_but_listed_unreachable() {
        println!("reached, although listed as unreachable: {name}");
    }
    println!("{passed} passed, {failed} failed in {seconds:.1} s");
    if failed == 0 && summary.reached_but_listed_unreachable().is_empty() && missing.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
