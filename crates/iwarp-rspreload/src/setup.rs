//! Functions that create, connect and accept sockets, and that get and set options and addresses.

use crate::api::{bypassed, is_bypassed, on_rsocket, rdma, real};
use crate::placeholder::{apply_size_options, create_placeholder, to_tcp};
use crate::{config, connecting, errno, fail, fork};
use libc::{c_int, c_void, sockaddr, socklen_t};

const FLAGS: c_int = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, ty: c_int, protocol: c_int) -> c_int {
    let stream =
        ty & !FLAGS == libc::SOCK_STREAM && (protocol == 0 || protocol == libc::IPPROTO_TCP);
    let inet = domain == libc::AF_INET || domain == libc::AF_INET6;
    if stream && inet && !is_bypassed() && config::selects(domain, ty & !FLAGS, protocol) {
        if fork::is_on() {
            // SAFETY: no pointers.
            let fd = unsafe { real::socket(domain, ty, protocol) };
            if fd >= 0 {
                fork::set_new(fd);
            }
            return fd;
        }
        let socket_fd = bypassed(|| {
            let rdma = rdma()?;
            // SAFETY: no pointers.
            let socket = unsafe { (rdma.socket)(domain, ty, protocol) };
            (socket >= 0).then(|| {
                apply_size_options(rdma, socket);
                create_placeholder(rdma, socket, ty)
            })
        });
        if let Some(fd) = socket_fd {
            return fd;
        }
    }
    // SAFETY: as above.
    unsafe { real::socket(domain, ty, protocol) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.bind)(s, addr, len) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::bind(fd, addr, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.listen)(s, backlog) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe {
            let result = real::listen(fd, backlog);
            if result == 0 {
                fork::set_listening(fd);
            }
            result
        })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe { accept4(fd, addr, len, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let accepted = on_rsocket(fd, |r, s| {
        if flags & !FLAGS != 0 {
            return fail(libc::EINVAL);
        }
        // SAFETY: the contract of the C function.
        let new = unsafe { (r.accept)(s, addr, len) };
        if new < 0 {
            return new;
        }
        if flags & libc::SOCK_NONBLOCK != 0 {
            // SAFETY: no pointers.
            unsafe { (r.fcntl)(new, libc::F_SETFL, libc::O_NONBLOCK.into()) };
        }
        create_placeholder(r, new, flags)
    });
    // SAFETY: the contract of the C function.
    accepted.unwrap_or_else(|| unsafe {
        let new = real::accept4(fd, addr, len, flags);
        fork::set_accepted(fd, new);
        new
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    let connected = on_rsocket(fd, |r, s| {
        // SAFETY: the contract of the C function.
        let result = unsafe { (r.connect)(s, addr, len) };
        let error = if result == 0 { 0 } else { errno() };
        match error {
            0 => Ok(0),
            libc::EINPROGRESS => {
                // SAFETY: as above.
                unsafe { connecting::begin(fd, addr, len) };
                Ok(fail(error))
            }
            libc::EALREADY | libc::EISCONN | libc::EINTR | libc::EBADF | libc::EFAULT => Ok(-1),
            // The peer is not an rsocket; it may be a TCP server.
            _ if to_tcp(r, fd, s) => Err(()),
            _ => Ok(fail(error)),
        }
    });
    match connected {
        Some(Ok(result)) => result,
        // SAFETY: the contract of the C function.
        None | Some(Err(())) => unsafe {
            let result = real::connect(fd, addr, len);
            if result == 0 || errno() == libc::EINPROGRESS {
                fork::set_connected(fd);
            }
            result
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    // SAFETY: no pointers.
    on_rsocket(fd, |r, s| unsafe { (r.shutdown)(s, how) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::shutdown(fd, how) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR)
        && !value.is_null()
        // SAFETY: the contract of the C function: null, or valid.
        && let Some(len) = unsafe { len.as_mut() }
        && *len >= 4
        && let Some(error) = connecting::take_error(fd)
    {
        *len = 4;
        // SAFETY: there is room for 4 bytes.
        unsafe { value.cast::<c_int>().write_unaligned(error) };
        return 0;
    }
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe {
        (r.getsockopt)(s, level, name, value, len)
    })
    // SAFETY: as above.
    .unwrap_or_else(|| unsafe { real::getsockopt(fd, level, name, value, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe {
        (r.setsockopt)(s, level, name, value, len)
    })
    // SAFETY: as above.
    .unwrap_or_else(|| unsafe { real::setsockopt(fd, level, name, value, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.getpeername)(s, addr, len) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::getpeername(fd, addr, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the contract of the C function.
    on_rsocket(fd, |r, s| unsafe { (r.getsockname)(s, addr, len) })
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { real::getsockname(fd, addr, len) })
}
