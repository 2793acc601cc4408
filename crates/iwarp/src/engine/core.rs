//! The engine: an `epoll` set, a table of timers and a progress thread. A process has one engine,
//! or several if it has many connections.
//!
//! Leases ([`super::lease`]) decide which thread drives a socket. Each completion queue has a lease
//! for the sockets of its queue pairs. The process has the lease [`everything`] for threads that
//! poll all sockets, because their queues have many queue pairs.
//!
//! The first engine starts with the first socket. An engine belongs to one process: after a fork,
//! the child starts engines of its own.
//!
//! The first engine serves the first connections of queue pairs, and all other sources. When each
//! engine has [`policy::CONNECTIONS_EACH`] connections, the next connection starts another engine,
//! up to [`Config::progress_threads`](crate::Config::progress_threads). So a server of many peers
//! uses more than one processor, and a process with few connections has one progress thread.

use super::lease::Lease;
use super::parker::Parker;
use super::policy;
use super::sources::{PausedSources, Source, Sources};
use super::sync::{AtomicUsize, Ordering, thread_local};
use super::timers::Timers;
use super::watch::{Rounds, Watch};
use super::yield_pacing::has_competitors;
use crate::sys::clock::now_ns;
use crate::sys::eventfd::EventFd;
use crate::sys::poller::{AsFd, Events, Interest, Poller};
use crate::sys::thread::kept_from_processor;
use crate::sys::{fork, guarded, limits, prefetch};
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of events per call of `epoll_wait`. The sockets of one batch are read and
/// answered before the next batch, because a socket that is still in the processor's cache is
/// cheaper to write: with 128 events, echoes took a tenth longer.
pub(super) const BATCH: usize = 32;
pub(super) const WAKE_TOKEN: u64 = 0;

// A child leaks the engines that it inherits, because dropping them would affect the parent's
// sockets.
#[cfg(not(shuttle))]
use crate::sys::process_lock::ProcessLock;
#[cfg(not(shuttle))]
type Engines = ProcessLock<Vec<Arc<Engine>>>;
#[cfg(shuttle)]
type Engines = super::sync::parking::Mutex<Vec<Arc<Engine>>>;

#[cfg(not(shuttle))]
static ENGINES: Engines = Engines::own("engine::ENGINES", Vec::new());
#[cfg(not(shuttle))]
static WHOLE_PROCESS: Lease = Lease::new();
/// Number of engines that were started. Threads copy the list again when it has changed.
#[cfg(not(shuttle))]
static STARTS: AtomicUsize = AtomicUsize::new(0);

// Each execution of a model starts with new engines.
#[cfg(shuttle)]
shuttle::lazy_static! {
    static ref ENGINES: Engines = Engines::new(Vec::new());
    static ref WHOLE_PROCESS: Lease = Lease::new();
    static ref STARTS: AtomicUsize = AtomicUsize::new(0);
}

fn engines() -> &'static Engines {
    &ENGINES
}

/// Called with the first engine of each process once it runs.
#[cfg(not(shuttle))]
type StartHook = fn(&Arc<Engine>);
#[cfg(not(shuttle))]
static STARTED: ProcessLock<Option<StartHook>> = ProcessLock::new("engine::STARTED", None);

/// Registers `started`, which is called with the first engine of this process and of each child
/// when that engine starts. If it runs already, calls `started` now. Only the first registration
/// has an effect.
#[cfg(not(shuttle))]
pub(crate) fn at_start(started: StartHook) {
    if STARTED.lock().replace(started).is_some() {
        return;
    }
    let running = engines().lock().first().cloned();
    if let Some(engine) = running {
        started(&engine);
    }
}

/// Returns the lease of threads that drive all sockets of the process by [`poll_all`].
pub(crate) fn whole_process_lease() -> &'static Lease {
    &WHOLE_PROCESS
}

/// Wakes the progress threads, so that they check the leases again. Called after a lease was given
/// back.
#[cold]
pub(crate) fn wake_up() {
    for engine in running_engines() {
        engine.wake_up();
    }
}

