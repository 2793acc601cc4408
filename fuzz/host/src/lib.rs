//! Fuzz targets that need the runtime, sockets or files, which makes them slower than those of
//! `iwarp-fuzz`.
//!
//! Modules of the `iwarp` command are compiled into this crate, because a binary crate cannot be a
//! dependency. The targets of `iwarp cp` and of the C API are in the crates `iwarp-cp` and
//! `iwarp-verbs`, and are compiled only by `cargo xtask fuzz`. The programs are in `fuzz_targets/`.

#![allow(dead_code, reason = "targets use only a part of the modules")]

pub mod measure;
mod perf;
pub mod sockets;
