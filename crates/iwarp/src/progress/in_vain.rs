//! Polling threads yield their processor to other threads now and then.
//!
//! Where there are fewer processors than threads (a container, a CI runner, more ranks than cores), the peer that a polling thread
//! waits for may need this very processor. If the thread never yields, the peer gets the processor at the scheduler's next tick,
//! milliseconds later. If it always yields, each look costs twice as much while nobody needs the processor. How long a yield takes
//! tells which of the two it is: so each thread sets its own pace by its last yields.

use super::sync::{thread_local, yield_now};
use crate::sys::clock::now_ns;
use crate::sys::guarded;
use std::cell::Cell;

/// Looks without result between two yields while no other thread wants the processor.
const ALONE: u32 = 64;
/// The same while others take it. With 1, two ends on one processor move little at a time: 64 KiB messages were a third slower, and
/// short ones as well.
const COMPETING: u32 = 4;
/// The same, at most, if the thread that had it instead worked for long: it waits for nothing from here, and takes its turns by itself.
const BESIDE_WORK: u32 = 4096;
/// A yield that takes longer, in nanoseconds, has let another thread run.
const SWITCHED: u64 = 1_500;
/// So long works a thread, in nanoseconds, that does not just answer: about until the scheduler takes the processor from it.
const WORKED: u64 = 2_000_000;

/// When a thread yields.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// Looks from one yield to the next.
    every: u32,
    /// Looks since the last one.
    looks: u32,
}

impl Pace {
    const fn new() -> Self {
        Self {
            every: ALONE,
            looks: 0,
        }
    }

    /// Counts a look without result, and yields if it is time. `offer` yields and returns how long that took.
    #[inline]
    fn look(&mut self, offer: impl FnOnce() -> u64) {
        self.looks += 1;
        if self.looks >= self.every {
            self.looks = 0;
            self.every = match offer() {
                ..SWITCHED => (self.every * 2).min(ALONE),
                SWITCHED..WORKED => COMPETING,
                WORKED.. => (self.every * 8).clamp(ALONE, BESIDE_WORK),
            };
        }
    }
}

thread_local! {
    static PACE: Cell<Pace> = const { Cell::new(Pace::new()) };
}

/// Yields the processor (`sched_yield(2)`) now and then: at every 4th call if other threads take it, at every 64th if none does. Call it
/// after each look without result. It never sleeps.
#[inline]
pub fn looked_in_vain() {
    // A thread that is ending has no pace any more.
    let _ = PACE.try_with(|cell| {
        let mut pace = cell.get();
        pace.look(offer);
        cell.set(pace);
    });
}

/// Yields, and returns how long that took.
#[cold]
fn offer() -> u64 {
    guarded::keep();
    let begin = now_ns();
    yield_now();
    now_ns().saturating_sub(begin)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks so often, where each yield takes `took`. Returns the number of yields.
    fn yields(pace: &mut Pace, looks: u32, took: u64) -> u32 {
        let mut count = 0;
        for _ in 0..looks {
            pace.look(|| {
                count += 1;
                took
            });
        }
        count
    }

    #[test]
    fn who_is_alone_yields_rarely() {
        assert_eq!(yields(&mut Pace::new(), 100 * ALONE, 600), 100);
    }

    #[test]
    fn who_is_waited_for_yields_often() {
        let mut pace = Pace::new();
        yields(&mut pace, ALONE, 3_000);
        assert_eq!(yields(&mut pace, 100 * COMPETING, 3_000), 100);
        // The others are gone: a few more, further and further apart.
        assert_eq!(yields(&mut pace, 2 * ALONE, 600), 5);
        assert_eq!(pace.every, ALONE);
    }

    #[test]
    fn beside_work_the_scheduler_decides() {
        let mut pace = Pace::new();
        yields(&mut pace, 2 * BESIDE_WORK, 3_000_000);
        assert_eq!(yields(&mut pace, 10 * BESIDE_WORK, 3_000_000), 10);
        // The work is done.
        yields(&mut pace, BESIDE_WORK, 600);
        assert_eq!(pace.every, ALONE);
    }

    /// A yield enters the kernel, which takes its time.
    #[test]
    fn a_yield_is_timed() {
        let begin = now_ns();
        let longest = (0..100).map(|_| offer()).max().unwrap();
        assert!((2..=now_ns() - begin).contains(&longest), "{longest}");
    }
}
