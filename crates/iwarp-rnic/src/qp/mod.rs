//! One reliable-connected queue pair over one MPA stream (RFC 5040, 5041, 5044, 7306).
//!
//! The type [`QueuePair`] explains how it is driven, with a complete driver as an example.
//!
//! Files: `create`, `post`, `queries`, `send_queue` (in-order completion, flush), `acknowledge`
//! (completion when placed), `by_number` (peers connected by number), `farewell` (the last note to
//! such a peer), `xrc` (extended reliable connections), `next` (which message goes next), `tx`,
//! `message`, `request`, `answer`, `headers`, `segment`, `fpdu` and `plan` (FPDUs out), `rx`,
//! `buffer`, `frames`, `direct`, `admit`, `place`, `deliver`, `answered`, `receives` and `control`
//! (FPDUs in), `tagged` (tag matching),
//! `response` (inbound Reads and atomics), `fault` (errors, Terminate), `life` (the states of queue
//! pair and stream, one type) and `state` (the effects of its transitions).

// The documentation lists the methods of a queue pair in the order of these modules.
mod create;

mod state;

mod post;

mod tx;

mod local;

mod rx;

mod timing;

mod acknowledge;

mod by_number;

mod xrc;

mod queries;

// Modules without public methods.
mod admit;
mod answer;
mod answered;
mod buffer;
mod control;
mod deliver;
mod direct;
mod farewell;
mod fault;
mod fpdu;
mod frames;
mod headers;
mod life;
mod message;
mod next;
mod place;
mod plan;
mod receives;
mod request;
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

/// The policy for a Send that finds no posted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverNotReady {
    /// Stop reading until a receive is posted; TCP flow control stops the peer. If none is posted
    /// in time, the stream ends as with [`Terminate`](Self::Terminate).
    Hold {
        /// How long the Send waits; [`Duration::MAX`] means forever.
        limit: Duration,
        /// How long it waits after its sender has closed its direction. Nothing is read past a held
        /// Send, so the driver has to check for that ([`QueuePair::sender_closed`]);
        /// [`QueuePair::poll_at`] returns a time for it at this interval.
        after_close: Duration,
    },
    /// End the stream, as RFC 5041 section 7.1 requires.
    Terminate,
    /// Behave like an unreliable connection of InfiniBand: drop the message, and also an RDMA Write
    /// whose memory access is refused. Both ends continue. The sender is not notified, and must use
    /// the same policy, so that its requests need no response.
    Drop,
}

impl Default for ReceiverNotReady {
    /// Holds for two seconds, and for 200 ms after the sender has closed.
    fn default() -> Self {
        Self::Hold {
            limit: Duration::from_secs(2),
            after_close: Duration::from_millis(200),
        }
    }
}

/// Selects one of a queue pair's two completion queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The completion queue of the send queue.
    Send,
    /// The completion queue of the receive queue.
    Recv,
}

/// Functions of the environment that a queue pair calls while it works.
pub trait Host {
    /// The kind of registered memory: [`HostRange`](crate::memory::HostRange) in a process.
    type Memory: Memory;
    /// Writes a completion. If the queue overflows, the host fails the queue pair afterwards.
    fn complete(&mut self, direction: Direction, cqe: Cqe);
    /// Takes the oldest request of the shared receive queue. Returns `false` if there is none.
    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool;
    /// Passes the shared receive queue to `f`; returns `None` if there is none. Only called by
    /// queue pairs that match tags ([`QpConfig::match_tags`]).
    fn with_shared_receive<R>(
        &mut self,
        f: impl FnOnce(&mut SharedReceiveQueue) -> R,
    ) -> Option<R> {
        let _ = f;
        None
    }
    /// Returns `true` if a message may consume a receive. If `false`, the queue pair behaves as if
    /// no receive were posted, and [`RxInterest::Held`] asks for a retry. Hosts that inject faults
    /// override it.
    #[inline]
    fn receiver_ready(&mut self) -> bool {
        true
    }
    /// Selects the shared receive queue for [`take_shared_receive`](Self::take_shared_receive) by
    /// number, and returns its protection domain; `None` if the peer may use no such queue. Its
    /// receives complete in the queue's own completion queue.
    ///
    /// Only the target of an extended reliable connection calls it ([`QueuePair::set_xrc`]).
    fn select_shared_receive(&mut self, number: u32) -> Option<u32> {
        let _ = number;
        None
    }
}

