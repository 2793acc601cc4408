//! Responders that have accepted, and whose queue pair takes over the stream when the initiator's
//! first FPDU arrives.
//!
//! Queue pairs that are connected by number need this. The initiator's queue pair may be reset
//! after it has sent its request. The stream then ends although the responder has replied, and the
//! initiator may already be connecting another stream. Between two resets a queue pair takes only
//! one stream, and that must not be the stream that the initiator has given up. The first FPDU
//! shows that the initiator's queue pair uses the stream. In the peer-to-peer model the initiator
//! has to send an FPDU first (RFC 6581 section 9.2).
//!
//! The time limit is the one of the start-up session in its state `FirstFpdu`. The session itself
//! is dropped, because it has a large buffer, and the next octets belong to the queue pair.

use super::CmEventKind;
use super::id::{CmId, CmIdInner, ConnectionParameters, IdState, engine};
use super::phase::Phase;
use crate::conn::attach::Handover;
use crate::conn::qp::{QueuePair, TIMERS_END};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::sys::poller::Interest;
use iwarp_rnic::Time;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

// Differs from the timers of queue pairs, because the queue pair takes over the token.
const TIMER_OVERDUE: u32 = TIMERS_END;

/// A stream whose initiator has sent nothing since its request.
pub(super) struct AwaitingFirstFpdu {
    id: Weak<CmIdInner>,
    qp: QueuePair,
    engine: Arc<Engine>,
    token: u64,
    /// `None` after the first FPDU, and after the end of the stream.
    handover: Mutex<Option<Handover>>,
}

impl CmId {
    /// Accepts a connection request as [`accept`](Self::accept) does. In the peer-to-peer model the
    /// queue pair takes over the stream when the peer's first FPDU arrives, unless the queue pair
    /// was reset after [`set_queue_pair_of`](Self::set_queue_pair_of). If the stream ends before
    /// the first FPDU, the event is ConnectError. If no FPDU arrives in time, the event is
    /// Unreachable. In both cases the queue pair can take another stream.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub(crate) fn accept_at_first_fpdu(&self, parameters: &ConnectionParameters) -> Result<()> {
        let (replied, qp) = self.send_reply(parameters)?;
        let Some(until) = replied.first_fpdu_until else {
            return self.attach_stream(replied, &qp);
        };
        let engine = engine()?;
        let pending = Arc::new(AwaitingFirstFpdu {
            id: Arc::downgrade(&self.inner),
            qp,
            token: engine.token(),
            engine,
            handover: Mutex::new(None),
        });
        // Locked until the phase is set, so that `destroy` either prevents the watch or finds it in
        // the phase.
        let mut s = self.inner.state.lock();
        if !matches!(s.phase, Phase::Connected(false)) {
            drop(s);
            replied.handover.stream.abort();
            return Err(Error::InvalidState("the identifier was destroyed"));
        }
        if let Err(error) = pending.watch(replied.handover, until) {
            drop(s.end_pending());
            return Err(error);
        }
        s.phase = Phase::AwaitingFirstFpdu(pending);
        Ok(())
    }

    /// Returns `true` if the identifier has accepted a request
    /// ([`accept_at_first_fpdu`](Self::accept_at_first_fpdu)) and the peer has sent nothing since
    /// then.
    pub(crate) fn awaits_first_fpdu(&self) -> bool {
        matches!(self.inner.state.lock().phase, Phase::AwaitingFirstFpdu(_))
    }
}

impl AwaitingFirstFpdu {
    fn watch(self: &Arc<Self>, handover: Handover, until: Time) -> Result<()> {
        // Locked until the stream is in the slot, so that `ready` finds it.
        let mut slot = self.handover.lock();
        let source = Arc::clone(self) as Arc<dyn Source>;
        self.engine
            .add(&handover.stream, self.token, Interest::READ, source)?;
        *slot = Some(handover);
        drop(slot);
        self.engine.at(until.as_nanos(), self.token, TIMER_OVERDUE);
        Ok(())
    }

    /// Ends the stream without an event. Returns `false` if the queue pair has taken the stream, or
    /// the stream has ended.
    pub(super) fn cancel(&self) -> bool {
        let Some(handover) = self.handover.lock().take() else {
            return false;
        };
        self.engine.remove(&handover.stream, self.token);
        handover.stream.abort();
        true
    }

