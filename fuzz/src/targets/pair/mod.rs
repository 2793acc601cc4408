//! Two connected queue pairs, whose streams arrive in pieces of any size. RFC 5040, 5041, 5044,
//! 7306.
//!
//! The input controls the two programs and the network. For every input, each request and each
//! receive must complete exactly once and in order. Memory must contain the data of completed
//! operations, and must not change elsewhere. If no fault was injected, all operations must
//! succeed.

mod arena;
mod end;
mod program;

use iwarp_rnic::qp::{
    Budget, Direction, QpConfig, Rtr, RxInterest, State, StreamConfig, StreamTimes,
};
use iwarp_rnic::{PostError, RecvWr, SendFlags, SendOp, SendWr, Sge, WcOpcode};
use std::time::Duration;

use arena::{pattern, template};
use end::{ARENA, EXPOSED, Endpoint, RECEIVES, SINKS, SLOT, SOURCE, StreamEvent, WORDS};
use program::{Message, Request};

/// Maximum number of commands, so that no input takes long.
const COMMANDS_MAX: usize = 400;
/// Number of bytes that arrive in one piece while the pair completes its operations at the end.
const PIECE: usize = 4096;

/// The connection.
struct Pair {
    endpoints: [Endpoint; 2],
    /// A fault was injected, so operations may fail.
    fault_injected: bool,
}

/// The input: four bytes of options for the connection, and commands of four bytes each. The first
/// byte of a command selects the command and the endpoint; the others are parameters.
pub fn pair(data: &[u8]) {
    let Some((options, commands)) = data.split_first_chunk::<4>() else {
        return;
    };
    let mut pair = Pair::new(*options);
    for command in commands.chunks_exact(4).take(COMMANDS_MAX) {
        if let [what, a, b, c] = *command {
            pair.command(what, [a, b, c]);
        }
    }
    pair.finish();
}

/// Panics if there is no valid reason to refuse the request.
fn check_refusal(error: PostError, plan: &Plan) {
    let valid = match error {
        PostError::QueueFull | PostError::InvalidState | PostError::InlineTooLong => true,
        // Invalid only if the Read depth is 0.
        PostError::InvalidRequest => {
            plan.needs_sink || matches!(plan.op, SendOp::AtomicWrite { .. })
        }
        _ => false,
    };
    assert!(valid, "{:?} is refused: {error}", plan.op);
}

const fn bit(octet: u8, n: u8) -> bool {
    octet >> n & 1 != 0
}

impl Pair {
    fn new([how, depth, budget, emss]: [u8; 4]) -> Self {
        let rtr = match depth >> 6 {
            0 => None,
            1 => Some(Rtr::Send),
            2 => Some(Rtr::Write),
            _ => Some(Rtr::Read),
        };
        let ords = [u16::from(depth & 3), u16::from(depth >> 2 & 3)];
        let emss = match emss & 7 {
            0 => 536,
            1 => 1460,
            2 => 9000,
            3 => 65483,
            _ => 128 + u32::from(emss),
        };
        let endpoints = [0, 1].map(|side: usize| {
            let initiator = side == 0;
            let stream = StreamConfig {
                initiator,
                crc: bit(how, 0),
                markers_tx: bit(how, 1 + side as u8),
                markers_rx: bit(how, 2 - side as u8),
                ird: ords[side ^ 1],
                ord: ords[side],
                rtr: rtr.filter(|_| initiator),
                rtr_send_expected: !initiator && rtr == Some(Rtr::Send),
                emss,
                times: StreamTimes {
                    reminders: [bit(how, 3).then(|| Duration::from_millis(50)), None, None],
                    maturity: Duration::from_millis(50),
                    speak_first: bit(how, 4).then(|| Duration::from_millis(200)),
                    first_fpdu: None,
                },
            };
            let count = |octet: u8| 1 + u32::from(octet & 15);
            let config = QpConfig {
                qp_num: side as u32 + 1,
                max_send_wr: count(budget >> 4),
                max_recv_wr: 8,
                max_send_sge: 3,
                max_recv_sge: 2,
                max_inline: 64,
                max_ird: ords[side ^ 1],
                max_ord: ords[side],
                signal_all: bit(how, 5),
                snapshot: bit(how, 6),
                budget: Budget {
                    completions: count(budget),
                    local_requests: 1,
                    fpdus: count(budget),
                },
                ..QpConfig::default()
            };
            let mut end = Endpoint::new(config, stream);
            if bit(how, 7) {
                end.qp.complete_when_placed();
            }
            end
        });
        Self {
            endpoints,
            fault_injected: false,
        }
    }

