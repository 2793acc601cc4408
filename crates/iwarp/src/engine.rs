//! The engine: one epoll set, one table of timers and one progress thread for a process.
//!
//! Whoever is already running moves the bytes: posting threads write, polling threads read.
//! The progress thread serves what nobody is driving. It sleeps in `epoll_wait`; while an
//! application thread polls completion queues it parks instead, so that packets do not wake
//! two threads, and looks again after at most [`PARK_MAX`]. It starts with the first socket and
//! belongs to one process: after a fork the child gets an engine of its own when it needs one.

use crate::progress::parker::Parker;
use crate::sys::clock::now_ns;
use crate::sys::eventfd::EventFd;
use crate::sys::poller::{Events, Interest, Poller};
use crate::sys::{fork, limits};
use parking_lot::{Mutex, RwLock};
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// An empty poll within this time means that an application thread is driving.
const DRIVING_NS: u64 = 50_000;
/// How long the progress thread looks away at first, and at most.
const PARK_MIN: Duration = Duration::from_micros(200);
/// See [`PARK_MIN`]. Bounds how late one-sided requests are served when an application stops polling.
const PARK_MAX: Duration = Duration::from_millis(1);
/// Events taken from the kernel at a time.
const BATCH: usize = 128;
const WAKE_TOKEN: u64 = 0;

/// When an application thread last polled in vain, in nanoseconds of the monotonic clock.
static LAST_EMPTY_POLL: AtomicU64 = AtomicU64::new(0);
static CURRENT: Mutex<Option<Arc<Engine>>> = Mutex::new(None);

/// Something with a file descriptor or a timer.
pub(crate) trait Source: Send + Sync {
    /// The descriptor is ready. `broken`: it has an error, or is closed in both directions, which reading or writing will tell.
    fn ready(self: Arc<Self>, readable: bool, writable: bool, broken: bool);
    /// A timer has run out. Timers are not cancelled: the source decides if it still means something.
    fn timer(self: Arc<Self>, kind: u32);
}

pub(crate) struct Engine {
    generation: u32,
    poller: Poller,
    wake: EventFd,
    sources: RwLock<HashMap<u64, Arc<dyn Source>>>,
    next_token: AtomicU64,
    timers: Mutex<BinaryHeap<Reverse<(u64, u64, u32)>>>,
    parker: Parker,
}

thread_local! {
    static EVENTS: Cell<Option<Box<Events>>> = const { Cell::new(None) };
}

impl Engine {
    /// The engine of this process. Starts it if there is none yet.
    pub(crate) fn current() -> io::Result<Arc<Self>> {
        let generation = fork::generation();
        let mut current = CURRENT.lock();
        if let Some(engine) = current.as_ref() {
            if engine.generation == generation {
                return Ok(Arc::clone(engine));
            }
            // A child of the process that started it: its thread does not exist here, and its epoll set is shared
            // with the parent. Leak it, because dropping what it refers to would touch the parent's sockets.
            std::mem::forget(current.take());
        }
        let open_files = limits::raise_open_files();
        tracing::debug!(limit = open_files.now, "engine starts");
        let poller = Poller::new()?;
        let wake = EventFd::new()?;
        poller.add(&wake, WAKE_TOKEN, Interest::READ)?;
        let engine = Arc::new(Self {
            generation,
            poller,
            wake,
            sources: RwLock::default(),
            next_token: AtomicU64::new(WAKE_TOKEN + 1),
            timers: Mutex::default(),
            parker: Parker::new(),
        });
        let worker = Arc::clone(&engine);
        // All signals stay with the application's threads.
        crate::sys::thread::spawn_without_signals("iwarp-progress", move || worker.run())?;
        *current = Some(Arc::clone(&engine));
        Ok(engine)
    }

    /// A token for a source.
    pub(crate) fn token(&self) -> u64 {
        self.next_token.fetch_add(1, Ordering::Relaxed)
    }

    /// Watches a descriptor and keeps its source alive until [`remove`](Self::remove).
    pub(crate) fn add(
        &self,
        fd: impl AsFd,
        token: u64,
        interest: Interest,
        source: Arc<dyn Source>,
    ) -> io::Result<()> {
        self.sources.write().insert(token, source);
        self.poller.add(fd, token, interest).inspect_err(|_| {
            self.sources.write().remove(&token);
        })
    }

