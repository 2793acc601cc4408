//! The control connection: JSON lines over TCP.
//!
//! The client sends `hello`, then any number of `open` and `run`. The server answers `hello`, then
//! `listening` and `opened` to each `open`, `ready` and `done` to each `run`, or `error`. An error
//! ends only the connection it concerns. A server that serves another client answers `busy` to the
//! first `open`, and sends `busy` at any time to a client that loses its place. Lines are at most
//! 64 KiB, and both ends limit their waits.

use super::host::HostInfo;
use super::point::{Link, Point, STALL};
use iwarp_cli_common::error::{Context as _, Error, Result};
use rustix::net::{SendFlags, send};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead as _, BufReader, ErrorKind, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

/// Protocol version. It changes with each incompatible change of the messages or measurements.
pub(crate) const PROTOCOL: u32 = 2;
/// Default port of `iwarp perf serve`.
pub(crate) const DEFAULT_PORT: u16 = 7175;
/// Longest line, in bytes.
const MAX_LINE: usize = 64 * 1024;
/// How long an answer may take in addition to the measurement.
pub(crate) const ANSWER: Duration = Duration::from_secs(STALL.as_secs() + 5);
/// How long a server waits for a client's hello.
pub(crate) const HELLO: Duration = Duration::from_secs(5);
/// How long a server waits for the client's next request.
pub(crate) const IDLE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Request {
    /// The first message. The server ignores unknown fields, so that newer clients get an answer.
    Hello {
        /// [`PROTOCOL`] of the client.
        protocol: u32,
        /// The client's version, for the error message.
        version: String,
    },
    /// Sets up the connections of a link.
    Open {
        /// Number of the link, counted by the client from 0.
        id: u32,
        /// The link to set up.
        link: Link,
    },
    /// Runs one measurement.
    Run { id: u32, point: Point, iters: u64 },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Reply {
    /// Answers the client's hello, even if the versions differ.
    Hello {
        /// [`PROTOCOL`] of the server.
        protocol: u32,
        /// The server's program version.
        version: String,
        /// The server's machine.
        host: Option<HostInfo>,
    },
    /// Refuses the client because another one is being served; the client may retry.
    Busy {},
    /// The server listens for the link's connections, at the address of the control connection.
    Listening { port: u16 },
    /// All connections of the link are set up.
    Opened {},
    /// The server is ready and has started its side of the measurement.
    Ready {},
    /// The server's side has ended.
    Done {
        /// Processor time that the server process used for it, in microseconds.
        cpu_us: f64,
    },
    Error {
        /// The reason, for the user.
        message: String,
    },
}

impl Reply {
    pub(crate) const fn is_done(&self) -> bool {
        matches!(self, Self::Done { .. })
    }
}

/// One end of a control connection.
#[derive(Debug)]
pub(crate) struct Control {
    lines: BufReader<TcpStream>,
    /// The server has opened a link for this client. Before, a reset means that the server is busy.
    begun: bool,
}

/// Sends `busy` to a client that loses its place, and closes the connection. Does not wait for
/// clients that do not read.
pub(crate) fn send_busy(stream: &TcpStream) {
    if let Ok(mut line) = serde_json::to_vec(&Reply::Busy {}) {
        line.push(b'\n');
        let _ = send(stream, &line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
    let _ = stream.shutdown(Shutdown::Both);
}

impl Control {
    /// Wraps a connected socket.
    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_write_timeout(Some(ANSWER)))
            .context("control connection")?;
        Ok(Self {
            lines: BufReader::new(stream),
            begun: false,
        })
    }

    /// Connects to a server and exchanges hellos.
    ///
    /// # Errors
    /// Fails if the connection cannot be set up, if the other end is not `iwarp perf serve` or has
    /// another version, or if the server is busy.
    pub(crate) fn connect(addr: SocketAddr) -> Result<(Self, Option<HostInfo>)> {
        let stream = TcpStream::connect_timeout(&addr, STALL)
            .context(format_args!("cannot connect to {addr}"))?;
        let mut c = Self::new(stream)?;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        c.send(&Request::Hello {
            protocol: PROTOCOL,
            version: version.clone(),
        })?;
        match c
            .receive::<Reply>(ANSWER)
            .map_err(|e| e.during(addr))?
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
                "{addr} runs iwarp {theirs} (perf protocol {protocol}), this is iwarp {version} \
                 (perf protocol {PROTOCOL}); use the same version on both hosts"
            ))),
            Reply::Busy {} => Err(c.is_busy()),
            Reply::Error { message } => Err(Error::failed(format!("{addr}: {message}"))),
            other => Err(Error::failed(format!(
                "{addr} answered hello with {other:?}"
            ))),
        }
    }

    /// Records that the server has opened a link for this client.
    pub(crate) fn begun(&mut self) {
        self.begun = true;
    }

    fn is_busy(&self) -> Error {
        let server = self.lines.get_ref().peer_addr();
        let server = server.map_or_else(|_| "the server".to_owned(), |a| a.to_string());
        Error::Busy(format!(
            "{server} is serving another client; try again later"
        ))
    }

    fn broken(&self, e: &io::Error) -> Error {
        let reset = matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
        let text = format!("control connection: {e}");
        match reset && !self.begun {
            true => Error::Busy(text),
            false => Error::Failed(text),
        }
    }

    /// Returns the peer's address with port `port`. A link-local address keeps its scope.
    pub(crate) fn peer_at(&self, port: u16) -> Result<SocketAddr> {
        let peer = self.lines.get_ref().peer_addr();
        let mut peer = peer.context("control connection")?;
        peer.set_port(port);
        Ok(peer)
    }

    /// Returns the local address with port 0.
    pub(crate) fn here(&self) -> Result<SocketAddr> {
        let local = self.lines.get_ref().local_addr();
        let mut local = local.context("control connection")?;
        local.set_port(0);
        Ok(local)
    }

    /// Returns the peer's address.
    pub(crate) fn there(&self) -> Result<IpAddr> {
        let peer = self.lines.get_ref().peer_addr();
        Ok(peer.context("control connection")?.ip())
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).context("control message")?;
        line.push(b'\n');
        let written = self.lines.get_mut().write_all(&line);
        written.map_err(|e| self.broken(&e))
    }

    /// Waits at most `timeout` for a message. Returns `None` if the peer closed the connection.
    ///
    /// # Errors
    /// Fails after the timeout, if the connection is broken, and if a line is not a message.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<Option<T>> {
        let line = self.read_line(timeout).map_err(|e| match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                Error::failed(format!("no answer within {} seconds", timeout.as_secs()))
            }
            _ => self.broken(&e),
        })?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            return Err(Error::failed(
                "the peer closed the connection in the middle of a message",
            ));
        }
        serde_json::from_slice(&line)
            .map(Some)
            .map_err(|e| Error::failed(format!("not the iwarp perf protocol ({e})")))
    }

    /// Reads a line. It lacks its line feed if the peer closed the connection, or at [`MAX_LINE`].
    fn read_line(&mut self, timeout: Duration) -> io::Result<Vec<u8>> {
        let end = Instant::now() + timeout;
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') && line.len() < MAX_LINE {
            // The limit applies to the whole line: a peer that sends byte by byte gains no time.
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.lines.get_ref().set_read_timeout(Some(left))?;
            let came = match self.lines.fill_buf() {
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                came => came?,
            };
            if came.is_empty() {
                break;
            }
            let whole = came.iter().position(|octet| *octet == b'\n');
            let taken = whole.map_or(came.len(), |at| at + 1);
            let taken = taken.min(MAX_LINE - line.len());
            line.extend_from_slice(&came[..taken]);
            self.lines.consume(taken);
        }
        Ok(line)
    }

    /// Waits for the server's answer.
    ///
    /// # Errors
    /// Fails if [`receive`](Self::receive) fails, if the server reports an error or is busy, and if
    /// the answer is not the expected one.
    pub(crate) fn expect(
        &mut self,
        what: &str,
        accept: impl FnOnce(&Reply) -> bool,
    ) -> Result<Reply> {
        match self.receive(ANSWER)? {
            Some(Reply::Error { message }) => {
                Err(Error::failed(format!("server error: {message}")))
            }
            Some(Reply::Busy {}) => Err(self.is_busy()),
            Some(r) if accept(&r) => Ok(r),
            Some(r) => Err(Error::failed(format!(
                "the server answered {r:?} instead of {what}"
            ))),
            None => Err(Error::failed("the server closed the connection")),
        }
    }
}

