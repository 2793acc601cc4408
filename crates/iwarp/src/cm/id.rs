//! Connection identifiers: handles of connections and listeners (`rdma_create_id(3)`).

use super::active::Active;
use super::awaiting_first_fpdu::AwaitingFirstFpdu;
use super::passive::{Backlog, Count, Listening, Requested};
use super::placeholder_qp::PlaceholderQp;
use super::resolve::Resolving;
use super::sidr::{Asked, Asking, Datagrams, Serving};
use super::{CmEvent, CmEventChannel, CmEventKind};
use crate::admission::Admission;
use crate::config::Config;
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::qp::{Handover, QueuePair};
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::sys::connect::{Bound, Sharing};
use crate::sys::fork::Origin;
use crate::sys::process_lock::ProcessLock;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Parameters of `rdma_connect(3)` and `rdma_accept(3)`.
#[derive(Debug, Clone, Default)]
pub struct ConnectionParameters {
    /// Private data, sent with the MPA frame. At most 508 octets to another `iwarp`; every peer
    /// accepts up to 251.
    pub private_data: Vec<u8>,
    /// Maximum number of inbound RDMA Reads and atomics in flight; `None` for the queue pair's
    /// maximum.
    pub responder_resources: Option<u16>,
    /// Maximum number of outbound RDMA Reads and atomics in flight; `None` for the queue pair's
    /// maximum.
    pub initiator_depth: Option<u16>,
    /// Parameters with which this end behaves as on InfiniBand; `None` for iWARP.
    pub infiniband: Option<InfinibandParameters>,
}

/// The part of the peer's reply that the program gets.
#[derive(Debug, Clone, Default)]
pub(super) struct Reply {
    pub(super) private_data: Vec<u8>,
    pub(super) infiniband: Option<InfinibandParameters>,
}

/// How far a connection has come ([`CmId::progress`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmProgress {
    /// The identifier neither connects nor listens.
    Idle,
    /// The identifier connects, listens, or has a request to answer.
    Begun,
    /// The program has accepted, and the peer has not confirmed yet.
    Accepted,
    /// The connection is up.
    Up,
    /// The connection is over.
    Over,
}

pub(super) enum Phase {
    Idle,
    /// The next hop to the peer has not answered yet.
    Resolving(Arc<Resolving>),
    /// The address is resolved, so the device is known.
    Resolved,
    /// Address and route are resolved.
    Routed,
    /// An attempt has failed. The program may connect again, to the same address or to another.
    Failed,
    Connecting(Arc<Active>),
    /// The peer has accepted, and the program has not called [`CmId::establish`] yet.
    Answered(Box<Handover>),
    Listening(Arc<Listening>),
    /// In the client-server model: the reply is sent, and the event Established follows
    /// immediately.
    Accepting,
    /// A peer's request waits for an answer.
    Requested(Box<Requested>),
    /// For datagrams: the identifier has asked a listener for its queue pair.
    Asking(Arc<Asking>),
    /// For datagrams: the identifier listens.
    Serving(Arc<Serving>),
    /// For datagrams: a peer's request waits for an answer.
    Asked(Box<Asked>),
    /// Accepted. The queue pair takes the stream when the peer's first FPDU arrives.
    AwaitingFirstFpdu(Arc<AwaitingFirstFpdu>),
    /// Accepted or connected; `true` after the event Established. For datagrams: the request was
    /// answered.
    Connected(bool),
    Disconnected,
    Destroyed,
}

impl Phase {
    /// Stops a listener, rejects a request, or cancels an attempt.
    fn end(self) {
        match self {
            Self::Resolving(resolving) => resolving.cancel(),
            Self::Connecting(active) => active.cancel(),
            Self::Listening(listening) => listening.stop(),
            Self::Requested(requested) => requested.reject(&[]),
            Self::AwaitingFirstFpdu(pending) => {
                pending.cancel();
            }
            Self::Asking(asking) => asking.cancel(),
            Self::Serving(serving) => serving.stop(),
            // Dropping a request for datagrams rejects it.
            _ => {}
        }
    }
}

