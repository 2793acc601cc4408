//! Tests of streams that stall, break or arrive octet by octet during a transfer, and of receivers
//! that are not ready (RFC 5041 section 7.1, RFC 5044 section 7.2).

use crate::common::wire::{Hello, Wire, initiator, read, responder, segment, write_header};
use crate::common::*;
use iwarp::runtime::cm::CmEventKind;
use iwarp::runtime::{Cqe, RecvWr, SendOp, SharedReceiveQueue, State, WcStatus};
use iwarp::{Blame, ReceiverNotReady};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader};
use iwarp_proto::mpa::startup::{Flags, FrameKind};
use iwarp_proto::rdmap::{Opcode, ReadRequest, Terminate, TerminateCode as Code};
use std::io::Read;
use std::time::{Duration, Instant};

#[test]
fn send_without_receive() {
    others_are_served(|| {
        let mut strict = config();
        strict.receiver_not_ready = ReceiverNotReady::Terminate;
        let server = Server::new(V4, &strict);
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        wire.untagged(Opcode::SEND, b"too early");
        wire.expect_terminate(Code::DDP_UNTAGGED_NO_BUFFER);
        end.expect_disconnected();

        // A receiver that holds the Send terminates the stream after a time limit.
        let server = Server::new(V4, &config());
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        wire.untagged(Opcode::SEND, b"too early");
        wire.is_silent(Duration::from_millis(150));
        wire.expect_terminate(Code::DDP_UNTAGGED_NO_BUFFER);
        end.expect_disconnected();

        // A receive that is posted in time takes the held Send.
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        wire.untagged(Opcode::SEND, b"in time");
        until("the Send is held", || {
            end.qp.counters().receiver_not_ready > 0
        });
        let mem = end.mem(64);
        end.post_recv(1, &[mem.sge(64)]);
        assert_eq!(end.expect_status(1, WcStatus::Success).byte_len, 7);
    });
}

#[test]
fn reset_of_held_send_is_noticed() {
    others_are_served(|| {
        let mut patient = config();
        patient.receiver_not_ready = ReceiverNotReady::Hold(Duration::from_secs(600));
        let server = Server::new(V4, &patient);
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        wire.untagged(Opcode::SEND, b"too early");
        until("the Send is held", || {
            end.qp.counters().receiver_not_ready > 0
        });
        wire.reset();
        assert_eq!(end.expect_disconnected().status, libc::ECONNRESET);
    });
}

#[test]
fn close_of_held_send_is_noticed() {
    others_are_served(|| {
        let mut patient = config();
        patient.receiver_not_ready = ReceiverNotReady::Hold(Duration::from_secs(600));
        let server = Server::new(V4, &patient);
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        wire.untagged(Opcode::SEND, b"too early");
        wire.fin();
        until("the Send is held", || {
            end.qp.counters().receiver_not_ready > 0
        });
        // The program may post no receive until it gets this event, so the event must not wait for
        // a receive.
        assert_eq!(end.expect_disconnected().status, 0);

        // If the peer does not close, the Send is held until the time limit.
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        wire.untagged(Opcode::SEND, b"patience");
        wire.is_silent(Duration::from_millis(700));
        let mem = end.mem(64);
        end.post_recv(1, &[mem.sge(64)]);
        assert_eq!(end.expect_status(1, WcStatus::Success).byte_len, 8);
    });
}

/// A program may post a receive after the Send has arrived, and then sleep, as fio does. The stream
/// must be read without a poll.
#[test]
fn held_stream_resumes_without_poll() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        let mem = end.mem(64);
        for round in 1..=3 {
            wire.untagged(Opcode::SEND, b"too early");
            until("the Send is held", || {
                end.qp.counters().receiver_not_ready >= round
            });
            // This takes the held Send. Nothing has arrived after it yet.
            end.post_recv(round, &[mem.sge(32)]);
            wire.write_op(mem.stag, mem.addr() + 32, &round.to_ne_bytes());
            until("the Write is placed", || mem.word(4) == round);
            assert_eq!(end.expect_status(round, WcStatus::Success).byte_len, 9);
        }
    });
}

