//! Sequences of requests, of a peer's segments, and of RDMA Reads between two ends.

use super::{Numbers, Seen};
use crate::qp::tests::harness::*;
use crate::qp::*;
use crate::{Access, RecvWr, SendFlags, SendOp, SendWr, Sge};
use iwarp_proto::rdmap::{Immediate, Opcode};
use std::vec;
use std::vec::Vec;

fn stream(n: &mut Numbers) -> StreamConfig {
    let markers = n.one_in(4);
    StreamConfig {
        crc: !n.one_in(2),
        markers_tx: markers,
        markers_rx: markers,
        emss: n.pick(&[65_000, 1460, 300]),
        ..STREAM
    }
}

/// All kinds of requests, written in steps of all sizes.
pub(super) fn send(seed: u64) -> Vec<Seen> {
    let n = &mut Numbers::new(seed);
    let stream = stream(n);
    let config = QpConfig {
        max_send_sge: 2,
        max_inline: 64,
        snapshot: n.one_in(5),
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, stream);
    if n.one_in(2) {
        rig.qp.align(stream.emss);
    }
    let most = n.within(1, 9000) as usize;
    let every = n.within(1, 9);
    let mr = rig.mr(8192, Access::LOCAL_WRITE);
    let (mut octets, mut parts) = (Vec::new(), Vec::new());
    for wr_id in 0..n.within(1, 60) {
        post(&mut rig, &mr, wr_id, n);
        if wr_id % every == 0 {
            drain(&mut rig, most, &mut octets, &mut parts);
        }
    }
    drain(&mut rig, most, &mut octets, &mut parts);
    let seen = Seen::of(&mut rig);
    vec![seen.with("octets", octets).with("parts", parts)]
}

fn post(rig: &mut Rig, mr: &Mr, wr_id: u64, n: &mut Numbers) {
    let (remote_addr, rkey) = (wr_id * 77, 9);
    let op = match n.below(30) {
        0..=12 => SendOp::Write { remote_addr, rkey },
        13..=25 => SendOp::Send,
        26 => SendOp::WriteImm {
            remote_addr: 5,
            rkey,
            imm: 3,
        },
        27 => SendOp::SendImm(wr_id as u32),
        28 => SendOp::SendInv(0x500),
        _ => SendOp::Read { remote_addr, rkey },
    };
    let lens: Vec<u32> = (0..n.below(3)).map(|_| n.length()).collect();
    let mut flags = SendFlags::empty();
    flags.set(SendFlags::SIGNALED, n.one_in(2));
    flags.set(SendFlags::SOLICITED, n.one_in(2));
    flags.set(SendFlags::FENCE, n.one_in(4));
    let small = lens.iter().sum::<u32>() <= 64;
    let inline = n.one_in(2) && small && !op.has_response();
    flags.set(SendFlags::INLINE, inline);
    let bad = if n.one_in(100) { 0x100 } else { 0 };
    let sges: Vec<Sge> = lens
        .iter()
        .enumerate()
        .map(|(i, len)| Sge {
            lkey: mr.stag ^ bad,
            ..mr.part(i as u32 * 3, *len)
        })
        .collect();
    let data: Vec<Vec<u8>> = lens.iter().map(|len| vec![7; *len as usize]).collect();
    let pieces: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let wr = SendWr {
        wr_id,
        op,
        flags,
        sges: if inline { &[] } else { &sges },
        inline: if inline { &pieces } else { &[] },
    };
    // A full queue and a failed queue pair are part of the sequence.
    let _ = rig.qp.post_send(&wr, &mut rig.host);
}

/// Writes everything in steps of at most `most` octets, and records the length of each write.
fn drain(rig: &mut Rig, most: usize, octets: &mut Vec<u8>, parts: &mut Vec<u8>) {
    loop {
        while !rig.plan.is_done() {
            let together = rig.plan.together();
            parts.extend((together as u32).to_le_bytes());
            octets.extend(rig.write_some(together.min(most)));
        }
        if !rig.qp.wants_tx() || rig.fill() != TxFill::Ready {
            return;
        }
    }
}

/// Segments of a peer, mostly valid, split anywhere.
pub(super) fn receive(seed: u64) -> Vec<Seen> {
    let n = &mut Numbers::new(seed);
    let stream = stream(n);
    let config = QpConfig {
        max_recv_sge: 2,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, stream);
    let target = rig.zero_based(40_000, ALL);
    let sink = rig.zero_based(40_000, Access::LOCAL_WRITE);
    for wr_id in 0..n.below(40) {
        let part = |off, len| Sge {
            addr: off,
            len,
            lkey: sink.stag,
        };
        let sges = [
            part(wr_id * 64, 40 + wr_id as u32 % 3 * 30),
            part(3000, if n.one_in(4) { 30_000 } else { 3500 }),
        ];
        let wr = RecvWr { wr_id, sges: &sges };
        rig.qp.post_recv(&wr, &mut rig.host).unwrap();
    }
    let mut peer = Peer {
        msn: 1,
        mo: 0,
        request: 1,
    };
    let mut octets = Vec::new();
    for i in 0..n.within(1, 60) as usize {
        let ulpdu = peer.segment(i, target.stag, n);
        let mut fpdu = rig.fpdu(&ulpdu);
        if n.one_in(100) {
            let at = n.below(fpdu.len() as u64) as usize;
            fpdu[at] ^= n.within(1, 256) as u8;
        }
        octets.extend(fpdu);
    }
    let piece = n.within(1, 4000) as usize;
    for part in octets.chunks(piece) {
        if rig.rx(part) == RxStatus::Held || rig.qp.state() != State::Rts {
            break;
        }
    }
    let answers = rig.octets_out();
    let (written, received) = (rig.read(&target), rig.read(&sink));
    let seen = Seen::of(&mut rig).with("answers", answers);
    vec![seen.with("written", written).with("received", received)]
}

