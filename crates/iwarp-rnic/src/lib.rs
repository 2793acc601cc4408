//! A software RNIC without I/O.
//!
//! The verbs objects (protection domains, memory regions and windows, completion queues, shared
//! receive queues, queue pairs) and the state machines that turn work requests into FPDUs and FPDUs
//! into completions. The crate opens no socket, takes no lock, reads no clock and draws no random
//! number: callers pass these in. A socket driver, a simulator, a fuzzer and a kernel module
//! therefore run the same code.
//!
//! * [`memory`] — the STag table and registered memory; most of the crate's `unsafe` is here.
//! * [`cq`], [`receive_queue`] — queues that several queue pairs share.
//! * [`tags`] — tag matching for a shared receive queue.
//! * [`qp`] — one queue pair: posting, transmitting (`qp::tx`), receiving (`qp::rx`).
//! * [`startup`] — MPA start-up, before a queue pair has its stream.
//!
//! Memory is allocated when objects are created. Code paths driven by a peer or by a work request
//! do not allocate and cannot panic.
#![no_std]
#![deny(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod boxed;
pub mod counters;
pub mod cq;
pub mod limits;
mod list;
pub mod memory;
pub mod qp;
pub mod receive_queue;
pub mod startup;
mod storage;
pub mod tags;
mod taken_receive;
pub mod tally;
mod time;
mod verbs;

pub use time::Time;
pub use verbs::*;

/// The allocator refused memory for a new object. Nothing was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocError;

impl core::fmt::Display for AllocError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("out of memory: free objects or ask for smaller queues")
    }
}

impl core::error::Error for AllocError {}

/// Whether a bounded call finished its work. Calls are bounded to keep lock hold times short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Work {
    /// All work is done.
    Done,
    /// Some work is left: call again. Locks may be released in between.
    More,
}
