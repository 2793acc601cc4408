//! A connected TCP socket for the data path: non-blocking, without Nagle's algorithm, reading and
//! writing registered memory in place (RFC 5044 section 4).
//!
//! Invariant: the only `unsafe` calls are `send`, `sendmsg`, `recv`, `recvmsg`, `connect` and
//! `ioctl` on a descriptor that this type owns. A bad address in a list is an error of the kernel
//! (`EFAULT`), never a crash. The `_raw` functions are unsafe because the kernel reads or writes
//! memory behind the compiler's back, so the caller must have the right to that memory.

use super::address::canonical;
use super::raw_slice::RawSlice;
use super::sockopt::tcp_info;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{SockRef, Socket, TcpKeepalive};
use std::io;
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// The maximum number of entries of one call (`UIO_MAXIOV`). Longer lists are transferred in part.
pub const MAX_SLICES: usize = 1024;

/// A TCP connection. All functions take `&self`: one thread may send while another one receives.
#[derive(Debug)]
pub struct TcpStream {
    socket: Socket,
    /// Its listener's limit of [`keep_alive`](Self::keep_alive).
    inherited: Option<Duration>,
}

impl TcpStream {
    /// Takes over a connected or connecting TCP socket, which is non-blocking already, and disables
    /// Nagle's algorithm.
    ///
    /// # Errors
    /// The kernel's error, if it is not a TCP socket.
    pub fn from_socket(socket: Socket) -> io::Result<Self> {
        // An FPDU should be sent when it is complete; the engine coalesces by itself.
        socket.set_tcp_nodelay(true)?;
        Ok(Self {
            socket,
            inherited: None,
        })
    }

    /// Takes over what a listener has accepted, non-blocking. It has the listener's options, of
    /// which one is the limit of [`keep_alive`](Self::keep_alive).
    pub(super) const fn accepted(socket: Socket, inherited: Option<Duration>) -> Self {
        Self { socket, inherited }
    }

    /// Sends a list of ranges. Returns how many bytes TCP took, possibly fewer than offered.
    ///
    /// `eor` marks the end of a record: TCP will not merge the last segment with later data, which
    /// keeps FPDUs aligned with segments. `more` says that data follow immediately and a partial
    /// segment should wait for them. Lists longer than [`MAX_SLICES`] are sent in part, and the
    /// part is never the end of the record.
    ///
    /// # Errors
    /// `WouldBlock` if the socket's buffer is full; `EFAULT` for unmapped memory; errors of the
    /// connection. Never raises `SIGPIPE`.
    ///
    /// # Safety
    /// The caller has the right to let all ranges be read during the call. They may change
    /// concurrently: what is sent is then a mix of old and new bytes.
    pub unsafe fn send_vectored_raw(
        &self,
        list: &[RawSlice],
        eor: bool,
        more: bool,
    ) -> io::Result<usize> {
        let whole = list.len() <= MAX_SLICES;
        let mut flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        if eor && whole {
            flags |= libc::MSG_EOR;
        }
        if more || !whole {
            flags |= libc::MSG_MORE;
        }
        let fd = self.socket.as_raw_fd();
        let message = header(list);
        loop {
            let sent = if let [one] = list {
                // Cheaper for the kernel: there is no header and no list to copy.
                // SAFETY: the kernel only reads the range, which the caller allows.
                unsafe { calls::send(fd, one.as_ptr(), one.len(), flags) }
            } else {
                // SAFETY: `message` names a list that lives on and has the layout of `iovec`; the
                // kernel only reads the ranges, which the caller allows.
                unsafe { calls::sendmsg(fd, &raw const message, flags) }
            };
            if let Some(result) = outcome(sent) {
                return result;
            }
        }
    }

