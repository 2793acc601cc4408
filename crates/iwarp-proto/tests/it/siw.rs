//! Tests with captures of Linux's siw: every frame and header of every capture is parsed, and
//! emitted identically. `tests/data/siw/README.md` describes the captures.

use crate::common::{Connection, connections};
use iwarp_proto::crc32c;
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, decode_fpdu, encode_fpdu};
use iwarp_proto::mpa::negotiate::{LocalParams, Outcome, Responder, Rtr};
use iwarp_proto::mpa::pretty;
use iwarp_proto::mpa::startup::{
    Flags, Frame, FrameKind, FrameReader, Progress, RequestFrame, StartupError,
};
use iwarp_proto::rdmap::terminate::Layout;
use iwarp_proto::rdmap::{Opcode, ReadRequest, Terminate, TerminateCode};
use std::path::{Path, PathBuf};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/siw")
}

fn capture(name: &str) -> Vec<Connection> {
    let list = connections(&data().join(name).with_extension("pcap"));
    assert!(!list.is_empty(), "{name} contains no connection");
    list
}

/// The parts of one direction: the start-up frame and the ULPDUs.
struct Direction {
    frame: Vec<u8>,
    ulpdus: Vec<Vec<u8>>,
}

impl Direction {
    fn frame(&self) -> Frame<'_> {
        Frame::parse(&self.frame).unwrap().unwrap()
    }

    fn headers(&self) -> Vec<Header> {
        self.ulpdus
            .iter()
            .map(|u| Header::parse(u).unwrap())
            .collect()
    }
}

/// Parses one direction, and checks that each part is emitted identically.
fn parse_direction(octets: &[u8], kind: FrameKind, crc: bool) -> Direction {
    // Pass the octets one by one, so that nothing depends on TCP's segments.
    let mut reader = FrameReader::new(kind);
    let mut at = 0;
    loop {
        match reader.push(&octets[at..at + 1]).unwrap() {
            Progress::NeedMore => at += 1,
            Progress::Frame { consumed } => {
                at += consumed;
                break;
            }
        }
    }
    let frame = reader.frame().unwrap();
    let mut again = vec![0; at];
    let n = frame.header().emit(&mut again);
    if let Some(prefix) = frame.prefix().unwrap() {
        prefix.emit(&mut again[n..]);
    }
    let ulp = frame.ulp_private_data();
    again[at - ulp.len()..].copy_from_slice(ulp);
    assert_eq!(again, octets[..at], "start-up frame");

    let opts = FpduOptions {
        markers: false,
        crc: crc.then_some(crc32c::append),
    };
    let mut rx = MarkerClock::new();
    let mut tx = MarkerClock::new();
    let mut ulpdus = Vec::new();
    let mut rest = &octets[at..];
    let mut buf = vec![0; 65536];
    while !rest.is_empty() {
        let d = decode_fpdu(rest, &opts, &mut rx, &mut buf).expect("a complete, valid FPDU");
        let ulpdu = &buf[..d.ulpdu_len];
        let mut again = vec![0xee; d.consumed];
        assert_eq!(
            encode_fpdu(ulpdu, &opts, &mut tx, &mut again),
            Ok(d.consumed)
        );
        if !crc {
            // siw sets the field to zero, as we do.
            assert_eq!(rest[d.consumed - 4..d.consumed], [0; 4]);
        }
        // siw sometimes pads with old buffer contents, but we always pad with zeros.
        let pad = 2 + d.ulpdu_len..d.consumed - 4;
        let mut original = rest[..d.consumed].to_vec();
        if original[pad.clone()].iter().any(|&o| o != 0) {
            assert!(!crc, "the CRC covers the pad, so it would differ as well");
            original[pad].fill(0);
        }
        assert_eq!(again, original, "FPDU");
        reencode_ulpdu(ulpdu);
        ulpdus.push(ulpdu.to_vec());
        rest = &rest[d.consumed..];
    }
    assert_eq!(rx, tx);
    Direction {
        frame: octets[..at].to_vec(),
        ulpdus,
    }
}

