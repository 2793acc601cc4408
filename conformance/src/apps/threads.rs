//! ThreadSanitizer: runs our C programs with instrumented libraries.
//!
//! ThreadSanitizer does not see the synchronization in an uninstrumented standard library, so
//! Rust's standard library is instrumented, too (`-Zbuild-std`). This needs a nightly toolchain
//! with rust-src. The programs use the C compiler's sanitizer runtime.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use xtask::context::Context;

use super::checked::{host, start};
use super::checks::expect;
use super::stage::Stage;
use crate::case::{Case, Verdict};

/// C programs of crates/iwarp-verbs/tests/c. Both ends are threads of one process.
const OWN: [&str; 7] = [
    "exchange",
    "connected_by_number",
    "datagrams",
    "solicited",
    "unreliable",
    "xrc",
    "misuse",
];
const FLAGS: &str = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer";
const SHIM: &str = include_str!("tsan_shim.c");
/// Suppressions of false positives, with reasons.
const KNOWN: &str = include_str!("tsan.supp");

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        Case::new("ThreadSanitizer", "own programs", sanitized)
            .needs(&["libibverbs-dev", "librdmacm-dev"])
            .long()
            .limit(1800),
    ]
}

fn sanitized(stage: &Stage) -> Result<Verdict> {
    if !has_source()? {
        return Ok(Verdict::skipped(
            "no nightly toolchain with the component rust-src",
        ));
    }
    if !has_runtime()? {
        return Ok(Verdict::skipped("the C compiler has no libtsan"));
    }
    let library = stage.dir().join("libiwarp_verbs.so");
    std::fs::copy(build()?, &library)?;
    let known = stage.dir().join("tsan.supp");
    std::fs::write(&known, KNOWN)?;
    let library = library.display().to_string();
    let options = format!("suppressions={} exitcode=66", known.display());
    let variables = [
        ("IWARP_LIBRARY", library.as_str()),
        ("TSAN_OPTIONS", options.as_str()),
    ];
    for name in OWN {
        let program = compile(stage, name)?;
        let said = start(stage, (&variables, &[]), &[&program, "rnic"])?.success()?;
        expect(&said, " checks, 0 failed")?;
    }
    Ok(Verdict::passed(format!("{} programs, no race", OWN.len())))
}

/// Returns a command of the nightly toolchain. Removes the variables that select the toolchain of
/// this program.
fn nightly(program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", program]);
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

fn has_source() -> Result<bool> {
    let Ok(answer) = nightly("rustc").args(["--print", "sysroot"]).output() else {
        return Ok(false);
    };
    let root = String::from_utf8(answer.stdout)?;
    Ok(answer.status.success()
        && Path::new(root.trim())
            .join("lib/rustlib/src/rust/library/std")
            .exists())
}

fn has_runtime() -> Result<bool> {
    let answer = Command::new("cc")
        .arg("-print-file-name=libtsan.so")
        .output()
        .context("the C compiler")?;
    // If the library is not installed, the compiler prints its name without a directory.
    Ok(Path::new(String::from_utf8_lossy(&answer.stdout).trim()).is_absolute())
}

fn build() -> Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let target = std::path::absolute(target.join("tsan"))?;
    let host = host()?;
    let built = nightly("cargo")
        .args(["build", "-Zbuild-std", "--package", "iwarp-verbs"])
        .args(["--target", &host, "--target-dir"])
        .arg(&target)
        .env("RUSTFLAGS", FLAGS)
        .output()
        .context("starting cargo")?;
    if !built.status.success() {
        bail!(
            "the instrumented library cannot be built: {}",
            String::from_utf8_lossy(&built.stderr)
        );
    }
    Ok(target.join(host).join("debug/libiwarp_verbs.so"))
}

/// Compiles one of our own programs with the sanitizer.
fn compile(stage: &Stage, name: &str) -> Result<String> {
    let shim = stage.dir().join("tsan_shim.c");
    std::fs::write(&shim, SHIM)?;
    let object = shim.with_extension("o");
    run(Command::new("cc")
        .args(["-O1", "-fno-builtin", "-c", "-o"])
        .args([&object, &shim]))?;
    let source = Context::new(false, false)?
        .root
        .join("crates/iwarp-verbs/tests/c")
        .join(format!("{name}.c"));
    let program = stage.dir().join(name);
    run(Command::new("cc")
        .args(["-fsanitize=thread", "-pthread", "-g", "-O1", "-rdynamic"])
        .arg("-o")
        .args([&program, &source, &object])
        .arg("-L")
        .arg(stage.libraries())
        .args(["-l:libibverbs.so.1", "-l:librdmacm.so.1"]))?;
    Ok(program.display().to_string())
}

fn run(command: &mut Command) -> Result<()> {
    let out = command.output().context("the C compiler")?;
    if !out.status.success() {
        bail!("{}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(())
}
