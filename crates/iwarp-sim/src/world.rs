//! The parts of a run: hosts, connections, programs, and the clock.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use iwarp_proto::crc32c::Crc32cFn;
use iwarp_proto::rdmap::TerminateCode;
use iwarp_rnic::cq::CompletionQueue;
use iwarp_rnic::memory::MemoryTable;
use iwarp_rnic::qp::{Events, QueuePair, RxBuffer, RxPlan, StreamConfig, TxPlan};
use iwarp_rnic::receive_queue::SharedReceiveQueue;
use iwarp_rnic::{SendFlags, SendOp, Sge, WcFlags, WcOpcode, WcStatus};

use crate::net::Pipe;
use crate::plant::Planted;
use crate::raw::Arena;
use crate::rng::{Rng, mix};

/// Octets of one host's memory. Only octets that are used cost anything.
pub const ARENA: usize = 32 << 20;
/// CRC32C for everything in the simulator.
pub const CRC32C: Crc32cFn = iwarp_proto::crc32c::append;
/// How long a Send may wait for a receive: far longer than any program posts late.
pub const HOLD_TIME: u64 = 100_000_000_000;

/// Octets that will appear at an offset of an arena.
#[derive(Debug, Clone)]
pub struct Effect {
    /// The offset.
    pub off: usize,
    /// The octets.
    pub data: Vec<u8>,
}

/// The outcome of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// It succeeds.
    Success,
    /// It fails with this status; the peer is told of a local catastrophe.
    Local(WcStatus),
    /// The peer refuses it with this code. The request itself reports that if it has an answer.
    Refused(TerminateCode),
}

/// A send work request and its expected outcome.
#[derive(Debug, Clone)]
pub struct Op {
    /// The operation.
    pub op: SendOp,
    /// Its flags.
    pub flags: SendFlags,
    /// Its elements.
    pub sges: Vec<Sge>,
    /// Its data, if inline.
    pub inline: Option<Vec<u8>>,
    /// It is posted when that many messages have been received.
    pub after_recv: usize,
    /// What changes in the poster's memory.
    pub local: Vec<Effect>,
    /// What changes in the peer's memory, other than in receives.
    pub remote: Vec<Effect>,
    /// No other request changes the same memory.
    pub exclusive: bool,
    /// `byte_len` of the completion.
    pub byte_len: u32,
    /// The sink of an atomic on the counter that all share.
    pub shared_sink: Option<usize>,
    /// The outcome.
    pub expect: Expect,
}

/// What a receive must report.
#[derive(Debug, Clone)]
pub struct Message {
    /// The peer's request that sends it.
    pub op: usize,
    /// Payload of a Send.
    pub data: Vec<u8>,
    /// Opcode of the completion.
    pub opcode: WcOpcode,
    /// Its length.
    pub byte_len: u32,
    /// Its flags.
    pub flags: WcFlags,
    /// Immediate data or STag.
    pub imm_or_stag: u32,
}

/// A receive work request.
#[derive(Debug, Clone)]
pub struct Receive {
    /// Its elements.
    pub sges: Vec<Sge>,
    /// Where those lie in the arena: offset and length.
    pub parts: Vec<(usize, usize)>,
}

/// A shared receive queue and its book-keeping.
#[derive(Debug)]
pub struct Srq {
    /// The real one.
    pub queue: SharedReceiveQueue,
    /// All receives that the program posts.
    pub receives: Vec<Receive>,
    /// How many are posted.
    pub posted: usize,
    /// Posted and not completed.
    pub open: BTreeSet<usize>,
    /// Limit events that came and that were asked for.
    pub limit_events: u32,
    /// See `limit_events`.
    pub limits_set: u32,
}

/// A host with an RNIC.
#[derive(Debug)]
pub struct Node {
    /// Its memory.
    pub arena: Arena,
    /// Octets of the arena in use.
    pub used: usize,
    /// Contents as the programs will make them, in the order of the script. Used while generating.
    pub model: Vec<u8>,
    /// Contents as observed completions prove them.
    pub shadow: Vec<u8>,
    /// What may or may not have happened when a stream broke.
    pub maybe: Vec<Effect>,
    /// Eight octets whose final value cannot be predicted.
    pub wild: Vec<usize>,
    /// The STag table.
    pub table: MemoryTable,
    /// Completion queues.
    pub cqs: Vec<CompletionQueue>,
    /// A poll of each is due.
    pub poll_due: Vec<bool>,
    /// The shared receive queue, if any.
    pub srq: Option<Srq>,
    /// The counter that all connections add to: offset, tagged offset and STag.
    pub counter: (usize, u64, u32),
    /// The old values that additions returned.
    pub counter_olds: Vec<u64>,
    /// Additions that were posted.
    pub counter_posted: u64,
}