pub(super) struct IdState {
    pub(super) phase: Phase,
    pub(super) ctx: Option<Context>,
    pub(super) qp: Option<QueuePair>,
    /// Epoch of `qp` in which it may take the stream ([`QueuePair::epoch`]); `None` for any.
    pub(super) epoch: Option<u64>,
    /// Owns `qp`, if the program has no queue pair for the connection.
    pub(super) placeholder_qp: Option<PlaceholderQp>,
    pub(super) bound: Option<Bound>,
    pub(super) local: Option<SocketAddr>,
    /// `true` if the program has chosen the source address.
    pub(super) source_named: bool,
    pub(super) peer: Option<SocketAddr>,
    pub(super) only_v6: Option<bool>,
    pub(super) sharing: Sharing,
    /// `true` if the program has disconnected.
    pub(super) leaving: bool,
    /// Status of the event Disconnected, if the connection ended before the event Established.
    pub(super) ended_early: Option<i32>,
    /// `true` if the program has passed a context. If not, identifiers share one context per
    /// device.
    pub(super) own_context: bool,
    /// The listener's admission rules; `None` for those of its device.
    pub(super) admission: Option<Admission>,
    /// Counts this connection against its listener's limit.
    pub(super) counted: Option<Count>,
    /// Negotiated ORD and IRD.
    pub(super) depths: Option<(u16, u16)>,
    /// `true` if resolving the address has chosen the local port.
    pub(super) port_chosen: bool,
    /// State of an identifier for datagrams; `None` for connections.
    pub(super) datagrams: Option<Datagrams>,
}

impl IdState {
    /// Returns the admission rules of a listener.
    pub(super) fn admission(&self) -> Admission {
        let own = self.admission.as_ref();
        let device = self.ctx.as_ref().map(|ctx| &ctx.config().admission);
        // Without a context, the contexts of the connections are opened with the environment's
        // settings.
        own.or(device)
            .cloned()
            .unwrap_or_else(|| Config::from_env().admission)
    }
}

pub(crate) struct CmIdInner {
    pub(super) channel: Mutex<CmEventChannel>,
    pub(super) state: Mutex<IdState>,
    user: AtomicU64,
    serial: u64,
    pub(super) this: Weak<Self>,
    origin: Origin,
}

/// An identifier: one end of a connection, or a listener.
#[derive(Clone)]
pub struct CmId {
    pub(super) inner: Arc<CmIdInner>,
}

static SERIAL: AtomicU64 = AtomicU64::new(1);
/// A forked child opens its own contexts, because threads of the parent may have held locks of the
/// inherited ones.
static CONTEXTS: ProcessLock<Option<HashMap<String, Context>>> =
    ProcessLock::own("cm::id::CONTEXTS", None);

/// Returns the device's context that all identifiers created without a context share.
///
/// # Errors
/// As [`Context::open`].
pub(super) fn shared_context(device: &Device) -> Result<Context> {
    let mut contexts = CONTEXTS.lock();
    let contexts = contexts.get_or_insert_with(HashMap::new);
    if let Some(ctx) = contexts.get(&device.name) {
        return Ok(ctx.clone());
    }
    let ctx = Context::open(device, Config::from_env())?;
    contexts.insert(device.name.clone(), ctx.clone());
    Ok(ctx)
}

impl CmId {
    /// Creates an identifier whose events are added to `channel`. If `ctx` is given, only its
    /// device is used. If not, the device is found by address, and all identifiers without a
    /// context share one context per device.
    pub fn create(channel: &CmEventChannel, ctx: Option<&Context>) -> Self {
        Self::new(channel, ctx, None)
    }

