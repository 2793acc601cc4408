//! The engine's interface to a datagram queue pair.

use super::send::TIMER_BLOCKED;
use super::{UdInner, UdState};
use crate::conn::engine_events::driven_until;
use crate::engine::Source;
use crate::sys::poller::Interest;
use std::sync::{Arc, Weak};

/// The engine's handle of a queue pair. It is weak, so that a queue pair which the program has
/// dropped is freed.
pub(super) struct Watch {
    qp: Weak<UdInner>,
    /// `true` if the socket is at a local address, `false` if it is a group's socket.
    own: bool,
}

impl Watch {
    const fn new(qp: Weak<UdInner>, own: bool) -> Self {
        Self { qp, own }
    }

    pub(super) fn own(qp: &Arc<UdInner>) -> Arc<dyn Source> {
        let qp = Arc::downgrade(qp);
        Arc::new(Self::new(qp, true))
    }

    /// Creates the handle for a group's socket, which the engine always watches.
    pub(super) fn group(qp: &Arc<UdInner>) -> Arc<dyn Source> {
        let qp = Arc::downgrade(qp);
        Arc::new(Self::new(qp, false))
    }
}

impl UdInner {
    /// If application threads have driven the sockets, lets the engine watch them again.
    pub(super) fn resume_engine_watch(&self, g: &mut UdState) {
        if !std::mem::take(&mut g.driven_by_app) || self.is_destroyed() {
            return;
        }
        for local in self.locals.all().iter() {
            let engine = &self.engine;
            let watched = engine.resume(&local.socket, local.token, Interest::READ);
            if let Err(error) = watched {
                tracing::error!(qp = self.num, %error, "cannot watch a socket");
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
            qp.retry_blocked();
            served = true;
        }
        served
    }

    fn driven_until(&self, now: u64) -> Option<u64> {
        let qp = self.qp.upgrade().filter(|_| self.own)?;
        driven_until([&qp.send_cq, &qp.recv_cq], now)
    }

    fn pause_watch(&self) -> bool {
        let Some(qp) = self.qp.upgrade() else {
            return false;
        };
        let mut g = qp.state.lock();
        if g.watched_for_room.is_some() || qp.is_destroyed() {
            return false;
        }
        if !g.driven_by_app {
            for local in qp.locals.all().iter() {
                qp.engine.pause(&local.socket);
            }
            g.driven_by_app = true;
        }
        true
    }

    fn resume_watch(&self) {
        let Some(qp) = self.qp.upgrade() else { return };
        let mut g = qp.state.lock();
        qp.resume_engine_watch(&mut g);
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if let (TIMER_BLOCKED, Some(qp)) = (kind, self.qp.upgrade()) {
            qp.retry_blocked();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::now_ns;
    use crate::testing::datagram_queue_pair;
    use crate::ud::UdQueuePair;
    use std::time::{Duration, Instant};

    /// Returns `true` if the engine watches all sockets of the queue pair, and `false` if it
    /// watches none.
    fn is_watched(qp: &UdQueuePair) -> bool {
        let engine = &qp.inner.engine;
        let locals = qp.inner.locals.all();
        let watched = locals.iter().filter(|local| {
            // `modify` fails if the poller does not watch the descriptor.
            engine
                .modify(&local.socket, local.token, Interest::READ)
                .is_ok()
        });
        match watched.count() {
            0 => false,
            count => {
                assert_eq!(count, locals.len());
                true
            }
        }
    }

    #[test]
    fn sockets_are_unwatched_until_resumed() {
        let qp = datagram_queue_pair();
        let watch = Watch::own(&qp.inner);
        watch.resume_watch();
        assert!(is_watched(&qp), "the watch was not paused");
        for _ in 0..2 {
            for _ in 0..2 {
                assert!(watch.pause_watch());
                assert!(!is_watched(&qp));
            }
            watch.resume_watch();
            assert!(is_watched(&qp));
        }
    }

    #[test]
    fn waiting_requests_keep_the_watch() {
        let qp = datagram_queue_pair();
        let watch = Watch::own(&qp.inner);
        let local = Arc::clone(&qp.inner.locals.all()[0]);
        qp.inner.state.lock().watched_for_room = Some(local);
        assert!(!watch.pause_watch());
        assert!(is_watched(&qp));
    }

    #[test]
    fn destroyed_queue_pair_stays_unwatched() {
        for paused in [false, true] {
            let qp = datagram_queue_pair();
            let watch = Watch::own(&qp.inner);
            assert!(!paused || watch.pause_watch());
            qp.destroy();
            assert!(!watch.pause_watch());
            watch.resume_watch();
            assert!(!is_watched(&qp), "{paused}");
        }
    }

    #[test]
    fn drive_reports_progress() {
        let qp = datagram_queue_pair();
        for (readable, writable) in [(false, false), (true, false), (false, true), (true, true)] {
            let watch = Watch::own(&qp.inner);
            let served = watch.ready(readable, writable, false);
            assert_eq!(served, readable || writable, "{readable} {writable}");
        }
    }

    #[test]
    fn pollers_drive_own_sockets() {
        let qp = datagram_queue_pair();
        let pollers = &qp.inner.send_cq.inner.pollers;
        let own = Watch::own(&qp.inner);
        let start = Instant::now();
        let end = loop {
            assert_eq!(own.driven_until(u64::MAX), None);
            let now = now_ns();
            pollers.renew(now);
            if let Some(end) = pollers.driven_until(now) {
                break end;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "no lease");
        };
        assert_eq!(own.driven_until(end - 1), Some(end));
        assert_eq!(own.driven_until(end), None);
        let group = Watch::group(&qp.inner);
        assert_eq!(
            group.driven_until(end - 1),
            None,
            "the engine always reads a group's socket"
        );
    }

    #[test]
    fn dropped_queue_pair_does_nothing() {
        let watch = Arc::new(Watch::new(Weak::new(), true));
        assert!(!watch.pause_watch());
        assert_eq!(watch.driven_until(0), None);
        watch.resume_watch();
        Arc::clone(&watch).timer(TIMER_BLOCKED);
        assert!(!watch.ready(true, true, true));
    }
}
