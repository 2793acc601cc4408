//! The threads that poll one completion queue: which sockets they drive, by which lease, and when
//! they give the lease back.
//!
//! A queue with few queue pairs has a lease of its own, by which its pollers drive these sockets
//! one by one. If it has many, they drive the whole set by [`everything`]. A thread that is about
//! to wait gives back both.

use super::core::{everything, poll_all, wake_up};
use super::lease::Lease;
use super::policy;
use super::sync::{AtomicBool, AtomicU32, Ordering};
use crate::sys::clock::now_ns;
use crate::sys::thread::kept_from_processor;

/// Adds one to `counter` and returns the value before. The count is a hint: there is no locked
/// instruction, so one of two additions at the same time may be lost.
#[inline]
fn count(counter: &AtomicU32) -> u32 {
    let before = counter.load(Ordering::Relaxed);
    counter.store(before.wrapping_add(1), Ordering::Relaxed);
    before
}

/// State of the pollers of one queue. Any thread may use it at any time.
#[derive(Debug)]
pub(crate) struct Pollers {
    /// `true` if the queue has more queue pairs of a kind than are read one by one. Polls then
    /// serve the whole process.
    many: AtomicBool,
    /// The lease by which they drive the queue pairs one by one, unless there are
    /// [`many`](Self::many).
    lease: Lease,
    /// Empty polls and taken completions since the lease was renewed. A hint.
    unnoted: AtomicU32,
    /// Empty polls and taken completions between two renewals. A hint.
    renew_every: AtomicU32,
    /// The number of the empty poll that next serves the whole process, and its distance from the
    /// one before. Both are hints: a lost update costs one poll.
    serve_all_at: AtomicU32,
    serve_all_after: AtomicU32,
    /// Polls without result. They show a posting thread whether the program waits between posts.
    empty_polls: AtomicU32,
}

