//! Connects queue pairs by number, for programs that exchange GIDs and queue pair numbers themselves
//! (`ibv_modify_qp(3)` to RTR with an address) instead of using the connection manager.
//!
//! iWARP has no such way to connect: an MPA connection needs a port and two roles. So the number carries the port. The low 16
//! bits of an addressable queue pair's number are a TCP port on which its device listens, with each of its addresses; the address is
//! the GID. Each side learns of the other at RTR, and neither waits for the other. The side with the smaller (GID, number) connects
//! and the other accepts; requests posted meanwhile wait. The MPA private data name both numbers, so a listener answers
//! only those peers that one of its queue pairs has named.
//!
//! An early request waits for its queue pair for a bounded time, and an early connector tries again as long as its queue pair waits
//! (`conn/absent_peer.rs` says when a request has waited for long enough).
//!
//! A queue pair that is its own peer gets a TCP socket that is connected to itself. MPA start-up, which needs two ends, is left out:
//! there is nothing to agree on.

use crate::cm::{
    CmEvent, CmEventChannel, CmEventKind, CmId, ConnectionParameters, create_event_channel,
};
use crate::conn::absent_peer;
use crate::conn::qp::{Handover, QpInner, QueuePair};
use crate::device::{Device, gid_of};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::objects::context::{Context, ContextInner, random_u32};
use crate::objects::registry::Registry;
use crate::sys::clock::now_ns;
use crate::sys::connect::connect_to_itself;
use crate::sys::poller::Interest;
use iwarp_rnic::qp::{State as QpState, StreamConfig, StreamTimes};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

const MAGIC: [u8; 8] = *b"iwarp-qp";
/// Queue pair numbers per listener: those that differ in the 8 of 24 bits that are not the port.
const PER_PORT: usize = 256;
/// Early requests kept per device.
const EARLY_MAX: usize = 1024;
/// How long an early request waits for its queue pair. Its sender then tries again.
const PATIENCE: Duration = Duration::from_secs(30);
/// How many ports are tried until one is free on all addresses.
const PORT_ATTEMPTS: usize = 16;
/// The pause before a connector tries again is an eighth of the time that it has waited, within these limits.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];
/// In the number of a timer: it is time to look whether the peer of this queue pair is absent. Queue pair numbers have 24 bits.
const LOOK: u32 = 1 << 24;

/// The peer of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Address {
    gid: [u8; 16],
    num: u32,
}

/// A port on which the device listens.
struct Port {
    /// One for each address.
    listeners: Vec<(IpAddr, CmId)>,
    port: u16,
    used: [bool; PER_PORT],
}

impl Port {
    /// Listens on one more address, and on the first of them chooses the port.
    fn listen(&mut self, peers: &Peers, ctx: &Context, device: &Device, ip: IpAddr) -> Result<()> {
        let id = CmId::create(&peers.channel, Some(ctx));
        let at = device.socket_addr(ip, self.port);
        if let Err(e) = id.bind(at).and_then(|()| id.listen(0)) {
            id.destroy();
            return Err(e);
        }
        self.port = id.addresses().0.map_or(0, |a| a.port());
        self.listeners.push((ip, id));
        Ok(())
    }

    fn close(&self) {
        self.listeners.iter().for_each(|(_, id)| id.destroy());
    }
}

/// A queue pair between RTR and its connection.
struct Waiting {
    qp: Weak<QpInner>,
    /// The epoch of the queue pair that the connection is for. What was begun in another one does
    /// not concern it.
    epoch: u64,
    peer: Address,
    role: Role,
    /// Our request, or the peer's that was accepted, until the connection is up.
    id: Option<CmId>,
}

enum Role {
    /// The peer connects.
    Accepts,
    /// We connect.
    Connects {
        /// The address that the peer knows us by.
        own: IpAddr,
        since: u64,
    },
}

impl Waiting {
    fn queue_pair(&self) -> Option<QueuePair> {
        Some(QueuePair {
            inner: self.qp.upgrade()?,
        })
    }

