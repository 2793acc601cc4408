//! The short way and the general one against peers of every kind: what they send may be out of order, out of bounds, too much,
//! or nobody's business, while requests of our own are being sent, in part or in full.

use super::harness::*;
use crate::memory::HostRange;
use crate::qp::*;
use crate::{Access, Cqe, RecvWr, SendFlags, SendOp, Sge};
use iwarp_proto::ddp::Header;
use iwarp_proto::mpa::framing::{MarkerClock, decode_fpdu};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, Opcode, ReadRequest};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

/// One thing that happens. Most of what a peer sends is right; `wrong` says what is not.
#[derive(Debug, Clone)]
enum Act {
    Post {
        kind: u8,
        lens: Vec<u32>,
        flags: u32,
        at: u32,
    },
    Receive(u32),
    /// The program writes to the stream, once, so much of what it has.
    Write(usize),
    /// The peer's octets since the last time arrive.
    Arrive,
    Peer {
        kind: u8,
        len: u32,
        at: u64,
        wrong: u8,
    },
    Rights(u32),
    Drain(bool),
    Invalidate(bool),
}

/// One thing at a time, and rarely: afterwards the stream is over.
fn wrong() -> impl Strategy<Value = u8> {
    prop_oneof![300 => Just(0), 1 => (0u32..8).prop_map(|bit| 1 << bit)]
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let len = || prop_oneof![6 => 1u32..80, 1 => 0u32..2, 2 => 0u32..2200, 1 => 2000u32..5000];
    let act = prop_oneof![
        10 => (0u8..20, proptest::collection::vec(len(), 1..3), 0u32..16, 0u32..3900)
            .prop_map(|(kind, lens, flags, at)| Act::Post { kind, lens, flags, at }),
        3 => (0u32..200).prop_map(Act::Receive),
        12 => (1usize..20_000).prop_map(Act::Write),
        6 => Just(Act::Arrive),
        24 => (0u8..20, len(), 0u64..4000, wrong())
            .prop_map(|(kind, len, at, wrong)| Act::Peer { kind, len, at, wrong }),
        1 => (0u32..4000).prop_map(Act::Rights),
        1 => any::<bool>().prop_map(Act::Drain),
        1 => prop::bool::weighted(0.1).prop_map(Act::Invalidate),
    ];
    proptest::collection::vec(act, 1..250)
}

/// A request that the peer knows of and has not answered in full.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Read { sink: u32, len: u32, done: u32 },
    Atomic(u32),
}

struct World {
    rig: Rig,
    /// What the peer may use, and what it may not.
    target: Mr,
    sink: Mr,
    /// All that was sent, and how much of it the peer has understood.
    sent: Vec<u8>,
    understood: usize,
    asked: VecDeque<Asked>,
    msn: [u32; 4],
    arriving: Vec<u8>,
    fills: Vec<(TxFill, usize)>,
    held: bool,
}

impl World {
    fn new(plodding: bool, config: QpConfig, stream: StreamConfig, placed: bool) -> Self {
        let mut rig = Rig::fresh(config);
        if placed {
            rig.qp.complete_when_placed();
        }
        rig.start(stream);
        rig.qp.plodding = plodding;
        let target = zero_based(&mut rig, 4096, ALL);
        let sink = zero_based(&mut rig, 8192, Access::LOCAL_WRITE);
        Self {
            rig,
            target,
            sink,
            sent: Vec::new(),
            understood: 0,
            asked: VecDeque::new(),
            msn: [1; 4],
            arriving: Vec::new(),
            fills: Vec::new(),
            held: false,
        }
    }

    /// The peer looks at what has come whole.
    fn understand(&mut self) {
        let mut ulpdu = vec![0; 65536];
        let options = self.rig.options;
        while let Ok(d) = decode_fpdu(
            &self.sent[self.understood..],
            &options,
            &mut MarkerClock::new(),
            &mut ulpdu,
        ) {
            self.understood += d.consumed;
            let header = Header::parse(&ulpdu[..d.ulpdu_len]).unwrap();
            let body = &ulpdu[header.len()..d.ulpdu_len];
            match header.opcode() {
                Opcode::READ_REQUEST => {
                    let r = ReadRequest::parse(body).unwrap();
                    self.asked.push_back(Asked::Read {
                        sink: r.sink_stag.0,
                        len: r.size,
                        done: 0,
                    });
                }
                Opcode::ATOMIC_REQUEST => {
                    let r = AtomicRequest::parse(body).unwrap();
                    self.asked.push_back(Asked::Atomic(r.request_id));
                }
                _ => {}
            }
        }
    }

    fn say(&mut self, ulpdu: &[u8]) {
        let fpdu = self.rig.fpdu(ulpdu);
        self.arriving.extend(fpdu);
    }

