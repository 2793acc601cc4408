//! Timed actions of a queue pair, and when they are due.

use super::{Due, Flow, Hold, Last, Life, Peer};
use crate::Time;
use crate::qp::{ReceiverNotReady, StreamTimes};

impl Life {
    /// Returns when [`due`](Self::due) must be called next.
    #[inline]
    pub(in crate::qp) fn poll_at(&self) -> Option<Time> {
        match self {
            Self::Up { flow, .. } => flow.poll_at(),
            Self::Ending {
                last: Last::Drained { not_before },
                ..
            } => *not_before,
            Self::Ending { .. } | Self::Apart { .. } => None,
        }
    }

    /// Returns the next action that is due at `now`. Call it until it returns `None`.
    pub(in crate::qp) fn due(
        &mut self,
        now: Time,
        times: &StreamTimes,
        held: ReceiverNotReady,
    ) -> Option<Due> {
        let is_due = |at: &Option<Time>| at.is_some_and(|at| at <= now);
        match self {
            Self::Up { flow, .. } => {
                if let Flow::AwaitsFirstFpdu {
                    closing,
                    speak,
                    overdue,
                } = flow
                    && is_due(speak)
                {
                    *flow = Flow::Sends {
                        peer: Peer::AwaitingFirstFpdu { overdue: *overdue },
                        closing: *closing,
                        unwritten: false,
                    };
                }
                flow.due(now, times, held)
            }
            Self::Ending {
                last: Last::Drained { not_before },
                ..
            } => {
                not_before.take_if(|at| *at <= now);
                None
            }
            Self::Ending { .. } | Self::Apart { .. } => None,
        }
    }

    /// Records that the sender of the held Send has closed its direction. If `wait` is `true`, the
    /// time limit of the Send is removed.
    pub(in crate::qp) fn sender_closed(&mut self, wait: bool) {
        if let Some(Hold::Since {
            until,
            until_if_closed,
            check_at,
        }) = self.hold()
        {
            *until = if wait { Time::NEVER } else { *until_if_closed };
            *check_at = None;
        }
    }
}

impl Flow {
    #[inline]
    fn poll_at(&self) -> Option<Time> {
        match *self {
            Self::Sends { peer, .. } | Self::Drained { peer } => match peer {
                Peer::Heard { hold: Hold::No } => None,
                Peer::Heard { hold: Hold::Begins } => Some(Time::ZERO),
                Peer::Heard {
                    hold:
                        Hold::Since {
                            until, check_at, ..
                        },
                } => Some(check_at.map_or(until, |check_at| check_at.min(until))),
                Peer::AwaitingFirstFpdu { overdue } => overdue,
                Peer::Unanswered {
                    reminder,
                    not_before,
                } => match self {
                    Self::Drained { .. } => not_before,
                    _ => reminder.at,
                },
            },
            Self::AwaitsFirstFpdu { speak, overdue, .. } => earlier(speak, overdue),
        }
    }

    fn due(&mut self, now: Time, times: &StreamTimes, held: ReceiverNotReady) -> Option<Due> {
        let drained = matches!(self, Self::Drained { .. });
        let peer = match self {
            Self::AwaitsFirstFpdu { overdue, .. } => {
                return overdue.take_if(|at| *at <= now).map(|_| Due::FirstFpdu);
            }
            Self::Sends { peer, .. } | Self::Drained { peer } => peer,
        };
        match peer {
            Peer::AwaitingFirstFpdu { overdue } => {
                overdue.take_if(|at| *at <= now).map(|_| Due::FirstFpdu)
            }
            Peer::Unanswered {
                reminder,
                not_before,
            } => {
                not_before.take_if(|at| *at <= now);
                if drained {
                    return None;
                }
                reminder.at.take_if(|at| *at <= now)?;
                reminder.before = reminder.before.saturating_add(1);
                let next = times.reminders.get(usize::from(reminder.before));
                reminder.at = next.copied().flatten().map(|wait| now.after_about(wait));
                Some(Due::Reminder)
            }
            Peer::Heard { hold } => hold.due(now, held),
        }
    }
}

impl Hold {
    fn due(&mut self, now: Time, held: ReceiverNotReady) -> Option<Due> {
        let ReceiverNotReady::Hold { limit, after_close } = held else {
            return None;
        };
        match self {
            Self::No => None,
            Self::Begins => {
                let until = now.after(limit);
                let until_if_closed = now.after(after_close).min(until);
                *self = Self::Since {
                    until,
                    until_if_closed,
                    check_at: Some(until_if_closed),
                };
                None
            }
            Self::Since {
                until, check_at, ..
            } => {
                if *until <= now {
                    return Some(Due::HoldEnds);
                }
                if check_at.is_some_and(|at| at <= now) {
                    *check_at = Some(now.after(after_close));
                }
                None
            }
        }
    }
}

fn earlier(a: Option<Time>, b: Option<Time>) -> Option<Time> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
