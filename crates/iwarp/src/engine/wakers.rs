//! Lists of wakers, each of which is woken once.
//!
//! A waker runs code of the program: it may poll, register again, take locks, or panic. It is
//! therefore called with no lock held, not even the lock of the list. If a waker panics, the
//! calling thread still wakes the others. Cloning and dropping a waker may also run code of the
//! program, so both happen without the lock.

use super::sync::parking::Mutex;
use super::sync::{AtomicBool, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

#[derive(Debug, Default)]
pub(crate) struct Wakers {
    list: Mutex<List>,
    /// `true` if the list is not empty. Changed only with the list locked.
    any: AtomicBool,
}

#[derive(Debug, Default)]
struct List {
    last_key: u64,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    /// The number of the [`Registration`] that owns this entry; `None` if the entry stays until it
    /// is woken.
    key: Option<u64>,
    waker: Waker,
}

/// The entry of one wait. Dropping it removes the waker from the list.
#[derive(Debug)]
pub(crate) struct Registration<'a> {
    wakers: &'a Wakers,
    key: Option<u64>,
}

impl Wakers {
    /// Registers `waker` for the next [`wake_all`](Self::wake_all). Does nothing if it is
    /// registered already.
    pub(crate) fn register(&self, waker: &Waker) {
        let waker = waker.clone();
        let mut list = self.list.lock();
        if list
            .entries
            .iter()
            .any(|e| e.key.is_none() && e.waker.will_wake(&waker))
        {
            // Unlock before the clone is dropped.
            drop(list);
            return;
        }
        list.entries.push(Entry { key: None, waker });
        self.any.store(true, Ordering::Release);
    }

    /// Returns an entry for a wait that may be cancelled. The entry has no waker yet.
    pub(crate) const fn registration(&self) -> Registration<'_> {
        Registration {
            wakers: self,
            key: None,
        }
    }

    /// Returns `true` if a waker is registered. This is only one load, because the data path calls
    /// it for each completion.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Wakes all wakers, and empties the list. Call it with no lock held.
    pub(crate) fn wake_all(&self) {
        let (first, others) = {
            let mut list = self.list.lock();
            self.any.store(false, Ordering::Release);
            // Usually there is one waker. The list then keeps its memory, so that the next
            // registration does not allocate.
            match list.entries.len() {
                0 | 1 => (list.entries.pop(), Vec::new()),
                _ => (None, std::mem::take(&mut list.entries)),
            }
        };
        for entry in first.into_iter().chain(others) {
            wake(entry.waker);
        }
    }
}

/// Calls a waker of the program. A panic does not prevent the calls of other wakers.
pub(crate) fn wake(waker: Waker) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
        tracing::error!("a waker of the program panicked");
        // Dropping the payload may panic again.
        std::mem::forget(payload);
    }
}

impl Registration<'_> {
    /// Registers `waker` in place of the waker of the last poll.
    pub(crate) fn renew(&mut self, waker: &Waker) {
        let mut waker = waker.clone();
        let mut list = self.wakers.list.lock();
        let mine = self.key.and_then(|key| list.position(key));
        if let Some(entry) = mine.and_then(|index| list.entries.get_mut(index)) {
            std::mem::swap(&mut entry.waker, &mut waker);
            // Unlock before the replaced waker is dropped.
            drop(list);
            return;
        }
        list.last_key += 1;
        let key = Some(list.last_key);
        list.entries.push(Entry { key, waker });
        self.key = key;
        self.wakers.any.store(true, Ordering::Release);
    }
}