    /// Creates an identifier for datagrams (`RDMA_PS_UDP`), with the arguments of
    /// [`create`](Self::create). Its ports are UDP ports. [`connect`](Self::connect) asks a
    /// listener which queue pair serves its port, and [`accept`](Self::accept) answers.
    pub fn create_for_datagrams(channel: &CmEventChannel, ctx: Option<&Context>) -> Self {
        Self::new(channel, ctx, Some(Datagrams::default()))
    }

    fn new(channel: &CmEventChannel, ctx: Option<&Context>, datagrams: Option<Datagrams>) -> Self {
        let state = IdState {
            phase: Phase::Idle,
            ctx: ctx.cloned(),
            qp: None,
            epoch: None,
            placeholder_qp: None,
            bound: None,
            local: None,
            source_named: false,
            peer: None,
            only_v6: None,
            sharing: Sharing::Exclusive,
            leaving: false,
            ended_early: None,
            own_context: ctx.is_some(),
            admission: None,
            counted: None,
            depths: None,
            port_chosen: false,
            datagrams,
        };
        Self {
            inner: Arc::new_cyclic(|this| CmIdInner {
                channel: Mutex::new(Arc::clone(channel)),
                state: Mutex::new(state),
                user: AtomicU64::new(0),
                serial: SERIAL.fetch_add(1, Ordering::Relaxed),
                this: Weak::clone(this),
                origin: Origin::current_process(),
            }),
        }
    }

    pub(super) fn of_request(
        channel: &CmEventChannel,
        ctx: Context,
        own: bool,
        requested: Requested,
        counted: Count,
    ) -> Self {
        let id = Self::create(channel, Some(&ctx));
        {
            let mut s = id.inner.state.lock();
            s.counted = Some(counted);
            s.own_context = own;
            s.local = Some(requested.starting.ends.local);
            s.peer = Some(requested.starting.ends.peer);
            s.phase = Phase::Requested(Box::new(requested));
        }
        id
    }

    /// Creates the identifier of a peer's request for datagrams.
    pub(super) fn of_datagram_request(
        channel: &CmEventChannel,
        ctx: Context,
        own: bool,
        (local, peer): (SocketAddr, SocketAddr),
        asked: Asked,
    ) -> Self {
        let id = Self::create_for_datagrams(channel, Some(&ctx));
        {
            let mut s = id.inner.state.lock();
            s.own_context = own;
            s.local = Some(local);
            s.peer = Some(peer);
            s.phase = Phase::Asked(Box::new(asked));
        }
        id
    }

    /// Returns a number that is unique in this process.
    pub fn serial(&self) -> u64 {
        self.inner.serial
    }

    /// Returns the value of [`set_user_data`](Self::set_user_data).
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Stores a value for the program ([`user_data`](Self::user_data)).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Returns the event channel.
    pub fn channel(&self) -> CmEventChannel {
        Arc::clone(&self.inner.channel.lock())
    }

    /// Moves the identifier and its pending events to another channel (`rdma_migrate_id(3)`).
    pub fn migrate(&self, channel: &CmEventChannel) {
        let old = std::mem::replace(&mut *self.inner.channel.lock(), Arc::clone(channel));
        if Arc::ptr_eq(&old, channel) {
            return;
        }
        let mut moved = Vec::new();
        old.retain(|event| {
            let mine = event.concerns(self);
            if mine {
                moved.push(event.clone());
            }
            !mine
        });
        for event in moved {
            channel.push(event);
        }
    }

    /// Returns the context, if the device is known.
    pub fn context(&self) -> Option<Context> {
        self.inner.state.lock().ctx.clone()
    }

