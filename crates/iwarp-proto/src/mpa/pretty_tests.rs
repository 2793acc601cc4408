//! The printed lines of frames and FPDUs.

use super::*;
use crate::crc32c::append;
use crate::ddp::Stag;
use crate::mpa::framing::encode_fpdu;
use crate::mpa::startup::{EnhancedPrefix, FrameHeader};
use crate::rdmap::AtomicOp;

extern crate std;
use std::string::{String, ToString as _};
use std::vec::Vec;
use std::{format, vec};

const PLAIN: FpduOptions = FpduOptions {
    crc: None,
    markers: false,
};
const CRC: FpduOptions = FpduOptions {
    crc: Some(append),
    markers: false,
};
const MARKERS: FpduOptions = FpduOptions {
    crc: Some(append),
    markers: true,
};

fn printed(octets: &[u8], opts: FpduOptions) -> String {
    Stream::new(octets, opts).to_string()
}

fn untagged(opcode: Opcode, qn: u32) -> Header {
    Header::Untagged(UntaggedHeader {
        opcode,
        last: true,
        qn,
        msn: 7,
        mo: 0,
        ..UntaggedHeader::default()
    })
}

fn ulpdu(header: &Header, body: &[u8]) -> Vec<u8> {
    let mut out = vec![0; header.len()];
    assert_eq!(header.emit(&mut out), header.len());
    out.extend_from_slice(body);
    out
}

fn fpdus(ulpdus: &[&[u8]], opts: FpduOptions) -> Vec<u8> {
    let mut clock = MarkerClock::new();
    let mut wire = vec![];
    for ulpdu in ulpdus {
        let mut out = vec![0; ulpdu.len() + 64];
        let len = encode_fpdu(ulpdu, &opts, &mut clock, &mut out).unwrap();
        wire.extend_from_slice(&out[..len]);
    }
    wire
}

/// Returns the printed line of an FPDU, without the text before its header.
fn described(header: &Header, body: &[u8]) -> String {
    let ulpdu = ulpdu(header, body);
    let line = printed(&fpdus(&[&ulpdu], PLAIN), PLAIN);
    let head = format!("       0 FPDU {}: ", ulpdu.len());
    let rest = line.strip_prefix(&head).unwrap_or_else(|| panic!("{line}"));
    rest.strip_suffix('\n').unwrap().into()
}

fn frame(kind: FrameKind, flags: Flags, data: &[u8]) -> Vec<u8> {
    let header = FrameHeader {
        kind,
        flags,
        revision: 2,
        pd_length: data.len() as u16,
    };
    let mut out = vec![0; header.frame_len()];
    header.emit(&mut out);
    out[20..].copy_from_slice(data);
    out
}

#[test]
fn frames_are_described() {
    let mut prefix = [0; EnhancedPrefix::LEN];
    let enhanced = EnhancedPrefix {
        ird: 3,
        ord: 4,
        peer_to_peer: true,
        rtr_send: true,
        rtr_write: true,
        rtr_read: true,
    };
    enhanced.emit(&mut prefix);
    let flags = Flags(Flags::MARKERS.0 | Flags::CRC.0 | Flags::ENHANCED.0);
    let request = frame(FrameKind::Request, flags, &[&prefix[..], b"hi"].concat());
    assert_eq!(
        printed(&request, PLAIN),
        "       0 MPA Request revision 2 markers CRC enhanced IRD 3 ORD 4 \
         peer-to-peer RTR-Send RTR-Write RTR-Read, 2 octets private data\n"
    );
    let reply = frame(FrameKind::Reply, Flags::REJECT, b"sorry");
    assert_eq!(
        printed(&reply, PLAIN),
        "       0 MPA Reply revision 2 reject, 5 octets private data\n"
    );
    // Offsets of FPDUs include the frame.
    let send = ulpdu(&untagged(Opcode::SEND, 0), b"abc");
    let all = [&reply[..], &fpdus(&[&send, &send], PLAIN)].concat();
    let lines: Vec<String> = printed(&all, PLAIN).lines().map(String::from).collect();
    assert!(lines[1].starts_with("      25 FPDU 21: "), "{lines:?}");
    assert!(lines[2].starts_with("      53 FPDU 21: "), "{lines:?}");
    assert_eq!(lines.len(), 3);
    // The first marker is after the frame.
    let all = [&reply[..], &fpdus(&[&send, &send], MARKERS)].concat();
    let lines: Vec<String> = printed(&all, MARKERS).lines().map(String::from).collect();
    let first = "      25 FPDU 21 markers 1 CRC good: ";
    assert!(lines[1].starts_with(first), "{lines:?}");
    assert!(
        lines[2].starts_with("      57 FPDU 21 CRC good: "),
        "{lines:?}"
    );
    assert_eq!(printed(&[], PLAIN), "");
}

