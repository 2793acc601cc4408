//! The world of one execution: its time, its descriptors, and its sleeping threads.
//!
//! All threads of an execution run on one thread of the operating system, one at a time, so this
//! state needs no lock. The scheduler switches threads only in [`call`], never while the state is
//! accessed.

use shuttle::rand::RngCore as _;
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::thread::{self, Thread, ThreadId};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// A bug that is planted to show that the checks detect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Half of the signals that wake a progress thread do nothing.
    LosesSignals,
    /// Only events wake a thread, not the time limit of its sleep.
    IgnoresTime,
    /// A descriptor that is added to a set does not report what arrived before.
    ForgetsArrivals,
    /// A waiting thread keeps its lease.
    KeepsLease,
    /// A thread checks for completions before it registers its waker, not afterwards.
    ChecksFirst,
    /// The engine does not watch a socket again after it paused watching it.
    NeverResumes,
    /// A thread that finds a socket in use leaves no note for its driver.
    LeavesNoNote,
}

#[derive(Debug, Default)]
struct Descriptor {
    /// Times of the arrivals that have not been taken.
    arrived: Vec<u64>,
}

#[derive(Debug)]
struct Member {
    set: usize,
    fd: usize,
    token: u64,
    readable: bool,
    /// Number of pending arrivals that the set does not report.
    hidden: usize,
}

#[derive(Debug, Default)]
struct World {
    now: u64,
    plant: Option<Plant>,
    descriptors: Vec<Descriptor>,
    sets: usize,
    members: Vec<Member>,
    /// Queues whose lease was handed over, and that were not polled since.
    handed_over: HashSet<usize>,
    /// A lease was handed over, and no queue was polled since.
    all_handed_over: bool,
    /// End of the last poll.
    last_poll: u64,
    /// For each thread, the time that it last read from the clock.
    clock_reads: HashMap<ThreadId, u64>,
    /// Sleeping threads, with the time when each wakes by itself.
    sleepers: Vec<(Option<u64>, Thread)>,
}

std::thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

/// Accesses the world. `f` must not switch to another thread.
fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(f)
}

/// Creates a new world.
pub(crate) fn begin(plant: Option<Plant>) {
    with(|w| {
        *w = World {
            // As on a machine that has been up for a while.
            now: 1_000_000_000,
            plant,
            ..World::default()
        };
    });
}

pub(crate) fn has_plant(plant: Plant) -> bool {
    with(|w| w.plant == Some(plant))
}

/// Starts a system call, before which another thread may run.
pub(crate) fn call() {
    AtomicBool::new(false).load(Ordering::SeqCst);
}

/// Starts a thread that does not prevent the execution from ending. `shuttle` can only detach tasks
/// of futures, which may block like threads.
pub(crate) fn spawn_detached(run: impl FnOnce() + Send + 'static) {
    drop(shuttle::future::spawn(async move { run() }));
}

/// Returns a random number below `limit`, which the seed determines.
pub(crate) fn random(limit: u64) -> u64 {
    shuttle::rand::thread_rng().next_u64() % limit.max(1)
}

pub(crate) fn now() -> u64 {
    with(|w| w.now)
}

/// Records the time that the calling thread reads from the clock.
pub(crate) fn note_clock_read(now: u64) {
    let me = thread::current().id();
    with(|w| w.clock_reads.insert(me, now));
}

/// Returns the time that the calling thread last read from the clock.
pub(crate) fn last_clock_read() -> u64 {
    let me = thread::current().id();
    with(|w| w.clock_reads.get(&me).copied().unwrap_or(w.now))
}

/// Records the end of a poll of a queue, which may have renewed leases.
pub(crate) fn note_poll(queue: usize) {
    with(|w| {
        w.handed_over.remove(&queue);
        w.all_handed_over = false;
        w.last_poll = w.now;
    });
}

/// Returns when a poll of any queue last ended.
pub(crate) fn last_poll() -> u64 {
    with(|w| w.last_poll)
}

/// Records that a thread has handed over the lease of a queue, and the lease of all queues.
pub(crate) fn note_hand_over(queue: usize) {
    with(|w| {
        w.handed_over.insert(queue);
        w.all_handed_over = true;
    });
}

