//! The step `miri`: runs tests under Miri, which detects undefined behaviour and data races.
//!
//! Miri is a component of nightly toolchains (`rustup component add miri rust-src --toolchain
//! nightly`). It interprets the program and is slow. So it runs only the tests of the protocol
//! crate, the short tests of the engine, and those of the lock-free parts of the runtime, but no
//! tests that open sockets or map memory.

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

/// The parts of the engine whose tests take minutes under Miri, and not hours.
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

/// Returns a command that runs `cargo miri` of the nightly toolchain.
fn miri() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri"]);
    // These variables refer to the toolchain that runs this program.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

/// Returns `true` if a nightly toolchain with Miri is installed.
fn is_installed() -> bool {
    let version = miri().arg("--version").output();
    version.is_ok_and(|output| output.status.success())
}

/// Runs the step.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    if !is_installed() {
        return Ok(Outcome::Skipped(
            "no nightly toolchain with the component miri".into(),
        ));
    }
    let mut ran = 0;
    for (package, filters) in RUNS {
        let mut command = miri();
        command
            .current_dir(&context.root)
            // The tests read random seeds and look for a folder with failed cases, which isolation
            // forbids. Tests of the engine leak the memory of simulated peers.
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
