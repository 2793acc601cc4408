//! The server: `iwarp perf serve`, and the peer process of a local run.

use super::args::ServeArgs;
use super::control::{
    Control, DEFAULT_PORT, HELLO_TIMEOUT, PROTOCOL, REQUEST_TIMEOUT, Reply, Request, resolve,
    send_busy,
};
use super::host::HostInfo;
use super::point::{Link, Metric, Point, Role, Session, check_link, check_point, memory_of};
use super::{host, local, pin, transport};
use iwarp::Config;
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::out;
use iwarp_cli_common::service::{self, Budget, Gate, Guest, Share};
use iwarp_figures::Latencies;
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Largest number of links of a client. No plan needs as many.
const MAX_LINKS: usize = 64;
/// How long a client waits for its turn while the previous client frees its queue pairs and memory.
const TURN_TIMEOUT: Duration = Duration::from_secs(1);
/// A measuring client that sends no request for this long loses its turn if another client waits.
const TURN_IDLE: Duration = Duration::from_secs(5);
/// A client whose first link is not set up after this long loses its turn if another client waits.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);
/// The thread of a client that lost its turn has this long to end. After that the next client
/// measures nevertheless, because that thread no longer has an active connection.
const TAKE_OVER_DELAY: Duration = Duration::from_millis(500);

