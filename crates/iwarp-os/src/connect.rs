//! TCP connections: non-blocking connect, listening sockets, accept.
//!
//! If there is no free descriptor, `accept` returns [`NetError::TooManyFiles`]. The connection
//! remains in the backlog, and a level-triggered poller reports it again and again, so the
//! accepting thread must pause.

use super::address::canonical;
use super::option::{self, set_no_delay};
use super::poller::{Interest, wait_fd};
use super::sockopt::tcp_info;
use super::stream::{TcpStream, set_keep_alive};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Why a socket could not be created or used.
#[derive(Debug)]
pub enum NetError {
    /// No file descriptor is left.
    TooManyFiles {
        /// `true` for the process's limit (`EMFILE`), `false` for the system's limit (`ENFILE`).
        process_limit: bool,
    },
    /// Any other error of the operating system.
    Io(io::Error),
}

impl fmt::Display for NetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyFiles {
                process_limit: true,
            } => f.write_str("this process has no file descriptor left (see ulimit -n)"),
            Self::TooManyFiles {
                process_limit: false,
            } => f.write_str("the system has no file descriptor left (see sysctl fs.file-max)"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for NetError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::TooManyFiles { .. } => None,
            Self::Io(error) => Some(error),
        }
    }
}

impl From<io::Error> for NetError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EMFILE) => Self::TooManyFiles {
                process_limit: true,
            },
            Some(libc::ENFILE) => Self::TooManyFiles {
                process_limit: false,
            },
            _ => Self::Io(error),
        }
    }
}

impl From<NetError> for io::Error {
    fn from(error: NetError) -> Self {
        match error {
            NetError::TooManyFiles {
                process_limit: true,
            } => Self::from_raw_os_error(libc::EMFILE),
            NetError::TooManyFiles {
                process_limit: false,
            } => Self::from_raw_os_error(libc::ENFILE),
            NetError::Io(error) => error,
        }
    }
}

fn tcp_socket(address: &SocketAddr) -> io::Result<Socket> {
    // Close-on-exec from the start: another thread may fork and exec at any time.
    Socket::new(
        Domain::for_address(*address),
        Type::STREAM.nonblocking(),
        Some(Protocol::TCP),
    )
}

/// A connection attempt that may still be in progress. Poll it for writing, then call
/// [`Connecting::try_finish`].
#[derive(Debug)]
pub struct Connecting {
    stream: TcpStream,
    peer: SocketAddr,
}

/// The addresses of the two endpoints of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// Our address.
    pub local: SocketAddr,
    /// The peer's address.
    pub peer: SocketAddr,
}

/// The state of a [`Connecting`].
#[derive(Debug)]
pub enum Connect {
    /// Established.
    Done(TcpStream, Ends),
    /// Still in progress; poll it for writing again.
    Pending(Connecting),
}

/// Starts to connect to `peer`, from `local` if given, and does not wait for the connection. If
/// `local` has port 0, the kernel chooses a free port.
///
/// # Errors
/// There is no descriptor or no route, or `local` is in use, of the other address family, or not an
/// address of this host. An error of the connection itself is returned here if the kernel detects
/// it immediately (`ConnectionRefused` on loopback), and by [`Connecting::try_finish`] otherwise.
pub fn connect(peer: SocketAddr, local: Option<SocketAddr>) -> Result<Connecting, NetError> {
    // An IPv4-mapped peer gets an IPv4 socket.
    let peer = canonical(peer);
    let socket = tcp_socket(&peer)?;
    // Miri connects unbound sockets only.
    if let Some(local) = local.map(canonical).filter(|_| !cfg!(miri)) {
        if local.port() == 0 {
            choose_port_at_connect(&socket);
        }
        socket.bind(&SockAddr::from(local))?;
    }
    delay_handshake_ack(&socket);
    start_connect(socket, peer)
}

/// How long a socket may take to connect to itself. Usually it is connected when `connect` returns.
const SELF_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Connects a socket to itself, on a free port of `address`: it receives what is sent on it. This
/// is TCP's simultaneous open (RFC 9293 section 3.5), with one socket in both roles.
///
/// # Errors
/// There is no descriptor or no port, or `address` is not an address of this host. `TimedOut` if a
/// packet filter of this host drops the segments.
pub fn connect_to_itself(address: SocketAddr) -> Result<(TcpStream, Ends), NetError> {
    let mut address = canonical(address);
    address.set_port(0);
    let socket = tcp_socket(&address)?;
    // Bind first, because the address to connect to includes the port.
    socket.bind(&SockAddr::from(address))?;
    let local = address_of(&socket)?;
    let connecting = start_connect(socket, local)?;
    if !wait_fd(&connecting, Interest::WRITE, Some(SELF_CONNECT_TIMEOUT))? {
        return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT).into());
    }
    if let Some(error) = connecting.stream.take_error()? {
        return Err(error.into());
    }
    let peer = connecting.stream.peer_addr()?;
    Ok((connecting.stream, Ends { local, peer }))
}