impl List {
    fn position(&self, key: u64) -> Option<usize> {
        self.entries.iter().position(|e| e.key == Some(key))
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let Some(key) = self.key.filter(|_| self.wakers.any()) else {
            // There was no waker, or the list is empty and this waker was woken.
            return;
        };
        let removed = {
            let mut list = self.wakers.list.lock();
            let position = list.position(key);
            let removed = position.map(|index| list.entries.swap_remove(index));
            self.wakers
                .any
                .store(!list.entries.is_empty(), Ordering::Release);
            removed
        };
        // Dropped without the lock: the waker may be the last handle to a task, and dropping that
        // drops all that the task owns.
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

    /// A waker that counts its calls, and registers itself again inside `wake`, as an executor does
    /// that polls immediately.
    struct Reregisters {
        wakers: Arc<Wakers>,
        woken: AtomicU32,
    }

    impl Wake for Reregisters {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(1, Ordering::Relaxed);
            let wakers = Arc::clone(&self.wakers);
            wakers.register(&Waker::from(self));
        }
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("intended by the test");
        }
    }

    #[derive(Default)]
    struct WakeCounter(AtomicU32);

    impl Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn count(wakers: &Wakers) -> usize {
        let n = wakers.list.lock().entries.len();
        assert_eq!(n > 0, wakers.any());
        n
    }

    #[test]
    fn reregistered_waker_is_woken_again() {
        let wakers = Arc::new(Wakers::default());
        for others in 0..3 {
            let again = Arc::new(Reregisters {
                wakers: Arc::clone(&wakers),
                woken: AtomicU32::new(0),
            });
            let more: Vec<_> = (0..others)
                .map(|_| Arc::new(WakeCounter::default()))
                .collect();
            wakers.register(&Waker::from(Arc::clone(&again)));
            for round in 1..4 {
                for other in &more {
                    wakers.register(&Waker::from(Arc::clone(other)));
                }
                wakers.wake_all();
                assert_eq!(again.woken.load(Ordering::Relaxed), round);
            }
            assert!(more.iter().all(|o| o.0.load(Ordering::Relaxed) == 3));
            assert_eq!(count(&wakers), 1);
            wakers.list.lock().entries.clear();
            wakers.any.store(false, Ordering::Relaxed);
        }
    }

    #[test]
    fn panicking_waker_spares_others() {
        let wakers = Wakers::default();
        let counts = [(); 3].map(|()| Arc::new(WakeCounter::default()));
        for count in &counts {
            wakers.register(&Waker::from(Arc::clone(count)));
            wakers.register(&Waker::from(Arc::new(Panics)));
        }
        wakers.wake_all();
        assert!(counts.iter().all(|c| c.0.load(Ordering::Relaxed) == 1));
        assert_eq!(count(&wakers), 0);
    }

    #[test]
    fn wait_has_one_entry() {
        let wakers = Wakers::default();
        let tasks = [(); 2].map(|()| Arc::new(WakeCounter::default()));
        let [first, second] = tasks.each_ref().map(|t| Waker::from(Arc::clone(t)));
        let mut wait = wakers.registration();
        assert_eq!(count(&wakers), 0);
        for _ in 0..5 {
            wait.renew(&first);
            wait.renew(&second);
            wakers.register(&first);
        }
        assert_eq!(count(&wakers), 2);
        drop(wait);
        assert_eq!(count(&wakers), 1, "the entry of `register` stays");
        let mut wait = wakers.registration();
        wait.renew(&second);
        wakers.wake_all();
        assert_eq!(
            tasks.each_ref().map(|t| t.0.load(Ordering::Relaxed)),
            [1, 1]
        );
        wakers.register(&first);
        drop(wait);
        assert_eq!(count(&wakers), 1, "the wait was woken and had no entry");
    }

    #[test]
    fn each_wait_removes_its_own_entry() {
        let wakers = Wakers::default();
        let tasks = [(); 3].map(|()| Arc::new(WakeCounter::default()));
        let mut waits = [(); 3].map(|()| wakers.registration());
        for (wait, task) in waits.iter_mut().zip(&tasks) {
            wait.renew(&Waker::from(Arc::clone(task)));
        }
        let [first, second, third] = waits;
        drop(second);
        assert_eq!(count(&wakers), 2);
        wakers.wake_all();
        let woken = tasks.each_ref().map(|t| t.0.load(Ordering::Relaxed));
        assert_eq!(woken, [1, 0, 1]);
        drop((first, third));
        assert_eq!(count(&wakers), 0);
    }

    #[test]
    fn list_keeps_its_memory() {
        let wakers = Wakers::default();
        let task = Waker::from(Arc::new(WakeCounter::default()));
        wakers.register(&task);
        let room = wakers.list.lock().entries.capacity();
        wakers.wake_all();
        assert_eq!(count(&wakers), 0);
        assert_eq!(wakers.list.lock().entries.capacity(), room);
    }

    /// One waker may have two entries: by `register`, and of a wait.
    #[test]
    fn dropped_wait_removes_only_its_entry() {
        for waits_first in [false, true] {
            let wakers = Wakers::default();
            let task = Arc::new(WakeCounter::default());
            let waker = Waker::from(Arc::clone(&task));
            let mut wait = wakers.registration();
            if waits_first {
                wait.renew(&waker);
            }
            wakers.register(&waker);
            wait.renew(&waker);
            assert_eq!(count(&wakers), 2);
            drop(wait);
            assert_eq!(count(&wakers), 1);
            wakers.wake_all();
            assert_eq!(task.0.load(Ordering::Relaxed), 1);
        }
    }
}
