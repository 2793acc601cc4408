//! The calls on sockets by number, as a program sees them.

use crate::errno::{Errno, Result};
use crate::options::{self, Options};
use crate::socket::{Phase, Socket, State, last_goodbyes};
use crate::stream::Gather;
use crate::{fork, repoll, table};
use libc::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::{Arc, Once};

/// Creates a stream socket (`socket(2)`). `SOCK_NONBLOCK` and `SOCK_CLOEXEC` may be added to the type.
///
/// # Errors
/// EAFNOSUPPORT: neither IPv4 nor IPv6. EPROTONOSUPPORT: not a stream; rsockets of datagrams need unreliable
/// queue pairs, which iWARP does not have. EMFILE.
pub fn socket(domain: c_int, ty: c_int, protocol: c_int) -> Result<RawFd> {
    if domain != libc::AF_INET && domain != libc::AF_INET6 {
        return Err(Errno(libc::EAFNOSUPPORT));
    }
    let kind = ty & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    if kind != libc::SOCK_STREAM || (protocol != 0 && protocol != libc::IPPROTO_TCP) {
        return Err(Errno(libc::EPROTONOSUPPORT));
    }
    prepare();
    let options = Options::new(ty & libc::SOCK_NONBLOCK != 0, ty & libc::SOCK_CLOEXEC != 0);
    Ok(table::insert(Arc::new(Socket::create(domain, options)?)))
}

/// Done once for a process.
fn prepare() {
    static ONCE: Once = Once::new();
    fork::install();
    ONCE.call_once(|| {
        // SAFETY: the function lives as long as the program.
        unsafe { libc::atexit(at_exit) };
    });
}

extern "C" fn at_exit() {
    // A panic must not unwind into the C library.
    let _ = std::panic::catch_unwind(|| last_goodbyes(table::all()));
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
    table::get(fd)?.bind(address)
}

/// Listens (`listen(2)`).
///
/// # Errors
/// EBADF, EINVAL, EADDRINUSE.
pub fn listen(fd: RawFd, backlog: c_int) -> Result<()> {
    table::get(fd)?.listen(backlog)
}

/// Accepts a connection (`accept(2)`), and returns the peer's address with it.
///
/// # Errors
/// EBADF, EINVAL, EAGAIN, EINTR.
pub fn accept(fd: RawFd) -> Result<(RawFd, Option<SocketAddr>)> {
    let socket = table::get(fd)?.accept()?;
    let peer = socket.addresses().1.ok();
    Ok((table::insert(socket), peer))
}

/// Connects (`connect(2)`).
///
/// # Errors
/// EBADF, EINPROGRESS, EALREADY, EISCONN, ECONNREFUSED, ETIMEDOUT, ENETUNREACH, ENODEV, EPROTO, EINTR.
pub fn connect(fd: RawFd, address: SocketAddr) -> Result<()> {
    table::get(fd)?.connect(address)
}

/// Closes one or both directions (`shutdown(2)`).
///
/// # Errors
/// EBADF, ENOTCONN, EINVAL.
pub fn shutdown(fd: RawFd, how: c_int) -> Result<()> {
    table::get(fd)?.shutdown(how)
}

/// Closes (`close(2)`). What was sent still arrives; the call blocks until it is on its way.
///
/// # Errors
/// EBADF.
pub fn close(fd: RawFd) -> Result<()> {
    let Ok(socket) = table::remove(fd) else {
        return repoll::close(fd);
    };
    if socket.is_foreign() {
        // The socket belongs to the parent: threads that are not here may hold its locks, and its peer must not notice anything.
        std::mem::forget(socket);
        // SAFETY: nobody in this process uses the number any more.
        unsafe { libc::close(fd) };
        return Ok(());
    }
    socket.close();
    Ok(())
}

/// Receives (`recv(2)`), with `MSG_PEEK`, `MSG_DONTWAIT`, `MSG_WAITALL`. Returns zero at the end of the stream.
///
/// # Errors
/// EBADF, ENOTCONN, EAGAIN, EINTR, ECONNRESET, EOPNOTSUPP (`MSG_OOB`).
pub fn recv(fd: RawFd, out: &mut [u8], flags: c_int) -> Result<usize> {
    recv_vectored(fd, &mut [out], flags)
}

