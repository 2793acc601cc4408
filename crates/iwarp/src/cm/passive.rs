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

/// Requests that may wait for an answer if the program asks for fewer, or for no number: programs ask for one and mean that they do not mind.
const BACKLOG_LEAST: u32 = 128;
/// The backlog of a program that names none, and the largest one, in the kernel's connection
/// manager.
const BACKLOG_MOST: u32 = 1024;
/// Connections that the kernel keeps until they are accepted, unless the program asks for more. It is as many as may be in start-up. If the queue
/// is full, the kernel drops what comes, and a peer connects a second later or more: a crowd that comes while other threads have the processor
/// must not do that to a good client.
const ARRIVING_LEAST: u32 = STARTING_MAX as u32;
/// The setting that [`Admission::half_open`] has for [`refused_max`], whatever the program's is.
const STARTING_MAX: usize = 1024;
/// This many may be in start-up, however few descriptors there are, unless the settings ask for fewer.
const STARTING_MIN: usize = 16;
/// The private data that tell a peer why its request was rejected without asking the program.
const NO_SEAT: &[u8] = b"the listener has as many connections as it may have";
/// How long a listener pauses when descriptors run out.
const PAUSE: Duration = Duration::from_millis(100);

/// How many requests a program wants to be asked about at a time.
#[derive(Debug, Clone, Copy)]
pub(super) enum Backlog {
    /// Further ones wait until the program has answered some.
    Waits(u32),
    /// Further ones are rejected until the program has taken some from its channel.
    Rejects(u32),
}

impl Backlog {
    /// The number that the program has named.
    pub(super) const fn wanted(self) -> u32 {
        match self {
            Self::Waits(n) | Self::Rejects(n) => n,
        }
    }

    /// Requests that may wait for an answer.
    fn unanswered(self) -> u32 {
        match self {
            Self::Waits(n) => n.max(BACKLOG_LEAST),
            Self::Rejects(_) => BACKLOG_MOST,
        }
    }

    /// Requests that may wait to be taken, if there is a limit.
    const fn untaken_most(self) -> Option<u32> {
        match self {
            Self::Waits(_) => None,
            Self::Rejects(n) if n == 0 || n > BACKLOG_MOST => Some(BACKLOG_MOST),
            Self::Rejects(n) => Some(n),
        }
    }
}

/// A listening socket.
pub(super) struct Listening {
    listener: Listener,
    token: u64,
    backlog: u32,
    paused: Mutex<bool>,
    hall: Arc<Hall>,
}

