//! Whether to look for a while before going to sleep.
//!
//! A sleep and the wake-up from it cost more than a short round trip takes. A thread that expects its completion soon
//! therefore polls for a window before it sleeps; one that has been disappointed sleeps at once. Each queue learns from
//! its own waits: those that end soon speak for polling, whether it polled or slept, and a window spent in vain speaks
//! against it, the louder the more often it happens in a row.
//!
//! The counters are hints. They are read and written without order, and a lost update costs a window at most.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Short waits in a row before the first window.
const TRUST: u32 = 2;
/// A wait that ended in sleep was short if it took at most so many windows: most of it may have been wake-ups, of this
/// thread and of the peer's.
const SLEEPY: u32 = 4;
/// Most that a row of windows in vain can ask for.
const DISTRUST_MAX: u32 = 1024;

/// What the waits of one queue have taught.
#[derive(Debug, Default)]
pub(crate) struct BusyPoll {
    /// Short waits in a row.
    short: AtomicU32,
    /// How many of those it takes, beyond [`TRUST`].
    distrust: AtomicU32,
}

impl BusyPoll {
    /// Is it worth polling before the next sleep?
    #[inline]
    pub(crate) fn is_worth_it(&self) -> bool {
        let need = TRUST + self.distrust.load(Ordering::Relaxed);
        self.short.load(Ordering::Relaxed) >= need
    }

    /// A wait ended while polling.
    #[inline]
    pub(crate) fn hit(&self) {
        if self.distrust.load(Ordering::Relaxed) != 0 {
            self.distrust.store(0, Ordering::Relaxed);
        }
    }

    /// A window was spent in vain.
    pub(crate) fn miss(&self) {
        let distrust = self.distrust.load(Ordering::Relaxed);
        let more = (distrust * 2 + 2).min(DISTRUST_MAX);
        self.distrust.store(more, Ordering::Relaxed);
        self.short.store(0, Ordering::Relaxed);
    }

    /// A wait ended in sleep after `waited`, measured from its begin.
    pub(crate) fn slept(&self, waited: Duration, window: Duration) {
        if waited <= window * SLEEPY {
            let short = self.short.load(Ordering::Relaxed);
            self.short.store(short.saturating_add(1), Ordering::Relaxed);
        } else {
            self.short.store(0, Ordering::Relaxed);
        }
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
        b.hit();
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
        b.hit();
        b.slept(WINDOW * 5, WINDOW);
        b.slept(SHORT, WINDOW);
        b.slept(SHORT, WINDOW);
        assert!(b.is_worth_it(), "one hit forgives");
    }
}
