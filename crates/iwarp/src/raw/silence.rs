//! Peers that vanish: their host is gone, or their reset was lost, and no packet tells that.
//!
//! The kernel's keep-alive probes a peer on a silent connection ([`TcpStream::keep_alive`]); it costs this process nothing. It
//! does not probe while octets wait for their acknowledgement: then TCP sends those again, for a quarter of an hour, and the
//! queue pair looks four times within [`Config::peer_timeout`] whether anything is answered. `TCP_USER_TIMEOUT` would do the
//! same without a timer of ours, but it also ends connections whose peer answers and does not read for a while, such as a
//! stopped process.
//!
//! [`TcpStream::keep_alive`]: crate::sys::stream::TcpStream::keep_alive
//! [`Config::peer_timeout`]: crate::Config::peer_timeout

use super::after::After;
use super::drive;
use super::qp::{Guarded, QpInner, TIMER_SILENCE};
use std::sync::Arc;

/// Looks within the time that a peer may be silent.
const LOOKS: u32 = 4;

/// What a queue pair has seen of its peer's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Silence {
    /// A timer for the next look is set.
    watched: bool,
    /// Looks in a row that have found no answer.
    unanswered: u32,
}

/// Something was sent: a later look checks whether it is answered.
#[inline]
pub(super) fn watch(qp: &QpInner, g: &mut Guarded) {
    if !g.conn.silence.watched {
        begin(qp, g);
    }
}

#[cold]
fn begin(qp: &QpInner, g: &mut Guarded) {
    if let (Some(limit), Some(link)) = (qp.ctx.config.peer_timeout, &g.link) {
        g.conn.silence.watched = true;
        link.engine
            .after_about(limit / LOOKS, link.token, TIMER_SILENCE);
    }
}

/// It is time for a look.
pub(super) fn timer(qp: &Arc<QpInner>) {
    let mut after = After::default();
    let mut g = qp.state.lock();
    let unanswered = std::mem::take(&mut g.conn.silence).unanswered;
    let (Some(limit), Some(link)) = (qp.ctx.config.peer_timeout, g.link.clone()) else {
        return;
    };
    // If no octets are on their way, no answer is due, and the next ones start anew. A peer that has left is not waited for.
    if g.conn.left.rx || !link.stream.unacknowledged_bytes().is_ok_and(|n| n > 0) {
        return;
    }
    let silent = link.stream.unanswered().unwrap_or_default();
    g.conn.silence.unanswered = match silent {
        Some(time) if time >= limit / LOOKS => unanswered + 1,
        _ => 0,
    };
    // The first look may come right after the octets.
    if g.conn.silence.unanswered <= LOOKS {
        watch(qp, &mut g);
        return;
    }
    tracing::debug!(qp = qp.num, "the peer has vanished");
    drive::broken(qp, &mut g, &mut after);
    qp.settle(&mut g, &mut after);
    drop(g);
    after.run(qp);
}
