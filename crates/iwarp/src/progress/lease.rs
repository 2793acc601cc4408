//! The lease by which application threads drive sockets: who drives, until when, and for how long at most.
//!
//! A thread that polls serves its sockets better than the progress thread would: the data are in its cache, and no thread has to be
//! woken. While it polls, the progress thread leaves these sockets alone. But nobody tells when a program stops polling: it may
//! compute, or sleep. So each poll renews a lease, which ends by itself, and the progress thread serves the sockets from then on.
//!
//! How long is that? A short lease costs looks of the progress thread, a long one makes peers wait for a program that has stopped
//! polling. Here the time for which polls follow each other closely ([`DENSE`]) earns a sixteenth of itself as credit, and a pause
//! costs credit as long as itself. A lease lasts as long as the credit reaches, at most [`LONGEST`]. So whatever a program does,
//! requests of its peers are unserved for about a sixteenth of the time that it has spent on polling at most, and a program that
//! only looks now and then leaves nothing unserved. Time in which a thread would have polled, but was kept from its processor, is
//! no pause. A thread that waits gives the lease back first; the progress thread serves the sockets during the wait, so the wait
//! is no pause either. The next poll continues with the same credit, less [`RETURN_COST`].
//!
//! Times are nanoseconds of the monotonic clock. The lease holds hints about the future, so threads that share one need no lock: if
//! two renew it at the same time, one of the two counts.

use super::sync::{AtomicU64, Ordering};

/// Renewals that follow each other within this time are dense. Not every poll renews, so this may be the time of several.
const DENSE: u64 = 70_000;
/// For each completion that a thread has taken it may be so much longer until it is back.
const ANSWER: u64 = 10_000;
/// At most so many completions count.
const ANSWERS: u64 = 64;
/// This part of the time for which polls have been dense is earned.
const SHARE: u64 = 16;
/// No more is earned.
const MOST: u64 = 8_000_000;
/// No lease is longer. It limits how long a peer waits once when a program stops polling after a long time.
const LONGEST: u64 = 2_000_000;
/// Giving a lease back costs this much credit, which dense polls earn in 128 µs. The progress
/// thread watches the sockets again after a return, and stops when the next lease begins. Shorter
/// spells of polling are not worth that work.
const RETURN_COST: u64 = 8_000;
/// A shorter lease is not worth a look at its end: the progress thread serves the sockets as if there were none.
const WORTH: u64 = 50_000;
/// A thread whose lease has ended within this time may only be waiting for a processor.
const LATELY: u64 = 20_000_000;

/// A lease. Any thread may use it at any time.
#[derive(Debug)]
pub(crate) struct Lease {
    /// When it was last renewed; 0 if it was given back since.
    renewed: AtomicU64,
    /// What dense polls have earned, less what pauses have cost.
    credit: AtomicU64,
    /// When the sockets were last driven.
    driven: AtomicU64,
    /// How long the next renewal may take to follow closely.
    patience: AtomicU64,
}