/// Serves until killed, or as a child until the parent exits.
pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    if let Some(cpu) = args.cpu {
        pin::pin_to(cpu);
    }
    let addrs = resolve(&args.bind, DEFAULT_PORT)?;
    let listener =
        TcpListener::bind(&addrs[..]).context(format_args!("cannot listen on {}", args.bind))?;
    let at = listener.local_addr().context("listener")?;
    if args.child {
        local::end_with_parent()?;
        local::announce(at)?;
    } else {
        out::line(format_args!(
            "iwarp perf: listening on {at}; measure with: iwarp perf connect HOST:{}",
            at.port()
        ));
    }

    let gate = service::gate(&args.limits);
    let peers = args.limits.apply(Config::from_env()).admission.peers;
    // Both ends of a local run belong to the same user.
    let budget = Budget::new(if args.child { u64::MAX } else { args.memory });
    let turns = Turns::default();
    std::thread::scope(|scope| {
        loop {
            let (stream, from) = match listener.accept() {
                Ok(x) => x,
                Err(e) => {
                    // No file descriptors are left, or a handshake was aborted: keep serving.
                    tracing::warn!("accept: {e}");
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            if !peers.contains(from.ip()) {
                tracing::info!(%from, "refused by --allow");
                continue;
            }
            let guest = match admit(&gate, &stream, from) {
                Ok(guest) => guest,
                Err(e) => {
                    tracing::info!(%from, "refused: {e}");
                    // The answer fits into the buffer of a new socket, so this does not block.
                    let _ = Control::new(stream).and_then(|mut c| c.send(&Reply::Busy {}));
                    continue;
                }
            };
            let (turns, budget) = (&turns, &budget);
            let spawned = std::thread::Builder::new()
                .name(format!("client {from}"))
                .spawn_scoped(scope, move || {
                    let guest = Arc::new(guest);
                    match one_client(stream, &guest, turns, budget) {
                        Ok(()) => tracing::info!(%from, "client done"),
                        Err(_) if guest.is_evicted() => {
                            tracing::info!(%from, "evicted for another client");
                        }
                        Err(e) => service::log_failure(from, &e),
                    }
                });
            if let Err(e) = spawned {
                tracing::warn!(%from, "cannot start a thread for a client: {e}");
            }
        }
    })
}

fn admit(gate: &Arc<Gate>, stream: &TcpStream, from: SocketAddr) -> Result<Guest> {
    let guest = gate.admit(from.ip()).context("no place")?;
    let clone = stream.try_clone().context("control connection")?;
    guest.on_evict(move || send_busy(&clone));
    Ok(guest)
}

/// Serialises the measurements of all clients, because they would disturb each other.
#[derive(Default)]
struct Turns {
    holder: Mutex<Option<Holder>>,
}

struct Holder {
    guest: Arc<Guest>,
    since: Instant,
    /// The connections of a link have been set up.
    opened: bool,
    /// When a waiting client first found that this client was evicted.
    evicted_since: Option<Instant>,
}

impl Holder {
    /// Returns `true` if the client is idle and loses its turn to a waiting client.
    fn is_idle(&self, now: Instant) -> bool {
        let opening = now.saturating_duration_since(self.since);
        (!self.opened && opening >= OPEN_TIMEOUT) || self.guest.idle() >= TURN_IDLE
    }
}

impl Turns {
    fn holder(&self) -> MutexGuard<'_, Option<Holder>> {
        // Every statement leaves the holder consistent, so a poisoned lock is harmless.
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the right to measure. Returns `None` if another client keeps it, or if this client
    /// is evicted meanwhile. Evicts the holder if it is idle.
    fn take(&self, guest: &Arc<Guest>) -> Option<Turn<'_>> {
        let end = Instant::now() + TURN_TIMEOUT;
        loop {
            let now = Instant::now();
            if self.try_take(guest, now) {
                return Some(Turn {
                    turns: self,
                    guest: Arc::clone(guest),
                });
            }
            if now >= end || guest.is_evicted() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn try_take(&self, guest: &Arc<Guest>, now: Instant) -> bool {
        let mut holder = self.holder();
        if let Some(other) = &mut *holder {
            if other.guest.is_evicted() {
                let since = *other.evicted_since.get_or_insert(now);
                if now.saturating_duration_since(since) < TAKE_OVER_DELAY {
                    return false;
                }
            } else {
                if other.is_idle(now) {
                    tracing::info!("an idle client loses its turn");
                    other.guest.evict();
                }
                return false;
            }
        }
        *holder = Some(Holder {
            guest: Arc::clone(guest),
            since: now,
            opened: false,
            evicted_since: None,
        });
        true
    }
}

/// The right to measure. Dropping it passes the right on.
struct Turn<'a> {
    turns: &'a Turns,
    guest: Arc<Guest>,
}

impl Turn<'_> {
    /// Calls `f` with the holder if the holder is still this client.
    fn if_holder(&self, f: impl FnOnce(&mut Option<Holder>)) {
        let mut holder = self.turns.holder();
        if holder
            .as_ref()
            .is_some_and(|h| Arc::ptr_eq(&h.guest, &self.guest))
        {
            f(&mut holder);
        }
    }

    /// Records that the connections of a link have been set up.
    fn set_opened(&self) {
        self.if_holder(|holder| {
            if let Some(holder) = holder {
                holder.opened = true;
            }
        });
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.if_holder(|holder| *holder = None);
    }
}

fn one_client(
    stream: TcpStream,
    guest: &Arc<Guest>,
    turns: &Turns,
    budget: &Arc<Budget>,
) -> Result<()> {
    let mut c = Control::new(stream)?;
    guest.advance();
    match c.receive(HELLO_TIMEOUT)? {
        Some(Request::Hello { protocol, .. }) => {
            guest.advance();
            let version = env!("CARGO_PKG_VERSION").to_owned();
            c.send(&Reply::Hello {
                protocol: PROTOCOL,
                version,
                host: Some(HostInfo::collect()),
            })?;
            if protocol == PROTOCOL {
                serve_requests(&mut c, guest, turns, budget)
            } else {
                Ok(())
            }
        }
        Some(_) => c.send(&Reply::Error {
            message: "the first message must be hello".to_owned(),
        }),
        None => Ok(()),
    }
}

struct Opened {
    _share: Share,
    link: Link,
    session: Box<dyn Session>,
}

