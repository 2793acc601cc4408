//! The lock of a device's memory table, for threads that move octets.
//!
//! Accesses to registered memory hold the table for reading, and one that meets a page fault which does not end holds it for ever. A thread
//! that wants to change the table then waits for ever, too, and by the lock's rules keeps out all readers that come after it. So a
//! reader that has waited for long goes past such a thread.

use crate::sys::clock::now_ns;
use crate::sys::guarded::MemoryTable;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a reader waits for a thread that wants to change the table. Changes take microseconds.
const PATIENCE: Duration = Duration::from_millis(100);
/// For so long after that, readers do not wait for such threads, in nanoseconds.
const HASTE: u64 = 2_000_000_000;

/// A memory table with its lock.
#[derive(Debug, Default)]
pub(crate) struct TableLock {
    table: RwLock<MemoryTable>,
    /// Until when readers do not wait for threads that want to change the table.
    hasty_until: AtomicU64,
}

impl TableLock {
    pub(crate) const fn new(table: MemoryTable) -> Self {
        Self {
            table: RwLock::new(table),
            hasty_until: AtomicU64::new(0),
        }
    }

    /// Locks it for reading.
    #[inline]
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, MemoryTable> {
        match self.table.try_read() {
            Some(guard) => guard,
            None => self.read_late(),
        }
    }

    /// The same, if that needs no waiting.
    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, MemoryTable>> {
        self.table.try_read()
    }

    #[cold]
    fn read_late(&self) -> RwLockReadGuard<'_, MemoryTable> {
        if now_ns() >= self.hasty_until.load(Ordering::Relaxed) {
            if let Some(guard) = self.table.try_read_for(PATIENCE) {
                return guard;
            }
            let until = now_ns().saturating_add(HASTE);
            self.hasty_until.store(until, Ordering::Relaxed);
        }
        // It waits for a thread that is changing the table, and not for one that waits itself.
        self.table.read_recursive()
    }

    /// Locks it for changes.
    #[inline]
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, MemoryTable> {
        self.table.write()
    }

    /// The same, if that needs no waiting.
    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, MemoryTable>> {
        self.table.try_write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// A reader that never ends and a thread that waits for it keep no other reader out.
    #[test]
    fn readers_go_past_a_thread_that_waits_for_ever() {
        let lock = TableLock::new(MemoryTable::new());
        let stuck = lock.read();
        std::thread::scope(|scope| {
            let (done, wait) = channel();
            let writer = &lock;
            scope.spawn(move || {
                drop(writer.write());
                done.send(()).expect("the test waits");
            });
            // From the moment when the lock is wanted for changes.
            while lock.try_read().is_some() {
                std::thread::yield_now();
            }
            for _ in 0..3 {
                drop(lock.read());
            }
            assert!(lock.hasty_until.load(Ordering::Relaxed) > 0);
            assert!(
                wait.try_recv().is_err(),
                "the table was changed during an access"
            );
            drop(stuck);
            wait.recv().expect("the change is made");
        });
    }

    /// A child of a fork tries for a while, because a thread that holds the lock may not exist there.
    #[test]
    fn a_lock_that_is_tried_is_had_when_nobody_is_in_the_way() {
        let lock = TableLock::new(MemoryTable::new());
        let reads = lock.try_read();
        assert!(reads.is_some() && lock.try_read().is_some());
        assert!(lock.try_write().is_none());
        drop(reads);
        let writes = lock.try_write();
        assert!(writes.is_some());
        assert!(lock.try_read().is_none() && lock.try_write().is_none());
        drop(writes);
        assert!(lock.try_read().is_some());
    }
}
