//! Tests and models of the parker.

use super::*;

#[cfg(not(loom))]
mod plain {
    use super::*;
    use crate::sys::eventfd::EventFd;
    use crate::sys::poller::{Interest, wait_fd};
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::time::{Duration, Instant};

    const LONG: Duration = Duration::from_secs(10);

    /// Sleeps for at most `time`, as the progress thread does, if `idle` returns `true`. Returns
    /// `true` if another thread woke this one.
    fn sleep(
        parker: &Parker,
        event: &EventFd,
        time: Duration,
        idle: impl FnOnce() -> bool,
    ) -> bool {
        let announced = parker.announce();
        let woken = idle() && wait_fd(event, Interest::READ, Some(time)).expect("poll");
        drop(announced);
        event.drain();
        woken
    }

    #[test]
    fn sleep_ends_by_timeout_or_work() {
        let (parker, event) = (Parker::new(), EventFd::new().expect("eventfd"));
        let start = Instant::now();
        assert!(!sleep(&parker, &event, Duration::from_millis(15), || true));
        assert!(start.elapsed() >= Duration::from_millis(15));
        assert!(!sleep(&parker, &event, LONG, || false));
        assert!(start.elapsed() < LONG);
        assert!(!parker.unpark_with(|| panic!("nobody sleeps")));
    }

    #[test]
    fn wake_up_before_sleep_ends_sleep() {
        let (parker, event) = (Parker::new(), EventFd::new().expect("eventfd"));
        let start = Instant::now();
        assert!(sleep(&parker, &event, LONG, || {
            assert!(parker.unpark_with(|| event.signal()));
            assert!(!parker.unpark_with(|| panic!("woken twice")));
            true
        }));
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn panic_ends_announcement() {
        let parker = Parker::new();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _announced = parker.announce();
            panic!("intended by the test");
        }));
        assert!(panicked.is_err());
        assert!(!parker.unpark_with(|| panic!("nobody sleeps")));
    }

    #[test]
    fn concurrent_wakers_lose_no_work() {
        const ITEMS: u64 = 20_000;
        let (parker, event) = (Parker::new(), EventFd::new().expect("eventfd"));
        let (queued, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let mut done = 0;
                while !stop.load(Ordering::Relaxed) || queued.load(Ordering::Relaxed) > 0 {
                    done += queued.swap(0, Ordering::Relaxed);
                    let idle =
                        || queued.load(Ordering::Relaxed) == 0 && !stop.load(Ordering::Relaxed);
                    let start = Instant::now();
                    sleep(&parker, &event, LONG, idle);
                    assert!(start.elapsed() < LONG, "the sleeper missed work");
                }
                done
            });
            let wakers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..ITEMS {
                            queued.fetch_add(1, Ordering::Relaxed);
                            parker.unpark_with(|| event.signal());
                        }
                    })
                })
                .collect();
            for waker in wakers {
                waker.join().expect("waker");
            }
            stop.store(true, Ordering::Relaxed);
            parker.unpark_with(|| event.signal());
            assert_eq!(sleeper.join().expect("sleeper"), 2 * ITEMS);
        });
    }

    #[test]
    fn descriptor_wakes_sleeper() {
        let (parker, event) = (Parker::new(), EventFd::new().expect("eventfd"));
        let announced = parker.announce();
        assert!(!announced.is_woken());
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(parker.unpark_with(|| event.signal())));
            assert!(wait_fd(&event, Interest::READ, Some(LONG)).expect("poll"));
        });
        assert!(announced.is_woken());
        drop(announced);
        assert!(!parker.unpark_with(|| panic!("nobody sleeps")));
    }
}

#[cfg(loom)]
mod models {
    use super::*;
    use crate::engine::lease::Lease;
    use loom::sync::atomic::AtomicBool;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;
    // This is not loom's `Arc`, which cannot be dropped after loom has found a deadlock.
    use std::sync::Arc;

    struct Event {
        signalled: Mutex<bool>,
        changed: Condvar,
    }

    impl Event {
        fn new() -> Self {
            Self {
                signalled: Mutex::new(false),
                changed: Condvar::new(),
            }
        }

        fn signal(&self) {
            *self.signalled.lock().expect("lock") = true;
            self.changed.notify_one();
        }

        /// Sleeps without limit. A lost wake-up is a deadlock, which loom reports.
        fn sleep(&self) {
            let mut signalled = self.signalled.lock().expect("lock");
            while !std::mem::take(&mut *signalled) {
                signalled = self.changed.wait(signalled).expect("lock");
            }
        }

        fn drain(&self) {
            *self.signalled.lock().expect("lock") = false;
        }
    }

    struct Shared {
        parker: Parker,
        event: Event,
        /// Set by each waker. The sleeper is done when both are set.
        work: [AtomicBool; 2],
    }