/// Serves all ready sources of the process, without waiting, for an application thread that polls.
/// Returns `false` if no source was ready, or if other threads drive all ready sources.
///
/// A caller that polls densely then holds the lease of the whole process, and the progress thread
/// drives nothing. With one engine, a second thread would gain nothing. With several engines, the
/// progress threads have enough work, so the caller gets that lease only if it has `many` queue
/// pairs and no other way to drive them. The same holds if other threads need its processor.
pub(crate) fn poll_all(many: bool) -> bool {
    let start = now_ns();
    let mut served = false;
    let engines = each_known_engine(|engine| served |= engine.poll_once());
    if policy::drives_whole_process(many, engines, has_competitors()) {
        let now = now_ns();
        whole_process_lease().renew_for_drive(now, now.saturating_sub(start), kept_from_processor);
    }
    served
}

/// The engines that a thread knows, so that it can poll them without a lock.
struct Known {
    /// The process, and the value of [`STARTS`] when the list was copied.
    at: Option<(u32, usize)>,
    engines: Vec<Arc<Engine>>,
}

impl Known {
    const fn new() -> Self {
        Self {
            at: None,
            engines: Vec::new(),
        }
    }
}

impl Default for Known {
    fn default() -> Self {
        Self::new()
    }
}

/// Calls `f` for each engine of this process, and returns their number. Writes no memory that
/// threads share, unless another engine has been started.
fn each_known_engine(f: impl FnMut(&Engine)) -> usize {
    // The list is taken, because `f` may call wakers, which may poll. They then copy it again. A
    // thread that exits may have no list any more.
    let mut known = KNOWN.try_with(Cell::take).unwrap_or_default();
    // If an engine starts after this, the next call sees the change.
    let at = Some((fork::generation(), STARTS.load(Ordering::Acquire)));
    if known.at != at {
        known.at = at;
        known.engines = running_engines().collect();
    }
    known.engines.iter().map(|engine| &**engine).for_each(f);
    let engines = known.engines.len();
    let _ = KNOWN.try_with(|cell| cell.set(known));
    engines
}

/// Returns the engines of this process. The list is not locked between two steps of the iterator.
pub(super) fn running_engines() -> impl Iterator<Item = Arc<Engine>> {
    (0..).map_while(|index| {
        let engines = engines().lock();
        engines.get(index).cloned()
    })
}

pub(crate) struct Engine {
    generation: u32,
    /// Connections of queue pairs that this engine serves.
    connections: AtomicUsize,
    pub(super) poller: Poller,
    pub(super) wake: EventFd,
    pub(super) parker: Parker,
    pub(super) sources: Sources,
    pub(super) paused: PausedSources,
    pub(super) timers: Timers,
    /// Which thread is the progress thread, and whether it is in a round.
    pub(super) rounds: Rounds,
    pub(super) watch: Arc<Watch>,
}

thread_local! {
    static EVENTS: Cell<Option<Box<Events>>> = const { Cell::new(None) };
    static KNOWN: Cell<Known> = const { Cell::new(Known::new()) };
}

impl Engine {
    /// Returns the first engine of this process. Starts it if there is none.
    pub(crate) fn current() -> io::Result<Arc<Self>> {
        let mut engines = engines().lock();
        if let Some(engine) = engines.first() {
            return Ok(Arc::clone(engine));
        }
        let open_files = limits::raise_open_files();
        tracing::debug!(limit = open_files.now, "engine starts");
        let engine = Self::start(Arc::default())?;
        Self::list(&mut engines, &engine);
        // Unlock first: the hook accesses files, and a fork waits for the lock.
        drop(engines);
        #[cfg(not(shuttle))]
        {
            let started = *STARTED.lock();
            if let Some(started) = started {
                started(&engine);
            }
        }
        Ok(engine)
    }

