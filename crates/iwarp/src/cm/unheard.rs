//! Responders that have accepted, and whose queue pair takes the stream only when the initiator's first FPDU comes.
//!
//! Queue pairs that are connected by number need this. The initiator's queue pair may have been reset since it sent its request. If the
//! responder has sent its reply before it learns of that, the stream ends, and the initiator, which may be connecting again already, comes
//! with another stream. A queue pair takes one stream only until it is reset, so it must not be the one that the initiator has given up. The
//! first FPDU tells that the initiator's queue pair has taken the stream, too: in the peer-to-peer model the initiator has to send one
//! (RFC 6581 section 9.2).

use super::CmEventKind;
use super::id::{CmId, CmIdInner, ConnectionParameters, IdState, Phase, engine};
use crate::conn::qp::{Handover, QueuePair, TIMERS_END};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::sys::poller::Interest;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;

// No queue pair has this timer: the queue pair takes over the token.
const TIMER_OVERDUE: u32 = TIMERS_END;

/// A stream whose initiator has sent nothing behind its request.
pub(super) struct Unheard {
    id: Weak<CmIdInner>,
    qp: QueuePair,
    engine: Arc<Engine>,
    token: u64,
    /// `None` after the first FPDU, or the end.
    handover: Mutex<Option<Handover>>,
}

impl CmId {
    /// As [`accept`](Self::accept), but in the peer-to-peer model the queue pair takes the stream only when the peer's first FPDU comes, and
    /// only if it was not reset since it was set ([`set_queue_pair_of`](Self::set_queue_pair_of)). If the stream ends before that, or no FPDU
    /// comes in time, the event is ConnectError or Unreachable, as it would be later, but the queue pair may take another stream.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub(crate) fn accept_when_heard(&self, parameters: &ConnectionParameters) -> Result<()> {
        let (replied, qp) = self.send_reply(parameters)?;
        if !replied.peer_to_peer {
            return self.take(replied, &qp);
        }
        let engine = engine()?;
        let unheard = Arc::new(Unheard {
            id: Arc::downgrade(&self.inner),
            qp,
            token: engine.token(),
            engine,
            handover: Mutex::new(None),
        });
        // Locked until the stream is in its place, so that `destroy` either prevents it or finds it.
        let mut s = self.inner.state.lock();
        if !matches!(s.phase, Phase::Connected(false)) {
            drop(s);
            replied.handover.stream.abort();
            return Err(Error::InvalidState("the identifier was destroyed"));
        }
        if let Err(error) = unheard.watch(replied.handover, replied.limit) {
            drop(s.lose());
            return Err(error);
        }
        s.phase = Phase::Unheard(unheard);
        Ok(())
    }

    /// Returns `true` if it has accepted ([`accept_when_heard`](Self::accept_when_heard)) and its peer has sent nothing since.
    pub(crate) fn is_unheard(&self) -> bool {
        matches!(self.inner.state.lock().phase, Phase::Unheard(_))
    }
}

