//! Tests of MPA start-up as the responder, with initiators that hang, close early, or send invalid
//! MPA requests, and with initiators of every revision and mode (RFC 5044 section 7.1, RFC 6581
//! sections 9 and 10).

mod places;

use crate::common::loopback;
use crate::common::wire::{Hello, Wire, initiator};
use crate::common::*;
use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::{
    CompletionQueue, Context, QueuePair, RecvWr, SendOp, State, WcStatus, create_event_channel,
};
use iwarp::{Access, Error};
use iwarp_proto::ddp::Stag;
use iwarp_proto::mpa::startup::{Flags, FrameKind};
use iwarp_proto::rdmap::{Opcode, ReadRequest};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

#[test]
fn silent_initiator_times_out() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# 2. When MPA is started in the Responder mode, the MPA implementation MUST
    //# wait until an MPA Request Frame is received and validated before entering
    //# Full MPA/DDP Operation.
    //= rfc5044 section 7.1.2
    //= type=test
    //# Implementations SHOULD put a timeout on waiting for the MPA Request Frame
    //# when started in Responder mode, to detect incorrect "Responder/Responder"
    //# startups.
    //= rfc5044 section 7.1.2
    //= type=test
    //# 10. MPA implementations SHOULD implement a reasonable timeout while waiting
    //# for the entire set of startup frames; this prevents certain
    //# denial-of-service attacks.
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let request = Hello::enhanced(true, true).octets(FrameKind::Request);
        for len in [0, 1, 16, 20, 23] {
            let start = Instant::now();
            let mut wire = Wire::connect(server.address);
            wire.write(&request[..len]);
            wire.ends_with_reset();
            assert!(start.elapsed() >= HANDSHAKE, "after {len} octets");
        }
        assert!(server.channel.is_empty());
    });
}

#[test]
fn peer_closing_within_request_is_dropped() {
    others_are_served(|| {
        let server = Server::new(V6, &config());
        let request = Hello::enhanced(true, true).octets(FrameKind::Request);
        for len in [0, 7, 20] {
            let mut wire = Wire::connect(server.address);
            wire.write(&request[..len]);
            wire.fin();
            assert!(wire.ends(), "after {len} octets");
            let mut wire = Wire::connect(server.address);
            wire.write(&request[..len]);
            wire.reset();
        }
        // The listener still works, and the program got no event for those peers.
        let (_wire, _end) = initiator(&server, &Hello::enhanced(true, false));
        assert!(server.channel.is_empty());
    });
}

#[test]
fn invalid_mpa_requests_are_refused() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# If the MPA Request Frame is improperly formatted, the implementation MUST
    //# close the TCP connection and exit MPA.
    //= rfc5044 section 8
    //= type=test
    //# In this case, the TCP connection MUST be immediately closed.
    let hello = Hello::enhanced(true, true);
    let good = hello.octets(FrameKind::Request);
    let changed = |at: usize, to: u8| {
        let mut frame = good.clone();
        frame[at] = to;
        frame
    };
    let mut oversize = good.clone();
    oversize[18..20].copy_from_slice(&513u16.to_be_bytes());
    let random: Vec<u8> = (0..4000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 | 0x80)
        .collect();
    let no_prefix = Hello {
        prefix: None,
        ..hello.clone()
    }
    .octets(FrameKind::Request);
    let cases = [
        (
            "HTTP",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        ),
        (
            "TLS",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        ),
        ("random", random),
        ("a reply", hello.octets(FrameKind::Reply)),
        ("wrong key", changed(15, b'E')),
        ("revision 3", changed(17, 3)),
        ("too much private data", oversize),
        ("enhanced without depths", no_prefix),
    ];
    others_are_served(|| {
        let mut slow = config();
        slow.handshake_timeout = LIMIT * 10;
        let server = Server::new(V4, &slow);
        for (what, octets) in &cases {
            let mut wire = Wire::connect(server.address);
            wire.write(octets);
            // The refusal is a reset, because hardware falls back to revision 1 only after a reset,
            // not after a FIN.
            assert!(!wire.ends(), "{what}");
        }
        assert!(server.channel.is_empty());
    });
}

