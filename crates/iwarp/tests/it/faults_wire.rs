//! Tests of peers that violate the protocol in full operation (RFC 5040 section 7, RFC 5041 section
//! 7, RFC 5044 section 8). The peer gets the right Terminate. The program gets a completion, an
//! asynchronous event and a Disconnected event. Other connections are not affected.

use crate::common::wire::{Hello, Wire, initiator, read, segment, write_header};
use crate::common::*;
use iwarp::runtime::cm::CmEventKind;
use iwarp::runtime::{State, WcStatus};
use iwarp::{Access, Blame, Config};
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::mpa::startup::{EnhancedPrefix, FrameKind};
use iwarp_proto::rdmap::{AtomicOp, Opcode, ReadRequest, TerminateCode as Code};
use std::net::IpAddr;

/// The memory regions of a case. `all` grants the peer all access, `local` grants none, and
/// `foreign` is in another protection domain.
struct Place {
    all: Mem,
    local: Mem,
    foreign: Mem,
}

const ACCESS: &str = "QpAccessError";
const REQUEST: &str = "QpRequestError";

struct Case {
    name: &'static str,
    /// Lets the peer violate the protocol.
    does: fn(&mut Wire, &Place),
    code: Code,
    event: &'static str,
    /// The status with which the posted receive completes.
    receive: WcStatus,
}

fn case(name: &'static str, code: Code, event: &'static str, does: fn(&mut Wire, &Place)) -> Case {
    Case {
        name,
        does,
        code,
        event,
        receive: WcStatus::Flushed,
    }
}

fn run(ip: IpAddr, config: &Config, cases: &[Case]) {
    others_are_served(|| {
        let server = Server::new(ip, config);
        for case in cases {
            let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
            let other_pd = end.ctx.allocate_pd();
            let place = Place {
                all: end.mem(64),
                local: Mem::with(&end.ctx, end.pd, 64, Access::LOCAL_WRITE),
                foreign: Mem::new(&end.ctx, other_pd, 64),
            };
            end.post_recv(5, &[place.all.sge(64)]);
            (case.does)(&mut wire, &place);
            wire.expect_terminate(case.code);
            let cqe = end.poll();
            assert_eq!((cqe.wr_id, cqe.status), (5, case.receive), "{}", case.name);
            end.expect_disconnected();
            let fault = end.qp.fault().unwrap();
            assert_eq!(
                (fault.blame, fault.code),
                (Blame::Peer, case.code),
                "{}",
                case.name
            );
            let mut seen = Vec::new();
            while seen.last().is_none_or(|k| k != "QpFatal") {
                seen.push(end.async_kind());
            }
            assert!(
                seen.iter().any(|k| k == case.event),
                "{}: {seen:?}",
                case.name
            );
            for m in [&place.all, &place.local, &place.foreign] {
                assert!(
                    (0..8).all(|i| m.word(i) == 0),
                    "{}: memory changed",
                    case.name
                );
            }
            assert_eq!(end.qp.counters().terminates_sent, 1);
        }
    });
}

#[test]
fn invalid_writes_are_refused() {
    let cases = [
        case(
            "no such STag",
            Code::DDP_TAGGED_INVALID_STAG,
            ACCESS,
            |w, _| {
                w.write_op(0x1234_5678, 0, b"12345678");
            },
        ),
        case(
            "wrong key",
            Code::DDP_TAGGED_INVALID_STAG,
            ACCESS,
            |w, p| {
                w.write_op(p.all.stag ^ 1, p.all.addr(), b"12345678");
            },
        ),
        case(
            "after the end",
            Code::DDP_TAGGED_BASE_BOUNDS,
            ACCESS,
            |w, p| {
                w.write_op(p.all.stag, p.all.addr() + 60, b"12345678");
            },
        ),
        case(
            "before the start",
            Code::DDP_TAGGED_BASE_BOUNDS,
            ACCESS,
            |w, p| {
                w.write_op(p.all.stag, p.all.addr() - 4, b"12345678");
            },
        ),
        case("offset wraps", Code::DDP_TAGGED_TO_WRAP, ACCESS, |w, p| {
            w.write_op(p.all.stag, u64::MAX - 3, b"12345678");
        }),
        case("no right", Code::RDMAP_ACCESS, ACCESS, |w, p| {
            w.write_op(p.local.stag, p.local.addr(), b"12345678");
        }),
        case(
            "other domain",
            Code::DDP_TAGGED_NOT_ASSOCIATED,
            ACCESS,
            |w, p| {
                w.write_op(p.foreign.stag, p.foreign.addr(), b"12345678");
            },
        ),
    ];
    run(V4, &config(), &cases);
}