    /// Returns the engine for a new connection: the engine with the fewest connections. Starts
    /// another engine if all have their share of connections, and fewer than `max` engines exist.
    pub(crate) fn for_connection(max: usize) -> io::Result<Arc<Self>> {
        guarded::keep_installed();
        let first = Self::current()?;
        let mut engines = engines().lock();
        let idlest = Self::idlest(&engines).unwrap_or_else(|| Arc::clone(&first));
        if !policy::needs_engine(idlest.connections(), engines.len(), max) {
            return Ok(idlest);
        }
        match Self::start(Arc::clone(&first.watch)) {
            Ok(engine) => {
                tracing::debug!(engines = engines.len() + 1, "another engine starts");
                Self::list(&mut engines, &engine);
                Ok(engine)
            }
            Err(error) => {
                // No descriptors or threads are left. An existing engine can serve any number of
                // connections.
                tracing::warn!(%error, "cannot start another engine; an existing one is used");
                Ok(idlest)
            }
        }
    }

    fn idlest(engines: &[Arc<Self>]) -> Option<Arc<Self>> {
        let idlest = engines.iter().min_by_key(|engine| engine.connections());
        idlest.cloned()
    }

    fn start(watch: Arc<Watch>) -> io::Result<Arc<Self>> {
        let engine = Arc::new(Self::new(fork::generation(), watch)?);
        engine.start_progress(0)?;
        Ok(engine)
    }

