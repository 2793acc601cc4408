//! Queries about a queue pair's life: what it allows and requires.

use super::{Flow, Idle, Last, Life, Old, Peer, Ready};
use crate::Time;
use crate::qp::{RxInterest, State, StreamWish};

impl Life {
    /// Returns the state that the program sees.
    #[inline]
    pub(in crate::qp) const fn state(&self) -> State {
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

    /// Returns `true` if the queue pair accepts send work requests, even if only to flush them.
    #[inline]
    pub(in crate::qp) const fn accepts_sends(&self) -> bool {
        matches!(self.state(), State::Rts | State::Sqd | State::Error)
    }

    pub(in crate::qp) const fn has_stream(&self) -> bool {
        !matches!(self, Self::Apart { old: None, .. })
    }

    /// Returns `true` if a stream is operational: received octets are processed.
    #[inline]
    pub(in crate::qp) const fn is_up(&self) -> bool {
        matches!(self, Self::Up { .. })
    }

    /// Returns `true` if a stream is operational, and neither end has started to close it.
    pub(in crate::qp) const fn is_open(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::AwaitsFirstFpdu { closing: false, .. }
                    | Flow::Sends { closing: false, .. },
                ..
            }
        )
    }

    /// Returns `true` if a drained send queue has an effect: the program is notified in SQD, or the
    /// stream ends.
    #[inline]
    pub(in crate::qp) const fn acts_when_drained(&self) -> bool {
        matches!(
            self,
            Self::Up {
                ready: Ready::Drain { notified: false },
                ..
            } | Self::Up {
                flow: Flow::AwaitsFirstFpdu { closing: true, .. }
                    | Flow::Sends { closing: true, .. },
                ..
            } | Self::Apart { .. }
        )
    }

    /// Returns `true` if messages may be started and continued.
    #[inline]
    pub(in crate::qp) const fn may_send(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends { .. },
                ..
            }
        )
    }

    /// Returns `true` if a responder waits for the initiator's first FPDU.
    #[inline]
    pub(in crate::qp) const fn awaits_first_fpdu(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::AwaitsFirstFpdu { .. },
                ..
            }
        )
    }

    /// Returns `true` in RTS with a stream.
    #[inline]
    pub(in crate::qp) const fn starts_requests(&self) -> bool {
        matches!(
            self,
            Self::Up {
                ready: Ready::Send,
                ..
            }
        )
    }

    #[inline]
    pub(in crate::qp) const fn is_rtr(&self) -> bool {
        matches!(
            self,
            Self::Up {
                ready: Ready::Receive,
                ..
            }
        )
    }

    /// Returns `true` if a plan or a Terminate is to be written.
    #[inline]
    pub(in crate::qp) const fn has_octets_due(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends {
                    unwritten: true,
                    ..
                },
                ..
            } | Self::Ending {
                last: Last::Terminate { .. } | Last::Plan { .. },
                ..
            }
        )
    }

    pub(in crate::qp) const fn has_terminate(&self) -> bool {
        matches!(
            self,
            Self::Ending {
                last: Last::Terminate { .. },
                ..
            }
        )
    }

    /// Returns `true` if a plan was filled and is not written completely.
    pub(in crate::qp) const fn has_unwritten(&self) -> bool {
        matches!(
            self,
            Self::Up {
                flow: Flow::Sends {
                    unwritten: true,
                    ..
                },
                ..
            } | Self::Ending {
                last: Last::Plan { .. }
                    | Last::Terminate {
                        unwritten: true,
                        ..
                    },
                ..
            } | Self::Apart {
                old: Some(Old::Leave { cut: true, .. }),
                ..
            }
        )
    }

    /// Returns `true` if the peer's first FPDU has arrived on the operational stream.
    #[inline]
    pub(in crate::qp) const fn has_first_fpdu(&self) -> bool {
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

    pub(in crate::qp) const fn is_ending(&self) -> bool {
        self.has_stream() && !self.is_open()
    }

    pub(in crate::qp) const fn has_eof(&self) -> bool {
        matches!(self, Self::Ending { eof: true, .. })
    }

    pub(in crate::qp) const fn is_shut_down(&self) -> bool {
        matches!(
            self,
            Self::Ending {
                last: Last::ShutDown,
                ..
            }
        )
    }

    pub(in crate::qp) const fn wish(&self) -> StreamWish {
        match *self {
            Self::Up {
                flow:
                    Flow::Drained {
                        peer:
                            Peer::Unanswered {
                                not_before: Some(_),
                                ..
                            },
                    },
                ..
            } => StreamWish::Keep,
            Self::Up {
                flow: Flow::Drained { .. },
                ..
            }
            | Self::Ending {
                last: Last::Drained { not_before: None },
                ..
            } => StreamWish::ShutdownWrite,
            Self::Apart {
                old: Some(Old::Leave { cut, not_before }),
                ..
            } => StreamWish::Leave { cut, not_before },
            Self::Apart {
                old: Some(Old::Abort),
                ..
            } => StreamWish::Abort,
            _ => StreamWish::Keep,
        }
    }

    #[inline]
    pub(in crate::qp) const fn rx_interest(&self) -> RxInterest {
        match self {
            Self::Up { .. } if self.holds_send() => RxInterest::Held,
            Self::Up { .. } => RxInterest::Read,
            Self::Ending { eof: false, .. } => RxInterest::Discard,
            Self::Ending { eof: true, .. } | Self::Apart { .. } => RxInterest::None,
        }
    }

    pub(super) const fn not_before(&self) -> Option<Time> {
        match *self {
            Self::Up {
                flow:
                    Flow::Sends {
                        peer: Peer::Unanswered { not_before, .. },
                        ..
                    }
                    | Flow::Drained {
                        peer: Peer::Unanswered { not_before, .. },
                    },
                ..
            }
            | Self::Ending {
                last:
                    Last::Terminate { not_before, .. }
                    | Last::Plan { not_before }
                    | Last::Drained { not_before },
                ..
            }
            | Self::Apart {
                old: Some(Old::Leave { not_before, .. }),
                ..
            } => not_before,
            _ => None,
        }
    }
}

impl Ready {
    pub(super) const fn state(self) -> State {
        match self {
            Self::Receive => State::Rtr,
            Self::Send => State::Rts,
            Self::Drain { .. } => State::Sqd,
        }
    }
}
