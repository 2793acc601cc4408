//! A datagram queue pair as the engine sees it.

use super::send::TIMER_BLOCKED;
use super::{Guarded, UdInner};
use crate::engine::Source;
use crate::sys::poller::Interest;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};

/// Stands for a queue pair in the engine's table, so that the engine does not keep one that the program has dropped.
pub(super) struct Watch {
    qp: Weak<UdInner>,
    /// It watches one of the queue pair's own sockets, and not that of a group.
    own: bool,
    /// How often application threads had driven the queue pair when the engine last asked about this socket. All sockets share the count, so that
    /// the answer about one does not make another one look idle.
    seen: AtomicU32,
}

impl Watch {
    const fn new(qp: Weak<UdInner>, own: bool) -> Self {
        let seen = AtomicU32::new(0);
        Self { qp, own, seen }
    }

    /// For the queue pair's own sockets.
    pub(super) fn own(qp: &Arc<UdInner>) -> Arc<dyn Source> {
        let qp = Arc::downgrade(qp);
        Arc::new(Self::new(qp, true))
    }

    /// For the socket of a group, which the engine always watches.
    pub(super) fn group(qp: &Arc<UdInner>) -> Arc<dyn Source> {
        let qp = Arc::downgrade(qp);
        Arc::new(Self::new(qp, false))
    }
}

impl UdInner {
    /// Has the engine watch the sockets again, if application threads drove them.
    pub(super) fn wake(&self, g: &mut Guarded) {
        if !std::mem::take(&mut g.resting) || self.is_destroyed() {
            return;
        }
        for local in self.locals.all().iter() {
            let engine = &self.engine;
            let watched = engine.resume(&local.socket, local.token, Interest::READ);
            if let Err(error) = watched {
                tracing::error!(qp = self.num, %error, "a socket cannot be watched");
            }
        }
    }
}

impl Source for Watch {
    fn ready(self: Arc<Self>, readable: bool, writable: bool, _: bool) -> bool {
        let Some(qp) = self.qp.upgrade() else {
            return false;
        };
        let mut served = false;
        if readable {
            served |= qp.drive_rx();
        }
        if writable {
            qp.room_or_late();
            served = true;
        }
        served
    }

    fn is_driven(&self) -> bool {
        let qp = self.qp.upgrade();
        self.own && qp.is_some_and(|qp| qp.drives.is_news(&self.seen))
    }

    fn rest(&self) -> bool {
        let Some(qp) = self.qp.upgrade() else {
            return false;
        };
        let mut g = qp.state.lock();
        if g.watches_room.is_some() || qp.is_destroyed() {
            return false;
        }
        if !g.resting {
            for local in qp.locals.all().iter() {
                qp.engine.pause(&local.socket);
            }
            g.resting = true;
        }
        true
    }

    fn resume(&self) {
        let Some(qp) = self.qp.upgrade() else { return };
        let mut g = qp.state.lock();
        qp.wake(&mut g);
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if let (TIMER_BLOCKED, Some(qp)) = (kind, self.qp.upgrade()) {
            qp.room_or_late();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::testing::context;
    use crate::raw::{UdAttributes, UdQueuePair};

    fn queue_pair() -> UdQueuePair {
        let ctx = context();
        let cq = ctx.create_cq(1, None).unwrap();
        let attributes = UdAttributes {
            pd: ctx.allocate_pd(),
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: false,
        };
        ctx.create_ud_qp(&attributes).unwrap()
    }

    #[test]
    fn sockets_of_one_queue_pair_are_asked_about_one_by_one() {
        let qp = queue_pair().inner;
        let (sockets, of_group) = ([Watch::own(&qp), Watch::own(&qp)], Watch::group(&qp));
        let driven = || sockets.each_ref().map(|socket| socket.is_driven());
        assert_eq!(driven(), [false, false]);
        qp.drives.note();
        assert_eq!(driven(), [true, true]);
        assert_eq!(driven(), [false, false]);
        // A thread that waits next does not count as driving.
        qp.drives.note();
        qp.drives.take();
        assert_eq!(driven(), [false, false]);
        qp.drives.note();
        assert!(sockets[1].is_driven());
        assert!(sockets[0].is_driven());
        assert!(!of_group.is_driven(), "the engine always watches it");
    }
}
