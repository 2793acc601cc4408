//! The effects that a call of the state machine has outside the queue pair ([`Effects`]), which are
//! applied when all locks are released; and the state machine's access to completion queues and
//! shared receive queues during the call ([`DriveHost`]).

use super::linger::Closing;
use super::link::Report;
use super::qp::QpInner;
use crate::objects::any_qp::EventQp;
use crate::objects::cq::{CompletionQueue, CqInner, Owed};
use crate::objects::events::AsyncEventKind;
use crate::objects::hooks::Completion;
use crate::objects::slots::Ring;
use crate::sys::connect::Ends;
use crate::sys::guarded::ProcessRange;
use bitflags::bitflags;
use iwarp_rnic::Cqe;
use iwarp_rnic::qp::{Direction, Events, Fault, Host};
use iwarp_rnic::receive_queue::{SharedReceiveQueue as Queue, TakenRecv};
use parking_lot::MutexGuard;
use std::io;
use std::sync::Arc;

bitflags! {
    /// Effects without data.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct Due: u8 {
        /// This end has shut down its direction of the stream, so the manager is notified of the
        /// end.
        const CLOSED_BY_US = 1;
        /// The queue pair waits until some memory is no longer in use.
        const WAIT_FOR_MEMORY = 1 << 1;
        /// Memory for which a queue pair waits is no longer in use.
        const MEMORY_UNUSED = 1 << 2;
        const XRC_DELIVERED = 1 << 3;
        /// A receive was returned to the shared receive queue, and other queue pairs wait for it.
        const RECEIVE_RETURNED = 1 << 4;
        const FAULT = 1 << 5;
        /// Posted requests wait for the stream of a peer that is connected by number.
        const REQUESTS_WAIT = 1 << 6;
    }
}

/// The effects of a call of the state machine. `QpInner::collect_effects` and [`DriveHost`] collect
/// them while the queue pair's lock is held. [`Effects::apply`] applies them when all locks are
/// released.
#[derive(Default)]
pub(crate) struct Effects {
    /// Events and wake-ups of the send queue's completion queue.
    pub(crate) send: Owed,
    /// Events and wake-ups of the receive queue's completion queue.
    pub(crate) recv: Owed,
    pub(crate) due: Due,
    /// Events of the queue pair. The connection manager in `report` is also notified of them.
    pub(crate) events: Events,
    /// Why the stream ended, if it ended in error.
    pub(crate) fault: Option<Fault>,
    pub(crate) report: Report,
    /// The connection has ended in error, which is logged once.
    pub(crate) lost: Option<Box<Lost>>,
    /// A stream that the queue pair has given up.
    pub(crate) closing: Option<Closing>,
}

/// A connection that has ended in error, for the log.
pub(crate) struct Lost {
    pub(crate) fault: Option<Fault>,
    /// Its addresses.
    pub(crate) ends: Option<Ends>,
    /// Number of the system's error, if a call has failed.
    pub(crate) errno: Option<i32>,
}

impl Lost {
    fn log(&self, qp: u32) {
        let local = self.ends.map(|ends| tracing::field::display(ends.local));
        let peer = self.ends.map(|ends| tracing::field::display(ends.peer));
        let fault = self.fault.map(tracing::field::display);
        let error = self.errno.map(io::Error::from_raw_os_error);
        let error = error.map(tracing::field::display);
        tracing::debug!(qp, local, peer, fault, error, "connection lost");
    }
}

impl Effects {
    #[inline]
    pub(crate) fn add_if(&mut self, effect: Due, is_due: bool) {
        if is_due {
            self.due |= effect;
        }
    }

    #[inline]
    pub(crate) fn apply(self, qp: &Arc<QpInner>) {
        if !self.is_quiet() {
            self.apply_now(qp);
        }
    }

