//! Time. The RNIC has no clock: the caller passes the time, and asks when the next call is due.

use core::time::Duration;

/// A point in time: nanoseconds since an arbitrary start of the caller's monotonic clock. The range
/// is 584 years.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    /// The start of the caller's clock; no time is earlier.
    pub const ZERO: Self = Self(0);

    /// The latest time: a timer set to it never expires.
    pub const NEVER: Self = Self(u64::MAX);

    /// Converts nanoseconds of the caller's clock.
    #[inline]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns the nanoseconds of the caller's clock.
    #[inline]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the time `wait` later, at most [`NEVER`](Self::NEVER).
    pub const fn after(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(nanos(wait)))
    }

    /// Like [`after`](Self::after), but up to a quarter of `wait` later. The rounding lets objects
    /// with the same wait share one timer.
    pub const fn after_about(self, wait: Duration) -> Self {
        let at = self.after(wait);
        let step = nanos(wait) / 4;
        match at.0.checked_rem(step) {
            None | Some(0) => at,
            Some(remainder) => Self(at.0.saturating_add(step.wrapping_sub(remainder))),
        }
    }

    /// Returns the time since `earlier`, zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

const fn nanos(wait: Duration) -> u64 {
    wait.as_secs()
        .saturating_mul(1_000_000_000)
        .saturating_add(wait.subsec_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn time_saturates_at_never() {
        let near_end = Time::from_nanos(u64::MAX - 5);
        let end = Time::from_nanos(u64::MAX);
        assert_eq!(near_end.after(Duration::from_nanos(5)), end);
        for wait in [Duration::from_secs(1), Duration::MAX] {
            assert_eq!(
                (near_end.after(wait), near_end.after_about(wait)),
                (end, end)
            );
        }
        assert_eq!(
            Time::ZERO.after_about(Duration::from_nanos(3)).as_nanos(),
            3
        );
    }

    proptest! {
        #[test]
        fn after_about_rounds_up_by_a_quarter(now in 0u64..1 << 60, wait in 0u64..1 << 40) {
            let (now, wait) = (Time::from_nanos(now), Duration::from_nanos(wait));
            let waited = now.after_about(wait).since(now);
            prop_assert!(waited >= wait && waited <= wait + wait / 4);
        }
    }
}
