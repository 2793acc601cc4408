//! The state of a run: hosts, connections, programs, and the events in virtual time.

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

/// Size of one host's memory. Unused pages take no real memory.
pub const ARENA: usize = 32 << 20;
/// The CRC function of all queue pairs.
pub const CRC32C: Crc32c = Crc32c::new(iwarp_proto::crc32c::append);
/// How long a Send may wait for a receive: far longer than any program takes to post it.
pub const HOLD_TIME: Duration = Duration::from_secs(100);

/// A change of memory: new octets at an offset of an arena.
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
    /// The request fails with this status, and the peer gets a Terminate with a local catastrophic
    /// error.
    Local(WcStatus),
    /// The peer refuses the request with this code. If the request has an answer, its completion
    /// reports the refusal.
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
    /// Post it after this many received messages.
    pub after_recv: usize,
    /// Changes in the poster's memory.
    pub local: Vec<Effect>,
    /// Changes in the peer's memory, other than in receives.
    pub remote: Vec<Effect>,
    /// No other request changes the same memory.
    pub exclusive: bool,
    /// `byte_len` of the completion.
    pub byte_len: u32,
    /// Offset of the sink, for an atomic on the counter that all connections share.
    pub shared_sink: Option<usize>,
    /// The outcome.
    pub expect: Expect,
}

/// A message, and what the completion of its receive must report.
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
    /// Indices of receives that are posted and not complete.
    pub open: BTreeSet<usize>,
    /// Number of limit events.
    pub limit_events: u32,
    /// Number of armed limits, each of which allows one event.
    pub limits_set: u32,
}

/// A host with an RNIC.
#[derive(Debug)]
pub struct Node {
    /// Its memory.
    pub arena: Arena,
    /// Octets of the arena in use.
    pub used: usize,
    /// Contents according to the programs, in the order of the script. Used only to generate the
    /// programs.
    pub model: Vec<u8>,
    /// Contents according to the completions.
    pub shadow: Vec<u8>,
    /// Changes that may or may not have happened before a stream broke.
    pub maybe: Vec<Effect>,
    /// Offsets of words of eight octets whose final value cannot be predicted.
    pub wild: Vec<usize>,
    /// The STag table.
    pub table: MemoryTable<SimRange>,
    /// Completion queues.
    pub cqs: Vec<CompletionQueue>,
    /// For each completion queue, whether a poll is scheduled.
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

/// The fate of a connection: what the run does to it. The side is 0 or 1; a time is in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub enum Fate {
    /// Nothing happens until the programs have finished. Then the connection ends like this.
    Clean(End),
    /// One side (0, 1) or both (2) close gracefully while the programs are running.
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
    /// A receive of this side names memory by an invalid key, or memory that has gone.
    BadReceive(usize),
    /// This side posts too few receives.
    Starve(usize),
}

impl Fate {
    /// Returns the number and the name of a kind of fate, for [`Reach`].
    pub const fn number_and_name(self) -> (u64, &'static str) {
        match self {
            Self::Clean(End::Close(_)) => (0, "clean, then closed"),
            Self::Clean(End::Abort(_)) => (1, "clean, then aborted"),
            Self::Clean(End::Reset) => (2, "clean, then reset"),
            Self::Clean(End::Forge(..)) => (14, "clean, then a forged FPDU"),
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
pub enum End {
    /// One side closes (0, 1), or both (2).
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
    /// The fate has happened. From now on, completions with errors are expected.
    pub fate_happened: bool,
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
    /// The partly written plan, if any.
    pub plan: Option<Box<TxPlan>>,
    /// Received octets that were not processed yet, if any.
    pub buffer: Option<Box<RxBuffer>>,
    /// Octets after those that the queue pair has not accepted, because a Send is held.
    pub lent: Vec<u8>,
    /// A transmission is scheduled.
    pub tx_due: bool,
    /// The stream is full.
    pub tx_blocked: bool,
    /// The endpoint does not read.
    pub stalled: bool,
    pub fin_sent: bool,
    /// Writing more completions is scheduled.
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
    /// The program posts no more.
    pub stopped: bool,
    /// Number of requests that the program still posts in the error state.
    pub extra_posts: usize,
    /// The program has the queue pair in SQD.
    pub sqd: bool,
    /// While generating: the next request depends on all messages so far.
    pub wait_next: bool,
    pub inbound: Vec<Message>,
    pub receives: Vec<Receive>,
    pub recv_posted: usize,
    pub recv_due: bool,

    // The checker.
    /// All requests below this index have completed.
    pub next_cqe: usize,
    /// The first request that failed: index, status and vendor error.
    pub first_bad: Option<(usize, WcStatus, u32)>,
    /// The first request that did not succeed.
    pub flushed_from: Option<usize>,
    /// The status of the first receive that failed.
    pub first_bad_recv: Option<WcStatus>,
    /// Number of received messages.
    pub received: usize,
    /// Number of completions of the queue pair's own receives.
    pub recv_cqes: usize,
    /// Number of requests of this side whose changes in the peer's memory are proven.
    pub committed: usize,
    /// Number of requests that had been posted when the program closed gracefully.
    pub posted_at_close: Option<usize>,
}

impl Endpoint {
    /// Returns the number of the other end.
    pub const fn peer(&self) -> usize {
        self.id ^ 1
    }
}

/// A scheduled event.
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

    /// Schedules an event at a time in nanoseconds, or now if that is past.
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
