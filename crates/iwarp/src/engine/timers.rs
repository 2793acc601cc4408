//! The timers of an engine.

use crate::progress::sync::parking::Mutex;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A timer: when it expires, in nanoseconds of the monotonic clock, the token of its source, and what the source calls it.
pub(super) type Timer = (u64, u64, u32);

/// Timers in the order in which they expire. They are not cancelled.
#[derive(Default)]
pub(super) struct Timers(Mutex<BinaryHeap<Reverse<Timer>>>);

impl Timers {
    /// Sets one. Returns `true` if it is now the first one.
    pub(super) fn set(&self, timer: Timer) -> bool {
        let mut timers = self.0.lock();
        let first = timers.peek().is_none_or(|Reverse((at, ..))| timer.0 < *at);
        timers.push(Reverse(timer));
        first
    }

    /// Takes the first one if it has expired at `now`.
    pub(super) fn take_due(&self, now: u64) -> Option<Timer> {
        let mut timers = self.0.lock();
        let due = timers.peek().is_some_and(|Reverse((at, ..))| *at <= now);
        due.then(|| timers.pop())
            .flatten()
            .map(|Reverse(timer)| timer)
    }

    /// Returns the time of the first one for which `wanted` holds, and drops those before it. `wanted` is called without the
    /// lock, because sources set timers under theirs.
    pub(super) fn first(&self, wanted: impl Fn(&Timer) -> bool) -> Option<u64> {
        loop {
            let Reverse(first) = *self.0.lock().peek()?;
            if wanted(&first) {
                return Some(first.0);
            }
            let mut timers = self.0.lock();
            if timers.peek() == Some(&Reverse(first)) {
                timers.pop();
            }
        }
    }
}
