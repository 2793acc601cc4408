//! Unmodified RDMA packages from PyPI, with test programs (`wheels/`) that check the transferred
//! data.
//!
//! The versions of the packages and of their dependencies are pinned. pip downloads them into the
//! target directory when a case runs for the first time. If PyPI is unreachable, the case is
//! skipped.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use xtask::context::Context;

use super::checks::{expect, octets_sent};
use super::program::Program;
use super::stage::{Stage, WIRE_V4};
use crate::case::{Case, Verdict};

/// Time limit including the download, in seconds.
const LIMIT_S: u64 = 600;
const NEEDS: &[&str] = &["python3-pip"];
/// Debian's Python. The downloaded packages are built for its version.
const PYTHON: &str = "/usr/bin/python3";
/// The module that the test programs share.
const SHARED: (&str, &str) = ("exchange.py", include_str!("wheels/exchange.py"));
/// The port of a server, as a number and as an argument.
const PORT: u16 = 22345;
const PORT_ARGUMENT: &str = "22345";
/// Minimum number of bytes that the second process must send through our library.
const MIN_BYTES_SENT: u64 = 8 << 20;

struct Wheel {
    /// The package and its dependencies, with versions.
    requirements: &'static [&'static str],
    script: (&'static str, &'static str),
    /// The roles of the two processes, and the arguments of both.
    roles: [&'static str; 2],
    arguments: &'static [&'static str],
    variables: &'static [(&'static str, &'static str)],
    /// Options of `iwarp run`.
    run: &'static [&'static str],
    /// Lines that the second process prints if the data are correct.
    reports: &'static [&'static str],
}

const ROCE: &[&str] = &["--as", "roce", "--bind", WIRE_V4, "--stats"];
const RNIC: &[&str] = &["--sysfs", "--bind", WIRE_V4, "--stats"];

/// The package contains renamed copies of UCX and libibverbs.
const NIXL: Wheel = Wheel {
    requirements: &["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy==2.2.6"],
    script: ("nixl_transfer.py", include_str!("wheels/nixl_transfer.py")),
    roles: ["target", "initiator"],
    arguments: &[],
    variables: &[("UCX_TLS", "rc,self"), ("UCX_NET_DEVICES", "iwarp0:1")],
    run: ROCE,
    reports: &["read, 1: correct", "read, 8388608: correct"],
};

const MOONCAKE: Wheel = Wheel {
    requirements: &["mooncake-transfer-engine-non-cuda==0.3.13.post1"],
    script: (
        "mooncake_transfer.py",
        include_str!("wheels/mooncake_transfer.py"),
    ),
    roles: ["target", "initiator"],
    arguments: &[WIRE_V4, "iwarp0"],
    variables: &[],
    run: ROCE,
    reports: &["read, 1: correct", "read, 8388608: correct"],
};

const INFINISTORE: Wheel = Wheel {
    // infinistore links libuv and uses uvloop's event loop, so both must contain the same version
    // of libuv.
    requirements: &["infinistore==0.2.35", "uvloop==0.21.0", "numpy==2.2.6"],
    script: (
        "infinistore_blocks.py",
        include_str!("wheels/infinistore_blocks.py"),
    ),
    roles: ["server", "client"],
    arguments: &["iwarp0", PORT_ARGUMENT],
    variables: &[],
    run: ROCE,
    reports: &["read: correct"],
};

const DLSLIME: Wheel = Wheel {
    requirements: &["dlslime==0.1.23"],
    script: (
        "dlslime_transfer.py",
        include_str!("wheels/dlslime_transfer.py"),
    ),
    roles: ["target", "initiator"],
    arguments: &["iwarp0"],
    variables: &[],
    run: ROCE,
    // The first process checks the data of Writes and Sends.
    reports: &["read: correct"],
};

