//! Tests and models of the parker.

use super::*;

#[cfg(not(loom))]
mod plain {
    use super::*;
    use crate::sys::eventfd::EventFd;
    use crate::sys::poller::{Interest, wait_fd};
    use std::sync::atomic::{AtomicBool, AtomicU64};

    const LONG: Duration = Duration::from_secs(10);

    #[test]
    fn times_out_and_does_not_sleep_on_work() {
        let parker = Parker::default();
        let start = Instant::now();
        assert!(!parker.park_timeout(Duration::from_millis(15), || true));
        assert!(start.elapsed() >= Duration::from_millis(15));
        assert!(!parker.park_timeout(LONG, || false));
        assert!(start.elapsed() < LONG);
        assert!(!parker.unpark(), "nobody sleeps");
        assert!(
            !parker.park_timeout(Duration::ZERO, || true),
            "no stale wake-up"
        );
    }

    #[test]
    fn an_unpark_between_look_and_sleep_counts() {
        let parker = Parker::new();
        let start = Instant::now();
        assert!(parker.park_timeout(LONG, || {
            assert!(parker.unpark());
            assert!(!parker.unpark(), "one waker is enough");
            true
        }));
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn never_sleeps_through_work() {
        const ITEMS: u64 = 20_000;
        let parker = Parker::new();
        let (queued, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let mut done = 0;
                while !stop.load(Ordering::Relaxed) || queued.load(Ordering::Relaxed) > 0 {
                    done += queued.swap(0, Ordering::Relaxed);
                    let idle =
                        || queued.load(Ordering::Relaxed) == 0 && !stop.load(Ordering::Relaxed);
                    let start = Instant::now();
                    parker.park_timeout(LONG, idle);
                    assert!(start.elapsed() < LONG, "slept through it");
                }
                done
            });
            let wakers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..ITEMS {
                            queued.fetch_add(1, Ordering::Relaxed);
                            parker.unpark();
                        }
                    })
                })
                .collect();
            for waker in wakers {
                waker.join().expect("waker");
            }
            stop.store(true, Ordering::Relaxed);
            parker.unpark();
            assert_eq!(sleeper.join().expect("sleeper"), 2 * ITEMS);
        });
    }

    #[test]
    fn a_sleeper_in_poll_is_woken_by_its_descriptor() {
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
    use loom::sync::atomic::AtomicBool;
    use loom::thread;
    // Not the one of loom, which could not be dropped after a deadlock was found.
    use std::sync::Arc;

    struct Shared {
        parker: Parker,
        work: [AtomicBool; 2],
    }

    /// A lost wake-up is a sleeper that sleeps for ever (loom's time-outs never expire): loom reports a deadlock.
    fn model(wakers: usize, park: fn(&Shared, &dyn Fn() -> bool), unpark: fn(&Parker)) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = (wakers > 1).then_some(3);
        builder.check(move || {
            let shared = Arc::new(Shared {
                parker: Parker::new(),
                work: [AtomicBool::new(false), AtomicBool::new(wakers < 2)],
            });
            let threads: Vec<_> = (0..wakers)
                .map(|who| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        shared.work[who].store(true, Ordering::Relaxed);
                        unpark(&shared.parker);
                    })
                })
                .collect();
            let pending = || shared.work.iter().any(|slot| !slot.load(Ordering::Relaxed));
            while pending() {
                park(&shared, &pending);
            }
            for thread in threads {
                thread.join().expect("waker");
            }
        });
    }

    fn park(shared: &Shared, idle: &dyn Fn() -> bool) {
        shared.parker.park_timeout(Duration::MAX, idle);
    }

    fn unpark(parker: &Parker) {
        parker.unpark();
    }

    #[test]
    fn loom_parker_one_waker() {
        model(1, park, unpark);
    }

    #[test]
    fn loom_parker_two_wakers() {
        model(2, park, unpark);
    }

    /// Broken: the waker looks for a sleeper without the fence, so its look may come before its work.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_parker_broken_waker_is_caught() {
        fn broken(parker: &Parker) {
            if parker.state.load(Ordering::Acquire) == PARKED {
                parker.unpark();
            }
        }
        model(1, park, broken);
    }

    /// Broken: looks for work before the announcement only.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_parker_broken_sleeper_is_caught() {
        fn broken(shared: &Shared, _: &dyn Fn() -> bool) {
            shared.parker.park_timeout(Duration::MAX, || true);
        }
        model(1, broken, unpark);
    }

    /// Broken: wakes without the lock, between the sleeper's check and its sleep.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_parker_broken_wake_is_caught() {
        fn broken(parker: &Parker) {
            parker.unpark_with(|| parker.wake.notify_one());
        }
        model(1, park, broken);
    }
}
