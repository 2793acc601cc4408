//! The engine as a Linux kernel module sees it.
//!
//! C code drives `iwarp-rnic` through the `rk_*` functions of this crate, which call the `iwarp_*`
//! functions that the C code provides. `kernel/engine.h` declares both. This crate contains all
//! the `unsafe` code on the Rust side: [`runtime`] (allocator, panic handler, CRC, completions),
//! [`device`] (memory table), [`queue_pair`], [`stream`] (the queue pair's stream), [`area`] (the
//! work areas that queue pairs borrow while data are in transit), and [`startup`] (MPA).
#![no_std]
#![deny(
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

extern crate alloc;

#[allow(unsafe_code)]
pub mod area;
#[allow(unsafe_code)]
pub mod device;
pub mod error;
#[allow(unsafe_code)]
pub mod queue_pair;
#[allow(unsafe_code)]
pub mod runtime;
#[allow(unsafe_code)]
pub mod startup;
#[allow(unsafe_code)]
pub mod stream;
