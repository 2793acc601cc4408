//! The step `targets`: the published crates and the shared libraries compile for another
//! architecture and for another C library.
//!
//! The crates are only checked (`cargo check`). Linking would need the target's linker, and running
//! tests would need an emulator.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::package;
use xtask::context::Context;
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

const TARGETS: &[&str] = &["aarch64-unknown-linux-gnu", "x86_64-unknown-linux-musl"];

/// Checks the targets whose standard library is installed. Skips if none is.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    let mut missing = Vec::new();
    for target in TARGETS {
        if !library_folder(target)?.is_dir() {
            missing.push(*target);
            continue;
        }
        let mut command = cargo(&context.root);
        // A separate folder, because the step runs in parallel with other steps.
        command.env("CARGO_TARGET_DIR", context.target.join("targets"));
        command.args(["check", "--target", target]);
        // By default, musl links the C library statically, which excludes shared libraries. Without
        // this flag cargo would skip our shared libraries.
        command.env(flags_variable(target), "-Ctarget-feature=-crt-static");
        for package in package::members(context)?
            .iter()
            .filter(|p| is_for_users(p))
        {
            command.arg("--package");
            command.arg(package["name"].as_str().context("a package has a name")?);
        }
        log.run(&mut command)?;
        log.say(format!("crates and libraries compile for {target}"));
    }
    if missing.is_empty() {
        return Ok(Outcome::Passed);
    }
    let install = format!(
        "no standard library for {}: rustup target add {}",
        missing.join(" and "),
        missing.join(" ")
    );
    if missing.len() == TARGETS.len() {
        return Ok(Outcome::Skipped(install));
    }
    log.say(install);
    Ok(Outcome::Passed)
}

/// Returns `true` for a published crate and for a crate that is built into a shared library.
fn is_for_users(package: &Value) -> bool {
    let is_shared = |target: &Value| target["crate_types"].to_string().contains("\"cdylib\"");
    let mut targets = package["targets"].as_array().into_iter().flatten();
    package::is_published(package) || targets.any(is_shared)
}

/// Returns the folder in which the compiler looks for a target's standard library. The folder may
/// not exist.
pub(crate) fn library_folder(target: &str) -> Result<PathBuf> {
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--print", "target-libdir", "--target", target])
        .output()
        .context("cannot start rustc")?;
    if !output.status.success() {
        bail!("rustc does not know {target}");
    }
    Ok(String::from_utf8(output.stdout)?.trim().into())
}

/// Returns the variable with the compiler's flags for a target.
fn flags_variable(target: &str) -> String {
    let name = target.to_uppercase().replace('-', "_");
    format!("CARGO_TARGET_{name}_RUSTFLAGS")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_knows_the_targets() {
        for target in TARGETS {
            let folder = library_folder(target).unwrap();
            assert!(folder.to_str().unwrap().contains(target), "{folder:?}");
        }
        assert!(library_folder("no-such-target").is_err());
    }

    #[test]
    fn host_library_is_installed() {
        let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        if cfg!(target_env = "gnu") {
            assert!(library_folder(&host).unwrap().is_dir());
        }
    }

    #[test]
    fn cargo_reads_target_flags() {
        assert_eq!(
            flags_variable("x86_64-unknown-linux-musl"),
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS"
        );
    }
}
