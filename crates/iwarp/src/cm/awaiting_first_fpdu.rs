//! Responders that have accepted, and whose queue pair takes the stream only when the initiator's
//! first FPDU comes.
//!
//! Queue pairs that are connected by number need this. The initiator's queue pair may have been
//! reset after it sent its request. Then the stream ends although the responder has replied, and
//! the initiator may already be connecting with another stream. Between two resets a queue pair
//! takes only one stream, which must not be the one that the initiator has given up. The first FPDU
//! shows that the initiator's queue pair has taken the stream: in the peer-to-peer model it has to
//! send one (RFC 6581 section 9.2).
//!
//! The time limit is that of the start-up session in its state `FirstFpdu`. The session itself is
//! not kept: the octets that come belong to the queue pair, and a session holds a buffer for a
//! frame.

use super::CmEventKind;
use super::id::{CmId, CmIdInner, ConnectionParameters, IdState, Phase, engine};
use crate::conn::qp::{Handover, QueuePair, TIMERS_END};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::sys::poller::Interest;
use iwarp_rnic::Time;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

// Differs from all timers of a queue pair, because the queue pair takes over the token.
const TIMER_OVERDUE: u32 = TIMERS_END;

/// A stream whose initiator has sent nothing since its request.
pub(super) struct AwaitingFirstFpdu {
    id: Weak<CmIdInner>,
    qp: QueuePair,
    engine: Arc<Engine>,
    token: u64,
    /// `None` after the first FPDU, or the end.
    handover: Mutex<Option<Handover>>,
}

impl CmId {
    /// As [`accept`](Self::accept), but in the peer-to-peer model the queue pair takes the stream
    /// only when the peer's first FPDU comes, and only if it was not reset since it was set
    /// ([`set_queue_pair_of`](Self::set_queue_pair_of)). If the stream ends before that, or no FPDU
    /// comes in time, the event is ConnectError or Unreachable, as with `accept`, but the queue
    /// pair can take another stream.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub(crate) fn accept_at_first_fpdu(&self, parameters: &ConnectionParameters) -> Result<()> {
        let (replied, qp) = self.send_reply(parameters)?;
        let Some(until) = replied.first_fpdu_until else {
            return self.take(replied, &qp);
        };
        let engine = engine()?;
        let pending = Arc::new(AwaitingFirstFpdu {
            id: Arc::downgrade(&self.inner),
            qp,
            token: engine.token(),
            engine,
            handover: Mutex::new(None),
        });
        // Locked until the stream is in its place, so that `destroy` either prevents it or finds
        // it.
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

    /// Returns `true` if it has accepted a request
    /// ([`accept_at_first_fpdu`](Self::accept_at_first_fpdu)) and the peer has sent nothing since.
    pub(crate) fn awaits_first_fpdu(&self) -> bool {
        matches!(self.inner.state.lock().phase, Phase::AwaitingFirstFpdu(_))
    }
}

impl AwaitingFirstFpdu {
    fn watch(self: &Arc<Self>, handover: Handover, until: Time) -> Result<()> {
        // Locked until the stream is in its place, so that the engine finds it there.
        let mut slot = self.handover.lock();
        let source = Arc::clone(self) as Arc<dyn Source>;
        self.engine
            .add(&handover.stream, self.token, Interest::READ, source)?;
        *slot = Some(handover);
        drop(slot);
        self.engine.at(until.as_nanos(), self.token, TIMER_OVERDUE);
        Ok(())
    }

    /// Ends the stream without an event. Returns `false` if the queue pair has it, or it has ended.
    pub(super) fn cancel(&self) -> bool {
        let Some(handover) = self.handover.lock().take() else {
            return false;
        };
        self.engine.remove(&handover.stream, self.token);
        handover.stream.abort();
        true
    }

    /// Hands the stream, on which the initiator has sent something, to the queue pair. The caller
    /// holds no locks, because the queue pair starts to work immediately.
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
        // The socket stays watched: the queue pair takes this one's place.
        handover.watched = Some(self.token);
        if let Err(error) = self.qp.inner.attach(handover) {
            tracing::debug!(%error, "the queue pair does not take the connection");
            self.over(CmEventKind::ConnectError, error.errno());
        }
    }

    /// Notifies the program that the stream has ended, unless it has destroyed the identifier.
    fn over(&self, kind: CmEventKind, status: i32) {
        let Some(id) = self.id.upgrade() else { return };
        let mut s = id.state.lock();
        let before = s.end_pending();
        if before.is_some() {
            id.notify(s, kind, status);
        }
    }
}

