//! Fuzz targets that need the runtime, sockets or files, and so are slower than those of
//! `iwarp-fuzz`.
//!
//! The modules of the `iwarp` command are compiled into this crate, because a command has no
//! library. The targets of `iwarp cp` and of the C interface are in `iwarp-cp` and `iwarp-verbs`
//! themselves, and exist only if `cargo xtask fuzz` builds them. The programs are in
//! `fuzz_targets/`.

#![allow(dead_code, reason = "targets use a part of the modules")]

pub mod measure;
mod perf;
pub mod sockets;
