//! The segmentation of the stream has no effect: FPDUs processed in a loop give the same result as
//! one by one.

use super::harness::*;
use crate::qp::*;
use crate::{Access, Cqe, RecvWr, Sge};
use iwarp_proto::mpa::framing::MPA_LEN_FIELD;
use iwarp_proto::rdmap::{Immediate, Opcode};
use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

const STREAMS: [StreamConfig; 2] = [
    STREAM,
    StreamConfig {
        crc: false,
        ..STREAM
    },
];

#[derive(Debug, Clone)]
struct Segment {
    kind: u8,
    len: usize,
    to: u64,
    last: bool,
    mangle: Option<(usize, u8)>,
}

impl Segment {
    fn has_other_length(&self) -> bool {
        self.mangle.is_some_and(|(at, _)| at < MPA_LEN_FIELD)
    }
}

fn segments() -> impl Strategy<Value = Vec<Segment>> {
    let len = prop_oneof![6 => 0usize..80, 1 => 0usize..3000];
    let mangle = proptest::option::weighted(0.01, (0usize..40, 1u8..));
    let segment = (
        0u8..13,
        len,
        0u64..1500,
        proptest::bool::weighted(0.8),
        mangle,
    )
        .prop_map(|(kind, len, to, last, mangle)| Segment {
            kind,
            len,
            to,
            last,
            mangle,
        });
    proptest::collection::vec(segment, 1..60)
}

#[derive(Debug, PartialEq)]
struct Seen {
    written: Vec<u8>,
    received: Vec<u8>,
    recvs: Vec<Cqe>,
    answers: Vec<u8>,
    counters: Counters,
    state: State,
    fault: Option<Fault>,
}

/// Returns the FPDUs of the segments. Writes and Reads access `stag`.
fn fpdus(rig: &mut Rig, stag: u32, segments: &[Segment]) -> Vec<Vec<u8>> {
    let (mut msn, mut mo, mut request) = (1, 0, 1);
    let mut fpdus = Vec::new();
    for (i, s) in segments.iter().enumerate() {
        let payload: Vec<u8> = (0..s.len).map(|j| (i * 31 + j) as u8).collect();
        let ulpdu = match s.kind {
            0..=5 => tagged(Opcode::WRITE, stag, s.to, s.last, &payload),
            6..=10 => {
                let opcode = match s.kind {
                    6 => Opcode::SEND_SE,
                    _ => Opcode::SEND,
                };
                let ulpdu = untagged(opcode, 0, msn, mo, s.last, &payload);
                (msn, mo) = match s.last {
                    true => (msn + 1, 0),
                    false => (msn, mo + s.len as u32),
                };
                ulpdu
            }
            11 => {
                // The completion carries the length of the preceding Write.
                msn += 1;
                let imm = Immediate::plain(i as u32).octets();
                untagged(Opcode::IMMEDIATE, 0, msn - 1, 0, true, &imm)
            }
            _ => {
                request += 1;
                let body = read_request(i as u32 + 2, 16, stag, s.to);
                untagged(Opcode::READ_REQUEST, 1, request - 1, 0, true, &body)
            }
        };
        let mut fpdu = rig.fpdu(&ulpdu);
        if let Some((at, with)) = s.mangle
            && at < fpdu.len()
        {
            fpdu[at] ^= with;
        }
        fpdus.push(fpdu);
    }
    fpdus
}

proptest! {
    #[test]
    fn segmentation_has_no_effect(
        segments in segments(),
        crc in 0usize..2,
        receives in 0u64..40,
        piece in 1usize..4000,
    ) {
        let config = QpConfig { max_recv_sge: 2, ..QpConfig::default() };
        let mut seen: Vec<Seen> = Vec::new();
        for one_by_one in [false, true] {
            let rig = &mut Rig::with(config, STREAMS[crc]);
            let target = rig.zero_based(4096, ALL);
            let sink = rig.zero_based(4096, Access::LOCAL_WRITE);
            for wr_id in 0..receives {
                let part = |off, len| Sge { addr: off, len, lkey: sink.stag };
                let sges = [part(wr_id * 64, 40 + wr_id as u32 % 3 * 30), part(3000, 900)];
                rig.qp.post_recv(&RecvWr { wr_id, sges: &sges }, &mut rig.host).unwrap();
            }
            let mut fpdus = fpdus(rig, target.stag, &segments);
            if segments.iter().any(Segment::has_other_length) {
                // With a wrong length, an FPDU may include everything after it. How much of an
                // incomplete FPDU is examined is undefined, so it is completed.
                fpdus.push(vec![0; usize::from(u16::MAX) + 64]);
            }
            let octets = fpdus.concat();
            let pieces: Vec<&[u8]> = match one_by_one {
                true => fpdus.iter().map(Vec::as_slice).collect(),
                false => octets.chunks(piece).collect(),
            };
            for part in pieces {
                if rig.rx(part) == RxStatus::Held || rig.qp.state() != State::Rts {
                    break;
                }
            }
            let answers = rig.octets_out();
            // No octets are passed after a held Send or an error.
            let counters = Counters { rx_bytes: 0, ..*rig.qp.counters() };
            seen.push(Seen {
                written: rig.read(&target),
                received: rig.read(&sink),
                recvs: rig.host.recvs.clone(),
                answers,
                counters,
                state: rig.qp.state(),
                fault: rig.qp.fault(),
            });
        }
        prop_assert_eq!(&seen[0], &seen[1]);
    }
}
