//! The partners of all queue pairs of a device that are connected by number ([overview](super)).
//!
//! Events of the connection manager, timers, and calls of queue pairs become events of a
//! [`Partner`]. The directory releases its lock before it applies the effects of an event.

use super::partner::{
    Address, Connector, EARLY_LIMIT, Effects, Event, Named, Partner, Request, Role, Then,
    absent_after, step,
};
use super::ports::Ports;
use crate::cm::{
    CmEvent, CmEventChannel, CmEventKind, CmId, ConnectionParameters, create_event_channel,
};
use crate::conn::attach::Handover;
use crate::conn::qp::{QpInner, QueuePair};
use crate::device::gid_of;
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::objects::context::{Context, ContextInner};
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
/// Maximum number of connection requests kept for queue pairs that have not named their peer yet.
const EARLY_MAX: usize = 1024;
/// Timer that refuses connection requests which were kept for too long. Each other timer is a queue
/// pair number (24 bits, never 0) and starts the next attempt to connect.
const TIMER_EXPIRE: u32 = 0;
/// Set in the timer of a queue pair whose work requests may have reached their time limit.
const TIMER_REQUESTS: u32 = 1 << 24;

#[derive(Default)]
struct State {
    ports: Ports,
    partners: HashMap<u32, Partner>,
}

impl State {
    fn step(&mut self, num: u32, event: Event) -> Effects {
        let (next, effects) = step(self.partners.remove(&num), event);
        if let Some(next) = next {
            self.partners.insert(num, next);
        }
        effects
    }
}

/// The directory of a device, if this process has started it. The first use starts it.
#[derive(Default)]
pub(crate) struct Registered(Mutex<Option<Arc<Directory>>>);

impl Registered {
    /// Returns the directory, unless a parent process started it before a fork.
    fn ours(&self) -> Option<Arc<Directory>> {
        let directory = self.0.lock().clone();
        directory.filter(|directory| directory.is_ours())
    }
}

impl Registry for Registered {
    fn destroyed(&self, num: u32) {
        if let Some(directory) = self.ours() {
            directory.forget(num);
        }
    }

    fn gave_up_peer(&self, num: u32) {
        if let Some(directory) = self.ours() {
            directory.give_up(num, None);
        }
    }

    fn requests_wait(&self, num: u32) {
        if let Some(directory) = self.ours() {
            directory.requests_wait(num, false);
        }
    }

    fn closed(&self) {
        let directory = self.0.lock().take();
        if let Some(directory) = directory.filter(|directory| directory.is_ours()) {
            directory.stop();
        }
    }
}

impl ContextInner {
    /// Returns the directory of the device in this process, and starts it if there is none.
    pub(crate) fn directory(self: &Arc<Self>) -> Result<Arc<Directory>> {
        let registered = self.registry::<Registered>();
        let mut directory = registered.0.lock();
        match &*directory {
            Some(d) if d.is_ours() => Ok(Arc::clone(d)),
            _ => {
                let new = Directory::start(self)?;
                *directory = Some(Arc::clone(&new));
                Ok(new)
            }
        }
    }

    /// Restarts the time limit of work requests that wait for the peer of the queue pair `num`.
    pub(super) fn restart_requests(&self, num: u32) {
        if let Some(directory) = self.registry::<Registered>().ours() {
            directory.requests_wait(num, true);
        }
    }
}

/// See the module.
pub(crate) struct Directory {
    ctx: Weak<ContextInner>,
    channel: CmEventChannel,
    engine: Arc<Engine>,
    token: u64,
    /// Counts the connection requests: each one holds a clone.
    kept: Arc<()>,
    state: Mutex<State>,
}

impl Directory {
    fn start(ctx: &Arc<ContextInner>) -> Result<Arc<Self>> {
        let engine = Engine::current()?;
        let token = engine.token();
        let this = Arc::new(Self {
            ctx: Arc::downgrade(ctx),
            channel: create_event_channel()?,
            engine: Arc::clone(&engine),
            token,
            kept: Arc::default(),
            state: Mutex::default(),
        });
        let source = Arc::clone(&this) as Arc<dyn Source>;
        engine.add(&*this.channel, token, Interest::READ, source)?;
        Ok(this)
    }

