//! Tests of the Terminate message: the tables of the RFCs, and the layouts of RFC 5040 and siw.

use iwarp_proto::ddp::{Header, Stag, TaggedHeader, UntaggedHeader};
use iwarp_proto::rdmap::terminate::{Etype, Layer, Layout, TerminateError};
use iwarp_proto::rdmap::{Opcode, ReadRequest, Terminate, TerminateCode as C};

/// The codes of RFC 5040 figure 9, RFC 5041 §7.2, RFC 5044 §8 and RFC 6581 §8, copied from the
/// documents.
const TABLE: &[(u8, u8, u8, C)] = &[
    (0, 0, 0x00, C::RDMAP_LOCAL_CATASTROPHIC),
    (0, 1, 0x00, C::RDMAP_INVALID_STAG),
    (0, 1, 0x01, C::RDMAP_BASE_BOUNDS),
    (0, 1, 0x02, C::RDMAP_ACCESS),
    (0, 1, 0x03, C::RDMAP_STAG_NOT_ASSOCIATED),
    (0, 1, 0x04, C::RDMAP_TO_WRAP),
    (0, 1, 0x09, C::RDMAP_CANNOT_INVALIDATE),
    (0, 1, 0xff, C::RDMAP_PROTECTION_UNSPECIFIED),
    (0, 2, 0x05, C::RDMAP_INVALID_VERSION),
    (0, 2, 0x06, C::RDMAP_UNEXPECTED_OPCODE),
    (0, 2, 0x07, C::RDMAP_CATASTROPHIC_STREAM),
    (0, 2, 0x08, C::RDMAP_CATASTROPHIC_GLOBAL),
    (0, 2, 0x09, C::RDMAP_OPERATION_CANNOT_INVALIDATE),
    (0, 2, 0xff, C::RDMAP_OPERATION_UNSPECIFIED),
    (1, 0, 0x00, C::DDP_LOCAL_CATASTROPHIC),
    (1, 1, 0x00, C::DDP_TAGGED_INVALID_STAG),
    (1, 1, 0x01, C::DDP_TAGGED_BASE_BOUNDS),
    (1, 1, 0x02, C::DDP_TAGGED_NOT_ASSOCIATED),
    (1, 1, 0x03, C::DDP_TAGGED_TO_WRAP),
    (1, 1, 0x04, C::DDP_TAGGED_INVALID_VERSION),
    (1, 2, 0x01, C::DDP_UNTAGGED_INVALID_QN),
    (1, 2, 0x02, C::DDP_UNTAGGED_NO_BUFFER),
    (1, 2, 0x03, C::DDP_UNTAGGED_INVALID_MSN),
    (1, 2, 0x04, C::DDP_UNTAGGED_INVALID_MO),
    (1, 2, 0x05, C::DDP_UNTAGGED_TOO_LONG),
    (1, 2, 0x06, C::DDP_UNTAGGED_INVALID_VERSION),
    (2, 0, 0x01, C::MPA_CONNECTION_LOST),
    (2, 0, 0x02, C::MPA_CRC),
    (2, 0, 0x03, C::MPA_MARKER),
    (2, 0, 0x04, C::MPA_INVALID_FRAME),
    (2, 0, 0x05, C::MPA_LOCAL_CATASTROPHIC),
    (2, 0, 0x06, C::MPA_INSUFFICIENT_IRD),
    (2, 0, 0x07, C::MPA_NO_MATCHING_RTR),
];

#[test]
fn codes_match_rfcs() {
    //= rfc5040 section 4.8
    //= type=test
    //# Figure 9, "Terminate Control Field Values", defines the valid
    //# values that MUST be used for this field.
    assert_eq!(C::ALL.len(), TABLE.len());
    for &(layer, etype, code, constant) in TABLE {
        assert_eq!(constant, C { layer, etype, code });
        assert!(constant.description().is_some());
        assert!(C::ALL.contains(&constant));
        // The message only contains the nibbles and the code.
        let mut out = [0xffu8; 8];
        assert_eq!(Terminate::new(constant).emit(&mut out), 4);
        assert_eq!(out[..4], [(layer << 4) | etype, code, 0, 0]);
        assert_eq!(
            Terminate::parse(&out[..4]),
            Ok((Terminate::new(constant), Layout::Rfc))
        );
    }
    assert_eq!(
        C::new(Layer(7), Etype(7), Default::default()).description(),
        None
    );
}

