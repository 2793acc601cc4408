//! Connects queue pairs by number, for programs that exchange GIDs and queue pair numbers themselves
//! (`ibv_modify_qp(3)` to RTR with an address) instead of using the connection manager.
//!
//! iWARP has no such way to connect: an MPA connection needs a port and two roles. So the number carries the port. The low 16
//! bits of an addressable queue pair's number are a TCP port on which its device listens, with each of its addresses; the address is
//! the GID. Each side learns of the other at RTR, and neither waits for the other. The side with the smaller (GID, number) connects
//! and the other accepts; requests posted meanwhile wait. The MPA private data name both numbers, so a listener answers
//! only those peers that one of its queue pairs has named.
//!
//! An early request waits for its queue pair, and an early connector tries again, both for a bounded time.

use super::cm::{
    CmEvent, CmEventChannel, CmEventKind, CmId, ConnectionParameters, create_event_channel,
};
use super::context::{Context, ContextInner, random_u32};
use super::qp::QueuePair;
use crate::device::{Device, gid_of};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::sys::clock::now_ns;
use crate::sys::poller::Interest;
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
/// How long an early request waits for its queue pair, and a connector for its peer.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(50);
/// How many ports are tried until one is free on all addresses.
const PORT_ATTEMPTS: usize = 16;

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
enum Waiting {
    /// The peer connects.
    ForPeer { qp: QueuePair, peer: Address },
    /// We connect; `id` is the attempt in progress.
    Connecting {
        qp: QueuePair,
        /// The address that the peer knows us by.
        own: IpAddr,
        peer: Address,
        id: Option<CmId>,
        since: u64,
    },
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

/// All addressable queue pairs of a device.
pub(super) struct Peers {
    ctx: Weak<ContextInner>,
    channel: CmEventChannel,
    engine: Arc<Engine>,
    token: u64,
    state: Mutex<State>,
}

impl Peers {
    pub(super) fn start(ctx: &Arc<ContextInner>) -> Result<Arc<Self>> {
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
    pub(super) fn is_ours(&self) -> bool {
        !self.engine.is_foreign()
    }

    pub(super) fn stop(&self) {
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
    pub(super) fn number(&self, taken: impl Fn(u32) -> bool) -> Result<u32> {
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
        let mut attempt = self.listen_on_all(ctx, &device);
        for _ in 1..PORT_ATTEMPTS {
            match attempt {
                Err(ref e) if e.errno() == libc::EADDRINUSE => {}
                _ => break,
            }
            attempt = self.listen_on_all(ctx, &device);
        }
        attempt
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
    pub(super) fn forget(&self, num: u32) {
        let gone = {
            let mut state = self.state.lock();
            let port = num as u16;
            if let Some(p) = state.ports.iter_mut().find(|p| p.port == port) {
                p.used[(num >> 16) as usize % PER_PORT] = false;
            }
            // A listener without queue pairs is closed, so that no peer connects to it.
            let idle = state.ports.iter().position(|p| !p.used.contains(&true));
            if let Some(i) = idle {
                state.ports.swap_remove(i).close();
            }
            let early = state.early.remove(&num).map(|e| e.0);
            let attempt = match state.waiting.remove(&num) {
                Some(Waiting::Connecting { id, .. }) => id,
                _ => None,
            };
            let up = state
                .up
                .iter()
                .position(|id| id.queue_pair().is_none_or(|qp| qp.num() == num));
            let up = up.map(|i| state.up.swap_remove(i));
            [early, attempt, up]
        };
        for id in gone.into_iter().flatten() {
            id.destroy();
        }
    }

    /// Handles a queue pair that has become RTR with this peer, which knows it by the GID `own`.
    pub(super) fn connect(
        self: &Arc<Self>,
        qp: &QueuePair,
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
        if own == peer {
            return Err(Error::InvalidArgument(
                "a queue pair cannot be connected to itself",
            ));
        }
        if own < peer {
            let entry = Waiting::Connecting {
                qp: qp.clone(),
                own: ip,
                peer,
                id: None,
                since: now_ns(),
            };
            self.state.lock().waiting.insert(own.num, entry);
            self.try_connect(own.num);
            return Ok(());
        }
        let early = {
            let mut state = self.state.lock();
            match state.early.remove(&own.num) {
                Some((id, from, _)) if from == peer => Some(id),
                _ => {
                    state.waiting.insert(
                        own.num,
                        Waiting::ForPeer {
                            qp: qp.clone(),
                            peer,
                        },
                    );
                    None
                }
            }
        };
        if let Some(id) = early {
            self.accept(&id, qp);
        }
        Ok(())
    }

    fn accept(&self, id: &CmId, qp: &QueuePair) {
        id.set_queue_pair(Some(qp));
        match id.accept(&ConnectionParameters::default()) {
            Ok(()) => self.state.lock().up.push(id.clone()),
            Err(error) => {
                tracing::debug!(qp = qp.num(), %error, "cannot accept the peer");
                id.destroy();
                qp.inner.fail_connection();
            }
        }
    }

    fn try_connect(self: &Arc<Self>, num: u32) {
        let (qp, own, peer) = match self.state.lock().waiting.get(&num) {
            Some(Waiting::Connecting {
                qp,
                own,
                peer,
                id: None,
                ..
            }) => (qp.clone(), *own, *peer),
            _ => return,
        };
        let attempt = self.attempt(&qp, own, peer);
        let mut state = self.state.lock();
        match attempt {
            Ok(attempt) => {
                if let Some(Waiting::Connecting { id, .. }) = state.waiting.get_mut(&num) {
                    *id = Some(attempt);
                } else {
                    drop(state);
                    attempt.destroy();
                }
            }
            Err(error) => {
                tracing::debug!(qp = num, %error, "cannot connect to the peer");
                state.waiting.remove(&num);
                drop(state);
                qp.inner.fail_connection();
            }
        }
    }

    fn attempt(&self, qp: &QueuePair, own: IpAddr, peer: Address) -> Result<CmId> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let id = CmId::create(&self.channel, Some(&ctx));
        let own = ctx.device().socket_addr(own, 0);
        let mut address = SocketAddr::new(Ipv6Addr::from(peer.gid).to_canonical(), peer.num as u16);
        // A GID has no scope: a link-local peer is on the network of the address that it knows.
        if let (SocketAddr::V6(to), SocketAddr::V6(own)) = (&mut address, own) {
            to.set_scope_id(own.scope_id());
        }
        id.resolve_addr(Some(own), address)?;
        id.resolve_route()?;
        id.set_queue_pair(Some(qp));
        let mut data = MAGIC.to_vec();
        data.extend_from_slice(&qp.num().to_be_bytes());
        data.extend_from_slice(&peer.num.to_be_bytes());
        id.connect(&ConnectionParameters {
            private_data: data,
            ..ConnectionParameters::default()
        })?;
        Ok(id)
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
        let qp = {
            let mut state = self.state.lock();
            match state.waiting.get(&to) {
                Some(Waiting::ForPeer { qp, peer }) if *peer == from => {
                    let qp = qp.clone();
                    state.waiting.remove(&to);
                    Some(qp)
                }
                None if exists && state.early.len() < EARLY_MAX => {
                    let old = state.early.insert(to, (event.id.clone(), from, now_ns()));
                    drop(state);
                    if let Some((id, ..)) = old {
                        id.destroy();
                    }
                    self.engine.after(PATIENCE, self.token, 0);
                    return;
                }
                _ => None,
            }
        };
        match qp {
            Some(qp) => self.accept(&event.id, &qp),
            None => event.id.destroy(),
        }
    }

    fn established(&self, id: &CmId) {
        let mut state = self.state.lock();
        let num = state.waiting.iter().find_map(|(num, w)| match w {
            Waiting::Connecting { id: Some(i), .. } if i.is_same(id) => Some(*num),
            _ => None,
        });
        if let Some(num) = num {
            state.waiting.remove(&num);
            state.up.push(id.clone());
        }
    }

    /// Handles a failed attempt: the peer may not be RTR yet, or may not listen yet. Tries again for a while.
    fn failed(self: &Arc<Self>, event: &CmEvent) {
        let lost = {
            let mut state = self.state.lock();
            state.up.retain(|id| !id.is_same(&event.id));
            let entry = state.waiting.iter_mut().find_map(|(num, w)| match w {
                Waiting::Connecting { id, qp, since, .. }
                    if id.as_ref().is_some_and(|i| i.is_same(&event.id)) =>
                {
                    *id = None;
                    Some((*num, qp.clone(), *since))
                }
                _ => None,
            });
            match entry {
                Some((num, qp, since))
                    if now_ns().saturating_sub(since) > PATIENCE.as_nanos() as u64 =>
                {
                    state.waiting.remove(&num);
                    Some(qp)
                }
                Some((num, ..)) => {
                    self.engine.after(RETRY, self.token, num);
                    None
                }
                None => None,
            }
        };
        event.id.destroy();
        if let Some(qp) = lost {
            tracing::debug!(
                qp = qp.num(),
                status = event.status,
                "the peer cannot be reached"
            );
            qp.inner.fail_connection();
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
            num => self.try_connect(num),
        }
    }
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").finish_non_exhaustive()
    }
}