    fn has(&self, id: &CmId) -> bool {
        self.id.as_ref().is_some_and(|i| i.is_same(id))
    }
}

/// A request that has come to nothing.
enum Lost {
    /// The peer's.
    Peers,
    /// Ours. The queue pair has tried since then.
    Ours { since: u64 },
}

#[derive(Default)]
struct State {
    ports: Vec<Port>,
    waiting: HashMap<u32, Waiting>,
    /// Requests whose queue pair is not RTR yet, by its number.
    early: HashMap<u32, (CmId, Address, u64)>,
    /// Identifiers of connections that are up; dropped at their end.
    up: Vec<CmId>,
}

/// Connects the queue pairs of a device by number, in this process. It starts with the first of them.
#[derive(Default)]
pub(crate) struct Directory(Mutex<Option<Arc<Peers>>>);

impl Registry for Directory {
    fn destroyed(&self, num: u32) {
        let peers = self.0.lock().clone();
        if let Some(peers) = peers {
            peers.forget(num);
        }
    }

    fn gave_up_peer(&self, num: u32) {
        let peers = self.0.lock().clone();
        if let Some(peers) = peers.filter(|peers| peers.is_ours()) {
            peers.abandon(num);
        }
    }

    fn requests_wait(&self, num: u32, time: Duration) {
        let peers = self.0.lock().clone();
        if let Some(peers) = peers.filter(|peers| peers.is_ours()) {
            peers.look_for(num, time);
        }
    }

    fn closed(&self) {
        let peers = self.0.lock().take();
        if let Some(peers) = peers.filter(|peers| peers.is_ours()) {
            peers.stop();
        }
    }
}

impl ContextInner {
    /// Returns what connects the device's queue pairs by number, in this process.
    pub(crate) fn peers(self: &Arc<Self>) -> Result<Arc<Peers>> {
        let directory = self.registry::<Directory>();
        let mut peers = directory.0.lock();
        match &*peers {
            Some(p) if p.is_ours() => Ok(Arc::clone(p)),
            _ => {
                let new = Peers::start(self)?;
                *peers = Some(Arc::clone(&new));
                Ok(new)
            }
        }
    }
}

/// All addressable queue pairs of a device.
pub(crate) struct Peers {
    ctx: Weak<ContextInner>,
    channel: CmEventChannel,
    engine: Arc<Engine>,
    token: u64,
    state: Mutex<State>,
}

impl Peers {
    pub(crate) fn start(ctx: &Arc<ContextInner>) -> Result<Arc<Self>> {
        let engine = Engine::current()?;
        let token = engine.token();
        let this = Arc::new(Self {
            ctx: Arc::downgrade(ctx),
            channel: create_event_channel()?,
            engine: Arc::clone(&engine),
            token,
            state: Mutex::default(),
        });
        engine.add(
            &*this.channel,
            token,
            Interest::READ,
            Arc::clone(&this) as Arc<dyn Source>,
        )?;
        Ok(this)
    }

    /// Returns `true` if it belongs to this process, and not to the one that forked it.
    pub(crate) fn is_ours(&self) -> bool {
        !self.engine.is_foreign()
    }

    pub(crate) fn stop(&self) {
        self.engine.remove(&*self.channel, self.token);
        let state = std::mem::take(&mut *self.state.lock());
        state.ports.iter().for_each(Port::close);
        for id in &state.up {
            id.destroy();
        }
    }

    fn context(&self) -> Option<Context> {
        Some(Context {
            inner: self.ctx.upgrade()?,
        })
    }

