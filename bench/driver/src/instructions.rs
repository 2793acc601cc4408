//! `cargo xtask instructions`: counts the instructions of fixed pieces of work under callgrind, and
//! compares the counts with recorded values.
//!
//! Times on a shared machine vary by a quarter. The counts do not vary, so a regression of a few
//! per cent is detected. Only instructions of our own code are counted. The C library uses
//! different functions on other processors, so only the number of calls into it is compared.

mod callgrind;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use callgrind::Counts;
use xtask::context::{Context, find_program};
use xtask::outcome::Outcome;
use xtask::process::Log;
use xtask::release_builds::{self, INSTRUCTIONS};

const RECORD: &str = "bench/instructions.toml";
/// The function of the program in which callgrind counts.
const MEASURED: &str = "*iwarp_instructions::measured*";
/// Allowed relative increase of a count: inlining may change when other code changes.
const TOLERANCE: f64 = 0.03;
/// Additional absolute increase that is allowed. It matters for the shortest pieces of work.
const SLACK: f64 = 0.5;
/// Time limit, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Arguments of `cargo xtask instructions`.
#[derive(Args)]
pub(crate) struct InstructionsArgs {
    /// Record the current counts instead of comparing them
    #[arg(long)]
    bless: bool,
    /// Exit with status 77 if the counts cannot be compared on this machine, so that `cargo xtask
    /// test` can report a skipped step
    #[arg(long, hide = true)]
    step: bool,
}

/// A line that `iwarp-instructions --list` prints.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Case {
    name: String,
    /// How often the work is repeated while its instructions are counted.
    count: u32,
    about: String,
}

/// Number of instructions of one piece of work, and number of its calls into other libraries.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    instructions: f64,
    calls: f64,
}

/// The recorded counts, and the compiler and architecture with which they were recorded.
#[derive(Debug, Default)]
struct Record {
    rustc: String,
    arch: String,
    costs: BTreeMap<String, Cost>,
}

/// Counts the instructions, and compares or records the counts.
///
/// # Errors
/// Fails if valgrind is missing, the build or a run fails, the record cannot be read, or a count
/// regressed.
pub(crate) fn command(context: &Context, args: &InstructionsArgs) -> Result<Outcome> {
    if find_program("valgrind").is_none() {
        let why = "valgrind is not installed";
        if args.step {
            return Ok(Outcome::Skipped(why.into()));
        }
        bail!(why);
    }
    let path = context.log_dir().join("instructions-counted.log");
    let mut log = Log::create(&path, LIMIT)?;
    if args.bless {
        let (cases, costs) = count(context, &mut log)?;
        let now = Record {
            rustc: compiler(context)?,
            arch: std::env::consts::ARCH.to_owned(),
            costs,
        };
        std::fs::write(context.root.join(RECORD), write(&now, &cases))?;
        println!("  {} counts recorded in {RECORD}", cases.len());
        return Ok(Outcome::Passed);
    }
    match check(context, &mut log)? {
        Outcome::Skipped(why) if !args.step => {
            println!("  not compared: {why}");
            Ok(Outcome::Passed)
        }
        outcome => Ok(outcome),
    }
}

fn check(context: &Context, log: &mut Log) -> Result<Outcome> {
    let record = read(&xtask::files::read(&context.root, RECORD)?)?;
    let (cases, costs) = count(context, log)?;
    let (table, bad) = compare(&record, &cases, &costs);
    for line in table.lines() {
        log.say(line);
    }
    let rustc = compiler(context)?;
    if rustc != record.rustc || std::env::consts::ARCH != record.arch {
        return Ok(Outcome::Skipped(format!(
            "the counts were recorded with {} for {}, but this is {rustc} for {}",
            record.rustc,
            record.arch,
            std::env::consts::ARCH
        )));
    }
    if bad > 0 {
        bail!(
            "{bad} of {} counts regressed by more than {} %. If that is intended, record the new \
             counts: cargo xtask instructions --bless",
            cases.len(),
            TOLERANCE * 100.0
        );
    }
    Ok(Outcome::Passed)
}

