//! `cargo xtask fuzz`: builds the fuzzer with instrumentation, runs it, and measures which lines its corpora reach.
//!
//! Both need nothing but the stable toolchain. LLVM's pass for the counters (`sancov-module`) is part of every compiler, and the component
//! `llvm-tools` has what makes a report of source-based coverage.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde_json::Value;

use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

/// The packages with fuzz targets. Each has a program of its name.
const PACKAGES: &[&str] = &["iwarp-fuzz", "iwarp-fuzz-host"];

/// Counters at edges, which guide the search, and calls at comparisons.
const GUIDE: &str = "--cfg=fuzzing -Cpasses=sancov-module \
     -Cllvm-args=-sanitizer-coverage-level=3 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
     -Cllvm-args=-sanitizer-coverage-trace-compares";
/// Counters of regions of the source, for the report.
const MEASURE: &str = "--cfg=fuzzing -Cinstrument-coverage";

/// What `cargo xtask fuzz` is told.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// Target to run; may be repeated; all without it
    #[arg(long = "target", value_name = "NAME")]
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Executions for each target, instead of a time
    #[arg(long)]
    executions: Option<u64>,
    /// Targets that run at a time; 0 means one for each processor
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// Start of the pseudo-random sequence
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run one file with the named target, and nothing else
    #[arg(long, value_name = "FILE", requires = "targets")]
    replay: Option<PathBuf>,
    /// Do not search: report the lines and regions of each file that the seeds and the corpora reach
    #[arg(long)]
    coverage: bool,
    /// Print the names of the targets
    #[arg(long)]
    list: bool,
}

/// The folder with everything that fuzzing makes.
fn home(context: &Context) -> PathBuf {
    context.target.join("fuzz")
}

/// Returns a cargo command that builds a package with instrumentation. Each kind has a target folder of its own.
fn build(context: &Context, package: &str, flags: &str, folder: &Path) -> Command {
    let mut command = cargo(&context.root);
    command
        .args(["build", "--profile", "fuzz", "--package", package])
        .args(["--bin", package])
        .env("CARGO_TARGET_DIR", folder)
        .env(
            "RUSTC_WORKSPACE_WRAPPER",
            context.root.join("fuzz/instrument.sh"),
        )
        .env("FUZZ_FLAGS", flags);
    command
}

/// Builds a package with the counters that guide the search. Returns a command of its program.
fn program(
    context: &Context,
    package: &str,
    run: &mut dyn FnMut(&mut Command) -> Result<()>,
) -> Result<Command> {
    let folder = home(context).join("build");
    run(&mut build(context, package, GUIDE, &folder))?;
    let mut command = Command::new(folder.join("fuzz").join(package));
    command
        .current_dir(&context.root)
        .arg("--state")
        .arg(home(context).join("state"));
    Ok(command)
}

/// Runs a command that prints to the terminal.
fn visibly(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !status.success() {
        bail!("{} failed: {status}", command.get_program().display());
    }
    Ok(())
}