/// What the connections of a listener need of it. It does not hold the socket: when the program closes the listener, its port
/// is free at once, even while connections are still starting.
struct Hall {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    /// The device that the listener is confined to, if the program chose it.
    ctx: Option<Context>,
    /// Where it listens, if that is one address.
    local: Option<SocketAddr>,
    /// Which peers it lets in, and how many.
    admission: Admission,
    /// Connections and requests that are not over.
    seats: Arc<AtomicU32>,
    /// Connections in start-up, the oldest first.
    starting: Mutex<VecDeque<Weak<Greeting>>>,
    /// Requests not answered.
    waiting: Arc<AtomicU32>,
    /// Requests whose event nobody has taken, and how many of them there may be.
    untaken: Arc<AtomicU32>,
    untaken_most: Option<u32>,
    /// Requests that were rejected, until their initiators have closed.
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
            hall: Arc::new(Hall {
                id: Arc::downgrade(&id.inner),
                engine: Arc::clone(&engine),
                ctx,
                local: (!local.ip().is_unspecified()).then(|| canonical(local)),
                admission,
                seats: Arc::default(),
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
        self.hall.engine.remove(&self.listener, self.token);
    }

    fn pause(&self) {
        let mut paused = self.paused.lock();
        if !*paused {
            *paused = true;
            let engine = &self.hall.engine;
            let _ = engine.modify(&self.listener, self.token, Interest::NONE);
            engine.after(PAUSE, self.token, 0);
        }
    }
}

impl Hall {
    fn welcome(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        if !self.admission.peers.contains(peer.ip()) {
            tracing::debug!(%peer, "a peer that is not let in");
            stream.abort();
            return;
        }
        // The peer's address as `accept` returned it: a socket forgets its peer when that resets the connection.
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
        if self.is_greeting() {
            // Requests of older connections may have come, too, and this one must not overtake them. The poller reports all of them in the
            // order in which they came. Programs such as `ib_send_bw -q 8` take the n-th request for the n-th connection of the client.
            return self.greet(ctx, incoming);
        }
        // Often the request is there already.
        match incoming.read() {
            Read::NeedMore => self.greet(ctx, incoming),
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
    fn is_greeting(&self) -> bool {
        let mut all = self.starting.lock();
        while all.front().is_some_and(|oldest| oldest.strong_count() == 0) {
            all.pop_front();
        }
        !all.is_empty()
    }

    /// Waits for the request.
    fn greet(self: &Arc<Self>, ctx: Context, incoming: Incoming) {
        let limit = incoming.session.poll_at();
        let token = self.engine.token();
        let greeting = Arc::new(Greeting {
            hall: Arc::clone(self),
            ctx,
            token,
            address: counted(incoming.starting.ends.peer.ip()),
            incoming: Mutex::new(None),
        });
        let mut slot = greeting.incoming.lock();
        let watched = self.engine.add(
            &incoming.starting.stream,
            token,
            Interest::READ,
            Arc::clone(&greeting) as Arc<dyn Source>,
        );
        if watched.is_err() {
            return;
        }
        *slot = Some(incoming);
        drop(slot);
        self.seat(&greeting);
        if let Some(limit) = limit {
            self.engine.at(limit.as_nanos(), token, 0);
        }
    }

    /// Adds a connection to those in start-up. If there are too many, of its address or in all, the oldest of them is given up: an honest peer sends
    /// its request at once, so that one is the most suspicious.
    fn seat(&self, greeting: &Arc<Greeting>) {
        let (mut of_address, mut in_all) = (0, 0);
        let mut oldest = None;
        {
            let mut all = self.starting.lock();
            all.retain(|weak| {
                let Some(other) = weak.upgrade() else {
                    return false;
                };
                in_all += 1;
                if other.address == greeting.address {
                    of_address += 1;
                    oldest.get_or_insert(other);
                }
                true
            });
            all.push_back(Arc::downgrade(greeting));
        }
        if let Some(oldest) = oldest
            && of_address >= self.admission.half_open_per_address
        {
            self.starting
                .lock()
                .retain(|weak| !std::ptr::eq(weak.as_ptr(), &*oldest));
            oldest.be_given_up("too many connections of its address in start-up");
        } else if in_all >= starting_max(self.admission.half_open as usize) {
            self.give_up_oldest("too many connections in start-up");
        }
    }

    /// Gives up the connection that has been in start-up for longest, unless its request has come and nobody has read it yet. Returns `false` if
    /// there is no connection in start-up.
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
        oldest.be_given_up(why);
        true
    }

    fn context_of(&self, ip: IpAddr) -> Result<Context> {
        match &self.ctx {
            Some(ctx) => Ok(ctx.clone()),
            None => shared_context(&Device::by_address(ip)?),
        }
    }

    /// The request is complete and valid: notifies the program.
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
        let told = |v: Option<u16>| v.filter(|v| *v != NO_NEGOTIATION);
        let (responder_resources, initiator_depth) =
            (told(pending.peer_ord()), told(pending.peer_ird()));
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
            timeout: limits(ctx.config()).close,
        };
        if let Some(most) = self.untaken_most
            && self.untaken.load(Ordering::Relaxed) >= most
        {
            drop(s);
            tracing::debug!("a request is rejected: the program has not taken the earlier ones");
            return requested.reject(&[]);
        }
        if self.seats.load(Ordering::Relaxed) >= self.admission.connections {
            drop(s);
            tracing::debug!("a request is rejected: the listener has too many connections");
            return requested.reject(NO_SEAT);
        }
        let channel = listener.channel();
        let seat = Count::new(&self.seats);
        let is_watched = self.untaken_most.is_some() && ctx.config().face == Face::Roce;
        let id = CmId::of_request(&channel, ctx, self.ctx.is_some(), requested, seat);
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
            // Behind the event of the request.
            id.watch_requester(&self.engine);
        }
    }
}

