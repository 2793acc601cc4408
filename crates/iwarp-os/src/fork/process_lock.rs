//! Locks of the whole process that survive a fork.
//!
//! A child has a copy of its parent's memory, and only the thread that forked. A lock that another
//! thread held at that moment is never released in the child. So the handlers here, which `fork`
//! installs, take all locks of this kind before a fork and release them in both processes; the
//! child finds complete values. They wait for a lock only for a bounded time, because its holder
//! may need another lock that they have taken already, or may be stuck. A lock that they did not
//! get is replaced in the child by a new one with the default value, and the old value is leaked.
//! Also replaced is a value that a child must not use, such as a list of engines whose threads
//! do not exist there.
//!
//! The locks are those of the standard library: each is a single word. The locks of `parking_lot`
//! share a table whose own locks may be held at the fork, too. Every static lock in the crates that
//! become C libraries has this type, which `cargo xtask test --only tidy` checks.
//!
//! Invariants: `held` is accessed only by the forking thread, between its handlers, while it holds
//! the lock, and by the child's only thread. `mutex` is replaced only by the child's only thread,
//! if its holder does not exist there.

use crate::fork;
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long a fork waits for the locks.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a fork waits for another thread's fork, which may have to copy large page tables.
const TURN_PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_micros(50);

/// A process-wide value and its lock. A forked child finds it unlocked; see the file.
pub struct ProcessLock<T: 'static> {
    name: &'static str,
    /// A child starts with the default value.
    is_own: bool,
    initial: fn() -> T,
    mutex: UnsafeCell<Mutex<T>>,
    /// The guard, from before a fork until after it.
    held: UnsafeCell<Option<MutexGuard<'static, T>>>,
    is_listed: AtomicBool,
}

// SAFETY: `mutex` guards the value, which may move between threads. The file's invariants say who
// accesses the other cell.
unsafe impl<T: Send> Sync for ProcessLock<T> {}

impl<T: Default + Send> ProcessLock<T> {
    /// Creates a lock whose value a child inherits. `name` is for tests.
    pub const fn new(name: &'static str, value: T) -> Self {
        Self::with(name, value, false)
    }

    /// Creates a lock whose value belongs to one process: a child starts with the default value.
    pub const fn own(name: &'static str, value: T) -> Self {
        Self::with(name, value, true)
    }

    const fn with(name: &'static str, value: T, is_own: bool) -> Self {
        Self {
            name,
            is_own,
            initial: T::default,
            mutex: UnsafeCell::new(Mutex::new(value)),
            held: UnsafeCell::new(None),
            is_listed: AtomicBool::new(false),
        }
    }

