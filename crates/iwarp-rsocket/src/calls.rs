//! The socket calls, which take the number of a socket.

use crate::datagram::Datagram;
use crate::errno::{Errno, Result};
use crate::options::Options;
use crate::socket::{Phase, Socket, State, close_all_at_exit, options};
use crate::stream::Gather;
use crate::table::{self, Entry};
use crate::{fork, repoll};
use libc::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Creates a socket (`socket(2)`) of type `SOCK_STREAM` or `SOCK_DGRAM`, optionally with
/// `SOCK_NONBLOCK` and `SOCK_CLOEXEC`.
///
/// # Errors
/// EOPNOTSUPP if the domain, type or protocol is not supported (as in rdma-core); EMFILE.
pub fn socket(domain: c_int, ty: c_int, protocol: c_int) -> Result<RawFd> {
    if domain != libc::AF_INET && domain != libc::AF_INET6 {
        return Err(Errno::NOTSUP);
    }
    let flags = ty & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    match (ty & !flags, protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
            install_handlers();
            let nonblocking = flags & libc::SOCK_NONBLOCK != 0;
            let options = Options::new(nonblocking, flags & libc::SOCK_CLOEXEC != 0);
            let socket = Socket::create(domain, options)?;
            Ok(table::insert(Entry::Stream(socket)))
        }
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => {
            let socket = Datagram::create(domain, flags)?;
            Ok(table::insert(Entry::Datagram(Arc::new(socket))))
        }
        _ => Err(Errno::NOTSUP),
    }
}

fn install_handlers() {
    static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
    // If there is no memory for the handlers, forks are not detected.
    let _ = fork::notice_forks();
    if !IS_INSTALLED.swap(true, Ordering::AcqRel) {
        // SAFETY: the function is never unloaded.
        unsafe { libc::atexit(at_exit) };
    }
}

extern "C" fn at_exit() {
    // A panic must not unwind into the C library.
    let _ = std::panic::catch_unwind(|| close_all_at_exit(table::all_streams()));
}

/// Returns `true` if this is the number of an rsocket.
pub fn is_rsocket(fd: RawFd) -> bool {
    table::find(fd).is_some()
}

/// Binds (`bind(2)`).
///
/// # Errors
/// EBADF, EINVAL, EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT.
pub fn bind(fd: RawFd, address: SocketAddr) -> Result<()> {
    match table::get(fd)? {
        Entry::Stream(socket) => socket.bind(address),
        Entry::Datagram(socket) => socket.bind(address),
    }
}

/// Listens (`listen(2)`).
///
/// # Errors
/// EBADF, EINVAL, EADDRINUSE, EOPNOTSUPP (a datagram socket).
pub fn listen(fd: RawFd, backlog: c_int) -> Result<()> {
    table::get_stream(fd)?.listen(backlog)
}

/// Accepts a connection (`accept(2)`). Returns the new socket's number and the peer's address.
///
/// # Errors
/// EBADF, EINVAL, EAGAIN, EINTR, EOPNOTSUPP (a datagram socket).
pub fn accept(fd: RawFd) -> Result<(RawFd, Option<SocketAddr>)> {
    let socket = table::get_stream(fd)?.accept()?;
    let peer = socket.addresses().1.ok();
    Ok((table::insert(Entry::Stream(socket)), peer))
}

/// Connects (`connect(2)`).
///
/// # Errors
/// EBADF, EINPROGRESS, EALREADY, EISCONN, ECONNREFUSED, ETIMEDOUT, ENETUNREACH, ENODEV, EPROTO,
/// EINTR.
pub fn connect(fd: RawFd, address: SocketAddr) -> Result<()> {
    match table::get(fd)? {
        Entry::Stream(socket) => socket.connect(address),
        Entry::Datagram(socket) => socket.connect(address),
    }
}

/// Shuts down one or both directions (`shutdown(2)`).
///
/// # Errors
/// EBADF, ENOTCONN, EINVAL.
pub fn shutdown(fd: RawFd, how: c_int) -> Result<()> {
    match table::get(fd)? {
        Entry::Stream(socket) => socket.shutdown(how),
        Entry::Datagram(socket) => socket.shutdown(how),
    }
}