/// As [`recv`], into several buffers.
///
/// # Errors
/// As [`recv`].
pub fn recv_vectored(fd: RawFd, out: &mut [&mut [u8]], flags: c_int) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::NOTSUP);
    }
    let socket = table::get(fd)?;
    let peek = flags & libc::MSG_PEEK != 0;
    let total: usize = out.iter().map(|o| o.len()).sum();
    let all = flags & libc::MSG_WAITALL != 0;
    let (nonblocking, timeout) =
        socket.with_state(|s| (s.options.nonblocking, s.options.receive_timeout));
    let wait = !nonblocking && flags & libc::MSG_DONTWAIT == 0;
    let mut done = 0;
    let result = socket.until(wait, timeout, |s| {
        let stream = match s.stream() {
            Ok(stream) => stream,
            // Not connected yet: the same as if nothing had come.
            Err(Errno::AGAIN) => return None,
            Err(e) => return Some(Err(e)),
        };
        if total == 0 {
            return Some(Ok(()));
        }
        if peek {
            // Returns all, or what there is, and leaves it in the buffer.
            let most = total.min(stream.sizes().receive_buffer as usize / 2);
            let enough = !all || stream.available() as usize >= most || stream.is_at_end();
            if !enough {
                return None;
            }
        }
        loop {
            let place = place_at(out, done);
            if place.is_empty() {
                return Some(Ok(()));
            }
            match stream.receive(place, peek) {
                Ok(0) => return Some(Ok(())),
                Ok(n) => done += n,
                Err(Errno::AGAIN) if done > 0 && !all => return Some(Ok(())),
                Err(Errno::AGAIN) => return None,
                Err(e) => return Some(Err(e)),
            }
            if peek {
                return Some(Ok(()));
            }
        }
    });
    match result {
        Err(_) if done > 0 => Ok(done),
        Err(e) => Err(e),
        Ok(()) => Ok(done),
    }
}

/// Returns where octet number `at` goes, and the rest of that buffer.
fn place_at<'a>(out: &'a mut [&mut [u8]], mut at: usize) -> &'a mut [u8] {
    for place in out {
        if at < place.len() {
            return &mut place[at..];
        }
        at -= place.len();
    }
    &mut []
}

/// Sends (`send(2)`), with `MSG_DONTWAIT`. It never raises `SIGPIPE`.
///
/// # Errors
/// EBADF, ENOTCONN, EAGAIN, EINTR, EPIPE, ECONNRESET, EOPNOTSUPP (`MSG_OOB`).
pub fn send(fd: RawFd, data: &[u8], flags: c_int) -> Result<usize> {
    send_vectored(fd, &[data], flags)
}

/// As [`send`], from several buffers.
///
/// # Errors
/// As [`send`].
pub fn send_vectored(fd: RawFd, data: &[&[u8]], flags: c_int) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::NOTSUP);
    }
    let socket = table::get(fd)?;
    let mut data = Gather::new(data);
    let total = data.left();
    let result = until_sent(&socket, flags, |s| {
        s.stream()?.send(&mut data)?;
        Ok(data.left() == 0)
    });
    finished(result, total - data.left())
}

/// Repeats `step` while it returns "not all" or EAGAIN and the caller wants to wait.
fn until_sent(
    socket: &Socket,
    flags: c_int,
    mut step: impl FnMut(&mut State) -> Result<bool>,
) -> Result<()> {
    let (nonblocking, timeout) =
        socket.with_state(|s| (s.options.nonblocking, s.options.send_timeout));
    let wait = !nonblocking && flags & libc::MSG_DONTWAIT == 0;
    socket.until(wait, timeout, |s| match step(s) {
        Ok(true) => Some(Ok(())),
        Ok(false) | Err(Errno::AGAIN) => None,
        Err(e) => Some(Err(e)),
    })
}

fn finished(result: Result<()>, done: usize) -> Result<usize> {
    match result {
        Err(e) if done == 0 => Err(e),
        _ => Ok(done),
    }
}

