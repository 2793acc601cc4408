//! A thread that polls offers its processor to other threads now and then.
//!
//! Where there are fewer processors than threads (a container, a CI runner, more ranks than cores), the peer that a polling thread
//! waits for may need this very processor. Without an offer the peer gets it at the scheduler's tick only, which is milliseconds
//! later. The rule stands here alone: each loop that polls counts its looks without result and calls one of these functions.

/// Looks without result between two offers of a thread that polls. An offer that nobody takes costs about as much as a look.
const POLLING: u32 = 16;
/// The same for a thread that polls for a moment before it sleeps. It would have given the processor away at once, so it offers
/// it earlier; with 16, threads that wait for each other on one processor need twice as long (`bench/one-connection.md`).
const BEFORE_SLEEP: u32 = 4;

/// Call this after each look without result, with the number of such looks before it. At every 16th it yields the processor
/// (`sched_yield(2)`). It never sleeps.
#[inline]
pub fn looked_in_vain(looks: u32) {
    offer(looks, POLLING);
}

/// The same for a thread that is going to sleep soon, which yields at every 4th look.
#[inline]
pub(crate) fn looked_before_sleep(looks: u32) {
    offer(looks, BEFORE_SLEEP);
}

#[inline]
fn offer(looks: u32, every: u32) {
    if looks % every == every - 1 {
        std::thread::yield_now();
    }
}
