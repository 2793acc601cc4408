//! Tests and models of the slots.

use super::*;
use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicU32 as Count, Ordering::SeqCst};
use std::task::Wake;

#[derive(Default)]
struct WakeCounter(Count);

impl Wake for WakeCounter {
    fn wake(self: StdArc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

type TestSlots = Slots<StdArc<()>, u8>;

#[cfg(not(loom))]
mod plain {
    use super::*;

    fn take(slots: &TestSlots) -> Option<u32> {
        slots.take(1, 0, true).ok()
    }

    #[test]
    fn slot_is_in_use_until_collected() {
        let slots = TestSlots::new(2);
        let (a, b) = (take(&slots).unwrap(), take(&slots).unwrap());
        assert!(a != b && take(&slots).is_none() && !slots.has_room());
        assert_eq!((slots.outcome(a), slots.collect(a)), (None, None));
        assert!(slots.finish(a, Ok(())).is_none() && slots.finish(b, Err(7)).is_none());
        assert_eq!(
            (slots.outcome(a), slots.outcome(b)),
            (Some(true), Some(false))
        );
        assert!(take(&slots).is_none());
        assert_eq!(slots.collect(b), Some((Err(7), false)));
        assert_eq!(slots.collect(a), Some((Ok(()), false)));
        assert_eq!(slots.collect(a), None);
        assert!(take(&slots).is_some() && take(&slots).is_some() && take(&slots).is_none());
    }

    #[test]
    fn later_and_unknown_ends_are_ignored() {
        let slots = TestSlots::new(1);
        let id = take(&slots).unwrap();
        assert!(slots.finish(id, Err(1)).is_none() && slots.finish(id, Ok(())).is_none());
        assert_eq!(slots.collect(id), Some((Err(1), false)));
        assert!(slots.finish(id, Ok(())).is_none() && slots.finish(99, Ok(())).is_none());
        assert_eq!((slots.outcome(99), slots.collect(99)), (None, None));
        assert!(!slots.withdraw(99) && slots.abandon(99, None) == (None, false));
        assert_eq!(slots.take(1, 0, true), Ok(id));
        assert_eq!(TestSlots::new(0).take(1, 0, true), Err(NoSlot::Full));
        // Miri is slow.
        if !cfg!(miri) {
            let slots = TestSlots::new(u32::MAX);
            assert_eq!(slots.count(), SLOTS_MAX);
            // This is the largest number of places that fits into `room`.
            let all = slots.take(SLOTS_MAX, 0, true).unwrap();
            assert_eq!(slots.take(1, 0, true), Err(NoSlot::Full));
            assert!(!slots.withdraw(all) && slots.has_room());
        }
    }

    #[test]
    fn reserved_places_stay_free() {
        let slots = TestSlots::new(8);
        assert_eq!(slots.take(9, 0, true), Err(NoSlot::Full));
        assert_eq!(slots.take(u32::MAX, 1, true), Err(NoSlot::Full));
        let batch = slots.take(6, 0, true).unwrap();
        assert_eq!(slots.take(1, 2, true), Err(NoSlot::Full));
        let single = slots.take(1, 1, true).unwrap();
        assert_eq!(slots.take(2, 0, true), Err(NoSlot::Full));
        assert!(!slots.withdraw(batch));
        assert!(slots.take(7, 0, true).is_ok());
        let version = slots.version();
        assert!(!slots.withdraw(single) && slots.version() != version);
    }

    #[test]
    fn end_wakes_waiter_and_frees_memory() {
        let slots = TestSlots::new(4);
        let woken = StdArc::new(WakeCounter::default());
        let waker = Waker::from(StdArc::clone(&woken));
        let memory = StdArc::new(());
        let ids = [(); 4].map(|()| take(&slots).unwrap());
        slots.wait(ids[0], &waker);
        slots.wait(ids[0], &waker);
        assert!(slots.somebody_waits());
        let due = slots.finish(ids[0], Ok(())).unwrap();
        due.waker.unwrap().wake();
        assert!(due.kept.is_none() && !slots.somebody_waits());
        // The request has ended, so the waker is not kept.
        slots.wait(ids[0], &waker);
        assert!(!slots.somebody_waits() && StdArc::strong_count(&woken) == 2);
        assert_eq!(woken.0.load(SeqCst), 1);

        slots.wait(ids[1], &waker);
        let kept = Some(StdArc::clone(&memory));
        assert!(!slots.keeps_memory());
        assert_eq!(slots.abandon(ids[1], kept), (None, false));
        assert!(slots.keeps_memory());
        assert!(!slots.somebody_waits() && StdArc::strong_count(&woken) == 2);
        assert_eq!(StdArc::strong_count(&memory), 2);
        slots.crowd();
        let due = slots.finish(ids[1], Err(3)).unwrap();
        assert!(due.kept.is_some() && due.waker.is_none() && due.crowded);
        assert!(!slots.keeps_memory());
        drop(due);
        assert_eq!(slots.take(1, 0, true), Err(NoSlot::Crowded));
        assert_eq!(slots.take(1, 0, false), Ok(ids[1]));
        slots.uncrowd();

        assert!(slots.finish(ids[2], Err(9)).is_none());
        let (kept, crowded) = slots.abandon(ids[2], Some(StdArc::clone(&memory)));
        assert!(kept.is_some() && !crowded);
        drop(kept);
        assert_eq!(StdArc::strong_count(&memory), 1);
        // The failure of the previous request must not be reported for the next one.
        let id = take(&slots).unwrap();
        assert_eq!(id, ids[2]);
        assert!(slots.finish(id, Ok(())).is_none());
        assert_eq!(slots.collect(id), Some((Ok(()), false)));
    }

    /// A future may move between tasks. Only the task that polled it last is woken.
    #[test]
    fn last_waiting_task_is_woken() {
        let slots = TestSlots::new(1);
        let id = take(&slots).unwrap();
        let tasks = [(); 3].map(|()| StdArc::new(WakeCounter::default()));
        for task in &tasks {
            slots.wait(id, &Waker::from(StdArc::clone(task)));
        }
        slots.finish(id, Ok(())).unwrap().waker.unwrap().wake();
        assert_eq!(tasks.each_ref().map(|task| task.0.load(SeqCst)), [0, 0, 1]);
        // No waker is stored any more.
        assert_eq!(tasks.each_ref().map(StdArc::strong_count), [1; 3]);
        assert!(!slots.somebody_waits());
    }

    #[test]
    fn concurrent_takers_share_no_slot() {
        let rounds = if cfg!(miri) { 60 } else { 20_000 };
        let slots = TestSlots::new(3);
        let owners = [const { Count::new(0) }; 3];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let Some(id) = take(&slots) else {
                            std::thread::yield_now();
                            continue;
                        };
                        assert_eq!(owners[id as usize].fetch_add(1, SeqCst), 0);
                        owners[id as usize].fetch_sub(1, SeqCst);
                        slots.withdraw(id);
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

    /// An operation waits, as a future does, while the router ends its request.
    #[test]
    fn loom_slots_no_wake_up_is_lost() {
        loom::model(|| {
            let slots = Arc::new(TestSlots::new(1));
            let id = slots.take(1, 0, true).unwrap();
            let woken = StdArc::new(WakeCounter::default());
            let router = {
                let slots = Arc::clone(&slots);
                thread::spawn(move || {
                    if let Some(due) = slots.finish(id, Err(5)) {
                        due.waker.expect("a waker").wake();
                    }
                })
            };
            let waker = Waker::from(StdArc::clone(&woken));
            slots.wait(id, &waker);
            let collected = slots.collect(id);
            router.join().unwrap();
            match collected {
                Some((result, _)) => assert_eq!(result, Err(5)),
                None => {
                    assert_eq!(woken.0.load(SeqCst), 1, "a wake-up was lost");
                    assert_eq!(slots.collect(id), Some((Err(5), false)));
                }
            }
            assert!(!slots.somebody_waits());
            assert!(slots.take(1, 0, true).is_ok());
        });
    }

    /// The operation gives up while the router ends its request. One of the two frees the memory
    /// and releases the slot.
    #[test]
    fn loom_slots_are_released_once() {
        loom::model(|| {
            let slots = Arc::new(TestSlots::new(1));
            let id = slots.take(1, 0, true).unwrap();
            let memory = StdArc::new(());
            slots.wait(id, &Waker::from(StdArc::new(WakeCounter::default())));
            let router = {
                let slots = Arc::clone(&slots);
                thread::spawn(move || drop(slots.finish(id, Ok(()))))
            };
            drop(slots.abandon(id, Some(StdArc::clone(&memory))));
            router.join().unwrap();
            assert_eq!(StdArc::strong_count(&memory), 1, "memory is kept");
            assert!(!slots.somebody_waits());
            assert_eq!(slots.take(1, 0, true), Ok(id));
            assert_eq!(slots.take(1, 0, true), Err(NoSlot::Full), "released twice");
        });
    }

    #[test]
    fn loom_slots_have_one_owner() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let slots = Arc::new(TestSlots::new(2));
            let taken = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let (slots, taken) = (Arc::clone(&slots), Arc::clone(&taken));
                    thread::spawn(move || take_and_release(&slots, &taken))
                })
                .collect();
            take_and_release(&slots, &taken);
            for other in others {
                other.join().unwrap();
            }
            assert!(slots.take(2, 0, true).is_ok(), "places are lost");
        });
        fn take_and_release(slots: &TestSlots, taken: &[AtomicBool; 2]) {
            let Ok(id) = slots.take(1, 0, true) else {
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

    /// An operation waits for room while the only place is released.
    fn room(wait: fn(&TestSlots, &AtomicBool)) {
        loom::model(move || {
            let slots = Arc::new(TestSlots::new(1));
            // The router's list of waiting operations: `true` if it has an entry.
            let listed = Arc::new(AtomicBool::new(false));
            let id = slots.take(1, 0, true).unwrap();
            let other = {
                let (slots, listed) = (Arc::clone(&slots), Arc::clone(&listed));
                thread::spawn(move || slots.withdraw(id) && listed.swap(false, Ordering::Relaxed))
            };
            wait(&slots, &listed);
            let got = slots.take(1, 0, false).is_ok();
            let woken = other.join().unwrap();
            assert!(got || woken, "a wake-up was lost");
        });
    }

    #[test]
    fn loom_slots_free_room_wakes_waiter() {
        room(|slots, listed| {
            listed.store(true, Ordering::Relaxed);
            slots.crowd();
        });
    }

    /// Planted bug: the mark is set before the list has an entry.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_slots_broken_crowd_is_caught() {
        room(|slots, listed| {
            slots.crowd();
            listed.store(true, Ordering::Relaxed);
        });
    }
}
