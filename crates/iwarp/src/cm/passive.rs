//! The responder's start-up: accepts TCP connections, reads MPA requests, and reports them to the
//! program (RFC 5044 section 7.1.2, RFC 6581 section 9).

use super::id::{CmId, CmIdInner, ConnectionParameters, engine, shared_context};
use super::phase::Phase;
use super::refused::RefusedList;
use super::startup::{Read, Starting, limits, local_params, record};
use super::withdrawn::Watch;
use super::{CmEvent, CmEventKind, xrc};
use crate::admission::{Admission, counted};
use crate::config::{Config, Face};
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::linger;
use crate::device::Device;
use crate::engine::{Engine, Source};
use crate::error::Result;
use crate::objects::context::Context;
use crate::sys::address::canonical;
use crate::sys::clock::now_ns;
use crate::sys::connect::{Bound, Ends, Listener, NetError};
use crate::sys::limits;
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_proto::mpa::startup::NO_NEGOTIATION;
use iwarp_rnic::Time;
use iwarp_rnic::qp::XrcEnd;
use iwarp_rnic::startup::{Reading, Responder};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Minimum number of requests that may wait for an answer. Many programs pass a backlog of 1
/// although they expect more requests.
const BACKLOG_MIN: u32 = 128;
/// The default and maximum backlog of the kernel's connection manager.
const BACKLOG_MAX: u32 = 1024;
/// Minimum length of the kernel's accept queue. If the queue is full, the kernel drops SYNs, and
/// the peers repeat them after a second or more. Many connections may arrive before the progress
/// thread runs, and they should not be delayed.
const TCP_BACKLOG_MIN: u32 = STARTING_MAX as u32;
/// Default limit of connections in start-up. [`refused_max`] is derived from it, regardless of
/// [`Admission::half_open`].
const STARTING_MAX: usize = 1024;
/// Minimum of the limit of connections in start-up that is derived from the limit of file
/// descriptors.
const STARTING_MIN: usize = 16;
/// Private data of the rejection if the listener has reached its limit of connections.
const TOO_MANY: &[u8] = b"the listener has as many connections as it may have";
/// How long a listener stops accepting after file descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// The backlog that a program has requested.
#[derive(Debug, Clone, Copy)]
pub(super) enum Backlog {
    /// Further connections wait in the kernel until the program has answered requests.
    Waits(u32),
    /// Further requests are rejected until the program has taken events from its channel.
    Rejects(u32),
}

impl Backlog {
    pub(super) const fn wanted(self) -> u32 {
        match self {
            Self::Waits(n) | Self::Rejects(n) => n,
        }
    }

    /// Returns the maximum number of unanswered requests.
    fn unanswered(self) -> u32 {
        match self {
            Self::Waits(n) => n.max(BACKLOG_MIN),
            Self::Rejects(_) => BACKLOG_MAX,
        }
    }

    /// Returns the maximum number of request events in the channel, if there is a limit.
    const fn untaken_max(self) -> Option<u32> {
        match self {
            Self::Waits(_) => None,
            Self::Rejects(n) if n == 0 || n > BACKLOG_MAX => Some(BACKLOG_MAX),
            Self::Rejects(n) => Some(n),
        }
    }
}

pub(super) struct Listening {
    listener: Listener,
    token: u64,
    backlog: u32,
    paused: Mutex<bool>,
    half_open: Arc<HalfOpen>,
}

/// The half-open connections of a listener: connections in start-up, and unanswered requests.
/// Connections refer to this structure and not to the listening socket, so that the port is free as
/// soon as the program closes the listener.
struct HalfOpen {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    /// The only device on which the listener accepts, if the program has chosen one.
    ctx: Option<Context>,
    /// The listener's address; `None` for a wildcard.
    local: Option<SocketAddr>,
    admission: Admission,
    /// Number of requests and connections that have not ended.
    connections: Arc<AtomicU32>,
    /// Connections in start-up, oldest first.
    starting: Mutex<VecDeque<Weak<Pending>>>,
    /// Number of unanswered requests.
    waiting: Arc<AtomicU32>,
    /// Number of requests whose event the program has not taken from the channel.
    untaken: Arc<AtomicU32>,
    untaken_max: Option<u32>,
    /// Rejected connections that the initiators have not closed yet.
    refused: Arc<RefusedList>,
}

