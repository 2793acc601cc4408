//! A software RNIC without I/O.
//!
//! The verbs objects (protection domains, memory regions and windows, completion
//! queues, shared receive queues, queue pairs) and the state machines that turn
//! work requests into FPDUs and FPDUs into completions. Nothing here opens a
//! socket, takes a lock, reads a clock or draws a random number: those arrive as
//! arguments, so that a socket, a simulator, a fuzzer and later a kernel drive
//! the same code.
//!
//! * [`memory`] — the STag table, what memory is, and (in `span` and the kinds of memory) the crate's only `unsafe`.
//! * [`cq`], [`receive_queue`] — queues that several queue pairs share.
//! * [`tags`] — buffers of a shared receive queue that messages are matched with.
//! * [`qp`] — one queue pair: posting, transmitting (`qp::tx`), receiving (`qp::rx`).
//! * [`startup`] — MPA start-up, which comes before a queue pair has its stream.
//!
//! Memory is allocated when objects are created. The paths that a peer or a work
//! request drives allocate nothing, and none of them can panic.
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

/// Whether a call has done all of its work. Calls are bounded, so that locks are not held for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Work {
    /// All of it.
    Done,
    /// A part. Call again; locks may be dropped before that.
    More,
}
