//! Tests of MPA start-up frames: octets, flags, and arrival in arbitrary portions.

use iwarp_proto::mpa::startup::*;

/// An enhanced request: CRC, IRD 1, ORD 2, peer-to-peer with Write or Read as RTR message, and the
/// private data "hi".
const REQUEST: &[u8] = b"MPA ID Req Frame\x50\x02\x00\x06\x80\x01\xc0\x02hi";

#[test]
fn request_round_trips() {
    //= rfc5044 section 7.1.1
    //= type=test
    //# Initiator mode senders MUST set this field to
    //# the fixed value "MPA ID Req Frame" or (in byte order) 4D 50 41 20
    //# 49 44 20 52 65 71 20 46 72 61 6D 65 (in hexadecimal).
    assert_eq!(
        REQUEST_KEY,
        [
            0x4d, 0x50, 0x41, 0x20, 0x49, 0x44, 0x20, 0x52, 0x65, 0x71, 0x20, 0x46, 0x72, 0x61,
            0x6d, 0x65
        ]
    );
    //= rfc5044 section 7.1.1
    //= type=test
    //# Responder mode senders MUST set this field to
    //# the fixed value "MPA ID Rep Frame" or (in byte order) 4D 50 41 20
    //# 49 44 20 52 65 70 20 46 72 61 6D 65 (in hexadecimal).
    assert_eq!(
        REPLY_KEY,
        [
            0x4d, 0x50, 0x41, 0x20, 0x49, 0x44, 0x20, 0x52, 0x65, 0x70, 0x20, 0x46, 0x72, 0x61,
            0x6d, 0x65
        ]
    );
    let frame = Frame::parse(REQUEST).unwrap().unwrap();
    let header = FrameHeader {
        kind: FrameKind::Request,
        flags: Flags::CRC | Flags::ENHANCED,
        revision: 2,
        pd_length: 6,
    };
    assert_eq!(*frame.header(), header);
    let prefix = EnhancedPrefix {
        ird: 1,
        ord: 2,
        peer_to_peer: true,
        rtr_send: false,
        rtr_write: true,
        rtr_read: true,
    };
    assert_eq!(frame.prefix(), Ok(Some(prefix)));
    assert_eq!(
        (frame.private_data().len(), frame.ulp_private_data()),
        (6, &b"hi"[..])
    );
    let mut out = [0u8; 26];
    assert_eq!(header.emit(&mut out), 20);
    assert_eq!(prefix.emit(&mut out[20..]), 4);
    out[24..].copy_from_slice(b"hi");
    assert_eq!(out, *REQUEST);
    for n in 0..REQUEST.len() {
        assert_eq!(Frame::parse(&REQUEST[..n]), Ok(None), "{n} octets");
    }
}

#[test]
fn enhanced_prefix_round_trips() {
    //= rfc6581 section 9
    //= type=test
    //# Note that this field MUST be
    //# sent in network byte order, with the IRD and ORD encoded as 14-bit
    //# unsigned integers.
    let none = EnhancedPrefix::default();
    for (octets, prefix) in [
        (
            [0x80, 0, 0, 0],
            EnhancedPrefix {
                peer_to_peer: true,
                ..none
            },
        ),
        (
            [0x40, 0, 0, 0],
            EnhancedPrefix {
                rtr_send: true,
                ..none
            },
        ),
        (
            [0, 0, 0x80, 0],
            EnhancedPrefix {
                rtr_write: true,
                ..none
            },
        ),
        (
            [0, 0, 0x40, 0],
            EnhancedPrefix {
                rtr_read: true,
                ..none
            },
        ),
        (
            [0x3f, 0xff, 0x01, 0x02],
            EnhancedPrefix {
                ird: NO_NEGOTIATION,
                ord: 0x102,
                ..none
            },
        ),
    ] {
        assert_eq!(EnhancedPrefix::parse(&octets), Some(prefix));
        let mut out = [0u8; 4];
        assert_eq!(prefix.emit(&mut out), 4);
        assert_eq!(out, octets);
    }
    // If a value is too large, neither flags nor "no negotiation" may be written.
    let mut out = [0u8; 4];
    EnhancedPrefix {
        ird: 0xffff,
        ord: 0x4000,
        ..none
    }
    .emit(&mut out);
    assert_eq!(out, [0x3f, 0xfe, 0x3f, 0xfe]);
}