    /// True in a child of the process that started it. The epoll set and the sockets in it are then shared with the
    /// parent, and a change here would be one there.
    pub(crate) fn is_foreign(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Keeps a source without a descriptor alive for its timers, until [`forget`](Self::forget).
    pub(crate) fn add_timed(&self, token: u64, source: Arc<dyn Source>) {
        self.sources.write().insert(token, source);
    }

    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.poller.modify(fd, token, interest)
    }

    /// Watches a descriptor no more. Harmless if it was not watched.
    pub(crate) fn remove(&self, fd: impl AsFd, token: u64) {
        if !self.is_foreign() {
            let _ = self.poller.remove(fd);
        }
        self.forget(token);
    }

    pub(crate) fn forget(&self, token: u64) {
        // Dropped outside the lock: it may remove others.
        let source = self.sources.write().remove(&token);
        drop(source);
    }

    /// Calls the source's `timer` after `delay`.
    pub(crate) fn after(&self, delay: Duration, token: u64, kind: u32) {
        let at = now_ns().saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX));
        let mut timers = self.timers.lock();
        let earlier = timers.peek().is_none_or(|Reverse((first, ..))| at < *first);
        timers.push(Reverse((at, token, kind)));
        drop(timers);
        if earlier {
            self.wake.signal();
        }
    }

    /// An application thread polled a queue in vain and is driving the sockets itself.
    #[inline]
    pub(crate) fn note_empty_poll() {
        LAST_EMPTY_POLL.store(now_ns(), Ordering::Relaxed);
    }

    /// Application threads stop driving now: one of them is going to wait for an event.
    #[inline]
    pub(crate) fn hand_over(&self) {
        LAST_EMPTY_POLL.store(0, Ordering::Relaxed);
        self.parker.unpark();
    }

    fn application_drives() -> bool {
        now_ns().wrapping_sub(LAST_EMPTY_POLL.load(Ordering::Relaxed)) < DRIVING_NS
    }

    /// Serves whatever is ready, without waiting: for application threads that poll many queue pairs.
    pub(crate) fn poll_once(&self) {
        // Nothing is kept for a thread that is ending.
        let kept = EVENTS.try_with(Cell::take).ok().flatten();
        let mut events = kept.unwrap_or_else(|| Box::new(Events::with_capacity(BATCH)));
        if let Ok(n) = self.poller.wait_zero(&mut events)
            && n > 0
        {
            // The wake-up is for the progress thread, whose sleep it ends: taken off here, it would be lost.
            self.dispatch(&events, false);
        }
        let _ = EVENTS.try_with(|cell| cell.set(Some(events)));
    }

    fn run(&self) {
        let mut events = Events::with_capacity(BATCH);
        let mut park = PARK_MIN;
        loop {
            if let Err(error) = self.poller.wait(&mut events, self.next_timeout()) {
                // Only a programming error can end up here; without progress nothing would ever complete.
                tracing::error!(%error, "epoll_wait failed");
                std::thread::sleep(PARK_MAX);
                continue;
            }
            if !events.is_empty() && Self::application_drives() {
                self.parker.park_timeout(park, Self::application_drives);
                park = (park * 2).min(PARK_MAX);
                let _ = self.poller.wait_zero(&mut events);
            } else {
                park = PARK_MIN;
            }
            self.dispatch(&events, true);
            self.fire_timers();
        }
    }

    fn dispatch(&self, events: &Events, woken: bool) {
        for event in events.iter() {
            if event.token == WAKE_TOKEN {
                if woken {
                    self.wake.drain();
                }
                continue;
            }
            let source = self.sources.read().get(&event.token).cloned();
            if let Some(source) = source {
                source.ready(event.readable, event.writable, event.broken);
            }
        }
    }

    fn next_timeout(&self) -> Option<Duration> {
        let timers = self.timers.lock();
        let Reverse((at, ..)) = timers.peek()?;
        Some(Duration::from_nanos(at.saturating_sub(now_ns())))
    }

    fn fire_timers(&self) {
        loop {
            let (token, kind) = {
                let mut timers = self.timers.lock();
                match timers.peek() {
                    Some(Reverse((at, token, kind))) if *at <= now_ns() => {
                        let due = (*token, *kind);
                        timers.pop();
                        due
                    }
                    _ => return,
                }
            };
            let source = self.sources.read().get(&token).cloned();
            if let Some(source) = source {
                source.timer(kind);
            }
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}
