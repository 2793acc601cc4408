//! `cargo xtask interop apps`: programs of the distribution, as they are, on our libraries.
//!
//! A case is one check of one program. It runs as an ordinary user (as `nobody` when started as root) with an installed copy of
//! what was built. Where the machine allows it, each case has its own network and process namespaces, so that ports never collide
//! and no process survives its case.
//!
//! # Adding a case
//!
//! A file here has a function `cases() -> Vec<Case>` and a row in [`all`]. A case is
//!
//! ```ignore
//! Case::new("rping", "IPv6", |stage| {
//!     let server = stage.start(&["rping", "-s", "-a", "::1", "-C", "3", "-v"])?;
//!     stage.wait_for_port(7174)?;
//!     let client = stage.start(&["rping", "-c", "-a", "::1", "-C", "3", "-v"])?;
//!     let said = client.success()?;             // exit code 0 within the case's limit, and what it wrote
//!     expect_lines(&said, "ping data:", 3)?;    // a check of real output
//!     server.success()?;
//!     Ok(Verdict::passed("3 pings"))
//! })
//! .needs(&["rdmacm-utils"])
//! ```
//!
//! - The first string is the program (one row of the table in `docs/programs.md`), the second is what ran; both together are the name
//!   that `--only` looks for.
//! - [`Case::needs`] names Debian packages, each a row in `xtask/src/packages.rs`. Without them the case is skipped.
//! - [`Case::wire`] gives an interface with an address for programs that skip loopback ([`stage::WIRE_V4`]).
//! - [`Case::spins`] runs the case alone, because its programs use all processors while they wait.
//! - [`Case::limit`] sets the time limit of a slow case. [`Case::long`] runs the case with `--all` only.
//! - `Ok(Verdict::skipped(why))` is for a case that finds out that it cannot run on this machine. Any error is a failure.
//! - A program is killed when its value is dropped. When the case ends, all processes that are left in its namespaces are killed.
//!
//! `--bless` writes the table in `docs/programs.md`. It replaces the row of a program if all cases of that program ran.
//! A unit test fails when the table and the cases differ.

mod by_number;
mod case;
mod ceph;
mod checked;
mod crates;
mod crates_examples;
mod crates_known;
mod dapl;
mod datagrams;
mod enumerate;
mod fabric;
mod faults;
mod fio;
mod gloo;
mod huge_pages;
mod iser;
mod migration;
mod mpi;
mod perftest;
mod pingpong;
mod program;
pub(crate) mod pyverbs;
pub(crate) mod pyverbs_skips;
mod qperf;
mod rdmacm;
mod rsockets;
mod rsockets_servers;
mod stage;
mod table;
mod threads;
mod ucp;
mod ucx;
mod wheels;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use case::{Case, Verdict};
use stage::{Isolation, Stage};
use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::Log;
use xtask::{install, packages};

/// Arguments of `cargo xtask interop apps`.
#[derive(Args)]
pub(crate) struct AppsArgs {
    /// Run only the cases whose names contain one of these
    #[arg(long, value_name = "CASE", num_args = 1..)]
    only: Vec<String>,
    /// Run the long cases, too
    #[arg(long)]
    all: bool,
    /// List the cases
    #[arg(long)]
    list: bool,
    /// Write the results into docs/programs.md
    #[arg(long)]
    bless: bool,
    /// How many cases run at a time
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Run each case N times
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: usize,
    /// Use this installation (of `cargo xtask install`) instead of building one
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// Exit with 77 if none of the programs is installed, which a step of `cargo xtask test` has to tell from success
    #[arg(long, hide = true)]
    step: bool,
}