#[test]
fn peer_never_sends_rtr() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let mut wire = Wire::connect(server.address);
        wire.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
        let end = server.accept();
        wire.read_hello(FrameKind::Reply);
        let mem = end.mem(8);
        end.post_recv(1, &[mem.sge(8)]);
        end.expect_failure(CmEventKind::Unreachable, libc::ETIMEDOUT);
        end.expect_status(1, WcStatus::Flushed);
        wire.ends_with_reset();
    });
}

#[test]
fn peer_closes_before_rtr() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        for reset in [false, true] {
            let mut wire = Wire::connect(server.address);
            wire.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
            let end = server.accept();
            wire.read_hello(FrameKind::Reply);
            if reset {
                wire.reset();
            } else {
                wire.fin();
                assert!(wire.ends());
            }
            end.expect_failure(CmEventKind::ConnectError, libc::ECONNRESET);
        }
    });
}

#[test]
fn peer_gone_before_accept() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let mut wire = Wire::connect(server.address);
        wire.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
        let request = server.request();
        wire.reset();
        let end = server.end(request);
        // The reset may arrive before or after the call, so both ways to report it are right.
        match end.id.accept(&parameters(b"")) {
            Err(Error::ConnectionLost(_)) => {}
            Err(e) => panic!("{e}"),
            Ok(()) => end.expect_failure(CmEventKind::ConnectError, libc::ECONNRESET),
        }
        assert!(matches!(
            end.id.accept(&parameters(b"")),
            Err(Error::InvalidState(_))
        ));
    });
}

#[test]
fn oversized_private_data_keeps_request() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let mut wire = Wire::connect(server.address);
        let mut hello = Hello::enhanced(true, false);
        hello.private_data = vec![5; 508];
        wire.write(&hello.octets(FrameKind::Request));
        let request = server.request();
        assert_eq!(request.private_data, hello.private_data);
        assert_eq!(
            (request.responder_resources, request.initiator_depth),
            (Some(16), Some(16))
        );
        let end = server.end(request);
        let too_long = end.id.accept(&parameters(&[1; 509]));
        assert!(
            matches!(too_long, Err(Error::InvalidArgument(_))),
            "{too_long:?}"
        );
        end.id.accept(&parameters(&[1; 508])).unwrap();
        assert_eq!(wire.read_hello(FrameKind::Reply).private_data, [1; 508]);
        wire.rtr_write();
        end.expect(CmEventKind::Established);
    });
}

#[test]
fn reject_carries_private_data_and_closes() {
    others_are_served(|| {
        let server = Server::new(V6, &config());
        for hello in [Hello::enhanced(true, true), Hello::plain()] {
            let mut wire = Wire::connect(server.address);
            wire.write(&hello.octets(FrameKind::Request));
            server.request().id.reject(b"full").unwrap();
            let reply = wire.read_hello(FrameKind::Reply);
            assert!(reply.flags.has(Flags::REJECT));
            assert_eq!(
                (reply.revision, &reply.private_data[..]),
                (hello.revision, &b"full"[..])
            );
            assert!(wire.ends());
        }
    });
}

#[test]
fn fin_follows_reject_with_delay() {
    // siw loses the private data of a rejection if the FIN arrives together with it. A network may
    // merge the two packets.
    //= rfc5044 section 7.1.2
    //= type=test
    //# If the
    //# MPA Request Frame is properly formatted but the Private Data is
    //# not acceptable, the implementation SHOULD return an MPA Reply
    //# Frame with the Rejected Connection bit set to '1'; the MPA
    //# Reply Frame MAY include ULP-supplied Private Data; the
    //# implementation MUST exit MPA, leaving the TCP connection open.
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let mut wire = Wire::connect(server.address);
        wire.write(&Hello::enhanced(false, false).octets(FrameKind::Request));
        let request = server.request();
        let start = Instant::now();
        request.id.reject(b"full").unwrap();
        request.id.destroy();
        assert_eq!(wire.read_hello(FrameKind::Reply).private_data, b"full");
        // Further data of the initiator is discarded.
        wire.write(b"why?");
        // An initiator that does not close times out.
        assert!(wire.ends());
        assert!(start.elapsed() >= HANDSHAKE);
    });
}

