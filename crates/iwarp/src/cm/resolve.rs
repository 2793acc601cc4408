//! Resolution of a peer's address (`rdma_resolve_addr(3)`): determines the source address and the
//! device, and then checks the next hop.
//!
//! The kernel's connection manager resolves the link address of the next hop. If the next hop does
//! not answer within the program's time limit, it reports AddrError. A TCP connect would fail only
//! seconds later, with a different event. Therefore the next hop is checked here, too.

use super::CmEventKind;
use super::id::{CmId, CmIdInner, IdState, engine};
use super::phase::Phase;
use crate::device::source_address;
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::sys::address::canonical;
use crate::sys::neighbour::NextHop;
use parking_lot::Mutex;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Pause before the second check of the next hop. On a local network it has usually answered by
/// then.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// Upper limit of the pauses, which double.
const LAST_PAUSE: Duration = Duration::from_millis(50);

impl CmId {
    /// Resolves a peer's address: determines the source address and its device. The event
    /// [`CmEventKind::AddrResolved`] follows. The next hop is not checked; if it does not answer,
    /// connecting fails.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: the address is resolved already.
    /// - [`Error::InvalidArgument`]: the addresses have different families.
    /// - [`Error::NoDevice`]: no device has the source address.
    /// - [`Error::Io`]: there is no route, or the source address is in use or not an address of
    ///   this host.
    pub fn resolve_addr(&self, source: Option<SocketAddr>, peer: SocketAddr) -> Result<()> {
        self.check_process()?;
        self.inner.state.lock().prepare(source, peer)?;
        self.emit(CmEventKind::AddrResolved, 0);
        Ok(())
    }

    /// Resolves a peer's address as [`resolve_addr`](Self::resolve_addr) does, and delays the event
    /// until the next hop has answered (`rdma_resolve_addr(3)`). If it does not answer within
    /// `limit`, the event is [`CmEventKind::AddrError`] with `ETIMEDOUT`, and the identifier can
    /// resolve an address again. Also chooses the local port, unless all ports are in use. Does not
    /// block.
    ///
    /// # Errors
    /// As [`resolve_addr`](Self::resolve_addr).
    pub fn resolve_addr_within(
        &self,
        source: Option<SocketAddr>,
        peer: SocketAddr,
        limit: Duration,
    ) -> Result<()> {
        self.check_process()?;
        let mut s = self.inner.state.lock();
        let local = s.prepare(source, peer)?;
        s.choose_port(local);
        if let Some(hop) = NextHop::unanswered(local.ip(), canonical(peer)) {
            let resolving = Resolving::begin(self, hop, limit);
            s.phase = resolving
                .as_ref()
                .map_or(Phase::Idle, |r| Phase::Resolving(Arc::clone(r)));
            return resolving.map(|_| ());
        }
        drop(s);
        self.emit(CmEventKind::AddrResolved, 0);
        Ok(())
    }
}

impl IdState {
    /// Binds an identifier without a port to a free port, because programs query the port before
    /// they connect. If no port is free, the kernel may still find one for the connection.
    fn choose_port(&mut self, local: SocketAddr) {
        if self.datagrams.is_none()
            && !self.is_bound()
            && local.port() == 0
            && let Ok(local) = self.bind_port(local)
        {
            self.local = Some(local);
            self.port_chosen = true;
        }
    }

    /// Determines the source address and the device. Returns the source address.
    fn prepare(&mut self, source: Option<SocketAddr>, peer: SocketAddr) -> Result<SocketAddr> {
        if !matches!(self.phase, Phase::Idle | Phase::Failed) {
            return Err(Error::InvalidState("the address is resolved already"));
        }
        let same_family = |a: &SocketAddr| canonical(*a).is_ipv4() == canonical(peer).is_ipv4();
        let any = |a: &SocketAddr| a.ip().is_unspecified();
        // A socket that is bound to `::` can also connect to IPv4 peers.
        let usable = |a: &SocketAddr| same_family(a) || (any(a) && a.is_ipv6());
        if self.port_chosen && !self.is_bound() {
            // An earlier attempt has used the port. The address is kept if it is usable.
            self.local.iter_mut().for_each(|local| local.set_port(0));
            self.port_chosen = false;
        }
        let own = self.local.filter(|a| self.is_bound() || usable(a));
        if !own.as_ref().is_none_or(usable) || !source.as_ref().is_none_or(same_family) {
            return Err(Error::InvalidArgument(
                "source and destination have different address families",
            ));
        }
        let source_ip = match (own, source) {
            (Some(own), _) if !any(&own) => own.ip(),
            (_, Some(source)) if !any(&source) => source.ip(),
            _ => source_address(peer)?,
        };
        self.find_device(source_ip).or_else(|e| {
            if let (Error::NoDevice, Some(source)) = (&e, source) {
                check_is_local(source)?;
            }
            Err(e)
        })?;
        let port = own.or(source).map_or(0, |a| a.port());
        let mut local = SocketAddr::new(source_ip, port);
        if let (SocketAddr::V6(local), SocketAddr::V6(peer)) = (&mut local, peer) {
            local.set_scope_id(peer.scope_id());
        }
        if own.is_none() && port != 0 {
            self.bind_port(local)?;
        }
        self.local = Some(local);
        self.source_named |= source.is_some_and(|source| !any(&source));
        self.peer = Some(peer);
        self.phase = Phase::Resolved;
        Ok(local)
    }
}

/// Fails if the address is not an address of this host. Its error is more specific than
/// [`Error::NoDevice`].
fn check_is_local(source: SocketAddr) -> Result<()> {
    let mut free = source;
    free.set_port(0);
    UdpSocket::bind(free)?;
    Ok(())
}

/// A resolution that waits for the next hop.
pub(super) struct Resolving {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
    hop: NextHop,
    until: Instant,
    pause: Mutex<Duration>,
}

impl Resolving {
    fn begin(id: &CmId, hop: NextHop, limit: Duration) -> Result<Arc<Self>> {
        let engine = engine()?;
        let token = engine.token();
        let now = Instant::now();
        let this = Arc::new(Self {
            id: Arc::downgrade(&id.inner),
            engine,
            token,
            hop,
            until: now.checked_add(limit).unwrap_or(now),
            pause: Mutex::new(FIRST_PAUSE),
        });
        let source = Arc::clone(&this) as Arc<dyn Source>;
        this.engine.add_timed(token, source);
        this.engine.after(FIRST_PAUSE.min(limit), token, 0);
        Ok(this)
    }

    /// Ends the attempt without an event.
    pub(super) fn cancel(&self) {
        self.engine.forget(self.token);
    }

    fn finish(&self, kind: CmEventKind, status: i32) {
        self.engine.forget(self.token);
        let Some(id) = self.id.upgrade().map(|inner| CmId { inner }) else {
            return;
        };
        let mut s = id.inner.state.lock();
        // The phase is this attempt's, because no other attempt starts before this one has ended.
        if !matches!(s.phase, Phase::Resolving(_)) {
            return;
        }
        s.phase = match kind {
            CmEventKind::AddrResolved => Phase::Resolved,
            _ => Phase::Idle,
        };
        id.give(s, id.event(kind, status));
    }
}

impl Source for Resolving {
    fn timer(self: Arc<Self>, _: u32) {
        if !self.hop.is_open() {
            return self.finish(CmEventKind::AddrResolved, 0);
        }
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return self.finish(CmEventKind::AddrError, libc::ETIMEDOUT);
        }
        let mut pause = self.pause.lock();
        *pause = (*pause * 2).min(LAST_PAUSE);
        self.engine.after(pause.min(left), self.token, 0);
    }
}
