//! A connected TCP socket for the data path: non-blocking, without Nagle's algorithm, reading and
//! writing registered memory in place (RFC 5044 section 4).
//!
//! Invariant: the `unsafe` calls are system calls (send, receive, connect, `ioctl`) on a descriptor
//! that this type owns. For an unmapped address in a list, the kernel returns `EFAULT`. The `_raw`
//! functions are unsafe because the kernel reads or writes the memory, so the caller must guarantee
//! that it may be accessed.

use super::address::canonical;
#[cfg(miri)]
use super::miri::calls;
use super::option::set_no_delay;
use super::raw_slice::RawSlice;
use super::sockopt::{TcpInfo, tcp_info};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{SockRef, Socket, TcpKeepalive};
use std::io;
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// The maximum number of ranges in one call (`UIO_MAXIOV`). Of a longer list, only the first ones
/// are transferred.
pub const MAX_SLICES: usize = 1024;

/// A TCP connection. All functions take `&self`: one thread may send while another one receives.
#[derive(Debug)]
pub struct TcpStream {
    socket: Socket,
    /// The limit of [`keep_alive`](Self::keep_alive) that the listener had.
    inherited: Option<Duration>,
}

impl TcpStream {
    /// Takes over a TCP socket that is connected or connecting, and non-blocking. Disables Nagle's
    /// algorithm.
    ///
    /// # Errors
    /// The kernel's error, if it is not a TCP socket.
    pub fn from_socket(socket: Socket) -> io::Result<Self> {
        // Send each FPDU immediately. The engine itself combines FPDUs to larger writes.
        set_no_delay(&socket)?;
        Ok(Self {
            socket,
            inherited: None,
        })
    }

    /// Takes over a non-blocking socket that a listener has accepted. The socket has the options of
    /// the listener, including its limit of [`keep_alive`](Self::keep_alive).
    pub(super) const fn accepted(socket: Socket, inherited: Option<Duration>) -> Self {
        Self { socket, inherited }
    }

    /// Sends a list of ranges. Returns the number of bytes that TCP accepted, which may be fewer
    /// than all.
    ///
    /// If `eor` is set, the data end a record: TCP does not add later data to the last segment,
    /// which keeps FPDUs aligned with segments. If `more` is set, data follow immediately, and an
    /// incomplete segment waits for them. Of a list longer than [`MAX_SLICES`], only the first
    /// ranges are sent, without the end of the record.
    ///
    /// # Errors
    /// `WouldBlock` if the socket's buffer is full. `EFAULT` for unmapped memory. Other errors of
    /// the connection. Never raises `SIGPIPE`.
    ///
    /// # Safety
    /// The caller guarantees that all ranges may be read during the call. If they change
    /// concurrently, the sent data contain old and new bytes.
    pub unsafe fn send_vectored_raw(
        &self,
        list: &[RawSlice],
        eor: bool,
        more: bool,
    ) -> io::Result<usize> {
        let fits = list.len() <= MAX_SLICES;
        let mut flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        if eor && fits {
            flags |= libc::MSG_EOR;
        }
        if more || !fits {
            flags |= libc::MSG_MORE;
        }
        let fd = self.socket.as_raw_fd();
        let message = header(list);
        loop {
            let sent = if let [one] = list {
                // This is cheaper, because the kernel copies neither a header nor a list.
                // SAFETY: the kernel only reads the range. The caller guarantees that it may.
                unsafe { calls::send(fd, one.as_ptr(), one.len(), flags) }
            } else {
                // SAFETY: `message` refers to the borrowed list, which has the layout of `iovec`.
                // The kernel only reads the ranges. The caller guarantees that it may.
                unsafe { calls::sendmsg(fd, &raw const message, flags) }
            };
            if let Some(result) = outcome(sent) {
                return result;
            }
        }
    }

