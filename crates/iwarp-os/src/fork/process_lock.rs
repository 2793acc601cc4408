//! Locks of the whole process that survive a fork.
//!
//! A child has a copy of its parent's memory, but only the thread that forked. A lock that another
//! thread held at that time is never released in the child. So the handlers of this file, which
//! `fork` installs, take all locks of this type before a fork, and release them in both processes
//! afterwards. Then the child's values are complete.
//!
//! The handlers wait for a lock only for a limited time: its holder may be stuck, or may need a
//! lock that they have already taken. A lock that they could not take is replaced in the child by a
//! new one with the default value, and the old value is leaked. So is a value that belongs to one
//! process, such as a list of engines, whose threads do not exist in the child.
//!
//! The type uses the standard library's lock, which is a single word. The locks of `parking_lot`
//! share a table, whose own locks may be held at the time of the fork as well. Every static lock in
//! the crates that become C libraries has this type, which `cargo xtask test --only tidy` checks.
//!
//! Invariants: `held` is accessed only by the forking thread, between its handlers, while it holds
//! the lock, and by the child's only thread. `mutex` is replaced only by the child's only thread,
//! if the thread that holds it does not exist in the child.

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
const OTHER_FORK_PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_micros(50);

/// A process-wide value and its lock. In a forked child, the lock is free.
pub struct ProcessLock<T: 'static> {
    name: &'static str,
    /// The value belongs to one process: a child starts with the default value.
    is_own: bool,
    default: fn() -> T,
    mutex: UnsafeCell<Mutex<T>>,
    /// The guard, while a fork holds the lock.
    held: UnsafeCell<Option<MutexGuard<'static, T>>>,
    is_listed: AtomicBool,
}

// SAFETY: `mutex` guards the value, which is `Send`. The invariants at the head of the file say
// which threads access `held`.
unsafe impl<T: Send> Sync for ProcessLock<T> {}

impl<T: Default + Send> ProcessLock<T> {
    /// Creates a lock whose value a child inherits. Tests refer to the lock by `name`.
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
            default: T::default,
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
        // SAFETY: the mutex is replaced only while no other thread exists (see the invariants).
        unsafe { &*self.mutex.get() }
    }

    /// Adds the lock to the list, before it is locked for the first time.
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

/// The operations of the handlers on a lock of any type.
trait ForkSafe: Sync {
    fn name(&self) -> &'static str;

    /// Holds the lock until [`release`](Self::release). Returns `false` if another thread holds it.
    fn hold(&'static self) -> bool;

    fn release(&self);

    /// Called in a child: replaces the lock if a thread of the parent held it, or if the child must
    /// not use the value.
    fn reset_in_child(&'static self);

    fn while_locked(&'static self, f: &mut dyn FnMut());
}

impl<T: Default + Send> ForkSafe for ProcessLock<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn hold(&'static self) -> bool {
        let guard = self.try_lock();
        // If the lock is in the list twice, this fork may already hold it.
        // SAFETY: only the forking thread accesses `held` now.
        unsafe {
            if guard.is_some() {
                *self.held.get() = guard;
            }
            (*self.held.get()).is_some()
        }
    }

    fn release(&self) {
        // SAFETY: this is the forking thread, or the child's only thread.
        drop(unsafe { (*self.held.get()).take() });
    }

    fn reset_in_child(&'static self) {
        if self.is_own || self.try_lock().is_none() {
            // SAFETY: this is the only thread of the child, so no thread holds the lock. The old
            // value is not dropped: it may be incomplete, or refer to objects of the parent.
            unsafe { self.mutex.get().write(Mutex::new((self.default)())) };
        }
    }

    fn while_locked(&'static self, f: &mut dyn FnMut()) {
        let _locked = self.lock();
        f();
    }
}

/// An entry of the list of locks. It is never freed.
struct Entry {
    lock: &'static dyn ForkSafe,
    next: *const Self,
}

static FIRST: AtomicPtr<Entry> = AtomicPtr::new(null_mut());

/// Adds a lock to the list. Two threads may add it twice, which is harmless. A lock that prevents
/// it could be held forever in a child.
#[cold]
fn add(lock: &'static dyn ForkSafe) {
    // If there is no memory for the handlers, forks are not detected.
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

fn all() -> impl Iterator<Item = &'static dyn ForkSafe> {
    let mut next: *const Entry = FIRST.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: the pointer is null, or refers to an entry, which is never freed.
        let entry = unsafe { next.as_ref() }?;
        next = entry.next;
        Some(entry.lock)
    })
}

