//! Queue pairs that wait until nobody uses memory that is being invalidated, or registered again.
//!
//! Memory is in use while a thread places octets there or is in a system call with it, so the wait is short. Nobody polls for its
//! end: a thread that has ended such a use asks the table ([`MemoryTable::take_unused`](iwarp_rnic::memory::MemoryTable::take_unused)), and drives the
//! queue pairs of this list. A queue pair that enters the list tries once more, because the use may have ended before.

use super::context::ContextInner;
use super::member::Member;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// The queue pairs of a device that wait.
#[derive(Default)]
pub(crate) struct MemoryWaiters(pub(crate) Mutex<Vec<Weak<dyn Member>>>);

impl MemoryWaiters {
    /// Enters a queue pair. Returns `false` if it is in the list already.
    pub(crate) fn enter<M: Member>(&self, qp: &Arc<M>) -> bool {
        let mut list = self.0.lock();
        list.retain(|other| other.strong_count() > 0);
        let weak: Weak<dyn Member> = Arc::downgrade(qp) as _;
        let known = list.iter().any(|other| other.ptr_eq(&weak));
        if !known {
            list.push(weak);
        }
        !known
    }
}

impl ContextInner {
    /// A queue pair waits. The caller holds no lock.
    #[cold]
    pub(crate) fn wait_for_memory<M: Member>(&self, qp: &Arc<M>) {
        if self.waiting.enter(qp) {
            Arc::clone(qp).retry_memory();
        }
    }

    /// Memory for which somebody waits has become free of users. The caller holds no lock.
    #[cold]
    pub(crate) fn memory_unused(&self) {
        let list = std::mem::take(&mut *self.waiting.0.lock());
        for qp in list.iter().filter_map(Weak::upgrade) {
            qp.retry_memory();
        }
    }
}
