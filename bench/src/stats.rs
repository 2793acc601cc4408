//! Quantiles of round-trip times, and the figures that all measurements report.

use crate::cpu;
use anyhow::Result;
use iwarp_figures::Latencies;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Durations of half round trips.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    halves: Latencies,
    /// CPU time of this process during all round trips, in microseconds.
    cpu_us: f64,
}

impl Samples {
    /// Measures `iters` calls of `ask`, each of which is a round trip. A tenth as many are made
    /// before, to warm up.
    pub(crate) fn of(iters: u64, mut ask: impl FnMut() -> Result<()>) -> Result<Self> {
        for _ in 0..iters / 10 {
            ask()?;
        }
        let mut samples = Self::default();
        let before = cpu::process_us();
        for _ in 0..iters {
            let start = Instant::now();
            ask()?;
            samples.round_trip(start.elapsed());
        }
        samples.cpu_us = cpu::process_us() - before;
        Ok(samples)
    }

    pub(crate) fn round_trip(&mut self, took: Duration) {
        self.halves.record(took / 2);
    }

    /// Returns the median, 99th percentile, minimum and mean of half a round trip, and the CPU time
    /// of this process for it, in microseconds. They are 0 if nothing was recorded.
    pub(crate) fn report(&self) -> Value {
        let count = self.halves.count();
        let quantile = |share| self.halves.quantile_us(share).unwrap_or(0.0);
        json!({
            "med_us": quantile(0.5),
            "p99_us": quantile(0.99),
            "min_us": quantile(0.0),
            "cpu_us": self.cpu_us / (2 * count.max(1)) as f64,
            "mean_us": self.halves.mean_us().unwrap_or(0.0),
            "samples": count,
        })
    }
}

/// The result of a measurement in one direction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flow {
    pub(crate) bytes: f64,
    /// Octets per message.
    pub(crate) size: f64,
    /// Time from the first to the last octet, in nanoseconds.
    pub(crate) ns: f64,
    /// CPU time of the sending process, in microseconds.
    pub(crate) tx_cpu_us: f64,
    /// CPU time of the receiving process, in microseconds.
    pub(crate) rx_cpu_us: f64,
}

impl Flow {
    /// Returns GB/s, million messages per second, and CPU microseconds of both sides per 64 KiB.
    pub(crate) fn report(&self) -> Value {
        let pieces = (self.bytes / 65536.0).max(f64::MIN_POSITIVE);
        let ns = self.ns.max(1.0);
        json!({
            "gbps": self.bytes / ns,
            "mmsg": self.bytes / self.size / ns * 1e3,
            "tx_cpu_us_64k": self.tx_cpu_us / pieces,
            "rx_cpu_us_64k": self.rx_cpu_us / pieces,
        })
    }
}

/// Sorts the values, and returns the median.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (
        values.get(middle),
        middle.checked_sub(1).and_then(|i| values.get(i)),
    ) {
        (Some(high), Some(low)) if values.len().is_multiple_of(2) => (high + low) / 2.0,
        (Some(high), _) => *high,
        (None, _) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_even_number() {
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 8.0]), 3.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut []), 0.0);
    }

    #[test]
    fn warm_up_is_not_counted() {
        let mut asked = 0;
        let samples = Samples::of(50, || {
            asked += 1;
            Ok(())
        });
        assert_eq!((samples.unwrap().halves.count(), asked), (50, 55));
        assert!(Samples::of(1, || anyhow::bail!("no")).is_err());
    }

    #[test]
    fn round_trip_counts_half() {
        let mut samples = Samples::default();
        assert_eq!(samples.report()["med_us"], 0.0);
        for i in 1..=100u64 {
            samples.round_trip(Duration::from_nanos(i * 2000));
        }
        let report = samples.report();
        let close = |name: &str, exact: f64| {
            let got = report[name].as_f64().unwrap();
            assert!(
                (got / exact - 1.0).abs() < 1e-3,
                "{name}: {got} instead of {exact}"
            );
        };
        close("min_us", 1.0);
        close("med_us", 50.0);
        close("p99_us", 99.0);
        close("mean_us", 50.5);
        assert_eq!(report["samples"], 100);
    }

    #[test]
    fn flow_report_has_correct_units() {
        let r = Flow {
            bytes: 131_072.0,
            size: 65_536.0,
            ns: 131_072.0,
            tx_cpu_us: 20.0,
            rx_cpu_us: 10.0,
        }
        .report();
        assert_eq!(
            (r["gbps"].as_f64(), r["tx_cpu_us_64k"].as_f64()),
            (Some(1.0), Some(10.0))
        );
        assert!((r["mmsg"].as_f64().unwrap() - 2000.0 / 131_072.0).abs() < 1e-12);
    }
}
