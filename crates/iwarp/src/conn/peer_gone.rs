//! The end of a stream that is hidden from its queue pair, because the peer is connected by number,
//! or because a connection of the connection manager is shown as on InfiniBand.
//!
//! On InfiniBand a queue pair does not notice that the peer's queue pair is gone: receives stay
//! posted, and a request fails when it is not answered for some time. Programs that connect by
//! number rely on that: the end that is done first exits while the other still polls for its last
//! completions, where a flushed receive would be an error. A program that uses the connection
//! manager gets a disconnect event, and takes what has arrived before it ends its own queue pair.

use crate::conn::effects::{DriveHost, Effects};
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::qp::{QpInner, QpState, TIMER_PEER_GONE};
use crate::sys::poller::Interest;
use iwarp_rnic::qp::Events;
use std::sync::Arc;

/// The `rnr_retry` without a limit, and the largest `retry_cnt`. Both fields have three bits.
const FOR_EVER: u8 = 7;
const RETRIES_MAX: u8 = 7;

impl QpState {
    /// Makes the new connection behave as on InfiniBand, with the time limits of these parameters,
    /// if there are any.
    pub(crate) fn behave_as(&mut self, infiniband: Option<InfinibandParameters>) {
        let Some(parameters) = infiniband else { return };
        self.machine.hide_end();
        if parameters.rnr_retry_count >= FOR_EVER {
            self.machine.hold_for_ever();
        }
        self.retry.retry_cnt = parameters.retry_count.min(RETRIES_MAX);
        if let Some(timeout) = parameters.ack_timeout {
            self.retry.timeout = timeout;
        }
    }
}

/// Handles the end of the stream, and leaves the queue pair as it is.
pub(crate) fn hide_end(qp: &Arc<QpInner>, g: &mut QpState, effects: &mut Effects) {
    tracing::trace!(qp = qp.num, "the peer is gone");
    unwatch(g);
    g.link.read_to_end();
    notify_manager(g, effects);
    start_request_timer(g);
}

/// Handles the end of the stream behind a Send that waits for its receive. When the receive is
/// posted, the rest is read.
pub(crate) fn hide_end_behind_held(g: &mut QpState, effects: &mut Effects) {
    unwatch(g);
    g.link.end_behind_held();
    notify_manager(g, effects);
    start_request_timer(g);
}

/// Removes the socket from the engine's set. Otherwise a hang-up would be reported again and again,
/// whatever the interest.
fn unwatch(g: &mut QpState) {
    if let Some(open) = g.link.open_mut() {
        open.socket.engine.pause(&open.socket.stream);
        open.driven_by_app = false;
        open.interest = Interest::NONE;
    }
}

/// Notifies the connection manager of the end. With a peer that is connected by number, the program
/// knows of no connection.
pub(crate) fn notify_manager(g: &QpState, effects: &mut Effects) {
    if !g.machine.is_by_number() {
        effects.events |= Events::DISCONNECTED;
        effects.report = g.link.report().clone();
    }
}

pub(crate) fn start_request_timer(g: &mut QpState) {
    let Some(limit) = g.retry.gone_after() else {
        return;
    };
    if g.machine.sends_outstanding() == 0 || !g.link.await_answer() {
        return;
    }
    if let Some(socket) = g.link.socket() {
        socket.engine.after(limit, socket.token, TIMER_PEER_GONE);
    }
}

