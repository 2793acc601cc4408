//! Tests that guessing STags does not help a peer (RFC 5042 sections 6.1.1 and 6.3.1): it has one
//! guess per connection, and an STag has 28 random bits.

use crate::common::wire::{Hello, initiator};
use crate::common::*;
use iwarp_proto::rdmap::TerminateCode as Code;
use std::collections::HashSet;

/// The peer also sends valid requests after its wrong guess.
#[test]
fn wrong_stag_ends_connection_and_counts() {
    let server = Server::new(V4, &config());
    for wrong in [1, 0x100, 0x8000_0000, u32::MAX] {
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        let mem = end.mem(64);
        wire.write_op(mem.stag ^ wrong, mem.addr(), b"12345678");
        wire.write_op(mem.stag, mem.addr(), b"12345678");
        wire.expect_terminate(Code::DDP_TAGGED_INVALID_STAG);
        end.expect_disconnected();
        assert_eq!(mem.word(0), 0, "nothing is placed after a wrong guess");
        assert_eq!(end.qp.counters().terminates_sent, 1);
        let fault = end.qp.fault().expect("the queue pair reports the cause");
        assert_eq!(fault.code, Code::DDP_TAGGED_INVALID_STAG);
    }
}

#[test]
fn stags_are_random_except_four_bits() {
    const REGIONS: usize = 2048;
    let stags = || -> Vec<u32> {
        let ctx = context(V4, &config());
        let pd = ctx.allocate_pd();
        let regions: Vec<_> = (0..REGIONS).map(|_| Mem::new(&ctx, pd, 8)).collect();
        regions.iter().map(|mem| mem.stag).collect()
    };
    let (first, second) = (stags(), stags());
    let random = (0..u32::BITS).filter(|bit| {
        let ones = first.iter().filter(|stag| *stag >> bit & 1 == 1).count();
        (REGIONS * 2 / 5..REGIONS * 3 / 5).contains(&ones)
    });
    // When the table grows, new STags are in other parts.
    let random = random.count();
    assert!(random >= 28, "{random} random bits");
    let known: HashSet<_> = first.iter().collect();
    assert_eq!(known.len(), REGIONS, "STags are unique");
    // Of 2^28 values, two samples of 2048 share 0.016 on average.
    let common = second.iter().filter(|stag| known.contains(stag)).count();
    assert!(common < 4, "another device has other STags: {common}");
    let steps =
        |all: &[u32]| -> HashSet<u32> { all.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect() };
    assert!(
        steps(&first).len() > REGIONS - 8,
        "consecutive STags are not consecutive numbers"
    );
}

/// Queue pairs of two devices do not start with the same number.
#[test]
fn queue_pair_numbers_begin_at_random() {
    let numbers: HashSet<u32> = (0..8)
        .map(|_| {
            let server = Server::new(V4, &config());
            let (_wire, end) = initiator(&server, &Hello::enhanced(true, false));
            end.qp.num()
        })
        .collect();
    // Of eight random numbers of 24 bits, two are equal once in 600,000 runs.
    assert!(numbers.len() > 6, "{numbers:x?}");
}
