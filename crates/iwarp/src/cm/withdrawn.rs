//! Requests whose initiator closes the connection before the program has answered. InfiniBand's
//! connection manager notifies the program with the event Rejected. iWARP's connection manager does
//! not, so the program gets an error when it accepts.

use super::CmEventKind;
use super::id::{CmId, CmIdInner};
use super::phase::Phase;
use crate::engine::{Engine, Source};
use crate::sys::poller::Interest;
use std::sync::{Arc, Weak};

/// A watch of the stream of an unanswered request.
pub(super) struct Watch {
    engine: Arc<Engine>,
    token: u64,
}

impl Watch {
    /// Ends the watch, before the stream is used for something else.
    pub(super) fn end(self, stream: &crate::sys::stream::TcpStream) {
        self.engine.remove(stream, self.token);
    }
}

struct Requester {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
}

impl CmId {
    /// Watches the initiator of the identifier's request. If the initiator closes the connection,
    /// the event is [`CmEventKind::Rejected`] with `ECONNABORTED`.
    pub(super) fn watch_requester(&self, engine: &Arc<Engine>) {
        let mut s = self.inner.state.lock();
        let Phase::Requested(requested) = &mut s.phase else {
            return;
        };
        let token = engine.token();
        let requester = Arc::new(Requester {
            id: Arc::downgrade(&self.inner),
            engine: Arc::clone(engine),
            token,
        });
        let stream = &requested.starting.stream;
        let watched = engine.add(stream, token, Interest::READ, requester);
        // Without a watch the program gets an error when it accepts, as on iWARP.
        requested.watch = watched.is_ok().then(|| Watch {
            engine: Arc::clone(engine),
            token,
        });
    }
}

impl Source for Requester {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        let Some(id) = self.id.upgrade().map(|inner| CmId { inner }) else {
            return true;
        };
        let mut s = id.inner.state.lock();
        let Phase::Requested(requested) = &s.phase else {
            return true;
        };
        let stream = &requested.starting.stream;
        if !stream.peer_closed() {
            // The initiator has sent octets before the reply, which it should not. Stop watching;
            // the octets are read after the program has answered.
            let _ = self.engine.modify(stream, self.token, Interest::NONE);
            return true;
        }
        let phase = std::mem::replace(&mut s.phase, Phase::Disconnected);
        s.counted = None;
        id.give(s, id.event(CmEventKind::Rejected, libc::ECONNABORTED));
        if let Phase::Requested(requested) = phase {
            self.engine.remove(&requested.starting.stream, self.token);
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {}
}