/// Closes a socket (`close(2)`). Blocks until the data is sent.
///
/// # Errors
/// EBADF.
pub fn close(fd: RawFd) -> Result<()> {
    let socket = match table::remove(fd) {
        Ok(Entry::Stream(socket)) => socket,
        // The descriptor is closed when no thread uses the socket any more.
        Ok(Entry::Datagram(_)) => return Ok(()),
        Err(_) => return repoll::close(fd),
    };
    if socket.is_inherited() {
        // The socket belongs to the parent: its locks may be held by threads that exist only in the
        // parent, and its peer must not notice anything.
        std::mem::forget(socket);
        // SAFETY: this process no longer uses the number.
        unsafe { libc::close(fd) };
        return Ok(());
    }
    socket.close();
    Ok(())
}

/// Receives (`recv(2)`). A stream socket supports `MSG_PEEK`, `MSG_DONTWAIT` and `MSG_WAITALL`, and
/// returns zero at the end of the stream. A datagram socket supports all of the kernel's flags. It
/// receives one datagram, truncated to the buffer; with `MSG_TRUNC`, it returns the full length.
///
/// # Errors
/// EBADF, ENOTCONN, EAGAIN, EINTR, ECONNRESET; EOPNOTSUPP for `MSG_OOB` on a stream socket;
/// ECONNREFUSED on a connected datagram socket.
pub fn recv(fd: RawFd, out: &mut [u8], flags: c_int) -> Result<usize> {
    recv_vectored(fd, &mut [out], flags)
}

/// As [`recv`], into several buffers.
///
/// # Errors
/// As [`recv`].
pub fn recv_vectored(fd: RawFd, out: &mut [&mut [u8]], flags: c_int) -> Result<usize> {
    match table::get(fd)? {
        Entry::Stream(socket) => recv_stream(&socket, out, flags),
        Entry::Datagram(socket) => Ok(socket.receive(out, flags)?.0),
    }
}

/// As [`recv`]; also returns the datagram's sender or the stream's peer (`recvfrom(2)`).
///
/// # Errors
/// As [`recv`].
pub fn recv_from(fd: RawFd, out: &mut [u8], flags: c_int) -> Result<(usize, Option<SocketAddr>)> {
    match table::get(fd)? {
        Entry::Stream(socket) => {
            let n = recv_stream(&socket, &mut [out], flags)?;
            let peer = (n > 0).then(|| socket.addresses().1.ok()).flatten();
            Ok((n, peer))
        }
        Entry::Datagram(socket) => socket.receive(&mut [out], flags),
    }
}

fn recv_stream(socket: &Socket, out: &mut [&mut [u8]], flags: c_int) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::NOTSUP);
    }
    let peek = flags & libc::MSG_PEEK != 0;
    let total: usize = out.iter().map(|o| o.len()).sum();
    let all = flags & libc::MSG_WAITALL != 0;
    let (nonblocking, timeout) =
        socket.with_state(|s| (s.options.nonblocking, s.options.receive_timeout));
    let wait = !nonblocking && flags & libc::MSG_DONTWAIT == 0;
    let mut done = 0;
    let result = socket.wait_until(wait, timeout, |s| {
        let stream = match s.stream() {
            Ok(stream) => stream,
            // While connecting, behave as if no data had arrived.
            Err(Errno::AGAIN) => return None,
            Err(e) => return Some(Err(e)),
        };
        if total == 0 {
            return Some(Ok(()));
        }
        if peek {
            // Peeks at everything requested or available, without removing it.
            let wanted = total.min(stream.sizes().receive_buffer as usize / 2);
            let enough = !all || stream.available() as usize >= wanted || stream.is_at_end();
            if !enough {
                return None;
            }
        }
        loop {
            let buffer = buffer_at(out, done);
            if buffer.is_empty() {
                return Some(Ok(()));
            }
            // The next call reports the end of the stream or an error. If this call consumed an
            // error and returned data, the program would see a graceful close instead of the error.
            let peeked = if peek { done } else { 0 };
            let more = stream.available() as usize > peeked;
            if done > 0 && !more && (peek || !all || stream.is_at_end()) {
                return Some(Ok(()));
            }
            match stream.receive(buffer, peek.then_some(done)) {
                Ok(0) => return Some(Ok(())),
                Ok(n) => done += n,
                Err(Errno::AGAIN) => return None,
                Err(e) => return Some(Err(e)),
            }
        }
    });
    match result {
        Err(_) if done > 0 => Ok(done),
        Err(e) => Err(e),
        Ok(()) => Ok(done),
    }
}

