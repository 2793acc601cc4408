//! Events of an identifier: how they are built, and added to its channel.

use super::id::{CmId, IdState};
use super::phase::Phase;
use super::{CmEvent, CmEventChannel, CmEventKind};
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::qp::QueuePair;
use crate::error::{Error, Result};
use parking_lot::MutexGuard;
use std::sync::Arc;

/// The part of the peer's reply that the program gets.
#[derive(Debug, Clone, Default)]
pub(super) struct Reply {
    pub(super) private_data: Vec<u8>,
    pub(super) infiniband: Option<InfinibandParameters>,
}

impl CmId {
    /// Moves the identifier and its pending events to another channel (`rdma_migrate_id(3)`).
    pub fn migrate(&self, channel: &CmEventChannel) {
        let old = std::mem::replace(&mut *self.inner.channel.lock(), Arc::clone(channel));
        if Arc::ptr_eq(&old, channel) {
            return;
        }
        let mut moved = Vec::new();
        old.retain(|event| {
            let mine = event.concerns(self);
            if mine {
                moved.push(event.clone());
            }
            !mine
        });
        for event in moved {
            channel.push(event);
        }
    }

    /// Adds an event to the channel (`rdma_write_cm_event(3)`), for example to wake a thread that
    /// waits for events. `status` becomes the event's status.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: programs cannot write events of this kind, or the identifier was
    /// destroyed.
    pub fn write_event(&self, kind: CmEventKind, status: i32) -> Result<()> {
        use CmEventKind::{AddrinfoError, AddrinfoResolved, User};
        if !matches!(kind, User(_) | AddrinfoResolved | AddrinfoError) {
            return Err(Error::InvalidArgument(
                "programs can write only User, AddrinfoResolved and AddrinfoError events",
            ));
        }
        if matches!(self.inner.state.lock().phase, Phase::Destroyed) {
            return Err(Error::InvalidArgument("the identifier was destroyed"));
        }
        self.emit(kind, status);
        Ok(())
    }

    pub(super) fn emit(&self, kind: CmEventKind, status: i32) {
        self.push(self.event(kind, status));
    }

    pub(crate) fn event(&self, kind: CmEventKind, status: i32) -> CmEvent {
        CmEvent {
            kind,
            status,
            id: self.clone(),
            listener: None,
            private_data: Vec::new(),
            replied: false,
            responder_resources: None,
            initiator_depth: None,
            xrc: None,
            datagrams: None,
            service_status: 0,
            infiniband: None,
            _untaken: None,
        }
    }

    /// Returns the event Established, with the negotiated parameters.
    pub(super) fn established_event(&self, s: &IdState, reply: Reply) -> CmEvent {
        let (outbound, inbound) = s.depths.unzip();
        CmEvent {
            private_data: reply.private_data,
            infiniband: reply.infiniband,
            responder_resources: inbound,
            initiator_depth: outbound,
            ..self.event(CmEventKind::Established, 0)
        }
    }

    /// Adds an event to the channel and wakes its tasks. The caller holds no lock.
    pub(super) fn push(&self, event: CmEvent) {
        self.put(event).wake();
    }

    /// Adds an event to the channel. Returns the channel. The caller has to wake its tasks after
    /// releasing all locks.
    #[must_use = "the channel's tasks have to be woken"]
    pub(super) fn put(&self, event: CmEvent) -> CmEventChannel {
        // The lock is held until the event is in the channel, so that `migrate` does not miss it.
        let channel = self.inner.channel.lock();
        channel.put(event);
        Arc::clone(&channel)
    }

    /// Adds the event of a change that was made under the lock `state`, and then releases the lock.
    /// Therefore the events have the order of the changes, and [`destroy`](Self::destroy) either
    /// prevents the event or finds it in the channel.
    pub(super) fn give(&self, state: MutexGuard<'_, IdState>, event: CmEvent) {
        let channel = self.put(event);
        drop(state);
        channel.wake();
    }

    /// Records that the connection is up. Returns `false` if the identifier was destroyed.
    pub(super) fn established(&self, reply: Reply) -> bool {
        let mut s = self.inner.state.lock();
        let ended = s.ended_early.take();
        match (&s.phase, ended) {
            (Phase::Connecting(_) | Phase::Accepting, None) => s.phase = Phase::Connected(true),
            (Phase::Connecting(_) | Phase::Accepting, Some(_)) => s.disconnected(),
            (Phase::Destroyed, _) => return false,
            // The peer's first message has been handled already.
            _ => return true,
        }
        if let Some((local, peer)) = s.qp.as_ref().and_then(QueuePair::addresses) {
            s.local = Some(local);
            // Keep the program's address. With a port mapper the stream's peer has another.
            let named = s.peer.filter(|named| !named.ip().is_unspecified());
            s.peer = named.or(Some(peer));
        }
        let event = self.established_event(&s, reply);
        self.give(s, event);
        if let Some(status) = ended {
            self.inner.disconnected(status);
        }
        true
    }

    /// Handles an attempt that has failed. `refusal` is the private data of the peer's rejection,
    /// if there is one.
    pub(super) fn failed(&self, kind: CmEventKind, status: i32, refusal: Option<Vec<u8>>) {
        let mut s = self.inner.state.lock();
        if !matches!(s.phase, Phase::Connecting(_)) {
            return;
        }
        s.phase = Phase::Failed;
        let event = CmEvent {
            replied: refusal.is_some(),
            private_data: refusal.unwrap_or_default(),
            ..self.event(kind, status)
        };
        self.give(s, event);
    }
}

impl CmEvent {
    /// Returns `true` if `id` is the identifier of the event, or the listener of its request.
    pub(super) fn concerns(&self, id: &CmId) -> bool {
        self.id.is_same(id) || self.listener.as_ref().is_some_and(|l| l.is_same(id))
    }
}
