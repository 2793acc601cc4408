//! Common parts of `cp serve`, `ping serve` and `perf serve`: listening, admission of clients, and
//! the memory budget. The failure of one client never ends the connections of others.

mod budget;
mod gate;

pub use budget::{Budget, Share, zeros};
pub use gate::{Full, Gate, Guest, Limits};

use crate::error::{Context as _, Error, Result};
use crate::rdma::BUSY;
use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, ConnectionRequest, ListeningId};
use iwarp::verbs::{Context, QueuePair};
use iwarp::{Config, Device};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// File descriptors that one client needs at most: its socket, its event channels, and files.
const DESCRIPTORS_PER_CLIENT: u64 = 8;
/// File descriptors for the process itself, and for connections in set-up.
const DESCRIPTORS_OF_SERVER: u64 = 128;

/// Longest reason for a refusal, in bytes: fits the private data of any MPA reply.
const MAX_REASON: usize = 240;

/// The wildcard addresses. The IPv6 wildcard comes first, because it also covers IPv4; a host
/// without IPv6 has only the IPv4 wildcard.
pub const WILDCARDS: [IpAddr; 2] = [
    IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    IpAddr::V4(Ipv4Addr::UNSPECIFIED),
];
/// The loopback addresses. The second one is for a host without IPv4.
pub const LOOPBACK: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// Listens on the first of these addresses that this host has. Port 0 selects a free port. If the
/// port is in use at that address, the next addresses are not tried, because clients would connect
/// to the first one.
///
/// # Errors
/// Fails if an address is in use, or if this host has none of them.
pub fn listen(candidates: &[IpAddr], port: u16, config: &Config) -> Result<(Context, ListeningId)> {
    let mut last = Error::failed("there is no address to listen on");
    for &ip in candidates {
        match listen_at(ip, port, config) {
            Err((at, e)) => {
                last = Error::failed(format!("cannot listen on {at}: {e}"));
                if !host_lacks_address(&e) {
                    break;
                }
            }
            Ok(listens) => return Ok(listens),
        }
    }
    Err(last)
}

/// Listens on one address. The error comes with the address that was tried.
fn listen_at(
    ip: IpAddr,
    port: u16,
    config: &Config,
) -> std::result::Result<(Context, ListeningId), (String, iwarp::Error)> {
    let device = device_for(ip).map_err(|e| (ip.to_string(), e))?;
    // A link-local address needs its interface as a scope, which the device knows.
    let at = device.socket_addr(ip, port);
    Context::open(&device, config.clone())
        .and_then(|ctx| {
            let listener = ListeningId::bind(&ctx, at)?;
            Ok((ctx, listener))
        })
        .map_err(|e| (at.to_string(), e))
}

/// Returns `true` if this host does not have the address or its address family.
fn host_lacks_address(e: &iwarp::Error) -> bool {
    let errno = Errno::from_raw_os_error(e.errno());
    matches!(e, iwarp::Error::NoDevice) || matches!(errno, Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT)
}

/// Returns the device for listening on `ip`. For a wildcard address this is the first device:
/// connections take only their settings from it.
fn device_for(ip: IpAddr) -> iwarp::Result<Device> {
    if !ip.is_unspecified() {
        return Device::by_address(ip);
    }
    Device::list()?
        .into_iter()
        .next()
        .ok_or(iwarp::Error::NoDevice)
}

/// Creates a gate. First raises the soft limit of file descriptors to what the clients need. If the
/// hard limit is too low for that, reduces the number of clients and logs a warning.
pub fn gate(limits: &Limits) -> Arc<Gate> {
    let clients = limits.clients();
    let needed = DESCRIPTORS_OF_SERVER + clients as u64 * DESCRIPTORS_PER_CLIENT;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|soft| soft < needed) {
        limit.current = limit
            .maximum
            .map_or(Some(needed), |hard| Some(hard.min(needed)));
        if let Err(e) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!("cannot raise the limit of file descriptors: {e}");
        }
    }
    let possible = clients_for(getrlimit(Resource::Nofile).current);
    if possible < clients {
        tracing::warn!(
            "serving at most {possible} clients at a time instead of {clients}: the hard limit of \
             file descriptors (`ulimit -Hn`) is too low; {needed} are needed"
        );
    }
    Gate::new(clients.min(possible), limits.per_address())
}

/// Returns how many clients can be served with `limit` descriptors: at least one, so that a server
/// with few descriptors still works.
fn clients_for(limit: Option<u64>) -> usize {
    let available = limit.map_or(u64::MAX, |n| n.saturating_sub(DESCRIPTORS_OF_SERVER));
    usize::try_from(available / DESCRIPTORS_PER_CLIENT)
        .unwrap_or(usize::MAX)
        .max(1)
}

