//! The baton of one stream direction: the right to drive, which one thread holds at a time. A
//! thread that finds the baton taken leaves a note for the holder.
//!
//! A thread first publishes its work (a queued work request, a readable socket), and then tries to
//! take the baton. If it gets the baton, it does all pending work. If not, it leaves a note and
//! returns. The holder cannot release the baton without seeing the note, and then checks for work
//! again. So no work is lost, and no thread waits.
//!
//! The baton is one byte with three states. Every failed attempt to take it is a read-modify-write,
//! even if there is a note already. That puts the work which the thread has published into the
//! release sequence that the holder acquires; a plain load would not.

use super::sync::{AtomicU8, Ordering};

const IDLE: u8 = 0;
const HELD: u8 = 1;
const NOTED: u8 = 2;

/// A lock for which no thread waits. A thread that does not get it leaves a note.
#[derive(Debug)]
pub(crate) struct Baton(AtomicU8);

impl Default for Baton {
    fn default() -> Self {
        Self::new()
    }
}

impl Baton {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(IDLE))
    }

    /// Takes the baton, or leaves a note for its holder.
    ///
    /// Publish the work before the call. If this returns `None`, the holder checks for work after
    /// the call.
    #[inline]
    pub(crate) fn try_take(&self) -> Option<Guard<'_>> {
        if self
            .0
            .compare_exchange(IDLE, HELD, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            return Some(Guard { baton: self });
        }
        // If the holder has released the baton since the first step, this takes it and leaves a
        // note, which only makes this thread check for work once more.
        match self.0.swap(NOTED, Ordering::AcqRel) {
            IDLE => Some(Guard { baton: self }),
            _ => None,
        }
    }

    /// Does all pending work, or leaves it to the thread that holds the baton. Returns `true` if
    /// the calling thread did the work.
    ///
    /// `work` is called at least once, and again for every note. It must check everything that may
    /// have been published.
    pub(crate) fn drive(&self, mut work: impl FnMut()) -> bool {
        let Some(mut guard) = self.try_take() else {
            return false;
        };
        loop {
            work();
            match guard.finish() {
                Some(again) => guard = again,
                None => return true,
            }
        }
    }

    /// Returns `true` if a thread holds the baton. The result is a hint: it may be outdated.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.0.load(Ordering::Relaxed) != IDLE
    }
}

/// The baton, held by the calling thread. Call [`finish`](Self::finish) to release it.
#[must_use = "dropping it without checking for a note loses work"]
#[derive(Debug)]
pub(crate) struct Guard<'a> {
    baton: &'a Baton,
}

impl Guard<'_> {
    /// Releases the baton if there is no note. If there is one, removes it and returns the baton:
    /// the caller must check for work again.
    #[inline]
    pub(crate) fn finish(self) -> Option<Self> {
        let state = &self.baton.0;
        if state
            .compare_exchange(HELD, IDLE, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            std::mem::forget(self);
            return None;
        }
        // There is a note. Removing it must be a read-modify-write, to acquire what all threads
        // that left one have published.
        state.swap(HELD, Ordering::AcqRel);
        Some(self)
    }

    /// Releases the baton even if there is a note. Returns `true` if there was one: the caller must
    /// have another thread check for work.
    #[cfg(test)]
    #[must_use = "if a note was removed, another thread must check for work"]
    #[inline]
    pub(crate) fn release(self) -> bool {
        let noted = self.set_idle();
        std::mem::forget(self);
        noted
    }

    fn set_idle(&self) -> bool {
        self.baton.0.swap(IDLE, Ordering::AcqRel) == NOTED
    }
}

impl Drop for Guard<'_> {
    /// Releases the baton if its holder panics, so that other threads can drive. A note is lost.
    fn drop(&mut self) {
        // After a model has failed, loom allows no further step.
        if cfg!(loom) && std::thread::panicking() {
            return;
        }
        self.set_idle();
    }
}

#[cfg(test)]
#[path = "baton_tests.rs"]
mod tests;
