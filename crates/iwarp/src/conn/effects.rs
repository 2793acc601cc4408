//! Work that is done after all locks are dropped, and the state machine's way to completion queues meanwhile.

use super::linger::{self, StreamEnd};
use super::qp::{CmSink, Link, QpInner};
use crate::objects::cq::{CompletionQueue, CqInner, Owed};
use crate::objects::events::AsyncEventKind;
use crate::objects::hooks::Completion;
use crate::objects::member::EventQp;
use crate::objects::slots::Ring;
use crate::sys::guarded::ProcessRange;
use iwarp_rnic::Cqe;
use iwarp_rnic::qp::{Direction, Events, Fault, Host};
use iwarp_rnic::receive_queue::{SharedReceiveQueue as Queue, TakenRecv};
use parking_lot::MutexGuard;
use std::sync::{Arc, Weak};

/// Work that is done after all locks are dropped.
#[derive(Default)]
pub(crate) struct Effects {
    pub(crate) send: Owed,
    pub(crate) recv: Owed,
    pub(crate) events: Events,
    pub(crate) fault: Option<Fault>,
    pub(crate) cm: Option<Weak<dyn CmSink>>,
    pub(crate) closed_by_us: bool,
    /// The initiator's first FPDU has come, now or earlier.
    pub(crate) established: bool,
    pub(crate) dropped: Option<Arc<Link>>,
    /// The queue pair waits until nobody uses some memory.
    pub(crate) waits: bool,
    /// Nobody uses memory any more for which some queue pair waits.
    pub(crate) unused: bool,
    /// The target of an extended reliable connection has delivered something.
    pub(crate) xrc: bool,
    /// The shared receive queue has got a receive back for which other queue pairs wait.
    pub(crate) returned: bool,
    /// An injected fault is due.
    pub(crate) act: bool,
    /// The dropped connection must be ended in the background.
    pub(crate) stream_end: Option<StreamEnd>,
}

impl Effects {
    #[inline]
    pub(crate) fn run(self, qp: &Arc<QpInner>) {
        if !self.is_quiet() {
            self.run_now(qp);
        }
    }

    /// Returns `true` if there is nothing to do. It is asked four times for each message, and nearly always so.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.events.is_empty()
            && self.dropped.is_none()
            && !self.closed_by_us
            && !self.waits
            && !self.unused
            && !self.xrc
            && !self.returned
            && !self.act
            && self.send.is_nothing()
            && self.recv.is_nothing()
    }

    #[inline(never)]
    fn run_now(self, qp: &Arc<QpInner>) {
        let mut overflow = qp.send_cq.inner.settle(self.send);
        overflow |= qp.recv_cq.inner.settle(self.recv);
        if overflow {
            tracing::warn!(qp = qp.num, "completion queue overflow");
            overflowed([&qp.send_cq, &qp.recv_cq]);
        }
        if let (true, Some(target)) = (self.xrc, &qp.xrc) {
            overflowed(&target.settle(qp));
        }
        if let (true, Some(srq)) = (self.returned, &qp.srq) {
            srq.inner.drive_waiting();
        }
        if let (true, Some(faults)) = (self.act, &qp.faults) {
            faults.act(Arc::clone(qp) as _);
        }
        if self.waits {
            qp.ctx.wait_for_memory(qp);
        }
        if self.unused {
            qp.ctx.memory_unused();
        }
        if let (true, Some(srq)) = (self.recv.srq_limit, &qp.srq) {
            srq.inner.tell_limit();
        }
        if self.events.is_empty() && self.dropped.is_none() && !self.closed_by_us {
            return;
        }
        self.run_rare(qp);
    }

    #[cold]
    fn run_rare(self, qp: &Arc<QpInner>) {
        if let Some(link) = self.dropped {
            match self.stream_end {
                Some(stream_end) => linger::end_in_background(qp, &link, stream_end),
                None => link.engine.remove(&link.stream, link.token),
            }
        }
        let handle = || EventQp(Arc::clone(qp) as _);
        let raise = |flag: Events, kind: fn(EventQp) -> AsyncEventKind| {
            if self.events.contains(flag) {
                qp.ctx.raise(kind(handle()));
            }
        };
        if let Some(fault) = &self.fault
            && self.events.contains(Events::FATAL)
        {
            tracing::debug!(qp = qp.num, %fault, "connection failed");
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
        if self.closed_by_us {
            events |= Events::DISCONNECTED;
        }
        if self.established && events.intersects(Events::DISCONNECTED | Events::FATAL) {
            // The thread that saw the first message may not have reported it yet.
            events |= Events::ESTABLISHED;
        }
        if let Some(cm) = self.cm.and_then(|cm| cm.upgrade()) {
            if events.contains(Events::FIRST_FPDU_OVERDUE) {
                tracing::debug!(qp = qp.num, "the peer's first message did not come");
                cm.first_message_overdue();
            }
            cm.qp_event(events, self.fault);
        }
    }
}

