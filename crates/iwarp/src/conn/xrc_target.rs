//! The interface to the target of an extended reliable connection (XRC). The peer chooses the
//! shared receive queue from which a message takes its receive.

use super::effects::Effects;
use super::qp::QpInner;
use crate::objects::cq::CompletionQueue;
use iwarp_rnic::Cqe;
use iwarp_rnic::receive_queue::TakenRecv;
use std::any::Any;
use std::sync::Arc;

/// The receives of a target. Implemented by the room `xrc`.
pub(crate) trait XrcTarget: Any + Send + Sync {
    /// Selects the queue `number` for the next receives, and returns its protection domain; `None`
    /// if there is no such queue.
    fn select(&self, number: u32) -> Option<u32>;

    fn take(&self, taken: &mut TakenRecv, effects: &mut Effects) -> bool;

    /// Registers a queue pair that holds a Send until a receive is posted. Returns `false` if the
    /// Send can be retried now.
    fn wait(&self, qp: &Arc<QpInner>) -> bool;

    fn complete(&self, cqe: Cqe, effects: &mut Effects);

    /// Raises pending events. Called without locks. Returns the completion queues that have just
    /// overflowed.
    fn raise_due(&self, qp: &Arc<QpInner>) -> Vec<CompletionQueue>;

    /// Returns the protection domain for accesses to memory before the peer has selected a queue.
    fn default_pd(&self) -> u32;

    /// Removes a destroyed queue pair, so that polls no longer drive it.
    fn forget(&self, qp: &Arc<QpInner>);
}
