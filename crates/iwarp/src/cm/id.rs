//! Connection identifiers: handles of connections and listeners (`rdma_create_id(3)`).

use super::CmEventChannel;
use super::passive::{Count, Requested};
use super::phase::{CmProgress, Phase};
use super::placeholder_qp::PlaceholderQp;
use super::sidr::{Asked, Datagrams};
use crate::admission::Admission;
use crate::config::Config;
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::qp::QueuePair;
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::sys::connect::{Bound, Sharing};
use crate::sys::fork::Origin;
use crate::sys::process_lock::ProcessLock;
use parking_lot::Mutex;
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
        self.inner.state.lock().phase.progress()
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

    pub(super) fn release_port(&mut self) {
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
