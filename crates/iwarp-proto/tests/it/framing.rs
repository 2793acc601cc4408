//! Tests of FPDUs: the RFC's figures, a comparison of marker positions with a simple model, sizes.

use iwarp_proto::crc32c;
use iwarp_proto::ddp::{Header, UntaggedHeader};
use iwarp_proto::mpa::framing::*;
use iwarp_proto::rdmap::{Opcode, TerminateCode};

const CRC: FpduOptions = FpduOptions {
    markers: false,
    crc: Some(crc32c::append),
};
const MARKERS: FpduOptions = FpduOptions {
    markers: true,
    crc: Some(crc32c::append),
};

/// Returns the ULPDU of RFC 5044 figures 5 and 6: a Send of 24 zeros.
fn send(msn: u32) -> [u8; 42] {
    let mut ulpdu = [0; 42];
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::SEND,
        msn,
        ..Default::default()
    });
    assert_eq!(header.emit(&mut ulpdu), 18);
    ulpdu
}

/// Checks that `ulpdu` is encoded to `wire`, and that `wire` is decoded to `ulpdu`.
fn assert_round_trip(ulpdu: &[u8], wire: &[u8], opts: &FpduOptions, start: MarkerClock) {
    let mut tx = start;
    let mut out = vec![0xaa; wire.len()];
    assert_eq!(encode_fpdu(ulpdu, opts, &mut tx, &mut out), Ok(wire.len()));
    assert_eq!(out, wire);
    let mut rx = start;
    let mut back = vec![0xaa; ulpdu.len()];
    assert_eq!(
        decode_fpdu(wire, opts, &mut rx, &mut back),
        Ok(Decoded {
            consumed: wire.len(),
            ulpdu_len: ulpdu.len()
        })
    );
    assert_eq!(back, ulpdu);
    assert_eq!(tx, rx);
}