    fn is_ours(&self) -> bool {
        !self.engine.is_foreign()
    }

    fn stop(&self) {
        self.engine.remove(&*self.channel, self.token);
        let state = std::mem::take(&mut *self.state.lock());
        let ids = state.partners.into_values().flat_map(Partner::into_ids);
        ids.for_each(|id| id.destroy());
    }

    fn context(&self) -> Option<Context> {
        Some(Context {
            inner: self.ctx.upgrade()?,
        })
    }

    /// Reserves a queue pair number that contains a port of this device. `taken` returns `true` for
    /// numbers in use.
    pub(crate) fn reserve_number(&self, taken: impl Fn(u32) -> bool) -> Result<u32> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let mut state = self.state.lock();
        state.ports.reserve(&self.channel, &ctx, taken)
    }

    /// Handles a destroyed queue pair.
    fn forget(&self, num: u32) {
        let unused = self.state.lock().ports.release(num);
        drop(unused);
        self.give_up(num, None);
    }

    /// Removes the partner of a queue pair. If `epoch` is given, removes it only if the queue pair
    /// is still in that epoch, so that it was not reset in between.
    fn give_up(&self, num: u32, epoch: Option<u64>) {
        let effects = self.state.lock().step(num, Event::GivenUp { epoch });
        destroy_all(effects.destroy);
    }

    /// Connects a queue pair, which has become RTR in this epoch, to its peer. `own` is the GID by
    /// which the peer knows the queue pair.
    ///
    /// # Errors
    /// The device cannot listen at that address, or the queue pair cannot be connected to itself.
    pub(super) fn connect(
        self: &Arc<Self>,
        (qp, epoch): (&QueuePair, u64),
        own: [u8; 16],
        peer: Address,
    ) -> Result<()> {
        let ctx = self.context().ok_or(Error::NoDevice)?;
        let ip = Ipv6Addr::from(own).to_canonical();
        let num = qp.num();
        let listening = {
            let mut state = self.state.lock();
            state.ports.listen_at(&self.channel, &ctx, num, ip)
        };
        let is_itself = qp.is_known_as(peer.gid, peer.num);
        let result = match listening {
            Ok(()) if is_itself => connect_itself(&ctx, qp, ip),
            listening => listening,
        };
        if is_itself && result.is_ok() {
            return Ok(());
        }
        let own = Address { gid: own, num };
        let since = now_ns();
        let role = match result {
            Err(_) => Role::Unreachable,
            Ok(()) if own < peer => Role::Us(Connector { own: ip, since }),
            Ok(()) => Role::Peer,
        };
        let named = Named {
            qp: Arc::downgrade(&qp.inner),
            epoch,
            peer,
            requests_since: None,
        };
        self.pass(num, Event::Named(named, role));
        // Another thread may have posted work requests before the partner existed.
        self.requests_wait(num, false);
        result
    }

    /// Passes an event to the partner of the queue pair `num`, and applies the effects.
    fn pass(self: &Arc<Self>, num: u32, event: Event) {
        let effects = self.state.lock().step(num, event);
        self.apply(num, effects);
    }

    /// Applies the effects of an event. The caller holds no lock.
    fn apply(self: &Arc<Self>, num: u32, effects: Effects) {
        destroy_all(effects.destroy);
        match effects.then {
            Then::Nothing => {}
            Then::Connect => self.attempt(num),
            Then::ConnectAfter(pause) => self.engine.after(pause, self.token, num),
            Then::Accept { id, qp, epoch } => self.accept(num, &id, &qp, epoch),
            // `attempt` handles this effect itself, because it has the identifier.
            Then::Ask { .. } => {}
            Then::SetTimer => {
                if let Some(limit) = self.limit(num) {
                    self.set_timer(num, limit);
                }
            }
            Then::SetTimerFor(left) => self.set_timer(num, left),
            Then::Fail { qp, epoch } => {
                let Some(qp) = qp.upgrade() else { return };
                if qp.fail_absent_peer(epoch) {
                    self.give_up(num, Some(epoch));
                }
            }
        }
    }

    fn set_timer(&self, num: u32, limit: Duration) {
        let timer = TIMER_REQUESTS | num;
        self.engine.after(limit, self.token, timer);
    }

    /// Returns how long work requests of a queue pair wait for its peer.
    fn limit(&self, num: u32) -> Option<Duration> {
        let qp = self.context()?.queue_pair(num)?;
        absent_after(qp.retry().gone_after())
    }

    /// Starts the time limit of work requests that wait for the peer of a queue pair. If the limit
    /// is running already, only `restart` starts it again.
    fn requests_wait(self: &Arc<Self>, num: u32, restart: bool) {
        let named = {
            let state = self.state.lock();
            let named = state.partners.get(&num).and_then(Partner::named);
            let named = named.filter(|named| named.starts_limit(restart));
            named.map(|named| (Weak::clone(&named.qp), named.epoch))
        };
        let Some((qp, epoch)) = named else { return };
        if qp.upgrade().is_some_and(|qp| qp.awaits_peer(epoch)) {
            let now = now_ns();
            self.pass(num, Event::RequestsWait { now, restart });
        }
    }

    /// Accepts the connection request `id` for the queue pair `num`.
    fn accept(self: &Arc<Self>, num: u32, id: &CmId, qp: &Weak<QpInner>, epoch: u64) {
        let accepted = match qp.upgrade() {
            None => Err(Error::Closed),
            Some(inner) => {
                id.set_user_data(num.into());
                id.set_queue_pair_of(Some(&QueuePair { inner }), Some(epoch));
                match id.requester_is_gone() {
                    // The peer's queue pair was reset after it sent the request, and it will send
                    // another. If this request were accepted, the next one would be refused.
                    true => Err(Error::Closed),
                    false => id.accept_at_first_fpdu(&ConnectionParameters::default()),
                }
            }
        };
        if let Err(error) = accepted {
            tracing::debug!(qp = num, %error, "cannot accept the peer's request");
            self.lose(num, id);
        }
    }

    /// Handles a connection request that was refused or aborted.
    fn lose(self: &Arc<Self>, num: u32, id: &CmId) {
        let lost = Event::Lost {
            id: id.clone(),
            now: now_ns(),
        };
        let effects = self.state.lock().step(num, lost);
        id.destroy();
        self.apply(num, effects);
    }

    /// Starts the next attempt to connect a queue pair, if its partner is `Pausing`.
    fn attempt(self: &Arc<Self>, num: u32) {
        let Some(ctx) = self.context() else { return };
        let id = CmId::create(&self.channel, Some(&ctx));
        id.set_user_data(num.into());
        let Effects { destroy, then } = {
            let id = id.clone();
            self.state.lock().step(num, Event::Begin { id })
        };
        destroy_all(destroy);
        let Then::Ask {
            qp,
            epoch,
            own,
            peer,
        } = then
        else {
            return;
        };
        let Some(qp) = qp.upgrade().map(|inner| QueuePair { inner }) else {
            return;
        };
        if matches!(qp.state(), QpState::Reset | QpState::Error) {
            // The queue pair has failed or was reset, so it no longer needs its peer.
            return self.give_up(num, Some(epoch));
        }
        id.set_queue_pair_of(Some(&qp), Some(epoch));
        if let Err(error) = ask(&ctx, &id, num, own, peer) {
            // There may be no route at the moment, or no file descriptor.
            tracing::debug!(qp = num, %error, "cannot connect to the peer");
            self.lose(num, &id);
        }
    }

    fn event(self: &Arc<Self>, event: CmEvent) {
        let CmEvent { kind, id, .. } = &event;
        let num = id.user_data() as u32;
        let id = id.clone();
        match kind {
            CmEventKind::ConnectRequest => self.connect_request(&event),
            CmEventKind::Established => self.pass(num, Event::Established { id }),
            CmEventKind::Rejected | CmEventKind::Unreachable | CmEventKind::ConnectError => {
                tracing::debug!(qp = num, status = event.status, "no connection to the peer");
                self.lose(num, &id);
            }
            CmEventKind::Disconnected => {
                let over = id.clone();
                self.pass(num, Event::Disconnected { id });
                over.destroy();
            }
            _ => {}
        }
    }

    /// Handles the connection request of a peer.
    fn connect_request(self: &Arc<Self>, event: &CmEvent) {
        let id = &event.id;
        let Some((from, num)) = sender(event) else {
            return id.destroy();
        };
        let ctx = self.context();
        if ctx.is_none_or(|ctx| ctx.queue_pair(num).is_none()) {
            return id.destroy();
        }
        let effects = {
            let mut state = self.state.lock();
            let partner = state.partners.get(&num);
            if partner.is_none() && Arc::strong_count(&self.kept) > EARLY_MAX {
                drop(state);
                return id.destroy();
            }
            let accepted = partner.and_then(Partner::accepted);
            let asked = Event::Asked {
                is_live: !id.requester_is_gone(),
                is_silent: accepted.is_some_and(CmId::awaits_first_fpdu),
                request: Request {
                    id: id.clone(),
                    from,
                    since: now_ns(),
                    _counted: Arc::clone(&self.kept),
                },
            };
            state.step(num, asked)
        };
        if matches!(effects.then, Then::Nothing) {
            // The request is kept and needs a timer. If it was refused instead, the timer has no
            // effect.
            self.engine.after(EARLY_LIMIT, self.token, TIMER_EXPIRE);
        }
        self.apply(num, effects);
    }

    /// Refuses connection requests that were kept for too long.
    fn expire(&self) {
        let now = now_ns();
        let expired: Vec<CmId> = {
            let mut state = self.state.lock();
            let nums: Vec<u32> = state.partners.keys().copied().collect();
            let effects = nums
                .iter()
                .map(|num| state.step(*num, Event::Expire { now }));
            effects.flat_map(|effects| effects.destroy).collect()
        };
        destroy_all(expired);
    }
}