impl Lease {
    /// A lease that nobody has taken.
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        Self {
            renewed: AtomicU64::new(0),
            credit: AtomicU64::new(0),
            driven: AtomicU64::new(0),
            patience: AtomicU64::new(DENSE),
        }
    }

    /// A lease that nobody has taken.
    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self {
            renewed: AtomicU64::new(0),
            credit: AtomicU64::new(0),
            driven: AtomicU64::new(0),
            patience: AtomicU64::new(DENSE),
        }
    }

    /// The calling thread drives the sockets now, and will be back soon. It has done so for about `busy` already.
    ///
    /// `kept` tells for how long it was kept from its processor since a moment. It is only called after a pause. Returns the time since the last
    /// renewal.
    #[inline]
    pub(crate) fn drive(&self, now: u64, busy: u64, kept: impl FnOnce(u64) -> u64) -> u64 {
        self.driven.store(now, Ordering::Relaxed);
        self.renew(now, busy, 0, kept)
    }

    /// The calling thread has taken so many completions, and will be back when it has answered them. A thread that never drives
    /// keeps no lease by that.
    #[inline]
    pub(crate) fn stay(&self, now: u64, taken: usize, kept: impl FnOnce(u64) -> u64) {
        if now.saturating_sub(self.driven.load(Ordering::Relaxed)) < LONGEST {
            self.renew(now, 0, ANSWER * (taken as u64).min(ANSWERS), kept);
        }
    }

    /// Renews it after `busy`. The next renewal may come so much later by `answer`.
    #[inline]
    fn renew(&self, now: u64, busy: u64, answer: u64, kept: impl FnOnce(u64) -> u64) -> u64 {
        let renewed = self.renewed.load(Ordering::Relaxed);
        let time = now.saturating_sub(renewed);
        let dense = self.patience.load(Ordering::Relaxed) + busy;
        let credit = self.credit.load(Ordering::Relaxed);
        let credit = match renewed {
            0 => credit.saturating_sub(RETURN_COST),
            _ => credit_after(credit, time, dense, || kept(renewed)),
        };
        self.credit.store(credit, Ordering::Relaxed);
        self.patience.store(DENSE + answer, Ordering::Relaxed);
        // Who reads this time finds the credit that belongs to it, or a later one.
        self.renewed.store(now, Ordering::Release);
        time
    }

    /// Gives the lease back, because the calling thread is going to wait. Returns `true` if the
    /// progress thread may be asleep for it; then wake that thread.
    ///
    /// The credit stays, because the progress thread serves the sockets from here on. A pause since
    /// the last renewal costs what any pause costs. `now` and `kept` are only called if somebody
    /// has the lease.
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
        let held = self.length() >= WORTH;
        let time = now().saturating_sub(renewed);
        let dense = self.patience.load(Ordering::Relaxed);
        let credit = self.credit.load(Ordering::Relaxed);
        let credit = credit_after(credit, time, dense, || kept(renewed));
        self.credit.store(credit, Ordering::Relaxed);
        self.renewed.store(0, Ordering::Relaxed);
        held
    }

    /// Returns when the lease ends, if it has not ended and is worth being waited for.
    #[inline]
    pub(crate) fn end(&self, now: u64) -> Option<u64> {
        let renewed = self.renewed.load(Ordering::Acquire);
        let length = self.length();
        let end = renewed.saturating_add(length);
        (length >= WORTH && now < end).then_some(end)
    }

    /// Returns `true` if it has ended lately, without having been given back: who held it has polled much, and may only be waiting
    /// for a processor.
    pub(crate) fn has_ended_lately(&self, now: u64) -> bool {
        let age = now.saturating_sub(self.renewed.load(Ordering::Relaxed));
        age < LATELY && self.length() >= WORTH && self.end(now).is_none()
    }

    /// Returns how long the lease lasts from its last renewal on.
    #[inline]
    fn length(&self) -> u64 {
        self.credit.load(Ordering::Relaxed).min(LONGEST)
    }

    /// A lease that has been renewed until `now` for a long time.
    #[cfg(all(test, loom))]
    pub(super) fn held(now: u64) -> Self {
        Self {
            renewed: AtomicU64::new(now),
            credit: AtomicU64::new(MOST),
            driven: AtomicU64::new(now),
            patience: AtomicU64::new(DENSE),
        }
    }

    /// A broken renewal after a long pause, for the model that must notice it.
    #[cfg(all(test, loom))]
    pub(super) fn renew_in_wrong_order(&self, now: u64) {
        self.renewed.store(now, Ordering::Release);
        self.credit.store(0, Ordering::Relaxed);
    }
}

/// Returns the credit after `time` since the last renewal. A longer time than `dense` is a pause,
/// unless the thread was kept from its processor meanwhile.
#[inline]
fn credit_after(credit: u64, time: u64, dense: u64, kept: impl FnOnce() -> u64) -> u64 {
    let gap = match time <= dense {
        true => time,
        false => time.saturating_sub(kept()),
    };
    match gap <= dense {
        true => (credit + gap / SHARE).min(MOST),
        false => credit.saturating_sub(gap),
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
