//! The implementation of [`AnyQp`] for stream queue pairs, and the calls of a device that create
//! and find queue pairs.

use super::attributes::QpAttributes;
use super::qp::{QpInner, QpState, QueuePair};
use crate::error::Result;
use crate::objects::any_qp::{AnyQp, EventQp, PollOutcome, downcast};
use crate::objects::context::{Context, ContextInner};
use crate::objects::cq::CqInner;
use crate::objects::slots::Slots;
use crate::sys::guarded;
use iwarp_rnic::counters::Counters;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

impl AnyQp for QpInner {
    fn num(&self) -> u32 {
        self.num
    }

    fn user_data(&self) -> u64 {
        self.user.load(Ordering::Acquire)
    }

    fn poll_sockets(self: Arc<Self>) -> PollOutcome {
        // This also writes pending data.
        self.drive_rx();
        PollOutcome {
            answered: self.peer_answers.is_answered(),
            driven_elsewhere: self.is_driven_elsewhere(),
            moved: self.bytes_transferred.take(),
        }
    }

    fn fail(self: Arc<Self>) {
        self.with_machine(|machine, host| machine.abort(host));
    }

    fn counters(&self, wait: bool) -> Option<Counters> {
        let state = match wait {
            true => Some(self.state.lock()),
            false => self.state.try_lock(),
        };
        Some(*state?.machine.counters())
    }

    fn resume_receiving(self: Arc<Self>) {
        self.drive_rx();
    }

    fn send_deferred(self: Arc<Self>) {
        self.drive_tx();
    }

    fn deferred_mark(&self, cq: &CqInner) -> Option<&AtomicBool> {
        let [send, recv] = &self.deferred;
        Some(match std::ptr::eq(&*self.send_cq.inner, cq) {
            true => send,
            false => recv,
        })
    }

    fn retry_memory(self: Arc<Self>) {
        {
            let mut g = self.state.lock();
            if !g.machine.waits_for_memory() {
                return;
            }
            g.machine.retry_memory();
        }
        self.drive_tx();
        self.drive_rx();
    }
}

impl QueuePair {
    /// Returns `true` if an asynchronous event is about this queue pair.
    pub fn is_subject(&self, event_qp: &EventQp) -> bool {
        event_qp.is(&self.inner)
    }

    /// Returns the queue pair that an event is about; `None` if it is a datagram queue pair.
    pub fn of_event(qp: &EventQp) -> Option<Self> {
        Some(Self {
            inner: qp.downcast()?,
        })
    }
}

impl Context {
    /// Creates a queue pair (`ibv_create_qp(3)`).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if an attribute is out of
    /// range, and [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the queue pair cannot be
    /// allocated.
    pub fn create_qp(&self, attributes: &QpAttributes) -> Result<QueuePair> {
        guarded::keep_installed();
        QueuePair::create(&self.inner, attributes)
    }

    /// Returns the queue pair with this number; `None` if there is none, or if it is a datagram
    /// queue pair.
    pub fn queue_pair(&self, qp_num: u32) -> Option<QueuePair> {
        let inner = downcast(self.inner.member(qp_num)?)?;
        Some(QueuePair { inner })
    }
}

impl ContextInner {
    /// Returns the queue pair with this number. In a forked child, returns `None` if the list is
    /// locked.
    pub(crate) fn qp_if_free(&self, num: u32) -> Option<Arc<QpInner>> {
        downcast(self.try_member(num)?)
    }
}

impl QpState {
    /// Releases slots whose completions were polled, unless the send queue has room for `n`
    /// requests.
    #[inline]
    pub(crate) fn make_send_room(&mut self, slots: &Slots, n: usize) {
        if !self.machine.has_send_room(n) {
            let freed = slots.free_sends(&mut self.seen_slots);
            self.machine.release_sends(freed);
        }
    }

    /// Releases slots whose completions were polled, unless the receive queue has room for `n`
    /// requests.
    #[inline]
    pub(crate) fn make_receive_room(&mut self, slots: &Slots, n: usize) {
        if !self.machine.has_receive_room(n) {
            let freed = slots.free_receives(&mut self.seen_slots);
            self.machine.release_receives(freed);
        }
    }

    /// Called after a reset, which has dropped the completions.
    pub(crate) fn release_all_slots(&mut self, slots: &Slots) {
        self.seen_slots = slots.all_free(self.machine.send_position());
    }
}
