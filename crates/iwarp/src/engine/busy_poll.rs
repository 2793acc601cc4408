//! Lets a thread poll for a while before it sleeps.
//!
//! A sleep and its wake-up take longer than a short round trip. A thread that expects its
//! completion soon therefore polls for a window of time before it sleeps. Each queue learns from
//! its own waits. A wait that ends soon counts in favour of polling, whether the thread polled or
//! slept. A window without result counts against it, and each further one counts more. If the
//! thread lost its processor for long meanwhile, processors are scarce. Polling then takes them
//! from programs that have work, and the scheduler takes them back for milliseconds at a time,
//! while a thread that sleeps is woken at once: most waits sleep from then on.
//!
//! The counters are hints. They are read and written without order; a lost update costs one window
//! at most.

use super::policy;
use super::sync::{AtomicU32, Ordering};
use super::yield_pacing::after_empty_poll;
use crate::sys::clock::now_ns;
use std::time::Duration;

/// The outcomes of waits: short ones in a row, and how many more a window needs after windows
/// without result.
#[derive(Debug, Default)]
pub(super) struct Record {
    short: AtomicU32,
    /// Short waits that a window needs beyond [`policy::WINDOW_SHORT_WAITS`].
    distrust: AtomicU32,
}

impl Record {
    #[inline]
    pub(super) fn is_good(&self) -> bool {
        let distrust = self.distrust.load(Ordering::Relaxed);
        policy::earns_window(self.short.load(Ordering::Relaxed), distrust)
    }

    /// Records a wait that ended in its window.
    #[inline]
    pub(super) fn hit(&self) {
        if self.distrust.load(Ordering::Relaxed) != 0 {
            self.distrust.store(0, Ordering::Relaxed);
        }
    }

    /// Records a window that ended without result.
    pub(super) fn miss(&self) {
        let distrust = self.distrust.load(Ordering::Relaxed);
        self.begin_again(policy::distrust_after_miss(distrust));
    }

    /// Forgets the short waits so far, and sets the distrust.
    fn begin_again(&self, distrust: u32) {
        self.distrust.store(distrust, Ordering::Relaxed);
        self.short.store(0, Ordering::Relaxed);
    }

    /// Records a wait without a window, which was short or not.
    pub(super) fn note(&self, short: bool) {
        let row = match short {
            true => self.short.load(Ordering::Relaxed).saturating_add(1),
            false => 0,
        };
        self.short.store(row, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct BusyPoll {
    record: Record,
}

impl BusyPoll {
    /// Calls `look` with the time until it returns `true`, for at most `window`, if that is worth
    /// it. Returns `true` if `look` did.
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
            after_empty_poll();
            let before = std::mem::replace(&mut now, now_ns());
            if policy::has_lost_processor(now.saturating_sub(before)) {
                self.record.begin_again(policy::DISTRUST_MAX);
                return look(now);
            }
            if now >= end {
                self.miss();
                return false;
            }
        }
    }

    #[inline]
    pub(crate) fn is_worth_it(&self) -> bool {
        self.record.is_good()
    }

    /// Records a window that ended without result.
    pub(crate) fn miss(&self) {
        self.record.miss();
    }

    /// Records a wait that ended in sleep after `waited`, measured from its beginning.
    pub(crate) fn slept(&self, waited: Duration, window: Duration) {
        self.record.note(policy::is_short_sleep(waited, window));
    }
}

#[cfg(test)]
mod tests {
    use super::policy::{DISTRUST_MAX, PROCESSOR_LOST_NS, WINDOW_SHORT_WAITS};
    use super::*;

    const WINDOW: Duration = Duration::from_micros(50);
    const SHORT: Duration = Duration::from_micros(10);

    #[test]
    fn short_waits_earn_a_window() {
        let b = BusyPoll::default();
        assert!(!b.is_worth_it());
        for _ in 0..WINDOW_SHORT_WAITS {
            b.slept(SHORT, WINDOW);
        }
        assert!(b.is_worth_it());
        b.record.hit();
        assert!(b.is_worth_it(), "a hit keeps it");
        b.slept(WINDOW * 5, WINDOW);
        assert!(!b.is_worth_it(), "a long wait ends it");
    }

    #[test]
    fn fruitless_windows_become_rare() {
        let b = BusyPoll::default();
        let mut windows = 0;
        // All sleeps are short and no window finds anything, as when both ends share one processor.
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
    fn result_ends_the_window() {
        let b = BusyPoll::default();
        assert!(!b.poll(WINDOW, |_| panic!("nothing was short yet")));
        let trust = || {
            for _ in 0..WINDOW_SHORT_WAITS + DISTRUST_MAX {
                b.slept(SHORT, WINDOW);
            }
        };
        trust();
        assert!(!b.poll(Duration::ZERO, |_| panic!("no window")));
        // The window lasts until there is a result, unless the processor is taken from this thread
        // meanwhile.
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

    /// The result may be there when the thread gets its processor back.
    #[test]
    fn lost_processor_stops_polling() {
        for result in [true, false] {
            let b = BusyPoll::default();
            for _ in 0..WINDOW_SHORT_WAITS {
                b.slept(SHORT, WINDOW);
            }
            let mut looks = 0;
            let found = b.poll(Duration::MAX, |_| {
                looks += 1;
                std::thread::sleep(Duration::from_nanos(PROCESSOR_LOST_NS));
                looks == 2 && result
            });
            assert_eq!((found, looks), (result, 2));
            for _ in 1..DISTRUST_MAX {
                b.slept(SHORT, WINDOW);
                assert!(!b.is_worth_it());
            }
            for _ in 0..=WINDOW_SHORT_WAITS {
                b.slept(SHORT, WINDOW);
            }
            assert!(b.is_worth_it());
        }
    }

    /// The first window needs two short waits. Each fruitless one doubles what the next needs, up
    /// to a limit.
    #[test]
    fn each_fruitless_window_costs_more() {
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

    /// The wake-ups may take most of a sleep, so it is short up to four windows.
    #[test]
    fn sleep_of_some_windows_is_short() {
        for (waited, short) in [
            (WINDOW, true),
            (WINDOW * 4, true),
            (WINDOW * 4 + Duration::from_nanos(1), false),
        ] {
            let b = BusyPoll::default();
            for _ in 0..WINDOW_SHORT_WAITS {
                b.slept(waited, WINDOW);
            }
            assert_eq!(b.is_worth_it(), short, "{waited:?}");
        }
    }
}
