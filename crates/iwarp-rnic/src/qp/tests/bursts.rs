//! Runs of small messages that are received go a shorter way. What comes out must be what the general way gives, octet for octet.

use super::harness::*;
use crate::memory::HostRange;
use crate::qp::*;
use crate::{Access, Cqe, RecvWr, SendFlags, SendOp, Sge};
use iwarp_proto::rdmap::{Immediate, Opcode};
use proptest::prelude::*;
use std::vec::Vec;

const STREAMS: [StreamConfig; 2] = [
    STREAM,
    StreamConfig {
        crc: false,
        ..STREAM
    },
];

/// Two alike; the second one knows the general way only.
fn twins(config: QpConfig, stream: StreamConfig) -> [Rig; 2] {
    let mut twins = [Rig::with(config, stream), Rig::with(config, stream)];
    twins[1].qp.plodding = true;
    twins
}

/// A region whose tagged offsets begin at zero, so that twins see the same ones.
fn zero_based(rig: &mut Rig, len: u32, access: Access) -> Mr {
    let range: HostRange = rig.range(len);
    let at = range.addr();
    let random = rig.random();
    let stag = rig
        .table
        .register(range, 0, PD, access | Access::ZERO_BASED, random);
    Mr {
        stag: stag.unwrap(),
        at,
        len,
    }
}

/// Writes what there is in steps of at most `most` octets, and notes how much belongs together before each.
fn drain(rig: &mut Rig, most: usize, octets: &mut Vec<u8>, parts: &mut Vec<usize>) {
    loop {
        while !rig.plan.is_done() {
            parts.push(rig.plan.together());
            let n = rig.plan.together().min(most);
            octets.extend(rig.write_some(n));
        }
        if !rig.qp.wants_tx() || rig.fill() != TxFill::Ready {
            return;
        }
    }
}