impl Listening {
    pub(super) fn start(
        id: &CmId,
        bound: Bound,
        backlog: Backlog,
        ctx: Option<Context>,
        admission: Admission,
    ) -> Result<Arc<Self>> {
        let unanswered = backlog.unanswered();
        let local = bound.local_addr()?;
        let peer_timeout = match &ctx {
            Some(ctx) => ctx.config().peer_timeout,
            None => Config::from_env().peer_timeout,
        };
        let listener = bound.listen(unanswered.max(TCP_BACKLOG_MIN), peer_timeout)?;
        let engine = engine()?;
        let token = engine.token();
        let this = Arc::new(Self {
            listener,
            token,
            backlog: unanswered,
            paused: Mutex::new(false),
            half_open: Arc::new(HalfOpen {
                id: Arc::downgrade(&id.inner),
                engine: Arc::clone(&engine),
                ctx,
                local: (!local.ip().is_unspecified()).then(|| canonical(local)),
                admission,
                connections: Arc::default(),
                starting: Mutex::default(),
                waiting: Arc::new(AtomicU32::new(0)),
                untaken: Arc::default(),
                untaken_max: backlog.untaken_max(),
                refused: Arc::default(),
            }),
        });
        engine.add(
            &this.listener,
            token,
            Interest::READ,
            Arc::clone(&this) as Arc<dyn Source>,
        )?;
        Ok(this)
    }

    pub(super) fn stop(&self) {
        self.half_open.engine.remove(&self.listener, self.token);
    }

    fn pause(&self) {
        let mut paused = self.paused.lock();
        if !*paused {
            *paused = true;
            let engine = &self.half_open.engine;
            let _ = engine.modify(&self.listener, self.token, Interest::NONE);
            engine.after(PAUSE, self.token, 0);
        }
    }
}

impl HalfOpen {
    /// Starts the start-up of an accepted TCP connection.
    fn accepted(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        if !self.admission.peers.contains(peer.ip()) {
            tracing::debug!(%peer, "connection from a peer that is not admitted");
            stream.abort();
            return;
        }
        // `peer` is the result of `accept`, because a socket has no peer address after a reset.
        let local = self.local.map_or_else(|| stream.local_addr(), Ok);
        let found = local.map_err(crate::Error::from).and_then(|local| {
            let ctx = self.context_of(local.ip())?;
            Ok((ctx, Ends { local, peer }))
        });
        let Ok((ctx, ends)) = found else {
            tracing::debug!("a connection arrived at an address without a device");
            stream.abort();
            return;
        };
        let starting = Starting {
            flow: record(&ctx, &ends, false),
            stream,
            ends,
        };
        let mut incoming = Incoming::new(starting, &ctx, Time::from_nanos(now_ns()));
        if self.has_pending() {
            // Requests of older connections may have arrived, too, and this one must not overtake
            // them. The poller reports requests in order of arrival. Programs such as `ib_send_bw
            // -q 8` assume that the n-th request is from the client's n-th connection.
            return self.await_request(ctx, incoming);
        }
        // Often the request has already arrived.
        match incoming.read() {
            Read::NeedMore => self.await_request(ctx, incoming),
            Read::Frame(()) => self.deliver(ctx, incoming),
            Read::Bad(failure) => {
                tracing::debug!(error = %failure, "no MPA request");
                incoming.starting.end(failure.ending(), ctx.config().crc);
            }
            Read::Closed => {}
            Read::Broken(e) => {
                tracing::debug!(error = %e, "connection broke during start-up");
            }
        }
    }

    /// Returns `true` if the request of an older connection has not been read yet.
    fn has_pending(&self) -> bool {
        let mut all = self.starting.lock();
        while all.front().is_some_and(|oldest| oldest.strong_count() == 0) {
            all.pop_front();
        }
        !all.is_empty()
    }

    fn await_request(self: &Arc<Self>, ctx: Context, incoming: Incoming) {
        let limit = incoming.session.poll_at();
        let token = self.engine.token();
        let pending = Arc::new(Pending {
            half_open: Arc::clone(self),
            ctx,
            token,
            address: counted(incoming.starting.ends.peer.ip()),
            incoming: Mutex::new(None),
        });
        let mut slot = pending.incoming.lock();
        let watched = self.engine.add(
            &incoming.starting.stream,
            token,
            Interest::READ,
            Arc::clone(&pending) as Arc<dyn Source>,
        );
        if watched.is_err() {
            return;
        }
        *slot = Some(incoming);
        drop(slot);
        self.admit(&pending);
        if let Some(limit) = limit {
            self.engine.at(limit.as_nanos(), token, 0);
        }
    }

    /// Adds a connection to `starting`. If the peer's address has too many connections in start-up,
    /// closes the oldest one of this address. If all addresses together have too many, closes the
    /// oldest of all. An honest peer sends its request immediately, so the oldest connection is the
    /// most suspicious one.
    fn admit(&self, pending: &Arc<Pending>) {
        let (mut of_address, mut total) = (0, 0);
        let mut oldest = None;
        {
            let mut all = self.starting.lock();
            all.retain(|weak| {
                let Some(other) = weak.upgrade() else {
                    return false;
                };
                total += 1;
                if other.address == pending.address {
                    of_address += 1;
                    oldest.get_or_insert(other);
                }
                true
            });
            all.push_back(Arc::downgrade(pending));
        }
        if let Some(oldest) = oldest
            && of_address >= self.admission.half_open_per_address
        {
            self.starting
                .lock()
                .retain(|weak| !std::ptr::eq(weak.as_ptr(), &*oldest));
            oldest.read_or_give_up("its address has too many connections in start-up");
        } else if total >= starting_max(self.admission.half_open as usize) {
            self.give_up_oldest("too many connections in start-up");
        }
    }

