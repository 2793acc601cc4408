//! Decides whether a task that has just posted a request lets other tasks go first, before it
//! polls.
//!
//! A poll sends what was posted, which is a system call. If many requests are awaited together, it
//! pays to post all of them and then to poll once. A future cannot know whether others are about to
//! be polled. So it wakes itself, which puts it behind the others, and polls the queue on its next
//! turn. If a task awaits one request after the other, this costs a turn of its executor and gains
//! nothing. It is therefore given up after some turns in which no other task posted, and tried
//! again from time to time. The thresholds are in [`policy`](crate::engine::policy). All counters
//! are hints, accessed with relaxed ordering.

use crate::engine::policy;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

#[derive(Debug)]
pub(super) struct Turns {
    /// Remaining turns without posts of other tasks.
    patience: AtomicU32,
    /// Requests since the patience ran out.
    requests: AtomicU32,
    /// Version of the slots when the open turn began.
    version: AtomicU32,
    open: AtomicBool,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            patience: AtomicU32::new(policy::TURNS_PATIENCE),
            requests: AtomicU32::new(0),
            version: AtomicU32::new(0),
            open: AtomicBool::new(false),
        }
    }
}

impl Turns {
    /// Records a posted request; `version` is the version of the slots. Returns `true` if others
    /// should go first.
    pub(super) fn begin(&self, version: u32) -> bool {
        let patience = self.patience.load(Ordering::Relaxed);
        let mut requests = self.requests.load(Ordering::Relaxed);
        if patience == 0 {
            requests = requests.wrapping_add(1);
            self.requests.store(requests, Ordering::Relaxed);
        }
        if !policy::lets_others_first(patience, requests) {
            return false;
        }
        if !self.open.load(Ordering::Relaxed) {
            self.version.store(version, Ordering::Relaxed);
            self.open.store(true, Ordering::Relaxed);
        }
        true
    }

    /// Ends the open turn: a task polls for completions now.
    #[inline]
    pub(super) fn over(&self, version: u32) {
        if self.open.load(Ordering::Relaxed) {
            self.judge(version);
        }
    }

    fn judge(&self, version: u32) {
        self.open.store(false, Ordering::Relaxed);
        let others_posted = version != self.version.load(Ordering::Relaxed);
        let patience = self.patience.load(Ordering::Relaxed);
        let patience = policy::turns_patience(patience, others_posted);
        self.patience.store(patience, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lone_task_stops_asking() {
        let turns = Turns::default();
        let asked = |version| {
            let asked = turns.begin(version);
            turns.over(version);
            asked
        };
        let first = (0..200).map(asked).collect::<Vec<_>>();
        assert!(first[..4].iter().all(|asked| *asked));
        let later = first[4..].iter().filter(|asked| **asked).count();
        assert!((10..=13).contains(&later), "{later}");
    }

    #[test]
    fn many_tasks_are_noticed() {
        let turns = Turns::default();
        for version in 0..8 {
            turns.begin(version);
            turns.over(version);
        }
        // Sixteen requests are posted before a poll: one of them tries.
        assert!((100..116).any(|version| turns.begin(version)));
        turns.over(116);
        let asked = |version| turns.begin(version);
        assert!((200..264).all(asked), "it pays");
        turns.over(264);
        assert!(asked(300), "and stays so");
    }
}