    /// Returns the local and the peer's address, as far as they are known.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let s = self.inner.state.lock();
        (s.local, s.peer)
    }

    /// Returns `true` if the peer has sent a request and then closed its connection.
    pub(crate) fn requester_is_gone(&self) -> bool {
        match &self.inner.state.lock().phase {
            Phase::Requested(requested) => requested.starting.stream.peer_closed(),
            _ => false,
        }
    }

    /// Returns how far the connection has come.
    pub fn progress(&self) -> CmProgress {
        match self.inner.state.lock().phase {
            Phase::Idle
            | Phase::Resolving(_)
            | Phase::Resolved
            | Phase::Routed
            | Phase::Failed
            | Phase::Destroyed => CmProgress::Idle,
            Phase::Connecting(_)
            | Phase::Answered(_)
            | Phase::Listening(_)
            | Phase::Requested(_)
            | Phase::Asking(_)
            | Phase::Serving(_)
            | Phase::Asked(_) => CmProgress::Begun,
            Phase::Accepting | Phase::AwaitingFirstFpdu(_) | Phase::Connected(false) => {
                CmProgress::Accepted
            }
            Phase::Connected(true) => CmProgress::Up,
            Phase::Disconnected => CmProgress::Over,
        }
    }

    /// Returns `true` if the identifier listens.
    pub fn is_listening(&self) -> bool {
        let s = self.inner.state.lock();
        matches!(s.phase, Phase::Listening(_) | Phase::Serving(_))
    }

    /// Returns the negotiated ORD and IRD.
    pub fn depths(&self) -> Option<(u16, u16)> {
        self.inner.state.lock().depths
    }

    /// Returns `true` if the identifier is for datagrams.
    pub fn is_for_datagrams(&self) -> bool {
        self.inner.state.lock().datagrams.is_some()
    }

    /// Returns the queue pair.
    pub fn queue_pair(&self) -> Option<QueuePair> {
        self.inner.state.lock().qp.clone()
    }

    /// Sets the queue pair that the connection will use. Replaces an earlier one.
    pub fn set_queue_pair(&self, qp: Option<&QueuePair>) {
        self.set_queue_pair_of(qp, None);
    }

    /// Sets the queue pair as [`set_queue_pair`](Self::set_queue_pair) does. If the queue pair is
    /// not in this epoch any more when the connection is up, because it was reset, it does not take
    /// the connection.
    pub(crate) fn set_queue_pair_of(&self, qp: Option<&QueuePair>, epoch: Option<u64>) {
        let mut s = self.inner.state.lock();
        s.qp = qp.cloned();
        s.epoch = epoch;
        let before = s.placeholder_qp.take();
        drop(s);
        drop(before);
    }

    /// Returns `true` if both handles refer to the same identifier.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns `true` if [`set_only_v6`](Self::set_only_v6) is allowed: as in the kernel, if the
    /// identifier neither connects nor listens.
    pub fn may_choose_family(&self) -> bool {
        matches!(self.inner.state.lock().phase, Phase::Idle)
    }

    /// Returns `true` if [`set_reuse_address`](Self::set_reuse_address) with `reuse` is allowed. As
    /// in the kernel, the option cannot be set on a listener, and can be cleared only on an unbound
    /// identifier.
    pub fn may_reuse_address(&self, reuse: bool) -> bool {
        let s = self.inner.state.lock();
        let listens = matches!(s.phase, Phase::Listening(_) | Phase::Serving(_));
        let is_idle = matches!(s.phase, Phase::Idle) && !s.is_bound();
        is_idle || (reuse && !listens)
    }

    /// Sets whether an IPv6 listener refuses IPv4 peers (`RDMA_OPTION_ID_AFONLY`).
    pub fn set_only_v6(&self, only: bool) {
        self.inner.state.lock().only_v6 = Some(only);
    }

    /// Sets whether other identifiers with this option may be bound to the same address
    /// (`RDMA_OPTION_ID_REUSEADDR`). Only one of them can listen. Takes effect at the next
    /// [`bind`](Self::bind).
    pub fn set_reuse_address(&self, reuse: bool) {
        self.inner.state.lock().sharing = if reuse {
            Sharing::Shared
        } else {
            Sharing::Exclusive
        };
    }

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

    /// Checks that this process created the identifier. In a forked child, threads of the parent
    /// may have held its locks, and the parent's engine does not exist.
    ///
    /// # Errors
    /// [`Error::Unsupported`] in a forked child.
    pub(super) fn check_process(&self) -> Result<()> {
        match self.inner.origin.is_foreign() {
            true => Err(Error::Unsupported(
                "the parent process created the identifier: create another after the fork",
            )),
            false => Ok(()),
        }
    }

    /// Destroys the identifier (`rdma_destroy_id(3)`). This stops a listener, rejects a request, or
    /// cancels an attempt to connect. Pending events are dropped. The program has to destroy the
    /// queue pair itself. If a parent process created the identifier, the call has no effect.
    pub fn destroy(&self) {
        if self.inner.origin.is_foreign() {
            return;
        }
        let (phase, datagrams, placeholder_qp) = {
            let mut s = self.inner.state.lock();
            s.bound = None;
            s.qp = None;
            s.counted = None;
            let datagrams = s.datagrams.as_mut().map(std::mem::take);
            let phase = std::mem::replace(&mut s.phase, Phase::Destroyed);
            (phase, datagrams, s.placeholder_qp.take())
        };
        phase.end();
        drop((datagrams, placeholder_qp));
        let mut orphans = Vec::new();
        self.channel().retain(|event| {
            let mine = event.concerns(self);
            if mine && !event.id.is_same(self) {
                orphans.push(event.id.clone());
            }
            !mine
        });
        // Identifiers of requests whose event was dropped.
        for id in orphans {
            id.destroy();
        }
    }

    /// Adds an event to the channel (`rdma_write_cm_event(3)`), for example to wake a thread that
    /// waits for events. `status` becomes the event's status.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: programs cannot write events of this kind, or the identifier was
    /// destroyed.
    pub fn write_event(&self, kind: CmEventKind, status: i32) -> Result<()> {
        use CmEventKind::{AddrinfoError, AddrinfoResolved, User};
        if !matches!(kind, User(_) | AddrinfoResolved | AddrinfoError) {
            return Err(Error::InvalidArgument(
                "programs can write only User, AddrinfoResolved and AddrinfoError events",
            ));
        }
        if matches!(self.inner.state.lock().phase, Phase::Destroyed) {
            return Err(Error::InvalidArgument("the identifier was destroyed"));
        }
        self.emit(kind, status);
        Ok(())
    }

    pub(super) fn emit(&self, kind: CmEventKind, status: i32) {
        self.push(self.event(kind, status));
    }

    pub(crate) fn event(&self, kind: CmEventKind, status: i32) -> CmEvent {
        CmEvent {
            kind,
            status,
            id: self.clone(),
            listener: None,
            private_data: Vec::new(),
            replied: false,
            responder_resources: None,
            initiator_depth: None,
            xrc: None,
            datagrams: None,
            service_status: 0,
            infiniband: None,
            _untaken: None,
        }
    }

    /// Returns the event Established, with the negotiated parameters.
    pub(super) fn established_event(&self, s: &IdState, reply: Reply) -> CmEvent {
        let (outbound, inbound) = s.depths.unzip();
        CmEvent {
            private_data: reply.private_data,
            infiniband: reply.infiniband,
            responder_resources: inbound,
            initiator_depth: outbound,
            ..self.event(CmEventKind::Established, 0)
        }
    }

    /// Adds an event to the channel and wakes its tasks. The caller holds no lock.
    pub(super) fn push(&self, event: CmEvent) {
        self.put(event).wake();
    }

    /// Adds an event to the channel. Returns the channel. The caller has to wake its tasks after
    /// releasing all locks.
    #[must_use = "the channel's tasks have to be woken"]
    pub(super) fn put(&self, event: CmEvent) -> CmEventChannel {
        // The lock is held until the event is in the channel, so that `migrate` does not miss it.
        let channel = self.inner.channel.lock();
        channel.put(event);
        Arc::clone(&channel)
    }

    /// Adds the event of a change that was made under the lock `state`, and then releases the lock.
    /// Therefore the events have the order of the changes, and [`destroy`](Self::destroy) either
    /// prevents the event or finds it in the channel.
    pub(super) fn give(&self, state: MutexGuard<'_, IdState>, event: CmEvent) {
        let channel = self.put(event);
        drop(state);
        channel.wake();
    }

    /// Records that the connection is up. Returns `false` if the identifier was destroyed.
    pub(super) fn established(&self, reply: Reply) -> bool {
        let mut s = self.inner.state.lock();
        let ended = s.ended_early.take();
        match (&s.phase, ended) {
            (Phase::Connecting(_) | Phase::Accepting, None) => s.phase = Phase::Connected(true),
            (Phase::Connecting(_) | Phase::Accepting, Some(_)) => s.disconnected(),
            (Phase::Destroyed, _) => return false,
            // The peer's first message has been handled already.
            _ => return true,
        }
        if let Some((local, peer)) = s.qp.as_ref().and_then(QueuePair::addresses) {
            s.local = Some(local);
            // Keep the program's address. With a port mapper the stream's peer has another.
            let named = s.peer.filter(|named| !named.ip().is_unspecified());
            s.peer = named.or(Some(peer));
        }
        let event = self.established_event(&s, reply);
        self.give(s, event);
        if let Some(status) = ended {
            self.inner.disconnected(status);
        }
        true
    }

    /// Handles an attempt that has failed. `refusal` is the private data of the peer's rejection,
    /// if there is one.
    pub(super) fn failed(&self, kind: CmEventKind, status: i32, refusal: Option<Vec<u8>>) {
        let mut s = self.inner.state.lock();
        if !matches!(s.phase, Phase::Connecting(_)) {
            return;
        }
        s.phase = Phase::Failed;
        let event = CmEvent {
            replied: refusal.is_some(),
            private_data: refusal.unwrap_or_default(),
            ..self.event(kind, status)
        };
        self.give(s, event);
    }
}

