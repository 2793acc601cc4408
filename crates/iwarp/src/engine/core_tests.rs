//! Tests of the engine: sources that application threads drive, timers, and the choice of an
//! engine.

use super::*;
use crate::engine::sync::parking::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

const LONG: Duration = Duration::from_secs(10);

/// A source that reports that application threads drive it, until `driven` is cleared.
struct Driven {
    engine: Arc<Engine>,
    fd: EventFd,
    token: u64,
    driven: AtomicBool,
    paused: AtomicBool,
    served: AtomicU32,
}

impl Driven {
    /// Creates a source on an engine of its own, because polling threads of other tests serve the
    /// engines of the process.
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

/// Waits until `done` returns `true`. Panics with `failure` if that takes too long.
pub(in crate::engine) fn wait_for(failure: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{failure}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The progress thread pauses a source that application threads drive, and serves it when their
/// lease has ended.
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

/// While application threads hold the lease of the whole process, the progress thread serves no
/// source, but it still pauses sources that pollers drive one by one. When that lease is given
/// back, the progress thread serves sources at once.
#[test]
fn process_lease_stops_progress_thread() {
    let lease = whole_process_lease();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            // The time limit ends the thread if the test fails.
            while !stop.load(Ordering::Relaxed) && start.elapsed() < 3 * LONG {
                // A thread that yields beside computing threads renews too seldom to earn credit.
                lease.renew_for_drive(now_ns(), 0, kept_from_processor);
                std::hint::spin_loop();
            }
        });
        wait_for("the lease is never held", || lease.end(now_ns()).is_some());
        let driven = Driven::watch();
        driven.fd.signal();
        wait_for("the source is not paused", || {
            driven.paused.load(Ordering::Relaxed)
        });
        stop.store(true, Ordering::Relaxed);
        let other = Driven::watch();
        other.driven.store(false, Ordering::Relaxed);
        other.fd.signal();
        if lease.give_back(now_ns, kept_from_processor) {
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

struct AwaitsOthers {
    fired: Mutex<Vec<u32>>,
}

impl Source for AwaitsOthers {
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
fn unawaited_timer_wakes_no_thread() {
    // An engine without a progress thread, which could fire the timers at any time.
    let engine = Engine::new(fork::generation(), Arc::default()).expect("engine");
    let token = engine.token();
    let source = Arc::new(AwaitsOthers {
        fired: Mutex::default(),
    });
    engine.add_timed(token, Arc::clone(&source) as Arc<dyn Source>);
    let start = now_ns();
    engine.at(start, token, 1);
    engine.at(start + 1, token, 2);
    assert_eq!(
        engine.first_timer(),
        Some(start + 1),
        "the progress thread sleeps until the second timer"
    );
    wait_for("the clock stands still", || now_ns() > start);
    engine.fire_timers();
    assert_eq!(*source.fired.lock(), [2]);
    assert_eq!(engine.first_timer(), None);
    engine.at(start, token, 3);
    engine.forget(token);
    assert_eq!(engine.first_timer(), None, "the source was removed");
}

/// The progress thread sleeps until the first timer, so it must be woken only for an earlier one.
/// Setting an equal timer again has no effect.
#[test]
fn only_earlier_timer_wakes_thread() {
    let timers = Timers::default();
    let set = |time| timers.set((time, 1, 0));
    let due = |now| std::iter::from_fn(|| Some(timers.take_due(now)?.0)).collect::<Vec<_>>();
    let are_first = [50, 70, 50, 30, 31, 10].map(set);
    assert_eq!(are_first, [true, false, false, true, false, true]);
    assert_eq!(due(9), [0; 0]);
    assert_eq!(due(50), [10, 30, 31, 50]);
    assert_eq!([71, 70, 60].map(set), [false, false, true]);
    assert_eq!(due(100), [60, 70, 71]);
    assert!(set(80), "there is no other timer");
}

/// If the kernel refuses to watch a descriptor, the caller does not remove it, so the engine must
/// not keep its source. `shuttle` does not simulate such a refusal.
#[cfg(not(shuttle))]
#[test]
fn unwatchable_source_is_dropped() {
    let engine = Engine::new(fork::generation(), Arc::default()).expect("engine");
    let source = Arc::new(AwaitsOthers {
        fired: Mutex::default(),
    });
    let file = std::fs::File::open("/proc/self/exe").expect("file");
    let watched = Arc::clone(&source) as Arc<dyn Source>;
    let result = engine.add(&file, engine.token(), Interest::READ, watched);
    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert_eq!(Arc::strong_count(&source), 1);
}

/// Timers that are not urgent expire together, so that idle connections seldom wake the thread.
#[test]
fn about_timers_are_rounded() {
    for delay in [Duration::from_secs(4), Duration::from_millis(1)] {
        let engine = Engine::new(fork::generation(), Arc::default()).expect("engine");
        let token = engine.token();
        let source = Arc::new(AwaitsOthers {
            fired: Mutex::default(),
        });
        engine.add_timed(token, source);
        let (before, delay_ns) = (now_ns(), delay.as_nanos() as u64);
        engine.after_about(delay, token, 2);
        let at = engine.first_timer().expect("a timer");
        assert!(at >= before + delay_ns && at <= now_ns() + delay_ns + delay_ns / 4);
        assert!(at.is_multiple_of(delay_ns / 4), "{at}");
    }
}

/// A forked child has the parent's set of descriptors, and must not change it.
#[cfg(not(shuttle))]
#[test]
fn child_leaves_parents_set() {
    let parent = fork::generation().wrapping_sub(1);
    let engine = Engine::new(parent, Arc::default()).expect("engine");
    let (fd, token) = (EventFd::new().expect("eventfd"), engine.token());
    engine
        .poller
        .add(&fd, token, Interest::READ)
        .expect("watched");
    engine.pause(&fd);
    engine.remove(&fd, token);
    assert!(engine.resume(&fd, token, Interest::READ).is_ok());
    assert!(engine.poller.remove(&fd).is_ok(), "it is not watched");
    assert!(engine.modify(&fd, token, Interest::READ).is_ok());
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
