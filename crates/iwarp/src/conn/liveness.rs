//! Detects peers that have vanished: their host is down or unreachable, or their reset was lost, so
//! no packet reports the end.
//!
//! On an idle connection, the kernel's keep-alive probes the peer ([`TcpStream::keep_alive`]),
//! which costs this process nothing. Keep-alive does not probe while data is unacknowledged: TCP
//! then retransmits for a quarter of an hour. So while data is unacknowledged, a timer of the queue
//! pair checks four times within [`Config::peer_timeout`] whether the peer's TCP answers.
//! `TCP_USER_TIMEOUT` would need no timer, but it also ends a connection whose peer answers but
//! does not read for a while, such as a stopped process.
//!
//! Setting keep-alive takes four system calls, too many for a program that connects to thousands of
//! peers. An accepted stream inherits keep-alive from its listener. For other streams it is set at
//! the first check, which is early enough: the kernel sends its first probe after half of
//! [`Config::peer_timeout`].
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

/// Whether the peer's TCP is reachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The peer's TCP does not answer retransmissions.
    Silent,
    /// The peer's TCP answers, or no answer is due.
    Answers,
    /// TCP has not retransmitted yet, so it is unknown whether the peer is unreachable or slow.
    /// It is known when the peer has acknowledged nothing for the given time.
    Unknown(Duration),
}

impl Socket {
    /// Returns whether the peer's TCP answers. `quiet` is the time since it last acknowledged new
    /// data.
    pub(crate) fn reach(&self, quiet: Duration) -> Reach {
        if matches!(self.stream.unanswered(), Ok(Some(_))) {
            return Reach::Silent;
        }
        let detection_time = self.stream.detection_time().unwrap_or_default();
        match detection_time.checked_sub(quiet) {
            Some(remaining) if !remaining.is_zero() => Reach::Unknown(detection_time),
            _ => Reach::Answers,
        }
    }
}

const CHECKS_PER_TIMEOUT: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Liveness {
    timer_set: bool,
    /// The next check must set keep-alive.
    keep_alive_due: bool,
    unanswered_checks: u32,
}

impl Liveness {
    /// Returns the state for a new stream. `limit` is
    /// [`Config::peer_timeout`](crate::Config::peer_timeout).
    pub(crate) fn new(stream: &TcpStream, limit: Option<Duration>) -> Self {
        let inherited = stream.inherited_keep_alive();
        // The listener's device may have another setting. Replace it now: the first check would be
        // too late.
        if inherited.is_some() && inherited != limit {
            set_keep_alive(stream, limit);
        }
        Self {
            keep_alive_due: limit.is_some() && inherited.is_none(),
            ..Self::default()
        }
    }

    /// Returns the value of `unanswered_checks` after another check. `silent` is the time for which
    /// the peer has not answered, if an answer is due.
    fn unanswered_after(&self, silent: Option<Duration>, limit: Duration) -> u32 {
        match silent {
            Some(time) if time >= limit / CHECKS_PER_TIMEOUT => self.unanswered_checks + 1,
            _ => 0,
        }
    }
}

fn set_keep_alive(stream: &TcpStream, limit: Option<Duration>) {
    let set = stream.keep_alive(limit);
    debug_assert!(set.is_ok(), "{set:?}");
}

/// Sets the timer of the first check of a new stream, if that check must set keep-alive. Call it
/// after the stream was added to the engine.
pub(crate) fn begin(qp: &QpInner, g: &mut QpState) {
    if g.link
        .open()
        .is_some_and(|open| open.liveness.keep_alive_due)
    {
        watch(qp, g);
    }
}

/// Sets the timer of the next check, unless it is set already. Called after data was sent.
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
        engine.after_about(limit / CHECKS_PER_TIMEOUT, *token, TIMER_LIVENESS);
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
        set_keep_alive(stream, Some(limit));
    }
    // If all data is acknowledged, no answer is due, and the next data starts a new count. A peer
    // that is known to be gone is not checked.
    if is_read_to_end || !stream.unacknowledged_bytes().is_ok_and(|n| n > 0) {
        return;
    }
    let silent = stream.unanswered().unwrap_or_default();
    open.liveness.unanswered_checks = before.unanswered_after(silent, limit);
    // The first check may come right after the data, so one more check than `CHECKS_PER_TIMEOUT` is
    // needed.
    if open.liveness.unanswered_checks <= CHECKS_PER_TIMEOUT {
        watch(qp, &mut g);
        return;
    }
    g.peer_vanished = true;
    g.stream_errno = Some(libc::ETIMEDOUT);
    drive::handle_broken(qp, &mut g, &mut effects);
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
}

#[cfg(test)]
#[path = "liveness_tests.rs"]
mod tests;
