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

use super::fault::TerminateOctets;
use super::{RxInterest, State, StreamWish};

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
    Unanswered,
    /// Nothing yet, and we are a responder that has not waited for it, or will send nothing any more.
    Unheard,
    /// Its first FPDU.
    Heard {
        /// A Send waits for a receive.
        held: bool,
    },
}

/// What is still to be sent on a stream that is being ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    /// A Terminate that is in no plan yet.
    Terminate {
        message: TerminateOctets,
        /// A plan before it is not fully written.
        unwritten: bool,
    },
    /// The rest of a plan.
    Plan,
    /// Nothing: the sending side is to be shut down now.
    Drained,
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

    /// The state that the program sees.
    #[inline]
    pub(super) const fn state(&self) -> State {
        match self {
            Self::Up { ready, .. } => ready.state(),
            Self::Ending { .. } => State::Error,
            Self::Apart { state, .. } => match state {
                Idle::Reset => State::Reset,
                Idle::Init => State::Init,
                Idle::Ready { ready, .. } => ready.state(),
                Idle::Error => State::Error,
            },
        }
    }

    /// Returns `true` if the queue pair takes send work requests, if only to flush them.
    #[inline]
    pub(super) const fn takes_sends(&self) -> bool {
        matches!(self.state(), State::Rts | State::Sqd | State::Error)
    }

    /// Returns `true` if there is a stream that is not gone.
    pub(super) const fn has_stream(&self) -> bool {
        !matches!(self, Self::Apart { old: None, .. })
    }

    /// Returns `true` if a stream is in operation: what is received is processed.
    #[inline]
    pub(super) const fn is_up(&self) -> bool {
        matches!(self, Self::Up { .. })
    }

    /// Returns `true` if a stream is in operation and nobody has begun to end it.
    pub(super) const fn is_up_for_good(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Waits { closing: false } | Flow::Sends { closing: false, .. },
                ..
            }
        )
    }

    /// Returns `true` if messages may be started and continued.
    #[inline]
    pub(super) const fn may_send(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends { .. },
                ..
            }
        )
    }

    /// Returns `true` in RTS with a stream.
    #[inline]
    pub(super) const fn starts_requests(&self) -> bool {
        matches!(
            self,
            Self::Up {
                ready: Ready::Send,
                ..
            }
        )
    }

    /// Returns `true` if the peer may be asked whether requests are placed: in RTS or SQD with a stream.
    #[inline]
    pub(super) const fn may_probe(&self) -> bool {
        matches!(
            self,
            Self::Up {
                ready: Ready::Send | Ready::Drain { .. },
                ..
            }
        )
    }

    /// Returns `true` if a plan is to be written, or a Terminate.
    #[inline]
    pub(super) const fn has_octets_due(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends {
                    unwritten: true,
                    ..
                },
                ..
            } | Self::Ending {
                last: Last::Terminate { .. } | Last::Plan,
                ..
            }
        )
    }

    /// Returns `true` if a plan was begun and not all of it is known to be written.
    pub(super) const fn has_unwritten(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends {
                    unwritten: true,
                    ..
                },
                ..
            } | Self::Ending {
                last: Last::Plan
                    | Last::Terminate {
                        unwritten: true,
                        ..
                    },
                ..
            } | Self::Apart {
                old: Some(Old::Leave { cut: true }),
                ..
            }
        )
    }

    /// Returns `true` if the peer's first FPDU has come on the stream in operation.
    #[inline]
    pub(super) const fn has_heard(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends {
                    peer: Peer::Heard { .. },
                    ..
                } | Flow::Drained {
                    peer: Peer::Heard { .. },
                },
                ..
            }
        )
    }

    /// Returns `true` if nothing has come from the responder.
    pub(super) const fn is_unanswered(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends {
                    peer: Peer::Unanswered,
                    ..
                } | Flow::Drained {
                    peer: Peer::Unanswered,
                },
                ..
            }
        )
    }

    /// Returns `true` if nothing has come from the initiator.
    pub(super) const fn awaits_first_fpdu(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Waits { .. }
                    | Flow::Sends {
                        peer: Peer::Unheard,
                        ..
                    }
                    | Flow::Drained {
                        peer: Peer::Unheard,
                    },
                ..
            }
        )
    }

    /// Returns `true` if the stream is being ended and is not gone.
    pub(super) const fn is_ending(&self) -> bool {
        self.has_stream() && !self.is_up_for_good()
    }

    /// Returns `true` if the sending side was shut down.
    pub(super) const fn is_shut_down(&self) -> bool {
        matches!(
            self,
            Self::Ending {
                last: Last::ShutDown,
                ..
            }
        )
    }

    pub(super) const fn wish(&self) -> StreamWish {
        match *self {
            Self::Up {
                flow: Flow::Drained { .. },
                ..
            }
            | Self::Ending {
                last: Last::Drained,
                ..
            } => StreamWish::ShutdownWrite,
            Self::Apart {
                old: Some(Old::Leave { cut }),
                ..
            } => StreamWish::Leave { cut },
            Self::Apart {
                old: Some(Old::Abort),
                ..
            } => StreamWish::Abort,
            _ => StreamWish::Keep,
        }
    }

    #[inline]
    pub(super) const fn rx_interest(&self) -> RxInterest {
        match self {
            Self::Up {
                flow:
                    Flow::Sends {
                        peer: Peer::Heard { held: true },
                        ..
                    }
                    | Flow::Drained {
                        peer: Peer::Heard { held: true },
                    },
                ..
            } => RxInterest::Held,
            Self::Up { .. } => RxInterest::Read,
            Self::Ending { eof: false, .. } => RxInterest::Discard,
            Self::Ending { eof: true, .. } | Self::Apart { .. } => RxInterest::None,
        }
    }

    // What the program does.

    /// Changes the state; [`State::may_become`] has allowed it.
    pub(super) const fn modify(&mut self, to: State) {
        let ready = match to {
            State::Reset => return self.apart(Idle::Reset),
            State::Error => {
                // A stream that is ending goes on to do so, perhaps with a Terminate that is still to be sent.
                if !matches!(self, Self::Ending { .. }) {
                    self.apart(Idle::Error);
                }
                return;
            }
            State::Init => {
                if let Self::Apart { state, .. } = self {
                    *state = Idle::Init;
                }
                return;
            }
            State::Rtr => Ready::Receive,
            State::Rts | State::Sqe => Ready::Send,
            State::Sqd => Ready::Drain { told: false },
        };
        match self {
            Self::Up { ready: now, .. }
            | Self::Apart {
                state: Idle::Ready { ready: now, .. },
                ..
            } => now.change(ready),
            Self::Apart { state, .. } => {
                *state = Idle::Ready {
                    ready,
                    awaits: false,
                };
            }
            Self::Ending { .. } => {}
        }
    }

    /// The program moves the queue pair to RTR and RTS itself from now on. Returns `false` if the state does not allow it.
    pub(super) const fn await_stream(&mut self) -> bool {
        match self {
            Self::Up { ready, .. } => !matches!(ready, Ready::Drain { .. }),
            Self::Apart { state, .. } => {
                let ready = match *state {
                    Idle::Init => Ready::Receive,
                    Idle::Ready {
                        ready: ready @ (Ready::Receive | Ready::Send),
                        ..
                    } => ready,
                    _ => return false,
                };
                *state = Idle::Ready {
                    ready,
                    awaits: true,
                };
                true
            }
            Self::Ending { .. } => false,
        }
    }

    /// A stream begins. Returns `false` if the queue pair cannot take one.
    pub(super) const fn start(&mut self, initiator: bool) -> bool {
        let ready = match *self {
            Self::Apart {
                state:
                    Idle::Ready {
                        ready,
                        awaits: true,
                    },
                old: None,
            } => ready,
            Self::Apart {
                state: Idle::Reset | Idle::Init | Idle::Ready { .. },
                old: None,
            } => Ready::Send,
            _ => return false,
        };
        let flow = if initiator {
            Flow::Sends {
                peer: Peer::Unanswered,
                closing: false,
                unwritten: false,
            }
        } else {
            Flow::Waits { closing: false }
        };
        *self = Self::Up { ready, flow };
        true
    }

    /// The program closes the stream gracefully. Without one the queue pair enters ERR.
    pub(super) const fn close(&mut self) {
        match self {
            Self::Up {
                flow: Flow::Waits { closing } | Flow::Sends { closing, .. },
                ..
            } => *closing = true,
            Self::Apart { .. } => self.abandon(),
            Self::Up {
                flow: Flow::Drained { .. },
                ..
            }
            | Self::Ending { .. } => {}
        }
    }

    /// The queue pair gives the stream up and enters ERR. In RESET it stays there.
    pub(super) const fn abandon(&mut self) {
        if !matches!(self.state(), State::Reset) {
            self.apart(Idle::Error);
        }
    }

    /// As [`abandon`](Self::abandon), and the stream is to be reset.
    pub(super) const fn abort(&mut self) {
        self.abandon();
        if let Self::Apart { old: Some(old), .. } = self {
            *old = Old::Abort;
        }
    }

    /// Gives the stream up, as it is. What TCP has taken is not taken back, because it may have completed.
    const fn apart(&mut self, state: Idle) {
        let old = match *self {
            Self::Apart { old, .. } => old,
            Self::Up { .. } | Self::Ending { .. } => Some(Old::Leave {
                cut: self.has_unwritten(),
            }),
        };
        *self = Self::Apart { state, old };
    }

    // What the peer does.

    /// A valid FPDU has come.
    pub(super) const fn hear(&mut self) -> Heard {
        let Self::Up { flow, .. } = self else {
            return Heard::Before;
        };
        let peer = match flow {
            Flow::Waits { closing } => {
                *flow = Flow::Sends {
                    peer: Peer::Heard { held: false },
                    closing: *closing,
                    unwritten: false,
                };
                return Heard::Established;
            }
            Flow::Sends { peer, .. } | Flow::Drained { peer } => peer,
        };
        let heard = match peer {
            Peer::Heard { .. } => return Heard::Before,
            Peer::Unanswered => Heard::Answer,
            Peer::Unheard => Heard::Established,
        };
        *peer = Peer::Heard { held: false };
        heard
    }

    /// A Send waits for a receive, or does not any more.
    #[inline]
    pub(super) const fn hold(&mut self, on: bool) {
        if let Self::Up {
            flow:
                Flow::Sends {
                    peer: Peer::Heard { held },
                    ..
                }
                | Flow::Drained {
                    peer: Peer::Heard { held },
                },
            ..
        } = self
        {
            *held = on;
        }
    }

    /// The stream ends because of an error that the peer is told of by a Terminate, if that may be sent.
    pub(super) const fn fail(&mut self, message: TerminateOctets) {
        match *self {
            //= rfc5040 section 5.4
            //# After sending a Terminate Message on an RDMAP Stream, the Local Peer
            //# MUST NOT send any more Messages on that specific RDMAP Stream.
            Self::Up {
                flow: Flow::Sends { unwritten, .. },
                ..
            } => {
                let last = Last::Terminate { message, unwritten };
                *self = Self::Ending { eof: false, last };
            }
            // A responder may send nothing before a valid FPDU has come, not even a Terminate.
            Self::Up {
                flow: Flow::Waits { .. },
                ..
            } => self.abort(),
            Self::Up {
                flow: Flow::Drained { .. },
                ..
            } => self.end(false),
            Self::Apart { .. } | Self::Ending { .. } => {}
        }
    }

    /// The peer has ended the stream by a Terminate, which is not answered.
    pub(super) const fn terminated(&mut self) {
        if self.is_up() {
            self.end(false);
        }
    }

    /// The peer has closed its direction. Returns `false` if that was known, or there is no stream that it concerns.
    pub(super) const fn eof(&mut self) -> bool {
        match self {
            Self::Up { .. } => {
                self.end(true);
                true
            }
            Self::Ending { eof, .. } => !core::mem::replace(eof, true),
            Self::Apart { .. } => false,
        }
    }

    /// A stream in operation ends with what is in a plan now.
    const fn end(&mut self, eof: bool) {
        let last = if self.has_unwritten() {
            Last::Plan
        } else {
            Last::Drained
        };
        *self = Self::Ending { eof, last };
    }

    // What the driver does.

    /// A responder may send from now on, whether or not the initiator has.
    pub(super) const fn speak_first(&mut self) {
        if let Self::Up {
            flow: flow @ Flow::Waits { .. },
            ..
        } = self
            && let Flow::Waits { closing } = *flow
        {
            *flow = Flow::Sends {
                peer: Peer::Unheard,
                closing,
                unwritten: false,
            };
        }
    }

    /// Takes the Terminate that is due. The caller puts it into the plan.
    #[inline]
    pub(super) const fn take_terminate(&mut self) -> Option<TerminateOctets> {
        let Self::Ending {
            last: last @ Last::Terminate { .. },
            ..
        } = self
        else {
            return None;
        };
        let before = *last;
        *last = Last::Plan;
        match before {
            Last::Terminate { message, .. } => Some(message),
            _ => None,
        }
    }

    /// A plan was filled or written, and octets of it are `left`.
    #[inline]
    pub(super) const fn written(&mut self, left: bool) {
        match self {
            Self::Up {
                flow: Flow::Sends { unwritten, .. },
                ..
            }
            | Self::Ending {
                last: Last::Terminate { unwritten, .. },
                ..
            } => *unwritten = left,
            Self::Ending {
                last: last @ Last::Plan,
                ..
            } if !left => *last = Last::Drained,
            Self::Apart {
                old: Some(Old::Leave { cut }),
                ..
            } => *cut = left,
            _ => {}
        }
    }

    /// Nothing that was started is outstanding. Returns `true` if the program has to be told, once in each stay in SQD.
    pub(super) const fn idle(&mut self) -> bool {
        match self {
            Self::Up {
                flow: Flow::Sends {
                    unwritten: true, ..
                },
                ..
            } => false,
            Self::Up {
                ready: Ready::Drain { told },
                ..
            }
            | Self::Apart {
                state:
                    Idle::Ready {
                        ready: Ready::Drain { told },
                        ..
                    },
                ..
            } => !core::mem::replace(told, true),
            _ => false,
        }
    }

    /// Returns `true` if the sending side is to be shut down as soon as the queue is done.
    #[inline]
    pub(super) const fn is_closing(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Waits { closing: true }
                    | Flow::Sends {
                        closing: true,
                        unwritten: false,
                        ..
                    },
                ..
            }
        )
    }

    /// The queue is done: the sending side is to be shut down now, if [`is_closing`](Self::is_closing).
    pub(super) const fn drained(&mut self) {
        if !self.is_closing() {
            return;
        }
        if let Self::Up { flow, .. } = self {
            let peer = match *flow {
                Flow::Sends { peer, .. } | Flow::Drained { peer } => peer,
                Flow::Waits { .. } => Peer::Unheard,
            };
            *flow = Flow::Drained { peer };
        }
    }

    /// The sending side was shut down.
    pub(super) const fn shutdown_done(&mut self) {
        let eof = match *self {
            Self::Up {
                flow: Flow::Drained { .. },
                ..
            } => false,
            Self::Ending {
                eof,
                last: Last::Drained,
            } => eof,
            _ => return,
        };
        *self = Self::Ending {
            eof,
            last: Last::ShutDown,
        };
    }

    /// The stream is closed. The end of one that was given up does not concern the queue pair.
    pub(super) const fn gone(&mut self) {
        let state = match *self {
            Self::Apart { state, .. } => state,
            Self::Up { .. } | Self::Ending { .. } => Idle::Error,
        };
        *self = Self::Apart { state, old: None };
    }
}

impl Ready {
    const fn state(self) -> State {
        match self {
            Self::Receive => State::Rtr,
            Self::Send => State::Rts,
            Self::Drain { .. } => State::Sqd,
        }
    }

    /// Changes to another; a stay in SQD goes on.
    const fn change(&mut self, to: Self) {
        if !matches!((*self, to), (Self::Drain { .. }, Self::Drain { .. })) {
            *self = to;
        }
    }
}

#[cfg(test)]
#[path = "tests/life.rs"]
mod tests;
