//! The command line. One process searches for each target, so that an input that ends or stops it is noticed by this one.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;

use crate::failure::{self, Failure};
use crate::minimise::minimise;
use crate::state::Store;
use crate::worker::{Limit, Report, describe, work};
use crate::{Suite, Target, trace};

/// A worker that runs one input for longer than this is stopped. It is above the time after which an input that ends is too slow.
const HANG: Duration = Duration::from_secs(30);
/// The most processes that are spent on making an input small that ends its process.
const PROCESSES_MAX: u32 = 500;

/// Searches for inputs that break something: replays the seeds and the corpus, then changes them
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Targets to run; all if none is named
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Executions for each target, instead of a time
    #[arg(long)]
    executions: Option<u64>,
    /// Run the seeds and the corpus, and nothing else
    #[arg(long, conflicts_with = "executions")]
    once: bool,
    /// Start of the pseudo-random sequence
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Targets that run at a time; 0 means one for each processor
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// Folder of the corpora and of inputs that fail
    #[arg(long, value_name = "DIR", default_value = "target/fuzz/state")]
    state: PathBuf,
    /// Run only this file, with the named targets
    #[arg(long, value_name = "FILE", requires = "targets")]
    replay: Option<PathBuf>,
    /// Print the names of the targets
    #[arg(long)]
    list: bool,
    /// Be the process that searches for the named target
    #[arg(long, hide = true, requires = "targets")]
    worker: bool,
}

impl Args {
    fn limit(&self) -> Limit {
        match self.executions {
            _ if self.once => Limit::Once,
            Some(most) => Limit::Executions(most),
            None => Limit::Time(Duration::from_secs(self.seconds)),
        }
    }
}

/// Runs the command with the process's arguments.
#[must_use]
pub fn main(suite: &Suite) -> ExitCode {
    match run(suite, &Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(suite: &Suite, args: &Args) -> Result<(), String> {
    if args.list {
        for target in suite.targets {
            println!("{}", target.name);
        }
        return Ok(());
    }
    let targets = wanted(suite, &args.targets)?;
    if let Some(file) = &args.replay {
        let data = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        for target in targets {
            failure::run(target, &data)
                .map_err(|failure| format!("target {} {}", target.name, failure.text))?;
            println!("{}: {} passes", target.name, file.display());
        }
        return Ok(());
    }
    if args.worker {
        for target in targets {
            let store = Store::open(&args.state, target)?;
            work(suite, target, &store, args.limit(), args.seed)?;
        }
        return Ok(());
    }
    all(args, &targets)
}

fn wanted<'a>(suite: &'a Suite, names: &[String]) -> Result<Vec<&'a Target>, String> {
    let find = |name: &String| {
        let found = suite.targets.iter().find(|target| target.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = suite.targets.iter().map(|target| target.name).collect();
            format!(
                "no target is called {name:?}; there are: {}",
                names.join(", ")
            )
        })
    };
    match names {
        [] => Ok(suite.targets.iter().collect()),
        names => names.iter().map(find).collect(),
    }
}

