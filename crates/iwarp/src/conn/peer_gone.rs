//! Hides the end of a stream from its queue pair: if the peer is connected by number, or if the
//! connection behaves as on InfiniBand.
//!
//! On InfiniBand, a queue pair does not notice that the peer's queue pair is gone. Its receives
//! stay posted, and a request fails if it is not answered for some time. Programs that connect by
//! number rely on that: one end may finish and exit while the other still polls for its last
//! completions. A flushed receive would look like an error there. A program that uses the
//! connection manager is notified by a disconnect event, and can still receive what has arrived
//! before it disconnects, too.

use crate::conn::effects::{DriveHost, Effects};
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::qp::{QpInner, QpState, TIMER_PEER_GONE};
use crate::sys::poller::Interest;
use iwarp_rnic::qp::Events;
use std::sync::Arc;

const RNR_RETRY_UNLIMITED: u8 = 7;
const RETRY_CNT_MAX: u8 = 7;

impl QpState {
    /// If there are parameters, makes the new connection behave as on InfiniBand, with their time
    /// limits.
    pub(crate) fn apply_infiniband(&mut self, infiniband: Option<InfinibandParameters>) {
        let Some(parameters) = infiniband else { return };
        self.machine.hide_end();
        if parameters.rnr_retry_count >= RNR_RETRY_UNLIMITED {
            self.machine.hold_for_ever();
        }
        self.retry.retry_cnt = parameters.retry_count.min(RETRY_CNT_MAX);
        if let Some(timeout) = parameters.ack_timeout {
            self.retry.timeout = timeout;
        }
    }
}

/// Handles the end of the stream, and keeps the queue pair in RTS.
pub(crate) fn hide_end(qp: &Arc<QpInner>, g: &mut QpState, effects: &mut Effects) {
    tracing::trace!(qp = qp.num, "the peer is gone");
    unwatch(g);
    g.link.read_to_end();
    notify_manager(g, effects);
    start_request_timer(g);
}

/// Handles the end of the stream while a Send is held. The rest of the stream is read when the
/// receive is posted.
pub(crate) fn hide_end_behind_held(g: &mut QpState, effects: &mut Effects) {
    unwatch(g);
    g.link.end_behind_held();
    notify_manager(g, effects);
    start_request_timer(g);
}

/// Removes the socket from the engine's set. Otherwise `epoll` would report the hang-up again and
/// again: it reports hang-ups even if the interest is empty.
fn unwatch(g: &mut QpState) {
    if let Some(open) = g.link.open_mut() {
        open.socket.engine.pause(&open.socket.stream);
        open.driven_by_app = false;
        open.interest = Interest::NONE;
    }
}

