//! One reliable-connected queue pair over one MPA stream (RFC 5040, 5041, 5044, 7306).
//!
//! [`QueuePair`] says how it is driven, with a whole driver as an example.
//!
//! Files: `create`, `post`, `look`, `send_queue` (in-order completion, flush), `acknowledge` (completion when placed), `numbered` (peers that are known by number), `farewell` (what they learn when we leave), `xrc` (extended reliable connections), `next` (which
//! message goes next), `tx`, `message`, `answer`, `headers`, `segment` and `plan` (FPDUs out), `rx`, `buffer`, `frames`, `direct`, `admit`, `place`,
//! `deliver` and `control` (FPDUs in), `tagged` (messages that are matched by tag), `response` (inbound Reads and atomics), `fault` (errors, Terminate), `life` (the states and the
//! phases of a stream, one type) and `state` (what follows from its transitions).

// The documentation shows the methods of a queue pair in the order of these modules.
mod create;

mod state;

mod post;

mod tx;

mod local;

mod rx;

mod timing;

mod acknowledge;

mod numbered;

mod xrc;

mod look;

// They have none.
mod admit;
mod answer;
mod buffer;
mod control;
mod deliver;
mod direct;
mod farewell;
mod fault;
mod frames;
mod headers;
mod life;
mod message;
mod next;
mod place;
mod plan;
mod response;
mod segment;
mod send_queue;
mod tagged;

pub use buffer::{RxBuffer, RxPlan, RxSizes};
pub use fault::{Blame, Fault};
pub use iwarp_proto::mpa::negotiate::Rtr;
pub use plan::{Run, RunKind, TxPlan, TxSizes};
pub use rx::{RxInterest, RxStatus};
pub use state::State;
pub use tx::TxFill;
pub use xrc::XrcEnd;

use crate::counters::Counters;
use crate::memory::{Crc32c, Memory, MemoryTable};
use crate::receive_queue::{ReceiveQueue, SharedReceiveQueue, TakenRecv};
use crate::{Access, AllocError, Cqe, Time};
use bitflags::bitflags;
use core::time::Duration;
use iwarp_proto::mpa::negotiate::Agreed;

/// What happens to a Send for which no receive is posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverNotReady {
    /// Read no further until a receive is posted; TCP's flow control stops the peer. If none is posted in time, the stream
    /// ends as with [`Terminate`](Self::Terminate).
    Hold {
        /// How long the Send waits; [`Duration::MAX`] is for ever.
        limit: Duration,
        /// How long it waits if its sender has closed its direction. Nothing is read behind a held Send, so the driver has to
        /// look for that ([`QueuePair::sender_closed`]); [`QueuePair::poll_at`] names a time for it as often as this.
        after_close: Duration,
    },
    /// End the stream, as RFC 5041 section 7.1 has it.
    Terminate,
    /// The queue pair is an unreliable connection, as InfiniBand knows it: the message is lost, and so is an RDMA Write that memory
    /// refuses. Both ends go on. The sender is not told, and has to be of the same kind, so that its requests need no answer.
    Drop,
}

impl Default for ReceiverNotReady {
    /// Two seconds, and 200 ms if the sender has closed.
    fn default() -> Self {
        Self::Hold {
            limit: Duration::from_secs(2),
            after_close: Duration::from_millis(200),
        }
    }
}

/// One of the two completion queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// That of the send queue.
    Send,
    /// That of the receive queue.
    Recv,
}

/// The functions of its surroundings that a queue pair calls while it works.
pub trait Host {
    /// What registered memory is made of: [`HostRange`](crate::memory::HostRange) in a process.
    type Memory: Memory;
    /// Writes a completion. If the queue overflows, the host notices that and fails the queue pair afterwards.
    fn complete(&mut self, direction: Direction, cqe: Cqe);
    /// Takes the oldest request of the shared receive queue. Returns `false` if there is none.
    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool;
    /// Lets `f` have the shared receive queue; `None` if there is none. Only queue pairs that match tags call it
    /// ([`QpConfig::match_tags`]).
    fn with_shared_receive<R>(
        &mut self,
        f: impl FnOnce(&mut SharedReceiveQueue) -> R,
    ) -> Option<R> {
        let _ = f;
        None
    }
    /// Returns `true` if a message that needs a receive may take one. Otherwise none is taken, as if none were posted, and
    /// [`RxInterest::Held`] asks for another try. For hosts that inject faults.
    #[inline]
    fn receiver_ready(&mut self) -> bool {
        true
    }
    /// Makes [`take_shared_receive`](Self::take_shared_receive) take from the shared receive queue with this number, and returns that queue's
    /// protection domain; `None` if the number is that of no queue that the peer may use. Receives complete in the queue's completion queue then.
    ///
    /// Only the target of an extended reliable connection calls it ([`QueuePair::set_xrc`]).
    fn select_shared_receive(&mut self, number: u32) -> Option<u32> {
        let _ = number;
        None
    }
}

/// Memory, CRC function and host for one call.
#[derive(Debug)]
pub struct Env<'a, H: Host> {
    /// The device's STag table.
    pub memory: &'a MemoryTable<H::Memory>,
    /// How CRCs are computed.
    pub crc32c: Crc32c,
    /// The receiver of completions.
    pub host: &'a mut H,
}

