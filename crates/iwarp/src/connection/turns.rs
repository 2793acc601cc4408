//! Decides whether a task that has just posted a request lets other tasks go first, before it looks for completions.
//!
//! Looking sends what was posted, which is a system call. If many requests are awaited together, it pays to post all of them and then to
//! look once. A future cannot see whether others are about to be polled. So it asks to be polled again at once, which puts it behind the
//! others, and looks then. Where a task awaits one request after the other, this costs a turn of its executor and gains nothing. So it is
//! given up after some turns in which nobody else posted, and tried again now and then. All of it is a hint, without order.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Turns in vain after which it is given up.
const PATIENCE: u32 = 4;
/// After that, one request in so many tries it.
const TRY_EVERY: u32 = 16;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Turns {
    /// Turns in vain that are left.
    patience: AtomicU32,
    /// Requests since it was last tried.
    requests: AtomicU32,
    /// The version of the slots when the first turn began that is not over.
    version: AtomicU32,
    open: AtomicBool,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            patience: AtomicU32::new(PATIENCE),
            requests: AtomicU32::new(0),
            version: AtomicU32::new(0),
            open: AtomicBool::new(false),
        }
    }
}

impl Turns {
    /// A request was posted, and `version` is that of the slots. Returns `true` if others should go first.
    pub(super) fn begin(&self, version: u32) -> bool {
        if self.patience.load(Ordering::Relaxed) == 0 {
            let requests = self.requests.load(Ordering::Relaxed).wrapping_add(1);
            self.requests.store(requests, Ordering::Relaxed);
            if !requests.is_multiple_of(TRY_EVERY) {
                return false;
            }
        }
        if !self.open.load(Ordering::Relaxed) {
            self.version.store(version, Ordering::Relaxed);
            self.open.store(true, Ordering::Relaxed);
        }
        true
    }

    /// Somebody looks for completions now.
    #[inline]
    pub(super) fn over(&self, version: u32) {
        if self.open.load(Ordering::Relaxed) {
            self.judge(version);
        }
    }

    fn judge(&self, version: u32) {
        self.open.store(false, Ordering::Relaxed);
        let patience = match version == self.version.load(Ordering::Relaxed) {
            true => self.patience.load(Ordering::Relaxed).saturating_sub(1),
            false => PATIENCE,
        };
        self.patience.store(patience, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_always_alone_stops_asking_and_tries_again() {
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
    fn many_that_are_polled_together_are_noticed() {
        let turns = Turns::default();
        for version in 0..8 {
            turns.begin(version);
            turns.over(version);
        }
        // Sixteen requests are posted before anybody looks: one of them tries.
        assert!((100..116).any(|version| turns.begin(version)));
        turns.over(116);
        let asked = |version| turns.begin(version);
        assert!((200..264).all(asked), "it pays");
        turns.over(264);
        assert!(asked(300), "and stays so");
    }
}
