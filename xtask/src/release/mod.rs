//! `cargo xtask release`: the checks before a release, in addition to `cargo xtask test`.
//!
//! The checks run on the packages that the registry would serve, unpacked outside of the workspace
//! ([`packed`]): they see neither the workspace's lock file nor files that are not packaged.
//! `RELEASING.md` names the commands in the order of a release.

mod api;
mod checks;
mod notes;
mod packed;
mod programs;
mod publish;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use crate::tools;
use packed::Packed;
use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::Log;

/// How many lines of a failing check's log are shown.
const TAIL_LINES: usize = 60;

/// Arguments of `cargo xtask release`.
#[derive(Args)]
pub(crate) struct ReleaseArgs {
    /// Run only these checks, in the usual order
    #[arg(long, value_name = "CHECK", num_args = 1..)]
    only: Vec<String>,
    /// Do not run these checks
    #[arg(long, value_name = "CHECK", num_args = 1.., conflicts_with = "only")]
    skip: Vec<String>,
    /// List the checks with descriptions
    #[arg(long)]
    list: bool,
    /// The tag of the release, such as v0.1.0: version and changelog must agree with it, and no
    /// check may be skipped
    #[arg(long)]
    tag: Option<String>,
    /// The commit or tag with whose interface `semver` compares [default: the last release]
    #[arg(long, value_name = "REVISION")]
    baseline: Option<String>,
    /// Check a work tree with changes that are not committed
    #[arg(long)]
    allow_dirty: bool,
    /// Do not install missing tools and toolchains
    #[arg(long)]
    no_install: bool,
}

/// What the checks work on.
struct Release<'a> {
    context: Context,
    packed: Packed,
    args: &'a ReleaseArgs,
}

/// A check of a release.
struct Check {
    /// The name for `--only`.
    name: &'static str,
    /// A line that describes what is checked.
    about: &'static str,
    run: fn(&Release<'_>, &mut Log) -> Result<Outcome>,
}

/// Far above what a check takes on two processors, so that only a check that hangs reaches it.
const LIMIT: Duration = Duration::from_secs(90 * 60);

/// All checks, the quick ones first.
const CHECKS: &[Check] = &[
    Check {
        name: "notes",
        about: "tag, versions and changelog agree",
        run: notes::run,
    },
    Check {
        name: "programs",
        about: "programs outside of the workspace run on the packaged crates",
        run: programs::run,
    },
    Check {
        name: "features",
        about: "every combination of features compiles without warnings (cargo-hack)",
        run: checks::features,
    },
    Check {
        name: "oldest",
        about: "the packages compile with the oldest supported Rust",
        run: checks::oldest,
    },
    Check {
        name: "minimal",
        about: "the packages compile with the oldest versions of their dependencies",
        run: checks::minimal,
    },
    Check {
        name: "docs",
        about: "the documentation builds as on docs.rs",
        run: checks::docs,
    },
    Check {
        name: "semver",
        about: "the version allows the changes of the interface (cargo-semver-checks)",
        run: api::run,
    },
    Check {
        name: "publish",
        about: "a dry run of publishing all packages, in order, each compiled",
        run: publish::run,
    },
];

/// Runs the chosen checks. Returns `true` if none failed.
///
/// # Errors
/// If a check's name is unknown, or if the crates cannot be packaged.
pub(crate) fn command(args: &ReleaseArgs) -> Result<bool> {
    if args.list {
        for check in CHECKS {
            println!("{:10} {}", check.name, check.about);
        }
        return Ok(true);
    }
    let checks = choose(args)?;
    let context = Context::new(false, !args.no_install)?;
    let mut log = Log::create(&context.log_dir().join("release.log"), LIMIT)?;
    log.print("==> packages\n");
    let packed = Packed::new(&context, &mut log).inspect_err(|_| show_tail(&log))?;
    let release = Release {
        context,
        packed,
        args,
    };
    let mut failed = Vec::new();
    for check in checks {
        if !release.run(check)? {
            failed.push(check.name);
        }
    }
    if failed.is_empty() {
        println!("all checks passed");
    } else {
        println!("FAILED: {}", failed.join(", "));
    }
    Ok(failed.is_empty())
}

impl Release<'_> {
    /// Runs a check and prints its result. Returns `false` if it failed.
    fn run(&self, check: &Check) -> Result<bool> {
        let path = self
            .context
            .log_dir()
            .join(format!("release-{}.log", check.name));
        let mut log = Log::create(&path, LIMIT)?;
        log.print(&format!("==> {}: {}\n", check.name, check.about));
        let start = Instant::now();
        let result = (check.run)(self, &mut log);
        let seconds = start.elapsed().as_secs();
        match result {
            Ok(Outcome::Passed) => log.show(format!("passed in {seconds} s")),
            Ok(Outcome::Skipped(why)) if self.args.tag.is_none() => {
                log.show(format!("skipped: {why}"));
            }
            Ok(Outcome::Skipped(why)) => {
                log.show(format!("FAILED: a release needs this check: {why}"));
                return Ok(false);
            }
            Err(error) => {
                show_tail(&log);
                log.say(format!("error: {error:#}"));
                log.show(format!("FAILED after {seconds} s"));
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Prints the end of a log.
fn show_tail(log: &Log) {
    let (path, tail) = (log.path().display(), log.tail(TAIL_LINES));
    println!("--- last lines of {path}\n{tail}\n---");
}

/// Returns the checks that the arguments select.
fn choose(args: &ReleaseArgs) -> Result<Vec<&'static Check>> {
    for name in args.only.iter().chain(&args.skip) {
        if !CHECKS.iter().any(|check| check.name == *name) {
            bail!("there is no check {name}: see cargo xtask release --list");
        }
    }
    let named = |names: &[String], check: &Check| names.iter().any(|name| name == check.name);
    let chosen = CHECKS.iter().filter(|check| {
        (args.only.is_empty() || named(&args.only, check)) && !named(&args.skip, check)
    });
    Ok(chosen.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ReleaseArgs,
    }

    fn chosen(words: &[&str]) -> Result<Vec<&'static str>> {
        let args = Cli::parse_from(std::iter::once(&"release").chain(words)).args;
        Ok(choose(&args)?.iter().map(|check| check.name).collect())
    }

    #[test]
    fn checks_are_chosen_by_name() {
        assert_eq!(chosen(&[]).unwrap().len(), CHECKS.len());
        assert_eq!(
            chosen(&["--only", "semver", "notes"]).unwrap(),
            ["notes", "semver"]
        );
        assert!(!chosen(&["--skip", "docs"]).unwrap().contains(&"docs"));
        let error = chosen(&["--skip", "nothing"]).unwrap_err().to_string();
        assert!(error.contains("nothing"), "{error}");
    }
}