/// Sizes and rules of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpConfig {
    /// Number, unique on the device.
    pub qp_num: u32,
    /// Protection domain.
    pub pd: u32,
    /// Send work requests outstanding, up to [`MAX_QP_WR`](crate::limits::MAX_QP_WR).
    pub max_send_wr: u32,
    /// Receive work requests outstanding; ignored with a shared receive queue.
    pub max_recv_wr: u32,
    /// Elements per send work request, up to [`MAX_SGE`](crate::limits::MAX_SGE).
    pub max_send_sge: u32,
    /// Elements per receive work request.
    pub max_recv_sge: u32,
    /// Octets of inline data per work request, up to [`MAX_INLINE`](crate::limits::MAX_INLINE).
    pub max_inline: u32,
    /// Inbound RDMA Reads and atomics served at a time, up to [`MAX_IRD`](crate::limits::MAX_IRD).
    pub max_ird: u16,
    /// Outbound RDMA Reads and atomics outstanding, up to [`MAX_ORD`](crate::limits::MAX_ORD).
    pub max_ord: u16,
    /// Every send work request writes a completion.
    pub signal_all: bool,
    /// Receives come from a shared receive queue.
    pub shared_receive: bool,
    /// That queue matches messages with tags ([`tags`](crate::tags)).
    pub match_tags: bool,
    /// See [`ReceiverNotReady`].
    pub receiver_not_ready: ReceiverNotReady,
    /// Payload that is sent with a CRC is copied first. See [`QueuePair::set_snapshot`].
    pub snapshot: bool,
    /// A slot of a queue stays taken after its request has completed, until the driver reports that the completion was polled
    /// ([`QueuePair::release_sends`], [`QueuePair::release_receives`]). So a program that does not poll fills its queue, as with
    /// hardware, and not the completion queue. Otherwise the slot is free when the completion is written.
    pub hold_slots: bool,
    /// How much one call does.
    pub budget: Budget,
}

/// How much work one call of a queue pair does at most, so that its driver holds locks and keeps off other work for a limited
/// time only. A call that has more to do says so, and is made again. Zero counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Completions of requests that are flushed, or that an answer to an earlier request has completed
    /// ([`QueuePair::completions_due`]). So many requests are looked at, too, to find the one that a Terminate of the peer is about.
    pub completions: u32,
    /// Requests that only change the memory table, carried out by one [`QueuePair::tx_fill`]. What that call puts into a plan is limited by
    /// the plan.
    pub local_requests: u32,
    /// FPDUs that are processed ([`RxStatus::More`]).
    pub fpdus: u32,
}

impl Budget {
    /// What suits a process: no other thread waits for longer than some ten microseconds.
    pub const DEFAULT: Self = Self {
        completions: 256,
        local_requests: 64,
        fpdus: 256,
    };

    const fn fpdus(&self) -> u32 {
        match self.fpdus {
            0 => 1,
            n => n,
        }
    }

    const fn completions(&self) -> u32 {
        match self.completions {
            0 => 1,
            n => n,
        }
    }

    const fn local_requests(&self) -> u32 {
        match self.local_requests {
            0 => 1,
            n => n,
        }
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Default for QpConfig {
    fn default() -> Self {
        Self {
            qp_num: 1,
            pd: 1,
            max_send_wr: 64,
            max_recv_wr: 64,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 64,
            max_ird: 16,
            max_ord: 16,
            signal_all: false,
            shared_receive: false,
            match_tags: false,
            receiver_not_ready: ReceiverNotReady::default(),
            snapshot: false,
            hold_slots: false,
            budget: Budget::default(),
        }
    }
}

/// Why a queue pair was not created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateError {
    /// A size is above its limit (EINVAL).
    Invalid,
    /// No memory (ENOMEM).
    OutOfMemory,
}

impl From<AllocError> for CreateError {
    fn from(_: AllocError) -> Self {
        Self::OutOfMemory
    }
}

/// What MPA start-up has agreed on for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamConfig {
    /// We sent the MPA request. The responder's first FPDU waits for the initiator's.
    pub initiator: bool,
    /// Both sides generate and check CRCs.
    pub crc: bool,
    /// The peer asked for markers in what we send.
    pub markers_tx: bool,
    /// We asked for markers in what we receive.
    pub markers_rx: bool,
    /// Inbound reads we serve at a time.
    pub ird: u16,
    /// Outbound reads the peer serves at a time.
    pub ord: u16,
    /// As initiator: the RTR message to send first.
    pub rtr: Option<Rtr>,
    /// As responder: an RTR message by Send is expected and takes no receive.
    pub rtr_send_expected: bool,
    /// Effective maximum segment size of the stream, in octets.
    pub emss: u32,
    /// What is due when.
    pub times: StreamTimes,
}

