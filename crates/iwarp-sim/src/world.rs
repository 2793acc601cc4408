//! The state of a run: hosts, connections, programs, and the pending events in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use iwarp_proto::rdmap::TerminateCode;
use iwarp_rnic::cq::CompletionQueue;
use iwarp_rnic::memory::{Crc32c, MemoryTable};
use iwarp_rnic::qp::{Events, QueuePair, RxBuffer, StreamConfig, TxPlan};
use iwarp_rnic::receive_queue::SharedReceiveQueue;
use iwarp_rnic::{SendFlags, SendOp, Sge, Time, WcFlags, WcOpcode, WcStatus};

use crate::forgery::Forgery;
use crate::net::Pipe;
use crate::plant::Planted;
use crate::raw::{Arena, SimRange};
use crate::reach::Reach;
use crate::rng::{Rng, mix};

/// Size of one host's memory. The operating system does not allocate unused pages.
pub const ARENA: usize = 32 << 20;
/// The CRC function of all queue pairs.
pub const CRC32C: Crc32c = Crc32c::new(iwarp_proto::crc32c::append);
/// How long a Send may wait for a receive. Programs always post one much earlier.
pub const HOLD_TIME: Duration = Duration::from_secs(100);

/// New octets at an offset of an arena.
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
    /// The request succeeds.
    Success,
    /// The request fails with this status, and the peer receives a Terminate with the code "local
    /// catastrophic error".
    Local(WcStatus),
    /// The peer refuses the request with this code. If the request has a response, its completion
    /// reports the refusal.
    Refused(TerminateCode),
}

/// A send work request and its expected outcome.
#[derive(Debug, Clone)]
pub struct Op {
    /// The operation.
    pub op: SendOp,
    /// Flags of the request.
    pub flags: SendFlags,
    /// Scatter/gather elements.
    pub sges: Vec<Sge>,
    /// Payload of an inline request.
    pub inline: Option<Vec<u8>>,
    /// Number of messages that must be received before the request is posted.
    pub after_recv: usize,
    /// Changes in the memory of the host that posts it.
    pub local: Vec<Effect>,
    /// Changes in the peer's memory, except in receives.
    pub remote: Vec<Effect>,
    /// No other request changes the same memory of the peer.
    pub exclusive: bool,
    /// `byte_len` of the completion.
    pub byte_len: u32,
    /// For an atomic on the counter that all connections share, the offset of its sink.
    pub counter_sink: Option<usize>,
    /// The expected outcome.
    pub expect: Expect,
}

/// A message, and the expected completion of its receive.
#[derive(Debug, Clone)]
pub struct Message {
    /// Index of the peer's request that sends it.
    pub op: usize,
    /// Payload of a Send.
    pub data: Vec<u8>,
    /// Opcode of the completion.
    pub opcode: WcOpcode,
    /// Length in the completion.
    pub byte_len: u32,
    /// Flags of the completion.
    pub flags: WcFlags,
    /// Immediate data, or the invalidated STag, of the completion.
    pub imm_or_stag: u32,
}

/// A receive work request.
#[derive(Debug, Clone)]
pub struct Receive {
    /// Scatter/gather elements.
    pub sges: Vec<Sge>,
    /// Offset and length of each element in the arena.
    pub parts: Vec<(usize, usize)>,
}

/// A shared receive queue and its book-keeping.
#[derive(Debug)]
pub struct Srq {
    /// The queue of the RNIC.
    pub queue: SharedReceiveQueue,
    /// All receives that the program posts.
    pub receives: Vec<Receive>,
    /// Number of posted receives.
    pub posted: usize,
    /// Indices of receives that are posted, but have not completed.
    pub open: BTreeSet<usize>,
    /// Number of limit events.
    pub limit_events: u32,
    /// Number of armed limits, each of which allows one event.
    pub limits_set: u32,
}

