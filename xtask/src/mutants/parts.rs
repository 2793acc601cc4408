//! The parts of the tree that are mutated, and the tests that run for each mutant.
//!
//! A mutant should take seconds, so only the fast tests of the crate run first. The slow tests run
//! only for the mutants that survive the fast ones. The simulator would take even longer, so it
//! does not run.

/// A part of the tree.
pub(crate) struct Part {
    /// The name for `--part`.
    pub(crate) name: &'static str,
    /// The package that is mutated.
    pub(crate) package: &'static str,
    /// Globs of the files that are mutated.
    pub(crate) files: &'static [&'static str],
    /// The packages whose tests run.
    pub(crate) test_packages: &'static [&'static str],
    /// Arguments of cargo that choose the test programs. Other programs are not compiled.
    pub(crate) programs: &'static [&'static str],
    /// Parts of the names of tests that run only for mutants that survive all other tests.
    pub(crate) slow: &'static [&'static str],
    /// Parts of the names of tests that never run.
    pub(crate) skip: &'static [&'static str],
}

/// All parts, the quick ones first.
pub(crate) const PARTS: &[Part] = &[
    Part {
        name: "proto",
        package: "iwarp-proto",
        files: &["crates/iwarp-proto/src/**/*.rs"],
        test_packages: &["iwarp-proto"],
        programs: &["--lib", "--tests"],
        slow: &[],
        skip: &[],
    },
    Part {
        name: "rnic",
        package: "iwarp-rnic",
        files: &["crates/iwarp-rnic/src/**/*.rs"],
        test_packages: &["iwarp-rnic"],
        programs: &["--lib"],
        slow: &[],
        // A test for races that takes longer than all other tests together.
        skip: &["stress_tests::no_access_sees"],
    },
    Part {
        name: "runtime",
        package: "iwarp",
        files: &[
            "crates/iwarp/src/connection/**/*.rs",
            "crates/iwarp/src/device/*.rs",
            "crates/iwarp/src/engine/answers.rs",
            "crates/iwarp/src/engine/baton.rs",
            "crates/iwarp/src/engine/busy_poll.rs",
            "crates/iwarp/src/engine/lease.rs",
            "crates/iwarp/src/engine/parker.rs",
            "crates/iwarp/src/engine/policy.rs",
            "crates/iwarp/src/engine/pollers.rs",
            "crates/iwarp/src/engine/slots.rs",
            "crates/iwarp/src/engine/wakers.rs",
            "crates/iwarp/src/engine/yield_pacing.rs",
            "crates/iwarp/src/by_number/**/*.rs",
            "crates/iwarp/src/cm/**/*.rs",
            "crates/iwarp/src/conn/**/*.rs",
            "crates/iwarp/src/inject/**/*.rs",
            "crates/iwarp/src/objects/**/*.rs",
            "crates/iwarp/src/tags.rs",
            "crates/iwarp/src/ud/**/*.rs",
            "crates/iwarp/src/verbs/*.rs",
            "crates/iwarp/src/xrc.rs",
        ],
        test_packages: &["iwarp"],
        programs: &["--lib", "--test=it"],
        slow: &[
            "channel::",
            "connection_awaits::",
            "connection_misuse::",
            "datagrams::",
            "driving::",
            "engines::",
            "faults_",
            "guess::",
            "hardware::",
            "lossy::",
            "numbered::",
            "on_demand::",
            "outage::",
            "resolve::",
            "service::",
            "siw_replay::",
            "stat::",
            "tags::",
            "tokio::",
            "values::",
            "waiting::",
            "xrc::",
        ],
        // These tests compile programs.
        skip: &["examples::"],
    },
    Part {
        name: "cp",
        package: "iwarp-cp",
        files: &["crates/iwarp-cp/src/*.rs"],
        test_packages: &["iwarp-cp", "iwarp-cli"],
        programs: &["--lib", "--test=it"],
        slow: &["cp_serve::", "crowds::"],
        // Tests of other commands.
        skip: &[
            "alignment::",
            "bundle::",
            "diagnosis::",
            "iproute2::",
            "loading::",
            "perf::",
            "ping::",
            "stat::",
            "sysfs::",
            "tshark::",
        ],
    },
];
