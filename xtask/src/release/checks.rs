//! The checks that compile the workspace of the unpacked packages: all combinations of features,
//! the oldest compiler, the oldest dependencies, and the documentation.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::packed::text;
use super::{Release, tools};
use xtask::outcome::Outcome;
use xtask::process::Log;

/// Version and hashes of cargo-hack.
const HACK: &str = "xtask/cargo-hack.txt";

/// The check `features`.
pub(super) fn features(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    let (context, packed) = (&release.context, &release.packed);
    let Some(program) = tools::from_python(context, log, "cargo-hack", HACK)? else {
        return Ok(Outcome::Skipped("cargo-hack is not installed".into()));
    };
    packed.forget_versions()?;
    let mut hack = tools::command(&program, &packed.workspace);
    packed.set_environment(context, &mut hack);
    hack.args([
        "hack",
        "check",
        "--workspace",
        "--feature-powerset",
        "--keep-going",
    ]);
    let output = log.run_and_read(&mut hack)?;
    let combinations = output
        .lines()
        .filter(|line| line.starts_with("info: running "))
        .count();
    if combinations < packed.crates.len() {
        bail!("cargo-hack ran only {combinations} times");
    }
    log.say(format!("{combinations} combinations"));
    Ok(Outcome::Passed)
}

/// The check `oldest`. Cargo selects dependencies that support this compiler, because they are
/// selected anew and the manifests name it.
pub(super) fn oldest(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    let versions: BTreeSet<&str> = release
        .packed
        .crates
        .iter()
        .map(|package| text(&package.metadata, "rust_version"))
        .collect::<Result<_>>()?;
    let (1, Some(version)) = (versions.len(), versions.first()) else {
        bail!("the crates name several oldest versions of Rust: {versions:?}");
    };
    // `1.89` may be any release of that series to rustup, but users may have the first one.
    let dots = version.matches('.').count();
    let version = format!("{version}{}", if dots == 1 { ".0" } else { "" });
    let is_installed = || {
        let found = toolchain(&version, "rustc").arg("--version").output();
        found.is_ok_and(|output| output.status.success())
    };
    if !is_installed() && release.context.install {
        let mut install = Command::new("rustup");
        install.args(["toolchain", "install", "--profile", "minimal", &version]);
        if let Err(error) = log.run(&mut install) {
            log.say(format!("cannot install Rust {version}: {error:#}"));
        }
    }
    if !is_installed() {
        return Ok(Outcome::Skipped(format!("Rust {version} is not installed")));
    }
    release.packed.forget_versions()?;
    let mut check = toolchain(&version, "cargo");
    check.current_dir(&release.packed.workspace);
    release.packed.set_environment(&release.context, &mut check);
    // An old compiler may warn about what a newer one accepts.
    check.env_remove("RUSTFLAGS");
    log.run(check.args(["check", "--workspace", "--all-features"]))?;
    log.say(format!("Rust {version}"));
    Ok(Outcome::Passed)
}

/// Returns a command that runs a program of another toolchain.
fn toolchain(version: &str, program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", version, program]);
    // These variables refer to the toolchain that runs this program.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

/// The check `minimal`. Only the direct dependencies are as old as the manifests allow: indirect
/// ones are the responsibility of the crates that name them.
pub(super) fn minimal(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    let (context, packed) = (&release.context, &release.packed);
    packed.forget_versions()?;
    let mut lock = packed.cargo(context);
    // The option is unstable. The variable allows it for this command, which compiles nothing.
    lock.env("RUSTC_BOOTSTRAP", "1");
    log.run(lock.args(["generate-lockfile", "-Z", "direct-minimal-versions"]))?;
    let mut check = packed.cargo(context);
    let result = log.run(check.args(["check", "--workspace", "--all-features", "--locked"]));
    packed.forget_versions()?;
    result.context(
        "raise the version that Cargo.toml requires of the dependency that lacks something",
    )?;
    Ok(Outcome::Passed)
}

/// The check `docs`. The documentation service uses a nightly compiler, so `cfg(docsrs)` may enable
/// unstable features of rustdoc.
pub(super) fn docs(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    for package in &release.packed.crates {
        let settings = &package.metadata["metadata"]["docs"]["rs"];
        let mut doc = release.packed.cargo(&release.context);
        doc.args(["doc", "--no-deps", "--lib", "--package", &package.name])
            .env("RUSTDOCFLAGS", "--cfg docsrs -Dwarnings")
            .env("RUSTC_BOOTSTRAP", package.name.replace('-', "_"));
        if settings["all-features"] == true {
            doc.arg("--all-features");
        }
        let targets = package.metadata["targets"].as_array();
        let is_library = |target: &serde_json::Value| {
            let kinds = target["kind"].as_array();
            kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind == "lib"))
        };
        if targets.is_some_and(|targets| targets.iter().any(is_library)) {
            log.run(&mut doc)?;
        }
    }
    Ok(Outcome::Passed)
}
