//! Tests of MPA start-up as the initiator, with responders that do not listen, are silent, send
//! invalid octets, reject, or support only revision 1 (RFC 5044 section 7.1, RFC 6581 sections 9
//! and 10).

use crate::common::wire::{Hello, Wire, responder};
use crate::common::*;
use iwarp::Error;
use iwarp::runtime::cm::CmEventKind;
use iwarp::verbs::{QpInitAttr, SendOp, State, WcStatus};
use iwarp_proto::mpa::startup::{EnhancedPrefix, Flags, FrameKind};
use iwarp_proto::rdmap::{Opcode, TerminateCode};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

fn listener(ip: IpAddr) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(SocketAddr::new(ip, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Accepts the next connection and reads its MPA request.
fn incoming(listener: &TcpListener) -> (Wire, Hello) {
    let mut wire = Wire::new(listener.accept().unwrap().0);
    let hello = wire.read_hello(FrameKind::Request);
    (wire, hello)
}

#[test]
fn connect_to_closed_port_is_refused() {
    others_are_served(|| {
        for ip in [V4, V6] {
            let (gone, address) = listener(ip);
            drop(gone);
            let end = End::new(ip, &config());
            end.connect(address, b"");
            end.expect_failure(CmEventKind::Rejected, libc::ECONNREFUSED);
            // Identifier and queue pair can connect again.
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
fn connecting_to_unusable_addresses_fails() {
    others_are_served(|| {
        // A broadcast address, and an address of the other family. Either a call or an event
        // reports the error.
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
fn hanging_responder() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# 10. MPA implementations SHOULD implement a reasonable timeout while waiting
    //# for the entire set of startup frames; this prevents certain
    //# denial-of-service attacks.
    others_are_served(|| {
        let (socket, address) = listener(V4);
        let reply = Hello::enhanced(true, false).octets(FrameKind::Reply);
        // The time limit of requests does not apply to answers.
        let mut impatient = config();
        impatient.handshake_timeout = LIMIT * 10;
        impatient.answer_timeout = HANDSHAKE;
        for len in [0, 9, 22] {
            let end = End::new(V4, &impatient);
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

/// A program may take long to answer: `ib_write_bw` fills its memory first.
#[test]
fn slow_answer_is_awaited() {
    others_are_served(|| {
        let mut patient = config();
        patient.handshake_timeout = Duration::from_millis(50);
        patient.answer_timeout = LIMIT;
        let server = Server::new(V4, &config());
        let end = End::new(V4, &patient);
        end.connect(server.address, b"");
        let request = server.request();
        std::thread::sleep(patient.handshake_timeout * 8);
        let other = server.end(request);
        other.id.accept(&parameters(b"")).unwrap();
        end.expect(CmEventKind::Established);
        other.expect(CmEventKind::Established);
    });
}

#[test]
fn tcp_connect_times_out() {
    // When its queue is full, the kernel drops further SYNs for a listener.
    let listener =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::new(V4, 0).into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    let wait = Duration::from_millis(100);
    let mut queued = Vec::new();
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, wait) {
        queued.push(stream);
    }
    let mut impatient = config();
    impatient.connect_timeout = wait;
    let end = End::new(V4, &impatient);
    let start = Instant::now();
    end.connect(address, b"");
    end.expect_failure(CmEventKind::Unreachable, libc::ETIMEDOUT);
    assert!(start.elapsed() >= wait);
}

/// Returns a listener that drops all segments with data, as if its host disappeared after the TCP
/// connect.
fn deaf_listener() -> (socket2::Socket, SocketAddr) {
    const LOAD_PACKET_LENGTH: u16 = 0x80;
    const JUMP_IF_GREATER: u16 = 0x25;
    const RETURN: u16 = 0x06;
    // Maximum length, from the TCP header on, of a segment without data.
    const WITHOUT_DATA: u32 = 60;
    let op = socket2::SockFilter::new;
    let listener =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    listener
        .attach_filter(&[
            op(LOAD_PACKET_LENGTH, 0, 0, 0),
            op(JUMP_IF_GREATER, 0, 1, WITHOUT_DATA),
            op(RETURN, 0, 0, 0),
            op(RETURN, 0, 0, u32::MAX),
        ])
        .unwrap();
    listener.bind(&SocketAddr::new(V4, 0).into()).unwrap();
    listener.listen(8).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    (listener, address)
}

#[test]
fn unacknowledged_request_times_out_early() {
    let (listener, address) = deaf_listener();
    let mut impatient = config();
    impatient.connect_timeout = Duration::from_millis(500);
    impatient.answer_timeout = LIMIT * 10;
    let end = End::new(V4, &impatient);
    let start = Instant::now();
    // The private data has the maximum length, so that the filter recognizes the request as data.
    end.connect(address, &[7; 200]);
    end.expect_failure(CmEventKind::Unreachable, libc::ETIMEDOUT);
    assert!(start.elapsed() >= impatient.connect_timeout);
    drop(listener);
}

/// The time limit of the acknowledgement does not apply to the answer.
#[test]
fn acknowledged_request_gets_answer_timeout() {
    let (listener, address) = listener(V4);
    let mut impatient = config();
    impatient.connect_timeout = Duration::from_millis(50);
    impatient.answer_timeout = LIMIT;
    let end = End::new(V4, &impatient);
    end.connect(address, b"");
    let (mut wire, _) = incoming(&listener);
    std::thread::sleep(impatient.connect_timeout * 8);
    wire.write(&Hello::enhanced(true, false).octets(FrameKind::Reply));
    end.expect(CmEventKind::Established);
}

#[test]
fn responder_closes_within_reply() {
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
fn invalid_mpa_replies_are_refused() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# If the MPA Reply Frame is improperly formatted, the implementation MUST
    //# close the TCP connection and exit MPA.
    //= rfc5044 section 8
    //= type=test
    //# In this case, the TCP connection MUST be immediately closed.
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
fn impossible_reply_parameters_are_refused() {
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
fn reject_carries_private_data() {
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

/// The errors of `verbs` describe why an attempt failed. The texts of the errnos would mislead: "no
/// space left on device" for an excessive depth, or "connection refused" for a rejection without
/// private data.
#[test]
fn verbs_connect_failures_name_cause() {
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
            let pd = iwarp::verbs::ProtectionDomain::new(&ctx);
            let cq = ctx.create_cq(16, None).unwrap();
            let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
            iwarp::verbs::cm::Connector::new(&ctx).connect(address, qp)
        });
        let (mut wire, _) = incoming(&socket);
        wire.write(&reply.octets(FrameKind::Reply));
        let error = attempt.join().unwrap().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    drop(socket);
    let ctx = context(V4, &config());
    let pd = iwarp::verbs::ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
    let error = iwarp::verbs::cm::Connector::new(&ctx).connect(address, qp);
    assert!(
        matches!(&error, Err(Error::Io(e)) if e.raw_os_error() == Some(libc::ECONNREFUSED)),
        "{error:?}"
    );
}

#[test]
fn responders_of_revision_1() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        // Responders of revision 1 reset or close the stream after a request of revision 2.
        for reset in [true, false] {
            let end = End::new(V4, &config());
            end.connect(address, b"again");
            // The initiator first tries revision 2 again, because the stream may have ended for
            // another reason.
            for _ in 0..2 {
                let (wire, enhanced) = incoming(&socket);
                assert_eq!(enhanced.revision, 2);
                give_up(wire, reset);
            }
            let (mut wire, plain) = incoming(&socket);
            assert_eq!((plain.revision, plain.prefix), (1, None));
            assert_eq!(plain.private_data, b"again");
            wire.write(&Hello::plain().octets(FrameKind::Reply));
            end.expect(CmEventKind::Established);
            let mem = end.mem(64);
            mem.set(0, 11);
            end.post(1, SendOp::Send, &[mem.sge(8)]);
            assert_eq!(wire.expect(Opcode::SEND), 11u64.to_ne_bytes());
            end.expect_status(1, WcStatus::Success);
        }
        // If the attempt with revision 1 fails, too, there is no further attempt.
        let end = End::new(V4, &config());
        end.connect(address, b"");
        for revision in [2, 2, 1] {
            assert_eq!(incoming(&socket).1.revision, revision);
        }
        end.expect_failure(CmEventKind::Rejected, libc::ECONNRESET);
        socket.set_nonblocking(true).unwrap();
        assert!(socket.accept().is_err(), "there was a fourth attempt");
    });
}

/// The peer ends the stream instead of replying.
fn give_up(mut wire: Wire, reset: bool) {
    if reset {
        wire.reset();
    } else {
        wire.fin();
        assert!(wire.ends());
    }
}

/// A peer of revision 2 may be killed, or reset its queue pair, before it replies. The initiator
/// tries revision 2 again, so that the depths are negotiated.
#[test]
fn killed_setup_retries_with_revision_2() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for reset in [true, false] {
            let end = End::new(V4, &config());
            end.connect(address, b"again");
            let (wire, first) = incoming(&socket);
            give_up(wire, reset);
            let (mut wire, second) = incoming(&socket);
            assert_eq!(
                second.octets(FrameKind::Request),
                first.octets(FrameKind::Request)
            );
            assert!(second.prefix.is_some());
            let mut reply = Hello::enhanced(true, false);
            let depths = reply.prefix.as_mut().unwrap();
            (depths.ird, depths.ord) = (3, 2);
            wire.write(&reply.octets(FrameKind::Reply));
            let event = end.expect(CmEventKind::Established);
            assert_eq!(event.initiator_depth, Some(3));
            assert_eq!(event.responder_resources, Some(2));
        }
    });
}

#[test]
fn responders_choose_rtr_kind() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# If the MPA Reply Frame is properly formatted and the Private Data is
    //# acceptable, and the Reject Connection bit is set to '0', the implementation
    //# SHOULD enter Full MPA/DDP Operation Phase; interpreting any received data as
    //# FPDUs and sending DDP ULPDUs as FPDUs.
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
            // The RTR message writes no completion.
            end.expect_status(2, WcStatus::Success);
            assert!(end.cq.is_empty());
        }
    });
}

#[test]
fn established_precedes_disconnected() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for reset in [false, true] {
            for _ in 0..20 {
                let end = End::new(V4, &config());
                end.connect(address, b"");
                let (mut wire, _) = incoming(&socket);
                wire.write(&Hello::enhanced(true, false).octets(FrameKind::Reply));
                if reset {
                    // A reset may overtake the reply, so it is sent only after the reply was read.
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
fn fin_follows_rtr_with_delay() {
    // A kernel with siw may crash if the FIN arrives directly after the RTR message
    // (`docs/interop.md`).
    for destroy in [false, true] {
        let apart = (0..50).any(|_| {
            let end = End::new(V4, &config());
            let mut wire = responder(&end, &Hello::enhanced(true, false));
            if destroy {
                end.qp.destroy();
            } else {
                end.id.disconnect().unwrap();
            }
            // On a busy machine this thread may check too late, so one success in fifty attempts is
            // enough.
            let apart = wire.stays_open(Duration::from_millis(20));
            assert!(wire.ends());
            apart
        });
        assert!(apart, "destroy: {destroy}");
    }
}

#[test]
fn destroyed_queue_pair_still_reports_disconnected() {
    let end = End::new(V4, &config());
    // The responder has sent only its reply, so the end of the stream is delayed.
    let _wire = responder(&end, &Hello::enhanced(true, false));
    end.id.disconnect().unwrap();
    end.qp.destroy();
    assert_eq!(end.expect(CmEventKind::Disconnected).status, 0);
    std::thread::sleep(Duration::from_millis(100));
    assert!(
        end.channel.try_next().is_none(),
        "Disconnected was reported twice"
    );
}

#[test]
fn post_works_on_established_event() {
    //= rfc5044 section 7.1
    //= type=test
    //# A DDP endpoint MUST be "bound" to the MPA connection at entry to this phase.
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
fn own_private_data_is_limited() {
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
            // The end is dropped first. If the peer closed first, the end would try again with
            // revision 1.
            drop(end);
        }
    });
}

#[test]
fn destroying_the_identifier_cancels_the_attempt() {
    others_are_served(|| {
        let (socket, address) = listener(V4);
        for _ in 0..20 {
            let end = End::new(V4, &config());
            end.connect(address, b"");
            end.id.destroy();
            // The MPA request may have been sent already. After it, only the end of the stream may
            // follow.
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

/// Programs that use IPv6 addresses only name an IPv4 peer by its mapped address,
/// `::ffff:127.0.0.1`.
#[test]
fn ipv4_mapped_address_reaches_peer() {
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