    fn say_untagged(&mut self, opcode: Opcode, qn: u32, wrong: u8, body: &[u8]) {
        let msn = self.msn[qn as usize].wrapping_add(u32::from(wrong & 1));
        self.msn[qn as usize] += 1;
        let mo = u32::from(wrong & 2);
        let qn = if wrong & 4 != 0 { qn ^ 1 } else { qn };
        self.say(&untagged(opcode, qn, msn, mo, wrong & 8 == 0, body));
    }

    /// The peer sends a message, or a segment of an answer.
    fn peer(&mut self, kind: u8, len: u32, at: u64, wrong: u8) {
        let len = len.min(4000);
        let payload: Vec<u8> = (0..len).map(|i| (i as u64 * 7 + at) as u8).collect();
        let stag = self.target.stag ^ u32::from(wrong & 16) << 8;
        // Nearly always inside.
        let to = match wrong & 32 {
            0 => at % u64::from(4096 - len),
            _ => at.wrapping_sub(100),
        };
        match kind {
            0..=3 => {
                let ulpdu = tagged(Opcode::WRITE, stag, to, wrong & 8 == 0, &payload);
                self.say(&ulpdu);
            }
            4 | 5 => {
                let payload = &payload[..payload.len().min(100)];
                let opcode = if kind == 4 {
                    Opcode::SEND
                } else {
                    Opcode::SEND_SE
                };
                self.say_untagged(opcode, 0, wrong, payload);
            }
            6..=11 => {
                let mut body = read_request(at as u32 + 2, len, stag, to);
                if wrong & 64 != 0 {
                    body.push(0);
                }
                self.say_untagged(Opcode::READ_REQUEST, 1, wrong, &body);
            }
            12 => {
                let mut body = [0; AtomicRequest::LEN];
                AtomicRequest {
                    op: AtomicOp::FETCH_ADD,
                    request_id: 7,
                    stag: iwarp_proto::ddp::Stag(stag),
                    to: to & !7,
                    add_swap: 3,
                    ..AtomicRequest::default()
                }
                .emit(&mut body);
                self.say_untagged(Opcode::ATOMIC_REQUEST, 1, wrong, &body);
            }
            _ => self.answer(&payload, wrong),
        }
    }

    fn answer(&mut self, payload: &[u8], wrong: u8) {
        if wrong & 64 != 0 {
            // The second instead of the first.
            self.asked.pop_front();
        }
        let Some(first) = self.asked.front_mut() else {
            if wrong != 0 {
                self.say(&tagged(Opcode::READ_RESPONSE, 5, 0, true, payload));
            }
            return;
        };
        match first {
            Asked::Read { sink, len, done } => {
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
                    self.asked.pop_front();
                }
                self.say(&tagged(Opcode::READ_RESPONSE, stag, to, last, &part));
            }
            Asked::Atomic(_) if wrong & 1 != 0 => {
                self.say(&tagged(Opcode::READ_RESPONSE, 0, 0, true, &[1; 8]));
            }
            Asked::Atomic(id) => {
                let mut body = [0; AtomicResponse::LEN];
                AtomicResponse {
                    request_id: *id ^ u32::from(wrong & 16),
                    original: 0x0102_0304,
                }
                .emit(&mut body);
                self.asked.pop_front();
                self.say_untagged(Opcode::ATOMIC_RESPONSE, 3, wrong & 15, &body);
            }
        }
    }

    fn post(&mut self, wr_id: u64, kind: u8, lens: &[u32], flags: u32, at: u32) {
        let mut bits = SendFlags::empty();
        bits.set(SendFlags::SIGNALED, flags & 1 != 0);
        bits.set(SendFlags::FENCE, flags & 14 == 14);
        bits.set(SendFlags::SOLICITED, flags & 2 != 0);
        let (remote_addr, rkey) = (u64::from(at), 9);
        let op = match kind {
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
        let lens = if kind == 9 { &[8] } else { lens };
        let lkey = self.sink.stag;
        let sges: Vec<Sge> = lens
            .iter()
            .map(|&len| Sge {
                addr: u64::from(at),
                len,
                lkey,
            })
            .collect();
        let _ = self.rig.try_post(wr_id, op, bits, &sges);
    }

    /// One step of the program's side of the stream.
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
        // The program took memory away that was being sent: that is for the caller to end.
        let mut out = vec![0; most];
        let who = self.rig.qp.accessor();
        match self.rig.plan.copy_to(&self.rig.table, who, &mut out) {
            Ok(n) => {
                self.sent.extend(&out[..n]);
                self.rig
                    .qp
                    .tx_written(&mut self.rig.plan, n, &mut self.rig.host);
            }
            Err(_) => self.rig.qp.abort(&mut self.rig.host),
        }
        self.understand();
    }

    fn arrive(&mut self, piece: usize) {
        let octets = std::mem::take(&mut self.arriving);
        let mut rest = &octets[..];
        if self.held {
            self.held = self.rig.again() == RxStatus::Held;
        }
        while !rest.is_empty() && !self.held && self.rig.qp.rx_interest() == RxInterest::Read {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            self.held = self.rig.rx(now) == RxStatus::Held;
            rest = later;
        }
        // What a held stream has not taken comes again.
        self.arriving = rest.to_vec();
    }

    fn act(&mut self, i: usize, act: &Act, piece: usize) {
        match act {
            Act::Post {
                kind,
                lens,
                flags,
                at,
            } => self.post(i as u64, *kind, lens, *flags, *at),
            Act::Receive(at) => {
                let sge = Sge {
                    addr: 7000 + u64::from(*at),
                    len: 100,
                    lkey: self.sink.stag,
                };
                let wr = RecvWr {
                    wr_id: i as u64,
                    sges: &[sge],
                };
                let _ = self.rig.qp.post_recv(&wr, &mut self.rig.host);
            }
            Act::Write(most) => self.write(*most),
            Act::Arrive => self.arrive(piece),
            Act::Peer {
                kind,
                len,
                at,
                wrong,
            } => self.peer(*kind, *len, *at, *wrong),
            Act::Rights(bits) => {
                let without = match bits {
                    0..40 => Access::REMOTE_READ,
                    40..80 => Access::REMOTE_WRITE,
                    80..120 => Access::REMOTE_ATOMIC,
                    _ => Access::empty(),
                };
                self.rig.qp.set_remote_access(Access::all() - without);
            }
            Act::Drain(stop) => {
                let to = if *stop { State::Sqd } else { State::Rts };
                let _ = self.rig.qp.modify(to, &mut self.rig.host);
            }
            Act::Invalidate(all) if *all => {
                let _ = self.rig.table.deregister(self.target.stag);
            }
            Act::Invalidate(_) => {}
        }
    }

    fn seen(&mut self) -> Seen {
        Seen {
            sent: std::mem::take(&mut self.sent),
            fills: std::mem::take(&mut self.fills),
            sends: self.rig.host.sends.clone(),
            recvs: self.rig.host.recvs.clone(),
            target: self.rig.read(&self.target),
            sink: self.rig.read(&self.sink),
            counters: *self.rig.qp.counters(),
            state: self.rig.qp.state(),
            fault: self.rig.qp.fault(),
            events: self.rig.qp.take_events(),
        }
    }
}

