//! The lease with which application threads drive sockets instead of the progress thread.
//!
//! A thread that polls serves its sockets better than the progress thread would: the data are in
//! its cache, and no thread has to be woken. While it polls, the progress thread does not serve
//! these sockets. But nothing notifies the library when the program stops polling, in order to
//! compute or sleep. So each poll renews a lease. When the lease ends, the progress thread serves
//! the sockets again.
//!
//! A short lease costs wake-ups of the progress thread; a long lease delays the peers of a program
//! that has stopped polling. The length therefore depends on *credit*, which is a time:
//!
//! - Renewals in quick succession are *dense*. Each earns a sixteenth of the time since the last
//!   renewal as credit.
//! - A longer time between renewals is a *pause*, which costs credit of the same length. Time for
//!   which the kernel kept the thread from running is not part of a pause.
//! - The length of a lease is the credit, up to a maximum.
//! - A thread that is about to wait gives the lease back. The progress thread serves the sockets
//!   during the wait, so the wait is no pause. Giving back costs a fixed credit.
//!
//! So the time for which peers are not served is at most about a sixteenth of the time that the
//! program has polled. The thresholds are in [`policy`](super::policy).
//!
//! Times are nanoseconds of the monotonic clock. The fields are hints, so threads that share a
//! lease need no lock: if two threads renew it at the same time, one renewal may be lost.

use super::policy;
use super::sync::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Lease {
    /// Time of the last renewal; 0 if the lease was given back since.
    renewed: AtomicU64,
    /// Time that dense polls have earned, less the length of pauses.
    credit: AtomicU64,
    driven: AtomicU64,
    /// Longest time to the next renewal that is no pause.
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

    /// Renews the lease for a thread that drives the sockets at `now`, or that has just driven them
    /// for `busy`. Returns the time since the last renewal.
    ///
    /// `off_cpu` returns for how long the kernel kept the thread from running since a given time.
    /// It is called only after a pause.
    #[inline]
    pub(crate) fn renew_for_drive(
        &self,
        now: u64,
        busy: u64,
        off_cpu: impl FnOnce(u64) -> u64,
    ) -> u64 {
        self.driven.store(now, Ordering::Relaxed);
        self.renew(now, busy, 0, off_cpu)
    }

    /// Renews the lease for a thread that has taken `taken` completions, if it has driven lately.
    /// The next renewal may be later by the time to handle them.
    #[inline]
    pub(crate) fn renew_for_completions(
        &self,
        now: u64,
        taken: usize,
        off_cpu: impl FnOnce(u64) -> u64,
    ) {
        if policy::completions_renew(now.saturating_sub(self.driven.load(Ordering::Relaxed))) {
            self.renew(now, 0, taken, off_cpu);
        }
    }

    /// Renews the lease after a drive of `busy`.
    #[inline]
    fn renew(&self, now: u64, busy: u64, taken: usize, off_cpu: impl FnOnce(u64) -> u64) -> u64 {
        let renewed = self.renewed.load(Ordering::Relaxed);
        let time = now.saturating_sub(renewed);
        let patience = self.patience.load(Ordering::Relaxed) + busy;
        let credit = match renewed {
            0 => policy::lease_credit_after_return(self.credit.load(Ordering::Relaxed)),
            _ => self.credit_after(time, patience, || off_cpu(renewed)),
        };
        self.credit.store(credit, Ordering::Relaxed);
        self.patience
            .store(policy::lease_patience(taken), Ordering::Relaxed);
        // A thread that reads this time also sees the credit stored above, or a later one.
        self.renewed.store(now, Ordering::Release);
        time
    }

    /// Gives the lease back, because the calling thread is about to wait. Returns `true` if the
    /// progress thread may be sleeping because of this lease; the caller must then wake it.
    ///
    /// The lease keeps its credit, except the cost of a pause since the last renewal. `now` and
    /// `off_cpu` are called only if the lease was not given back yet.
    #[inline]
    pub(crate) fn give_back(
        &self,
        now: impl FnOnce() -> u64,
        off_cpu: impl FnOnce(u64) -> u64,
    ) -> bool {
        let renewed = self.renewed.load(Ordering::Relaxed);
        if renewed == 0 {
            return false;
        }
        let held = policy::is_lease_respected(self.credit.load(Ordering::Relaxed));
        let time = now().saturating_sub(renewed);
        let patience = self.patience.load(Ordering::Relaxed);
        let credit = self.credit_after(time, patience, || off_cpu(renewed));
        self.credit.store(credit, Ordering::Relaxed);
        self.renewed.store(0, Ordering::Relaxed);
        held
    }

    /// Records that the threads have stopped driving. Taking completions then does not renew the
    /// lease, until a thread drives again.
    pub(crate) fn forget_drive(&self) {
        self.driven.store(0, Ordering::Relaxed);
    }

    /// Returns the credit after `time` since the last renewal.
    #[inline]
    fn credit_after(&self, time: u64, patience: u64, off_cpu: impl FnOnce() -> u64) -> u64 {
        let gap = match policy::is_pause(time, patience) {
            true => time.saturating_sub(off_cpu()),
            false => time,
        };
        policy::lease_credit(self.credit.load(Ordering::Relaxed), gap, patience)
    }

    /// Returns when the lease ends; `None` if it has ended, or is too short to be respected.
    #[inline]
    pub(crate) fn end(&self, now: u64) -> Option<u64> {
        let renewed = self.renewed.load(Ordering::Acquire);
        policy::lease_end(renewed, self.credit.load(Ordering::Relaxed), now)
    }

    /// Returns `true` if the lease ended a short time ago, and was not given back.
    pub(crate) fn has_ended_lately(&self, now: u64) -> bool {
        let renewed = self.renewed.load(Ordering::Acquire);
        policy::has_lease_ended_lately(renewed, self.credit.load(Ordering::Relaxed), now)
    }

    /// Creates a lease with full credit that was renewed at `now`.
    #[cfg(all(test, loom))]
    pub(super) fn held(now: u64) -> Self {
        Self {
            renewed: AtomicU64::new(now),
            credit: AtomicU64::new(policy::LEASE_CREDIT_MAX_NS),
            driven: AtomicU64::new(now),
            patience: AtomicU64::new(policy::LEASE_DENSE_NS),
        }
    }

    /// Renews the lease after a long pause, with the stores in the wrong order: a planted bug that
    /// the model must find.
    #[cfg(all(test, loom))]
    pub(super) fn renew_in_wrong_order(&self, now: u64) {
        self.renewed.store(now, Ordering::Release);
        self.credit.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
