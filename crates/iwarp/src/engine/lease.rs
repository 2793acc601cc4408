//! The lease by which application threads drive sockets: who drives, until when, and for how long
//! at most.
//!
//! A thread that polls serves its sockets better than the progress thread would: the data are in
//! its cache, and no thread has to be woken. While it polls, the progress thread leaves these
//! sockets alone. But nothing notifies the library when a program stops polling: it may compute, or
//! sleep. So each poll renews a lease, which ends by itself, and the progress thread serves the
//! sockets from then on.
//!
//! A short lease costs wake-ups of the progress thread; a long one delays the peers of a program
//! that has stopped polling. The length therefore depends on *credit*:
//!
//! - While renewals are dense, their time earns a sixteenth of itself as credit.
//! - A pause costs as much credit as it lasts. Time in which the thread was kept from its processor
//!   is no pause.
//! - A lease lasts as long as the credit reaches, up to a maximum.
//! - A thread that is about to wait gives the lease back. The progress thread serves the sockets
//!   during the wait, so the wait is no pause. The return costs a fixed price.
//!
//! So the peers of any program are unserved for about a sixteenth of the time that it has spent on
//! polling, at most, and a program that polls now and then leaves nothing unserved. The thresholds
//! are in [`policy`](super::policy).
//!
//! Times are nanoseconds of the monotonic clock. The lease holds hints about the future, so threads
//! that share one need no lock: if two renew it at the same time, one of the two counts.

use super::policy;
use super::sync::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Lease {
    /// When it was last renewed; 0 if it was given back since.
    renewed: AtomicU64,
    /// Time that dense polls have earned, less what pauses have cost.
    credit: AtomicU64,
    driven: AtomicU64,
    /// Longest time until the next renewal that is no pause.
    patience: AtomicU64,
}

impl Lease {
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        Self {
            renewed: AtomicU64::new(0),
            credit: AtomicU64::new(0),
            driven: AtomicU64::new(0),
            patience: AtomicU64::new(policy::LEASE_DENSE_NS),
        }
    }

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self {
            renewed: AtomicU64::new(0),
            credit: AtomicU64::new(0),
            driven: AtomicU64::new(0),
            patience: AtomicU64::new(policy::LEASE_DENSE_NS),
        }
    }

    /// Renews the lease: the calling thread drives the sockets now, and will be back soon. It has
    /// driven them for about `busy` already. Returns the time since the last renewal.
    ///
    /// `kept` returns how long the thread was kept from its processor since a given time. It is
    /// only called after a pause.
    #[inline]
    pub(crate) fn drive(&self, now: u64, busy: u64, kept: impl FnOnce(u64) -> u64) -> u64 {
        self.driven.store(now, Ordering::Relaxed);
        self.renew(now, busy, 0, kept)
    }

    /// Renews the lease of a thread that has taken this many completions and will be back when it
    /// has answered them. A thread that never drives keeps no lease by that.
    #[inline]
    pub(crate) fn stay(&self, now: u64, taken: usize, kept: impl FnOnce(u64) -> u64) {
        if policy::completions_renew(now.saturating_sub(self.driven.load(Ordering::Relaxed))) {
            self.renew(now, 0, taken, kept);
        }
    }

    /// Renews the lease after `busy`. The next renewal may be later by the time to answer `taken`
    /// completions.
    #[inline]
    fn renew(&self, now: u64, busy: u64, taken: usize, kept: impl FnOnce(u64) -> u64) -> u64 {
        let renewed = self.renewed.load(Ordering::Relaxed);
        let time = now.saturating_sub(renewed);
        let patience = self.patience.load(Ordering::Relaxed) + busy;
        let credit = match renewed {
            0 => policy::lease_credit_after_return(self.credit.load(Ordering::Relaxed)),
            _ => self.credit_after(time, patience, || kept(renewed)),
        };
        self.credit.store(credit, Ordering::Relaxed);
        self.patience
            .store(policy::lease_patience(taken), Ordering::Relaxed);
        // A thread that reads this time finds the credit that belongs to it, or a later one.
        self.renewed.store(now, Ordering::Release);
        time
    }

    /// Gives the lease back, because the calling thread is going to wait. Returns `true` if the
    /// progress thread may be asleep for it; then wake that thread.
    ///
    /// The credit stays, because the progress thread serves the sockets from here on. A pause since
    /// the last renewal costs what any pause costs. `now` and `kept` are only called if a thread
    /// holds the lease.
    #[inline]
    pub(crate) fn give_back(
        &self,
        now: impl FnOnce() -> u64,
        kept: impl FnOnce(u64) -> u64,
    ) -> bool {
        let renewed = self.renewed.load(Ordering::Relaxed);
        if renewed == 0 {
            return false;
        }
        let held = policy::is_lease_worth(self.credit.load(Ordering::Relaxed));
        let time = now().saturating_sub(renewed);
        let patience = self.patience.load(Ordering::Relaxed);
        let credit = self.credit_after(time, patience, || kept(renewed));
        self.credit.store(credit, Ordering::Relaxed);
        self.renewed.store(0, Ordering::Relaxed);
        held
    }

    /// Returns the credit after `time` since the last renewal. `kept` returns how much of it the
    /// thread was kept from its processor.
    #[inline]
    fn credit_after(&self, time: u64, patience: u64, kept: impl FnOnce() -> u64) -> u64 {
        let gap = match policy::is_pause(time, patience) {
            true => time.saturating_sub(kept()),
            false => time,
        };
        policy::lease_credit(self.credit.load(Ordering::Relaxed), gap, patience)
    }

    /// Returns when the lease ends, if it has not ended and is worth being waited for.
    #[inline]
    pub(crate) fn end(&self, now: u64) -> Option<u64> {
        let renewed = self.renewed.load(Ordering::Acquire);
        policy::lease_end(renewed, self.credit.load(Ordering::Relaxed), now)
    }

    /// Returns `true` if it ended a short time ago and was not given back: its thread polled much,
    /// and may only be waiting for a processor.
    pub(crate) fn has_ended_lately(&self, now: u64) -> bool {
        let renewed = self.renewed.load(Ordering::Acquire);
        policy::has_lease_ended_lately(renewed, self.credit.load(Ordering::Relaxed), now)
    }

    /// Creates a lease that has been renewed until `now` for a long time.
    #[cfg(all(test, loom))]
    pub(super) fn held(now: u64) -> Self {
        Self {
            renewed: AtomicU64::new(now),
            credit: AtomicU64::new(policy::LEASE_CREDIT_MAX_NS),
            driven: AtomicU64::new(now),
            patience: AtomicU64::new(policy::LEASE_DENSE_NS),
        }
    }

    /// Renews the lease after a long pause, in the wrong order: a bug that the model must notice.
    #[cfg(all(test, loom))]
    pub(super) fn renew_in_wrong_order(&self, now: u64) {
        self.renewed.store(now, Ordering::Release);
        self.credit.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
