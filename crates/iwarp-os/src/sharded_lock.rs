//! A readers-writer lock whose readers on different processors write different cache lines.
//!
//! An ordinary readers-writer lock counts its readers in one word. If many processors read often,
//! that word moves from cache to cache, and the readers wait for it although none excludes another.
//! This lock has several *shards*, each an ordinary lock on a cache line of its own. A reader locks
//! the shard of its thread. A writer locks all shards, so a write costs as much as `SHARDS` writes
//! of an ordinary lock. It suits values that are read with every message and rarely change.
//!
//! A reader that never ends must block neither other readers nor, through a waiting writer, the
//! readers of other shards. So a writer that holds some shards waits only for a limited time for
//! the next one. Then it releases all shards, waits for that one alone, and starts again. A reader
//! that has waited for long overtakes waiting writers.
//!
//! Invariant of the `unsafe` code: the value is borrowed mutably only by a [`WriteGuard`], which
//! holds all shards for writing. Otherwise it is borrowed only by a [`ReadGuard`], which holds one
//! for reading.

use crate::clock::now_ns;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Number of shards. Threads share shards if there are more; each shard takes 128 bytes of each
/// lock, and about 20 ns of each write.
const SHARDS: usize = 16;
/// How long a reader waits for writers that arrived earlier, and how long a writer that holds some
/// shards waits for the next one. A change takes microseconds.
const WAIT_MAX: Duration = Duration::from_millis(100);
/// After a reader has waited that long, all readers overtake waiting writers for this time, in
/// nanoseconds.
const OVERTAKE_WRITERS_NS: u64 = 2_000_000_000;

/// Two cache lines, because processors prefetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(RwLock<()>);

/// A readers-writer lock for a value that is read often and from many threads, and rarely changes.
pub struct ShardedLock<T> {
    shards: [Shard; SHARDS],
    /// Time until which readers overtake waiting writers at once.
    overtake_until: AtomicU64,
    value: UnsafeCell<T>,
}

// SAFETY: by the file's invariant, threads share the value, or one of them changes or takes it.
unsafe impl<T: Send + Sync> Sync for ShardedLock<T> {}

thread_local! {
    static SHARD: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the shard of the calling thread. Consecutive new threads get different shards.
#[inline]
fn own_shard() -> usize {
    SHARD.get().unwrap_or_else(choose_shard)
}

#[cold]
fn choose_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let shard = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
    SHARD.set(Some(shard));
    shard
}

impl<T: Default> Default for ShardedLock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> ShardedLock<T> {
    /// Creates an unlocked lock.
    pub const fn new(value: T) -> Self {
        Self {
            shards: [const { Shard(RwLock::new(())) }; SHARDS],
            overtake_until: AtomicU64::new(0),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    fn shard(&self) -> &RwLock<()> {
        &self.shards[own_shard() % SHARDS].0
    }

    /// Locks for reading. Waits for a writer that holds the lock; a writer that only waits for it
    /// is overtaken after at most 100 ms.
    #[inline]
    pub fn read(&self) -> ReadGuard<'_, T> {
        let shard = self.shard();
        let guard = match shard.try_read() {
            Some(guard) => guard,
            None => self.read_slowly(shard),
        };
        ReadGuard::new(self, guard)
    }

    /// Locks for reading, unless a writer holds the lock or waits for it.
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        Some(ReadGuard::new(self, self.shard().try_read()?))
    }

    #[cold]
    fn read_slowly<'a>(&self, shard: &'a RwLock<()>) -> RwLockReadGuard<'a, ()> {
        if now_ns() >= self.overtake_until.load(Ordering::Relaxed) {
            if let Some(guard) = shard.try_read_for(WAIT_MAX) {
                return guard;
            }
            let until = now_ns().saturating_add(OVERTAKE_WRITERS_NS);
            self.overtake_until.store(until, Ordering::Relaxed);
        }
        // This waits for a writer that holds the shard, but not for writers that wait for it.
        shard.read_recursive()
    }

    /// Locks for writing: waits until no reader and no other writer holds the lock.
    pub fn write(&self) -> WriteGuard<'_, T> {
        loop {
            match self.write_within(WAIT_MAX) {
                Ok(guard) => return guard,
                // Hold no other shard while a reader may never end.
                Err(busy) => drop(busy.0.write()),
            }
        }
    }

    /// Locks for writing, unless another thread holds the lock or waits for it.
    pub fn try_write(&self) -> Option<WriteGuard<'_, T>> {
        self.write_within(Duration::ZERO).ok()
    }

    /// Locks all shards, and waits up to `patience` for each of them. If that is too short,
    /// releases all, and returns the shard that is still locked.
    fn write_within(&self, patience: Duration) -> Result<WriteGuard<'_, T>, &Shard> {
        let mut held = [const { None }; SHARDS];
        for (guard, shard) in held.iter_mut().zip(&self.shards) {
            *guard = shard.0.try_write();
            if guard.is_none() && !patience.is_zero() {
                *guard = shard.0.try_write_for(patience);
            }
            if guard.is_none() {
                return Err(shard);
            }
        }
        Ok(WriteGuard {
            lock: self,
            _held: held,
        })
    }
}