impl Default for Pollers {
    fn default() -> Self {
        Self {
            many: AtomicBool::new(false),
            lease: Lease::new(),
            unnoted: AtomicU32::new(0),
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

    /// Returns `true` if the queue has too many queue pairs to read their sockets one by one.
    #[inline]
    pub(crate) fn are_for_many(&self) -> bool {
        self.many.load(Ordering::Relaxed)
    }

    pub(crate) fn set_many(&self, many: bool) {
        if many && !self.many.swap(many, Ordering::Relaxed) && give_back([&self.lease]) {
            // From now on polls do not drive the queue pairs one by one, so their sockets must be
            // watched.
            wake_up();
        }
        self.many.store(many, Ordering::Relaxed);
    }

    #[inline]
    fn lease(&self) -> &Lease {
        match self.many.load(Ordering::Relaxed) {
            true => everything(),
            false => &self.lease,
        }
    }

    /// Returns until when they drive the sockets of the queue's queue pairs one by one; `None` if
    /// they do not drive them at `now`.
    pub(crate) fn driven_until(&self, now: u64) -> Option<u64> {
        self.lease.end(now)
    }

    /// Returns `true` if they have driven the sockets lately, but do not at `now`.
    pub(crate) fn was_driven(&self, now: u64) -> bool {
        self.lease.has_ended_lately(now) || everything().has_ended_lately(now)
    }

    /// Counts empty polls or taken completions. Returns `true` if the lease has to be renewed.
    #[inline]
    fn is_time_to_renew(&self, count: u32) -> bool {
        let unnoted = self.unnoted.load(Ordering::Relaxed).saturating_add(count);
        let is_time = unnoted >= self.renew_every.load(Ordering::Relaxed);
        let remaining = if is_time { 0 } else { unnoted };
        self.unnoted.store(remaining, Ordering::Relaxed);
        is_time
    }

    /// Sets how often the lease is renewed, by the time between the last two renewals.
    #[inline]
    fn set_pace(&self, time: u64) {
        let every = self.renew_every.load(Ordering::Relaxed);
        let next = policy::renew_every(every, time);
        if next != every {
            self.renew_every.store(next, Ordering::Relaxed);
        }
    }

    /// Records that the calling thread has taken completions. Without this, the progress thread
    /// would find the next ones first, and this thread would never drive.
    #[inline]
    pub(crate) fn took(&self, taken: usize) {
        if self.is_time_to_renew(taken as u32) {
            self.lease().stay(now_ns(), taken, kept_from_processor);
        }
    }

    /// Drives for an empty poll. `drive` serves the sockets of the queue's queue pairs. If its
    /// argument is `true`, it also serves the whole process by [`serve_all`](Self::serve_all), and
    /// returns `true` if something was ready there.
    #[inline]
    pub(crate) fn drive_for_poll(&self, drive: impl FnOnce(bool) -> bool) {
        let polls = count(&self.empty_polls);
        if self.is_time_to_renew(1) && !self.many.load(Ordering::Relaxed) {
            let time = self.lease.drive(now_ns(), 0, kept_from_processor);
            self.set_pace(time);
        }
        let serve_all =
            polls.wrapping_sub(self.serve_all_at.load(Ordering::Relaxed)) < u32::MAX / 2;
        let served = drive(serve_all);
        if serve_all {
            self.note_served(polls, served);
        }
    }

    /// Renews the lease for a thread that polls repeatedly, knows the time, and is about to drive.
    #[inline]
    pub(crate) fn renew(&self, now: u64) {
        if !self.many.load(Ordering::Relaxed) {
            self.lease.drive(now, 0, kept_from_processor);
        }
    }

    /// Records a drive of `busy` nanoseconds; the thread's next poll will be late.
    #[inline]
    pub(crate) fn was_busy(&self, busy: u64) {
        self.lease().drive(now_ns(), busy, kept_from_processor);
    }

    /// Serves the whole process. Returns `true` if something was ready.
    pub(crate) fn serve_all(&self) -> bool {
        poll_all(self.many.load(Ordering::Relaxed))
    }

    /// Sets when a poll next serves the whole process, by what the last one found.
    fn note_served(&self, polls: u32, served: bool) {
        let after = self.serve_all_after.load(Ordering::Relaxed);
        let after = policy::serve_all_after(after, served);
        self.serve_all_after.store(after, Ordering::Relaxed);
        self.serve_all_at
            .store(polls.wrapping_add(after), Ordering::Relaxed);
    }

    /// Gives the sockets to the progress thread, because the caller is about to wait.
    pub(crate) fn hand_over(&self) {
        // Polls of a queue with few queue pairs also renew the lease of everything now and then.
        if give_back([&self.lease, everything()]) {
            wake_up();
        }
    }
}

/// Gives back leases. Returns `true` if the progress thread may be asleep for one of them.
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

    /// A program may poll many other things between two polls of one queue, as UCX does, and still
    /// drive it.
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

    /// The time of a long drive is no pause, so a thread that does nothing else keeps its lease.
    #[test]
    fn long_drives_renew_the_lease() {
        let pollers = Pollers::default();
        let limit = now_ns() + 20_000_000_000;
        while pollers.driven_until(now_ns()).is_none() {
            assert!(now_ns() < limit, "the queue is never driven");
            // Too long for dense polls.
            std::thread::sleep(std::time::Duration::from_micros(100));
            pollers.was_busy(1_000_000_000);
        }
        let end = pollers.driven_until(0).unwrap();
        // The lease was not given back: its thread may only be waiting for a processor.
        assert!(!pollers.lease.has_ended_lately(end - 1));
        assert!(pollers.was_driven(end));
        pollers.hand_over();
        assert!(!pollers.lease.has_ended_lately(end));
    }

    #[test]
    fn polls_and_completions_count_alike() {
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
            // On a busy machine the lease may have ended by now. Then try again.
            pollers.took(RENEW_EVERY_MAX as usize);
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

    /// Returns which of the next polls serve the whole process. `found` says whether something is
    /// ready then.
    fn serves(pollers: &Pollers, polls: u32, found: bool) -> Vec<u32> {
        let serves = |_: &u32| {
            let mut all = false;
            pollers.drive_for_poll(|serve_all| {
                all = serve_all;
                serve_all && found
            });
            all
        };
        (0..polls).filter(serves).collect()
    }

    #[test]
    fn empty_polls_serve_all_at_times() {
        let pollers = Pollers::default();
        assert!(serves(&pollers, SERVE_ALL_EVERY_MAX, false).is_empty());
        // While something is ready, each poll serves all. Then the distance doubles.
        assert_eq!(serves(&pollers, 3, true), [0, 1, 2]);
        assert_eq!(serves(&pollers, 33, false), [0, 2, 6, 14, 30]);
        assert_eq!(serves(&pollers, 400, false), [29, 93, 157, 221, 285, 349]);
        assert_eq!(pollers.empty_polls(), SERVE_ALL_EVERY_MAX + 436);
    }

    #[test]
    fn many_members_use_shared_lease() {
        let pollers = Pollers::default();
        let limit = now_ns() + 20_000_000_000;
        while pollers.driven_until(now_ns()).is_none() {
            assert!(now_ns() < limit, "the queue is never driven");
            pollers.renew(now_ns());
        }
        assert!(!pollers.are_for_many());
        pollers.set_many(true);
        assert!(pollers.are_for_many());
        assert_eq!(pollers.driven_until(now_ns()), None);
        for _ in 0..1000 {
            pollers.renew(now_ns());
            assert_eq!(pollers.driven_until(now_ns()), None);
        }
        pollers.set_many(false);
        assert!(!pollers.are_for_many());
    }

    /// Renews a lease as densely as a program that only polls. Returns the last time.
    fn hold(lease: &Lease) -> u64 {
        let mut now = 0;
        for _ in 0..1000 {
            now += 10_000;
            lease.drive(now, 0, |_| 0);
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
                "both were given back already"
            );
        }
    }

    #[test]
    fn few_queue_pairs_keep_the_lease() {
        let pollers = Pollers::default();
        let now = hold(&pollers.lease);
        let end = pollers.driven_until(now);
        assert!(end.is_some());
        pollers.set_many(false);
        assert_eq!(pollers.driven_until(now), end);
        pollers.set_many(true);
        assert_eq!(pollers.driven_until(now), None);
    }

    #[test]
    fn old_drive_is_forgotten() {
        let pollers = Pollers::default();
        hold(&pollers.lease);
        assert!(!pollers.was_driven(u64::MAX));
    }

    /// Of two polls at the same time one may be lost, and with it the turn to serve the whole
    /// process.
    #[test]
    fn missed_service_is_made_up() {
        for (polls, turn, first) in [(5, 5, 0), (5, 3, 0), (2, u32::MAX, 0), (u32::MAX, 1, 2)] {
            let pollers = Pollers::default();
            pollers.empty_polls.store(polls, Ordering::Relaxed);
            pollers.serve_all_at.store(turn, Ordering::Relaxed);
            assert_eq!(serves(&pollers, 10, false), [first], "{polls} {turn}");
        }
    }

    #[test]
    fn empty_polls_hold_own_lease() {
        let few = Pollers::default();
        let many = Pollers::default();
        many.set_many(true);
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
