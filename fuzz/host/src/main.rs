//! Fuzz targets that need the runtime, sockets or files, and so are slower than those of `iwarp-fuzz`.
//!
//! The modules of the `iwarp` command are compiled into this program, because a command has no library. Those of `iwarp cp`
//! and of the C interface are in `iwarp-cp` and `iwarp-verbs` themselves, and only there if `cargo xtask fuzz` builds them.

#![allow(dead_code, reason = "targets use a part of the modules")]

mod measure;
mod perf;
mod sockets;

use std::process::ExitCode;

use iwarp_fuzz_engine::{Suite, Target};

/// All targets.
const TARGETS: &[Target] = &[
    #[cfg(fuzzing)]
    Target {
        name: "cp-message",
        run: iwarp_cp::fuzzing::message,
        len_max: 512,
    },
    #[cfg(fuzzing)]
    Target {
        name: "cp-session",
        run: iwarp_cp::fuzzing::session,
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
    #[cfg(fuzzing)]
    iwarp_cp::fuzzing::end();
    code
}
