//! The timer of the state machine, one for each connection. It follows what the state machine says
//! is due next ([`iwarp_rnic::qp::StreamTimes`]), for example reminders to a silent responder, or
//! the limit of a held Send.
//!
//! Timers are not cancelled. A timer without a purpose is ignored and wakes no thread.

use super::effects::{DriveHost, Effects};
use super::qp::{QpInner, QpState, TIMER_MACHINE};
use crate::conn::peer_gone;
use crate::sys::clock::now_ns;
use iwarp_rnic::Time;
use iwarp_rnic::qp::RxInterest;
use std::sync::Arc;

impl QpState {
    /// Returns `true` if no timer of the connection is set for `at` or earlier.
    #[inline]
    fn timer_is_after(&self, at: Time) -> bool {
        let timer = self.link.open().and_then(|open| open.timer);
        timer.is_none_or(|timer| at < timer)
    }

    fn set_timer(&mut self, timer: Option<Time>) {
        if let Some(open) = self.link.open_mut() {
            open.timer = timer;
        }
    }
}

impl QpInner {
    /// Does what is due already, and sets the timer for what is due next. Called after each change
    /// of the state machine.
    #[inline]
    pub(crate) fn follow_time(self: &Arc<Self>, g: &mut QpState, effects: &mut Effects) {
        // Nearly always no time is awaited, and the clock is not read.
        if let Some(at) = g.machine.poll_at()
            && g.timer_is_after(at)
        {
            self.follow_to(g, at, effects);
        }
    }

    #[cold]
    fn follow_to(self: &Arc<Self>, g: &mut QpState, at: Time, effects: &mut Effects) {
        let Some(socket) = g.link.socket().cloned() else {
            return;
        };
        if socket.engine.is_foreign() {
            // No timer expires in a forked child. The end of a connection need not wait there,
            // because a child sends nothing.
            if g.machine.is_ending() {
                g.machine.on_time(at, &mut DriveHost::new(self, effects));
            }
            return;
        }
        let now = Time::from_nanos(now_ns());
        if at <= now {
            g.machine.on_time(now, &mut DriveHost::new(self, effects));
        }
        if let Some(at) = g.machine.poll_at()
            && g.timer_is_after(at)
        {
            g.set_timer(Some(at));
            socket.engine.at(at.as_nanos(), socket.token, TIMER_MACHINE);
        }
    }

    /// Returns `true` if the state machine still awaits a time. If not, the timer is forgotten.
    pub(crate) fn awaits_time(&self) -> bool {
        // Must not block: the thread that holds the state may be stuck in the program's memory.
        // This is called between two rounds of the progress thread, where the watch would not
        // notice that the progress thread is stuck, too.
        let Some(mut g) = self.state.try_lock() else {
            return true;
        };
        let awaits = g.link.is_open() && g.machine.poll_at().is_some();
        if !awaits {
            g.set_timer(None);
        }
        awaits
    }

    pub(crate) fn machine_timer_expired(self: &Arc<Self>) {
        // The process may have been stopped, so take what has arrived before the time is judged.
        self.drive_rx();
        let mut effects = Effects::default();
        let mut g = self.state.lock();
        let now = Time::from_nanos(now_ns());
        let Some(socket) = g.link.socket().cloned() else {
            return;
        };
        if g.timer_is_after(now) {
            // A later timer has replaced this one.
            return;
        }
        g.set_timer(None);
        // Nothing is read past a held Send, so the end must be looked for.
        if g.machine.rx_interest() == RxInterest::Held && socket.stream.peer_closed() {
            if g.machine.hides_end() {
                peer_gone::notify_manager(&g, &mut effects);
            }
            g.machine.sender_closed();
        }
        g.machine
            .on_time(now, &mut DriveHost::new(self, &mut effects));
        self.collect_effects(&mut g, &mut effects);
        drop(g);
        effects.apply(self);
        self.drive_tx();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ReceiverNotReady};
    use crate::conn::qp::QueuePair;
    use crate::testing;
    use iwarp_rnic::RecvWr;
    use iwarp_rnic::qp::State;
    use std::io::{Read as _, Write as _};
    use std::time::{Duration, Instant};

    #[test]
    fn earlier_time_sets_new_timer() {
        let ctx = testing::context_with(Config {
            receiver_not_ready: ReceiverNotReady::Hold(Duration::from_millis(20)),
            ..Config::default()
        });
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let mut peer = testing::connected(&qp);
        let later = Time::from_nanos(now_ns() + 3_600_000_000_000);
        testing::open(&mut qp.inner.state.lock()).timer = Some(later);
        // It finds no receive.
        peer.write_all(&testing::EMPTY_SEND).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut terminate = [0; 4];
        peer.read_exact(&mut terminate).unwrap();
        // The last segment of a Terminate, untagged.
        assert_eq!(terminate[2..], [0x41, 0x47]);
        qp.destroy();
    }

    const LIMIT: Duration = Duration::from_secs(20);

    /// Creates a queue pair that may hold a Send for an hour, and its peer, whose Send is held.
    fn holds() -> (QueuePair, std::net::TcpStream) {
        let ctx = testing::context_with(Config {
            receiver_not_ready: ReceiverNotReady::Hold(Duration::from_secs(3600)),
            ..Config::default()
        });
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let mut peer = testing::connected(&qp);
        peer.write_all(&testing::EMPTY_SEND).unwrap();
        until(&qp, |g| {
            g.machine.rx_interest() == RxInterest::Held && timer(g).is_some()
        });
        (qp, peer)
    }

    fn timer(g: &QpState) -> Option<Time> {
        g.link.open().and_then(|open| open.timer)
    }

    fn until(qp: &QueuePair, is_so: impl Fn(&QpState) -> bool) {
        let start = Instant::now();
        while !is_so(&qp.inner.state.lock()) {
            assert!(start.elapsed() < LIMIT);
            std::thread::yield_now();
        }
    }

    /// A timer without a purpose is forgotten, so that it is not taken for work that a stuck thread
    /// leaves undone.
    #[test]
    fn timer_is_awaited_while_needed() {
        let (qp, _peer) = holds();
        assert!(qp.inner.awaits_time());
        assert!(timer(&qp.inner.state.lock()).is_some());
        let receive = RecvWr {
            wr_id: 1,
            sges: &[],
        };
        qp.post_recv(&[receive]).unwrap();
        until(&qp, |g| g.machine.poll_at().is_none());
        {
            let mut g = qp.inner.state.lock();
            testing::open(&mut g).timer = Some(Time::from_nanos(1 << 62));
            assert!(
                qp.inner.awaits_time(),
                "the holder of the state may be stuck"
            );
            assert!(timer(&g).is_some());
        }
        // An earlier timer expires, which the later one has replaced.
        qp.inner.machine_timer_expired();
        assert!(timer(&qp.inner.state.lock()).is_some());
        assert!(!qp.inner.awaits_time());
        assert_eq!(timer(&qp.inner.state.lock()), None);
        qp.destroy();
        assert!(!qp.inner.awaits_time(), "not connected");
    }

    /// A sender that has closed no longer waits, so its Send is held only briefly.
    #[test]
    fn held_send_ends_with_its_sender() {
        let (qp, peer) = holds();
        let first_check = qp.inner.state.lock().machine.poll_at();
        // The first check has found that the sender is there.
        until(&qp, |g| g.machine.poll_at() > first_check);
        assert_eq!(qp.state(), State::Rts);
        drop(peer);
        until(&qp, |g| g.machine.state() == State::Error);
        qp.destroy();
    }
}