    type Park = fn(&Shared, &dyn Fn() -> bool);
    type Unpark = fn(&Shared);

    fn model(wakers: usize, park: Park, unpark: Unpark) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = (wakers > 1).then_some(3);
        builder.check(move || {
            let shared = Arc::new(Shared {
                parker: Parker::new(),
                event: Event::new(),
                work: [AtomicBool::new(false), AtomicBool::new(wakers < 2)],
            });
            let threads: Vec<_> = (0..wakers)
                .map(|index| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        shared.work[index].store(true, Ordering::Relaxed);
                        unpark(&shared);
                    })
                })
                .collect();
            let idle = || shared.work.iter().any(|slot| !slot.load(Ordering::Relaxed));
            while idle() {
                park(&shared, &idle);
            }
            for thread in threads {
                thread.join().expect("waker");
            }
        });
    }

    fn park(shared: &Shared, idle: &dyn Fn() -> bool) {
        let announced = shared.parker.announce();
        if idle() {
            shared.event.sleep();
        }
        drop(announced);
        shared.event.drain();
    }

    fn unpark(shared: &Shared) {
        shared.parker.unpark_with(|| shared.event.signal());
    }

    #[test]
    fn loom_parker_one_waker() {
        model(1, park, unpark);
    }

    #[test]
    fn loom_parker_two_wakers() {
        model(2, park, unpark);
    }

    /// Planted bug: the waker has no fence, so it may check for a sleeper before its work is
    /// visible.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_parker_broken_waker_is_caught() {
        fn broken(shared: &Shared) {
            if shared.parker.state.load(Ordering::Acquire) == PARKED {
                unpark(shared);
            }
        }
        model(1, park, broken);
    }

    /// Planted bug: the sleeper checks for work only before the announcement.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_parker_broken_sleeper_is_caught() {
        fn broken(shared: &Shared, _: &dyn Fn() -> bool) {
            park(shared, &|| true);
        }
        model(1, broken, unpark);
    }

    const NOW: u64 = 20_000_000;

    /// A thread gives the lease back while the progress thread goes to sleep because of it.
    fn lease_model(give_back: fn(&Lease, &Shared), park: fn(&Lease, &Shared)) {
        loom::model(move || {
            let lease = Arc::new(Lease::held(NOW));
            let shared = Arc::new(Shared {
                parker: Parker::new(),
                event: Event::new(),
                work: [AtomicBool::new(false), AtomicBool::new(false)],
            });
            let holder = {
                let (lease, shared) = (Arc::clone(&lease), Arc::clone(&shared));
                thread::spawn(move || give_back(&lease, &shared))
            };
            while lease.end(NOW).is_some() {
                park(&lease, &shared);
            }
            holder.join().expect("holder");
        });
    }

    fn hand_over(lease: &Lease, shared: &Shared) {
        if lease.give_back(|| NOW, |_| 0) {
            unpark(shared);
        }
    }

    fn sleep_while_held(lease: &Lease, shared: &Shared) {
        park(shared, &|| lease.end(NOW).is_some());
    }

    #[test]
    fn loom_lease_given_back_wakes() {
        lease_model(hand_over, sleep_while_held);
    }

    /// Planted bug: the holder wakes the progress thread before it gives the lease back.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_lease_broken_holder_is_caught() {
        fn broken(lease: &Lease, shared: &Shared) {
            unpark(shared);
            lease.give_back(|| NOW, |_| 0);
        }
        lease_model(broken, sleep_while_held);
    }

    /// Planted bug: the progress thread checks the lease only before the announcement.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_lease_broken_sleeper_is_caught() {
        fn broken(_: &Lease, shared: &Shared) {
            park(shared, &|| true);
        }
        lease_model(hand_over, broken);
    }

    /// A thread polls again after a long pause while the progress thread checks the lease. The
    /// check must not combine the time of that poll with the credit from before the pause.
    fn pause_model(renew: fn(&Lease, u64)) {
        loom::model(move || {
            let lease = Arc::new(Lease::held(NOW));
            let later = NOW + 10_000_000;
            let driver = {
                let lease = Arc::clone(&lease);
                thread::spawn(move || renew(&lease, later))
            };
            assert_eq!(lease.end(later), None, "the pause has cost the credit");
            driver.join().expect("driver");
            assert_eq!(lease.end(later), None);
        });
    }

    #[test]
    fn loom_lease_pause_costs_credit() {
        pause_model(|lease, now| {
            lease.renew_for_drive(now, 0, |_| 0);
        });
    }

    /// Planted bug: the renewal stores the time before the credit.
    #[test]
    #[should_panic(expected = "the pause has cost the credit")]
    fn loom_lease_broken_renewal_is_caught() {
        fn broken(lease: &Lease, now: u64) {
            lease.renew_in_wrong_order(now);
        }
        pause_model(broken);
    }
}
