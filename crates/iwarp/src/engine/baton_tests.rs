//! Tests and models of the baton.

use super::*;

#[cfg(not(loom))]
mod plain {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn one_holder_sees_notes() {
        let baton = Baton::default();
        assert!(!baton.is_held());
        let guard = baton.try_take().expect("idle");
        assert!(baton.is_held());
        assert!(baton.try_take().is_none());
        assert!(baton.try_take().is_none());
        let guard = guard.finish().expect("there is a note");
        assert!(guard.finish().is_none(), "one call removes all notes");
        assert!(!baton.is_held());

        let guard = baton.try_take().expect("idle again");
        assert!(baton.try_take().is_none());
        assert!(guard.release(), "the note is reported");
        assert!(!baton.try_take().expect("free").release());
    }

    #[test]
    fn unwinding_releases_baton() {
        let baton = Baton::new();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            baton.drive(|| panic!("driver"))
        }));
        assert!(result.is_err());
        assert!(baton.drive(|| ()));
    }

    #[test]
    fn concurrent_drivers_do_all_work() {
        // Miri is slow. Without Miri, there are enough rounds for the threads to collide.
        const EACH: u64 = if cfg!(miri) { 50 } else { 100_000 };
        let baton = Baton::new();
        let start = std::sync::Barrier::new(4);
        let (added, done) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    for _ in 0..EACH {
                        added.fetch_add(1, Ordering::Relaxed);
                        baton.drive(|| {
                            // These steps are not atomic together. If two threads drove at the same
                            // time, counts would be lost.
                            let new = added.swap(0, Ordering::Relaxed);
                            let old = done.load(Ordering::Relaxed);
                            done.store(old + new, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(added.into_inner(), 0);
        assert_eq!(done.into_inner(), 4 * EACH);
    }
}

#[cfg(loom)]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    /// Work that is published without ordering, and a cell that only the driver may access: the
    /// baton must order both.
    struct Stream {
        baton: Baton,
        queued: [AtomicUsize; 3],
        done: UnsafeCell<usize>,
    }

    impl Stream {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                baton: Baton::new(),
                queued: [
                    AtomicUsize::new(0),
                    AtomicUsize::new(0),
                    AtomicUsize::new(0),
                ],
                done: UnsafeCell::new(0),
            })
        }

        fn post(&self, index: usize) {
            self.queued[index].store(1, Ordering::Relaxed);
        }

        /// Does all work that is visible. Relaxed loads let the model return old values.
        fn work(&self) {
            for slot in &self.queued {
                if slot.load(Ordering::Relaxed) == 1 {
                    slot.store(2, Ordering::Relaxed);
                    // SAFETY: the baton admits one thread at a time. The model checks exactly this:
                    // loom reports concurrent access.
                    self.done.with_mut(|done| unsafe { *done += 1 });
                }
            }
        }

        fn check_done(&self, expected: usize) {
            // SAFETY: all other threads have been joined.
            self.done
                .with(|done| assert_eq!(unsafe { *done }, expected, "work was lost"));
        }
    }

    fn model(threads: usize, drive: fn(&Stream)) {
        let mut builder = loom::model::Builder::new();
        // A full search with three threads takes minutes. Three preemptions are enough to find
        // every bug that is planted below.
        builder.preemption_bound = (threads > 2).then_some(3);
        builder.check(move || {
            let stream = Stream::new();
            let others: Vec<_> = (1..threads)
                .map(|index| {
                    let stream = Arc::clone(&stream);
                    thread::spawn(move || {
                        stream.post(index);
                        drive(&stream);
                    })
                })
                .collect();
            stream.post(0);
            drive(&stream);
            for other in others {
                other.join().expect("thread");
            }
            stream.check_done(threads);
        });
    }

    fn drive(stream: &Stream) {
        stream.baton.drive(|| stream.work());
    }

    #[test]
    fn loom_baton_two_threads() {
        model(2, drive);
    }

    #[test]
    fn loom_baton_three_threads() {
        model(3, drive);
    }

    /// A holder that releases the baton despite a note learns of the note.
    #[test]
    fn loom_baton_release_reports_the_note() {
        fn release_each_time(stream: &Stream) {
            while let Some(guard) = stream.baton.try_take() {
                stream.work();
                if !guard.release() {
                    break;
                }
            }
        }
        model(2, release_each_time);
        model(3, release_each_time);
    }

    /// Planted bug: checking for a note and releasing the baton are two steps.
    #[test]
    #[should_panic(expected = "work was lost")]
    fn loom_baton_broken_finish_is_caught() {
        fn broken(stream: &Stream) {
            let Some(guard) = stream.baton.try_take() else {
                return;
            };
            stream.work();
            while stream.baton.0.load(Ordering::Acquire) == NOTED {
                stream.baton.0.swap(HELD, Ordering::AcqRel);
                stream.work();
            }
            let _ = guard.release();
        }
        model(2, broken);
    }

    /// Planted bug: a thread that does not get the baton leaves no note.
    #[test]
    #[should_panic(expected = "work was lost")]
    fn loom_baton_broken_try_is_caught() {
        fn broken(stream: &Stream) {
            if stream
                .baton
                .0
                .compare_exchange(IDLE, HELD, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                let mut guard = Guard {
                    baton: &stream.baton,
                };
                loop {
                    stream.work();
                    match guard.finish() {
                        Some(again) => guard = again,
                        None => return,
                    }
                }
            }
        }
        model(2, broken);
    }

    /// Planted bug: a thread that finds a note leaves none, so its work is not ordered before the
    /// holder's next check.
    #[test]
    #[should_panic(expected = "work was lost")]
    fn loom_baton_broken_second_note_is_caught() {
        fn broken(stream: &Stream) {
            if stream.baton.0.load(Ordering::Acquire) == NOTED {
                return;
            }
            drive(stream);
        }
        model(3, broken);
    }
}
