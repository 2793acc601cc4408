//! The table of steps, and the steps that consist of little more than one cargo command.

use std::time::Duration;

use anyhow::{Result, bail};

use xtask::context::Context;
use xtask::kernel;
use xtask::outcome::Outcome;
use xtask::packages;
use xtask::process::{Log, cargo, program, tests_passed};
use xtask::release_builds;

use crate::{
    compliance, deb, fuzz, lessons, licences, miri, mutants, no_std, package, spelling, targets,
    tidy,
};

/// A step of `cargo xtask test`.
pub(crate) struct Step {
    /// The name for `--only`.
    pub(crate) name: &'static str,
    /// A line that describes what the step checks.
    pub(crate) about: &'static str,
    /// The time limit. It is much longer than the step takes, so only a hanging step reaches it.
    pub(crate) limit: Duration,
    /// The lane in which the step runs.
    pub(crate) lane: Lane,
    /// Runs the step.
    pub(crate) run: fn(&Context, &mut Log) -> Result<Outcome>,
}

/// Determines which steps may run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Steps that run before all others, which need their results.
    First,
    /// Steps that run one after another.
    Main,
    /// Steps that run one after another, in parallel with the main lane and at a low priority. They
    /// use the processor time that waiting tests leave. Each builds in a target folder or with a
    /// profile of its own, because cargo locks the folder of a profile. What such a step checks
    /// must not depend on the processor time that it gets.
    Beside,
}

const fn minutes(count: u64) -> Duration {
    Duration::from_secs(count * 60)
}

/// The package whose program tests the distribution's programs.
pub(crate) const CONFORMANCE: &str = "iwarp-conformance";
/// The package whose program runs the benchmarks.
pub(crate) const BENCH: &str = "iwarp-bench-driver";

/// All steps, the quick ones first.
pub(crate) const STEPS: &[Step] = &[
    Step {
        name: "packages",
        about: "the programs that other steps need are installed",
        limit: minutes(10),
        lane: Lane::First,
        run: packages::run,
    },
    Step {
        name: "fmt",
        about: "the code is formatted as by rustfmt",
        limit: minutes(5),
        lane: Lane::Main,
        run: fmt,
    },
    Step {
        name: "tidy",
        about: "rules for the files of the repository that no compiler checks",
        limit: minutes(5),
        lane: Lane::Main,
        run: tidy::run,
    },
    Step {
        name: "spelling",
        about: "no common misspellings",
        limit: minutes(5),
        lane: Lane::Main,
        run: spelling::run,
    },
    Step {
        name: "deny",
        about: "licences and sources of all dependencies",
        limit: minutes(5),
        lane: Lane::Main,
        run: licences::run,
    },
    Step {
        name: "compliance",
        about: "RFC quotations are correct, and no requirement is missing",
        limit: minutes(5),
        lane: Lane::Main,
        run: compliance::run,
    },
    Step {
        name: "clippy",
        about: "no lint warnings",
        limit: minutes(20),
        lane: Lane::Main,
        run: clippy,
    },
    Step {
        name: "doc",
        about: "the documentation builds without warnings",
        limit: minutes(20),
        lane: Lane::Main,
        run: doc,
    },
    Step {
        name: "unit",
        about: "all tests and documentation examples",
        limit: minutes(30),
        lane: Lane::Main,
        run: unit,
    },
    Step {
        name: "programs",
        about: "the programs that later steps run can be built",
        limit: minutes(20),
        lane: Lane::Beside,
        run: programs,
    },
    Step {
        name: "loom",
        about: "model check of the wake-up protocol",
        limit: minutes(30),
        lane: Lane::Beside,
        run: loom,
    },
    Step {
        name: "miri",
        about: "no undefined behaviour in the protocol, and where requests are cancelled",
        limit: minutes(60),
        lane: Lane::Beside,
        run: miri::run,
    },
    Step {
        name: "no-std",
        about: "protocol and engine need no standard library",
        limit: minutes(10),
        lane: Lane::Beside,
        run: no_std::run,
    },
    Step {
        name: "kernel",
        about: "the engine's object is fit for a Linux kernel",
        limit: minutes(20),
        lane: Lane::Main,
        run: kernel::run,
    },
    Step {
        name: "targets",
        about: "everything compiles for aarch64 and for musl",
        limit: minutes(20),
        lane: Lane::Beside,
        run: targets::run,
    },
    Step {
        name: "package",
        about: "crates can be packaged for the registry",
        limit: minutes(5),
        lane: Lane::Main,
        run: package::run,
    },
    Step {
        name: "apps",
        about: "the distribution's programs run on our libraries",
        limit: minutes(30),
        lane: Lane::Main,
        run: apps,
    },
    Step {
        name: "hostile",
        about: "servers serve a good client while a peer violates the protocol",
        limit: minutes(10),
        lane: Lane::Main,
        run: hostile,
    },
    Step {
        name: "module",
        about: "the distribution's programs run on the kernel module, in an emulated machine",
        limit: minutes(15),
        lane: Lane::Main,
        run: module,
    },
    // After `apps`, which has compiled the same libraries.
    Step {
        name: "soak",
        about: "64 busy connections survive killed processes, lost links and missing descriptors",
        limit: minutes(10),
        lane: Lane::Main,
        run: soak,
    },
    // After `apps`, which has compiled the same programs in release mode.
    Step {
        name: "lessons",
        about: "the commands of the course print what its lessons show",
        limit: minutes(20),
        lane: Lane::Main,
        run: lessons::step,
    },
    Step {
        name: "deb",
        about: "the Debian package contains the right files",
        limit: minutes(20),
        lane: Lane::Main,
        run: deb::step,
    },
    Step {
        name: "fuzz-smoke",
        about: "a short fuzzing run finds no failing input",
        limit: minutes(10),
        lane: Lane::Main,
        run: fuzz::step,
    },
    Step {
        name: "mutants",
        about: "tests detect small changes of the code (a sample of mutants)",
        limit: minutes(10),
        lane: Lane::Beside,
        run: mutants::step,
    },
    Step {
        name: "instructions",
        about: "fixed workloads take no more instructions than recorded",
        limit: minutes(15),
        lane: Lane::Main,
        run: instructions,
    },
    Step {
        name: "sim",
        about: "random verbs programs on a faulty network, and faults at every octet of set-up",
        limit: minutes(30),
        lane: Lane::Main,
        run: sim,
    },
];