impl StreamConfig {
    /// Returns what the agreement means for one of the two sides.
    pub fn agreed(agreed: &Agreed, initiator: bool, emss: u32, times: StreamTimes) -> Self {
        Self {
            initiator,
            //= rfc5044 section 4.4
            //# The process MUST be invisible to the ULP.
            crc: agreed.crc,
            markers_tx: agreed.markers_tx,
            markers_rx: agreed.markers_rx,
            ird: agreed.ird,
            ord: agreed.ord,
            rtr: agreed.rtr.filter(|_| initiator),
            rtr_send_expected: !initiator && agreed.rtr == Some(Rtr::Send),
            emss,
            times,
        }
    }
}

/// Times of a stream, counted from [`QueuePair::start`]. See [`QueuePair::poll_at`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamTimes {
    /// As initiator: how long the responder may be silent before it is reminded by a zero-length RDMA Write, if we have sent
    /// something; then how long before it is reminded again, up to a quarter later each. After `None` there is no further
    /// reminder. siw as responder overlooks FPDUs that come before it has finished its own part of the start-up, until more come.
    /// A zero-length RDMA Write is never refused, and no program notices it.
    pub reminders: [Option<Duration>; 3],
    /// As initiator that has agreed on an RTR message: how old the stream must be for its end, as long as nothing has come from
    /// the responder. siw as responder fails if the stream ends before it has looked at the RTR message.
    pub maturity: Duration,
    /// As responder: how long to wait for the initiator's first FPDU before sending without it. RFC 5044 section 7.1.2 has the
    /// responder wait without limit (`None`), because an initiator may need time after the reply until it accepts FPDUs. Without
    /// the RTR messages of RFC 6581, a server that sends first and a client that waits for it would then wait for each other.
    pub speak_first: Option<Duration>,
    /// As responder: how long the initiator's first FPDU may take. Then the stream is reset ([`Events::FIRST_FPDU_OVERDUE`]). In
    /// the peer-to-peer model the initiator has to send it (RFC 6581 section 9.2). `None`: any time.
    pub first_fpdu: Option<Duration>,
}

impl StreamTimes {
    /// Nothing is ever due.
    pub const NONE: Self = Self {
        reminders: [None; 3],
        maturity: Duration::ZERO,
        speak_first: None,
        first_fpdu: None,
    };

    /// [`reminders`](Self::reminders) for any peer. An emulated siw has needed 30 ms; the later ones are for guests that were held up.
    /// Each reminder costs both ends a system call per connection, so there are few.
    pub const REMINDERS: [Option<Duration>; 3] = [
        Some(Duration::from_millis(50)),
        Some(Duration::from_millis(1000)),
        Some(Duration::from_millis(3200)),
    ];
}

bitflags! {
    /// What happened to a queue pair since the last [`QueuePair::take_events`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Events: u32 {
        /// As responder: the initiator's first FPDU has come, both sides may send.
        const ESTABLISHED = 1;
        /// The send queue is drained in state SQD.
        const SQ_DRAINED = 1 << 1;
        /// The queue pair went to the error state because of the stream or the peer.
        const FATAL = 1 << 2;
        /// A peer's access to memory was refused.
        const ACCESS_ERROR = 1 << 3;
        /// A peer broke the protocol.
        const REQUEST_ERROR = 1 << 4;
        /// The last receive was taken from the shared receive queue by a queue pair in error.
        const LAST_WQE = 1 << 5;
        /// The stream is over, for whatever reason.
        const DISCONNECTED = 1 << 6;
        /// As responder: the initiator's first FPDU has not come in time, and the stream is reset.
        const FIRST_FPDU_OVERDUE = 1 << 7;
        /// A message of the peer's program has come in RTR, for the first time on this stream
        /// (`IBV_EVENT_COMM_EST`).
        const MESSAGE_IN_RTR = 1 << 8;
    }
}

/// What the caller should do with the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamWish {
    /// Nothing.
    Keep,
    /// Everything is written: shut down the sending side, go on reading and discard the octets, close when the peer closes.
    ShutdownWrite,
    /// The queue pair is done with the stream. The caller takes it away, tells [`QueuePair::stream_gone`], and ends
    /// the stream in the background so that the peer's TCP gets what was written.
    Leave {
        /// A plan was written in part and nothing follows. The peer must not take the end for a good one: a reset,
        /// once the peer's TCP has acknowledged what was written.
        cut: bool,
        /// The end must not be sent earlier ([`StreamTimes::maturity`]).
        not_before: Option<Time>,
    },
    /// Close at once, with a reset.
    Abort,
}

#[doc = include_str!("driver.txt")]
#[derive(Debug)]
pub struct QueuePair {
    config: QpConfig,
    /// Receives complete out of line: their tags are matched, or operations are counted.
    receives_apart: bool,
    life: life::Life,
    sq: send_queue::SendQueue,
    rq: ReceiveQueue,
    responses: response::ResponseQueue,
    acknowledge: acknowledge::Acknowledge,
    xrc: xrc::Xrc,
    /// What a peer may do to memory through this queue pair, if the region allows it, too.
    remote: Access,
    tx: tx::Tx,
    rx: rx::Rx,
    tagged: tagged::Tagged,
    events: Events,
    fault: Option<Fault>,
    counters: Counters,
    times: StreamTimes,
}

#[cfg(test)]
mod tests;
