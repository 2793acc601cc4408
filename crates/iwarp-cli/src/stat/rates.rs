//! Rates per second, from what a process said now and the last time.

use super::document::{QueuePair, Told, counter};
use std::collections::HashMap;

/// Octets per second of a queue pair, framing included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rates {
    pub(super) sent_octets: f64,
    pub(super) received_octets: f64,
}

/// What tells queue pairs apart: their process, device and number. Numbers are used again, by processes too, and then counters are lower.
type Key = (u32, String, u32);

/// What the processes said the last time.
#[derive(Debug, Default)]
pub(super) struct Since {
    /// Age of the process, octets sent and received.
    known: Option<HashMap<Key, (u64, u64, u64)>>,
}

fn key(told: &Told, qp: &QueuePair) -> Key {
    (told.pid, qp.device.clone(), qp.number)
}

fn figures(told: &Told, qp: &QueuePair) -> (u64, u64, u64) {
    (
        told.document.process.age_ns,
        counter(&qp.counters, "tx_bytes"),
        counter(&qp.counters, "rx_bytes"),
    )
}

impl Since {
    /// Remembers what was said, for the next time.
    pub(super) fn remember(told: &[Told]) -> Self {
        let all = told.iter().flat_map(|one| {
            let qps = one.document.queue_pairs.iter();
            qps.map(move |qp| (key(one, qp), figures(one, qp)))
        });
        Self {
            known: Some(all.collect()),
        }
    }

    /// Returns `true` if there was a last time.
    pub(super) const fn is_some(&self) -> bool {
        self.known.is_some()
    }

    /// The rates of a queue pair; `None` if there was no last time. One that is new has the rate 0 until the next time.
    pub(super) fn of(&self, told: &Told, qp: &QueuePair) -> Option<Rates> {
        let known = self.known.as_ref()?;
        let now = figures(told, qp);
        let (then, sent, received) = known.get(&key(told, qp)).copied().unwrap_or(now);
        // A process whose age is less than it was is another one.
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

    fn told(age_ns: u64, sent: u64) -> Told {
        let mut qp = QueuePair::default();
        qp.counters.insert("tx_bytes".to_owned(), sent);
        Told {
            document: Document {
                process: Process {
                    age_ns,
                    ..Process::default()
                },
                queue_pairs: vec![qp],
                ..Document::default()
            },
            ..Told::default()
        }
    }

    fn sent(before: &Since, now: &Told) -> Option<f64> {
        Some(before.of(now, &now.document.queue_pairs[0])?.sent_octets)
    }

    #[test]
    fn rates_are_per_second_of_the_process_and_never_negative() {
        let first = told(1_000_000_000, 500);
        assert_eq!(sent(&Since::default(), &first), None);
        let before = Since::remember(&[first]);
        assert_eq!(sent(&before, &told(1_500_000_000, 1500)), Some(2000.0));
        // Another process of that number, another queue pair of that number, the same answer twice.
        assert_eq!(sent(&before, &told(500_000_000, 1500)), Some(0.0));
        assert_eq!(sent(&before, &told(2_000_000_000, 100)), Some(0.0));
        assert_eq!(sent(&before, &told(1_000_000_000, 500)), Some(0.0));
        assert_eq!(sent(&Since::remember(&[]), &told(1, 7)), Some(0.0));
    }
}
