//! `cargo xtask test`: runs the steps in order, some of them in parallel with the others, and
//! prints a summary.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::Log;

use crate::steps::{Lane, STEPS, Step};

/// How many lines of a failing step's log are shown.
const TAIL_LINES: usize = 150;

/// Arguments of `cargo xtask test`.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Shorten the steps that can be shortened (simulator, fuzzing)
    #[arg(long)]
    quick: bool,
    /// Run only these steps, in the usual order
    #[arg(long, value_name = "STEP", num_args = 1..)]
    only: Vec<String>,
    /// Do not run these steps
    #[arg(long, value_name = "STEP", num_args = 1.., conflicts_with = "only")]
    skip: Vec<String>,
    /// Continue after a failure
    #[arg(long)]
    keep_going: bool,
    /// Do not install missing packages, even as root
    #[arg(long)]
    no_install: bool,
    /// List the steps with descriptions
    #[arg(long)]
    list: bool,
}

enum Status {
    Passed,
    Failed,
    Skipped(String),
}

/// Runs the chosen steps. Returns `true` if no step failed.
///
/// # Errors
/// If a step's name is unknown, or if the tree cannot be found.
pub(crate) fn test(args: &TestArgs) -> Result<bool> {
    if args.list {
        for step in STEPS {
            println!("{:12} {}", step.name, step.about);
        }
        return Ok(true);
    }
    let steps = choose(&args.only, &args.skip)?;
    let run = Run {
        context: Context::new(args.quick, !args.no_install)?,
        keep_going: args.keep_going,
        hold: steps.iter().any(|step| step.lane == Lane::Main),
        stopped_by: OnceLock::new(),
    };
    let lane = |lane| steps.iter().copied().filter(move |step| step.lane == lane);
    let mut rows: Vec<Row> = lane(Lane::First).map(|step| run.step(step)).collect();
    thread::scope(|scope| {
        let beside = scope.spawn(|| {
            lower_priority();
            lane(Lane::Beside)
                .map(|step| run.step(step))
                .collect::<Vec<_>>()
        });
        rows.extend(lane(Lane::Main).map(|step| run.step(step)));
        match beside.join() {
            Ok(more) => rows.extend(more),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    });
    let position = |step: &Step| STEPS.iter().position(|other| other.name == step.name);
    rows.sort_by_key(|(step, ..)| position(step));
    Ok(summary(&rows))
}

/// A step, its result, and the time that it took.
type Row = (&'static Step, Status, Duration);

/// The state that the lanes of a run share.
struct Run {
    context: Context,
    keep_going: bool,
    /// Hold back the output of a step in [`Lane::Beside`] until the step ends.
    hold: bool,
    /// The step whose failure stops the run.
    stopped_by: OnceLock<&'static str>,
}

impl Run {
    /// Runs a step, unless an earlier failure has stopped the run, and prints its result.
    fn step(&self, step: &'static Step) -> Row {
        if let Some(name) = self.stopped_by.get() {
            let why = format!("not run: {name} failed");
            return (step, Status::Skipped(why), Duration::ZERO);
        }
        let start = Instant::now();
        let path = self.context.log_dir().join(format!("{}.log", step.name));
        let status = match Log::create(&path, step.limit) {
            Ok(log) => self.run_logged(step, log),
            Err(error) => {
                println!("==> {}: {error:#}", step.name);
                Status::Failed
            }
        };
        if matches!(status, Status::Failed) && !self.keep_going {
            // If both lanes fail, the first failure is kept.
            let _ = self.stopped_by.set(step.name);
        }
        (step, status, start.elapsed())
    }

    /// Runs a step with this log.
    fn run_logged(&self, step: &Step, mut log: Log) -> Status {
        if self.hold && step.lane == Lane::Beside {
            log = log.held();
        }
        log.print(&format!("==> {}: {}\n", step.name, step.about));
        let start = Instant::now();
        let result = (step.run)(&self.context, &mut log);
        let elapsed = seconds(start.elapsed());
        if let Err(error) = &result {
            let (path, tail) = (log.path().display(), log.tail(TAIL_LINES));
            let text = format!("--- last lines of {path}\n{tail}\n---\n  error: {error:#}\n");
            log.print(&text);
            log.line(format!("error: {error:#}"));
        }
        let (status, message) = match result {
            Ok(Outcome::Passed) => (Status::Passed, format!("passed in {elapsed}")),
            Ok(Outcome::Skipped(why)) => (Status::Skipped(why.clone()), format!("skipped: {why}")),
            Err(_) => (Status::Failed, format!("FAILED after {elapsed}")),
        };
        log.show(message);
        log.release();
        status
    }
}

/// Lowers the priority of this thread and of the commands that it starts.
fn lower_priority() {
    // Ignore an error: the run only takes longer.
    let _ = rustix::process::setpriority_process(None, 10);
}

fn choose(only: &[String], skip: &[String]) -> Result<Vec<&'static Step>> {
    for name in only.iter().chain(skip) {
        if !STEPS.iter().any(|step| step.name == name) {
            let names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
            bail!(
                "no step is called {name:?}; there are: {}",
                names.join(", ")
            );
        }
    }
    Ok(STEPS
        .iter()
        .filter(|step| only.is_empty() || only.iter().any(|name| name == step.name))
        .filter(|step| !skip.iter().any(|name| name == step.name))
        .collect())
}

/// Prints the table of steps, and a line with the numbers of passed, failed and skipped steps.
/// Returns `true` if no step failed.
fn summary(rows: &[Row]) -> bool {
    println!("\n==> summary");
    for (step, status, elapsed) in rows {
        let (word, note) = match status {
            Status::Passed => ("passed", ""),
            Status::Failed => ("FAILED", ""),
            Status::Skipped(why) => ("skipped", why.as_str()),
        };
        println!(
            "{}",
            format!(
                "  {:12} {word:8} {:>8}  {note}",
                step.name,
                seconds(*elapsed)
            )
            .trim_end()
        );
    }
    let count =
        |wanted: fn(&Status) -> bool| rows.iter().filter(|(_, status, _)| wanted(status)).count();
    let failed = count(|status| matches!(status, Status::Failed));
    let passed = count(|status| matches!(status, Status::Passed));
    let skipped = count(|status| matches!(status, Status::Skipped(_)));
    println!("\n{passed} passed, {failed} failed, {skipped} skipped");
    failed == 0
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_run_in_table_order() {
        let names = |only: &[&str], skip: &[&str]| -> Vec<&str> {
            let own = |list: &[&str]| list.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
            choose(&own(only), &own(skip))
                .unwrap()
                .iter()
                .map(|step| step.name)
                .collect()
        };
        assert_eq!(names(&["unit", "fmt"], &[]), ["fmt", "unit"]);
        assert_eq!(names(&[], &[]).len(), STEPS.len());
        assert!(!names(&[], &["unit"]).contains(&"unit"));
    }

    #[test]
    fn unknown_step_lists_known_steps() {
        let error = choose(&["unti".to_owned()], &[]).err().unwrap().to_string();
        assert!(error.contains("unti") && error.contains("unit"), "{error}");
    }

    #[test]
    fn failure_stops_later_steps() {
        const FAILS: Step = Step {
            name: "test-fails",
            about: "a step that fails",
            limit: Duration::from_secs(20),
            lane: Lane::Beside,
            run: |_, _| bail!("on purpose"),
        };
        const LATER: Step = Step {
            name: "test-later",
            lane: Lane::Main,
            run: |_, _| panic!("not to be run"),
            ..FAILS
        };
        let run = Run {
            context: Context::new(false, false).unwrap(),
            keep_going: false,
            hold: true,
            stopped_by: OnceLock::new(),
        };
        assert!(matches!(run.step(&FAILS).1, Status::Failed));
        let Status::Skipped(why) = run.step(&LATER).1 else {
            panic!("a later step ran");
        };
        assert_eq!(why, "not run: test-fails failed");
        let _ = std::fs::remove_file(run.context.log_dir().join("test-fails.log"));
    }

    #[test]
    fn one_failure_fails_the_run() {
        let step = &STEPS[0];
        let row = |status| (step, status, Duration::ZERO);
        assert!(summary(&[
            row(Status::Passed),
            row(Status::Skipped("why".into()))
        ]));
        assert!(!summary(&[row(Status::Passed), row(Status::Failed)]));
    }
}