/// Returns the buffer that contains byte number `position`, from that byte on.
fn buffer_at<'a>(out: &'a mut [&mut [u8]], mut position: usize) -> &'a mut [u8] {
    for buffer in out {
        if position < buffer.len() {
            return &mut buffer[position..];
        }
        position -= buffer.len();
    }
    &mut []
}

/// Sends (`send(2)`). A stream socket supports `MSG_DONTWAIT`. A datagram socket sends one
/// datagram. Never raises `SIGPIPE`.
///
/// # Errors
/// - A stream socket: EBADF, ENOTCONN, EAGAIN, EINTR, EPIPE, ECONNRESET; EOPNOTSUPP for `MSG_OOB`.
/// - A datagram socket: EDESTADDRREQ if it is not connected; EMSGSIZE above 65,507 bytes over IPv4
///   or 65,527 bytes over IPv6; ECONNREFUSED, EAGAIN, ENETUNREACH and the kernel's other errors.
pub fn send(fd: RawFd, data: &[u8], flags: c_int) -> Result<usize> {
    send_vectored(fd, &[data], flags)
}

/// As [`send`], from several buffers.
///
/// # Errors
/// As [`send`].
pub fn send_vectored(fd: RawFd, data: &[&[u8]], flags: c_int) -> Result<usize> {
    match table::get(fd)? {
        Entry::Stream(socket) => send_stream(&socket, data, flags),
        Entry::Datagram(socket) => socket.send(data, flags, None),
    }
}

/// Sends a datagram to an address (`sendto(2)`), whether or not the socket is connected.
///
/// # Errors
/// As [`send`], and EISCONN for a stream socket.
pub fn send_to(fd: RawFd, data: &[u8], flags: c_int, to: SocketAddr) -> Result<usize> {
    match table::get(fd)? {
        Entry::Stream(_) => Err(Errno::ISCONN),
        Entry::Datagram(socket) => socket.send(&[data], flags, Some(to)),
    }
}

fn send_stream(socket: &Socket, data: &[&[u8]], flags: c_int) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::NOTSUP);
    }
    let mut data = Gather::new(data);
    let total = data.remaining();
    let result = until_sent(socket, flags, |s| {
        s.stream()?.send(&mut data)?;
        Ok(data.remaining() == 0)
    });
    partial_result(result, total - data.remaining())
}

/// Repeats `step` until it returns `true` or an error other than EAGAIN. Fails with EAGAIN if the
/// call would block, or if the timeout passes.
fn until_sent(
    socket: &Socket,
    flags: c_int,
    mut step: impl FnMut(&mut State) -> Result<bool>,
) -> Result<()> {
    let (nonblocking, timeout) =
        socket.with_state(|s| (s.options.nonblocking, s.options.send_timeout));
    let wait = !nonblocking && flags & libc::MSG_DONTWAIT == 0;
    socket.wait_until(wait, timeout, |s| match step(s) {
        Ok(true) => Some(Ok(())),
        Ok(false) | Err(Errno::AGAIN) => None,
        Err(e) => Some(Err(e)),
    })
}

/// Returns the number of bytes transferred, or the error if there were none.
fn partial_result(result: Result<()>, done: usize) -> Result<usize> {
    match result {
        Err(e) if done == 0 => Err(e),
        _ => Ok(done),
    }
}

/// Maps a buffer for the peer's direct Writes (`riomap`). If `writable` is `false`, only registers
/// the buffer. Returns the offset for the peer: the given offset, or else the buffer's address.
///
/// # Errors
/// EBADF; EINVAL if not connected or if the length is invalid; ENOMEM if the peer has no free entry
/// (`RDMA_IOMAPSIZE`); EFAULT; EOPNOTSUPP for a datagram socket.
///
/// # Safety
/// The buffer stays mapped until [`iounmap`] or [`close`] returns. The peer may change it at any
/// time, so the program must read it accordingly.
pub unsafe fn iomap(
    fd: RawFd,
    buffer: *mut u8,
    len: usize,
    writable: bool,
    offset: Option<u64>,
) -> Result<u64> {
    table::get_stream(fd)?.with_state(|s| {
        let Phase::Connected(stream) = &mut s.phase else {
            return Err(Errno::INVAL);
        };
        // SAFETY: guaranteed by the caller.
        let offset = unsafe { stream.map(buffer as u64, len, writable, offset) }?;
        stream.send_mappings();
        Ok(offset)
    })
}

