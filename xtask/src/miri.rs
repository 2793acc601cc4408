//! The step `miri`: what needs no system call runs under Miri, which notices undefined behaviour
//! and races.
//!
//! Miri is a component of nightly toolchains (`rustup component add miri rust-src --toolchain
//! nightly`). It interprets, so tests of it are the smallest that there are: the protocol's own,
//! those of the engine but for its long random runs, and those of the lock-free parts of the
//! runtime. What opens sockets or maps memory is left out.

use std::process::Command;

use anyhow::{Result, bail};

use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::{Log, tests_passed};

/// Packages and the filters of their tests.
const RUNS: &[(&str, &[&str])] = &[
    ("iwarp-proto", &[]),
    ("iwarp-rnic", ENGINE),
    ("iwarp", &["engine::slots", "engine::baton", "connection::"]),
];

/// The parts of the engine whose tests take minutes there, and not hours.
const ENGINE: &[&str] = &[
    "boxed",
    "list",
    "storage",
    "cq::",
    "receive_queue",
    "memory::host",
    "memory::table",
    "memory::span",
];

/// Makes a command of Miri. The toolchain that runs this program is another one, so its own cargo
/// does not do.
fn miri() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri"]);
    // They name the other toolchain.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

/// Returns `true` if there is a nightly toolchain with Miri.
fn is_there() -> bool {
    let version = miri().arg("--version").output();
    version.is_ok_and(|output| output.status.success())
}

/// Runs the step.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    if !is_there() {
        return Ok(Outcome::Skipped(
            "no nightly toolchain with the component miri".into(),
        ));
    }
    let mut ran = 0;
    for (package, filters) in RUNS {
        let mut command = miri();
        command
            .current_dir(&context.root)
            // Seeds come from the system, and the folder for cases that failed is looked for. Tests
            // of the engine leave memory of peers.
            .env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-ignore-leaks")
            .env("PROPTEST_CASES", "1")
            .env("CARGO_TARGET_DIR", context.target.join("miri"))
            .args(["test", "--lib", "--package", package, "--"])
            .args(*filters);
        let text = log.run_and_read(&mut command)?;
        ran += tests_passed(&text);
    }
    if ran == 0 {
        bail!("no test ran");
    }
    log.say(format!("{ran} tests passed"));
    Ok(Outcome::Passed)
}