fn fmt(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run(cargo(&context.root).args(["fmt", "--all", "--check"]))?;
    // The probe is not a member of the workspace, so `--all` does not format it.
    log.run(cargo(&context.root.join(no_std::PROBE)).args(["fmt", "--check"]))?;
    Ok(Outcome::Passed)
}

fn clippy(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run(cargo(&context.root).args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    Ok(Outcome::Passed)
}

fn doc(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run(
        cargo(&context.root)
            .env("RUSTDOCFLAGS", "-Dwarnings")
            .args(["doc", "--workspace", "--no-deps"]),
    )?;
    Ok(Outcome::Passed)
}

/// The variable with the number of tests that a test program runs at a time.
const TEST_THREADS: &str = "RUST_TEST_THREADS";
/// Tests that run in addition to one per processor. The slow tests use no processor: they wait, for
/// example, until the time of a connection expires.
const WAITING_TESTS: usize = 6;

fn unit(context: &Context, log: &mut Log) -> Result<Outcome> {
    let mut command = cargo(&context.root);
    command.args(["test", "--workspace", "--no-fail-fast"]);
    if std::env::var_os(TEST_THREADS).is_none() {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        command.env(TEST_THREADS, (processors + WAITING_TESTS).to_string());
    }
    require_tools(&mut command);
    let result = log.run_and_read(&mut command);
    let text = match &result {
        Ok(text) => text.clone(),
        Err(_) => log.tail(usize::MAX),
    };
    for line in interesting_lines(&text) {
        log.show(line);
    }
    // The output of a failing test may be far before the end of the log, so it is printed here.
    for line in failures(&text) {
        log.show(line);
    }
    let ran = tests_passed(&result?);
    if ran == 0 {
        bail!("no test ran");
    }
    log.say(format!("{ran} tests passed"));
    Ok(Outcome::Passed)
}

/// Sets the variables that make tests fail, instead of skipping themselves, if they do not find a
/// program that is installed here.
fn require_tools(command: &mut std::process::Command) {
    if packages::have("tshark") {
        command.env("IWARP_REQUIRE_TSHARK", "1");
    }
    let rdma = [
        "ibverbs-utils",
        "rdmacm-utils",
        "perftest",
        "libibverbs-dev",
        "librdmacm-dev",
    ];
    if rdma.into_iter().all(packages::have) {
        command.env("IWARP_REQUIRE_RDMA_TOOLS", "1");
    }
    let mut namespaces = std::process::Command::new("unshare");
    namespaces.args(["--user", "--map-root-user", "--net", "true"]);
    let allowed = namespaces
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if allowed && packages::have("iproute2") {
        command.env("IWARP_REQUIRE_NAMESPACES", "1");
    }
}

/// The protocol between threads that drive sockets, which the model checks named `loom_…` test.
const BATON: &str = "crates/iwarp/src/engine/baton.rs";

fn loom(context: &Context, log: &mut Log) -> Result<Outcome> {
    if !context.has(BATON) {
        return Ok(Outcome::Skipped(format!("there is no {BATON} yet")));
    }
    let text = log.run_and_read(
        cargo(&context.root)
            .env("RUSTFLAGS", "--cfg loom")
            .env("CARGO_TARGET_DIR", context.target.join("loom"))
            // The tests take seconds, but link-time optimisation would take a minute.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .args(["test", "--package", "iwarp", "--lib", "--release", "loom_"]),
    )?;
    at_least_one_test(log, &text)
}

/// Builds what later steps run, by the same commands, while tests of the main lane wait.
fn programs(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run(&mut release_builds::installation(context))?;
    log.run(&mut release_builds::instructions(context))?;
    log.run(&mut release_builds::simulator(context))?;
    // The step `unit` locks the folder of this profile only while it compiles.
    for package in [CONFORMANCE, BENCH] {
        log.run(cargo(&context.root).args(["build", "--package", package]))?;
    }
    Ok(Outcome::Passed)
}

fn apps(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run_program(program(&context.root, CONFORMANCE).args(["apps", "--step"]))
}

fn hostile(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run_program(program(&context.root, CONFORMANCE).args(["hostile", "--quick"]))
}

fn module(context: &Context, log: &mut Log) -> Result<Outcome> {
    let words = ["kernel", "test", "--step", "--with", "itself", "--few"];
    log.run_program(program(&context.root, CONFORMANCE).args(words))
}

fn soak(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run_program(program(&context.root, CONFORMANCE).args(["soak", "--step"]))
}

fn instructions(context: &Context, log: &mut Log) -> Result<Outcome> {
    log.run_program(program(&context.root, BENCH).args(["instructions", "--step"]))
}

fn sim(context: &Context, log: &mut Log) -> Result<Outcome> {
    if !context.has("crates/iwarp-sim/src/main.rs") {
        return Ok(Outcome::Skipped("iwarp-sim has no program yet".into()));
    }
    let seeds = if context.quick { "1000" } else { "10000" };
    // With `--reach`, the log contains a table of what the seeds reached.
    for words in [&["--setup"][..], &["--reach", "--seeds", seeds]] {
        let package = ["run", "--release", "--package", "iwarp-sim", "--"];
        let text = log.run_and_read(cargo(&context.root).args(package).args(words))?;
        for line in text.lines().filter(|line| is_result_of_sim(line)) {
            log.show(line);
        }
    }
    Ok(Outcome::Passed)
}

/// Returns `true` for the summary lines of the simulator.
fn is_result_of_sim(line: &str) -> bool {
    [" seeds are dull", " passed, ", " failed in "]
        .iter()
        .any(|words| line.contains(words))
}

/// Fails if no test ran, because cargo succeeds if a filter matches no test.
fn at_least_one_test(log: &mut Log, text: &str) -> Result<Outcome> {
    let ran = tests_passed(text);
    if ran == 0 {
        bail!("no test ran");
    }
    log.say(format!("{ran} tests passed"));
    Ok(Outcome::Passed)
}

/// How many lines of the output of failing tests are shown. The log contains all lines.
const FAILURE_LINES: usize = 300;

/// Returns the lines of cargo test's output that name a test program, its result, or a test that
/// hung.
fn interesting_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| {
        line.starts_with("test result:")
            || line.starts_with("Running ")
            || line.starts_with("Doc-tests ")
            || line.starts_with("hung: ")
    })
}

