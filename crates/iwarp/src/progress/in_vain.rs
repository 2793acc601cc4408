//! Polling threads yield their processor to other threads now and then.
//!
//! Where there are fewer processors than threads (a container, a CI runner, more ranks than cores), the peer that a polling thread
//! waits for may need this very processor. If the thread never yields, the peer gets the processor at the scheduler's next tick,
//! milliseconds later. Each loop that polls counts its looks without result and calls one of these functions.

/// Looks without result between two yields of a thread that polls. A yield that no thread uses costs about as much as a look.
const POLLING: u32 = 16;
/// The same for a thread that polls for a moment before it sleeps. Without that poll the processor would be free at once, so the
/// thread yields earlier. With 16, threads that wait for each other on one processor take twice as long (`bench/one-connection.md`).
const BEFORE_SLEEP: u32 = 4;

/// Yields the processor (`sched_yield(2)`) at every 16th look without result. Call it after each of them with the number of
/// looks without result before. It never sleeps.
#[inline]
pub fn looked_in_vain(looks: u32) {
    offer(looks, POLLING);
}

/// Does the same at every 4th look, for a thread that polls for a moment and then sleeps.
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