#[test]
fn invalid_fpdus_are_described() {
    let send = ulpdu(&untagged(Opcode::SEND, 0), b"abc");
    let line = |wire: &[u8], opts| printed(wire, opts).lines().next().unwrap().to_string();
    let mut wire = fpdus(&[&send], CRC);
    assert!(line(&wire, CRC).starts_with("       0 FPDU 21 CRC good: "));
    wire[10] ^= 1;
    assert!(line(&wire, CRC).starts_with("       0 FPDU 21 CRC BAD: "));
    assert!(line(&wire, PLAIN).starts_with("       0 FPDU 21: "));
    let cut = "       0 27 octets of an incomplete FPDU\n";
    assert_eq!(printed(&wire[..27], CRC), cut);
    let stub = fpdus(&[&send[..13]], PLAIN);
    assert_eq!(
        printed(&stub, PLAIN),
        "       0 FPDU 13: shorter than a DDP header\n"
    );
}

#[test]
fn markers_are_counted_and_checked() {
    // The first marker is before the first FPDU, the second inside it, and the third before the
    // second FPDU.
    let long = ulpdu(
        &untagged(Opcode::SEND, 0),
        &[0x5a; 1024 - 4 - 4 - 2 - 18 - 4],
    );
    let wire = fpdus(&[&long, &long[..18]], MARKERS);
    let text = printed(&wire, MARKERS);
    assert_eq!(
        text,
        "       0 FPDU 1010 markers 2 CRC good: SEND QN 0 MSN 7 MO 0, 992 octets, last\n    \
         1024 FPDU 18 markers 1 CRC good: SEND QN 0 MSN 7 MO 0, 0 octets, last\n"
    );
    let mut bad = wire.clone();
    bad[515] ^= 4;
    let text = printed(&bad, MARKERS);
    assert!(
        text.contains("FPDU 1010 markers 2 BAD MARKERS 1 CRC BAD: "),
        "{text}"
    );
    assert!(text.contains("FPDU 18 markers 1 CRC good: "), "{text}");
}

/// A marker may split a header. It must not be printed as a part of the header.
#[test]
fn header_is_read_around_marker() {
    let request = ReadRequest {
        sink_stag: Stag(0x0102_0304),
        sink_to: 0x10,
        size: 5,
        source_stag: Stag(0x0506_0708),
        source_to: 0x20,
    };
    let mut body = [0; ReadRequest::LEN];
    request.emit(&mut body);
    let read = ulpdu(&untagged(Opcode::READ_REQUEST, 1), &body);
    // The second FPDU begins 12 octets before the second marker.
    let first = ulpdu(&untagged(Opcode::SEND, 0), &[1; 512 - 12 - 4 - 2 - 18 - 4]);
    let wire = fpdus(&[&first, &read], MARKERS);
    let text = printed(&wire, MARKERS);
    assert!(
        text.ends_with(
            "     500 FPDU 46 markers 1 CRC good: READ_REQUEST QN 1 MSN 7 MO 0, 28 octets: \
             5 octets from STag 0x05060708 TO 0x20 to STag 0x01020304 TO 0x10, last\n"
        ),
        "{text}"
    );
}