/// A segment as a peer may send it.
#[derive(Debug, Clone)]
struct Segment {
    kind: u8,
    len: usize,
    to: u64,
    last: bool,
    mangle: Option<(usize, u8)>,
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

/// Everything that can be seen of a receiver.
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

proptest! {
    #[test]
    fn what_is_received_is_the_same(segments in segments(), crc in 0usize..2, receives in 0u64..40, piece in 1usize..4000) {
        let config = QpConfig { max_recv_sge: 2, ..QpConfig::default() };
        let mut twins = twins(config, STREAMS[crc]);
        let mut seen: Vec<Seen> = Vec::new();
        for rig in &mut twins {
            let target = zero_based(rig, 4096, ALL);
            let sink = zero_based(rig, 4096, Access::LOCAL_WRITE);
            for wr_id in 0..receives {
                let part = |off, len| Sge { addr: off, len, lkey: sink.stag };
                let sges = [part(wr_id * 64, 40 + wr_id as u32 % 3 * 30), part(3000, 900)];
                rig.qp.post_recv(&RecvWr { wr_id, sges: &sges }, &mut rig.host).unwrap();
            }
            let (mut msn, mut mo, mut request) = (1, 0, 1);
            let mut octets = Vec::new();
            for (i, s) in segments.iter().enumerate() {
                let payload: Vec<u8> = (0..s.len).map(|j| (i * 31 + j) as u8).collect();
                let ulpdu = match s.kind {
                    0..=5 => tagged(Opcode::WRITE, target.stag, s.to, s.last, &payload),
                    6..=10 => {
                        let opcode = if s.kind == 6 { Opcode::SEND_SE } else { Opcode::SEND };
                        let ulpdu = untagged(opcode, 0, msn, mo, s.last, &payload);
                        if s.last { msn += 1; mo = 0 } else { mo += s.len as u32 }
                        ulpdu
                    }
                    11 => {
                        // Tells how long the Write before it was.
                        msn += 1;
                        let imm = Immediate::plain(i as u32).octets();
                        untagged(Opcode::IMMEDIATE, 0, msn - 1, 0, true, &imm)
                    }
                    _ => {
                        request += 1;
                        let body = read_request(i as u32 + 2, 16, target.stag, s.to);
                        untagged(Opcode::READ_REQUEST, 1, request - 1, 0, true, &body)
                    }
                };
                let mut fpdu = rig.fpdu(&ulpdu);
                if let Some((at, with)) = s.mangle && at < fpdu.len() {
                    fpdu[at] ^= with;
                }
                octets.extend(fpdu);
            }
            for part in octets.chunks(piece) {
                if rig.rx(part) == RxStatus::Held || rig.qp.state() != State::Rts {
                    break;
                }
            }
            let answers = rig.octets_out();
            let counters = *rig.qp.counters();
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

/// One RDMA Read, or a Write among them.
#[derive(Debug, Clone)]
struct Ask {
    lens: Vec<u32>,
    from: u64,
    flags: u32,
    kind: u8,
}

fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let len = prop_oneof![6 => 0u32..80, 2 => 0u32..2200, 1 => 2000u32..5000];
    let ask = (
        proptest::collection::vec(len, 1..3),
        0u64..3000,
        0u32..8,
        0u8..40,
    )
        .prop_map(|(lens, from, flags, kind)| Ask {
            lens,
            from,
            flags,
            kind,
        });
    proptest::collection::vec(ask, 1..60)
}

fn ask(rig: &mut Rig, sink: &Mr, source: &Mr, wr_id: u64, a: &Ask) {
    let op = match a.kind {
        // Nothing of the peer's.
        0 => SendOp::Read {
            remote_addr: a.from,
            rkey: source.stag ^ 0x100,
        },
        1..=4 => SendOp::Write {
            remote_addr: a.from,
            rkey: source.stag,
        },
        5 => SendOp::FetchAdd {
            remote_addr: 8,
            rkey: source.stag,
            add: 1,
            mask: 0,
        },
        _ => SendOp::Read {
            remote_addr: a.from,
            rkey: source.stag,
        },
    };
    let mut flags = SendFlags::empty();
    flags.set(SendFlags::SIGNALED, a.flags & 1 != 0);
    flags.set(SendFlags::FENCE, a.flags & 6 == 6);
    let lens = if a.kind == 5 { &[8][..] } else { &a.lens };
    // Now and then a sink that is not all there.
    let at = (wr_id as u32 * 64) % 3600;
    let sges: Vec<Sge> = lens.iter().map(|len| sink.part(at, *len)).collect();
    let _ = rig.try_post(wr_id, op, flags, &sges);
}

proptest! {
    #[test]
    fn what_is_read_is_the_same(
        asks in asks(), both: bool, crc in 0usize..2, every in 1usize..40, emss in prop_oneof![Just(65_000u32), Just(1460), Just(300)],
        piece in 1usize..4000, ird in 1u16..40,
    ) {
        let config = QpConfig { max_send_sge: 2, max_ird: 40, max_ord: 40, ..QpConfig::default() };
        let stream = StreamConfig { emss, ird, ord: ird, ..STREAMS[crc] };
        let mut seen = Vec::new();
        for plodding in [false, true] {
            let mut ends = [Rig::with(config, stream), Rig::with(config, StreamConfig { initiator: false, ..stream })];
            let sources: Vec<Mr> = ends.iter_mut().map(|rig| zero_based(rig, 8192, ALL)).collect();
            let sinks: Vec<Mr> = ends.iter_mut().map(|rig| rig.mr(8192, Access::LOCAL_WRITE)).collect();
            for rig in &mut ends {
                rig.qp.plodding = plodding;
            }
            let mut wire = [Vec::new(), Vec::new()];
            let mut parts = Vec::new();
            for (i, a) in asks.iter().enumerate() {
                ask(&mut ends[0], &sinks[0], &sources[1], i as u64, a);
                if both {
                    ask(&mut ends[1], &sinks[1], &sources[0], i as u64, a);
                }
                let last = i + 1 == asks.len();
                if i % every != 0 && !last {
                    continue;
                }
                // Once to and fro, and at the end until nothing moves any more.
                for _ in 0..if last { 200 } else { 1 } {
                    for (from, to) in [(0, 1), (1, 0)] {
                        let mut octets = Vec::new();
                        drain(&mut ends[from], usize::MAX, &mut octets, &mut parts);
                        for part in octets.chunks(piece) {
                            if ends[to].qp.state() == State::Rts {
                                let _ = ends[to].rx(part);
                            }
                        }
                        wire[from].extend(octets);
                    }
                }
            }
            let ends: Vec<_> = ends
                .iter()
                .zip(&sinks)
                .zip(&sources)
                .map(|((rig, sink), source)| {
                    (rig.host.sends.clone(), rig.read(sink), rig.read(source), *rig.qp.counters(), rig.qp.state(), rig.qp.fault())
                })
                .collect();
            seen.push((wire, ends));
        }
        prop_assert!(seen[0] == seen[1], "the short way differs");
    }
}
