//! Misbehaving peers, whose messages may be out of order, out of bounds, too long or unexpected,
//! while our own requests are being sent.

use super::{Numbers, Seen};
use crate::qp::tests::harness::*;
use crate::qp::*;
use crate::{Access, RecvWr, SendFlags, SendOp, Sge};
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::mpa::framing::{MarkerClock, decode_fpdu};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, Opcode, ReadRequest};
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

pub(super) fn run(seed: u64) -> Vec<Seen> {
    let n = &mut Numbers::new(seed);
    let initiator = n.one_in(2);
    let few = |n: &mut Numbers, below| match n.one_in(5) {
        true => n.below(below) as u16,
        false => 40,
    };
    let ird = few(n, 6);
    let ord = match n.below(9) {
        0 => n.below(2) as u16,
        1..=4 => n.within(1, 6) as u16,
        _ => 40,
    };
    let config = QpConfig {
        max_send_wr: 60,
        max_send_sge: 2,
        max_ird: ird,
        max_ord: 40,
        snapshot: n.one_in(2),
        receiver_not_ready: n.pick(&[ReceiverNotReady::Terminate, ReceiverNotReady::default()]),
        ..QpConfig::default()
    };
    let rtr = n.pick(&[None, None, None, Some(Rtr::Write), Some(Rtr::Read)]);
    let stream = StreamConfig {
        initiator,
        crc: n.one_in(2),
        emss: n.pick(&[65_000, 1460, 300]),
        ird,
        ord,
        rtr: rtr.filter(|_| initiator),
        ..STREAM
    };
    let mut world = World::new(config, stream, n.below(10) < 3);
    let piece = n.within(1, 6000) as usize;
    for i in 0..n.below(60) {
        world.receive(1000 + i, 0);
    }
    for i in 0..n.within(1, 250) {
        world.step(i, piece, n);
    }
    world.arrive(piece);
    for _ in 0..100 {
        world.write(10_000);
    }
    vec![world.seen()]
}

/// A request that the peer has received and not answered completely.
#[derive(Debug, Clone, Copy)]
enum PeerRequest {
    Read { sink: u32, len: u32, done: u32 },
    Atomic(u32),
}

struct World {
    rig: Rig,
    /// Memory that the peer may access.
    target: Mr,
    /// Memory that the peer may not access.
    sink: Mr,
    sent: Vec<u8>,
    /// How many of the sent octets the peer has parsed.
    parsed: usize,
    unanswered: VecDeque<PeerRequest>,
    msn: [u32; 4],
    arriving: Vec<u8>,
    fills: Vec<(TxFill, usize)>,
    held: bool,
}

impl World {
    fn new(config: QpConfig, stream: StreamConfig, placed: bool) -> Self {
        let mut rig = Rig::fresh(config);
        if placed {
            rig.qp.complete_when_placed();
        }
        rig.start(stream);
        let target = rig.zero_based(4096, ALL);
        let sink = rig.zero_based(8192, Access::LOCAL_WRITE);
        Self {
            rig,
            target,
            sink,
            sent: Vec::new(),
            parsed: 0,
            unanswered: VecDeque::new(),
            msn: [1; 4],
            arriving: Vec::new(),
            fills: Vec::new(),
            held: false,
        }
    }

    fn parse_sent(&mut self) {
        let mut ulpdu = vec![0; 65536];
        let options = self.rig.options;
        while let Ok(d) = decode_fpdu(
            &self.sent[self.parsed..],
            &options,
            &mut MarkerClock::new(),
            &mut ulpdu,
        ) {
            self.parsed += d.consumed;
            let header = Header::parse(&ulpdu[..d.ulpdu_len]).unwrap();
            let body = &ulpdu[header.len()..d.ulpdu_len];
            match header.opcode() {
                Opcode::READ_REQUEST => {
                    let r = ReadRequest::parse(body).unwrap();
                    self.unanswered.push_back(PeerRequest::Read {
                        sink: r.sink_stag.0,
                        len: r.size,
                        done: 0,
                    });
                }
                Opcode::ATOMIC_REQUEST => {
                    let r = AtomicRequest::parse(body).unwrap();
                    self.unanswered.push_back(PeerRequest::Atomic(r.request_id));
                }
                _ => {}
            }
        }
    }

    fn peer_sends(&mut self, ulpdu: &[u8]) {
        let fpdu = self.rig.fpdu(ulpdu);
        self.arriving.extend(fpdu);
    }

