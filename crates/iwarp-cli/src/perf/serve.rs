//! The answering end: `iwarp perf serve`, and the peer process of a local run.

use super::args::ServeArgs;
use super::control::{ANSWER, Control, DEFAULT_PORT, IDLE, PROTOCOL, Reply, Request, resolve};
use super::hist::Histogram;
use super::host::HostInfo;
use super::point::{Link, Metric, Point, Role, Session, check_link, check_point};
use super::{local, pin, transport};
use crate::error::{Context as _, Error, Result};
use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// More links than any plan needs; a client that asks for more is broken.
const MAX_LINKS: usize = 64;
/// Handlers that wait to say "busy"; a flood of connections waits in the kernel's backlog.
const MAX_HANDLERS: usize = 32;
/// What a client that has its figures may take to leave, queue pairs and memory included.
const LEAVING: Duration = Duration::from_secs(1);

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

    let busy = Mutex::new(());
    let handlers = std::sync::atomic::AtomicUsize::new(0);
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
            let (busy, handlers) = (&busy, &handlers);
            use std::sync::atomic::Ordering::Relaxed;
            while handlers.load(Relaxed) >= MAX_HANDLERS {
                std::thread::sleep(Duration::from_millis(20));
            }
            handlers.fetch_add(1, Relaxed);
            scope.spawn(move || {
                match one_client(stream, busy) {
                    Ok(()) => tracing::info!(%from, "client done"),
                    Err(e) => tracing::warn!(%from, "{e}"),
                }
                handlers.fetch_sub(1, Relaxed);
            });
        }
    })
}

/// The right to measure; `None` if another client has it. One that is leaving is given the time to.
fn turn(busy: &Mutex<()>) -> Option<MutexGuard<'_, ()>> {
    let end = Instant::now() + LEAVING;
    loop {
        match busy.try_lock() {
            Ok(turn) => return Some(turn),
            // Nothing is guarded but the turn itself.
            Err(TryLockError::Poisoned(e)) => return Some(e.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn one_client(stream: TcpStream, busy: &Mutex<()>) -> Result<()> {
    let mut c = Control::new(stream)?;
    match c.hear(ANSWER)? {
        Some(Request::Hello { protocol, .. }) => {
            // A second measurement at the same time would spoil both.
            let Some(_turn) = turn(busy) else {
                return c.say(&Reply::Busy {});
            };
            let version = env!("CARGO_PKG_VERSION").to_owned();
            c.say(&Reply::Hello {
                protocol: PROTOCOL,
                version,
                host: Some(HostInfo::here()),
            })?;
            if protocol == PROTOCOL {
                serve_requests(&mut c)
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
    link: Link,
    session: Box<dyn Session>,
}

fn serve_requests(c: &mut Control) -> Result<()> {
    let mut links: HashMap<u32, Opened> = HashMap::new();
    let mut hist = Histogram::new();
    while let Some(request) = c.hear::<Request>(IDLE)? {
        let result = match request {
            Request::Hello { .. } => Err(Error::failed("hello was said already")),
            Request::Open { id, link } => open(c, id, link, &mut links),
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
    Ok(())
}

fn open(c: &mut Control, id: u32, link: Link, links: &mut HashMap<u32, Opened>) -> Result<()> {
    check_link(&link)?;
    if links.len() >= MAX_LINKS || links.contains_key(&id) {
        return Err(Error::failed(
            "too many links, or one of this number is open",
        ));
    }
    let pending = transport(link.wire).listen(&link, c.here()?)?;
    c.say(&Reply::Listening {
        port: pending.port(),
    })?;
    let session = pending.accept()?;
    links.insert(id, Opened { link, session });
    c.say(&Reply::Opened {})
}

fn measure(
    c: &mut Control,
    id: u32,
    point: &Point,
    iters: u64,
    links: &mut HashMap<u32, Opened>,
    hist: &mut Histogram,
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
