//! Watches the progress threads, so that one that is stuck does not keep all connections of its engine waiting.
//!
//! An access to registered memory may take for ever: a page fault that the program itself is to serve (`userfaultfd(2)`), or a file on a
//! server that is gone. The thread that makes the access cannot be called back. It keeps what it holds, which is the state of one
//! queue pair, and another thread takes its place in the engine. When its access ends after all, it ends, too.
//!
//! A progress thread works in *turns*: it begins one when it has something to serve, and ends it before it sleeps. All of that is one
//! number, which has the thread's *place* as well: the watch gives a place to another thread by changing the number, and the old
//! holder finds that out when it tries to end its turn. When no progress thread has had anything to do for a while, the watch sleeps.
//!
//! It also does once what would hold up other threads: it has the kernel make room for descriptors (`limits.rs` of `iwarp-os`).

use super::core::{self, Engine};
use crate::sys::thread::{is_runnable, own_number};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

/// The watch looks this often while there are things to serve. A turn that it sees twice, and whose thread is not running, is stuck.
const PERIOD: Duration = Duration::from_millis(250);
/// Stuck threads that an engine may have. Each is for one queue pair whose memory does not answer, and the program chose that memory.
const STUCK_MAX: usize = 32;
/// The bits of a [`Turns`] number that count turns; those above are the place. An odd count is a turn that has begun.
const COUNT_BITS: u32 = 48;

/// Who has the place of the progress thread, and what turn it is.
#[derive(Default)]
pub(super) struct Turns {
    word: AtomicU64,
    /// The kernel's number of the thread that has the place; 0 until it has begun.
    thread: AtomicU32,
    /// Threads that have lost their place and have not come back.
    stuck: AtomicUsize,
}

/// The place of the progress thread, held by the calling thread, between two turns.
pub(super) struct Place(u64);

impl Turns {
    /// The calling thread, which was started for that, takes the place that it was given.
    pub(super) fn enter(&self, place: u64) -> Place {
        self.thread.store(own_number(), Ordering::Relaxed);
        Place(place << COUNT_BITS)
    }

    /// Begins a turn.
    pub(super) fn begin(&self, place: &mut Place) {
        // Nobody gives the place away between turns. A full fence, before the caller looks whether the watch sleeps.
        place.0 += 1;
        self.word.swap(place.0, Ordering::SeqCst);
    }

    /// Ends the turn. Returns `false` if another thread has the place now.
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

    /// Gives the place of the thread whose turn is `word` to another one, and returns the new place. `None` if the turn has ended, or if
    /// too many threads are stuck.
    fn give_away(&self, word: u64) -> Option<u64> {
        if self.stuck.load(Ordering::Relaxed) >= STUCK_MAX {
            return None;
        }
        let place = (word >> COUNT_BITS).wrapping_add(1) & (u64::MAX >> COUNT_BITS);
        // Before the number changes: the thread that has lost its place counts itself off.
        self.stuck.fetch_add(1, Ordering::Relaxed);
        let new = place << COUNT_BITS;
        let given = self
            .word
            .compare_exchange(word, new, Ordering::AcqRel, Ordering::Relaxed);
        if given.is_err() {
            self.stuck.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        // Only now: a thread that has kept its place stays known, or the watch would not look at it again.
        self.thread.store(0, Ordering::Relaxed);
        Some(place)
    }

    /// Returns the number of the turn that has begun last, and whether it has not ended.
    fn last(&self) -> (u64, bool) {
        let word = self.word.load(Ordering::SeqCst);
        (word, word & 1 == 1)
    }

    /// Returns the number of the turn that has begun and not ended; `None` between turns.
    fn turn(&self) -> Option<u64> {
        let (word, lasts) = self.last();
        lasts.then_some(word)
    }
}

/// The watch of a process. All engines have the same.
#[derive(Default)]
pub(super) struct Watch {
    thread: OnceLock<Thread>,
    asleep: AtomicBool,
}

impl Watch {
    /// Wakes the watch if it sleeps. Call it after the begin of a turn.
    pub(super) fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst)
            && self.asleep.swap(false, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Starts the thread that watches, unless there is one. Without it everything works but what this file is for.
    #[cfg(not(shuttle))]
    pub(super) fn start(self: &Arc<Self>) {
        if self.thread.get().is_some() {
            return;
        }
        let watch = Arc::clone(self);
        let run = move || {
            // There is a first connection, and many may follow. This thread has the time to wait for the kernel.
            if let Some(engine) = core::all().next() {
                crate::sys::limits::make_room(&engine.wake);
            }
            watch.run();
        };
        match crate::sys::thread::spawn_without_signals("iwarp-watch", run) {
            Ok(handle) => {
                // Of two that are started at the same moment, the second is not known here, and is never woken.
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
                let (turn, lasts) = engine.turns.last();
                if at == seen.len() {
                    seen.push(None);
                }
                let before = seen[at].replace(turn);
                // A thread that has ended turns since the last look will begin others. If the watch slept now, each would wake it.
                active |= lasts || before != Some(turn);
                if lasts && before == Some(turn) {
                    engine.relieve(turn);
                }
            }
            if active {
                std::thread::sleep(PERIOD);
            } else {
                self.rest();
            }
        }
    }

    /// Sleeps until a turn begins.
    fn rest(&self) {
        self.asleep.store(true, Ordering::SeqCst);
        // A turn that began before the announcement is found here, and one that begins afterwards finds the announcement.
        let busy = core::all().any(|engine| engine.turns.turn().is_some());
        while !busy && self.asleep.load(Ordering::Acquire) {
            std::thread::park();
        }
        self.asleep.store(false, Ordering::Relaxed);
    }
}

impl Engine {
    /// The thread whose turn this is has not come back for at least [`PERIOD`]. If it waits for something, another thread takes its
    /// place.
    fn relieve(self: &Arc<Self>, turn: u64) {
        let thread = self.turns.thread.load(Ordering::Relaxed);
        // On a busy machine a turn may take long because the thread gets no processor.
        if thread == 0 || is_runnable(thread) {
            return;
        }
        let Some(place) = self.turns.give_away(turn) else {
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

    /// Starts a progress thread that takes this place.
    pub(super) fn start_progress(self: &Arc<Self>, place: u64) -> io::Result<()> {
        let engine = Arc::clone(self);
        // All signals stay with the application's threads.
        crate::sys::thread::spawn_without_signals("iwarp-progress", move || engine.run(place))
            .map(drop)
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
