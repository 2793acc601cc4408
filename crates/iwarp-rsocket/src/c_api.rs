//! The functions of `rdma/rsocket.h` with their C signatures: they return -1 and set `errno` on
//! failure, and never panic.
//!
//! This crate does not export them: `librdmacm.so.1` does, with symbol versions. `rfcntl` is
//! variadic in C; the 64-bit Linux ABIs that this library supports pass its integer or pointer like
//! a fixed argument.

#![allow(
    clippy::missing_safety_doc,
    reason = "the contracts are those of the C functions, in rsocket(7)"
)]
#![allow(missing_docs, reason = "rsocket(7)")]

use crate::cancel::Uncancelled;
use crate::errno::{Errno, Result};
use crate::poll::{Sets, poll, select};
use crate::table::{self, Entry};
use crate::{address, calls, repoll};
use libc::{
    c_int, c_long, c_void, epoll_event, fd_set, iovec, msghdr, nfds_t, off_t, pollfd, size_t,
    sockaddr, socklen_t, ssize_t,
};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// The maximum number of buffers in a vector, as in the kernel.
const IOV_MAX: usize = 1024;

fn catch<T>(failed: T, f: impl FnOnce() -> Result<T>) -> T {
    let _uncancelled = Uncancelled::new();
    match catch_unwind(AssertUnwindSafe(f)).unwrap_or(Err(Errno::IO)) {
        Ok(value) => value,
        Err(errno) => {
            errno.set();
            failed
        }
    }
}

fn code(f: impl FnOnce() -> Result<()>) -> c_int {
    catch(-1, || f().map(|()| 0))
}

fn count(f: impl FnOnce() -> Result<usize>) -> ssize_t {
    catch(-1, || f().map(|n| n as ssize_t))
}

unsafe fn bytes<'a>(from: *const c_void, len: size_t) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if from.is_null() || len > isize::MAX as usize {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the contract of the C function: `len` readable bytes.
    Ok(unsafe { std::slice::from_raw_parts(from.cast(), len) })
}

unsafe fn bytes_mut<'a>(to: *mut c_void, len: size_t) -> Result<&'a mut [u8]> {
    if len == 0 {
        return Ok(&mut []);
    }
    if to.is_null() || len > isize::MAX as usize {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the contract of the C function: `len` writable bytes.
    Ok(unsafe { std::slice::from_raw_parts_mut(to.cast(), len) })
}

/// Returns the elements of the program's vector. Their number has a different type in some
/// functions and C libraries.
unsafe fn iovecs<'a>(iov: *const iovec, n: impl TryInto<usize>) -> Result<&'a [iovec]> {
    let n = n.try_into().map_err(|_| Errno::INVAL)?;
    if n > IOV_MAX {
        return Err(Errno::INVAL);
    }
    if n == 0 {
        return Ok(&[]);
    }
    if iov.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the contract of the C function: `n` vectors.
    Ok(unsafe { std::slice::from_raw_parts(iov, n) })
}

unsafe fn send_iovecs(
    fd: c_int,
    iov: *const iovec,
    n: impl TryInto<usize>,
    flags: c_int,
) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    let iov = unsafe { iovecs(iov, n) }?;
    let data: Result<Vec<&[u8]>> = iov
        .iter()
        // SAFETY: each vector describes readable bytes.
        .map(|v| unsafe { bytes(v.iov_base, v.iov_len) })
        .collect();
    calls::send_vectored(fd, &data?, flags)
}

unsafe fn recv_iovecs(
    fd: c_int,
    iov: *const iovec,
    n: impl TryInto<usize>,
    flags: c_int,
) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    let iov = unsafe { iovecs(iov, n) }?;
    let buffers: Result<Vec<&mut [u8]>> = iov
        .iter()
        // SAFETY: each vector describes writable bytes.
        .map(|v| unsafe { bytes_mut(v.iov_base, v.iov_len) })
        .collect();
    calls::recv_vectored(fd, &mut buffers?, flags)
}

pub unsafe extern "C" fn rsocket(domain: c_int, ty: c_int, protocol: c_int) -> c_int {
    catch(-1, || calls::socket(domain, ty, protocol))
}

pub unsafe extern "C" fn rbind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the contract of the C function.
    code(|| calls::bind(fd, unsafe { address::read(addr, len) }?))
}

pub unsafe extern "C" fn rlisten(fd: c_int, backlog: c_int) -> c_int {
    code(|| calls::listen(fd, backlog))
}

