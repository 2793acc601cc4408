//! One end of the connection: a queue pair, its driver, its memory, and its program's knowledge.

use std::collections::VecDeque;

use iwarp_proto::crc32c;
use iwarp_rnic::memory::{Crc32c, HostRange, MemoryTable};
use iwarp_rnic::qp::{
    Direction, Env, Host, QpConfig, QueuePair, Run, RxInterest, RxPlan, RxStatus, StreamConfig,
    StreamWish, TxFill,
};
use iwarp_rnic::receive_queue::TakenRecv;
use iwarp_rnic::{Access, Cqe, Time};

use super::arena::Arena;
use super::program::Program;
use crate::targets::pool::{self, Lent};

/// Bytes of memory of an end.
pub(super) const ARENA: usize = 24 << 10;
/// Requests send from here, and the peer reads it. It never changes.
pub(super) const SOURCE: (usize, usize) = (0x0200, 0x1000);
/// The peer writes here.
pub(super) const EXPOSED: (usize, usize) = (0x1400, 0x0800);
/// Words for the peer's atomics.
pub(super) const WORDS: (usize, usize) = (0x1e00, 0x40);
/// Responses are placed here, in slots.
pub(super) const SINKS: (usize, usize) = (0x2000, SLOT * SLOTS);
/// Messages are placed here, in slots.
pub(super) const RECEIVES: (usize, usize) = (0x4000, SLOT * SLOTS);
/// Bytes of a slot, and so the longest message.
pub(super) const SLOT: usize = 0x400;
/// Slots of each kind.
pub(super) const SLOTS: usize = 7;

/// The only protection domain.
const PD: u32 = 1;
/// Random numbers for the STags, the same at both ends and in every run.
const RANDOM: [u32; 5] = [
    0x1000_0101,
    0x1000_0202,
    0x1000_0303,
    0x1000_0404,
    0x1000_0505,
];

/// The STags of an end.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Keys {
    pub(super) source: u32,
    pub(super) exposed: u32,
    pub(super) words: u32,
    pub(super) sinks: u32,
    pub(super) receives: u32,
}

/// Stores completions, which are checked after the call.
#[derive(Debug, Default)]
pub(super) struct Completions(VecDeque<(Direction, Cqe)>);

impl Host for Completions {
    type Memory = HostRange;

    fn complete(&mut self, direction: Direction, cqe: Cqe) {
        self.0.push_back((direction, cqe));
    }

    fn take_shared_receive(&mut self, _: &mut TakenRecv) -> bool {
        false
    }
}

/// One end.
#[derive(Debug)]
pub(super) struct End {
    pub(super) qp: QueuePair,
    pub(super) host: Completions,
    pub(super) table: MemoryTable,
    pub(super) arena: Arena,
    pub(super) keys: Keys,
    /// FPDUs have CRCs.
    pub(super) crc: bool,
    pub(super) program: Program,
    /// Bytes that the peer has written and this end has not read.
    pub(super) wire: VecDeque<u8>,
    /// The peer has shut down its direction after those bytes.
    pub(super) fin: bool,
    pub(super) gone: bool,
    shut: bool,
    buffers: Lent,
    rx: RxPlan,
    /// Bytes that were offered and not taken.
    lent: Vec<u8>,
    now: Time,
}

impl End {
    pub(super) fn new(config: QpConfig, stream: StreamConfig) -> Self {
        let mut end = Self {
            qp: QueuePair::new(QpConfig { pd: PD, ..config }).expect("sizes within limits"),
            host: Completions::default(),
            table: MemoryTable::new(),
            arena: Arena::new(),
            keys: Keys::default(),
            crc: stream.crc,
            program: Program::new(),
            wire: VecDeque::new(),
            fin: false,
            gone: false,
            shut: false,
            buffers: pool::take(),
            rx: RxPlan::new(6),
            lent: Vec::new(),
            now: Time::ZERO,
        };
        end.register();
        end.qp.start(stream, end.now).expect("a fresh queue pair");
        end
    }

