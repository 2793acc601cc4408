//! The engine as a Linux kernel module sees it.
//!
//! C code drives `iwarp-rnic` through the `rk_*` functions of this crate, and this crate calls the `iwarp_*` functions that the C code
//! brings along. `kernel/engine.h` declares both sides. All `unsafe` of the Rust side of a kernel module is here:
//! [`runtime`] (allocator, panic handler, CRC, completions), [`device`] (memory table), [`queue_pair`], [`octets`] (its stream),
//! [`area`] (what it needs for that), and [`startup`] (MPA).
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
pub mod octets;
#[allow(unsafe_code)]
pub mod queue_pair;
#[allow(unsafe_code)]
pub mod runtime;
#[allow(unsafe_code)]
pub mod startup;