#[test]
fn terminate_carries_headers() {
    //= rfc5040 section 4.8
    //= type=test
    //# See Figure 10 for when this bit SHOULD be set.
    // The expected values are those of RFC 5040 figure 10.
    for &(layer, etype, _, code) in TABLE {
        let (header, read) = match (layer, etype) {
            (0, 0) => (false, false),
            (0, 1) => (true, true),
            (0, 2) => (true, false),
            (1, _) => (true, false),
            _ => (false, false),
        };
        assert_eq!(
            (code.wants_ddp_header(), code.wants_read_request()),
            (header, read),
            "{code:?}"
        );
        let t = Terminate::about(code, 46, read_header(), Some(read_request()));
        assert_eq!(t.ddp_header.is_some(), header, "{code:?}");
        assert_eq!(t.ddp_segment_len.is_some(), header, "{code:?}");
        assert_eq!(t.read_request.is_some(), read, "{code:?}");
    }
}

fn read_header() -> Header {
    Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::READ_REQUEST,
        qn: 1,
        msn: 5,
        ..Default::default()
    })
}

fn read_request() -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(0x0a0b_0c0d),
        sink_to: 16,
        size: 4096,
        source_stag: Stag(0x0102_0304),
        source_to: 32,
    }
}

/// The Terminate for a failed Read, with all parts: control word, length, DDP header, Read Request.
const READ_BOUNDS: [u8; 52] = [
    0x01, 0x01, 0xe0, 0x00, // layer 0, type 1, code 1, M D R
    0x00, 0x2e, // 46 octets
    0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, 0, // DDP header
    0x0a, 0x0b, 0x0c, 0x0d, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0x10, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0,
    0, 32,
];

#[test]
fn terminate_with_all_parts_round_trips() {
    let t = Terminate::about(
        C::RDMAP_BASE_BOUNDS,
        46,
        read_header(),
        Some(read_request()),
    );
    let mut out = [0u8; Terminate::MAX_LEN];
    assert_eq!(t.emit(&mut out), 52);
    //= rfc5040 section 4.8
    //= type=test
    //# The following figure depicts a Terminate Header that MUST be used for the
    //# Terminate Message:
    //= rfc5040 section 4.8
    //= type=test
    //# The Terminate Control field MUST have the format defined in Figure 8 below.
    //= rfc5040 section 4.8
    //= type=test
    //# It MUST be present if the D bit is set.
    //= rfc5040 section 4.8
    //= type=test
    //# It MUST be present if the R bit is set.
    assert_eq!(out, READ_BOUNDS);
    assert_eq!(Terminate::parse(&out), Ok((t, Layout::Rfc)));
    assert_eq!(t.emit(&mut out[..51]), 0);
}

#[test]
fn terminate_carries_tagged_header() {
    let header = Header::Tagged(TaggedHeader {
        last: true,
        opcode: Opcode::WRITE,
        stag: Stag(0xbad0_0000),
        to: 7,
    });
    let t = Terminate::about(C::DDP_TAGGED_INVALID_STAG, 0x4e, header, None);
    let mut out = [0u8; Terminate::MAX_LEN];
    let n = t.emit(&mut out);
    let octets = [
        0x11, 0, 0xc0, 0, 0, 0x4e, 0xc1, 0x40, 0xba, 0xd0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7,
    ];
    assert_eq!(out[..n], octets);
    assert_eq!(Terminate::parse(&octets), Ok((t, Layout::Rfc)));
}

#[test]
fn siw_layout_is_detected() {
    // siw's encoding of the same Terminate: nibbles exchanged, and M, D, R in the low bits.
    let mut octets = READ_BOUNDS;
    octets[0] = 0x10;
    octets[2] = 0x07;
    let t = Terminate::about(
        C::RDMAP_BASE_BOUNDS,
        46,
        read_header(),
        Some(read_request()),
    );
    assert_eq!(Terminate::parse(&octets), Ok((t, Layout::Siw)));
}