/// Removes a mapping (`riounmap`). The peer cannot write to the buffer after this returns.
///
/// # Errors
/// EBADF; EINVAL if there is no such mapping.
pub fn iounmap(fd: RawFd, buffer: *mut u8, len: usize) -> Result<()> {
    table::get_stream(fd)?.with_state(|s| match &mut s.phase {
        Phase::Connected(stream) => stream.unmap(buffer as u64, len),
        _ => Err(Errno::INVAL),
    })
}

/// Writes into a buffer that the peer mapped (`riowrite`). Returns fewer bytes than requested if
/// the remainder is not mapped, or if the send buffer of a nonblocking socket is full.
///
/// # Errors
/// As [`send`].
pub fn iowrite(fd: RawFd, data: &[u8], offset: u64, flags: c_int) -> Result<usize> {
    let socket = table::get_stream(fd)?;
    let pieces = [data];
    let mut gather = Gather::new(&pieces);
    let mut position = offset;
    let result = until_sent(&socket, flags, |s| {
        let remaining = gather.remaining();
        let n = s.stream()?.write_mapped(&mut gather, &mut position)?;
        // No progress and no error means that the range is not mapped.
        Ok(n == 0 || n == remaining)
    });
    partial_result(result, data.len() - gather.remaining())
}

/// Returns the socket's own address (`getsockname(2)`).
///
/// # Errors
/// EBADF.
pub fn local_address(fd: RawFd) -> Result<SocketAddr> {
    let socket = match table::get(fd)? {
        Entry::Stream(socket) => socket,
        Entry::Datagram(socket) => return socket.local_address(),
    };
    Ok(socket.addresses().0.unwrap_or_else(|| match socket.domain {
        libc::AF_INET6 => (Ipv6Addr::UNSPECIFIED, 0).into(),
        _ => (Ipv4Addr::UNSPECIFIED, 0).into(),
    }))
}

/// Returns the peer's address (`getpeername(2)`).
///
/// # Errors
/// EBADF, ENOTCONN.
pub fn peer_address(fd: RawFd) -> Result<SocketAddr> {
    match table::get(fd)? {
        Entry::Stream(socket) => {
            socket.with_state(|s| socket.pump(s, true));
            socket.addresses().1
        }
        Entry::Datagram(socket) => socket.peer_address(),
    }
}

/// Sets an option (`setsockopt(2)`, `rsocket(7)`).
///
/// # Errors
/// EBADF; EOPNOTSUPP if rsockets do not support the option; EINVAL.
pub fn set_option(fd: RawFd, level: c_int, name: c_int, value: &[u8]) -> Result<()> {
    match table::get(fd)? {
        Entry::Stream(socket) => options::set(&socket, level, name, value),
        Entry::Datagram(socket) => socket.set_option(level, name, value),
    }
}

/// Returns an option (`getsockopt(2)`) as the bytes of its C value.
///
/// # Errors
/// EBADF; EOPNOTSUPP if rsockets do not support the option.
pub fn get_option(fd: RawFd, level: c_int, name: c_int) -> Result<Vec<u8>> {
    match table::get(fd)? {
        Entry::Stream(socket) => options::get(&socket, level, name),
        Entry::Datagram(socket) => socket.get_option(level, name),
    }
}

/// `F_GETFL`, `F_SETFL`, `F_GETFD`, `F_SETFD` (`fcntl(2)`).
///
/// # Errors
/// EBADF; EOPNOTSUPP for other commands.
pub fn control(fd: RawFd, command: c_int, argument: c_int) -> Result<c_int> {
    let socket = match table::get(fd)? {
        Entry::Stream(socket) => socket,
        Entry::Datagram(socket) => return socket.control(command, argument),
    };
    socket.with_state(|s| {
        let o = &mut s.options;
        match command {
            libc::F_GETFL => Ok(libc::O_RDWR | if o.nonblocking { libc::O_NONBLOCK } else { 0 }),
            libc::F_SETFL => {
                o.nonblocking = argument & libc::O_NONBLOCK != 0;
                Ok(0)
            }
            libc::F_GETFD => Ok(if o.close_on_exec { libc::FD_CLOEXEC } else { 0 }),
            libc::F_SETFD => {
                o.close_on_exec = argument & libc::FD_CLOEXEC != 0;
                Ok(0)
            }
            _ => Err(Errno::NOTSUP),
        }
    })
}
