//! Peers that spoil MPA start-up while we initiate: nobody there, silence, nonsense, refusal; and responders that only
//! speak revision 1 (RFC 5044 section 7.1, RFC 6581 sections 9 and 10).

mod common;

use common::wire::{Hello, Wire, responder};
use common::*;
use iwarp::raw::cm::CmEventKind;
use iwarp::{Error, SendOp, State, WcStatus};
use iwarp_proto::mpa::startup::{EnhancedPrefix, Flags, FrameKind};
use iwarp_proto::rdmap::{Opcode, TerminateCode};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

fn listener(ip: IpAddr) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(SocketAddr::new(ip, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// The next connection that comes, and its request.
fn incoming(listener: &TcpListener) -> (Wire, Hello) {
    let mut wire = Wire::new(listener.accept().unwrap().0);
    let hello = wire.read_hello(FrameKind::Request);
    (wire, hello)
}

#[test]
fn nobody_listens() {
    others_are_served(|| {
        for ip in [V4, V6] {
            let (gone, address) = listener(ip);
            drop(gone);
            let end = End::new(ip, &config());
            end.connect(address, b"");
            end.expect_failure(CmEventKind::Rejected, libc::ECONNREFUSED);
            // The identifier and its queue pair can try again.
            let server = Server::new(ip, &config());
            end.id.resolve_addr(None, server.address).unwrap();
            end.expect(CmEventKind::AddrResolved);
            end.id.resolve_route().unwrap();
            end.expect(CmEventKind::RouteResolved);
            end.id.connect(&parameters(b"")).unwrap();
            let other = server.accept();
            end.expect(CmEventKind::Established);
            other.expect(CmEventKind::Established);
        }
    });
}

#[test]
fn addresses_that_lead_nowhere() {
    others_are_served(|| {
        // A broadcast address, and one of the other family: an error at once or an event, but soon.
        for address in ["255.255.255.255:9", "[ff02::1]:9"] {
            let end = End::new(V4, &config());
            let address: SocketAddr = address.parse().unwrap();
            if end.id.resolve_addr(None, address).is_err() {
                continue;
            }
            end.expect(CmEventKind::AddrResolved);
            end.id.resolve_route().unwrap();
            end.expect(CmEventKind::RouteResolved);
            end.id.set_queue_pair(Some(&end.qp));
            if end.id.connect(&parameters(b"")).is_ok() {
                let event = end.channel.next(Some(LIMIT)).unwrap();
                assert!(event.status != 0, "{event:?}");
            }
        }
    });
}

#[test]
fn a_responder_that_hangs() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        let reply = Hello::enhanced(true, false).octets(FrameKind::Reply);
        for len in [0, 9, 22] {
            let end = End::new(V4, &config());
            let start = Instant::now();
            end.connect(address, b"");
            let (mut wire, _) = incoming(&socket);
            wire.write(&reply[..len]);
            end.expect_failure(CmEventKind::Unreachable, libc::ETIMEDOUT);
            assert!(start.elapsed() >= HANDSHAKE);
            wire.ends_with_reset();
            assert_eq!(end.qp.state(), State::Reset);
        }
    });
}

#[test]
fn a_responder_that_goes_in_the_middle_of_its_reply() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        let reply = Hello::enhanced(true, false).octets(FrameKind::Reply);
        let end = End::new(V4, &config());
        end.connect(address, b"");
        let (mut wire, _) = incoming(&socket);
        wire.write(&reply[..18]);
        wire.fin();
        end.expect_failure(CmEventKind::ConnectError, libc::ECONNRESET);
        wire.ends();
    });
}

#[test]
fn what_is_no_reply_is_refused() {
    let hello = Hello::enhanced(true, false);
    let good = hello.octets(FrameKind::Reply);
    let changed = |at: usize, to: u8| {
        let mut frame = good.clone();
        frame[at] = to;
        frame
    };
    let mut oversize = good.clone();
    oversize[18..20].copy_from_slice(&600u16.to_be_bytes());
    let cases = [
        ("HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ("SSH", b"SSH-2.0-OpenSSH_9.9\r\n".to_vec()),
        ("a request", hello.octets(FrameKind::Request)),
        ("wrong key", changed(3, b'_')),
        ("revision 3", changed(17, 3)),
        ("too much private data", oversize),
        ("plain", Hello::plain().octets(FrameKind::Reply)),
    ];
    others_are_served(|| {
        let (socket, address) = listener(V6);
        for (what, octets) in &cases {
            let end = End::new(V6, &config());
            end.connect(address, b"");
            let (mut wire, _) = incoming(&socket);
            wire.write(octets);
            end.expect_failure(CmEventKind::ConnectError, libc::EPROTO);
            assert!(!wire.ends(), "{what}");
        }
    });
}

#[test]
fn replies_that_ask_for_the_impossible() {
    let depths = EnhancedPrefix {
        ird: 16,
        ord: 200,
        peer_to_peer: true,
        rtr_write: true,
        ..EnhancedPrefix::default()
    };
    let rtr = EnhancedPrefix {
        ord: 1,
        rtr_send: true,
        rtr_write: false,
        ..depths
    };
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for (prefix, code, errno) in [
            (depths, TerminateCode::MPA_INSUFFICIENT_IRD, libc::ENOSPC),
            (rtr, TerminateCode::MPA_NO_MATCHING_RTR, libc::EPROTO),
        ] {
            let end = End::new(V4, &config());
            end.connect(address, b"");
            let (mut wire, _) = incoming(&socket);
            let reply = Hello {
                prefix: Some(prefix),
                ..Hello::enhanced(false, false)
            };
            wire.write(&reply.octets(FrameKind::Reply));
            wire.expect_terminate(code);
            end.expect_failure(CmEventKind::ConnectError, errno);
        }
    });
}

