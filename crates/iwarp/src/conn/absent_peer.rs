//! Requests of queue pairs that are connected by number, while their peer is not there.
//!
//! On InfiniBand a queue pair does not know whether its peer exists. A request is sent `retry_cnt` times more, and fails if it is
//! never answered. Until a request is posted nothing fails, however long the peer takes to come.

use super::effects::{DriveHost, Effects};
use super::qp::{QpInner, QpState};
use super::retry::Retry;
use crate::sys::clock::now_ns;
use std::sync::Arc;
use std::time::Duration;

/// Since when requests wait for a peer that has not come.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Absent {
    /// Nanoseconds of [`now_ns`]; zero if no request waits.
    since: u64,
}

/// Requests were posted and there is no stream: their time begins.
#[cold]
pub(crate) fn begin(qp: &QpInner, g: &mut QpState) {
    let waits = g.machine.is_connectionless() && g.machine.sends_outstanding() > 0;
    if g.absent.since != 0 || !waits {
        return;
    }
    g.absent.since = now_ns();
    watch(qp, g.retry.absent_after());
}

fn watch(qp: &QpInner, left: Option<Duration>) {
    if let Some(left) = left {
        qp.ctx.requests_wait(qp.num, left);
    }
}

/// The time of a request may be over.
pub(crate) fn timer(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    let limit = g.retry.absent_after();
    let (since, Some(limit)) = (g.absent.since, limit) else {
        return;
    };
    if since == 0 || g.link.is_open() {
        return;
    }
    let waited = Duration::from_nanos(now_ns().saturating_sub(since));
    if let Some(left) = limit.checked_sub(waited).filter(|left| !left.is_zero()) {
        drop(g);
        watch(qp, Some(left));
        return;
    }
    tracing::debug!(qp = qp.num, "the peer is absent");
    g.absent = Absent::default();
    g.machine
        .peer_is_absent(&mut DriveHost::new(qp, &mut effects));
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
    qp.ctx.gave_up_peer(qp.num);
}

impl QpInner {
    /// Sets how long requests wait for the peer and its receives. Requests that wait already begin anew.
    pub(crate) fn set_retry(&self, retry: Retry) {
        let mut g = self.state.lock();
        g.retry = retry;
        g.machine.set_rnr_retry(retry.rnr_retry);
        g.machine.set_min_rnr_timer(retry.rnr_timer());
        if g.link.is_none() {
            g.absent = Absent::default();
            begin(self, &mut g);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::qp::QueuePair;
    use crate::testing;
    use iwarp_rnic::qp::State;
    use iwarp_rnic::{SendOp, SendWr};

    /// In RTS without a connection. `numbered`: it is connected by number; `asks`: a request is posted.
    fn lonely(numbered: bool, asks: bool) -> QueuePair {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        qp.modify(State::Init).unwrap();
        qp.inner.state.lock().machine.await_stream().unwrap();
        qp.modify(State::Rts).unwrap();
        let mut effects = Effects::default();
        let mut g = qp.inner.state.lock();
        if numbered {
            g.machine.hide_connection();
        }
        if asks {
            let mut host = DriveHost::new(&qp.inner, &mut effects);
            let wr = SendWr::new(1, SendOp::Send, &[]);
            g.machine.post_send(&wr, &mut host).unwrap();
        }
        drop(g);
        qp
    }

    /// Until a request is posted nothing fails, and a connection that the program has made itself has no such time.
    #[test]
    fn a_time_begins_with_the_first_request_to_a_number() {
        for numbered in [false, true] {
            for asks in [false, true] {
                let qp = lonely(numbered, asks);
                let mut g = qp.inner.state.lock();
                begin(&qp.inner, &mut g);
                let begun = g.absent.since != 0;
                assert_eq!(begun, numbered && asks, "{numbered} {asks}");
                g.absent.since = 7;
                begin(&qp.inner, &mut g);
                assert_eq!(g.absent.since, 7, "that of the first counts");
                drop(g);
                qp.destroy();
            }
        }
    }

    /// Timers are not cancelled, so each may come too early, or too late.
    #[test]
    fn a_request_fails_when_its_time_is_over() {
        let qp = lonely(true, true);
        let since = |since| qp.inner.state.lock().absent.since = since;
        let now = now_ns();
        for (begun, text) in [(0, "no request waits"), (now, "there is time")] {
            since(begun);
            timer(&qp.inner);
            assert_eq!(qp.state(), State::Rts, "{text}");
            assert_eq!(qp.inner.state.lock().absent.since, begun, "{text}");
        }
        let retry = Retry {
            timeout: 0,
            ..Retry::default()
        };
        since(1);
        qp.set_retry(retry).unwrap();
        timer(&qp.inner);
        assert_eq!(qp.state(), State::Rts, "it waits for ever");
        qp.set_retry(Retry::default()).unwrap();
        let again = qp.inner.state.lock().absent.since;
        assert!(again >= now, "a new setting begins anew");
        since(1);
        timer(&qp.inner);
        assert_eq!(qp.state(), State::Error);
        assert_eq!(qp.inner.state.lock().absent.since, 0);
        qp.destroy();
    }

    /// The peer has come, and the timer was set before.
    #[test]
    fn a_peer_that_has_come_is_not_absent() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let _peer = testing::connected(&qp);
        qp.inner.state.lock().absent.since = 1;
        timer(&qp.inner);
        assert_eq!(qp.state(), State::Rts);
        qp.destroy();
    }
}
