//! Detects peers that have vanished: their host is gone, or their reset was lost, so no packet
//! reports the end.
//!
//! On an idle connection the kernel's keep-alive probes the peer ([`TcpStream::keep_alive`]), which
//! costs this process nothing. Keep-alive does not probe while data is unacknowledged: TCP then
//! retransmits for a quarter of an hour. So a timer of the queue pair checks four times within
//! [`Config::peer_timeout`] whether the peer answers anything. `TCP_USER_TIMEOUT` would need no
//! timer, but it also ends connections whose peer answers and does not read for a while, such as a
//! stopped process.
//!
//! Setting keep-alive takes four system calls, which a program that connects to thousands of peers
//! would notice. An accepted stream inherits it from its listener. Any other stream gets it at the
//! first check: the kernel would not probe before half of the time is over.
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
    /// It does not answer retransmissions.
    Silent,
    /// It answers, or nothing was sent that it would have to answer.
    Answers,
    /// TCP has not waited long enough to retransmit, so a peer that is out of reach looks like a
    /// slow one. It is known after this time without an acknowledgement.
    Unknown(Duration),
}

impl Socket {
    /// Returns whether the peer's TCP answers. `quiet` is the time since it last acknowledged
    /// something new.
    pub(crate) fn reach(&self, quiet: Duration) -> Reach {
        if matches!(self.stream.unanswered(), Ok(Some(_))) {
            return Reach::Silent;
        }
        let time_to_tell = self.stream.time_to_tell().unwrap_or_default();
        match time_to_tell.checked_sub(quiet) {
            Some(remaining) if !remaining.is_zero() => Reach::Unknown(time_to_tell),
            _ => Reach::Answers,
        }
    }
}

/// Checks within the time that a peer may be silent.
const CHECKS: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Liveness {
    timer_set: bool,
    /// The next check has to turn keep-alive on.
    keep_alive_due: bool,
    /// Checks in a row that have found no answer.
    unanswered: u32,
}

impl Liveness {
    /// Returns the state of a new stream whose peer may be silent for `limit`.
    pub(crate) fn of(stream: &TcpStream, limit: Option<Duration>) -> Self {
        let inherited = stream.inherited_keep_alive();
        // The listener's device may have another setting, which must not act until the first check.
        if inherited.is_some() && inherited != limit {
            keep_alive(stream, limit);
        }
        Self {
            keep_alive_due: limit.is_some() && inherited.is_none(),
            ..Self::default()
        }
    }

    /// Returns how many checks in a row have found no answer, after one more. `silent`: for how
    /// long the peer has not answered, if it owes an answer.
    fn unanswered_after(&self, silent: Option<Duration>, limit: Duration) -> u32 {
        match silent {
            Some(time) if time >= limit / CHECKS => self.unanswered + 1,
            _ => 0,
        }
    }
}

fn keep_alive(stream: &TcpStream, limit: Option<Duration>) {
    let set = stream.keep_alive(limit);
    debug_assert!(set.is_ok(), "{set:?}");
}

/// Sets the timer of the first check of a new stream, if the check has something to do. The engine
/// already watches the stream.
pub(crate) fn begin(qp: &QpInner, g: &mut QpState) {
    if g.link
        .open()
        .is_some_and(|open| open.liveness.keep_alive_due)
    {
        watch(qp, g);
    }
}

/// Makes sure that a check will follow, because something was sent.
#[inline]
pub(crate) fn watch(qp: &QpInner, g: &mut QpState) {
    if let Some(open) = g.link.open_mut().filter(|open| !open.liveness.timer_set) {
        set_timer(qp, open);
    }
}

#[cold]
fn set_timer(qp: &QpInner, open: &mut Open) {
    if let Some(limit) = qp.ctx.config.peer_timeout {
        open.liveness.timer_set = true;
        let Socket { engine, token, .. } = &*open.socket;
        engine.after_about(limit / CHECKS, *token, TIMER_LIVENESS);
    }
}

pub(crate) fn timer_expired(qp: &Arc<QpInner>) {
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
    // If nothing is in flight, no answer is due, and the next data starts a new count. A peer that
    // is known to be gone is not checked.
    if is_read_to_end || !stream.unacknowledged_bytes().is_ok_and(|n| n > 0) {
        return;
    }
    let silent = stream.unanswered().unwrap_or_default();
    open.liveness.unanswered = before.unanswered_after(silent, limit);
    // The first check may come right after the data, so it does not count.
    if open.liveness.unanswered <= CHECKS {
        watch(qp, &mut g);
        return;
    }
    tracing::debug!(qp = qp.num, "the peer has vanished");
    g.peer_vanished = true;
    drive::broken(qp, &mut g, &mut effects);
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
}

#[cfg(test)]
#[path = "liveness_tests.rs"]
mod tests;