impl<T> fmt::Debug for ShardedLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedLock").finish_non_exhaustive()
    }
}

/// Shared access to the value, until this is dropped.
#[must_use = "the lock is released when this is dropped"]
pub struct ReadGuard<'a, T> {
    lock: &'a ShardedLock<T>,
    _held: RwLockReadGuard<'a, ()>,
}

impl<'a, T> ReadGuard<'a, T> {
    #[inline]
    fn new(lock: &'a ShardedLock<T>, held: RwLockReadGuard<'a, ()>) -> Self {
        Self { lock, _held: held }
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: by the file's invariant, because this guard holds a shard for reading.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> fmt::Debug for ReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadGuard").finish_non_exhaustive()
    }
}

/// Exclusive access to the value, until this is dropped.
#[must_use = "the lock is released when this is dropped"]
pub struct WriteGuard<'a, T> {
    lock: &'a ShardedLock<T>,
    _held: [Option<RwLockWriteGuard<'a, ()>>; SHARDS],
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: by the file's invariant, because this guard holds all shards for writing.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above; the caller borrows the only guard mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> fmt::Debug for WriteGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteGuard").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// A reader that never ends and a writer that waits for it must not block other readers,
    /// neither those of the same shard nor those of a shard that the writer has locked before.
    #[test]
    fn readers_overtake_waiting_writer() {
        for stuck_shard in [0, SHARDS - 1] {
            let lock = ShardedLock::new(());
            SHARD.set(Some(stuck_shard));
            let stuck = lock.read();
            std::thread::scope(|scope| {
                let (done, wait) = channel();
                let writer = &lock;
                scope.spawn(move || {
                    drop(writer.write());
                    done.send(()).expect("the test waits");
                });
                // Once `try_read` fails, the writer waits for this shard.
                while lock.try_read().is_some() {
                    std::thread::yield_now();
                }
                for shard in 0..SHARDS {
                    SHARD.set(Some(shard));
                    drop(lock.read());
                }
                let is_waiting = wait.try_recv().is_err();
                assert!(is_waiting, "the value was changed during an access");
                drop(stuck);
                wait.recv().expect("the change is made");
            });
        }
    }

    /// After one reader has waited for long, the next ones overtake at once.
    #[test]
    fn later_readers_overtake_at_once() {
        let lock = ShardedLock::new(());
        let start = now_ns();
        std::thread::scope(|scope| {
            let stuck = lock.read();
            let writer = scope.spawn(|| drop(lock.write()));
            while lock.try_read().is_some() {
                std::thread::yield_now();
            }
            drop(lock.read());
            let until = lock.overtake_until.load(Ordering::Relaxed);
            assert!(until >= start + OVERTAKE_WRITERS_NS);
            drop(stuck);
            writer.join().expect("the writer ends");
        });
    }

    /// A forked child must not wait for the lock: the thread that holds it may not exist there.
    #[test]
    fn try_lock_fails_only_if_held() {
        let lock = ShardedLock::new(1);
        let reads = lock.try_read();
        assert!(reads.is_some() && lock.try_read().is_some());
        assert!(lock.try_write().is_none());
        drop(reads);
        let mut writes = lock.try_write().expect("no reader is left");
        *writes = 2;
        for shard in 0..SHARDS {
            SHARD.set(Some(shard));
            assert!(lock.try_read().is_none() && lock.try_write().is_none());
        }
        drop(writes);
        assert_eq!(lock.try_read().map(|value| *value), Some(2));
    }

    #[test]
    fn new_threads_get_different_shards() {
        let shard = || {
            let thread = std::thread::spawn(|| (own_shard(), own_shard()));
            let (first, again) = thread.join().expect("the thread ends");
            assert_eq!(first, again);
            first
        };
        // Other tests start threads at the same time.
        let shards: Vec<usize> = (0..4 * SHARDS).map(|_| shard()).collect();
        assert!(shards.iter().all(|shard| *shard < SHARDS));
        assert!(shards.iter().any(|shard| *shard != shards[0]));
    }

    /// A writer excludes the readers of all shards. A reader that ran during a write could see the
    /// two halves differ.
    #[test]
    fn writer_excludes_readers_of_all_shards() {
        let lock = ShardedLock::new([0u64; 2]);
        let rounds = if cfg!(miri) { 20 } else { 2000 };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let value = lock.read();
                        assert_eq!(value[0], value[1]);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..rounds / 10 {
                        let mut value = lock.write();
                        value[0] += 1;
                        std::hint::black_box(&mut *value);
                        value[1] += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.read(), [rounds / 10 * 2; 2]);
    }
}
