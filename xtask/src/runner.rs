//! `cargo xtask test`: runs the steps in order and prints a summary.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::Log;

use crate::steps::{STEPS, Step};

/// How many lines of a failing step's log are shown.
const TAIL_LINES: usize = 150;

/// Arguments of `cargo xtask test`.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Shorter runs of the steps that can be shortened (simulator, fuzzing)
    #[arg(long)]
    quick: bool,
    /// Run only these steps, in the usual order
    #[arg(long, value_name = "STEP", num_args = 1..)]
    only: Vec<String>,
    /// Leave out these steps
    #[arg(long, value_name = "STEP", num_args = 1.., conflicts_with = "only")]
    skip: Vec<String>,
    /// Go on after a failure
    #[arg(long)]
    keep_going: bool,
    /// Do not install missing packages, even as root
    #[arg(long)]
    no_install: bool,
    /// List the steps and what each is for
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
/// When a step's name is unknown or the tree cannot be found.
pub(crate) fn test(args: &TestArgs) -> Result<bool> {
    if args.list {
        for step in STEPS {
            println!("{:12} {}", step.name, step.about);
        }
        return Ok(true);
    }
    let steps = choose(&args.only, &args.skip)?;
    let context = Context::new(args.quick, !args.no_install)?;
    let mut rows: Vec<(&Step, Status, Duration)> = Vec::new();
    let mut stopped_by = None;
    for step in steps {
        if let Some(name) = stopped_by {
            rows.push((
                step,
                Status::Skipped(format!("not run: {name} failed")),
                Duration::ZERO,
            ));
            continue;
        }
        println!("==> {}: {}", step.name, step.about);
        let start = Instant::now();
        let status = run_step(&context, step);
        let elapsed = start.elapsed();
        match &status {
            Status::Passed => println!("  passed in {}", seconds(elapsed)),
            Status::Failed => println!("  FAILED after {}", seconds(elapsed)),
            Status::Skipped(why) => println!("  skipped: {why}"),
        }
        if matches!(status, Status::Failed) && !args.keep_going {
            stopped_by = Some(step.name);
        }
        rows.push((step, status, elapsed));
    }
    Ok(summary(&rows))
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

fn run_step(context: &Context, step: &Step) -> Status {
    let path = context.log_dir().join(format!("{}.log", step.name));
    let result = Log::create(&path, step.limit).and_then(|mut log| {
        let result = (step.run)(context, &mut log);
        if let Err(error) = &result {
            println!("--- last lines of {}", log.path().display());
            println!("{}", log.tail(TAIL_LINES));
            println!("---");
            log.line(format!("error: {error:#}"));
        }
        result
    });
    match result {
        Ok(Outcome::Passed) => Status::Passed,
        Ok(Outcome::Skipped(why)) => Status::Skipped(why),
        Err(error) => {
            println!("  error: {error:#}");
            Status::Failed
        }
    }
}

/// Prints the table of steps and, in a line of its own, how many passed, failed and were skipped. Returns `true` if no step failed.
fn summary(rows: &[(&Step, Status, Duration)]) -> bool {
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
    fn steps_run_in_the_order_of_the_table() {
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
    fn an_unknown_step_is_an_error_that_lists_the_known_ones() {
        let error = choose(&["unti".to_owned()], &[]).err().unwrap().to_string();
        assert!(error.contains("unti") && error.contains("unit"), "{error}");
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
