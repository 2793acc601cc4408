//! The responder: listening, reading MPA requests, handing them to the program
//! (RFC 5044 section 7.1.2, RFC 6581 section 9).

use super::id::{CmId, CmIdInner, ConnectionParameters, Phase, engine, shared_context};
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

/// The least number of requests that may wait for an answer. Programs ask for one and mean that
/// they do not mind.
const BACKLOG_LEAST: u32 = 128;
/// The default backlog of the kernel's connection manager, which is also its largest.
const BACKLOG_MOST: u32 = 1024;
/// The least length of the kernel's queue of connections that are not accepted yet. If the queue is
/// full, the kernel drops new connections, and their peers try again after a second or more. A
/// crowd that comes while other threads have the processor must not do that to a good client.
const ARRIVING_LEAST: u32 = STARTING_MAX as u32;
/// The limit of connections in start-up from which [`refused_max`] is derived, whatever
/// [`Admission::half_open`] is.
const STARTING_MAX: usize = 1024;
/// The least number of connections that may be in start-up, however few descriptors there are.
/// Settings may ask for fewer.
const STARTING_MIN: usize = 16;
/// The private data of a rejection for which the program was not asked.
const TOO_MANY: &[u8] = b"the listener has as many connections as it may have";
/// How long a listener accepts nothing after descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// How many unanswered requests a program wants to have at a time.
#[derive(Debug, Clone, Copy)]
pub(super) enum Backlog {
    /// Further ones wait until the program has answered some.
    Waits(u32),
    /// Further ones are rejected until the program has taken some from its channel.
    Rejects(u32),
}

impl Backlog {
    pub(super) const fn wanted(self) -> u32 {
        match self {
            Self::Waits(n) | Self::Rejects(n) => n,
        }
    }

    /// Returns how many requests may wait for an answer.
    fn unanswered(self) -> u32 {
        match self {
            Self::Waits(n) => n.max(BACKLOG_LEAST),
            Self::Rejects(_) => BACKLOG_MOST,
        }
    }