#[test]
fn rejected_connection_ends_with_initiator() {
    others_are_served(|| {
        let mut slow = config();
        slow.handshake_timeout = LIMIT * 10;
        let server = Server::new(V6, &slow);
        let mut wire = Wire::connect(server.address);
        wire.write(&Hello::plain().octets(FrameKind::Request));
        server.request().id.reject(b"full").unwrap();
        wire.read_hello(FrameKind::Reply);
        wire.fin();
        assert!(wire.ends());
    });
}

#[test]
fn responder_waits_for_first_message() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        for hello in [Hello::plain(), Hello::client_server()] {
            let (mut wire, end) = initiator(&server, &hello);
            let mem = end.mem(64);
            mem.set(0, 42);
            end.post(1, SendOp::Send, &[mem.sge(8)]);
            wire.is_silent(Duration::from_millis(100));
            // cxgb4 sends this RTR message even if none was negotiated, as in this test.
            wire.rtr_read();
            let (first, second) = (wire.recv(), wire.recv());
            let mut seen = [first.0.opcode(), second.0.opcode()];
            seen.sort();
            assert_eq!(seen, [Opcode::READ_RESPONSE, Opcode::SEND]);
            end.expect_status(1, WcStatus::Success);
            assert_eq!(end.qp.counters().tx_messages, 2);
        }
    });
}

#[test]
fn initiators_of_every_revision_and_mode() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# If the MPA Request Frame is properly formatted and the Private Data is
    //# acceptable, the implementation SHOULD return an MPA Reply Frame with the
    //# Rejected Connection bit set to '0'; the MPA Reply Frame MAY include
    //# ULP-supplied Private Data; and the Responder SHOULD prepare to interpret any
    //# data received as FPDUs and pass any received ULPDUs to DDP.
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let ammasso = Hello {
            revision: 0,
            ..Hello::plain()
        };
        let no_crc = Hello {
            flags: Flags::NONE,
            ..Hello::plain()
        };
        let both = Hello::enhanced(true, true);
        let [write, read] = [Hello::enhanced(true, false), Hello::enhanced(false, true)];
        for hello in [
            ammasso,
            no_crc,
            both,
            write,
            read,
            Hello::plain(),
            Hello::client_server(),
        ] {
            let (mut wire, end) = initiator(&server, &hello);
            let mem = Mem::with(
                &end.ctx,
                end.pd,
                64,
                Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
            );
            end.post_recv(1, &[mem.sge(32)]);
            wire.untagged(Opcode::SEND, &3u64.to_ne_bytes());
            end.expect_status(1, WcStatus::Success);
            wire.write_op(mem.stag, mem.addr() + 8, &4u64.to_ne_bytes());
            wire.read_op(ReadRequest {
                sink_stag: Stag(5),
                sink_to: 6,
                size: 16,
                source_stag: Stag(mem.stag),
                source_to: mem.addr(),
            });
            let answer = wire.expect(Opcode::READ_RESPONSE);
            assert_eq!(answer, [3u64.to_ne_bytes(), 4u64.to_ne_bytes()].concat());
            end.post(2, SendOp::Send, &[mem.sge(8)]);
            assert_eq!(wire.expect(Opcode::SEND), 3u64.to_ne_bytes());
            end.expect_status(2, WcStatus::Success);
            end.id.disconnect().unwrap();
            assert_eq!(end.expect_disconnected().status, 0);
            assert!(wire.ends());
        }
    });
}

#[test]
fn destroyed_listener_frees_port() {
    others_are_served(|| {
        let mut slow = config();
        slow.handshake_timeout = LIMIT * 10;
        let server = Server::new(V4, &slow);
        let mut starting = Wire::connect(server.address);
        let mut asking = Wire::connect(server.address);
        asking.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
        until("the request arrives", || !server.channel.is_empty());
        server.id.destroy();
        assert!(server.channel.is_empty());
        // The initiator whose request was pending gets a rejection.
        assert!(asking.read_hello(FrameKind::Reply).flags.has(Flags::REJECT));
        let _ = starting.socket.set_nodelay(true);
        starting.write(b"M");
        // The listening socket is closed, so another socket can bind the port immediately.
        let again = CmId::create(&create_event_channel().unwrap(), Some(&server.ctx));
        again.bind(server.address).unwrap();
        again.listen(1).unwrap();
        again.destroy();
    });
}