impl IdState {
    /// Ends a connection that is accepted and not established. Returns the previous phase, which is
    /// dropped without locks; `None` if there is no such connection.
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
                tracing::debug!(%error, "the peer has given up a connection that it had asked for");
                self.engine.remove(&handover.stream, self.token);
                drop(handover);
                self.over(CmEventKind::ConnectError, libc::ECONNRESET);
            }
        }
        true
    }

    fn awaits(&self, kind: u32) -> bool {
        kind == TIMER_OVERDUE && self.handover.lock().is_some()
    }

    fn timer(self: Arc<Self>, _: u32) {
        // The process may have been stopped meanwhile, so the socket is checked before the clock
        // counts.
        Arc::clone(&self).ready(true, false, false);
        if self.cancel() {
            self.over(CmEventKind::Unreachable, libc::ETIMEDOUT);
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

    /// Returns the identifier of an initiator's request, and the initiator's socket.
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

    /// Returns an identifier that has accepted for this epoch of the queue pair, and the socket of
    /// its initiator, which has read the reply.
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

    /// If the queue pair was reset when the first message comes, it does not take the stream, and
    /// stays free for a connection of its present epoch.
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
        // It takes a stream of its present epoch.
        let (id, mut peer) = accepted(&qp, qp.epoch());
        assert!(id.awaits_first_fpdu() && qp.addresses().is_none());
        peer.write_all(&[0]).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while qp.addresses().is_none() {
            assert!(Instant::now() < end, "it does not take the stream");
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
            _ => unreachable!("nothing has come"),
        };
        assert!(pending.awaits(TIMER_OVERDUE));
        Arc::clone(&pending).timer(TIMER_OVERDUE);
        assert!(!pending.awaits(TIMER_OVERDUE));
        let event = next(&id.channel());
        let silent = (CmEventKind::Unreachable, libc::ETIMEDOUT);
        assert_eq!((event.kind, event.status), silent);
        assert!(peer.read(&mut [0]).is_err(), "it is not reset");
        // Nor does the queue pair notice that the program destroys the identifier.
        let (id, mut peer) = accepted(&qp, qp.epoch());
        id.destroy();
        assert!(peer.read(&mut [0]).is_err(), "it is not reset");
        assert!(id.channel().is_empty());
        assert_eq!((qp.state(), qp.addresses()), (State::Init, None));
        qp.destroy();
    }

    fn pending_of(id: &CmId) -> Arc<AwaitingFirstFpdu> {
        match &id.inner.state.lock().phase {
            Phase::AwaitingFirstFpdu(pending) => Arc::clone(pending),
            _ => unreachable!("nothing has come"),
        }
    }

    /// A process that was stopped finds the first message and the expired timer at the same moment.
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
            testing::until("it comes", || matches!(stream.has_octets(), Ok(true)));
        }
        pending.timer(TIMER_OVERDUE);
        assert!(qp.addresses().is_some() && !id.awaits_first_fpdu());
        assert!(id.channel().is_empty());
        qp.destroy();
    }

    /// The limit is that of the device's settings.
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

    /// However a pending connection ends, its listener no longer counts it.
    #[test]
    fn ended_connection_is_not_counted() {
        type End = fn(&CmId, std::net::TcpStream);
        let ends: [End; 3] = [
            |_, peer| drop(peer),
            |id, _| pending_of(id).timer(TIMER_OVERDUE),
            |id, _| id.destroy(),
        ];
        let qp = queue_pair();
        for (at, end) in ends.into_iter().enumerate() {
            let (id, peer) = accepted(&qp, qp.epoch());
            assert!(id.inner.state.lock().counted.is_some());
            end(&id, peer);
            let is_back = || id.inner.state.lock().counted.is_none();
            testing::until(&format!("it still counts: {at}"), is_back);
        }
        qp.destroy();
    }
}
