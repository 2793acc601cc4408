//! Decides whether a poll that has found completions also waits for the peer's answer.
//!
//! Some programs spin on memory into which their peers write, and poll a completion queue only for
//! their own requests. While such a program spins, no application thread drives its sockets, so the
//! progress thread must. It needs a processor. Waking it on an idle processor takes long; on the
//! processor of the spinning program, the scheduler may delay it for milliseconds. So if answers
//! have come soon after the program's polls so far, a poll waits for the answer. The memory then
//! changes before the program reads it.
//!
//! Such a program is recognized when the progress thread receives data: since the last data, the
//! program has taken completions, and it has not polled without result after that. As in
//! [`busy_poll`](super::busy_poll), the outcomes of the waits decide whether later polls wait.
//!
//! The counters are hints. A lost update costs one wait at most.

use super::busy_poll::Record;
use super::policy::{self, AnswerWait, Seen};
use super::sync::{AtomicBool, AtomicU32, Ordering};
use super::yield_pacing::after_empty_poll;
use crate::sys::clock::now_ns;

#[derive(Debug, Default)]
pub(crate) struct Answers {
    record: Record,
    /// Number of empty polls when the program last took completions.
    empty_polls: AtomicU32,
    /// The program has taken completions since the progress thread last received data.
    has_taken: AtomicBool,
}

impl Answers {
    /// Records a poll that found completions. `empty_polls` is the number of empty polls so far.
    #[inline]
    pub(crate) fn record_taken(&self, empty_polls: u32) {
        self.empty_polls.store(empty_polls, Ordering::Relaxed);
        self.has_taken.store(true, Ordering::Relaxed);
    }

    /// Records that the progress thread received data. `empty_polls` is the number of empty polls
    /// so far.
    pub(crate) fn record_arrival(&self, empty_polls: u32) {
        let has_taken = self.has_taken.swap(false, Ordering::Relaxed);
        let at_last_taking = self.empty_polls.load(Ordering::Relaxed);
        let watches_memory = policy::watches_memory(has_taken, at_last_taking, empty_polls);
        self.record.record_wait(watches_memory);
    }

    /// Returns `true` if a poll that found completions should wait for the peer's answer.
    #[inline]
    pub(crate) fn are_expected_soon(&self) -> bool {
        self.record.earns_window()
    }

    /// Calls `drive` with the time until it reports the answer, or until nothing has arrived for
    /// `window` nanoseconds. Returns `true` if the answer came.
    #[cold]
    #[must_use = "without an answer, the program may not poll again soon"]
    pub(crate) fn wait(&self, window: u64, mut drive: impl FnMut(u64) -> Seen) -> bool {
        let mut last = now_ns();
        let mut now = last;
        loop {
            // Drive before the time is checked: the answer may have come while the thread had no
            // processor.
            match policy::answer_wait(drive(now), now.saturating_sub(last), window) {
                AnswerWait::Done => {
                    self.record.hit();
                    return true;
                }
                AnswerWait::GiveUp => {
                    self.record.miss();
                    return false;
                }
                AnswerWait::Restart => last = now,
                AnswerWait::Again => after_empty_poll(),
            }
            now = now_ns();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::policy::ANSWER_SILENCE_MAX_NS;
    use super::*;

    /// The program takes a completion after `polls` empty polls, and then the progress thread
    /// receives the answer.
    fn round(a: &Answers, polls: u32) {
        a.record_taken(polls);
        a.record_arrival(polls);
    }

    /// Returns a state in which answers are expected.
    fn expecting() -> Answers {
        let a = Answers::default();
        round(&a, 3);
        assert!(!a.are_expected_soon(), "one answer is not enough");
        round(&a, 7);
        assert!(a.are_expected_soon());
        a
    }

    #[test]
    fn empty_poll_ends_expectation() {
        let a = expecting();
        a.record_taken(9);
        a.record_arrival(10);
        assert!(!a.are_expected_soon(), "an empty poll came in between");
    }

    #[test]
    fn arrival_without_completion_is_no_answer() {
        let a = expecting();
        a.record_arrival(7);
        assert!(
            !a.are_expected_soon(),
            "the second arrival after one completion"
        );
    }

    #[test]
    fn wait_ends_with_the_answer() {
        let a = expecting();
        let mut drives = 0;
        let answered = a.wait(u64::MAX, |_| {
            drives += 1;
            match drives {
                3 => Seen::Answer,
                _ => Seen::Nothing,
            }
        });
        assert!(answered);
        assert_eq!(drives, 3);
        assert!(a.are_expected_soon());
    }

    #[test]
    fn fruitless_waits_become_rare() {
        let a = Answers::default();
        let mut waits = 0;
        for polls in 0..10_000 {
            round(&a, polls);
            if a.are_expected_soon() {
                waits += 1;
                assert!(!a.wait(0, |_| Seen::Nothing));
            }
        }
        assert!((5..40).contains(&waits), "{waits}");
    }

    #[test]
    fn last_drive_follows_the_window() {
        let a = expecting();
        let start = now_ns();
        let (mut first, mut last) = (0, 0);
        let answered = a.wait(ANSWER_SILENCE_MAX_NS * 100, |now| {
            first = if first == 0 { now } else { first };
            last = now;
            Seen::Nothing
        });
        assert!(!answered && first >= start && last >= first + ANSWER_SILENCE_MAX_NS);
        assert!(!a.are_expected_soon());
    }

    #[test]
    fn arrivals_restart_the_window() {
        let a = expecting();
        let mut drives = 0;
        let answered = a.wait(0, |_| {
            drives += 1;
            match drives {
                1..10 => Seen::Part,
                _ => Seen::Answer,
            }
        });
        assert_eq!((answered, drives), (true, 10));
        assert!(a.are_expected_soon());
    }
}