#[test]
fn rfc_5044_figure_5() {
    //= rfc5041 section 3
    //= type=test
    //# 6. LLP MUST provide a strong digest (at least equivalent to CRC32-C) to
    //# cover at least the DDP Segment.
    //= rfc5044 section 4.3
    //= type=test
    //# When Markers are enabled (see Section 7.1, Connection Setup), the MPA
    //# Markers MUST be inserted immediately preceding the first FPDU of Full
    //# Operation Phase, and at every 512th octet of the TCP octet stream
    //# thereafter.
    //= rfc5044 section 4.4
    //= type=test
    //# When CRCs
    //# are enabled, the CRC field in the MPA FPDU MUST be computed using the
    //# CRC32c polynomial in the manner described in the iSCSI Protocol
    //# [iSCSI] document for Header and Data Digests.
    let mut wire = vec![0, 0, 0, 0]; // marker
    wire.extend([0x00, 0x2a]); // length
    wire.extend([0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
    wire.extend([0; 24]);
    wire.extend([0x52, 0x23, 0x99, 0x83]);
    //= rfc5044 section 4.3
    //= type=test
    //# In this case, the Marker is considered to be contained in the following
    //# FPDU; the Marker MUST be included in the CRC calculation of the FPDU
    //# following the Marker (if CRCs are being generated or checked).
    //= rfc5044 section 4.4
    //= type=test
    //# The fields which MUST be included in the CRC calculation when sending an
    //# FPDU are as follows:
    assert_eq!(wire.len(), 0x34);
    assert_round_trip(&send(1), &wire, &MARKERS, MarkerClock::new());
}

#[test]
fn rfc_5044_figure_6() {
    //= rfc5044 section 4.3
    //= type=test
    //# FPDUPTR MUST contain the number of octets in
    //# the TCP stream from the beginning of the ULPDU Length field to the
    //# first octet of the Marker, unless the Marker falls between FPDUs.
    let mut wire = vec![0x00, 0x2a];
    wire.extend([0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]);
    wire.extend([0, 0, 0, 0x14]); // marker at 0x200
    wire.extend([0; 24]);
    wire.extend([0x84, 0x92, 0x58, 0x98]);
    assert_round_trip(&send(2), &wire, &MARKERS, MarkerClock::at(0x1ec));
}

#[test]
fn rfc_5044_figure_4() {
    // An FPDU with 16 octets of ULPDU, a marker after 12 octets, and two octets of pad.
    let ulpdu: Vec<u8> = (1..=16).collect();
    let mut wire = vec![0x00, 0x10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 0, 0x0c];
    wire.extend([11, 12, 13, 14, 15, 16, 0, 0]);
    wire.extend(crc32c::append(0, &wire).to_le_bytes());
    assert_round_trip(&ulpdu, &wire, &MARKERS, MarkerClock::at(500));
}

#[test]
fn fpdus_have_pads_of_every_length() {
    //= rfc5044 section 4.1
    //= type=test
    //# The length of the
    //# pad is set so as to make the size of the FPDU an integral multiple of
    //# four.
    //= rfc5044 section 4.1
    //= type=test
    //# The pad data MUST be set to zero by the sender and
    //# ignored by the receiver (except for CRC checking).
    for (len, pad) in [
        (0, 2),
        (1, 1),
        (2, 0),
        (3, 3),
        (4, 2),
        (5, 1),
        (6, 0),
        (1442, 0),
        (65535, 3),
    ] {
        assert_eq!(pad_len(len), pad, "{len}");
        assert_eq!(fpdu_len(len) % 4, 0);
        assert_eq!(fpdu_len(len), 2 + len + pad + 4);
        let ulpdu = vec![0x5a; len];
        let mut wire = (len as u16).to_be_bytes().to_vec();
        wire.extend(&ulpdu);
        wire.resize(2 + len + pad, 0);
        let body = wire.clone();
        wire.extend(crc32c::append(0, &body).to_le_bytes());
        //= rfc5044 section 4.1
        //= type=test
        //# The format of an FPDU shown below MUST be used for all MPA FPDUs.
        assert_round_trip(&ulpdu, &wire, &CRC, MarkerClock::new());
        // If CRCs are off, the field is zero. A peer's values in the field and in the pad are
        // ignored.
        let off = FpduOptions::default();
        let crc_at = wire.len() - 4;
        wire[crc_at..].fill(0);
        assert_round_trip(&ulpdu, &wire, &off, MarkerClock::new());
        wire[crc_at - pad..].fill(0xee);
        let mut back = vec![0; len];
        assert!(decode_fpdu(&wire, &off, &mut MarkerClock::new(), &mut back).is_ok());
        assert_eq!(back, ulpdu);
    }
}

#[test]
fn crc_off_ignores_field() {
    //= rfc5044 section 4.1
    //= type=test
    //# When CRCs are not
    //# enabled, this field is still present, may contain any value, and MUST
    //# NOT be checked.
    //= rfc5044 section 4.4
    //= type=test
    //# When sending an FPDU, the sender MUST include a CRC field.
    let mut wire = [0xffu8; 8];
    assert_eq!(
        encode_fpdu(
            b"ab",
            &FpduOptions::default(),
            &mut MarkerClock::new(),
            &mut wire
        ),
        Ok(8)
    );
    assert_eq!(wire, [0, 2, b'a', b'b', 0, 0, 0, 0]);
    //= rfc5044 section 7.1.1
    //= type=test
    //# When CRCs are not in use, the CRC field MUST be considered valid for FPDU
    //# checking regardless of its contents.
    wire[4..].copy_from_slice(&[1, 2, 3, 4]);
    let mut out = [0; 2];
    assert!(
        decode_fpdu(
            &wire,
            &FpduOptions::default(),
            &mut MarkerClock::new(),
            &mut out
        )
        .is_ok()
    );
    //= rfc5044 section 6
    //= type=test
    //# To do this, the receiver MUST:
    let e = decode_fpdu(&wire, &CRC, &mut MarkerClock::new(), &mut out).unwrap_err();
    assert_eq!(e.terminate(), Some(TerminateCode::MPA_CRC));
}

/// Returns the stream of `bodies` (FPDUs without markers). Inserts the markers while it copies one
/// octet at a time, and computes each FPDUPTR from the position of the FPDU's first octet.
fn simple_stream(bodies: &[Vec<u8>], start: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for body in bodies {
        let mut header_at = None;
        for &octet in body {
            if (start + out.len()).is_multiple_of(512) {
                let ptr = header_at.map_or(0, |h| out.len() - h) as u16;
                out.extend([0, 0]);
                out.extend(ptr.to_be_bytes());
            }
            header_at.get_or_insert(out.len());
            out.push(octet);
        }
    }
    out
}

#[test]
fn markers_match_simple_model() {
    //= rfc5041 section 3
    //= type=test
    //# 4. The LLP MUST preserve DDP Segment and Message boundaries at the Data
    //# Sink.
    //= rfc5041 section 3
    //= type=test
    //# 7. On receive, the LLP MUST provide the length of the DDP Segment received.
    //= rfc5044 section 5.2
    //= type=test
    //# The receivers MUST identify FPDU boundaries by using the ULPDU_LENGTH field,
    //# as described in Section 6.
    //= rfc5044 section 6
    //= type=test
    //# To detect the start of the FPDU unambiguously one of the following MUST be
    //# used:
    //= rfc5044 section 4.3
    //= type=test
    //# If an FPDU is large enough to contain multiple Markers, they MUST all
    //# point to the same point in the TCP stream: the first octet of the
    //# ULPDU Length field for the FPDU.
    let opts = FpduOptions {
        markers: true,
        crc: None,
    };
    //= rfc5044 section 4.3
    //= type=test
    //# If a Marker interval contains multiple FPDUs (the FPDUs are small), the
    //# Marker MUST point to the start of the ULPDU Length field for the FPDU
    //# containing the Marker unless the Marker falls between FPDUs, in which case
    //# the Marker MUST be zero.
    //= rfc5044 section 4.3
    //= type=test
    //# When Markers are enabled, MPA senders MUST insert a Marker into the data
    //# stream at a 512-octet periodic interval in the TCP Sequence Number Space.
    //= rfc5044 section 4.3
    //= type=test
    //# All MPA senders MUST be able to generate Markers when their use is declared
    //# by the opposing receiver (see Section 7.1, Connection Setup).
    //= rfc5044 section 4.3
    //= type=test
    //# MPA Receivers MUST preserve ULPDU boundaries when passing data to DDP.
    //= rfc5044 section 4.3
    //= type=test
    //# MPA Receivers MUST pass the ULPDU data and the ULPDU Length to DDP and not
    //# the Markers, headers, and CRC.
    for start in (0..512).step_by(4) {
        for lens in [
            &[0, 0, 0][..],
            &[498, 498],
            &[1, 2, 3, 500, 501, 502],
            &[2000, 10, 1442],
            &[64766],
            &[64768],
        ] {
            let ulpdus: Vec<Vec<u8>> = lens
                .iter()
                .map(|&n| (0..n).map(|i| (i * 7 + n) as u8 | 1).collect())
                .collect();
            let bodies: Vec<Vec<u8>> = ulpdus
                .iter()
                .map(|u| {
                    let mut body = vec![0; fpdu_len(u.len())];
                    encode_fpdu(
                        u,
                        &FpduOptions::default(),
                        &mut MarkerClock::new(),
                        &mut body,
                    )
                    .unwrap();
                    body
                })
                .collect();
            let expected = simple_stream(&bodies, start);
            let (mut tx, mut rx) = (MarkerClock::at(start as u64), MarkerClock::at(start as u64));
            let mut stream = Vec::new();
            for u in &ulpdus {
                let total = fpdu_len_with_markers(tx.next_marker_in(), u.len());
                let mut out = vec![0; total];
                assert_eq!(encode_fpdu(u, &opts, &mut tx, &mut out), Ok(total));
                stream.extend(out);
            }
            assert!(stream == expected, "start {start} lengths {lens:?}");
            let mut rest = &stream[..];
            for u in &ulpdus {
                let mut out = vec![0; u.len()];
                let d = decode_fpdu(rest, &opts, &mut rx, &mut out).unwrap();
                assert_eq!(&out, u);
                rest = &rest[d.consumed..];
            }
            assert!(rest.is_empty());
            assert_eq!(tx, rx);
        }
    }
}

#[test]
fn marker_before_and_after_crc() {
    //= rfc5044 section 4.4
    //= type=test
    //# If there is a
    //# Marker immediately following the PAD, the Marker is included in
    //# the CRC calculation for this FPDU.
    // The length field (2 octets), the ULPDU (10 octets), the marker, and the CRC.
    let mut out = [0; 20];
    let mut clock = MarkerClock::at(500);
    assert_eq!(
        encode_fpdu(&[7; 10], &MARKERS, &mut clock, &mut out),
        Ok(20)
    );
    assert_eq!(out[12..16], [0, 0, 0, 12]);
    assert_eq!(out[16..], crc32c::append(0, &out[..16]).to_le_bytes());
    // If the FPDU starts four octets earlier, the marker is directly after the CRC, and belongs to
    // the next FPDU.
    let mut clock = MarkerClock::at(496);
    assert_eq!(
        encode_fpdu(&[7; 10], &MARKERS, &mut clock, &mut out),
        Ok(16)
    );
    assert_eq!(clock.next_marker_in(), 0);
}

#[test]
fn bad_markers_are_detected() {
    //= rfc5044 section 8
    //= type=test
    //# It may not be possible to make this check as a segment arrives, but the
    //# check SHOULD be made when a gap creating an out-of-order sequence is closed
    //# and any time a Marker points to an already identified FPDU.
    //= rfc5044 section 8
    //= type=test
    //# If the FPDU start determined from previous ULPDU Length
    //# fields does not match with the MPA Marker position, MPA SHOULD
    //# deliver an error to DDP.
    let opts = FpduOptions {
        markers: true,
        crc: None,
    };
    let mut wire = [0; 64];
    let n = encode_fpdu(&send(1), &opts, &mut MarkerClock::at(500), &mut wire).unwrap();
    let mut out = [0; 42];
    wire[15] = 16;
    let e = decode_fpdu(&wire[..n], &opts, &mut MarkerClock::at(500), &mut out).unwrap_err();
    assert_eq!(
        e,
        FramingError::BadMarker {
            expected: 12,
            received: 16
        }
    );
    assert_eq!(e.terminate(), Some(TerminateCode::MPA_MARKER));
    //= rfc5044 section 4.2
    //= type=test
    //# The least significant two
    //# bits MUST always be set to zero at the transmitter, and the receivers
    //# MUST always treat these as zero for calculations.
    //= rfc5044 section 4.2
    //= type=test
    //# The Reserved field MUST be set to zero on transmit and
    //# ignored on receive (except for CRC calculation).
    wire[12..16].copy_from_slice(&[0xff, 0xff, 0, 12 | 3]);
    assert!(decode_fpdu(&wire[..n], &opts, &mut MarkerClock::at(500), &mut out).is_ok());
    //= rfc5044 section 4.2
    //= type=test
    //# The format of a Marker MUST be as specified in Figure 3:
    //= rfc5044 section 4.3
    //= type=test
    //# MPA reserves these bits so they MUST be treated as zero for computation at
    //# the receiver.
    assert_eq!(Marker { fpdu_ptr: 15 }.octets(), [0, 0, 0, 12]);
}

/// After an error or an incomplete FPDU, the clock is unchanged.
#[test]
fn error_keeps_marker_clock() {
    let body = [7; 1200];
    for start in [0, 4, 300, 508] {
        let from = MarkerClock::at(start);
        let mut wire = [0; 1300];
        let n = encode_fpdu(&body, &MARKERS, &mut from.clone(), &mut wire).unwrap();
        let unchecked = FpduOptions {
            crc: None,
            ..MARKERS
        };
        let mut clock = from;
        let mut out = [0; 1200];
        let mut errors = 0;
        // Change each octet. Errors in markers are detected even without CRCs.
        for i in 0..n {
            let mut wrong = wire;
            wrong[i] ^= 0x10;
            for options in [&MARKERS, &unchecked] {
                if decode_fpdu(&wrong[..n], options, &mut clock, &mut out).is_err() {
                    assert_eq!(clock, from, "octet {i} from {start}");
                    errors += 1;
                }
                clock = from;
            }
        }
        assert!(errors > n);
        for room in [0, 600, 1199] {
            let short = decode_fpdu(&wire[..n], &MARKERS, &mut clock, &mut out[..room]);
            assert!(short.is_err());
            let short = encode_fpdu(&body, &MARKERS, &mut clock, &mut [0; 1200][..room]);
            assert!(short.is_err());
            assert_eq!(clock, from);
        }
        assert!(decode_fpdu(&wire[..n], &MARKERS, &mut clock, &mut out).is_ok());
        assert_eq!(clock, MarkerClock::at(start + n as u64));
    }
}

#[test]
fn incomplete_input_reports_needed_length() {
    //= rfc5044 section 6
    //= type=test
    //# The ULPDU Length field (see Section 4) MUST be used to determine if the
    //# entire FPDU is present before forwarding the ULPDU to DDP.
    for opts in [CRC, MARKERS] {
        let mut wire = [0; 64];
        let n = encode_fpdu(&send(1), &opts, &mut MarkerClock::new(), &mut wire).unwrap();
        let mut out = [0; 42];
        let mut clock = MarkerClock::new();
        for len in 0..n {
            match decode_fpdu(&wire[..len], &opts, &mut clock, &mut out) {
                Err(FramingError::Incomplete { needed }) => assert!(len < needed && needed <= n),
                other => panic!("{len} octets: {other:?}"),
            }
            assert_eq!(clock, MarkerClock::new());
        }
        assert!(decode_fpdu(&wire[..n], &opts, &mut clock, &mut out[..41]).is_err());
        assert!(decode_fpdu(&wire[..n], &opts, &mut clock, &mut out).is_ok());
    }
}

#[test]
fn long_ulpdu_or_short_output_fails() {
    let mut out = vec![0; 70000];
    let clock = &mut MarkerClock::new();
    assert_eq!(
        encode_fpdu(&[0; 65536], &CRC, clock, &mut out),
        Err(FramingError::UlpduTooLong)
    );
    // The length field can express 65535 octets, but the pointer of the last marker cannot.
    assert_eq!(
        encode_fpdu(&[0; 65535], &MARKERS, clock, &mut out),
        Err(FramingError::UlpduTooLong)
    );
    assert_eq!(*clock, MarkerClock::new());
    let longest = vec![0; usize::from(MAX_ULPDU)];
    for start in (0..512).step_by(4) {
        assert!(encode_fpdu(&longest, &MARKERS, &mut MarkerClock::at(start), &mut out).is_ok());
    }
    assert_eq!(
        encode_fpdu(b"abc", &CRC, clock, &mut out[..11]),
        Err(FramingError::OutputTooSmall { needed: 12 })
    );
}

#[test]
fn mulpdu_follows_rfc_formula() {
    //= rfc5044 section 4.5
    //= type=test
    //# The maximum ULPDU Length for a single ULPDU when Markers are
    //# present MUST be computed as:
    //# MULPDU = EMSS - (6 + 4 * Ceiling(EMSS / 512) + EMSS mod 4)
    //= rfc5044 section 4.5
    //= type=test
    //# The maximum ULPDU Length for a single ULPDU when Markers are NOT
    //# present MUST be computed as:
    //# MULPDU = EMSS - (6 + EMSS mod 4)
    //= rfc5044 section 4.5
    //= type=test
    //# If this occurs, the MPA on TCP sender MUST NOT shrink the
    //# MULPDU below 128 octets
    for (emss, plain, markers) in [
        (1460, 1454, 1442),
        (1448, 1442, 1430),
        (1461, 1454, 1442),
        (536, 530, 522),
        (512, 506, 502),
        (134, 128, 128),
        (100, 128, 128),
        (0, 128, 128),
        (64772, 64766, 64258),
        (65280, 64766, 64762),
        (65284, 64766, 64766),
        (65483, 64766, 64766),
        (65536, 64766, 64766),
        (u32::MAX, 64766, 64766),
    ] {
        assert_eq!(mulpdu(emss, false), plain, "{emss}");
        assert_eq!(mulpdu(emss, true), markers, "{emss} with markers");
    }
    //= rfc5044 section 3
    //= type=test
    //# The range of MULPDU values MUST be
    //# between 128 octets and 64768 octets, inclusive.
    //= rfc5044 section 4.5
    //= type=test
    //# If one or more FPDUs are already packed into a TCP segment, such that the
    //# remaining room is less than 128 octets, MPA MUST NOT provide a MULPDU
    //# smaller than 128.
    for emss in (0..200).chain(64_000..66_000).chain([1 << 20, u32::MAX]) {
        for markers in [false, true] {
            assert!((128..=64768).contains(&mulpdu(emss, markers)), "{emss}");
        }
    }
    // An FPDU with the MULPDU fits into a segment, wherever the markers are.
    for emss in 140..4000u32 {
        assert!(fpdu_len(mulpdu(emss, false).into()) <= emss as usize);
        for next in (0..512).step_by(4) {
            assert!(fpdu_len_with_markers(next, mulpdu(emss, true).into()) <= emss as usize);
        }
    }
}

#[test]
fn marker_clock_counts_modulo_512() {
    let mut c = MarkerClock::new();
    assert_eq!((c.offset(), c.next_marker_in()), (0, 0));
    c.advance(4);
    assert_eq!(c.next_marker_in(), 508);
    c.advance(508);
    assert_eq!(c.next_marker_in(), 0);
    //= rfc5044 section 4.3
    //= type=test
    //# Note that this computation MUST take into account that the TCP sequence
    //# number could have wrapped between the Marker and the header.
    c.advance(usize::MAX);
    assert_eq!(MarkerClock::at(u64::MAX).offset(), 511);
    assert_eq!(MarkerClock::at(1024 + 20), MarkerClock::at(20));
}

#[test]
fn fpdu_length_with_markers_is_limited() {
    let mut out = vec![0; 70000];
    let (mut fit, mut over) = (0, 0);
    for start in (0..512).step_by(4) {
        let next = MarkerClock::at(start).next_marker_in();
        for ulpdu_len in 65004..65032 {
            let total = fpdu_len_with_markers(next, ulpdu_len);
            let clock = &mut MarkerClock::at(start);
            let result = encode_fpdu(&vec![0; ulpdu_len], &MARKERS, clock, &mut out);
            let want = match total <= 65536 {
                true => Ok(total),
                false => Err(FramingError::UlpduTooLong),
            };
            assert_eq!(result, want, "{ulpdu_len} octets at {start}");
            fit += u32::from(total == 65536);
            over += u32::from(total > 65536);
        }
    }
    assert!(fit > 100 && over > 100, "{fit} {over}");
}
