//! The datagram queue pairs of a completion queue: who polls it drives their sockets.

use super::UdInner;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Queue pairs whose sockets an empty poll reads one by one.
const POLL_DIRECTLY: usize = 4;

#[derive(Default)]
pub(in super::super) struct Members {
    list: RwLock<Vec<Weak<UdInner>>>,
    /// A hint, so that completion queues without any take no lock.
    any: AtomicBool,
}

impl Members {
    pub(super) fn attach(&self, qp: &Arc<UdInner>) {
        let mut list = self.list.write();
        list.retain(|member| member.strong_count() > 0);
        list.push(Arc::downgrade(qp));
        self.any.store(true, Ordering::Release);
    }

    pub(super) fn detach(&self, qp: &Arc<UdInner>) {
        let gone = Arc::downgrade(qp);
        let mut list = self.list.write();
        list.retain(|member| !member.ptr_eq(&gone));
        self.any.store(!list.is_empty(), Ordering::Release);
    }

    /// Returns all of them.
    pub(in super::super) fn all(&self) -> Vec<Arc<UdInner>> {
        self.list.read().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns how many there are.
    pub(in super::super) fn len(&self) -> usize {
        let list = self.list.read();
        list.iter().filter(|qp| qp.strong_count() > 0).count()
    }

    fn few(&self) -> ([Option<Arc<UdInner>>; POLL_DIRECTLY], bool) {
        let mut few: [Option<Arc<UdInner>>; POLL_DIRECTLY] = Default::default();
        let list = self.list.read();
        for (slot, qp) in few.iter_mut().zip(list.iter()) {
            *slot = qp.upgrade();
        }
        (few, list.len() > POLL_DIRECTLY)
    }

    /// Returns `true` if there are more than polls read one by one.
    pub(in super::super) fn are_many(&self) -> bool {
        self.list.read().len() > POLL_DIRECTLY
    }

    /// Reads and writes their sockets; if there are many, of the first few. Returns `true` if there are others, which are left to
    /// whoever serves the whole process.
    #[inline]
    pub(in super::super) fn drive(&self) -> bool {
        self.any.load(Ordering::Acquire) && self.drive_now()
    }

    fn drive_now(&self) -> bool {
        let (few, others) = self.few();
        // In a forked child the queue pairs are the parent's, and their locks may have been copied while they were held.
        for qp in few.iter().flatten().filter(|qp| !qp.origin.is_foreign()) {
            qp.drive_rx();
            if qp.is_blocked() {
                qp.drive_tx();
            }
        }
        others
    }
}