    fn peer_sends_untagged(&mut self, opcode: Opcode, qn: u32, wrong: u8, body: &[u8]) {
        let msn = self.msn[qn as usize].wrapping_add(u32::from(wrong & 1));
        self.msn[qn as usize] += 1;
        let mo = u32::from(wrong & 2);
        let qn = if wrong & 4 != 0 { qn ^ 1 } else { qn };
        self.peer_sends(&untagged(opcode, qn, msn, mo, wrong & 8 == 0, body));
    }

    /// Sends a message of the peer, or a segment of a response.
    fn peer(&mut self, kind: u8, len: u32, at: u64, wrong: u8) {
        let len = len.min(4000);
        let payload: Vec<u8> = (0..len).map(|i| (i as u64 * 7 + at) as u8).collect();
        let stag = self.target.stag ^ u32::from(wrong & 16) << 8;
        // The offset is nearly always inside the region.
        let to = match wrong & 32 {
            0 => at % u64::from(4096 - len),
            _ => at.wrapping_sub(100),
        };
        match kind {
            0..=3 => {
                let ulpdu = tagged(Opcode::WRITE, stag, to, wrong & 8 == 0, &payload);
                self.peer_sends(&ulpdu);
            }
            4 | 5 => {
                let payload = &payload[..payload.len().min(100)];
                let opcode = if kind == 4 {
                    Opcode::SEND
                } else {
                    Opcode::SEND_SE
                };
                self.peer_sends_untagged(opcode, 0, wrong, payload);
            }
            6..=11 => {
                let mut body = read_request(at as u32 + 2, len, stag, to);
                if wrong & 64 != 0 {
                    body.push(0);
                }
                self.peer_sends_untagged(Opcode::READ_REQUEST, 1, wrong, &body);
            }
            12 => {
                let mut body = [0; AtomicRequest::LEN];
                AtomicRequest {
                    op: AtomicOp::FETCH_ADD,
                    request_id: 7,
                    stag: Stag(stag),
                    to: to & !7,
                    add_swap: 3,
                    ..AtomicRequest::default()
                }
                .emit(&mut body);
                self.peer_sends_untagged(Opcode::ATOMIC_REQUEST, 1, wrong, &body);
            }
            _ => self.answer(&payload, wrong),
        }
    }

    fn answer(&mut self, payload: &[u8], wrong: u8) {
        if wrong & 64 != 0 {
            // Answer the second request instead of the first.
            self.unanswered.pop_front();
        }
        let Some(first) = self.unanswered.front_mut() else {
            if wrong != 0 {
                self.peer_sends(&tagged(Opcode::READ_RESPONSE, 5, 0, true, payload));
            }
            return;
        };
        match first {
            PeerRequest::Read { sink, len, done } => {
                let left = *len - *done;
                let now = left.min((payload.len() as u32).max(1)) as usize;
                let mut part = vec![9; now];
                let known = now.min(payload.len());
                part[..known].copy_from_slice(&payload[..known]);
                if wrong & 2 != 0 {
                    part.push(1);
                }
                let stag = *sink ^ u32::from(wrong & 16);
                let to = u64::from(*done) + u64::from(wrong & 1);
                let last = (now as u32 == left) ^ (wrong & 8 != 0);
                *done += now as u32;
                if *done == *len {
                    self.unanswered.pop_front();
                }
                self.peer_sends(&tagged(Opcode::READ_RESPONSE, stag, to, last, &part));
            }
            PeerRequest::Atomic(_) if wrong & 1 != 0 => {
                self.peer_sends(&tagged(Opcode::READ_RESPONSE, 0, 0, true, &[1; 8]));
            }
            PeerRequest::Atomic(id) => {
                let mut body = [0; AtomicResponse::LEN];
                AtomicResponse {
                    request_id: *id ^ u32::from(wrong & 16),
                    original: 0x0102_0304,
                }
                .emit(&mut body);
                self.unanswered.pop_front();
                self.peer_sends_untagged(Opcode::ATOMIC_RESPONSE, 3, wrong & 15, &body);
            }
        }
    }

