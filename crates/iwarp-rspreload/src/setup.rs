//! Functions that create, connect and accept sockets, and those for options and addresses.

use crate::api::{Rdma, inside, is_inside, on_rsocket, rdma, real};
use crate::{config, errno, fail, fork, table};
use libc::{c_int, c_void, sockaddr, socklen_t};

const FLAGS: c_int = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
const SOL_RDMA: c_int = 0x10000;

/// Creates a descriptor of the program that stands for an rsocket. If that fails, closes the rsocket, sets `errno` and returns -1.
fn stand_in(rdma: &Rdma, socket: c_int, flags: c_int) -> c_int {
    let cloexec = if flags & libc::SOCK_CLOEXEC != 0 {
        libc::O_CLOEXEC
    } else {
        0
    };
    // SAFETY: the path is valid.
    let fd = unsafe { real::open(c"/dev/null".as_ptr(), libc::O_RDWR | cloexec, 0) };
    if fd >= 0 && table::insert(fd, socket) {
        return fd;
    }
    let reason = if fd < 0 { errno() } else { libc::EMFILE };
    // SAFETY: both were just created, and the program does not know them.
    unsafe {
        if fd >= 0 {
            real::close(fd);
        }
        (rdma.close)(socket);
    }
    fail(reason)
}

/// Sets the options of an rsocket from `RS_SQ_SIZE`, `RS_RQ_SIZE` and `RS_INLINE`. A value that is invalid or refused is ignored.
pub(crate) fn tune(rdma: &Rdma, socket: c_int) {
    for (name, option) in [("RS_SQ_SIZE", 0), ("RS_RQ_SIZE", 1), ("RS_INLINE", 2)] {
        let value = std::env::var(name)
            .ok()
            .and_then(|v| v.parse::<c_int>().ok())
            .filter(|v| *v > 0);
        if let Some(value) = value {
            // SAFETY: the pointer is to a valid integer of 4 octets.
            unsafe { (rdma.setsockopt)(socket, SOL_RDMA, option, (&raw const value).cast(), 4) };
        }
    }
}

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
                stand_in(rdma, socket, ty)
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
        stand_in(r, new, flags)
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
            // The peer does not speak RDMA; perhaps it speaks TCP.
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

/// Replaces the rsocket behind `fd` by an ordinary socket with the same flags and common options. Returns `false` if that fails.
fn to_tcp(rdma: &Rdma, fd: c_int, socket: c_int) -> bool {
    // SAFETY: the pointers are to valid locals with their true lengths. The descriptors belong to this library.
    unsafe {
        let mut name: libc::sockaddr_storage = std::mem::zeroed();
        let mut len = size_of_val(&name) as socklen_t;
        if (rdma.getsockname)(socket, (&raw mut name).cast(), &raw mut len) != 0 {
            return false;
        }
        let flags = (rdma.fcntl)(socket, libc::F_GETFL, 0);
        let tcp = real::socket(name.ss_family.into(), libc::SOCK_STREAM, 0);
        if tcp < 0 {
            return false;
        }
        let cloexec = real::fcntl(fd, libc::F_GETFD, 0);
        for (level, option) in [
            (libc::SOL_SOCKET, libc::SO_REUSEADDR),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY),
        ] {
            let mut value: c_int = 0;
            let mut len = 4;
            let place = (&raw mut value).cast::<c_void>();
            if (rdma.getsockopt)(socket, level, option, place, &raw mut len) == 0 && value != 0 {
                real::setsockopt(tcp, level, option, place, 4);
            }
        }
        real::fcntl(tcp, libc::F_SETFL, (flags & libc::O_NONBLOCK).into());
        let placed = real::dup3(
            tcp,
            fd,
            if cloexec & libc::FD_CLOEXEC != 0 {
                libc::O_CLOEXEC
            } else {
                0
            },
        );
        real::close(tcp);
        if placed < 0 {
            return false;
        }
    }
    if let Some((socket, true)) = table::remove(fd) {
        // SAFETY: no descriptor stands for the rsocket any more.
        unsafe { (rdma.close)(socket) };
    }
    true
}

/// Makes the descriptor of an ordinary socket stand for an rsocket. The rsocket is closed if that fails.
///
/// # Safety
/// Both are open.
pub(crate) unsafe fn become_rsocket(rdma: &Rdma, fd: c_int, socket: c_int) {
    // SAFETY: the descriptors are open, and the path is valid. The options have four octets.
    unsafe {
        let mut value: c_int = 0;
        let mut len = 4;
        let place = (&raw mut value).cast::<c_void>();
        let (level, option) = (libc::IPPROTO_TCP, libc::TCP_NODELAY);
        if real::getsockopt(fd, level, option, place, &raw mut len) == 0 {
            (rdma.setsockopt)(socket, level, option, place, 4);
        }
        let keeps = real::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC == 0;
        let null = real::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC, 0);
        let flags = if keeps { 0 } else { libc::O_CLOEXEC };
        let placed = null >= 0 && real::dup3(null, fd, flags) >= 0;
        if null >= 0 {
            real::close(null);
        }
        if !placed || !table::insert(fd, socket) {
            (rdma.close)(socket);
        }
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