#[test]
fn addresses_that_are_not_ours() {
    others_are_served(|| {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, None);
        let foreign: SocketAddr = "203.0.113.77:0".parse().unwrap();
        assert_eq!(id.bind(foreign).unwrap_err().errno(), libc::EADDRNOTAVAIL);
        let here: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let from_there = id.resolve_addr(Some(foreign), here);
        assert_eq!(from_there.unwrap_err().errno(), libc::EADDRNOTAVAIL);
        let ctx = context(V4, &config());
        let id = CmId::create(&channel, Some(&ctx));
        assert!(matches!(id.bind(foreign), Err(Error::Io(_))));
        // The port is in use.
        let taken = TcpListener::bind(SocketAddr::new(V4, 0)).unwrap();
        let bound = id
            .bind(taken.local_addr().unwrap())
            .and_then(|()| id.listen(1));
        assert_eq!(bound.unwrap_err().errno(), libc::EADDRINUSE);
        assert!(matches!(
            id.accept(&parameters(b"")),
            Err(Error::InvalidState(_))
        ));
        assert!(matches!(id.disconnect(), Err(Error::InvalidState(_))));
        id.destroy();
        assert!(channel.is_empty());
    });
}

/// A peer's queue pair number that is smaller than any number with a listening port, so that the
/// peer connects.
const NUMBERED: u32 = 2;

/// Returns a queue pair that waits for the peer `NUMBERED` at the same address.
fn numbered(ctx: &Context, pd: u32, cq: &CompletionQueue) -> QueuePair {
    let attributes = loopback::attributes(pd, cq, 1);
    let qp = ctx.create_addressable_qp(&attributes).unwrap();
    qp.modify(State::Init).unwrap();
    qp.connect_peer(loopback::gid(), NUMBERED).unwrap();
    qp.modify(State::Rts).unwrap();
    qp
}

/// Connects as the peer `NUMBERED` of this queue pair, and reads the reply.
fn ask(qp: &QueuePair) -> Wire {
    let mut hello = Hello::enhanced(true, false);
    hello.private_data = b"iwarp-qp".to_vec();
    for number in [NUMBERED, qp.num()] {
        hello.private_data.extend(number.to_be_bytes());
    }
    let mut wire = Wire::connect(SocketAddr::new(V4, qp.num() as u16));
    wire.write(&hello.octets(FrameKind::Request));
    assert_eq!(wire.read_hello(FrameKind::Reply).revision, 2);
    wire
}

/// The peer resets its queue pair after its request, and sends another request. The end of the
/// first stream may be noticed before or after the second request.
#[test]
fn numbered_qp_refuses_abandoned_stream() {
    others_are_served(|| {
        let ctx = context(V4, &config());
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
        let ends: [fn(Wire) -> Option<Wire>; 3] = [
            |wire| {
                wire.reset();
                None
            },
            |mut wire| {
                wire.fin();
                assert!(wire.ends());
                None
            },
            Some,
        ];
        for end in ends {
            let qp = numbered(&ctx, pd, &cq);
            let mem = Mem::new(&ctx, pd, 8);
            let sges = [mem.sge(8)];
            let receive = RecvWr {
                wr_id: 1,
                sges: &sges,
            };
            qp.post_recv(&[receive]).unwrap();
            let first = end(ask(&qp));
            let mut second = ask(&qp);
            if let Some(mut first) = first {
                first.ends_with_reset();
            }
            second.rtr_write();
            second.untagged(Opcode::SEND, &7u64.to_ne_bytes());
            let cqe = poll(&cq);
            assert_eq!((cqe.wr_id, cqe.status), (1, WcStatus::Success));
            assert_eq!(mem.word(0), 7);
            qp.destroy();
            ctx.deregister(mem.stag).unwrap();
        }
    });
}

/// A peer that sends nothing after its request does not block the queue pair for a later peer.
#[test]
fn numbered_qp_limits_first_message_wait() {
    others_are_served(|| {
        let ctx = context(V4, &config());
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
        let qp = numbered(&ctx, pd, &cq);
        ask(&qp).ends_with_reset();
        assert_eq!((qp.state(), qp.addresses()), (State::Rts, None));
        let mut second = ask(&qp);
        second.rtr_write();
        until("connected", || qp.addresses().is_some());
        qp.destroy();
    });
}
