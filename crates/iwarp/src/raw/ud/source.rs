//! A datagram queue pair as the engine sees it.

use super::send::TIMER_BLOCKED;
use super::{Guarded, UdInner};
use crate::engine::Source;
use crate::raw::source::driven_until;
use crate::sys::poller::Interest;
use std::sync::{Arc, Weak};

/// Stands for a queue pair in the engine's table, so that the engine does not keep one that the program has dropped.
pub(super) struct Watch {
    qp: Weak<UdInner>,
    /// It watches one of the queue pair's own sockets, and not that of a group.
    own: bool,
}

impl Watch {
    const fn new(qp: Weak<UdInner>, own: bool) -> Self {
        Self { qp, own }
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

    fn driven_until(&self, now: u64) -> Option<u64> {
        let qp = self.qp.upgrade().filter(|_| self.own)?;
        driven_until([&qp.send_cq, &qp.recv_cq], now)
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
