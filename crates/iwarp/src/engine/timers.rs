//! The timers of an engine.

use super::sync::parking::Mutex;
use std::collections::BTreeSet;

/// A timer: the time when it expires, in nanoseconds of the monotonic clock; the token of its
/// source; and its kind.
pub(super) type Timer = (u64, u64, u32);

/// Timers in the order of their times. They are not cancelled, so there may be many. A tree
/// allocates small blocks, which the reserve of the C libraries can provide when memory is
/// exhausted. A heap would need a new block of twice the size.
#[derive(Default)]
pub(super) struct Timers(Mutex<BTreeSet<Timer>>);

impl Timers {
    /// Sets a timer. Returns `true` if no other timer expires earlier or at the same time.
    pub(super) fn set(&self, timer: Timer) -> bool {
        let mut timers = self.0.lock();
        let is_first = timers.first().is_none_or(|(at, ..)| timer.0 < *at);
        timers.insert(timer);
        is_first
    }

    /// Removes and returns the first timer if it has expired at `now`.
    pub(super) fn take_due(&self, now: u64) -> Option<Timer> {
        let mut timers = self.0.lock();
        let is_due = timers.first().is_some_and(|(at, ..)| *at <= now);
        is_due.then(|| timers.pop_first()).flatten()
    }

    /// Returns the time of the first timer for which `is_needed` returns `true`, and drops the
    /// timers before it. `is_needed` is called without the lock, because it may take a source's
    /// lock, and sources set timers while they hold theirs.
    pub(super) fn first(&self, is_needed: impl Fn(&Timer) -> bool) -> Option<u64> {
        loop {
            let first = *self.0.lock().first()?;
            if is_needed(&first) {
                return Some(first.0);
            }
            self.0.lock().remove(&first);
        }
    }
}