fn compiler(context: &Context) -> Result<String> {
    let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(program)
        .arg("--version")
        .current_dir(&context.root)
        .output()
        .context("cannot run `rustc --version`")?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

fn count(context: &Context, log: &mut Log) -> Result<(Vec<Case>, BTreeMap<String, Cost>)> {
    log.run(&mut release_builds::instructions(context))?;
    let program = context.target.join("release").join(INSTRUCTIONS);
    let cases = cases(&log.run_and_read(Command::new(&program).arg("--list"))?)?;
    let dir = context.target.join("instructions");
    std::fs::create_dir_all(&dir)?;
    let mut costs = BTreeMap::new();
    for case in &cases {
        let counts = count_one(&program, case, &dir, log)?;
        if counts.own == 0 {
            bail!(
                "{}: no instructions were counted; was the function {MEASURED} renamed?",
                case.name
            );
        }
        let per = f64::from(case.count);
        costs.insert(
            case.name.clone(),
            Cost {
                instructions: counts.own as f64 / per,
                calls: counts.calls as f64 / per,
            },
        );
    }
    Ok((cases, costs))
}

fn count_one(program: &Path, case: &Case, dir: &Path, log: &mut Log) -> Result<Counts> {
    let out: PathBuf = dir.join(format!("{}.callgrind", case.name));
    log.run(
        Command::new("valgrind")
            .arg("--tool=callgrind")
            .arg("--collect-atstart=no")
            .arg(format!("--toggle-collect={MEASURED}"))
            .arg(format!("--callgrind-out-file={}", out.display()))
            .arg(program)
            .arg(&case.name)
            .env_remove("LD_PRELOAD")
            .env("RUST_BACKTRACE", "0"),
    )?;
    let text = std::fs::read_to_string(&out)
        .with_context(|| format!("callgrind has not written {}", out.display()))?;
    callgrind::parse(&text, INSTRUCTIONS).with_context(|| format!("in {}", out.display()))
}

fn cases(text: &str) -> Result<Vec<Case>> {
    // Skip lines without a tab: the text starts with the command line.
    text.lines()
        .filter(|line| line.contains('\t'))
        .map(|line| {
            let mut fields = line.split('\t');
            let mut next = || {
                fields
                    .next()
                    .context("a line of --list must have three fields")
            };
            Ok(Case {
                name: next()?.to_owned(),
                count: next()?.parse()?,
                about: next()?.to_owned(),
            })
        })
        .collect()
}

fn exceeds(count: f64, base: f64) -> bool {
    count > base * (1.0 + TOLERANCE) + SLACK
}

/// Returns the table, and the number of rows with regressions or missing records.
fn compare(record: &Record, cases: &[Case], costs: &BTreeMap<String, Cost>) -> (String, usize) {
    let mut text = format!(
        "{:22} {:>12} {:>12} {:>8} {:>8} {:>8}  {}\n",
        "work", "instructions", "recorded", "change", "calls", "recorded", "description"
    );
    let mut bad = 0;
    for case in cases {
        let Some(now) = costs.get(&case.name) else {
            continue;
        };
        let Some(then) = record.costs.get(&case.name) else {
            bad += 1;
            let _ = writeln!(
                text,
                "{:22} {:>12.1} {:>12} {:>8} {:>8.2} {:>8}  {} — NOT RECORDED",
                case.name, now.instructions, "–", "", now.calls, "–", case.about
            );
            continue;
        };
        let change = (now.instructions / then.instructions - 1.0) * 100.0;
        let verdict =
            if exceeds(now.instructions, then.instructions) || exceeds(now.calls, then.calls) {
                bad += 1;
                " — REGRESSED"
            } else if exceeds(then.instructions, now.instructions) {
                " — better: record it with --bless"
            } else {
                ""
            };
        let _ = writeln!(
            text,
            "{:22} {:>12.1} {:>12.1} {:>+7.1}% {:>8.2} {:>8.2}  {}{verdict}",
            case.name,
            now.instructions,
            then.instructions,
            change,
            now.calls,
            then.calls,
            case.about
        );
    }
    for name in record.costs.keys() {
        if !cases.iter().any(|case| case.name == *name) {
            bad += 1;
            let _ = writeln!(text, "{name:22} is recorded, but no longer exists — GONE");
        }
    }
    (text, bad)
}

fn write(record: &Record, cases: &[Case]) -> String {
    let mut text = format!(
        "# Instructions per piece of work, of our own code only, and calls of the C library's \
         functions.\n\
         # Written by `cargo xtask instructions --bless`; compared by `cargo xtask instructions` \
         within {} %.\n\
         rustc = {:?}\narch = {:?}\n",
        TOLERANCE * 100.0,
        record.rustc,
        record.arch
    );
    for case in cases {
        if let Some(cost) = record.costs.get(&case.name) {
            let _ = write!(
                text,
                "\n# {}\n[work.{}]\ninstructions = {:.2}\ncalls = {:.2}\n",
                case.about, case.name, cost.instructions, cost.calls
            );
        }
    }
    text
}

fn read(text: &str) -> Result<Record> {
    let table: toml::Table = text
        .parse()
        .with_context(|| format!("{RECORD} is not valid TOML"))?;
    let string = |name: &str| {
        table
            .get(name)
            .and_then(toml::Value::as_str)
            .map(str::to_owned)
            .with_context(|| format!("{RECORD} has no {name}"))
    };
    let work = table
        .get("work")
        .and_then(toml::Value::as_table)
        .with_context(|| format!("{RECORD} has no work"))?;
    let mut costs = BTreeMap::new();
    for (name, entry) in work {
        let number = |field: &str| {
            let value = entry.get(field);
            value
                .and_then(toml::Value::as_float)
                .with_context(|| format!("{RECORD}: {name} has no {field}"))
        };
        costs.insert(
            name.clone(),
            Cost {
                instructions: number("instructions")?,
                calls: number("calls")?,
            },
        );
    }
    Ok(Record {
        rustc: string("rustc")?,
        arch: string("arch")?,
        costs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> (Vec<Case>, Record) {
        let cases = cases("$ iwarp-instructions --list\na\t10\tfirst\nb\t1\tsecond\n").unwrap();
        let cost = |instructions, calls| Cost {
            instructions,
            calls,
        };
        let record = Record {
            rustc: "rustc 1.2.3".into(),
            arch: "x".into(),
            costs: [
                ("a".to_owned(), cost(100.0, 1.0)),
                ("b".to_owned(), cost(5.0, 0.0)),
            ]
            .into(),
        };
        (cases, record)
    }

    #[test]
    fn record_survives_write_and_read() {
        let (cases, record) = example();
        let back = read(&write(&record, &cases)).unwrap();
        assert_eq!(back.costs, record.costs);
        assert_eq!((back.rustc, back.arch), (record.rustc, record.arch));
        assert!(read("rustc = 1").is_err());
    }

    #[test]
    fn increase_above_tolerance_is_regression() {
        let (cases, record) = example();
        let with = |a: f64, calls: f64| {
            let mut costs = record.costs.clone();
            costs.insert(
                "a".into(),
                Cost {
                    instructions: a,
                    calls,
                },
            );
            compare(&record, &cases, &costs)
        };
        assert_eq!(with(100.0, 1.0).1, 0);
        assert_eq!(with(103.0, 1.0).1, 0);
        assert!(with(104.0, 1.0).0.contains("REGRESSED") && with(104.0, 1.0).1 == 1);
        assert_eq!(with(100.0, 2.0).1, 1);
        assert!(with(90.0, 1.0).0.contains("--bless") && with(90.0, 1.0).1 == 0);
    }

    #[test]
    fn new_and_removed_work_is_detected() {
        let (cases, mut record) = example();
        let costs = record.costs.clone();
        record.costs.remove("a");
        assert!(compare(&record, &cases, &costs).0.contains("NOT RECORDED"));
        assert_eq!(compare(&record, &cases[1..], &costs).1, 0);
        let (_, record) = example();
        assert!(compare(&record, &cases[1..], &costs).0.contains("GONE"));
    }
}