/// Resolves `HOST`, `HOST:PORT`, `[V6]`, `[V6]:PORT` or a bare IPv6 address.
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

/// Splits `text` into host and port. An IPv6 address with a port is in brackets.
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
            // A scope may be a number; the loopback interface is number 1 on every host.
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

    #[test]
    fn slow_line_gains_no_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut control = Control::new(listener.accept().unwrap().0).unwrap();
        let sender = std::thread::spawn(move || {
            while slow.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let e = control
            .receive::<Request>(Duration::from_millis(100))
            .unwrap_err();
        assert!(e.to_string().contains("no answer within"), "{e}");
        drop(control);
        sender.join().unwrap();
    }

    fn answer_with(text: &'static [u8]) -> Error {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = l.local_addr().unwrap();
        let t = std::thread::spawn(move || {
            let mut s = l.accept().unwrap().0;
            let mut hello = String::new();
            BufReader::new(&s).read_line(&mut hello).unwrap();
            assert!(
                hello.contains("\"type\":\"hello\"") && hello.contains("\"protocol\":2"),
                "{hello}"
            );
            s.write_all(text).unwrap();
        });
        let e = Control::connect(addr).unwrap_err();
        t.join().unwrap();
        e
    }

    /// A server that closes the connection before it has opened a link is busy; later it has
    /// failed.
    #[test]
    fn reset_means_busy_until_link_opens() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        for begun in [false, true] {
            let server = std::thread::spawn({
                let listener = listener.try_clone().unwrap();
                move || {
                    let mut served = Control::new(listener.accept().unwrap().0).unwrap();
                    served.receive::<Request>(HELLO).unwrap();
                    let (protocol, version) = (PROTOCOL, String::new());
                    let host = None;
                    served
                        .send(&Reply::Hello {
                            protocol,
                            version,
                            host,
                        })
                        .unwrap();
                    let stream = served.lines.into_inner();
                    // Without linger time, closing sends a reset.
                    let at_once = Some(Duration::ZERO);
                    rustix::net::sockopt::set_socket_linger(stream, at_once).unwrap();
                }
            });
            let (mut client, _) = Control::connect(at).unwrap();
            if begun {
                client.begun();
            }
            server.join().unwrap();
            let e = client.receive::<Reply>(ANSWER).unwrap_err();
            assert_eq!(matches!(e, Error::Busy(_)), !begun, "{e}");
        }
    }

    #[test]
    fn wrong_servers_are_distinguished() {
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
                .contains("middle of a message")
        );
        assert!(answer_with(b"").to_string().contains("closed"));
        // The port is in use by a connection, so nothing can listen there meanwhile.
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let held = TcpStream::connect(other.local_addr().unwrap()).unwrap();
        assert!(
            Control::connect(held.local_addr().unwrap())
                .unwrap_err()
                .to_string()
                .contains("cannot connect")
        );
    }
}
