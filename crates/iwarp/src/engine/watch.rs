//! Watches the progress threads, so that one that is stuck does not stop all connections of its
//! engine.
//!
//! An access to registered memory may block forever: in a page fault that the program itself serves
//! (`userfaultfd(2)`), or on a file of a server that is gone. The thread cannot be interrupted. It
//! keeps what it holds, the state of one queue pair, and another thread takes its place in the
//! engine. If the access ends after all, the old thread ends.
//!
//! A progress thread works in *rounds*: a round begins when there is something to serve, and ends
//! before the thread sleeps. One number holds the count of rounds and the thread's *place*. The
//! watch gives the place to another thread by changing the number. The old thread notices that when
//! it tries to end its round. If no progress thread has had anything to do for a while, the watch
//! sleeps.
//!
//! The watch also makes the kernel enlarge the table of descriptors, which would delay other
//! threads (`limits.rs` of `iwarp-os`).

use super::core::{self, Engine};
use crate::sys::thread::{is_runnable, own_number};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

/// How often the watch checks while there is something to serve. A round that it sees twice, and
/// whose thread is not running, is stuck.
const PERIOD: Duration = Duration::from_millis(250);
/// Most stuck threads of an engine. Each holds one queue pair whose memory does not respond, and
/// the program chose that memory.
const STUCK_MAX: usize = 32;
/// Bits of a [`Rounds`] number that count rounds; those above are the place. The count is odd
/// during a round.
const COUNT_BITS: u32 = 48;

/// Which thread has the place of the progress thread, and the count of rounds.
#[derive(Default)]
pub(super) struct Rounds {
    word: AtomicU64,
    /// The kernel's thread id of the thread that has the place; 0 until that thread runs.
    thread: AtomicU32,
    /// Threads that have lost their place and not returned.
    stuck: AtomicUsize,
}

/// The place of the progress thread, held by the calling thread.
pub(super) struct Place(u64);

impl Rounds {
    /// Takes the place for which the calling thread was started.
    pub(super) fn enter(&self, place: u64) -> Place {
        self.thread.store(own_number(), Ordering::Relaxed);
        Place(place << COUNT_BITS)
    }

    pub(super) fn begin(&self, place: &mut Place) {
        // The watch gives no place away between rounds. This is a full fence before the caller
        // checks whether the watch sleeps.
        place.0 += 1;
        self.word.swap(place.0, Ordering::SeqCst);
    }

    /// Ends the round. Returns `false` if another thread has the place now.
    pub(super) fn end(&self, place: &mut Place) -> bool {
        let began = place.0;
        let count = began.wrapping_add(1) & ((1 << COUNT_BITS) - 1);
        place.0 = (began >> COUNT_BITS << COUNT_BITS) | count;
        let ended = self
            .word
            .compare_exchange(began, place.0, Ordering::AcqRel, Ordering::Relaxed);
        if ended.is_err() {
            self.stuck.fetch_sub(1, Ordering::Relaxed);
        }
        ended.is_ok()
    }

    /// Gives the place of the thread whose round is `word` to another thread, and returns the new
    /// place. Returns `None` if the round has ended, or if too many threads are stuck.
    fn give_away(&self, word: u64) -> Option<u64> {
        if self.stuck.load(Ordering::Relaxed) >= STUCK_MAX {
            return None;
        }
        let place = (word >> COUNT_BITS).wrapping_add(1) & (u64::MAX >> COUNT_BITS);
        // Before the number changes, because the thread that has lost its place decrements this.
        self.stuck.fetch_add(1, Ordering::Relaxed);
        let new = place << COUNT_BITS;
        let given = self
            .word
            .compare_exchange(word, new, Ordering::AcqRel, Ordering::Relaxed);
        if given.is_err() {
            self.stuck.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        // Only now: a thread that has kept its place must stay known to the watch.
        self.thread.store(0, Ordering::Relaxed);
        Some(place)
    }

    /// Returns the number of the last round, and whether that round has not ended.
    fn last(&self) -> (u64, bool) {
        let word = self.word.load(Ordering::SeqCst);
        (word, word & 1 == 1)
    }

    /// Returns the number of the current round; `None` between rounds.
    fn current(&self) -> Option<u64> {
        let (word, lasts) = self.last();
        lasts.then_some(word)
    }
}

/// The watch of a process. All engines share it.
#[derive(Default)]
pub(super) struct Watch {
    thread: OnceLock<Thread>,
    asleep: AtomicBool,
}

impl Watch {
    /// Wakes the watch if it sleeps. Call it after a round has begun.
    pub(super) fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst)
            && self.asleep.swap(false, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Starts the thread of the watch, unless there is one. Without it, stuck threads are not
    /// replaced.
    #[cfg(not(shuttle))]
    pub(super) fn start(self: &Arc<Self>) {
        if self.thread.get().is_some() {
            return;
        }
        let watch = Arc::clone(self);
        let run = move || {
            // This is the first connection, and many may follow. This thread has time to wait for
            // the kernel.
            if let Some(engine) = core::all().next() {
                crate::sys::limits::make_room(&engine.wake);
            }
            watch.run();
        };
        match crate::sys::thread::spawn_without_signals("iwarp-watch", run) {
            Ok(handle) => {
                // If two threads start at the same time, the second is never woken.
                let _ = self.thread.set(handle.thread().clone());
            }
            Err(error) => tracing::warn!(%error, "progress threads are not watched"),
        }
    }

    /// Under the scheduler of a model no thread is ever stuck.
    #[cfg(shuttle)]
    pub(super) fn start(&self) {}

    fn run(&self) {
        let mut seen: Vec<Option<u64>> = Vec::new();
        loop {
            let mut active = false;
            for (at, engine) in core::all().enumerate() {
                let (round, lasts) = engine.rounds.last();
                if at == seen.len() {
                    seen.push(None);
                }
                let before = seen[at].replace(round);
                // A thread that has ended rounds since the last check will begin others. If the
                // watch slept now, each round would wake it.
                active |= lasts || before != Some(round);
                if lasts && before == Some(round) {
                    engine.relieve(round);
                }
            }
            if active {
                std::thread::sleep(PERIOD);
            } else {
                self.sleep();
            }
        }
    }

    fn sleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
        // A round that began before this store is found here. One that begins later finds the
        // store.
        let busy = core::all().any(|engine| engine.rounds.current().is_some());
        while !busy && self.asleep.load(Ordering::Acquire) {
            std::thread::park();
        }
        self.asleep.store(false, Ordering::Relaxed);
    }
}

impl Engine {
    /// Replaces the progress thread if it is blocked. Its `round` has lasted for at least
    /// [`PERIOD`].
    fn relieve(self: &Arc<Self>, round: u64) {
        let thread = self.rounds.thread.load(Ordering::Relaxed);
        // On a busy machine a round may take long because the thread gets no processor.
        if thread == 0 || is_runnable(thread) {
            return;
        }
        let Some(place) = self.rounds.give_away(round) else {
            return;
        };
        tracing::warn!(
            thread,
            "registered memory does not answer; another thread serves the other connections"
        );
        if let Err(error) = self.start_progress(place) {
            tracing::error!(%error, "no thread can be started: connections are not served");
        }
    }

    pub(super) fn start_progress(self: &Arc<Self>, place: u64) -> io::Result<()> {
        let engine = Arc::clone(self);
        // All signals are left to the application's threads.
        crate::sys::thread::spawn_without_signals("iwarp-progress", move || engine.run(place))
            .map(drop)
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
