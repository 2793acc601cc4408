//! Fuzz targets that need the runtime, sockets or files, and so are slower than those of `iwarp-fuzz`.
//!
//! The modules of the `iwarp` command are compiled into this program, because a command has no library. What is behind the C interface is
//! in `iwarp-verbs` itself, and only there if `cargo xtask fuzz` builds it.

#![allow(dead_code, reason = "targets use a part of the modules")]

#[path = "../../../crates/iwarp-cli/src/error.rs"]
mod error;
#[path = "../../../crates/iwarp-cli/src/text.rs"]
mod text;
#[path = "../../../crates/iwarp-cli/src/units.rs"]
mod units;

mod copy;
mod cp;
mod measure;
mod perf;
mod service;
mod sockets;

use std::process::ExitCode;

use iwarp_fuzz_engine::{Suite, Target};

/// All targets.
const TARGETS: &[Target] = &[
    Target {
        name: "cp-message",
        run: copy::message,
        len_max: 512,
    },
    Target {
        name: "cp-session",
        run: copy::session,
        len_max: 1024,
    },
    Target {
        name: "perf",
        run: measure::message,
        len_max: 1024,
    },
    Target {
        name: "perf-control",
        run: measure::control,
        len_max: 1024,
    },
    Target {
        name: "rsocket-calls",
        run: sockets::calls,
        len_max: 256,
    },
    #[cfg(fuzzing)]
    Target {
        name: "verbs",
        run: iwarp_verbs::fuzzing::verbs,
        len_max: 2048,
    },
];

fn main() -> ExitCode {
    let code = iwarp_fuzz_engine::main(&Suite {
        targets: TARGETS,
        seeds: concat!(env!("CARGO_MANIFEST_DIR"), "/seeds"),
    });
    copy::end();
    code
}
