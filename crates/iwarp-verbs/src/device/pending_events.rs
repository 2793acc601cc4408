//! Pending asynchronous events. The room `events` delivers them. Before an object is destroyed, its
//! pending events are discarded here.

use iwarp::runtime::{
    AsyncEventKind, CompletionQueue, Context, ProcessLock, QueuePair, SharedReceiveQueue,
    UdQueuePair,
};

/// Held while an event is taken and counted, so that destroying its object sees both changes or
/// neither.
pub(crate) static DELIVERY: ProcessLock<()> = ProcessLock::new("verbs::events::DELIVERY", ());

pub(crate) trait Subject {
    fn is_subject_of(&self, kind: &AsyncEventKind) -> bool;
    fn clear_user_data(&self);
}

impl Subject for CompletionQueue {
    fn is_subject_of(&self, kind: &AsyncEventKind) -> bool {
        matches!(kind, AsyncEventKind::CqError(cq) if cq.is_same(self))
    }

    fn clear_user_data(&self) {
        self.set_user_data(0);
    }
}

impl Subject for SharedReceiveQueue {
    fn is_subject_of(&self, kind: &AsyncEventKind) -> bool {
        matches!(kind, AsyncEventKind::SrqLimitReached(srq) if srq.is_same(self))
    }

    fn clear_user_data(&self) {
        self.set_user_data(0);
    }
}

impl Subject for QueuePair {
    fn is_subject_of(&self, kind: &AsyncEventKind) -> bool {
        kind.queue_pair().is_some_and(|qp| self.is_subject(qp))
    }

    fn clear_user_data(&self) {
        self.set_user_data(0);
    }
}

impl Subject for UdQueuePair {
    fn is_subject_of(&self, kind: &AsyncEventKind) -> bool {
        kind.queue_pair().is_some_and(|qp| self.is_subject(qp))
    }

    fn clear_user_data(&self) {
        self.set_user_data(0);
    }
}

/// Discards an object's pending events. No event about it is delivered from now on.
pub(crate) fn discard(ctx: &Context, subject: impl Subject) {
    let _delivery = DELIVERY.lock();
    subject.clear_user_data();
    ctx.async_events()
        .retain(|event| !subject.is_subject_of(&event.kind));
}

/// Redirects a queue pair's events to another public object.
pub(crate) fn redirect_events(qp: &QueuePair, object: u64) {
    let _delivery = DELIVERY.lock();
    qp.set_user_data(object);
}
