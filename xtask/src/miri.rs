//! The step `miri`: runs tests under Miri, which detects undefined behaviour and data races.
//!
//! Miri is a component of nightly toolchains (`rustup component add miri rust-src --toolchain
//! nightly`). It interprets the program and is slow. So it runs only the tests of the protocol
//! crate, the short tests of the engine, and those of the lock-free parts of the runtime. It also
//! runs connections whose futures are cancelled or forgotten at every await: `iwarp-os` has what
//! Miri lacks for that, in its file `miri.rs`.

use std::process::Command;

use anyhow::{Context as _, Result, bail};

use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::{Log, tests_passed};

/// Packages, their test programs, and the filters of their tests.
const RUNS: &[(&str, &[&str], &[&str])] = &[
    ("iwarp-proto", &["--lib"], &[]),
    ("iwarp-rnic", &["--lib"], ENGINE),
    (
        "iwarp",
        &["--lib"],
        &["engine::slots", "engine::baton", "connection::"],
    ),
    ("iwarp", &["--test", "it"], CANCELLED),
];

/// Tests of connections whose futures end early.
const CANCELLED: &[&str] = &[
    "requests_are_cancelled_at_every_await",
    "channels_are_cancelled_at_every_await",
    "setup_is_cancelled_at_every_await",
    "forgotten_requests_keep_their_regions",
];

/// The tests read random seeds and look for a folder with failed cases, which isolation forbids.
/// Tests of the engine leak the memory of simulated peers.
const FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-ignore-leaks";
/// Flags for tests with sockets. Tree borrows allow atomic loads from memory that the program only
/// lends for reading. Miri crashes in its emulation of weak memory if atomic accesses to a place
/// have different sizes.
const SOCKET_FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-tree-borrows \
    -Zmiri-disable-weak-memory-emulation -Zmiri-env-set=IWARP_STAT=off";

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

/// Returns the variable that names the program which starts tests, and its value. The project's own
/// runner (see .cargo/config.toml) would conflict with Miri's.
fn runner() -> Result<(&'static str, String)> {
    let mut which = Command::new("rustup");
    which.args(["which", "--toolchain", "nightly", "cargo-miri"]);
    let output = which.output().context("rustup which")?;
    let path = String::from_utf8(output.stdout)?;
    let name = if cfg!(target_arch = "aarch64") {
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER"
    } else {
        "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER"
    };
    Ok((name, format!("{} runner", path.trim())))
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
    let (runner, program) = runner()?;
    let mut ran = 0;
    for (package, tests, filters) in RUNS {
        let mut command = miri();
        let flags = match *filters == CANCELLED {
            true => SOCKET_FLAGS,
            false => FLAGS,
        };
        command
            .current_dir(&context.root)
            .env("MIRIFLAGS", flags)
            // Miri interprets no assembly.
            .env("RUSTFLAGS", "--cfg rustix_use_libc")
            .env(runner, &program)
            .env("PROPTEST_CASES", "1")
            .env("CARGO_TARGET_DIR", context.target.join("miri"))
            .args(["test", "--package", package])
            .args(*tests)
            .arg("--")
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
