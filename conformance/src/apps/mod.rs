//! `cargo xtask interop apps`: the distribution's unmodified programs on our libraries.
//!
//! A case is one check of one program. It runs as an ordinary user (as `nobody` if root started it)
//! with an installed copy of the build. If the machine permits, each case runs in separate network
//! and process namespaces, so that ports never collide and no process survives its case.
//!
//! # Adding a case
//!
//! Each file of this directory with cases has a function `cases() -> Vec<Case<Stage>>`, which
//! [`all`] calls. Example of a case:
//!
//! ```ignore
//! Case::new("rping", "IPv6", |stage| {
//!     let server = stage.start(&["rping", "-s", "-a", "::1", "-C", "3", "-v"])?;
//!     stage.wait_for_port(7174)?;
//!     let client = stage.start(&["rping", "-c", "-a", "::1", "-C", "3", "-v"])?;
//!     let said = client.success()?;             // fails unless the exit status is 0
//!     expect_lines(&said, "ping data:", 3)?;    // checks the output
//!     server.success()?;
//!     Ok(Verdict::passed("3 pings"))
//! })
//! .needs(&["rdmacm-utils"])
//! ```
//! - The first string is the program (one row of the table in `docs/programs.md`), the second
//!   describes what it does. Both together are the name to which `--only` applies.
//! - [`Case::needs`] lists Debian packages, each of which is a row in `xtask/src/packages.rs`. If
//!   one is missing, the case is skipped.
//! - [`Case::wire`] adds a network interface with an address ([`stage::WIRE_V4`]), for programs
//!   that ignore loopback.
//! - [`Case::busy_polls`] runs the case alone, because its programs busy-poll.
//! - [`Case::limit`] sets the time limit of a slow case. A [`Case::long`] case runs only with
//!   `--all` or `--only`.
//! - If a case cannot run on this machine, it returns `Ok(Verdict::skipped(why))`. An error is a
//!   failure.
//! - Dropping a program's value kills the program. At the end of the case, all remaining processes
//!   in its namespaces are killed.
//!
//! `--bless` updates the table in `docs/programs.md`: it replaces the row of each program whose
//! cases all ran. A unit test fails if the table and the cases differ.

mod by_number;
mod ceph;
mod checked;
mod checks;
mod crates;
mod crates_examples;
mod crates_known;
mod crates_view;
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
mod monitoring;
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

use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use xtask::context::Context;
use xtask::install;
use xtask::outcome::Outcome;
use xtask::process::Log;

use crate::case::{Case, Verdict, is_chosen};
use crate::needs::{self, Capabilities};
use crate::rows::Row;
use crate::tempdir::tempdir;
use stage::{Environment, Isolation, Stage};

/// Arguments of `cargo xtask interop apps`.
#[derive(Args)]
pub(crate) struct AppsArgs {
    /// Run only the cases whose names contain one of these
    #[arg(long, value_name = "CASE", num_args = 1..)]
    only: Vec<String>,
    /// Also run the long cases
    #[arg(long)]
    all: bool,
    /// List the cases
    #[arg(long)]
    list: bool,
    /// Write the results into docs/programs.md
    #[arg(long)]
    bless: bool,
    /// Number of cases that run concurrently
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Run each case N times
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: usize,
    /// Use this installation (of `cargo xtask install`) instead of building one
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// Exit with 77 if none of the programs is installed (for `cargo xtask test`)
    #[arg(long, hide = true)]
    step: bool,
}

/// All cases, in the order of the table.
fn all() -> Vec<Case<Stage>> {
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
        monitoring::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Time limit of the whole run. It is long, and only stops a run that hangs.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

/// Runs the selected cases.
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
            "{} of {} cases failed: {}",
            failed.len(),
            rows.len(),
            failed.join("; ")
        );
    }
    if args.step && rows.iter().all(Row::is_skipped) {
        return Ok(Outcome::Skipped("none of the programs is installed".into()));
    }
    Ok(Outcome::Passed)
}

