//! The control connection: JSON lines over TCP.
//!
//! The client sends `hello`, then any number of `open` and `run`. The server answers `hello`, then
//! `listening` and `opened` to each `open`, `ready` and `done` to each `run`, or `error`. An error
//! closes only the link that it concerns. A server that serves another client answers `busy` to the
//! first `open`, and sends `busy` at any time to a client that it evicts. Lines are at most 64 KiB,
//! and both ends limit their waits.

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
/// How long an answer may take after the measurement.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(STALL.as_secs() + 5);
/// How long a server waits for a client's hello.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server waits for the client's next request.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

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
    /// The server's side of the measurement is complete.
    Done {
        /// Processor time that the server process used for the measurement, in microseconds.
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
    /// The server has opened a link for this client. Before that, a reset means that it is busy.
    link_opened: bool,
}

/// Sends `busy` to an evicted client, and closes the connection. Does not block if the client does
/// not read.
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
            .and_then(|()| stream.set_write_timeout(Some(ANSWER_TIMEOUT)))
            .context("control connection")?;
        Ok(Self {
            lines: BufReader::new(stream),
            link_opened: false,
        })
    }

    /// Connects to a server and exchanges hellos.
    ///
    /// # Errors
    /// Fails if the connection cannot be set up, if the peer is not `iwarp perf serve` of the same
    /// protocol version, or if the server is busy.
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
            .receive::<Reply>(ANSWER_TIMEOUT)
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
            Reply::Busy {} => Err(c.busy_error()),
            Reply::Error { message } => Err(Error::failed(format!("{addr}: {message}"))),
            other => Err(Error::failed(format!(
                "{addr} answered hello with {other:?}"
            ))),
        }
    }

    /// Records that the server has opened a link for this client.
    pub(crate) fn set_link_opened(&mut self) {
        self.link_opened = true;
    }

    fn busy_error(&self) -> Error {
        let server = self.lines.get_ref().peer_addr();
        let server = server.map_or_else(|_| "the server".to_owned(), |a| a.to_string());
        Error::Busy(format!(
            "{server} is serving another client; try again later"
        ))
    }

    fn connection_error(&self, e: &io::Error) -> Error {
        let reset = matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
        let text = format!("control connection: {e}");
        match reset && !self.link_opened {
            true => Error::Busy(text),
            false => Error::Failed(text),
        }
    }

    /// Returns the peer's address with port `port`. A link-local address keeps its scope.
    pub(crate) fn peer_with_port(&self, port: u16) -> Result<SocketAddr> {
        let peer = self.lines.get_ref().peer_addr();
        let mut peer = peer.context("control connection")?;
        peer.set_port(port);
        Ok(peer)
    }

    /// Returns the local address with port 0.
    pub(crate) fn local_with_any_port(&self) -> Result<SocketAddr> {
        let local = self.lines.get_ref().local_addr();
        let mut local = local.context("control connection")?;
        local.set_port(0);
        Ok(local)
    }

    pub(crate) fn peer_ip(&self) -> Result<IpAddr> {
        let peer = self.lines.get_ref().peer_addr();
        Ok(peer.context("control connection")?.ip())
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).context("control message")?;
        line.push(b'\n');
        let written = self.lines.get_mut().write_all(&line);
        written.map_err(|e| self.connection_error(&e))
    }

    /// Waits at most `timeout` for a message. Returns `None` if the peer closed the connection.
    ///
    /// # Errors
    /// Fails after the timeout, if the connection breaks, or if a line is not a message.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<Option<T>> {
        let line = self.read_line(timeout).map_err(|e| match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                Error::failed(format!("no answer within {} seconds", timeout.as_secs()))
            }
            _ => self.connection_error(&e),
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

    /// Reads a line. The line feed is missing if the peer closed the connection before it, or if
    /// the line is longer than [`MAX_LINE`].
    fn read_line(&mut self, timeout: Duration) -> io::Result<Vec<u8>> {
        let end = Instant::now() + timeout;
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') && line.len() < MAX_LINE {
            // The timeout is for the whole line: a peer that sends byte by byte gains no time.
            let remaining = end.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.lines.get_ref().set_read_timeout(Some(remaining))?;
            let received = match self.lines.fill_buf() {
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                received => received?,
            };
            if received.is_empty() {
                break;
            }
            let line_feed = received.iter().position(|octet| *octet == b'\n');
            let len = line_feed.map_or(received.len(), |at| at + 1);
            let len = len.min(MAX_LINE - line.len());
            line.extend_from_slice(&received[..len]);
            self.lines.consume(len);
        }
        Ok(line)
    }

    /// Waits for the server's answer. `what` names the answer that `accept` expects.
    ///
    /// # Errors
    /// Fails if [`receive`](Self::receive) fails, if the server reports an error or is busy, or if
    /// `accept` does not accept the answer.
    pub(crate) fn expect(
        &mut self,
        what: &str,
        accept: impl FnOnce(&Reply) -> bool,
    ) -> Result<Reply> {
        match self.receive(ANSWER_TIMEOUT)? {
            Some(Reply::Error { message }) => {
                Err(Error::failed(format!("server error: {message}")))
            }
            Some(Reply::Busy {}) => Err(self.busy_error()),
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
    fn slow_line_does_not_extend_timeout() {
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

    /// Returns the error of a client whose hello is answered with `text`.
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

    /// A reset before the server has opened a link means that it is busy. A later reset is a
    /// failure.
    #[test]
    fn reset_means_busy_until_link_opens() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        for link_opened in [false, true] {
            let server = std::thread::spawn({
                let listener = listener.try_clone().unwrap();
                move || {
                    let mut served = Control::new(listener.accept().unwrap().0).unwrap();
                    served.receive::<Request>(HELLO_TIMEOUT).unwrap();
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
                    // With a linger time of zero, closing sends a reset.
                    let linger = Some(Duration::ZERO);
                    rustix::net::sockopt::set_socket_linger(stream, linger).unwrap();
                }
            });
            let (mut client, _) = Control::connect(at).unwrap();
            if link_opened {
                client.set_link_opened();
            }
            server.join().unwrap();
            let e = client.receive::<Reply>(ANSWER_TIMEOUT).unwrap_err();
            assert_eq!(matches!(e, Error::Busy(_)), !link_opened, "{e}");
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
        // A connection uses this port, so no listener can take it meanwhile.
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