/// Returns the targets of a program.
fn targets(command: &Command) -> Result<Vec<String>> {
    let output = Command::new(command.get_program()).arg("--list").output()?;
    let text = String::from_utf8(output.stdout).context("names of targets")?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Runs the command. Returns `true` if nothing was found.
pub(crate) fn command(args: &FuzzArgs) -> Result<bool> {
    let context = Context::new(false, false)?;
    if args.coverage {
        return coverage(&context).map(|()| true);
    }
    let mut missing = args.targets.clone();
    let mut found = false;
    for package in PACKAGES {
        let mut command = program(&context, package, &mut visibly)?;
        let names = targets(&command)?;
        if args.list {
            names.iter().for_each(|name| println!("{name}"));
            continue;
        }
        missing.retain(|name| !names.contains(name));
        let here: Vec<_> = args
            .targets
            .iter()
            .filter(|name| names.contains(name))
            .collect();
        if here.is_empty() && !args.targets.is_empty() {
            continue;
        }
        command.args(here).args(["--seed", &args.seed.to_string()]);
        command.args(["--jobs", &args.jobs.to_string()]);
        match (&args.replay, args.executions) {
            (Some(file), _) => command.arg("--replay").arg(std::path::absolute(file)?),
            (None, Some(most)) => command.args(["--executions", &most.to_string()]),
            (None, None) => command.args(["--seconds", &args.seconds.to_string()]),
        };
        found |= !command.status()?.success();
    }
    if let Some(name) = missing.first() {
        bail!("no target is called {name:?}; `cargo xtask fuzz --list` prints their names");
    }
    Ok(!found)
}

/// The step of `cargo xtask test`: a short search. It leaves out the package whose dependencies take minutes to build.
pub(crate) fn step(context: &Context, log: &mut Log) -> Result<Outcome> {
    let seconds = if context.quick { "1" } else { "3" };
    let mut command = program(context, PACKAGES[0], &mut |command| log.run(command))?;
    let text = log.run_and_read(command.args(["--seconds", seconds]))?;
    text.lines().for_each(|line| log.show(line));
    Ok(Outcome::Passed)
}

/// Returns the folder of the toolchain's LLVM tools.
fn llvm_tools(context: &Context) -> Result<PathBuf> {
    let ask = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("rustc")
            .current_dir(&context.root)
            .args(arguments)
            .output()
            .context("cannot start rustc")?;
        Ok(String::from_utf8(output.stdout)?)
    };
    let root = ask(&["--print", "sysroot"])?;
    let version = ask(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc does not say its host")?;
    let folder = Path::new(root.trim())
        .join("lib/rustlib")
        .join(host)
        .join("bin");
    if !folder.join("llvm-cov").is_file() {
        bail!("no LLVM tools: `rustup component add llvm-tools` installs them");
    }
    Ok(folder)
}

/// Replays the seeds and the corpora in programs that count what they run, and prints a table of the files.
fn coverage(context: &Context) -> Result<()> {
    let tools = llvm_tools(context)?;
    let home = home(context);
    let profiles = home.join("profiles");
    if profiles.exists() {
        std::fs::remove_dir_all(&profiles)?;
    }
    let folder = home.join("coverage");
    let mut programs = Vec::new();
    for package in PACKAGES {
        visibly(&mut build(context, package, MEASURE, &folder))?;
        let program = folder.join("fuzz").join(package);
        visibly(
            Command::new(&program)
                .current_dir(&context.root)
                .env("LLVM_PROFILE_FILE", profiles.join("%p.profraw"))
                .arg("--once")
                .arg("--state")
                .arg(home.join("state")),
        )?;
        programs.push(program);
    }
    let merged = home.join("merged.profdata");
    visibly(
        Command::new(tools.join("llvm-profdata"))
            .args(["merge", "-sparse", "-o"])
            .arg(&merged)
            .arg(&profiles),
    )?;
    let mut export = Command::new(tools.join("llvm-cov"));
    export
        .args(["export", "-summary-only", "-instr-profile"])
        .arg(&merged);
    for program in &programs {
        export.arg("-object").arg(program);
    }
    let output = export.output().context("llvm-cov")?;
    if !output.status.success() {
        bail!(
            "llvm-cov failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let report: Value = serde_json::from_slice(&output.stdout).context("llvm-cov's report")?;
    for line in table(&report, &context.root) {
        println!("{line}");
    }
    Ok(())
}

/// Makes a table, as Markdown, of the files of the crates of which anything was run.
fn table(report: &Value, root: &Path) -> Vec<String> {
    let files = report["data"][0]["files"].as_array();
    let mut rows = Vec::new();
    let mut sums = [0; 4];
    for file in files.into_iter().flatten() {
        let name = Path::new(file["filename"].as_str().unwrap_or_default());
        // A module that is compiled into two crates has a path through the other one.
        let name = name.canonicalize().unwrap_or_else(|_| name.to_owned());
        let Ok(name) = name.strip_prefix(root.join("crates")) else {
            continue;
        };
        let number = |kind: &str, what: &str| file["summary"][kind][what].as_u64().unwrap_or(0);
        let counts = [
            number("lines", "covered"),
            number("lines", "count"),
            number("regions", "covered"),
            number("regions", "count"),
        ];
        if counts[0] > 0 {
            rows.push(row(&name.display().to_string(), counts));
            sums.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
        }
    }
    rows.sort();
    let mut lines = vec![
        "| File | Lines | Regions |".to_owned(),
        "| --- | ---: | ---: |".to_owned(),
    ];
    lines.append(&mut rows);
    lines.push(row("**all**", sums));
    lines
}

fn row(name: &str, [lines, of_lines, regions, of_regions]: [u64; 4]) -> String {
    let share = |part: u64, whole: u64| format!("{} % of {whole}", part * 100 / whole.max(1));
    format!(
        "| {name} | {} | {} |",
        share(lines, of_lines),
        share(regions, of_regions)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_files_of_the_crates_that_were_run() {
        let file = |name: &str, lines: u64| {
            serde_json::json!({ "filename": name, "summary": {
                "lines": { "covered": lines, "count": 40 },
                "regions": { "covered": 1, "count": 3 },
            }})
        };
        let files = [
            file("/r/crates/b/src/x.rs", 10),
            file("/r/crates/a/src/y.rs", 30),
            file("/r/crates/a/src/z.rs", 0),
            file("/elsewhere/crates/w.rs", 30),
        ];
        let report = serde_json::json!({ "data": [{ "files": files }] });
        let lines = table(&report, Path::new("/r"));
        assert_eq!(
            lines[2..],
            [
                "| a/src/y.rs | 75 % of 40 | 33 % of 3 |",
                "| b/src/x.rs | 25 % of 40 | 33 % of 3 |",
                "| **all** | 50 % of 80 | 33 % of 6 |",
            ]
        );
    }
}