#[test]
fn fpdus_in_single_octets() {
    others_are_served(|| {
        let server = Server::new(V6, &config());
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        let mem = end.mem(64);
        end.post_recv(1, &[mem.sge(64)]);
        let write = wire.fpdu(&segment(
            &write_header(mem.stag, mem.addr() + 32, true),
            &7u64.to_ne_bytes(),
        ));
        let send = Header::Untagged(wire.untagged_header(Opcode::SEND_SE));
        let send = wire.fpdu(&segment(&send, &9u64.to_ne_bytes()));
        for octet in write.iter().chain(&send) {
            wire.write(&[*octet]);
        }
        let got = end.expect_status(1, WcStatus::Success);
        assert_eq!((got.byte_len, mem.word(0), mem.word(4)), (8, 9, 7));
        wire.read_op(read(mem.stag, mem.addr() + 32, 8));
        assert_eq!(wire.expect(Opcode::READ_RESPONSE), 7u64.to_ne_bytes());
    });
}

/// The FPDUs of a Write and a Send, two segments each.
fn messages(wire: &mut Wire, mem: &Mem) -> [Vec<u8>; 4] {
    let payload = [7u8; 4000];
    let write = |at, last| segment(&write_header(mem.stag, mem.addr() + at, last), &payload);
    let first = wire.untagged_header(Opcode::SEND);
    let send = |last, mo| {
        segment(
            &Header::Untagged(iwarp_proto::ddp::UntaggedHeader { last, mo, ..first }),
            &payload,
        )
    };
    [
        write(0, false),
        write(4000, true),
        send(false, 0),
        send(true, 4000),
    ]
    .map(|u| wire.fpdu(&u))
}

#[test]
fn stream_end_within_message_is_error() {
    // The number of whole FPDUs that the peer sends, and the number of octets of the next one.
    let cuts = [
        (0, 1),
        (0, 2000),
        (0, 4017),
        (1, 0),
        (1, 3000),
        (2, 1000),
        (3, 0),
        (3, 17),
    ];
    others_are_served(|| {
        for crc in [true, false] {
            let mut c = config();
            c.crc = crc;
            let server = Server::new(V4, &c);
            for (whole, part) in cuts {
                for reset in [false, true] {
                    let mut hello = Hello::enhanced(true, false);
                    hello.flags = if crc { hello.flags } else { Flags::ENHANCED };
                    let (mut wire, end) = initiator(&server, &hello);
                    assert_eq!(wire.crc, crc);
                    let mem = end.mem(16_000);
                    end.post_recv(1, &[mem.sge(16_000)]);
                    let fpdus = messages(&mut wire, &mem);
                    let mut octets = fpdus[..whole].concat();
                    octets.extend_from_slice(&fpdus[whole][..part]);
                    wire.write(&octets);
                    if reset {
                        wire.reset();
                    } else {
                        wire.fin();
                        assert!(wire.ends());
                    }
                    let what = format!("crc {crc}, {whole} FPDUs and {part} octets, reset {reset}");
                    end.expect_status(1, WcStatus::Flushed);
                    assert_eq!(end.expect_disconnected().status, libc::ECONNRESET, "{what}");
                    let fault = end.qp.fault().unwrap();
                    assert_eq!(
                        (fault.blame, fault.code),
                        (Blame::Transport, Code::MPA_CONNECTION_LOST),
                        "{what}"
                    );
                    end.qp.destroy();
                }
            }
            // If the stream ends between two messages, the end is graceful.
            let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
            let mem = end.mem(16_000);
            end.post_recv(1, &[mem.sge(16_000)]);
            let fpdus = messages(&mut wire, &mem);
            wire.write(&fpdus.concat());
            wire.fin();
            assert_eq!(end.expect_status(1, WcStatus::Success).byte_len, 8000);
            assert_eq!(end.expect_disconnected().status, 0);
            assert!(end.qp.fault().is_none());
            assert!(wire.ends());
        }
    });
}

