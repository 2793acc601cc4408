//! Runs the runtime's engine (progress threads, leases, batons and hand-overs) under a
//! deterministic scheduler of threads, with a virtual clock.
//!
//! `loom` explores all interleavings of each small protocol, but not of the whole engine. This
//! crate compiles the room `engine` of `crates/iwarp` unchanged, with the locks and atomics of
//! [`shuttle`] and a simulated operating system (descriptors, epoll sets, clock). A seed determines
//! the programs, the messages and the order of the threads. `tests/threads.rs` runs seeds.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "only a part of the runtime's modules is used"
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