/// Searches for each target in a process of its own, some of them at a time.
fn all(args: &Args, targets: &[&Target]) -> Result<(), String> {
    let jobs = match args.jobs {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let width = targets
        .iter()
        .map(|t| t.name.len())
        .max()
        .unwrap_or(0)
        .max(6);
    println!(
        "{:width$} {:>12} {:>9} {:>7} {:>13} {:>9} {:>14}",
        "target", "executions", "per s", "corpus", "edges", "features", "since it began"
    );
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(targets.len()) {
            scope.spawn(|| {
                while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = supervise(args, target);
                    if let Ok((report, store)) = &result {
                        print(width, target, report, store);
                    }
                    if let Ok(mut results) = results.lock() {
                        results.push(result);
                    }
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_default();
    let (mut sum, mut since) = (0, 0);
    let mut errors = Vec::new();
    for result in results {
        match result {
            Ok((report, store)) => {
                sum += report.executions;
                since += store.executions();
            }
            Err(error) => errors.push(error),
        }
    }
    println!(
        "{sum} executions of {} targets; {since} since their corpora began",
        targets.len()
    );
    match errors.is_empty() {
        true => Ok(()),
        false => Err(errors.join("\n")),
    }
}

fn print(width: usize, target: &Target, report: &Report, store: &Store) {
    let edges = match report.counters {
        0 => "none".into(),
        all => format!("{} of {all}", report.edges),
    };
    println!(
        "{:width$} {:>12} {:>9} {:>7} {edges:>13} {:>9} {:>14}",
        target.name,
        report.executions,
        report.executions * 1000 / report.milliseconds.max(1),
        report.corpus,
        report.features,
        store.executions()
    );
}

/// Runs this program with other arguments.
fn again(args: &Args, target: &Target) -> Result<Command, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command
        .arg("--state")
        .arg(&args.state)
        .arg(target.name)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Ok(command)
}

/// Runs the worker of one target, and says what has ended it if it did not end by itself.
fn supervise(args: &Args, target: &Target) -> Result<(Report, Store), String> {
    let store = Store::open(&args.state, target)?;
    let mut command = again(args, target)?;
    command.args(["--worker", "--seed", &args.seed.to_string()]);
    match args.limit() {
        Limit::Once => command.arg("--once"),
        Limit::Executions(most) => command.args(["--executions", &most.to_string()]),
        Limit::Time(time) => command.args(["--seconds", &time.as_secs().to_string()]),
    };
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let hangs = watch(&mut child, &store.running());
    let (text, errors, status) = ended(child)?;
    let report = text.lines().find_map(Report::parse);
    match report {
        Some(report) if status.success() => return Ok((report, store)),
        Some(_) => return Err(errors.trim().trim_start_matches("error: ").to_owned()),
        None if status.code().is_some() && !hangs => {
            return Err(format!("{}: {errors}", target.name));
        }
        None => {}
    }
    let seen = trace::read(&store.running()).map_err(|error| error.to_string())?;
    store.add_executions(seen.number)?;
    if hangs && ends(args, target, &store, &seen.data)? {
        eprintln!(
            "target {}: it was stopped, but its input ends when it runs again: the machine is busy",
            target.name
        );
        let executions = seen.number;
        let report = Report {
            executions,
            ..Report::default()
        };
        return Ok((report, store));
    }
    let failure = Failure {
        kind: if hangs { "hang" } else { "crash" },
        place: String::new(),
        text: match hangs {
            true => format!("does not end within {} s", HANG.as_secs()),
            false => format!("ends the process ({status}): {}", errors.trim()),
        },
    };
    let small = match hangs {
        true => seen.data,
        false => shrink(args, target, &store, &seen.data)?,
    };
    Err(describe(target, &store, &failure, &small)?)
}

/// Waits for the end of a worker. Returns `true` if it had to be stopped, because it ran one input for too long.
fn watch(child: &mut Child, running: &Path) -> bool {
    let mut number = 0;
    let mut since = Instant::now();
    loop {
        if child.try_wait().is_ok_and(|status| status.is_some()) {
            return false;
        }
        let now = trace::read(running).map_or(0, |seen| seen.number);
        if now != number {
            (number, since) = (now, Instant::now());
        }
        if since.elapsed() > HANG {
            let _ = child.kill();
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns what an ended process has printed, and how it ended.
fn ended(mut child: Child) -> Result<(String, String, std::process::ExitStatus), String> {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_end(&mut out)
            .map_err(|error| error.to_string())?;
    }
    if let Some(mut pipe) = child.stderr.take() {
        pipe.read_to_end(&mut err)
            .map_err(|error| error.to_string())?;
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    let text = |octets: &[u8]| String::from_utf8_lossy(octets).into_owned();
    Ok((text(&out), text(&err), status))
}

/// Returns `true` if an input ends in a process of its own. On a busy machine a worker may wait for long without being at fault.
fn ends(args: &Args, target: &Target, store: &Store, data: &[u8]) -> Result<bool, String> {
    let file = store.running().with_extension("again");
    std::fs::write(&file, data).map_err(|error| error.to_string())?;
    let mut command = again(args, target)?;
    command.arg("--replay").arg(&file);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let start = Instant::now();
    let ended = loop {
        if let Ok(Some(status)) = child.try_wait() {
            break status.success();
        }
        if start.elapsed() > 2 * HANG {
            let _ = child.kill();
            let _ = child.wait();
            break false;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let _ = std::fs::remove_file(&file);
    Ok(ended)
}

/// Makes an input small that ends its process, with a process for each attempt.
fn shrink(args: &Args, target: &Target, store: &Store, data: &[u8]) -> Result<Vec<u8>, String> {
    let file = store.running().with_extension("smaller");
    let mut left = PROCESSES_MAX;
    let mut crashes = |data: &[u8]| -> Result<bool, String> {
        if left == 0 {
            return Ok(false);
        }
        left -= 1;
        std::fs::write(&file, data).map_err(|error| error.to_string())?;
        let mut command = again(args, target)?;
        command.arg("--replay").arg(&file);
        let output = command.output().map_err(|error| error.to_string())?;
        Ok(output.status.code().is_none())
    };
    let small = match crashes(data)? {
        true => minimise(data, |data| crashes(data).unwrap_or(false)),
        false => data.to_vec(),
    };
    let _ = std::fs::remove_file(&file);
    Ok(small)
}
