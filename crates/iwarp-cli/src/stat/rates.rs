//! Computes rates from two successive answers of a process.

use super::document::{ProcessStats, QueuePair, counter};
use std::collections::HashMap;

/// Bytes per second of a queue pair, framing included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rates {
    pub(super) sent_octets: f64,
    pub(super) received_octets: f64,
}

/// Identifies a queue pair: process ID, device and queue pair number. If the ID or the number is
/// reused, the age of the process or the counters are lower than before.
type Key = (u32, String, u32);

/// Figures of the previous answers.
#[derive(Debug, Default)]
pub(super) struct Previous {
    /// For each queue pair: age of its process, bytes sent, bytes received. `None` before the first
    /// answers.
    known: Option<HashMap<Key, (u64, u64, u64)>>,
}

fn key(stats: &ProcessStats, qp: &QueuePair) -> Key {
    (stats.pid, qp.device.clone(), qp.number)
}

fn figures(stats: &ProcessStats, qp: &QueuePair) -> (u64, u64, u64) {
    (
        stats.document.process.age_ns,
        counter(&qp.counters, "tx_bytes"),
        counter(&qp.counters, "rx_bytes"),
    )
}

impl Previous {
    /// Keeps the figures of these answers for [`rates`](Self::rates).
    pub(super) fn new(stats: &[ProcessStats]) -> Self {
        let all = stats.iter().flat_map(|one| {
            let qps = one.document.queue_pairs.iter();
            qps.map(move |qp| (key(one, qp), figures(one, qp)))
        });
        Self {
            known: Some(all.collect()),
        }
    }

    /// Returns `true` if there are previous answers.
    pub(super) const fn is_some(&self) -> bool {
        self.known.is_some()
    }

    /// Returns the rates of a queue pair, or `None` without previous answers. The rates of a new
    /// queue pair are 0.
    pub(super) fn rates(&self, stats: &ProcessStats, qp: &QueuePair) -> Option<Rates> {
        let known = self.known.as_ref()?;
        let now = figures(stats, qp);
        let (then, sent, received) = known.get(&key(stats, qp)).copied().unwrap_or(now);
        // If the age decreased, the process ID belongs to another process now.
        let seconds = now.0.checked_sub(then).map_or(0.0, |ns| ns as f64 / 1e9);
        let per_second = |now: u64, then: u64| match now.checked_sub(then) {
            Some(more) if seconds > 0.0 => more as f64 / seconds,
            _ => 0.0,
        };
        Some(Rates {
            sent_octets: per_second(now.1, sent),
            received_octets: per_second(now.2, received),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::document::{Document, Process};
    use super::*;

    fn stats(age_ns: u64, sent: u64) -> ProcessStats {
        let mut qp = QueuePair::default();
        qp.counters.insert("tx_bytes".to_owned(), sent);
        // Receives seven times as much as it sends.
        qp.counters.insert("rx_bytes".to_owned(), 7 * sent);
        ProcessStats {
            document: Document {
                process: Process {
                    age_ns,
                    ..Process::default()
                },
                queue_pairs: vec![qp],
                ..Document::default()
            },
            ..ProcessStats::default()
        }
    }

    fn sent(before: &Previous, now: &ProcessStats) -> Option<f64> {
        let rates = before.rates(now, &now.document.queue_pairs[0])?;
        assert_eq!(rates.received_octets, 7.0 * rates.sent_octets);
        Some(rates.sent_octets)
    }

    #[test]
    fn rates_use_process_time() {
        let first = stats(1_000_000_000, 500);
        assert_eq!(sent(&Previous::default(), &first), None);
        let before = Previous::new(&[first]);
        assert_eq!(sent(&before, &stats(1_500_000_000, 1500)), Some(2000.0));
        // Another process with that ID, another queue pair with that number, and the same answer
        // twice.
        assert_eq!(sent(&before, &stats(500_000_000, 1500)), Some(0.0));
        assert_eq!(sent(&before, &stats(2_000_000_000, 100)), Some(0.0));
        assert_eq!(sent(&before, &stats(1_000_000_000, 500)), Some(0.0));
        assert_eq!(sent(&Previous::new(&[]), &stats(1, 7)), Some(0.0));
    }
}