/// Returns `true` if the lease of a queue (`None`: the lease of all queues) was handed over and not
/// renewed by a poll since.
pub(crate) fn is_handed_over(queue: Option<usize>) -> bool {
    with(|w| queue.map_or(w.all_handed_over, |queue| w.handed_over.contains(&queue)))
}

/// Advances the time while the calling thread works. Returns the new time.
pub(crate) fn spend(time: u64) -> u64 {
    let now = with(|w| {
        w.now += time;
        w.now
    });
    wake_if(|end| end.is_some_and(|end| end <= now));
    now
}

/// Wakes the sleepers for whose end of sleep `condition` returns `true`.
fn wake_if(condition: impl Fn(Option<u64>) -> bool) {
    let woken: Vec<_> = with(|w| {
        let sleepers = &mut w.sleepers;
        sleepers
            .extract_if(.., |(end, _)| condition(*end))
            .collect()
    });
    for (_, thread) in woken {
        thread.unpark();
    }
}

/// Sleeps until `is_ready` returns `true` or until `end`. Returns `false` if the time expired
/// first.
pub(crate) fn sleep_until(end: Option<u64>, is_ready: impl Fn() -> bool) -> bool {
    let end = end.filter(|_| !has_plant(Plant::IgnoresTime));
    loop {
        call();
        if is_ready() {
            return true;
        }
        if end.is_some_and(|end| end <= now()) {
            return false;
        }
        let me = thread::current();
        with(|w| w.sleepers.push((end, me)));
        thread::park();
    }
}

/// Returns when the first sleeper with a time limit wakes.
pub(crate) fn first_wake_time() -> Option<u64> {
    with(|w| w.sleepers.iter().filter_map(|(end, _)| *end).min())
}

pub(crate) fn descriptor() -> usize {
    with(|w| {
        w.descriptors.push(Descriptor::default());
        w.descriptors.len() - 1
    })
}

/// Records an arrival at a descriptor.
pub(crate) fn arrive(fd: usize) {
    with(|w| {
        let now = w.now;
        w.descriptors[fd].arrived.push(now);
    });
    wake_if(|_| true);
}

/// Takes all arrivals. Returns their number.
pub(crate) fn take_all(fd: usize) -> usize {
    with(|w| {
        w.members
            .iter_mut()
            .filter(|member| member.fd == fd)
            .for_each(|member| member.hidden = 0);
        std::mem::take(&mut w.descriptors[fd].arrived).len()
    })
}

/// Returns the number of arrivals that have not been taken.
pub(crate) fn pending(fd: usize) -> usize {
    with(|w| w.descriptors[fd].arrived.len())
}

/// A simulated epoll set.
#[derive(Debug)]
pub(crate) struct Set(usize);

impl Set {
    pub(crate) fn new() -> Self {
        with(|w| {
            w.sets += 1;
            Self(w.sets)
        })
    }

    /// Returns `false` if the descriptor already is a member.
    pub(crate) fn add(&self, fd: usize, token: u64, readable: bool) -> bool {
        let set = self.0;
        let added = with(|w| {
            if w.members.iter().any(|m| (m.set, m.fd) == (set, fd)) {
                return false;
            }
            let hidden = match w.plant {
                Some(Plant::ForgetsArrivals) => w.descriptors[fd].arrived.len(),
                _ => 0,
            };
            w.members.push(Member {
                set,
                fd,
                token,
                readable,
                hidden,
            });
            true
        });
        wake_if(|_| true);
        added
    }

    /// Returns `false` if the descriptor is not a member.
    pub(crate) fn remove(&self, fd: usize) -> bool {
        with(|w| {
            let before = w.members.len();
            w.members.retain(|m| (m.set, m.fd) != (self.0, fd));
            w.members.len() < before
        })
    }

    /// Returns the tokens of the members with arrivals.
    pub(crate) fn ready(&self) -> Vec<u64> {
        with(|w| {
            let ready = w.members.iter().filter(|m| {
                m.set == self.0 && m.readable && w.descriptors[m.fd].arrived.len() > m.hidden
            });
            ready.map(|m| m.token).collect()
        })
    }
}