/// Frames with all flags and all revisions are parsed without an error, and round-trip.
#[test]
fn all_flags_and_revisions_round_trip() {
    for kind in [FrameKind::Request, FrameKind::Reply] {
        for flags in 0..=255 {
            for revision in 0..=255 {
                let header = FrameHeader {
                    kind,
                    flags: Flags(flags),
                    revision,
                    pd_length: 4,
                };
                let mut octets = [0u8; 24];
                assert_eq!(header.emit(&mut octets), 20);
                assert_eq!(octets[16..20], [flags, revision, 0, 4]);
                let frame = Frame::parse(&octets).unwrap().unwrap();
                assert_eq!(*frame.header(), header);
                // S is defined from revision 2 on; before, it is a reserved bit.
                let enhanced = flags & 0x10 != 0 && revision >= 2;
                assert_eq!(header.is_enhanced(), enhanced);
                assert_eq!(frame.prefix().unwrap().is_some(), enhanced);
                assert_eq!(frame.ulp_private_data().len(), if enhanced { 0 } else { 4 });
                let f = Flags(flags);
                assert_eq!(
                    (
                        f.has(Flags::MARKERS),
                        f.has(Flags::CRC),
                        f.has(Flags::REJECT),
                        f.has(Flags::ENHANCED)
                    ),
                    (
                        flags & 0x80 != 0,
                        flags & 0x40 != 0,
                        flags & 0x20 != 0,
                        flags & 0x10 != 0
                    )
                );
            }
        }
    }
}

#[test]
fn enhanced_frame_without_prefix_is_refused() {
    //= rfc6581 section 6
    //= type=test
    //# However, if the 'S' flag is
    //# set, Private Data MUST begin with enhanced RDMA connection
    //# establishment data (see Section 9).
    for pd in 0..4u8 {
        let mut octets = b"MPA ID Req Frame\x10\x02\x00".to_vec();
        octets.push(pd);
        octets.resize(20 + usize::from(pd), 0);
        let frame = Frame::parse(&octets).unwrap().unwrap();
        assert_eq!(frame.prefix(), Err(StartupError::MissingEnhancedPrefix));
    }
}

fn long_frame(len: u16) -> Vec<u8> {
    let header = FrameHeader {
        kind: FrameKind::Reply,
        flags: Flags::NONE,
        revision: 1,
        pd_length: len,
    };
    let mut octets = vec![0x5a; header.frame_len()];
    header.emit(&mut octets);
    octets
}

#[test]
fn private_data_has_at_most_512_octets() {
    //= rfc5044 section 7.1.1
    //= type=test
    //# If the receiver detects that
    //# the PD_Length field does not match the length of the Private Data
    //# field, or if the length of the Private Data field exceeds 512
    //# octets, the receiver MUST close the connection and report an
    //# error locally.
    //= rfc5044 section 7.1.2
    //= type=test
    //# MPA implementations MUST validate the PD_Length field.
    //= rfc5044 section 7.1.2
    //= type=test
    //# The buffer that receives the Private Data field MUST be large enough to
    //# receive that data; the amount of Private Data MUST not exceed the PD_Length
    //# or the application buffer.
    let frame = long_frame(512);
    assert_eq!(
        Frame::parse(&frame).unwrap().unwrap().ulp_private_data(),
        [0x5a; 512]
    );
    let mut reader = FrameReader::new(FrameKind::Reply);
    assert_eq!(reader.push(&frame), Ok(Progress::Frame { consumed: 532 }));
    for len in [513, 0x8000, 0xffff] {
        //= rfc5044 section 7.1.2
        //= type=test
        //# If any of the above fails, the startup frame MUST be considered improperly
        //# formatted.
        let frame = long_frame(len);
        assert_eq!(
            Frame::parse(&frame),
            Err(StartupError::PeerPrivateDataTooLong { len })
        );
        let mut reader = FrameReader::new(FrameKind::Reply);
        assert_eq!(reader.push(&frame[..19]), Ok(Progress::NeedMore));
        // The error is reported as soon as the length has arrived.
        assert_eq!(
            reader.push(&frame[19..20]),
            Err(StartupError::PeerPrivateDataTooLong { len })
        );
    }
}

