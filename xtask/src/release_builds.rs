//! The builds in release mode. The step `programs` runs all of them early, beside the tests, and
//! later steps find the programs built. Cargo compiles again if a later command selects other
//! packages or flags, so each command is in one place.

use std::process::Command;

use crate::context::Context;
use crate::process::cargo;

/// The package of the command `iwarp`.
pub const COMMAND: &str = "iwarp-cli";
/// The packages of the programs and libraries in an installation.
pub const INSTALLED: [&str; 4] = [COMMAND, "iwarp-verbs", "iwarp-rspreload", "iwarp-paths"];

/// Returns the command that builds what an installation contains.
#[must_use]
pub fn installation(context: &Context) -> Command {
    build(context, &INSTALLED)
}

/// Returns the command that builds the simulator.
#[must_use]
pub fn simulator(context: &Context) -> Command {
    build(context, &["iwarp-sim"])
}

/// The program with the workloads whose instructions are counted.
pub const INSTRUCTIONS: &str = "iwarp-instructions";

/// Returns the command that builds [`INSTRUCTIONS`].
#[must_use]
pub fn instructions(context: &Context) -> Command {
    let mut command = build(context, &["iwarp-bench"]);
    // The caller's compiler flags would change every count.
    command
        .env_remove("RUSTFLAGS")
        .args(["--bin", INSTRUCTIONS]);
    command
}

fn build(context: &Context, packages: &[&str]) -> Command {
    let mut command = cargo(&context.root);
    command.args(["build", "--release"]);
    for name in packages {
        command.args(["--package", name]);
    }
    command
}