    /// Locks the value.
    pub fn lock(&'static self) -> MutexGuard<'static, T> {
        self.enlist();
        self.mutex().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the value unless another thread holds the lock.
    pub fn try_lock(&'static self) -> Option<MutexGuard<'static, T>> {
        self.enlist();
        match self.mutex().try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn mutex(&'static self) -> &'static Mutex<T> {
        // SAFETY: it is replaced only as the file's invariants say, when no other thread exists.
        unsafe { &*self.mutex.get() }
    }

    fn enlist(&'static self) {
        if !self.is_listed.load(Ordering::Acquire) {
            add(self);
            self.is_listed.store(true, Ordering::Release);
        }
    }
}

impl<T> fmt::Debug for ProcessLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProcessLock").field(&self.name).finish()
    }
}

/// What the handlers do with a lock of any type.
trait Survives: Sync {
    fn name(&self) -> &'static str;

    /// Takes the lock until [`release`](Self::release). Returns `false` if another thread holds it.
    fn hold(&'static self) -> bool;

    /// Releases the lock if this fork has taken it.
    fn release(&self);

    /// In a child: replaces the lock if a thread of the parent held it, or if the value is not for
    /// the child.
    fn revive(&'static self);

    /// Runs `f` while the calling thread holds the lock.
    fn while_locked(&'static self, f: &mut dyn FnMut());
}

impl<T: Default + Send> Survives for ProcessLock<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn hold(&'static self) -> bool {
        let guard = self.try_lock();
        // It may be listed twice.
        // SAFETY: the forking thread accesses this, and holds the lock now, or has found it held.
        unsafe {
            if guard.is_some() {
                *self.held.get() = guard;
            }
            (*self.held.get()).is_some()
        }
    }

    fn release(&self) {
        // SAFETY: the thread that forks holds the lock, or this is the child's only thread.
        drop(unsafe { (*self.held.get()).take() });
    }

    fn revive(&'static self) {
        if self.is_own || self.try_lock().is_none() {
            // SAFETY: this is the only thread of the child, so no thread holds the lock. The old
            // value is not dropped: it may be incomplete, or refer to what the parent uses.
            unsafe { self.mutex.get().write(Mutex::new((self.initial)())) };
        }
    }

    fn while_locked(&'static self, f: &mut dyn FnMut()) {
        let _locked = self.lock();
        f();
    }
}

/// An entry of the list of locks. It is never freed.
struct Entry {
    lock: &'static dyn Survives,
    next: *const Self,
}

static FIRST: AtomicPtr<Entry> = AtomicPtr::new(null_mut());

/// Adds a lock to the list, before it is locked for the first time. Threads that do so concurrently
/// add it twice, which is harmless; waiting for each other could last forever in a child.
#[cold]
fn add(lock: &'static dyn Survives) {
    // Without memory for the handlers, forks are not detected.
    let _ = fork::install();
    let entry = Box::leak(Box::new(Entry {
        lock,
        next: FIRST.load(Ordering::Acquire),
    }));
    while let Err(other) = FIRST.compare_exchange_weak(
        entry.next.cast_mut(),
        entry,
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        entry.next = other;
    }
}

fn all() -> impl Iterator<Item = &'static dyn Survives> {
    let mut at: *const Entry = FIRST.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or an entry, which lives as long as the process.
        let entry = unsafe { at.as_ref() }?;
        at = entry.next;
        Some(entry.lock)
    })
}

/// A thread is between the handlers of its fork.
static FORKING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// This thread is.
    static MINE: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn before_fork() {
    if MINE.get() {
        // The handlers are installed twice.
        return;
    }
    let begin = Instant::now();
    while FORKING.swap(true, Ordering::Acquire) {
        if begin.elapsed() >= TURN_PATIENCE {
            return;
        }
        std::thread::sleep(PAUSE);
    }
    MINE.set(true);
    let begin = Instant::now();
    // Each lock is tried; those that are held remain after the last attempt.
    while all().filter(|lock| !lock.hold()).count() > 0 && begin.elapsed() < PATIENCE {
        // The holder may be waiting for a lock that was taken here.
        all().for_each(Survives::release);
        std::thread::sleep(PAUSE);
    }
}

/// Releases the locks in the parent, even if the fork has failed.
pub(super) fn after_fork() {
    if MINE.replace(false) {
        all().for_each(Survives::release);
        FORKING.store(false, Ordering::Release);
    }
}

/// Releases the locks in the child, and replaces those that other threads of the parent held.
pub(super) fn after_fork_in_child() {
    MINE.set(false);
    all().for_each(|lock| {
        lock.release();
        lock.revive();
    });
    FORKING.store(false, Ordering::Release);
}

/// Returns the names of the locks that this process has used. For tests.
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<_> = all().map(Survives::name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Runs `f` while the calling thread holds the lock with this name. Returns `false` if no such lock
/// was used. For tests.
pub fn while_locked(name: &str, mut f: impl FnMut()) -> bool {
    let lock = all().find(|lock| lock.name() == name);
    lock.inspect(|lock| lock.while_locked(&mut f)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::check_in_child;
    use std::sync::mpsc;

    /// Runs `f` while another thread holds the lock, then lets that thread end.
    fn while_another_has<T: Default + Send>(
        lock: &'static ProcessLock<T>,
        change: impl FnOnce(&mut T) + Send,
        f: impl FnOnce(mpsc::Sender<()>),
    ) {
        let (locked, is_locked) = mpsc::channel();
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut value = lock.lock();
                locked.send(()).unwrap();
                let _ = is_done.recv();
                change(&mut value);
            });
            is_locked.recv().unwrap();
            f(done);
        });
    }

    #[test]
    fn child_keeps_value() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::new("test::kept", Vec::new());
        LOCK.lock().push(7);
        assert!(check_in_child(|| LOCK
            .try_lock()
            .is_some_and(|v| *v == [7])));
        assert_eq!(*LOCK.lock(), [7]);
    }

    #[test]
    fn child_begins_with_own_value() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::own("test::own", Vec::new());
        LOCK.lock().push(7);
        assert!(check_in_child(|| LOCK
            .try_lock()
            .is_some_and(|v| v.is_empty())));
        assert_eq!(*LOCK.lock(), [7]);
    }

    #[test]
    fn child_replaces_stuck_lock() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::new("test::stuck", Vec::new());
        LOCK.lock().push(7);
        while_another_has(
            &LOCK,
            |_| {},
            |_done| {
                assert!(check_in_child(|| LOCK
                    .try_lock()
                    .is_some_and(|v| v.is_empty())));
                assert!(LOCK.try_lock().is_none(), "the parent's holder keeps it");
            },
        );
        assert_eq!(*LOCK.lock(), [7]);
    }

    #[test]
    fn fork_waits_for_holder() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::new("test::awaited", Vec::new());
        while_another_has(
            &LOCK,
            |value| value.push(1),
            |done| {
                let soon = std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(20));
                    drop(done);
                });
                assert!(check_in_child(|| LOCK
                    .try_lock()
                    .is_some_and(|v| *v == [1])));
                soon.join().unwrap();
            },
        );
    }

    /// Each child finds the locks free while threads of the parent take them continuously and two
    /// threads fork.
    #[test]
    fn forks_under_contention() {
        static LOCK: ProcessLock<u64> = ProcessLock::new("test::contended", 0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        *LOCK.lock() += 1;
                        // A lock that is never free cannot be taken for a fork.
                        std::thread::yield_now();
                    }
                });
            }
            let forks =
                || (0..20).all(|_| check_in_child(|| LOCK.try_lock().is_some_and(|n| *n > 0)));
            while *LOCK.lock() == 0 {
                std::thread::yield_now();
            }
            let other = scope.spawn(forks);
            let good = forks();
            let good = other.join().unwrap() && good;
            stop.store(true, Ordering::Relaxed);
            assert!(good);
        });
        assert!(LOCK.try_lock().is_some());
    }
}
