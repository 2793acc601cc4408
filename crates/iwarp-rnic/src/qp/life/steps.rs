//! The transitions of a queue pair's life.

use super::{Flow, Heard, Hold, Idle, Last, Life, Old, Peer, Ready, Reminder};
use crate::Time;
use crate::qp::fault::TerminateOctets;
use crate::qp::{State, StreamConfig};

impl Life {
    // What the program does.

    /// Changes the state; [`State::may_become`] has allowed it.
    pub(in crate::qp) const fn modify(&mut self, to: State) {
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
    pub(in crate::qp) const fn await_stream(&mut self) -> bool {
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

    /// A stream begins now. Returns `false` if the queue pair cannot take one.
    pub(in crate::qp) fn start(&mut self, stream: &StreamConfig, now: Time) -> bool {
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
        let times = &stream.times;
        let flow = if stream.initiator {
            let waits = stream.rtr.is_some() && !times.maturity.is_zero();
            Flow::Sends {
                peer: Peer::Unanswered {
                    reminder: Reminder {
                        at: times.reminders[0].map(|wait| now.after_about(wait)),
                        before: 0,
                    },
                    not_before: waits.then(|| now.after(times.maturity)),
                },
                closing: false,
                unwritten: false,
            }
        } else {
            Flow::Waits {
                closing: false,
                speak: times.speak_first.map(|wait| now.after(wait)),
                overdue: times.first_fpdu.map(|wait| now.after(wait)),
            }
        };
        *self = Self::Up { ready, flow };
        true
    }

    /// The program closes the stream gracefully. Without one the queue pair enters ERR.
    pub(in crate::qp) const fn close(&mut self) {
        match self {
            Self::Up {
                flow: Flow::Waits { closing, .. } | Flow::Sends { closing, .. },
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
    pub(in crate::qp) const fn abandon(&mut self) {
        if !matches!(self.state(), State::Reset) {
            self.apart(Idle::Error);
        }
    }

    /// As [`abandon`](Self::abandon), and the stream is to be reset.
    pub(in crate::qp) const fn abort(&mut self) {
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
                not_before: self.not_before(),
            }),
        };
        *self = Self::Apart { state, old };
    }

    // What the peer does.

    /// A valid FPDU has come.
    pub(in crate::qp) const fn hear(&mut self) -> Heard {
        let Self::Up { flow, .. } = self else {
            return Heard::Before;
        };
        let peer = match flow {
            Flow::Waits { closing, .. } => {
                *flow = Flow::Sends {
                    peer: Peer::Heard { hold: Hold::No },
                    closing: *closing,
                    unwritten: false,
                };
                return Heard::Established;
            }
            Flow::Sends { peer, .. } | Flow::Drained { peer } => peer,
        };
        let heard = match peer {
            Peer::Heard { .. } => return Heard::Before,
            Peer::Unanswered { .. } => Heard::Answer,
            Peer::Unheard { .. } => Heard::Established,
        };
        *peer = Peer::Heard { hold: Hold::No };
        heard
    }

    /// Where it is noted whether a Send waits for a receive.
    #[inline]
    pub(in crate::qp) const fn hold(&mut self) -> Option<&mut Hold> {
        match self {
            Self::Up {
                flow:
                    Flow::Sends {
                        peer: Peer::Heard { hold },
                        ..
                    }
                    | Flow::Drained {
                        peer: Peer::Heard { hold },
                    },
                ..
            } => Some(hold),
            _ => None,
        }
    }

    /// Ends the wait of a Send, and returns it, if one waits.
    #[inline]
    pub(in crate::qp) const fn end_hold(&mut self) -> Option<Hold> {
        match self.hold() {
            None | Some(Hold::No) => None,
            Some(hold) => Some(core::mem::replace(hold, Hold::No)),
        }
    }

    #[inline]
    pub(super) const fn is_held(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends {
                    peer: Peer::Heard {
                        hold: Hold::Begins | Hold::Since { .. }
                    },
                    ..
                } | Flow::Drained {
                    peer: Peer::Heard {
                        hold: Hold::Begins | Hold::Since { .. }
                    },
                },
                ..
            }
        )
    }