/// The memory, CRC functions and host that a call uses.
#[derive(Debug)]
pub struct Env<'a, H: Host> {
    /// The device's STag table.
    pub memory: &'a MemoryTable<H::Memory>,
    /// The CRC functions.
    pub crc32c: Crc32c,
    /// Receives the completions.
    pub host: &'a mut H,
}

/// Sizes and rules of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpConfig {
    /// Queue pair number, unique on the device.
    pub qp_num: u32,
    /// Protection domain.
    pub pd: u32,
    /// Maximum outstanding send work requests, up to [`MAX_QP_WR`](crate::limits::MAX_QP_WR).
    pub max_send_wr: u32,
    /// Maximum outstanding receive work requests; ignored with a shared receive queue.
    pub max_recv_wr: u32,
    /// Maximum elements per send work request, up to [`MAX_SGE`](crate::limits::MAX_SGE).
    pub max_send_sge: u32,
    /// Maximum elements per receive work request.
    pub max_recv_sge: u32,
    /// Maximum inline data per work request in bytes, up to
    /// [`MAX_INLINE`](crate::limits::MAX_INLINE).
    pub max_inline: u32,
    /// Maximum concurrent inbound RDMA Reads and atomics, up to
    /// [`MAX_IRD`](crate::limits::MAX_IRD).
    pub max_ird: u16,
    /// Maximum outstanding outbound RDMA Reads and atomics, up to
    /// [`MAX_ORD`](crate::limits::MAX_ORD).
    pub max_ord: u16,
    /// Every send work request writes a completion.
    pub signal_all: bool,
    /// Receives come from a shared receive queue.
    pub shared_receive: bool,
    /// The shared receive queue matches tags ([`tags`](crate::tags)).
    pub match_tags: bool,
    /// The policy for Sends that find no receive.
    pub receiver_not_ready: ReceiverNotReady,
    /// Payload sent with a CRC is copied first; see [`QueuePair::set_snapshot`].
    pub snapshot: bool,
    /// A completed request keeps its slot until the driver reports that the completion was polled
    /// ([`QueuePair::release_sends`], [`QueuePair::release_receives`]). A program that does not
    /// poll then fills its work queue, as with hardware, instead of the completion queue. If
    /// `false`, a slot is freed when the completion is written.
    pub hold_slots: bool,
    /// The maximum work of one call.
    pub budget: Budget,
}

/// Limits on the work of one call, so that its driver holds locks and delays other work for a
/// bounded time. If a call reaches a limit, its result asks the driver to repeat the call. Zero is
/// treated as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Completions of requests that are flushed, or that a response to a later request completes
    /// ([`QueuePair::completions_due`]). Also the number of requests examined per call to find the
    /// request that a Terminate refers to.
    pub completions: u32,
    /// Requests that only change the memory table, executed by one [`QueuePair::tx_fill`]. The plan
    /// itself limits the other requests.
    pub local_requests: u32,
    /// FPDUs processed ([`RxStatus::More`]).
    pub fpdus: u32,
}

impl Budget {
    /// Defaults for a process: other threads wait for about ten microseconds at most.
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
    /// A size exceeds its limit (EINVAL).
    Invalid,
    /// The allocator has no memory (ENOMEM).
    OutOfMemory,
}

impl From<AllocError> for CreateError {
    fn from(_: AllocError) -> Self {
        Self::OutOfMemory
    }
}

/// The result of MPA start-up for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamConfig {
    /// We sent the MPA request. The responder sends its first FPDU after the initiator's.
    pub initiator: bool,
    /// Both sides generate and check CRCs.
    pub crc: bool,
    /// The peer requested markers in what we send.
    pub markers_tx: bool,
    /// We requested markers in what we receive.
    pub markers_rx: bool,
    /// Inbound Reads that we serve at a time.
    pub ird: u16,
    /// Outbound Reads that the peer serves at a time.
    pub ord: u16,
    /// As initiator: the RTR message to be sent first.
    pub rtr: Option<Rtr>,
    /// As responder: an RTR message by Send is expected and takes no receive.
    pub rtr_send_expected: bool,
    /// Effective maximum segment size of the stream, in octets.
    pub emss: u32,
    /// The time limits of the stream.
    pub times: StreamTimes,
}

