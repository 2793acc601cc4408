//! Decides after how many empty polls a polling thread yields its processor to other threads.
//!
//! If there are fewer processors than threads (a container, a CI runner, more ranks than cores),
//! the peer that a polling thread waits for may need the same processor. If the thread never
//! yields, the peer gets the processor at the scheduler's next tick, milliseconds later. If the
//! thread yields after each poll, each poll costs twice as much although no other thread needs the
//! processor. The duration of a yield shows whether another thread ran, and each thread sets its
//! pace by the duration of its last yield.

use super::policy;
use super::sync::{thread_local, yield_now};
use crate::sys::clock::now_ns;
use crate::sys::guarded;
use std::cell::Cell;

#[derive(Debug, Clone, Copy)]
struct Pace {
    /// Number of empty polls from one yield to the next.
    every: u32,
    /// Number of empty polls since the last yield.
    polls: u32,
}

impl Pace {
    const fn new() -> Self {
        Self {
            every: policy::YIELD_ALONE,
            polls: 0,
        }
    }

    /// Counts an empty poll, and calls `timed_yield` after each `every` polls. `timed_yield` yields
    /// and returns how long that took.
    #[inline]
    fn count_poll(&mut self, timed_yield: impl FnOnce() -> u64) {
        self.polls += 1;
        if self.polls >= self.every {
            self.polls = 0;
            self.every = policy::yield_every(self.every, timed_yield());
        }
    }
}

thread_local! {
    static PACE: Cell<Pace> = const { Cell::new(Pace::new()) };
}

/// Yields the processor (`sched_yield(2)`) at some calls: at every 4th call if other threads need
/// the processor, at every 64th if none does. Call it after each poll without result. It never
/// sleeps.
#[inline]
pub fn after_empty_poll() {
    // This fails in a thread that is exiting, whose thread-local values were dropped.
    let _ = PACE.try_with(|cell| {
        let mut pace = cell.get();
        pace.count_poll(timed_yield);
        cell.set(pace);
    });
}

/// Returns `true` if other threads needed the processor of the calling thread when it last yielded.
pub(super) fn has_competitors() -> bool {
    PACE.try_with(|cell| policy::is_competing(cell.get().every))
        .unwrap_or(false)
}

#[cold]
fn timed_yield() -> u64 {
    let start = now_ns();
    guarded::keep_regularly(start);
    yield_now();
    now_ns().saturating_sub(start)
}

#[cfg(test)]
mod tests {
    use super::policy::{YIELD_ALONE, YIELD_BESIDE_WORK, YIELD_COMPETING};
    use super::*;

    /// Counts `polls` empty polls, with yields that take `took` each. Returns the number of yields.
    fn yields(pace: &mut Pace, polls: u32, took: u64) -> u32 {
        let mut count = 0;
        for _ in 0..polls {
            pace.count_poll(|| {
                count += 1;
                took
            });
        }
        count
    }

    #[test]
    fn lone_thread_yields_rarely() {
        assert_eq!(yields(&mut Pace::new(), 100 * YIELD_ALONE, 600), 100);
    }

    #[test]
    fn competing_threads_yield_often() {
        let mut pace = Pace::new();
        yields(&mut pace, YIELD_ALONE, 3_000);
        assert_eq!(yields(&mut pace, 100 * YIELD_COMPETING, 3_000), 100);
        // No other thread needs the processor any more: the yields become rarer.
        assert_eq!(yields(&mut pace, 2 * YIELD_ALONE, 600), 5);
        assert_eq!(pace.every, YIELD_ALONE);
    }

    #[test]
    fn thread_beside_computation_yields_rarely() {
        let mut pace = Pace::new();
        yields(&mut pace, 2 * YIELD_BESIDE_WORK, 3_000_000);
        assert_eq!(yields(&mut pace, 10 * YIELD_BESIDE_WORK, 3_000_000), 10);
        yields(&mut pace, YIELD_BESIDE_WORK, 600);
        assert_eq!(pace.every, YIELD_ALONE);
    }

    /// A yield enters the kernel, which takes more than a nanosecond.
    #[test]
    fn yield_is_timed() {
        let start = now_ns();
        let longest = (0..100).map(|_| timed_yield()).max().unwrap();
        assert!((2..=now_ns() - start).contains(&longest), "{longest}");
    }
}
