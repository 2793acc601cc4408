//! A log-linear histogram of nanoseconds: constant memory, constant time, less than 0.4 % error per value.
//!
//! Latency distributions have long tails; keeping every sample would cost memory bandwidth in the measured loop.

/// Values below this are kept exactly.
const EXACT: usize = 256;
/// Linear steps per power of two above that.
const STEPS: usize = 128;
/// Powers of two from 2^8 to 2^63.
const OCTAVES: usize = 56;

/// Histogram of `u64` values.
#[derive(Debug, Clone)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    min: u64,
    max: u64,
}

impl Histogram {
    /// An empty histogram; the only allocation it ever makes.
    pub(crate) fn new() -> Self {
        Self {
            counts: vec![0; EXACT + STEPS * OCTAVES],
            total: 0,
            min: u64::MAX,
            max: 0,
        }
    }

    /// Forgets everything, keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.counts.fill(0);
        (self.total, self.min, self.max) = (0, u64::MAX, 0);
    }

    /// Adds one value.
    pub(crate) fn record(&mut self, v: u64) {
        if let Some(c) = self.counts.get_mut(index(v)) {
            *c += 1;
        }
        self.total += 1;
        self.min = self.min.min(v);
        self.max = self.max.max(v);
    }

    /// Number of values.
    pub(crate) fn len(&self) -> u64 {
        self.total
    }

    /// The value below or at which a share `q` (0–1) of all values lies; `None` when empty.
    pub(crate) fn quantile(&self, q: f64) -> Option<u64> {
        if self.total == 0 {
            return None;
        }
        let rank = ((q.clamp(0.0, 1.0) * self.total as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (i, &c) in self.counts.iter().enumerate() {
            seen += c;
            if seen >= rank {
                return Some(middle(i).clamp(self.min, self.max));
            }
        }
        Some(self.max)
    }
}

fn index(v: u64) -> usize {
    if v < EXACT as u64 {
        return v as usize;
    }
    let octave = 63 - v.leading_zeros() as usize;
    let step = (v >> (octave - 7)) as usize & (STEPS - 1);
    EXACT + (octave - 8) * STEPS + step
}

/// The value in the middle of a bucket.
fn middle(i: usize) -> u64 {
    if i < EXACT {
        return i as u64;
    }
    let (octave, step) = ((i - EXACT) / STEPS + 8, (i - EXACT) % STEPS);
    let width = 1u64 << (octave - 7);
    ((STEPS + step) as u64) * width + width / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bucket_holds_its_own_middle() {
        for i in 0..EXACT + STEPS * OCTAVES {
            assert_eq!(index(middle(i)), i);
        }
        assert_eq!(index(u64::MAX), EXACT + STEPS * OCTAVES - 1);
    }

    #[test]
    fn values_are_within_four_per_mille() {
        let mut v = 1u64;
        while v < 1 << 50 {
            let err = (middle(index(v)) as f64 - v as f64).abs() / v as f64;
            assert!(err <= 0.004, "{v}: {err}");
            v += v / 97 + 1;
        }
    }

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
        let mut h = Histogram::new();
        all.iter().for_each(|&v| h.record(v));
        all.sort_unstable();
        assert_eq!(h.len(), 20_000);
        for q in [0.0, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let exact = all[((q * 20_000.0f64).ceil() as usize).max(1) - 1] as f64;
            let got = h.quantile(q).unwrap() as f64;
            assert!(
                (got - exact).abs() / exact < 0.008,
                "q {q}: {got} instead of {exact}"
            );
        }
        h.clear();
        assert_eq!(h.quantile(0.5), None);
    }
}
