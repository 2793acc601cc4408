//! The lock of a device's memory table. A page fault that never ends must not block all
//! connections.
//!
//! An access to registered memory holds the table's read lock. If the access causes a page fault
//! that never ends, it never releases the lock. A thread that wants to change the table then waits
//! forever, and a fair lock makes all later readers wait behind that writer. So a reader that has
//! waited for long overtakes waiting writers.

use crate::sys::clock::now_ns;
use crate::sys::guarded::MemoryTable;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a reader waits for writers that arrived earlier. A change takes microseconds.
const READ_WAIT_MAX: Duration = Duration::from_millis(100);
/// After a reader has waited that long, all readers overtake waiting writers for this time, in
/// nanoseconds.
const OVERTAKE_WRITERS_NS: u64 = 2_000_000_000;

#[derive(Debug, Default)]
pub(crate) struct TableLock {
    table: RwLock<MemoryTable>,
    /// Time until which readers overtake waiting writers at once.
    overtake_until: AtomicU64,
}

impl TableLock {
    pub(crate) const fn new(table: MemoryTable) -> Self {
        Self {
            table: RwLock::new(table),
            overtake_until: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, MemoryTable> {
        match self.table.try_read() {
            Some(guard) => guard,
            None => self.read_slowly(),
        }
    }

    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, MemoryTable>> {
        self.table.try_read()
    }

    #[cold]
    fn read_slowly(&self) -> RwLockReadGuard<'_, MemoryTable> {
        if now_ns() >= self.overtake_until.load(Ordering::Relaxed) {
            if let Some(guard) = self.table.try_read_for(READ_WAIT_MAX) {
                return guard;
            }
            let until = now_ns().saturating_add(OVERTAKE_WRITERS_NS);
            self.overtake_until.store(until, Ordering::Relaxed);
        }
        // This waits for a writer that holds the lock, but not for writers that wait for it.
        self.table.read_recursive()
    }

    #[inline]
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, MemoryTable> {
        self.table.write()
    }

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
    fn readers_overtake_waiting_writer() {
        let lock = TableLock::new(MemoryTable::new());
        let stuck = lock.read();
        std::thread::scope(|scope| {
            let (done, wait) = channel();
            let writer = &lock;
            scope.spawn(move || {
                drop(writer.write());
                done.send(()).expect("the test waits");
            });
            // Once `try_read` fails, the writer waits for the lock.
            while lock.try_read().is_some() {
                std::thread::yield_now();
            }
            let start = now_ns();
            for _ in 0..3 {
                drop(lock.read());
            }
            assert!(lock.overtake_until.load(Ordering::Relaxed) >= start + OVERTAKE_WRITERS_NS);
            assert!(
                wait.try_recv().is_err(),
                "the table was changed during an access"
            );
            drop(stuck);
            wait.recv().expect("the change is made");
        });
    }

    /// A forked child must not wait for the lock: the thread that holds it may not exist there.
    #[test]
    fn try_lock_fails_only_if_held() {
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
