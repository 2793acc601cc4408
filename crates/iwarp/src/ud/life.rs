//! State changes of a datagram queue pair, the completions that they write, and destruction.

use super::{UdEffects, UdInner, UdQueuePair, UdState};
use crate::conn::effects;
use crate::objects::any_qp::{AnyQp, EventQp, PollOutcome};
use crate::objects::events::AsyncEventKind;
use crate::objects::events::UdEvent;
use iwarp_rnic::counters::Counters;
use iwarp_rnic::qp::State;
use iwarp_rnic::{Cqe, WcOpcode, WcStatus};
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Number of completions after which a flush lets other threads take the queue pair's lock.
const FLUSH_STEP: usize = 1024;

impl UdInner {
    pub(super) fn change_state(
        &self,
        g: &mut MutexGuard<'_, UdState>,
        to: State,
        effects: &mut UdEffects,
    ) {
        let before = std::mem::replace(&mut g.state, to);
        match to {
            State::Reset => {
                g.sends.clear();
                g.rq.clear();
                g.seen.clear();
                g.epoch += 1;
                g.blocked_since = None;
            }
            State::Error => {
                if before != State::Error && self.srq.is_some() {
                    effects.events.push(UdEvent::LastWqeReached);
                }
                self.flush(g, effects);
            }
            State::Sqd if before != State::Sqd && g.in_flight == 0 => {
                effects.events.push(UdEvent::SqDrained);
            }
            _ => {}
        }
    }

    /// Handles a local error of the oldest request. The queue pair enters SQE, in which it still
    /// receives.
    pub(super) fn fail_send(
        &self,
        g: &mut MutexGuard<'_, UdState>,
        status: WcStatus,
        effects: &mut UdEffects,
    ) {
        if let Some(wr) = g.sends.pop() {
            self.complete_send(g, wr.wr_id, status, effects);
        }
        g.state = State::Sqe;
        self.flush_sends(g, effects);
    }

    /// Flushes all requests: first the send queue, then the receive queue.
    pub(super) fn flush(&self, g: &mut MutexGuard<'_, UdState>, effects: &mut UdEffects) {
        self.flush_sends(g, effects);
        loop {
            for _ in 0..FLUSH_STEP {
                let Some(wr_id) = g.rq.flush_one() else {
                    return;
                };
                self.complete_receive(
                    g,
                    completion(wr_id, WcStatus::Flushed, WcOpcode::Recv),
                    effects,
                );
            }
            MutexGuard::bump(g);
        }
    }

    pub(super) fn flush_sends(&self, g: &mut MutexGuard<'_, UdState>, effects: &mut UdEffects) {
        g.epoch += 1;
        g.blocked_since = None;
        loop {
            for _ in 0..FLUSH_STEP {
                let Some(wr) = g.sends.pop() else { return };
                self.complete_send(g, wr.wr_id, WcStatus::Flushed, effects);
            }
            MutexGuard::bump(g);
        }
    }

    pub(super) fn complete_send(
        &self,
        g: &mut UdState,
        wr_id: u64,
        status: WcStatus,
        effects: &mut UdEffects,
    ) {
        g.counters.completions += 1;
        let mut cqe = Cqe {
            qp_num: self.num,
            position: g.sends.position(),
            ..completion(wr_id, status, WcOpcode::Send)
        };
        self.slots.sent(&mut cqe);
        let cq = &self.send_cq.inner;
        cq.push(&mut cq.ring.lock(), cqe, &mut effects.send);
    }

    pub(super) fn complete_receive(&self, g: &mut UdState, cqe: Cqe, effects: &mut UdEffects) {
        g.counters.completions += 1;
        let mut cqe = Cqe {
            qp_num: self.num,
            ..cqe
        };
        self.slots.received(&mut cqe);
        let cq = &self.recv_cq.inner;
        cq.push(&mut cq.ring.lock(), cqe, &mut effects.recv);
    }

