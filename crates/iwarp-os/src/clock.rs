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
    use super::*;

    #[test]
    fn nanoseconds_of_monotonic_clock() {
        let reading = || {
            let now = clock_gettime(ClockId::Monotonic);
            std::time::Duration::new(now.tv_sec as u64, now.tv_nsec as u32).as_nanos()
        };
        for _ in 0..1000 {
            let (before, now, after) = (reading(), u128::from(now_ns()), reading());
            assert!(before <= now && now <= after, "{before} {now} {after}");
        }
    }
}
