//! A program that has no standard library and no C library, and links `iwarp-proto` and
//! `iwarp-rnic`.
//!
//! If either crate, or one of its dependencies, needed more than `core` and `alloc`, this program
//! would not link. The step `no-std` also runs it, to test that the code works there. It supports
//! only x86-64 Linux, because its entry point is written in assembler.
#![no_std]
#![no_main]

extern crate alloc;

mod memory;
mod start;

use alloc::vec::Vec;
use iwarp_proto::crc32c;
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, decode_fpdu, encode_fpdu};
use iwarp_rnic::cq::CompletionQueue;
use iwarp_rnic::qp::{QpConfig, QueuePair};

/// Runs the checks. Returns 0 if all passed, and otherwise the number of the check that failed.
fn run() -> i32 {
    // The published check value of CRC32C.
    if crc32c::append(0, b"123456789") != 0xe306_9283 {
        return 1;
    }
    let mut ulpdu: Vec<u8> = Vec::new();
    if ulpdu.try_reserve_exact(1400).is_err() {
        return 2;
    }
    ulpdu.extend((0..1400_u32).map(|index| index.to_be_bytes()[3]));
    let options = FpduOptions {
        markers: true,
        crc: Some(crc32c::append),
    };
    let (mut tx, mut rx) = (MarkerClock::new(), MarkerClock::new());
    let (mut fpdu, mut received) = ([0; 2048], [0; 2048]);
    let Ok(length) = encode_fpdu(&ulpdu, &options, &mut tx, &mut fpdu) else {
        return 3;
    };
    match decode_fpdu(&fpdu[..length], &options, &mut rx, &mut received) {
        Ok(decoded) if received.get(..decoded.ulpdu_len) == Some(&ulpdu[..]) => {}
        _ => return 4,
    }
    let Ok(mut completions) = CompletionQueue::new(16) else {
        return 5;
    };
    if completions.pop().is_some() {
        return 6;
    }
    // The queue pair is the largest object of the engine. It is created and dropped.
    match QueuePair::new(QpConfig::default()) {
        Ok(_) => 0,
        Err(_) => 7,
    }
}