    /// Raises events and wakes waiting threads. The caller holds no lock.
    pub(super) fn apply_effects(self: &Arc<Self>, effects: UdEffects) {
        if !effects.recv.is_nothing() || !effects.send.is_nothing() {
            let mut overflow = self.send_cq.inner.raise_due(effects.send);
            overflow |= self.recv_cq.inner.raise_due(effects.recv);
            if let (true, Some(srq)) = (effects.recv.srq_limit, &self.srq) {
                srq.inner.raise_limit_event();
            }
            if overflow {
                effects::overflowed([&self.send_cq, &self.recv_cq]);
            }
        }
        for event in effects.events {
            let qp = EventQp(Arc::clone(self) as _);
            self.ctx.raise(AsyncEventKind::Datagram(qp, event));
        }
        if self.is_destroyed() {
            self.forget_events();
        }
    }

    /// Fails the queue pair, because one of its completion queues has overflowed and has lost
    /// completions.
    fn enter_error(self: &Arc<Self>) {
        let mut effects = UdEffects::default();
        {
            let mut g = self.state.lock();
            if g.state == State::Error || self.is_destroyed() {
                return;
            }
            effects.events.push(UdEvent::Fatal);
            self.change_state(&mut g, State::Error, &mut effects);
        }
        self.apply_effects(effects);
    }

    pub(super) fn destroy(self: &Arc<Self>) {
        if self.origin.is_foreign() {
            return;
        }
        {
            let mut g = self.state.lock();
            if self.destroyed.swap(true, Ordering::AcqRel) {
                return;
            }
            self.change_state(&mut g, State::Reset, &mut UdEffects::default());
        }
        self.leave();
        for cq in [&self.send_cq, &self.recv_cq] {
            cq.inner.datagrams.detach(self);
            cq.inner.count_members();
        }
        self.send_cq.inner.purge(self.num);
        self.recv_cq.inner.purge(self.num);
        self.slots.close(&self.send_cq, &self.recv_cq);
        self.forget_events();
    }

    fn leave(&self) {
        self.groups.leave_all(&self.engine);
        for local in self.locals.all().iter() {
            self.engine.remove(&local.socket, local.token);
        }
        self.engine.forget(self.timer);
        let counters = self.state.lock().counters;
        self.ctx.remove_ud(self.num, &counters);
    }

    /// Drops pending asynchronous events of the queue pair. They would keep the queue pair, and
    /// with it the device, forever.
    fn forget_events(self: &Arc<Self>) {
        self.ctx.async_events.retain(|event| {
            let qp = event.kind.queue_pair();
            qp.is_none_or(|qp| !qp.is(self))
        });
    }
}

impl AnyQp for UdInner {
    fn num(&self) -> u32 {
        self.num
    }

    fn user_data(&self) -> u64 {
        self.user.load(Ordering::Acquire)
    }

    fn poll_sockets(self: Arc<Self>) -> PollOutcome {
        // In a forked child, threads of the parent may have held the queue pair's locks at the time
        // of the fork.
        if !self.origin.is_foreign() {
            self.drive_rx();
            if self.is_blocked() {
                self.drive_tx();
            }
        }
        PollOutcome::default()
    }

    fn fail(self: Arc<Self>) {
        self.enter_error();
    }

    fn counters(&self, wait: bool) -> Option<Counters> {
        let state = match wait {
            true => Some(self.state.lock()),
            false => self.state.try_lock(),
        };
        Some(state?.counters)
    }
}

impl UdQueuePair {
    /// Returns `true` if an asynchronous event concerns this queue pair.
    pub fn is_subject(&self, qp: &EventQp) -> bool {
        qp.is(&self.inner)
    }

    /// Returns the datagram queue pair of an asynchronous event; `None` if the event concerns a
    /// queue pair of another type.
    pub fn of_event(qp: &EventQp) -> Option<Self> {
        Some(Self {
            inner: qp.downcast()?,
        })
    }
}

impl Drop for UdInner {
    fn drop(&mut self) {
        // The last handle was dropped without `destroy`.
        if !self.is_destroyed() && !self.origin.is_foreign() {
            self.leave();
        }
    }
}

