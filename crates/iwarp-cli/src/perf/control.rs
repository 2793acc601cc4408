//! The control connection: JSON lines over TCP, by which the client tells the server what comes next.
//!
//! Client: `hello`, then any number of `open` and `run`. Server: `hello` (or `busy`), `listening` + `opened`, `ready` + `done`, or
//! `error`, which ends nothing but the connection it concerns. Lines are at most 64 KiB; both ends bound their waiting.

use super::host::HostInfo;
use super::point::{Link, Point, STALL};
use crate::error::{Context as _, Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::Duration;

/// Changes with every incompatible change of the messages or of what the two ends do between them.
pub(crate) const PROTOCOL: u32 = 1;
/// Port of `iwarp perf serve` when none is given.
pub(crate) const DEFAULT_PORT: u16 = 7175;
/// Longest line.
const MAX_LINE: u64 = 64 * 1024;
/// How long an answer may take on top of the measurement itself.
pub(crate) const ANSWER: Duration = Duration::from_secs(STALL.as_secs() + 5);
/// How long a server waits for the first word of a client.
pub(crate) const HELLO: Duration = Duration::from_secs(5);
/// How long a server waits for the next request of a client. Between two requests a client does nothing that takes long.
pub(crate) const IDLE: Duration = Duration::from_secs(30);

/// What the client says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Request {
    /// First of all. Unknown fields are ignored, so that a newer client gets a clear answer.
    Hello {
        /// [`PROTOCOL`] of the client.
        protocol: u32,
        /// Its program version, for the error message.
        version: String,
    },
    /// Set up the connections of a link.
    Open {
        /// Chosen by the client, counted up from 0.
        id: u32,
        /// What to set up.
        link: Link,
    },
    /// Run one measurement.
    Run {
        /// An opened link.
        id: u32,
        /// What to run.
        point: Point,
        /// How many operations.
        iters: u64,
    },
}

/// What the server says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Reply {
    /// Answer to the client's hello, also when the versions differ.
    Hello {
        /// [`PROTOCOL`] of the server.
        protocol: u32,
        /// Its program version.
        version: String,
        /// Its machine.
        host: Option<HostInfo>,
    },
    /// Another client is being served.
    Busy {},
    /// The link may be connected to, at the address of the control connection.
    Listening {
        /// TCP port.
        port: u16,
    },
    /// All connections of the link are there.
    Opened {},
    /// The server has prepared the measurement and has begun its side.
    Ready {},
    /// The server's side is over.
    Done {},
    /// The request could not be done.
    Error {
        /// Why.
        message: String,
    },
}

/// One end of a control connection.
#[derive(Debug)]
pub(crate) struct Control {
    lines: BufReader<TcpStream>,
}

impl Control {
    /// Takes over a connected socket.
    ///
    /// # Errors
    /// When the socket options cannot be set.
    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_write_timeout(Some(ANSWER)))
            .context("control connection")?;
        Ok(Self {
            lines: BufReader::new(stream),
        })
    }

    /// Connects to a server and exchanges hellos.
    ///
    /// # Errors
    /// When nobody listens, somebody else listens, the server is busy or speaks another version.
    pub(crate) fn connect(addr: SocketAddr) -> Result<(Self, Option<HostInfo>)> {
        let stream = TcpStream::connect_timeout(&addr, STALL)
            .context(format_args!("cannot connect to {addr}"))?;
        let mut c = Self::new(stream)?;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        c.say(&Request::Hello {
            protocol: PROTOCOL,
            version: version.clone(),
        })?;
        match c
            .hear::<Reply>(ANSWER)
            .context(addr)?
            .ok_or_else(|| Error::failed(format!("{addr} closed the connection")))?
        {
            Reply::Hello {
                protocol: PROTOCOL,
                host,
                ..
            } => Ok((c, host)),
            Reply::Hello {
                protocol,
                version: theirs,
                ..
            } => Err(Error::failed(format!(
                "{addr} runs iwarp {theirs} (perf protocol {protocol}), this is iwarp {version} (perf protocol {PROTOCOL}); use the same version on both hosts"
            ))),
            Reply::Busy {} => Err(Error::failed(format!(
                "{addr} is serving another client; try again later"
            ))),
            Reply::Error { message } => Err(Error::failed(format!("{addr}: {message}"))),
            other => Err(Error::failed(format!(
                "{addr} answered hello with {other:?}"
            ))),
        }
    }

    /// Address of the other end, with another port. A link-local address keeps its scope.
    pub(crate) fn peer_at(&self, port: u16) -> Result<SocketAddr> {
        let peer = self.lines.get_ref().peer_addr();
        let mut peer = peer.context("control connection")?;
        peer.set_port(port);
        Ok(peer)
    }

    /// Address of this end, with any port.
    pub(crate) fn here(&self) -> Result<SocketAddr> {
        let local = self.lines.get_ref().local_addr();
        let mut local = local.context("control connection")?;
        local.set_port(0);
        Ok(local)
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the connection is broken or the other end does not read.
    pub(crate) fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).context("control message")?;
        line.push(b'\n');
        self.lines
            .get_mut()
            .write_all(&line)
            .context("control connection")
    }

    /// Waits at most `timeout` for one message; `None` when the other end has closed.
    ///
    /// # Errors
    /// On time-out, on a broken connection, and on anything that is not a message.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<Option<T>> {
        self.lines
            .get_ref()
            .set_read_timeout(Some(timeout))
            .context("control connection")?;
        let mut line = Vec::new();
        let n = (&mut self.lines)
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)
            .map_err(|e| match e.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                    Error::failed(format!("no answer within {} seconds", timeout.as_secs()))
                }
                _ => Error::failed(format!("control connection: {e}")),
            })?;
        if n == 0 {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            return Err(Error::failed(
                "what came is no complete message of the iwarp perf protocol",
            ));
        }
        serde_json::from_slice(&line)
            .map(Some)
            .map_err(|e| Error::failed(format!("what came is not the iwarp perf protocol ({e})")))
    }

    /// Waits for the server's answer and turns its errors into ours.
    ///
    /// # Errors
    /// Also when the answer is not the expected one.
    pub(crate) fn expect(
        &mut self,
        what: &str,
        accept: impl FnOnce(&Reply) -> bool,
    ) -> Result<Reply> {
        match self.hear(ANSWER)? {
            Some(Reply::Error { message }) => {
                Err(Error::failed(format!("the server says: {message}")))
            }
            Some(r) if accept(&r) => Ok(r),
            Some(r) => Err(Error::failed(format!(
                "the server answered {r:?} instead of {what}"
            ))),
            None => Err(Error::failed("the server has gone away")),
        }
    }
}