/// All cases, in the order of the table.
fn all() -> Vec<Case> {
    [
        enumerate::cases(),
        rdmacm::cases(),
        datagrams::cases(),
        pingpong::cases(),
        perftest::cases(),
        by_number::cases(),
        qperf::cases(),
        dapl::cases(),
        fio::cases(),
        rsockets::cases(),
        rsockets_servers::cases(),
        fabric::cases(),
        ucx::cases(),
        ucp::cases(),
        mpi::cases(),
        gloo::cases(),
        iser::cases(),
        migration::cases(),
        ceph::cases(),
        faults::cases(),
        pyverbs::cases(),
        wheels::cases(),
        crates::cases(),
        checked::cases(),
        threads::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The limit for all cases together. Each case has its own limit as well, so this one only ends a run that hangs.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

/// Runs the cases that the arguments choose.
///
/// # Errors
/// When our programs cannot be built, no case matches `--only`, or a case fails.
pub(crate) fn command(args: &AppsArgs) -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("interop-apps.log"), LIMIT)?;
    let Some(rows) = execute(&context, args, &mut log)? else {
        return Ok(Outcome::Passed);
    };
    if args.bless {
        table::bless(&context.root, &all(), &rows)?;
    }
    let failed: Vec<_> = rows
        .iter()
        .filter(|row| row.result.is_err())
        .map(|row| row.name.as_str())
        .collect();
    if !failed.is_empty() {
        bail!(
            "{} of {} failed: {}",
            failed.len(),
            rows.len(),
            failed.join("; ")
        );
    }
    let skipped = |row: &Row| matches!(row.result, Ok(Verdict::Skipped(_)));
    if args.step && rows.iter().all(skipped) {
        return Ok(Outcome::Skipped("none of the programs is installed".into()));
    }
    Ok(Outcome::Passed)
}

/// How one case ended.
struct Row {
    program: &'static str,
    name: String,
    result: Result<Verdict>,
    time: Duration,
}

/// Runs the cases that the arguments choose. Returns `None` if they only ask for the list.
fn execute(context: &Context, args: &AppsArgs, log: &mut Log) -> Result<Option<Vec<Row>>> {
    let chosen: Vec<Case> = all()
        .into_iter()
        .filter(|case| args.all || !args.only.is_empty() || !case.is_long())
        .filter(|case| {
            let name = case.name();
            args.only.is_empty() || args.only.iter().any(|text| name.contains(text.as_str()))
        })
        .collect();
    if args.list {
        for case in &chosen {
            println!("{}", case.name());
        }
        return Ok(None);
    }
    if chosen.is_empty() {
        bail!("no such case; --list shows them");
    }
    let home = tempdir()?;
    let prefix = match &args.prefix {
        Some(prefix) => prefix.clone(),
        None => {
            let prefix = home.path.join("prefix");
            install::install(context, &prefix)?;
            prefix
        }
    };
    let isolation = Isolation::find();
    log.say(isolation.about());
    let jobs = if isolation == Isolation::Nothing {
        // Without namespaces the cases share the machine's ports, so they run one after the other.
        1
    } else {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // One more than processors, because many programs sleep between messages.
        args.jobs.unwrap_or(cores.clamp(1, 4) + 1).max(1)
    };
    let logs = context.log_dir().join("apps");
    std::fs::create_dir_all(&logs)?;
    let rows = run(
        &Setting {
            prefix: &prefix,
            home: &home.path,
            logs: &logs,
            isolation,
        },
        &chosen,
        args.repeat.max(1),
        jobs,
        log,
    );
    summary(&rows, log);
    Ok(Some(rows))
}

/// The directories and the kind of isolation, which all cases share.
struct Setting<'a> {
    prefix: &'a Path,
    home: &'a Path,
    logs: &'a Path,
    isolation: Isolation,
}

/// Returns the numbers of the runs of all cases in the order in which they start. Spinning cases come last: each of them waits for the cases
/// beside it to end, and nothing starts meanwhile.
fn order(cases: &[Case], repeat: usize) -> Vec<usize> {
    let mut runs: Vec<usize> = (0..cases.len().saturating_mul(repeat)).collect();
    runs.sort_by_key(|run| cases.get(run / repeat).is_some_and(Case::is_spinning));
    runs
}