/// Control words, and the code and layout that are read from them.
#[test]
fn control_word_determines_layout() {
    for (word, code, layout) in [
        (
            [0x11, 0x00, 0x03, 0x00],
            C::DDP_TAGGED_INVALID_STAG,
            Layout::Siw,
        ),
        (
            [0x11, 0x01, 0x03, 0x00],
            C::DDP_TAGGED_BASE_BOUNDS,
            Layout::Siw,
        ),
        (
            [0x10, 0x03, 0x07, 0x00],
            C::RDMAP_STAG_NOT_ASSOCIATED,
            Layout::Siw,
        ),
        (
            [0x21, 0x02, 0x03, 0x00],
            C::DDP_UNTAGGED_NO_BUFFER,
            Layout::Siw,
        ),
        (
            [0x20, 0x07, 0x03, 0x00],
            C::RDMAP_CATASTROPHIC_STREAM,
            Layout::Siw,
        ),
        (
            [0x01, 0x00, 0x03, 0x00],
            C::DDP_LOCAL_CATASTROPHIC,
            Layout::Siw,
        ),
        // Without flags, the code is defined in only one of the layouts.
        (
            [0x21, 0x06, 0x00, 0x00],
            C::DDP_UNTAGGED_INVALID_VERSION,
            Layout::Siw,
        ),
        ([0x02, 0x02, 0x00, 0x00], C::MPA_CRC, Layout::Siw),
        ([0x02, 0x03, 0x00, 0x00], C::MPA_MARKER, Layout::Siw),
        // Without flags, the code is defined in both layouts. The RFC's layout is used, although
        // siw sends this for an unexpected opcode.
        (
            [0x20, 0x06, 0x00, 0x00],
            C::MPA_INSUFFICIENT_IRD,
            Layout::Rfc,
        ),
        (
            [0x12, 0x02, 0xc0, 0x00],
            C::DDP_UNTAGGED_NO_BUFFER,
            Layout::Rfc,
        ),
    ] {
        let (t, parsed_layout) = Terminate::parse(&word).unwrap();
        assert_eq!((t.code, parsed_layout), (code, layout), "{word:02x?}");
    }
}

#[test]
fn reserved_bits_are_ignored() {
    //= rfc5040 section 4.8
    //= type=test
    //# This field MUST be set to zero on transmit,
    //# ignored on receive.
    let mut octets = READ_BOUNDS;
    octets[2] |= 0x1f;
    octets[3] = 0xff;
    let t = Terminate::about(
        C::RDMAP_BASE_BOUNDS,
        46,
        read_header(),
        Some(read_request()),
    );
    assert_eq!(Terminate::parse(&octets), Ok((t, Layout::Rfc)));
}

#[test]
fn truncated_terminate_keeps_code() {
    for n in 0..READ_BOUNDS.len() {
        match Terminate::parse(&READ_BOUNDS[..n]) {
            Err(TerminateError) => assert!(n < 4),
            Ok((t, _)) => {
                assert!(n >= 4);
                assert_eq!(t.code, C::RDMAP_BASE_BOUNDS);
                assert_eq!(t.ddp_segment_len.is_some(), n >= 6);
                assert_eq!(t.ddp_header.is_some(), n >= 24);
                assert_eq!(t.read_request, None);
            }
        }
    }
}

#[test]
fn length_field_accompanies_header() {
    //= rfc5040 section 4.8
    //= type=test
    //# It MUST be valid if the M bit is set.  It MUST be
    //# present when the D bit is set.
    let t = Terminate {
        code: C::DDP_UNTAGGED_NO_BUFFER,
        ddp_header: Some(read_header()),
        ..Default::default()
    };
    let mut out = [0u8; Terminate::MAX_LEN];
    assert_eq!(t.emit(&mut out), 4 + 2 + 18);
    assert_eq!(out[2], 0x40);
    assert_eq!(Terminate::parse(&out[..24]), Ok((t, Layout::Rfc)));
}