/// Parses the headers of a ULPDU, and checks that they are emitted identically.
fn reencode_ulpdu(ulpdu: &[u8]) {
    let header = Header::parse(ulpdu).unwrap_or_else(|e| panic!("{e}: {ulpdu:02x?}"));
    let mut out = [0u8; 18];
    let n = header.emit(&mut out);
    assert_eq!(n, header.len());
    assert_eq!(out[..n], ulpdu[..n]);
    let body = &ulpdu[n..];
    if header.opcode() == Opcode::READ_REQUEST {
        let r = ReadRequest::parse(body).unwrap();
        let mut out = [0u8; 28];
        assert_eq!(r.emit(&mut out), 28);
        assert_eq!(out, body[..]);
    }
    if header.opcode() == Opcode::TERMINATE {
        let (t, layout) = Terminate::parse(body).unwrap();
        let mut out = [0u8; Terminate::MAX_LEN];
        let n = t.emit(&mut out);
        // Only the control word differs between the layouts.
        assert_eq!(layout, Layout::Siw);
        assert_eq!(out[4..n], body[4..]);
    }
}

fn parse_connection(c: &Connection) -> (Direction, Direction) {
    let crc = {
        let reply = Frame::parse(&c.server).unwrap().unwrap();
        reply.header().flags.has(Flags::CRC)
    };
    (
        parse_direction(&c.client, FrameKind::Request, crc),
        parse_direction(&c.server, FrameKind::Reply, crc),
    )
}

#[test]
fn captures_are_reproduced_exactly() {
    let mut files = 0;
    let mut fpdus = 0;
    let mut crcs = 0;
    let mut pads = 0;
    for entry in std::fs::read_dir(data()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "pcap") {
            continue;
        }
        files += 1;
        for c in connections(&path) {
            let (a, b) = parse_connection(&c);
            for d in [&a, &b] {
                fpdus += d.ulpdus.len();
                pads += d.ulpdus.iter().filter(|u| u.len() % 4 != 2).count();
            }
            if b.frame().header().flags.has(Flags::CRC) {
                crcs += a.ulpdus.len() + b.ulpdus.len();
            }
        }
    }
    // Check that the captures are not empty.
    assert!(files >= 17, "{files} captures");
    assert!(
        fpdus > 120 && crcs > 20 && pads > 15,
        "{fpdus} FPDUs, {crcs} with CRC, {pads} padded"
    );
}

#[test]
fn crc_detects_flipped_bit() {
    //= rfc5044 section 4.4
    //= type=test
    //# Verify that the calculated CRC-32c value is the same as the
    //# received CRC-32c value found in the FPDU CRC field.  If not, the
    //# receiver MUST treat the FPDU as an invalid FPDU.
    let c = &capture("mpa_crc_on")[0];
    let d = parse_direction(&c.client, FrameKind::Request, true);
    let start = d.frame.len();
    let opts = FpduOptions {
        markers: false,
        crc: Some(crc32c::append),
    };
    let mut buf = [0u8; 2048];
    let end = start
        + decode_fpdu(&c.client[start..], &opts, &mut MarkerClock::new(), &mut buf)
            .unwrap()
            .consumed;
    //= rfc5044 section 4.4
    //= type=test
    //# When an FPDU is received, and CRC checking is enabled, the receiver MUST
    //# first perform the following:
    for i in start + 2..end {
        let mut broken = c.client[start..end].to_vec();
        broken[i - start] ^= 1 << (i % 8);
        let e = decode_fpdu(&broken, &opts, &mut MarkerClock::new(), &mut buf).unwrap_err();
        assert_eq!(e.terminate(), Some(TerminateCode::MPA_CRC), "octet {i}");
    }
}

#[test]
fn siw_terminates_are_parsed() {
    for (name, code, read) in [
        (
            "err_write_badstag",
            TerminateCode::DDP_TAGGED_INVALID_STAG,
            false,
        ),
        (
            "mpa_crc_err_badstag",
            TerminateCode::DDP_TAGGED_INVALID_STAG,
            false,
        ),
        ("err_read_oob", TerminateCode::RDMAP_BASE_BOUNDS, true),
        (
            "err_send_toolong",
            TerminateCode::DDP_UNTAGGED_NO_BUFFER,
            false,
        ),
    ] {
        let c = &capture(name)[0];
        let (a, b) = parse_connection(c);
        let found: Vec<_> = a
            .ulpdus
            .iter()
            .chain(&b.ulpdus)
            .filter(|u| Header::parse(u).unwrap().opcode() == Opcode::TERMINATE)
            .map(|u| Terminate::parse(&u[18..]).unwrap())
            .collect();
        assert_eq!(found.len(), 1, "{name}");
        let (t, layout) = found[0];
        assert_eq!((t.code, layout), (code, Layout::Siw), "{name}");
        assert!(
            t.ddp_segment_len.is_some() && t.ddp_header.is_some(),
            "{name}"
        );
        assert_eq!(t.read_request.is_some(), read, "{name}");
    }
}