fn start_connect(socket: Socket, peer: SocketAddr) -> Result<Connecting, NetError> {
    let stream = TcpStream::from_socket(socket)?;
    match stream.socket().connect(&SockAddr::from(peer)) {
        Ok(()) => {}
        // An interrupted connect continues in the background.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => {}
        Err(error) => return Err(error.into()),
    }
    let peer = canonical(peer);
    Ok(Connecting { stream, peer })
}

/// Lets the kernel choose the source port at connect time instead of bind time, so that connections
/// to different destinations can use the same port. A busy client then does not run out of ports.
/// A failure is ignored.
fn choose_port_at_connect(socket: &Socket) {
    // The IPv4 option applies to both families.
    let _ = option::set(
        socket,
        libc::IPPROTO_IP,
        libc::IP_BIND_ADDRESS_NO_PORT,
        1i32,
    );
}

/// Delays the last segment of the TCP handshake, so that it carries the MPA request, which the
/// initiator sends immediately. That saves a segment, and the responder finds the request when it
/// accepts. If no data is sent within 200 ms, the kernel sends the segment without data. If the
/// kernel refuses the option, it sends the segment immediately. Later segments are not affected.
fn delay_handshake_ack(socket: &Socket) {
    let _ = option::set(socket, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 0i32);
}

impl Connecting {
    /// Checks whether the attempt has finished. Call it when the descriptor is writable; an earlier
    /// call is harmless.
    ///
    /// # Errors
    /// Why the attempt failed: `ConnectionRefused`, `TimedOut`, `HostUnreachable`,
    /// `ConnectionReset` and others.
    pub fn try_finish(self) -> io::Result<Connect> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        let peer = match self.stream.peer_addr() {
            Ok(peer) => peer,
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                return Ok(Connect::Pending(self));
            }
            Err(error) => return Err(error),
        };
        let local = self.stream.local_addr()?;
        self.done(Ends { local, peer })
    }

    /// Sends the first bytes if the connection is already established, as it is if the peer is on
    /// this host. Returns the number of bytes sent. The next [`try_finish`](Self::try_finish)
    /// reports an error of the attempt.
    ///
    /// # Errors
    /// As [`try_finish`](Self::try_finish).
    pub fn send_now(self, first: &[u8]) -> io::Result<(Connect, usize)> {
        let local = self.stream.local_addr()?;
        let peer = if self.peer.ip().is_unspecified() {
            // The unspecified address refers to this host. The kernel has chosen the actual
            // address.
            match self.stream.peer_addr() {
                Ok(peer) => peer,
                Err(_) => return Ok((Connect::Pending(self), 0)),
            }
        } else {
            self.peer
        };
        // Do not send on a socket that is connected to itself; `done` reports an error.
        if local == peer {
            return self.done(Ends { local, peer }).map(|done| (done, 0));
        }
        match self.stream.send(first) {
            Ok(n) => self.done(Ends { local, peer }).map(|done| (done, n)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Ok((Connect::Pending(self), 0))
            }
            Err(error) => Err(error),
        }
    }

    fn done(self, ends: Ends) -> io::Result<Connect> {
        // A socket that connects to a port of this host may get the same port as its source port,
        // and so be connected to itself (simultaneous open). Then nothing listens on the port.
        if ends.local == ends.peer {
            self.stream.abort();
            return Err(io::Error::from_raw_os_error(libc::ECONNREFUSED));
        }
        Ok(Connect::Done(self.stream, ends))
    }
}

impl AsFd for Connecting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn address_of(socket: &Socket) -> io::Result<SocketAddr> {
    let address = socket.local_addr()?;
    address
        .as_socket()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

/// Whether other sockets may bind the same port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// No other socket may bind it until this one listens or connects.
    Exclusive,
    /// Other sockets with `Shared` may bind it as well.
    Shared,
}

/// A bound socket that neither listens nor connects yet.
#[derive(Debug)]
pub struct Bound {
    socket: Socket,
}

impl Bound {
    /// Binds to `address`; [`local_addr`](Self::local_addr) returns the port if `address` has port
    /// 0.
    ///
    /// Earlier connections of the port, established or in TIME-WAIT, do not reserve it, so that a
    /// restarted program gets its port back immediately. Another bound socket reserves the port,
    /// unless it [shares](Sharing::Shared) it. While there are earlier connections, the kernel does
    /// not always detect that; but at most one of the sockets can listen.
    ///
    /// `only_v6` says whether an IPv6 listener refuses IPv4 peers; `None` keeps the system's
    /// default.
    ///
    /// # Errors
    /// There is no descriptor. `AddrInUse`. `AddrNotAvailable`. `PermissionDenied` for a low port.
    pub fn bind(
        address: SocketAddr,
        only_v6: Option<bool>,
        sharing: Sharing,
    ) -> Result<Self, NetError> {
        #[cfg(miri)]
        let address = crate::miri::with_port(address)?;
        let socket = tcp_socket(&address)?;
        if let (Some(only_v6), true) = (only_v6, address.is_ipv6()) {
            socket.set_only_v6(only_v6)?;
        }
        let address = SockAddr::from(address);
        let shared = sharing == Sharing::Shared;
        // Sockets with SO_REUSEADDR can bind the same port until one of them listens. So a socket
        // with an exclusive port sets the option only while it binds beside earlier connections.
        socket.set_reuse_address(shared)?;
        match socket.bind(&address) {
            Err(error) if !shared && error.kind() == io::ErrorKind::AddrInUse => {
                socket.set_reuse_address(true)?;
                socket.bind(&address)?;
                socket.set_reuse_address(false)?;
            }
            bound => bound?,
        }
        Ok(Self { socket })
    }

