//! The timers of an engine.

use super::sync::parking::Mutex;
use std::collections::BTreeSet;

/// A timer: its time in nanoseconds of the monotonic clock, the token of its source, and its kind.
pub(super) type Timer = (u64, u64, u32);

/// Timers in the order of their times. They are not cancelled, so there may be many. A tree
/// allocates small pieces, which the C libraries serve from their reserve when memory is exhausted.
/// A heap would have to be copied to a block of twice the size.
#[derive(Default)]
pub(super) struct Timers(Mutex<BTreeSet<Timer>>);

impl Timers {
    /// Sets a timer. Returns `true` if it is now the first one.
    pub(super) fn set(&self, timer: Timer) -> bool {
        let mut timers = self.0.lock();
        let is_first = timers.first().is_none_or(|(at, ..)| timer.0 < *at);
        timers.insert(timer);
        is_first
    }

    /// Takes the first timer if it has expired at `now`.
    pub(super) fn take_due(&self, now: u64) -> Option<Timer> {
        let mut timers = self.0.lock();
        let is_due = timers.first().is_some_and(|(at, ..)| *at <= now);
        is_due.then(|| timers.pop_first()).flatten()
    }

    /// Returns the time of the first timer for which `wanted` holds, and drops those before it.
    /// `wanted` is called without the lock, because sources set timers under their own locks.
    pub(super) fn first(&self, wanted: impl Fn(&Timer) -> bool) -> Option<u64> {
        loop {
            let first = *self.0.lock().first()?;
            if wanted(&first) {
                return Some(first.0);
            }
            self.0.lock().remove(&first);
        }
    }
}