#[test]
fn invalid_reads_and_responses_are_refused() {
    let cases = [
        case("no such STag", Code::RDMAP_INVALID_STAG, ACCESS, |w, _| {
            w.read_op(read(0x1234_5678, 0, 8));
        }),
        case("after the end", Code::RDMAP_BASE_BOUNDS, ACCESS, |w, p| {
            w.read_op(read(p.all.stag, p.all.addr() + 60, 8));
        }),
        case("offset wraps", Code::RDMAP_TO_WRAP, ACCESS, |w, p| {
            w.read_op(read(p.all.stag, u64::MAX - 3, 8));
        }),
        case("no right", Code::RDMAP_ACCESS, ACCESS, |w, p| {
            w.read_op(read(p.local.stag, p.local.addr(), 8));
        }),
        case(
            "other domain",
            Code::RDMAP_STAG_NOT_ASSOCIATED,
            ACCESS,
            |w, p| {
                w.read_op(read(p.foreign.stag, p.foreign.addr(), 8));
            },
        ),
        case(
            "short request",
            Code::RDMAP_OPERATION_UNSPECIFIED,
            REQUEST,
            |w, _| {
                w.untagged(Opcode::READ_REQUEST, &[0; 20]);
            },
        ),
        case(
            "unrequested response",
            Code::RDMAP_UNEXPECTED_OPCODE,
            REQUEST,
            |w, p| {
                let Header::Tagged(h) = write_header(p.all.stag, p.all.addr(), true) else {
                    return;
                };
                let opcode = Opcode::READ_RESPONSE;
                w.send(
                    Header::Tagged(iwarp_proto::ddp::TaggedHeader { opcode, ..h }),
                    b"12345678",
                );
            },
        ),
    ];
    run(V6, &config(), &cases);
}

#[test]
fn invalid_atomics_and_invalidations_are_refused() {
    let mut cases = vec![
        case("no such STag", Code::RDMAP_INVALID_STAG, ACCESS, |w, _| {
            w.atomic_op(AtomicOp::FETCH_ADD, 0x1234_5678, 0);
        }),
        case("after the end", Code::RDMAP_BASE_BOUNDS, ACCESS, |w, p| {
            w.atomic_op(AtomicOp::CMP_SWAP, p.all.stag, p.all.addr() + 64);
        }),
        case("no right", Code::RDMAP_ACCESS, ACCESS, |w, p| {
            w.atomic_op(AtomicOp::FETCH_ADD, p.local.stag, p.local.addr());
        }),
        case(
            "other domain",
            Code::RDMAP_STAG_NOT_ASSOCIATED,
            ACCESS,
            |w, p| {
                w.atomic_op(AtomicOp::FETCH_ADD, p.foreign.stag, p.foreign.addr());
            },
        ),
        case(
            "not aligned",
            Code::RDMAP_CATASTROPHIC_STREAM,
            REQUEST,
            |w, p| {
                w.atomic_op(AtomicOp::FETCH_ADD, p.all.stag, p.all.addr() + 4);
            },
        ),
        case(
            "no such operation",
            Code::RDMAP_UNEXPECTED_OPCODE,
            REQUEST,
            |w, p| {
                w.atomic_op(AtomicOp(1), p.all.stag, p.all.addr());
            },
        ),
        case(
            "unrequested response",
            Code::RDMAP_UNEXPECTED_OPCODE,
            REQUEST,
            |w, _| {
                w.untagged(Opcode::ATOMIC_RESPONSE, &[0; 12]);
            },
        ),
    ];
    let not_mine: [fn(&mut Wire, &Place); 3] = [
        |w, _| send_inv(w, 0x1234_5678),
        // A peer may not invalidate an ordinary memory region.
        |w, p| send_inv(w, p.all.stag),
        |w, p| send_inv(w, p.foreign.stag),
    ];
    for does in not_mine {
        cases.push(Case {
            receive: WcStatus::LocalAccess,
            ..case("invalidation", Code::RDMAP_CANNOT_INVALIDATE, ACCESS, does)
        });
    }
    run(V4, &config(), &cases);
}

