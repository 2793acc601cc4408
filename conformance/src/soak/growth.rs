//! Samples memory, descriptors and threads of both processes between disturbances, and checks that
//! they do not grow.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

use super::end::End;
use super::network::Side;

/// Resource usage of a process at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sample {
    /// Resident memory, in KiB.
    pub(super) rss: u64,
    /// Bytes allocated with malloc, as the process reports, without blocks of 64 KiB and more.
    pub(super) heap: u64,
    pub(super) descriptors: u64,
    pub(super) threads: u64,
}

/// Number of initial samples that are ignored, because queues and pools still grow.
const WARM_UP: usize = 4;
/// Tolerated growth of resident memory, in KiB. Pools keep their largest size, and the allocator
/// keeps freed memory.
const SLACK_KIB: u64 = 16 << 10;
/// Tolerated growth of allocated bytes. Lists keep their largest capacity.
const SLACK_HEAP: u64 = 128 << 10;
/// Tolerated growth of descriptors. Some connections close in the background.
const SLACK_DESCRIPTORS: u64 = 4;

/// All samples, by side and process number.
#[derive(Default)]
pub(super) struct Growth(BTreeMap<(&'static str, u64), Vec<Sample>>);

impl Growth {
    pub(super) fn measure(&mut self, ends: &[End; 2]) -> Result<()> {
        for end in ends {
            let key = (end.side().name(), end.process_number());
            self.0.entry(key).or_default().push(sample(end)?);
        }
        Ok(())
    }

    /// Fails if the resource usage of a process has grown.
    pub(super) fn check(&self) -> Result<()> {
        for ((side, number), samples) in &self.0 {
            let Some(more) = grown(samples) else { continue };
            let heap: Vec<_> = samples.iter().map(|s| s.heap >> 10).collect();
            bail!(
                "{side} process {number}: resource usage has grown: {more}; \
                 allocated KiB over time: {heap:?}"
            );
        }
        Ok(())
    }

    /// Returns the samples of this side's longest-lived process.
    pub(super) fn longest(&self, side: Side) -> &[Sample] {
        let of_side = self.0.iter().filter(|((name, _), _)| *name == side.name());
        of_side
            .map(|(_, samples)| samples.as_slice())
            .max_by_key(|samples| samples.len())
            .unwrap_or_default()
    }
}

/// Returns a description of the first value that has grown between the first and the last samples.
fn grown(samples: &[Sample]) -> Option<String> {
    let samples = samples
        .get(WARM_UP..)
        .filter(|samples| samples.len() >= 8)?;
    let ends = |n: usize| (&samples[..n], &samples[samples.len() - n..]);
    let largest =
        |from: &[Sample], value: fn(&Sample) -> u64| from.iter().map(value).max().unwrap_or(0);
    let smallest =
        |from: &[Sample], value: fn(&Sample) -> u64| from.iter().map(value).min().unwrap_or(0);
    // Compares the largest of the first three samples with the smallest of the last three, so that
    // a peak does not count as growth.
    let without_peaks = |value: fn(&Sample) -> u64| {
        let (first, last) = ends(3);
        (largest(first, value), smallest(last, value))
    };
    // For values that fluctuate, compares the minima of the first and the last third, which reveal
    // even slow growth.
    let minima = |value: fn(&Sample) -> u64| {
        let (first, last) = ends((samples.len() / 3).max(3));
        (smallest(first, value), smallest(last, value))
    };
    let (was, is) = without_peaks(|sample| sample.rss);
    if is > was + SLACK_KIB {
        return Some(format!("{was} to {is} KiB of memory"));
    }
    let (was, is) = minima(|sample| sample.heap);
    if is > was + SLACK_HEAP {
        return Some(format!("{was} to {is} bytes allocated"));
    }
    let (was, is) = minima(|sample| sample.descriptors);
    if is > was + SLACK_DESCRIPTORS {
        return Some(format!("{was} to {is} descriptors"));
    }
    let (was, is) = without_peaks(|sample| sample.threads);
    (is > was).then(|| format!("{was} to {is} threads"))
}

fn sample(end: &End) -> Result<Sample> {
    let dir = format!("/proc/{}", end.pid()?.as_raw_nonzero());
    let status = std::fs::read_to_string(format!("{dir}/status"))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let word = line.and_then(|line| line.split_whitespace().next());
        word.and_then(|word| word.parse::<u64>().ok())
            .with_context(|| format!("no {name} in /proc"))
    };
    Ok(Sample {
        rss: field("VmRSS:")?,
        heap: end.counter("heap"),
        threads: field("Threads:")?,
        descriptors: std::fs::read_dir(format!("{dir}/fd"))?.count() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steady_growth_is_reported() {
        let at = |rss, descriptors, threads| Sample {
            rss,
            heap: 1 << 20,
            descriptors,
            threads,
        };
        let flat: Vec<Sample> = (0..20).map(|i| at(50_000 + i % 3, 80, 3)).collect();
        assert_eq!(grown(&flat), None);
        let mut peak = flat.clone();
        peak[18].rss = 90_000;
        assert_eq!(grown(&peak), None);
        let leak: Vec<Sample> = (0..40).map(|i| at(50_000 + i * 1000, 80, 3)).collect();
        assert!(grown(&leak).is_some_and(|more| more.contains("KiB")));
        let open: Vec<Sample> = (0..20).map(|i| at(50_000, 80 + i, 3)).collect();
        assert!(grown(&open).is_some_and(|more| more.contains("descriptors")));
        // With 20 connections between two samples: a leak of one descriptor per 100 connections,
        // and then a leak of 64 bytes per connection.
        let slow: Vec<Sample> = (0..40).map(|i| at(50_000, 80 + i / 5, 3)).collect();
        assert!(grown(&slow).is_some_and(|more| more.contains("descriptors")));
        let mut octets = vec![at(50_000, 80, 3); 400];
        for (i, sample) in octets.iter_mut().enumerate() {
            // Two of three samples include buffers of data in flight.
            sample.heap += (i * 20 * 64 + i % 3 * 100_000) as u64;
        }
        assert!(grown(&octets).is_some_and(|more| more.contains("bytes allocated")));
        octets.truncate(40);
        assert_eq!(grown(&octets), None, "below the tolerated growth");
        let threads: Vec<Sample> = (0..20).map(|i| at(50_000, 80, 3 + i / 10)).collect();
        assert!(grown(&threads).is_some_and(|more| more.contains("threads")));
        // Pools fill while connections come and go, and then stop growing.
        let mut filling: Vec<Sample> = (0..30).map(|_| at(68_000, 80, 3)).collect();
        filling[..4].fill(at(46_000, 77, 3));
        filling[4..8].fill(at(57_000, 77, 3));
        assert_eq!(grown(&filling), None);
        // There are too few samples of a short-lived process.
        assert_eq!(grown(&leak[..11]), None);
    }
}
