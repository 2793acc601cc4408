//! Asynchronous events.

use super::{CompletionQueue, SharedReceiveQueue};
use crate::objects::events::AsyncEventKind;
use crate::objects::events::PortEvent;

/// An asynchronous event of a device (`ibv_get_async_event(3)`). Queue pairs are named by their numbers ([`QueuePair::qp_num`](super::QueuePair::qp_num)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A completion queue has overflowed.
    CqError(CompletionQueue),
    /// A queue pair has failed.
    QpFatal(u32),
    /// A peer broke the protocol.
    QpRequestError(u32),
    /// A peer's access to memory was refused.
    QpAccessError(u32),
    /// A responder has received the initiator's first message.
    CommunicationEstablished(u32),
    /// The send queue is drained in state SQD.
    SqDrained(u32),
    /// A queue pair in error has given back its last receive to the shared receive queue.
    LastWqeReached(u32),
    /// Something happened to the port, or to the device.
    Port(PortEvent),
    /// Fewer receives than the limit wait in a shared receive queue.
    SrqLimitReached(SharedReceiveQueue),
}

impl AsyncEvent {
    /// Returns the event, if it is about an object of this layer.
    pub(crate) fn of(kind: AsyncEventKind) -> Option<Self> {
        Some(match kind {
            AsyncEventKind::CqError(cq) => Self::CqError(CompletionQueue(cq)),
            AsyncEventKind::QpFatal(qp) => Self::QpFatal(qp.num()),
            AsyncEventKind::QpRequestError(qp) => Self::QpRequestError(qp.num()),
            AsyncEventKind::QpAccessError(qp) => Self::QpAccessError(qp.num()),
            AsyncEventKind::CommunicationEstablished(qp) => {
                Self::CommunicationEstablished(qp.num())
            }
            AsyncEventKind::SqDrained(qp) => Self::SqDrained(qp.num()),
            AsyncEventKind::LastWqeReached(qp) => Self::LastWqeReached(qp.num()),
            AsyncEventKind::SrqLimitReached(srq) => Self::SrqLimitReached(SharedReceiveQueue(srq)),
            AsyncEventKind::Port(event) => Self::Port(event),
            AsyncEventKind::Datagram(..) => return None,
        })
    }
}