    fn command(&mut self, what: u8, [a, b, c]: [u8; 3]) {
        let side = usize::from(bit(what, 7));
        let len = usize::from(u16::from_be_bytes([a, b]));
        match what & 31 {
            0..=11 => self.post(side, what & 31, [a, b, c]),
            12..=14 => drop(self.post_receive(side)),
            15..=18 => drop(self.transmit(side, len % 3000)),
            19..=22 => {
                self.endpoints[side].receive(len % 3000, bit(c, 0));
            }
            23 => self.fault_injected |= self.endpoints[side].time_passes(),
            24 => drop(self.modify(side, State::Sqd)),
            25 => drop(self.modify(side, State::Rts)),
            26 => self.endpoints[side].qp.set_emss(128 + u32::from(a) * 8),
            27 => self.endpoints[side].qp.complete_when_placed(),
            28 => {
                self.fault_injected = true;
                let end = &mut self.endpoints[side];
                end.qp.close(&mut end.host);
            }
            29 => {
                self.fault_injected = true;
                let end = &mut self.endpoints[side];
                match a % 3 {
                    0 => end.qp.abort(&mut end.host),
                    1 => drop(end.qp.modify(State::Error, &mut end.host)),
                    _ => end.reset(),
                }
            }
            30 => self.post_invalid(side, [a, b, c]),
            // Flip a bit in transit. Only the CRC can detect this.
            _ => {
                let end = &mut self.endpoints[side];
                let at = len % end.wire.len().max(1);
                if end.crc
                    && let Some(octet) = end.wire.get_mut(at)
                {
                    *octet ^= 1 << (c & 7);
                    self.fault_injected = true;
                }
            }
        }
        self.check_completions();
    }

    fn modify(&mut self, side: usize, to: State) -> bool {
        let end = &mut self.endpoints[side];
        !end.closed && end.qp.modify(to, &mut end.host).is_ok()
    }

    /// Posts a valid request of this kind, if there is room.
    fn post(&mut self, side: usize, kind: u8, [a, b, c]: [u8; 3]) {
        let flags = flags(c);
        let len = usize::from(u16::from_be_bytes([a & 7, b])) % (SLOT + 1);
        let from = SOURCE.0 + usize::from(a >> 3) * 64;
        let from = from.min(SOURCE.0 + SOURCE.1 - len);
        let data = template()[from..from + len].to_vec();
        let word = WORDS.0 + usize::from(b & 7) * 8;
        let target = EXPOSED.0 + usize::from(c) % (EXPOSED.1 / 8) * 8;
        let target = target.min(EXPOSED.0 + EXPOSED.1 - len);
        let source = Source {
            from,
            len,
            key: self.endpoints[side].keys.source,
        };
        let imm = u32::from(c) << 8 | u32::from(b);
        let plan = match kind {
            0..=2 => Plan::sends(SendOp::Send, source, None),
            3 => Plan::sends(SendOp::SendImm(imm), source, Some(imm)),
            4..=6 => self.write(side, source, target, (kind == 6).then_some(imm)),
            7 => self.atomic_write(side, source, word),
            8 | 9 => self.read(side, source),
            _ => {
                let value = u64::from_ne_bytes(std::array::from_fn(|i| pattern(len + i)));
                let is_equal = bit(c, 7);
                self.atomic(side, kind == 10, (word, value, is_equal))
            }
        };
        let _ = self.post_plan(side, plan, flags, &data);
    }