    /// Returns a number whose port is ours. `taken` returns `true` for numbers in use.
    pub(crate) fn number(&self, taken: impl Fn(u32) -> bool) -> Result<u32> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let random = random_u32()? as usize;
        let mut state = self.state.lock();
        for round in 0..2 {
            for port in &mut state.ports {
                for i in 0..PER_PORT {
                    let high = (random + i) % PER_PORT;
                    let num = (high as u32) << 16 | u32::from(port.port);
                    if !port.used[high] && num > 1 && !taken(num) {
                        port.used[high] = true;
                        return Ok(num);
                    }
                }
            }
            if round == 0 {
                state.ports.push(self.open_port(&ctx)?);
            }
        }
        Err(Error::OutOfMemory)
    }

    /// Listens on a port that is free on all addresses of the device that have GIDs.
    fn open_port(&self, ctx: &Context) -> Result<Port> {
        let device = ctx.device().current()?.ok_or(Error::NoDevice)?;
        until_free(|| self.listen_on_all(ctx, &device))
    }

    fn listen_on_all(&self, ctx: &Context, device: &Device) -> Result<Port> {
        let mut port = Port {
            listeners: Vec::new(),
            port: 0,
            used: [false; PER_PORT],
        };
        for ip in device.addresses.iter().filter(|a| a.place.is_some()) {
            if let Err(e) = port.listen(self, ctx, device, ip.ip) {
                port.close();
                return Err(e);
            }
        }
        match port.port {
            0 => Err(Error::NoDevice),
            _ => Ok(port),
        }
    }

    /// Listens for the peers of this queue pair on one more address, which the device has got since the port was opened.
    fn listen_also(&self, ctx: &Context, num: u32, ip: IpAddr) -> Result<()> {
        let mut state = self.state.lock();
        let port = state.ports.iter_mut().find(|p| p.port == num as u16);
        let Some(port) = port.filter(|p| !p.listeners.iter().any(|l| l.0 == ip)) else {
            return Ok(());
        };
        let device = ctx.device().current()?.ok_or(Error::NoDevice)?;
        if device.address(ip).is_none() {
            return Err(Error::InvalidArgument("the GID is none of this device"));
        }
        port.listen(self, ctx, &device, ip)
    }

    /// Handles a queue pair that is gone.
    pub(crate) fn forget(&self, num: u32) {
        let idle = {
            let mut state = self.state.lock();
            let port = num as u16;
            if let Some(p) = state.ports.iter_mut().find(|p| p.port == port) {
                p.used[(num >> 16) as usize % PER_PORT] = false;
            }
            // A listener without queue pairs is closed, so that no peer connects to it.
            let idle = state.ports.iter().position(|p| !p.used.contains(&true));
            idle.map(|i| state.ports.swap_remove(i))
        };
        if let Some(port) = idle {
            port.close();
        }
        self.abandon(num);
    }

    /// Handles a queue pair that does not want its peer any more.
    pub(crate) fn abandon(&self, num: u32) {
        let mut gone = Vec::new();
        {
            let mut state = self.state.lock();
            gone.extend(state.early.remove(&num).map(|e| e.0));
            gone.extend(state.waiting.remove(&num).and_then(|w| w.id));
            let is_of = |id: &mut CmId| id.queue_pair().is_none_or(|qp| qp.num() == num);
            gone.extend(state.up.extract_if(.., is_of));
        }
        for id in gone {
            id.destroy();
        }
    }

    /// Looks after this time whether the peer of a queue pair is absent.
    pub(crate) fn look_for(&self, num: u32, left: Duration) {
        self.engine.after(left, self.token, LOOK | num);
    }

    /// Handles a queue pair that has become RTR in this epoch, with this peer, which knows it by the GID `own`.
    pub(crate) fn connect(
        self: &Arc<Self>,
        (qp, epoch): (&QueuePair, u64),
        own: [u8; 16],
        gid: [u8; 16],
        num: u32,
    ) -> Result<()> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let ip = Ipv6Addr::from(own).to_canonical();
        self.listen_also(&ctx, qp.num(), ip)?;
        let own = Address {
            gid: own,
            num: qp.num(),
        };
        let peer = Address { gid, num };
        if qp.is_known_as(gid, num) {
            return join(&ctx, qp, ip);
        }
        let connects = own < peer;
        let role = match connects {
            true => Role::Connects {
                own: ip,
                since: now_ns(),
            },
            false => Role::Accepts,
        };
        let entry = Waiting {
            qp: Arc::downgrade(&qp.inner),
            epoch,
            peer,
            role,
            id: None,
        };
        if self.wait(own.num, entry) {
            match connects {
                true => self.try_connect(own.num),
                false => self.accept_next(own.num),
            }
        }
        Ok(())
    }

    /// A queue pair waits for its connection from now on. Returns `false` if it did already.
    fn wait(&self, num: u32, entry: Waiting) -> bool {
        let mut gone = Vec::new();
        {
            let mut state = self.state.lock();
            if let Some(before) = state.waiting.get(&num)
                && (before.epoch, before.peer) == (entry.epoch, entry.peer)
            {
                return false;
            }
            if state.early.get(&num).is_some_and(|e| e.1 != entry.peer) {
                gone.extend(state.early.remove(&num).map(|e| e.0));
            }
            let before = state.waiting.insert(num, entry);
            gone.extend(before.and_then(|before| before.id));
        }
        for id in gone {
            id.destroy();
        }
        true
    }

    /// Accepts the early request of a queue pair's peer, if there is one and no other was accepted. If the peer has given it up, the queue pair
    /// goes on waiting.
    fn accept_next(&self, num: u32) {
        while let Some((id, qp, epoch)) = self.take_early(num) {
            id.set_queue_pair_of(Some(&qp), Some(epoch));
            let accepted = match id.requester_is_gone() {
                // The peer's queue pair was reset since it asked. It asks again, and could not if this one were connected.
                true => Err(Error::Closed),
                false => id.accept_when_heard(&ConnectionParameters::default()),
            };
            let Err(error) = accepted else { return };
            tracing::debug!(qp = num, %error, "cannot accept the peer");
            self.lose(num, &id);
            id.destroy();
        }
    }

    /// Takes the early request that is to be accepted now, with the queue pair and the epoch of it that takes it.
    fn take_early(&self, num: u32) -> Option<(CmId, QueuePair, u64)> {
        let mut state = self.state.lock();
        let State { waiting, early, .. } = &mut *state;
        let entry = waiting.get_mut(&num)?;
        let is_free = matches!(entry.role, Role::Accepts) && entry.id.is_none();
        if !is_free || early.get(&num)?.1 != entry.peer {
            return None;
        }
        let qp = entry.queue_pair()?;
        let (id, ..) = early.remove(&num)?;
        entry.id = Some(id.clone());
        Some((id, qp, entry.epoch))
    }

    /// The request of a queue pair that waits has come to nothing. Returns since when a queue pair that connects has tried; `None` if
    /// the request is not that of its present attempt.
    fn lose(&self, num: u32, id: &CmId) -> Option<Lost> {
        let mut state = self.state.lock();
        let entry = state.waiting.get_mut(&num).filter(|w| w.has(id))?;
        entry.id = None;
        Some(match entry.role {
            Role::Accepts => Lost::Peers,
            Role::Connects { since, .. } => Lost::Ours { since },
        })
    }

    fn try_connect(self: &Arc<Self>, num: u32) {
        let Some(ctx) = self.context() else { return };
        let id = CmId::create(&self.channel, Some(&ctx));
        let Some((qp, own, peer)) = self.begin_attempt(num, &id) else {
            return;
        };
        if matches!(qp.state(), QpState::Reset | QpState::Error) {
            // It has failed by itself, and does not want its peer any more.
            self.abandon(num);
            return;
        }
        if let Err(error) = attempt(&ctx, &id, &qp, own, peer) {
            // There may be no route now, or no descriptor.
            tracing::debug!(qp = num, %error, "cannot connect to the peer");
            let lost = self.lose(num, &id);
            id.destroy();
            if let Some(Lost::Ours { since }) = lost {
                self.try_again(num, since);
            }
        }
    }

    /// Notes the attempt before its events can come. Returns what it is for; `None` if none is to be made now.
    fn begin_attempt(&self, num: u32, id: &CmId) -> Option<(QueuePair, IpAddr, Address)> {
        let mut state = self.state.lock();
        let entry = state.waiting.get_mut(&num).filter(|w| w.id.is_none())?;
        let Role::Connects { own, .. } = entry.role else {
            return None;
        };
        let qp = entry.queue_pair()?;
        id.set_queue_pair_of(Some(&qp), Some(entry.epoch));
        entry.id = Some(id.clone());
        Some((qp, own, entry.peer))
    }

    /// Tries again after a pause.
    fn try_again(&self, num: u32, since: u64) {
        let waited = Duration::from_nanos(now_ns().saturating_sub(since));
        self.engine.after(pause_after(waited), self.token, num);
    }

    fn event(self: &Arc<Self>, event: CmEvent) {
        match event.kind {
            CmEventKind::ConnectRequest => self.request(event),
            CmEventKind::Established => self.established(&event.id),
            CmEventKind::Rejected | CmEventKind::Unreachable | CmEventKind::ConnectError => {
                self.failed(&event)
            }
            CmEventKind::Disconnected => {
                self.state.lock().up.retain(|id| !id.is_same(&event.id));
                event.id.destroy();
            }
            _ => {}
        }
    }

    fn request(self: &Arc<Self>, event: CmEvent) {
        let Some((from, to)) = sender(&event) else {
            event.id.destroy();
            return;
        };
        let exists = self
            .context()
            .is_some_and(|ctx| ctx.queue_pair(to).is_some());
        let gone = match exists {
            true => self.keep(&event.id, from, to),
            false => vec![event.id],
        };
        for id in gone {
            id.destroy();
        }
        self.accept_next(to);
        if self.state.lock().early.contains_key(&to) {
            self.engine.after(PATIENCE, self.token, 0);
        }
    }

    /// Keeps a request for a queue pair until it is accepted. Returns the identifiers that are of no use any more; they are destroyed without
    /// locks.
    fn keep(&self, id: &CmId, from: Address, to: u32) -> Vec<CmId> {
        let mut state = self.state.lock();
        let State { waiting, early, .. } = &mut *state;
        let mut gone = Vec::new();
        match waiting.get_mut(&to) {
            Some(entry) if entry.peer != from || !matches!(entry.role, Role::Accepts) => {
                return vec![id.clone()];
            }
            // A peer asks again only if it has given up the stream of its earlier request, although that may be heard of later.
            Some(entry) if !id.requester_is_gone() => {
                gone.extend(entry.id.take_if(|before| before.is_unheard()));
            }
            None if early.len() >= EARLY_MAX => return vec![id.clone()],
            _ => {}
        }
        let before = early.insert(to, (id.clone(), from, now_ns()));
        gone.extend(before.map(|before| before.0));
        gone
    }

    /// Returns the number of the queue pair that waits with this request.
    fn waits_with(&self, id: &CmId) -> Option<u32> {
        let state = self.state.lock();
        let found = state.waiting.iter().find(|(_, w)| w.has(id));
        found.map(|(num, _)| *num)
    }

    fn established(&self, id: &CmId) {
        let mut state = self.state.lock();
        let num = state.waiting.iter().find(|(_, w)| w.has(id));
        if let Some(num) = num.map(|(num, _)| *num) {
            state.waiting.remove(&num);
            state.up.push(id.clone());
        }
    }

    /// Handles a connection that has come to nothing: the peer may not be RTR yet, may not listen yet, or was reset since it asked.
    fn failed(self: &Arc<Self>, event: &CmEvent) {
        let num = self.waits_with(&event.id);
        let lost = num.and_then(|num| Some((num, self.lose(num, &event.id)?)));
        event.id.destroy();
        let Some((num, lost)) = lost else { return };
        tracing::debug!(qp = num, status = event.status, "no connection to the peer");
        match lost {
            Lost::Ours { since } => self.try_again(num, since),
            Lost::Peers => self.accept_next(num),
        }
    }

    /// Ends requests that waited too long.
    fn expire(&self) {
        let now = now_ns();
        let late: Vec<CmId> = {
            let mut state = self.state.lock();
            let limit = PATIENCE.as_nanos() as u64;
            let nums: Vec<u32> = state
                .early
                .iter()
                .filter(|(_, (.., since))| now.saturating_sub(*since) >= limit)
                .map(|(num, _)| *num)
                .collect();
            nums.iter()
                .filter_map(|num| state.early.remove(num))
                .map(|e| e.0)
                .collect()
        };
        for id in late {
            id.destroy();
        }
    }
}