fn send_inv(w: &mut Wire, stag: u32) {
    let mut h = w.untagged_header(Opcode::SEND_INV);
    h.invalidate_stag = Stag(stag);
    w.send(Header::Untagged(h), b"");
}

/// Sends a Send whose header is changed by `change`.
fn send_changed(w: &mut Wire, change: impl FnOnce(&mut iwarp_proto::ddp::UntaggedHeader)) {
    let mut h = w.untagged_header(Opcode::SEND);
    change(&mut h);
    w.send(Header::Untagged(h), b"payload");
}

/// Sends a Send whose header octet at `at` is replaced by `octet`.
fn control_changed(w: &mut Wire, at: usize, octet: u8) {
    let h = Header::Untagged(w.untagged_header(Opcode::SEND));
    let mut ulpdu = segment(&h, b"payload");
    ulpdu[at] = octet;
    w.send_ulpdu(&ulpdu);
}

#[test]
fn invalid_untagged_fields_are_refused() {
    let cases = [
        case(
            "MSN skipped",
            Code::DDP_UNTAGGED_INVALID_MSN,
            REQUEST,
            |w, _| {
                send_changed(w, |h| h.msn += 1);
            },
        ),
        case(
            "MSN repeated",
            Code::DDP_UNTAGGED_INVALID_MSN,
            REQUEST,
            |w, _| {
                send_changed(w, |h| h.msn -= 1);
            },
        ),
        case(
            "offset in a first segment",
            Code::DDP_UNTAGGED_INVALID_MO,
            REQUEST,
            |w, _| {
                send_changed(w, |h| h.mo = 8);
            },
        ),
        case(
            "no such queue",
            Code::DDP_UNTAGGED_INVALID_QN,
            REQUEST,
            |w, _| {
                send_changed(w, |h| h.qn = 4);
            },
        ),
        case(
            "another's queue",
            Code::RDMAP_UNEXPECTED_OPCODE,
            REQUEST,
            |w, _| {
                send_changed(w, |h| h.qn = 1);
            },
        ),
        Case {
            receive: WcStatus::LocalLength,
            ..case(
                "Send too long",
                Code::DDP_UNTAGGED_TOO_LONG,
                REQUEST,
                |w, _| {
                    w.untagged(Opcode::SEND, &[7; 65]);
                },
            )
        },
    ];
    run(V4, &config(), &cases);
}

#[test]
fn invalid_control_octets_are_refused() {
    let cases = [
        case(
            "no such opcode",
            Code::RDMAP_UNEXPECTED_OPCODE,
            REQUEST,
            |w, _| {
                control_changed(w, 1, 0x4c);
            },
        ),
        case(
            "untagged Write",
            Code::RDMAP_UNEXPECTED_OPCODE,
            REQUEST,
            |w, _| {
                control_changed(w, 1, 0x40);
            },
        ),
        case(
            "DDP version",
            Code::DDP_UNTAGGED_INVALID_VERSION,
            REQUEST,
            |w, _| {
                control_changed(w, 0, 0x42);
            },
        ),
        case(
            "RDMAP version",
            Code::RDMAP_INVALID_VERSION,
            REQUEST,
            |w, _| {
                control_changed(w, 1, 0x83);
            },
        ),
        case(
            "tagged DDP version",
            Code::DDP_TAGGED_INVALID_VERSION,
            REQUEST,
            |w, p| {
                let mut ulpdu = segment(&write_header(p.all.stag, p.all.addr(), true), b"12345678");
                ulpdu[0] = 0xc3;
                w.send_ulpdu(&ulpdu);
            },
        ),
    ];
    run(V4, &config(), &cases);
}

#[test]
fn broken_fpdus_are_refused() {
    let cases = [
        case("half a header", Code::MPA_MARKER, REQUEST, |w, _| {
            w.send_ulpdu(&[0x41, 0x43, 0, 0]);
        }),
        case("nothing", Code::MPA_MARKER, REQUEST, |w, _| {
            w.send_ulpdu(&[])
        }),
        case("wrong CRC", Code::MPA_CRC, REQUEST, |w, p| {
            let ulpdu = segment(&write_header(p.all.stag, p.all.addr(), true), b"12345678");
            let mut fpdu = w.fpdu(&ulpdu);
            fpdu[20] ^= 0x10;
            w.write(&fpdu);
        }),
    ];
    run(V4, &config(), &cases);
}