    /// Plans a Write, with immediate data if there is an `imm`.
    fn write(&self, side: usize, source: Source, target: usize, imm: Option<u32>) -> Plan {
        let (remote_addr, rkey) = (target as u64, self.endpoints[side ^ 1].keys.exposed);
        let data = template()[source.from..][..source.len].to_vec();
        let Some(imm) = imm else {
            return Plan::writes(SendOp::Write { remote_addr, rkey }, source, target, data);
        };
        let op = SendOp::WriteImm {
            remote_addr,
            rkey,
            imm,
        };
        Plan {
            imm: Some(imm),
            message: Some(WcOpcode::RecvWriteImm),
            ..Plan::writes(op, source, target, data)
        }
    }

    fn atomic_write(&self, side: usize, source: Source, word: usize) -> Plan {
        let op = SendOp::AtomicWrite {
            remote_addr: word as u64,
            rkey: self.endpoints[side ^ 1].keys.words,
        };
        let source = Source {
            len: 8,
            from: source.from & !7,
            ..source
        };
        let data = template()[source.from..][..8].to_vec();
        Plan::writes(op, source, word, data)
    }

    /// Plans a Read of the peer's memory at the place of `source`.
    fn read(&self, side: usize, source: Source) -> Plan {
        let (end, peer) = (&self.endpoints[side], &self.endpoints[side ^ 1]);
        let op = SendOp::Read {
            remote_addr: source.from as u64,
            rkey: peer.keys.source,
        };
        let data = template()[source.from..][..source.len].to_vec();
        Plan::reads(op, end.program.sink(), end.keys.sinks, data)
    }

    /// Plans a Fetch and Add, or a Compare and Swap that compares with the word's current value
    /// (`is_equal`) or another value.
    fn atomic(&self, side: usize, adds: bool, (word, value, is_equal): (usize, u64, bool)) -> Plan {
        let (end, peer) = (&self.endpoints[side], &self.endpoints[side ^ 1]);
        let old: [u8; 8] = std::array::from_fn(|i| peer.program.model[word + i]);
        let old = u64::from_ne_bytes(old);
        let (remote_addr, rkey) = (word as u64, peer.keys.words);
        let compare = if is_equal { old } else { value };
        let (op, new) = match adds {
            true => (
                SendOp::FetchAdd {
                    remote_addr,
                    rkey,
                    add: value,
                    mask: 0,
                },
                old.wrapping_add(value),
            ),
            false => (
                SendOp::CmpSwap {
                    remote_addr,
                    rkey,
                    compare,
                    swap: value,
                    compare_mask: u64::MAX,
                    swap_mask: u64::MAX,
                },
                if compare == old { value } else { old },
            ),
        };
        let answer = old.to_ne_bytes().to_vec();
        let mut plan = Plan::reads(op, end.program.sink(), end.keys.sinks, answer);
        plan.change = Some((word, new.to_ne_bytes().to_vec()));
        plan
    }

