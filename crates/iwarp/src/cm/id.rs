//! Identifiers: a program's handles of connections and listeners (`rdma_create_id(3)`).

use super::active::Active;
use super::awaiting_first_fpdu::AwaitingFirstFpdu;
use super::passive::{Backlog, Count, Listening, Requested};
use super::resolve::Resolving;
use super::sidr::{Asked, Asking, Datagrams, Serving};
use super::stand_in::StandIn;
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
    /// Inbound RDMA Reads and atomics to serve at a time; `None` for the queue pair's maximum.
    pub responder_resources: Option<u16>,
    /// Outbound RDMA Reads and atomics to have outstanding; `None` for the queue pair's maximum.
    pub initiator_depth: Option<u16>,
    /// Lets this end of the connection behave as on InfiniBand; `None` for iWARP.
    pub infiniband: Option<InfinibandParameters>,
}

/// The part of the peer's reply that the program gets.
#[derive(Debug, Clone, Default)]
pub(super) struct Reply {
    pub(super) private_data: Vec<u8>,
    pub(super) infiniband: Option<InfinibandParameters>,
}

/// How far a connection has come, as far as calls depend on that ([`CmId::progress`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmProgress {
    /// It neither connects nor listens.
    Idle,
    /// It connects, listens, or has a request to answer.
    Begun,
    /// It has accepted, and the peer has not confirmed that.
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
    /// An attempt has failed. It may connect again, to the same address or to another.
    Failed,
    Connecting(Arc<Active>),
    /// The peer has accepted, and the program has not taken the connection yet
    /// ([`CmId::establish`]).
    Answered(Box<Handover>),
    Listening(Arc<Listening>),
    /// In the client-server model: the reply is sent, and the event follows immediately.
    Accepting,
    /// A peer's request waits for an answer.
    Requested(Box<Requested>),
    /// For datagrams: it has asked a listener for its queue pair.
    Asking(Arc<Asking>),
    /// For datagrams: it listens.
    Serving(Arc<Serving>),
    /// For datagrams: a peer's request waits for an answer.
    Asked(Box<Asked>),
    /// Accepted. The queue pair takes the stream when the peer's first FPDU comes.
    AwaitingFirstFpdu(Arc<AwaitingFirstFpdu>),
    /// Accepted or connected; `true` after the event Established. For datagrams: the request was
    /// answered.
    Connected(bool),
    Disconnected,
    Destroyed,
}

impl Phase {
    /// Ends what the phase stands for: a listener stops, a request is rejected, an attempt ends.
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
    /// The epoch of `qp` ([`QueuePair::epoch`]) that the connection is for; `None` for any.
    pub(super) epoch: Option<u64>,
    /// Owns `qp` unless the program does.
    pub(super) stand_in: Option<StandIn>,
    pub(super) bound: Option<Bound>,
    pub(super) local: Option<SocketAddr>,
    /// The program has chosen the source address.
    pub(super) source_named: bool,
    pub(super) peer: Option<SocketAddr>,
    pub(super) only_v6: Option<bool>,
    pub(super) sharing: Sharing,
    pub(super) leaving: bool,
    /// The connection ended before its Established event was given. The value is the status of the
    /// Disconnected event.
    pub(super) ended_early: Option<i32>,
    /// The program has brought its own context. Otherwise identifiers share one for each device.
    pub(super) own_context: bool,
    /// The listener's admission rules, if they are not those of its device.
    pub(super) admission: Option<Admission>,
    /// Counts the connection among those of its listener.
    pub(super) counted: Option<Count>,
    /// Negotiated RDMA Reads and atomics: outbound, and inbound.
    pub(super) depths: Option<(u16, u16)>,
    /// Its port was chosen when its address was resolved.
    pub(super) port_chosen: bool,
    /// `None` for connections.
    pub(super) datagrams: Option<Datagrams>,
}