/// The fate of a connection.
#[derive(Debug, Clone, Copy)]
pub enum Fate {
    /// Nothing until everything is done; then this.
    Clean(End),
    /// Graceful close by one side (0, 1) or both (2) in the middle.
    Close(usize, u64),
    /// One side aborts.
    Abort(usize, u64),
    /// One side's queue pair is modified to the error state.
    ToError(usize, u64),
    /// The network resets both.
    Reset(u64),
    /// A bit of what this side receives is wrong.
    Flip(usize),
    /// This side stops reading for good.
    Stall(usize, u64),
    /// The program of this side has a request that must not succeed.
    Illegal(usize),
    /// A receive of this side is too short.
    TooLong(usize),
    /// A receive of this side names memory that it may not.
    BadReceive(usize),
    /// This side posts too few receives.
    Starve(usize),
}

/// The end of a connection on which everything succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// One side closes (0, 1), or both (2).
    Close(usize),
    /// One side aborts.
    Abort(usize),
    /// The network resets it.
    Reset,
}

/// One connection: endpoints `2 * i` and `2 * i + 1`.
#[derive(Debug)]
pub struct Conn {
    /// What befalls it.
    pub fate: Fate,
    /// The index of the illegal request, once generated.
    pub illegal_op: Option<usize>,
    /// The fate has happened: completions with errors are expected.
    pub struck: bool,
}

/// One end of a connection: a queue pair, its driver and its program.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Endpoint {
    pub id: usize,
    pub node: usize,
    pub qp: QueuePair,
    pub stream: StreamConfig,
    pub send_cq: usize,
    pub recv_cq: usize,
    pub rng: Rng,

    // The driver.
    pub plan: Option<Box<TxPlan>>,
    pub buffer: Option<Box<RxBuffer>>,
    pub tx_due: bool,
    pub tx_blocked: bool,
    pub stalled: bool,
    pub fin_sent: bool,
    pub gone: bool,
    pub hold_epoch: u64,
    pub holding: bool,
    pub events: Events,

    // The program.
    pub ops: Vec<Op>,
    pub posted: usize,
    pub app_due: bool,
    pub queue_full: bool,
    pub stopped: bool,
    pub extra_posts: usize,
    pub sqd: bool,
    /// The next request that is generated depends on all messages so far.
    pub wait_next: bool,
    pub inbound: Vec<Message>,
    pub receives: Vec<Receive>,
    pub recv_posted: usize,
    pub recv_due: bool,

    // The checker.
    pub next_cqe: usize,
    pub first_bad: Option<(usize, WcStatus, u32)>,
    /// The first request that did not succeed.
    pub flushed_from: Option<usize>,
    pub first_bad_recv: Option<WcStatus>,
    pub received: usize,
    pub recv_cqes: usize,
    /// Requests of this side whose changes in the peer's memory are proven.
    pub committed: usize,
    /// Requests that had been posted when it was closed gracefully.
    pub posted_at_close: Option<usize>,
}

impl Endpoint {
    /// The other end.
    pub const fn peer(&self) -> usize {
        self.id ^ 1
    }
}

/// An event at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Event {
    Transmit(usize),
    Readable(usize),
    Writable(usize),
    App(usize),
    PostReceives(usize),
    PostShared(usize),
    Poll(usize, usize),
    HoldExpired(usize, u64),
    Fate(usize),
    Pause(usize),
    Resume(usize),
    Unstall(usize),
}

/// A run.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct World {
    pub now: u64,
    pub sequence: u64,
    pub queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pub rng: Rng,
    pub nodes: Vec<Node>,
    pub eps: Vec<Endpoint>,
    pub conns: Vec<Conn>,
    /// Pipe `i` carries what endpoint `i` writes.
    pub pipes: Vec<Pipe>,
    pub planted: Planted,
    pub pool: Pool,
    pub failure: Option<String>,
    pub verbose: bool,
    pub steps: u64,
}

/// Buffers that are kept from run to run, because they are large.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Pool {
    pub plans: Vec<Box<TxPlan>>,
    pub buffers: Vec<Box<RxBuffer>>,
    pub arenas: Vec<Arena>,
    pub rx_plan: Option<RxPlan>,
    pub octets: Vec<u8>,
}

impl Pool {
    /// An empty transmit plan.
    pub fn plan(&mut self) -> Box<TxPlan> {
        self.plans
            .pop()
            .unwrap_or_else(|| TxPlan::new().expect("memory"))
    }

    /// An empty receive buffer.
    pub fn buffer(&mut self) -> Box<RxBuffer> {
        self.buffers
            .pop()
            .unwrap_or_else(|| RxBuffer::new().expect("memory"))
    }
}

/// The contents of memory before anything happens.
pub const fn pattern(node: usize, off: usize) -> u8 {
    mix((node as u64) << 48 | (off as u64 >> 3)).to_le_bytes()[off & 7]
}

impl World {
    /// Plans an event `delay` nanoseconds from now.
    pub fn after(&mut self, delay: u64, event: Event) {
        self.at(self.now + delay, event);
    }

    /// Plans an event.
    pub fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.queue
            .push(Reverse((time.max(self.now), self.sequence, event)));
    }

    /// Notes a failure. The first one counts.
    pub fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.failure.is_none() {
            let text = what();
            self.failure = Some(format!("at {} ns: {text}", self.now));
        }
    }

    /// Prints a line of a replay.
    pub fn log(&self, line: impl FnOnce() -> String) {
        if self.verbose {
            println!("{:>12} {}", self.now, line());
        }
    }
}