    /// Posts a request, and records its expected result. Returns `true` if it was posted.
    fn post_plan(&mut self, side: usize, plan: Plan, flags: SendFlags, data: &[u8]) -> bool {
        let end = &mut self.endpoints[side];
        if plan.needs_sink && plan.answer.is_none() {
            return false;
        }
        let wr_id = end.program.next_wr_id();
        let (mut flags, mut inline) = (flags, &[][..]);
        if flags.contains(SendFlags::INLINE) {
            // Only requests that send data support inline.
            match plan.needs_sink
                || plan.sges.is_empty()
                || matches!(plan.op, SendOp::AtomicWrite { .. })
            {
                true => flags.remove(SendFlags::INLINE),
                false => inline = data,
            }
        }
        let pieces = [inline];
        let wr = SendWr {
            wr_id,
            op: plan.op,
            flags,
            sges: &plan.sges,
            inline: &pieces,
        };
        if let Err(error) = end.qp.post_send(&wr, &mut end.host) {
            check_refusal(error, &plan);
            return false;
        }
        if plan.answer.is_some() {
            end.program.use_sink();
        }
        let byte_len = plan.sges.iter().map(|sge| sge.len).sum();
        end.program.requests.push_back(Request {
            wr_id,
            signaled: flags.contains(SendFlags::SIGNALED) || end.qp.config().signal_all,
            opcode: plan.op.wc_opcode(),
            byte_len,
            answer: plan.answer,
        });
        let peer = &mut self.endpoints[side ^ 1].program;
        if let Some((at, new)) = plan.change {
            peer.model[at..at + new.len()].copy_from_slice(&new);
        }
        if let Some(opcode) = plan.message {
            let data = if opcode == WcOpcode::Recv {
                data.to_vec()
            } else {
                Vec::new()
            };
            peer.inbound.push_back(Message {
                data,
                imm: plan.imm,
                opcode,
                byte_len,
            });
        }
        true
    }

