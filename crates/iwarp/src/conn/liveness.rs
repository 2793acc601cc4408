//! Peers that vanish: their host is gone, or their reset was lost, and no packet tells that.
//!
//! The kernel's keep-alive probes a peer on a silent connection ([`TcpStream::keep_alive`]); it
//! costs this process nothing. It does not probe while octets wait for their acknowledgement: then
//! TCP sends those again, for a quarter of an hour, and the queue pair looks four times within
//! [`Config::peer_timeout`] whether anything is answered. `TCP_USER_TIMEOUT` would do the same
//! without a timer of ours, but it also ends connections whose peer answers and does not read for a
//! while, such as a stopped process.
//!
//! Keep-alive takes four system calls, which a program that connects to thousands of peers would
//! notice. An accepted stream has it from its listener. Any other stream gets it at the first look:
//! the kernel asks nothing before half of the time is over.
//!
//! [`TcpStream::keep_alive`]: crate::sys::stream::TcpStream::keep_alive
//! [`Config::peer_timeout`]: crate::Config::peer_timeout

use super::drive;
use super::effects::Effects;
use super::link::{Open, Socket};
use super::qp::{QpInner, QpState, TIMER_LIVENESS};
use crate::sys::stream::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// Whether the peer's TCP can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It does not answer what was sent again.
    Silent,
    /// It answers, or is not asked anything.
    Answers,
    /// TCP has not waited long enough to send anything again: a peer that is out of reach looks
    /// like one that takes its time. It is known after this time without an acknowledgement.
    Unknown(Duration),
}

impl Socket {
    /// Looks whether the peer's TCP answers. `quiet` is the time without an acknowledgement of
    /// anything new.
    pub(crate) fn reach(&self, quiet: Duration) -> Reach {
        if matches!(self.stream.unanswered(), Ok(Some(_))) {
            return Reach::Silent;
        }
        let time_to_tell = self.stream.time_to_tell().unwrap_or_default();
        match time_to_tell.checked_sub(quiet) {
            Some(left) if !left.is_zero() => Reach::Unknown(time_to_tell),
            _ => Reach::Answers,
        }
    }
}

/// Looks within the time that a peer may be silent.
const LOOKS: u32 = 4;

/// What a queue pair has seen of its peer's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Liveness {
    /// A timer for the next look is set.
    watched: bool,
    /// The next look has to turn keep-alive on.
    keep_alive_due: bool,
    /// Looks in a row that have found no answer.
    unanswered: u32,
}

impl Liveness {
    /// Starts watching a new stream, whose peer may be silent for `limit`.
    pub(crate) fn of(stream: &TcpStream, limit: Option<Duration>) -> Self {
        let inherited = stream.inherited_keep_alive();
        // The listener may belong to a device with another setting, which must not act until the
        // first look.
        if inherited.is_some() && inherited != limit {
            keep_alive(stream, limit);
        }
        Self {
            keep_alive_due: limit.is_some() && inherited.is_none(),
            ..Self::default()
        }
    }

    /// Returns how many looks in a row have found no answer after one more. The peer has been
    /// `silent` for so long, if it owes one.
    fn unanswered_after(&self, silent: Option<Duration>, limit: Duration) -> u32 {
        match silent {
            Some(time) if time >= limit / LOOKS => self.unanswered + 1,
            _ => 0,
        }
    }
}

fn keep_alive(stream: &TcpStream, limit: Option<Duration>) {
    let set = stream.keep_alive(limit);
    debug_assert!(set.is_ok(), "{set:?}");
}

/// The stream is watched by the engine: sets a timer for the first look if that has something to
/// do.
pub(crate) fn begin(qp: &QpInner, g: &mut QpState) {
    if g.link
        .open()
        .is_some_and(|open| open.liveness.keep_alive_due)
    {
        watch(qp, g);
    }
}

/// Something was sent: a later look checks whether it is answered.
#[inline]
pub(crate) fn watch(qp: &QpInner, g: &mut QpState) {
    if let Some(open) = g.link.open_mut().filter(|open| !open.liveness.watched) {
        set_timer(qp, open);
    }
}

#[cold]
fn set_timer(qp: &QpInner, open: &mut Open) {
    if let Some(limit) = qp.ctx.config.peer_timeout {
        open.liveness.watched = true;
        let Socket { engine, token, .. } = &*open.socket;
        engine.after_about(limit / LOOKS, *token, TIMER_LIVENESS);
    }
}

/// It is time for a look.
pub(crate) fn timer(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    let is_read_to_end = g.link.is_read_to_end();
    let Some(open) = g.link.open_mut() else {
        return;
    };
    let before = std::mem::take(&mut open.liveness);
    let Some(limit) = qp.ctx.config.peer_timeout else {
        return;
    };
    let stream = &open.socket.stream;
    if before.keep_alive_due {
        keep_alive(stream, Some(limit));
    }
    // If no octets are on their way, no answer is due, and the next ones start anew. Nobody waits
    // for a peer that is gone.
    if is_read_to_end || !stream.unacknowledged_bytes().is_ok_and(|n| n > 0) {
        return;
    }
    let silent = stream.unanswered().unwrap_or_default();
    open.liveness.unanswered = before.unanswered_after(silent, limit);
    // The first look may come right after the octets.
    if open.liveness.unanswered <= LOOKS {
        watch(qp, &mut g);
        return;
    }
    tracing::debug!(qp = qp.num, "the peer has vanished");
    drive::broken(qp, &mut g, &mut effects);
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
}

#[cfg(test)]
#[path = "liveness_tests.rs"]
mod tests;
