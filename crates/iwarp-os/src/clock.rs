//! The monotonic clock. The runtime passes its time to the sans-I/O crates as the argument `now`.
//!
//! No `unsafe`. `CLOCK_MONOTONIC` is read through the vDSO, in about 20 ns.

use rustix::time::{ClockId, clock_gettime};

/// Returns nanoseconds since an arbitrary fixed point (usually boot). Never goes backwards; wraps
/// after 584 years.
#[inline]
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Both fields are non-negative for this clock, so the casts keep the value.
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::now_ns;
    use std::time::{Duration, Instant};

    #[test]
    fn clock_agrees_with_instant() {
        // `outer` spans all readings and `inner` lies within them, so that delays on a busy machine
        // do not matter.
        let outer = Instant::now();
        let start = now_ns();
        let inner = Instant::now();
        let mut last = start;
        while inner.elapsed() < Duration::from_millis(20) {
            let now = now_ns();
            assert!(now >= last);
            last = now;
        }
        let passed = u128::from(now_ns() - start);
        assert!(
            passed >= Duration::from_millis(20).as_nanos(),
            "{passed} ns"
        );
        assert!(passed <= outer.elapsed().as_nanos(), "{passed} ns");
    }
}
