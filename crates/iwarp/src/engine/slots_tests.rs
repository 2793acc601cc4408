//! Tests and models of the slots.

use super::*;
use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicU32 as Count, Ordering::SeqCst};
use std::task::Wake;

#[derive(Default)]
struct Woken(Count);

impl Wake for Woken {
    fn wake(self: StdArc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

type Tried = Slots<StdArc<()>, u8>;

#[cfg(not(loom))]
mod plain {
    use super::*;

    fn take(slots: &Tried) -> Option<u32> {
        slots.take(1)
    }

    /// Ends a request as the router does.
    fn end(slots: &Tried, id: u32, result: Result<(), u8>) -> bool {
        let due = slots.finish(id, result).expect("it is in flight");
        assert!(due.waker.is_none() && due.kept.is_none());
        slots.return_places(due.places)
    }

    #[test]
    fn places_are_free_at_the_end() {
        let slots = Tried::new(2);
        let (a, b) = (take(&slots).unwrap(), take(&slots).unwrap());
        assert!(a != b && take(&slots).is_none());
        assert_eq!((slots.outcome(a), slots.collect(a)), (None, None));
        assert!(!end(&slots, a, Ok(())) && !end(&slots, b, Err(7)));
        assert_eq!(
            (slots.outcome(a), slots.outcome(b)),
            (Some(true), Some(false))
        );
        // The results have not been taken, so these have other slots.
        let (c, d) = (take(&slots).unwrap(), take(&slots).unwrap());
        assert!(take(&slots).is_none());
        assert_eq!([a, b, c, d].iter().sum::<u32>(), 6);
        assert_eq!(slots.count(), 4);
        assert_eq!(slots.collect(b), Some(Err(7)));
        assert_eq!(slots.collect(a), Some(Ok(())));
        assert_eq!(slots.collect(a), None);
        assert!(!end(&slots, d, Ok(())));
        assert_eq!((slots.outcome(c), slots.outcome(d)), (None, Some(true)));
    }

    #[test]
    fn slots_double_until_their_maximum() {
        let slots = Tried::new(3);
        for n in 0..3 << 6 {
            let id = slots.take_without_places().unwrap();
            assert_eq!(id, n, "each block is used from its start");
            let block = slots.block_of(id);
            let number = match n {
                0..3 => 0,
                _ => (n / 3).ilog2() as usize + 1,
            };
            assert_eq!(block.number, number, "{n}");
            let blocks: usize = (0..number).map(|i| 3 << i.saturating_sub(1)).sum();
            assert_eq!(blocks + block.index, n as usize, "{n}");
            assert_eq!(block.slots, 3 << number.saturating_sub(1), "{n}");
            assert!(block.number < BLOCKS);
        }
        assert_eq!(slots.count(), 3 << 6);
        assert_eq!(Tried::new(0).take_without_places(), None);
        // Miri is slow.
        if !cfg!(miri) {
            let slots = Tried::new(u32::MAX);
            assert_eq!(slots.count(), PLACES_MAX);
            let all = slots.take(PLACES_MAX).unwrap();
            assert_eq!(take(&slots), None);
            assert!(!end(&slots, all, Ok(())) && take(&slots).is_some());
            let mut taken = 2;
            while slots.take_without_places().is_some() {
                taken += 1;
            }
            assert_eq!((taken, slots.count()), (PLACES_MAX << 3, PLACES_MAX << 3));
        }
    }

    #[test]
    fn first_end_counts() {
        let slots = Tried::new(1);
        let id = take(&slots).unwrap();
        assert!(!end(&slots, id, Err(1)) && slots.finish(id, Ok(())).is_none());
        assert_eq!(slots.collect(id), Some(Err(1)));
        assert!(slots.finish(id, Ok(())).is_none() && slots.finish(99, Ok(())).is_none());
        assert_eq!((slots.outcome(99), slots.collect(99)), (None, None));
        assert!(!slots.withdraw(99) && slots.abandon(99, None).is_none());
        assert_eq!(take(&slots), Some(id));
        assert_eq!(Tried::new(0).take(1), None);
    }

    #[test]
    fn backlog_takes_places_first() {
        let slots = Tried::new(8);
        assert_eq!((slots.take(9), slots.take(u32::MAX)), (None, None));
        let batch = slots.take(6).unwrap();
        let queued = slots.take_without_places().unwrap();
        slots.crowd();
        assert!(!slots.take_places(queued, 3));
        assert_eq!(take(&slots), None, "the backlog comes first");
        assert!(end(&slots, batch, Ok(())), "there is a backlog");
        assert!(slots.take_places(queued, 3) && !slots.take_places(99, 1));
        slots.uncrowd();
        assert_eq!(slots.take(6), None);
        let version = slots.version();
        let rest = slots.take(5).unwrap();
        assert_ne!(slots.version(), version);
        assert!(!slots.withdraw(rest));
        assert!(!end(&slots, queued, Ok(())));
        assert!(slots.take(8).is_some());
        assert!(!slots.return_places(0));
    }

    #[test]
    fn waiter_is_woken_and_memory_kept() {
        let slots = Tried::new(4);
        let woken = StdArc::new(Woken::default());
        let waker = Waker::from(StdArc::clone(&woken));
        let memory = StdArc::new(());
        let ids = [(); 4].map(|()| take(&slots).unwrap());
        slots.wait(ids[0], &waker);
        slots.wait(ids[0], &waker);
        assert!(slots.has_waiters());
        let due = slots.finish(ids[0], Ok(())).unwrap();
        due.waker.unwrap().wake();
        assert!(due.kept.is_none() && !slots.has_waiters());
        // The request has ended, so the waker is not kept.
        slots.wait(ids[0], &waker);
        assert!(!slots.has_waiters() && StdArc::strong_count(&woken) == 2);
        assert_eq!(woken.0.load(SeqCst), 1);

        slots.wait(ids[1], &waker);
        let kept = Some(StdArc::clone(&memory));
        assert!(!slots.keeps_memory());
        assert_eq!(slots.abandon(ids[1], kept), None);
        assert!(slots.keeps_memory());
        assert!(!slots.has_waiters() && StdArc::strong_count(&woken) == 2);
        assert_eq!(StdArc::strong_count(&memory), 2);
        let due = slots.finish(ids[1], Err(3)).unwrap();
        assert!(due.kept.is_some() && due.waker.is_none());
        assert_eq!(due.places, 1);
        assert!(!slots.return_places(due.places) && !slots.keeps_memory());
        drop(due);
        // The router has returned its slot.
        assert_eq!(take(&slots), Some(ids[1]));

        assert!(!end(&slots, ids[2], Err(9)));
        let kept = slots.abandon(ids[2], Some(StdArc::clone(&memory)));
        assert!(kept.is_some());
        drop(kept);
        assert_eq!(StdArc::strong_count(&memory), 1);
        // The failure of the previous request is gone.
        let id = take(&slots).unwrap();
        assert_eq!(id, ids[2]);
        assert!(!end(&slots, id, Ok(())));
        assert_eq!(slots.collect(id), Some(Ok(())));
    }

    /// A future may be polled by one task and then by another, which waits from then on.
    #[test]
    fn last_waiting_task_is_woken() {
        let slots = Tried::new(1);
        let id = take(&slots).unwrap();
        let tasks = [(); 3].map(|()| StdArc::new(Woken::default()));
        for task in &tasks {
            slots.wait(id, &Waker::from(StdArc::clone(task)));
        }
        slots.finish(id, Ok(())).unwrap().waker.unwrap().wake();
        assert_eq!(tasks.each_ref().map(|task| task.0.load(SeqCst)), [0, 0, 1]);
        // No waker is kept.
        assert_eq!(tasks.each_ref().map(StdArc::strong_count), [1; 3]);
        assert!(!slots.has_waiters());
    }

    #[test]
    fn one_owner_each_under_load() {
        let rounds = if cfg!(miri) { 60 } else { 20_000 };
        let slots = Tried::new(3);
        let owners = [const { Count::new(0) }; 12];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..rounds {
                        let Some(id) = take(&slots) else {
                            std::thread::yield_now();
                            continue;
                        };
                        assert_eq!(owners[id as usize].fetch_add(1, SeqCst), 0);
                        let leave = || owners[id as usize].fetch_sub(1, SeqCst);
                        if round % 2 == 0 {
                            leave();
                            slots.withdraw(id);
                        } else {
                            end(&slots, id, Ok(()));
                            leave();
                            assert_eq!(slots.collect(id), Some(Ok(())));
                        }
                    }
                });
            }
        });
        assert_eq!(
            [(); 4].map(|()| take(&slots).is_some()),
            [true, true, true, false]
        );
    }
}

