//! Tests of headers against literal octets, in both directions.

use iwarp_proto::ddp::{
    Header, HeaderError, QueueNumber, Stag, TaggedHeader, TaggedView, UntaggedHeader, UntaggedView,
    header_len,
};
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, encode_fpdu};
use iwarp_proto::mpa::pretty;
use iwarp_proto::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest, Terminate,
    TerminateCode,
};

/// Checks that `octets` are parsed to `header`, and that `header` is emitted as `octets`.
fn assert_round_trip(octets: &[u8], header: Header) {
    //= rfc5041 section 4.4
    //= type=test
    //# Each DDP Segment MUST contain a DDP Header.
    assert_eq!(Header::parse(octets), Ok(header));
    assert_eq!(header_len(octets[0]), octets.len());
    let mut out = [0xaa; 18];
    assert_eq!(header.emit(&mut out), octets.len());
    assert_eq!(&out[..octets.len()], octets);
    assert!(out[octets.len()..].iter().all(|&o| o == 0xaa));
    assert_eq!(header.len(), octets.len());
    // An output that is too short is not changed.
    let mut short = [0xaa; 18];
    assert_eq!(header.emit(&mut short[..octets.len() - 1]), 0);
    assert_eq!(short, [0xaa; 18]);
    for n in 0..octets.len() {
        assert_eq!(
            Header::parse(&octets[..n]),
            Err(HeaderError::TooShort),
            "{n} octets"
        );
    }
}

#[test]
fn tagged_headers_round_trip() {
    //= rfc5040 section 3.1
    //= type=test
    //# RDMAP MUST be layered on top of the Direct Data Placement Protocol [DDP].
    //= rfc5041 section 4.2
    //= type=test
    //# Figure 4 shows the DDP Header format that MUST be used in all DDP
    //# Segments that target Tagged Buffers.
    //= rfc5040 section 4.1
    //= type=test
    //# The ordering of the bits in the first octet MUST be as defined in Figure 3,
    //# "DDP Control, RDMAP Control, and Invalidate STag Fields".
    //= rfc5040 section 4.1
    //= type=test
    //# The first octet reserved for ULP use in the DDP Protocol MUST be used by the
    //# RDMAP to carry the RDMAP Control Field.
    //= rfc5040 section 4.1
    //= type=test
    //# All RDMA Messages handed by the RDMAP layer to the DDP layer MUST define the
    //# value of the Tagged flag in the DDP Header.
    //= rfc5041 section 4.1
    //= type=test
    //# This field MUST be set to one to indicate the version of the specification
    //# described in this document.
    //= rfc5041 section 4.1
    //= type=test
    //# The value of DV MUST be the same for all the DDP Segments transmitted or
    //# received on a DDP Stream.
    assert_round_trip(
        &[0x81, 0x40, 0xab, 0xcd, 0xef, 0x12, 1, 2, 3, 4, 5, 6, 7, 8],
        Header::Tagged(TaggedHeader {
            last: false,
            opcode: Opcode::WRITE,
            stag: Stag(0xabcd_ef12),
            to: 0x0102_0304_0506_0708,
        }),
    );
    assert_round_trip(
        &[
            0xc1, 0x42, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        ],
        Header::Tagged(TaggedHeader {
            last: true,
            opcode: Opcode::READ_RESPONSE,
            stag: Stag(1),
            to: u64::MAX,
        }),
    );
}