impl StreamConfig {
    /// Returns the configuration of one side, from the negotiated parameters.
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

/// Time limits of a stream, counted from [`QueuePair::start`]. See [`QueuePair::poll_at`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamTimes {
    /// As initiator: the intervals at which we send reminders, zero-length RDMA Writes, while
    /// nothing has arrived from the responder. The first interval begins when we send something;
    /// each is extended by up to a quarter. `None` ends the sequence.
    ///
    /// As responder, siw does not notice FPDUs that arrive before it has finished its own start-up,
    /// until more arrive. A zero-length RDMA Write is never refused, and programs do not notice it.
    pub reminders: [Option<Duration>; 3],
    /// As initiator that agreed to an RTR message: the minimum age at which the stream may end
    /// while nothing has arrived from the responder. As responder, siw fails if the stream ends
    /// before it has processed the RTR message.
    pub maturity: Duration,
    /// As responder: how long to wait for the initiator's first FPDU before sending without it. RFC
    /// 5044 section 7.1.2 has the responder wait without limit (`None`), because an initiator may
    /// need time after the reply before it accepts FPDUs. Without the RTR messages of RFC 6581, a
    /// server that sends first and its client would then deadlock.
    pub speak_first: Option<Duration>,
    /// As responder: time limit for the initiator's first FPDU, after which the stream is reset
    /// ([`Events::FIRST_FPDU_OVERDUE`]). In the peer-to-peer model the initiator must send it (RFC
    /// 6581 section 9.2). `None`: no limit.
    pub first_fpdu: Option<Duration>,
}

impl StreamTimes {
    /// No time limits.
    pub const NONE: Self = Self {
        reminders: [None; 3],
        maturity: Duration::ZERO,
        speak_first: None,
        first_fpdu: None,
    };

    /// The [`reminders`](Self::reminders) that suit every peer. siw in an emulated machine has
    /// needed 30 ms; the later reminders are for stalled guests. Each reminder costs both ends a
    /// system call, so there are only three.
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
        /// As responder: the initiator's first FPDU has arrived, so both sides may send.
        const ESTABLISHED = 1;
        /// The send queue is drained in state SQD.
        const SQ_DRAINED = 1 << 1;
        /// The stream or the peer moved the queue pair to the error state.
        const FATAL = 1 << 2;
        /// A peer's access to memory was refused.
        const ACCESS_ERROR = 1 << 3;
        /// A peer broke the protocol.
        const REQUEST_ERROR = 1 << 4;
        /// The queue pair is in error, and takes no more receives from its shared receive queue
        /// (`IBV_EVENT_QP_LAST_WQE_REACHED`).
        const LAST_WQE = 1 << 5;
        /// The stream has ended, for whatever reason.
        const DISCONNECTED = 1 << 6;
        /// As responder: the initiator's first FPDU was overdue, and the stream is reset.
        const FIRST_FPDU_OVERDUE = 1 << 7;
        /// A message of the peer's program has arrived in RTR, for the first time on this stream
        /// (`IBV_EVENT_COMM_EST`).
        const MESSAGE_IN_RTR = 1 << 8;
    }
}

/// What the caller should do with the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamWish {
    /// Nothing.
    Keep,
    /// Everything is written: shut down the sending direction, keep reading and discard the octets,
    /// and close when the peer closes.
    ShutdownWrite,
    /// The queue pair no longer needs the stream. The caller takes it, calls
    /// [`QueuePair::stream_gone`], and ends the stream in the background, so that the peer's TCP
    /// receives what was written.
    Leave {
        /// A plan was written partially and nothing follows. The peer must not see an orderly end:
        /// reset the stream once the peer's TCP has acknowledged what was written.
        cut: bool,
        /// Do not end the stream earlier ([`StreamTimes::maturity`]).
        not_before: Option<Time>,
    },
    /// Reset the stream immediately.
    Abort,
}

#[doc = include_str!("driver.txt")]
#[derive(Debug)]
pub struct QueuePair {
    config: QpConfig,
    /// Received Sends complete in a function that is not inlined, because tags are matched or
    /// operations are counted.
    receives_out_of_line: bool,
    life: life::Life,
    sq: send_queue::SendQueue,
    rq: ReceiveQueue,
    responses: response::ResponseQueue,
    acknowledge: acknowledge::Acknowledge,
    xrc: xrc::Xrc,
    /// Remote access rights of this queue pair, in addition to those of each region.
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