/// Runs the cases on `jobs` threads. The rows are in the order of the cases.
fn run(
    setting: &Setting<'_>,
    cases: &[Case],
    repeat: usize,
    jobs: usize,
    log: &mut Log,
) -> Vec<Row> {
    let runs = order(cases, repeat);
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Row)>> = Mutex::new(Vec::new());
    let log = Mutex::new(log);
    let stages = RwLock::new(());
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let Some(&at) = runs.get(next.fetch_add(1, Ordering::Relaxed)) else {
                        return;
                    };
                    let Some(case) = cases.get(at / repeat) else {
                        return;
                    };
                    // A spinning case holds the lock alone until it ends. All others share it.
                    let (alone, beside) = if case.is_spinning() {
                        (stages.write().ok(), None)
                    } else {
                        (None, stages.read().ok())
                    };
                    let row = run_one(setting, case, at);
                    drop((alone, beside));
                    if let Ok(mut log) = log.lock() {
                        report(&row, &mut log);
                    }
                    if let Ok(mut done) = done.lock() {
                        done.push((at, row));
                    }
                }
            });
        }
    });
    let mut rows = done.into_inner().unwrap_or_default();
    rows.sort_by_key(|(at, _)| *at);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn run_one(setting: &Setting<'_>, case: &Case, number: usize) -> Row {
    let start = Instant::now();
    let absent: Vec<_> = case
        .packages()
        .iter()
        .copied()
        .filter(|name| !packages::have(name))
        .collect();
    let result = if !absent.is_empty() {
        Ok(Verdict::skipped(format!(
            "not installed: {}",
            absent.join(", ")
        )))
    } else if case.needs_wire() && setting.isolation == Isolation::Nothing {
        Ok(Verdict::skipped(
            "needs a network namespace: root, or unprivileged user namespaces",
        ))
    } else {
        Stage::open(setting, case, number).and_then(|stage| {
            let result = case.run(&stage);
            stage.close(&result);
            result
        })
    };
    Row {
        program: case.program(),
        name: case.name(),
        result,
        time: start.elapsed(),
    }
}

fn report(row: &Row, log: &mut Log) {
    let seconds = row.time.as_secs_f64();
    match &row.result {
        Ok(Verdict::Passed(note)) => {
            log.say(format!("passed  {seconds:>5.1} s  {}  {note}", row.name))
        }
        Ok(Verdict::Skipped(why)) => {
            log.say(format!("skipped {seconds:>5.1} s  {}  {why}", row.name))
        }
        Err(error) => log.say(format!("FAILED  {seconds:>5.1} s  {}  {error:#}", row.name)),
    }
}

fn summary(rows: &[Row], log: &mut Log) {
    let failed = rows.iter().filter(|row| row.result.is_err()).count();
    let skipped = rows
        .iter()
        .filter(|row| matches!(row.result, Ok(Verdict::Skipped(_))))
        .count();
    log.say(format!(
        "{} cases passed, {failed} failed, {skipped} skipped",
        rows.len() - failed - skipped
    ));
    for row in rows {
        if let Ok(Verdict::Skipped(why)) = &row.result {
            log.line(format!("skipped: {}: {why}", row.name));
        }
        if let Err(error) = &row.result {
            log.say(format!("FAILED {}: {error:#}", row.name));
        }
    }
}

/// A directory that all users may read. It is removed when the value is dropped.
pub(crate) struct TempDir {
    pub(crate) path: PathBuf,
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

pub(crate) fn tempdir() -> Result<TempDir> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = std::env::temp_dir().join(format!("iwarp-apps-{}", std::process::id()));
    std::fs::create_dir(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(TempDir { path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_need_known_packages() {
        let cases = all();
        for (at, case) in cases.iter().enumerate() {
            assert!(
                cases[..at].iter().all(|other| other.name() != case.name()),
                "{} twice",
                case.name()
            );
            for package in case.packages() {
                assert!(packages::known(package), "{}: {package}", case.name());
            }
        }
    }
}
