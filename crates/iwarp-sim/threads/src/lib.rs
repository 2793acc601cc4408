//! The runtime's engine, its progress threads, leases, batons and hand-overs under a scheduler that
//! decides which thread goes on, and a clock of their own.
//!
//! `loom` looks at all interleavings of the smallest protocols; it cannot hold all of them at once.
//! Here the room `engine` of `crates/iwarp` is compiled in as it is, with the locks and atomics of
//! [`shuttle`] and a made-up operating system (descriptors, sets, clock), and a seed chooses
//! programs, messages and the order of the threads. `tests/threads.rs` runs seeds.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "the modules of the runtime are used in part"
)]

#[path = "../../../iwarp/src/engine/mod.rs"]
mod engine;
mod model;
mod queue;
mod schedule;
mod sync;
mod sys;
mod world;

pub use model::run;
pub use world::Plant;
