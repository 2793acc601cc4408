//! Pending asynchronous events. The room `events` delivers them; objects withdraw theirs here
//! before they are destroyed.

use iwarp::runtime::{
    AsyncEventKind, CompletionQueue, Context, ProcessLock, QueuePair, SharedReceiveQueue,
    UdQueuePair,
};

/// Held while an event is taken and counted, so that destroying its object sees both or neither.
pub(crate) static DELIVERY: ProcessLock<()> = ProcessLock::new("verbs::events::DELIVERY", ());

pub(crate) trait Subject {
    fn is(&self, kind: &AsyncEventKind) -> bool;
    fn disown(&self);
}

impl Subject for CompletionQueue {
    fn is(&self, kind: &AsyncEventKind) -> bool {
        matches!(kind, AsyncEventKind::CqError(cq) if cq.is_same(self))
    }

    fn disown(&self) {
        self.set_user_data(0);
    }
}

impl Subject for SharedReceiveQueue {
    fn is(&self, kind: &AsyncEventKind) -> bool {
        matches!(kind, AsyncEventKind::SrqLimitReached(srq) if srq.is_same(self))
    }

    fn disown(&self) {
        self.set_user_data(0);
    }
}

impl Subject for QueuePair {
    fn is(&self, kind: &AsyncEventKind) -> bool {
        kind.queue_pair().is_some_and(|qp| self.is_subject(qp))
    }

    fn disown(&self) {
        self.set_user_data(0);
    }
}

impl Subject for UdQueuePair {
    fn is(&self, kind: &AsyncEventKind) -> bool {
        kind.queue_pair().is_some_and(|qp| self.is_subject(qp))
    }

    fn disown(&self) {
        self.set_user_data(0);
    }
}

/// Discards an object's pending events. No event about it is delivered from now on.
pub(crate) fn forget(ctx: &Context, subject: impl Subject) {
    let _delivery = DELIVERY.lock();
    subject.disown();
    ctx.async_events().retain(|event| !subject.is(&event.kind));
}

/// Redirects a queue pair's events to another public object.
pub(crate) fn hand_over(qp: &QueuePair, object: u64) {
    let _delivery = DELIVERY.lock();
    qp.set_user_data(object);
}
