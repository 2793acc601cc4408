//! The life of a queue pair: its state as the verbs have it and the phase of its stream, in one type.
//!
//! ```text
//!             start                fail, eof, terminated, shutdown_done
//!   Apart ─────────────► Up ──────────────────────────────────────────► Ending
//!     ▲                   │   leave, abort, modify, stream_gone            │
//!     ╰───────────────────┴────────────────────────────────────────────────╯
//! ```
//! Each variant carries what has a meaning in it and nothing else. So no value says, for instance, that a queue pair in ERR may
//! start requests, that a stream was shut down in the middle of a plan, or that the end of an old stream concerns a queue pair
//! that was reset meanwhile. The transitions are methods. They return nothing but what the caller has to tell or to do; the
//! files that call them flush, count and raise events.
//!
//! Three pairs are independent, because the verbs allow each combination:
//!
//! * [`Ready`] and [`Flow`]: a program moves its queue pair between RTR, RTS and SQD whatever its stream is doing.
//! * [`Idle`] and [`Old`]: after a change to RESET a program may go on to INIT, RTR and RTS before the driver has taken the old
//!   stream away.
//! * `eof` and [`Last`]: the two directions of a stream end independently.
//!
//! `look` says what a value allows and asks for, `steps` has the transitions, and `due` what happens at a time. Times stand in the variants in which something is due then, so a timer whose purpose is gone is gone with it.

mod due;
mod look;
mod steps;

use super::fault::TerminateOctets;
use crate::Time;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The queue pair has no stream, or has given it up.
    Apart {
        /// Its state without a stream.
        state: Idle,
        /// The stream that it has given up, until the driver has taken it away.
        old: Option<Old>,
    },
    /// A stream is in operation.
    Up {
        /// RTR, RTS or SQD.
        ready: Ready,
        /// What may be sent.
        flow: Flow,
    },
    /// ERR, and the stream is being ended: nothing that is received is looked at.
    Ending {
        /// The peer has closed its direction.
        eof: bool,
        /// What is still to be sent.
        last: Last,
    },
}

/// The state of a queue pair without a stream in operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Idle {
    Reset,
    Init,
    /// RTR, RTS or SQD.
    Ready {
        ready: Ready,
        /// The program has named a peer and makes the changes of state itself: a stream that attaches does not change it.
        awaits: bool,
    },
    /// ERR.
    Error,
}

/// The states between INIT and ERR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    /// RTR: takes no send work requests.
    Receive,
    /// RTS.
    Send,
    /// SQD: starts no requests.
    Drain {
        /// The program was told that nothing is outstanding.
        told: bool,
    },
}

/// A stream that the queue pair has given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Old {
    /// It ends without the queue pair.
    Leave {
        /// A plan was written in part.
        cut: bool,
        /// It must not end earlier.
        not_before: Option<Time>,
    },
    /// It must be reset.
    Abort,
}

/// What may be sent on a stream in operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    /// A responder to which the initiator's first FPDU has not come: no FPDU (RFC 5044 section 7.1.2).
    Waits {
        /// The program has closed: the sending side is shut down when local requests are done.
        closing: bool,
        /// When it stops waiting.
        speak: Option<Time>,
        /// When the FPDU is overdue.
        overdue: Option<Time>,
    },
    /// Everything.
    Sends {
        peer: Peer,
        /// The program has closed: what is queued is sent, then the sending side is shut down.
        closing: bool,
        /// A plan was filled and is not fully written.
        unwritten: bool,
    },
    /// Nothing: the program has closed, and the sending side is to be shut down now.
    Drained { peer: Peer },
}

/// What has come from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// Nothing yet, and we are the initiator.
    Unanswered {
        reminder: Reminder,
        /// The stream must not end earlier.
        not_before: Option<Time>,
    },
    /// Nothing yet, and we are a responder that has not waited for it, or will send nothing any more.
    Unheard {
        /// When its first FPDU is overdue.
        overdue: Option<Time>,
    },
    /// Its first FPDU.
    Heard { hold: Hold },
}

/// The next reminder for a responder that is silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reminder {
    /// When it is due; `None` if there are no more.
    at: Option<Time>,
    /// Reminders before it.
    before: u8,
}

/// Whether a Send waits for a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    /// No Send does.
    No,
    /// One does, and the time is not known yet.
    Begins,
    /// One does.
    Since {
        /// The end of its time.
        until: Time,
        /// The end if its sender has closed.
        until_if_closed: Time,
        /// When the driver should look whether the sender has closed.
        look: Option<Time>,
    },
}

/// Something whose time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// A reminder for a responder that is silent.
    Reminder,
    /// The initiator's first FPDU has not come in time.
    FirstFpdu,
    /// A held Send has waited for long enough.
    HoldEnds,
}

/// What is still to be sent on a stream that is being ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    /// A Terminate that is in no plan yet.
    Terminate {
        message: TerminateOctets,
        /// A plan before it is not fully written.
        unwritten: bool,
        not_before: Option<Time>,
    },
    /// The rest of a plan.
    Plan { not_before: Option<Time> },
    /// Nothing: the sending side is to be shut down, but not before this time.
    Drained { not_before: Option<Time> },
    /// Nothing: the sending side is shut down.
    ShutDown,
}

/// The answer to the peer's first FPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// It was not the first.
    Before,
    /// We are the initiator.
    Answer,
    /// We are the responder: the connection is established.
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