    fn post(&mut self, wr_id: u64, n: &mut Numbers) {
        let mut bits = SendFlags::empty();
        bits.set(SendFlags::SIGNALED, n.one_in(2));
        bits.set(SendFlags::FENCE, n.one_in(8));
        bits.set(SendFlags::SOLICITED, n.one_in(2));
        let at = n.below(3900);
        let (remote_addr, rkey) = (at, 9);
        let op = match n.below(20) {
            0..=8 => SendOp::Read { remote_addr, rkey },
            9 => SendOp::FetchAdd {
                remote_addr,
                rkey,
                add: 1,
                mask: 0,
            },
            10 => SendOp::WriteImm {
                remote_addr,
                rkey,
                imm: 7,
            },
            11..=14 => SendOp::Send,
            _ => SendOp::Write { remote_addr, rkey },
        };
        let atomic = matches!(op, SendOp::FetchAdd { .. });
        let lkey = self.sink.stag;
        let sges: Vec<Sge> = (0..n.within(1, 3))
            .map(|_| Sge {
                addr: at,
                len: if atomic { 8 } else { Self::length(n) },
                lkey,
            })
            .collect();
        let _ = self.rig.try_post(wr_id, op, bits, &sges);
    }

    fn write(&mut self, most: usize) {
        if self.rig.plan.is_done() {
            if !self.rig.qp.wants_tx() {
                return;
            }
            let fill = self.rig.fill();
            self.fills.push((fill, self.rig.plan.remaining()));
            if fill != TxFill::Ready {
                return;
            }
        }
        // The program deregistered memory that was being sent: the caller has to end the stream.
        let mut out = vec![0; most];
        let accessor = self.rig.qp.accessor();
        match self.rig.plan.copy_to(&self.rig.table, accessor, &mut out) {
            Ok(n) => {
                self.sent.extend(&out[..n]);
                self.rig
                    .qp
                    .tx_written(&mut self.rig.plan, n, &mut self.rig.host);
            }
            Err(_) => self.rig.qp.abort(&mut self.rig.host),
        }
        self.parse_sent();
    }

    fn arrive(&mut self, piece: usize) {
        let octets = std::mem::take(&mut self.arriving);
        let mut rest = &octets[..];
        if self.held {
            self.held = self.rig.offer_again() == RxStatus::Held;
        }
        while !rest.is_empty() && !self.held && self.rig.qp.rx_interest() == RxInterest::Read {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            self.held = self.rig.rx(now) == RxStatus::Held;
            rest = later;
        }
        // Octets that a held stream has not consumed are passed again.
        self.arriving = rest.to_vec();
    }

    /// Performs one step: the program posts, the peer sends, or octets move.
    fn step(&mut self, i: u64, piece: usize, n: &mut Numbers) {
        match n.below(58) {
            0..=9 => self.post(i, n),
            10..=12 => {
                let at = n.below(200);
                self.receive(i, at);
            }
            13..=24 => self.write(n.within(1, 20_000) as usize),
            25..=30 => self.arrive(piece),
            31..=54 => {
                let kind = n.below(20) as u8;
                let (len, at) = (Self::length(n), n.below(4000));
                // Errors are rare, because an error ends the stream.
                let wrong = if n.one_in(300) { 1 << n.below(8) } else { 0 };
                self.peer(kind, len, at, wrong);
            }
            55 => {
                let without = match n.below(4000) {
                    0..40 => Access::REMOTE_READ,
                    40..80 => Access::REMOTE_WRITE,
                    80..120 => Access::REMOTE_ATOMIC,
                    _ => Access::empty(),
                };
                self.rig.qp.set_remote_access(Access::all() - without);
            }
            56 => {
                let to = n.pick(&[State::Sqd, State::Rts]);
                let _ = self.rig.qp.modify(to, &mut self.rig.host);
            }
            _ => {
                if n.one_in(10) {
                    let _ = self.rig.table.deregister(Stag(self.target.stag));
                }
            }
        }
    }

    fn receive(&mut self, wr_id: u64, at: u64) {
        let sge = Sge {
            addr: 7000 + at,
            len: 100,
            lkey: self.sink.stag,
        };
        let wr = RecvWr {
            wr_id,
            sges: &[sge],
        };
        let _ = self.rig.qp.post_recv(&wr, &mut self.rig.host);
    }

    const fn length(n: &mut Numbers) -> u32 {
        match n.below(10) {
            0..=5 => n.within(1, 80) as u32,
            6 => n.below(2) as u32,
            7 | 8 => n.below(2200) as u32,
            _ => n.within(2000, 5000) as u32,
        }
    }

    fn seen(&mut self) -> Seen {
        let (target, sink) = (self.rig.read(&self.target), self.rig.read(&self.sink));
        let mut plans = Vec::new();
        for (fill, octets) in &self.fills {
            plans.push(*fill as u8);
            plans.extend((*octets as u32).to_le_bytes());
        }
        let seen = Seen::of(&mut self.rig);
        let seen = seen.with("octets", std::mem::take(&mut self.sent));
        let seen = seen.with("plans", plans).with("target", target);
        seen.with("sink", sink)
    }
}