    fn list(engines: &mut Vec<Arc<Self>>, engine: &Arc<Self>) {
        engines.push(Arc::clone(engine));
        // A thread that sees this count then finds the engine in the list.
        STARTS.fetch_add(1, Ordering::Release);
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn connection_added(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.watch.start();
    }

    pub(crate) fn connection_removed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn new(generation: u32, watch: Arc<Watch>) -> io::Result<Self> {
        let poller = Poller::new()?;
        let wake = EventFd::new()?;
        poller.add(&wake, WAKE_TOKEN, Interest::READ)?;
        Ok(Self {
            generation,
            connections: AtomicUsize::new(0),
            poller,
            wake,
            parker: Parker::new(),
            sources: Sources::new(WAKE_TOKEN),
            paused: PausedSources::default(),
            timers: Timers::default(),
            rounds: Rounds::default(),
            watch,
        })
    }

    pub(crate) fn token(&self) -> u64 {
        self.sources.token()
    }

    /// Watches a descriptor, and keeps its source alive until [`remove`](Self::remove).
    pub(crate) fn add(
        &self,
        fd: impl AsFd,
        token: u64,
        interest: Interest,
        source: Arc<dyn Source>,
    ) -> io::Result<()> {
        self.sources.insert(token, source);
        self.poller
            .add(fd, token, interest)
            .inspect_err(|_| self.sources.remove(token))
    }

    /// Replaces the source of `token`. Its descriptor stays watched.
    pub(crate) fn replace_source(&self, token: u64, source: Arc<dyn Source>) {
        self.sources.insert(token, source);
    }

    /// Returns `true` in a forked child of the process that started the engine. The child must not
    /// change the epoll set, which it shares with the parent.
    pub(crate) fn is_foreign(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Keeps a source without a descriptor alive for its timers, until [`forget`](Self::forget).
    pub(crate) fn add_timed(&self, token: u64, source: Arc<dyn Source>) {
        self.sources.insert(token, source);
    }

    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.poller.modify(fd, token, interest)
    }

    /// Stops watching a descriptor until [`resume`](Self::resume). Its source stays.
    pub(crate) fn pause(&self, fd: impl AsFd) {
        if !self.is_foreign() {
            let _ = self.poller.remove(fd);
        }
    }

    /// Watches a descriptor again after [`pause`](Self::pause). If data has arrived meanwhile, the
    /// engine reports that it is readable.
    pub(crate) fn resume(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        if self.is_foreign() {
            return Ok(());
        }
        self.poller.add(fd, token, interest)
    }

    /// Stops watching a descriptor and drops its source. Does nothing if it was not watched.
    pub(crate) fn remove(&self, fd: impl AsFd, token: u64) {
        if !self.is_foreign() {
            let _ = self.poller.remove(fd);
        }
        self.forget(token);
    }

    pub(crate) fn forget(&self, token: u64) {
        // In a forked child, the table may have been locked during the fork, and no thread uses it.
        if !self.is_foreign() {
            self.sources.remove(token);
        }
    }

    /// Calls the source's [`timer`](Source::timer) with `kind` after `delay`.
    pub(crate) fn after(&self, delay: Duration, token: u64, kind: u32) {
        let time = now_ns().saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX));
        self.at(time, token, kind);
    }

    /// Does the same as [`after`](Self::after), but up to a quarter of `delay` later, so that one
    /// wake-up serves many sources.
    pub(crate) fn after_about(&self, delay: Duration, token: u64, kind: u32) {
        let delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        let earliest = now_ns().saturating_add(delay);
        let time = earliest
            .checked_next_multiple_of((delay / 4).max(1))
            .unwrap_or(earliest);
        self.at(time, token, kind);
    }

    /// Calls the source's [`timer`](Source::timer) with `kind` at `time`, in nanoseconds of
    /// [`now_ns`].
    pub(crate) fn at(&self, time: u64, token: u64, kind: u32) {
        if self.timers.set((time, token, kind)) {
            self.wake_up();
        }
    }

    /// Wakes the progress thread, so that it checks timers and leases again.
    fn wake_up(&self) {
        self.parker.unpark_with(|| self.wake.signal());
    }

    /// Serves all ready sources, without waiting. Returns `false` if no source was ready, or if
    /// other threads drive all ready sources.
    fn poll_once(&self) -> bool {
        // While a thread exits, its thread-local buffer may be gone already.
        let reused = EVENTS.try_with(Cell::take).ok().flatten();
        let mut events = reused.unwrap_or_else(|| Box::new(Events::with_capacity(BATCH)));
        let ready = self.poller.wait_zero(&mut events).is_ok_and(|n| n > 0);
        let served = ready && self.dispatch(&events, |_, source| Some(source));
        let _ = EVENTS.try_with(|cell| cell.set(Some(events)));
        served
    }

    /// Serves the sources of `events`. Returns `false` if other threads drive all of them.
    ///
    /// `select` decides for each source whether the calling thread serves it, and returns it if so.
    pub(super) fn dispatch(
        &self,
        events: &Events,
        mut select: impl FnMut(u64, Arc<dyn Source>) -> Option<Arc<dyn Source>>,
    ) -> bool {
        let mut served = false;
        // With thousands of queue pairs, nearly every first access to a queue pair is a cache miss.
        // So each source is prefetched while the two sources before it make their system calls.
        let mut sources = self.sources_of(events);
        if let [Some(first), Some(second), ..] = &sources {
            first.prefetch_object();
            second.prefetch_object();
            first.prefetch_state();
        }
        for (i, event) in events.iter().enumerate() {
            if let Some(Some(source)) = sources.get(i + 2) {
                source.prefetch_object();
            }
            if let Some(Some(source)) = sources.get(i + 1) {
                source.prefetch_state();
            }
            let Some(source) = sources.get_mut(i).and_then(Option::take) else {
                // The source was removed, or this is the progress thread's wake-up event.
                served |= event.token != WAKE_TOKEN;
                continue;
            };
            served |= match select(event.token, source) {
                Some(source) => source.ready(event.readable, event.writable, event.broken),
                None => true,
            };
        }
        served
    }

    fn sources_of(&self, events: &Events) -> [Option<Arc<dyn Source>>; BATCH] {
        let mut sources = [const { None }; BATCH];
        self.sources.with_table(|known| {
            for source in events.iter().filter_map(|event| known.get(&event.token)) {
                prefetch::counts(source);
            }
            for (event, slot) in events.iter().zip(&mut sources) {
                *slot = known.get(&event.token).cloned();
            }
        });
        sources
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
#[path = "core_tests.rs"]
pub(super) mod tests;