/// Fails the requests that were not answered in time.
pub(crate) fn request_timer_expired(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    if !g.link.peer_gone().is_some_and(|peer| peer.request_timer) {
        return;
    }
    g.machine
        .fail_absent_peer(&mut DriveHost::new(qp, &mut effects));
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::link::Gone;
    use crate::conn::qp::QueuePair;
    use crate::conn::retry::Retry;
    use crate::testing;
    use iwarp_rnic::qp::{RxInterest, State};
    use iwarp_rnic::{Cqe, RecvWr, SendOp, SendWr, WcStatus};
    use std::io::Write as _;

    /// Creates a queue pair with its peer. It waits hours for an answer.
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

    fn is_timed(g: &QpState) -> bool {
        g.link.peer_gone().is_some_and(|peer| peer.request_timer)
    }

    fn gone(qp: &QueuePair) -> Option<Gone> {
        let peer = qp.inner.state.lock().link.peer_gone();
        peer.map(|peer| peer.gone)
    }

    /// The timer runs only if the peer is gone and a request is outstanding.
    #[test]
    fn request_timer_needs_absent_peer() {
        for is_gone in [false, true] {
            for asks in [false, true] {
                let (qp, _peer) = connection();
                let mut effects = Effects::default();
                let mut g = qp.inner.state.lock();
                if is_gone {
                    g.link.read_to_end();
                }
                if asks {
                    let mut host = DriveHost::new(&qp.inner, &mut effects);
                    let wr = SendWr::new(1, SendOp::Send, &[]);
                    g.machine.post_send(&wr, &mut host).unwrap();
                }
                for _ in 0..2 {
                    start_request_timer(&mut g);
                    assert_eq!(is_timed(&g), is_gone && asks, "{is_gone} {asks}");
                }
                drop(g);
                qp.destroy();
            }
        }
    }

    /// Requests that were posted before the peer was gone are timed like later ones.
    #[test]
    fn end_of_peer_starts_request_timer() {
        for asks in [false, true] {
            let (qp, _peer) = connection();
            let mut effects = Effects::default();
            let mut g = qp.inner.state.lock();
            if asks {
                let mut host = DriveHost::new(&qp.inner, &mut effects);
                let wr = SendWr::new(1, SendOp::Send, &[]);
                g.machine.post_send(&wr, &mut host).unwrap();
            }
            hide_end(&qp.inner, &mut g, &mut effects);
            assert_eq!((g.link.is_read_to_end(), is_timed(&g)), (true, asks));
            drop(g);
            qp.destroy();
        }
    }

    /// Timers are not cancelled, so this one may belong to an earlier connection.
    #[test]
    fn expired_request_timer_fails_queue_pair() {
        for (runs, state) in [(false, State::Rts), (true, State::Error)] {
            let (qp, _peer) = connection();
            {
                let mut g = qp.inner.state.lock();
                g.link.read_to_end();
                assert!(!runs || g.link.await_answer());
            }
            request_timer_expired(&qp.inner);
            assert_eq!(qp.state(), state);
            qp.destroy();
        }
    }

    /// Creates a queue pair that is connected by number, or whose connection is shown as on
    /// InfiniBand.
    fn hidden(by_number: bool) -> (QueuePair, std::net::TcpStream) {
        let (qp, peer) = connection();
        let mut g = qp.inner.state.lock();
        match by_number {
            true => g.machine.set_by_number(),
            false => g.machine.hide_end(),
        }
        drop(g);
        (qp, peer)
    }

    fn receive(qp: &QueuePair, wr_id: u64) {
        let wr = RecvWr { wr_id, sges: &[] };
        qp.post_recv(&[wr]).unwrap();
    }

    fn polled(qp: &QueuePair) -> Vec<(u64, WcStatus)> {
        let mut cqes = [Cqe::default(); 4];
        let n = qp.inner.recv_cq.poll(&mut cqes).unwrap();
        let cqes = cqes[..n].iter();
        cqes.map(|cqe| (cqe.wr_id, cqe.status)).collect()
    }

    /// The peer dies inside an FPDU.
    #[test]
    fn cut_message_changes_nothing() {
        for by_number in [true, false] {
            for part in 1..testing::EMPTY_SEND.len() {
                let (qp, mut peer) = hidden(by_number);
                receive(&qp, 1);
                peer.write_all(&testing::EMPTY_SEND[..part]).unwrap();
                drop(peer);
                testing::until("the end is not noticed", || {
                    qp.inner.state.lock().link.is_read_to_end()
                });
                assert_eq!(qp.state(), State::Rts);
                assert_eq!(polled(&qp), []);
                request_timer_expired(&qp.inner);
                assert_eq!(qp.state(), State::Rts, "nothing waits for an answer");
                qp.disconnect();
                assert_eq!(qp.state(), State::Error);
                assert_eq!(polled(&qp), [(1, WcStatus::Flushed)]);
                qp.destroy();
            }
        }
    }

    /// A stream that is reset behind a held Send is read to its end when the receive is posted.
    #[test]
    fn held_send_outlives_a_reset() {
        let (qp, mut peer) = hidden(false);
        qp.inner.state.lock().machine.hold_for_ever();
        let mut octets = testing::EMPTY_SEND.to_vec();
        octets.extend_from_slice(&testing::send_fpdu_of(2, &[]));
        peer.write_all(&octets).unwrap();
        testing::until("the Send is not held", || {
            qp.inner.state.lock().machine.rx_interest() == RxInterest::Held
        });
        testing::break_off(&testing::link(&qp), peer);
        testing::until("the end is not noticed", || {
            gone(&qp) == Some(Gone::BehindHeld)
        });
        assert_eq!(qp.state(), State::Rts);
        // The queue has one slot, which is free when the completion has been polled.
        for wr_id in [1, 2] {
            receive(&qp, wr_id);
            let mut done = Vec::new();
            testing::until("a Send is lost", || {
                done = polled(&qp);
                !done.is_empty()
            });
            assert_eq!(done, [(wr_id, WcStatus::Success)]);
        }
        testing::until("the end is not noticed again", || {
            qp.inner.state.lock().link.is_read_to_end()
        });
        assert_eq!(qp.state(), State::Rts);
        qp.destroy();
    }
}