    /// Closes the oldest connection in start-up, unless its request has arrived and was not read
    /// yet. Returns `false` if no connection is in start-up.
    fn give_up_oldest(&self, why: &str) -> bool {
        // The lock is released before the connection is dropped, because the drop takes other
        // locks.
        let oldest = loop {
            let Some(oldest) = self.starting.lock().pop_front() else {
                return false;
            };
            if let Some(oldest) = oldest.upgrade() {
                break oldest;
            }
        };
        oldest.read_or_give_up(why);
        true
    }

    fn context_of(&self, ip: IpAddr) -> Result<Context> {
        match &self.ctx {
            Some(ctx) => Ok(ctx.clone()),
            None => shared_context(&Device::by_address(ip)?),
        }
    }

    /// Adds the event of a complete and valid request to the listener's channel.
    fn deliver(self: &Arc<Self>, ctx: Context, incoming: Incoming) {
        let Incoming { starting, session } = incoming;
        let Some(pending) = session.request() else {
            return;
        };
        let Some(listener) = self.id.upgrade().map(|inner| CmId { inner }) else {
            return;
        };
        let (peer_end, private_data) = xrc::unwrap(session.private_data());
        let (infiniband, private_data) = InfinibandParameters::split_from(private_data);
        let private_data = private_data.to_vec();
        let negotiable = |v: Option<u16>| v.filter(|v| *v != NO_NEGOTIATION);
        let (responder_resources, initiator_depth) = (
            negotiable(pending.peer_ord()),
            negotiable(pending.peer_ird()),
        );
        let s = listener.inner.state.lock();
        if !matches!(s.phase, Phase::Listening(_)) {
            return;
        }
        let requested = Requested {
            starting,
            session,
            peer_end,
            watch: None,
            _waiting: Count::new(&self.waiting),
            refused: Arc::clone(&self.refused),
        };
        if let Some(max) = self.untaken_max
            && self.untaken.load(Ordering::Relaxed) >= max
        {
            drop(s);
            tracing::debug!(
                "request rejected: the program has not taken the earlier request events"
            );
            return requested.reject(&[]);
        }
        if self.connections.load(Ordering::Relaxed) >= self.admission.connections {
            drop(s);
            tracing::debug!("request rejected: the listener has reached its limit of connections");
            return requested.reject(TOO_MANY);
        }
        let channel = listener.channel();
        let counted = Count::new(&self.connections);
        let is_watched = self.untaken_max.is_some() && ctx.config().face == Face::Roce;
        let id = CmId::of_request(&channel, ctx, self.ctx.is_some(), requested, counted);
        let event = CmEvent {
            listener: Some(listener.clone()),
            private_data,
            responder_resources,
            initiator_depth,
            xrc: peer_end,
            infiniband,
            _untaken: Some(Arc::new(Count::new(&self.untaken))),
            ..id.event(CmEventKind::ConnectRequest, 0)
        };
        listener.give(s, event);
        if is_watched {
            // This may add the event Rejected, so it follows the event of the request.
            id.watch_requester(&self.engine);
        }
    }
}

/// Returns the limit of connections in start-up: a quarter of the process's limit of file
/// descriptors, because an accepted connection needs more than one descriptor.
fn starting_max(max: usize) -> usize {
    let quarter = limits::descriptors() / 4;
    quarter.max(STARTING_MIN).min(max)
}

/// Returns the maximum number of rejected connections that a listener keeps open.
fn refused_max() -> usize {
    starting_max(STARTING_MAX) / 2
}

impl Source for Listening {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // Connections that arrive during the loop are reported again.
        for _ in 0..self.listener.waiting() {
            if self.half_open.waiting.load(Ordering::Relaxed) >= self.backlog {
                self.pause();
                return true;
            }
            match self.listener.accept() {
                Ok(Some((stream, peer))) => self.half_open.accepted(stream, peer),
                Ok(None) => return true,
                // Close rejected, lingering and silent connections to free descriptors for new
                // ones.
                Err(NetError::TooManyFiles { .. }) if self.half_open.refused.close_oldest() => {}
                Err(NetError::TooManyFiles { .. }) if linger::give_up_oldest() => {}
                Err(NetError::TooManyFiles { .. })
                    if self.half_open.give_up_oldest("its descriptor is needed") => {}
                Err(e @ NetError::TooManyFiles { .. }) => {
                    let why = std::io::Error::from(e);
                    crate::complain::once(format!("cannot accept connections for now: {why}"));
                    self.pause();
                    return true;
                }
                Err(e) => {
                    // Out of memory, or not permitted. Without the pause the poller would report
                    // the connection again immediately.
                    tracing::debug!(error = %std::io::Error::from(e), "accept failed");
                    self.pause();
                    return true;
                }
            }
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        let mut paused = self.paused.lock();
        if *paused {
            *paused = false;
            let engine = &self.half_open.engine;
            let _ = engine.modify(&self.listener, self.token, Interest::READ);
        }
    }
}

