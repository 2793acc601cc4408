//! Selects the objects that have samples: not more than the reader wants, and none twice.

use super::super::document::{Device, ProcessStats, QueuePair};
use super::format::Labels;
use std::collections::{HashMap, HashSet};

/// A process, with what has samples. A second queue pair or device of the same name is left out,
/// because Prometheus refuses a whole document in which a sample occurs twice.
pub(super) struct Entry<'a> {
    pub(super) stats: &'a ProcessStats,
    /// If a program has loaded the library twice, its process ID occurs twice. The second
    /// occurrence gets a number for the label `copy`.
    copy: Option<usize>,
    pub(super) devices: Vec<&'a Device>,
    /// The queue pairs that have samples of their own.
    pub(super) queue_pairs: Vec<&'a QueuePair>,
}

impl<'a> Entry<'a> {
    /// Returns the processes, with at most `max` queue pairs together.
    pub(super) fn all(stats: &'a [ProcessStats], max: usize) -> Vec<Self> {
        let mut seen = HashMap::<u32, usize>::new();
        let mut entries: Vec<_> = stats
            .iter()
            .map(|one| {
                let before = seen.entry(one.pid).or_default();
                let copy = (*before > 0).then_some(*before);
                *before += 1;
                Self::new(one, copy)
            })
            .collect();
        let counts: Vec<usize> = entries.iter().map(|e| e.queue_pairs.len()).collect();
        let most = fair_share(&counts, max);
        for entry in &mut entries {
            entry.queue_pairs.truncate(most);
        }
        entries
    }

    fn new(stats: &'a ProcessStats, copy: Option<usize>) -> Self {
        let (mut names, mut numbers) = (HashSet::new(), HashSet::new());
        let document = &stats.document;
        Self {
            stats,
            copy,
            devices: document
                .devices
                .iter()
                .filter(|d| names.insert(&d.name))
                .collect(),
            queue_pairs: document
                .queue_pairs
                .iter()
                .filter(|qp| numbers.insert((&qp.device, qp.number)))
                .collect(),
        }
    }

    /// Returns the labels that all samples of the process have.
    pub(super) fn labels(&self) -> Labels<'_> {
        let mut labels: Labels<'_> = vec![("pid", &self.stats.pid)];
        if let Some(copy) = &self.copy {
            labels.push(("copy", copy));
        }
        labels
    }
}

/// Returns the largest number of queue pairs for each process with which all processes together
/// have at most `max`, so that a process with very many does not displace those of others.
fn fair_share(counts: &[usize], max: usize) -> usize {
    let mut ascending = counts.to_vec();
    ascending.sort_unstable();
    let mut left = max;
    for (i, &count) in ascending.iter().enumerate() {
        let share = left / (ascending.len() - i);
        if count > share {
            return share;
        }
        left -= count;
    }
    max
}
