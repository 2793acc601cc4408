//! The baton of one stream direction: one thread drives at a time, and a thread that comes too late leaves a note.
//!
//! A thread first publishes its work (a work request queued, a socket found readable), then tries to take the baton. If it gets
//! the baton, it does all the work there is. If not, it leaves a note and returns. The holder cannot let go without seeing the
//! note, and then looks for work once more. So no work is forgotten, and no thread waits.
//!
//! One byte, three states. Every failed attempt to take the baton is a read-modify-write, even if a note is there already: it
//! puts this thread's published work into the release sequence that the holder acquires. A plain load would not do that.

use super::sync::{AtomicU8, Ordering};

const IDLE: u8 = 0;
const HELD: u8 = 1;
const NOTED: u8 = 2;

/// A lock that is only tried, where a thread that does not get it leaves a note.
#[derive(Debug)]
pub(crate) struct Baton(AtomicU8);

impl Default for Baton {
    fn default() -> Self {
        Self::new()
    }
}

impl Baton {
    /// Makes a baton that no thread holds.
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
        // If the holder lets go between the two steps, this takes the baton, with a note to this thread that costs one more look.
        match self.0.swap(NOTED, Ordering::AcqRel) {
            IDLE => Some(Guard { baton: self }),
            _ => None,
        }
    }

    /// Does all the work there is, or leaves it to the thread that holds the baton. Returns `true` if this thread did it.
    ///
    /// `work` is called at least once, and again for every note. It must look at everything that may have been published.
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

    /// Returns `true` if a thread holds it at this moment. This is only a hint.
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
        // There is a note. Taking it off must be a read-modify-write, to acquire what all of its writers have published.
        state.swap(HELD, Ordering::AcqRel);
        Some(self)
    }

    /// Lets go in any case. Returns `true` if there was a note. Then another thread must be told to look for work: the progress
    /// thread, if the caller's budget is spent.
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
    /// Only when the driver unwinds: the next thread may drive. A note is then lost together with the work.
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
