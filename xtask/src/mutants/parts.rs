//! The parts of the tree in which mutants are made, and the tests that judge each.
//!
//! A mutant should cost seconds, so the tests are the fast ones of the crate itself. Those that
//! survive these meet its slow tests, too, which would take too long for each. The simulator, which
//! kills many of them as well, takes longer than all of these.

/// A part of the tree.
pub(crate) struct Part {
    /// The name for `--part`.
    pub(crate) name: &'static str,
    /// The package whose files are changed.
    pub(crate) package: &'static str,
    /// Globs of the files that are changed.
    pub(crate) files: &'static [&'static str],
    /// The packages whose tests are run.
    pub(crate) test_packages: &'static [&'static str],
    /// Arguments of cargo that choose the test programs. Others are not even compiled.
    pub(crate) programs: &'static [&'static str],
    /// Tests that run only for the mutants that survive all others, by parts of their names.
    pub(crate) slow: &'static [&'static str],
    /// Tests that are left out, by parts of their names.
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
        // A test of races that takes longer than all others.
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
        // They compile programs.
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
