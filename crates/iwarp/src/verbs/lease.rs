//! Buffers of a pool: parts of a registered block, which return to the pool.
//!
//! A buffer is a [`MemoryRegion`] of its own, so everything that uses regions can use it. The pool
//! keeps an object for each buffer. So neither taking a buffer nor returning it allocates. A lease
//! counts the handles of a buffer, and the drop of the last one returns the buffer.

use super::mr::{MemoryRegion, RegionInner};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// A pool, to which buffers are returned.
pub(crate) trait TakeBack: std::fmt::Debug + Send + Sync {
    /// Takes back the buffer with this index: the last handle was dropped.
    fn take_back(&self, index: usize);
}

/// Counts the handles of a buffer, and returns it to its pool.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Weak<dyn TakeBack>,
    index: usize,
    handles: AtomicUsize,
}

impl Lease {
    pub(super) fn add_handle(&self) {
        // Relaxed: either the handle that is cloned is counted, or the pool lends the buffer to one
        // user, and its lock orders that after the previous use.
        self.handles.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the drop of a handle, and returns the buffer if it was the last one. If the pool is
    /// gone, the caller's reference is the last one.
    pub(super) fn remove_handle(&self) {
        // The next user must see that all handles have ended their accesses.
        if self.handles.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(pool) = self.pool.upgrade()
        {
            pool.take_back(self.index);
        }
    }

    pub(super) fn has_one_handle(&self) -> bool {
        self.handles.load(Ordering::Acquire) == 1
    }
}

/// A buffer as its pool keeps it.
#[derive(Debug)]
pub(crate) struct Buffer(Arc<RegionInner>);

impl Buffer {
    /// Creates the buffer `index` of a pool: `len` bytes at `at` of a registered block.
    pub(crate) fn new(
        block: &MemoryRegion,
        at: usize,
        len: usize,
        pool: Weak<dyn TakeBack>,
        index: usize,
    ) -> Self {
        let lease = Lease {
            pool,
            index,
            handles: AtomicUsize::new(0),
        };
        Self(Arc::new(RegionInner::part(block.clone(), at, len, lease)))
    }

    /// Lends the buffer, which has no handle. The pool takes it back later.
    pub(crate) fn lend(&self) -> MemoryRegion {
        MemoryRegion::first_handle(&self.0)
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::verbs::ProtectionDomain;
    use iwarp_rnic::Access;
    use parking_lot::Mutex;

    #[derive(Debug, Default)]
    struct Returned(Mutex<Vec<usize>>);

    impl TakeBack for Returned {
        fn take_back(&self, index: usize) {
            self.0.lock().push(index);
        }
    }

    #[test]
    fn last_handle_ends_the_lease() {
        let pd = ProtectionDomain::new(&crate::testing::context());
        let block = pd.reg_mr(64, Access::LOCAL_WRITE).unwrap();
        let pool = Arc::new(Returned::default());
        let weak: Weak<dyn TakeBack> = Arc::downgrade(&(Arc::clone(&pool) as _));
        let buffer = Buffer::new(&block, 16, 8, weak, 5);
        for times in 0..3 {
            let first = buffer.lend();
            let second = first.clone();
            drop(first);
            assert_eq!(*pool.0.lock(), vec![5; times], "one handle is left");
            drop(second);
            assert_eq!(*pool.0.lock(), vec![5; times + 1]);
        }
    }
}
