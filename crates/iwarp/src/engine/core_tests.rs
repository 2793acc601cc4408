//! Which sources the progress thread leaves alone, timers, and the choice of an engine.

use super::*;
use crate::engine::sync::parking::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

const LONG: Duration = Duration::from_secs(10);

/// A source that application threads drive until `driven` is cleared.
struct Driven {
    engine: Arc<Engine>,
    fd: EventFd,
    token: u64,
    driven: AtomicBool,
    paused: AtomicBool,
    served: AtomicU32,
}

impl Driven {
    /// Watches a source on an engine of its own: polling threads of other tests serve the engines
    /// of the process.
    fn watch() -> Arc<Self> {
        let engine = Engine::start(Arc::default()).expect("engine");
        let source = Arc::new(Self {
            token: engine.token(),
            engine: Arc::clone(&engine),
            fd: EventFd::new().expect("eventfd"),
            driven: AtomicBool::new(true),
            paused: AtomicBool::new(false),
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

    fn pause_watch(&self) -> bool {
        self.engine.pause(&self.fd);
        self.paused.store(true, Ordering::Relaxed);
        true
    }

    fn resume_watch(&self) {
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

/// The progress thread serves a driven source only when its lease has ended.
#[test]
fn driven_source_pauses_until_lease_ends() {
    let source = Driven::watch();
    source.fd.signal();
    wait_for("the source is not paused", || {
        source.paused.load(Ordering::Relaxed)
    });
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(source.served.load(Ordering::Relaxed), 0);
    source.driven.store(false, Ordering::Relaxed);
    wait_for("the source is not served", || {
        source.served.load(Ordering::Relaxed) == 1
    });
    source.engine.remove(&source.fd, source.token);
}

/// While application threads drive the whole set, the progress thread serves nothing, but it pauses
/// sources that pollers of a queue drive one by one. A lease that is given back ends at once.
#[test]
fn driven_set_is_left_alone() {
    let all = everything();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let begin = Instant::now();
            // The time limit ends the thread if the test fails. Waiting for a processor is no
            // pause.
            while !stop.load(Ordering::Relaxed) && begin.elapsed() < 3 * LONG {
                all.drive(now_ns(), 0, kept_from_processor);
                std::thread::yield_now();
            }
        });
        wait_for("no lease", || all.end(now_ns()).is_some());
        let driven = Driven::watch();
        driven.fd.signal();
        wait_for("the source is not paused", || {
            driven.paused.load(Ordering::Relaxed)
        });
        stop.store(true, Ordering::Relaxed);
        let other = Driven::watch();
        other.driven.store(false, Ordering::Relaxed);
        other.fd.signal();
        if all.give_back(now_ns, kept_from_processor) {
            other.engine.wake_up();
        }
        wait_for("the source is not served", || {
            other.served.load(Ordering::Relaxed) == 1
        });
        for source in [driven, other] {
            source.engine.remove(&source.fd, source.token);
        }
    });
}

/// A source whose timer of kind 1 has no purpose.
struct Forgetful {
    fired: Mutex<Vec<u32>>,
}

impl Source for Forgetful {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        true
    }

    fn awaits(&self, kind: u32) -> bool {
        kind != 1
    }

    fn timer(self: Arc<Self>, kind: u32) {
        self.fired.lock().push(kind);
    }
}

#[test]
fn timer_without_purpose_is_forgotten() {
    // Without a thread: the progress thread may run only after both times.
    let engine = Engine::new(fork::generation(), Arc::default()).expect("engine");
    let token = engine.token();
    let source = Arc::new(Forgetful {
        fired: Mutex::default(),
    });
    engine.add_timed(token, Arc::clone(&source) as Arc<dyn Source>);
    let begin = now_ns();
    engine.at(begin, token, 1);
    engine.at(begin + 1, token, 2);
    assert_eq!(
        engine.first_timer(),
        Some(begin + 1),
        "the time until which the thread sleeps"
    );
    wait_for("time stands still", || now_ns() > begin);
    engine.fire_timers();
    assert_eq!(*source.fired.lock(), [2]);
    assert_eq!(engine.first_timer(), None);
    engine.at(begin, token, 3);
    engine.forget(token);
    assert_eq!(engine.first_timer(), None, "the source is gone");
}

/// The progress thread sleeps until the first timer. It must be woken only for an earlier one. Two
/// equal timers are one.
#[test]
fn only_earliest_timer_is_first() {
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

/// A descriptor that the kernel does not watch is never removed, so the engine must not keep its
/// source. Under `shuttle` there is no kernel.
#[cfg(not(shuttle))]
#[test]
fn unwatchable_source_is_dropped() {
    let engine = Engine::new(fork::generation(), Arc::default()).expect("engine");
    let source = Arc::new(Forgetful {
        fired: Mutex::default(),
    });
    // `epoll` refuses regular files.
    let file = std::fs::File::open("/proc/self/exe").expect("file");
    let watched = Arc::clone(&source) as Arc<dyn Source>;
    let error = engine.add(&file, engine.token(), Interest::READ, watched);
    assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert_eq!(Arc::strong_count(&source), 1);
}

#[test]
fn idlest_engine_is_chosen() {
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
        let found = Engine::idlest(&engines).expect("an engine");
        assert!(Arc::ptr_eq(&found, &engines[idlest]), "{connections:?}");
    }
    assert!(Engine::idlest(&[]).is_none());
}