/// A host with an RNIC.
#[derive(Debug)]
pub struct Node {
    /// The memory of the host.
    pub arena: Arena,
    /// Number of octets of the arena in use.
    pub used: usize,
    /// While the programs are generated: contents of the arena after the requests generated so far.
    pub model: Vec<u8>,
    /// Contents of the arena that the completions so far prove.
    pub shadow: Vec<u8>,
    /// Changes that may or may not have happened before a stream broke.
    pub unproven: Vec<Effect>,
    /// Offsets of words of eight octets whose final value cannot be predicted.
    pub unpredictable: Vec<usize>,
    /// The STag table.
    pub table: MemoryTable<SimRange>,
    /// Completion queues.
    pub cqs: Vec<CompletionQueue>,
    /// For each completion queue, whether a poll is scheduled.
    pub poll_due: Vec<bool>,
    /// The shared receive queue, if any.
    pub srq: Option<Srq>,
    /// The counter that all connections increment: offset, tagged offset and STag.
    pub counter: (usize, u64, u32),
    /// The old values of the counter that atomics returned.
    pub counter_olds: Vec<u64>,
    /// Number of increments that were posted.
    pub counter_posted: u64,
}

/// The fate of a connection: what the run does to it. The `usize` is the affected side, 0 or 1. The
/// `u64` is the time in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub enum Fate {
    /// Nothing happens until the programs have finished. Then the connection ends in this way.
    Clean(Ending),
    /// One side (0 or 1) or both sides (2) close gracefully while the programs are running.
    Close(usize, u64),
    /// One side aborts.
    Abort(usize, u64),
    /// One side's queue pair is modified to the error state.
    ToError(usize, u64),
    /// The network resets both directions.
    Reset(u64),
    /// The network flips a bit that this side receives.
    Flip(usize),
    /// This side stops reading forever.
    Stall(usize, u64),
    /// The program of this side has a request that must not succeed.
    Illegal(usize),
    /// A receive of this side is too short.
    TooLong(usize),
    /// A receive of this side has an invalid lkey, or its memory was unmapped.
    BadReceive(usize),
    /// This side posts too few receives.
    Starve(usize),
}

impl Fate {
    /// Returns the number and the name of a kind of fate, for [`Reach`].
    pub const fn number_and_name(self) -> (u64, &'static str) {
        match self {
            Self::Clean(Ending::Close(_)) => (0, "clean, then closed"),
            Self::Clean(Ending::Abort(_)) => (1, "clean, then aborted"),
            Self::Clean(Ending::Reset) => (2, "clean, then reset"),
            Self::Clean(Ending::Forge(..)) => (14, "clean, then a forged FPDU"),
            Self::Close(2, _) => (3, "closed by both in the middle"),
            Self::Close(..) => (4, "closed in the middle"),
            Self::Abort(..) => (5, "aborted"),
            Self::ToError(..) => (6, "modified to ERR"),
            Self::Reset(_) => (7, "reset"),
            Self::Flip(_) => (8, "a bit flipped"),
            Self::Stall(..) => (9, "a side stops reading"),
            Self::Illegal(_) => (10, "an illegal request"),
            Self::TooLong(_) => (11, "a receive too short"),
            Self::BadReceive(_) => (12, "a receive without memory"),
            Self::Starve(_) => (13, "a receive missing"),
        }
    }
}

/// How a connection ends when its programs have finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// One side (0 or 1) or both sides (2) close gracefully.
    Close(usize),
    /// One side aborts.
    Abort(usize),
    /// The network resets both directions.
    Reset,
    /// One side sends an FPDU that violates a rule.
    Forge(usize, Forgery),
}

/// One connection: endpoints `2 * i` and `2 * i + 1`.
#[derive(Debug)]
pub struct Conn {
    /// The fate of the connection.
    pub fate: Fate,
    /// The index of the illegal request, once generated.
    pub illegal_op: Option<usize>,
    /// The fate has happened. Completions with errors are allowed from now on.
    pub fate_happened: bool,
}

