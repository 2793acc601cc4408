//! `cargo xtask mutants`: cargo-mutants changes the code in small ways. Each changed program (a
//! mutant) should fail a test.
//!
//! If a mutant passes all tests (it survives), a test is missing, or the mutant is equivalent: it
//! behaves like the original. Equivalent mutants are listed with reasons in [`equivalents::LIST`].
//! Any other survivor is a failure.

mod equivalents;
mod parts;
mod tool;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use xtask::context::Context;
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::Log;

use equivalents::{Equivalents, LIST, Names};
use parts::{PARTS, Part};
use tool::Tool;

/// Arguments of `cargo xtask mutants`.
#[derive(Args)]
pub(crate) struct MutantsArgs {
    /// Only mutate these parts of the tree: proto, rnic, runtime, cp [default: all]
    #[arg(long, value_name = "PART", num_args = 1..)]
    part: Vec<String>,
    /// Only mutate files that match these globs (see the option --file of cargo-mutants)
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    files: Vec<String>,
    /// Only run a sample of about this many mutants of each part
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    sample: Option<u64>,
    /// Number of the sample. Successive numbers have no mutant in common until all have been run
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// List the mutants instead of running them
    #[arg(long)]
    list: bool,
}

/// Results of a part's mutants.
#[derive(Default)]
struct Figures {
    caught: usize,
    timeouts: usize,
    /// Mutants that do not compile.
    unviable: usize,
    equivalent: usize,
    missed: Vec<String>,
    /// Mutants that a test killed, although they are in the list of equivalents.
    killed_equivalents: Vec<String>,
}

/// Time limit of the command. A complete run takes hours.
const LIMIT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Stops each test program at its first failed test. On a stable toolchain, test programs accept
/// the option for that only with `RUSTC_BOOTSTRAP`. The key is the same as in `.cargo/config.toml`,
/// because Cargo joins the values of one key, but refuses two keys that apply.
const FAIL_FAST: &str =
    "--cargo-arg=--config=target.'cfg(target_os = \"linux\")'.runner=['env', 'RUSTC_BOOTSTRAP=1']";

/// Part, files and sample size of the step of `cargo xtask test`. The files compile and test within
/// seconds. They rarely change, so the step usually runs the same mutants.
const STEP: (&str, &[&str], u64) = (
    "proto",
    &[
        "crates/iwarp-proto/src/ddp/stag.rs",
        "crates/iwarp-proto/src/ddp/opcode.rs",
        "crates/iwarp-proto/src/wire.rs",
    ],
    3,
);

/// Runs `cargo xtask mutants`. Returns `false` if there is a survivor, or if the list of
/// equivalents is wrong.
///
/// # Errors
/// If cargo-mutants cannot run, or if tests fail without a mutant.
pub(crate) fn command(args: &MutantsArgs) -> Result<bool> {
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("mutants.log"), LIMIT)?;
    match run(&context, &mut log, args)? {
        Some(good) => Ok(good),
        None => {
            println!("skipped: cargo-mutants is not installed, and installing it failed");
            Ok(true)
        }
    }
}

/// The step `mutants`: a sample, the same on every machine.
pub(crate) fn step(context: &Context, log: &mut Log) -> Result<Outcome> {
    let (part, files, sample) = STEP;
    let args = MutantsArgs {
        part: vec![part.to_owned()],
        files: files.iter().map(|&glob| glob.to_owned()).collect(),
        sample: Some(sample),
        seed: 0,
        list: false,
    };
    match run(context, log, &args)? {
        Some(true) => Ok(Outcome::Passed),
        Some(false) => bail!("a mutant survived, or {LIST} is wrong"),
        None => Ok(Outcome::Skipped("cargo-mutants is not installed".into())),
    }
}

fn run(context: &Context, log: &mut Log, args: &MutantsArgs) -> Result<Option<bool>> {
    let parts = choose(&args.part)?;
    let Some(tool) = Tool::new(context, log)? else {
        return Ok(None);
    };
    let list = Equivalents::parse(&files::read(&context.root, LIST)?)?;
    let mut good = up_to_date(&tool, log, &list)?;
    let mut ran = 0;
    for part in parts {
        let chosen: Vec<&str> = match args.files.is_empty() {
            true => part.files.to_vec(),
            false => args.files.iter().map(String::as_str).collect(),
        };
        let all = listed(log, &mut select(&tool, part, &chosen))?;
        if all.is_empty() {
            continue;
        }
        let shard = shard(all.len() as u64, args.sample, args.seed);
        let mut command = select(&tool, part, &chosen);
        command.args(["--sharding=round-robin", &format!("--shard={shard}")]);
        if args.list {
            for name in listed(log, &mut command)? {
                println!("{name}");
            }
            continue;
        }
        let figures = measure(&tool, log, part, command, &list)?;
        figures.show(log, part.name, all.len());
        ran += figures.ran();
        good &= figures.missed.is_empty() && figures.killed_equivalents.is_empty();
    }
    if ran == 0 && !args.list {
        bail!("there are no mutants in these files");
    }
    Ok(Some(good))
}

