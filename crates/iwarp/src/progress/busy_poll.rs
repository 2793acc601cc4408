//! Decides whether a thread polls for a while before it sleeps.
//!
//! A sleep and the wake-up from it cost more than a short round trip takes. A thread that expects its completion soon
//! therefore polls for a window of time before it sleeps. Each queue learns from its own waits. A wait that ends soon counts
//! for polling, whether the thread polled or slept. A window without result counts against it, the more the more of them follow
//! each other. If another thread worked for long on the processor meanwhile, processors are scarce. Then polling takes them from
//! programs that have something to do, and the scheduler takes them back for milliseconds at a time, while a thread that sleeps is
//! woken at once: so most waits sleep from then on.
//!
//! The counters are hints. They are read and written without order, and a lost update costs a window at most.

use super::in_vain::looked_in_vain;
use super::sync::{AtomicU32, Ordering};
use crate::sys::clock::now_ns;
use std::time::Duration;

/// Short waits in a row before the first window.
const TRUST: u32 = 2;
/// A wait that ended in sleep was short if it took at most so many windows: most of it may have been the wake-ups of this
/// thread and of the peer's.
const SLEEPY: u32 = 4;
/// The most short waits that a row of windows without result can ask for.
const DISTRUST_MAX: u32 = 1024;
/// If so much time passes between two looks, in nanoseconds, the processor was taken from the thread. No look takes that long.
const TAKEN: u64 = 2_000_000;

/// What waits have shown: how many short ones there were, and how many more it takes after windows in vain.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// Short waits in a row.
    short: AtomicU32,
    /// How many short waits a window takes, beyond [`TRUST`].
    distrust: AtomicU32,
}

impl Record {
    /// Returns `true` if the next wait should begin with a window.
    #[inline]
    pub(super) fn is_good(&self) -> bool {
        let need = TRUST + self.distrust.load(Ordering::Relaxed);
        self.short.load(Ordering::Relaxed) >= need
    }

    /// A wait ended in its window.
    #[inline]
    pub(super) fn hit(&self) {
        if self.distrust.load(Ordering::Relaxed) != 0 {
            self.distrust.store(0, Ordering::Relaxed);
        }
    }

    /// A window ended without result.
    pub(super) fn miss(&self) {
        let distrust = self.distrust.load(Ordering::Relaxed);
        self.distrust_next((distrust * 2 + 2).min(DISTRUST_MAX));
    }

    /// The next window takes so many short waits.
    fn distrust_next(&self, waits: u32) {
        self.distrust.store(waits, Ordering::Relaxed);
        self.short.store(0, Ordering::Relaxed);
    }

    /// A wait without a window was short, or was not.
    pub(super) fn note(&self, short: bool) {
        let row = match short {
            true => self.short.load(Ordering::Relaxed).saturating_add(1),
            false => 0,
        };
        self.short.store(row, Ordering::Relaxed);
    }
}

/// What the waits of one queue have shown.
#[derive(Debug, Default)]
pub(crate) struct BusyPoll {
    record: Record,
}

impl BusyPoll {
    /// Calls `look` until it returns `true`, for at most `window`, if that is worth it. Returns `true` if it did. `look` gets the
    /// time.
    pub(crate) fn poll(&self, window: Duration, mut look: impl FnMut(u64) -> bool) -> bool {
        if window.is_zero() || !self.is_worth_it() {
            return false;
        }
        let mut now = now_ns();
        let end = now.saturating_add(u64::try_from(window.as_nanos()).unwrap_or(u64::MAX));
        loop {
            if look(now) {
                self.record.hit();
                return true;
            }
            looked_in_vain();
            let before = std::mem::replace(&mut now, now_ns());
            if now.saturating_sub(before) >= TAKEN {
                self.processor_was_taken();
                return look(now);
            }
            if now >= end {
                self.miss();
                return false;
            }
        }
    }

    /// Returns `true` if the thread should poll before it sleeps.
    #[inline]
    pub(crate) fn is_worth_it(&self) -> bool {
        self.record.is_good()
    }

    /// A window ended without result.
    pub(crate) fn miss(&self) {
        self.record.miss();
    }

    /// Another thread worked on the processor for long.
    #[cold]
    fn processor_was_taken(&self) {
        self.record.distrust_next(DISTRUST_MAX);
    }

