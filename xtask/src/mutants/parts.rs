//! The parts of the tree in which mutants are made, and the tests that judge each.
//!
//! A mutant should cost seconds, so the tests are the fast ones of the crate itself, and one more that sees the crate from outside.

/// A part of the tree.
pub(crate) struct Part {
    /// The name for `--part`.
    pub(crate) name: &'static str,
    /// The package whose files are changed.
    pub(crate) package: &'static str,
    /// Globs of the files that are changed.
    pub(crate) files: &'static [&'static str],
    /// Further packages whose tests run.
    pub(crate) judges: &'static [&'static str],
    /// Arguments of cargo that choose the test programs. Others are not even compiled.
    pub(crate) programs: &'static [&'static str],
    /// Tests that are left out, by parts of their names.
    pub(crate) skip: &'static [&'static str],
}

/// All parts, the quick ones first.
pub(crate) const PARTS: &[Part] = &[
    Part {
        name: "proto",
        package: "iwarp-proto",
        files: &["crates/iwarp-proto/src/**/*.rs"],
        judges: &[],
        programs: &["--lib", "--tests"],
        skip: &[],
    },
    Part {
        name: "rnic",
        package: "iwarp-rnic",
        files: &["crates/iwarp-rnic/src/**/*.rs"],
        judges: &["iwarp-sim"],
        programs: &["--lib"],
        // Tests of races and of the simulator's own checkers take most of the time, and do not see more than the others.
        skip: &[
            "stress_tests::no_access_sees",
            "planted",
            "a_seed_is_the_same_run",
        ],
    },
    Part {
        name: "runtime",
        package: "iwarp",
        files: &[
            "crates/iwarp/src/cm.rs",
            "crates/iwarp/src/connection/**/*.rs",
            "crates/iwarp/src/device/*.rs",
            "crates/iwarp/src/memory.rs",
            "crates/iwarp/src/portmap.rs",
            "crates/iwarp/src/progress/*.rs",
            "crates/iwarp/src/raw/**/*.rs",
        ],
        judges: &[],
        programs: &[
            "--lib",
            "--test=connection",
            "--test=portmap",
            "--test=raw",
            "--test=verbs",
        ],
        skip: &[],
    },
    Part {
        name: "cp",
        package: "iwarp-cli",
        files: &["crates/iwarp-cli/src/cp/*.rs"],
        judges: &[],
        programs: &["--bin=iwarp", "--test=cp"],
        skip: &[],
    },
];
