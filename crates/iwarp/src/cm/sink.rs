//! Events of an identifier's queue pair: the connection is established, or has ended.

use super::id::{CmId, CmIdInner, IdState};
use super::notify::Reply;
use super::phase::Phase;
use super::{CmEventKind, overtaken, timewait};
use crate::conn::qp::{CmSink, QueuePair};
use iwarp_rnic::qp::{Blame, Events, Fault};
use parking_lot::MutexGuard;
use std::sync::Weak;

impl CmSink for CmIdInner {
    fn qp_event(&self, events: Events, fault: Option<Fault>) {
        let over = events.intersects(Events::DISCONNECTED | Events::FATAL);
        let status = status_of(fault);
        let mut s = self.state.lock();
        let ended = match s.phase {
            Phase::Connecting(_) | Phase::Accepting if over => {
                s.ended_early.get_or_insert(status);
                false
            }
            Phase::Connected(true) if over => {
                s.disconnected();
                drop(s);
                true
            }
            Phase::Connected(false) if events.contains(Events::ESTABLISHED) => {
                s.established();
                // The first message and the end may be reported together. The program gets both
                // events.
                if over {
                    s.disconnected();
                }
                if let Some(id) = self.this.upgrade().map(|inner| CmId { inner }) {
                    let event = id.established_event(&s, Reply::default());
                    id.give(s, event);
                }
                over
            }
            Phase::Connected(false) if over => {
                s.disconnected();
                self.notify(s, CmEventKind::ConnectError, libc::ECONNRESET);
                false
            }
            _ => false,
        };
        if ended
            && !(self.has_unseen_success() && overtaken::begin(Weak::clone(&self.this), status))
        {
            self.disconnected(status);
        }
    }

    fn first_message_overdue(&self) {
        let mut s = self.state.lock();
        if matches!(s.phase, Phase::Connected(false)) {
            s.disconnected();
            self.notify(s, CmEventKind::Unreachable, libc::ETIMEDOUT);
        }
    }
}

/// Returns the status of the event Disconnected: `ECONNRESET` if the connection broke, else zero.
fn status_of(fault: Option<Fault>) -> i32 {
    match fault {
        Some(Fault {
            blame: Blame::Transport,
            ..
        }) => libc::ECONNRESET,
        _ => 0,
    }
}

impl CmIdInner {
    pub(super) fn timewait_over(&self) {
        self.notify_if_disconnected(CmEventKind::TimewaitExit, 0);
    }

    /// Adds the event Disconnected.
    pub(super) fn disconnected(&self, status: i32) {
        self.notify_if_disconnected(CmEventKind::Disconnected, status);
        timewait::begin(Weak::clone(&self.this));
    }

    fn notify_if_disconnected(&self, kind: CmEventKind, status: i32) {
        let s = self.state.lock();
        if matches!(s.phase, Phase::Disconnected) {
            self.notify(s, kind, status);
        }
    }

    /// Returns `true` if the peer has ended the connection and the program may not have polled all
    /// completions of the peer's messages. With a placeholder queue pair the messages use other
    /// queue pairs, which are unknown here, so the result depends only on who has ended the
    /// connection.
    pub(super) fn has_unseen_success(&self) -> bool {
        let s = self.state.lock();
        let by_peer = !s.leaving;
        let has_placeholder = s.placeholder_qp.is_some();
        let qp = s.qp.clone();
        drop(s);
        by_peer && (has_placeholder || qp.is_some_and(|qp| qp.has_unseen_success()))
    }

    /// Adds an event with [`CmId::give`].
    pub(super) fn notify(&self, state: MutexGuard<'_, IdState>, kind: CmEventKind, status: i32) {
        if let Some(id) = self.this.upgrade().map(|inner| CmId { inner }) {
            id.give(state, id.event(kind, status));
        }
    }
}

impl IdState {
    /// Records that the peer's first message has arrived.
    fn established(&mut self) {
        self.phase = Phase::Connected(true);
        if let Some((local, peer)) = self.qp.as_ref().and_then(QueuePair::addresses) {
            self.local = Some(local);
            self.peer = Some(peer);
        }
    }
}
