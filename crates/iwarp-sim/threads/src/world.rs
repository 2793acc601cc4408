//! The world of one execution: its time, its descriptors, and who sleeps for them.
//!
//! All threads of an execution run on one thread of the operating system, one at a time, so this
//! state needs no lock. It is not a part of what is modelled: a thread can only be interrupted in
//! front of an access, by [`call`].

use shuttle::rand::RngCore as _;
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::thread::{self, Thread, ThreadId};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// A bug that a run has on purpose, to see that the checks notice it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Half of the signals that wake a progress thread do nothing.
    LosesSignals,
    /// A sleep has no end but an event.
    IgnoresTime,
    /// A descriptor that is watched again reports only what comes after that.
    ForgetsArrivals,
    /// A thread that waits does not give its lease back.
    KeepsLease,
    /// A thread looks for completions, and then asks to be woken.
    LooksFirst,
    /// A socket that has rested is not watched again.
    NeverResumes,
    /// A thread that finds another one at a socket leaves no note.
    LeavesNoNote,
}

/// A descriptor.
#[derive(Debug, Default)]
struct Descriptor {
    /// When each thing that nobody has taken arrived.
    arrived: Vec<u64>,
}

/// A member of a set.
#[derive(Debug)]
struct Member {
    set: usize,
    fd: usize,
    token: u64,
    readable: bool,
    /// So many of the things that wait are not reported.
    hidden: usize,
}

#[derive(Debug, Default)]
struct World {
    now: u64,
    plant: Option<Plant>,
    descriptors: Vec<Descriptor>,
    sets: usize,
    members: Vec<Member>,
    /// Queues that nobody has polled since a thread gave back their leases.
    handed_over: HashSet<usize>,
    /// Nobody has polled any queue since a thread gave back its leases.
    all_handed_over: bool,
    /// When a poll last ended.
    polled: u64,
    /// When each thread last looked at the clock.
    looks: HashMap<ThreadId, u64>,
    /// Threads that sleep, each with the end of its sleep.
    sleepers: Vec<(Option<u64>, Thread)>,
}

std::thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

/// Uses the world. `f` is no place where another thread goes on.
fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(f)
}

/// Begins a new world.
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

pub(crate) fn has(plant: Plant) -> bool {
    with(|w| w.plant == Some(plant))
}

/// A system call begins: another thread may go on first.
pub(crate) fn call() {
    AtomicBool::new(false).load(Ordering::SeqCst);
}

/// Starts a thread that does not keep the execution from its end. Only tasks of futures can be let
/// go of; such a one may block.
pub(crate) fn spawn_detached(run: impl FnOnce() + Send + 'static) {
    drop(shuttle::future::spawn(async move { run() }));
}

/// Returns a number below `below`, which the scheduler chooses.
pub(crate) fn random(below: u64) -> u64 {
    shuttle::rand::thread_rng().next_u64() % below.max(1)
}

pub(crate) fn now() -> u64 {
    with(|w| w.now)
}

/// The calling thread knows this time.
pub(crate) fn note_look(now: u64) {
    let me = thread::current().id();
    with(|w| w.looks.insert(me, now));
}

/// Returns the time that the calling thread knows.
pub(crate) fn last_look() -> u64 {
    let me = thread::current().id();
    with(|w| w.looks.get(&me).copied().unwrap_or(w.now))
}

/// A poll of a queue ends, which may have renewed leases.
pub(crate) fn note_poll(queue: usize) {
    with(|w| {
        w.handed_over.remove(&queue);
        w.all_handed_over = false;
        w.polled = w.now;
    });
}

/// Returns when a poll of any queue last ended.
pub(crate) fn last_poll() -> u64 {
    with(|w| w.polled)
}

/// A thread has given back its leases.
pub(crate) fn note_hand_over(queue: usize) {
    with(|w| {
        w.handed_over.insert(queue);
        w.all_handed_over = true;
    });
}

/// Returns `true` if the lease of a queue, or the one of everything, was given back and nobody has
/// polled since.
pub(crate) fn is_handed_over(queue: Option<usize>) -> bool {
    with(|w| queue.map_or(w.all_handed_over, |queue| w.handed_over.contains(&queue)))
}

/// Lets time pass while the calling thread works. Returns the time afterwards.
pub(crate) fn spend(time: u64) -> u64 {
    let now = with(|w| {
        w.now += time;
        w.now
    });
    wake(|end| end.is_some_and(|end| end <= now));
    now
}

/// Wakes sleepers by the ends of their sleeps.
fn wake(who: impl Fn(Option<u64>) -> bool) {
    let woken: Vec<_> = with(|w| w.sleepers.extract_if(.., |(end, _)| who(*end)).collect());
    for (_, thread) in woken {
        thread.unpark();
    }
}

/// Sleeps until `is_ready` or until a time. Returns `false` if the time is over.
pub(crate) fn sleep_until(end: Option<u64>, is_ready: impl Fn() -> bool) -> bool {
    let end = end.filter(|_| !has(Plant::IgnoresTime));
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

/// Returns when the first sleep ends, if any ends by itself.
pub(crate) fn first_end() -> Option<u64> {
    with(|w| w.sleepers.iter().filter_map(|(end, _)| *end).min())
}

/// Makes a descriptor at which nothing has arrived.
pub(crate) fn descriptor() -> usize {
    with(|w| {
        w.descriptors.push(Descriptor::default());
        w.descriptors.len() - 1
    })
}

/// Something arrives at a descriptor.
pub(crate) fn arrive(fd: usize) {
    with(|w| {
        let now = w.now;
        w.descriptors[fd].arrived.push(now);
    });
    wake(|_| true);
}

/// Takes what has arrived. Returns how much that is.
pub(crate) fn take_all(fd: usize) -> usize {
    with(|w| {
        w.members
            .iter_mut()
            .filter(|member| member.fd == fd)
            .for_each(|member| member.hidden = 0);
        std::mem::take(&mut w.descriptors[fd].arrived).len()
    })
}

/// Returns how much waits at a descriptor.
pub(crate) fn waiting(fd: usize) -> usize {
    with(|w| w.descriptors[fd].arrived.len())
}

/// A set of descriptors.
#[derive(Debug)]
pub(crate) struct Set(usize);

impl Set {
    pub(crate) fn new() -> Self {
        with(|w| {
            w.sets += 1;
            Self(w.sets)
        })
    }

    /// Returns `false` if it is a member.
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
        wake(|_| true);
        added
    }

    /// Returns `false` if it is no member.
    pub(crate) fn remove(&self, fd: usize) -> bool {
        with(|w| {
            let before = w.members.len();
            w.members.retain(|m| (m.set, m.fd) != (self.0, fd));
            w.members.len() < before
        })
    }

    /// Returns the tokens of the members at which something waits.
    pub(crate) fn ready(&self) -> Vec<u64> {
        with(|w| {
            let ready = w.members.iter().filter(|m| {
                m.set == self.0 && m.readable && w.descriptors[m.fd].arrived.len() > m.hidden
            });
            ready.map(|m| m.token).collect()
        })
    }
}