#[test]
fn untagged_headers_round_trip() {
    //= rfc5041 section 4.3
    //= type=test
    //# Figure 5 shows the DDP Header format that MUST be used in all DDP
    //# Segments that target Untagged Buffers.
    assert_round_trip(
        &[0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        Header::Untagged(UntaggedHeader {
            last: true,
            opcode: Opcode::SEND,
            msn: 1,
            ..Default::default()
        }),
    );
    //= rfc5040 section 4.1
    //= type=test
    //# For Send with Invalidate and Send with Solicited Event and
    //# Invalidate, the second through fifth octets of the DDP RsvdULP field
    //# MUST be used by RDMAP to carry the Invalidate STag.
    assert_round_trip(
        &[
            0x01, 0x46, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66,
            0x77, 0x88,
        ],
        Header::Untagged(UntaggedHeader {
            last: false,
            opcode: Opcode::SEND_SE_INV,
            invalidate_stag: Stag(0xdead_beef),
            qn: 0,
            msn: 0x1122_3344,
            mo: 0x5566_7788,
        }),
    );
    assert_round_trip(
        &[0x41, 0x4b, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 9, 0, 0, 0, 0],
        Header::Untagged(UntaggedHeader {
            last: true,
            opcode: Opcode::ATOMIC_RESPONSE,
            qn: 3,
            msn: 9,
            ..Default::default()
        }),
    );
}

#[test]
fn opcode_properties_match_rfcs() {
    //= rfc5040 section 4.1
    //= type=test
    //# Figure 4 defines when the STag, Queue Number, and Tagged Offset fields MUST
    //# be provided for each RDMA Message.
    //= rfc5040 section 4.1
    //= type=test
    //# Figure 4 defines the value of the RDMA Opcode field that MUST be used
    //# for each RDMA Message.
    //= rfc7306 section 5.2
    //= type=test
    //# Atomic
    //# Operation Request messages MUST use the same Queue Number as RDMA
    //# Read Requests (QN=1).
    //= rfc7306 section 5.2
    //= type=test
    //# Atomic
    //# Operation Response messages MUST set Queue Number (QN) to 3 in the
    //# DDP header.
    //= rfc7306 section 6.3
    //= type=test
    //# For an Immediate Data or Immediate Data with SE Message, the Local
    //# Peer's RDMAP Layer MUST request that the DDP layer set the Queue
    //# Number field to zero.
    //= rfc5040 section 4.1
    //= type=test
    //# Figure 4, "RDMA Usage of DDP Fields", MUST be used to define the value of
    //# the Tagged flag that is handed to the DDP layer for each RDMA Message.
    //= rfc7306 section 5.2.1
    //= type=test
    //# That is, the Local Peer's RDMAP layer MUST request that the DDP mark the
    //# Message as Untagged.
    //= rfc7306 section 5.2.2
    //= type=test
    //# That is, the Responder RDMAP layer MUST request that the DDP mark the
    //# Message as Untagged.
    //= rfc7306 section 6.3
    //= type=test
    //# That is, the Local Peer's RDMAP Layer MUST request that the DDP layer mark
    //# the Message as Untagged.
    //= rfc7306 section 5.2.1
    //= type=test
    //# That is, the Requester's RDMAP layer MUST request that the DDP layer set the
    //# Queue Number field to one.
    //= rfc7306 section 5.2.2
    //= type=test
    //# That is, the Responder's RDMAP layer MUST request that the DDP layer set the
    //# Queue Number field to 3.
    // opcode, tagged, queue, invalidates, solicited, is_send
    let table = [
        (0, true, None, false, false, false),
        (1, false, Some(1), false, false, false),
        (2, true, None, false, false, false),
        (3, false, Some(0), false, false, true),
        (4, false, Some(0), true, false, true),
        (5, false, Some(0), false, true, true),
        (6, false, Some(0), true, true, true),
        (7, false, Some(2), false, false, false),
        (8, false, Some(0), false, false, false),
        (9, false, Some(0), false, true, false),
        (10, false, Some(1), false, false, false),
        (11, false, Some(3), false, false, false),
        (12, false, None, false, false, false),
        (13, false, None, false, false, false),
        (14, false, None, false, false, false),
        (15, false, None, false, false, false),
    ];
    for (op, tagged, queue, invalidates, solicited, is_send) in table {
        let o = Opcode(op);
        assert_eq!(
            (
                o.is_tagged(),
                o.queue_number(),
                o.invalidates(),
                o.solicited(),
                o.is_send()
            ),
            (tagged, queue, invalidates, solicited, is_send),
            "{o:?}"
        );
        assert_eq!(o.is_known(), op < 12);
    }
}

/// Parses all pairs of control octets on several queues (65536 × 6 headers), and compares the
/// results with the rules, written out.
#[test]
fn all_control_octets_are_checked() {
    //= rfc5044 section C.1
    //= type=test
    //# Moreover, the DDP and RDMAP version MUST be identical in the two directions.
    //= rfc5041 section 4.1
    //= type=test
    //# This field MUST be
    //# set to zero on transmit, and not checked on receive.
    //= rfc5040 section 7.2
    //= type=test
    //# The RDMA OpCode MUST be valid.
    //= rfc5040 section 7.2
    //= type=test
    //# The RDMA Version MUST be valid.
    //= rfc7306 section 8.2
    //= type=test
    //# The RDMA OpCode MUST be valid.
    //= rfc5040 section 4.1
    //= type=test
    //# For this version of the RDMAP, all RDMA Messages MUST have:
    //= rfc7306 section 4.1
    //= type=test
    //# All RDMA Messages defined in this specification MUST have:
    //= rfc5040 section 4.1
    //= type=test
    //# Reserved.  MUST be set to zero by sender, ignored by the receiver.
    //= rfc7306 section 8.2
    //= type=test
    //# The RDMA Version MUST be valid.
    //= rfc5041 section 7.1
    //= type=test
    //# The QN is valid for this stream.
    for ddp in 0..=255u8 {
        for rdmap in 0..=255u8 {
            for qn in [0u32, 1, 2, 3, 4, u32::MAX] {
                let mut octets = [0u8; 18];
                octets[..2].copy_from_slice(&[ddp, rdmap]);
                let tagged = ddp & 0x80 != 0;
                if !tagged {
                    octets[6..10].copy_from_slice(&qn.to_be_bytes());
                }
                let op = Opcode(rdmap & 0xf);
                let expected = if ddp & 3 != 1 {
                    Err(HeaderError::BadDdpVersion { tagged })
                } else if rdmap >> 6 != 1 {
                    Err(HeaderError::BadRdmapVersion)
                } else if tagged != matches!(op.0, 0 | 2) || op.0 > 11 {
                    Err(HeaderError::UnexpectedOpcode(op.0))
                } else if tagged || op.queue_number() == Some(qn) {
                    Ok(op)
                } else if qn > 3 {
                    Err(HeaderError::InvalidQueue { qn })
                } else {
                    Err(HeaderError::UnexpectedOpcode(op.0))
                };
                let got = Header::parse(&octets);
                assert_eq!(
                    got.map(|h| h.opcode()),
                    expected,
                    "{ddp:02x} {rdmap:02x} {qn}"
                );
                if let Ok(h) = got {
                    assert_eq!(h.last(), ddp & 0x40 != 0);
                    // Reserved bits are ignored, and emitted as zero.
                    let mut out = [0u8; 18];
                    h.emit(&mut out);
                    assert_eq!(out[..2], [ddp & 0xc3, rdmap & 0xcf]);
                }
            }
        }
    }
}

/// `is_any_of` agrees with `parse_opcode`, for all pairs of control octets and all opcodes, known
/// or not.
#[test]
fn is_any_of_matches_parse_opcode() {
    for control in 0..=u16::MAX {
        let octets = control.to_be_bytes();
        let parsed = Header::parse_opcode(&octets);
        assert_eq!(
            parsed.is_ok(),
            Header::check_control(octets[0], octets[1]).is_ok()
        );
        for op in 0..=16 {
            let found = Header::is_any_of(&octets, &[Opcode(op)]);
            assert_eq!(found, parsed == Ok(Opcode(op)), "{control:04x} {op}");
        }
        let (sends, parsed) = (Header::is_any_of(&octets, &Opcode::SENDS), parsed.ok());
        assert_eq!(sends, parsed.is_some_and(|op| Opcode::SENDS.contains(&op)));
    }
    for short in [&[][..], &[0x41]] {
        assert!(!Header::is_any_of(short, &Opcode::SENDS));
        assert_eq!(Header::parse_opcode(short), Err(HeaderError::TooShort));
    }
}

#[test]
fn views_read_invalid_headers() {
    let octets = [0xff, 0xff, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 8, 0x77];
    let v = TaggedView::new(&octets[..]).unwrap();
    assert_eq!(
        (v.ddp_version(), v.rdmap_version(), v.opcode()),
        (3, 3, Opcode(15))
    );
    assert_eq!(
        (v.tagged(), v.last(), v.stag(), v.to()),
        (true, true, Stag(7), 8)
    );
    assert_eq!(v.payload(), [0x77]);
    assert!(TaggedView::new(&octets[..13]).is_none());
    assert!(UntaggedView::new(&octets[..]).is_none());
    let mut buf = [0xffu8; 18];
    let mut v = UntaggedView::new(&mut buf).unwrap();
    v.set_control(false, Opcode::TERMINATE);
    v.set_qn(QueueNumber::TERMINATE.0);
    v.set_msn(1);
    v.set_mo(0);
    v.set_invalidate_stag(Stag(0));
    assert_eq!(
        buf,
        [0x01, 0x47, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0]
    );
}

#[test]
fn header_errors_have_terminate_codes() {
    //= rfc5041 section 7.2
    //= type=test
    //# The following error numbers MUST be used when reporting errors to the
    //# ULP.
    for (error, (layer, etype, code)) in [
        (HeaderError::BadDdpVersion { tagged: true }, (1, 1, 4)),
        (HeaderError::BadDdpVersion { tagged: false }, (1, 2, 6)),
        (HeaderError::InvalidQueue { qn: 4 }, (1, 2, 1)),
        (HeaderError::BadRdmapVersion, (0, 2, 5)),
        (HeaderError::UnexpectedOpcode(15), (0, 2, 6)),
        (HeaderError::TooShort, (2, 0, 3)),
    ] {
        assert_eq!(
            TerminateCode::from(&error),
            TerminateCode { layer, etype, code }
        );
    }
}

#[test]
fn read_request_round_trips() {
    let octets: [u8; 28] = [
        0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 64, 0xca, 0xfe, 0, 1, 0x80, 0, 0, 0, 0, 0,
        0, 5,
    ];
    let r = ReadRequest {
        sink_stag: Stag(0x102),
        sink_to: 0x1000,
        size: 64,
        source_stag: Stag(0xcafe_0001),
        source_to: 0x8000_0000_0000_0005,
    };
    //= rfc5040 section 4.4
    //= type=test
    //# The following figure depicts the RDMA Read Request Header that MUST be used
    //# for all RDMA Read Request Messages:
    assert_eq!(ReadRequest::parse(&octets), Some(r));
    let mut out = [0u8; 28];
    assert_eq!(r.emit(&mut out), 28);
    assert_eq!(out, octets);
    assert_eq!(ReadRequest::parse(&octets[..27]), None);
    assert_eq!(r.emit(&mut out[..27]), 0);
}

#[test]
fn atomics_round_trip() {
    let octets: [u8; 52] = [
        0, 0, 0, 2, // CmpSwap
        0, 0, 0, 9, // request identifier
        0xab, 0xcd, 0xef, 0x12, // STag
        0, 0, 0, 0, 0, 0, 0, 8, // TO
        1, 1, 1, 1, 1, 1, 1, 1, // swap
        2, 2, 2, 2, 2, 2, 2, 2, // swap mask
        3, 3, 3, 3, 3, 3, 3, 3, // compare
        4, 4, 4, 4, 4, 4, 4, 4, // compare mask
    ];
    let a = AtomicRequest {
        op: AtomicOp::CMP_SWAP,
        request_id: 9,
        stag: Stag(0xabcd_ef12),
        to: 8,
        add_swap: 0x0101_0101_0101_0101,
        add_swap_mask: 0x0202_0202_0202_0202,
        compare: 0x0303_0303_0303_0303,
        compare_mask: 0x0404_0404_0404_0404,
    };
    assert_eq!(AtomicRequest::parse(&octets), Some(a));
    let mut out = [0u8; 52];
    assert_eq!(a.emit(&mut out), 52);
    assert_eq!(out, octets);
    // The 28 reserved bits are ignored, and the operation may be undefined.
    let mut odd = octets;
    odd[..4].copy_from_slice(&[0xff, 0xff, 0xff, 0xff]);
    assert_eq!(AtomicRequest::parse(&odd).unwrap().op, AtomicOp(15));
    assert_eq!((AtomicOp::FETCH_ADD.0, AtomicOp::CMP_SWAP.0), (0, 2));

    let octets = [0, 0, 0, 9, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88];
    let r = AtomicResponse {
        request_id: 9,
        original: 0x1122_3344_5566_7788,
    };
    assert_eq!(AtomicResponse::parse(&octets), Some(r));
    let mut out = [0u8; 12];
    assert_eq!(r.emit(&mut out), 12);
    assert_eq!(out, octets);
    assert_eq!(AtomicResponse::parse(&octets[..11]), None);
}

#[test]
fn immediates_round_trip() {
    //= rfc7306 section 6.3
    //= type=test
    //# The Remote Peer MUST check that Immediate Data and Immediate Data
    //# with SE Messages include exactly 8 bytes of data from the DDP
    //# layer.
    let plain = Immediate::plain(0x0102_0304);
    let before = Immediate::before_send(0x0102_0304);
    assert_eq!(plain.octets(), [1, 2, 3, 4, 0, 0, 0, 0]);
    assert_eq!(before.octets(), [1, 2, 3, 4, 0, 0, 0, 1]);
    assert!(!plain.belongs_to_send() && before.belongs_to_send());
    assert_eq!((plain.value(), before.value()), (0x0102_0304, 0x0102_0304));
    let mut out = [9u8; 9];
    //= rfc7306 section 6.3
    //= type=test
    //# For an Immediate Data or Immediate Data with SE Message, the Local Peer's
    //# RDMAP Layer MUST request that the DDP layer transmit 8 bytes of data.
    assert_eq!(before.emit(&mut out), 8);
    assert_eq!(out, [1, 2, 3, 4, 0, 0, 0, 1, 9]);
    assert_eq!(Immediate::parse(&out[..8]), Some(before));
    assert_eq!(Immediate::parse(&out), None);
    assert_eq!(Immediate::parse(&out[..7]), None);
    assert_eq!(before.emit(&mut out[..7]), 0);
    // Another implementation may use the second word for its own purposes.
    let other = Immediate::from_octets([1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(!other.belongs_to_send());
    assert_eq!(Immediate::parse(&other.octets()), Some(other));
}

#[test]
fn longest_terminate_has_52_octets() {
    assert_eq!(Terminate::MAX_LEN, 52);
}

/// Returns the printed line of an FPDU with this immediate value.
fn printed(immediate: Immediate) -> String {
    let opts = FpduOptions::default();
    let header = Header::Untagged(UntaggedHeader {
        opcode: Opcode::IMMEDIATE,
        last: true,
        msn: 1,
        ..UntaggedHeader::default()
    });
    let mut ulpdu = [0; 26];
    assert_eq!(header.emit(&mut ulpdu), 18);
    ulpdu[18..].copy_from_slice(&immediate.octets());
    let mut wire = [0; 64];
    let len = encode_fpdu(&ulpdu, &opts, &mut MarkerClock::new(), &mut wire).unwrap();
    pretty::Stream::new(&wire[..len], opts).to_string()
}

#[test]
fn immediate_before_send_is_printed() {
    let plain = printed(Immediate::plain(0x77));
    assert!(
        plain.contains(": 0x77") && !plain.contains("Send"),
        "{plain}"
    );
    let before = printed(Immediate::before_send(0x77));
    assert!(before.contains(": 0x77 before Send"), "{before}");
}
