//! Tests of who is left alone, and which timers wake.

use super::*;
use crate::engine::sync::parking::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

const LONG: Duration = Duration::from_secs(10);

/// A source that application threads drive until it is told that they do not.
struct Driven {
    engine: Arc<Engine>,
    fd: EventFd,
    token: u64,
    driven: AtomicBool,
    rests: AtomicBool,
    served: AtomicU32,
}

impl Driven {
    /// Watches one on an engine of its own: the threads of other tests that poll serve all that is ready on the process's engines.
    fn watch() -> Arc<Self> {
        let engine = Engine::start(Arc::default()).expect("engine");
        let source = Arc::new(Self {
            token: engine.token(),
            engine: Arc::clone(&engine),
            fd: EventFd::new().expect("eventfd"),
            driven: AtomicBool::new(true),
            rests: AtomicBool::new(false),
            served: AtomicU32::new(0),
        });
        let watched = Arc::clone(&source) as Arc<dyn Source>;
        engine
            .add(&source.fd, source.token, Interest::READ, watched)
            .expect("add");
        source
    }
}

impl Source for Driven {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        self.fd.drain();
        self.served.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn driven_until(&self, now: u64) -> Option<u64> {
        let driven = self.driven.load(Ordering::Relaxed);
        driven.then_some(now + 1_000_000)
    }

    fn rest(&self) -> bool {
        self.engine.pause(&self.fd);
        self.rests.store(true, Ordering::Relaxed);
        true
    }

    fn resume(&self) {
        let watched = self.engine.resume(&self.fd, self.token, Interest::READ);
        watched.expect("watched again");
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

pub(in crate::engine) fn wait_for(what: &str, done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What application threads drive is not served by the progress thread, until their lease is over. Then nothing was lost.
#[test]
fn what_is_driven_rests_until_the_lease_ends() {
    let source = Driven::watch();
    source.fd.signal();
    wait_for("it does not rest", || source.rests.load(Ordering::Relaxed));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(source.served.load(Ordering::Relaxed), 0);
    source.driven.store(false, Ordering::Relaxed);
    wait_for("nobody serves it", || {
        source.served.load(Ordering::Relaxed) == 1
    });
    source.engine.remove(&source.fd, source.token);
}

/// While application threads drive the whole set, the progress thread serves nothing of it, but what a queue's pollers drive one
/// by one is taken out of it. A lease that is given back counts at once.
#[test]
fn the_whole_set_is_left_to_who_drives_it() {
    let all = everything();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let begin = Instant::now();
            // If the test fails, it ends. Where others work, the thread is kept from its processor, which is no pause.
            while !stop.load(Ordering::Relaxed) && begin.elapsed() < 3 * LONG {
                all.drive(now_ns(), 0, kept_from_processor);
                std::thread::yield_now();
            }
        });
        wait_for("no lease", || all.end(now_ns()).is_some());
        let driven = Driven::watch();
        driven.fd.signal();
        wait_for("it does not rest", || driven.rests.load(Ordering::Relaxed));
        stop.store(true, Ordering::Relaxed);
        let other = Driven::watch();
        other.driven.store(false, Ordering::Relaxed);
        other.fd.signal();
        if all.give_back(now_ns, kept_from_processor) {
            other.engine.wake_up();
        }
        wait_for("nobody serves it", || {
            other.served.load(Ordering::Relaxed) == 1
        });
        for source in [driven, other] {
            source.engine.remove(&source.fd, source.token);
        }
    });
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
    // Without a thread: that of the process looks when it gets a processor, which may be after both times.
    let engine = Engine::new(fork::generation(), Arc::default()).expect("engine");
    let token = engine.token();
    let source = Arc::new(Forgetful {
        told: Mutex::default(),
    });
    engine.add_timed(token, Arc::clone(&source) as Arc<dyn Source>);
    let begin = now_ns();
    engine.at(begin, token, 1);
    engine.at(begin + 1, token, 2);
    assert_eq!(
        engine.first_timer(),
        Some(begin + 1),
        "what a sleep ends by"
    );
    wait_for("time stands still", || now_ns() > begin);
    engine.fire_timers();
    assert_eq!(*source.told.lock(), [2]);
    assert_eq!(engine.first_timer(), None);
    engine.at(begin, token, 3);
    engine.forget(token);
    assert_eq!(engine.first_timer(), None, "its source is gone");
}

/// The progress thread sleeps until the first timer. It has to be woken for an earlier one, and for no
/// other. Two equal timers are one.
#[test]
fn a_timer_is_the_first_one_until_an_earlier_one_is_set() {
    let timers = Timers::default();
    let set = |at| timers.set((at, 1, 0));
    let taken = |now| std::iter::from_fn(|| Some(timers.take_due(now)?.0)).collect::<Vec<_>>();
    let firsts = [50, 70, 50, 30, 31, 10].map(set);
    assert_eq!(firsts, [true, false, false, true, false, true]);
    assert_eq!(taken(9), [0; 0]);
    assert_eq!(taken(50), [10, 30, 31, 50]);
    assert_eq!([71, 70, 60].map(set), [false, false, true]);
    assert_eq!(taken(100), [60, 70, 71]);
    assert!(set(80), "the only one");
}

/// What the kernel does not watch is never reported and never removed, so the engine must not keep it. Under `shuttle` there is no kernel.
#[cfg(not(shuttle))]
#[test]
fn a_source_that_cannot_be_watched_is_not_kept() {
    let engine = Engine::new(fork::generation(), Arc::default()).expect("engine");
    let source = Arc::new(Forgetful {
        told: Mutex::default(),
    });
    // A file is ready at any time.
    let file = std::fs::File::open("/proc/self/exe").expect("file");
    let watched = Arc::clone(&source) as Arc<dyn Source>;
    let error = engine.add(&file, engine.token(), Interest::READ, watched);
    assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert_eq!(Arc::strong_count(&source), 1);
}

/// Connections end in any order, so the engine with room for the next one may be any of them.
#[test]
fn the_next_connection_goes_to_the_engine_with_the_fewest() {
    let engines = [(); 3].map(|()| Arc::new(Engine::new(0, Arc::default()).expect("engine")));
    for (connections, idlest) in [
        ([0, 0, 0], 0),
        ([1, 0, 0], 1),
        ([16, 3, 2], 2),
        ([0, 16, 16], 0),
        ([16, 7, 16], 1),
        ([5, 4, 4], 1),
        ([16, 16, 16], 0),
    ] {
        for (engine, count) in engines.iter().zip(connections) {
            engine.connections.store(count, Ordering::Relaxed);
        }
        let found = Engine::idlest(&engines).expect("there are some");
        assert!(Arc::ptr_eq(&found, &engines[idlest]), "{connections:?}");
    }
    assert!(Engine::idlest(&[]).is_none());
}
