//! Functions that create, connect and accept sockets, and those for options and addresses.

use crate::api::{inside, is_inside, on_rsocket, rdma, real};
use crate::placeholder::{create_placeholder, to_tcp, tune};
use crate::{config, errno, fail, fork};
use libc::{c_int, c_void, sockaddr, socklen_t};

const FLAGS: c_int = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, ty: c_int, protocol: c_int) -> c_int {
    let stream =
        ty & !FLAGS == libc::SOCK_STREAM && (protocol == 0 || protocol == libc::IPPROTO_TCP);
    let inet = domain == libc::AF_INET || domain == libc::AF_INET6;
    if stream && inet && !is_inside() && config::admits(domain, ty & !FLAGS, protocol) {
        if fork::is_on() {
            // SAFETY: no pointers.
            let fd = unsafe { real::socket(domain, ty, protocol) };
            if fd >= 0 {
                fork::created(fd);
            }
            return fd;
        }
        let made = inside(|| {
            let rdma = rdma()?;
            // SAFETY: no pointers.
            let socket = unsafe { (rdma.socket)(domain, ty, protocol) };
            (socket >= 0).then(|| {
                tune(rdma, socket);
                create_placeholder(rdma, socket, ty)
            })
        });
        if let Some(fd) = made {
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
                fork::listens(fd);
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
    let taken = on_rsocket(fd, |r, s| {
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
    taken.unwrap_or_else(|| unsafe {
        let new = real::accept4(fd, addr, len, flags);
        fork::accepted(fd, new);
        new
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    let tried = on_rsocket(fd, |r, s| {
        // SAFETY: the contract of the C function.
        let result = unsafe { (r.connect)(s, addr, len) };
        let why = if result == 0 { 0 } else { errno() };
        match why {
            0 => Ok(0),
            libc::EINPROGRESS
            | libc::EALREADY
            | libc::EISCONN
            | libc::EINTR
            | libc::EBADF
            | libc::EFAULT => Ok(-1),
            // The peer does not speak RDMA; it may speak TCP.
            _ if to_tcp(r, fd, s) => Err(()),
            _ => Ok(fail(why)),
        }
    });
    match tried {
        Some(Ok(result)) => result,
        // SAFETY: the contract of the C function.
        None | Some(Err(())) => unsafe {
            let result = real::connect(fd, addr, len);
            if result == 0 || errno() == libc::EINPROGRESS {
                fork::connects(fd);
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
