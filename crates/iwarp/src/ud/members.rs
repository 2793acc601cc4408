//! The datagram queue pairs of a completion queue: who polls it drives their sockets.

use super::UdInner;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Queue pairs whose sockets an empty poll reads one by one.
const POLL_DIRECTLY: usize = 4;

#[derive(Default)]
pub(crate) struct Members {
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
    pub(crate) fn all(&self) -> Vec<Arc<UdInner>> {
        self.list.read().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns how many there are.
    pub(crate) fn len(&self) -> usize {
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
    pub(crate) fn are_many(&self) -> bool {
        self.list.read().len() > POLL_DIRECTLY
    }

    /// Reads and writes their sockets; if there are many, of the first few. Returns `true` if there are others, which are left to
    /// whoever serves the whole process.
    #[inline]
    pub(crate) fn drive(&self) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{datagram_queue_pair, post_to_itself};
    use iwarp_rnic::SendFlags;
    use std::time::{Duration, Instant};

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn polls_leave_the_rest_of_many_to_others() {
        let members = Members::default();
        assert!(!members.drive() && members.all().is_empty());
        let qps: Vec<_> = (0..7).map(|_| datagram_queue_pair()).collect();
        let expect = |count: usize| {
            assert_eq!((members.len(), members.all().len()), (count, count));
            let many = count > 4;
            assert_eq!(
                (members.are_many(), members.drive()),
                (many, many),
                "{count}"
            );
        };
        for (before, qp) in qps.iter().enumerate() {
            members.attach(&qp.inner);
            expect(before + 1);
        }
        for (left, qp) in qps.iter().enumerate().rev() {
            members.detach(&qp.inner);
            expect(left);
        }
    }

    #[test]
    fn the_dropped_ones_do_not_count() {
        let members = Members::default();
        let gone: Vec<_> = (0..POLL_DIRECTLY).map(|_| datagram_queue_pair()).collect();
        gone.iter().for_each(|qp| members.attach(&qp.inner));
        let weak: Vec<_> = gone.iter().map(|qp| Arc::downgrade(&qp.inner)).collect();
        drop(gone);
        let start = Instant::now();
        while weak.iter().any(|qp| qp.strong_count() > 0) {
            assert!(start.elapsed() < PATIENCE, "somebody keeps one");
            std::thread::yield_now();
        }
        assert!(members.len() == 0 && members.all().is_empty());
        let qp = datagram_queue_pair();
        members.attach(&qp.inner);
        assert_eq!(members.len(), 1);
        assert!(!members.are_many(), "they have left their places");
    }

    /// Whoever polls reads the sockets of those that are left when another one has gone.
    #[test]
    fn who_is_left_is_driven() {
        let members = Members::default();
        let (left, gone) = (datagram_queue_pair(), datagram_queue_pair());
        for qp in [&left, &gone] {
            members.attach(&qp.inner);
            // Nobody else reads it.
            qp.inner.pause();
            let ip = qp.inner.locals.all()[0].ip;
            post_to_itself(qp, ip, SendFlags::empty(), 1);
        }
        members.detach(&gone.inner);
        let start = Instant::now();
        while left.drops().no_receive == 0 {
            assert!(start.elapsed() < PATIENCE, "nobody reads it");
            members.drive();
        }
        assert_eq!(gone.drops().no_receive, 0);
    }
}