    /// Passes the stream to the queue pair, after the initiator has sent something. The caller
    /// holds no locks, because the queue pair starts to use the stream immediately.
    fn hand_over(&self, mut handover: Handover) {
        let id = self.id.upgrade();
        let is_wanted = id.as_ref().is_some_and(|id| {
            let mut s = id.state.lock();
            let is_wanted = matches!(s.phase, Phase::AwaitingFirstFpdu(_));
            if is_wanted {
                s.phase = Phase::Connected(false);
            }
            is_wanted
        });
        if !is_wanted {
            self.engine.remove(&handover.stream, self.token);
            handover.stream.abort();
            return;
        }
        // The engine keeps watching the socket; the queue pair replaces `self` as its source.
        handover.watched = Some(self.token);
        if let Err(error) = self.qp.inner.attach(handover) {
            tracing::debug!(%error, "cannot attach the stream to the queue pair");
            self.notify_end(CmEventKind::ConnectError, error.errno());
        }
    }

    /// Notifies the program that the stream has ended, unless the program has destroyed the
    /// identifier.
    fn notify_end(&self, kind: CmEventKind, status: i32) {
        let Some(id) = self.id.upgrade() else { return };
        let mut s = id.state.lock();
        let before = s.end_pending();
        if before.is_some() {
            id.notify(s, kind, status);
        }
    }
}

impl IdState {
    /// Ends a connection that is accepted and not yet established. Returns the previous phase,
    /// which the caller drops without locks. Returns `None` if there is no such connection.
    fn end_pending(&mut self) -> Option<Phase> {
        if !matches!(
            self.phase,
            Phase::AwaitingFirstFpdu(_) | Phase::Connected(false)
        ) {
            return None;
        }
        self.counted = None;
        Some(std::mem::replace(&mut self.phase, Phase::Disconnected))
    }
}

