//! What `ping` and `cp` both need from the library: names to addresses, devices, listeners, one thread per client, and
//! failures in words for the person at the terminal.

use crate::error::{Context as _, Error, Result};
use iwarp::cm::{Connection, ConnectionRequest, Connector, Listener};
use iwarp::{Config, Context, Device, QueuePair, WcStatus};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Clients that are served at a time; the next ones are told to come back.
pub(crate) const MAX_CLIENTS: usize = 64;
/// What a client is told that is one too many; goes into the private data of the reject.
const BUSY: &[u8] = b"the server has too many clients, try again later";

/// Turns a host name or an address (IPv6 with or without brackets) into socket addresses.
///
/// # Errors
/// When the name is not known.
pub(crate) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let bare = host
        .strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .unwrap_or(host);
    let found: Vec<_> = (bare, port)
        .to_socket_addrs()
        .context(format_args!("'{host}'"))?
        .collect();
    if found.is_empty() {
        return Err(Error::failed(format!("'{host}' has no address")));
    }
    Ok(found)
}

/// Tries the addresses of a peer in turn; `attempt` gets the device that reaches it.
///
/// # Errors
/// The failure of the last attempt.
pub(crate) fn first_that_answers<T>(
    addresses: &[SocketAddr],
    config: &Config,
    mut attempt: impl FnMut(&Context, SocketAddr) -> Result<T>,
) -> Result<T> {
    let mut last = Error::failed("there is no address to connect to");
    for &peer in addresses {
        let device = Device::route_to(peer).map_err(|e| cannot_connect(peer, &e));
        let outcome = device
            .and_then(|d| Context::open(&d, config.clone()).context("cannot open the device"))
            .and_then(|ctx| attempt(&ctx, peer));
        match outcome {
            Ok(x) => return Ok(x),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Connects, with a failure that names the peer and what a person can do about it.
///
/// # Errors
/// Everything that [`Connector::connect`] may say.
pub(crate) fn connect(
    connector: &Connector,
    peer: SocketAddr,
    qp: QueuePair,
) -> Result<Connection> {
    connector
        .connect(peer, qp)
        .map_err(|e| cannot_connect(peer, &e))
}

fn cannot_connect(peer: SocketAddr, e: &iwarp::Error) -> Error {
    use std::io::ErrorKind;
    let why = match e {
        iwarp::Error::Io(io) => match io.kind() {
            ErrorKind::ConnectionRefused => "connection refused: nobody listens there".to_owned(),
            ErrorKind::ConnectionReset => {
                "the peer closed during set-up: perhaps it does not speak iWARP".to_owned()
            }
            _ => io.to_string(),
        },
        iwarp::Error::NoDevice => {
            "no device can reach it (`iwarp devices` lists them; is IWARP_BIND set?)".to_owned()
        }
        iwarp::Error::Handshake(what) => format!("{what}: perhaps it does not speak iWARP"),
        iwarp::Error::TimedOut(_) => {
            "no answer in time: the host is down or filtered, or does not speak iWARP".to_owned()
        }
        // Private data are the peer's: printed only if they are plain text.
        iwarp::Error::Rejected(data) if is_text(data) => {
            format!("refused: {}", String::from_utf8_lossy(data))
        }
        other => other.to_string(),
    };
    Error::failed(format!("cannot connect to {peer}: {why}"))
}

fn is_text(data: &[u8]) -> bool {
    !data.is_empty() && data.iter().all(|b| b.is_ascii_graphic() || *b == b' ')
}

/// What a completion with an error means, with the reason of the connection's end if that is known.
pub(crate) fn failed_completion(status: WcStatus, qp: &iwarp::raw::QueuePair) -> Error {
    match (qp.fault(), status) {
        (Some(fault), _) => Error::failed(format!("connection lost: {fault}")),
        (None, WcStatus::Flushed) => Error::failed("the peer closed the connection"),
        (None, status) => Error::failed(format!("a work request failed: {status:?}")),
    }
}

/// Listens on one address, or on all (IPv6 and IPv4) when none is given. Port 0 picks a free one.
///
/// # Errors
/// When the address is in use or not of this host.
pub(crate) fn listen(
    bind: Option<IpAddr>,
    port: u16,
    config: &Config,
) -> Result<(Context, Listener)> {
    let mut candidates = vec![
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    ];
    if let Some(ip) = bind {
        candidates = vec![ip];
    }
    let mut last = Error::failed("there is no address to listen on");
    for ip in candidates {
        let device = device_for(ip)?;
        // A link-local address is one of an interface, and only the device knows which.
        let at = match device.ip == ip {
            true => device.socket_addr(port),
            false => SocketAddr::new(ip, port),
        };
        let ctx = Context::open(&device, config.clone()).context("cannot open the device")?;
        // A host without IPv6 has no [::]; then 0.0.0.0 is all there is.
        match Listener::bind(&ctx, at) {
            Ok(listener) => return Ok((ctx, listener)),
            Err(e) => last = Error::failed(format!("cannot listen on {at}: {e}")),
        }
    }
    Err(last)
}

/// Any device can listen on all addresses: connections take the settings from it, and the address from TCP.
fn device_for(ip: IpAddr) -> Result<Device> {
    if !ip.is_unspecified() {
        return Device::by_address(ip).context(format_args!("cannot listen on {ip}"));
    }
    let list = Device::list().context("devices")?;
    list.into_iter()
        .next()
        .ok_or_else(|| Error::failed("this machine has no usable network address"))
}

/// Serves clients until `stop`, each in a thread of its own and at most [`MAX_CLIENTS`] at a time. What one client does or
/// suffers never ends the others.
///
/// # Errors
/// When the listener fails.
pub(crate) fn serve_clients(
    listener: &Listener,
    stop: impl Fn() -> bool,
    client: impl Fn(ConnectionRequest, SocketAddr) + Send + Sync + 'static,
) -> Result<()> {
    let client = Arc::new(client);
    let active = Arc::new(AtomicUsize::new(0));
    while !stop() {
        let request = match listener.accept(Some(Duration::from_millis(200))) {
            Ok(request) => request,
            Err(iwarp::Error::TimedOut(_)) => continue,
            Err(e) => {
                // Out of descriptors: that passes when clients leave.
                tracing::warn!("accept: {e}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        let from = request.peer_addr().map_or_else(
            || SocketAddr::from(([0; 4], 0)),
            |a| SocketAddr::new(a.ip().to_canonical(), a.port()),
        );
        if active.load(Ordering::Acquire) >= MAX_CLIENTS {
            tracing::warn!(%from, "refused: {MAX_CLIENTS} clients already");
            let _ = request.reject(BUSY);
            continue;
        }
        let turn = Turn::take(&active);
        let client = Arc::clone(&client);
        let spawned = std::thread::Builder::new()
            .name(format!("client {from}"))
            .spawn(move || {
                let _turn = turn;
                client(request, from);
            });
        if let Err(e) = spawned {
            tracing::warn!(%from, "no thread for a client: {e}");
        }
    }
    // Those that are still at work finish.
    while active.load(Ordering::Acquire) > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Counts a client as long as it lives, even if its thread panics.
struct Turn(Arc<AtomicUsize>);

impl Turn {
    fn take(active: &Arc<AtomicUsize>) -> Self {
        active.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(active))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_become_addresses() {
        let want = |s: &str| vec![s.parse::<SocketAddr>().unwrap()];
        assert_eq!(resolve("127.0.0.1", 7).unwrap(), want("127.0.0.1:7"));
        assert_eq!(resolve("[::1]", 7).unwrap(), want("[::1]:7"));
        assert_eq!(resolve("::1", 7).unwrap(), want("[::1]:7"));
        assert!(resolve("no such host", 7).is_err());
    }

    #[test]
    fn failures_name_the_peer_and_the_cause() {
        let peer = "127.0.0.1:7174".parse().unwrap();
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        for (e, part) in [
            (iwarp::Error::Io(refused), "nobody listens"),
            (iwarp::Error::Rejected(b"too busy".to_vec()), "too busy"),
            (iwarp::Error::Rejected(vec![0, 1]), "2 octets"),
            (iwarp::Error::TimedOut("x"), "no answer"),
        ] {
            let text = cannot_connect(peer, &e).to_string();
            assert!(
                text.contains("127.0.0.1:7174") && text.contains(part),
                "{text}"
            );
        }
    }
}
