//! The life of a queue pair: its verbs state and the phase of its stream, in one type.
//!
//! ```text
//!             start                fail, eof, terminated, shutdown_done
//!   Apart ─────────────► Up ──────────────────────────────────────────► Ending
//!     ▲                   │   leave, abort, modify, stream_gone            │
//!     ╰───────────────────┴────────────────────────────────────────────────╯
//! ```
//! Each variant carries only the data that is meaningful in it, so invalid combinations cannot be
//! expressed. The transitions are methods that return what the caller has to report or do. Their
//! callers flush, count and raise events.
//!
//! Three pairs are independent, because the verbs allow each combination:
//!
//! * [`Ready`] and [`Flow`]: a program moves its queue pair between RTR, RTS and SQD independently
//!   of its stream.
//! * [`Idle`] and [`Old`]: after a change to RESET a program may go on to INIT, RTR and RTS before
//!   the driver has taken the old stream.
//! * `eof` and [`Last`]: the two directions of a stream end independently.
//!
//! `queries` contains the functions that inspect a value, `steps` the transitions, and `due` the
//! timed actions. Each deadline is stored in the variants that need it, so a timer ends with the
//! variant.

mod due;
mod queries;
mod steps;

use super::fault::TerminateOctets;
use crate::Time;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The queue pair has no stream, or has given it up.
    Apart {
        state: Idle,
        /// The stream that was given up, until the driver has taken it.
        old: Option<Old>,
    },
    /// A stream is operational.
    Up { ready: Ready, flow: Flow },
    /// The queue pair is in ERR, and the stream is ending: received octets are discarded.
    Ending {
        /// The peer has closed its direction.
        eof: bool,
        last: Last,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Idle {
    Reset,
    Init,
    Ready {
        ready: Ready,
        /// The program has specified a peer and changes the state itself; attaching a stream does
        /// not change the state.
        awaits: bool,
    },
    Error,
}

/// The states between INIT and ERR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    /// RTR: accepts no send work requests.
    Receive,
    /// RTS.
    Send,
    /// SQD: starts no requests.
    Drain {
        /// The program was notified that nothing is outstanding.
        notified: bool,
    },
}

/// A stream that the queue pair has given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Old {
    /// The stream ends independently of the queue pair.
    Leave {
        /// A plan was written partially.
        cut: bool,
        /// The stream must not end earlier.
        not_before: Option<Time>,
    },
    Abort,
}

/// What may be sent on an operational stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    /// No FPDUs: we are a responder and await the initiator's first FPDU (RFC 5044 section 7.1.2).
    AwaitsFirstFpdu {
        /// The program has closed: the sending direction is shut down once local requests are done.
        closing: bool,
        /// When we stop waiting and send.
        speak: Option<Time>,
        /// When the first FPDU is overdue.
        overdue: Option<Time>,
    },
    /// Everything.
    Sends {
        peer: Peer,
        /// The program has closed: what is queued is sent, then the sending direction is shut down.
        closing: bool,
        /// A plan was filled and is not completely written.
        unwritten: bool,
    },
    /// Nothing: the program has closed, and the sending direction is to be shut down now.
    Drained { peer: Peer },
}

/// What has arrived from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// Nothing yet; we are the initiator.
    Unanswered {
        reminder: Reminder,
        /// The stream must not end earlier.
        not_before: Option<Time>,
    },
    /// Nothing yet; we are a responder that no longer waits before sending, or has nothing to send.
    AwaitingFirstFpdu {
        /// When the first FPDU is overdue.
        overdue: Option<Time>,
    },
    /// At least the first FPDU.
    Heard { hold: Hold },
}

/// The next reminder for a silent responder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reminder {
    /// When it is due; `None` after the last reminder.
    at: Option<Time>,
    /// Number of reminders already sent.
    before: u8,
}

/// Whether a Send waits for a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    No,
    /// A Send waits; its deadline is not known yet.
    Begins,
    /// A Send waits.
    Since {
        /// The Send's deadline.
        until: Time,
        /// The Send's deadline if its sender has closed.
        until_if_closed: Time,
        /// When the driver should check whether the sender has closed.
        check_at: Option<Time>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Reminder,
    /// The initiator's first FPDU is overdue.
    FirstFpdu,
    /// A held Send has reached its deadline.
    HoldEnds,
}

/// What remains to be sent on an ending stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    /// A Terminate that is not in a plan yet.
    Terminate {
        message: TerminateOctets,
        /// The plan before it is not completely written.
        unwritten: bool,
        not_before: Option<Time>,
    },
    /// The rest of a plan.
    Plan { not_before: Option<Time> },
    /// Nothing: the sending direction is to be shut down, but not before this time.
    Drained { not_before: Option<Time> },
    /// Nothing: the sending direction is shut down.
    ShutDown,
}

/// The effect of an FPDU from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// None: earlier FPDUs have arrived.
    Before,
    /// It is the first FPDU, and we are the initiator.
    Answer,
    /// It is the first FPDU, and we are the responder: the connection is established.
    Established,
}

impl Life {
    pub(super) const NEW: Self = Self::Apart {
        state: Idle::Reset,
        old: None,
    };
}

#[cfg(test)]
#[path = "../tests/life.rs"]
mod tests;
