//! Programs under memory checkers: valgrind's memcheck with the normal libraries, and
//! AddressSanitizer with instrumented libraries.
//!
//! Only our programs are checked for leaks, because Debian's programs exit without freeing all
//! memory.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use xtask::context::Context;

use super::checks::{expect, expect_lines};
use super::program::Program;
use super::pyverbs;
use super::stage::Stage;
use crate::case::{Case, Verdict};

const MEMCHECK: [&str; 4] = [
    "valgrind",
    "--tool=memcheck",
    "--quiet",
    "--error-exitcode=99",
];
const LEAKS: [&str; 2] = ["--leak-check=full", "--errors-for-leak-kinds=definite"];
/// Suppressions, with reasons, of known errors in perftest and of a false positive in rustix.
const PERFTEST: &str = include_str!("perftest.supp");
const RUSTIX: &str = include_str!("rustix.supp");
const SANITIZE: &str = "-Zsanitizer=address";
/// C programs of crates/iwarp-verbs/tests/c.
const OWN: [&str; 4] = ["exchange", "misuse", "misuse_cm", "unreliable"];

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        Case::new("valgrind", "`rping`, both ends", |stage| {
            rping(stage, &[], &words(&memcheck(stage, &[RUSTIX])?))
        })
        .needs(&["valgrind", "rdmacm-utils"]),
        Case::new("valgrind", "`ib_write_bw -R`, both ends", |stage| {
            let checker = memcheck(stage, &[RUSTIX, PERFTEST])?;
            write_bw(stage, &[], &words(&checker), 200)
        })
        .needs(&["valgrind", "perftest"]),
        Case::new("valgrind", "own programs, with leaks", |stage| {
            let checker = memcheck(stage, &[RUSTIX])?;
            let checker: Vec<&str> = words(&checker).into_iter().chain(LEAKS).collect();
            own(stage, &[], &checker)
        })
        .needs(&["valgrind", "libibverbs-dev", "librdmacm-dev"]),
        Case::new(
            "AddressSanitizer",
            "`rping`, `ib_write_bw -R`, own programs with leaks, rdma-core's own tests",
            sanitized,
        )
        .needs(&[
            "rdmacm-utils",
            "perftest",
            "libibverbs-dev",
            "librdmacm-dev",
            "python3-pyverbs",
        ])
        .wire()
        .long()
        .limit(900),
    ]
}

/// Returns the command that runs memcheck with these suppressions.
fn memcheck(stage: &Stage, known: &[&str]) -> Result<Vec<String>> {
    let file = stage.dir().join("known.supp");
    std::fs::write(&file, known.concat())?;
    let mut words: Vec<String> = MEMCHECK.map(str::to_owned).to_vec();
    words.push(format!("--suppressions={}", file.display()));
    Ok(words)
}

fn words(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

/// Environment variables, and the checker's command, to which the program is appended.
pub(super) type CheckerSetup<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);

pub(super) fn start(
    stage: &Stage,
    (variables, checker): CheckerSetup<'_>,
    words: &[&str],
) -> Result<Program> {
    let all: Vec<&str> = checker.iter().chain(words).copied().collect();
    stage.start_with(&[], None, variables, &all)
}

/// Runs a server and a client of rping. If the checker finds an error, it makes the program exit
/// with a failure.
fn rping(stage: &Stage, variables: &[(&str, &str)], checker: &[&str]) -> Result<Verdict> {
    let setup = (variables, checker);
    let port = stage.port()?;
    let number = port.to_string();
    let common = ["-a", "127.0.0.1", "-p", &number, "-C", "10", "-V", "-v"];
    let words = |side| -> Vec<&str> { ["rping", side].into_iter().chain(common).collect() };
    let server = start(stage, setup, &words("-s"))?;
    stage.wait_for_port(port)?;
    let said = start(stage, setup, &words("-c"))?.success()?;
    expect_lines(&said, "ping data: rdma-ping-", 10)?;
    let said = server.success()?;
    expect_lines(&said, "server ping data: rdma-ping-", 10)?;
    Ok(Verdict::passed("10 pings, no error"))
}

fn write_bw(
    stage: &Stage,
    variables: &[(&str, &str)],
    checker: &[&str],
    count: u32,
) -> Result<Verdict> {
    let setup = (variables, checker);
    let (port, count) = (stage.port()?, count.to_string());
    let number = port.to_string();
    let words = [
        "ib_write_bw",
        "-R",
        "-F",
        "-d",
        "iwarp0",
        "-p",
        &number,
        "-n",
        &count,
        "-s",
        "65536",
    ];
    let server = start(stage, setup, &words)?;
    stage.wait_for_port(port)?;
    let client: Vec<&str> = words.into_iter().chain(["127.0.0.1"]).collect();
    let said = start(stage, setup, &client)?.success()?;
    expect(&said, "65536")?;
    server.success()?;
    Ok(Verdict::passed(format!("{count} Writes, no error")))
}

