//! Runs fuzz targets on the stable toolchain: the committed seeds, then pseudo-random changes of them.
//!
//! It does not measure coverage, so it is only a smoke test; libFuzzer does the real search. The seed number determines all
//! inputs, so a failure can be repeated on every machine.

use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use iwarp_fuzz::mutate::{Random, input};
use iwarp_fuzz::{TARGETS, Target};

/// An input that takes longer than this counts as a failure, because a peer could use it to keep us busy. Correct code needs far
/// less time for any input.
const SLOW: Duration = Duration::from_secs(5);

/// Replays the committed seeds, then runs random changes of them
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Targets to run; all if none is named
    targets: Vec<String>,
    /// Number of changed inputs for each target
    #[arg(long, default_value_t = 200_000)]
    inputs: u64,
    /// Start of the pseudo-random sequence
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only this file, with the named targets
    #[arg(long, value_name = "FILE", requires = "targets")]
    replay: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    for name in &args.targets {
        if !TARGETS.iter().any(|target| target.name == name) {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            return Err(format!(
                "no target is called {name:?}; there are: {}",
                names.join(", ")
            ));
        }
    }
    let wanted = |target: &&Target| {
        args.targets.is_empty() || args.targets.iter().any(|name| name == target.name)
    };
    for target in TARGETS.iter().filter(wanted) {
        if let Some(file) = &args.replay {
            let data =
                std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
            attempt(target, &data)?;
            println!("{}: {} passes", target.name, file.display());
            continue;
        }
        let seeds = seeds(target)?;
        let start = Instant::now();
        for data in &seeds {
            attempt(target, data)?;
        }
        let mut random = Random::new(args.seed);
        for _ in 0..args.inputs {
            attempt(target, &input(&mut random, &seeds, target.len_max))?;
        }
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{}: {} seeds and {} inputs in {seconds:.1} s",
            target.name,
            seeds.len(),
            args.inputs
        );
    }
    Ok(())
}

/// Returns the committed seeds of a target, in the order of their names. A target without seeds is an error.
fn seeds(target: &Target) -> Result<Vec<Vec<u8>>, String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("seeds")
        .join(target.name);
    let fail = |error: std::io::Error| format!("{}: {error}", dir.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(fail)? {
        files.push(entry.map_err(fail)?.path());
    }
    files.sort();
    if files.is_empty() {
        return Err(format!("{} has no seeds", dir.display()));
    }
    files
        .iter()
        .map(|file| std::fs::read(file).map_err(fail))
        .collect()
}

/// Runs one input. If it panics or is slow, writes it to a file in `artifacts/`, for `--replay`, and returns an error.
fn attempt(target: &Target, data: &[u8]) -> Result<(), String> {
    let start = Instant::now();
    let panicked = panic::catch_unwind(AssertUnwindSafe(|| (target.run)(data))).is_err();
    let slow = start.elapsed() > SLOW;
    if !panicked && !slow {
        return Ok(());
    }
    let what = if panicked { "panicked" } else { "is slow" };
    let hex: String = data.iter().map(|octet| format!("{octet:02x}")).collect();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("artifacts")
        .join(target.name);
    let file =
        dir.join(format!("{what}-{}", iwarp_proto::crc32c::append(0, data)).replace(' ', "-"));
    let kept = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(&file, data));
    let kept = match kept {
        Ok(()) => format!("kept as {}", file.display()),
        Err(error) => format!("could not be kept: {error}"),
    };
    Err(format!(
        "target {} {what}; the input, {kept}, is {hex}",
        target.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_seeds_that_pass() {
        for target in TARGETS {
            for data in seeds(target).unwrap() {
                (target.run)(&data);
            }
        }
    }

    #[test]
    fn a_panic_becomes_an_error_with_the_input() {
        let target = Target {
            name: "test-of-the-runner",
            run: |data| assert!(data.len() < 2),
            len_max: 2,
        };
        assert_eq!(attempt(&target, &[1]), Ok(()));
        let error = attempt(&target, &[1, 0xff]).unwrap_err();
        assert!(
            error.contains("panicked") && error.ends_with("01ff"),
            "{error}"
        );
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts/test-of-the-runner");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
