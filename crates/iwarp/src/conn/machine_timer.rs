//! One timer for each connection. It follows what the state machine says is due next: reminders for
//! a silent responder, the time of a held Send, and the like ([`iwarp_rnic::qp::StreamTimes`]).
//!
//! Timers are not cancelled. One whose purpose is gone is ignored and wakes no thread.

use super::effects::{DriveHost, Effects};
use super::qp::{QpInner, QpState, TIMER_MACHINE};
use crate::conn::peer_gone;
use crate::sys::clock::now_ns;
use iwarp_rnic::Time;
use iwarp_rnic::qp::RxInterest;
use std::sync::Arc;

impl QpState {
    /// Returns `true` if no timer of the connection expires at this time or before.
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
    /// Does what is due already, and sets a timer for what is due later. Called after each change
    /// of the state machine.
    #[inline]
    pub(crate) fn follow_time(self: &Arc<Self>, g: &mut QpState, effects: &mut Effects) {
        // Nearly always nothing is due at any time, and the clock is not read.
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
            // No timer ever expires here. In a child of the process whose connection this is, an
            // end need not wait: it sends nothing.
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

    /// Returns `true` if something is still due at some time. If not, the timer is forgotten.
    pub(crate) fn awaits_time(&self) -> bool {
        // The thread that has the state may be stuck in the program's memory. This is asked outside
        // of a turn of the progress thread, which would then be stuck where nobody notices.
        let Some(mut g) = self.state.try_lock() else {
            return true;
        };
        let awaits = g.link.is_open() && g.machine.poll_at().is_some();
        if !awaits {
            g.set_timer(None);
        }
        awaits
    }

    /// The timer has expired.
    pub(crate) fn machine_timer_expired(self: &Arc<Self>) {
        // The process may have been stopped meanwhile: what has come is looked at before the clock
        // is believed.
        self.drive_rx();
        let mut effects = Effects::default();
        let mut g = self.state.lock();
        let now = Time::from_nanos(now_ns());
        let Some(socket) = g.link.socket().cloned() else {
            return;
        };
        if g.timer_is_after(now) {
            // An earlier one has replaced it.
            return;
        }
        g.set_timer(None);
        // Nothing is read behind a held Send, so the end has to be looked for.
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

    /// Something that is due earlier than what the timer was set for is not late.
    #[test]
    fn a_timer_is_set_anew_for_what_is_due_earlier() {
        let ctx = testing::context_with(Config {
            receiver_not_ready: ReceiverNotReady::Hold(Duration::from_millis(20)),
            ..Config::default()
        });
        let cq = ctx.create_cq(2, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let mut peer = testing::connected(&qp);
        let later = Time::from_nanos(now_ns() + 3_600_000_000_000);
        testing::open(&mut qp.inner.state.lock()).timer = Some(later);
        // There is no receive for it.
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

    /// A queue pair that may hold a Send for an hour, and its peer, whose Send is held.
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

    /// A timer whose purpose is gone is forgotten, so that nobody takes it for work that a stuck
    /// thread leaves undone.
    #[test]
    fn a_timer_is_awaited_while_something_is_due() {
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
            assert!(qp.inner.awaits_time(), "whoever has it may be stuck");
            assert!(timer(&g).is_some());
        }
        // An earlier one expires, whose place it has taken.
        qp.inner.machine_timer_expired();
        assert!(timer(&qp.inner.state.lock()).is_some());
        assert!(!qp.inner.awaits_time());
        assert_eq!(timer(&qp.inner.state.lock()), None);
        qp.destroy();
        assert!(!qp.inner.awaits_time(), "there is no connection");
    }

    /// A sender that has closed waits for no receive, so its Send is held for a moment only.
    #[test]
    fn a_held_send_waits_as_long_as_its_sender_does() {
        let (qp, peer) = holds();
        let look = qp.inner.state.lock().machine.poll_at();
        // The first look has found that the sender is there.
        until(&qp, |g| g.machine.poll_at() > look);
        assert_eq!(qp.state(), State::Rts);
        drop(peer);
        until(&qp, |g| g.machine.state() == State::Error);
        qp.destroy();
    }
}
