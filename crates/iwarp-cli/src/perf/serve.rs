//! The answering end: `iwarp perf serve`, and the peer process of a local run.

use super::args::ServeArgs;
use super::control::{Control, DEFAULT_PORT, HELLO, IDLE, PROTOCOL, Reply, Request, resolve};
use super::host::HostInfo;
use super::point::{Link, Metric, Point, Role, Session, check_link, check_point, memory_of};
use super::{local, pin, transport};
use crate::error::{Context as _, Error, Result};
use crate::service::{self, Budget, Gate, Guest, Share};
use iwarp_figures::Latencies;
use std::collections::HashMap;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// More links than any plan needs; a client that asks for more is broken.
const MAX_LINKS: usize = 64;
/// How long a client that has its figures may take to leave, until its queue pairs and memory are freed.
const LEAVING: Duration = Duration::from_secs(1);
/// A client that may measure and asks for nothing for this long loses its turn to the next one.
const TURN_IDLE: Duration = Duration::from_secs(5);

/// Serves until killed; as a child, until the parent has gone.
///
/// # Errors
/// When the address cannot be bound.
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
        println!(
            "iwarp perf: listening on {at}; measure with: iwarp perf connect HOST:{}",
            at.port()
        );
    }

    let gate = service::gate(&args.limits);
    // Both ends of a local run belong to the same user.
    let budget = Budget::new(if args.child { u64::MAX } else { args.memory });
    let turns = Turns::default();
    std::thread::scope(|scope| {
        loop {
            let (stream, from) = match listener.accept() {
                Ok(x) => x,
                Err(e) => {
                    // Out of descriptors or an aborted handshake: neither may end the server.
                    tracing::warn!("accept: {e}");
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            let guest = match admit(&gate, &stream, from) {
                Ok(guest) => guest,
                Err(e) => {
                    tracing::info!(%from, "refused: {e}");
                    // The answer fits into the buffer of a new socket, so this does not block.
                    let _ = Control::new(stream).and_then(|mut c| c.say(&Reply::Busy {}));
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
                        Err(e) => tracing::warn!(%from, "{e}"),
                    }
                });
            if let Err(e) = spawned {
                tracing::warn!(%from, "no thread for a client: {e}");
            }
        }
    })
}

fn admit(gate: &Arc<Gate>, stream: &TcpStream, from: SocketAddr) -> Result<Guest> {
    let guest = gate.admit(from.ip()).context("no place")?;
    let other = stream.try_clone().context("control connection")?;
    guest.on_evict(move || {
        let _ = other.shutdown(Shutdown::Both);
    });
    Ok(guest)
}

/// The client that measures: one at a time, because a second measurement would disturb both.
#[derive(Default)]
struct Turns {
    holder: Mutex<Option<Arc<Guest>>>,
}

impl Turns {
    fn holder(&self) -> MutexGuard<'_, Option<Arc<Guest>>> {
        // The holder is set or not; a thread that panics leaves nothing half done.
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The right to measure; `None` if another client has it. A client that is leaving gets time for that, and a client that has it
    /// and does nothing is disconnected.
    fn take(&self, guest: &Arc<Guest>) -> Option<Turn<'_>> {
        let end = Instant::now() + LEAVING;
        loop {
            {
                let mut holder = self.holder();
                match &*holder {
                    None => {
                        *holder = Some(Arc::clone(guest));
                        return Some(Turn(self));
                    }
                    Some(other) if other.idle() >= TURN_IDLE && !other.is_evicted() => {
                        tracing::info!("a client that does not measure loses its turn");
                        other.evict();
                    }
                    Some(_) => {}
                }
            }
            if Instant::now() >= end {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The right to measure, until this is dropped.
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.holder() = None;
    }
}

fn one_client(
    stream: TcpStream,
    guest: &Arc<Guest>,
    turns: &Turns,
    budget: &Arc<Budget>,
) -> Result<()> {
    let mut c = Control::new(stream)?;
    match c.hear(HELLO)? {
        Some(Request::Hello { protocol, .. }) => {
            guest.at_work();
            let Some(_turn) = turns.take(guest) else {
                return c.say(&Reply::Busy {});
            };
            guest.touch();
            let version = env!("CARGO_PKG_VERSION").to_owned();
            c.say(&Reply::Hello {
                protocol: PROTOCOL,
                version,
                host: Some(HostInfo::here()),
            })?;
            if protocol == PROTOCOL {
                serve_requests(&mut c, guest, budget)
            } else {
                Ok(())
            }
        }
        Some(_) => c.say(&Reply::Error {
            message: "say hello first".to_owned(),
        }),
        None => Ok(()),
    }
}

struct Opened {
    _share: Share,
    link: Link,
    session: Box<dyn Session>,
}

fn serve_requests(c: &mut Control, guest: &Guest, budget: &Arc<Budget>) -> Result<()> {
    let mut links: HashMap<u32, Opened> = HashMap::new();
    let mut hist = Latencies::new();
    loop {
        guest.touch();
        let Some(request) = c.hear::<Request>(IDLE)? else {
            return Ok(());
        };
        guest.at_work();
        let result = match request {
            Request::Hello { .. } => Err(Error::failed("hello was said already")),
            Request::Open { id, link } => open(c, id, link, &mut links, budget),
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
            c.say(&Reply::Error {
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
            "too many links, or one of this number is open",
        ));
    }
    let share = budget.take(memory_of(&link) as usize)?;
    let pending = transport(link.wire).listen(&link, c.here()?)?;
    c.say(&Reply::Listening {
        port: pending.port(),
    })?;
    let session = pending.accept()?;
    let opened = Opened {
        _share: share,
        link,
        session,
    };
    links.insert(id, opened);
    c.say(&Reply::Opened {})
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
    c.say(&Reply::Ready {})?;
    match point.metric {
        Metric::Latency => o.session.latency(Role::Server, point, iters, hist)?,
        Metric::Bandwidth => drop(o.session.bandwidth(Role::Server, point, iters)?),
    }
    c.say(&Reply::Done {})
}
