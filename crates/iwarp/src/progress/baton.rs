//! The baton of one stream direction: one driver at a time, and who comes too late leaves a note.
//!
//! Work is published first (a work request queued, a socket found readable), then the baton is tried. Whoever gets it does all
//! the work there is. Whoever does not get it leaves a note and goes away, and the holder cannot let go without seeing the note:
//! it must look for work once more. So no work is forgotten and nobody ever waits.
//!
//! One byte, three states. Every attempt that fails to take the baton is a read-modify-write even if a note is there already: it
//! puts this thread's published work into the release sequence that the holder acquires, and a plain load would not.

use super::sync::{AtomicU8, Ordering};

const IDLE: u8 = 0;
const HELD: u8 = 1;
const NOTED: u8 = 2;

/// A try-lock whose losers leave a note.
#[derive(Debug)]
pub(crate) struct Baton(AtomicU8);

impl Default for Baton {
    fn default() -> Self {
        Self::new()
    }
}

impl Baton {
    /// A baton that nobody holds.
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(IDLE))
    }

    /// Takes the baton, or leaves a note for its holder.
    ///
    /// Publish the work before the call. `None` means that the holder will look for work after this moment.
    #[inline]
    pub(crate) fn try_take(&self) -> Option<Guard<'_>> {
        if self
            .0
            .compare_exchange(IDLE, HELD, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            return Some(Guard { baton: self });
        }
        // If it was let go between the two steps, this takes it, with a note to ourselves that costs one more look at most.
        match self.0.swap(NOTED, Ordering::AcqRel) {
            IDLE => Some(Guard { baton: self }),
            _ => None,
        }
    }

    /// Does all the work there is, or leaves it to the thread that is at it. True if this thread did it.
    ///
    /// `work` is called at least once and again for every note; it must look at everything that may have been published.
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

    /// True if somebody holds it at this moment. Only a hint.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.0.load(Ordering::Relaxed) != IDLE
    }
}

/// The right to drive. End it with [`finish`](Self::finish) or [`release`](Self::release).
#[must_use = "letting go without looking for notes forgets work"]
#[derive(Debug)]
pub(crate) struct Guard<'a> {
    baton: &'a Baton,
}

impl Guard<'_> {
    /// Lets go, unless there is a note: then the baton stays with the caller, who must look for work again.
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
        // A note. Taking it off must be a read-modify-write, to acquire what its writers (all of them) have published.
        state.swap(HELD, Ordering::AcqRel);
        Some(self)
    }

    /// Lets go in any case. True: there was a note, and somebody must now be told to come and look (the progress thread,
    /// when the caller's budget is spent).
    #[cfg(test)]
    #[must_use = "a note was taken off: hand the work to somebody"]
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
    /// Only when the driver unwinds: the next one who comes may drive. A note is then lost with the work in hand.
    fn drop(&mut self) {
        // A model that has failed is over; loom allows no further step.
        if cfg!(loom) && std::thread::panicking() {
            return;
        }
        self.let_go();
    }
}

#[cfg(test)]
#[path = "baton_tests.rs"]
mod tests;