pub(super) fn completion(wr_id: u64, status: WcStatus, opcode: WcOpcode) -> Cqe {
    Cqe {
        wr_id,
        status,
        opcode,
        ..Cqe::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::context::Context;
    use crate::testing::{context, datagram_queue_pair, datagram_queue_pair_of};
    use crate::ud::UdAttributes;

    /// Takes the pending events of this device's datagram queue pairs.
    fn events(ctx: &Context) -> Vec<(u32, UdEvent)> {
        std::iter::from_fn(|| ctx.try_async_event())
            .filter_map(|event| match event.kind {
                AsyncEventKind::Datagram(qp, event_kind) => Some((qp.num(), event_kind)),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn failure_is_reported_once() {
        let qp = datagram_queue_pair();
        qp.inner.enter_error();
        qp.inner.enter_error();
        assert_eq!(qp.state(), State::Error);
        assert_eq!(events(&qp.context()), [(qp.num(), UdEvent::Fatal)]);
        let qp = datagram_queue_pair();
        qp.destroy();
        qp.inner.enter_error();
        assert_eq!(qp.state(), State::Reset, "the queue pair is destroyed");
        assert!(events(&qp.context()).is_empty());
    }

    /// After a reset, a peer may number its datagrams from the beginning again.
    #[test]
    fn reset_forgets_senders() {
        let qp = datagram_queue_pair();
        let from = ([127, 0, 0, 1], 9).into();
        qp.inner.state.lock().seen.record(from, 1, 5);
        for (to, is_copy) in [(State::Error, true), (State::Reset, false)] {
            qp.modify(to).unwrap();
            let g = qp.inner.state.lock();
            assert_eq!(g.seen.is_copy(from, 1, 5), is_copy, "{to:?}");
        }
    }

    #[test]
    fn drained_is_reported_once() {
        let qp = datagram_queue_pair();
        let drained = [(qp.num(), UdEvent::SqDrained)];
        for _ in 0..2 {
            qp.modify(State::Sqd).unwrap();
            assert_eq!(events(&qp.context()), drained);
            qp.modify(State::Sqd).unwrap();
            assert!(
                events(&qp.context()).is_empty(),
                "the queue pair was in SQD already"
            );
            qp.modify(State::Rts).unwrap();
            assert!(events(&qp.context()).is_empty(), "no event in RTS");
        }
        // While a batch is being sent, the event is delayed. The sending thread raises it.
        qp.inner.state.lock().in_flight = 2;
        qp.modify(State::Sqd).unwrap();
        assert!(events(&qp.context()).is_empty());
    }

    #[test]
    fn destroy_drops_events() {
        let ctx = context();
        let (destroyed_qp, other_qp) = (datagram_queue_pair_of(&ctx), datagram_queue_pair_of(&ctx));
        for qp in [&destroyed_qp, &other_qp] {
            qp.modify(State::Sqd).unwrap();
        }
        ctx.inner
            .raise(AsyncEventKind::CqError(destroyed_qp.inner.send_cq.clone()));
        destroyed_qp.destroy();
        let first = ctx.try_async_event().unwrap().kind;
        assert!(
            matches!(
                &first,
                AsyncEventKind::Datagram(of, UdEvent::SqDrained) if other_qp.is_subject(of)
            ),
            "{first:?}"
        );
        let second = ctx.try_async_event().unwrap().kind;
        assert!(matches!(second, AsyncEventKind::CqError(_)), "{second:?}");
        assert!(ctx.try_async_event().is_none());
    }

    /// Destroying a queue pair drops its completions that are not polled, with and without a shared
    /// receive queue.
    #[test]
    fn destroy_drops_completions() {
        for shared in [false, true] {
            let ctx = context();
            let pd = ctx.allocate_pd();
            let [send, recv] = [(); 2].map(|()| ctx.create_cq(4, None).unwrap());
            let attributes = UdAttributes {
                pd,
                send_cq: send.clone(),
                recv_cq: recv.clone(),
                srq: shared.then(|| ctx.create_srq(pd, 4, 1).unwrap()),
                max_send_wr: 1,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
                signal_all: false,
            };
            let qp = ctx.create_ud_qp(&attributes).unwrap();
            let mut effects = UdEffects::default();
            {
                let mut g = qp.inner.state.lock();
                let received = completion(2, WcStatus::Success, WcOpcode::Recv);
                qp.inner
                    .complete_send(&mut g, 1, WcStatus::Success, &mut effects);
                qp.inner.complete_receive(&mut g, received, &mut effects);
            }
            qp.inner.apply_effects(effects);
            assert_eq!((send.len(), recv.len()), (1, 1));
            qp.destroy();
            assert_eq!((send.len(), recv.len()), (0, 0), "{shared}");
        }
    }
}
