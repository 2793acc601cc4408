//! The interface through which devices, completion queues and shared receive queues use queue
//! pairs. It is a trait, because queue pairs belong to the rooms above this one.

use super::cq::CqInner;
use iwarp_rnic::counters::Counters;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PollOutcome {
    /// A complete message has arrived since the program's last request.
    pub(crate) answered: bool,
    /// Another thread is reading or writing the socket.
    pub(crate) driven_elsewhere: bool,
    /// Bytes sent and received since the last poll.
    pub(crate) moved: u64,
}

/// A queue pair of any kind, as a member of a device, of completion queues and of shared receive
/// queues.
///
/// Methods that take `Arc<Self>` are called without locks, and may call back into the calling
/// object.
pub(crate) trait AnyQp: Any + Send + Sync {
    fn num(&self) -> u32;

    fn user_data(&self) -> u64;

    /// Reads and writes the sockets, for a thread that polls a completion queue.
    fn poll_sockets(self: Arc<Self>) -> PollOutcome;

    /// Puts the queue pair into the error state, because one of its completion queues has lost
    /// completions.
    fn fail(self: Arc<Self>);

    /// Returns the queue pair's counters. Without `wait`, returns `None` if its state is locked.
    fn counters(&self, wait: bool) -> Option<Counters>;

    /// Retries a received Send that is held because no receive was posted. Called when the shared
    /// receive queue has got a receive, or was destroyed.
    fn resume_receiving(self: Arc<Self>) {}

    fn send_deferred(self: Arc<Self>) {}

    /// Returns the flag that is set while the queue pair is on `cq`'s list of deferred queue pairs;
    /// `None` if it never defers sending.
    fn deferred_mark(&self, _cq: &CqInner) -> Option<&AtomicBool> {
        None
    }

    /// Retries operations that wait for accesses to memory to end.
    fn retry_memory(self: Arc<Self>) {}
}

/// The queue pair that an asynchronous event is about.
#[derive(Clone)]
pub struct EventQp(pub(crate) Arc<dyn AnyQp>);

impl EventQp {
    /// Returns the queue pair's number.
    pub fn num(&self) -> u32 {
        self.0.num()
    }

    /// Returns the program's own value for the queue pair, 0 if none was set.
    pub fn user_data(&self) -> u64 {
        self.0.user_data()
    }

    pub(crate) fn downcast<M: AnyQp>(&self) -> Option<Arc<M>> {
        downcast(Arc::clone(&self.0))
    }

    pub(crate) fn is<M: AnyQp>(&self, qp: &Arc<M>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(qp))
    }
}

impl fmt::Debug for EventQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EventQp").field(&self.num()).finish()
    }
}

pub(crate) fn downcast<M: AnyQp>(member: Arc<dyn AnyQp>) -> Option<Arc<M>> {
    let any: Arc<dyn Any + Send + Sync> = member;
    any.downcast().ok()
}
