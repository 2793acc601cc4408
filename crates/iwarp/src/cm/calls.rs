//! The calls of an identifier that bind, connect, listen and disconnect (`rdma_cm(7)`). The module
//! `accept` has the responder's answer.

use super::CmEventKind;
use super::active::Active;
use super::id::{CmId, ConnectionParameters};
use super::passive::{Backlog, Listening};
use super::phase::Phase;
use crate::admission::Admission;
use crate::error::{Error, Result};
use crate::sys::connect::Bound;
use std::net::SocketAddr;
use std::sync::Arc;

impl CmId {
    /// Binds the identifier to an address of this host (`rdma_bind_addr(3)`). Port 0 selects a free
    /// port. After a bind to an address that is not a wildcard, the device is known. Connections of
    /// an earlier program in TIME-WAIT do not block the port.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: the identifier is bound already.
    /// - [`Error::NoDevice`]: no device has the address.
    /// - [`Error::Io`]: the address is in use, or not an address of this host.
    pub fn bind(&self, address: SocketAddr) -> Result<()> {
        self.check_process()?;
        let mut s = self.inner.state.lock();
        if s.is_bound() || !matches!(s.phase, Phase::Idle) {
            return Err(Error::InvalidState("the identifier is bound already"));
        }
        // The socket is bound before the device is looked up, so that an address of another host is
        // reported as such.
        let local = s.bind_port(address)?;
        if !address.ip().is_unspecified() {
            match s.find_device(address.ip()) {
                // As with the wildcard address, no device is needed. libfabric binds to it to
                // discover devices.
                Err(Error::NoDevice) if address.ip().is_loopback() => {}
                Err(e) => {
                    s.release_port();
                    return Err(e);
                }
                Ok(()) => {}
            }
        }
        s.local = Some(local);
        Ok(())
    }

    /// Resolves the route (`rdma_resolve_route(3)`). The event [`CmEventKind::RouteResolved`]
    /// follows immediately, because the route is known since the address was resolved.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the address is not resolved, or the route is resolved already.
    pub fn resolve_route(&self) -> Result<()> {
        self.check_process()?;
        {
            let mut s = self.inner.state.lock();
            if !matches!(s.phase, Phase::Resolved) {
                return Err(Error::InvalidState(
                    "resolve the address before the route, and the route only once",
                ));
            }
            s.phase = Phase::Routed;
        }
        self.emit(CmEventKind::RouteResolved, 0);
        Ok(())
    }

    /// Connects (`rdma_connect(3)`). One of the events Established, Rejected, Unreachable or
    /// `ConnectError` follows.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: the address or route is not resolved, or the identifier has no
    ///   queue pair.
    /// - [`Error::InvalidArgument`]: the private data is too long.
    pub fn connect(&self, parameters: &ConnectionParameters) -> Result<()> {
        self.check_process()?;
        if self.is_for_datagrams() {
            return self.ask(parameters);
        }
        let active = {
            let mut s = self.inner.state.lock();
            if !matches!(s.phase, Phase::Routed | Phase::Failed) {
                return Err(Error::InvalidState("resolve address and route first"));
            }
            let qp =
                s.qp.clone()
                    .ok_or(Error::InvalidState("create a queue pair first"))?;
            let ctx = s.ctx.clone().ok_or(Error::NoDevice)?;
            let peer = s
                .peer
                .ok_or(Error::InvalidState("resolve the address first"))?;
            // A bound socket connects from its own port. If there is none, the kernel picks the
            // port. A source address that the program has not chosen is not bound, because the
            // kernel chooses the same one.
            let bound = s.bound.take();
            if bound.is_none() && std::mem::take(&mut s.port_chosen) {
                // An earlier attempt has used the port.
                s.local.iter_mut().for_each(|local| local.set_port(0));
            }
            let chosen = s.own_context || s.source_named || bound.is_some();
            let local = s.local.filter(|local| chosen || local.port() != 0);
            let qp = (qp, s.epoch);
            let active = Active::new(self, &ctx, qp, peer, local, parameters)?;
            s.phase = Phase::Connecting(Arc::clone(&active));
            (active, bound)
        };
        let (active, bound) = active;
        active
            .start(bound)
            .inspect_err(|_| self.inner.state.lock().phase = Phase::Failed)
    }