/// Connections in start-up have a quarter of the process's descriptors at most: those that are accepted need more than one.
fn starting_max(most: usize) -> usize {
    let quarter = limits::descriptors() / 4;
    quarter.max(STARTING_MIN).min(most)
}

/// Rejected connections of one listener have half of that.
fn refused_max() -> usize {
    starting_max(STARTING_MAX) / 2
}

impl Source for Listening {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // Those that come meanwhile are reported again.
        for _ in 0..self.listener.waiting() {
            if self.hall.waiting.load(Ordering::Relaxed) >= self.backlog {
                self.pause();
                return true;
            }
            match self.listener.accept() {
                Ok(Some((stream, peer))) => self.hall.welcome(stream, peer),
                Ok(None) => return true,
                // Connections that are rejected or over or send nothing must not keep others out.
                Err(NetError::TooManyFiles { .. }) if self.hall.refused.close_oldest() => {}
                Err(NetError::TooManyFiles { .. }) if linger::give_up_oldest() => {}
                Err(NetError::TooManyFiles { .. })
                    if self.hall.give_up_oldest("its descriptor is needed") => {}
                Err(e @ NetError::TooManyFiles { .. }) => {
                    let why = std::io::Error::from(e);
                    crate::complain::once(format!("cannot accept connections for now: {why}"));
                    self.pause();
                    return true;
                }
                Err(e) => {
                    // Out of memory, or forbidden: the poller would report it again at once.
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
            let engine = &self.hall.engine;
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
struct Greeting {
    hall: Arc<Hall>,
    ctx: Context,
    token: u64,
    /// As peers are counted.
    address: IpAddr,
    incoming: Mutex<Option<Incoming>>,
}

impl Greeting {
    fn end(&self, starting: &Starting) {
        self.hall.engine.remove(&starting.stream, self.token);
    }

    /// Gives up the connection, unless its request has come and nobody has read it yet.
    fn be_given_up(self: Arc<Self>, why: &str) {
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

impl Source for Greeting {
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
                // The program is told without locks.
                drop(slot);
                self.hall.deliver(self.ctx.clone(), incoming);
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
        // The process may have been stopped meanwhile: what has come is looked at before the clock is believed.
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

/// Counts one while it lives: a request that waits for an answer, or a connection.
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

/// A peer's request.
pub(super) struct Requested {
    pub(super) starting: Starting,
    pub(super) session: Responder,
    /// Which end of an extended reliable connection the peer is.
    pub(super) peer_end: Option<XrcEnd>,
    /// Notices that the initiator gives up.
    pub(super) watch: Option<Watch>,
    _waiting: Count,
    refused: Arc<RefusedList>,
    /// How long the initiator may take to close a connection that is rejected.
    timeout: Duration,
}

impl Requested {
    /// Sends a rejection, and leaves it to the initiator to close the connection.
    pub(super) fn reject(mut self, private_data: &[u8]) {
        if let Some(watch) = self.watch.take() {
            watch.end(&self.starting.stream);
        }
        self.session.reject(private_data);
        let sent = self.starting.write(self.session.reply());
        if let (Ok(()), Ok(engine)) = (sent, engine()) {
            let most = refused_max();
            self.refused
                .keep(&engine, self.starting.stream, self.timeout, most);
        }
    }
}

#[cfg(test)]
#[path = "passive_tests.rs"]
mod tests;
