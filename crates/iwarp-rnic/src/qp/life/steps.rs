//! The transitions of a queue pair's life.

use super::{Flow, Heard, Hold, Idle, Last, Life, Old, Peer, Ready, Reminder};
use crate::Time;
use crate::qp::fault::TerminateOctets;
use crate::qp::{State, StreamConfig};

impl Life {
    // Steps of the program.

    /// Changes the state, as permitted by [`State::may_become`].
    pub(in crate::qp) const fn modify(&mut self, to: State) {
        let ready = match to {
            State::Reset => return self.give_up_stream(Idle::Reset),
            State::Error => {
                // A stream that is already ending is not affected: a Terminate may still be due.
                if !matches!(self, Self::Ending { .. }) {
                    self.give_up_stream(Idle::Error);
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
            State::Sqd => Ready::Drain { notified: false },
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

    /// Records that the program itself moves the queue pair to RTR and RTS. Returns `false` if the
    /// present state does not allow it.
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

    /// Attaches a stream at time `now`. Returns `false` if the present state does not allow it.
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
            Flow::AwaitsFirstFpdu {
                closing: false,
                speak: times.speak_first.map(|wait| now.after(wait)),
                overdue: times.first_fpdu.map(|wait| now.after(wait)),
            }
        };
        *self = Self::Up { ready, flow };
        true
    }

    /// Closes the stream gracefully. Without a stream the queue pair enters ERR.
    pub(in crate::qp) const fn close(&mut self) {
        match self {
            Self::Up {
                flow: Flow::AwaitsFirstFpdu { closing, .. } | Flow::Sends { closing, .. },
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

    /// Gives up the stream and enters ERR; a queue pair in RESET stays in RESET.
    pub(in crate::qp) const fn abandon(&mut self) {
        if !matches!(self.state(), State::Reset) {
            self.give_up_stream(Idle::Error);
        }
    }

    /// Like [`abandon`](Self::abandon), but the stream is to be reset.
    pub(in crate::qp) const fn abort(&mut self) {
        self.abandon();
        if let Self::Apart { old: Some(old), .. } = self {
            *old = Old::Abort;
        }
    }

    /// Gives up the stream without writing more to it. TCP still delivers the octets written so
    /// far, because their requests may have completed.
    const fn give_up_stream(&mut self, state: Idle) {
        let old = match *self {
            Self::Apart { old, .. } => old,
            Self::Up { .. } | Self::Ending { .. } => Some(Old::Leave {
                cut: self.has_unwritten(),
                not_before: self.not_before(),
            }),
        };
        *self = Self::Apart { state, old };
    }

    // Steps of the peer.

    pub(in crate::qp) const fn fpdu_arrived(&mut self) -> Heard {
        let Self::Up { flow, .. } = self else {
            return Heard::Before;
        };
        let peer = match flow {
            Flow::AwaitsFirstFpdu { closing, .. } => {
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
            Peer::AwaitingFirstFpdu { .. } => Heard::Established,
        };
        *peer = Peer::Heard { hold: Hold::No };
        heard
    }

    /// Returns the field for a held Send, if a Send can be held in the present state.
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

    /// Records that no Send waits. If one did, returns the previous value.
    #[inline]
    pub(in crate::qp) const fn end_hold(&mut self) -> Option<Hold> {
        match self.hold() {
            None | Some(Hold::No) => None,
            Some(hold) => Some(core::mem::replace(hold, Hold::No)),
        }
    }

    #[inline]
    pub(super) const fn holds_send(&self) -> bool {
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

    /// Ends the stream because of an error, with a Terminate to the peer if one may be sent.
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
            // A responder must not send anything, not even a Terminate, before a valid FPDU has
            // arrived.
            Self::Up {
                flow: Flow::AwaitsFirstFpdu { .. },
                ..
            } => self.abort(),
            Self::Up {
                flow: Flow::Drained { .. },
                ..
            } => self.end(false),
            Self::Apart { .. } | Self::Ending { .. } => {}
        }
    }

    /// Handles a Terminate of the peer, which ends the stream and is not answered.
    pub(in crate::qp) const fn terminated(&mut self) {
        if self.is_up() {
            self.end(false);
        }
    }

    /// Handles the peer closing its direction. Returns `false` if this was already known, or if the
    /// stream was given up.
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

    /// Ends an operational stream after the current plan.
    const fn end(&mut self, eof: bool) {
        let not_before = self.not_before();
        let last = if self.has_unwritten() {
            Last::Plan { not_before }
        } else {
            Last::Drained { not_before }
        };
        *self = Self::Ending { eof, last };
    }

    // Steps of the driver.

    /// Removes and returns the pending Terminate, which the caller adds to the plan.
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

    /// Records that a plan was filled or written. `left` is `true` if part of it is unwritten.
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

    /// Records that no started request is outstanding. Returns `true` if the program has to be
    /// notified, which happens once per change to SQD.
    pub(in crate::qp) const fn idle(&mut self) -> bool {
        match self {
            Self::Up {
                flow: Flow::Sends {
                    unwritten: true, ..
                },
                ..
            } => false,
            Self::Up {
                ready: Ready::Drain { notified },
                ..
            }
            | Self::Apart {
                state:
                    Idle::Ready {
                        ready: Ready::Drain { notified },
                        ..
                    },
                ..
            } => !core::mem::replace(notified, true),
            _ => false,
        }
    }

    /// Returns `true` if the sending direction is to be shut down once the queue is drained.
    #[inline]
    pub(in crate::qp) const fn is_closing(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::AwaitsFirstFpdu { closing: true, .. }
                    | Flow::Sends {
                        closing: true,
                        unwritten: false,
                        ..
                    },
                ..
            }
        )
    }

    /// Records that the queue is drained. If [`is_closing`](Self::is_closing), the sending
    /// direction is to be shut down now.
    pub(in crate::qp) const fn drained(&mut self) {
        if !self.is_closing() {
            return;
        }
        if let Self::Up { flow, .. } = self {
            let peer = match *flow {
                Flow::Sends { peer, .. } | Flow::Drained { peer } => peer,
                Flow::AwaitsFirstFpdu { overdue, .. } => Peer::AwaitingFirstFpdu { overdue },
            };
            *flow = Flow::Drained { peer };
        }
    }

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

    /// Records that the stream is closed. The end of a stream that was given up does not affect the
    /// queue pair.
    pub(in crate::qp) const fn gone(&mut self) {
        let state = match *self {
            Self::Apart { state, .. } => state,
            Self::Up { .. } | Self::Ending { .. } => Idle::Error,
        };
        *self = Self::Apart { state, old: None };
    }
}

impl Ready {
    /// Changes to another state. A change from SQD to SQD does not notify the program again.
    const fn change(&mut self, to: Self) {
        if !matches!((*self, to), (Self::Drain { .. }, Self::Drain { .. })) {
            *self = to;
        }
    }
}
