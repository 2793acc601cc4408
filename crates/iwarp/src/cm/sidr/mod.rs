//! Identifiers for datagrams (`RDMA_PS_UDP`). A requester asks which datagram queue pair belongs to
//! a UDP port; no connection is set up. docs/wire.md describes the messages, and
//! `iwarp_proto::sidr` encodes them.
//!
//! An identifier is bound to a UDP port, so its ports do not collide with those of connections.
//! `asking` is the requester, `serving` the listener, `request_table` the listener's decisions,
//! `groups` multicast.

mod asking;
mod groups;
mod request_table;
mod serving;

pub(super) use asking::Asking;
pub(super) use serving::{Asked, Serving};

use super::id::{CmId, ConnectionParameters, IdState};
use super::phase::Phase;
use crate::error::{Error, Result};
use crate::sys::connect::Sharing;
use crate::sys::service::ServiceSocket;
use crate::ud::UdQueuePair;
use groups::Membership;
use iwarp_proto::sidr::{Answer, Refusal, Unsendable};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

/// The destination of an identifier's datagrams: the peer's queue pair, or a multicast group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DatagramEnd {
    /// The address, which is also a GID.
    pub ip: IpAddr,
    /// The queue pair's number; 0xffffff for a group.
    pub num: u32,
    /// The Q_Key that datagrams have to contain.
    pub qkey: u32,
}

/// The additional state of an identifier for datagrams.
#[derive(Default)]
pub(super) struct Datagrams {
    /// The socket that is bound to the identifier's port. `Asking` and `Serving` share it.
    socket: Option<Arc<ServiceSocket>>,
    qp: Option<UdQueuePair>,
    groups: Vec<Membership>,
}

impl Datagrams {
    /// Binds the identifier to a UDP port. Returns the address.
    pub(super) fn bind(
        &mut self,
        address: SocketAddr,
        only_v6: Option<bool>,
        sharing: Sharing,
    ) -> Result<SocketAddr> {
        let socket = ServiceSocket::bind(address, only_v6, sharing)?;
        let local = socket.local_addr()?;
        self.socket = Some(Arc::new(socket));
        Ok(local)
    }

    pub(super) fn unbind(&mut self) {
        self.socket = None;
    }

    pub(super) fn is_bound(&self) -> bool {
        self.socket.is_some()
    }
}

impl From<Unsendable> for Error {
    fn from(_: Unsendable) -> Self {
        Self::InvalidArgument(
            "private data: at most 180 octets in a request, 136 in an answer; \
             queue pair numbers: at most 24 bits",
        )
    }
}

impl CmId {
    /// Returns the identifier's queue pair for datagrams.
    pub fn datagram_queue_pair(&self) -> Option<UdQueuePair> {
        let s = self.inner.state.lock();
        s.datagrams.as_ref()?.qp.clone()
    }

    /// Sets the queue pair whose number is sent to peers, and attaches it to the groups that the
    /// identifier has joined. An earlier queue pair is replaced, and stays attached.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the identifier is for connections. Those of
    /// [`UdQueuePair::attach_group`]; the queue pair is set even then.
    pub fn set_datagram_queue_pair(&self, qp: Option<&UdQueuePair>) -> Result<()> {
        let groups = {
            let mut s = self.inner.state.lock();
            let datagrams = s.for_datagrams()?;
            datagrams.qp = qp.cloned();
            datagrams.groups.clone()
        };
        let Some(qp) = qp else { return Ok(()) };
        groups.iter().try_for_each(|group| group.attach(qp))
    }

    /// Answers a peer's request with a queue pair number and a Q_Key.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: there is no request.
    /// - [`Error::InvalidArgument`]: the private data is too long, or the number has more than 24
    ///   bits. The request can still be answered.
    pub fn accept_datagrams(&self, num: u32, qkey: u32, private_data: &[u8]) -> Result<()> {
        let answer = Answer::QueuePair { num, qkey };
        self.answer(answer, private_data, Phase::Connected(true))
    }

    /// Performs [`accept`](Self::accept) for an identifier for datagrams.
    pub(super) fn accept_with_queue_pair(&self, parameters: &ConnectionParameters) -> Result<()> {
        let qp = self
            .datagram_queue_pair()
            .ok_or(Error::InvalidState("create a queue pair first"))?;
        self.accept_datagrams(qp.num(), qp.qkey(), &parameters.private_data)
    }

    /// Performs [`reject`](Self::reject) for an identifier for datagrams.
    pub(super) fn reject_datagrams(&self, private_data: &[u8]) -> Result<()> {
        let answer = Answer::Refused(Refusal::REJECTED);
        self.answer(answer, private_data, Phase::Disconnected)
    }

    fn answer(&self, answer: Answer, private_data: &[u8], then: Phase) -> Result<()> {
        let mut s = self.inner.state.lock();
        let Phase::Asked(asked) = &mut s.phase else {
            return Err(Error::InvalidState("there is no request to answer"));
        };
        asked.answer(answer, private_data)?;
        // The request is dropped after the lock is released.
        let asked = std::mem::replace(&mut s.phase, then);
        drop(s);
        drop(asked);
        Ok(())
    }

    /// Performs [`connect`](Self::connect) for an identifier for datagrams.
    pub(super) fn ask(&self, parameters: &ConnectionParameters) -> Result<()> {
        let asking = {
            let mut s = self.inner.state.lock();
            if !matches!(s.phase, Phase::Routed | Phase::Failed) {
                return Err(Error::InvalidState("resolve address and route first"));
            }
            let ctx = s.ctx.clone().ok_or(Error::NoDevice)?;
            let (Some(local), Some(peer)) = (s.local, s.peer) else {
                return Err(Error::InvalidState("resolve the address first"));
            };
            let socket = match &s.for_datagrams()?.socket {
                Some(bound) => Arc::clone(bound),
                None => Arc::new(ServiceSocket::bind(local, None, Sharing::Exclusive)?),
            };
            let asking = Asking::new(self, &ctx, socket, peer, &parameters.private_data)?;
            s.phase = Phase::Asking(Arc::clone(&asking));
            asking
        };
        asking.start().inspect_err(|_| {
            self.inner.state.lock().phase = Phase::Failed;
        })
    }

    /// Performs [`listen`](Self::listen) for an identifier for datagrams.
    pub(super) fn serve(&self, backlog: u32) -> Result<()> {
        let mut s = self.inner.state.lock();
        if !matches!(s.phase, Phase::Idle) {
            return Err(Error::InvalidState(
                "the identifier connects or listens already",
            ));
        }
        let (only_v6, sharing) = (s.only_v6, s.sharing);
        let own = s.ctx.clone().filter(|_| s.own_context);
        let peers = s.admission().peers;
        let local = s.local.unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into());
        let datagrams = s.for_datagrams()?;
        // On a shared port the first listener claims the port. Then no other identifier can listen
        // on it or bind a new socket to it.
        if sharing == Sharing::Shared || !datagrams.is_bound() {
            datagrams.bind(local, only_v6, sharing)?;
        }
        let socket = datagrams.socket.clone().ok_or(Error::NoDevice)?;
        socket.claim()?;
        s.local = Some(socket.local_addr()?);
        let serving = Serving::start(self, socket, backlog, own, peers)?;
        s.phase = Phase::Serving(serving);
        Ok(())
    }
}

impl IdState {
    /// Returns the state of an identifier for datagrams.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if the identifier is for connections.
    pub(super) fn for_datagrams(&mut self) -> Result<&mut Datagrams> {
        self.datagrams.as_mut().ok_or(Error::InvalidState(
            "the identifier is for connections (RDMA_PS_TCP)",
        ))
    }
}
