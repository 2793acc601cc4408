//! Functions that read and write.

use crate::api::{self, Rdma, real};
use crate::{errno, fail, fork, table};
use libc::{c_int, c_void, iovec, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};

/// As [`api::on_rsocket`], for functions that send or receive. If the connection becomes an rsocket
/// at its first use, creates that rsocket.
fn on_rsocket<R>(fd: c_int, f: impl FnOnce(&'static Rdma, c_int) -> R) -> Option<R> {
    fork::first_use(fd);
    api::on_rsocket(fd, f)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    unsafe {
        recvfrom(
            fd,
            buf,
            len,
            flags,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    addrlen: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe {
        (r.recvfrom)(s, buf, len, flags, addr, addrlen)
    })
    // SAFETY: as above.
    .unwrap_or_else(|| unsafe { real::recvfrom(fd, buf, len, flags, addr, addrlen) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.recvmsg)(s, msg, flags) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::recvmsg(fd, msg, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.recv)(s, buf, len, 0) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::read(fd, buf, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.readv)(s, iov, n) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::readv(fd, iov, n) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    unsafe { sendto(fd, buf, len, flags, std::ptr::null(), 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    addr: *const sockaddr,
    addrlen: socklen_t,
) -> ssize_t {
    // The kernel's stream sockets ignore an address, whereas rsockets refuse it.
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe {
        (r.sendto)(s, buf, len, flags, std::ptr::null(), 0)
    })
    // SAFETY: as above.
    .unwrap_or_else(|| unsafe { real::sendto(fd, buf, len, flags, addr, addrlen) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.sendmsg)(s, msg, flags) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::sendmsg(fd, msg, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.send)(s, buf, len, 0) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::write(fd, buf, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.writev)(s, iov, n) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::writev(fd, iov, n) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    fork::first_use(out);
    if table::find(out).is_none() {
        // SAFETY: the contract of the C function.
        return unsafe { real::sendfile(out, from, offset, count) };
    }
    let mut buffer = vec![0u8; count.min(64 * 1024)];
    let mut done: size_t = 0;
    while done < count {
        let want = buffer.len().min(count - done);
        // SAFETY: the contract of the C function. `want` bytes fit into the buffer.
        let (got, position) = unsafe {
            let position = match offset.is_null() {
                true => libc::lseek(from, 0, libc::SEEK_CUR),
                false => offset.read(),
            };
            (
                libc::pread(from, buffer.as_mut_ptr().cast(), want, position),
                position,
            )
        };
        let sent = match got {
            ..=0 => got,
            // SAFETY: as above.
            _ => unsafe { write(out, buffer.as_ptr().cast(), got as size_t) },
        };
        if sent <= 0 {
            return if done > 0 { done as ssize_t } else { sent };
        }
        let position = position + sent as off_t;
        // SAFETY: as above.
        unsafe {
            match offset.is_null() {
                true => drop(libc::lseek(from, position, libc::SEEK_SET)),
                false => offset.write(position),
            }
        }
        done += sent as size_t;
        if sent < got {
            break;
        }
    }
    done as ssize_t
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the contract of the C function.
    unsafe { sendfile(out, from, offset, count) }
}

/// Aborts if `len` bytes do not fit into the buffer. Programs built with `_FORTIFY_SOURCE` call
/// `__read_chk` and similar functions, which check this. The C library's versions would bypass this
/// library.
fn check_fits(len: size_t, buffer_len: size_t) {
    if len > buffer_len {
        eprintln!("iwarp: buffer overflow detected: {len} bytes into {buffer_len}");
        std::process::abort();
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    buffer_len: size_t,
) -> ssize_t {
    check_fits(len, buffer_len);
    // SAFETY: the contract of the C function.
    unsafe { read(fd, buf, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    buffer_len: size_t,
    flags: c_int,
) -> ssize_t {
    check_fits(len, buffer_len);
    // SAFETY: the contract of the C function.
    unsafe { recv(fd, buf, len, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    buffer_len: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    addrlen: *mut socklen_t,
) -> ssize_t {
    check_fits(len, buffer_len);
    // SAFETY: the contract of the C function.
    unsafe { recvfrom(fd, buf, len, flags, addr, addrlen) }
}

/// Returns the number of bytes that can be read without blocking, at most 64 KiB. On error, returns
/// -1 and sets `errno`.
pub(crate) fn readable_bytes(fd: c_int) -> c_int {
    let mut buffer = vec![0u8; 64 * 1024];
    // SAFETY: the pointer and the length are those of `buffer`.
    let n = unsafe {
        recv(
            fd,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            libc::MSG_PEEK | libc::MSG_DONTWAIT,
        )
    };
    match n {
        0.. => n as c_int,
        _ if errno() == libc::EAGAIN => 0,
        _ => fail(errno()),
    }
}
