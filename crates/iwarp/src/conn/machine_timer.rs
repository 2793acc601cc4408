//! The timer of the state machine, one per connection. It is set for the time when the state
//! machine next has work ([`iwarp_rnic::qp::StreamTimes`]), for example a reminder to a silent
//! responder, or the time limit of a held Send.
//!
//! Timers cannot be cancelled. A timer that is no longer needed is ignored and wakes no thread.

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
    /// Has the state machine do the work that is due, and sets the timer for the next work. Called
    /// after each change of the state machine.
    #[inline]
    pub(crate) fn update_timer(self: &Arc<Self>, g: &mut QpState, effects: &mut Effects) {
        // The state machine rarely waits for a time. If it does not, the clock is not read.
        if let Some(at) = g.machine.poll_at()
            && g.timer_is_after(at)
        {
            self.set_timer_for(g, at, effects);
        }
    }

    #[cold]
    fn set_timer_for(self: &Arc<Self>, g: &mut QpState, at: Time, effects: &mut Effects) {
        let Some(socket) = g.link.socket().cloned() else {
            return;
        };
        if socket.engine.is_foreign() {
            // No timer expires in a forked child. There, the end of a connection need not wait for
            // its time, because the child sends nothing.
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

    /// Returns `true` if the state machine still waits for a time. If not, records that no timer is
    /// set.
    pub(crate) fn awaits_time(&self) -> bool {
        // This must not block. The thread that holds the state may be stuck in an access to the
        // program's memory. The progress thread calls this between two rounds, and the watch
        // notices only threads that are stuck in a round.
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
        // If the process was stopped for a while, the peer's answer may have arrived. Read it
        // before the state machine decides that it is late.
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
        // While a Send is held, nothing is read after it, so check here whether the peer has
        // closed.
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
        // No receive is posted, so the Send is held until its time limit.
        peer.write_all(&testing::EMPTY_SEND).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut terminate = [0; 4];
        peer.read_exact(&mut terminate).unwrap();
        // The header of a Terminate: the last segment, untagged.
        assert_eq!(terminate[2..], [0x41, 0x47]);
        qp.destroy();
    }

    const LIMIT: Duration = Duration::from_secs(20);

    /// The Send is held for up to an hour.
    fn with_held_send() -> (QueuePair, std::net::TcpStream) {
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

    /// Once the receive is posted, the timer is not needed. But while the state is locked, the
    /// timer must be assumed to be needed.
    #[test]
    fn timer_is_awaited_while_needed() {
        let (qp, _peer) = with_held_send();
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
        // An older timer expires. It does not affect the timer that is set for later.
        qp.inner.machine_timer_expired();
        assert!(timer(&qp.inner.state.lock()).is_some());
        assert!(!qp.inner.awaits_time());
        assert_eq!(timer(&qp.inner.state.lock()), None);
        qp.destroy();
        assert!(!qp.inner.awaits_time(), "not connected");
    }

    #[test]
    fn held_send_fails_soon_after_close() {
        let (qp, peer) = with_held_send();
        let first_check = qp.inner.state.lock().machine.poll_at();
        // The first check has found that the sender has not closed.
        until(&qp, |g| g.machine.poll_at() > first_check);
        assert_eq!(qp.state(), State::Rts);
        drop(peer);
        until(&qp, |g| g.machine.state() == State::Error);
        qp.destroy();
    }
}
