//! The pollers of one completion queue, that is, the threads that poll it: which sockets they
//! drive, with which lease, and when they give the lease back.
//!
//! If the queue has few queue pairs, its pollers drive their sockets one by one, with the queue's
//! own lease. If it has many, its pollers drive the whole process, with the lease [`everything`]. A
//! thread that is about to wait gives both leases back.

use super::core::{poll_all, wake_up, whole_process_lease};
use super::lease::Lease;
use super::policy;
use super::sync::{AtomicBool, AtomicU32, Ordering};
use crate::sys::clock::now_ns;
use crate::sys::thread::kept_from_processor;

/// Increments `counter`, and returns the value before. The count is a hint: this is not an atomic
/// increment, so one of two concurrent increments may be lost.
#[inline]
fn increment(counter: &AtomicU32) -> u32 {
    let before = counter.load(Ordering::Relaxed);
    counter.store(before.wrapping_add(1), Ordering::Relaxed);
    before
}

#[derive(Debug)]
pub(crate) struct Pollers {
    /// `true` if the queue has too many queue pairs to drive them one by one. Polls then serve the
    /// whole process.
    many: AtomicBool,
    /// The lease for driving the queue pairs one by one. Unused while [`many`](Self::many) is set.
    lease: Lease,
    /// Number of empty polls and taken completions since the lease was renewed. A hint.
    since_renewal: AtomicU32,
    /// Number of empty polls and taken completions from one renewal to the next. A hint.
    renew_every: AtomicU32,
    /// The value of `empty_polls` at which a poll next serves the whole process. A hint: a lost
    /// update costs one poll.
    serve_all_at: AtomicU32,
    /// Number of empty polls between the last two polls that served the whole process. A hint.
    serve_all_after: AtomicU32,
    /// Number of polls without result. A posting thread learns from this whether the program waits
    /// between posts.
    empty_polls: AtomicU32,
}

impl Default for Pollers {
    fn default() -> Self {
        Self {
            many: AtomicBool::new(false),
            lease: Lease::new(),
            since_renewal: AtomicU32::new(0),
            renew_every: AtomicU32::new(policy::RENEW_EVERY_MAX),
            serve_all_at: AtomicU32::new(policy::SERVE_ALL_EVERY_MAX),
            serve_all_after: AtomicU32::new(policy::SERVE_ALL_EVERY_MAX),
            empty_polls: AtomicU32::new(0),
        }
    }
}

