//! Tests of who is left alone, and which timers wake.

use super::*;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const LONG: Duration = Duration::from_secs(10);

/// A source that application threads drive all the time.
struct Driven {
    engine: Arc<Engine>,
    fd: EventFd,
    rests: AtomicBool,
}

impl Source for Driven {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // As a baton that another thread holds.
        false
    }

    fn is_driven(&self) -> bool {
        true
    }

    fn rest(&self) -> bool {
        self.engine.pause(&self.fd);
        self.rests.store(true, Ordering::Relaxed);
        true
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

/// A thread that polls one queue serves the whole set now and then. Its own sockets rest all the same.
#[test]
fn what_is_driven_rests_even_while_the_set_is_polled() {
    let engine = Engine::current().expect("engine");
    let token = engine.token();
    let source = Arc::new(Driven {
        engine: Arc::clone(&engine),
        fd: EventFd::new().expect("eventfd"),
        rests: AtomicBool::new(false),
    });
    engine.poll_once();
    Engine::note_empty_poll();
    let watched = Arc::clone(&source) as Arc<dyn Source>;
    engine
        .add(&source.fd, token, Interest::READ, watched)
        .expect("add");
    source.fd.signal();
    let begin = Instant::now();
    while !source.rests.load(Ordering::Relaxed) {
        assert!(begin.elapsed() < LONG, "it does not rest");
        engine.poll_once();
        Engine::note_empty_poll();
        std::thread::yield_now();
    }
    engine.remove(&source.fd, token);
}

/// A source whose first timer means nothing.
struct Forgetful {
    told: Mutex<Vec<u32>>,
}

impl Source for Forgetful {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        true
    }

    fn awaits(&self, kind: u32) -> bool {
        kind != 1
    }

    fn timer(self: Arc<Self>, kind: u32) {
        self.told.lock().push(kind);
    }
}

#[test]
fn a_timer_that_means_nothing_is_forgotten() {
    let engine = Engine::current().expect("engine");
    let token = engine.token();
    let source = Arc::new(Forgetful {
        told: Mutex::default(),
    });
    engine.add_timed(token, Arc::clone(&source) as Arc<dyn Source>);
    // Far enough away that the progress thread looks at it before.
    engine.after(Duration::from_millis(300), token, 1);
    engine.after(Duration::from_millis(600), token, 2);
    let begin = Instant::now();
    while source.told.lock().is_empty() {
        assert!(begin.elapsed() < LONG, "no timer");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(*source.told.lock(), [2]);
    engine.forget(token);
}