impl IdState {
    /// Returns the admission rules of a listener.
    pub(super) fn admission(&self) -> Admission {
        let own = self.admission.as_ref();
        let device = self.ctx.as_ref().map(|ctx| &ctx.config().admission);
        // If a listener has no context, those of its connections are opened with the settings of
        // the environment.
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
/// A forked child opens contexts of its own: threads of the parent may hold locks of the inherited
/// ones.
static CONTEXTS: ProcessLock<Option<HashMap<String, Context>>> =
    ProcessLock::own("cm::id::CONTEXTS", None);

/// Returns the context that all identifiers without a context of their own share for a device.
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
    /// Creates an identifier whose events go to `channel`. With a context, only its device is used.
    /// Otherwise the device is found by address, and all such identifiers share its context.
    pub fn create(channel: &CmEventChannel, ctx: Option<&Context>) -> Self {
        Self::new(channel, ctx, None)
    }

    /// Creates an identifier for datagrams (`RDMA_PS_UDP`), as [`create`](Self::create) does for
    /// connections. Its ports are UDP ports. [`connect`](Self::connect) asks a listener which queue
    /// pair serves its port, and [`accept`](Self::accept) answers.
    pub fn create_for_datagrams(channel: &CmEventChannel, ctx: Option<&Context>) -> Self {
        Self::new(channel, ctx, Some(Datagrams::default()))
    }

    fn new(channel: &CmEventChannel, ctx: Option<&Context>, datagrams: Option<Datagrams>) -> Self {
        let state = IdState {
            phase: Phase::Idle,
            ctx: ctx.cloned(),
            qp: None,
            epoch: None,
            stand_in: None,
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
                origin: Origin::here(),
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

    /// Creates the identifier of a peer's request for datagrams, with the local address and the
    /// peer's.
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

    /// Returns a number that no other identifier of this process has.
    pub fn serial(&self) -> u64 {
        self.inner.serial
    }

    /// Returns the program's value ([`set_user_data`](Self::set_user_data)).
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Stores a value for the program ([`user_data`](Self::user_data)).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Returns its event channel.
    pub fn channel(&self) -> CmEventChannel {
        Arc::clone(&self.inner.channel.lock())
    }

    /// Moves it and its pending events to another channel (`rdma_migrate_id(3)`).
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

    /// Returns its device, if it is known.
    pub fn context(&self) -> Option<Context> {
        self.inner.state.lock().ctx.clone()
    }

    /// Returns its address and the peer's, as far as they are known.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let s = self.inner.state.lock();
        (s.local, s.peer)
    }

    /// Returns `true` if the peer has closed the connection of its request.
    pub(crate) fn requester_is_gone(&self) -> bool {
        match &self.inner.state.lock().phase {
            Phase::Requested(requested) => requested.starting.stream.peer_closed(),
            _ => false,
        }
    }

    /// Returns how far its connection has come.
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

    /// Returns `true` if it listens.
    pub fn is_listening(&self) -> bool {
        let s = self.inner.state.lock();
        matches!(s.phase, Phase::Listening(_) | Phase::Serving(_))
    }

    /// Returns the negotiated RDMA Reads and atomics of its connection: outbound, and inbound.
    pub fn depths(&self) -> Option<(u16, u16)> {
        self.inner.state.lock().depths
    }

    /// Returns `true` if it is for datagrams.
    pub fn is_for_datagrams(&self) -> bool {
        self.inner.state.lock().datagrams.is_some()
    }

    /// Returns its queue pair.
    pub fn queue_pair(&self) -> Option<QueuePair> {
        self.inner.state.lock().qp.clone()
    }

    /// Sets the queue pair that the connection will use, in place of an earlier one.
    pub fn set_queue_pair(&self, qp: Option<&QueuePair>) {
        self.set_queue_pair_of(qp, None);
    }

    /// As [`set_queue_pair`](Self::set_queue_pair), for this epoch of the queue pair. If it was
    /// reset since, it does not take the connection.
    pub(crate) fn set_queue_pair_of(&self, qp: Option<&QueuePair>, epoch: Option<u64>) {
        let mut s = self.inner.state.lock();
        s.qp = qp.cloned();
        s.epoch = epoch;
        let before = s.stand_in.take();
        drop(s);
        drop(before);
    }

    /// Returns `true` if both handles mean the same identifier.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns `true` if [`set_only_v6`](Self::set_only_v6) is allowed in its state, as in the
    /// kernel: it neither connects nor listens.
    pub fn may_choose_family(&self) -> bool {
        matches!(self.inner.state.lock().phase, Phase::Idle)
    }

    /// Returns `true` if [`set_reuse_address`](Self::set_reuse_address) is allowed in its state, as
    /// in the kernel: a listener may not start to share its port, and only an unbound identifier
    /// may stop doing so.
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
    /// (`RDMA_OPTION_ID_REUSEADDR`). One of them can listen. Takes effect at the next
    /// [`bind`](Self::bind).
    pub fn set_reuse_address(&self, reuse: bool) {
        self.inner.state.lock().sharing = if reuse {
            Sharing::Shared
        } else {
            Sharing::Exclusive
        };
    }

    /// Binds it to an address of this host (`rdma_bind_addr(3)`); port 0 picks a free one. With a
    /// specific address the device is known afterwards. Old connections of an earlier program do
    /// not block the port.
    ///
    /// # Errors
    /// [`Error::InvalidState`]; [`Error::NoDevice`] if no device has the address; the operating
    /// system's: address in use, not of this host.
    pub fn bind(&self, address: SocketAddr) -> Result<()> {
        self.check_process()?;
        let mut s = self.inner.state.lock();
        if s.is_bound() || !matches!(s.phase, Phase::Idle) {
            return Err(Error::InvalidState("the identifier is bound already"));
        }
        // Before the device is looked up, because an address of another host is a different error.
        let local = s.take_port(address)?;
        if !address.ip().is_unspecified() {
            match s.adopt_device(address.ip()) {
                // Like the wildcard address it may be bound without a device: libfabric does so to
                // discover devices.
                Err(Error::NoDevice) if address.ip().is_loopback() => {}
                Err(e) => {
                    s.give_port_back();
                    return Err(e);
                }
                Ok(()) => {}
            }
        }
        s.local = Some(local);
        Ok(())
    }

    /// Resolves the route (`rdma_resolve_route(3)`), which is known since the address was resolved.
    /// The event [`CmEventKind::RouteResolved`] follows.
    ///
    /// # Errors
    /// [`Error::InvalidState`].
    pub fn resolve_route(&self) -> Result<()> {
        self.check_process()?;
        {
            let mut s = self.inner.state.lock();
            if !matches!(s.phase, Phase::Resolved) {
                return Err(Error::InvalidState(
                    "a route is resolved once, after the address",
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
    /// [`Error::InvalidState`]: not resolved, or without a queue pair.
    /// [`Error::InvalidArgument`]: private data too long.
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
            // A bound socket connects from its port; otherwise the kernel picks one. An address
            // that the program has not chosen need not be bound: it is the one that the kernel
            // prefers.
            let bound = s.bound.take();
            if bound.is_none() && std::mem::take(&mut s.port_chosen) {
                // An earlier attempt has used up the port.
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

    /// Listens (`rdma_listen(3)`) with room for `backlog` requests that are not answered yet, at
    /// least 128. Further connections wait in the kernel, unaccepted. Requests arrive as
    /// [`CmEventKind::ConnectRequest`].
    ///
    /// # Errors
    /// [`Error::InvalidState`]: not bound. The operating system's: port in use.
    pub fn listen(&self, backlog: u32) -> Result<()> {
        self.listen_as(Backlog::Waits(backlog))
    }

    /// Listens as [`listen`](Self::listen) does, and obeys `backlog` as the kernel's connection
    /// manager does: a request is rejected if this many request events wait in the channel. 0, and
    /// more than 1024, stand for 1024.
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
            return Err(Error::InvalidState("only a bound identifier can listen"));
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

    /// Sets which connections it admits when it listens, in place of its device's setting.
    pub fn set_admission(&self, admission: Admission) {
        self.inner.state.lock().admission = Some(admission);
    }

    /// Rejects a peer's request (`rdma_reject(3)`), with up to 508 octets of private data. The
    /// connection stays open in the background until the peer closes it, at most for
    /// [`Config::handshake_timeout`](crate::Config::handshake_timeout).
    ///
    /// A connection that waits for [`establish`](Self::establish) is closed instead, without the
    /// private data: MPA has no frame for it.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: no request.
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
    /// [`Error::InvalidState`]: never connected.
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

    /// Checks that the process is the one that created it. Threads of the parent of a forked child
    /// may have held its locks, and the parent's engine does not exist in the child.
    ///
    /// # Errors
    /// [`Error::Unsupported`] in a forked child.
    pub(super) fn check_process(&self) -> Result<()> {
        match self.inner.origin.is_foreign() {
            true => Err(Error::Unsupported(
                "the identifier belongs to the parent of this process",
            )),
            false => Ok(()),
        }
    }

    /// Destroys it (`rdma_destroy_id(3)`): a listener stops, a request is rejected, an attempt
    /// ends. Pending events are dropped. The program destroys its queue pair itself. In a forked
    /// child this does nothing, because the identifier is the parent's.
    pub fn destroy(&self) {
        if self.inner.origin.is_foreign() {
            return;
        }
        let (phase, datagrams, stand_in) = {
            let mut s = self.inner.state.lock();
            s.bound = None;
            s.qp = None;
            s.counted = None;
            let datagrams = s.datagrams.as_mut().map(std::mem::take);
            let phase = std::mem::replace(&mut s.phase, Phase::Destroyed);
            (phase, datagrams, s.stand_in.take())
        };
        phase.end();
        drop((datagrams, stand_in));
        let mut orphans = Vec::new();
        self.channel().retain(|event| {
            let mine = event.concerns(self);
            if mine && !event.id.is_same(self) {
                orphans.push(event.id.clone());
            }
            !mine
        });
        // Requests that no program will see.
        for id in orphans {
            id.destroy();
        }
    }

    /// Adds an event of the program itself (`rdma_write_cm_event(3)`), for example to wake a thread
    /// that waits for events. `status` is passed on unchanged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: programs may not write events of this kind, or the identifier
    /// was destroyed.
    pub fn write_event(&self, kind: CmEventKind, status: i32) -> Result<()> {
        use CmEventKind::{AddrinfoError, AddrinfoResolved, User};
        if !matches!(kind, User(_) | AddrinfoResolved | AddrinfoError) {
            return Err(Error::InvalidArgument(
                "programs may write only user events and those of names",
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

    /// Creates the event Established, with what was negotiated.
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

    /// Adds an event to the channel. Returns the channel, whose tasks have to be woken after all
    /// locks are dropped.
    #[must_use = "the channel's tasks have to be woken"]
    pub(super) fn put(&self, event: CmEvent) -> CmEventChannel {
        // The lock is held until the event is in the channel, so that `migrate` misses none.
        let channel = self.inner.channel.lock();
        channel.put(event);
        Arc::clone(&channel)
    }

    /// Adds the event of a change that was made under this lock. The lock is released after that,
    /// so that events come in the order of the changes, and [`destroy`](Self::destroy) either
    /// prevents the event or finds it.
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
            // A port mapper may have returned another address than the program's.
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
    /// Ends the connection or the attempt. The listener no longer counts it.
    pub(super) fn disconnected(&mut self) {
        self.phase = Phase::Disconnected;
        self.counted = None;
    }

    pub(super) fn is_bound(&self) -> bool {
        self.bound.is_some() || self.datagrams.as_ref().is_some_and(Datagrams::is_bound)
    }

    /// Binds it to an address, with a TCP or UDP port. Returns the address with the port that was
    /// picked.
    pub(super) fn take_port(&mut self, address: SocketAddr) -> Result<SocketAddr> {
        if let Some(datagrams) = &mut self.datagrams {
            return datagrams.bind(address, self.only_v6, self.sharing);
        }
        let bound = Bound::bind(address, self.only_v6, self.sharing)?;
        let local = bound.local_addr()?;
        self.bound = Some(bound);
        Ok(local)
    }

    fn give_port_back(&mut self) {
        self.bound = None;
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.unbind();
        }
    }

    pub(super) fn adopt_device(&mut self, ip: IpAddr) -> Result<()> {
        if self.own_context {
            return Ok(());
        }
        self.ctx = Some(shared_context(&Device::by_address(ip)?)?);
        Ok(())
    }
}

impl CmEvent {
    fn concerns(&self, id: &CmId) -> bool {
        self.id.is_same(id) || self.listener.as_ref().is_some_and(|l| l.is_same(id))
    }
}

impl Drop for CmIdInner {
    fn drop(&mut self) {
        if self.origin.is_foreign() {
            return;
        }
        // If it is dropped without `destroy`, a listener must not go on accepting.
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

/// Returns the engine of this process, and starts it if it does not run.
pub(super) fn engine() -> Result<Arc<Engine>> {
    Ok(Engine::current()?)
}