#[test]
fn a_refusal_carries_its_reason() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for hello in [Hello::enhanced(true, false), Hello::plain()] {
            let end = End::new(V4, &config());
            end.connect(address, b"please");
            let (mut wire, request) = incoming(&socket);
            assert_eq!(request.private_data, b"please");
            let no = Hello {
                flags: hello.flags | Flags::REJECT,
                private_data: b"no".to_vec(),
                ..hello
            };
            wire.write(&no.octets(FrameKind::Reply));
            let event = end.expect(CmEventKind::Rejected);
            assert_eq!(
                (event.status, &event.private_data[..]),
                (libc::ECONNREFUSED, &b"no"[..])
            );
            assert!(wire.ends());
        }
    });
}

/// What the safe API says of a failed attempt names the cause: neither "no space left on device" for a depth, nor
/// "connection refused", which sounds as if nobody listened, for a refusal without a word.
#[test]
fn failures_of_the_safe_api_name_their_cause() {
    let (socket, address) = listener(V4);
    let greedy = Hello {
        prefix: Some(EnhancedPrefix {
            ird: 16,
            ord: 200,
            peer_to_peer: true,
            rtr_write: true,
            ..EnhancedPrefix::default()
        }),
        ..Hello::enhanced(false, false)
    };
    let silent = Hello {
        flags: Hello::enhanced(true, false).flags | Flags::REJECT,
        private_data: Vec::new(),
        ..Hello::enhanced(true, false)
    };
    for (reply, words) in [(greedy, "RDMA Reads"), (silent, "the peer refused")] {
        let attempt = std::thread::spawn(move || {
            let ctx = context(V4, &config());
            let pd = iwarp::ProtectionDomain::new(&ctx);
            let cq = ctx.create_cq(16, None).unwrap();
            let qp = pd.queue_pair().build(&cq, &cq).unwrap();
            iwarp::cm::Connector::new(&ctx).connect(address, qp)
        });
        let (mut wire, _) = incoming(&socket);
        wire.write(&reply.octets(FrameKind::Reply));
        let error = attempt.join().unwrap().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    drop(socket);
    let ctx = context(V4, &config());
    let pd = iwarp::ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(16, None).unwrap();
    let qp = pd.queue_pair().build(&cq, &cq).unwrap();
    let error = iwarp::cm::Connector::new(&ctx).connect(address, qp);
    assert!(
        matches!(&error, Err(Error::Io(e)) if e.raw_os_error() == Some(libc::ECONNREFUSED)),
        "{error:?}"
    );
}

#[test]
fn responders_of_revision_1() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        // They close, or reset, on what they do not know.
        for reset in [true, false] {
            let end = End::new(V4, &config());
            end.connect(address, b"again");
            let (mut wire, first) = incoming(&socket);
            assert_eq!(first.revision, 2);
            if reset {
                wire.reset();
            } else {
                wire.fin();
                assert!(wire.ends());
            }
            let (mut wire, second) = incoming(&socket);
            assert_eq!((second.revision, second.prefix), (1, None));
            assert_eq!(second.private_data, b"again");
            wire.write(&Hello::plain().octets(FrameKind::Reply));
            end.expect(CmEventKind::Established);
            let mem = end.mem(64);
            mem.set(0, 11);
            end.post(1, SendOp::Send, &[mem.sge(8)]);
            assert_eq!(wire.expect(Opcode::SEND), 11u64.to_ne_bytes());
            end.expect_status(1, WcStatus::Success);
        }
        // Twice is enough.
        let end = End::new(V4, &config());
        end.connect(address, b"");
        drop(incoming(&socket));
        let (_, second) = incoming(&socket);
        assert_eq!(second.revision, 1);
        end.expect_failure(CmEventKind::Rejected, libc::ECONNRESET);
        socket.set_nonblocking(true).unwrap();
        assert!(socket.accept().is_err(), "a third attempt");
    });
}

