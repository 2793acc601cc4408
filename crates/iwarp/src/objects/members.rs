//! The datagram queue pairs of a completion queue. A thread that polls the queue drives their
//! sockets.

use super::any_qp::AnyQp;
use crate::engine::policy::{self, POLL_DIRECTLY_MAX};
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

#[derive(Default)]
pub(crate) struct UdMembers {
    list: RwLock<Vec<Weak<dyn AnyQp>>>,
    /// `true` if the list is not empty. A hint, so that a completion queue without datagram queue
    /// pairs takes no lock.
    any: AtomicBool,
}

impl UdMembers {
    pub(crate) fn attach<M: AnyQp>(&self, qp: &Arc<M>) {
        let mut list = self.list.write();
        list.retain(|member| member.strong_count() > 0);
        list.push(Arc::downgrade(qp) as _);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn detach<M: AnyQp>(&self, qp: &Arc<M>) {
        let gone: Weak<dyn AnyQp> = Arc::downgrade(qp) as _;
        let mut list = self.list.write();
        list.retain(|member| !member.ptr_eq(&gone));
        self.any.store(!list.is_empty(), Ordering::Release);
    }

    pub(crate) fn all(&self) -> Vec<Arc<dyn AnyQp>> {
        self.list.read().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn len(&self) -> usize {
        let list = self.list.read();
        list.iter().filter(|qp| qp.strong_count() > 0).count()
    }

    /// Returns the first queue pairs, and `true` if there are too many to poll them one by one.
    fn first_few(&self) -> ([Option<Arc<dyn AnyQp>>; POLL_DIRECTLY_MAX], bool) {
        let mut few: [Option<Arc<dyn AnyQp>>; POLL_DIRECTLY_MAX] = Default::default();
        let list = self.list.read();
        for (slot, qp) in few.iter_mut().zip(list.iter()) {
            *slot = qp.upgrade();
        }
        (few, policy::are_many(list.len()))
    }

    pub(crate) fn are_many(&self) -> bool {
        policy::are_many(self.list.read().len())
    }

    /// Reads and writes the sockets of the first [`POLL_DIRECTLY_MAX`] queue pairs. Returns `true`
    /// if there are more; the caller must then serve the whole process.
    #[inline]
    pub(crate) fn drive_first(&self) -> bool {
        self.any.load(Ordering::Acquire) && self.drive_now()
    }

    fn drive_now(&self) -> bool {
        let (few, are_many) = self.first_few();
        for qp in few.into_iter().flatten() {
            qp.poll_sockets();
        }
        are_many
    }
}
