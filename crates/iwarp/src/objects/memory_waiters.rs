//! Queue pairs that wait until no thread uses memory that they invalidate or register again.
//!
//! Memory is in use while a thread places data in it, or passes it to a system call, so the wait is
//! short. A thread that ends a use asks the memory table whether a queue pair waits
//! ([`MemoryTable::take_unused`](iwarp_rnic::memory::MemoryTable::take_unused)). If so, the thread
//! drives the queue pairs of this list. The use may end before a queue pair is on the list, so the
//! queue pair tries once more after it was added.

use super::any_qp::AnyQp;
use super::context::ContextInner;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

#[derive(Default)]
pub(crate) struct MemoryWaiters(pub(crate) Mutex<Vec<Weak<dyn AnyQp>>>);

impl MemoryWaiters {
    /// Adds a queue pair. Returns `false` if it is on the list already.
    pub(crate) fn insert<M: AnyQp>(&self, qp: &Arc<M>) -> bool {
        let mut list = self.0.lock();
        list.retain(|other| other.strong_count() > 0);
        let weak: Weak<dyn AnyQp> = Arc::downgrade(qp) as _;
        let known = list.iter().any(|other| other.ptr_eq(&weak));
        if !known {
            list.push(weak);
        }
        !known
    }
}

impl ContextInner {
    /// Adds a queue pair to those that wait for memory. The caller holds no lock.
    #[cold]
    pub(crate) fn wait_for_memory<M: AnyQp>(&self, qp: &Arc<M>) {
        if self.waiting.insert(qp) {
            Arc::clone(qp).retry_memory();
        }
    }

    /// Drives the waiting queue pairs after a use of memory has ended. The caller holds no lock.
    #[cold]
    pub(crate) fn memory_unused(&self) {
        let list = std::mem::take(&mut *self.waiting.0.lock());
        for qp in list.iter().filter_map(Weak::upgrade) {
            qp.retry_memory();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::any_qp::PollOutcome;
    use crate::testing;
    use iwarp_rnic::counters::Counters;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Waiter(AtomicU32);

    impl AnyQp for Waiter {
        fn num(&self) -> u32 {
            0
        }

        fn user_data(&self) -> u64 {
            0
        }

        fn poll_sockets(self: Arc<Self>) -> PollOutcome {
            PollOutcome::default()
        }

        fn fail(self: Arc<Self>) {}

        fn counters(&self, _wait: bool) -> Option<Counters> {
            None
        }

        fn retry_memory(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn unused_memory_drives_each_waiter_once() {
        let ctx = testing::context();
        let waiters = [(); 3].map(|()| Arc::new(Waiter::default()));
        let retries = || waiters.each_ref().map(|w| w.0.load(Ordering::Relaxed));
        for waiter in &waiters {
            ctx.inner.wait_for_memory(waiter);
        }
        assert_eq!(retries(), [1; 3], "each retries when it is added");
        ctx.inner.memory_unused();
        ctx.inner.memory_unused();
        assert_eq!(retries(), [2; 3]);
    }
}