/// The stream ends within an FPDU of the peer, while our side was stalled and can send again. Our
/// side can close gracefully, but must still report the lost connection.
#[test]
fn stream_end_within_both_messages_is_error() {
    others_are_served(|| {
        for _ in 0..10 {
            let end = End::new(V4, &config());
            let mut wire = responder(&end, &Hello::enhanced(true, false));
            let mem = end.mem(1 << 20);
            stall(&end, &mem);
            let write = segment(&write_header(mem.stag, mem.addr(), true), &[1; 64]);
            wire.write(&wire.fpdu(&write)[..40]);
            // While this thread polls, no other thread reads or writes this stream.
            let mut out = [Cqe::default(); 8];
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(20) {
                end.cq.poll(&mut out).unwrap();
            }
            wire.socket.set_nonblocking(true).unwrap();
            let mut octets = vec![0; 1 << 20];
            while wire.socket.read(&mut octets).is_ok_and(|n| n > 0) {}
            wire.fin();
            until("the end", || {
                end.cq.poll(&mut out).unwrap();
                !end.channel.is_empty()
            });
            assert_eq!(end.expect_disconnected().status, libc::ECONNRESET);
            end.qp.destroy();
            end.ctx.deregister(mem.stag).unwrap();
        }
    });
}

#[test]
fn missing_read_response_flushes_in_order() {
    others_are_served(|| {
        let end = End::new(V4, &config());
        let mut wire = responder(&end, &Hello::enhanced(true, false));
        let mem = end.mem(4096);
        let read = SendOp::Read {
            remote_addr: 0x1000,
            rkey: 0x55,
        };
        end.post(1, read, &[mem.sge(64)]);
        end.post(2, SendOp::Send, &[mem.sge(8)]);
        wire.expect(Opcode::READ_REQUEST);
        wire.expect(Opcode::SEND);
        wire.fin();
        // Both are flushed in posting order, because the Send must not complete before the Read.
        end.expect_status(1, WcStatus::Flushed);
        end.expect_status(2, WcStatus::Flushed);
        end.expect_disconnected();
        assert!(wire.ends());
    });
}

#[test]
fn terminate_names_the_request() {
    others_are_served(|| {
        let end = End::new(V4, &config());
        let mut wire = responder(&end, &Hello::enhanced(true, false));
        let mem = end.mem(4096);
        for wr_id in 1..=3 {
            let remote_addr = 0x1000 * wr_id;
            end.post(
                wr_id,
                SendOp::Read {
                    remote_addr,
                    rkey: 0x55,
                },
                &[mem.sge(64)],
            );
        }
        let requests: Vec<_> = (0..3).map(|_| wire.recv()).collect();
        let mut t = Terminate::new(Code::RDMAP_ACCESS);
        t.ddp_segment_len = Some(46);
        t.ddp_header = Some(requests[1].0);
        t.read_request = ReadRequest::parse(&requests[1].1);
        let mut body = vec![0; t.wire_len()];
        t.emit(&mut body);
        wire.untagged(Opcode::TERMINATE, &body);
        end.expect_status(1, WcStatus::Flushed);
        let failed = end.expect_status(2, WcStatus::RemoteAccess);
        assert_eq!(failed.vendor_err, 0x0102, "layer, type and code");
        end.expect_status(3, WcStatus::Flushed);
        end.expect_disconnected();
        let fault = end.qp.fault().unwrap();
        assert_eq!(
            (fault.blame, fault.code),
            (Blame::PeerTerminated, Code::RDMAP_ACCESS)
        );
        // A Terminate is not answered.
        assert!(wire.ends());
        assert_eq!(end.qp.counters().terminates_sent, 0);
    });
}

/// Returns the fields of a wrong Read Response to a request: sink STag (0 for the correct STag),
/// tagged offset, length, last flag.
type Answer = fn(&ReadRequest) -> (u32, u64, usize, bool);

