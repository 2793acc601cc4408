//! The implementation of [`Source`] for queue pairs: how the engine drives a queue pair, and pauses
//! while application threads drive it.

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

/// Counts the bytes that a queue pair sends and receives. A polling thread estimates from the count
/// how long its drive took.
#[derive(Debug, Default)]
pub(crate) struct BytesTransferred {
    count: AtomicU64,
    /// The count at the last call of [`take`](Self::take). A hint.
    taken: AtomicU64,
}

impl BytesTransferred {
    /// The caller holds the state lock.
    #[inline]
    pub(crate) fn add(&self, bytes: usize) {
        let before = self.count.load(Ordering::Relaxed);
        self.count.store(before + bytes as u64, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn take(&self) -> u64 {
        let count = self.count.load(Ordering::Relaxed);
        let taken = self.taken.load(Ordering::Relaxed);
        // Another thread may have taken more between the two loads.
        if count <= taken {
            return 0;
        }
        self.taken.store(count, Ordering::Relaxed);
        count - taken
    }
}

/// Whether a message of the peer has arrived since the program last posted a request. The counts
/// are hints.
#[derive(Debug, Default)]
pub(crate) struct PeerAnswers {
    /// Number of complete messages received.
    messages: AtomicU64,
    /// Number of payload bytes placed when the last of these messages was complete.
    payload_bytes: AtomicU64,
    /// The value of `payload_bytes` when the program last posted a request.
    at_last_request: AtomicU64,
}

impl PeerAnswers {
    /// Records the counters of the queue pair, whose state the caller has locked. An incomplete
    /// message is no answer yet.
    #[inline]
    pub(crate) fn record(&self, counters: &Counters) {
        if counters.rx_messages != self.messages.load(Ordering::Relaxed) {
            self.messages.store(counters.rx_messages, Ordering::Relaxed);
            self.payload_bytes
                .store(counters.rx_payload, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn record_request(&self) {
        let payload_bytes = self.payload_bytes();
        self.at_last_request.store(payload_bytes, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn payload_bytes(&self) -> u64 {
        self.payload_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_answered(&self) -> bool {
        self.payload_bytes() != self.at_last_request.load(Ordering::Relaxed)
    }
}

/// Returns until when the pollers of these completion queues drive the queue pair's sockets; `None`
/// if they do not drive them at `now`.
pub(crate) fn driven_until(cqs: [&CompletionQueue; 2], now: u64) -> Option<u64> {
    cqs.into_iter()
        .filter_map(|cq| cq.inner.pollers.driven_until(now))
        .max()
}

impl Source for QpInner {
    fn prefetch_object(&self) {
        prefetch::object(self);
    }

    fn prefetch_state(&self) {
        // If the lock is held, its holder has these cache lines already.
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

    fn pause_watch(&self) -> bool {
        let mut g = self.state.lock();
        let Some(open) = g.link.open_mut() else {
            return false;
        };
        if !open.interest.readable {
            // The driving thread does not read now, and would miss the end of the stream.
            return false;
        }
        if !open.driven_by_app {
            open.socket.engine.pause(&open.socket.stream);
            open.driven_by_app = true;
        }
        true
    }

    fn resume_watch(&self) {
        let mut g = self.state.lock();
        if let Some(open) = g.link.open_mut().filter(|open| open.driven_by_app) {
            let socket = &open.socket;
            // The descriptor was in the set before, so only a bug can make this fail.
            if let Err(error) = socket
                .engine
                .resume(&socket.stream, socket.token, open.interest)
            {
                tracing::error!(qp = self.num, %error, "cannot add the socket to the epoll set");
            }
            open.driven_by_app = false;
        }
    }

    fn ready(self: Arc<Self>, readable: bool, writable: bool, broken: bool) -> bool {
        let mut served = false;
        if readable {
            let before = self.peer_answers.payload_bytes();
            served |= self.drive_rx();
            if self.peer_answers.payload_bytes() != before {
                self.send_cq.inner.record_arrival();
            }
        }
        if writable {
            served |= self.drive_tx();
        }
        if broken {
            drive::handle_hang_up(&self);
        }
        served
    }

    fn awaits(&self, kind: u32) -> bool {
        match kind {
            TIMER_MACHINE => self.awaits_time(),
            // Higher kinds belong to the attempt to connect, which is over.
            _ => kind < TIMERS_END,
        }
    }

    fn timer(self: Arc<Self>, kind: u32) {
        match kind {
            TIMER_MACHINE => self.machine_timer_expired(),
            TIMER_LINGER => self.linger_timer_expired(),
            TIMER_SEND_DELAY => self.send_delay_expired(),
            TIMER_PEER_GONE => peer_gone::request_timer_expired(&self),
            TIMER_LIVENESS => liveness::timer_expired(&self),
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

    #[test]
    fn transferred_bytes_are_taken_once() {
        let transferred = BytesTransferred::default();
        transferred.add(100);
        assert_eq!((transferred.take(), transferred.take()), (100, 0));
        transferred.taken.store(250, Ordering::Relaxed);
        assert_eq!(transferred.take(), 0);
        transferred.add(160);
        assert_eq!(transferred.take(), 10);
    }

    /// An answer is a complete message, if payload was placed since the last request. A Read
    /// request of the peer places nothing.
    #[test]
    fn answer_is_complete_message_with_payload() {
        let answers = PeerAnswers::default();
        let mut counters = Counters::default();
        assert!(!answers.is_answered());
        counters.rx_payload += 100;
        answers.record(&counters);
        assert!(!answers.is_answered(), "the message is incomplete");
        counters.rx_messages += 1;
        answers.record(&counters);
        assert!(answers.is_answered() && answers.payload_bytes() == 100);
        answers.record_request();
        counters.rx_messages += 1;
        answers.record(&counters);
        assert!(!answers.is_answered(), "nothing was placed");
        counters.rx_messages += 1;
        counters.rx_payload += 1;
        answers.record(&counters);
        assert!(answers.is_answered());
    }

    /// The engine may report the hang-up of an old stream only after the queue pair was reset, and
    /// when its next stream already holds a Send.
    #[test]
    fn stale_hang_up_spares_next_stream() {
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

    /// An attempt to connect may complete or fail after the queue pair was reset.
    #[test]
    fn stale_attempt_spares_reset_queue_pair() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        qp.modify(State::Init).unwrap();
        let before = qp.epoch();
        let _peer = testing::connected_for(&qp, Some(before)).expect("the epoch is current");
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

    /// `ready` returns `false` if another thread holds the baton, and so will do the work.
    #[test]
    fn ready_is_false_if_driven_elsewhere() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let ready = |readable, writable| Arc::clone(&qp.inner).ready(readable, writable, false);
        let sides = [(true, false), (false, true), (true, true), (false, false)];
        let served = || sides.map(|(readable, writable)| ready(readable, writable));
        assert_eq!(served(), [true, true, true, false]);
        let rx_baton = qp.inner.rx.try_take();
        assert_eq!(served(), [false, true, true, false]);
        drop(rx_baton);
        let tx_baton = qp.inner.tx.try_take();
        assert_eq!(served(), [true, false, true, false]);
        drop(tx_baton);
        qp.destroy();
    }

    /// The engine does not watch a socket that application threads drive, unless they cannot read
    /// it.
    #[test]
    fn polled_socket_is_not_watched() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let is_driven = || {
            let g = qp.inner.state.lock();
            g.link.open().is_some_and(|open| open.driven_by_app)
        };
        assert!(!qp.inner.pause_watch() && !is_driven(), "no connection");
        qp.inner.resume_watch();
        let _peer = testing::connected(&qp);
        for _ in 0..2 {
            assert!(qp.inner.pause_watch() && is_driven());
            assert!(qp.inner.pause_watch() && is_driven(), "already paused");
            qp.inner.resume_watch();
            assert!(!is_driven());
        }
        testing::open(&mut qp.inner.state.lock()).interest.readable = false;
        assert!(!qp.inner.pause_watch() && !is_driven());
        qp.destroy();
    }

    /// Pollers of either completion queue drive the queue pair. If both queues have a lease, the
    /// later end applies.
    #[test]
    fn pollers_of_both_queues_drive() {
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

    #[test]
    fn timers_of_connection_are_awaited() {
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
        // The state machine waits for no time, and higher kinds belong to the attempt to connect.
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
