//! A queue pair as the engine sees it: readiness, timers, and pauses while application threads
//! drive it.

use super::drive;
use super::liveness;
use super::qp::{
    QpInner, TIMER_LINGER, TIMER_LIVENESS, TIMER_MACHINE, TIMER_PEER_GONE, TIMER_SEND_DELAY,
    TIMERS_END,
};
use crate::conn::peer_gone;
use crate::engine::Source;
use crate::objects::cq::CompletionQueue;
use crate::sys::prefetch;
use iwarp_rnic::counters::Counters;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what a queue pair moves, so that a thread that polls sees how long it was busy with that.
#[derive(Debug, Default)]
pub(crate) struct BytesTransferred {
    octets: AtomicU64,
    /// The count when a poll last looked. A hint.
    seen: AtomicU64,
}

impl BytesTransferred {
    /// Adds `octets` to the count. The caller has locked the queue pair's state.
    #[inline]
    pub(crate) fn add(&self, octets: usize) {
        let before = self.octets.load(Ordering::Relaxed);
        self.octets.store(before + octets as u64, Ordering::Relaxed);
    }

    /// Returns how many there were since the last call, by any thread.
    #[inline]
    pub(crate) fn take(&self) -> u64 {
        let octets = self.octets.load(Ordering::Relaxed);
        let before = self.seen.load(Ordering::Relaxed);
        // Another poll may have seen more between the two lines: then there is nothing left for
        // this one.
        if octets <= before {
            return 0;
        }
        self.seen.store(octets, Ordering::Relaxed);
        octets - before
    }
}

/// Tells whether the peer's data have come since the program last asked for something. The counts
/// are hints.
#[derive(Debug, Default)]
pub(crate) struct PeerAnswers {
    /// Messages of the peer that have come in full, and octets that had been placed when the last
    /// of them ended.
    messages: AtomicU64,
    octets: AtomicU64,
    /// The value of `octets` when the program last posted a request.
    when_asked: AtomicU64,
}

impl PeerAnswers {
    /// The queue pair has counted this. The caller has locked its state. A message of which only a
    /// part is there is no answer yet.
    #[inline]
    pub(crate) fn note(&self, counters: &Counters) {
        if counters.rx_messages != self.messages.load(Ordering::Relaxed) {
            self.messages.store(counters.rx_messages, Ordering::Relaxed);
            self.octets.store(counters.rx_payload, Ordering::Relaxed);
        }
    }

    /// The program has posted a request.
    #[inline]
    pub(crate) fn asked(&self) {
        self.when_asked.store(self.octets(), Ordering::Relaxed);
    }

    /// Returns how many octets had been placed when the last message ended.
    #[inline]
    pub(crate) fn octets(&self) -> u64 {
        self.octets.load(Ordering::Relaxed)
    }

    /// Returns `true` if some have come since the last request.
    #[inline]
    pub(crate) fn is_answered(&self) -> bool {
        self.octets() != self.when_asked.load(Ordering::Relaxed)
    }
}

/// Returns until when the pollers of these completion queues drive the sockets of a queue pair;
/// `None` if they do not, at `now`.
pub(crate) fn driven_until(cqs: [&CompletionQueue; 2], now: u64) -> Option<u64> {
    cqs.into_iter()
        .filter_map(|cq| cq.inner.pollers.driven_until(now))
        .max()
}

impl Source for QpInner {
    fn approach(&self) {
        prefetch::object(self);
    }

    fn come_next(&self) {
        // Who has the lock has it all close already.
        if let Some(g) = self.state.try_lock() {
            if let Some(socket) = g.link.socket() {
                prefetch::counts(socket);
                prefetch::object(&**socket);
            }
            g.machine.prefetch(prefetch::line);
        }
    }

    fn driven_until(&self, now: u64) -> Option<u64> {
        driven_until([&self.send_cq, &self.recv_cq], now)
    }

    fn was_driven(&self, now: u64) -> bool {
        let cqs = [&self.send_cq, &self.recv_cq];
        cqs.into_iter().any(|cq| cq.inner.pollers.was_driven(now))
    }

    fn rest(&self) -> bool {
        let mut g = self.state.lock();
        let Some(open) = g.link.open_mut() else {
            return false;
        };
        if !open.interest.readable {
            // The driving thread does not read now, and would not notice the end of the stream.
            return false;
        }
        if !open.driven_by_app {
            open.socket.engine.pause(&open.socket.stream);
            open.driven_by_app = true;
        }
        true
    }

