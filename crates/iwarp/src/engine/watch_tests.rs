//! Tests of threads that lose their places.

use super::*;
use crate::engine::Source;
use crate::engine::core::tests::wait_for;
use crate::sys::eventfd::EventFd;
use crate::sys::poller::Interest;
use std::sync::Condvar;
use std::sync::Mutex;

#[test]
fn a_turn_ends_unless_the_place_was_given_away() {
    let turns = Turns::default();
    let mut place = turns.enter(0);
    assert_eq!(turns.turn(), None);
    turns.begin(&mut place);
    let turn = turns.turn().expect("a turn");
    assert!(turns.end(&mut place));
    assert_eq!(turns.turn(), None);
    assert_eq!(turns.give_away(turn), None, "that turn is over");
    // The watch was too late, and looks at the thread again.
    assert_eq!(turns.thread.load(Ordering::Relaxed), own_number());
    assert_eq!(turns.stuck.load(Ordering::Relaxed), 0);

    turns.begin(&mut place);
    let turn = turns.turn().expect("a turn");
    assert_eq!(turns.give_away(turn), Some(1));
    assert_eq!(turns.thread.load(Ordering::Relaxed), 0, "not yet known");
    assert_eq!(turns.give_away(turn), None, "only once");
    let mut next = turns.enter(1);
    turns.begin(&mut next);
    assert_eq!(turns.stuck.load(Ordering::Relaxed), 1);
    assert!(!turns.end(&mut place), "it has lost its place");
    assert_eq!(turns.stuck.load(Ordering::Relaxed), 0);
    assert!(turns.end(&mut next), "and disturbs the other one not");
}

#[test]
fn no_more_threads_are_stuck_than_allowed() {
    let turns = Turns::default();
    for number in 0..STUCK_MAX as u64 {
        let mut place = turns.enter(number);
        turns.begin(&mut place);
        let turn = turns.turn().expect("a turn");
        assert_eq!(turns.give_away(turn), Some(number + 1));
    }
    let mut place = turns.enter(STUCK_MAX as u64);
    turns.begin(&mut place);
    assert_eq!(turns.give_away(turns.turn().expect("a turn")), None);
}

/// A source in which a thread stays until it is let go.
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

/// A source that counts signals.
struct Counter(EventFd, AtomicU32);

impl Source for Counter {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // The threads of other tests poll, too, and may come for the same signal.
        if self.0.drain() {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

/// One thread is stuck in a source, and the other sources are served.
#[test]
fn other_sources_are_served_while_a_thread_is_stuck() {
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