    /// A wait ended in sleep after `waited`, measured from its beginning.
    pub(crate) fn slept(&self, waited: Duration, window: Duration) {
        self.record.note(waited <= window * SLEEPY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_micros(50);
    const SHORT: Duration = Duration::from_micros(10);

    #[test]
    fn short_waits_earn_a_window() {
        let b = BusyPoll::default();
        assert!(!b.is_worth_it());
        for _ in 0..TRUST {
            b.slept(SHORT, WINDOW);
        }
        assert!(b.is_worth_it());
        b.record.hit();
        assert!(b.is_worth_it(), "a hit keeps it");
        b.slept(WINDOW * 5, WINDOW);
        assert!(!b.is_worth_it(), "a long wait ends it");
    }

    #[test]
    fn windows_in_vain_become_rare() {
        let b = BusyPoll::default();
        let mut windows = 0;
        // Sleeps are always short, windows always in vain: as when both ends share one processor.
        for _ in 0..10_000 {
            if b.is_worth_it() {
                windows += 1;
                b.miss();
            } else {
                b.slept(SHORT, WINDOW);
            }
        }
        assert!((5..40).contains(&windows), "{windows}");
        while !b.is_worth_it() {
            b.slept(SHORT, WINDOW);
        }
        b.record.hit();
        b.slept(WINDOW * 5, WINDOW);
        b.slept(SHORT, WINDOW);
        b.slept(SHORT, WINDOW);
        assert!(b.is_worth_it(), "one hit forgives");
    }

    #[test]
    fn a_window_ends_with_a_result() {
        let b = BusyPoll::default();
        assert!(!b.poll(WINDOW, |_| panic!("nothing was short yet")));
        let trust = || {
            for _ in 0..TRUST + DISTRUST_MAX {
                b.slept(SHORT, WINDOW);
            }
        };
        trust();
        assert!(!b.poll(Duration::ZERO, |_| panic!("no window")));
        // The window lasts until there is a result, unless the processor is taken from this thread meanwhile.
        let third = || {
            trust();
            let mut looks = 0;
            b.poll(Duration::MAX, |_| {
                looks += 1;
                looks == 3
            })
        };
        assert!((0..100).any(|_| third()));
        trust();
        assert!(b.poll(WINDOW, |_| true) && b.is_worth_it());
        let mut last = 0;
        assert!(!b.poll(WINDOW, |now| {
            assert!(now >= last);
            last = now;
            false
        }));
        assert!(!b.is_worth_it());
    }

    /// When the processor comes back, the result may be there.
    #[test]
    fn who_loses_the_processor_sleeps_from_then_on() {
        for result in [true, false] {
            let b = BusyPoll::default();
            for _ in 0..TRUST {
                b.slept(SHORT, WINDOW);
            }
            let mut looks = 0;
            let found = b.poll(Duration::MAX, |_| {
                looks += 1;
                std::thread::sleep(Duration::from_nanos(TAKEN));
                looks == 2 && result
            });
            assert_eq!((found, looks), (result, 2));
            for _ in 1..DISTRUST_MAX {
                b.slept(SHORT, WINDOW);
                assert!(!b.is_worth_it());
            }
            for _ in 0..=TRUST {
                b.slept(SHORT, WINDOW);
            }
            assert!(b.is_worth_it());
        }
    }

    /// The first window takes two short waits. Each one in vain doubles what the next one takes, up to a limit.
    #[test]
    fn each_window_in_vain_makes_the_next_one_dearer() {
        let b = BusyPoll::default();
        for waits in [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1026, 1026] {
            for wait in 0..waits {
                assert!(!b.is_worth_it(), "{wait} of {waits}");
                b.slept(SHORT, WINDOW);
            }
            assert!(b.is_worth_it(), "{waits}");
            b.miss();
        }
    }

    /// Most of the time of a wait in sleep may be that of the wake-ups: it is short up to four windows.
    #[test]
    fn a_sleep_of_some_windows_is_short() {
        for (waited, short) in [
            (WINDOW, true),
            (WINDOW * 4, true),
            (WINDOW * 4 + Duration::from_nanos(1), false),
        ] {
            let b = BusyPoll::default();
            for _ in 0..TRUST {
                b.slept(waited, WINDOW);
            }
            assert_eq!(b.is_worth_it(), short, "{waited:?}");
        }
    }
}