fn serve_requests(
    c: &mut Control,
    guest: &Arc<Guest>,
    turns: &Turns,
    budget: &Arc<Budget>,
) -> Result<()> {
    // Declared before the links, so that they are closed before the next client gets the turn.
    let mut turn = None;
    let mut links: HashMap<u32, Opened> = HashMap::new();
    let mut hist = Latencies::new();
    loop {
        guest.touch();
        let Some(request) = c.receive::<Request>(REQUEST_TIMEOUT)? else {
            return Ok(());
        };
        if turn.is_some() {
            guest.at_work();
        }
        let result = match request {
            Request::Hello { .. } => Err(Error::failed("hello was sent already")),
            Request::Open { id, link } => {
                if turn.is_none() && check_link(&link).is_ok() {
                    turn = turns.take(guest);
                    if turn.is_none() {
                        return c.send(&Reply::Busy {});
                    }
                    guest.at_work();
                }
                let opened = open(c, id, link, &mut links, budget);
                if let Some(turn) = turn.as_ref().filter(|_| opened.is_ok()) {
                    turn.set_opened();
                }
                opened
            }
            Request::Run { id, point, iters } => {
                let r = measure(c, id, &point, iters, &mut links, &mut hist);
                if r.is_err() {
                    // The two ends no longer agree on what is in flight on that link.
                    links.remove(&id);
                }
                r
            }
        };
        if let Err(e) = result {
            tracing::warn!("{e}");
            c.send(&Reply::Error {
                message: e.to_string(),
            })?;
        }
    }
}

fn open(
    c: &mut Control,
    id: u32,
    link: Link,
    links: &mut HashMap<u32, Opened>,
    budget: &Arc<Budget>,
) -> Result<()> {
    check_link(&link)?;
    if links.len() >= MAX_LINKS || links.contains_key(&id) {
        return Err(Error::failed(
            "too many links, or a link with this number is open",
        ));
    }
    let share = budget.take(memory_of(&link) as usize)?;
    let pending = transport(link.wire).listen(&link, c.local_with_any_port()?, c.peer_ip()?)?;
    c.send(&Reply::Listening {
        port: pending.port(),
    })?;
    let session = pending.accept()?;
    let opened = Opened {
        _share: share,
        link,
        session,
    };
    links.insert(id, opened);
    c.send(&Reply::Opened {})
}

fn measure(
    c: &mut Control,
    id: u32,
    point: &Point,
    iters: u64,
    links: &mut HashMap<u32, Opened>,
    hist: &mut Latencies,
) -> Result<()> {
    let o = links
        .get_mut(&id)
        .ok_or_else(|| Error::failed(format!("link {id} is not open")))?;
    check_point(point, &o.link)?;
    o.session.prepare(Role::Server, point, iters)?;
    c.send(&Reply::Ready {})?;
    let before = host::cpu_us();
    match point.metric {
        Metric::Latency => o.session.latency(Role::Server, point, iters, hist)?,
        Metric::Bandwidth => drop(o.session.bandwidth(Role::Server, point, iters)?),
    }
    c.send(&Reply::Done {
        cpu_us: host::cpu_us() - before,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    /// A client that has lost its turn must not end the turn of its successor.
    #[test]
    fn late_drop_keeps_successors_turn() {
        let gate = Gate::new(8, 8);
        let guest = || Arc::new(gate.admit(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap());
        let (turns, [first, second, third]) = (Turns::default(), [guest(), guest(), guest()]);
        let turn = turns.take(&first).unwrap();
        first.evict();
        let now = Instant::now();
        assert!(
            !turns.try_take(&second, now),
            "the first client's thread has time to end"
        );
        assert!(turns.try_take(&second, now + TAKE_OVER_DELAY));
        // The first client's thread opens its link late, and then ends.
        turn.set_opened();
        drop(turn);
        let holder = |guest: &Arc<Guest>| {
            let holder = turns.holder();
            holder
                .as_ref()
                .is_some_and(|h| Arc::ptr_eq(&h.guest, guest) && !h.opened)
        };
        assert!(holder(&second));
        assert!(!turns.try_take(&third, now + TAKE_OVER_DELAY));
        assert!(holder(&second));
    }
}
