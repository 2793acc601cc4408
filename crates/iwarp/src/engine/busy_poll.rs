//! Decides whether a thread polls for a while before it sleeps.
//!
//! A sleep and its wake-up take longer than a short round trip. A thread that expects its
//! completion soon therefore polls for a window of time before it sleeps. Each queue learns from
//! its own waits. A short wait is a reason to poll, whether the thread polled or slept. A window
//! without result is a reason to sleep, and each further one is a stronger reason.
//!
//! If a polling thread loses its processor for long, processors are scarce. Polling then takes them
//! from programs that have work, and the scheduler takes them back for milliseconds at a time. A
//! sleeping thread is woken at once, so most waits sleep from then on.
//!
//! The counters are hints, accessed with relaxed ordering. A lost update costs one window at most.

use super::policy;
use super::sync::{AtomicU32, Ordering};
use super::yield_pacing::after_empty_poll;
use crate::sys::clock::now_ns;
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Record {
    /// Short waits in a row.
    short: AtomicU32,
    /// Number of short waits required for the next window, in addition to
    /// [`policy::WINDOW_SHORT_WAITS`]. Windows without result increase it.
    distrust: AtomicU32,
}

impl Record {
    #[inline]
    pub(super) fn earns_window(&self) -> bool {
        let distrust = self.distrust.load(Ordering::Relaxed);
        policy::earns_window(self.short.load(Ordering::Relaxed), distrust)
    }

    /// Records a window that ended with a result.
    #[inline]
    pub(super) fn hit(&self) {
        if self.distrust.load(Ordering::Relaxed) != 0 {
            self.distrust.store(0, Ordering::Relaxed);
        }
    }

    /// Records a window that ended without result.
    pub(super) fn miss(&self) {
        let distrust = self.distrust.load(Ordering::Relaxed);
        self.reset(policy::distrust_after_miss(distrust));
    }

    fn reset(&self, distrust: u32) {
        self.distrust.store(distrust, Ordering::Relaxed);
        self.short.store(0, Ordering::Relaxed);
    }

    pub(super) fn record_wait(&self, was_short: bool) {
        let in_a_row = match was_short {
            true => self.short.load(Ordering::Relaxed).saturating_add(1),
            false => 0,
        };
        self.short.store(in_a_row, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct BusyPoll {
    record: Record,
}

impl BusyPoll {
    /// Calls `check` with the current time until it returns `true`, for at most `window`. Returns
    /// `true` if `check` did. If polling is not worth it, returns `false` at once.
    pub(crate) fn poll(&self, window: Duration, mut check: impl FnMut(u64) -> bool) -> bool {
        if window.is_zero() || !self.is_worth_it() {
            return false;
        }
        let mut now = now_ns();
        let deadline = now.saturating_add(u64::try_from(window.as_nanos()).unwrap_or(u64::MAX));
        loop {
            if check(now) {
                self.record.hit();
                return true;
            }
            after_empty_poll();
            let before = std::mem::replace(&mut now, now_ns());
            if policy::has_lost_processor(now.saturating_sub(before)) {
                self.record.reset(policy::DISTRUST_MAX);
                return check(now);
            }
            if now >= deadline {
                self.miss();
                return false;
            }
        }
    }

    #[inline]
    pub(crate) fn is_worth_it(&self) -> bool {
        self.record.earns_window()
    }

    pub(crate) fn miss(&self) {
        self.record.miss();
    }

    /// Records that a wait slept, and lasted `waited`.
    pub(crate) fn record_sleep(&self, waited: Duration, window: Duration) {
        self.record
            .record_wait(policy::is_short_sleep(waited, window));
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
            b.record_sleep(SHORT, WINDOW);
        }
        assert!(b.is_worth_it());
        b.record.hit();
        assert!(b.is_worth_it(), "after a hit, the next wait polls, too");
        b.record_sleep(WINDOW * 5, WINDOW);
        assert!(!b.is_worth_it(), "after a long wait, the next wait sleeps");
    }

    #[test]
    fn fruitless_windows_become_rare() {
        let b = BusyPoll::default();
        let mut windows = 0;
        // All sleeps are short and all windows end without result. This happens if both ends share
        // one processor.
        for _ in 0..10_000 {
            if b.is_worth_it() {
                windows += 1;
                b.miss();
            } else {
                b.record_sleep(SHORT, WINDOW);
            }
        }
        assert!((5..40).contains(&windows), "{windows}");
        while !b.is_worth_it() {
            b.record_sleep(SHORT, WINDOW);
        }
        b.record.hit();
        b.record_sleep(WINDOW * 5, WINDOW);
        b.record_sleep(SHORT, WINDOW);
        b.record_sleep(SHORT, WINDOW);
        assert!(b.is_worth_it(), "one hit clears the distrust");
    }

    #[test]
    fn result_ends_the_window() {
        let b = BusyPoll::default();
        assert!(!b.poll(WINDOW, |_| panic!("nothing was short yet")));
        let trust = || {
            for _ in 0..WINDOW_SHORT_WAITS + DISTRUST_MAX {
                b.record_sleep(SHORT, WINDOW);
            }
        };
        trust();
        assert!(!b.poll(Duration::ZERO, |_| panic!("no window")));
        // Polling goes on until the third check has a result, unless this thread loses its
        // processor. Then the test tries again.
        let third_check_ends = || {
            trust();
            let mut checks = 0;
            b.poll(Duration::MAX, |_| {
                checks += 1;
                checks == 3
            })
        };
        assert!((0..100).any(|_| third_check_ends()));
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

    #[test]
    fn lost_processor_stops_polling() {
        for result in [true, false] {
            let b = BusyPoll::default();
            for _ in 0..WINDOW_SHORT_WAITS {
                b.record_sleep(SHORT, WINDOW);
            }
            let mut checks = 0;
            let found = b.poll(Duration::MAX, |_| {
                checks += 1;
                std::thread::sleep(Duration::from_nanos(PROCESSOR_LOST_NS));
                checks == 2 && result
            });
            assert_eq!((found, checks), (result, 2));
            for _ in 1..DISTRUST_MAX {
                b.record_sleep(SHORT, WINDOW);
                assert!(!b.is_worth_it());
            }
            for _ in 0..=WINDOW_SHORT_WAITS {
                b.record_sleep(SHORT, WINDOW);
            }
            assert!(b.is_worth_it());
        }
    }

    /// The first window requires two short waits. After each window without result, the next one
    /// requires twice as many, up to a limit.
    #[test]
    fn each_fruitless_window_costs_more() {
        let b = BusyPoll::default();
        for waits in [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1026, 1026] {
            for wait in 0..waits {
                assert!(!b.is_worth_it(), "{wait} of {waits}");
                b.record_sleep(SHORT, WINDOW);
            }
            assert!(b.is_worth_it(), "{waits}");
            b.miss();
        }
    }

    /// Wake-ups may take most of a sleep, so a sleep of up to four windows is short.
    #[test]
    fn sleep_of_four_windows_is_short() {
        for (waited, short) in [
            (WINDOW, true),
            (WINDOW * 4, true),
            (WINDOW * 4 + Duration::from_nanos(1), false),
        ] {
            let b = BusyPoll::default();
            for _ in 0..WINDOW_SHORT_WAITS {
                b.record_sleep(waited, WINDOW);
            }
            assert_eq!(b.is_worth_it(), short, "{waited:?}");
        }
    }
}