    /// Registers memory. Tagged offsets are offsets in the arena.
    fn register(&mut self) {
        let atomic = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC;
        let ranges = [
            (SOURCE, Access::REMOTE_READ),
            (EXPOSED, Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            (WORDS, atomic | Access::REMOTE_WRITE),
            (SINKS, Access::LOCAL_WRITE),
            (RECEIVES, Access::LOCAL_WRITE),
        ];
        let mut stags = [0; 5];
        for ((((at, len), access), random), stag) in ranges.into_iter().zip(RANDOM).zip(&mut stags)
        {
            let range = self.arena.range(at, len);
            let registered = self.table.register(range, at as u64, PD, access, random);
            *stag = registered.expect("room in the table").0;
        }
        let [source, exposed, words, sinks, receives] = stags;
        self.keys = Keys {
            source,
            exposed,
            words,
            sinks,
            receives,
        };
    }

    /// Returns the next completion that was not checked.
    pub(super) fn next_completion(&mut self) -> Option<(Direction, Cqe)> {
        self.host.0.pop_front()
    }

    fn env<'a>(table: &'a MemoryTable, host: &'a mut Completions) -> Env<'a, Completions> {
        Env {
            memory: table,
            crc32c: Crc32c::new(crc32c::append),
            host,
        }
    }

    /// Writes at most `most` bytes. Returns them.
    pub(super) fn transmit(&mut self, most: usize) -> Vec<u8> {
        let mut out = vec![0; most];
        let mut len = 0;
        let (_, plan) = self.buffers.both();
        // Each turn fills the plan or writes from it, and neither can repeat forever.
        for _ in 0..10_000 {
            if self.gone || len == most && plan.is_done() {
                break;
            }
            if plan.is_done() {
                if !self.qp.wants_tx() {
                    break;
                }
                let filled = self
                    .qp
                    .tx_fill(plan, &mut Self::env(&self.table, &mut self.host));
                match filled {
                    TxFill::Idle => {
                        assert!(!self.qp.wants_tx(), "wants to send, and has nothing");
                        break;
                    }
                    TxFill::Memory => self.qp.tx_memory(&mut self.table, &mut self.host),
                    TxFill::More | TxFill::Ready => {}
                }
                continue;
            }
            if len == most {
                break;
            }
            let who = self.qp.accessor();
            let copied = plan.copy_to(&self.table, who, &mut out[len..]);
            let n = copied.expect("nothing is deregistered");
            self.qp.tx_written(plan, n, &mut self.host);
            len += n;
        }
        out.truncate(len);
        out
    }

    /// Fulfils the queue pair's wish for its stream. Returns what the peer sees of it.
    pub(super) fn serve(&mut self) -> Seen {
        while self.qp.completions_due() {
            let _ = self.qp.complete_due(&mut self.host);
        }
        if self.gone {
            return Seen::Nothing;
        }
        match self.qp.stream_wish() {
            StreamWish::Keep if self.shut && self.qp.rx_interest() == RxInterest::None => {
                self.leave();
                Seen::Nothing
            }
            StreamWish::Keep => Seen::Nothing,
            StreamWish::ShutdownWrite => {
                self.shut = true;
                self.qp.shutdown_done(&mut self.host);
                Seen::Fin
            }
            StreamWish::Leave { cut: false, .. } => {
                self.leave();
                Seen::Fin
            }
            StreamWish::Leave { cut: true, .. } | StreamWish::Abort => {
                self.leave();
                Seen::Reset
            }
        }
    }

    fn leave(&mut self) {
        self.gone = true;
        self.qp.stream_gone(&mut self.host);
        let (buffer, plan) = self.buffers.both();
        buffer.clear();
        plan.clear();
    }

    /// The peer or the network has reset the stream.
    pub(super) fn reset(&mut self) {
        if !self.gone {
            self.gone = true;
            self.qp.stream_failed(&mut self.host);
            self.leave();
        }
    }

    /// Reads at most `most` bytes from the wire, in place or from a copy. Returns `true` if
    /// something happened.
    pub(super) fn receive(&mut self, most: usize, direct: bool) -> bool {
        if self.gone {
            return false;
        }
        let here = self.wire.len().min(most);
        match self.qp.rx_interest() {
            RxInterest::None | RxInterest::Held | RxInterest::Waits => return false,
            _ if here == 0 && self.fin => {
                let (buffer, _) = self.buffers.both();
                let open = !self.qp.is_ending();
                self.qp.rx_eof(buffer, &mut self.host);
                self.fin = false;
                return open;
            }
            _ if here == 0 => return false,
            RxInterest::Discard => {
                self.lent.clear();
                self.wire.drain(..here);
            }
            RxInterest::Read if direct => self.read_to_places(here),
            RxInterest::Read => {
                self.lent.extend(self.wire.drain(..here));
                self.offer();
            }
        }
        true
    }

    /// Offers the bytes that were read, including held ones.
    pub(super) fn offer(&mut self) {
        loop {
            let (buffer, _) = self.buffers.both();
            let mut env = Self::env(&self.table, &mut self.host);
            let (n, status) = self.qp.rx_input(&self.lent, buffer, &mut env);
            self.lent.drain(..n);
            let all = matches!(status, RxStatus::Ok | RxStatus::Failed);
            assert!(!all || self.lent.is_empty(), "{status:?} leaves octets");
            if status != RxStatus::More {
                return;
            }
        }
    }

    fn read_to_places(&mut self, here: usize) {
        let mut runs: Vec<Run<'_>> = Vec::new();
        let (buffer, _) = self.buffers.both();
        self.qp
            .rx_plan(buffer, &self.table, &mut self.rx, |run| runs.push(run));
        let mut n = self.rx.room().min(here);
        assert!(n > 0, "no room for octets");
        let octets: Vec<u8> = self.wire.drain(..n).collect();
        super::arena::read_into(&runs, &octets);
        loop {
            let mut env = Self::env(&self.table, &mut self.host);
            let status = self.qp.rx_filled(buffer, &mut self.rx, n, &mut env);
            if status != RxStatus::More {
                return;
            }
            n = 0;
        }
    }

    /// Advances the time until a timer expires. Returns `true` if a held Send has reached its
    /// limit.
    pub(super) fn time_passes(&mut self) -> bool {
        let held = self.qp.rx_interest() == RxInterest::Held;
        if let Some(at) = self.qp.poll_at().filter(|_| !self.gone) {
            self.now = self.now.max(at);
            self.qp.on_time(self.now, &mut self.host);
            assert!(self.qp.poll_at().is_none_or(|next| next > self.now));
        }
        held && self.qp.rx_interest() != RxInterest::Held
    }
}

/// What the peer sees of an end's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing new.
    Nothing,
    /// The end of the stream.
    Fin,
    /// A reset.
    Reset,
}
