//! Quantiles of round trips, and the figures that every measurement prints in the same way.

use serde_json::{Value, json};
use std::time::Duration;

/// Half round trips, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    ns: Vec<u64>,
}

impl Samples {
    /// Room for `n` samples, touched so that recording causes no page faults.
    pub(crate) fn with_capacity(n: usize) -> Self {
        let mut ns = vec![1; n];
        ns.clear();
        Self { ns }
    }

    /// Notes a round trip.
    pub(crate) fn round_trip(&mut self, t: Duration) {
        self.ns.push(t.as_nanos() as u64 / 2);
    }

    fn quantile(sorted: &[u64], q: f64) -> f64 {
        let at = ((sorted.len() as f64 * q) as usize).min(sorted.len().saturating_sub(1));
        sorted.get(at).copied().unwrap_or(0) as f64 / 1e3
    }

    /// Median, 99th percentile, minimum and mean of half a round trip, in microseconds.
    pub(crate) fn report(&self) -> Value {
        let mut sorted = self.ns.clone();
        sorted.sort_unstable();
        let mean = sorted.iter().sum::<u64>() as f64 / sorted.len().max(1) as f64 / 1e3;
        json!({
            "med_us": Self::quantile(&sorted, 0.5),
            "p99_us": Self::quantile(&sorted, 0.99),
            "min_us": Self::quantile(&sorted, 0.0),
            "mean_us": mean,
            "samples": sorted.len(),
        })
    }
}

/// What one direction achieved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flow {
    /// Payload octets.
    pub(crate) bytes: f64,
    /// Octets per message.
    pub(crate) size: f64,
    /// From the first to the last of them.
    pub(crate) ns: f64,
    /// CPU time of the sending process, in microseconds.
    pub(crate) tx_cpu_us: f64,
    /// CPU time of the receiving process, in microseconds.
    pub(crate) rx_cpu_us: f64,
}

impl Flow {
    /// GB/s, million messages per second, and CPU microseconds per 64 KiB.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_units() {
        let mut s = Samples::with_capacity(100);
        for i in 1..=100u64 {
            s.round_trip(Duration::from_nanos(i * 2000));
        }
        let r = s.report();
        assert_eq!(r["min_us"], 1.0);
        assert_eq!(r["med_us"], 51.0);
        assert_eq!(r["p99_us"], 100.0);
        assert_eq!(r["mean_us"], 50.5);
        assert_eq!(Samples::default().report()["med_us"], 0.0);
    }

    #[test]
    fn a_flow_in_round_numbers() {
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