fn choose(names: &[String]) -> Result<Vec<&'static Part>> {
    if let Some(name) = names.iter().find(|n| !PARTS.iter().any(|p| p.name == **n)) {
        let known: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        bail!(
            "no part is called {name:?}; there are: {}",
            known.join(", ")
        );
    }
    let wanted = |part: &&Part| names.is_empty() || names.iter().any(|name| name == part.name);
    Ok(PARTS.iter().filter(wanted).collect())
}

/// Returns the shard `k/n` of cargo-mutants that is a sample of about `sample` of `total` mutants.
fn shard(total: u64, sample: Option<u64>, seed: u64) -> String {
    let count = sample.map_or(1, |sample| (total / sample.max(1)).max(1));
    format!("{}/{count}", seed % count)
}

/// Returns the command that mutates these files of a part.
fn select(tool: &Tool, part: &Part, globs: &[&str]) -> Command {
    let mut command = tool.command();
    command.args(["--package", part.package]);
    for glob in globs {
        command.args(["--file", glob]);
    }
    command
}

fn listed(log: &mut Log, command: &mut Command) -> Result<Vec<String>> {
    let text = log.run_and_read(command.args(["--list", "--colors=never", "--level=error"]))?;
    // Standard error may contain a message of Cargo, for example that it waits for a lock.
    let names = text.lines().filter(|line| line.contains(".rs:"));
    Ok(names.map(str::to_owned).collect())
}

/// Checks that each entry of the list is still a mutant.
fn up_to_date(tool: &Tool, log: &mut Log, list: &Equivalents) -> Result<bool> {
    let mut all = Vec::new();
    for part in PARTS {
        all.extend(listed(log, &mut select(tool, part, part.files))?);
    }
    let names = Names::new(&all);
    let outdated: Vec<_> = list.outdated(&names).collect();
    for entry in &outdated {
        log.say(format!("{LIST}: outdated, no such mutant: {entry}"));
    }
    Ok(outdated.is_empty())
}

/// Runs mutants and compares the survivors with the list.
fn measure(
    tool: &Tool,
    log: &mut Log,
    part: &Part,
    command: Command,
    list: &Equivalents,
) -> Result<Figures> {
    // The names depend on all mutants of the part, not only on those that run.
    let names = Names::new(&listed(log, &mut select(tool, part, part.files))?);
    let mut results = run_mutants(tool, log, part, command, part.slow)?;
    let unlisted = |results: &Results| -> Vec<String> {
        let missed = results.missed.iter();
        let unlisted = missed.filter(|name| !list.contain(names.stable(name)));
        unlisted.cloned().collect()
    };
    let survivors = unlisted(&results);
    if !survivors.is_empty() && !part.slow.is_empty() {
        // Select by file as well: version 27 runs mutants of struct fields even if no `--re`
        // matches them.
        let file = |name: &String| name.split(':').next().unwrap_or_default().to_owned();
        let files: BTreeSet<String> = survivors.iter().map(file).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let mut command = select(tool, part, &files);
        for name in &survivors {
            command.args(["--re", &exactly(name)]);
        }
        let mut again = run_mutants(tool, log, part, command, &[])?;
        again.caught.retain(|name| survivors.contains(name));
        again.timeouts.retain(|name| survivors.contains(name));
        results.missed.retain(|name| !again.kills(name));
        results.caught.append(&mut again.caught);
        results.timeouts.append(&mut again.timeouts);
    }
    let caught = results.caught.iter().map(|name| names.stable(name));
    let killed_equivalents = caught.filter(|name| list.contain(name)).map(str::to_owned);
    let survivors = unlisted(&results);
    Ok(Figures {
        caught: results.caught.len(),
        timeouts: results.timeouts.len(),
        unviable: results.unviable.len(),
        equivalent: results.missed.len() - survivors.len(),
        killed_equivalents: killed_equivalents.collect(),
        missed: survivors
            .iter()
            .map(|name| format!("{name}\n    {}", names.stable(name)))
            .collect(),
    })
}

/// Names of mutants, by result.
struct Results {
    caught: Vec<String>,
    missed: Vec<String>,
    timeouts: Vec<String>,
    unviable: Vec<String>,
}