    /// Returns how many request events may wait in the channel, if there is a limit.
    const fn untaken_most(self) -> Option<u32> {
        match self {
            Self::Waits(_) => None,
            Self::Rejects(n) if n == 0 || n > BACKLOG_MOST => Some(BACKLOG_MOST),
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

/// The half-open connections of a listener: those in start-up and the requests that wait for an
/// answer. They share this and not the socket, so that the port is free as soon as the program
/// closes the listener.
struct HalfOpen {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    /// The device that the listener is confined to, if the program has chosen one.
    ctx: Option<Context>,
    /// The listener's address, unless that is a wildcard.
    local: Option<SocketAddr>,
    admission: Admission,
    /// Number of connections and requests that are not over.
    connections: Arc<AtomicU32>,
    /// Connections in start-up, the oldest first.
    starting: Mutex<VecDeque<Weak<Pending>>>,
    /// Number of requests that are not answered.
    waiting: Arc<AtomicU32>,
    /// Number of requests whose event the program has not taken.
    untaken: Arc<AtomicU32>,
    untaken_most: Option<u32>,
    /// Rejected connections that their initiators have not closed yet.
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
        let listener = bound.listen(unanswered.max(ARRIVING_LEAST), peer_timeout)?;
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
                untaken_most: backlog.untaken_most(),
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
    /// Begins the start-up of a connection that TCP has accepted.
    fn accepted(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        if !self.admission.peers.contains(peer.ip()) {
            tracing::debug!(%peer, "connection from a peer that is not admitted");
            stream.abort();
            return;
        }
        // `accept` has returned the peer's address: a socket forgets it when the peer resets the
        // connection.
        let local = self.local.map_or_else(|| stream.local_addr(), Ok);
        let found = local.map_err(crate::Error::from).and_then(|local| {
            let ctx = self.context_of(local.ip())?;
            Ok((ctx, Ends { local, peer }))
        });
        let Ok((ctx, ends)) = found else {
            tracing::debug!("a connection came to an address without a device");
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
            // Requests of older connections may have come, too, and this one must not overtake
            // them. The poller reports them in the order in which they came. Programs such as
            // `ib_send_bw -q 8` take the n-th request for the n-th connection of the client.
            return self.await_request(ctx, incoming);
        }
        // Often the request has come already.
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

    /// Adds a connection to those in start-up. If its address, or all addresses together, have too
    /// many, their oldest one is given up: an honest peer sends its request immediately, so the
    /// oldest is the most suspicious.
    fn admit(&self, pending: &Arc<Pending>) {
        let (mut of_address, mut in_all) = (0, 0);
        let mut oldest = None;
        {
            let mut all = self.starting.lock();
            all.retain(|weak| {
                let Some(other) = weak.upgrade() else {
                    return false;
                };
                in_all += 1;
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
            oldest.read_or_give_up("too many connections of its address in start-up");
        } else if in_all >= starting_max(self.admission.half_open as usize) {
            self.give_up_oldest("too many connections in start-up");
        }
    }

    /// Gives up the connection that has been in start-up for longest, unless its request has come
    /// and was not read yet. Returns `false` if there is no connection in start-up.
    fn give_up_oldest(&self, why: &str) -> bool {
        // The lock is dropped before the connection, which takes others.
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

    /// Notifies the program of a request that is complete and valid.
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
        let said = |v: Option<u16>| v.filter(|v| *v != NO_NEGOTIATION);
        let (responder_resources, initiator_depth) =
            (said(pending.peer_ord()), said(pending.peer_ird()));
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
        if let Some(most) = self.untaken_most
            && self.untaken.load(Ordering::Relaxed) >= most
        {
            drop(s);
            tracing::debug!("a request is rejected: the program has not taken the earlier ones");
            return requested.reject(&[]);
        }
        if self.connections.load(Ordering::Relaxed) >= self.admission.connections {
            drop(s);
            tracing::debug!("a request is rejected: the listener has too many connections");
            return requested.reject(TOO_MANY);
        }
        let channel = listener.channel();
        let counted = Count::new(&self.connections);
        let is_watched = self.untaken_most.is_some() && ctx.config().face == Face::Roce;
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
            // After the event of the request.
            id.watch_requester(&self.engine);
        }
    }
}

/// Returns how many connections may be in start-up: at most a quarter of the process's descriptors,
/// because an accepted connection needs more than one.
fn starting_max(most: usize) -> usize {
    let quarter = limits::descriptors() / 4;
    quarter.max(STARTING_MIN).min(most)
}

/// Returns how many rejected connections a listener keeps.
fn refused_max() -> usize {
    starting_max(STARTING_MAX) / 2
}

impl Source for Listening {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // Connections that come meanwhile are reported again.
        for _ in 0..self.listener.waiting() {
            if self.half_open.waiting.load(Ordering::Relaxed) >= self.backlog {
                self.pause();
                return true;
            }
            match self.listener.accept() {
                Ok(Some((stream, peer))) => self.half_open.accepted(stream, peer),
                Ok(None) => return true,
                // Connections that are rejected, over or silent must not keep others out.
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
                    // Out of memory, or forbidden. Without the pause the poller would report it
                    // again immediately.
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

/// A connection whose MPA request is not complete, or was just completed.
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

/// A connection whose MPA request is being read.
struct Pending {
    half_open: Arc<HalfOpen>,
    ctx: Context,
    token: u64,
    /// The peer's address, by which connections are counted.
    address: IpAddr,
    incoming: Mutex<Option<Incoming>>,
}

impl Pending {
    fn end(&self, starting: &Starting) {
        self.half_open.engine.remove(&starting.stream, self.token);
    }

    /// Gives up the connection, unless its request has come and was not read yet.
    fn read_or_give_up(self: Arc<Self>, why: &str) {
        Arc::clone(&self).ready(true, false, false);
        self.give_up(why);
    }

    fn give_up(&self, why: &str) {
        if let Some(Incoming { starting, .. }) = self.incoming.lock().take() {
            tracing::debug!("a connection in start-up is given up: {why}");
            self.end(&starting);
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
                self.end(&incoming.starting);
                // The program is notified without locks.
                drop(slot);
                self.half_open.deliver(self.ctx.clone(), incoming);
            }
            Read::Bad(failure) => {
                tracing::debug!(error = %failure, "no MPA request");
                let Incoming { starting, .. } = incoming;
                self.end(&starting);
                starting.end(failure.ending(), self.ctx.config().crc);
            }
            Read::Closed => self.end(&incoming.starting),
            Read::Broken(e) => {
                tracing::debug!(error = %e, "connection broke during start-up");
                self.end(&incoming.starting);
            }
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        // The process may have been stopped meanwhile, so the socket is read before the clock
        // counts.
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

/// Adds one to a counter until it is dropped. Counts requests that wait for an answer, and
/// connections.
#[derive(Debug)]
pub(crate) struct Count(Arc<AtomicU32>);

impl Count {
    fn new(of: &Arc<AtomicU32>) -> Self {
        of.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(of))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

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
    /// Sends a rejection, and leaves it to the initiator to close the connection.
    pub(super) fn reject(mut self, private_data: &[u8]) {
        if let Some(watch) = self.watch.take() {
            watch.end(&self.starting.stream);
        }
        self.session.reject(private_data);
        let sent = self.starting.write(self.session.reply());
        self.session.reply_sent(Time::from_nanos(now_ns()));
        if let (Ok(()), Ok(engine), Some(until)) = (sent, engine(), self.session.poll_at()) {
            let most = refused_max();
            self.refused
                .keep(&engine, self.starting.stream, until, most);
        }
    }
}

#[cfg(test)]
#[path = "passive_tests.rs"]
mod tests;
