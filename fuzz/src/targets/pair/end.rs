//! One endpoint of the connection: a queue pair, its driver, its memory, and the state of its
//! program.

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
use crate::targets::pool::{self, PooledBuffers};

/// Size of an endpoint's memory in bytes. The ranges below are offset and length in it.
pub(super) const ARENA: usize = 24 << 10;
/// The source of requests and of the peer's Reads. It never changes.
pub(super) const SOURCE: (usize, usize) = (0x0200, 0x1000);
/// The target of the peer's Writes.
pub(super) const EXPOSED: (usize, usize) = (0x1400, 0x0800);
/// The words for the peer's atomic operations.
pub(super) const WORDS: (usize, usize) = (0x1e00, 0x40);
/// The slots for responses.
pub(super) const SINKS: (usize, usize) = (0x2000, SLOT * SLOTS);
/// The slots for received messages.
pub(super) const RECEIVES: (usize, usize) = (0x4000, SLOT * SLOTS);
/// Size of a slot, which limits the length of messages.
pub(super) const SLOT: usize = 0x400;
/// Number of slots of each kind.
pub(super) const SLOTS: usize = 7;

/// The only protection domain.
const PD: u32 = 1;
/// The random numbers for STags: the same at both endpoints and in every run.
const RANDOM: [u32; 5] = [
    0x1000_0101,
    0x1000_0202,
    0x1000_0303,
    0x1000_0404,
    0x1000_0505,
];

/// The STags of an endpoint.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Keys {
    pub(super) source: u32,
    pub(super) exposed: u32,
    pub(super) words: u32,
    pub(super) sinks: u32,
    pub(super) receives: u32,
}

/// Stores completions until they are checked after the call.
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

/// One endpoint.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) qp: QueuePair,
    pub(super) host: Completions,
    pub(super) table: MemoryTable,
    pub(super) arena: Arena,
    pub(super) keys: Keys,
    /// FPDUs have CRCs.
    pub(super) crc: bool,
    pub(super) program: Program,
    /// Bytes that the peer has sent and this endpoint has not read.
    pub(super) wire: VecDeque<u8>,
    /// The peer has shut down its direction; a FIN follows the bytes in `wire`.
    pub(super) fin: bool,
    /// The stream is closed.
    pub(super) closed: bool,
    /// This endpoint has shut down its direction.
    shut: bool,
    buffers: PooledBuffers,
    rx: RxPlan,
    /// Received bytes that the queue pair has not consumed.
    unconsumed: Vec<u8>,
    now: Time,
}

impl Endpoint {
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
            closed: false,
            shut: false,
            buffers: pool::acquire(),
            rx: RxPlan::new(6),
            unconsumed: Vec::new(),
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

    /// Returns the next unchecked completion.
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

    /// Returns the next bytes that the queue pair sends, at most `most`.
    pub(super) fn transmit(&mut self, most: usize) -> Vec<u8> {
        let mut out = vec![0; most];
        let mut len = 0;
        let (_, plan) = self.buffers.both();
        // Each iteration either fills the plan or takes bytes from it. The limit detects endless
        // loops.
        for _ in 0..10_000 {
            if self.closed || len == most && plan.is_done() {
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
                        assert!(
                            !self.qp.wants_tx(),
                            "wants_tx() is set, but there is nothing to send"
                        );
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

    /// Shuts down or closes the stream if the queue pair requests it. Returns the effect on the
    /// peer.
    pub(super) fn apply_stream_wish(&mut self) -> StreamEvent {
        while self.qp.completions_due() {
            let _ = self.qp.complete_due(&mut self.host);
        }
        if self.closed {
            return StreamEvent::None;
        }
        match self.qp.stream_wish() {
            StreamWish::Keep if self.shut && self.qp.rx_interest() == RxInterest::None => {
                self.close_stream();
                StreamEvent::None
            }
            StreamWish::Keep => StreamEvent::None,
            StreamWish::ShutdownWrite => {
                self.shut = true;
                self.qp.shutdown_done(&mut self.host);
                StreamEvent::Fin
            }
            StreamWish::Leave { cut: false, .. } => {
                self.close_stream();
                StreamEvent::Fin
            }
            StreamWish::Leave { cut: true, .. } | StreamWish::Abort => {
                self.close_stream();
                StreamEvent::Reset
            }
        }
    }

    fn close_stream(&mut self) {
        self.closed = true;
        self.qp.stream_gone(&mut self.host);
        let (buffer, plan) = self.buffers.both();
        buffer.clear();
        plan.clear();
    }

    /// Handles a reset of the stream by the peer or the network.
    pub(super) fn reset(&mut self) {
        if !self.closed {
            self.closed = true;
            self.qp.stream_failed(&mut self.host);
            self.close_stream();
        }
    }

    /// Reads at most `most` bytes from the wire, placing them directly or through a copy. Returns
    /// `true` if there was something to read.
    pub(super) fn receive(&mut self, most: usize, direct: bool) -> bool {
        if self.closed {
            return false;
        }
        let available = self.wire.len().min(most);
        match self.qp.rx_interest() {
            RxInterest::None | RxInterest::Held | RxInterest::Waits => return false,
            _ if available == 0 && self.fin => {
                let (buffer, _) = self.buffers.both();
                let open = !self.qp.is_ending();
                self.qp.rx_eof(buffer, &mut self.host);
                self.fin = false;
                return open;
            }
            _ if available == 0 => return false,
            RxInterest::Discard => {
                self.unconsumed.clear();
                self.wire.drain(..available);
            }
            RxInterest::Read if direct => self.read_directly(available),
            RxInterest::Read => {
                self.unconsumed.extend(self.wire.drain(..available));
                self.process_unconsumed();
            }
        }
        true
    }

    /// Passes the unconsumed bytes, including held ones, to the queue pair.
    pub(super) fn process_unconsumed(&mut self) {
        loop {
            let (buffer, _) = self.buffers.both();
            let mut env = Self::env(&self.table, &mut self.host);
            let (n, status) = self.qp.rx_input(&self.unconsumed, buffer, &mut env);
            self.unconsumed.drain(..n);
            let all = matches!(status, RxStatus::Ok | RxStatus::Failed);
            assert!(
                !all || self.unconsumed.is_empty(),
                "{status:?}, but not all octets were consumed"
            );
            if status != RxStatus::More {
                return;
            }
        }
    }

    fn read_directly(&mut self, available: usize) {
        let mut runs: Vec<Run<'_>> = Vec::new();
        let (buffer, _) = self.buffers.both();
        self.qp
            .rx_plan(buffer, &self.table, &mut self.rx, |run| runs.push(run));
        let mut n = self.rx.room().min(available);
        assert!(n > 0, "the receive plan has no room");
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

    /// Advances the time until a timer expires. Returns `true` if the timer ended the wait of a
    /// held Send.
    pub(super) fn time_passes(&mut self) -> bool {
        let held = self.qp.rx_interest() == RxInterest::Held;
        if let Some(at) = self.qp.poll_at().filter(|_| !self.closed) {
            self.now = self.now.max(at);
            self.qp.on_time(self.now, &mut self.host);
            assert!(self.qp.poll_at().is_none_or(|next| next > self.now));
        }
        held && self.qp.rx_interest() != RxInterest::Held
    }
}

/// An event on the stream, as the peer observes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamEvent {
    /// No event.
    None,
    /// A FIN.
    Fin,
    /// A reset.
    Reset,
}