/// Returns the output of failing tests: the lines from `failures:` to the result of their program.
fn failures(text: &str) -> Vec<&str> {
    let mut inside = false;
    let mut out = Vec::new();
    for line in text.lines() {
        inside = match line {
            "failures:" => true,
            _ if line.starts_with("test result:") => false,
            _ => inside,
        };
        if inside {
            out.push(line);
        }
    }
    out.truncate(FAILURE_LINES);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
     Running unittests src/lib.rs (target/debug/deps/x-1)
running 3 tests
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
   Doc-tests x
test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out
";

    #[test]
    fn passed_tests_are_added_up() {
        assert_eq!(tests_passed(OUTPUT), 5);
        assert_eq!(tests_passed("running 0 tests\n"), 0);
        assert_eq!(tests_passed("test result: passed\n"), 0);
    }

    #[test]
    fn only_headings_and_results_are_shown() {
        let lines: Vec<_> = interesting_lines(OUTPUT).collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("Running"));
        assert!(lines[3].contains("2 passed; 1 failed"));
        let hung = "hung: test a of x-1 has been running for 300 s";
        assert_eq!(interesting_lines(hung).collect::<Vec<_>>(), [hung]);
    }

    #[test]
    fn output_of_failed_tests_is_found() {
        let text = "running 2 tests\ntest a ... FAILED\n\nfailures:\n\n---- a stdout ----\nboom\n\n\
            failures:\n    a\n\ntest result: FAILED. 1 passed; 1 failed\nafter\n";
        let lines = failures(text);
        assert_eq!(lines.first(), Some(&"failures:"));
        assert!(lines.contains(&"boom") && lines.contains(&"    a"));
        assert!(!lines.contains(&"after") && !lines.contains(&"running 2 tests"));
        assert!(failures(OUTPUT).is_empty());
    }

    #[test]
    fn packages_are_needed_by_steps() {
        for (package, steps) in packages::needs() {
            for need in steps {
                assert!(
                    STEPS.iter().any(|step| step.name == *need),
                    "{package} needs no step {need}"
                );
            }
        }
    }

    #[test]
    fn names_are_unique() {
        for (i, step) in STEPS.iter().enumerate() {
            assert!(
                STEPS[..i].iter().all(|other| other.name != step.name),
                "{} twice",
                step.name
            );
        }
    }
}