pub unsafe extern "C" fn raccept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    catch(-1, || {
        let (new, peer) = calls::accept(fd)?;
        if let Some(peer) = peer {
            // SAFETY: the contract of the C function.
            unsafe { address::write(peer, addr, len) };
        }
        Ok(new)
    })
}

pub unsafe extern "C" fn rconnect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    code(|| {
        if let Entry::Datagram(socket) = table::get(fd)? {
            // SAFETY: the contract of the C function.
            return unsafe { socket.connect_raw(addr, len) };
        }
        // SAFETY: the contract of the C function.
        calls::connect(fd, unsafe { address::read(addr, len) }?)
    })
}

pub unsafe extern "C" fn rshutdown(fd: c_int, how: c_int) -> c_int {
    code(|| calls::shutdown(fd, how))
}

pub unsafe extern "C" fn rclose(fd: c_int) -> c_int {
    code(|| calls::close(fd))
}

pub unsafe extern "C" fn rrecv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    count(|| calls::recv(fd, unsafe { bytes_mut(buf, len) }?, flags))
}

pub unsafe extern "C" fn rrecvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    addrlen: *mut socklen_t,
) -> ssize_t {
    count(|| {
        // SAFETY: the contract of the C function.
        let (n, from) = calls::recv_from(fd, unsafe { bytes_mut(buf, len) }?, flags)?;
        if let Some(from) = from {
            // SAFETY: the contract of the C function.
            unsafe { address::write(from, addr, addrlen) };
        }
        Ok(n)
    })
}

pub unsafe extern "C" fn rrecvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    count(|| {
        // SAFETY: the contract of the C function.
        let msg = unsafe { msg.as_mut() }.ok_or(Errno(libc::EFAULT))?;
        if let Entry::Datagram(socket) = table::get(fd)? {
            // SAFETY: the contract of the C function.
            return unsafe { socket.receive_raw(msg, flags) };
        }
        if !msg.msg_control.is_null() && msg.msg_controllen > 0 {
            return Err(Errno::NOTSUP);
        }
        // SAFETY: the contract of the C function.
        let n = unsafe { recv_iovecs(fd, msg.msg_iov, msg.msg_iovlen, flags) }?;
        // A stream has neither addresses nor control data.
        (msg.msg_namelen, msg.msg_controllen, msg.msg_flags) = (0, 0, 0);
        Ok(n)
    })
}

pub unsafe extern "C" fn rread(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    if len == 0 && matches!(table::get(fd), Ok(Entry::Datagram(_))) {
        // Unlike `recv(2)`, a `read(2)` of zero bytes leaves the datagram in the queue.
        return 0;
    }
    // SAFETY: the contract of the C function.
    unsafe { rrecv(fd, buf, len, 0) }
}

pub unsafe extern "C" fn rreadv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    count(|| unsafe { recv_iovecs(fd, iov, n, 0) })
}

pub unsafe extern "C" fn rsend(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the contract of the C function.
    count(|| calls::send(fd, unsafe { bytes(buf, len) }?, flags))
}

pub unsafe extern "C" fn rsendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    tolen: socklen_t,
) -> ssize_t {
    count(|| {
        // SAFETY: the contract of the C function.
        let data = unsafe { bytes(buf, len) }?;
        match table::get(fd)? {
            Entry::Stream(_) if !to.is_null() || tolen != 0 => Err(Errno::ISCONN),
            Entry::Datagram(_) if !to.is_null() => {
                // SAFETY: the contract of the C function.
                let to = unsafe { address::read(to, tolen) }?;
                calls::send_to(fd, data, flags, to)
            }
            _ => calls::send(fd, data, flags),
        }
    })
}

pub unsafe extern "C" fn rsendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    count(|| {
        // SAFETY: the contract of the C function.
        let msg = unsafe { msg.as_ref() }.ok_or(Errno(libc::EFAULT))?;
        if let Entry::Datagram(socket) = table::get(fd)? {
            // SAFETY: the contract of the C function.
            return unsafe { socket.send_raw(msg, flags) };
        }
        if !msg.msg_control.is_null() && msg.msg_controllen > 0 {
            return Err(Errno::NOTSUP);
        }
        // SAFETY: the contract of the C function.
        unsafe { send_iovecs(fd, msg.msg_iov, msg.msg_iovlen, flags) }
    })
}

pub unsafe extern "C" fn rwrite(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the contract of the C function.
    unsafe { rsend(fd, buf, len, 0) }
}

pub unsafe extern "C" fn rwritev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    count(|| unsafe { send_iovecs(fd, iov, n, 0) })
}