/// Runs the selected cases. Returns `None` after `--list`.
fn execute(context: &Context, args: &AppsArgs, log: &mut Log) -> Result<Option<Vec<Row>>> {
    let selected: Vec<Case<Stage>> = all()
        .into_iter()
        .filter(|case| args.all || !args.only.is_empty() || !case.long)
        .filter(|case| is_chosen(&case.name, &args.only))
        .collect();
    if args.list {
        for case in &selected {
            println!("{}", case.name);
        }
        return Ok(None);
    }
    if selected.is_empty() {
        bail!("--only matches no case; --list shows the cases");
    }
    let temp_dir = tempdir()?;
    let prefix = match &args.prefix {
        Some(prefix) => prefix.clone(),
        None => {
            let prefix = temp_dir.path.join("prefix");
            install::install(context, &prefix)?;
            prefix
        }
    };
    let isolation = Isolation::probe();
    log.say(isolation.about());
    let jobs = if isolation == Isolation::None {
        // Without namespaces, the cases share the machine's ports, so run them one after the other.
        1
    } else {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // One case more than there are processors, because many programs sleep between messages.
        args.jobs.unwrap_or(cores.clamp(1, 4) + 1).max(1)
    };
    let logs = context.log_dir().join("apps");
    std::fs::create_dir_all(&logs)?;
    let rows = run(
        &Environment {
            prefix: &prefix,
            home: &temp_dir.path,
            logs: &logs,
            isolation,
        },
        &selected,
        args.repeat.max(1),
        jobs,
        log,
    );
    summary(&rows, log);
    Ok(Some(rows))
}

/// Returns the numbers of all runs in the order in which they start. Cases that busy-poll come
/// last, because each of them waits until no other case runs. The others begin with those that may
/// take long, so that the last one does not run alone.
fn order(cases: &[Case<Stage>], repeat: usize) -> Vec<usize> {
    let mut runs: Vec<usize> = (0..cases.len().saturating_mul(repeat)).collect();
    runs.sort_by_key(|run| {
        let case = cases.get(run / repeat)?;
        Some((case.busy_polls, Reverse(case.limit)))
    });
    runs
}

/// Runs the cases on `jobs` threads. The rows are in the order of the cases.
fn run(
    environment: &Environment<'_>,
    cases: &[Case<Stage>],
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
                    let Some(&number) = runs.get(next.fetch_add(1, Ordering::Relaxed)) else {
                        return;
                    };
                    let Some(case) = cases.get(number / repeat) else {
                        return;
                    };
                    // A case that busy-polls holds the lock exclusively. All others share it.
                    let (exclusive, shared) = if case.busy_polls {
                        (stages.write().ok(), None)
                    } else {
                        (None, stages.read().ok())
                    };
                    let row = run_one(environment, case, number);
                    drop((exclusive, shared));
                    if let Ok(mut log) = log.lock() {
                        row.report(&mut log);
                    }
                    if let Ok(mut done) = done.lock() {
                        done.push((number, row));
                    }
                }
            });
        }
    });
    let mut rows = done.into_inner().unwrap_or_default();
    rows.sort_by_key(|(at, _)| *at);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn run_one(environment: &Environment<'_>, case: &Case<Stage>, number: usize) -> Row {
    let start = Instant::now();
    let capabilities = Capabilities {
        namespaces: environment.isolation != Isolation::None,
        tap: false,
    };
    let result = match needs::missing(&case.needs, capabilities) {
        Some(why) => Ok(Verdict::Skipped(why)),
        None => Stage::open(environment, case, number).and_then(|stage| {
            let result = (case.run)(&stage);
            stage.close(&result);
            result
        }),
    };
    Row {
        name: case.name.clone(),
        result,
        time: start.elapsed(),
    }
}

fn summary(rows: &[Row], log: &mut Log) {
    let failed = rows.iter().filter(|row| row.result.is_err()).count();
    let skipped = rows.iter().filter(|row| row.is_skipped()).count();
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

#[cfg(test)]
mod tests {
    use xtask::packages;

    use super::*;
    use crate::needs::Need;

    #[test]
    fn slow_cases_start_first() {
        let case = |limit| Case::named("x", |_: &Stage| bail!("not run")).limit(limit);
        let cases = [case(60).busy_polls(), case(60), case(240), case(60)];
        assert_eq!(order(&cases, 1), [2, 1, 3, 0]);
        assert_eq!(order(&cases, 2), [4, 5, 2, 3, 6, 7, 0, 1]);
    }

    #[test]
    fn names_unique_and_packages_known() {
        let cases = all();
        for (at, case) in cases.iter().enumerate() {
            assert!(
                cases[..at].iter().all(|other| other.name != case.name),
                "{} twice",
                case.name
            );
            for need in &case.needs {
                if let Need::Package(package) = need {
                    assert!(packages::known(package), "{}: {package}", case.name);
                }
            }
        }
    }
}
