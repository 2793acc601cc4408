//! Placeholder queue pairs of identifiers whose program has no queue pair for the connection.
//!
//! On InfiniBand and RoCE the connection manager does not touch queue pairs. Some programs (UCX)
//! use its connections only to exchange private data and to notice the death of the other end. They
//! pass the number of a queue pair that no message ever uses, and connect their real queue pairs by
//! number. With iWARP a connection is a TCP stream, which only a queue pair can serve. Therefore
//! the identifier has a queue pair of its own, to which nothing can be posted. A peer cannot reach
//! memory through it, because its protection domain has none, and a peer's Send ends the
//! connection, because there is no receive.
//!
//! On InfiniBand the accepting program gets the event Established after the connecting program has
//! called `rdma_establish(3)`. UCX relies on that: it fails if data of the accepting end comes
//! first. Therefore the initiator's first message, which has the same effect (RFC 6581 section
//! 9.2), also waits for that call.

use super::id::{CmId, Phase, Reply};
use crate::conn::qp::{Handover, QpAttributes, QueuePair};
use crate::error::{Error, Result};
use crate::objects::context::Context;

/// A queue pair that is destroyed with its identifier.
pub(super) struct StandIn(QueuePair);

impl StandIn {
    /// Creates the queue pair. `depth` is the number of RDMA Reads that it offers to serve and to
    /// issue.
    fn create(ctx: &Context, depth: u16) -> Result<Self> {
        // No request will be posted, but a queue pair needs room for one.
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
    /// Uses a queue pair of the identifier for the connection, in place of one of the program. It
    /// carries no messages: the connection only exchanges private data and reports its end. It
    /// replaces an earlier queue pair, and is destroyed with the identifier.
    ///
    /// `depth` is the largest number of RDMA Reads that the peer is offered.
    ///
    /// # Errors
    /// [`Error::NoDevice`] before the address is resolved; otherwise as [`Context::create_qp`].
    pub fn use_stand_in(&self, depth: u16) -> Result<()> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let stand_in = StandIn::create(&ctx, depth)?;
        let mut s = self.inner.state.lock();
        s.qp = Some(stand_in.0.clone());
        let before = s.stand_in.replace(stand_in);
        // The end of the earlier one may notify this identifier, so the lock is dropped first.
        drop(s);
        drop(before);
        Ok(())
    }

    /// Establishes a connection without a queue pair of the program
    /// ([`use_stand_in`](Self::use_stand_in)) that the peer has accepted (`rdma_establish(3)`). The
    /// peer gets the event Established only then. Does nothing for other connections that are up.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: there is no connection. [`Error::ConnectionLost`]: it cannot be
    /// watched.
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

    /// Returns `true` if its queue pair is a placeholder.
    pub(super) fn has_stand_in(&self) -> bool {
        self.inner.state.lock().stand_in.is_some()
    }

    /// Notifies the program that the peer has accepted. The stream waits for
    /// [`establish`](Self::establish), and is not watched until then. If the identifier was
    /// destroyed, the stream is closed.
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

    /// Closes a connection that waits for [`establish`](Self::establish), and adds the event of its
    /// end. Returns `false` if there is no such connection.
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
        // The program is notified before the peer, as at the end of other connections.
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

    /// Returns an identifier whose peer has accepted, with its channel and the peer's socket.
    fn answered() -> (CmId, CmEventChannel, TcpStream) {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(&testing::context()));
        id.use_stand_in(1).unwrap();
        let (handover, peer) = testing::unattached(None, true);
        id.inner.state.lock().phase = Phase::Answered(Box::new(handover));
        (id, channel, peer)
    }

    /// If the queue pair does not take the connection, it is over.
    #[test]
    fn establish_needs_the_queue_pair() {
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

    /// Records whether the connection was still open at the peer when the program was notified.
    struct Notified {
        peer: TcpStream,
        early: AtomicBool,
    }

    impl Wake for Notified {
        fn wake(self: Arc<Self>) {
            let seen = self.peer.peek(&mut [0]);
            let is_open = matches!(seen, Err(error) if error.kind() == ErrorKind::WouldBlock);
            self.early.store(is_open, Ordering::SeqCst);
        }
    }

    #[test]
    fn program_is_notified_before_the_peer() {
        let (id, channel, peer) = answered();
        peer.set_nonblocking(true).unwrap();
        let notified = Arc::new(Notified {
            peer,
            early: AtomicBool::new(false),
        });
        channel.wake_at_next(&Waker::from(Arc::clone(&notified)));
        assert!(id.give_up_answer() && !id.give_up_answer());
        assert!(notified.early.load(Ordering::SeqCst));
        let event = channel.try_next().unwrap();
        assert_eq!((event.kind, event.status), (CmEventKind::Disconnected, 0));
        testing::until("the peer does not see the end", || {
            match notified.peer.peek(&mut [0]) {
                Err(error) => error.kind() != ErrorKind::WouldBlock,
                Ok(_) => true,
            }
        });
        id.destroy();
    }
}