impl Unheard {
    fn watch(self: &Arc<Self>, handover: Handover, limit: Duration) -> Result<()> {
        // Locked until the stream is in its place, so that the engine finds it there.
        let mut slot = self.handover.lock();
        let source = Arc::clone(self) as Arc<dyn Source>;
        self.engine
            .add(&handover.stream, self.token, Interest::READ, source)?;
        *slot = Some(handover);
        drop(slot);
        self.engine.after(limit, self.token, TIMER_OVERDUE);
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

    /// The initiator has sent something: the queue pair takes the stream. No locks are held, because it starts to work at once.
    fn heard(&self, mut handover: Handover) {
        let id = self.id.upgrade();
        let is_wanted = id.as_ref().is_some_and(|id| {
            let mut s = id.state.lock();
            let is_wanted = matches!(s.phase, Phase::Unheard(_));
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

    /// The stream is gone: tells the program, unless it has destroyed the identifier.
    fn over(&self, kind: CmEventKind, status: i32) {
        let Some(id) = self.id.upgrade() else { return };
        let mut s = id.state.lock();
        let before = s.lose();
        if before.is_some() {
            id.tell(s, kind, status);
        }
    }
}

impl IdState {
    /// A connection that is not established is over. Returns the phase before, which is dropped without locks; `None` if there is no such
    /// connection.
    fn lose(&mut self) -> Option<Phase> {
        if !matches!(self.phase, Phase::Unheard(_) | Phase::Connected(false)) {
            return None;
        }
        self.seat = None;
        Some(std::mem::replace(&mut self.phase, Phase::Disconnected))
    }
}

impl Source for Unheard {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        let mut slot = self.handover.lock();
        let Some(handover) = slot.take() else {
            return true;
        };
        match handover.stream.has_octets() {
            Ok(true) => {
                drop(slot);
                self.heard(handover);
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
        // The process may have been stopped meanwhile: what has come is looked at before the clock is believed.
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
    use std::time::Instant;

    /// A connection that an initiator has asked for, and its socket.
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

    /// One that was accepted for an epoch of the queue pair, and the socket of its initiator, which has the reply.
    pub(crate) fn accepted(qp: &QueuePair, epoch: u64) -> (CmId, std::net::TcpStream) {
        let (id, mut peer) = requested(qp);
        id.set_queue_pair_of(Some(qp), Some(epoch));
        id.accept_when_heard(&ConnectionParameters::default())
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

    /// The first message comes when the queue pair was reset: it is still free for the connections of its present epoch.
    #[test]
    fn a_queue_pair_that_was_reset_does_not_take_a_stream_of_its_former_life() {
        let qp = queue_pair();
        let (id, mut peer) = accepted(&qp, qp.epoch());
        qp.modify(State::Reset).unwrap();
        qp.modify(State::Init).unwrap();
        peer.write_all(&[0; 24]).unwrap();
        let event = next(&id.channel());
        assert_eq!(event.kind, CmEventKind::ConnectError);
        assert!(event.id.is_same(&id) && !id.is_unheard());
        assert_eq!((qp.state(), qp.addresses()), (State::Init, None));
        // It takes those of its present epoch.
        let (id, mut peer) = accepted(&qp, qp.epoch());
        assert!(id.is_unheard() && qp.addresses().is_none());
        peer.write_all(&[0]).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        while qp.addresses().is_none() {
            assert!(Instant::now() < end, "it does not take the stream");
            std::thread::sleep(Duration::from_millis(1));
        }
        qp.destroy();
    }

    #[test]
    fn a_peer_that_goes_or_stays_silent_is_told_to_the_program_and_not_to_the_queue_pair() {
        let qp = queue_pair();
        let (id, peer) = accepted(&qp, qp.epoch());
        drop(peer);
        let event = next(&id.channel());
        let gone = (CmEventKind::ConnectError, libc::ECONNRESET);
        assert_eq!((event.kind, event.status), gone);
        let (id, mut peer) = accepted(&qp, qp.epoch());
        let unheard = match &id.inner.state.lock().phase {
            Phase::Unheard(unheard) => Arc::clone(unheard),
            _ => unreachable!("nothing has come"),
        };
        assert!(unheard.awaits(TIMER_OVERDUE));
        Arc::clone(&unheard).timer(TIMER_OVERDUE);
        assert!(!unheard.awaits(TIMER_OVERDUE));
        let event = next(&id.channel());
        let silent = (CmEventKind::Unreachable, libc::ETIMEDOUT);
        assert_eq!((event.kind, event.status), silent);
        assert!(peer.read(&mut [0]).is_err(), "it is not reset");
        // Nor if the program does not want it any more.
        let (id, mut peer) = accepted(&qp, qp.epoch());
        id.destroy();
        assert!(peer.read(&mut [0]).is_err(), "it is not reset");
        assert!(id.channel().is_empty());
        assert_eq!((qp.state(), qp.addresses()), (State::Init, None));
        qp.destroy();
    }

    fn unheard_of(id: &CmId) -> Arc<Unheard> {
        match &id.inner.state.lock().phase {
            Phase::Unheard(unheard) => Arc::clone(unheard),
            _ => unreachable!("nothing has come"),
        }
    }

    /// A process that was stopped finds the first message and the expired timer at the same moment.
    #[test]
    fn a_first_message_that_has_come_counts_although_its_time_is_over() {
        let qp = queue_pair();
        let (id, mut peer) = accepted(&qp, qp.epoch());
        let unheard = unheard_of(&id);
        {
            let slot = unheard.handover.lock();
            let stream = &slot.as_ref().unwrap().stream;
            unheard.engine.pause(stream);
            peer.write_all(&[0]).unwrap();
            testing::until("it comes", || matches!(stream.has_octets(), Ok(true)));
        }
        unheard.timer(TIMER_OVERDUE);
        assert!(qp.addresses().is_some() && !id.is_unheard());
        assert!(id.channel().is_empty());
        qp.destroy();
    }

    /// Whichever way a connection comes to nothing before it is heard of, its listener has room for another.
    #[test]
    fn a_connection_that_is_not_heard_of_gives_its_seat_back() {
        type End = fn(&CmId, std::net::TcpStream);
        let ends: [End; 3] = [
            |_, peer| drop(peer),
            |id, _| unheard_of(id).timer(TIMER_OVERDUE),
            |id, _| id.destroy(),
        ];
        let qp = queue_pair();
        for (at, end) in ends.into_iter().enumerate() {
            let (id, peer) = accepted(&qp, qp.epoch());
            assert!(id.inner.state.lock().seat.is_some());
            end(&id, peer);
            let is_back = || id.inner.state.lock().seat.is_none();
            testing::until(&format!("its seat: {at}"), is_back);
        }
        qp.destroy();
    }
}
