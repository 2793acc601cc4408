//! Placeholder queue pairs, for connections for which the program has no queue pair.
//!
//! On InfiniBand and RoCE the connection manager does not touch queue pairs. Some programs (UCX)
//! use its connections only to exchange private data, and to notice when the peer dies. They pass
//! the number of a queue pair that carries no messages, and connect their real queue pairs by
//! number. With iWARP a connection is a TCP stream, which needs a queue pair. Therefore the
//! identifier creates a queue pair itself, to which nothing can be posted. A peer cannot access
//! memory through it, because its protection domain has no memory regions. A peer's Send ends the
//! connection, because no receive is posted.
//!
//! On InfiniBand the accepting program gets the event Established after the connecting program has
//! called `rdma_establish(3)`. UCX relies on this, and fails if data from the accepting end arrives
//! earlier. With iWARP the initiator's first message triggers the event (RFC 6581 section 9.2), so
//! this message waits for the call.

use super::id::CmId;
use super::notify::Reply;
use super::phase::Phase;
use crate::conn::attach::Handover;
use crate::conn::attributes::QpAttributes;
use crate::conn::qp::QueuePair;
use crate::error::{Error, Result};
use crate::objects::context::Context;

/// A queue pair that is destroyed with its identifier.
pub(super) struct PlaceholderQp(QueuePair);

impl PlaceholderQp {
    /// Creates the queue pair. `depth` is its ORD and IRD.
    fn create(ctx: &Context, depth: u16) -> Result<Self> {
        // No request will be posted, but the minimum size is 1.
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

impl Drop for PlaceholderQp {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

impl CmId {
    /// Creates a placeholder queue pair for the connection, if the program has none. The connection
    /// carries no messages; it exchanges private data and reports its end. The placeholder replaces
    /// an earlier queue pair, and is destroyed with the identifier.
    ///
    /// `depth` is the IRD and ORD that the peer is offered.
    ///
    /// # Errors
    /// [`Error::NoDevice`] before the address is resolved; those of [`Context::create_qp`].
    pub fn use_placeholder_qp(&self, depth: u16) -> Result<()> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let placeholder_qp = PlaceholderQp::create(&ctx, depth)?;
        let mut s = self.inner.state.lock();
        s.qp = Some(placeholder_qp.0.clone());
        let before = s.placeholder_qp.replace(placeholder_qp);
        // Destroying the earlier queue pair may notify this identifier, so the lock is released
        // first.
        drop(s);
        drop(before);
        Ok(())
    }

    /// Establishes a connection with a placeholder queue pair
    /// ([`use_placeholder_qp`](Self::use_placeholder_qp)) after the peer has accepted it
    /// (`rdma_establish(3)`). The peer then gets the event Established. On any other established
    /// connection the call has no effect.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: there is no connection.
    /// - [`Error::ConnectionLost`]: the queue pair does not take the stream.
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
    pub(super) fn has_placeholder_qp(&self) -> bool {
        self.inner.state.lock().placeholder_qp.is_some()
    }

    /// Notifies the program that the peer has accepted. The stream is not watched before
    /// [`establish`](Self::establish). If the identifier was destroyed, closes the stream.
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

    /// Closes a connection that waits for [`establish`](Self::establish), and adds the event
    /// Disconnected. Returns `false` if there is no such connection.
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
        id.use_placeholder_qp(1).unwrap();
        let (handover, peer) = testing::unattached(None, true);
        id.inner.state.lock().phase = Phase::Answered(Box::new(handover));
        (id, channel, peer)
    }

    /// If the placeholder queue pair was destroyed, `establish` fails and ends the connection.
    #[test]
    fn establish_fails_without_queue_pair() {
        for has_qp in [true, false] {
            let (id, _channel, mut peer) = answered();
            if !has_qp {
                id.queue_pair().unwrap().destroy();
            }
            let established = id.establish();
            let is_up = matches!(id.inner.state.lock().phase, Phase::Connected(true));
            assert_eq!((established.is_ok(), is_up), (has_qp, has_qp));
            if let Err(error) = established {
                assert!(matches!(error, Error::ConnectionLost(_)), "{error}");
                let is_over = matches!(id.inner.state.lock().phase, Phase::Disconnected);
                assert!(is_over);
                assert!(!matches!(std::io::Read::read(&mut peer, &mut [0]), Ok(1..)));
            }
            id.destroy();
        }
    }

    /// Records whether the peer's connection was still open when the program was notified.
    struct Notified {
        peer: TcpStream,
        peer_was_open: AtomicBool,
    }

    impl Wake for Notified {
        fn wake(self: Arc<Self>) {
            let seen = self.peer.peek(&mut [0]);
            let is_open = matches!(seen, Err(error) if error.kind() == ErrorKind::WouldBlock);
            self.peer_was_open.store(is_open, Ordering::SeqCst);
        }
    }

    #[test]
    fn program_is_notified_before_the_peer() {
        let (id, channel, peer) = answered();
        peer.set_nonblocking(true).unwrap();
        let notified = Arc::new(Notified {
            peer,
            peer_was_open: AtomicBool::new(false),
        });
        channel.wake_at_next(&Waker::from(Arc::clone(&notified)));
        assert!(id.give_up_answer() && !id.give_up_answer());
        assert!(notified.peer_was_open.load(Ordering::SeqCst));
        let event = channel.try_next().unwrap();
        assert_eq!((event.kind, event.status), (CmEventKind::Disconnected, 0));
        testing::until("the peer's connection is still open", || {
            match notified.peer.peek(&mut [0]) {
                Err(error) => error.kind() != ErrorKind::WouldBlock,
                Ok(_) => true,
            }
        });
        id.destroy();
    }
}