    /// Listens (`rdma_listen(3)`) with room for `backlog` unanswered requests, at least 128.
    /// Further connections wait in the kernel. Each request is reported by the event
    /// [`CmEventKind::ConnectRequest`].
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the identifier connects or listens already. [`Error::Io`]: the port
    /// is in use.
    pub fn listen(&self, backlog: u32) -> Result<()> {
        self.listen_as(Backlog::Waits(backlog))
    }

    /// Listens as [`listen`](Self::listen) does, with the kernel's meaning of `backlog`: if this
    /// many request events are pending in the channel, further requests are rejected. The values 0
    /// and above 1024 have the same effect as 1024.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn listen_strictly(&self, backlog: u32) -> Result<()> {
        self.listen_as(Backlog::Rejects(backlog))
    }

    fn listen_as(&self, backlog: Backlog) -> Result<()> {
        self.check_process()?;
        if self.is_for_datagrams() {
            return self.serve(backlog.wanted());
        }
        let mut s = self.inner.state.lock();
        if !matches!(s.phase, Phase::Idle) {
            return Err(Error::InvalidState(
                "the identifier connects or listens already",
            ));
        }
        let bound = match s.bound.take() {
            Some(bound) => bound,
            None => Bound::bind(SocketAddr::from(([0u8; 4], 0)), s.only_v6, s.sharing)?,
        };
        let own = s.ctx.clone().filter(|_| s.own_context);
        s.local = Some(bound.local_addr()?);
        let listening = Listening::start(self, bound, backlog, own, s.admission())?;
        s.phase = Phase::Listening(listening);
        Ok(())
    }

    /// Sets which connections a listener admits. Replaces the device's setting.
    pub fn set_admission(&self, admission: Admission) {
        self.inner.state.lock().admission = Some(admission);
    }

    /// Rejects a connection request (`rdma_reject(3)`), with up to 508 octets of private data. The
    /// TCP connection stays open in the background until the peer closes it, at most for
    /// [`Config::handshake_timeout`](crate::Config::handshake_timeout).
    ///
    /// If the peer has accepted and [`establish`](Self::establish) was not called yet, the
    /// connection is closed without the private data, because MPA has no frame for it.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: there is no request.
    pub fn reject(&self, private_data: &[u8]) -> Result<()> {
        self.check_process()?;
        if self.is_for_datagrams() {
            return self.reject_datagrams(private_data);
        }
        let requested = {
            let mut s = self.inner.state.lock();
            match std::mem::replace(&mut s.phase, Phase::Disconnected) {
                Phase::Requested(requested) => {
                    s.counted = None;
                    requested
                }
                Phase::Answered(_) => return Ok(()),
                other => {
                    s.phase = other;
                    return Err(Error::InvalidState("there is no request to reject"));
                }
            }
        };
        requested.reject(private_data);
        Ok(())
    }

    /// Ends the connection gracefully (`rdma_disconnect(3)`). The event Disconnected follows.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: there is no connection.
    pub fn disconnect(&self) -> Result<()> {
        self.check_process()?;
        if self.give_up_answer() {
            return Ok(());
        }
        let qp = {
            let mut s = self.inner.state.lock();
            match s.phase {
                Phase::Connected(_) | Phase::Accepting | Phase::Disconnected
                    if s.datagrams.is_none() =>
                {
                    s.leaving = true;
                    s.qp.clone()
                }
                _ => return Err(Error::InvalidState("there is no connection")),
            }
        };
        if let Some(qp) = qp {
            qp.disconnect();
        }
        Ok(())
    }
}
