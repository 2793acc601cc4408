//! `cargo xtask deb --test`: installs the package in a fresh Debian root, uses it as an ordinary
//! user, removes it, and compares the files before and after.

use std::fs;
use std::path::Path;

use anyhow::Result;
use xtask::context::Context;
use xtask::process::Log;

use super::PACKAGING;
use crate::roots::{self, Kind, Root, USER};

/// The packages in the root: a verbs program, and the programs that read manual pages, units and
/// completions.
const PACKAGES: &str = "perftest,man-db,systemd,bash-completion,procps";

/// Runs the trial and prints the output of all programs.
///
/// # Errors
/// If a script fails, or if the package leaves files behind.
pub(super) fn run(context: &Context, log: &mut Log, package: &Path, suite: &str) -> Result<()> {
    let kind = Kind {
        suite,
        foreign: None,
        packages: PACKAGES,
    };
    let root = Root::create(log, &context.target.join("deb"), &kind)?;
    fs::copy(package, root.path.join("tmp/iwarp.deb"))?;
    let before = root.files()?;
    let run = |log: &mut Log, user: &str, name: &str| {
        let script = context.root.join(PACKAGING).join("trial").join(name);
        root.run(log, user, &script, &["/tmp/iwarp.deb"])
    };
    run(log, "root", "install.sh")?;
    let installed = root.files()?;
    run(log, USER, "use.sh")?;
    run(log, "root", "remove.sh")?;
    let after = root.files()?;
    roots::compare(&before, &after)?;
    log.say(format!(
        "{} files before, {} installed, {} after removal, which are the same as before",
        before.len(),
        installed.len(),
        after.len()
    ));
    root.remove()
}