    /// Receives into a list of ranges. Returns the number of bytes. 0 is the end of the stream,
    /// unless all ranges are empty.
    ///
    /// # Errors
    /// `WouldBlock` if no data have arrived. `EFAULT` for memory that cannot be written. Other
    /// errors of the connection.
    ///
    /// # Safety
    /// The caller guarantees that all ranges may be written during the call: there are no
    /// references to them.
    pub unsafe fn recv_vectored_raw(&self, list: &[RawSlice]) -> io::Result<usize> {
        let fd = self.socket.as_raw_fd();
        let mut message = header(list);
        loop {
            let received = if let [one] = list {
                // SAFETY: the kernel only writes to the range. The caller guarantees that it may.
                unsafe { calls::recv(fd, one.as_ptr(), one.len(), libc::MSG_DONTWAIT) }
            } else {
                // SAFETY: as above. The kernel also writes to `message`.
                unsafe { calls::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) }
            };
            if let Some(result) = outcome(received) {
                return result;
            }
        }
    }

    /// Sends ordinary bytes.
    ///
    /// # Errors
    /// As for [`send_vectored_raw`](Self::send_vectored_raw).
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the range is borrowed during the call, and only read.
        unsafe { self.send_vectored_raw(&[RawSlice::of(bytes)], false, false) }
    }

    /// Receives ordinary bytes. Returns their number. 0 is the end of the stream, unless `bytes` is
    /// empty.
    ///
    /// # Errors
    /// As for [`recv_vectored_raw`](Self::recv_vectored_raw).
    pub fn recv(&self, bytes: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the range is borrowed exclusively during the call.
        unsafe { self.recv_vectored_raw(&[RawSlice::of_mut(bytes)]) }
    }

    /// Returns `true` if data have arrived. Does not read them.
    ///
    /// # Errors
    /// `UnexpectedEof` if the peer has closed its direction and all data have been read. Other
    /// errors of the kernel.
    pub fn has_octets(&self) -> io::Result<bool> {
        match self.socket().peek(&mut [MaybeUninit::uninit()]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns the maximum segment size (the EMSS of RFC 5044). It may change with the path MTU.
    pub fn mss(&self) -> io::Result<u32> {
        if cfg!(miri) {
            return Ok(32_768);
        }
        self.socket.tcp_mss()
    }

    /// Closes the sending direction: TCP sends a FIN after all written data.
    ///
    /// # Errors
    /// `NotConnected` if the connection no longer exists.
    pub fn shutdown_write(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Resets the connection: unsent data are dropped, and the peer gets an RST.
    ///
    /// Other threads may use the stream meanwhile. Their calls fail from now on, and a poller
    /// reports the stream as broken.
    pub fn abort(&self) {
        if cfg!(miri) {
            let _ = self.socket.shutdown(Shutdown::Both);
            return;
        }
        // If the kernel refuses the connect below, closing the socket resets the connection.
        let _ = self.socket.set_linger(Some(Duration::ZERO));
        let unspecified = libc::sockaddr {
            sa_family: libc::AF_UNSPEC as libc::sa_family_t,
            sa_data: [0; 14],
        };
        let len = size_of::<libc::sockaddr>() as libc::socklen_t;
        // Connecting to AF_UNSPEC resets a TCP connection, but does not close the descriptor, which
        // other threads may be using.
        // SAFETY: the address has `len` octets, and the descriptor belongs to `self`.
        unsafe { libc::connect(self.socket.as_raw_fd(), &raw const unspecified, len) };
    }

    /// Returns the local address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        to_inet(&self.socket.local_addr()?)
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected` before the connect has finished and after the connection has failed.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        to_inet(&self.socket.peer_addr()?)
    }

    /// Returns the pending error of the socket, if any, and clears it.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.socket.take_error()
    }

    /// Returns `true` if the peer has closed its direction, even if there are unread data.
    pub fn peer_closed(&self) -> bool {
        self.has_any_of(PollFlags::RDHUP)
    }

    /// Returns `true` if the stream has an error or both directions are closed. Does not send or
    /// read data.
    pub fn is_hung_up(&self) -> bool {
        self.has_any_of(PollFlags::empty())
    }

    /// Returns `true` if the stream has one of these events or an error, or if both directions are
    /// closed. Returns `false` if polling fails.
    fn has_any_of(&self, events: PollFlags) -> bool {
        let mut fds = [PollFd::new(&self.socket, events)];
        poll(&mut fds, Some(&Timespec::default())).is_ok() && !fds[0].revents().is_empty()
    }

    /// Returns the number of bytes written to the socket that the peer has not acknowledged.
    pub fn unacknowledged_bytes(&self) -> io::Result<u64> {
        self.queue_ioctl(libc::TIOCOUTQ)
    }

    /// Enables TCP keep-alive with this limit, or disables it.
    pub fn keep_alive(&self, limit: Option<Duration>) -> io::Result<()> {
        set_keep_alive(&self.socket, limit)
    }

    /// Returns the keep-alive limit that an accepted stream has inherited from its listener.
    /// [`keep_alive`](Self::keep_alive) does not change the result.
    pub const fn inherited_keep_alive(&self) -> Option<Duration> {
        self.inherited
    }

    /// If the peer has not answered a retransmission or a window probe, returns the time since its
    /// last acknowledgement.
    pub fn unanswered(&self) -> io::Result<Option<Duration>> {
        let info = tcp_info(&self.socket)?;
        Ok(is_silent(&info).then(|| Duration::from_millis(info.last_ack_received_ms.into())))
    }

    /// Returns the time after which TCP has certainly retransmitted unacknowledged data, so that
    /// [`unanswered`](Self::unanswered) distinguishes a silent peer from a short delay.
    ///
    /// Linux first sends a tail loss probe, which it does not count as a retransmission, and then
    /// waits again. That takes up to two retransmission timeouts. A third one allows for late
    /// timers.
    pub fn detection_time(&self) -> io::Result<Duration> {
        let timeout = tcp_info(&self.socket)?.retransmission_timeout_us;
        Ok(Duration::from_micros(timeout.into()) * 3)
    }

    /// Returns the socket, for socket options that have no function in this type.
    pub fn socket(&self) -> SockRef<'_> {
        SockRef::from(&self.socket)
    }

    fn queue_ioctl(&self, request: libc::Ioctl) -> io::Result<u64> {
        if cfg!(miri) {
            return Ok(0);
        }
        let mut count: libc::c_int = 0;
        // SAFETY: the request stores one `int` in `count`.
        let status = unsafe { libc::ioctl(self.socket.as_raw_fd(), request, &raw mut count) };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(u64::try_from(count).unwrap_or(0))
    }
}

/// Returns `true` if the peer has not answered a retransmission or a window probe.
const fn is_silent(info: &TcpInfo) -> bool {
    // A peer whose buffer is full may drop a retransmission, but acknowledges that it received a
    // segment. So any acknowledgement after the retransmission is an answer.
    let retransmitted =
        info.retransmits_in_a_row > 0 && info.last_data_sent_ms < info.last_ack_received_ms;
    // Linux answers at most one probe in half a second.
    let probed = match info.unanswered_probes {
        0 => false,
        1 => info.last_ack_received_ms > 2000,
        _ => true,
    };
    retransmitted || probed
}

/// Enables or disables keep-alive. If half of `limit` passes without a segment from the peer, the
/// kernel sends the first probe, then at most three more. If `limit` passes without an answer, the
/// stream fails with `TimedOut`. The limit is rounded down to seconds, and is at least 2 s and at
/// most 32,767 s. While data are unacknowledged, the kernel sends no probes; see
/// [`TcpStream::unanswered`]. Accepted streams inherit the setting of their listening socket.
pub(super) fn set_keep_alive(socket: &Socket, limit: Option<Duration>) -> io::Result<()> {
    const MAX_PROBES: u64 = 4;
    if cfg!(miri) {
        return Ok(());
    }
    let Some(limit) = limit else {
        return socket.set_keepalive(false);
    };
    let seconds = limit.as_secs().clamp(2, 32_767);
    let idle = seconds / 2;
    let probes = (seconds - idle).min(MAX_PROBES);
    let options = TcpKeepalive::new()
        .with_time(Duration::from_secs(idle))
        .with_interval(Duration::from_secs((seconds - idle).div_ceil(probes)))
        .with_retries(probes as u32);
    socket.set_tcp_keepalive(&options)
}

/// The system calls that transfer data. The C library's functions are not used: they are
/// cancellation points, so if a program cancelled a thread inside `ibv_poll_cq`, our locks would be
/// held forever. A preloaded library may also replace them.
#[cfg(not(miri))]
mod calls {
    use libc::{c_int, c_long, c_void, msghdr, size_t};

    /// # Safety
    /// As `send(2)`.
    #[inline]
    pub(super) unsafe fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> c_long {
        let no_address = std::ptr::null::<c_void>();
        // SAFETY: guaranteed by the caller. There is no address.
        unsafe { libc::syscall(libc::SYS_sendto, fd, from, len, flags, no_address, 0) }
    }

    /// # Safety
    /// As `recv(2)`.
    #[inline]
    pub(super) unsafe fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> c_long {
        let null = std::ptr::null_mut::<c_void>();
        // SAFETY: guaranteed by the caller. No address is requested.
        unsafe { libc::syscall(libc::SYS_recvfrom, fd, to, len, flags, null, null) }
    }

    /// # Safety
    /// As `sendmsg(2)`.
    #[inline]
    pub(super) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> c_long {
        // SAFETY: guaranteed by the caller.
        unsafe { libc::syscall(libc::SYS_sendmsg, fd, message, flags) }
    }

    /// # Safety
    /// As `recvmsg(2)`.
    #[inline]
    pub(super) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> c_long {
        // SAFETY: guaranteed by the caller.
        unsafe { libc::syscall(libc::SYS_recvmsg, fd, message, flags) }
    }
}

impl AsFd for TcpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for TcpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

fn to_inet(address: &socket2::SockAddr) -> io::Result<SocketAddr> {
    address
        .as_socket()
        .map(canonical)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

/// Returns a message header for the first [`MAX_SLICES`] ranges of `list`.
#[inline]
fn header(list: &[RawSlice]) -> libc::msghdr {
    // SAFETY: all zeros are a valid `msghdr`. (Some targets have private padding.)
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // The kernel only reads the list, although the C type is not `const`.
    message.msg_iov = list.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = list.len().min(MAX_SLICES) as _;
    message
}

/// Converts the result of a transfer call. Returns `None` if a signal interrupted the call; repeat
/// it then.
#[inline]
fn outcome(returned: libc::c_long) -> Option<io::Result<usize>> {
    if let Ok(count) = usize::try_from(returned) {
        return Some(Ok(count));
    }
    let error = io::Error::last_os_error();
    (error.kind() != io::ErrorKind::Interrupted).then_some(Err(error))
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
