//! A thread that spins offers its processor to others from time to time.
//!
//! Where there are fewer processors than threads (a container, a CI runner, more ranks than cores), what a spinning thread waits
//! for may need this very processor. Without an offer it gets it at the scheduler's tick only, after milliseconds.
//! The rule is here alone; everything that spins counts its looks in vain and asks it.

/// Looks in vain between two offers. An offer that nobody takes costs as much as about one look; with 16 both ends of a
/// connection on one processor wait 4 µs for each other, and on two processors no difference was seen (`bench/one-connection.md`).
const OFFER_EVERY: u32 = 16;

/// Call this after each look that found nothing, with the number of such looks so far. Every 16th call yields the processor
/// (`sched_yield(2)`); it never sleeps.
#[inline]
pub fn looked_in_vain(looks: u32) {
    if looks % OFFER_EVERY == OFFER_EVERY - 1 {
        std::thread::yield_now();
    }
}
