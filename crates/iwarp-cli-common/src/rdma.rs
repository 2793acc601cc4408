//! Helpers for the clients of `ping` and `cp`: name resolution, devices, connecting, and error
//! messages for the user.

use crate::error::{Context as _, Error, Result};
use crate::retry;
use iwarp::verbs::cm::{ConnectedId, Connector};
use iwarp::verbs::{Context, QueuePair, WcStatus};
use iwarp::{Blame, Config, Device};
use rustix::io::Errno;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

/// A reject whose private data start with this text says that the client may retry.
pub const BUSY: &str = "busy: ";

/// Turns a host name or an address (IPv6 with or without brackets) into socket addresses.
///
/// # Errors
/// Fails if the name cannot be resolved.
pub fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
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

/// Turns the error of a first request into [`Error::Busy`] if the connection was reset: a server
/// resets the connections of clients that it evicts, and they may retry.
pub fn busy_if_reset(e: Error, qp: &iwarp::runtime::QueuePair) -> Error {
    match qp.fault() {
        Some(fault) if fault.blame == Blame::Transport => Error::Busy(format!(
            "{e}: perhaps the server needed this client's place for another client"
        )),
        _ => e,
    }
}

/// Returns the configuration from the environment, with a default connect timeout of 10 s: `iwarp`
/// servers answer immediately, so a missing answer often means a wrong address.
pub fn config() -> Config {
    let mut defaults = Config::default();
    defaults.answer_timeout = Duration::from_secs(10);
    defaults.with_env()
}

/// Tries the addresses of a peer in turn; `attempt` gets the device with a route to the address.
///
/// # Errors
/// See [`retry::try_addresses`].
pub fn try_addresses<T>(
    addresses: &[SocketAddr],
    config: &Config,
    mut attempt: impl FnMut(&Context, SocketAddr) -> Result<T>,
) -> Result<T> {
    retry::try_addresses(addresses, |peer| {
        let device = Device::route_to(peer).map_err(|e| cannot_connect(peer, &e));
        device
            .and_then(|d| Context::open(&d, config.clone()).map_err(|e| cannot_connect(peer, &e)))
            .and_then(|ctx| attempt(&ctx, peer))
    })
}

/// Connects. The error names the peer and suggests a remedy.
///
/// # Errors
/// Fails if [`Connector::connect`] fails.
pub fn connect(connector: &Connector, peer: SocketAddr, qp: QueuePair) -> Result<ConnectedId> {
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
            _ => descriptor_advice(io).map_or_else(|| io.to_string(), str::to_owned),
        },
        iwarp::Error::NoDevice => {
            "no device can reach it (`iwarp devices` lists them; is IWARP_BIND set?)".to_owned()
        }
        iwarp::Error::Handshake(what) => format!("{what}: perhaps it does not speak iWARP"),
        iwarp::Error::TimedOut(_) => {
            "no answer in time: the host is down or filtered, or does not speak iWARP".to_owned()
        }
        // Private data come from the peer and are printed only if they are plain text.
        iwarp::Error::Rejected(data) if is_plain_text(data) => {
            let text = String::from_utf8_lossy(data);
            if let Some(why) = text.strip_prefix(BUSY) {
                return Error::Busy(format!("cannot connect to {peer}: refused: {why}"));
            }
            format!("refused: {text}")
        }
        other => other.to_string(),
    };
    Error::failed(format!("cannot connect to {peer}: {why}"))
}

/// Returns advice for the user if the error says that no file descriptors are left.
pub fn descriptor_advice(e: &std::io::Error) -> Option<&'static str> {
    match Errno::from_io_error(e)? {
        Errno::MFILE => Some(
            "too many open files: raise the limit (`ulimit -n`), or run fewer transfers at a time",
        ),
        Errno::NFILE => Some(
            "too many open files on the system: end programs, or raise the limit \
             (`sysctl fs.file-max`)",
        ),
        _ => None,
    }
}

fn is_plain_text(data: &[u8]) -> bool {
    !data.is_empty() && data.iter().all(|b| b.is_ascii_graphic() || *b == b' ')
}

/// Describes a failed completion, with the reason why the connection ended if it is known.
pub fn failed_completion(status: WcStatus, qp: &iwarp::runtime::QueuePair) -> Error {
    match (qp.fault(), status) {
        (Some(fault), _) => Error::failed(format!("connection lost: {fault}")),
        (None, WcStatus::Flushed) => Error::failed("the peer closed the connection"),
        (None, status) => Error::failed(format!("a work request failed: {status:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_resolve_to_addresses() {
        let want = |s: &str| vec![s.parse::<SocketAddr>().unwrap()];
        assert_eq!(resolve("127.0.0.1", 7).unwrap(), want("127.0.0.1:7"));
        assert_eq!(resolve("[::1]", 7).unwrap(), want("[::1]:7"));
        assert_eq!(resolve("::1", 7).unwrap(), want("[::1]:7"));
        assert!(resolve("no such host", 7).is_err());
    }

    #[test]
    fn errors_name_peer_and_cause() {
        let peer = "127.0.0.1:7174".parse().unwrap();
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        for (e, part) in [
            (iwarp::Error::from(refused), "nobody listens"),
            (iwarp::Error::Rejected(b"too busy".to_vec()), "too busy"),
            (iwarp::Error::Rejected(vec![0, 1]), "2 octets"),
            (iwarp::Error::TimedOut("x"), "no answer"),
            (iwarp::Error::Rejected(Vec::new()), "the peer refused"),
            (std::io::Error::from(Errno::MFILE).into(), "ulimit -n"),
            (std::io::Error::from(Errno::NFILE).into(), "fs.file-max"),
        ] {
            let text = cannot_connect(peer, &e).to_string();
            assert!(
                text.contains("127.0.0.1:7174") && text.contains(part),
                "{text}"
            );
        }
        let busy = iwarp::Error::Rejected(format!("{BUSY}full").into_bytes());
        assert!(matches!(cannot_connect(peer, &busy), Error::Busy(why) if why.ends_with("full")));
    }
}