impl IdState {
    /// Records the end of the connection or attempt. The listener stops counting it.
    pub(super) fn disconnected(&mut self) {
        self.phase = Phase::Disconnected;
        self.counted = None;
    }

    pub(super) fn is_bound(&self) -> bool {
        self.bound.is_some() || self.datagrams.as_ref().is_some_and(Datagrams::is_bound)
    }

    /// Binds the identifier to an address, with a TCP or UDP port. Returns the address and the
    /// chosen port.
    pub(super) fn bind_port(&mut self, address: SocketAddr) -> Result<SocketAddr> {
        if let Some(datagrams) = &mut self.datagrams {
            return datagrams.bind(address, self.only_v6, self.sharing);
        }
        let bound = Bound::bind(address, self.only_v6, self.sharing)?;
        let local = bound.local_addr()?;
        self.bound = Some(bound);
        Ok(local)
    }

    fn release_port(&mut self) {
        self.bound = None;
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.unbind();
        }
    }

    pub(super) fn find_device(&mut self, ip: IpAddr) -> Result<()> {
        if self.own_context {
            return Ok(());
        }
        self.ctx = Some(shared_context(&Device::by_address(ip)?)?);
        Ok(())
    }
}

impl CmEvent {
    /// Returns `true` if `id` is the identifier of the event, or the listener of its request.
    fn concerns(&self, id: &CmId) -> bool {
        self.id.is_same(id) || self.listener.as_ref().is_some_and(|l| l.is_same(id))
    }
}

impl Drop for CmIdInner {
    fn drop(&mut self) {
        if self.origin.is_foreign() {
            return;
        }
        // Without `destroy`, a dropped listener would continue to accept connections.
        std::mem::replace(&mut self.state.get_mut().phase, Phase::Destroyed).end();
    }
}

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CmId")
            .field("serial", &self.inner.serial)
            .finish_non_exhaustive()
    }
}

/// Returns this process's engine. Starts it if it is not running.
pub(super) fn engine() -> Result<Arc<Engine>> {
    Ok(Engine::current()?)
}