/// A connection whose MPA request is being read, and its session.
struct Incoming {
    starting: Starting,
    session: Responder,
}

impl Incoming {
    fn new(starting: Starting, ctx: &Context, now: Time) -> Self {
        let params = local_params(ctx, &ConnectionParameters::default(), None);
        let session = Responder::new(params, limits(ctx.config()), now);
        Self { starting, session }
    }

    fn read(&mut self) -> Read<()> {
        self.starting.read(&mut self.session)
    }
}

/// A connection in start-up that the poller watches. `incoming` is `None` after its end.
struct Pending {
    half_open: Arc<HalfOpen>,
    ctx: Context,
    token: u64,
    /// The peer's address, or prefix, for which connections are counted.
    address: IpAddr,
    incoming: Mutex<Option<Incoming>>,
}

impl Pending {
    fn unwatch(&self, starting: &Starting) {
        self.half_open.engine.remove(&starting.stream, self.token);
    }

    /// Closes the connection, unless its request has arrived and was not read yet.
    fn read_or_give_up(self: Arc<Self>, why: &str) {
        Arc::clone(&self).ready(true, false, false);
        self.give_up(why);
    }

    fn give_up(&self, why: &str) {
        if let Some(Incoming { starting, .. }) = self.incoming.lock().take() {
            tracing::debug!("closing a connection in start-up: {why}");
            self.unwatch(&starting);
            starting.stream.abort();
        }
    }
}

impl Source for Pending {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        let mut slot = self.incoming.lock();
        let Some(mut incoming) = slot.take() else {
            return true;
        };
        match incoming.read() {
            Read::NeedMore => {
                *slot = Some(incoming);
            }
            Read::Frame(()) => {
                self.unwatch(&incoming.starting);
                // The program is notified without locks.
                drop(slot);
                self.half_open.deliver(self.ctx.clone(), incoming);
            }
            Read::Bad(failure) => {
                tracing::debug!(error = %failure, "no MPA request");
                let Incoming { starting, .. } = incoming;
                self.unwatch(&starting);
                starting.end(failure.ending(), self.ctx.config().crc);
            }
            Read::Closed => self.unwatch(&incoming.starting),
            Read::Broken(e) => {
                tracing::debug!(error = %e, "connection broke during start-up");
                self.unwatch(&incoming.starting);
            }
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        // The process may have been stopped (SIGSTOP), so the socket is read before the time limit
        // is checked.
        Arc::clone(&self).ready(true, false, false);
        let now = Time::from_nanos(now_ns());
        let result = match self.incoming.lock().as_mut() {
            Some(incoming) => incoming.session.on_time(now),
            None => return,
        };
        if let Err(failure) = result {
            self.give_up(&failure.to_string());
        }
    }
}

/// Increments a counter of requests or connections, and decrements it when dropped.
#[derive(Debug)]
pub(crate) struct Count(Arc<AtomicU32>);

impl Count {
    fn new(counter: &Arc<AtomicU32>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(counter))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A complete MPA request that the program has not answered.
pub(super) struct Requested {
    pub(super) starting: Starting,
    pub(super) session: Responder,
    /// Which end of an extended reliable connection the peer is.
    pub(super) peer_end: Option<XrcEnd>,
    /// Notices when the initiator gives up.
    pub(super) watch: Option<Watch>,
    _waiting: Count,
    refused: Arc<RefusedList>,
}

impl Requested {
    /// Sends a rejection. The initiator is expected to close the connection.
    pub(super) fn reject(mut self, private_data: &[u8]) {
        if let Some(watch) = self.watch.take() {
            watch.end(&self.starting.stream);
        }
        self.session.reject(private_data);
        let sent = self.starting.write(self.session.reply());
        self.session.reply_sent(Time::from_nanos(now_ns()));
        if let (Ok(()), Ok(engine), Some(until)) = (sent, engine(), self.session.poll_at()) {
            let max = refused_max();
            self.refused.keep(&engine, self.starting.stream, until, max);
        }
    }
}

#[cfg(test)]
#[path = "passive_tests.rs"]
mod tests;