/// Serves clients until `stop`, each in a thread of its own. Connections are set up in the client's
/// thread, so a slow or silent peer does not delay others.
///
/// # Errors
/// Returns no error at present: a listener that runs out of file descriptors works again when
/// clients disconnect.
pub fn serve_clients(
    listener: &ListeningId,
    gate: &Arc<Gate>,
    stop: impl Fn() -> bool,
    client: impl Fn(ConnectionRequest, Guest, SocketAddr) + Send + Sync + 'static,
) -> Result<()> {
    let client = Arc::new(client);
    while !stop() {
        let request = match listener.accept(Some(Duration::from_millis(200))) {
            Ok(request) => request,
            Err(iwarp::Error::TimedOut(_)) => continue,
            Err(e) => {
                // No file descriptors are left; some become free when clients disconnect.
                tracing::warn!("accept: {e}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        let from = request.peer_addr().map_or_else(
            || SocketAddr::from(([0; 4], 0)),
            |a| SocketAddr::new(a.ip().to_canonical(), a.port()),
        );
        let guest = match gate.admit(from.ip()) {
            Ok(guest) => guest,
            Err(full) => {
                // Not a warning, because a crowd of clients could flood the log.
                tracing::info!(%from, "refused: {full}");
                let _ = request.reject(format!("{BUSY}{full}").as_bytes());
                continue;
            }
        };
        start(&client, request, guest, from);
    }
    // Let the remaining clients finish.
    while !gate.is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Serves a request in a thread of its own, or refuses it if no thread can be started.
fn start(
    client: &Arc<impl Fn(ConnectionRequest, Guest, SocketAddr) + Send + Sync + 'static>,
    request: ConnectionRequest,
    guest: Guest,
    from: SocketAddr,
) {
    // Shared, so that this thread can still refuse the request if the new thread does not start.
    let shared = Arc::new(Mutex::new(Some((request, guest))));
    let take = |s: &Mutex<Option<_>>| s.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (for_thread, client) = (Arc::clone(&shared), Arc::clone(client));
    let spawned = std::thread::Builder::new()
        .name(format!("client {from}"))
        .spawn(move || {
            if let Some((request, guest)) = take(&for_thread) {
                client(request, guest, from);
            }
        });
    if let Err(e) = spawned {
        tracing::warn!(%from, "cannot start a thread for a client: {e}");
        if let Some((request, _guest)) = take(&shared) {
            let why = "the server cannot start a thread for this client";
            let _ = request.reject(format!("{BUSY}{why}").as_bytes());
        }
    }
}

/// Accepts a request in the client's own thread. From then on an eviction ends the connection, and
/// each step has a stranger's grace.
///
/// # Errors
/// Fails if the peer closed the connection, does not continue the set-up in time, or has been
/// evicted.
pub fn accept(
    request: ConnectionRequest,
    qp: QueuePair,
    parameters: &ConnectionParameters,
    guest: &Guest,
) -> Result<ConnectedId> {
    if let Err(e) = check_not_evicted(guest) {
        // The client is not connected yet, so a reject can tell it to retry.
        return Err(refuse(request, e));
    }
    let handle = (*qp).clone();
    guest.on_evict(move || handle.abort());
    guest.advance();
    let connection = request.accept(qp, parameters).context("accept")?;
    check_not_evicted(guest)?;
    guest.advance();
    Ok(connection)
}

/// Checks whether an eviction explains why the client's connection has ended.
///
/// # Errors
/// Returns [`Error::Busy`] if the client has been evicted.
pub fn check_not_evicted(guest: &Guest) -> Result<()> {
    match guest.is_evicted() {
        true => Err(Error::Busy(
            "the client was idle, and its place was needed for another client".to_owned(),
        )),
        false => Ok(()),
    }
}

/// Logs why the server ended a client's connection.
pub fn log_failure(from: SocketAddr, why: &Error) {
    match why {
        // Not a warning, because idle clients that reconnect could flood the log.
        Error::Busy(_) => tracing::info!(%from, "{why}"),
        _ => tracing::warn!(%from, "{why}"),
    }
}

/// Refuses a connection request, sends the reason to the peer, and returns `why`.
pub fn refuse(request: ConnectionRequest, why: Error) -> Error {
    let mut text = format!("{BUSY}{why}");
    // Cut between characters, so that the text stays valid UTF-8.
    let fits = |at: &usize| text.is_char_boundary(*at);
    let end = (0..=MAX_REASON.min(text.len())).rev().find(fits);
    text.truncate(end.unwrap_or(0));
    let _ = request.reject(text.as_bytes());
    why
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_address_only_if_first_is_foreign() {
        let config = Config::default();
        // An address for documentation, which no host has (RFC 5737).
        let foreign = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
        let (_ctx, first) = listen(&[foreign, LOOPBACK[0]], 0, &config).unwrap();
        let at = first.local_addr();
        assert_eq!(at.ip(), LOOPBACK[0]);
        // The port is in use at the first address, and free at the next, which is not tried.
        let free = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        let Err(e) = listen(&[LOOPBACK[0], free], at.port(), &config) else {
            panic!("two servers on one port");
        };
        assert!(e.to_string().contains("in use"), "{e}");
        let e = listen(&[foreign], 0, &config).map(drop).unwrap_err();
        assert!(e.to_string().contains("192.0.2.1"), "{e}");
        let e = listen(&[], 0, &config).map(drop).unwrap_err();
        assert!(e.to_string().contains("no address"), "{e}");
    }

    #[test]
    fn descriptors_limit_clients() {
        assert!(clients_for(None) > 1 << 24);
        assert_eq!(clients_for(Some(1024)), 112);
        assert_eq!(clients_for(Some(200)), 9);
        assert_eq!(clients_for(Some(20)), 1);
    }
}
