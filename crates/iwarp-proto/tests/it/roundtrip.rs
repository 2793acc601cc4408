//! Property tests: emitted values are parsed to the same values, and no octets make a decoder
//! panic.

use iwarp_proto::crc32c;
use iwarp_proto::ddp::*;
use iwarp_proto::mpa::framing::*;
use iwarp_proto::mpa::negotiate::*;
use iwarp_proto::mpa::pretty;
use iwarp_proto::mpa::startup::*;
use iwarp_proto::rdmap::terminate::Layout;
use iwarp_proto::rdmap::*;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn tagged() -> impl Strategy<Value = TaggedHeader> {
    (any::<bool>(), 0..16u8, any::<u32>(), any::<u64>()).prop_map(|(last, op, stag, to)| {
        TaggedHeader {
            last,
            opcode: Opcode(op),
            stag: Stag(stag),
            to,
        }
    })
}

fn untagged() -> impl Strategy<Value = UntaggedHeader> {
    (
        any::<bool>(),
        0..16u8,
        any::<u32>(),
        any::<u32>(),
        any::<u32>(),
        any::<u32>(),
    )
        .prop_map(|(last, op, inv, qn, msn, mo)| UntaggedHeader {
            last,
            opcode: Opcode(op),
            invalidate_stag: Stag(inv),
            qn,
            msn,
            mo,
        })
}

/// Any header, also invalid ones.
fn header() -> impl Strategy<Value = Header> {
    prop_oneof![
        tagged().prop_map(Header::Tagged),
        untagged().prop_map(Header::Untagged)
    ]
}

fn read_request() -> impl Strategy<Value = ReadRequest> {
    (
        any::<u32>(),
        any::<u64>(),
        any::<u32>(),
        any::<u32>(),
        any::<u64>(),
    )
        .prop_map(|(a, sink_to, size, b, source_to)| ReadRequest {
            sink_stag: Stag(a),
            sink_to,
            size,
            source_stag: Stag(b),
            source_to,
        })
}

fn code() -> impl Strategy<Value = TerminateCode> {
    (0..16u8, 0..16u8, any::<u8>()).prop_map(|(layer, etype, code)| TerminateCode {
        layer,
        etype,
        code,
    })
}

fn prefix() -> impl Strategy<Value = EnhancedPrefix> {
    (0..0x4000u16, 0..0x4000u16, any::<[bool; 4]>()).prop_map(|(ird, ord, [a, b, c, d])| {
        EnhancedPrefix {
            ird,
            ord,
            peer_to_peer: a,
            rtr_send: b,
            rtr_write: c,
            rtr_read: d,
        }
    })
}

fn params() -> impl Strategy<Value = LocalParams> {
    (1..3u8, any::<[bool; 7]>(), any::<[u16; 4]>()).prop_map(
        |(revision, [crc, markers_rx, p2p, n, s, w, r], [ird, ord, max_ird, max_ord])| {
            LocalParams {
                revision,
                crc,
                markers_rx,
                ird,
                ord,
                max_ird,
                max_ord,
                peer_to_peer: p2p,
                rtr_offer: RtrSet {
                    send: s,
                    write: w,
                    read: r,
                },
                ird_ord_negotiate: n,
            }
        },
    )
}

