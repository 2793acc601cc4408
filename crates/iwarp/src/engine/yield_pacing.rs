//! Lets polling threads yield their processor to other threads now and then.
//!
//! Where there are fewer processors than threads (a container, a CI runner, more ranks than cores),
//! the peer that a polling thread waits for may need this very processor. If the thread never
//! yields, the peer gets the processor at the scheduler's next tick, milliseconds later. If it
//! always yields, each poll costs twice as much while no other thread needs the processor. The
//! duration of a yield reveals which of the two holds: each thread sets its own pace by its last
//! yields.

use super::policy;
use super::sync::{thread_local, yield_now};
use crate::sys::clock::now_ns;
use crate::sys::guarded;
use std::cell::Cell;

#[derive(Debug, Clone, Copy)]
struct Pace {
    every: u32,
    polls: u32,
}

impl Pace {
    const fn new() -> Self {
        Self {
            every: policy::YIELD_ALONE,
            polls: 0,
        }
    }

    /// Counts an empty poll, and yields if it is time. `offer` yields and returns how long that
    /// took.
    #[inline]
    fn count_poll(&mut self, offer: impl FnOnce() -> u64) {
        self.polls += 1;
        if self.polls >= self.every {
            self.polls = 0;
            self.every = policy::yield_every(self.every, offer());
        }
    }
}

thread_local! {
    static PACE: Cell<Pace> = const { Cell::new(Pace::new()) };
}

/// Yields the processor (`sched_yield(2)`) now and then: at every 4th call if other threads take
/// it, at every 64th if none does. Call it after each poll without result. It never sleeps.
#[inline]
pub fn after_empty_poll() {
    // The pace of a thread that is ending is gone.
    let _ = PACE.try_with(|cell| {
        let mut pace = cell.get();
        pace.count_poll(offer);
        cell.set(pace);
    });
}

/// Yields, and returns how long that took.
#[cold]
fn offer() -> u64 {
    let begin = now_ns();
    guarded::keep_regularly(begin);
    yield_now();
    now_ns().saturating_sub(begin)
}

#[cfg(test)]
mod tests {
    use super::policy::{YIELD_ALONE, YIELD_BESIDE_WORK, YIELD_COMPETING};
    use super::*;

    /// Counts `polls` empty polls, where each yield takes `took`. Returns the number of yields.
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
        // The others are gone: a few more yields, at growing distances.
        assert_eq!(yields(&mut pace, 2 * YIELD_ALONE, 600), 5);
        assert_eq!(pace.every, YIELD_ALONE);
    }

    #[test]
    fn scheduler_serves_computing_thread() {
        let mut pace = Pace::new();
        yields(&mut pace, 2 * YIELD_BESIDE_WORK, 3_000_000);
        assert_eq!(yields(&mut pace, 10 * YIELD_BESIDE_WORK, 3_000_000), 10);
        // The work is done.
        yields(&mut pace, YIELD_BESIDE_WORK, 600);
        assert_eq!(pace.every, YIELD_ALONE);
    }

    /// A yield enters the kernel, which takes more than a nanosecond.
    #[test]
    fn yield_is_timed() {
        let begin = now_ns();
        let longest = (0..100).map(|_| offer()).max().unwrap();
        assert!((2..=now_ns() - begin).contains(&longest), "{longest}");
    }
}