#[cfg(loom)]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    /// All interleavings of an operation that waits as a future does and the router that ends its
    /// request.
    #[test]
    fn loom_slots_no_wake_up_is_lost() {
        loom::model(|| {
            let slots = Arc::new(Tried::new(1));
            let id = slots.take(1).unwrap();
            let woken = StdArc::new(Woken::default());
            let router = {
                let slots = Arc::clone(&slots);
                thread::spawn(move || {
                    if let Some(waker) = slots.finish(id, Err(5)).and_then(|due| due.waker) {
                        waker.wake();
                    }
                })
            };
            let waker = Waker::from(StdArc::clone(&woken));
            slots.wait(id, &waker);
            let seen = slots.collect(id);
            router.join().unwrap();
            match seen {
                Some(result) => assert_eq!(result, Err(5)),
                None => {
                    assert_eq!(woken.0.load(SeqCst), 1, "a wake-up was lost");
                    assert_eq!(slots.collect(id), Some(Err(5)));
                }
            }
            assert!(!slots.has_waiters());
        });
    }

    /// The operation gives up while the router ends its request. One of them frees the memory, and
    /// the slot is returned once.
    #[test]
    fn loom_slots_are_given_back_once() {
        loom::model(|| {
            let slots = Arc::new(Tried::new(1));
            let id = slots.take(1).unwrap();
            let memory = StdArc::new(());
            slots.wait(id, &Waker::from(StdArc::new(Woken::default())));
            let router = {
                let slots = Arc::clone(&slots);
                thread::spawn(move || {
                    let due = slots.finish(id, Ok(())).expect("it is in flight");
                    slots.return_places(due.places);
                })
            };
            drop(slots.abandon(id, Some(StdArc::clone(&memory))));
            router.join().unwrap();
            assert_eq!(StdArc::strong_count(&memory), 1, "memory is kept");
            assert!(!slots.has_waiters());
            assert_eq!(slots.take(1), Some(id));
            assert_eq!(slots.take(1), None, "given back twice");
        });
    }

    #[test]
    fn loom_slots_have_one_owner() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let slots = Arc::new(Tried::new(2));
            let taken = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let (slots, taken) = (Arc::clone(&slots), Arc::clone(&taken));
                    thread::spawn(move || once(&slots, &taken))
                })
                .collect();
            once(&slots, &taken);
            for other in others {
                other.join().unwrap();
            }
            assert!(slots.take(2).is_some(), "places are lost");
        });
        fn once(slots: &Tried, taken: &[AtomicBool; 2]) {
            let Some(id) = slots.take(1) else {
                return;
            };
            assert!(
                !taken[id as usize].swap(true, Ordering::Relaxed),
                "two owners"
            );
            taken[id as usize].store(false, Ordering::Relaxed);
            slots.withdraw(id);
        }
    }

    /// A request is queued while the only places are returned.
    fn queue(queue: fn(&Tried, &AtomicBool)) {
        loom::model(move || {
            let slots = Arc::new(Tried::new(1));
            let listed = Arc::new(AtomicBool::new(false));
            let id = slots.take(1).unwrap();
            let other = {
                let (slots, listed) = (Arc::clone(&slots), Arc::clone(&listed));
                thread::spawn(move || {
                    let due = slots.finish(id, Ok(())).expect("it is in flight");
                    slots.return_places(due.places) && listed.load(Ordering::Relaxed)
                })
            };
            queue(&slots, &listed);
            let got = slots.take_places(id, 1);
            let posts = other.join().unwrap();
            assert!(got || posts, "a request was forgotten");
        });
    }

    #[test]
    fn loom_slots_backlog_is_not_forgotten() {
        queue(|slots, listed| {
            listed.store(true, Ordering::Relaxed);
            slots.crowd();
        });
    }

    /// Broken: the mark is set before the list has an entry.
    #[test]
    #[should_panic(expected = "a request was forgotten")]
    fn loom_slots_broken_crowd_is_caught() {
        queue(|slots, listed| {
            slots.crowd();
            listed.store(true, Ordering::Relaxed);
        });
    }
}