impl Results {
    fn read(dir: &Path) -> Self {
        let read = |name: &str| {
            let text = fs::read_to_string(dir.join(name)).unwrap_or_default();
            text.lines().map(str::to_owned).collect()
        };
        Self {
            caught: read("caught.txt"),
            missed: read("missed.txt"),
            timeouts: read("timeout.txt"),
            unviable: read("unviable.txt"),
        }
    }

    fn is_empty(&self) -> bool {
        let all = [&self.caught, &self.missed, &self.timeouts, &self.unviable];
        all.iter().all(|names| names.is_empty())
    }

    fn kills(&self, name: &String) -> bool {
        self.caught.contains(name) || self.timeouts.contains(name)
    }
}

/// Runs the mutants of a command with the tests of a part, except the tests whose names contain one
/// of `slow`.
fn run_mutants(
    tool: &Tool,
    log: &mut Log,
    part: &Part,
    mut command: Command,
    slow: &[&str],
) -> Result<Results> {
    let out = tool.home.join(format!("out-{}", part.name));
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out)?;
    command.arg("--output").arg(&out).arg("--colors=never");
    command.arg(format!("--test-package={}", part.test_packages.join(",")));
    for word in part.programs {
        command.arg(format!("--cargo-arg={word}"));
    }
    command.args([FAIL_FAST, "--", "--", "-Zunstable-options", "--fail-fast"]);
    let skipped = part.skip.iter().chain(slow);
    command.args(skipped.map(|name| format!("--skip={name}")));
    // The command also fails if a mutant survives. It is an error only without results.
    let result = log.run(&mut command);
    let results = Results::read(&out.join("mutants.out"));
    if results.is_empty() {
        result.context("no mutant ran; check that the tests pass without mutants")?;
    }
    Ok(results)
}

/// Returns a regular expression that matches this text alone.
fn exactly(text: &str) -> String {
    let mut pattern = String::from("^");
    for c in text.chars() {
        // Escape only these characters: a backslash gives other punctuation a special meaning.
        if r".+*?()|[]{}^$\".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('$');
    pattern
}

impl Figures {
    /// Returns the number of mutants that ran or did not compile.
    fn ran(&self) -> usize {
        self.caught + self.timeouts + self.unviable + self.equivalent + self.missed.len()
    }

    /// Returns how many per mille of the mutants were killed, without unviable and equivalent ones.
    fn killed_per_mille(&self) -> Option<usize> {
        let killed = self.caught + self.timeouts;
        (1000 * killed).checked_div(killed + self.missed.len())
    }

    fn show(&self, log: &mut Log, part: &str, all: usize) {
        for name in &self.missed {
            log.say(format!("survived: {name}"));
        }
        for name in &self.killed_equivalents {
            log.say(format!("{LIST}: not equivalent, a test kills it: {name}"));
        }
        let killed = self.killed_per_mille().unwrap_or(1000);
        log.say(format!(
            "{part}: {} of {all} mutants: {} caught, {} missed, {} unviable, {} timeouts, \
             {} equivalent; {}.{} % killed",
            self.ran(),
            self.caught,
            self.missed.len(),
            self.unviable,
            self.timeouts,
            self.equivalent,
            killed / 10,
            killed % 10,
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successive_samples_are_different_shards() {
        assert_eq!(shard(100, None, 7), "0/1");
        assert_eq!(shard(100, Some(10), 0), "0/10");
        assert_eq!(shard(100, Some(10), 13), "3/10");
        assert_eq!(shard(3, Some(10), 1), "0/1");
        assert_eq!(shard(0, Some(10), 1), "0/1");
    }

    #[test]
    fn mutants_match_whole_names() {
        let name = "a/b.rs:3:5: replace + with - in f<'t>::g";
        assert_eq!(
            exactly(name),
            r"^a/b\.rs:3:5: replace \+ with - in f<'t>::g$"
        );
    }

    #[test]
    fn only_viable_mutants_count() {
        let mut figures = Figures {
            caught: 95,
            timeouts: 2,
            unviable: 50,
            equivalent: 20,
            ..Figures::default()
        };
        assert_eq!(figures.killed_per_mille(), Some(1000));
        figures.missed = vec![String::new(); 3];
        assert_eq!(figures.killed_per_mille(), Some(970));
        assert_eq!(figures.ran(), 170);
    }

    #[test]
    fn list_can_be_read() {
        let root = Context::new(false, false).unwrap().root;
        let text = files::read(&root, LIST).unwrap();
        Equivalents::parse(&text).unwrap();
    }

    #[test]
    fn parts_are_chosen_by_name() {
        assert_eq!(choose(&[]).unwrap().len(), PARTS.len());
        assert_eq!(choose(&["cp".into()]).unwrap()[0].package, "iwarp-cp");
        assert!(choose(&["kernel".into()]).is_err());
    }
}
