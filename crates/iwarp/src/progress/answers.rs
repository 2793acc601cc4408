//! Decides whether a poll that has found the program's own completions stays for the peer's answer.
//!
//! Some programs wait for their peers by looking at memory into which the peers write, and poll a completion queue only for the
//! completions of their own requests. Nobody drives their sockets while they look, so the progress thread has to. It needs a
//! processor for that: another one, which takes as long as to wake a thread, or the very one on which the program looks. The
//! scheduler lets it wait there for milliseconds now and then. But the program has just polled. If answers have come soon after such
//! polls so far, the next poll stays until the answer is there. The memory changes then before the program looks at it.
//!
//! Such a program is told from others by what it has done when the progress thread finds data: it has taken completions since the last
//! time, and has not polled in vain after that. What the waits have brought decides the rest, as for a thread that polls before it sleeps.
//!
//! The counters are hints. A lost update costs a wait at most.

use super::busy_poll::Record;
use super::in_vain::looked_in_vain;
use super::sync::{AtomicBool, AtomicU32, Ordering};
use crate::sys::clock::now_ns;

/// No poll stays longer while nothing comes, in nanoseconds.
const LONGEST: u64 = 50_000;

/// What a look at the sockets has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    /// Octets were moved, but no answer is complete.
    Part,
    Answer,
}

/// What the polls of one queue have shown.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    record: Record,
    /// Polls in vain until the program last took completions.
    vain: AtomicU32,
    /// It has taken some since the progress thread last found data.
    took: AtomicBool,
}

impl Answers {
    /// A poll has found completions, after `vain` others in vain.
    #[inline]
    pub(crate) fn took(&self, vain: u32) {
        self.vain.store(vain, Ordering::Relaxed);
        self.took.store(true, Ordering::Relaxed);
    }

    /// The progress thread has found data. There were `vain` polls in vain until now.
    pub(crate) fn came(&self, vain: u32) {
        let looks_elsewhere =
            self.took.swap(false, Ordering::Relaxed) && self.vain.load(Ordering::Relaxed) == vain;
        self.record.note(looks_elsewhere);
    }

    /// Returns `true` if the next answer should be waited for.
    #[inline]
    pub(crate) fn come_soon(&self) -> bool {
        self.record.is_good()
    }

    /// Calls `look` with the time until it finds the answer, or nothing for `window` nanoseconds.
    #[cold]
    pub(crate) fn wait(&self, window: u64, mut look: impl FnMut(u64) -> Seen) {
        let mut last = now_ns();
        let mut now = last;
        loop {
            // The look comes first: the thread may have lost its processor, and the answer may have come meanwhile.
            match look(now) {
                Seen::Answer => return self.record.hit(),
                Seen::Part => last = now,
                Seen::Nothing if now - last >= window.min(LONGEST) => return self.record.miss(),
                Seen::Nothing => looked_in_vain(),
            }
            now = now_ns();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program takes a completion after `vain` polls in vain, and the progress thread finds the answer.
    fn round(a: &Answers, vain: u32) {
        a.took(vain);
        a.came(vain);
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
    fn who_looks_at_memory_is_told_from_who_polls() {
        let a = learned();
        a.took(9);
        a.came(10);
        assert!(!a.come_soon(), "it has polled in vain since");
    }

    #[test]
    fn who_takes_nothing_waits_for_nothing() {
        let a = learned();
        a.came(7);
        assert!(!a.come_soon(), "a second arrival for one completion");
    }

    #[test]
    fn a_wait_ends_with_the_answer() {
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
    fn waits_in_vain_become_rare() {
        let a = Answers::default();
        let mut waits = 0;
        for vain in 0..10_000 {
            round(&a, vain);
            if a.come_soon() {
                waits += 1;
                a.wait(0, |_| Seen::Nothing);
            }
        }
        assert!((5..40).contains(&waits), "{waits}");
    }

    /// No wait is longer than its window. A thread that has lost its processor looks once more.
    #[test]
    fn the_last_look_comes_after_the_window() {
        let a = learned();
        let begin = now_ns();
        let (mut first, mut last) = (0, 0);
        a.wait(LONGEST * 100, |now| {
            first = if first == 0 { now } else { first };
            last = now;
            Seen::Nothing
        });
        assert!(first >= begin && last >= first + LONGEST);
        assert!(!a.come_soon());
    }

    /// A long message keeps a thread that waits for it.
    #[test]
    fn the_window_begins_anew_while_octets_come() {
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