/// Compiles and runs our own programs, which print the number of failed checks.
fn own(stage: &Stage, variables: &[(&str, &str)], checker: &[&str]) -> Result<Verdict> {
    let sources = Context::new(false, false)?
        .root
        .join("crates/iwarp-verbs/tests/c");
    for name in OWN {
        let program = stage.dir().join(name);
        let compiled = Command::new("cc")
            .args(["-Wall", "-Wextra", "-pthread", "-g", "-o"])
            .arg(&program)
            .arg(sources.join(format!("{name}.c")))
            .arg("-L")
            .arg(stage.libraries())
            .args(["-l:libibverbs.so.1", "-l:librdmacm.so.1"])
            .output()
            .context("the C compiler")?;
        if !compiled.status.success() {
            bail!("{name}: {}", String::from_utf8_lossy(&compiled.stderr));
        }
        let program = program.display().to_string();
        let said = start(stage, (variables, checker), &[&program])?.success()?;
        expect(&said, " checks, 0 failed")?;
    }
    Ok(Verdict::passed(format!("{} programs, no error", OWN.len())))
}

/// Builds the library with AddressSanitizer and runs all programs with the C compiler's sanitizer
/// runtime preloaded. `RUSTC_BOOTSTRAP` enables the sanitizer in stable Rust.
fn sanitized(stage: &Stage) -> Result<Verdict> {
    let Some(asan_runtime) = asan_runtime()? else {
        return Ok(Verdict::skipped("the C compiler has no libasan"));
    };
    if let Err(why) = probe_instrumentation(stage)? {
        return Ok(Verdict::skipped(why));
    }
    let built = build()?;
    // The programs run as a user that may not be able to read the target directory.
    let library = stage.dir().join("libiwarp_verbs.so");
    std::fs::copy(&built, &library)?;
    let library = library.display().to_string();
    let preload = format!("LD_PRELOAD={}", asan_runtime.display());
    let variables = [("IWARP_LIBRARY", library.as_str())];
    let quiet = ["env", &preload, "ASAN_OPTIONS=detect_leaks=0"];
    let leaks = ["env", &preload, "ASAN_OPTIONS=detect_leaks=1"];
    own(stage, &variables, &leaks)?;
    rping(stage, &variables, &quiet)?;
    write_bw(stage, &variables, &quiet, 1000)?;
    if let Some(why) = pyverbs::unpack(stage)? {
        return Ok(Verdict::skipped(why));
    }
    let python: Vec<&str> = quiet.into_iter().chain(["/usr/bin/python3"]).collect();
    pyverbs::check_ours(&pyverbs::run(stage, &variables, &python)?)?;
    Ok(Verdict::passed("no error"))
}

/// Returns the sanitizer's runtime library, or `None` if it is not installed. Programs that are not
/// instrumented must load it before all other libraries.
fn asan_runtime() -> Result<Option<PathBuf>> {
    let answer = Command::new("cc")
        .arg("-print-file-name=libasan.so")
        .output()
        .context("the C compiler")?;
    let path = PathBuf::from(String::from_utf8_lossy(&answer.stdout).trim());
    // If the library is not installed, the compiler prints its name without a directory.
    Ok(path
        .is_absolute()
        .then(|| path.canonicalize())
        .transpose()?)
}

/// Tries to instrument an empty program. The inner error is the compiler's message if that fails.
fn probe_instrumentation(stage: &Stage) -> Result<Result<(), String>> {
    let source = stage.dir().join("instrumented.rs");
    std::fs::write(&source, "fn main() {}")?;
    let built = Command::new("rustc")
        .args([SANITIZE, "--target", &host()?, "-o"])
        .arg(source.with_extension(""))
        .arg(&source)
        .env("RUSTC_BOOTSTRAP", "1")
        .output()
        .context("starting rustc")?;
    Ok(if built.status.success() {
        Ok(())
    } else {
        let said = String::from_utf8_lossy(&built.stderr);
        let line = said.lines().find(|line| line.starts_with("error"));
        Err(format!(
            "this toolchain cannot instrument programs: {}",
            line.unwrap_or("no reason given")
        ))
    })
}

fn build() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let target = std::path::absolute(target.join("asan"))?;
    let host = host()?;
    // With `--target`, cargo does not apply RUSTFLAGS to build scripts and macros.
    let built = Command::new(cargo)
        .args(["build", "--package", "iwarp-verbs", "--target", &host])
        .arg("--target-dir")
        .arg(&target)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", SANITIZE)
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

pub(super) fn host() -> Result<String> {
    let answer = Command::new("rustc").arg("-vV").output()?;
    String::from_utf8_lossy(&answer.stdout)
        .lines()
        .find_map(|line| line.strip_prefix("host: ").map(str::to_owned))
        .context("no host triple in the output of `rustc -vV`")
}
