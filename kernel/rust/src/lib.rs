//! The C interface of the engine, for a Linux kernel module.
//!
//! C code drives `iwarp-rnic` through the `rk_*` functions of this crate, and provides the
//! `iwarp_*` functions that the crate calls. `kernel/engine.h` declares both. All the `unsafe` code
//! on the Rust side is in this crate: [`runtime`] (allocator, panic handler, CRC, completions),
//! [`device`] (memory table), [`queue_pair`], [`stream`] (sending and receiving), [`area`] (the
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
