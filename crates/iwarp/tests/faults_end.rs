//! What is left of a stream when its queue pair has done with it, and what its peer sees of the end.

mod common;

use common::wire::{Hello, Wire, responder, segment, write_header};
use common::*;
use iwarp::raw::QueuePair;
use iwarp::raw::cm::{CmEventKind, CmId};
use iwarp::{SendOp, State, WcStatus};
use iwarp_proto::rdmap::Opcode;
use std::io::{ErrorKind, Read as _};
use std::time::Duration;

/// An end that has sent as much as the sockets take, and a peer that has not read it. The last FPDU that was sent is cut.
fn stalled(linger: Duration) -> (End, Wire, Mem) {
    let mut c = config();
    c.linger = linger;
    let end = End::new(V4, &c);
    let wire = responder(&end, &Hello::enhanced(true, false));
    let mem = end.mem(1 << 20);
    for wr_id in 0..50 {
        end.post(wr_id, SendOp::Send, &[mem.sge(1 << 20)]);
    }
    let sent = |end: &End| end.qp.counters().tx_bytes;
    // Nothing more goes out.
    let mut before = 0;
    until("the sockets are full", || {
        std::thread::sleep(Duration::from_millis(50));
        let now = sent(&end);
        now > 0 && now == std::mem::replace(&mut before, now)
    });
    assert!(before < 50 << 20, "the sockets take everything");
    (end, wire, mem)
}

/// Reads everything; how much came, and whether a reset was the end.
fn read_all(wire: &mut Wire) -> (u64, bool) {
    let (mut total, mut octets) = (0, vec![0; 1 << 20]);
    loop {
        match wire.socket.read(&mut octets) {
            Ok(0) => return (total, false),
            Ok(n) => total += n as u64,
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return (total, true),
            Err(e) => panic!("no end after {total} octets: {e}"),
        }
    }
}

/// A peer that saw a FIN there could take a message for whole that is not.
#[test]
fn the_end_inside_an_fpdu_is_a_reset_behind_what_was_sent() {
    others_are_served(|| {
        let error: fn(&QueuePair) = |qp| qp.modify(State::Error).unwrap();
        for end_it in [QueuePair::destroy, error] {
            // Time enough for a reader that is kept from reading.
            let (end, mut wire, _mem) = stalled(LIMIT);
            end_it(&end.qp);
            let sent = end.qp.counters().tx_bytes;
            let (came, reset) = read_all(&mut wire);
            assert!(reset, "a FIN instead of a reset");
            // The octets of the first message are not seen by the reader.
            assert!(came > 0 && came + 100 >= sent, "{came} of {sent}");

            // The time of a peer that does not read is over some day. Early on Linux does not answer all questions for room in
            // the window, and an answer makes the difference between this and an outage.
            let (end, mut wire, _mem) = stalled(LINGER * 5);
            end_it(&end.qp);
            until("the connection is reset", || {
                let error = wire.socket.take_error().unwrap();
                error.is_some_and(|e| e.kind() == ErrorKind::ConnectionReset)
            });
            let (came, _) = read_all(&mut wire);
            assert!(came < 50 << 20);
        }
    });
}

#[test]
fn half_an_fpdu_is_no_part_of_the_next_stream() {
    others_are_served(|| {
        let mut end = End::new(V4, &config());
        let mut wire = responder(&end, &Hello::enhanced(true, false));
        let mem = end.mem(64);
        let write = segment(&write_header(mem.stag, mem.addr(), true), &[1; 32]);
        let fpdu = wire.fpdu(&write);
        let before = end.qp.counters().rx_bytes;
        wire.write(&fpdu[..20]);
        until("half of it has come", || {
            end.qp.counters().rx_bytes == before + 20
        });
        // Not the peer ends it: that would throw the half away.
        end.qp.modify(State::Reset).unwrap();
        end.expect(CmEventKind::Disconnected);
        end.id.destroy();
        end.id = CmId::create(&end.channel, Some(&end.ctx));
        let mut wire = responder(&end, &Hello::enhanced(true, false));
        end.post_recv(1, &[mem.sge(64)]);
        wire.untagged(Opcode::SEND, b"whole");
        assert_eq!(end.expect_status(1, WcStatus::Success).byte_len, 5);
    });
}
