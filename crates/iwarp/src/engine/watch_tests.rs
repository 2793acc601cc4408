//! Progress threads that lose their places to others.

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
    // The watch was too late. It must still know the thread.
    assert_eq!(rounds.thread.load(Ordering::Relaxed), own_number());
    assert_eq!(rounds.stuck.load(Ordering::Relaxed), 0);

    rounds.begin(&mut place);
    let round = rounds.current().expect("a round");
    assert_eq!(rounds.give_away(round), Some(1));
    assert_eq!(rounds.thread.load(Ordering::Relaxed), 0, "not yet known");
    assert_eq!(rounds.give_away(round), None, "only once");
    let mut next = rounds.enter(1);
    rounds.begin(&mut next);
    assert_eq!(rounds.stuck.load(Ordering::Relaxed), 1);
    assert!(!rounds.end(&mut place), "it has lost its place");
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

/// A source that blocks its thread until it is opened.
#[derive(Default)]
struct Trap {
    caught: AtomicBool,
    open: (Mutex<bool>, Condvar),
}

impl Source for Trap {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        if !self.caught.swap(true, Ordering::Relaxed) {
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
        // Polling threads of other tests may serve the same signal.
        if self.0.drain() {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

/// While one thread is stuck in a source, another one serves the rest.
#[test]
fn stuck_thread_spares_other_sources() {
    let engine = Engine::current().expect("engine");
    engine.watch.start();
    let trap = Arc::new(Trap::default());
    let bait = EventFd::new().expect("eventfd");
    let tokens = [engine.token(), engine.token()];
    engine
        .add(
            &bait,
            tokens[0],
            Interest::READ,
            Arc::clone(&trap) as Arc<dyn Source>,
        )
        .expect("watched");
    bait.signal();
    wait_for("nobody is caught", || trap.caught.load(Ordering::Relaxed));
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
        wait_for("nobody serves it", || {
            counter.1.load(Ordering::Relaxed) == round
        });
    }
    *trap.open.0.lock().expect("no panic") = true;
    trap.open.1.notify_all();
    engine.remove(&bait, tokens[0]);
    engine.remove(&counter.0, tokens[1]);
}