#[test]
fn headers_are_described() {
    let write = Header::Tagged(TaggedHeader {
        last: false,
        opcode: Opcode::WRITE,
        stag: Stag(0x1234),
        to: 0x5678,
    });
    assert_eq!(
        described(&write, b"four"),
        "WRITE STag 0x00001234 TO 0x5678, 4 octets"
    );
    let invalidates = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::SEND_INV,
        invalidate_stag: Stag(0x99),
        qn: 0,
        msn: 2,
        mo: 3,
    });
    assert_eq!(
        described(&invalidates, b""),
        "SEND_INV QN 0 MSN 2 MO 3, 0 octets, invalidates 0x00000099, last"
    );
    let invalid_queue = described(&untagged(Opcode::SEND, 9), b"");
    assert!(
        invalid_queue
            .starts_with("SEND QN 9 MSN 7 MO 0, 0 octets, last -- no untagged queue 9, terminate "),
        "{invalid_queue}"
    );
}

#[test]
fn atomics_are_described() {
    let request = AtomicRequest {
        op: AtomicOp::CMP_SWAP,
        request_id: 1,
        stag: Stag(2),
        to: 3,
        add_swap: 4,
        add_swap_mask: 5,
        compare: 6,
        compare_mask: 7,
    };
    let mut body = [0; AtomicRequest::LEN];
    request.emit(&mut body);
    let header = untagged(Opcode::ATOMIC_REQUEST, 1);
    assert_eq!(
        described(&header, &body),
        "ATOMIC_REQUEST QN 1 MSN 7 MO 0, 52 octets: CMP_SWAP id 1 STag 0x00000002 \
         TO 0x3 data 0x4 mask 0x5 compare 0x6 \
         mask 0x7, last"
    );
    assert!(described(&header, &body[..51]).ends_with("51 octets: cut short, last"));
    let response = AtomicResponse {
        request_id: 8,
        original: 9,
    };
    let mut body = [0; AtomicResponse::LEN];
    response.emit(&mut body);
    let header = untagged(Opcode::ATOMIC_RESPONSE, 3);
    assert!(described(&header, &body).ends_with("12 octets: id 8 original 0x9, last"));
    assert!(described(&header, &body[..11]).ends_with("11 octets: cut short, last"));
    let header = untagged(Opcode::READ_REQUEST, 1);
    assert!(described(&header, &[0; 27]).ends_with("27 octets: cut short, last"));
}

#[test]
fn immediates_are_described() {
    for opcode in [Opcode::IMMEDIATE, Opcode::IMMEDIATE_SE] {
        let line = |immediate: Immediate| described(&untagged(opcode, 0), &immediate.octets());
        assert!(line(Immediate::plain(0x77)).ends_with("8 octets: 0x77, last"));
        assert!(line(Immediate::before_send(0x77)).ends_with("8 octets: 0x77 before Send, last"));
        let long = described(&untagged(opcode, 0), &[0; 9]);
        assert!(long.ends_with("9 octets: not 8 octets, last"), "{long}");
    }
}

#[test]
fn terminates_are_described() {
    let header = untagged(Opcode::TERMINATE, 2);
    let about = |terminate: &Terminate| {
        let mut body = [0; Terminate::MAX_LEN];
        let len = terminate.emit(&mut body);
        described(&header, &body[..len])
    };
    let bare = Terminate::new(TerminateCode::RDMAP_INVALID_STAG);
    assert_eq!(
        about(&bare),
        format!(
            "TERMINATE QN 2 MSN 7 MO 0, 4 octets: {:?} Rfc layout, last",
            bare.code
        )
    );
    let read = ReadRequest {
        size: 77,
        ..ReadRequest::default()
    };
    let segment = untagged(Opcode::READ_REQUEST, 1);
    let full = about(&Terminate {
        ddp_segment_len: Some(46),
        ddp_header: Some(segment),
        read_request: Some(read),
        ..bare
    });
    let ends = format!(" layout, segment 46, about {segment:?}, {read:?}, last");
    assert!(full.ends_with(&ends), "{full}");
    let cut = described(&header, &[0; 3]);
    assert!(
        cut.ends_with("3 octets: Terminate message is shorter than its control word, last"),
        "{cut}"
    );
}