#[test]
fn mismatched_read_responses_are_refused() {
    others_are_served(|| {
        let cases: [(&str, Answer, Code); 4] = [
            (
                "another sink",
                |r| (r.sink_stag.0 ^ 1, 0, 64, true),
                Code::DDP_TAGGED_INVALID_STAG,
            ),
            (
                "too much",
                |_| (0, 0, 72, true),
                Code::DDP_TAGGED_BASE_BOUNDS,
            ),
            (
                "too little",
                |_| (0, 0, 56, true),
                Code::DDP_TAGGED_BASE_BOUNDS,
            ),
            (
                "elsewhere",
                |_| (0, 8, 56, true),
                Code::DDP_TAGGED_BASE_BOUNDS,
            ),
        ];
        for (what, answer, code) in cases {
            let end = End::new(V6, &config());
            let mut wire = responder_v6(&end);
            let mem = end.mem(4096);
            end.post(
                1,
                SendOp::Read {
                    remote_addr: 0,
                    rkey: 0x55,
                },
                &[mem.sge(64)],
            );
            let request = ReadRequest::parse(&wire.expect(Opcode::READ_REQUEST)).unwrap();
            let (stag, to, len, last) = answer(&request);
            let stag = Stag(if stag == 0 { request.sink_stag.0 } else { stag });
            let opcode = Opcode::READ_RESPONSE;
            let header = Header::Tagged(TaggedHeader {
                last,
                opcode,
                stag,
                to,
            });
            wire.send(header, &vec![9; len]);
            wire.expect_terminate(code);
            let cqe = end.poll();
            assert!(
                matches!(cqe.status, WcStatus::Flushed | WcStatus::BadResponse),
                "{what}: {cqe:?}"
            );
            assert!((0..512).all(|i| mem.word(i) == 0), "{what}");
            end.expect_disconnected();
        }
    });
}

/// Connects `end` to a hand-written responder on the IPv6 loopback.
fn responder_v6(end: &End) -> Wire {
    let listener = std::net::TcpListener::bind((V6, 0)).unwrap();
    end.connect(listener.local_addr().unwrap(), b"");
    let mut wire = Wire::new(listener.accept().unwrap().0);
    wire.read_hello(FrameKind::Request);
    let hello = Hello::enhanced(true, false);
    wire.write(&hello.octets(FrameKind::Reply));
    end.expect(CmEventKind::Established);
    wire.expect(Opcode::WRITE);
    wire.skips_reminders = true;
    wire
}

/// Posts 100 MiB of Sends. If the peer does not read, the socket is full long before the last one.
fn stall(end: &End, mem: &Mem) {
    for wr_id in 0..100 {
        end.post(wr_id, SendOp::Send, &[mem.sge(1 << 20)]);
    }
}

#[test]
fn stalled_peer_delays_no_others() {
    others_are_served(|| {
        let mut c = config();
        // The peer's TCP still answers, so the peer timeout must not end the connection.
        c.peer_timeout = Some(Duration::from_secs(1));
        let end = End::new(V4, &c);
        let mut wire = responder(&end, &Hello::enhanced(true, false));
        let mem = end.mem(1 << 20);
        stall(&end, &mem);
        let mut other = Healthy::new(V4);
        for _ in 0..50 {
            other.check();
        }
        // Wait longer than the timeouts of start-up and of closing, which must not apply to an
        // established connection.
        std::thread::sleep(LINGER + HANDSHAKE);
        other.check();
        assert_eq!(end.qp.state(), State::Rts);
        assert!(end.channel.is_empty());
        // When the peer reads again, the transfer goes on.
        let reader = std::thread::spawn(move || {
            let mut got = 0u64;
            while got < 100 << 20 {
                got += wire.recv().1.len() as u64;
            }
            got
        });
        for wr_id in 0..100 {
            end.expect_status(wr_id, WcStatus::Success);
        }
        assert_eq!(reader.join().unwrap(), 100 << 20);
    });
}

#[test]
fn disconnect_from_stalled_peer_is_bounded() {
    others_are_served(|| {
        let end = End::new(V4, &config());
        let wire = responder(&end, &Hello::enhanced(true, false));
        let mem = end.mem(1 << 20);
        stall(&end, &mem);
        let start = Instant::now();
        end.id.disconnect().unwrap();
        end.expect_disconnected();
        assert!(start.elapsed() >= LINGER / 2);
        let mut flushed = 0;
        for wr_id in 0..100 {
            let cqe = end.poll();
            assert_eq!(cqe.wr_id, wr_id);
            flushed += u32::from(cqe.status == WcStatus::Flushed);
        }
        assert!(flushed > 0);
        assert!(end.qp.addresses().is_none(), "the connection is still held");
        drop(wire);
    });
}

