//! Queue pairs that wait until nobody uses memory that is being invalidated, or registered again.
//!
//! Memory is in use while a thread places octets there or is in a system call with it, so the wait is short. Nobody polls for its
//! end: a thread that has ended such a use asks the table ([`MemoryTable::take_unused`](iwarp_rnic::memory::MemoryTable::take_unused)), and drives the
//! queue pairs of this list. A queue pair that enters the list tries once more, because the use may have ended before.

use super::qp::QpInner;
use crate::objects::context::ContextInner;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// The queue pairs of a device that wait.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Vec<Weak<QpInner>>>);

impl Waiting {
    /// Enters a queue pair. Returns `false` if it is in the list already.
    fn enter(&self, qp: &Arc<QpInner>) -> bool {
        let mut list = self.0.lock();
        list.retain(|other| other.strong_count() > 0);
        let known = list.iter().any(|other| other.as_ptr() == Arc::as_ptr(qp));
        if !known {
            list.push(Arc::downgrade(qp));
        }
        !known
    }
}

impl ContextInner {
    /// A queue pair waits. The caller holds no lock.
    #[cold]
    pub(crate) fn wait_for_memory(&self, qp: &Arc<QpInner>) {
        if self.waiting.enter(qp) {
            qp.retry_memory();
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

impl QpInner {
    /// Tries again what waits for memory.
    fn retry_memory(self: &Arc<Self>) {
        {
            let mut g = self.state.lock();
            if !g.machine.waits_for_memory() {
                return;
            }
            g.machine.retry_memory();
        }
        self.drive_tx();
        self.drive_rx();
    }
}

#[cfg(test)]
#[path = "waiting_tests.rs"]
mod tests;
