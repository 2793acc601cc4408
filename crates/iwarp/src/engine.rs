//! The engine: one epoll set, one table of timers and one progress thread for a process.
//!
//! The threads that are running already move the octets: posting threads write, polling threads read. The progress thread does
//! what no other thread does, and sleeps in `epoll_wait`. While an application thread polls, the sockets of its queue pairs are
//! taken out of the set, so that packets wake no thread and cost the sender no look at the set; the progress thread looks again
//! after at most [`PARK_MAX`]. While application threads poll the whole set, it parks. It starts with the first socket and
//! belongs to one process: after a fork the child gets an engine of its own when it needs one.

use crate::progress::parker::Parker;
use crate::sys::clock::now_ns;
use crate::sys::eventfd::EventFd;
use crate::sys::poller::{Events, Interest, Poller};
use crate::sys::{fork, limits, prefetch};
use parking_lot::{Mutex, RwLock};
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// An empty poll within this time means that an application thread is driving.
const DRIVING_NS: u64 = 50_000;
/// How long the progress thread leaves alone what other threads are driving.
const PARK_MIN: Duration = Duration::from_micros(200);
/// How long an application thread that has polled counts as driving, and how long the progress thread leaves it alone at first.
/// This is longer than a program takes to answer a batch of completions: a thread that came between would take its processor,
/// and find nothing to do that the program would not do.
const PARK_FIRST: Duration = Duration::from_millis(1);
/// How long it leaves the application thread alone after that has driven for a while. It limits how late one-sided requests are
/// served when an application stops polling.
const PARK_MAX: Duration = Duration::from_millis(4);
/// An application thread that has polled everything within this time may only be waiting for a processor.
const LATELY_NS: u64 = 20_000_000;
/// Events taken from the kernel at a time. Their answers are sent before the next are taken, and writing to a socket is cheaper
/// while the processor's cache still has it from reading: with 128, echoes took a tenth longer.
const BATCH: usize = 32;
const WAKE_TOKEN: u64 = 0;

/// When an application thread last polled in vain, in nanoseconds of the monotonic clock.
static LAST_EMPTY_POLL: AtomicU64 = AtomicU64::new(0);
/// When one last served the whole set or was about to, in the same clock.
static LAST_POLL_OF_ALL: AtomicU64 = AtomicU64::new(0);
/// When one last served the whole set.
static LAST_SERVED_ALL: AtomicU64 = AtomicU64::new(0);
static CURRENT: Mutex<Option<Arc<Engine>>> = Mutex::new(None);

/// Something with a file descriptor or a timer.
pub(crate) trait Source: Send + Sync {
    /// The descriptor is ready. `broken`: it has an error, or is closed in both directions, which reading or writing will tell.
    /// Returns `false` if another thread is driving it and will look again.
    fn ready(self: Arc<Self>, readable: bool, writable: bool, broken: bool) -> bool;
    /// It is served after a few others. The processor may prefetch its own state meanwhile.
    fn approach(&self) {}
    /// It is served next. The processor may prefetch what its state refers to meanwhile.
    fn come_next(&self) {}
    /// Returns `true` if application threads have driven it since the last call.
    fn is_driven(&self) -> bool {
        false
    }
    /// Application threads drive it: [`Engine::pause`]s its descriptor until [`resume`](Self::resume). Returns `false` if it has none.
    fn rest(&self) -> bool {
        false
    }
    /// They no longer drive it.
    fn resume(&self) {}
    /// Returns `true` if this timer still has a purpose. If not, no thread is woken for it.
    fn awaits(&self, _: u32) -> bool {
        true
    }
    /// A timer has expired. Timers are not cancelled: the source decides whether it still has a purpose.
    fn timer(self: Arc<Self>, kind: u32);
}

/// Sources by token.
type Sources = HashMap<u64, Arc<dyn Source>, BuildHasherDefault<TokenHasher>>;