    /// Posts an invalid request, which the peer or the queue pair must refuse.
    fn post_invalid(&mut self, side: usize, [a, b, c]: [u8; 3]) {
        let (keys, peer) = (self.endpoints[side].keys, self.endpoints[side ^ 1].keys);
        let end = &mut self.endpoints[side];
        let local = |key: u32| Sge {
            addr: SOURCE.0 as u64,
            len: 8,
            lkey: key,
        };
        let (op, sge) = match a % 6 {
            0 => (
                SendOp::Write {
                    remote_addr: u64::from(b),
                    rkey: peer.exposed,
                },
                local(keys.source),
            ),
            1 => (
                SendOp::Write {
                    remote_addr: EXPOSED.0 as u64,
                    rkey: peer.exposed ^ 1 << (c & 31),
                },
                local(keys.source),
            ),
            2 => (
                SendOp::Read {
                    remote_addr: u64::from(b) << 56,
                    rkey: peer.source,
                },
                Sge {
                    addr: SINKS.0 as u64,
                    len: 8,
                    lkey: keys.sinks,
                },
            ),
            3 => (SendOp::Send, local(keys.source ^ 1 << (c & 31))),
            4 => (SendOp::SendInv(peer.exposed), local(keys.source)),
            _ => (
                SendOp::Send,
                Sge {
                    addr: SOURCE.0 as u64,
                    len: SLOT as u32 + 1,
                    lkey: keys.source,
                },
            ),
        };
        let wr_id = end.program.next_wr_id();
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            sges: &[sge],
            inline: &[],
        };
        if end.qp.post_send(&wr, &mut end.host).is_ok() {
            self.fault_injected = true;
            let (opcode, byte_len) = (op.wc_opcode(), sge.len);
            end.program.requests.push_back(Request {
                wr_id,
                signaled: true,
                opcode,
                byte_len,
                answer: None,
            });
        }
    }

    /// Posts a receive. Returns `true` if a held message proceeds.
    fn post_receive(&mut self, side: usize) -> bool {
        let end = &mut self.endpoints[side];
        let Some(slot) = end.program.receive() else {
            return false;
        };
        let wr_id = end.program.next_wr_id();
        // Two elements, of which the second is not aligned.
        let at = (RECEIVES.0 + slot * SLOT) as u64;
        let lkey = end.keys.receives;
        let sges = [
            Sge {
                addr: at,
                len: 101,
                lkey,
            },
            Sge {
                addr: at + 101,
                len: SLOT as u32 - 101,
                lkey,
            },
        ];
        if end
            .qp
            .post_recv(&RecvWr { wr_id, sges: &sges }, &mut end.host)
            .is_ok()
        {
            end.program.use_receive();
            end.program.receives.push_back((wr_id, slot));
            if end.qp.rx_interest() == RxInterest::Held && !end.closed {
                end.process_unconsumed();
                return true;
            }
        }
        false
    }

    /// Transfers bytes that an endpoint sends to the wire. Returns `true` if there were any.
    fn transmit(&mut self, side: usize, most: usize) -> bool {
        let octets = self.endpoints[side].transmit(most);
        let peer = &mut self.endpoints[side ^ 1];
        peer.wire.extend(&octets);
        !octets.is_empty()
    }

    /// Applies shutdowns and closes of both streams, and checks all completions.
    fn check_completions(&mut self) {
        for side in [0, 1] {
            match self.endpoints[side].apply_stream_wish() {
                StreamEvent::None => {}
                StreamEvent::Fin => self.endpoints[side ^ 1].fin = true,
                StreamEvent::Reset => self.endpoints[side ^ 1].reset(),
            }
        }
        for side in [0, 1] {
            self.completions(side);
        }
    }

    fn completions(&mut self, side: usize) {
        let end = &mut self.endpoints[side];
        while let Some((direction, cqe)) = end.next_completion() {
            let arena = &end.arena;
            let octets = |at, len| arena.copy(at, len);
            let ok = match direction {
                Direction::Send => end.program.check_send_completion(&cqe, octets),
                Direction::Recv => end.program.check_receive_completion(&cqe, octets),
            };
            assert!(
                ok || self.fault_injected,
                "an error without an injected fault: {cqe:?} {:?}",
                end.qp.fault()
            );
        }
    }

    /// Lets all operations complete, closes the connection, and checks both endpoints.
    fn finish(&mut self) {
        for side in [0, 1] {
            self.modify(side, State::Rts);
        }
        // At the end, each endpoint posts a signaled request, which completes the unsignaled ones
        // before it. Try it several times: the queue may be full, and the responder may not send
        // before the initiator.
        let mut last = [false; 2];
        for _ in 0..3 {
            self.transfer_all();
            for side in [0, 1] {
                let source = Source {
                    from: SOURCE.0,
                    len: 0,
                    key: 0,
                };
                let plan = Plan::sends(SendOp::Send, source, None);
                last[side] = last[side] || self.post_plan(side, plan, SendFlags::SIGNALED, &[]);
            }
        }
        self.transfer_all();
        for end in &self.endpoints {
            let unfinished = (end.program.requests.len(), end.program.inbound.len());
            assert!(
                self.fault_injected || unfinished == (0, 0),
                "{unfinished:?} requests and messages did not complete: {:?}",
                end.qp.fault()
            );
        }
        if !self.fault_injected {
            self.compare(&[]);
        }
        self.close();
        // Even after a fault, memory outside these ranges is unchanged.
        self.compare(&[EXPOSED, WORDS, SINKS, RECEIVES]);
    }

    /// Transfers bytes and posts receives until both endpoints are idle.
    fn transfer_all(&mut self) {
        let mut moved = true;
        let mut turns = 0;
        while moved {
            moved = false;
            for side in [0, 1] {
                moved |= self.post_receive(side);
                self.check_completions();
                moved |= self.transmit(side, PIECE);
                self.check_completions();
                moved |= self.endpoints[side ^ 1].receive(PIECE, turns % 2 == 0);
                self.check_completions();
            }
            turns += 1;
            assert!(turns < 10_000, "the endpoints do not become idle");
        }
    }

    /// Closes the connection, and checks that all posted requests and receives have completed.
    fn close(&mut self) {
        self.fault_injected = true;
        for side in [0, 1] {
            let end = &mut self.endpoints[side];
            end.qp.close(&mut end.host);
            self.check_completions();
        }
        self.transfer_all();
        for side in [0, 1] {
            self.endpoints[side].reset();
            self.check_completions();
            let end = &self.endpoints[side];
            assert_eq!(end.qp.state(), State::Error);
            let outstanding = (end.qp.sends_outstanding(), end.qp.receives_posted());
            assert_eq!(outstanding, (0, 0), "not flushed");
            assert!(
                end.program.receives.is_empty(),
                "receives without a completion"
            );
            let all_unsignaled = end.program.requests.iter().all(|request| !request.signaled);
            assert!(
                all_unsignaled,
                "requests without a completion: {:?}",
                end.program.requests
            );
        }
    }

    /// Compares the memory of both endpoints with the expected contents, except for the ranges in
    /// `ignored`.
    fn compare(&self, ignored: &[(usize, usize)]) {
        for (side, end) in self.endpoints.iter().enumerate() {
            let (mut now, must) = (end.arena.copy(0, ARENA), &end.program.model);
            for &(at, len) in ignored {
                now[at..at + len].copy_from_slice(&must[at..at + len]);
            }
            if now != *must {
                let differs = (0..ARENA).find(|&at| now[at] != must[at]);
                let at = differs.expect("the contents differ");
                panic!(
                    "octet {at:#x} of endpoint {side} is {:#x} instead of {:#x}",
                    now[at], must[at]
                );
            }
        }
    }
}

