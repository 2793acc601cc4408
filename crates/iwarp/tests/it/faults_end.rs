//! Tests of the end of a stream after its queue pair has released it: what the peer sees, and that
//! the next stream is not affected.

use crate::common::wire::{Hello, Wire, responder, responder_at, segment, write_header};
use crate::common::*;
use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::{QueuePair, SendOp, State, WcStatus};
use iwarp_proto::ddp::{Header, TaggedHeader};
use iwarp_proto::rdmap::{Opcode, ReadRequest, Terminate, TerminateCode};
use std::io::{ErrorKind, Read as _};
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Returns an end that has filled the sockets, and its peer, which has not read anything. Only a
/// part of the last FPDU was written.
fn stalled(linger: Duration) -> (End, Wire, Mem) {
    stalled_at(&TcpListener::bind((V4, 0)).unwrap(), linger)
}

/// Returns a stalled end as [`stalled`] does, with a peer that `listener` accepts.
fn stalled_at(listener: &TcpListener, linger: Duration) -> (End, Wire, Mem) {
    let mut c = config();
    c.linger = linger;
    let end = End::new(V4, &c);
    let wire = responder_at(listener, &end, &Hello::enhanced(true, false));
    stall(end, wire)
}

/// Sends until the sockets are full.
fn stall(end: End, wire: Wire) -> (End, Wire, Mem) {
    let mem = end.mem(1 << 20);
    for wr_id in 0..50 {
        end.post(wr_id, SendOp::Send, &[mem.sge(1 << 20)]);
    }
    let sent = |end: &End| end.qp.counters().tx_bytes;
    // The sockets are considered full after 150 ms without progress. The state change has no effect
    // except that this thread tries to send, because on a busy machine the progress thread may not
    // have run.
    let (mut before, mut looks) = (0, 0);
    until("the sockets are full", || {
        std::thread::sleep(Duration::from_millis(50));
        end.qp.modify(State::Rts).unwrap();
        let now = sent(&end);
        let same = now > 0 && now == std::mem::replace(&mut before, now);
        looks = if same { looks + 1 } else { 0 };
        looks == 3
    });
    assert!(
        before < 50 << 20,
        "the sockets accepted all messages, so there is no partial FPDU"
    );
    (end, wire, mem)
}

/// Reads to the end of the stream. Returns the number of octets, and `true` if the stream ended
/// with a reset.
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

/// If the last FPDU is incomplete, the stream ends with a reset. After a FIN, the peer could
/// mistake the truncated message for a complete one.
#[test]
fn end_within_fpdu_resets_after_data() {
    others_are_served(|| {
        let error: fn(&QueuePair) = |qp| qp.modify(State::Error).unwrap();
        for end_it in [QueuePair::destroy, error] {
            // The linger time is long, so that a reader thread that is scheduled late still reads
            // everything.
            let (end, mut wire, _mem) = stalled(LIMIT);
            end_it(&end.qp);
            let sent = end.qp.counters().tx_bytes;
            let (received, reset) = read_all(&mut wire);
            assert!(reset, "a FIN instead of a reset");
            // `responder` has read the RTR message, so `received` is a little smaller.
            assert!(
                received > 0 && received + 100 >= sent,
                "{received} of {sent}"
            );

            // A peer that does not read is reset after the linger time, if its TCP still answers;
            // without an answer it could be an outage. Linux leaves the first window probes
            // unanswered, so this takes longer.
            let (end, mut wire, _mem) = stalled(LINGER * 5);
            end_it(&end.qp);
            until("the connection is reset", || {
                let error = wire.socket.take_error().unwrap();
                error.is_some_and(|e| e.kind() == ErrorKind::ConnectionReset)
            });
            let (received, _) = read_all(&mut wire);
            assert!(received < 50 << 20);
        }
    });
}

/// A program with snapshots changes its memory while data waits for room in the socket. The data
/// arrives as it was when its CRC was computed.
#[test]
fn memory_may_change_during_send() {
    others_are_served(|| {
        let end = End::new(V4, &config());
        let wire = responder(&end, &Hello::enhanced(true, false));
        end.qp.set_snapshot(true);
        let (end, mut wire, mem) = stall(end, wire);
        let waits = end.qp.counters().tx_bytes;
        (0..(1 << 20) / 8).for_each(|i| mem.set(i, u64::MAX));
        let (mut received, mut values) = (0, Vec::new());
        // The data in the sockets, the waiting plan, and some more.
        while received < waits + (2 << 20) {
            // `recv` checks the CRC.
            let payload = wire.expect(Opcode::SEND);
            received += payload.len() as u64;
            values.extend(payload);
            values.dedup();
        }
        assert_eq!(values, [0, 0xff]);
        end.qp.destroy();
    });
}