#[test]
fn reader_accepts_any_portions() {
    let mut stream = REQUEST.to_vec();
    stream.extend([0xfd; 7]);
    for first in 0..=stream.len() {
        for second in first..=stream.len() {
            let mut reader = FrameReader::new(FrameKind::Request);
            let mut consumed_len = 0;
            let mut done = false;
            for part in [&stream[..first], &stream[first..second], &stream[second..]] {
                match reader.push(part).unwrap() {
                    Progress::NeedMore => consumed_len += part.len(),
                    Progress::Frame { consumed } => {
                        consumed_len += consumed;
                        done = true;
                    }
                }
            }
            assert!(done);
            assert_eq!(consumed_len, REQUEST.len());
            assert_eq!(reader.missing(), Ok(0));
            let frame = reader.frame().unwrap();
            assert_eq!(frame, Frame::parse(REQUEST).unwrap().unwrap());
        }
    }
}

#[test]
fn reader_reports_octets_to_read() {
    //= rfc5044 section 7.1
    //= type=test
    //# MPA requires that the Consumer MUST activate MPA, and any TCP enhancements
    //# for MPA, on a TCP half connection at the same location in the octet stream
    //# at both the sender and the receiver.
    let mut reader = FrameReader::new(FrameKind::Request);
    assert!(reader.is_empty());
    let mut rest = REQUEST;
    let mut lengths = Vec::new();
    while let n @ 1.. = reader.missing().unwrap() {
        assert!(reader.frame().is_none());
        lengths.push(n);
        assert!(reader.push(&rest[..n]).is_ok());
        rest = &rest[n..];
    }
    assert_eq!(lengths, [20, 6]);
    assert!(reader.frame().is_some());
}

#[test]
fn wrong_key_fails_at_first_wrong_octet() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# If a received "Key" does not match the expected value (see
    //# Section 7.1.1, MPA Request and Reply Frame Format) the TCP/DDP
    //# connection MUST be closed, and an error returned to the ULP.
    for i in 0..16 {
        let mut octets = REQUEST[..16].to_vec();
        octets[i] ^= 0x20;
        let mut reader = FrameReader::new(FrameKind::Request);
        assert_eq!(reader.push(&octets[..i]), Ok(Progress::NeedMore));
        assert_eq!(
            reader.push(&octets[i..i + 1]),
            Err(StartupError::BadKey),
            "octet {i}"
        );
        assert!(Frame::parse(&[&octets[..], &[0, 1, 0, 0]].concat()).is_err());
    }
    //= rfc5044 section 7.1.2
    //= type=test
    //# MPA implementations MUST use the difference between the MPA
    //# Request Frame and the MPA Reply Frame to check for incorrect
    //# "Initiator/Initiator" startups.
    let mut reader = FrameReader::new(FrameKind::Reply);
    assert_eq!(reader.push(REQUEST), Err(StartupError::WrongRole));
    // An HTTP client.
    let mut reader = FrameReader::new(FrameKind::Request);
    assert_eq!(
        reader.push(b"GET / HTTP/1.1\r\n\r\n"),
        Err(StartupError::BadKey)
    );
}

#[test]
fn frame_view_reads_and_writes_fields() {
    let mut octets = [0u8; 21];
    assert!(FrameView::new(&octets[..19]).is_none());
    let mut v = FrameView::new(&mut octets[..]).unwrap();
    assert_eq!(v.kind(), None);
    v.set_kind(FrameKind::Reply);
    v.set_flags(Flags::REJECT);
    v.set_revision(1);
    v.set_pd_length(1);
    assert_eq!(v.kind(), Some(FrameKind::Reply));
    assert_eq!(
        (v.key(), v.private_data()),
        (&REPLY_KEY[..], Some(&[0u8][..]))
    );
    v.set_pd_length(2);
    assert_eq!(v.private_data(), None);
    assert_eq!(octets[16..20], [0x20, 1, 0, 2]);
}
