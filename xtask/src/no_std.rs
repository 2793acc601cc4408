//! The step `no-std`: `iwarp-proto` and `iwarp-rnic` need `core` and `alloc` only.
//!
//! There are three checks, from weak to strong:
//!
//! - The libraries and the probe, a program that links nothing else, contain no symbol of `std`.
//! - The probe links without any other library, and runs.
//! - Both crates build for every installed target without `std` or with 32-bit pointers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use xtask::context::{Context, find_program};
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

/// The program that links both crates and nothing else.
pub(crate) const PROBE: &str = "xtask/no-std-probe";
const CRATES: &[&str] = &["iwarp-proto", "iwarp-rnic"];

/// Runs the checks that this machine can run. Skips if it can run none.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    let mut proven = Vec::new();
    for target in other_targets(log) {
        build_for(context, log, &target)?;
        proven.push(format!("both crates build for {target}"));
    }
    if cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        let target_dir = context.target.join("no-std");
        let program = build_probe(context, log, &target_dir)?;
        log.run(&mut Command::new(&program))?;
        proven.push("a program of both without any library links and runs".to_owned());
        let mut files = libraries(&target_dir.join("release/deps"))?;
        if files.len() < CRATES.len() {
            bail!(
                "cannot find the compiled libraries of {}",
                CRATES.join(" and ")
            );
        }
        files.push(program);
        if find_program("nm").is_some() {
            for file in &files {
                no_std_symbols(log, file)?;
            }
            proven.push(format!("no symbol of std in {} files", files.len()));
        } else {
            log.say("nm is not installed, so the symbols were not checked");
        }
    }
    if proven.is_empty() {
        return Ok(Outcome::Skipped(
            "needs x86-64 Linux or an installed bare target".into(),
        ));
    }
    for line in &proven {
        log.say(line);
    }
    Ok(Outcome::Passed)
}

fn build_probe(context: &Context, log: &mut Log, target_dir: &Path) -> Result<PathBuf> {
    let probe = context.root.join(PROBE);
    // Remove the libraries of earlier builds, so that only the symbols of this build are checked.
    let old = target_dir.join("release");
    if old.exists() {
        std::fs::remove_dir_all(&old)
            .with_context(|| format!("cannot remove {}", old.display()))?;
    }
    // Use the same versions as the workspace. cargo removes the entries that the probe does not
    // need.
    std::fs::copy(context.root.join("Cargo.lock"), probe.join("Cargo.lock"))
        .context("cannot copy Cargo.lock")?;
    log.run(
        cargo(&probe)
            .env("CARGO_TARGET_DIR", target_dir)
            .args(["rustc", "--release", "--", "-C", "relocation-model=static"])
            .args(
                ["-nostartfiles", "-nostdlib", "-static"]
                    .iter()
                    .flat_map(|arg| ["-C".to_owned(), format!("link-arg={arg}")]),
            ),
    )?;
    Ok(target_dir.join("release/no-std-probe"))
}

fn build_for(context: &Context, log: &mut Log, target: &str) -> Result<()> {
    let mut command = cargo(&context.root);
    command
        .env("CARGO_TARGET_DIR", context.target.join("no-std"))
        .args(["build", "--target", target]);
    for name in CRATES {
        command.args(["--package", name]);
    }
    log.run(&mut command)
}

/// Returns the installed targets without an operating system and those with pointers of 32 bits.
fn other_targets(log: &mut Log) -> Vec<String> {
    let mut rustup = Command::new("rustup");
    let Ok(output) = rustup.args(["target", "list", "--installed"]).output() else {
        log.line("rustup is not installed, so other targets are unknown");
        return Vec::new();
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .map(str::trim)
        .filter(|target| is_bare_or_narrow(target))
        .map(str::to_owned)
        .collect()
}

fn is_bare_or_narrow(target: &str) -> bool {
    let narrow = [
        "i586", "i686", "arm", "thumb", "mips-", "mipsel-", "riscv32", "powerpc-", "wasm32",
    ];
    target.contains("-none") || narrow.iter().any(|start| target.starts_with(start))
}

/// Returns the compiled libraries of both crates.
fn libraries(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let ours = CRATES
            .iter()
            .any(|krate| name.starts_with(&format!("lib{}-", krate.replace('-', "_"))));
        if ours && name.ends_with(".rlib") {
            found.push(path);
        }
    }
    Ok(found)
}

fn no_std_symbols(log: &mut Log, file: &Path) -> Result<()> {
    let output = Command::new("nm")
        .args(["-C", "--format=posix"])
        .arg(file)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    log.line(format!(
        "{}: {} symbols",
        file.display(),
        text.lines().count()
    ));
    if text.lines().count() == 0 {
        bail!("nm sees no symbols in {}", file.display());
    }
    let bad: Vec<&str> = text.lines().filter(|line| names_std(line)).collect();
    for line in &bad {
        log.line(line);
    }
    if !bad.is_empty() {
        bail!("{} symbols of std in {}", bad.len(), file.display());
    }
    Ok(())
}

/// Returns `true` if a demangled symbol names something in `std`.
fn names_std(symbol: &str) -> bool {
    symbol.match_indices("std::").any(|(at, _)| {
        let before = symbol[..at].chars().next_back();
        // `mystd::` and `a::std::` are other crates and modules.
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn std_symbols_are_recognized() {
        assert!(names_std("std::io::Write::write_all T 0 0"));
        assert!(names_std("<std::io::Error as core::fmt::Debug>::fmt T 0 0"));
        assert!(!names_std("core::fmt::write T 0 0"));
        assert!(!names_std("no_std::probe T 0 0"));
        assert!(!names_std("probe::std::x T 0 0"));
    }

    #[test]
    fn bare_and_narrow_targets_are_chosen() {
        assert!(
            is_bare_or_narrow("thumbv7em-none-eabihf") && is_bare_or_narrow("x86_64-unknown-none")
        );
        assert!(is_bare_or_narrow("i686-unknown-linux-gnu"));
        assert!(
            !is_bare_or_narrow("x86_64-unknown-linux-gnu")
                && !is_bare_or_narrow("aarch64-apple-darwin")
        );
    }
}
