//! A program that has no standard library and no C library, and links `iwarp-proto` and `iwarp-rnic`.
//!
//! If either crate, or anything it depends on, needed more than `core` and `alloc`, this would not link. It also runs, so
//! that the code is known to work there. It is for x86-64 Linux, where two system calls are all it needs.
#![no_std]
#![no_main]

extern crate alloc;

mod memory;
mod start;

// Linked even as long as nothing below calls them.
use iwarp_proto as _;
use iwarp_rnic as _;

use alloc::vec::Vec;

/// The exit status: 0 when everything behaved.
fn run() -> i32 {
    let mut values = Vec::new();
    if values.try_reserve_exact(64).is_err() {
        return 2;
    }
    values.extend(0..64_u8);
    let sum: u32 = values.iter().map(|&value| u32::from(value)).sum();
    if sum == 2016 { 0 } else { 3 }
}
