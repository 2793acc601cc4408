//! Lets the progress thread sleep without missing work that other threads publish at that moment.
//!
//! The sleeper announces that it is about to sleep, and then checks for work once more. A waker
//! publishes work, and then checks for an announcement. Both execute a full fence between their
//! store and their load, so at least one sees the store of the other: either the sleeper finds the
//! work, or the waker finds the announcement and wakes the sleeper. While the progress thread is
//! awake, [`Parker::unpark_with`] is a fence and one load, and writes no shared memory.
//!
//! Only one thread sleeps, on a descriptor that the wakers signal. Any thread may wake it.

use super::sync::{AtomicU8, Ordering, fence};

const AWAKE: u8 = 0;
const PARKED: u8 = 1;
const WOKEN: u8 = 2;

#[derive(Debug)]
pub(crate) struct Parker {
    state: AtomicU8,
}

impl Default for Parker {
    fn default() -> Self {
        Self::new()
    }
}

impl Parker {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(AWAKE),
        }
    }

    /// Announces that the calling thread, which is the only sleeper, is about to sleep.
    ///
    /// Check for work once more after this call, and sleep only if there is none. Dropping the
    /// result ends the announcement.
    pub(crate) fn announce(&self) -> Announced<'_> {
        self.state.store(PARKED, Ordering::Relaxed);
        // Orders the announcement before the check for work.
        fence(Ordering::SeqCst);
        Announced { parker: self }
    }

    /// Calls `wake` if the sleeper is announced and no other thread has woken it yet, and then
    /// returns `true`. Publish the work before the call.
    #[inline]
    pub(crate) fn unpark_with(&self, wake: impl FnOnce()) -> bool {
        // Orders the work before the check for an announcement.
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) != PARKED {
            return false;
        }
        if self
            .state
            .compare_exchange(PARKED, WOKEN, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            // Another thread wakes the sleeper, or it woke by itself. In both cases, it checks for
            // work after this.
            return false;
        }
        wake();
        true
    }
}

/// Until this is dropped, wakers wake this thread.
#[must_use = "the announcement ends when this is dropped"]
#[derive(Debug)]
pub(crate) struct Announced<'a> {
    parker: &'a Parker,
}

impl Announced<'_> {
    #[cfg(test)]
    pub(crate) fn is_woken(&self) -> bool {
        self.parker.state.load(Ordering::Acquire) == WOKEN
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        // After a model has failed, loom allows no further step.
        if cfg!(loom) && std::thread::panicking() {
            return;
        }
        // A read-modify-write acquires what the waker has published.
        self.parker.state.swap(AWAKE, Ordering::AcqRel);
    }
}

#[cfg(test)]
#[path = "parker_tests.rs"]
mod tests;