#[test]
fn stalled_violator_times_out() {
    //= rfc5040 section 7
    //= type=test
    //# For a specific LLP connection, when all Streams are either gracefully torn
    //# down or are labeled as erroneous Streams, the LLP connection MUST be torn
    //# down.
    //= rfc5041 section 3
    //= type=test
    //# 10. For a specific LLP Connection, when all LLP Streams are either
    //# gracefully torn down or are labeled as erroneous LLP Streams, the LLP
    //# Connection MUST be torn down.
    others_are_served(|| {
        let end = End::new(V4, &config());
        let mut wire = responder(&end, &Hello::enhanced(true, false));
        let mem = end.mem(1 << 20);
        stall(&end, &mem);
        wire.write_op(0x1234_5678, 0, b"12345678");
        end.expect_disconnected();
        // The full socket has no room for the Terminate, and is closed even so.
        until("our side closes the connection", || {
            end.qp.addresses().is_none()
        });
    });
}

#[test]
fn peer_that_never_closes_times_out() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        let start = Instant::now();
        end.id.disconnect().unwrap();
        assert_eq!(end.expect_disconnected().status, 0);
        assert!(wire.ends());
        // Until then the peer may close.
        assert!(end.qp.addresses().is_some() || start.elapsed() >= LINGER);
        until("our side closes the connection", || {
            end.qp.addresses().is_none()
        });
        // Octets that the peer sends now are answered with a reset.
        let gone = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            std::io::Write::write_all(&mut wire.socket, b"anybody?").is_err()
        });
        assert!(gone);
    });
}

/// Connects a peer to a queue pair with a shared receive queue.
fn connect_with_srq(server: &Server, srq: (&SharedReceiveQueue, u32)) -> (Wire, End) {
    let mut wire = Wire::connect(server.address);
    wire.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
    let end = server.end_with(server.request(), Some(srq), 16, 64);
    end.id.accept(&parameters(b"")).unwrap();
    wire.read_hello(FrameKind::Reply);
    wire.rtr_write();
    end.expect(CmEventKind::Established);
    (wire, end)
}

#[test]
fn srq_serves_others_after_failure() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let pd = server.ctx.allocate_pd();
        let srq = server.ctx.create_srq(pd, 16, 2).unwrap();
        let mut ends = [(); 3].map(|()| connect_with_srq(&server, (&srq, pd)));
        let mem = Mem::new(&server.ctx, pd, 64);
        // Three held Sends wait for a receive each. Two receives are posted.
        for (wire, end) in &mut ends {
            wire.untagged(Opcode::SEND, b"12345678");
            until("the Send is held", || {
                end.qp.counters().receiver_not_ready > 0
            });
        }
        let sges = [mem.sge(8)];
        let receive = |wr_id| RecvWr { wr_id, sges: &sges };
        srq.post(&[receive(1), receive(2)]).unwrap();
        let mut done = 0;
        let mut cqe = [Cqe::default()];
        until("two Sends are received", || {
            for (_, end) in &ends {
                done += end.cq.poll(&mut cqe).unwrap();
            }
            done == 2
        });
        // The third Send is held until its time limit. Then only its connection ends.
        let ended = |end: &End| end.qp.state() == State::Error;
        until("the third is terminated", || {
            ends.iter().filter(|(_, end)| ended(end)).count() == 1
        });
        for (wire, end) in &mut ends {
            if ended(end) {
                wire.expect_terminate(Code::DDP_UNTAGGED_NO_BUFFER);
                end.expect_disconnected();
                continue;
            }
            srq.post(&[receive(3)]).unwrap();
            wire.untagged(Opcode::SEND, b"abcdefgh");
            end.expect_status(3, WcStatus::Success);
        }
        assert!(srq.is_empty());
    });
}
