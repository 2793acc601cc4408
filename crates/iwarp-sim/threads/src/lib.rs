//! The runtime's engine, its progress threads, leases, batons and hand-overs, under a scheduler
//! that selects which thread runs, with a virtual clock.
//!
//! `loom` explores all interleavings of the smallest protocols, but not of all of them together.
//! Here the room `engine` of `crates/iwarp` is compiled unchanged, with the locks and atomics of
//! [`shuttle`] and a simulated operating system (descriptors, sets, clock). A seed selects
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