impl Source for AwaitingFirstFpdu {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        let mut slot = self.handover.lock();
        let Some(handover) = slot.take() else {
            return true;
        };
        match handover.stream.has_octets() {
            Ok(true) => {
                drop(slot);
                self.hand_over(handover);
            }
            Ok(false) => *slot = Some(handover),
            Err(error) => {
                drop(slot);
                tracing::debug!(%error, "the initiator closed before its first FPDU");
                self.engine.remove(&handover.stream, self.token);
                drop(handover);
                self.notify_end(CmEventKind::ConnectError, libc::ECONNRESET);
            }
        }
        true
    }

    fn awaits(&self, kind: u32) -> bool {
        kind == TIMER_OVERDUE && self.handover.lock().is_some()
    }

    fn timer(self: Arc<Self>, _: u32) {
        // The process may have been stopped (SIGSTOP), so the socket is read before the timeout
        // takes effect.
        Arc::clone(&self).ready(true, false, false);
        if self.cancel() {
            self.notify_end(CmEventKind::Unreachable, libc::ETIMEDOUT);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::{CmEvent, create_event_channel};
    use super::*;
    use crate::testing;
    use iwarp_proto::mpa::negotiate::{Initiator, LocalParams};
    use iwarp_rnic::qp::State;
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    /// Connects as an initiator. Returns the identifier of its request, and the initiator's socket.
    pub(crate) fn requested(qp: &QueuePair) -> (CmId, std::net::TcpStream) {
        let channel = create_event_channel().unwrap();
        let listener = CmId::create(&channel, Some(&qp.context()));
        listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        listener.listen(0).unwrap();
        let mut peer = std::net::TcpStream::connect(listener.addresses().0.unwrap()).unwrap();
        let params = LocalParams {
            peer_to_peer: true,
            ..LocalParams::default()
        };
        let request = Initiator::new(params, b"").unwrap();
        peer.write_all(request.request_octets()).unwrap();
        let id = next(&channel).id;
        listener.destroy();
        (id, peer)
    }

    /// Accepts a request for this epoch of the queue pair. Returns the identifier, and the
    /// initiator's socket after it has read the reply.
    pub(crate) fn accepted(qp: &QueuePair, epoch: u64) -> (CmId, std::net::TcpStream) {
        let (id, mut peer) = requested(qp);
        id.set_queue_pair_of(Some(qp), Some(epoch));
        id.accept_at_first_fpdu(&ConnectionParameters::default())
            .unwrap();
        peer.read_exact(&mut [0; 24]).unwrap();
        (id, peer)
    }

    fn next(channel: &super::super::CmEventChannel) -> CmEvent {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(event) = channel.try_next() {
                return event;
            }
            assert!(Instant::now() < end, "no event");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn queue_pair() -> QueuePair {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        qp.modify(State::Init).unwrap();
        qp
    }

    /// If the queue pair was reset before the first message arrives, it does not take that stream.
    /// It can still take a stream of its current epoch.
    #[test]
    fn reset_queue_pair_ignores_earlier_streams() {
        let qp = queue_pair();
        let (id, mut peer) = accepted(&qp, qp.epoch());
        qp.modify(State::Reset).unwrap();
        qp.modify(State::Init).unwrap();
        peer.write_all(&[0; 24]).unwrap();
        let event = next(&id.channel());
        assert_eq!(event.kind, CmEventKind::ConnectError);
        assert!(event.id.is_same(&id) && !id.awaits_first_fpdu());
        assert_eq!((qp.state(), qp.addresses()), (State::Init, None));
        // It takes a stream of its current epoch.
        let (id, mut peer) = accepted(&qp, qp.epoch());
        assert!(id.awaits_first_fpdu() && qp.addresses().is_none());
        peer.write_all(&[0]).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while qp.addresses().is_none() {
            assert!(
                Instant::now() < end,
                "the queue pair does not take the stream"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        qp.destroy();
    }

    #[test]
    fn peer_silence_notifies_cm_only() {
        let qp = queue_pair();
        let (id, peer) = accepted(&qp, qp.epoch());
        drop(peer);
        let event = next(&id.channel());
        let gone = (CmEventKind::ConnectError, libc::ECONNRESET);
        assert_eq!((event.kind, event.status), gone);
        let (id, mut peer) = accepted(&qp, qp.epoch());
        let pending = match &id.inner.state.lock().phase {
            Phase::AwaitingFirstFpdu(pending) => Arc::clone(pending),
            _ => unreachable!("the peer has sent nothing"),
        };
        assert!(pending.awaits(TIMER_OVERDUE));
        Arc::clone(&pending).timer(TIMER_OVERDUE);
        assert!(!pending.awaits(TIMER_OVERDUE));
        let event = next(&id.channel());
        let silent = (CmEventKind::Unreachable, libc::ETIMEDOUT);
        assert_eq!((event.kind, event.status), silent);
        assert!(peer.read(&mut [0]).is_err(), "the connection is not reset");
        // The queue pair is also unaffected if the program destroys the identifier.
        let (id, mut peer) = accepted(&qp, qp.epoch());
        id.destroy();
        assert!(peer.read(&mut [0]).is_err(), "the connection is not reset");
        assert!(id.channel().is_empty());
        assert_eq!((qp.state(), qp.addresses()), (State::Init, None));
        qp.destroy();
    }

    fn pending_of(id: &CmId) -> Arc<AwaitingFirstFpdu> {
        match &id.inner.state.lock().phase {
            Phase::AwaitingFirstFpdu(pending) => Arc::clone(pending),
            _ => unreachable!("the peer has sent nothing"),
        }
    }

    /// A process that was stopped (SIGSTOP) finds the first message and the expired timer at the
    /// same time.
    #[test]
    fn first_message_beats_expired_timer() {
        let qp = queue_pair();
        let (id, mut peer) = accepted(&qp, qp.epoch());
        let pending = pending_of(&id);
        {
            let slot = pending.handover.lock();
            let stream = &slot.as_ref().unwrap().stream;
            pending.engine.pause(stream);
            peer.write_all(&[0]).unwrap();
            testing::until("the octet has not arrived", || {
                matches!(stream.has_octets(), Ok(true))
            });
        }
        pending.timer(TIMER_OVERDUE);
        assert!(qp.addresses().is_some() && !id.awaits_first_fpdu());
        assert!(id.channel().is_empty());
        qp.destroy();
    }

    /// The time limit is the device's `handshake_timeout`.
    #[test]
    fn silent_peer_is_timed_out() {
        let ctx = testing::context_with(crate::Config {
            handshake_timeout: Duration::from_secs(1),
            ..crate::Config::default()
        });
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        qp.modify(State::Init).unwrap();
        let (id, _peer) = accepted(&qp, qp.epoch());
        let event = next(&id.channel());
        let silent = (CmEventKind::Unreachable, libc::ETIMEDOUT);
        assert_eq!((event.kind, event.status), silent);
        qp.destroy();
    }

    #[test]
    fn ended_connection_is_not_counted() {
        type End = fn(&CmId, std::net::TcpStream);
        let ends: [End; 3] = [
            |_, peer| drop(peer),
            |id, _| pending_of(id).timer(TIMER_OVERDUE),
            |id, _| id.destroy(),
        ];
        let qp = queue_pair();
        for (index, end) in ends.into_iter().enumerate() {
            let (id, peer) = accepted(&qp, qp.epoch());
            assert!(id.inner.state.lock().counted.is_some());
            end(&id, peer);
            let is_uncounted = || id.inner.state.lock().counted.is_none();
            testing::until(
                &format!("the connection still counts: {index}"),
                is_uncounted,
            );
        }
        qp.destroy();
    }
}