pub unsafe extern "C" fn rpoll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int {
    catch(-1, || {
        let fds = match (n, fds.is_null()) {
            (0, _) => &mut [][..],
            (_, true) => return Err(Errno(libc::EFAULT)),
            // SAFETY: the contract of the C function.
            (n, false) => unsafe { std::slice::from_raw_parts_mut(fds, n as usize) },
        };
        let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
        Ok(poll(fds, timeout)? as c_int)
    })
}

pub unsafe extern "C" fn repoll_create(flags: c_int) -> c_int {
    catch(-1, || repoll::create(flags))
}

pub unsafe extern "C" fn repoll_ctl(
    set: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the contract of the C function.
    code(|| repoll::control(set, op, fd, unsafe { event.as_ref() }))
}

pub unsafe extern "C" fn repoll_wait(
    set: c_int,
    to: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    catch(-1, || {
        let max = usize::try_from(max).map_err(|_| Errno::INVAL)?;
        let to = match to.is_null() {
            true => return Err(Errno(libc::EFAULT)),
            // SAFETY: the contract of the C function: room for `max` events.
            false => unsafe { std::slice::from_raw_parts_mut(to, max) },
        };
        let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
        Ok(repoll::wait(set, to, timeout)? as c_int)
    })
}

pub unsafe extern "C" fn rselect(
    n: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut libc::timeval,
) -> c_int {
    catch(-1, || {
        // SAFETY: the contract of the C function.
        let timeout = match unsafe { timeout.as_ref() } {
            None => None,
            Some(t) => {
                let bad = |_| Errno::INVAL;
                let (s, us) = (
                    u64::try_from(t.tv_sec).map_err(bad)?,
                    u64::try_from(t.tv_usec).map_err(bad)?,
                );
                Some(Duration::from_secs(s).saturating_add(Duration::from_micros(us)))
            }
        };
        // SAFETY: the contract of the C function.
        Ok(unsafe {
            select(
                n,
                Sets {
                    read,
                    write,
                    except,
                },
                timeout,
            )
        }? as c_int)
    })
}

unsafe fn write_address(
    addr: *mut sockaddr,
    len: *mut socklen_t,
    get: impl FnOnce() -> Result<SocketAddr>,
) -> c_int {
    code(|| {
        let address = get()?;
        if len.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        // SAFETY: the contract of the C function.
        unsafe { address::write(address, addr, len) };
        Ok(())
    })
}

pub unsafe extern "C" fn rgetpeername(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe { write_address(addr, len, || calls::peer_address(fd)) }
}

pub unsafe extern "C" fn rgetsockname(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe { write_address(addr, len, || calls::local_address(fd)) }
}

pub unsafe extern "C" fn rsetsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    code(|| calls::set_option(fd, level, option, unsafe { bytes(value, len as usize) }?))
}

pub unsafe extern "C" fn rgetsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    code(|| {
        let got = calls::get_option(fd, level, option)?;
        // SAFETY: the contract of the C function.
        let room = unsafe { len.as_mut() }.ok_or(Errno(libc::EFAULT))?;
        let n = got.len().min(*room as usize);
        // SAFETY: the contract of the C function.
        unsafe { bytes_mut(value, n) }?.copy_from_slice(&got[..n]);
        *room = n as socklen_t;
        Ok(())
    })
}

pub unsafe extern "C" fn rfcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    catch(-1, || calls::control(fd, command, argument as c_int))
}

pub unsafe extern "C" fn riomap(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    prot: c_int,
    _flags: c_int,
    offset: off_t,
) -> off_t {
    catch(-1, || {
        if prot & !(libc::PROT_WRITE | libc::PROT_NONE) != 0 {
            return Err(Errno::INVAL);
        }
        let offset = (offset != -1).then_some(offset as u64);
        // SAFETY: the contract of the C function, which is that of `calls::iomap`.
        let got =
            unsafe { calls::iomap(fd, buf.cast(), len, prot & libc::PROT_WRITE != 0, offset) }?;
        Ok(got as off_t)
    })
}

pub unsafe extern "C" fn riounmap(fd: c_int, buf: *mut c_void, len: size_t) -> c_int {
    code(|| calls::iounmap(fd, buf.cast(), len))
}

pub unsafe extern "C" fn riowrite(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    offset: off_t,
    flags: c_int,
) -> size_t {
    catch(usize::MAX, || {
        // SAFETY: the contract of the C function.
        calls::iowrite(fd, unsafe { bytes(buf, len) }?, offset as u64, flags)
    })
}
