//! How the progress thread goes to sleep while other threads may be giving it work.
//!
//! The sleeper announces that it is about to sleep, and then looks for work once more. The other threads publish work, and then
//! look for an announcement. Both sides have a full fence between their store and their load, so at least one sees the other:
//! either the sleeper finds the work, or the other thread finds the sleeper and wakes it. While no thread sleeps,
//! [`Parker::unpark`] is a fence and one load, and writes no shared memory.
//!
//! One thread sleeps; any number may wake it. The sleeper may wait on the condition variable in here ([`Parker::park_timeout`]) or, between
//! [`Parker::announce`] and the end of its guard, in `epoll` on a descriptor that the wakers signal ([`Parker::unpark_with`]).

use super::sync::{AtomicU8, Condvar, Mutex, Ordering, fence};
use std::time::{Duration, Instant};

const AWAKE: u8 = 0;
const PARKED: u8 = 1;
const WOKEN: u8 = 2;

/// The place where one thread sleeps.
#[derive(Debug)]
pub(crate) struct Parker {
    state: AtomicU8,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Default for Parker {
    fn default() -> Self {
        Self::new()
    }
}

impl Parker {
    /// Makes one with no sleeper.
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(AWAKE),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Announces that the calling thread, which is the only sleeper, may sleep from now on.
    ///
    /// Look for work once more afterwards, and sleep only if there is none. Dropping the result ends the announcement.
    pub(crate) fn announce(&self) -> Announced<'_> {
        self.state.store(PARKED, Ordering::Relaxed);
        // All threads see the announcement before the look for work.
        fence(Ordering::SeqCst);
        Announced { parker: self }
    }

    /// Sleeps until woken, at most for `timeout`, unless `idle` returns `false`. Returns `true` if it was woken.
    ///
    /// `idle` is called after the announcement, and must see all work that was published before an [`unpark`](Self::unpark).
    pub(crate) fn park_timeout(&self, timeout: Duration, idle: impl FnOnce() -> bool) -> bool {
        let announced = self.announce();
        idle() && announced.sleep(timeout)
    }

    /// Wakes the sleeper if there is one. Publish the work before the call. Returns `true` if this call woke it.
    #[inline]
    pub(crate) fn unpark(&self) -> bool {
        self.unpark_with(|| {
            // Taking the lock waits until the sleeper, which checks the state under it, really sleeps.
            drop(self.lock.lock());
            self.wake.notify_one();
        })
    }

    /// As [`unpark`](Self::unpark) for a sleeper that waits elsewhere: exactly one of the wakers of each sleep calls `wake`.
    #[inline]
    pub(crate) fn unpark_with(&self, wake: impl FnOnce()) -> bool {
        // All threads see the work before the look for a sleeper.
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) != PARKED {
            return false;
        }
        if self
            .state
            .compare_exchange(PARKED, WOKEN, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            // Another thread is waking it, or it woke by itself. In both cases it looks for work after this.
            return false;
        }
        wake();
        true
    }
}

/// An announcement. While it lives, wakers wake this thread.
#[must_use = "the announcement ends when this is dropped"]
#[derive(Debug)]
pub(crate) struct Announced<'a> {
    parker: &'a Parker,
}

impl Announced<'_> {
    /// Returns `true` if another thread has already woken this one, so that it should not sleep.
    pub(crate) fn is_woken(&self) -> bool {
        self.parker.state.load(Ordering::Acquire) == WOKEN
    }

    /// Sleeps until woken, at most for `timeout`. Returns `true` if it was woken.
    pub(crate) fn sleep(self, timeout: Duration) -> bool {
        // A time-out beyond the range of the clock means without limit.
        let deadline = Instant::now().checked_add(timeout);
        // Nothing panics under this lock, and it guards no data, so a poisoned one serves as well.
        let mut held = match self.parker.lock.lock() {
            Ok(held) => held,
            Err(poisoned) => poisoned.into_inner(),
        };
        while !self.is_woken() {
            let left = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => timeout,
            };
            if left.is_zero() {
                return false;
            }
            held = match self.parker.wake.wait_timeout(held, left) {
                Ok((held, _)) => held,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        true
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        // A model that has failed is over; loom allows no further step.
        if cfg!(loom) && std::thread::panicking() {
            return;
        }
        // A read-modify-write, to acquire what the waker has published.
        self.parker.state.swap(AWAKE, Ordering::AcqRel);
    }
}

#[cfg(test)]
#[path = "parker_tests.rs"]
mod tests;
