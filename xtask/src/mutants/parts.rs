//! The parts of the tree in which mutants are made, and the tests that judge each.
//!
//! A mutant should cost seconds, so the tests are the fast ones of the crate itself. Those that survive these meet more tests, which would take
//! too long for each. The simulator, which kills many of them as well, takes longer than all of these.

/// A part of the tree.
pub(crate) struct Part {
    /// The name for `--part`.
    pub(crate) name: &'static str,
    /// The package whose files are changed.
    pub(crate) package: &'static str,
    /// Globs of the files that are changed.
    pub(crate) files: &'static [&'static str],
    /// Arguments of cargo that choose the test programs. Others are not even compiled.
    pub(crate) programs: &'static [&'static str],
    /// The same for the mutants that survive those.
    pub(crate) more: &'static [&'static str],
    /// Tests that are left out, by parts of their names.
    pub(crate) skip: &'static [&'static str],
}

/// All parts, the quick ones first.
pub(crate) const PARTS: &[Part] = &[
    Part {
        name: "proto",
        package: "iwarp-proto",
        files: &["crates/iwarp-proto/src/**/*.rs"],
        programs: &["--lib", "--tests"],
        more: &[],
        skip: &[],
    },
    Part {
        name: "rnic",
        package: "iwarp-rnic",
        files: &["crates/iwarp-rnic/src/**/*.rs"],
        programs: &["--lib"],
        more: &[],
        // A test of races that takes longer than all others.
        skip: &["stress_tests::no_access_sees"],
    },
    Part {
        name: "runtime",
        package: "iwarp",
        files: &[
            "crates/iwarp/src/connection/**/*.rs",
            "crates/iwarp/src/device/*.rs",
            "crates/iwarp/src/engine/pollers.rs",
            "crates/iwarp/src/progress/*.rs",
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
        programs: &[
            "--lib",
            "--test=connection",
            "--test=portmap",
            "--test=raw",
            "--test=verbs",
        ],
        more: &[
            "--test=channel",
            "--test=connection_awaits",
            "--test=connection_misuse",
            "--test=datagrams",
            "--test=driving",
            "--test=engines",
            "--test=faults_*",
            "--test=lossy",
            "--test=numbered",
            "--test=outage",
            "--test=resolve",
            "--test=service",
            "--test=siw_replay",
            "--test=stat",
            "--test=tags",
            "--test=tokio",
            "--test=values",
            "--test=waiting",
            "--test=xrc",
        ],
        skip: &[],
    },
    Part {
        name: "cp",
        package: "iwarp-cli",
        files: &["crates/iwarp-cli/src/cp/*.rs"],
        programs: &["--bin=iwarp", "--test=cp"],
        more: &["--test=cp_serve", "--test=crowds"],
        skip: &[],
    },
];