/// One endpoint of a connection: a queue pair, its driver and its program.
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
    /// The partly written plan, if any.
    pub plan: Option<Box<TxPlan>>,
    /// Received octets that were not processed yet, if any.
    pub buffer: Option<Box<RxBuffer>>,
    /// Octets that were read, but that the queue pair has not accepted because it holds a Send.
    pub unaccepted: Vec<u8>,
    /// A transmission is scheduled.
    pub tx_due: bool,
    /// The stream is full.
    pub tx_blocked: bool,
    /// The endpoint does not read.
    pub stalled: bool,
    pub fin_sent: bool,
    /// An [`Event::Complete`] is scheduled.
    pub completing: bool,
    /// The socket is closed.
    pub gone: bool,
    /// Time of the next timer.
    pub timer: Option<Time>,
    pub events: Events,

    // The program.
    pub ops: Vec<Op>,
    pub posted: usize,
    pub app_due: bool,
    /// The program waits for room in the send queue.
    pub queue_full: bool,
    /// The program posts no more requests.
    pub stopped: bool,
    /// Number of requests that the program still posts in the error state.
    pub extra_posts: usize,
    /// The program has moved the queue pair to SQD.
    pub sqd: bool,
    /// While generating: the next request waits for all messages generated so far.
    pub wait_next: bool,
    pub inbound: Vec<Message>,
    pub receives: Vec<Receive>,
    pub recv_posted: usize,
    pub recv_due: bool,

    // The checker.
    /// All requests below this index have completed.
    pub next_cqe: usize,
    /// The request that failed, or the first flushed request if none failed: index, status and
    /// vendor error.
    pub first_error: Option<(usize, WcStatus, u32)>,
    /// Index of the first request that was flushed or failed.
    pub first_unsuccessful: Option<usize>,
    /// The status of the first receive that did not succeed.
    pub first_recv_error: Option<WcStatus>,
    /// Number of received messages.
    pub received: usize,
    /// Number of completions of the queue pair's own receives.
    pub recv_cqes: usize,
    /// Number of requests that are known to have changed the peer's memory.
    pub committed: usize,
    /// Number of requests that were posted before the program closed gracefully.
    pub posted_at_close: Option<usize>,
}

impl Endpoint {
    /// Returns the index of the other endpoint.
    pub const fn peer(&self) -> usize {
        self.id ^ 1
    }
}

/// A scheduled event, with the index of the endpoint, node or connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Event {
    Transmit(usize),
    Readable(usize),
    Writable(usize),
    Complete(usize),
    App(usize),
    PostReceives(usize),
    PostShared(usize),
    Poll(usize, usize),
    Time(usize),
    Fate(usize),
    Pause(usize),
    Resume(usize),
    Unstall(usize),
}

/// The state of a run.
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
    pub reach: Reach,
}

/// Large buffers that the next run reuses.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Pool {
    pub plans: Vec<Box<TxPlan>>,
    pub buffers: Vec<Box<RxBuffer>>,
    pub arenas: Vec<Arena>,
    pub octets: Vec<u8>,
}

impl Pool {
    /// Returns an empty transmit plan.
    pub fn plan(&mut self) -> Box<TxPlan> {
        self.plans
            .pop()
            .unwrap_or_else(|| TxPlan::new().expect("memory"))
    }

    /// Returns an empty receive buffer.
    pub fn buffer(&mut self) -> Box<RxBuffer> {
        self.buffers
            .pop()
            .unwrap_or_else(|| RxBuffer::new().expect("memory"))
    }
}

/// Returns the initial octet at an offset of a host's memory.
pub const fn pattern(node: usize, off: usize) -> u8 {
    mix((node as u64) << 48 | (off as u64 >> 3)).to_le_bytes()[off & 7]
}

impl World {
    /// Schedules an event `delay` nanoseconds from now.
    pub fn after(&mut self, delay: u64, event: Event) {
        self.at(self.now + delay, event);
    }

    /// Schedules an event at a time in nanoseconds, or now if that time has passed.
    pub fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.queue
            .push(Reverse((time.max(self.now), self.sequence, event)));
    }

    /// Records a failure. Only the first one is kept.
    pub fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.failure.is_none() {
            let text = what();
            self.failure = Some(format!("at {} ns: {text}", self.now));
        }
    }

    /// Prints a line if the run is verbose.
    pub fn log(&self, line: impl FnOnce() -> String) {
        if self.verbose {
            println!("{:>12} {}", self.now, line());
        }
    }
}
