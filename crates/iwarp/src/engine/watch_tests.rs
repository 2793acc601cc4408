//! Tests of the watch: progress threads that lose their places to other threads.

use super::*;
use crate::engine::Source;
use crate::engine::core::tests::wait_for;
use crate::sys::eventfd::EventFd;
use crate::sys::poller::Interest;
use std::sync::Condvar;
use std::sync::Mutex;

#[test]
fn round_ends_unless_place_is_lost() {
    let rounds = Rounds::default();
    let mut place = rounds.enter(0);
    assert_eq!(rounds.current(), None);
    rounds.begin(&mut place);
    let round = rounds.current().expect("a round");
    assert!(rounds.end(&mut place));
    assert_eq!(rounds.current(), None);
    assert_eq!(rounds.give_away(round), None, "that round has ended");
    // The thread has kept its place, so its id must still be known.
    assert_eq!(rounds.thread.load(Ordering::Relaxed), thread_id());
    assert_eq!(rounds.stuck.load(Ordering::Relaxed), 0);

    rounds.begin(&mut place);
    let round = rounds.current().expect("a round");
    assert_eq!(rounds.give_away(round), Some(1));
    assert_eq!(rounds.thread.load(Ordering::Relaxed), 0, "not yet known");
    assert_eq!(rounds.give_away(round), None, "given away already");
    let mut next = rounds.enter(1);
    rounds.begin(&mut next);
    assert_eq!(rounds.stuck.load(Ordering::Relaxed), 1);
    assert!(!rounds.end(&mut place), "the old thread has lost its place");
    assert_eq!(rounds.stuck.load(Ordering::Relaxed), 0);
    assert!(rounds.end(&mut next), "the new thread keeps its place");
}

#[test]
fn stuck_threads_are_limited() {
    let rounds = Rounds::default();
    for number in 0..STUCK_MAX as u64 {
        let mut place = rounds.enter(number);
        rounds.begin(&mut place);
        let round = rounds.current().expect("a round");
        assert_eq!(rounds.give_away(round), Some(number + 1));
    }
    let mut place = rounds.enter(STUCK_MAX as u64);
    rounds.begin(&mut place);
    assert_eq!(rounds.give_away(rounds.current().expect("a round")), None);
}

/// A source that blocks the first thread that serves it, until it is opened.
#[derive(Default)]
struct Trap {
    has_blocked: AtomicBool,
    open: (Mutex<bool>, Condvar),
}

impl Source for Trap {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        if !self.has_blocked.swap(true, Ordering::Relaxed) {
            let (lock, opened) = &self.open;
            let mut open = lock.lock().expect("no panic");
            while !*open {
                open = opened.wait(open).expect("no panic");
            }
        }
        false
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

struct Counter(EventFd, AtomicU32);

impl Source for Counter {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // Polling threads of other tests may serve the same event.
        if self.0.drain() {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

#[test]
fn stuck_thread_spares_other_sources() {
    let engine = Engine::current().expect("engine");
    engine.watch.start();
    let trap = Arc::new(Trap::default());
    let trap_fd = EventFd::new().expect("eventfd");
    let tokens = [engine.token(), engine.token()];
    engine
        .add(
            &trap_fd,
            tokens[0],
            Interest::READ,
            Arc::clone(&trap) as Arc<dyn Source>,
        )
        .expect("watched");
    trap_fd.signal();
    wait_for("no thread is blocked", || {
        trap.has_blocked.load(Ordering::Relaxed)
    });
    let counter = Arc::new(Counter(EventFd::new().expect("eventfd"), AtomicU32::new(0)));
    engine
        .add(
            &counter.0,
            tokens[1],
            Interest::READ,
            Arc::clone(&counter) as Arc<dyn Source>,
        )
        .expect("watched");
    for round in 1..4 {
        counter.0.signal();
        wait_for("no thread serves the counter", || {
            counter.1.load(Ordering::Relaxed) == round
        });
    }
    *trap.open.0.lock().expect("no panic") = true;
    trap.open.1.notify_all();
    engine.remove(&trap_fd, tokens[0]);
    engine.remove(&counter.0, tokens[1]);
}
