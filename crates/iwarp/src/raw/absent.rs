//! Requests of queue pairs that are connected by number, while their peer is not there.
//!
//! On InfiniBand a queue pair does not know whether its peer exists. A request is sent `retry_cnt` times more, and fails if it is
//! never answered. Until a request is posted nothing fails, however long the peer takes to come.

use super::after::{After, DriveHost};
use super::qp::{Guarded, QpInner};
use super::retry::Retry;
use crate::sys::clock::now_ns;
use std::sync::Arc;
use std::time::Duration;

/// Since when requests wait for a peer that has not come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Absent {
    /// Nanoseconds of [`now_ns`]; zero if no request waits.
    since: u64,
}

/// Requests were posted and there is no stream: their time begins.
#[cold]
pub(super) fn begin(qp: &QpInner, g: &mut Guarded) {
    let waits = g.machine.is_connectionless() && g.machine.sends_outstanding() > 0;
    if g.absent.since != 0 || !waits {
        return;
    }
    g.absent.since = now_ns();
    watch(qp, g.retry.absent_after());
}

fn watch(qp: &QpInner, left: Option<Duration>) {
    if let (Some(left), Ok(peers)) = (left, qp.ctx.peers()) {
        peers.look_for(qp.num, left);
    }
}

/// The time of a request may be over.
pub(super) fn timer(qp: &Arc<QpInner>) {
    let mut after = After::default();
    let mut g = qp.state.lock();
    let limit = g.retry.absent_after();
    let (since, Some(limit)) = (g.absent.since, limit) else {
        return;
    };
    if since == 0 || g.link.is_some() {
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
        .peer_is_absent(&mut DriveHost::new(qp, &mut after));
    qp.settle(&mut g, &mut after);
    drop(g);
    after.run(qp);
    if let Ok(peers) = qp.ctx.peers() {
        peers.abandon(qp.num);
    }
}

impl QpInner {
    /// Sets how long requests wait for the peer and its receives. Requests that wait already begin anew.
    pub(super) fn set_retry(&self, retry: Retry) {
        let mut g = self.state.lock();
        g.retry = retry;
        g.machine.set_rnr_retry(retry.rnr_retry);
        g.machine.set_min_rnr_timer(retry.rnr_timer());
        if g.link.is_none() && g.absent.since != 0 {
            g.absent = Absent::default();
            begin(self, &mut g);
        }
    }
}
