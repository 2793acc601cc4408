//! Samples, their medians, and ratios. Ratios are computed from samples of the same turn, which
//! were taken in quick succession.

use std::collections::BTreeMap;

use iwarp_figures::Spread;
use serde_json::{Map, Value, json};

#[derive(Debug, Clone)]
pub(super) struct Sample {
    /// Number of the turn, counted over all rounds.
    pub(super) turn: u32,
    pub(super) series: String,
    pub(super) size: u64,
    pub(super) values: BTreeMap<String, f64>,
    /// How many CPUs other programs used during the sample.
    pub(super) others: f64,
    /// `true` if other programs did not disturb the sample.
    pub(super) good: bool,
}

impl Sample {
    pub(super) fn new(
        turn: u32,
        series: String,
        size: u64,
        values: &Value,
        others: f64,
        good: bool,
    ) -> Self {
        let mut values = values.as_object().map_or_else(BTreeMap::new, |o| {
            o.iter()
                .filter_map(|(k, v)| Some((k.clone(), v.as_f64()?)))
                .collect()
        });
        add_cpu_of_both_ends(&mut values, size);
        Self {
            turn,
            series,
            size,
            values,
            others,
            good,
        }
    }

    fn json(&self) -> Value {
        let values: Map<String, Value> = self
            .values
            .iter()
            .map(|(k, v)| (k.clone(), json!(v)))
            .collect();
        json!({
            "turn": self.turn,
            "series": self.series,
            "size": self.size,
            "others": self.others,
            "kept": self.good,
            "values": values,
        })
    }
}

/// Adds the CPU seconds of both ends per GiB, and per million messages of `size` octets, to the
/// values of a sample that has the CPU time of each end.
fn add_cpu_of_both_ends(values: &mut BTreeMap<String, f64>, size: u64) {
    let (Some(sender), Some(receiver)) = (values.get("tx_cpu_us_64k"), values.get("rx_cpu_us_64k"))
    else {
        return;
    };
    // Microseconds per octet are seconds per million octets.
    let s_per_million_octets = (sender + receiver) / 65_536.0;
    values.insert(
        "cpu_s_gib".to_owned(),
        s_per_million_octets * f64::from(1 << 30) / 1e6,
    );
    values.insert("cpu_s_mmsg".to_owned(), s_per_million_octets * size as f64);
}

/// The values of a metric of one series at one size, or the ratios of two such metrics.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Measured {
    pub(super) spread: Spread,
    /// `true` if there are only disturbed samples.
    pub(super) noisy: bool,
}

impl Measured {
    fn new(values: Vec<f64>, noisy: bool) -> Option<Self> {
        Spread::of(values).map(|spread| Self { spread, noisy })
    }
}

impl std::ops::Deref for Measured {
    type Target = Spread;

    fn deref(&self) -> &Spread {
        &self.spread
    }
}

pub(super) type Key<'a> = (&'a str, u64);

#[derive(Debug, Default)]
pub(super) struct Samples {
    all: Vec<Sample>,
    rounds: u32,
    turns: u32,
}

impl Samples {
    pub(super) fn new(rounds: u32, turns: u32) -> Self {
        Self {
            all: Vec::new(),
            rounds,
            turns,
        }
    }

    /// Reads samples from the contents of `results.json`. Returns `None` if they have another
    /// format.
    pub(super) fn from_results(results: &Value) -> Option<Self> {
        let count = |name: &str| u32::try_from(results.get(name)?.as_u64()?).ok();
        let mut samples = Self::new(count("rounds")?, count("turns")?);
        for sample in results.get("samples")?.as_array()? {
            samples.add(Sample::new(
                u32::try_from(sample.get("turn")?.as_u64()?).ok()?,
                sample.get("series")?.as_str()?.to_owned(),
                sample.get("size")?.as_u64()?,
                sample.get("values")?,
                sample.get("others")?.as_f64()?,
                sample.get("kept")?.as_bool()?,
            ));
        }
        Some(samples)
    }

    pub(super) fn add(&mut self, sample: Sample) {
        self.all.push(sample);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn rounds(&self) -> u32 {
        self.rounds
    }

    pub(super) fn turns(&self) -> u32 {
        self.turns
    }

    /// Returns the number of undisturbed samples and the number of all samples.
    pub(super) fn undisturbed_and_all(&self) -> (usize, usize) {
        (self.all.iter().filter(|s| s.good).count(), self.all.len())
    }

    pub(super) fn json(&self) -> Value {
        self.all.iter().map(Sample::json).collect()
    }

    /// Returns the series with samples at this size, in the order in which they were first
    /// measured.
    pub(super) fn series(&self, prefix: &str, size: u64) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for s in self
            .all
            .iter()
            .filter(|s| s.size == size && s.series.starts_with(prefix))
        {
            if !names.contains(&s.series.as_str()) {
                names.push(&s.series);
            }
        }
        names
    }