/// A completion queue has lost completions, so its queue pairs cannot report reliably any more.
#[cold]
pub(crate) fn overflowed<'a>(queues: impl IntoIterator<Item = &'a CompletionQueue>) {
    for cq in queues {
        if cq.inner.is_dead() {
            for member in cq.inner.datagrams.all() {
                member.fail();
            }
            for member in cq.inner.members() {
                member.fail();
            }
        }
    }
}

/// The state machine's view of completion queues and shared receive queue, for one call of it.
///
/// The completion queue stays locked from one completion to the next, because they come in runs. It is unlocked before any
/// other lock is taken, so the order of locks is kept.
pub(crate) struct DriveHost<'a> {
    qp: &'a Arc<QpInner>,
    effects: &'a mut Effects,
    ring: Option<(&'a CqInner, MutexGuard<'a, Ring>)>,
    /// Completions since it was locked.
    run: u32,
}

/// Completions after which other threads may have the queue.
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
            // It sends nothing that completes, so its receives need not wait for that.
            self.ring = None;
            target.complete(cqe, self.effects);
            return;
        }
        if direction == Direction::Recv && self.qp.held_receives.is_sending() {
            self.ring = None;
            self.qp.held_receives.keep(cqe);
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
                Completion::ThenAct => self.effects.act = true,
                Completion::Lost => lost = true,
            }
        }
        let (cq, owed) = match direction {
            Direction::Send => (&*self.qp.send_cq.inner, &mut self.effects.send),
            Direction::Recv => (&*self.qp.recv_cq.inner, &mut self.effects.recv),
        };
        self.run += 1;
        let held = self.ring.as_ref();
        if self.run >= RUN_MAX || !held.is_some_and(|(other, _)| std::ptr::eq(*other, cq)) {
            self.ring = None;
            self.run = 0;
        }
        let (_, ring) = self.ring.get_or_insert_with(|| (cq, cq.ring.lock()));
        if lost {
            cq.lose(ring, owed);
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
        self.effects.act |= !ready;
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
        self.effects.returned |= srq.has_waiting();
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
    use crate::conn::qp::QueuePair;
    use crate::testing;
    use iwarp_rnic::qp::State;
    use parking_lot::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// What is forgotten here is done by nobody: each reason alone is one.
    #[test]
    fn there_is_something_to_do_for_each_reason() {
        assert!(Effects::default().is_quiet());
        let reasons: [fn(&mut Effects); 9] = [
            |effects| effects.events = Events::ESTABLISHED,
            |effects| effects.closed_by_us = true,
            |effects| effects.waits = true,
            |effects| effects.unused = true,
            |effects| effects.xrc = true,
            |effects| effects.returned = true,
            |effects| effects.act = true,
            |effects| effects.send.srq_limit = true,
            |effects| effects.recv.srq_limit = true,
        ];
        for (i, give) in reasons.into_iter().enumerate() {
            let mut effects = Effects::default();
            give(&mut effects);
            assert!(!effects.is_quiet(), "reason {i}");
        }
    }

    /// What the connection manager is told.
    #[derive(Default)]
    struct Told(Mutex<Vec<(Events, Option<Fault>)>>, AtomicU32);

    impl CmSink for Told {
        fn qp_event(&self, events: Events, fault: Option<Fault>) {
            self.0.lock().push((events, fault));
        }

        fn first_message_overdue(&self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_connection_manager_is_told_everything() {
        let ctx = testing::context();
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let (end, begin) = (Events::DISCONNECTED, Events::ESTABLISHED);
        // What has happened, whether the program has disconnected, whether the first message has come, and what is told.
        let cases = [
            (Events::empty(), true, false, end),
            (Events::FATAL, true, false, Events::FATAL | end),
            (Events::FATAL, false, false, Events::FATAL),
            (end, false, false, end),
            (end, false, true, end | begin),
            (Events::FATAL, false, true, Events::FATAL | begin),
            (Events::empty(), true, true, end | begin),
            (Events::SQ_DRAINED, false, true, Events::SQ_DRAINED),
            (begin, false, false, begin),
        ];
        for (events, closed_by_us, established, told) in cases {
            let sink = Arc::new(Told::default());
            let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
            let effects = Effects {
                events,
                closed_by_us,
                established,
                cm: Some(cm),
                ..Effects::default()
            };
            effects.run(&qp.inner);
            assert_eq!(*sink.0.lock(), [(told, None)]);
            assert_eq!(sink.1.load(Ordering::Relaxed), 0);
        }
        let sink = Arc::new(Told::default());
        let cm: Weak<dyn CmSink> = Arc::downgrade(&(Arc::clone(&sink) as Arc<dyn CmSink>));
        let effects = Effects {
            events: Events::FIRST_FPDU_OVERDUE,
            cm: Some(cm),
            ..Effects::default()
        };
        effects.run(&qp.inner);
        assert_eq!(sink.1.load(Ordering::Relaxed), 1);
        qp.destroy();
    }

    #[test]
    fn each_event_is_an_asynchronous_one() {
        let ctx = testing::context();
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let raised = |events| {
            let effects = Effects {
                events,
                ..Effects::default()
            };
            effects.run(&qp.inner);
            let raised = std::iter::from_fn(|| ctx.try_async_event());
            let kinds = raised.map(|event| match event.kind {
                AsyncEventKind::CommunicationEstablished(of) => ("established", of),
                AsyncEventKind::QpAccessError(of) => ("access", of),
                AsyncEventKind::QpRequestError(of) => ("request", of),
                AsyncEventKind::QpFatal(of) => ("fatal", of),
                AsyncEventKind::SqDrained(of) => ("drained", of),
                AsyncEventKind::LastWqeReached(of) => ("last", of),
                other => panic!("{other:?}"),
            });
            let names = kinds.map(|(name, of)| {
                assert!(qp.is_subject(&of));
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
        // What is left of one that is destroyed is told to nobody.
        assert_eq!(raised(Events::FATAL), [""; 0]);
    }

    /// Completions of both kinds come in any order, and each is written to its queue.
    #[test]
    fn completions_go_to_the_queue_of_their_direction() {
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
        // Of one that is destroyed nothing is written.
        DriveHost::new(&qp.inner, &mut effects).complete(Direction::Send, Cqe::default());
        assert!(cqs[0].is_empty());
    }

    /// An injected fault acts if it says that there is no receive.
    #[test]
    fn a_receiver_that_is_made_to_be_not_ready_acts() {
        let ctx = testing::context_with(crate::Config {
            fault: Some("seed=255;log=/dev/null;rnr=1s,nth=2".parse().unwrap()),
            ..crate::Config::default()
        });
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        for is_ready in [true, false] {
            let mut effects = Effects::default();
            let ready = DriveHost::new(&qp.inner, &mut effects).receiver_ready();
            assert_eq!((ready, effects.act), (is_ready, !is_ready));
        }
        qp.destroy();
    }

    /// A receive that is given back to a shared queue may be one that another queue pair waits for.
    #[test]
    fn who_waits_for_a_receive_that_is_given_back_is_driven() {
        let ctx = testing::context();
        let cq = ctx.create_cq(2, None).unwrap();
        let srq = ctx.create_srq(1, 4, 1).unwrap();
        let attributes = crate::conn::qp::QpAttributes {
            srq: Some(srq.clone()),
            ..testing::attributes(&ctx, &cq, &cq)
        };
        let qps = [0; 2].map(|_| ctx.create_qp(&attributes).unwrap());
        let give_back = || {
            let mut effects = Effects::default();
            let wr = iwarp_rnic::RecvWr {
                wr_id: 1,
                sges: &[],
            };
            let given = DriveHost::new(&qps[0].inner, &mut effects)
                .with_shared_receive(|queue| queue.post(&wr).is_ok());
            assert_eq!(given, Some(true));
            effects.returned
        };
        assert!(srq.inner.wait(&qps[1].inner));
        assert!(give_back());
        srq.inner.drive_waiting();
        assert!(!give_back(), "nobody waits");
        qps.iter().for_each(QueuePair::destroy);
    }

    /// The queue pairs of a queue that has lost completions end, and no others.
    #[test]
    fn an_overflow_ends_the_queue_pairs_of_its_queue() {
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

    /// Both queues of a queue pair may overflow together, and others report to one of them only.
    #[test]
    fn the_queue_pairs_of_each_queue_that_has_overflowed_fail() {
        let ctx = testing::context();
        for dead in [[false, false], [true, false], [false, true], [true, true]] {
            let cqs = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
            let qps = cqs.each_ref().map(|cq| testing::queue_pair(&ctx, cq, cq));
            let _peers = qps.each_ref().map(testing::connected);
            for (cq, _) in cqs.iter().zip(dead).filter(|(_, dead)| *dead) {
                let mut owed = Owed::default();
                cq.inner.lose(&mut cq.inner.ring.lock(), &mut owed);
            }
            overflowed(&cqs);
            let failed = qps.each_ref().map(|qp| qp.state() == State::Error);
            assert_eq!(failed, dead);
            qps.iter().for_each(QueuePair::destroy);
        }
    }
}