    /// Returns `true` if there are no effects, which is the usual case. Called four times per
    /// message.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.events.is_empty()
            && self.due.is_empty()
            && self.closing.is_none()
            && self.send.is_nothing()
            && self.recv.is_nothing()
    }

    #[inline(never)]
    fn apply_now(self, qp: &Arc<QpInner>) {
        let mut overflow = qp.send_cq.inner.raise_due(self.send);
        overflow |= qp.recv_cq.inner.raise_due(self.recv);
        if overflow {
            tracing::warn!(qp = qp.num, "completion queue overflow");
            overflowed([&qp.send_cq, &qp.recv_cq]);
        }
        if let (true, Some(target)) = (self.due.contains(Due::XRC_DELIVERED), &qp.xrc) {
            overflowed(&target.raise_due(qp));
        }
        if let (true, Some(srq)) = (self.due.contains(Due::RECEIVE_RETURNED), &qp.srq) {
            srq.inner.drive_waiting();
        }
        if let (true, Some(faults)) = (self.due.contains(Due::FAULT), &qp.faults) {
            faults.act(Arc::clone(qp) as _);
        }
        if self.due.contains(Due::WAIT_FOR_MEMORY) {
            qp.ctx.wait_for_memory(qp);
        }
        if self.due.contains(Due::MEMORY_UNUSED) {
            qp.ctx.memory_unused();
        }
        if self.due.contains(Due::REQUESTS_WAIT) {
            qp.ctx.requests_wait(qp.num);
        }
        if let (true, Some(srq)) = (self.recv.srq_limit, &qp.srq) {
            srq.inner.raise_limit_event();
        }
        let closed_by_us = self.due.contains(Due::CLOSED_BY_US);
        if closed_by_us || self.closing.is_some() || !self.events.is_empty() {
            self.apply_rare(qp);
        }
    }

    #[cold]
    fn apply_rare(self, qp: &Arc<QpInner>) {
        if let Some(closing) = self.closing {
            closing.run(qp);
        }
        let handle = || EventQp(Arc::clone(qp) as _);
        let raise = |flag: Events, kind: fn(EventQp) -> AsyncEventKind| {
            if self.events.contains(flag) {
                qp.ctx.raise(kind(handle()));
            }
        };
        if let Some(lost) = &self.lost {
            lost.log(qp.num);
        }
        raise(
            Events::MESSAGE_IN_RTR,
            AsyncEventKind::CommunicationEstablished,
        );
        raise(Events::ACCESS_ERROR, AsyncEventKind::QpAccessError);
        raise(Events::REQUEST_ERROR, AsyncEventKind::QpRequestError);
        raise(Events::FATAL, AsyncEventKind::QpFatal);
        raise(Events::SQ_DRAINED, AsyncEventKind::SqDrained);
        raise(Events::LAST_WQE, AsyncEventKind::LastWqeReached);
        if qp.is_destroyed() {
            qp.forget_events();
        }
        let mut events = self.events;
        if self.due.contains(Due::CLOSED_BY_US) {
            events |= Events::DISCONNECTED;
        }
        if self.report.established && events.intersects(Events::DISCONNECTED | Events::FATAL) {
            // Another thread has processed the first message, and may not have reported it yet.
            events |= Events::ESTABLISHED;
        }
        if let Some(cm) = self.report.cm.and_then(|cm| cm.upgrade()) {
            if events.contains(Events::FIRST_FPDU_OVERDUE) {
                tracing::debug!(qp = qp.num, "the peer's first message did not come in time");
                cm.first_message_overdue();
            }
            cm.qp_event(events, self.fault);
        }
    }
}

/// Fails the queue pairs of those completion queues that have overflowed, because completions were
/// lost.
#[cold]
pub(crate) fn overflowed<'a>(queues: impl IntoIterator<Item = &'a CompletionQueue>) {
    for cq in queues {
        if cq.inner.has_overflowed() {
            for member in cq.inner.datagrams.all() {
                member.fail();
            }
            for member in cq.inner.members() {
                member.fail();
            }
        }
    }
}

/// The state machine's access to the completion queues and the shared receive queue during one
/// call.
///
/// A completion queue stays locked from one completion to the next, because completions often come
/// in a row. It is unlocked before any other lock is taken, which keeps the lock order.
pub(crate) struct DriveHost<'a> {
    qp: &'a Arc<QpInner>,
    effects: &'a mut Effects,
    ring: Option<(&'a CqInner, MutexGuard<'a, Ring>)>,
    run: u32,
}

/// Maximum number of completions that are written before the queue is unlocked for other threads.
const RUN_MAX: u32 = 64;

impl<'a> DriveHost<'a> {
    #[inline]
    pub(crate) fn new(qp: &'a Arc<QpInner>, effects: &'a mut Effects) -> Self {
        Self {
            qp,
            effects,
            ring: None,
            run: 0,
        }
    }
}

