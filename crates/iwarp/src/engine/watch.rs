//! The watch: a thread that replaces progress threads that are stuck. Otherwise a stuck thread
//! would stop all connections of its engine.
//!
//! An access to registered memory may block forever: in a page fault that the program itself serves
//! (`userfaultfd(2)`), or in a file on a server that does not respond. The thread cannot be
//! interrupted, and keeps the state of one queue pair locked. Another thread takes its place in the
//! engine. If the access ends after all, the stuck thread exits.
//!
//! A progress thread works in *rounds*: a round begins when there is work, and ends before the
//! thread sleeps. One atomic number contains the count of rounds and the thread's *place*, which is
//! a number that each replacement increments. The watch gives the place to another thread by
//! changing the number. The stuck thread notices that when it tries to end its round. If no
//! progress thread has had work for a while, the watch sleeps.
//!
//! The watch also makes the kernel enlarge the table of descriptors, which would delay other
//! threads (`limits.rs` of `iwarp-os`).

use super::core::{self, Engine};
use crate::sys::thread::{is_runnable, thread_id};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

/// How often the watch checks while there is work. If it sees the same round twice, and the thread
/// is not running, the thread is stuck.
const PERIOD: Duration = Duration::from_millis(250);
/// Maximum number of stuck threads per engine. Each keeps one queue pair locked, whose memory does
/// not respond.
const STUCK_MAX: usize = 32;
/// Number of low bits of [`Rounds::word`] that count rounds; the bits above are the place. The
/// count is odd during a round.
const COUNT_BITS: u32 = 48;

#[derive(Default)]
pub(super) struct Rounds {
    /// The place, and the count of rounds.
    word: AtomicU64,
    /// The kernel's thread id of the progress thread; 0 until that thread runs.
    thread: AtomicU32,
    /// Number of threads that have lost their place and not exited.
    stuck: AtomicUsize,
}

/// The calling thread's copy of [`Rounds::word`].
pub(super) struct Place(u64);

impl Rounds {
    /// Takes the place for which the calling thread was started.
    pub(super) fn enter(&self, place: u64) -> Place {
        self.thread.store(thread_id(), Ordering::Relaxed);
        Place(place << COUNT_BITS)
    }

    pub(super) fn begin(&self, place: &mut Place) {
        // The watch gives no place away between rounds, so this need not compare. The swap is also
        // a full fence before the caller checks whether the watch sleeps.
        place.0 += 1;
        self.word.swap(place.0, Ordering::SeqCst);
    }

    /// Returns `false` if another thread has the place now.
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
        // Increment this before the number changes: the thread that loses its place decrements it.
        self.stuck.fetch_add(1, Ordering::Relaxed);
        let new = place << COUNT_BITS;
        let given = self
            .word
            .compare_exchange(word, new, Ordering::AcqRel, Ordering::Relaxed);
        if given.is_err() {
            self.stuck.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        // Clear this only now: if the thread had kept its place, the watch must still know its id.
        self.thread.store(0, Ordering::Relaxed);
        Some(place)
    }

    /// Returns the current value of `word`, and whether it is in a round.
    fn last(&self) -> (u64, bool) {
        let word = self.word.load(Ordering::SeqCst);
        (word, word & 1 == 1)
    }

    /// Returns the current value of `word`; `None` between rounds.
    fn current(&self) -> Option<u64> {
        let (word, in_round) = self.last();
        in_round.then_some(word)
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

    /// Starts the watch, unless it runs already. If it cannot start, stuck threads are not
    /// replaced.
    #[cfg(not(shuttle))]
    pub(super) fn start(self: &Arc<Self>) {
        if self.thread.get().is_some() {
            return;
        }
        let watch = Arc::clone(self);
        let run = move || {
            // This is the first connection, and many may follow. Enlarge the table of descriptors
            // in this thread, which has time to wait for the kernel.
            if let Some(engine) = core::running_engines().next() {
                crate::sys::limits::enlarge_descriptor_table(&engine.wake);
            }
            watch.run();
        };
        match crate::sys::thread::spawn_without_signals("iwarp-watch", run) {
            Ok(handle) => {
                // If two threads start at the same time, only the first is ever woken.
                let _ = self.thread.set(handle.thread().clone());
            }
            Err(error) => tracing::warn!(
                %error,
                "cannot start the watch thread; stuck progress threads will not be replaced"
            ),
        }
    }

    /// Does nothing: under the scheduler of a model, no thread is ever stuck.
    #[cfg(shuttle)]
    pub(super) fn start(&self) {}

    fn run(&self) {
        let mut seen: Vec<Option<u64>> = Vec::new();
        loop {
            let mut active = false;
            for (i, engine) in core::running_engines().enumerate() {
                let (round, in_round) = engine.rounds.last();
                if i == seen.len() {
                    seen.push(None);
                }
                let before = seen[i].replace(round);
                // A thread that has ended rounds since the last check will probably begin others.
                // If the watch slept now, each of these rounds would wake it.
                active |= in_round || before != Some(round);
                if in_round && before == Some(round) {
                    engine.replace_if_blocked(round);
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
        // A round that began before this store is visible here. In a round that begins later, the
        // progress thread sees the store and wakes the watch.
        let busy = core::running_engines().any(|engine| engine.rounds.current().is_some());
        while !busy && self.asleep.load(Ordering::Acquire) {
            std::thread::park();
        }
        self.asleep.store(false, Ordering::Relaxed);
    }
}

impl Engine {
    /// Replaces the progress thread if it is blocked. Its round, `round`, has lasted for at least
    /// [`PERIOD`].
    fn replace_if_blocked(self: &Arc<Self>, round: u64) {
        let thread = self.rounds.thread.load(Ordering::Relaxed);
        // On a busy machine, a round may take long because the thread gets no processor.
        if thread == 0 || is_runnable(thread) {
            return;
        }
        let Some(place) = self.rounds.give_away(round) else {
            return;
        };
        tracing::warn!(
            thread,
            "progress thread is blocked in an access to registered memory; starting another one"
        );
        if let Err(error) = self.start_progress(place) {
            tracing::error!(
                %error,
                "cannot start another progress thread; only threads that poll serve connections"
            );
        }
    }

    pub(super) fn start_progress(self: &Arc<Self>, place: u64) -> io::Result<()> {
        let engine = Arc::clone(self);
        // The thread blocks all signals, so that the application's threads handle them.
        crate::sys::thread::spawn_without_signals("iwarp-progress", move || engine.run(place))
            .map(drop)
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