#[test]
fn terminate_names_segment_and_request() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let (mut wire, _end) = initiator(&server, &Hello::enhanced(true, false));
        let header = write_header(0xabcd_ef01, 77, true);
        wire.send(header, b"12345678");
        let t = wire.expect_terminate(Code::DDP_TAGGED_INVALID_STAG);
        assert_eq!((t.ddp_header, t.ddp_segment_len), (Some(header), Some(22)));

        let (mut wire, _end) = initiator(&server, &Hello::enhanced(false, true));
        let request = read(0xabcd_ef01, 77, 8);
        wire.read_op(request);
        let t = wire.expect_terminate(Code::RDMAP_INVALID_STAG);
        assert_eq!(t.read_request, Some(request));
        assert!(matches!(t.ddp_header, Some(Header::Untagged(h)) if h.qn == 1 && h.msn == 2));
    });
}

#[test]
fn excess_reads_end_the_stream() {
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        // The socket has no room for Read Responses of this size while the peer does not read, so
        // the requests stay outstanding.
        let mem = end.mem(16 << 20);
        for _ in 0..40 {
            wire.read_op(read(mem.stag, mem.addr(), 16 << 20));
        }
        end.expect_disconnected();
        let terminate = loop {
            let (header, payload) = wire.recv();
            if header.opcode() != Opcode::READ_RESPONSE {
                break (header.opcode(), payload);
            }
        };
        assert_eq!(terminate.0, Opcode::TERMINATE);
        let t = iwarp_proto::rdmap::Terminate::parse(&terminate.1)
            .unwrap()
            .0;
        assert_eq!(t.code, Code::DDP_UNTAGGED_NO_BUFFER);
        assert!(wire.ends());
        end.qp.destroy();
        end.ctx.deregister(mem.stag).unwrap();
    });
}

/// Returns the resident set size of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kilobytes: u64 = line
        .unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    kilobytes << 10
}

/// The peer requests as many Reads as a device grants, 4 GiB altogether, and does not read the
/// responses.
#[test]
fn full_read_depth_costs_little_memory() {
    alone("full_read_depth_costs_little_memory", || {
        const MOST: u16 = 4096;
        const EACH: u32 = 1 << 20;
        others_are_served(|| {
            let server = Server::new(V4, &config());
            let mut hello = Hello::client_server();
            hello.prefix = hello.prefix.map(|prefix| EnhancedPrefix {
                ord: MOST,
                ..prefix
            });
            let mut wire = Wire::connect(server.address);
            wire.write(&hello.octets(FrameKind::Request));
            let end = server.end_with(server.request(), None, MOST, 1024);
            end.id.accept(&parameters(b"")).unwrap();
            let reply = wire.read_hello(FrameKind::Reply);
            assert_eq!(reply.prefix.map(|prefix| prefix.ird), Some(MOST));
            let mem = end.mem(EACH as usize);
            let before = resident();
            for _ in 0..MOST {
                wire.read_op(read(mem.stag, mem.addr(), EACH));
            }
            until("all requests are taken", || {
                end.qp.counters().rx_requests == u64::from(MOST)
            });
            let mut other = Healthy::new(V4);
            other.check();
            assert_eq!(end.qp.state(), State::Rts);
            let more = resident().saturating_sub(before);
            assert!(more < 64 << 20, "{more} octets");
            // The socket has accepted the first few responses, so a few more requests would be
            // allowed, but not 64.
            let mut octets = Vec::new();
            for _ in 0..64 {
                let mut body = [0; ReadRequest::LEN];
                read(mem.stag, mem.addr(), EACH).emit(&mut body);
                let header = Header::Untagged(wire.untagged_header(Opcode::READ_REQUEST));
                octets.extend(wire.fpdu(&segment(&header, &body)));
            }
            wire.write(&octets);
            end.expect(CmEventKind::Established);
            end.expect_disconnected();
            assert_eq!(
                end.qp.fault().map(|fault| fault.code),
                Some(Code::DDP_UNTAGGED_NO_BUFFER)
            );
            other.check();
            end.qp.destroy();
            end.ctx.deregister(mem.stag).unwrap();
        });
    });
}