impl Host for DriveHost<'_> {
    type Memory = ProcessRange;

    #[inline]
    fn complete(&mut self, direction: Direction, mut cqe: Cqe) {
        if self.qp.is_destroyed() {
            return;
        }
        if direction == Direction::Recv
            && let Some(target) = &self.qp.xrc
        {
            // An XRC target sends no requests, so its receives are never held back.
            self.ring = None;
            target.complete(cqe, self.effects);
            return;
        }
        if direction == Direction::Recv && self.qp.held_receives.is_sending() {
            self.ring = None;
            self.qp.held_receives.hold(cqe);
            return;
        }
        match direction {
            Direction::Send => self.qp.slots.sent(&mut cqe),
            Direction::Recv => self.qp.slots.received(&mut cqe),
        }
        let mut lost = false;
        if let Some(faults) = &self.qp.faults {
            match faults.completed(direction, &mut cqe) {
                Completion::Written => {}
                Completion::ThenAct => self.effects.due |= Due::FAULT,
                Completion::Lost => lost = true,
            }
        }
        let (cq, owed) = match direction {
            Direction::Send => (&*self.qp.send_cq.inner, &mut self.effects.send),
            Direction::Recv => (&*self.qp.recv_cq.inner, &mut self.effects.recv),
        };
        self.run += 1;
        let locked = self.ring.as_ref();
        if self.run >= RUN_MAX || !locked.is_some_and(|(other, _)| std::ptr::eq(*other, cq)) {
            self.ring = None;
            self.run = 0;
        }
        let (_, ring) = self.ring.get_or_insert_with(|| (cq, cq.ring.lock()));
        if lost {
            cq.record_loss(ring, owed);
            return;
        }
        cq.push(ring, cqe, owed);
    }

    #[inline]
    fn receiver_ready(&mut self) -> bool {
        let Some(faults) = &self.qp.faults else {
            return true;
        };
        let ready = faults.receiver_ready();
        self.effects.add_if(Due::FAULT, !ready);
        ready
    }

    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool {
        self.ring = None;
        let Some(srq) = &self.qp.srq else {
            let target = self.qp.xrc.as_ref();
            return target.is_some_and(|target| target.take(taken, self.effects));
        };
        let (got, limit_reached) = srq.inner.take(taken);
        self.effects.recv.srq_limit |= limit_reached;
        got
    }

    fn with_shared_receive<R>(&mut self, f: impl FnOnce(&mut Queue) -> R) -> Option<R> {
        self.ring = None;
        let srq = &self.qp.srq.as_ref()?.inner;
        let result = srq.with_queue(|queue| Some(f(queue)));
        self.effects
            .add_if(Due::RECEIVE_RETURNED, srq.has_waiting());
        result
    }

    fn select_shared_receive(&mut self, number: u32) -> Option<u32> {
        self.ring = None;
        self.qp.xrc.as_ref()?.select(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::qp::{CmSink, QueuePair};
    use crate::testing;
    use iwarp_rnic::qp::State;
    use parking_lot::Mutex;
    use std::sync::Weak;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn each_effect_is_not_quiet() {
        assert!(Effects::default().is_quiet());
        let setters: [fn(&mut Effects); 3] = [
            |effects| effects.events = Events::ESTABLISHED,
            |effects| effects.send.srq_limit = true,
            |effects| effects.recv.srq_limit = true,
        ];
        for due in Due::all() {
            let mut effects = Effects::default();
            effects.add_if(due, false);
            assert!(effects.is_quiet());
            effects.add_if(due, true);
            assert!(!effects.is_quiet(), "{due:?}");
            effects.add_if(Due::all(), false);
            assert_eq!(effects.due, due);
        }
        for (i, set) in setters.into_iter().enumerate() {
            let mut effects = Effects::default();
            set(&mut effects);
            assert!(!effects.is_quiet(), "setter {i}");
        }
    }

    #[derive(Default)]
    struct TestSink(Mutex<Vec<(Events, Option<Fault>)>>, AtomicU32);

    impl CmSink for TestSink {
        fn qp_event(&self, events: Events, fault: Option<Fault>) {
            self.0.lock().push((events, fault));
        }

        fn first_message_overdue(&self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn manager_gets_all_events() {
        let ctx = testing::context();
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let (disconnected, established) = (Events::DISCONNECTED, Events::ESTABLISHED);
        // The events, whether this end has closed, whether the first message has arrived, and the
        // events of which the manager is notified.
        let cases = [
            (Events::empty(), true, false, disconnected),
            (Events::FATAL, true, false, Events::FATAL | disconnected),
            (Events::FATAL, false, false, Events::FATAL),
            (disconnected, false, false, disconnected),
            (disconnected, false, true, disconnected | established),
            (Events::FATAL, false, true, Events::FATAL | established),
            (Events::empty(), true, true, disconnected | established),
            (Events::SQ_DRAINED, false, true, Events::SQ_DRAINED),
            (established, false, false, established),
        ];
        for (events, closed_by_us, established, notified) in cases {
            let sink = Arc::new(TestSink::default());
            let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
            let effects = Effects {
                events,
                due: match closed_by_us {
                    true => Due::CLOSED_BY_US,
                    false => Due::empty(),
                },
                report: Report {
                    cm: Some(cm),
                    established,
                },
                ..Effects::default()
            };
            effects.apply(&qp.inner);
            assert_eq!(*sink.0.lock(), [(notified, None)]);
            assert_eq!(sink.1.load(Ordering::Relaxed), 0);
        }
        let sink = Arc::new(TestSink::default());
        let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
        let effects = Effects {
            events: Events::FIRST_FPDU_OVERDUE,
            report: Report {
                cm: Some(cm),
                established: false,
            },
            ..Effects::default()
        };
        effects.apply(&qp.inner);
        assert_eq!(sink.1.load(Ordering::Relaxed), 1);
        qp.destroy();
    }

    #[test]
    fn each_event_is_raised() {
        let ctx = testing::context();
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let raised = |events| {
            let effects = Effects {
                events,
                ..Effects::default()
            };
            effects.apply(&qp.inner);
            let raised = std::iter::from_fn(|| ctx.try_async_event());
            let kinds = raised.map(|event| match event.kind {
                AsyncEventKind::CommunicationEstablished(qp) => ("established", qp),
                AsyncEventKind::QpAccessError(qp) => ("access", qp),
                AsyncEventKind::QpRequestError(qp) => ("request", qp),
                AsyncEventKind::QpFatal(qp) => ("fatal", qp),
                AsyncEventKind::SqDrained(qp) => ("drained", qp),
                AsyncEventKind::LastWqeReached(qp) => ("last", qp),
                other => panic!("{other:?}"),
            });
            let names = kinds.map(|(name, event_qp)| {
                assert!(qp.is_subject(&event_qp));
                name
            });
            names.collect::<Vec<_>>()
        };
        for (event, name) in [
            (Events::MESSAGE_IN_RTR, "established"),
            (Events::ACCESS_ERROR, "access"),
            (Events::REQUEST_ERROR, "request"),
            (Events::FATAL, "fatal"),
            (Events::SQ_DRAINED, "drained"),
            (Events::LAST_WQE, "last"),
        ] {
            assert_eq!(raised(event), [name]);
        }
        assert_eq!(raised(Events::DISCONNECTED), [""; 0]);
        let both = raised(Events::FATAL | Events::LAST_WQE);
        assert_eq!(both, ["fatal", "last"]);
        qp.destroy();
        assert_eq!(raised(Events::FATAL), [""; 0]);
    }

    #[test]
    fn completions_go_to_right_queue_in_order() {
        let ctx = testing::context();
        let cqs = [0; 2].map(|_| ctx.create_cq(400, None).unwrap());
        let qp = testing::queue_pair(&ctx, &cqs[0], &cqs[1]);
        let mut effects = Effects::default();
        let mut host = DriveHost::new(&qp.inner, &mut effects);
        for wr_id in 0..300 {
            let direction = match wr_id % 3 {
                0 => Direction::Recv,
                _ => Direction::Send,
            };
            let cqe = Cqe {
                wr_id,
                ..Cqe::default()
            };
            host.complete(direction, cqe);
        }
        drop(host);
        let mut out = [Cqe::default(); 400];
        for (cq, sends) in cqs.iter().zip([true, false]) {
            let n = cq.take_ready(&mut out).unwrap();
            let ids = out[..n].iter().map(|cqe| cqe.wr_id);
            assert!(ids.eq((0..300).filter(|id| (id % 3 != 0) == sends)));
        }
        qp.destroy();
        DriveHost::new(&qp.inner, &mut effects).complete(Direction::Send, Cqe::default());
        assert!(cqs[0].is_empty());
    }

    /// A fault that makes the receiver not ready also has to act later, so it must become an
    /// effect.
    #[test]
    fn receiver_fault_is_due() {
        let ctx = testing::context_with(crate::Config {
            fault: Some("seed=255;log=/dev/null;rnr=1s,nth=2".parse().unwrap()),
            ..crate::Config::default()
        });
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        for is_ready in [true, false] {
            let mut effects = Effects::default();
            let ready = DriveHost::new(&qp.inner, &mut effects).receiver_ready();
            let is_due = effects.due == Due::FAULT;
            assert_eq!((ready, is_due), (is_ready, !is_ready));
        }
        qp.destroy();
    }

    /// Another queue pair may wait for a receive that is returned to the shared receive queue.
    #[test]
    fn returned_receive_drives_waiting_queue_pair() {
        let ctx = testing::context();
        let cq = ctx.create_cq(2, None).unwrap();
        let srq = ctx.create_srq(1, 4, 1).unwrap();
        let attributes = crate::conn::attributes::QpAttributes {
            srq: Some(srq.clone()),
            ..testing::attributes(&ctx, &cq, &cq)
        };
        let qps = [0; 2].map(|_| ctx.create_qp(&attributes).unwrap());
        let return_receive = || {
            let mut effects = Effects::default();
            let wr = iwarp_rnic::RecvWr {
                wr_id: 1,
                sges: &[],
            };
            let posted = DriveHost::new(&qps[0].inner, &mut effects)
                .with_shared_receive(|queue| queue.post(&wr).is_ok());
            assert_eq!(posted, Some(true));
            effects.due.contains(Due::RECEIVE_RETURNED)
        };
        assert!(srq.inner.wait(&qps[1].inner));
        assert!(return_receive());
        srq.inner.drive_waiting();
        assert!(!return_receive(), "no queue pair waits");
        qps.iter().for_each(QueuePair::destroy);
    }

    #[test]
    fn overflow_fails_queue_pairs_of_cq() {
        let ctx = testing::context();
        let cqs = [0; 2].map(|_| ctx.create_cq(2, None).unwrap());
        let qps = cqs.each_ref().map(|cq| testing::queue_pair(&ctx, cq, cq));
        let _peers = qps.each_ref().map(testing::connected);
        let states = || qps.each_ref().map(QueuePair::state);
        overflowed(&cqs);
        assert_eq!(states(), [State::Rts; 2]);
        let _ = cqs[1].inner.ring.lock().overflow();
        overflowed(&cqs);
        assert_eq!(states(), [State::Rts, State::Error]);
        qps.iter().for_each(QueuePair::destroy);
    }

    #[test]
    fn each_overflowed_cq_fails_its_queue_pairs() {
        let ctx = testing::context();
        for overflows in [[false, false], [true, false], [false, true], [true, true]] {
            let cqs = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
            let qps = cqs.each_ref().map(|cq| testing::queue_pair(&ctx, cq, cq));
            let _peers = qps.each_ref().map(testing::connected);
            for (cq, _) in cqs
                .iter()
                .zip(overflows)
                .filter(|(_, overflows)| *overflows)
            {
                let mut owed = Owed::default();
                cq.inner.record_loss(&mut cq.inner.ring.lock(), &mut owed);
            }
            overflowed(&cqs);
            let failed = qps.each_ref().map(|qp| qp.state() == State::Error);
            assert_eq!(failed, overflows);
            qps.iter().for_each(QueuePair::destroy);
        }
    }

    /// If one call both frees memory and makes the queue pair wait for memory, the waiting queue
    /// pairs are driven.
    #[test]
    fn memory_effects_are_independent() {
        let ctx = testing::context();
        let cq = ctx.create_cq(2, None).unwrap();
        let qps = [0; 2].map(|_| testing::queue_pair(&ctx, &cq, &cq));
        for (due, waiters) in [
            (Due::WAIT_FOR_MEMORY, 2),
            (Due::MEMORY_UNUSED, 0),
            (Due::WAIT_FOR_MEMORY | Due::MEMORY_UNUSED, 0),
        ] {
            let waiting = &ctx.inner.waiting;
            waiting.insert(&qps[1].inner);
            let effects = Effects {
                due,
                ..Effects::default()
            };
            effects.apply(&qps[0].inner);
            assert_eq!(waiting.0.lock().len(), waiters, "{due:?}");
        }
        qps.iter().for_each(QueuePair::destroy);
    }

    #[test]
    fn completion_fault_is_due() {
        let ctx = testing::context_with(crate::Config {
            fault: Some(
                "seed=254;log=/dev/null;status=GENERAL_ERR,nth=2"
                    .parse()
                    .unwrap(),
            ),
            ..crate::Config::default()
        });
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        for is_due in [false, true] {
            let mut effects = Effects::default();
            DriveHost::new(&qp.inner, &mut effects).complete(Direction::Send, Cqe::default());
            assert_eq!(effects.due == Due::FAULT, is_due);
        }
        qp.destroy();
    }
}