    fn resume(&self) {
        let mut g = self.state.lock();
        if let Some(open) = g.link.open_mut().filter(|open| open.driven_by_app) {
            let socket = &open.socket;
            // It cannot fail for lack of anything: the descriptor was in the set before.
            if let Err(error) = socket
                .engine
                .resume(&socket.stream, socket.token, open.interest)
            {
                tracing::error!(qp = self.num, %error, "the socket cannot be watched");
            }
            open.driven_by_app = false;
        }
    }

    fn ready(self: Arc<Self>, readable: bool, writable: bool, broken: bool) -> bool {
        let mut served = false;
        if readable {
            let before = self.peer_answers.octets();
            served |= self.drive_rx();
            if self.peer_answers.octets() != before {
                self.send_cq.inner.answer_came();
            }
        }
        if writable {
            served |= self.drive_tx();
        }
        if broken {
            drive::hung_up(&self);
        }
        served
    }

    fn awaits(&self, kind: u32) -> bool {
        match kind {
            TIMER_MACHINE => self.awaits_time(),
            // The others are timers of the attempt to connect, which is over.
            _ => kind < TIMERS_END,
        }
    }

    fn timer(self: Arc<Self>, kind: u32) {
        match kind {
            TIMER_MACHINE => self.machine_timer_expired(),
            TIMER_LINGER => self.linger_timer_expired(),
            TIMER_SEND_DELAY => self.send_delay_expired(),
            TIMER_PEER_GONE => peer_gone::request_timer_expired(&self),
            TIMER_LIVENESS => liveness::timer(&self),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use iwarp_rnic::qp::{RxInterest, State};
    use iwarp_rnic::{SendFlags, SendOp, SendWr};
    use std::time::{Duration, Instant};

    /// Two threads that poll one queue may look at the count at the same time, and the slower one
    /// finds that more has been seen.
    #[test]
    fn what_another_poll_has_seen_is_not_seen_again() {
        let moved = BytesTransferred::default();
        moved.add(100);
        assert_eq!((moved.take(), moved.take()), (100, 0));
        moved.seen.store(250, Ordering::Relaxed);
        assert_eq!(moved.take(), 0);
        moved.add(160);
        assert_eq!(moved.take(), 10);
    }

    /// The end of a message is an answer if anything was placed since the last request. A request
    /// of the peer brings nothing, and a part of a message is no answer yet.
    #[test]
    fn an_answer_is_a_whole_message_with_octets_since_the_request() {
        let answered = PeerAnswers::default();
        let mut counters = Counters::default();
        assert!(!answered.is_answered());
        counters.rx_payload += 100;
        answered.note(&counters);
        assert!(!answered.is_answered(), "a part");
        counters.rx_messages += 1;
        answered.note(&counters);
        assert!(answered.is_answered() && answered.octets() == 100);
        answered.asked();
        counters.rx_messages += 1;
        answered.note(&counters);
        assert!(!answered.is_answered(), "nothing was placed");
        counters.rx_messages += 1;
        counters.rx_payload += 1;
        answered.note(&counters);
        assert!(answered.is_answered());
    }

    /// The end of a stream is reported late, when the queue pair was reset and its next stream
    /// holds a Send already.
    #[test]
    fn a_late_report_of_a_hang_up_does_not_end_the_next_stream() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        qp.modify(State::Init).unwrap();
        let gid = ctx.device().addresses[0].gid();
        qp.connect_peer(gid, qp.num()).unwrap();
        qp.modify(State::Rts).unwrap();
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            sges: &[],
            inline: &[],
        };
        qp.post_send(&[wr]).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while qp.inner.state.lock().machine.rx_interest() != RxInterest::Held {
            assert!(Instant::now() < end, "the Send is not held");
            std::thread::sleep(Duration::from_millis(1));
        }
        Arc::clone(&qp.inner).ready(false, false, true);
        assert_eq!(qp.state(), State::Rts);
        qp.destroy();
    }