/// Notifies the connection manager of the end. Does nothing if the peer is connected by number,
/// because the program then knows of no connection.
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
    use crate::conn::drive;
    use crate::conn::link::Gone;
    use crate::conn::qp::QueuePair;
    use crate::conn::retry::Retry;
    use crate::testing;
    use iwarp_rnic::qp::{RxInterest, State};
    use iwarp_rnic::{Cqe, RecvWr, SendOp, SendWr, WcStatus};
    use std::io::Write as _;

    /// The queue pair waits hours for an answer.
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

    #[test]
    fn request_timer_needs_gone_peer_and_request() {
        for is_gone in [false, true] {
            for has_request in [false, true] {
                let (qp, _peer) = connection();
                let mut effects = Effects::default();
                let mut g = qp.inner.state.lock();
                if is_gone {
                    g.link.read_to_end();
                }
                if has_request {
                    let mut host = DriveHost::new(&qp.inner, &mut effects);
                    let wr = SendWr::new(1, SendOp::Send, &[]);
                    g.machine.post_send(&wr, &mut host).unwrap();
                }
                for _ in 0..2 {
                    start_request_timer(&mut g);
                    let timed = is_gone && has_request;
                    assert_eq!(is_timed(&g), timed, "{is_gone} {has_request}");
                }
                drop(g);
                qp.destroy();
            }
        }
    }

    /// The time limit also applies to requests that were posted before the peer was gone.
    #[test]
    fn end_of_peer_starts_request_timer() {
        for has_request in [false, true] {
            let (qp, _peer) = connection();
            let mut effects = Effects::default();
            let mut g = qp.inner.state.lock();
            if has_request {
                let mut host = DriveHost::new(&qp.inner, &mut effects);
                let wr = SendWr::new(1, SendOp::Send, &[]);
                g.machine.post_send(&wr, &mut host).unwrap();
            }
            hide_end(&qp.inner, &mut g, &mut effects);
            let state = (g.link.is_read_to_end(), is_timed(&g));
            assert_eq!(state, (true, has_request));
            drop(g);
            qp.destroy();
        }
    }

    /// A program that has connected by number knows of no connection, so it must not be notified of
    /// its end.
    #[test]
    fn hidden_end_notifies_manager() {
        for by_number in [false, true] {
            for is_held in [false, true] {
                let (qp, _peer) = with_hidden_end(by_number);
                let mut effects = Effects::default();
                let mut g = qp.inner.state.lock();
                match is_held {
                    true => hide_end_behind_held(&mut g, &mut effects),
                    false => hide_end(&qp.inner, &mut g, &mut effects),
                }
                drop(g);
                let notifies = effects.events.contains(Events::DISCONNECTED);
                assert_eq!(notifies, !by_number);
                qp.destroy();
            }
        }
    }

    /// If a request of a queue pair that is connected by number is lost with its stream, its status
    /// is the one that programs expect of an absent peer.
    #[test]
    fn lost_request_blames_absent_peer() {
        for (by_number, status) in [
            (false, WcStatus::Flushed),
            (true, WcStatus::TransportRetryExceeded),
        ] {
            let (qp, _peer) = with_hidden_end(by_number);
            let mut effects = Effects::default();
            {
                let mut g = qp.inner.state.lock();
                let wr = SendWr::new(1, SendOp::Send, &[]);
                let mut host = DriveHost::new(&qp.inner, &mut effects);
                g.machine.post_send(&wr, &mut host).unwrap();
                drop(host);
                drive::fail(&qp.inner, &mut g, &mut effects);
                qp.inner.collect_effects(&mut g, &mut effects);
            }
            effects.apply(&qp.inner);
            assert_eq!(poll(&qp), [(1, status)]);
            qp.destroy();
        }
    }

    /// Timers are not cancelled, so an expired timer may belong to an earlier connection. It must
    /// then have no effect.
    #[test]
    fn expired_request_timer_fails_queue_pair() {
        for (is_set, state) in [(false, State::Rts), (true, State::Error)] {
            let (qp, _peer) = connection();
            {
                let mut g = qp.inner.state.lock();
                g.link.read_to_end();
                assert!(!is_set || g.link.await_answer());
            }
            request_timer_expired(&qp.inner);
            assert_eq!(qp.state(), state);
            qp.destroy();
        }
    }

    /// Creates a queue pair that is connected by number, or whose connection behaves as on
    /// InfiniBand.
    fn with_hidden_end(by_number: bool) -> (QueuePair, std::net::TcpStream) {
        let (qp, peer) = connection();
        let mut g = qp.inner.state.lock();
        match by_number {
            true => g.machine.set_by_number(),
            false => g.machine.hide_end(),
        }
        drop(g);
        (qp, peer)
    }

    fn post_receive(qp: &QueuePair, wr_id: u64) {
        let wr = RecvWr { wr_id, sges: &[] };
        qp.post_recv(&[wr]).unwrap();
    }

    fn poll(qp: &QueuePair) -> Vec<(u64, WcStatus)> {
        let mut cqes = [Cqe::default(); 4];
        let n = qp.inner.recv_cq.poll(&mut cqes).unwrap();
        let cqes = cqes[..n].iter();
        cqes.map(|cqe| (cqe.wr_id, cqe.status)).collect()
    }

    #[test]
    fn end_inside_fpdu_is_hidden() {
        for by_number in [true, false] {
            for part in 1..testing::EMPTY_SEND.len() {
                let (qp, mut peer) = with_hidden_end(by_number);
                post_receive(&qp, 1);
                peer.write_all(&testing::EMPTY_SEND[..part]).unwrap();
                drop(peer);
                testing::until("the end is not read", || {
                    qp.inner.state.lock().link.is_read_to_end()
                });
                assert_eq!(qp.state(), State::Rts);
                assert_eq!(poll(&qp), []);
                request_timer_expired(&qp.inner);
                assert_eq!(qp.state(), State::Rts, "no request waits for an answer");
                qp.disconnect();
                assert_eq!(qp.state(), State::Error);
                assert_eq!(poll(&qp), [(1, WcStatus::Flushed)]);
                qp.destroy();
            }
        }
    }

    /// If the peer resets the stream while a Send is held, the rest of the stream is read when the
    /// receive is posted.
    #[test]
    fn held_send_outlives_reset() {
        let (qp, mut peer) = with_hidden_end(false);
        qp.inner.state.lock().machine.hold_for_ever();
        let mut octets = testing::EMPTY_SEND.to_vec();
        octets.extend_from_slice(&testing::send_fpdu_of(2, &[]));
        peer.write_all(&octets).unwrap();
        testing::until("the Send is not held", || {
            qp.inner.state.lock().machine.rx_interest() == RxInterest::Held
        });
        testing::break_off(&testing::link(&qp), peer);
        testing::until("the reset is not noticed", || {
            gone(&qp) == Some(Gone::BehindHeld)
        });
        assert_eq!(qp.state(), State::Rts);
        // The receive queue has one slot, so the second receive can be posted only after the first
        // completion was polled.
        for wr_id in [1, 2] {
            post_receive(&qp, wr_id);
            let mut done = Vec::new();
            testing::until("a Send is lost", || {
                done = poll(&qp);
                !done.is_empty()
            });
            assert_eq!(done, [(wr_id, WcStatus::Success)]);
        }
        testing::until("the end is not read", || {
            qp.inner.state.lock().link.is_read_to_end()
        });
        assert_eq!(qp.state(), State::Rts);
        qp.destroy();
    }
}