proptest! {
    #[test]
    fn headers_round_trip(h in header(), tail in vec(any::<u8>(), 0..8)) {
        let mut out = vec![0u8; 18];
        let n = h.emit(&mut out);
        prop_assert_eq!(n, h.len());
        out.truncate(n);
        out.extend(&tail);
        prop_assert_eq!(Header::decode(&out), Some(h));
        prop_assert_eq!(header_len(out[0]), n);
        // The views return the same values.
        match h {
            Header::Tagged(t) => {
                let v = TaggedView::new(&out).unwrap();
                prop_assert_eq!(
                    (v.last(), v.opcode(), v.stag(), v.to()),
                    (t.last, t.opcode, t.stag, t.to),
                );
                prop_assert_eq!(v.payload(), &tail[..]);
            }
            Header::Untagged(u) => {
                let v = UntaggedView::new(&out).unwrap();
                prop_assert_eq!(
                    (v.qn(), v.msn(), v.mo(), v.invalidate_stag()),
                    (u.qn, u.msn, u.mo, u.invalidate_stag),
                );
                prop_assert_eq!(v.payload(), &tail[..]);
            }
        }
        // `parse` either returns the same header, or an error with a Terminate code.
        match Header::parse(&out) {
            Ok(p) => prop_assert_eq!(p, h),
            Err(e) => prop_assert!(TerminateCode::from(&e).description().is_some()),
        }
    }

    #[test]
    fn rdmap_headers_round_trip(
        r in read_request(),
        op in 0..16u8,
        id in any::<u32>(),
        v in any::<[u64; 6]>(),
        o in any::<[u8; 8]>(),
    ) {
        let mut out = [0u8; 64];
        prop_assert_eq!(r.emit(&mut out), ReadRequest::LEN);
        prop_assert_eq!(ReadRequest::parse(&out), Some(r));
        let a = AtomicRequest {
            op: AtomicOp(op), request_id: id, stag: r.sink_stag, to: v[0], add_swap: v[1],
            add_swap_mask: v[2], compare: v[3], compare_mask: v[4],
        };
        prop_assert_eq!(a.emit(&mut out), AtomicRequest::LEN);
        prop_assert_eq!(AtomicRequest::parse(&out), Some(a));
        let a = AtomicResponse { request_id: id, original: v[5] };
        prop_assert_eq!(a.emit(&mut out), AtomicResponse::LEN);
        prop_assert_eq!(AtomicResponse::parse(&out), Some(a));
        let i = Immediate::from_octets(o);
        prop_assert_eq!(i.emit(&mut out), 8);
        prop_assert_eq!(Immediate::parse(&out[..8]), Some(i));
    }

    #[test]
    fn terminates_round_trip(
        code in code(),
        len in option::of(any::<u16>()),
        h in option::of(header()),
        r in option::of(read_request()),
    ) {
        let t = Terminate { code, ddp_segment_len: len, ddp_header: h, read_request: r };
        let mut out = [0u8; Terminate::MAX_LEN];
        let n = t.emit(&mut out);
        prop_assert_eq!(n, t.wire_len());
        let (back, layout) = Terminate::parse(&out[..n]).unwrap();
        if layout == Layout::Rfc {
            prop_assert_eq!(back, t);
        } else {
            // Only a Terminate without other parts, whose code is undefined, may be read in siw's
            // layout.
            prop_assert!(len.is_none() && h.is_none() && r.is_none());
            prop_assert!(code.description().is_none());
            prop_assert_eq!(back.code, code.swapped());
        }
    }

    #[test]
    fn startup_frames_round_trip(
        p in prefix(),
        flags in any::<u8>(),
        revision in any::<u8>(),
        reply in any::<bool>(),
        data in vec(any::<u8>(), 0..509),
    ) {
        let kind = if reply { FrameKind::Reply } else { FrameKind::Request };
        let h = FrameHeader {
            kind,
            flags: Flags(flags),
            revision,
            pd_length: data.len() as u16 + 4,
        };
        let mut out = vec![0u8; h.frame_len()];
        h.emit(&mut out);
        p.emit(&mut out[20..]);
        out[24..].copy_from_slice(&data);
        let f = Frame::parse(&out).unwrap().unwrap();
        prop_assert_eq!(*f.header(), h);
        if h.is_enhanced() {
            prop_assert_eq!(f.prefix(), Ok(Some(p)));
            prop_assert_eq!(f.ulp_private_data(), &data[..]);
        }
        prop_assert_eq!(f.private_data(), &out[20..]);
    }

    #[test]
    fn fpdu_streams_round_trip(
        ulpdus in vec(vec(any::<u8>(), 0..3000), 1..6),
        start in 0..128u64,
        markers in any::<bool>(),
        crc in any::<bool>(),
    ) {
        let crc: Option<crc32c::Crc32cFn> = if crc { Some(crc32c::append) } else { None };
        let opts = FpduOptions { markers, crc };
        let mut tx = MarkerClock::at(start * 4);
        let mut rx = tx;
        let mut stream = Vec::new();
        for u in &ulpdus {
            let mut out = vec![0xaa; 4096];
            let n = encode_fpdu(u, &opts, &mut tx, &mut out).unwrap();
            stream.extend(&out[..n]);
        }
        let mut rest = &stream[..];
        for u in &ulpdus {
            let mut out = vec![0; 3000];
            let d = decode_fpdu(rest, &opts, &mut rx, &mut out).unwrap();
            prop_assert_eq!(&out[..d.ulpdu_len], &u[..]);
            rest = &rest[d.consumed..];
        }
        prop_assert!(rest.is_empty());
        prop_assert_eq!(tx, rx);
    }

    /// The two roles of this crate always agree, or fail with an error of RFC 6581.
    #[test]
    fn both_roles_agree(i in params(), r in params()) {
        let initiator = Initiator::new(i, b"").unwrap();
        let request = Frame::parse(initiator.request_octets()).unwrap().unwrap();
        let Ok(pending) = Responder::on_request(&request, &r) else {
            prop_assert!(r.revision < request.header().revision);
            return Ok(());
        };
        let mut out = [0; MAX_FRAME_LEN];
        let (n, theirs) = pending.accept(&r, b"", &mut out).unwrap();
        match initiator.on_reply(&Frame::parse(&out[..n]).unwrap().unwrap()) {
            Ok(Outcome::Accepted(ours)) => {
                prop_assert_eq!(
                    (ours.crc, ours.rtr, ours.peer_to_peer),
                    (theirs.crc, theirs.rtr, theirs.peer_to_peer),
                );
                prop_assert_eq!(
                    (ours.markers_tx, ours.markers_rx),
                    (theirs.markers_rx, theirs.markers_tx),
                );
                prop_assert_eq!((ours.revision, ours.enhanced), (theirs.revision, theirs.enhanced));
                if ours.enhanced && i.ird_ord_negotiate {
                    prop_assert!(ours.ord <= theirs.ird && theirs.ord <= ours.ird);
                }
            }
            Err(e) => prop_assert_eq!(e, StartupError::NoMatchingRtr),
            other => prop_assert!(false, "{:?}", other),
        }
    }

    /// Passes arbitrary octets to every decoder.
    #[test]
    fn decoders_never_panic(
        octets in vec(any::<u8>(), 0..2000),
        cut in 0..2000usize,
        markers in any::<bool>(),
        crc in any::<bool>(),
    ) {
        let crc: Option<crc32c::Crc32cFn> = if crc { Some(crc32c::append) } else { None };
        let opts = FpduOptions { markers, crc };
        let _ = Header::parse(&octets);
        let _ = Header::decode(&octets);
        let _ = Terminate::parse(&octets);
        let _ = ReadRequest::parse(&octets);
        let _ = Frame::parse(&octets);
        let mut out = [0; 1024];
        let _ = decode_fpdu(&octets, &opts, &mut MarkerClock::at(cut as u64), &mut out);
        let _ = format!("{}", pretty::Stream::new(&octets, opts));
        let mut reader = FrameReader::new(FrameKind::Request);
        let (a, b) = octets.split_at(cut.min(octets.len()));
        let _ = reader.push(a).and_then(|_| reader.push(b));
        let _ = reader.frame();
    }

    /// Passes octets that start with a valid key to the start-up and the printer.
    #[test]
    fn startup_never_panics_after_key(
        reply in any::<bool>(),
        rest in vec(any::<u8>(), 4..600),
        own in params(),
    ) {
        let mut octets = if reply { REPLY_KEY } else { REQUEST_KEY }.to_vec();
        octets.extend(&rest);
        octets[18] &= 1;
        let _ = format!("{}", pretty::Stream::new(&octets, FpduOptions::default()));
        if let Ok(Some(f)) = Frame::parse(&octets) {
            let _ = Initiator::new(own, b"").unwrap().on_reply(&f);
            if let Ok(p) = Responder::on_request(&f, &own) {
                let mut out = [0; 64];
                prop_assert!(p.accept(&own, b"x", &mut out).is_ok());
                prop_assert!(p.reject(b"x", &mut out) > 0);
            }
        }
    }

    #[test]
    fn crc_matches_any_split(data in vec(any::<u8>(), 0..300), cut in 0..300usize) {
        let (a, b) = data.split_at(cut.min(data.len()));
        prop_assert_eq!(crc32c::append(crc32c::append(0, a), b), crc32c::append(0, &data));
    }
}