#[test]
fn responders_that_choose_the_first_message() {
    others_are_served(|| {
        for hello in [
            Hello::enhanced(true, false),
            Hello::enhanced(false, true),
            Hello::client_server(),
        ] {
            let end = End::new(V4, &config());
            let mut wire = responder(&end, &hello);
            let mem = end.mem(64);
            end.post_recv(1, &[mem.sge(8)]);
            wire.untagged(Opcode::SEND, &21u64.to_ne_bytes());
            end.expect_status(1, WcStatus::Success);
            assert_eq!(mem.word(0), 21);
            end.post(2, SendOp::Send, &[mem.sge(8)]);
            assert_eq!(wire.expect(Opcode::SEND), 21u64.to_ne_bytes());
            // The first message is nobody's completion.
            end.expect_status(2, WcStatus::Success);
            assert!(end.cq.is_empty());
        }
    });
}

#[test]
fn established_comes_before_disconnected_however_short_the_connection() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for reset in [false, true] {
            for _ in 0..20 {
                let end = End::new(V4, &config());
                end.connect(address, b"");
                let (mut wire, _) = incoming(&socket);
                wire.write(&Hello::enhanced(true, false).octets(FrameKind::Reply));
                if reset {
                    // Only what has been read can be trusted to come before a reset.
                    end.expect(CmEventKind::Established);
                    wire.reset();
                } else {
                    wire.fin();
                    end.expect(CmEventKind::Established);
                }
                end.expect_disconnected();
            }
        }
    });
}

#[test]
fn the_end_does_not_follow_the_first_message_at_once() {
    // siw's kernel does not survive an end that it sees before the RTR message.
    for destroy in [false, true] {
        let apart = (0..5).any(|_| {
            let end = End::new(V4, &config());
            let mut wire = responder(&end, &Hello::enhanced(true, false));
            if destroy {
                end.qp.destroy();
            } else {
                end.id.disconnect().unwrap();
            }
            // Late is late enough once in five times, however busy the machine is.
            let apart = wire.stays_open(Duration::from_millis(20));
            assert!(wire.ends());
            apart
        });
        assert!(apart, "destroy: {destroy}");
    }
}

#[test]
fn who_destroys_its_queue_pair_after_disconnecting_is_told_of_the_end() {
    let end = End::new(V4, &config());
    // It has heard nothing but the reply, so its end is put off.
    let _wire = responder(&end, &Hello::enhanced(true, false));
    end.id.disconnect().unwrap();
    end.qp.destroy();
    assert_eq!(end.expect(CmEventKind::Disconnected).status, 0);
    std::thread::sleep(Duration::from_millis(100));
    assert!(end.channel.try_next().is_none(), "told once");
}

#[test]
fn who_sees_established_may_post() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for _ in 0..100 {
            let end = End::new(V4, &config());
            end.connect(address, b"");
            let (mut wire, _) = incoming(&socket);
            wire.write(&Hello::client_server().octets(FrameKind::Reply));
            until("established", || {
                end.channel
                    .try_next()
                    .is_some_and(|e| e.kind == CmEventKind::Established)
            });
            let mem = end.mem(8);
            end.post(1, SendOp::Send, &[mem.sge(8)]);
            end.expect_status(1, WcStatus::Success);
        }
    });
}

#[test]
fn our_own_private_data_has_a_limit() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for (revision, most) in [(2, 508), (1, 512)] {
            let mut c = config();
            c.mpa_revision = revision;
            let end = End::new(V4, &c);
            end.resolve(address);
            let too_long = end.id.connect(&parameters(&vec![1; most + 1]));
            assert!(
                matches!(too_long, Err(Error::InvalidArgument(_))),
                "{too_long:?}"
            );
            assert!(end.channel.is_empty());
            end.id.connect(&parameters(&vec![1; most])).unwrap();
            let (_wire, request) = incoming(&socket);
            assert_eq!(
                (request.revision, request.private_data.len()),
                (revision, most)
            );
            // Before the peer closes: it would try revision 1.
            drop(end);
        }
    });
}

#[test]
fn attempts_that_are_given_up() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for _ in 0..20 {
            let end = End::new(V4, &config());
            end.connect(address, b"");
            end.id.destroy();
            // The request may have left before; nothing follows it.
            if let Ok((stream, _)) = socket.accept() {
                let mut wire = Wire::new(stream);
                let mut request = Vec::new();
                let _ = std::io::Read::read_to_end(&mut wire.socket, &mut request);
            }
            assert!(end.channel.is_empty());
            assert_eq!(end.qp.state(), State::Reset);
        }
    });
}

/// Programs that know one family only name an IPv4 peer like this.
#[test]
fn a_peer_named_by_an_ipv4_address_in_the_form_of_ipv6_is_reached() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let client = End::new(V4, &config());
        let SocketAddr::V4(address) = server.address else {
            panic!("{}", server.address);
        };
        let mapped = IpAddr::from(address.ip().to_ipv6_mapped());
        client.connect(SocketAddr::new(mapped, address.port()), b"");
        let accepted = server.accept();
        client.expect(CmEventKind::Established);
        accepted.expect(CmEventKind::Established);
    });
}
