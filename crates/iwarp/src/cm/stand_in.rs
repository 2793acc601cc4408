//! Stand-in queue pairs: connections of identifiers whose program has no queue pair for them.
//!
//! On InfiniBand and RoCE the connection manager does not touch queue pairs. Some programs (UCX) use a connection of it only to exchange
//! private data and to learn of the other end's death. They hand over the number of some queue pair that no message ever uses, and
//! connect their real queue pairs by number. With iWARP a connection is a TCP stream, which only a queue pair can serve. So the
//! identifier has a queue pair of its own, which nothing can be posted to: no peer can reach memory through it, because its protection
//! domain has none, and a peer's Send ends the connection, because there is no receive.
//!
//! On InfiniBand the accepting program hears that the connection is up when the connecting program has taken the answer and says so
//! (`rdma_establish(3)`). UCX relies on that: it fails if data of the accepting end come first. So the initiator's first message, which tells
//! the responder the same (RFC 6581 section 9.2), waits for the program, too.

use super::id::{CmId, Phase, Reply};
use crate::conn::qp::{Handover, QpAttributes, QueuePair};
use crate::error::{Error, Result};
use crate::objects::context::Context;

/// A queue pair that is destroyed with its identifier.
pub(super) struct StandIn(QueuePair);

impl StandIn {
    /// Creates the queue pair. `depth` is the number of RDMA Reads that it says to serve and to issue.
    fn create(ctx: &Context, depth: u16) -> Result<Self> {
        // A queue pair needs room for a request, although there will be none.
        let cq = ctx.create_cq(1, None)?;
        let attributes = QpAttributes {
            pd: ctx.allocate_pd(),
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            unreliable: false,
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: false,
            max_ird: depth,
            max_ord: depth,
        };
        Ok(Self(ctx.create_qp(&attributes)?))
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

impl CmId {
    /// Gives the connection a queue pair of the identifier's own instead of one of the program's. It carries no messages. The connection
    /// has private data, and its end is told at both ends. It takes the place of an earlier queue pair, and is destroyed with the
    /// identifier.
    ///
    /// `depth` is what the other end is told of RDMA Reads at most, if the program asks for more or for as many as possible.
    ///
    /// # Errors
    /// [`Error::NoDevice`] before the address is resolved; else as [`Context::create_qp`].
    pub fn use_stand_in(&self, depth: u16) -> Result<()> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let stand_in = StandIn::create(&ctx, depth)?;
        let mut s = self.inner.state.lock();
        s.qp = Some(stand_in.0.clone());
        let before = s.stand_in.replace(stand_in);
        // Its end may be told to this identifier, so the lock is dropped first.
        drop(s);
        drop(before);
        Ok(())
    }

    /// Takes a connection without a queue pair of the program's own ([`use_stand_in`](Self::use_stand_in)) that the peer has accepted
    /// (`rdma_establish(3)`). Only then the peer gets the event Established. For other connections
    /// that are up there is nothing to do.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: there is no connection. [`Error::ConnectionLost`]: it cannot be watched.
    pub fn establish(&self) -> Result<()> {
        let (handover, qp) = {
            let mut s = self.inner.state.lock();
            match std::mem::replace(&mut s.phase, Phase::Connected(true)) {
                Phase::Answered(handover) => (handover, s.qp.clone()),
                other => {
                    let is_up = matches!(other, Phase::Connected(_) | Phase::Accepting);
                    s.phase = other;
                    return match is_up {
                        true => Ok(()),
                        false => Err(Error::InvalidState("there is no connection")),
                    };
                }
            }
        };
        let attached = qp.map(|qp| qp.inner.attach(*handover));
        if let Some(Err(e)) = attached {
            self.inner.state.lock().phase = Phase::Disconnected;
            return Err(Error::ConnectionLost(e.to_string()));
        }
        Ok(())
    }

    /// Returns `true` if the connection will be that of a stand-in.
    pub(super) fn has_stand_in(&self) -> bool {
        self.inner.state.lock().stand_in.is_some()
    }

    /// The peer has accepted. The program is told, and the stream waits for [`establish`](Self::establish). Nothing watches it meanwhile, so
    /// its end is seen afterwards. If the identifier was destroyed, the stream is closed.
    pub(super) fn answered(&self, handover: Handover, reply: Reply) {
        let mut s = self.inner.state.lock();
        if !matches!(s.phase, Phase::Connecting(_)) {
            return;
        }
        s.local = Some(handover.ends.local);
        s.phase = Phase::Answered(Box::new(handover));
        let event = self.established_event(&s, reply);
        self.give(s, event);
    }

    /// Closes a connection that waits for [`establish`](Self::establish), and gives the event of its end. Returns `false` if none waits.
    pub(super) fn give_up_answer(&self) -> bool {
        let handover = {
            let mut s = self.inner.state.lock();
            match std::mem::replace(&mut s.phase, Phase::Disconnected) {
                Phase::Answered(handover) => handover,
                other => {
                    s.phase = other;
                    return false;
                }
            }
        };
        // In this order, as at the end of other connections: the program knows of the end before the peer does.
        self.inner.disconnected(0);
        drop(handover);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CmEventChannel, CmEventKind, create_event_channel};
    use super::*;
    use crate::testing;
    use std::io::ErrorKind;
    use std::net::TcpStream;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Wake, Waker};

    /// An identifier whose peer has answered, and that peer.
    fn answered() -> (CmId, CmEventChannel, TcpStream) {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(&testing::context()));
        id.use_stand_in(1).unwrap();
        let (handover, peer) = testing::unattached(None, true);
        id.inner.state.lock().phase = Phase::Answered(Box::new(handover));
        (id, channel, peer)
    }

    /// A connection that the queue pair does not take is over, and not one that waits to be ended.
    #[test]
    fn an_answer_is_taken_by_a_queue_pair_that_is_there() {
        for is_there in [true, false] {
            let (id, _channel, mut peer) = answered();
            if !is_there {
                id.queue_pair().unwrap().destroy();
            }
            let taken = id.establish();
            let is_up = matches!(id.inner.state.lock().phase, Phase::Connected(true));
            assert_eq!((taken.is_ok(), is_up), (is_there, is_there));
            if let Err(error) = taken {
                assert!(matches!(error, Error::ConnectionLost(_)), "{error}");
                let is_over = matches!(id.inner.state.lock().phase, Phase::Disconnected);
                assert!(is_over);
                assert!(!matches!(std::io::Read::read(&mut peer, &mut [0]), Ok(1..)));
            }
            id.destroy();
        }
    }

    /// Notes whether the peer has seen the end when the program is told of it.
    struct Told {
        peer: TcpStream,
        early: AtomicBool,
    }

    impl Wake for Told {
        fn wake(self: Arc<Self>) {
            let seen = self.peer.peek(&mut [0]);
            let is_open = matches!(seen, Err(error) if error.kind() == ErrorKind::WouldBlock);
            self.early.store(is_open, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_program_that_does_not_take_an_answer_knows_of_the_end_before_the_peer() {
        let (id, channel, peer) = answered();
        peer.set_nonblocking(true).unwrap();
        let told = Arc::new(Told {
            peer,
            early: AtomicBool::new(false),
        });
        channel.wake_at_next(&Waker::from(Arc::clone(&told)));
        assert!(id.give_up_answer() && !id.give_up_answer());
        assert!(told.early.load(Ordering::SeqCst));
        let event = channel.try_next().unwrap();
        assert_eq!((event.kind, event.status), (CmEventKind::Disconnected, 0));
        testing::until(
            "the peer is not told",
            || !matches!(told.peer.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock),
        );
        id.destroy();
    }
}
