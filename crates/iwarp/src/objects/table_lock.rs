//! The lock of a device's memory table, for threads that move octets.
//!
//! An access to registered memory holds the table's read lock. If it meets a page fault that never
//! ends, it never releases the table. A thread that wants to change the table then waits forever,
//! and the lock makes all later readers wait behind it. So a reader that has waited for long passes
//! such a writer.

use crate::sys::clock::now_ns;
use crate::sys::guarded::MemoryTable;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a reader waits behind a thread that wants to change the table. Changes take
/// microseconds.
const READ_WAIT_MAX: Duration = Duration::from_millis(100);
/// How long after that readers pass waiting writers at once, in nanoseconds.
const PASS_WRITERS_NS: u64 = 2_000_000_000;

#[derive(Debug, Default)]
pub(crate) struct TableLock {
    table: RwLock<MemoryTable>,
    /// Time until which readers pass waiting writers at once.
    pass_until: AtomicU64,
}

impl TableLock {
    pub(crate) const fn new(table: MemoryTable) -> Self {
        Self {
            table: RwLock::new(table),
            pass_until: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, MemoryTable> {
        match self.table.try_read() {
            Some(guard) => guard,
            None => self.read_slowly(),
        }
    }

    /// Locks the table for reading, if that needs no waiting.
    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, MemoryTable>> {
        self.table.try_read()
    }

    #[cold]
    fn read_slowly(&self) -> RwLockReadGuard<'_, MemoryTable> {
        if now_ns() >= self.pass_until.load(Ordering::Relaxed) {
            if let Some(guard) = self.table.try_read_for(READ_WAIT_MAX) {
                return guard;
            }
            let until = now_ns().saturating_add(PASS_WRITERS_NS);
            self.pass_until.store(until, Ordering::Relaxed);
        }
        // This waits for a thread that is changing the table, but not for one that is itself
        // waiting.
        self.table.read_recursive()
    }

    #[inline]
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, MemoryTable> {
        self.table.write()
    }

    /// Locks the table for changes, if that needs no waiting.
    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, MemoryTable>> {
        self.table.try_write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// A reader that never ends and a writer that waits for it must not block other readers.
    #[test]
    fn readers_pass_waiting_writer() {
        let lock = TableLock::new(MemoryTable::new());
        let stuck = lock.read();
        std::thread::scope(|scope| {
            let (done, wait) = channel();
            let writer = &lock;
            scope.spawn(move || {
                drop(writer.write());
                done.send(()).expect("the test waits");
            });
            // A writer waits once readers are refused.
            while lock.try_read().is_some() {
                std::thread::yield_now();
            }
            let begin = now_ns();
            for _ in 0..3 {
                drop(lock.read());
            }
            assert!(lock.pass_until.load(Ordering::Relaxed) >= begin + PASS_WRITERS_NS);
            assert!(
                wait.try_recv().is_err(),
                "the table was changed during an access"
            );
            drop(stuck);
            wait.recv().expect("the change is made");
        });
    }

    /// A forked child only tries, because a thread that holds the lock may not exist there.
    #[test]
    fn tried_lock_fails_only_if_held() {
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
