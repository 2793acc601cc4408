//! What happens when the peer of a queue pair that is connected by number leaves.
//!
//! On InfiniBand no event tells that the peer's queue pair is gone: receives stay posted, and a request fails when it is not
//! answered for some time. Programs that connect by number rely on that: the end that is done first exits while the other
//! still looks for its last completions, where a flushed receive would be an error.

use super::after::{After, DriveHost};
use super::qp::{Guarded, QpInner, TIMER_LEFT};
use crate::sys::poller::Interest;
use std::sync::Arc;

/// Which part of a stream has ended while the program was not told.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Left {
    /// No more octets come.
    pub(super) rx: bool,
    /// No octets can be sent.
    pub(super) tx: bool,
    /// The time of a request is running.
    timer: bool,
}

/// The program is not told that the stream has ended.
pub(super) fn leave(qp: &Arc<QpInner>, g: &mut Guarded) {
    let Some(link) = &g.link else { return };
    tracing::trace!(qp = qp.num, "the peer has left");
    // A hang-up is reported whatever events are asked for.
    link.engine.pause(&link.stream);
    g.conn.resting = false;
    g.conn.interest = Interest {
        readable: false,
        writable: false,
    };
    g.conn.stalled = None;
    g.conn.left.rx = true;
    send(g);
}

/// Handles requests that no peer will answer.
pub(super) fn send(g: &mut Guarded) {
    let Some(link) = &g.link else { return };
    if !g.conn.left.rx || g.conn.left.timer || g.machine.sends_outstanding() == 0 {
        return;
    }
    if let Some(limit) = g.retry.gone_after() {
        g.conn.left.timer = true;
        link.engine.after(limit, link.token, TIMER_LEFT);
    }
}

/// The time of a request is over.
pub(super) fn timer(qp: &Arc<QpInner>) {
    let mut after = After::default();
    let mut g = qp.state.lock();
    if !g.conn.left.timer {
        return;
    }
    g.machine
        .peer_is_absent(&mut DriveHost::new(qp, &mut after));
    qp.settle(&mut g, &mut after);
    drop(g);
    after.run(qp);
}

#[cfg(test)]
mod tests {
    use super::super::qp::QueuePair;
    use super::super::retry::Retry;
    use super::super::testing;
    use super::*;
    use iwarp_rnic::qp::State;
    use iwarp_rnic::{SendOp, SendWr};

    /// A queue pair with this peer, which waits for hours for an answer.
    fn connection() -> (QueuePair, std::net::TcpStream) {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let peer = testing::connected(&qp);
        let retry = Retry {
            timeout: 31,
            ..Retry::default()
        };
        qp.set_retry(retry).unwrap();
        (qp, peer)
    }

    /// As long as the peer is there, or nothing is asked of it, no time runs.
    #[test]
    fn the_time_of_a_request_runs_when_the_peer_has_left() {
        for has_left in [false, true] {
            for asks in [false, true] {
                let (qp, _peer) = connection();
                let mut after = After::default();
                let mut g = qp.inner.state.lock();
                g.conn.left.rx = has_left;
                if asks {
                    let mut host = DriveHost::new(&qp.inner, &mut after);
                    let wr = SendWr::new(1, SendOp::Send, &[]);
                    g.machine.post_send(&wr, &mut host).unwrap();
                }
                for _ in 0..2 {
                    send(&mut g);
                    assert_eq!(g.conn.left.timer, has_left && asks, "{has_left} {asks}");
                }
                drop(g);
                qp.destroy();
            }
        }
    }

    /// What was posted before the peer left has no other time than what is posted afterwards.
    #[test]
    fn the_time_of_a_request_runs_from_when_the_peer_leaves() {
        for asks in [false, true] {
            let (qp, _peer) = connection();
            let mut after = After::default();
            let mut g = qp.inner.state.lock();
            if asks {
                let mut host = DriveHost::new(&qp.inner, &mut after);
                let wr = SendWr::new(1, SendOp::Send, &[]);
                g.machine.post_send(&wr, &mut host).unwrap();
            }
            leave(&qp.inner, &mut g);
            assert_eq!((g.conn.left.rx, g.conn.left.timer), (true, asks));
            drop(g);
            qp.destroy();
        }
    }

    /// Timers are not cancelled: one may belong to an earlier connection.
    #[test]
    fn a_queue_pair_fails_when_its_time_has_run_out() {
        for (runs, state) in [(false, State::Rts), (true, State::Error)] {
            let (qp, _peer) = connection();
            qp.inner.state.lock().conn.left.timer = runs;
            timer(&qp.inner);
            assert_eq!(qp.state(), state);
            qp.destroy();
        }
    }
}