fn destroy_all(ids: Vec<CmId>) {
    ids.iter().for_each(CmId::destroy);
}

/// Sends a connection request for the queue pair `num` to `peer`, which knows it by the address
/// `own`.
fn ask(ctx: &Context, id: &CmId, num: u32, own: IpAddr, peer: Address) -> Result<()> {
    let own = ctx.device().socket_addr(own, 0);
    let mut address = SocketAddr::new(Ipv6Addr::from(peer.gid).to_canonical(), peer.num as u16);
    // A GID has no scope. A link-local peer is on the network of our address that it knows.
    if let (SocketAddr::V6(to), SocketAddr::V6(own)) = (&mut address, own) {
        to.set_scope_id(own.scope_id());
    }
    id.resolve_addr(Some(own), address)?;
    id.resolve_route()?;
    let mut data = MAGIC.to_vec();
    data.extend_from_slice(&num.to_be_bytes());
    data.extend_from_slice(&peer.num.to_be_bytes());
    id.connect(&ConnectionParameters {
        private_data: data,
        ..ConnectionParameters::default()
    })
}

/// Returns the sender of a connection request and the number of the requested queue pair; `None` if
/// [`ask`] did not write the private data.
fn sender(event: &CmEvent) -> Option<(Address, u32)> {
    let rest = event.private_data.strip_prefix(&MAGIC)?;
    let (from, rest) = rest.split_first_chunk()?;
    let (to, _) = rest.split_first_chunk()?;
    let gid = gid_of(event.id.addresses().1?.ip().to_canonical());
    let num = u32::from_be_bytes(*from);
    Some((Address { gid, num }, u32::from_be_bytes(*to)))
}

/// Connects a queue pair to itself, at this address of the device.
fn connect_itself(ctx: &Context, qp: &QueuePair, ip: IpAddr) -> Result<()> {
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
        // A capture would show each packet twice, in the same direction.
        flow: None,
        cm: None,
        epoch: None,
        infiniband: None,
    })
}

impl Source for Directory {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        while let Some(event) = self.channel.try_next() {
            self.event(event);
        }
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        match kind {
            TIMER_EXPIRE => self.expire(),
            num if num & TIMER_REQUESTS == 0 => self.attempt(num),
            timer => {
                let num = timer & !TIMER_REQUESTS;
                let (now, limit) = (now_ns(), self.limit(num));
                self.pass(num, Event::TimeOver { now, limit });
            }
        }
    }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
