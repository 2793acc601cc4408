//! Timers of a queue pair: reminders for a silent responder, the wait for the initiator's first
//! FPDU, the deadline of a held Send, and the earliest end of a stream. The queue pair has no
//! clock: its driver keeps one timer for it.

use super::life::Due;
use super::{Events, Host, QueuePair, Rtr};
use crate::Time;

impl QueuePair {
    /// Returns when to call [`on_time`](Self::on_time) next; `None` if no timer is set.
    ///
    /// Call this after each call that changes the queue pair. A time in the past means that
    /// `on_time` is due immediately, for instance to start the time limit of a held Send. A
    /// driver's timer for an earlier result need not be cancelled, because `on_time` has no effect
    /// if nothing is due.
    #[inline]
    pub fn poll_at(&self) -> Option<Time> {
        self.life.poll_at().filter(|at| *at != Time::NEVER)
    }

    /// Performs all actions that are due at `now`. [`poll_at`](Self::poll_at) then returns a later
    /// time or `None`.
    pub fn on_time<H: Host>(&mut self, now: Time, host: &mut H) {
        self.apply_own_hold(host);
        let held = self.receiver_not_ready();
        while let Some(due) = self.life.due(now, &self.times, held) {
            match due {
                Due::Reminder => self.remind(),
                Due::FirstFpdu => {
                    self.events |= Events::FIRST_FPDU_OVERDUE;
                    self.abort(host);
                }
                Due::HoldEnds => self.hold_timed_out(host),
            }
        }
    }

    /// Records that the sender of a held Send has closed its direction of the stream. If
    /// [`rx_interest`](Self::rx_interest) is `Held` at a time from [`poll_at`](Self::poll_at), the
    /// driver checks whether the sender has closed, and calls this before `on_time`. The Send is
    /// then held for a shorter time: the sender no longer waits, and the program that should post a
    /// receive may be waiting for the end of the connection.
    ///
    /// If [`hide_end`](Self::hide_end) was called, the driver notifies the program of the close,
    /// and the Send is held without a limit. Has no effect without a held Send.
    pub fn sender_closed(&mut self) {
        self.life
            .sender_closed(self.hides_end() && !self.is_by_number());
    }

    /// Sends a reminder, a zero-length Write, if we have sent something and no message is in
    /// progress.
    fn remind(&mut self) {
        if self.tx.has_sent && self.tx.job.is_none() {
            // After the first FPDU only an earlier, identical reminder can be pending.
            self.tx.send_rtr(Rtr::Write);
        }
    }
}