impl Pollers {
    #[inline]
    pub(crate) fn empty_polls(&self) -> u32 {
        self.empty_polls.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn have_many_qps(&self) -> bool {
        self.many.load(Ordering::Relaxed)
    }

    pub(crate) fn set_many_qps(&self, many: bool) {
        if many && !self.many.swap(many, Ordering::Relaxed) && give_back([&self.lease]) {
            // From now on, polls do not drive the queue pairs one by one, so their sockets must be
            // in the `epoll` set again.
            wake_up();
        }
        self.many.store(many, Ordering::Relaxed);
    }

    #[inline]
    fn lease(&self) -> &Lease {
        match self.many.load(Ordering::Relaxed) {
            true => whole_process_lease(),
            false => &self.lease,
        }
    }

    /// Returns until when pollers drive the sockets of the queue's queue pairs one by one; `None`
    /// if they do not at `now`.
    pub(crate) fn driven_until(&self, now: u64) -> Option<u64> {
        self.lease.end(now)
    }

    pub(crate) fn was_driven(&self, now: u64) -> bool {
        self.lease.has_ended_lately(now) || whole_process_lease().has_ended_lately(now)
    }

    /// Adds `count` empty polls or taken completions. Returns `true` if the lease must be renewed.
    #[inline]
    fn is_time_to_renew(&self, count: u32) -> bool {
        let since_renewal = self
            .since_renewal
            .load(Ordering::Relaxed)
            .saturating_add(count);
        let is_time = since_renewal >= self.renew_every.load(Ordering::Relaxed);
        let remaining = if is_time { 0 } else { since_renewal };
        self.since_renewal.store(remaining, Ordering::Relaxed);
        is_time
    }

    #[inline]
    fn set_pace(&self, gap: u64) {
        let every = self.renew_every.load(Ordering::Relaxed);
        let next = policy::renew_every(every, gap);
        if next != every {
            self.renew_every.store(next, Ordering::Relaxed);
        }
    }

    /// Records that the calling thread has taken completions, and renews its lease. Without the
    /// lease, the progress thread would receive the next data, and this thread would never drive.
    #[inline]
    pub(crate) fn record_taken(&self, taken: usize) {
        if self.is_time_to_renew(taken as u32) {
            self.lease()
                .renew_for_completions(now_ns(), taken, kept_from_processor);
        }
    }

    /// Drives for an empty poll. `drive` serves the sockets of the queue's queue pairs. If its
    /// argument is `true`, `drive` also calls [`serve_all`](Self::serve_all), and returns its
    /// result.
    #[inline]
    pub(crate) fn drive_for_poll(&self, drive: impl FnOnce(bool) -> bool) {
        let polls = increment(&self.empty_polls);
        if self.is_time_to_renew(1) && !self.many.load(Ordering::Relaxed) {
            let gap = self.lease.renew_for_drive(now_ns(), 0, kept_from_processor);
            self.set_pace(gap);
        }
        let serve_all =
            polls.wrapping_sub(self.serve_all_at.load(Ordering::Relaxed)) < u32::MAX / 2;
        let served = drive(serve_all);
        if serve_all {
            self.schedule_serve_all(polls, served);
        }
    }

    /// Renews the lease at the time `now`, for a thread that polls in a loop and is about to drive.
    #[inline]
    pub(crate) fn renew(&self, now: u64) {
        if !self.many.load(Ordering::Relaxed) {
            self.lease.renew_for_drive(now, 0, kept_from_processor);
        }
    }

    /// Records a drive of `duration_ns`, because of which the next poll is late.
    #[inline]
    pub(crate) fn record_drive(&self, duration_ns: u64) {
        self.lease()
            .renew_for_drive(now_ns(), duration_ns, kept_from_processor);
    }

    pub(crate) fn serve_all(&self) -> bool {
        poll_all(self.many.load(Ordering::Relaxed))
    }

    /// Sets which poll next serves the whole process. `served` tells whether poll number `polls`
    /// found a ready source.
    fn schedule_serve_all(&self, polls: u32, served: bool) {
        let after = self.serve_all_after.load(Ordering::Relaxed);
        let after = policy::serve_all_after(after, served);
        self.serve_all_after.store(after, Ordering::Relaxed);
        self.serve_all_at
            .store(polls.wrapping_add(after), Ordering::Relaxed);
    }

    /// Gives the sockets to the progress thread, because the caller has driven them and may not
    /// poll again soon, although it does not wait.
    #[cold]
    pub(crate) fn stop_driving(&self) {
        self.lease.forget_drive();
        self.hand_over();
    }

    /// Gives the sockets to the progress thread, because the caller is about to wait.
    pub(crate) fn hand_over(&self) {
        // Polls of a queue with few queue pairs sometimes renew the lease of the process, too.
        if give_back([&self.lease, whole_process_lease()]) {
            wake_up();
        }
    }
}

/// Gives leases back. Returns `true` if progress threads may be sleeping because of one of them,
/// and must be woken.
fn give_back<const N: usize>(leases: [&Lease; N]) -> bool {
    leases
        .map(|lease| lease.give_back(now_ns, kept_from_processor))
        .contains(&true)
}

#[cfg(test)]
mod tests {
    use super::policy::{
        RENEW_EVERY_MAX, RENEW_TOO_LATE_NS, RENEW_TOO_SOON_NS, SERVE_ALL_EVERY_MAX,
    };
    use super::*;

    /// A program that polls other objects between two polls of a queue, as UCX does, must keep its
    /// lease.
    #[test]
    fn slow_polls_renew_more_often() {
        let pollers = Pollers::default();
        let every = || pollers.renew_every.load(Ordering::Relaxed);
        assert_eq!(every(), RENEW_EVERY_MAX);
        for next in [4, 2, 1, 1] {
            pollers.set_pace(RENEW_TOO_LATE_NS);
            assert_eq!(every(), next);
        }
        assert!(pollers.is_time_to_renew(1), "each poll renews");
        pollers.set_pace(RENEW_TOO_SOON_NS);
        assert_eq!(every(), 1);
        for next in [2, 4, 8, 8] {
            pollers.set_pace(RENEW_TOO_SOON_NS - 1);
            assert_eq!(every(), next);
        }
        for time in [RENEW_TOO_SOON_NS, RENEW_TOO_LATE_NS - 1] {
            pollers.set_pace(time);
            assert_eq!(every(), 8, "the pace is right");
        }
    }

    #[test]
    fn long_drives_renew_the_lease() {
        let pollers = Pollers::default();
        let limit = now_ns() + 20_000_000_000;
        while pollers.driven_until(now_ns()).is_none() {
            assert!(now_ns() < limit, "the queue is never driven");
            // Without the time of the drive, these polls would not be dense.
            std::thread::sleep(std::time::Duration::from_micros(100));
            pollers.record_drive(1_000_000_000);
        }
        let end = pollers.driven_until(0).unwrap();
        // The lease ends without being given back: its thread may only be waiting for a processor.
        assert!(!pollers.lease.has_ended_lately(end - 1));
        assert!(pollers.was_driven(end));
        pollers.hand_over();
        assert!(!pollers.lease.has_ended_lately(end));
    }

    #[test]
    fn lease_is_renewed_at_regular_counts() {
        let pollers = Pollers::default();
        for _ in 0..3 {
            assert!(!pollers.is_time_to_renew(RENEW_EVERY_MAX - 1));
            assert!(pollers.is_time_to_renew(1));
        }
        assert!(pollers.is_time_to_renew(RENEW_EVERY_MAX + 5));
        assert!(!pollers.is_time_to_renew(1));
    }