    pub(super) fn sizes(&self, prefix: &str) -> Vec<u64> {
        let mut sizes: Vec<u64> = self
            .all
            .iter()
            .filter(|s| s.series.starts_with(prefix))
            .map(|s| s.size)
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Returns the value of the last undisturbed sample in a turn. If `noisy` is set, the last
    /// sample may also be a disturbed one.
    fn in_turn(&self, key: Key<'_>, metric: &str, turn: u32, noisy: bool) -> Option<f64> {
        self.all
            .iter()
            .rev()
            .find(|s| s.turn == turn && (s.series.as_str(), s.size) == key && (s.good || noisy))
            .and_then(|s| s.values.get(metric).copied())
    }

    /// Collects the values of all turns. Uses disturbed samples only if there are no others.
    fn over_turns(&self, value: impl Fn(u32, bool) -> Option<f64>) -> Option<Measured> {
        let collect = |noisy| {
            (0..self.rounds * self.turns)
                .filter_map(|t| value(t, noisy))
                .collect()
        };
        Measured::new(collect(false), false).or_else(|| Measured::new(collect(true), true))
    }

    pub(super) fn value(&self, key: Key<'_>, metric: &str) -> Option<Measured> {
        self.over_turns(|turn, noisy| self.in_turn(key, metric, turn, noisy))
    }

    /// Returns the best value of several series in a turn: the largest value if `large` is set,
    /// else the smallest.
    fn best(
        &self,
        keys: &[Key<'_>],
        metric: &str,
        large: bool,
        turn: u32,
        noisy: bool,
    ) -> Option<f64> {
        let values = keys
            .iter()
            .filter_map(|k| self.in_turn(*k, metric, turn, noisy));
        if large {
            values.reduce(f64::max)
        } else {
            values.reduce(f64::min)
        }
    }

    /// Divides, in each turn, the best value of `above` by the best value of `below`.
    pub(super) fn ratio(
        &self,
        above: &[Key<'_>],
        below: &[Key<'_>],
        metric: &str,
        large: bool,
    ) -> Option<Measured> {
        self.over_turns(|turn, noisy| {
            let a = self.best(above, metric, large, turn, noisy)?;
            let b = self.best(below, metric, large, turn, noisy)?;
            (b > 0.0).then(|| a / b)
        })
    }

    /// Returns the best value of several series in each turn.
    pub(super) fn best_value(
        &self,
        keys: &[Key<'_>],
        metric: &str,
        large: bool,
    ) -> Option<Measured> {
        self.over_turns(|turn, noisy| self.best(keys, metric, large, turn, noisy))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn sample(
        turn: u32,
        series: &str,
        size: u64,
        values: &[(&str, f64)],
        good: bool,
    ) -> Sample {
        Sample {
            turn,
            series: series.to_owned(),
            size,
            values: values.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect(),
            others: 0.0,
            good,
        }
    }

    /// 150 µs per 64 KiB are 2.4576 s per GiB, and 0.1465 µs per message of 64 octets.
    #[test]
    fn cpu_of_both_ends_is_derived() {
        let values = json!({ "tx_cpu_us_64k": 100.0, "rx_cpu_us_64k": 50.0 });
        let sample = Sample::new(0, "bw:tcp".to_owned(), 64, &values, 0.0, true);
        assert_eq!(sample.values["cpu_s_gib"], 2.4576);
        assert_eq!(sample.values["cpu_s_mmsg"], 150.0 / 1024.0);
        let values = json!({ "tx_cpu_us_64k": 100.0 });
        let sample = Sample::new(0, "bw:tcp".to_owned(), 64, &values, 0.0, true);
        assert_eq!(sample.values.len(), 1, "one end is not both");
    }

    #[test]
    fn ratios_use_the_same_turn() {
        let mut s = Samples::new(1, 3);
        for (turn, tcp, iwarp) in [(0, 1.0, 2.0), (1, 10.0, 20.0), (2, 5.0, 15.0)] {
            s.add(sample(turn, "tcp", 64, &[("gbps", tcp)], true));
            s.add(sample(turn, "write", 64, &[("gbps", iwarp)], true));
        }
        let r = s
            .ratio(&[("write", 64)], &[("tcp", 64)], "gbps", true)
            .unwrap();
        assert_eq!(
            (r.median, r.min, r.max, r.count, r.noisy),
            (2.0, 2.0, 3.0, 3, false)
        );
        let best = s
            .best_value(&[("tcp", 64), ("write", 64)], "gbps", false)
            .unwrap();
        assert_eq!(best.median, 5.0);
        assert!(
            s.ratio(&[("write", 64)], &[("tcp", 65)], "gbps", true)
                .is_none()
        );
    }

    #[test]
    fn results_can_be_read_back() {
        let mut samples = Samples::new(2, 1);
        samples.add(sample(1, "tcp", 64, &[("gbps", 9.0)], false));
        let results = json!({ "rounds": 2, "turns": 1, "samples": samples.json() });
        let back = Samples::from_results(&results).unwrap();
        assert_eq!(
            (back.json(), back.rounds(), back.turns()),
            (samples.json(), 2, 1)
        );
        assert!(Samples::from_results(&json!({ "rounds": 2 })).is_none());
    }

    #[test]
    fn disturbed_samples_are_last_resort() {
        let mut s = Samples::new(2, 1);
        s.add(sample(0, "tcp", 64, &[("gbps", 9.0)], false));
        s.add(sample(0, "tcp", 64, &[("gbps", 1.0)], true));
        s.add(sample(1, "tcp", 64, &[("gbps", 7.0)], false));
        let v = s.value(("tcp", 64), "gbps").unwrap();
        assert_eq!((v.median, v.count, v.noisy), (1.0, 1, false));
        s.add(sample(1, "x", 64, &[("gbps", 3.0)], false));
        assert!(s.value(("x", 64), "gbps").unwrap().noisy);
        assert_eq!(s.undisturbed_and_all(), (1, 4));
    }
}