/// Turns `HOST`, `HOST:PORT`, `[V6]`, `[V6]:PORT` or a bare IPv6 address into socket addresses.
///
/// # Errors
/// When the name is not known.
pub(crate) fn resolve(text: &str, default_port: u16) -> Result<Vec<SocketAddr>> {
    let (host, port) = host_and_port(text);
    let port = match port {
        None => default_port,
        Some(port) => port
            .parse()
            .map_err(|_| Error::failed(format!("'{text}': '{port}' is not a port (0 to 65535)")))?,
    };
    let found = (host, port).to_socket_addrs();
    let found: Vec<_> = found.context(format_args!("'{text}'"))?.collect();
    if found.is_empty() {
        return Err(Error::failed(format!("'{text}' has no address")));
    }
    Ok(found)
}

/// What is before the port, and the port. An IPv6 address has more colons, so it is in brackets if a port follows.
fn host_and_port(text: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = text.strip_prefix('[').and_then(|t| t.split_once(']')) {
        match rest.strip_prefix(':') {
            Some(port) => return (host, Some(port)),
            None if rest.is_empty() => return (host, None),
            None => return (text, None),
        }
    }
    match text.split_once(':') {
        Some((host, port)) if !port.contains(':') => (host, Some(port)),
        _ => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn addresses_with_and_without_port() {
        for (text, addr) in [
            ("127.0.0.1", "127.0.0.1:7175"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("::1", "[::1]:7175"),
            ("[::1]", "[::1]:7175"),
            ("[::1]:9", "[::1]:9"),
            // A scope may be a number, and loopback's is 1 everywhere.
            ("fe80::1%1", "[fe80::1%1]:7175"),
            ("[fe80::1%1]:9", "[fe80::1%1]:9"),
        ] {
            assert_eq!(
                resolve(text, 7175).unwrap(),
                [addr.parse().unwrap()],
                "{text}"
            );
        }
        for text in ["127.0.0.1:99999", "[::1]:x", "127.0.0.1:"] {
            let e = resolve(text, 7175).unwrap_err().to_string();
            assert!(e.contains("is not a port"), "{e}");
        }
        assert!(resolve("[::1]9", 7175).is_err());
        assert!(resolve("", 7175).is_err() || resolve(":", 7175).is_err());
    }

    fn answer_with(text: &'static [u8]) -> Error {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = l.local_addr().unwrap();
        let t = std::thread::spawn(move || {
            let mut s = l.accept().unwrap().0;
            let mut hello = String::new();
            BufReader::new(&s).read_line(&mut hello).unwrap();
            assert!(
                hello.contains("\"type\":\"hello\"") && hello.contains("\"protocol\":1"),
                "{hello}"
            );
            s.write_all(text).unwrap();
        });
        let e = Control::connect(addr).unwrap_err();
        t.join().unwrap();
        e
    }

    #[test]
    fn wrong_partners_are_told_apart() {
        let e =
            answer_with(b"{\"type\":\"hello\",\"protocol\":7,\"version\":\"9.9.9\",\"new\":1}\n")
                .to_string();
        assert!(e.contains("9.9.9") && e.contains("same version"), "{e}");
        assert!(
            answer_with(b"{\"type\":\"busy\"}\n")
                .to_string()
                .contains("another client")
        );
        assert!(
            answer_with(b"SSH-2.0-OpenSSH_9.6\r\n")
                .to_string()
                .contains("not the iwarp perf protocol")
        );
        assert!(
            answer_with(b"no end")
                .to_string()
                .contains("no complete message")
        );
        assert!(answer_with(b"").to_string().contains("closed"));
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        assert!(
            Control::connect(port)
                .unwrap_err()
                .to_string()
                .contains("cannot connect")
        );
    }
}