/// Sequence numbers of a peer.
struct Peer {
    msn: u32,
    mo: u32,
    request: u32,
}

impl Peer {
    fn segment(&mut self, i: usize, stag: u32, n: &mut Numbers) -> Vec<u8> {
        let kind = n.below(13);
        let len = match n.below(20) {
            0..=15 => n.below(80),
            16..=18 => n.below(3000),
            _ if kind < 7 => n.within(9000, 30_000),
            _ => 0,
        };
        let payload: Vec<u8> = (0..len).map(|j| (i as u64 * 31 + j) as u8).collect();
        let (to, last) = (n.below(1500), !n.one_in(5));
        match kind {
            0..=5 => tagged(Opcode::WRITE, stag, to, last, &payload),
            6..=10 => {
                let opcode = if kind == 6 {
                    Opcode::SEND_SE
                } else {
                    Opcode::SEND
                };
                let ulpdu = untagged(opcode, 0, self.msn, self.mo, last, &payload);
                self.mo = if last { 0 } else { self.mo + len as u32 };
                self.msn += u32::from(last);
                ulpdu
            }
            11 => {
                // The completion carries the length of the preceding Write.
                let imm = Immediate::plain(i as u32).octets();
                self.msn += 1;
                untagged(Opcode::IMMEDIATE, 0, self.msn - 1, 0, true, &imm)
            }
            _ => {
                let body = read_request(i as u32 + 2, 16, stag, to);
                self.request += 1;
                untagged(Opcode::READ_REQUEST, 1, self.request - 1, 0, true, &body)
            }
        }
    }
}

/// RDMA Reads, Writes and atomics between two ends, in one direction or in both.
pub(super) fn read(seed: u64) -> Vec<Seen> {
    let n = &mut Numbers::new(seed);
    let ird = n.within(1, 40) as u16;
    let stream = StreamConfig {
        ird,
        ord: ird,
        ..stream(n)
    };
    let config = QpConfig {
        max_send_sge: 2,
        max_ird: 40,
        max_ord: 40,
        ..QpConfig::default()
    };
    let other = StreamConfig {
        initiator: false,
        ..stream
    };
    let mut ends = [Rig::with(config, stream), Rig::with(config, other)];
    let regions: Vec<[Mr; 2]> = ends
        .iter_mut()
        .map(|rig| [rig.zero_based(8192, ALL), rig.mr(8192, Access::LOCAL_WRITE)])
        .collect();
    let (both, every) = (n.one_in(2), n.within(1, 40));
    let piece = n.within(1, 4000) as usize;
    let mut wire = [Vec::new(), Vec::new()];
    let mut parts = [Vec::new(), Vec::new()];
    let count = n.within(1, 60);
    for i in 0..count {
        for from in 0..=usize::from(both) {
            post_read(
                &mut ends[from],
                &regions[from][1],
                &regions[1 - from][0],
                i,
                n,
            );
        }
        let last = i + 1 == count;
        if i % every != 0 && !last {
            continue;
        }
        // One exchange; after the last request, until nothing is sent.
        for _ in 0..if last { 200 } else { 1 } {
            for (from, to) in [(0, 1), (1, 0)] {
                let mut octets = Vec::new();
                drain(&mut ends[from], usize::MAX, &mut octets, &mut parts[from]);
                for part in octets.chunks(piece) {
                    if ends[to].qp.state() == State::Rts {
                        let _ = ends[to].rx(part);
                    }
                }
                wire[from].extend(octets);
            }
        }
    }
    let seen = ends.iter_mut().zip(regions).zip(wire).zip(parts);
    seen.map(|(((rig, [source, sink]), octets), parts)| {
        let (source, sink) = (rig.read(&source), rig.read(&sink));
        let seen = Seen::of(rig).with("octets", octets).with("parts", parts);
        seen.with("source", source).with("sink", sink)
    })
    .collect()
}

fn post_read(rig: &mut Rig, sink: &Mr, source: &Mr, wr_id: u64, n: &mut Numbers) {
    let (remote_addr, rkey) = (n.below(3000), source.stag);
    let op = match n.below(40) {
        // A key that the peer does not have.
        0 => SendOp::Read {
            remote_addr,
            rkey: rkey ^ 0x100,
        },
        1..=4 => SendOp::Write { remote_addr, rkey },
        5 => SendOp::FetchAdd {
            remote_addr: 8,
            rkey,
            add: 1,
            mask: 0,
        },
        _ => SendOp::Read { remote_addr, rkey },
    };
    let mut flags = SendFlags::empty();
    flags.set(SendFlags::SIGNALED, n.one_in(2));
    flags.set(SendFlags::FENCE, n.one_in(4));
    let atomic = matches!(op, SendOp::FetchAdd { .. });
    // Some elements extend beyond the sink.
    let at = (wr_id as u32 * 64) % 3600;
    let sges: Vec<Sge> = (0..n.within(1, 3))
        .map(|_| sink.part(at, if atomic { 8 } else { n.length() }))
        .collect();
    let _ = rig.try_post(wr_id, op, flags, &sges);
}