/// Returns the pause of a queue pair that has tried for so long.
fn pause_after(waited: Duration) -> Duration {
    (waited / 8).clamp(PAUSES[0], PAUSES[1])
}

/// Attempts something until it does not fail because a port is taken. Each attempt gets another port.
fn until_free<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let mut result = attempt();
    for _ in 1..PORT_ATTEMPTS {
        match result {
            Err(ref e) if e.errno() == libc::EADDRINUSE => {}
            _ => break,
        }
        result = attempt();
    }
    result
}

/// Asks the peer of a queue pair, which knows it by the address `own`, for a connection.
fn attempt(ctx: &Context, id: &CmId, qp: &QueuePair, own: IpAddr, peer: Address) -> Result<()> {
    let own = ctx.device().socket_addr(own, 0);
    let mut address = SocketAddr::new(Ipv6Addr::from(peer.gid).to_canonical(), peer.num as u16);
    // A GID has no scope: a link-local peer is on the network of the address that it knows.
    if let (SocketAddr::V6(to), SocketAddr::V6(own)) = (&mut address, own) {
        to.set_scope_id(own.scope_id());
    }
    id.resolve_addr(Some(own), address)?;
    id.resolve_route()?;
    let mut data = MAGIC.to_vec();
    data.extend_from_slice(&qp.num().to_be_bytes());
    data.extend_from_slice(&peer.num.to_be_bytes());
    id.connect(&ConnectionParameters {
        private_data: data,
        ..ConnectionParameters::default()
    })
}

