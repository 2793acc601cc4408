//! One test for each known requirement of iWARP hardware: what its drivers require in connection
//! set-up, and what they send. `docs/interop.md` lists the requirements. Two of them concern TCP
//! segments and are tested in `crates/iwarp-cli/tests/it/alignment.rs`.

use crate::common::wire::{Hello, Wire};
use crate::common::*;
use iwarp::runtime::cm::CmEventKind;
use iwarp::runtime::{SendOp, WcStatus};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader};
use iwarp_proto::mpa::startup::{EnhancedPrefix, FrameKind};
use iwarp_proto::rdmap::{Opcode, ReadRequest};
use std::io::Read as _;
use std::net::{SocketAddr, TcpListener};

/// Flags in the first octets of the IRD word (`A`, `B`) and the ORD word (`C`, `D`) before the
/// private data (RFC 6581 section 9).
const A: u8 = 0x80;
const B: u8 = 0x40;
const C: u8 = 0x80;
const D: u8 = 0x40;

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(SocketAddr::new(V4, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Reads the octets of a start-up frame: 20 octets, and the length that they announce.
fn raw_frame(wire: &mut Wire) -> Vec<u8> {
    let mut frame = vec![0; 20];
    wire.socket.read_exact(&mut frame).unwrap();
    let len = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
    frame.resize(20 + len, 0);
    wire.socket.read_exact(&mut frame[20..]).unwrap();
    frame
}

/// irdma refuses enhanced requests without the peer-to-peer flag. cxgb4 accepts only the one kind
/// of RTR message that it is configured for. So the request sets that flag and offers both kinds
/// that hardware knows.
#[test]
fn request_offers_write_and_read_rtr() {
    let (socket, address) = listener();
    let end = End::new(V4, &config());
    end.connect(address, b"hello");
    let mut wire = Wire::new(socket.accept().unwrap().0);
    let frame = raw_frame(&mut wire);
    assert_eq!(&frame[..16], b"MPA ID Req Frame");
    assert!(frame[16] & 0x10 != 0, "enhanced");
    assert_eq!(frame[16] & 0x80, 0, "no markers: siw cannot send them");
    assert_eq!(frame[17], 2);
    assert_eq!(frame[20] & (A | B), A);
    assert_eq!(frame[22] & (C | D), C | D);
    assert_eq!(&frame[24..], b"hello");
}

/// cxgb4 checks flag C before D, and terminates the stream unless the first flag that is set is the
/// kind of RTR message that it is configured for.
#[test]
fn reply_selects_one_offered_rtr() {
    let server = Server::new(V4, &config());
    for (write, read) in [(true, true), (true, false), (false, true)] {
        let mut wire = Wire::connect(server.address);
        wire.write(&Hello::enhanced(write, read).octets(FrameKind::Request));
        let end = server.accept();
        let frame = raw_frame(&mut wire);
        let (first, second) = (frame[20] & (A | B), frame[22] & (C | D));
        assert_eq!(first, A);
        assert!(
            second == C && write || second == D && read,
            "{second:02x} for write {write}, read {read}"
        );
        drop(end);
    }
}

/// Chelsio's hardware fails tagged messages with STag 0, whatever their length.
#[test]
fn rtr_does_not_use_stag_zero() {
    for (write, read) in [(true, false), (false, true)] {
        let (socket, address) = listener();
        let end = End::new(V4, &config());
        end.connect(address, b"");
        let mut wire = Wire::new(socket.accept().unwrap().0);
        wire.read_hello(FrameKind::Request);
        wire.write(&Hello::enhanced(write, read).octets(FrameKind::Reply));
        end.expect(CmEventKind::Established);
        let (header, payload) = wire.recv();
        match header {
            Header::Tagged(header) => {
                assert!(write);
                let wanted = TaggedHeader {
                    last: true,
                    opcode: Opcode::WRITE,
                    stag: Stag(1),
                    to: 0,
                };
                assert_eq!((header, payload.len()), (wanted, 0));
            }
            Header::Untagged(header) => {
                assert!(read);
                assert_eq!((header.opcode, header.msn), (Opcode::READ_REQUEST, 1));
                let request = ReadRequest::parse(&payload).unwrap();
                assert_eq!((request.size, request.source_stag), (0, Stag(1)));
                assert_ne!(request.sink_stag, Stag(0), "the answer is tagged, too");
            }
        }
    }
}

/// cxgb4 sends its RTR message on revision 1 as well, where none is negotiated, and expects the
/// response if it is a Read. The RTR message comes before any message of the ULP and causes no
/// completion.
#[test]
fn revision_1_allows_empty_first_message() {
    let server = Server::new(V4, &config());
    for read in [true, false] {
        let mut wire = Wire::connect(server.address);
        wire.write(&Hello::plain().octets(FrameKind::Request));
        let end = server.accept();
        assert_eq!(wire.read_hello(FrameKind::Reply).revision, 1);
        end.expect(CmEventKind::Established);
        if read {
            wire.rtr_read();
            assert_eq!(wire.expect(Opcode::READ_RESPONSE), b"");
        } else {
            wire.rtr_write();
        }
        let mem = end.mem(64);
        end.post_recv(1, &[mem.sge(8)]);
        wire.untagged(Opcode::SEND, &5u64.to_ne_bytes());
        end.expect_status(1, WcStatus::Success);
        end.post(2, SendOp::Send, &[mem.sge(8)]);
        assert_eq!(wire.expect(Opcode::SEND), 5u64.to_ne_bytes());
        end.expect_status(2, WcStatus::Success);
        assert!(end.cq.is_empty());
    }
}

/// Both families of hardware fall back to revision 1 only after a reset, not after a FIN. So a
/// responder that knows only revision 1 has to reset the stream.
#[test]
fn a_responder_of_revision_1_resets() {
    let mut old = config();
    old.mpa_revision = 1;
    let server = Server::new(V4, &old);
    let mut wire = Wire::connect(server.address);
    wire.write(&Hello::enhanced(true, true).octets(FrameKind::Request));
    wire.ends_with_reset();
    // The initiator connects again with revision 1.
    let mut wire = Wire::connect(server.address);
    wire.write(&Hello::plain().octets(FrameKind::Request));
    let end = server.accept();
    assert_eq!(wire.read_hello(FrameKind::Reply).revision, 1);
    end.expect(CmEventKind::Established);
}

/// siw accepts at most 256 octets of private data, including the 4 octets of the prefix, and keeps
/// the length of the private data that it sends in one octet. 251 octets and the prefix, 255
/// together, fit both limits.
#[test]
fn private_data_of_251_octets_fits() {
    let (socket, address) = listener();
    let end = End::new(V4, &config());
    end.connect(address, &[7; 251]);
    let mut wire = Wire::new(socket.accept().unwrap().0);
    let frame = raw_frame(&mut wire);
    assert_eq!(frame.len(), 20 + 255);
    assert_eq!(frame[24..], [7; 251]);
}

/// Depth 0x3fff means "not negotiated". irdma requests that itself, and treats both depths as not
/// negotiated if either one in the reply is 0x3fff.
#[test]
fn unnegotiated_depths_are_echoed() {
    let server = Server::new(V4, &config());
    let mut hello = Hello::enhanced(true, true);
    hello.prefix = Some(EnhancedPrefix {
        ird: 0x3fff,
        ord: 0x3fff,
        ..hello.prefix.unwrap()
    });
    let mut wire = Wire::connect(server.address);
    wire.write(&hello.octets(FrameKind::Request));
    let end = server.accept();
    let reply = wire.read_hello(FrameKind::Reply).prefix.unwrap();
    assert_eq!((reply.ird, reply.ord), (0x3fff, 0x3fff));
    drop(end);
}

/// Reserved bits are zero when we send and ignored when we receive. siw uses one of them to request
/// large FPDUs.
#[test]
fn reserved_bits_are_not_echoed() {
    let server = Server::new(V4, &config());
    let mut wire = Wire::connect(server.address);
    let mut octets = Hello::enhanced(true, true).octets(FrameKind::Request);
    octets[16] |= 0x0f;
    wire.write(&octets);
    let end = server.accept();
    let frame = raw_frame(&mut wire);
    assert_eq!(frame[16] & 0x0f, 0);
    assert_eq!(frame[16] & 0x10, 0x10, "enhanced");
    drop(end);
}