    /// A queue pair is reset while an attempt to connect it comes to its end: neither its failure
    /// nor its stream concern the next epoch.
    #[test]
    fn what_was_begun_before_a_reset_does_not_concern_the_queue_pair_after_it() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        qp.modify(State::Init).unwrap();
        let before = qp.epoch();
        let _peer = testing::connected_for(&qp, Some(before)).expect("it is its life");
        qp.modify(State::Reset).unwrap();
        qp.inner.fail_connection(before);
        assert_eq!(qp.state(), State::Reset);
        qp.modify(State::Init).unwrap();
        assert!(testing::connected_for(&qp, Some(before)).is_err());
        qp.inner.fail_connection(before);
        assert_eq!(qp.state(), State::Init);
        assert!(qp.addresses().is_none());
        qp.inner.fail_connection(qp.epoch());
        assert_eq!(qp.state(), State::Error);
        qp.destroy();
    }

    /// Those of one thread that serves it are told from those of another, which the caller leaves
    /// the work to.
    #[test]
    fn who_serves_a_queue_pair_is_told_so() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let ready = |readable, writable| Arc::clone(&qp.inner).ready(readable, writable, false);
        let sides = [(true, false), (false, true), (true, true), (false, false)];
        let served = || sides.map(|(readable, writable)| ready(readable, writable));
        assert_eq!(served(), [true, true, true, false]);
        let reads = qp.inner.rx.try_take();
        assert_eq!(served(), [false, true, true, false]);
        drop(reads);
        let writes = qp.inner.tx.try_take();
        assert_eq!(served(), [true, false, true, false]);
        drop(writes);
        qp.destroy();
    }

    /// A socket that the program's threads read is not watched, and one that they cannot read is.
    #[test]
    fn a_queue_pair_rests_while_its_socket_is_read() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let is_driven = || {
            let g = qp.inner.state.lock();
            g.link.open().is_some_and(|open| open.driven_by_app)
        };
        assert!(!qp.inner.rest() && !is_driven(), "no connection");
        qp.inner.resume();
        let _peer = testing::connected(&qp);
        for _ in 0..2 {
            assert!(qp.inner.rest() && is_driven());
            assert!(qp.inner.rest() && is_driven(), "it rests already");
            qp.inner.resume();
            assert!(!is_driven());
        }
        testing::open(&mut qp.inner.state.lock()).interest.readable = false;
        assert!(!qp.inner.rest() && !is_driven());
        qp.destroy();
    }

    /// The pollers of either queue drive it, and those who drive longest count.
    #[test]
    fn the_pollers_of_both_queues_drive_a_queue_pair() {
        let ctx = testing::context();
        let [send, recv] = [(); 2].map(|()| ctx.create_cq(4, None).unwrap());
        let qp = testing::queue_pair(&ctx, &send, &recv);
        let start = Instant::now();
        assert_eq!(qp.inner.driven_until(0), None);
        let mut last = None;
        for cq in [&recv, &send] {
            let end = loop {
                assert_eq!(cq.poll(&mut [iwarp_rnic::Cqe::default()]), Ok(0));
                if let Some(end) = cq.inner.pollers.driven_until(0) {
                    break end;
                }
                assert!(start.elapsed() < Duration::from_secs(20), "never driven");
            };
            assert!(last < Some(end));
            last = Some(end);
            assert_eq!(qp.inner.driven_until(0), last);
            assert_eq!(driven_until([&recv, &send], 0), last);
            assert!(qp.inner.was_driven(end));
        }
        qp.destroy();
    }

    /// Timers that nobody awaits are no work that a stuck thread leaves undone.
    #[test]
    fn timers_of_a_connection_are_awaited() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        for kind in [
            TIMER_SEND_DELAY,
            TIMER_PEER_GONE,
            TIMER_LINGER,
            TIMER_LIVENESS,
        ] {
            assert!(qp.inner.awaits(kind), "{kind}");
        }
        // Nothing is due.
        for kind in [TIMER_MACHINE, TIMERS_END, TIMERS_END + 1, u32::MAX] {
            assert!(!qp.inner.awaits(kind), "{kind}");
        }
        let _peer = testing::connected(&qp);
        {
            let mut g = qp.inner.state.lock();
            g.cork.timer = true;
            testing::open(&mut g).timer = Some(iwarp_rnic::Time::ZERO);
        }
        let timers = || {
            let mut g = qp.inner.state.lock();
            (g.cork.timer, testing::open(&mut g).timer.is_some())
        };
        Arc::clone(&qp.inner).timer(TIMER_SEND_DELAY);
        assert_eq!(timers(), (false, true));
        Arc::clone(&qp.inner).timer(TIMER_MACHINE);
        assert_eq!(timers(), (false, false));
        qp.destroy();
    }
}