/// Connects a queue pair to itself, at this address of the device.
fn join(ctx: &Context, qp: &QueuePair, ip: IpAddr) -> Result<()> {
    let (stream, ends) = connect_to_itself(ctx.device().socket_addr(ip, 0))?;
    let (config, sizes) = (ctx.config(), qp.config());
    qp.inner.attach(Handover {
        stream,
        ends,
        watched: None,
        config: StreamConfig {
            initiator: true,
            crc: config.crc,
            markers_tx: config.markers,
            markers_rx: config.markers,
            ird: sizes.max_ird,
            ord: sizes.max_ord.min(sizes.max_ird),
            rtr: None,
            rtr_send_expected: false,
            emss: config.mss.unwrap_or(536),
            times: StreamTimes::NONE,
        },
        // A record of it would have each packet twice, in the same direction.
        flow: None,
        cm: None,
        epoch: None,
        infiniband: None,
    })
}

/// Returns the sender of a request and the queue pair that it names; `None` if that is not one of ours.
fn sender(event: &CmEvent) -> Option<(Address, u32)> {
    let rest = event.private_data.strip_prefix(&MAGIC)?;
    let (from, rest) = rest.split_first_chunk()?;
    let (to, _) = rest.split_first_chunk()?;
    let gid = gid_of(event.id.addresses().1?.ip().to_canonical());
    Some((
        Address {
            gid,
            num: u32::from_be_bytes(*from),
        },
        u32::from_be_bytes(*to),
    ))
}

impl Source for Peers {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        while let Some(event) = self.channel.try_next() {
            self.event(event);
        }
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        match kind {
            0 => self.expire(),
            num if num & LOOK == 0 => self.try_connect(num),
            look => {
                let num = look & !LOOK;
                if let Some(qp) = self.context().and_then(|ctx| ctx.queue_pair(num)) {
                    absent_peer::timer(&qp.inner);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "peer_tests.rs"]
mod tests;
