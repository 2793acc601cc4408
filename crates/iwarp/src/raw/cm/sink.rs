//! What becomes of events of an identifier's queue pair: the connection is established, or has ended.

use super::super::qp::{CmSink, QueuePair};
use super::id::{CmId, CmIdInner, Phase};
use super::{CmEventKind, overtaken, timewait};
use iwarp_rnic::qp::{Blame, Events, Fault};
use std::sync::Weak;

impl CmSink for CmIdInner {
    fn qp_event(&self, events: Events, fault: Option<Fault>) {
        let over = events.intersects(Events::DISCONNECTED | Events::FATAL);
        let (established, ended) = {
            let mut s = self.state.lock();
            match s.phase {
                Phase::Connecting(_) | Phase::Accepting if over => {
                    s.ended_early.get_or_insert(status_of(fault));
                    (false, None)
                }
                Phase::Connected(told) if over => {
                    s.phase = Phase::Disconnected;
                    s.seat = None;
                    (false, Some(told))
                }
                Phase::Connected(false) if events.contains(Events::ESTABLISHED) => {
                    s.phase = Phase::Connected(true);
                    if let Some((local, peer)) = s.qp.as_ref().and_then(QueuePair::addresses) {
                        s.local = Some(local);
                        s.peer = Some(peer);
                    }
                    (true, None)
                }
                _ => (false, None),
            }
        };
        let (kind, status) = match ended {
            None if established => (CmEventKind::Established, 0),
            None => return,
            // First message and end came together: the program has to see both.
            Some(false) if events.contains(Events::ESTABLISHED) => {
                self.push_own(CmEventKind::Established, 0);
                (CmEventKind::Disconnected, status_of(fault))
            }
            Some(false) => (CmEventKind::ConnectError, libc::ECONNRESET),
            Some(true) => (CmEventKind::Disconnected, status_of(fault)),
        };
        if kind != CmEventKind::Disconnected {
            self.push_own(kind, status);
        } else if !(self.has_unseen_success() && overtaken::begin(Weak::clone(&self.this), status))
        {
            self.disconnected(status);
        }
    }

    fn first_message_overdue(&self) {
        {
            let mut s = self.state.lock();
            if !matches!(s.phase, Phase::Connected(false)) {
                return;
            }
            s.phase = Phase::Disconnected;
            s.seat = None;
        }
        self.push_own(CmEventKind::Unreachable, libc::ETIMEDOUT);
    }
}

/// A disconnect has status zero unless the connection broke.
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
        self.put_after_the_end(CmEventKind::TimewaitExit, 0);
    }

    /// Gives the event of the connection's end.
    pub(super) fn disconnected(&self, status: i32) {
        self.put_after_the_end(CmEventKind::Disconnected, status);
        timewait::begin(Weak::clone(&self.this));
    }

    fn put_after_the_end(&self, kind: CmEventKind, status: i32) {
        let Some(id) = self.this.upgrade().map(|inner| CmId { inner }) else {
            return;
        };
        // Kept until the event is there, so that `destroy` either prevents it or finds it.
        let s = self.state.lock();
        if !matches!(s.phase, Phase::Disconnected) {
            return;
        }
        let channel = id.put(id.event(kind, status));
        drop(s);
        channel.wake();
    }

    /// Returns `true` if the peer has ended the connection and the program has not taken all completions of its messages. A stand-in's program has
    /// messages on other queue pairs, which nobody knows here, so it may always have some left.
    pub(super) fn has_unseen_success(&self) -> bool {
        let s = self.state.lock();
        let by_peer = !s.leaving;
        let is_stand_in = s.stand_in.is_some();
        let qp = s.qp.clone();
        drop(s);
        by_peer && (is_stand_in || qp.is_some_and(|qp| qp.has_unseen_success()))
    }

    fn push_own(&self, kind: CmEventKind, status: i32) {
        if let Some(inner) = self.this.upgrade() {
            CmId { inner }.emit(kind, status);
        }
    }
}
