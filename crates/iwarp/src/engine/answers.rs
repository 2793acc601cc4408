//! Lets a poll that has found the program's own completions stay for the peer's answer.
//!
//! Some programs wait for their peers by reading memory into which the peers write, and poll a
//! completion queue only for their own requests. While they do, no application thread drives their
//! sockets, so the progress thread has to. It needs a processor: another one, and waking a thread
//! there takes long, or the one on which the program spins, where the scheduler may let it wait for
//! milliseconds. But the program has just polled. If answers have come soon after such polls so
//! far, the next poll waits for the answer. The memory then changes before the program reads it.
//!
//! Such a program is recognized when the progress thread finds data: it has taken completions since
//! the last time, and has not polled without result after that. The outcomes of the waits decide
//! the rest, as for a thread that polls before it sleeps.
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
    /// Polls without result until the program last took completions.
    empty_polls: AtomicU32,
    /// The program has taken completions since the progress thread last found data.
    took: AtomicBool,
}

impl Answers {
    /// Records a poll that found completions, after `empty_polls` others that found none.
    #[inline]
    pub(crate) fn took(&self, empty_polls: u32) {
        self.empty_polls.store(empty_polls, Ordering::Relaxed);
        self.took.store(true, Ordering::Relaxed);
    }

    /// Records that the progress thread found data, after `empty_polls` polls without result.
    pub(crate) fn came(&self, empty_polls: u32) {
        let took = self.took.swap(false, Ordering::Relaxed);
        let then = self.empty_polls.load(Ordering::Relaxed);
        let at_memory = policy::looks_at_memory(took, then, empty_polls);
        self.record.note(at_memory);
    }

    #[inline]
    pub(crate) fn come_soon(&self) -> bool {
        self.record.is_good()
    }

    /// Calls `look` with the time until it finds the answer, or until it has found nothing for
    /// `window` nanoseconds.
    #[cold]
    pub(crate) fn wait(&self, window: u64, mut look: impl FnMut(u64) -> Seen) {
        let mut last = now_ns();
        let mut now = last;
        loop {
            // Look before the time is checked: the thread may have lost its processor, and the
            // answer may have come meanwhile.
            match policy::answer_wait(look(now), now.saturating_sub(last), window) {
                AnswerWait::Done => return self.record.hit(),
                AnswerWait::GiveUp => return self.record.miss(),
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

    /// Takes a completion after `polls` empty polls; then the progress thread finds the answer.
    fn round(a: &Answers, polls: u32) {
        a.took(polls);
        a.came(polls);
    }

    fn learned() -> Answers {
        let a = Answers::default();
        round(&a, 3);
        assert!(!a.come_soon(), "once is no habit");
        round(&a, 7);
        assert!(a.come_soon());
        a
    }

    #[test]
    fn empty_poll_ends_the_habit() {
        let a = learned();
        a.took(9);
        a.came(10);
        assert!(!a.come_soon(), "an empty poll came in between");
    }

    #[test]
    fn arrival_without_completion_is_no_answer() {
        let a = learned();
        a.came(7);
        assert!(!a.come_soon(), "the second arrival after one completion");
    }

    #[test]
    fn wait_ends_with_the_answer() {
        let a = learned();
        let mut looks = 0;
        a.wait(u64::MAX, |_| {
            looks += 1;
            match looks {
                3 => Seen::Answer,
                _ => Seen::Nothing,
            }
        });
        assert_eq!(looks, 3);
        assert!(a.come_soon());
    }

    #[test]
    fn fruitless_waits_become_rare() {
        let a = Answers::default();
        let mut waits = 0;
        for polls in 0..10_000 {
            round(&a, polls);
            if a.come_soon() {
                waits += 1;
                a.wait(0, |_| Seen::Nothing);
            }
        }
        assert!((5..40).contains(&waits), "{waits}");
    }

    /// A thread that lost its processor looks once more after its window.
    #[test]
    fn last_look_follows_the_window() {
        let a = learned();
        let begin = now_ns();
        let (mut first, mut last) = (0, 0);
        a.wait(ANSWER_SILENCE_MAX_NS * 100, |now| {
            first = if first == 0 { now } else { first };
            last = now;
            Seen::Nothing
        });
        assert!(first >= begin && last >= first + ANSWER_SILENCE_MAX_NS);
        assert!(!a.come_soon());
    }

    /// A thread waits for a long message until its end.
    #[test]
    fn arrivals_restart_the_window() {
        let a = learned();
        let mut looks = 0;
        a.wait(0, |_| {
            looks += 1;
            match looks {
                1..10 => Seen::Part,
                _ => Seen::Answer,
            }
        });
        assert_eq!(looks, 10);
        assert!(a.come_soon());
    }
}
