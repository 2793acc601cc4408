//! What is due when: reminders for a silent responder, the wait for the initiator's first FPDU, the time of a held Send, and the
//! earliest end of a stream. The queue pair has no clock: its driver keeps one timer for it.

use super::life::Due;
use super::{Events, Host, QueuePair, Rtr};
use crate::Time;

/// Time.
impl QueuePair {
    /// Returns when to call [`on_time`](Self::on_time) next; `None` if nothing is due at any time.
    ///
    /// Ask after every call that changes the queue pair, because each may change the answer. A time that has passed already means
    /// at once: the time of a held Send, for instance, begins with the next call of `on_time`. A timer that was set for an
    /// earlier answer may be left as it is: `on_time` ignores what is not due.
    #[inline]
    pub fn poll_at(&self) -> Option<Time> {
        self.life.poll_at().filter(|at| *at != Time::NEVER)
    }

    /// Does what is due at this time. Afterwards [`poll_at`](Self::poll_at) names a later time or none.
    pub fn on_time<H: Host>(&mut self, now: Time, host: &mut H) {
        self.heed_own_hold(host);
        let held = self.receiver_not_ready();
        while let Some(due) = self.life.due(now, &self.times, held) {
            match due {
                Due::Reminder => self.remind(),
                Due::FirstFpdu => {
                    self.events |= Events::FIRST_FPDU_OVERDUE;
                    self.abort(host);
                }
                Due::HoldEnds => self.hold_ends(host),
            }
        }
    }

    /// Tells that the sender of a held Send has closed its direction of the stream. The driver looks for that when a time of
    /// [`poll_at`](Self::poll_at) has come and [`rx_interest`](Self::rx_interest) is `Held`, and calls this before `on_time`. A
    /// sender that has closed waits for no receive, and the program that should post one may be waiting for the end of the
    /// connection. If [`hide_end`](Self::hide_end) was called, the driver notifies that program
    /// instead, and the Send waits for its receive without a limit. Without a held Send this does
    /// nothing.
    pub fn sender_closed(&mut self) {
        self.life
            .sender_closed(self.hides_end() && !self.is_connectionless());
    }

    /// Nothing has come from the responder. If we have sent something, and nothing is on its way, it gets a zero-length Write.
    fn remind(&mut self) {
        if self.tx.spoke && self.tx.job.is_none() {
            // Behind the first FPDU only an earlier reminder can wait to be sent, and this one is the same.
            self.tx.send_rtr(Rtr::Write);
        }
    }
}