pub(super) fn cases() -> Vec<Case<Stage>> {
    let transfer = "transfer engine 0.3.13.post1: Reads and Writes in batches";
    let ud = Wheel {
        variables: &[("UCX_TLS", "ud,self"), ("UCX_NET_DEVICES", "iwarp0:1")],
        ..NIXL
    };
    [
        case(
            "nixl",
            "1.5.1 (UCX 1.23), `--as roce`, `UCX_TLS=rc`: Reads, Writes and a notification",
            NIXL,
        ),
        case("nixl", "`--as roce`, `UCX_TLS=ud`, the same", ud),
        case("mooncake", format!("{transfer}, `--as roce`"), MOONCAKE),
        case(
            "mooncake",
            "the same, `--sysfs`",
            Wheel {
                run: RNIC,
                ..MOONCAKE
            },
        ),
        case(
            "dlslime",
            "0.1.23, `--as roce`: Read, Write, Write with immediate data, Send",
            DLSLIME,
        ),
        case(
            "infinistore",
            "0.2.35, `--as roce`: 256 blocks written and read back",
            INFINISTORE,
        ),
    ]
    .into()
}

fn case(program: &'static str, what: impl Into<String>, wheel: Wheel) -> Case<Stage> {
    Case::new(program, what, move |stage| transfer(stage, &wheel))
        .needs(NEEDS)
        .wire()
        .long()
        .limit(LIMIT_S)
}

/// Runs the two processes. The second one exits when all data have been checked.
fn transfer(stage: &Stage, wheel: &Wheel) -> Result<Verdict> {
    if !install(stage, wheel.requirements)? {
        return Ok(Verdict::skipped("PyPI is unreachable"));
    }
    for (name, text) in [SHARED, wheel.script] {
        std::fs::write(stage.dir().join(name), text)?;
    }
    let [first, second] = wheel.roles;
    let is_server = first == "server";
    let first = start(stage, wheel, first)?;
    if is_server {
        stage.wait_for_port(PORT)?;
    }
    let second = start(stage, wheel, second)?;
    let output = second.success()?;
    for report in wheel.reports {
        expect(&output, report)?;
    }
    let sent: u64 = output.lines().filter_map(octets_sent).sum();
    ensure!(
        sent >= MIN_BYTES_SENT,
        "only {sent} bytes went through our library"
    );
    // A server does not exit by itself.
    if !is_server {
        first.success()?;
    }
    Ok(Verdict::passed(format!("{} MiB sent", sent >> 20)))
}

fn start(stage: &Stage, wheel: &Wheel, role: &str) -> Result<Program> {
    let packages = stage.dir().join("packages").display().to_string();
    let variables = [wheel.variables, &[("PYTHONPATH", packages.as_str())]].concat();
    let mut words = vec![PYTHON, "-B", wheel.script.0, role];
    words.extend(wheel.arguments);
    stage.start_with(wheel.run, None, &variables, &words)
}

/// Installs packages into the case's directory. Returns `false` if they are unavailable.
fn install(stage: &Stage, requirements: &[&str]) -> Result<bool> {
    let cache = Context::new(false, false)?.target.join("wheels");
    std::fs::create_dir_all(&cache)?;
    if unpack(stage, &cache, requirements)? {
        return Ok(true);
    }
    let mut download = pip(&["download", "--no-deps", "--dest"]);
    let downloaded = succeeds(download.arg(&cache).args(requirements))?;
    Ok(downloaded && unpack(stage, &cache, requirements)?)
}

/// Installs packages from the cache. Returns `false` if one is missing in the cache.
fn unpack(stage: &Stage, cache: &PathBuf, requirements: &[&str]) -> Result<bool> {
    let mut install = pip(&["install", "--no-deps", "--no-index", "--find-links"]);
    let folder = stage.dir().join("packages");
    succeeds(
        install
            .arg(cache)
            .arg("--target")
            .arg(folder)
            .args(requirements),
    )
}

fn pip(words: &[&str]) -> Command {
    let mut command = Command::new(PYTHON);
    command
        .args(["-m", "pip", "--quiet", "--disable-pip-version-check"])
        .args(words);
    command
}

fn succeeds(command: &mut Command) -> Result<bool> {
    let status = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    Ok(status.context("cannot start pip")?.success())
}