/// Maps a buffer for the peer's direct Writes (`riomap`); if `writable` is `false` it only registers the buffer. Returns
/// the offset that the peer writes to: the given one, or the buffer's address.
///
/// # Errors
/// EBADF, EINVAL: not connected or a bad length, ENOMEM: the peer has no room (`RDMA_IOMAPSIZE`), EFAULT.
///
/// # Safety
/// The buffer stays mapped until [`iounmap`] or [`close`] has returned. The peer may change it at any time, so the
/// program must read it in a way that allows for that.
pub unsafe fn iomap(
    fd: RawFd,
    buffer: *mut u8,
    len: usize,
    writable: bool,
    offset: Option<u64>,
) -> Result<u64> {
    table::get(fd)?.with_state(|s| {
        let Phase::Connected(stream) = &mut s.phase else {
            return Err(Errno::INVAL);
        };
        // SAFETY: the caller's promise.
        let offset = unsafe { stream.map(buffer as u64, len, writable, offset) }?;
        stream.send_mappings();
        Ok(offset)
    })
}

/// Ends a mapping (`riounmap`). When this returns, nothing writes to the buffer any more.
///
/// # Errors
/// EBADF, EINVAL: no such mapping.
pub fn iounmap(fd: RawFd, buffer: *mut u8, len: usize) -> Result<()> {
    table::get(fd)?.with_state(|s| match &mut s.phase {
        Phase::Connected(stream) => stream.unmap(buffer as u64, len),
        _ => Err(Errno::INVAL),
    })
}

/// Writes into a buffer that the peer has mapped (`riowrite`). If it returns less than asked for, the rest is not mapped,
/// or the socket is nonblocking and there was no more room.
///
/// # Errors
/// As [`send`].
pub fn iowrite(fd: RawFd, data: &[u8], offset: u64, flags: c_int) -> Result<usize> {
    let socket = table::get(fd)?;
    let pieces = [data];
    let mut rest = Gather::new(&pieces);
    let mut at = offset;
    let result = until_sent(&socket, flags, |s| {
        let left = rest.left();
        // Nothing was done, and there was no error: the range is not mapped.
        let n = s.stream()?.write_mapped(&mut rest, &mut at)?;
        Ok(n == 0 || n == left)
    });
    finished(result, data.len() - rest.left())
}

/// The socket's own address (`getsockname(2)`).
///
/// # Errors
/// EBADF.
pub fn local_address(fd: RawFd) -> Result<SocketAddr> {
    let socket = table::get(fd)?;
    Ok(socket.addresses().0.unwrap_or_else(|| match socket.domain {
        libc::AF_INET6 => (Ipv6Addr::UNSPECIFIED, 0).into(),
        _ => (Ipv4Addr::UNSPECIFIED, 0).into(),
    }))
}

/// The peer's address (`getpeername(2)`).
///
/// # Errors
/// EBADF, ENOTCONN.
pub fn peer_address(fd: RawFd) -> Result<SocketAddr> {
    let socket = table::get(fd)?;
    socket.with_state(|s| socket.pump(s, true));
    socket.addresses().1
}

/// Sets an option (`setsockopt(2)`, `rsocket(7)`).
///
/// # Errors
/// EBADF, ENOPROTOOPT, EINVAL.
pub fn set_option(fd: RawFd, level: c_int, name: c_int, value: &[u8]) -> Result<()> {
    options::set(&table::get(fd)?, level, name, value)
}

/// Gets an option (`getsockopt(2)`), as the octets that C programs expect.
///
/// # Errors
/// EBADF, ENOPROTOOPT.
pub fn get_option(fd: RawFd, level: c_int, name: c_int) -> Result<Vec<u8>> {
    options::get(&*table::get(fd)?, level, name)
}

/// `F_GETFL`, `F_SETFL`, `F_GETFD`, `F_SETFD` (`fcntl(2)`).
///
/// # Errors
/// EBADF, EINVAL: another command.
pub fn control(fd: RawFd, command: c_int, argument: c_int) -> Result<c_int> {
    table::get(fd)?.with_state(|s| {
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
            _ => Err(Errno::INVAL),
        }
    })
}