/// Returns a stalled end as [`stalled_at`] does, after the peer has violated the protocol. The
/// Terminate waits for room in the socket.
fn stalled_with_terminate(listener: &TcpListener, linger: Duration) -> (End, Wire, Mem) {
    // Rarely, the kernel has room for the Terminate. Then the next attempt follows.
    for _ in 0..5 {
        let (end, mut wire, mem) = stalled_at(listener, linger);
        wire.write_op(0x1234_5678, 0, b"12345678");
        until("the error is noticed", || end.qp.state() == State::Error);
        // The state change has no effect except that this thread tries to send.
        end.qp.modify(State::Error).unwrap();
        if end.qp.counters().terminates_sent == 0 {
            return (end, wire, mem);
        }
    }
    panic!("the sockets had room for the Terminate in each attempt");
}

/// Programs destroy a queue pair as soon as they see an error. The waiting Terminate is sent even
/// so, because the peer would not learn the cause without it.
#[test]
fn waiting_terminate_outlives_queue_pair() {
    others_are_served(|| {
        let reset: fn(&QueuePair) = |qp| qp.modify(State::Reset).unwrap();
        for end_it in [QueuePair::destroy, reset] {
            let listener = TcpListener::bind((V4, 0)).unwrap();
            let (end, mut wire, mem) = stalled_with_terminate(&listener, LIMIT);
            end_it(&end.qp);
            end.ctx.deregister(mem.stag).unwrap();
            drop((end, mem));
            let terminate = loop {
                let (header, payload) = wire.recv();
                match header.opcode() {
                    Opcode::SEND => {}
                    Opcode::TERMINATE => break Terminate::parse(&payload).unwrap().0,
                    other => panic!("{other:?}"),
                }
            };
            assert_eq!(terminate.code, TerminateCode::DDP_TAGGED_INVALID_STAG);
            assert!(wire.ends(), "a reset after the Terminate");
        }
    });
}

#[test]
fn waiting_terminate_is_bounded() {
    others_are_served(|| {
        // The peer reads nothing. Linux leaves the first window probes unanswered.
        let listener = TcpListener::bind((V4, 0)).unwrap();
        let (end, wire, _mem) = stalled_with_terminate(&listener, LINGER * 5);
        drop(end);
        until("the connection is reset", || {
            let error = wire.socket.take_error().unwrap();
            error.is_some_and(|e| e.kind() == ErrorKind::ConnectionReset)
        });

        // The peer reads slowly. Its buffer is small, so that its TCP acknowledges octets after
        // each read.
        let listener = TcpListener::bind((V4, 0)).unwrap();
        socket2::SockRef::from(&listener)
            .set_recv_buffer_size(32 << 10)
            .unwrap();
        let (end, mut wire, _mem) = stalled_with_terminate(&listener, LINGER / 2);
        drop(end);
        let mut octets = vec![0; 3200];
        let end = loop {
            std::thread::sleep(Duration::from_millis(20));
            match wire.socket.read(&mut octets) {
                Ok(1..) => {}
                end => break end,
            }
        };
        let error = end.expect_err("it has got everything, and a FIN");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn partial_fpdu_does_not_enter_next_stream() {
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
        // Our side ends the stream, because the partial FPDU would be discarded anyway if the peer
        // ended it.
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

/// With `Config::placed` a request succeeds only after the peer's answer, because the peer may
/// never read data that its TCP has acknowledged.
#[test]
fn connection_end_does_not_prove_placement() {
    others_are_served(|| {
        let ours: fn(&End, &mut Wire) = |end, _| end.id.disconnect().unwrap();
        let theirs: fn(&End, &mut Wire) = |_, wire| wire.fin();
        for end_it in [ours, theirs] {
            let mut c = config();
            c.placed = true;
            let end = End::new(V4, &c);
            let mut wire = responder(&end, &Hello::enhanced(true, false));
            let mem = end.mem(64);
            let write = SendOp::Write {
                remote_addr: 0x1000,
                rkey: 7,
            };
            end.post(1, write, &[mem.sge(8)]);
            wire.expect(Opcode::WRITE);
            let request = ReadRequest::parse(&wire.expect(Opcode::READ_REQUEST)).unwrap();
            end.post(2, write, &[mem.sge(8)]);
            wire.expect(Opcode::WRITE);
            let answer = TaggedHeader {
                last: true,
                opcode: Opcode::READ_RESPONSE,
                stag: request.sink_stag,
                to: 0,
            };
            wire.send(Header::Tagged(answer), &[]);
            end.expect_status(1, WcStatus::Success);
            // The second request gets no answer.
            wire.expect(Opcode::READ_REQUEST);
            end_it(&end, &mut wire);
            end.expect_status(2, WcStatus::Flushed);
        }
    });
}

/// libfabric destroys the queue pair when it gets the event Disconnected, even if it has not polled
/// the completion of the last message yet.
#[test]
fn end_does_not_overtake_last_message() {
    let (client, server) = pair(V4, &config());
    let (from, to) = (client.mem(8), server.mem(8));
    server.post_recv(1, &[to.sge(8)]);
    client.post(2, SendOp::Send, &[from.sge(8)]);
    client.expect_status(2, WcStatus::Success);
    let start = Instant::now();
    client.id.disconnect().unwrap();
    // The program does not poll the completion, so the event follows after 30 ms.
    server.expect_disconnected();
    assert!(start.elapsed() >= Duration::from_millis(30));
    server.expect_status(1, WcStatus::Success);
}
