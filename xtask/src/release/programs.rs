//! The check `programs`: programs outside of the workspace use the packaged crates, in three
//! styles: spawned tasks, threads, and blocking calls.
//!
//! Each program is a project of its own, as a user's would be: its manifest names the crates by
//! version, cargo selects the newest versions of all dependencies, and only the features that it
//! asks for are enabled. What it prints must equal its `expected.txt`.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::Release;
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

/// Builds and runs all programs.
pub(super) fn run(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    let target = release.context.target.join("xtask-release/programs");
    for program in &release.packed.programs {
        let mut build = cargo(&program.folder);
        build.env("CARGO_TARGET_DIR", &target).arg("build");
        log.run(build.args(release.packed.patches()))?;
        let text = log.run_and_read(&mut Command::new(target.join("debug").join(&program.name)))?;
        // The first line of the log is the command.
        let (_, printed) = text.split_once('\n').unwrap_or_default();
        let file = program.folder.join("expected.txt");
        let expected = fs::read_to_string(&file)
            .with_context(|| format!("{} has no expected.txt", program.name))?;
        if printed != expected {
            bail!("{} printed\n{printed}instead of\n{expected}", program.name);
        }
        log.say(format!("{} printed what it should", program.name));
    }
    Ok(Outcome::Passed)
}