/// A thread of this process is between the handlers of its fork.
static FORKING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The current thread is between the handlers of its fork.
    static THIS_THREAD_FORKS: Cell<bool> = const { Cell::new(false) };
}

/// Takes all locks before a fork.
pub(super) fn before_fork() {
    if THIS_THREAD_FORKS.get() {
        // The handlers are installed twice, and this is the second call.
        return;
    }
    let begin = Instant::now();
    while FORKING.swap(true, Ordering::Acquire) {
        if begin.elapsed() >= OTHER_FORK_PATIENCE {
            return;
        }
        std::thread::sleep(PAUSE);
    }
    THIS_THREAD_FORKS.set(true);
    let begin = Instant::now();
    // Each attempt tries all locks. The last one keeps those that it could take.
    while all().filter(|lock| !lock.hold()).count() > 0 && begin.elapsed() < PATIENCE {
        // The holder may be waiting for a lock that was taken here.
        all().for_each(ForkSafe::release);
        std::thread::sleep(PAUSE);
    }
}

/// Releases the locks in the parent, even if the fork has failed.
pub(super) fn after_fork() {
    if THIS_THREAD_FORKS.replace(false) {
        all().for_each(ForkSafe::release);
        FORKING.store(false, Ordering::Release);
    }
}

/// Releases the locks in the child, and replaces those that other threads of the parent held.
pub(super) fn after_fork_in_child() {
    THIS_THREAD_FORKS.set(false);
    all().for_each(|lock| {
        lock.release();
        lock.reset_in_child();
    });
    FORKING.store(false, Ordering::Release);
}

/// Returns the names of the locks that this process has used. For tests.
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<_> = all().map(ForkSafe::name).collect();
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

    /// Runs `f` while another thread holds the lock. When `f` drops its argument, that thread
    /// applies `change` to the value and releases the lock.
    fn while_other_thread_holds<T: Default + Send>(
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
    fn child_inherits_value() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::new("test::kept", Vec::new());
        LOCK.lock().push(7);
        assert!(check_in_child(|| LOCK
            .try_lock()
            .is_some_and(|v| *v == [7])));
        assert_eq!(*LOCK.lock(), [7]);
    }

    #[test]
    fn own_value_is_reset_in_child() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::own("test::own", Vec::new());
        LOCK.lock().push(7);
        assert!(check_in_child(|| LOCK
            .try_lock()
            .is_some_and(|v| v.is_empty())));
        assert_eq!(*LOCK.lock(), [7]);
    }

    #[test]
    fn stuck_lock_is_replaced_in_child() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::new("test::stuck", Vec::new());
        LOCK.lock().push(7);
        while_other_thread_holds(
            &LOCK,
            |_| {},
            |_done| {
                assert!(check_in_child(|| LOCK
                    .try_lock()
                    .is_some_and(|v| v.is_empty())));
                assert!(
                    LOCK.try_lock().is_none(),
                    "the parent's lock is not replaced"
                );
            },
        );
        assert_eq!(*LOCK.lock(), [7]);
    }

    #[test]
    fn fork_waits_for_holder() {
        static LOCK: ProcessLock<Vec<u8>> = ProcessLock::new("test::awaited", Vec::new());
        while_other_thread_holds(
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

    /// Two threads fork while two other threads take the lock continuously. In each child, the lock
    /// is free.
    #[test]
    fn lock_is_free_after_contended_forks() {
        static LOCK: ProcessLock<u64> = ProcessLock::new("test::contended", 0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        *LOCK.lock() += 1;
                        // Give the forks a chance to take the lock.
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
            let passed = forks();
            let passed = other.join().unwrap() && passed;
            stop.store(true, Ordering::Relaxed);
            assert!(passed);
        });
        assert!(LOCK.try_lock().is_some());
    }
}