/// A region whose tagged offsets begin at zero, so that both see the same ones.
fn zero_based(rig: &mut Rig, len: u32, access: Access) -> Mr {
    let range: HostRange = rig.range(len);
    let at = range.addr();
    let random = rig.random();
    let stag = rig
        .table
        .register(range, 0, PD, access | Access::ZERO_BASED, random)
        .unwrap();
    Mr { stag, at, len }
}

#[derive(Debug, PartialEq)]
struct Seen {
    sent: Vec<u8>,
    fills: Vec<(TxFill, usize)>,
    sends: Vec<Cqe>,
    recvs: Vec<Cqe>,
    target: Vec<u8>,
    sink: Vec<u8>,
    counters: Counters,
    state: State,
    fault: Option<Fault>,
    events: Events,
}

proptest! {
    #[test]
    fn both_ways_treat_every_peer_alike(
        acts in acts(), crc: bool, initiator: bool, placed in prop::bool::weighted(0.3), snapshot: bool,
        rtr in prop_oneof![3 => Just(None), 1 => Just(Some(Rtr::Write)), 1 => Just(Some(Rtr::Read))],
        emss in prop_oneof![Just(65_000u32), Just(1460), Just(300)],
        piece in 1usize..6000, ird in prop_oneof![1 => 0u16..6, 4 => Just(40)], ord in prop_oneof![1 => 0u16..2, 4 => 1u16..6, 4 => Just(40)], terminate: bool, receives in 0usize..60,
    ) {
        let config = QpConfig {
            max_send_wr: 60,
            max_send_sge: 2,
            max_ird: ird,
            max_ord: 40,
            snapshot,
            receiver_not_ready: if terminate { ReceiverNotReady::Terminate } else { ReceiverNotReady::default() },
            ..QpConfig::default()
        };
        let rtr = rtr.filter(|_| initiator);
        let stream = StreamConfig { initiator, crc, emss, ird, ord, rtr, ..STREAM };
        let mut worlds = [false, true].map(|plodding| World::new(plodding, config, stream, placed));
        let mut seen = Vec::new();
        for world in &mut worlds {
            for _ in 0..receives {
                world.act(1000, &Act::Receive(0), piece);
            }
            for (i, act) in acts.iter().enumerate() {
                world.act(i, act, piece);
            }
            world.arrive(piece);
            for _ in 0..100 {
                world.write(10_000);
            }
            seen.push(world.seen());
        }
        prop_assert_eq!(&seen[0], &seen[1]);
    }
}