#[test]
fn rtr_messages_match_siw() {
    for (name, rtr, opcode) in [
        ("mpa_p2p_rtr_write", Rtr::Write, Opcode::WRITE),
        ("mpa_p2p_rtr_read", Rtr::Read, Opcode::READ_REQUEST),
    ] {
        let c = &capture(name)[0];
        let (a, b) = parse_connection(c);
        let first = a.headers()[0];
        assert_eq!(first.opcode(), opcode, "{name}");
        match first {
            Header::Tagged(h) => assert_eq!((h.stag, h.to, h.last), (Stag(1), 0, true)),
            Header::Untagged(h) => {
                let r = ReadRequest::parse(&a.ulpdus[0][18..]).unwrap();
                assert_eq!(
                    (h.msn, r.size, r.sink_stag, r.source_stag),
                    (1, 0, Stag(0), Stag(1))
                );
            }
        }
        // Our responder selects the same RTR message.
        let (_, agreed) = our_reply(&a.frame(), &LocalParams::default());
        assert_eq!(agreed.rtr, Some(rtr), "{name}");
        let p = b.frame().prefix().unwrap().unwrap();
        assert_eq!(
            (p.peer_to_peer, p.rtr_write, p.rtr_read),
            (true, rtr == Rtr::Write, rtr == Rtr::Read)
        );
    }
}

/// Returns our responder's reply to a request.
fn our_reply(
    request: &RequestFrame<'_>,
    params: &LocalParams,
) -> (Vec<u8>, iwarp_proto::mpa::negotiate::Agreed) {
    let mut out = [0u8; 532];
    let (n, agreed) = Responder::on_request(request, params)
        .unwrap()
        .accept(params, b"", &mut out)
        .unwrap();
    (out[..n].to_vec(), agreed)
}

#[test]
fn replies_match_siw() {
    // With siw's defaults, our replies equal those of siw.
    for (name, crc, ird, ord) in [
        ("rping_s64", false, 128, 128),
        ("mpa_crc_on", true, 128, 128),
        ("mpa_rev1", false, 0, 0),
        ("ird_srv2_cli16", false, 2, 2),
        ("mpa_p2p_rtr_write", false, 128, 128),
        ("mpa_p2p_rtr_read", false, 128, 128),
        ("mpa_p2p_rtr_none", false, 128, 128),
    ] {
        let c = &capture(name)[0];
        let (a, b) = parse_connection(c);
        let reply = b.frame();
        // The values that the program passed to `rdma_accept` are only visible in the reply.
        let (ird, ord) = match reply.prefix().unwrap() {
            Some(p) if name != "ird_srv2_cli16" => (p.ird, p.ord),
            _ => (ird, ord),
        };
        let params = LocalParams {
            crc,
            ird,
            ord,
            ..LocalParams::default()
        };
        let mut out = [0u8; 532];
        let (n, _) = Responder::on_request(&a.frame(), &params)
            .unwrap()
            .accept(&params, reply.ulp_private_data(), &mut out)
            .unwrap();
        assert_eq!(out[..n], b.frame[..], "{name}");
    }
}

#[test]
fn rejection_carries_private_data() {
    let c = &capture("reject_priv64")[0];
    let (a, b) = parse_connection(c);
    let request = a.frame();
    let initiator =
        iwarp_proto::mpa::negotiate::Initiator::new(LocalParams::default(), b"").unwrap();
    let p = request.prefix().unwrap().unwrap();
    assert_eq!(
        initiator.on_reply(&b.frame()),
        Ok(Outcome::Rejected {
            peer_ird: Some(p.ird),
            peer_ord: Some(p.ord)
        })
    );
    assert_eq!(b.frame().ulp_private_data().len(), 64);
    // A responder does not accept a reply as a request.
    assert_eq!(
        Responder::on_request(&b.frame(), &LocalParams::default()),
        Err(StartupError::WrongRole)
    );
}

#[test]
fn captures_are_printed() {
    let c = &capture("err_read_oob")[0];
    let text = format!(
        "{}{}",
        pretty::Stream::new(&c.client, FpduOptions::default()),
        pretty::Stream::new(&c.server, FpduOptions::default())
    );
    for words in [
        "MPA Request revision 2 enhanced",
        "READ_REQUEST QN 1 MSN 1",
        "TERMINATE QN 2",
        "Siw layout",
    ] {
        assert!(text.contains(words), "{words} not in:\n{text}");
    }
    assert!(
        !text.contains("BAD") && !text.contains("incomplete"),
        "{text}"
    );
}