    #[test]
    fn taken_completions_renew_the_lease() {
        let pollers = Pollers::default();
        let limit = now_ns() + 20_000_000_000;
        loop {
            assert!(now_ns() < limit, "completions never renew the lease");
            pollers.renew(now_ns());
            let Some(end) = pollers.driven_until(now_ns()) else {
                continue;
            };
            // On a busy machine the lease may end before this, and the test tries again.
            pollers.record_taken(RENEW_EVERY_MAX as usize);
            if pollers
                .driven_until(now_ns())
                .is_some_and(|later| later > end)
            {
                break;
            }
        }
        pollers.hand_over();
        assert_eq!(pollers.driven_until(now_ns()), None);
    }

    /// Polls `polls` times. Returns which of these polls serve the whole process. `ready` tells
    /// whether a source is ready then.
    fn polls_that_serve_all(pollers: &Pollers, polls: u32, ready: bool) -> Vec<u32> {
        let serves_all = |_: &u32| {
            let mut all = false;
            pollers.drive_for_poll(|serve_all| {
                all = serve_all;
                serve_all && ready
            });
            all
        };
        (0..polls).filter(serves_all).collect()
    }

    #[test]
    fn some_empty_polls_serve_whole_process() {
        let pollers = Pollers::default();
        assert!(polls_that_serve_all(&pollers, SERVE_ALL_EVERY_MAX, false).is_empty());
        // While a source is ready, each poll serves the process. After that, the distance doubles.
        assert_eq!(polls_that_serve_all(&pollers, 3, true), [0, 1, 2]);
        let polls = polls_that_serve_all(&pollers, 33, false);
        assert_eq!(polls, [0, 2, 6, 14, 30]);
        let polls = polls_that_serve_all(&pollers, 400, false);
        assert_eq!(polls, [29, 93, 157, 221, 285, 349]);
        assert_eq!(pollers.empty_polls(), SERVE_ALL_EVERY_MAX + 436);
    }

    #[test]
    fn many_queue_pairs_leave_own_lease_unused() {
        let pollers = Pollers::default();
        let limit = now_ns() + 20_000_000_000;
        while pollers.driven_until(now_ns()).is_none() {
            assert!(now_ns() < limit, "the queue is never driven");
            pollers.renew(now_ns());
        }
        assert!(!pollers.have_many_qps());
        pollers.set_many_qps(true);
        assert!(pollers.have_many_qps());
        assert_eq!(pollers.driven_until(now_ns()), None);
        for _ in 0..1000 {
            pollers.renew(now_ns());
            assert_eq!(pollers.driven_until(now_ns()), None);
        }
        pollers.set_many_qps(false);
        assert!(!pollers.have_many_qps());
    }

    /// Renews a lease as densely as a program that only polls.
    fn hold(lease: &Lease) -> u64 {
        let mut now = 0;
        for _ in 0..1000 {
            now += 10_000;
            lease.renew_for_drive(now, 0, |_| 0);
        }
        now
    }

    #[test]
    fn held_lease_wakes_progress_thread() {
        for held in [[false, false], [true, false], [false, true], [true, true]] {
            let leases = [Lease::new(), Lease::new()];
            for (lease, held) in leases.iter().zip(held) {
                if held {
                    hold(lease);
                }
            }
            assert_eq!(
                give_back(leases.each_ref()),
                held.contains(&true),
                "{held:?}"
            );
            assert!(
                !give_back(leases.each_ref()),
                "both leases were given back already"
            );
        }
    }

    #[test]
    fn few_queue_pairs_keep_the_lease() {
        let pollers = Pollers::default();
        let now = hold(&pollers.lease);
        let end = pollers.driven_until(now);
        assert!(end.is_some());
        pollers.set_many_qps(false);
        assert_eq!(pollers.driven_until(now), end);
        pollers.set_many_qps(true);
        assert_eq!(pollers.driven_until(now), None);
    }

    #[test]
    fn old_drive_was_not_lately() {
        let pollers = Pollers::default();
        hold(&pollers.lease);
        assert!(!pollers.was_driven(u64::MAX));
    }

    /// Concurrent polls may skip the value of `empty_polls` at which a poll serves the whole
    /// process. The next poll then does so.
    #[test]
    fn skipped_service_is_made_up() {
        for (polls, at, first) in [(5, 5, 0), (5, 3, 0), (2, u32::MAX, 0), (u32::MAX, 1, 2)] {
            let pollers = Pollers::default();
            pollers.empty_polls.store(polls, Ordering::Relaxed);
            pollers.serve_all_at.store(at, Ordering::Relaxed);
            let served = polls_that_serve_all(&pollers, 10, false);
            assert_eq!(served, [first], "{polls} {at}");
        }
    }

    #[test]
    fn empty_polls_of_few_hold_own_lease() {
        let few = Pollers::default();
        let many = Pollers::default();
        many.set_many_qps(true);
        let limit = now_ns() + 20_000_000_000;
        while few.driven_until(now_ns()).is_none() {
            assert!(now_ns() < limit, "the queue is never driven");
            for pollers in [&few, &many] {
                pollers.drive_for_poll(|_| false);
            }
            assert_eq!(many.driven_until(0), None);
        }
    }
}