    /// The stream ends because of an error that the peer is told of by a Terminate, if that may be sent.
    pub(in crate::qp) const fn fail(&mut self, message: TerminateOctets) {
        match *self {
            //= rfc5040 section 5.4
            //# After sending a Terminate Message on an RDMAP Stream, the Local Peer
            //# MUST NOT send any more Messages on that specific RDMAP Stream.
            Self::Up {
                flow: Flow::Sends { unwritten, .. },
                ..
            } => {
                let last = Last::Terminate {
                    message,
                    unwritten,
                    not_before: self.not_before(),
                };
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
    pub(in crate::qp) const fn terminated(&mut self) {
        if self.is_up() {
            self.end(false);
        }
    }

    /// The peer has closed its direction. Returns `false` if that was known, or there is no stream that it concerns.
    pub(in crate::qp) const fn eof(&mut self) -> bool {
        match self {
            Self::Up { .. } => {
                //= rfc5041 section 6.2.1
                //# Following this event, when the Local Peer ULP requests graceful teardown,
                //# DDP MUST indicate to the LLP that it SHOULD perform a graceful close of the
                //# other half of the LLP Stream.
                self.end(true);
                true
            }
            Self::Ending { eof, .. } => !core::mem::replace(eof, true),
            Self::Apart { .. } => false,
        }
    }

    /// A stream in operation ends with what is in a plan now.
    const fn end(&mut self, eof: bool) {
        let not_before = self.not_before();
        let last = if self.has_unwritten() {
            Last::Plan { not_before }
        } else {
            Last::Drained { not_before }
        };
        *self = Self::Ending { eof, last };
    }

    // What the driver does.

    /// Takes the Terminate that is due. The caller puts it into the plan.
    #[inline]
    pub(in crate::qp) const fn take_terminate(&mut self) -> Option<TerminateOctets> {
        let Self::Ending {
            last: last @ Last::Terminate { .. },
            ..
        } = self
        else {
            return None;
        };
        let Last::Terminate {
            message,
            not_before,
            ..
        } = *last
        else {
            return None;
        };
        *last = Last::Plan { not_before };
        Some(message)
    }

    /// A plan was filled or written, and octets of it are `left`.
    #[inline]
    pub(in crate::qp) const fn written(&mut self, left: bool) {
        if let Self::Up {
            flow: Flow::Sends { unwritten, .. },
            ..
        } = self
        {
            *unwritten = left;
        } else {
            self.written_at_the_end(left);
        }
    }

    #[cold]
    const fn written_at_the_end(&mut self, left: bool) {
        match self {
            Self::Ending {
                last: Last::Terminate { unwritten, .. },
                ..
            } => *unwritten = left,
            Self::Ending { last, .. } => {
                if let (Last::Plan { not_before }, false) = (*last, left) {
                    *last = Last::Drained { not_before };
                }
            }
            Self::Apart {
                old: Some(Old::Leave { cut, .. }),
                ..
            } => *cut = left,
            _ => {}
        }
    }

    /// Nothing that was started is outstanding. Returns `true` if the program has to be told, once in each stay in SQD.
    pub(in crate::qp) const fn idle(&mut self) -> bool {
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
    pub(in crate::qp) const fn is_closing(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Waits { closing: true, .. }
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
    pub(in crate::qp) const fn drained(&mut self) {
        if !self.is_closing() {
            return;
        }
        if let Self::Up { flow, .. } = self {
            let peer = match *flow {
                Flow::Sends { peer, .. } | Flow::Drained { peer } => peer,
                Flow::Waits { overdue, .. } => Peer::Unheard { overdue },
            };
            *flow = Flow::Drained { peer };
        }
    }

    /// The sending side was shut down.
    pub(in crate::qp) const fn shutdown_done(&mut self) {
        let eof = match *self {
            Self::Up {
                flow: Flow::Drained { .. },
                ..
            } => false,
            Self::Ending {
                eof,
                last: Last::Drained { .. },
            } => eof,
            _ => return,
        };
        *self = Self::Ending {
            eof,
            last: Last::ShutDown,
        };
    }

    /// The stream is closed. The end of one that was given up does not concern the queue pair.
    pub(in crate::qp) const fn gone(&mut self) {
        let state = match *self {
            Self::Apart { state, .. } => state,
            Self::Up { .. } | Self::Ending { .. } => Idle::Error,
        };
        *self = Self::Apart { state, old: None };
    }
}

impl Ready {
    /// Changes to another; a stay in SQD goes on.
    const fn change(&mut self, to: Self) {
        if !matches!((*self, to), (Self::Drain { .. }, Self::Drain { .. })) {
            *self = to;
        }
    }
}