/// Tokens count up, and only this file makes them, so one multiplication spreads them well enough.
#[derive(Default)]
struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, octets: &[u8]) {
        for &octet in octets {
            self.write_u64(u64::from(octet));
        }
    }

    fn write_u64(&mut self, token: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

pub(crate) struct Engine {
    generation: u32,
    poller: Poller,
    wake: EventFd,
    sources: RwLock<Sources>,
    next_token: AtomicU64,
    timers: Mutex<BinaryHeap<Reverse<(u64, u64, u32)>>>,
    parker: Parker,
    /// Where the progress thread sleeps in `epoll_wait` while sources rest.
    resting: Parker,
    /// Times that application threads have stopped driving.
    hand_overs: AtomicU32,
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
            resting: Parker::new(),
            hand_overs: AtomicU32::new(0),
        });
        let worker = Arc::clone(&engine);
        // All signals stay with the application's threads.
        crate::sys::thread::spawn_without_signals("iwarp-progress", move || worker.run())?;
        *current = Some(Arc::clone(&engine));
        // Not under the lock: it works on files, and a child that is forked meanwhile would inherit the lock as held.
        drop(current);
        crate::stat::start(&engine);
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

    /// The descriptor that is watched under this token belongs to another source from now on.
    pub(crate) fn hand_on(&self, token: u64, source: Arc<dyn Source>) {
        // Dropped outside the lock.
        let before = self.sources.write().insert(token, source);
        drop(before);
    }

    /// Returns `true` in a child of the process that started it. The epoll set and its sockets are then shared with the parent, and
    /// a change here would be one there.
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

    /// Takes a descriptor out of the set for a while; its source stays.
    pub(crate) fn pause(&self, fd: impl AsFd) {
        if !self.is_foreign() {
            let _ = self.poller.remove(fd);
        }
    }

    /// Watches a descriptor again after [`pause`](Self::pause). What has arrived meanwhile is reported.
    pub(crate) fn resume(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.poller.add(fd, token, interest)
    }

    /// Watches a descriptor no more. Harmless if it was not watched.
    pub(crate) fn remove(&self, fd: impl AsFd, token: u64) {
        if !self.is_foreign() {
            let _ = self.poller.remove(fd);
        }
        self.forget(token);
    }

    pub(crate) fn forget(&self, token: u64) {
        if self.is_foreign() {
            // The lock may have been copied while it was held, and no thread serves this table here.
            return;
        }
        // Dropped outside the lock: it may remove others.
        let source = self.sources.write().remove(&token);
        drop(source);
    }

    /// Calls the source's `timer` after `delay`.
    pub(crate) fn after(&self, delay: Duration, token: u64, kind: u32) {
        let at = now_ns().saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX));
        self.at(at, token, kind);
    }

    /// As [`after`](Self::after), up to a quarter later, so that one wake-up serves many sources.
    pub(crate) fn after_about(&self, delay: Duration, token: u64, kind: u32) {
        let delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        let at = now_ns().saturating_add(delay);
        let at = at
            .checked_next_multiple_of((delay / 4).max(1))
            .unwrap_or(at);
        self.at(at, token, kind);
    }

    /// Calls the source's `timer` at a time in nanoseconds of [`now_ns`].
    pub(crate) fn at(&self, at: u64, token: u64, kind: u32) {
        let mut timers = self.timers.lock();
        let earlier = timers.peek().is_none_or(|Reverse((first, ..))| at < *first);
        timers.push(Reverse((at, token, kind)));
        drop(timers);
        // It sleeps in `epoll_wait`, or is parked: it has to look at the timers again, or waiting requests would be sent late.
        if earlier && !self.parker.unpark() {
            self.wake.signal();
        }
    }

    /// An application thread polled a queue in vain and is driving the sockets itself.
    #[inline]
    pub(crate) fn note_empty_poll() {
        Self::note_empty_poll_at(now_ns());
    }

    /// The same, for callers that know the time.
    #[inline]
    pub(crate) fn note_empty_poll_at(now: u64) {
        LAST_EMPTY_POLL.store(now, Ordering::Relaxed);
    }

    /// An application thread drives the whole set, or is about to: it is busy with completions and will be back.
    #[inline]
    pub(crate) fn note_poll_of_all() {
        LAST_POLL_OF_ALL.store(now_ns(), Ordering::Relaxed);
    }

    /// Application threads stop driving now: one of them is about to wait for an event.
    #[inline]
    pub(crate) fn hand_over(&self) {
        LAST_EMPTY_POLL.store(0, Ordering::Relaxed);
        LAST_POLL_OF_ALL.store(0, Ordering::Relaxed);
        self.hand_overs.fetch_add(1, Ordering::Release);
        self.parker.unpark();
        self.resting.unpark_with(|| self.wake.signal());
    }

    /// How often that has happened.
    #[cfg(test)]
    pub(crate) fn times_handed_over(&self) -> u32 {
        self.hand_overs.load(Ordering::Acquire)
    }

    /// Application threads drive queue pairs of their own.
    fn application_drives() -> bool {
        now_ns().wrapping_sub(LAST_EMPTY_POLL.load(Ordering::Relaxed)) < DRIVING_NS
    }

    /// They drive everything. A thread that finds completions with every poll never drives for nothing.
    fn application_drives_all() -> bool {
        let now = now_ns();
        let since = |stamp: &AtomicU64| now.saturating_sub(stamp.load(Ordering::Relaxed));
        since(&LAST_POLL_OF_ALL) < PARK_FIRST.as_nanos() as u64
            && since(&LAST_SERVED_ALL) < PARK_MAX.as_nanos() as u64
    }

    /// They have driven everything lately, and have stopped or are kept from it.
    fn application_was_driving_all() -> bool {
        let age = now_ns().wrapping_sub(LAST_POLL_OF_ALL.load(Ordering::Relaxed));
        (PARK_FIRST.as_nanos() as u64..LATELY_NS).contains(&age)
    }

    /// Serves whatever is ready, without waiting: for application threads that poll many queue pairs. Returns `false` if other
    /// threads are driving all of it.
    pub(crate) fn poll_once(&self) -> bool {
        let now = now_ns();
        LAST_POLL_OF_ALL.store(now, Ordering::Relaxed);
        LAST_SERVED_ALL.store(now, Ordering::Relaxed);
        // Nothing is kept for a thread that is ending.
        let kept = EVENTS.try_with(Cell::take).ok().flatten();
        let mut events = kept.unwrap_or_else(|| Box::new(Events::with_capacity(BATCH)));
        let ready = self.poller.wait_zero(&mut events).is_ok_and(|n| n > 0);
        let served = ready && self.dispatch(&events, None);
        let _ = EVENTS.try_with(|cell| cell.set(Some(events)));
        served
    }

    fn run(&self) {
        let mut events = Events::with_capacity(BATCH);
        let mut resting = Sources::default();
        let mut hand_overs = 0;
        let mut park = PARK_FIRST;
        loop {
            let limit = (!resting.is_empty()).then_some(park);
            if let Err(error) = self.sleep(&mut events, limit, hand_overs) {
                // Only a programming error leads here; without progress nothing would ever complete.
                tracing::error!(%error, "epoll_wait failed");
                std::thread::sleep(PARK_MAX);
                continue;
            }
            // Done before the look at which thread drives: a hand-over after this moment must not be slept through.
            let before =
                std::mem::replace(&mut hand_overs, self.hand_overs.load(Ordering::Acquire));
            Self::look_after(&mut resting);
            park = if resting.is_empty() || before != hand_overs {
                PARK_FIRST
            } else {
                (park * 2).min(PARK_MAX)
            };
            if !events.is_empty() && Self::application_was_driving_all() {
                // It may be waiting for the processor that this thread has.
                std::thread::yield_now();
            }
            if !events.is_empty() && self.leave_all(&mut events, &mut resting) {
                continue;
            }
            let served = self.dispatch(&events, Some(&mut resting));
            self.fire_timers();
            if !events.is_empty() && !served {
                // Other threads are driving all of it, and it would be reported again at once.
                self.parker.park_timeout(PARK_MIN, || {
                    self.hand_overs.load(Ordering::Relaxed) == hand_overs
                });
            }
        }
    }

    /// Watches sources again that application threads no longer drive.
    fn look_after(resting: &mut Sources) {
        resting.retain(|_, source| {
            let stays = source.is_driven();
            if !stays {
                source.resume();
            }
            stays
        });
    }

    /// Pauses what is ready and what application threads drive one by one.
    fn rest_driven(&self, events: &Events, resting: &mut Sources) {
        if !Self::application_drives() {
            return;
        }
        for event in events.iter().filter(|event| event.token != WAKE_TOKEN) {
            let source = self.sources.read().get(&event.token).cloned();
            if let Some(source) = source
                && source.is_driven()
                && source.rest()
            {
                resting.insert(event.token, source);
            }
        }
    }

    /// Leaves the set to the application threads for as long as they poll it. Returns `false` if they do not.
    fn leave_all(&self, events: &mut Events, resting: &mut Sources) -> bool {
        let mut left = false;
        let mut park = PARK_FIRST;
        loop {
            // Done before the look at which thread drives, as in `run`.
            let hand_overs = self.hand_overs.load(Ordering::Acquire);
            if !Self::application_drives_all() {
                break;
            }
            left = true;
            self.rest_driven(events, resting);
            let first = self.first_timer();
            let time = self.next_timeout().map_or(park, |timer| timer.min(park));
            self.parker.park_timeout(time, || {
                self.hand_overs.load(Ordering::Relaxed) == hand_overs && self.first_timer() == first
            });
            park = (park * 2).min(PARK_MAX);
            Self::look_after(resting);
            self.fire_timers();
            let _ = self.poller.wait_zero(events);
        }
        if left {
            // Timers were looked at, and application threads leave this one alone.
            self.wake.drain();
        }
        left
    }

    /// Waits for events. While sources rest not for longer than `limit`, and not if they were handed over since `hand_overs`.
    fn sleep(
        &self,
        events: &mut Events,
        limit: Option<Duration>,
        hand_overs: u32,
    ) -> io::Result<()> {
        let timeout = self.next_timeout();
        let Some(limit) = limit else {
            self.poller.wait(events, timeout)?;
            return Ok(());
        };
        let _announced = self.resting.announce();
        if self.hand_overs.load(Ordering::Relaxed) == hand_overs {
            let limit = timeout.map_or(limit, |timeout| timeout.min(limit));
            self.poller.wait(events, Some(limit))?;
        } else {
            self.poller.wait_zero(events)?;
        }
        Ok(())
    }

    /// Serves what is ready. Returns `false` if other threads are driving all of it.
    ///
    /// The progress thread passes a list: sources that application threads drive are not served, but put there to be paused.
    fn dispatch(&self, events: &Events, mut resting: Option<&mut Sources>) -> bool {
        let driving = resting.is_some() && Self::application_drives();
        let mut served = false;
        // With thousands of queue pairs nearly every access to the next one's state goes to memory. Asked for two turns ahead,
        // it comes during the system calls of the others.
        let mut sources = self.sources_of(events);
        if let [Some(first), Some(second), ..] = &sources {
            first.approach();
            second.approach();
            first.come_next();
        }
        for (at, event) in events.iter().enumerate() {
            if let Some(Some(source)) = sources.get(at + 2) {
                source.approach();
            }
            if let Some(Some(source)) = sources.get(at + 1) {
                source.come_next();
            }
            if event.token == WAKE_TOKEN {
                // It ends the sleep of the progress thread: taken off by another, it would be lost.
                if resting.is_some() {
                    self.wake.drain();
                    served = true;
                }
                continue;
            }
            let Some(source) = sources.get_mut(at).and_then(Option::take) else {
                served = true;
                continue;
            };
            if driving
                && let Some(resting) = &mut resting
                && source.is_driven()
                && source.rest()
            {
                resting.insert(event.token, source);
                served = true;
                continue;
            }
            served |= source.ready(event.readable, event.writable, event.broken);
        }
        served
    }

    /// The sources of a batch of events, in its order.
    fn sources_of(&self, events: &Events) -> [Option<Arc<dyn Source>>; BATCH] {
        let mut sources = [const { None }; BATCH];
        let known = self.sources.read();
        for source in events.iter().filter_map(|event| known.get(&event.token)) {
            prefetch::counts(source);
        }
        for (event, slot) in events.iter().zip(&mut sources) {
            *slot = known.get(&event.token).cloned();
        }
        sources
    }

    /// Returns when the first timer expires.
    fn first_timer(&self) -> Option<u64> {
        self.timers.lock().peek().map(|Reverse((at, ..))| *at)
    }

    /// Returns how long it is until the first timer with a purpose. Those before it are dropped.
    fn next_timeout(&self) -> Option<Duration> {
        loop {
            let Reverse(first) = *self.timers.lock().peek()?;
            let (at, token, kind) = first;
            // Without the lock: sources set timers under theirs.
            let source = self.sources.read().get(&token).cloned();
            if source.is_some_and(|source| source.awaits(kind)) {
                return Some(Duration::from_nanos(at.saturating_sub(now_ns())));
            }
            let mut timers = self.timers.lock();
            if timers.peek() == Some(&Reverse(first)) {
                timers.pop();
            }
        }
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

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
