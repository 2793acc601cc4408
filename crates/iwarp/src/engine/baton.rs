//! The baton of one stream direction: one thread drives at a time, and a thread that finds it taken
//! leaves a note.
//!
//! A thread first publishes its work (a queued work request, a readable socket), and then tries to
//! take the baton. If it gets the baton, it does all pending work. If not, it leaves a note and
//! returns. The holder cannot release the baton without seeing the note, and then looks for work
//! once more. So no work is forgotten, and no thread waits.
//!
//! The baton is one byte with three states. Every failed attempt to take it is a read-modify-write,
//! even if there is a note already: this puts the thread's published work into the release sequence
//! that the holder acquires. A plain load would not do that.

use super::sync::{AtomicU8, Ordering};

const IDLE: u8 = 0;
const HELD: u8 = 1;
const NOTED: u8 = 2;

/// A lock that is only tried. A thread that does not get it leaves a note.
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
    /// Publish the work before the call. If it returns `None`, the holder will look for work after
    /// this moment.
    #[inline]
    pub(crate) fn try_take(&self) -> Option<Guard<'_>> {
        if self
            .0
            .compare_exchange(IDLE, HELD, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            return Some(Guard { baton: self });
        }
        // If the holder releases the baton between the two steps, this takes it, with a note that
        // only costs one more look for work.
        match self.0.swap(NOTED, Ordering::AcqRel) {
            IDLE => Some(Guard { baton: self }),
            _ => None,
        }
    }

    /// Does all pending work, or leaves it to the holder of the baton. Returns `true` if this
    /// thread did it.
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

    /// Returns `true` if a thread holds the baton at this moment. A hint.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.0.load(Ordering::Relaxed) != IDLE
    }
}

/// The right to drive. End it with [`finish`](Self::finish), or in tests with
/// [`release`](Self::release).
#[must_use = "dropping it without looking for notes forgets work"]
#[derive(Debug)]
pub(crate) struct Guard<'a> {
    baton: &'a Baton,
}

impl Guard<'_> {
    /// Releases the baton, unless there is a note: then returns it to the caller, which must look
    /// for work again.
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
        // There is a note. Removing it must be a read-modify-write, to acquire what all its writers
        // have published.
        state.swap(HELD, Ordering::AcqRel);
        Some(self)
    }

    /// Releases the baton in any case. Returns `true` if there was a note: then another thread must
    /// look for work.
    #[cfg(test)]
    #[must_use = "a note was removed: hand the work to another thread"]
    #[inline]
    pub(crate) fn release(self) -> bool {
        let noted = self.let_go();
        std::mem::forget(self);
        noted
    }

    fn let_go(&self) -> bool {
        self.baton.0.swap(IDLE, Ordering::AcqRel) == NOTED
    }
}

impl Drop for Guard<'_> {
    /// Releases the baton if the driver panics, so that another thread may drive. A note is lost
    /// together with the work.
    fn drop(&mut self) {
        // A model that has failed is over, and loom allows no further step.
        if cfg!(loom) && std::thread::panicking() {
            return;
        }
        self.let_go();
    }
}

#[cfg(test)]
#[path = "baton_tests.rs"]
mod tests;