/// Returns the flags of a request from one byte.
fn flags(octet: u8) -> SendFlags {
    let mut flags = SendFlags::empty();
    flags.set(SendFlags::SIGNALED, octet & 3 != 0);
    flags.set(SendFlags::FENCE, bit(octet, 2));
    flags.set(SendFlags::SOLICITED, bit(octet, 3));
    flags.set(SendFlags::INLINE, bit(octet, 4));
    flags
}

/// The source of a request's data.
#[derive(Clone, Copy)]
struct Source {
    from: usize,
    len: usize,
    key: u32,
}

impl Source {
    /// Returns zero, one or two elements that cover the bytes.
    fn sges(self) -> Vec<Sge> {
        let sge = |from: usize, len: usize| Sge {
            addr: from as u64,
            len: len as u32,
            lkey: self.key,
        };
        match self.len {
            0 => Vec::new(),
            len if len % 3 == 0 => vec![
                sge(self.from, len / 3),
                sge(self.from + len / 3, len - len / 3),
            ],
            len => vec![sge(self.from, len)],
        }
    }
}

/// A request and its expected result.
struct Plan {
    op: SendOp,
    sges: Vec<Sge>,
    /// The request has a response, which needs a free slot.
    needs_sink: bool,
    /// The slot for the response, and the expected response.
    answer: Option<(usize, Vec<u8>)>,
    /// The change in the peer's memory: offset and new content.
    change: Option<(usize, Vec<u8>)>,
    /// The opcode of the peer's receive completion, if the request consumes a receive.
    message: Option<WcOpcode>,
    imm: Option<u32>,
}

impl Plan {
    fn sends(op: SendOp, source: Source, imm: Option<u32>) -> Self {
        Self {
            op,
            sges: source.sges(),
            needs_sink: false,
            answer: None,
            change: None,
            message: Some(WcOpcode::Recv),
            imm,
        }
    }

    fn writes(op: SendOp, source: Source, at: usize, data: Vec<u8>) -> Self {
        Self {
            change: Some((at, data)),
            message: None,
            ..Self::sends(op, source, None)
        }
    }

    fn reads(op: SendOp, sink: Option<usize>, key: u32, data: Vec<u8>) -> Self {
        let sges = match sink {
            Some(slot) => Source {
                from: SINKS.0 + slot * SLOT,
                len: data.len(),
                key,
            }
            .sges(),
            None => Vec::new(),
        };
        Self {
            op,
            // An atomic operation has one element.
            sges: if data.len() == 8 {
                sges.into_iter().take(1).collect()
            } else {
                sges
            },
            needs_sink: true,
            answer: sink.map(|slot| (slot, data)),
            change: None,
            message: None,
            imm: None,
        }
    }
}