    /// Sets SO_REUSEADDR before the socket listens or connects, so that its connections do not
    /// reserve the port.
    fn share_port(&self) -> io::Result<()> {
        self.socket.set_reuse_address(true)
    }

    /// Returns the address of the socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        address_of(&self.socket)
    }

    /// Listens with a backlog of `backlog` connections; the kernel caps it at `net.core.somaxconn`.
    /// Accepted streams start with this setting of [`TcpStream::keep_alive`].
    ///
    /// # Errors
    /// `AddrInUse` if another socket listens on this address.
    pub fn listen(self, backlog: u32, keep_alive: Option<Duration>) -> Result<Listener, NetError> {
        // Accepted sockets inherit these options.
        self.share_port()?;
        set_no_delay(&self.socket)?;
        // If the kernel refuses keep-alive on the listener, each accepted stream sets it.
        let keep_alive = keep_alive.filter(|_| set_keep_alive(&self.socket, keep_alive).is_ok());
        self.socket
            .listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
        Ok(Listener {
            socket: self.socket,
            keep_alive,
        })
    }

    /// Connects from this address, see [`connect`].
    ///
    /// # Errors
    /// As [`connect`].
    pub fn connect(self, peer: SocketAddr) -> Result<Connecting, NetError> {
        let peer = match (self.local_addr()?, canonical(peer)) {
            (SocketAddr::V6(_), SocketAddr::V4(peer)) => {
                (peer.ip().to_ipv6_mapped(), peer.port()).into()
            }
            (_, peer) => peer,
        };
        self.share_port()?;
        delay_handshake_ack(&self.socket);
        start_connect(self.socket, peer)
    }
}

/// A listening socket. Poll it for reading, then call [`Listener::accept`] until it returns `None`.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    keep_alive: Option<Duration>,
}

impl Listener {
    /// Binds and listens in one step.
    #[cfg(test)]
    pub fn bind(
        address: SocketAddr,
        backlog: u32,
        only_v6: Option<bool>,
    ) -> Result<Self, NetError> {
        Bound::bind(address, only_v6, Sharing::Exclusive)?.listen(backlog, None)
    }

    /// Returns the number of connections in the backlog, or 1 if it is empty or unknown. This call
    /// costs less than an `accept` that finds no connection.
    pub fn waiting(&self) -> u32 {
        tcp_info(&self.socket).map_or(1, |info| info.unacknowledged_segments.max(1))
    }

    /// Accepts the next connection, if one is waiting.
    ///
    /// Connections that failed while they waited are skipped.
    ///
    /// # Errors
    /// [`NetError::TooManyFiles`] if no descriptor is left; the connection remains in the backlog,
    /// so stop polling the listener for a while. [`NetError::Io`] if the listener is unusable or
    /// the system is out of memory.
    pub fn accept(&self) -> Result<Option<(TcpStream, SocketAddr)>, NetError> {
        loop {
            let (socket, peer) = match self
                .socket
                .accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC)
            {
                Ok(accepted) => accepted,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return Ok(None),
                    // Linux's `accept` returns pending errors of the new connection. They do not
                    // concern the listener.
                    Some(
                        libc::EINTR
                        | libc::ECONNABORTED
                        | libc::EPROTO
                        | libc::ENETDOWN
                        | libc::ENOPROTOOPT
                        | libc::EHOSTDOWN
                        | libc::ENONET
                        | libc::EHOSTUNREACH
                        | libc::EOPNOTSUPP
                        | libc::ENETUNREACH,
                    ) => continue,
                    // The kernel allocates a descriptor even if no connection is waiting.
                    Some(libc::EMFILE | libc::ENFILE) if !self.has_waiting() => return Ok(None),
                    _ => return Err(error.into()),
                },
            };
            let Some(peer) = peer.as_socket().map(canonical) else {
                continue;
            };
            return Ok(Some((TcpStream::accepted(socket, self.keep_alive), peer)));
        }
    }

    /// Returns `true` if a connection is waiting, or if polling fails.
    fn has_waiting(&self) -> bool {
        wait_fd(&self.socket, Interest::READ, Some(Duration::ZERO)).unwrap_or(true)
    }

    /// Returns the address of the listener, with the port that the kernel has chosen.
    #[cfg(test)]
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        address_of(&self.socket)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
#[path = "connect_tests.rs"]
mod tests;
