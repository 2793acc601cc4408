//! Records many short durations in constant memory.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Longest recorded duration, in nanoseconds: 100 s. Longer durations are recorded as 100 s.
const LONGEST: u64 = 100_000_000_000;
/// Significant digits of each recorded duration.
const DIGITS: u8 = 3;

/// Durations of operations. Recording allocates no memory and takes constant time, so it may be
/// part of a measured loop. The figures are exact to a thousandth.
#[derive(Debug, Clone)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// Creates an empty collection.
    #[must_use]
    #[expect(
        clippy::missing_panics_doc,
        reason = "the bounds are constants, which a test covers"
    )]
    pub fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST, DIGITS).expect("these bounds are valid"))
    }

    /// Removes all durations. Keeps the memory.
    pub fn clear(&mut self) {
        self.0.reset();
    }

    /// Adds a duration.
    pub fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(LONGEST);
        self.0.saturating_record(ns);
    }

    /// Returns the number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns the quantile `share` (0 to 1) in microseconds, or `None` if nothing was recorded.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> Option<f64> {
        // The middle represents all durations that the histogram does not distinguish.
        let ns = |hist: &Histogram<u64>| hist.median_equivalent(hist.value_at_quantile(share));
        (!self.0.is_empty()).then(|| ns(&self.0) as f64 / 1e3)
    }

    /// Returns the mean in microseconds, or `None` if nothing was recorded.
    #[must_use]
    pub fn mean_us(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.mean() / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_match_the_sorted_list() {
        // A fixed scrambled sequence with a long tail.
        let mut x = 12345u64;
        let mut all: Vec<u64> = (0..20_000)
            .map(|_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                2_000 + (x >> 52) + if x >> 60 == 0 { x >> 44 } else { 0 }
            })
            .collect();
        let mut latencies = Latencies::new();
        for &ns in &all {
            latencies.record(Duration::from_nanos(ns));
        }
        all.sort_unstable();
        assert_eq!(latencies.count(), 20_000);
        let close = |got: Option<f64>, exact: f64| (got.unwrap() * 1e3 / exact - 1.0).abs() < 1e-3;
        for share in [0.0, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let exact = all[((share * 20_000.0f64).ceil() as usize).max(1) - 1] as f64;
            let got = latencies.quantile_us(share);
            assert!(close(got, exact), "{share}: {got:?} instead of {exact} ns");
        }
        let mean = all.iter().sum::<u64>() as f64 / 20_000.0;
        assert!(close(latencies.mean_us(), mean));
        latencies.clear();
        assert_eq!(
            (latencies.quantile_us(0.5), latencies.mean_us()),
            (None, None)
        );
    }

    #[test]
    fn extreme_times_are_counted() {
        let mut latencies = Latencies::default();
        latencies.record(Duration::ZERO);
        latencies.record(Duration::MAX);
        assert_eq!(latencies.count(), 2);
        assert!(latencies.quantile_us(0.0).unwrap() < 0.002);
        assert!((latencies.quantile_us(1.0).unwrap() / 1e8 - 1.0).abs() < 1e-3);
    }
}