    /// Receives into a list of ranges. Returns the number of bytes; 0 is the end of the stream,
    /// unless the list has no room.
    ///
    /// # Errors
    /// `WouldBlock` if there are no data; `EFAULT` for memory that cannot be written; errors of the
    /// connection.
    ///
    /// # Safety
    /// The caller has the right to let all ranges be written: no reference to them is alive, except
    /// to memory that is shared with the RNIC.
    pub unsafe fn recv_vectored_raw(&self, list: &[RawSlice]) -> io::Result<usize> {
        let fd = self.socket.as_raw_fd();
        let mut message = header(list);
        loop {
            let received = if let [one] = list {
                // SAFETY: the kernel writes only inside the range, which the caller allows.
                unsafe { calls::recv(fd, one.as_ptr(), one.len(), libc::MSG_DONTWAIT) }
            } else {
                // SAFETY: as above, and it writes into `message`.
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
    /// As [`send_vectored_raw`](Self::send_vectored_raw).
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the range is borrowed for the length of the call and only read.
        unsafe { self.send_vectored_raw(&[RawSlice::of(bytes)], false, false) }
    }

    /// Receives ordinary bytes; 0 is the end of the stream, unless `bytes` is empty.
    ///
    /// # Errors
    /// As [`recv_vectored_raw`](Self::recv_vectored_raw).
    pub fn recv(&self, bytes: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the range is borrowed exclusively for the length of the call.
        unsafe { self.recv_vectored_raw(&[RawSlice::of_mut(bytes)]) }
    }

    /// Returns `true` if data have arrived, `false` if not. Reads nothing.
    ///
    /// # Errors
    /// `UnexpectedEof`: the peer has closed its direction, and there are no data before the end.
    /// Otherwise the kernel's.
    pub fn has_octets(&self) -> io::Result<bool> {
        match self.socket().peek(&mut [MaybeUninit::uninit()]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns the size of TCP's largest segment without options: the EMSS of RFC 5044. It may
    /// change with the path MTU.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn mss(&self) -> io::Result<u32> {
        self.socket.tcp_mss()
    }

    /// Closes the outgoing direction after everything written (FIN).
    ///
    /// # Errors
    /// `NotConnected` if the connection is gone.
    pub fn shutdown_write(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Resets the connection: unsent data are dropped, and the peer gets an RST.
    ///
    /// Works while other threads use the stream: their calls fail from now on, and a poller reports
    /// it as broken.
    pub fn abort(&self) {
        // If the kernel refuses the connect below, the later close becomes the reset.
        let _ = self.socket.set_linger(Some(Duration::ZERO));
        let unspecified = libc::sockaddr {
            sa_family: libc::AF_UNSPEC as libc::sa_family_t,
            sa_data: [0; 14],
        };
        let len = size_of::<libc::sockaddr>() as libc::socklen_t;
        // Connecting to AF_UNSPEC resets a TCP connection and does not close the descriptor that
        // other threads use.
        // SAFETY: the address is valid for `len` octets; the descriptor is ours.
        unsafe { libc::connect(self.socket.as_raw_fd(), &raw const unspecified, len) };
    }

    /// Returns this end's address.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        inet(&self.socket.local_addr()?)
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected` before the connect has finished and after the connection has failed.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        inet(&self.socket.peer_addr()?)
    }

    /// Returns the pending error of the socket, if any, and clears it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.socket.take_error()
    }

    /// Returns `true` if the peer has closed its direction, even if unread data come before the
    /// end.
    pub fn peer_closed(&self) -> bool {
        self.has_any_of(PollFlags::RDHUP)
    }

    /// Returns `true` if it has an error or both directions are closed. Sends and reads nothing.
    pub fn is_hung_up(&self) -> bool {
        self.has_any_of(PollFlags::empty())
    }

    /// Returns `true` for one of these events, an error, or the end of both directions.
    fn has_any_of(&self, events: PollFlags) -> bool {
        let mut fds = [PollFd::new(&self.socket, events)];
        // A failed poll says nothing about the peer.
        poll(&mut fds, Some(&Timespec::default())).is_ok() && !fds[0].revents().is_empty()
    }

    /// Returns the number of bytes written to the socket that the peer has not acknowledged.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unacknowledged_bytes(&self) -> io::Result<u64> {
        self.queue_ioctl(libc::TIOCOUTQ)
    }

    /// Enables TCP's keep-alive with this limit, or disables it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn keep_alive(&self, limit: Option<Duration>) -> io::Result<()> {
        set_keep_alive(&self.socket, limit)
    }

    /// Returns the limit that an accepted stream has inherited from its listener.
    /// [`keep_alive`](Self::keep_alive) does not change the result.
    pub const fn inherited_keep_alive(&self) -> Option<Duration> {
        self.inherited
    }

    /// Returns the time since the peer's last acknowledgement if TCP has retransmitted or sent a
    /// window probe and waits for the answer.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unanswered(&self) -> io::Result<Option<Duration>> {
        let info = tcp_info(&self.socket)?;
        // A peer whose buffer is full may drop retransmissions, but says so: data sent before its
        // last acknowledgement count as answered.
        let again =
            info.retransmits_in_a_row > 0 && info.last_data_sent_ms < info.last_ack_received_ms;
        // Linux answers only one of two probes within half a second.
        let asked = match info.unanswered_probes {
            0 => false,
            1 => info.last_ack_received_ms > 2000,
            _ => true,
        };
        Ok((again || asked).then(|| Duration::from_millis(info.last_ack_received_ms.into())))
    }

    /// Returns the time after which TCP has surely retransmitted unacknowledged data, so that
    /// [`unanswered`](Self::unanswered) can distinguish silence from a short delay.
    ///
    /// Linux first sends a tail loss probe, which it does not count as a retransmission, and then
    /// waits again: up to two retransmission timeouts in total. The third allows for late timers.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn time_to_tell(&self) -> io::Result<Duration> {
        let timeout = tcp_info(&self.socket)?.retransmission_timeout_us;
        Ok(Duration::from_micros(timeout.into()) * 3)
    }

    /// Returns the socket, for options that this type has no function for.
    pub fn socket(&self) -> SockRef<'_> {
        SockRef::from(&self.socket)
    }

    fn queue_ioctl(&self, request: libc::Ioctl) -> io::Result<u64> {
        let mut count: libc::c_int = 0;
        // SAFETY: both requests store one int at the address given.
        let status = unsafe { libc::ioctl(self.socket.as_raw_fd(), request, &raw mut count) };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(u64::try_from(count).unwrap_or(0))
    }
}

/// Enables keep-alive: the first probe is sent after half of `limit` without a segment from the
/// peer, then at most three more. If `limit` passes without an answer, the stream fails with
/// `TimedOut`. The kernel counts in seconds, from 2 to 32,767. While data are unacknowledged, it
/// does not probe; see [`TcpStream::unanswered`]. Accepted streams inherit the setting of their
/// listening socket.
///
/// # Errors
/// The kernel's error.
pub(super) fn set_keep_alive(socket: &Socket, limit: Option<Duration>) -> io::Result<()> {
    const ASKS: u64 = 4;
    let Some(limit) = limit else {
        return socket.set_keepalive(false);
    };
    let seconds = limit.as_secs().clamp(2, 32_767);
    let idle = seconds / 2;
    let asks = (seconds - idle).min(ASKS);
    let options = TcpKeepalive::new()
        .with_time(Duration::from_secs(idle))
        .with_interval(Duration::from_secs((seconds - idle).div_ceil(asks)))
        .with_retries(asks as u32);
    socket.set_tcp_keepalive(&options)
}

/// The system calls that transfer data, without the C library's functions. Those are cancellation
/// points: a program that cancels a thread inside `ibv_poll_cq` would leave our locks held forever.
/// A preloaded library may also replace them.
mod calls {
    use libc::{c_int, c_long, c_void, msghdr, size_t};

    /// # Safety
    /// As `send(2)`.
    #[inline]
    pub(super) unsafe fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> c_long {
        let nowhere = std::ptr::null::<c_void>();
        // SAFETY: the caller's contract; there is no address.
        unsafe { libc::syscall(libc::SYS_sendto, fd, from, len, flags, nowhere, 0) }
    }

    /// # Safety
    /// As `recv(2)`.
    #[inline]
    pub(super) unsafe fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> c_long {
        let nowhere = std::ptr::null_mut::<c_void>();
        // SAFETY: the caller's contract; no address is requested.
        unsafe { libc::syscall(libc::SYS_recvfrom, fd, to, len, flags, nowhere, nowhere) }
    }

    /// # Safety
    /// As `sendmsg(2)`.
    #[inline]
    pub(super) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> c_long {
        // SAFETY: the caller's contract.
        unsafe { libc::syscall(libc::SYS_sendmsg, fd, message, flags) }
    }

    /// # Safety
    /// As `recvmsg(2)`.
    #[inline]
    pub(super) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> c_long {
        // SAFETY: the caller's contract.
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

fn inet(address: &socket2::SockAddr) -> io::Result<SocketAddr> {
    address
        .as_socket()
        .map(canonical)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

/// Returns a message header for at most [`MAX_SLICES`] entries of `list`.
#[inline]
fn header(list: &[RawSlice]) -> libc::msghdr {
    // SAFETY: all zero bytes are a valid `msghdr` (null pointers and zero lengths; some targets
    // have private padding).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // The kernel only reads the list; the C type lacks const.
    message.msg_iov = list.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = list.len().min(MAX_SLICES) as _;
    message
}

/// Converts the result of a transfer call; `None` to retry after a signal.
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
