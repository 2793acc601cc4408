//! Placeholders: descriptors of the program that represent rsockets. This file creates them, and
//! replaces them by ordinary sockets.
//!
//! This room uses `api` and `table`. `setup` uses it, and so does `fork` for connections that
//! become rsockets at their first use.

use crate::api::{Rdma, real};
use crate::{errno, fail, table};
use libc::{c_int, c_void, socklen_t};

const SOL_RDMA: c_int = 0x10000;

/// Creates a placeholder for an rsocket. On failure, closes the rsocket, sets `errno` and returns
/// -1.
pub(crate) fn create_placeholder(rdma: &Rdma, socket: c_int, flags: c_int) -> c_int {
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
    // SAFETY: both descriptors were just created, and the program does not know them.
    unsafe {
        if fd >= 0 {
            real::close(fd);
        }
        (rdma.close)(socket);
    }
    fail(reason)
}

/// Sets an rsocket's options from `RS_SQ_SIZE`, `RS_RQ_SIZE` and `RS_INLINE`. Ignores invalid
/// values.
pub(crate) fn apply_size_options(rdma: &Rdma, socket: c_int) {
    for (name, option) in [("RS_SQ_SIZE", 0), ("RS_RQ_SIZE", 1), ("RS_INLINE", 2)] {
        let value = std::env::var(name)
            .ok()
            .and_then(|v| v.parse::<c_int>().ok())
            .filter(|v| *v > 0);
        if let Some(value) = value {
            // SAFETY: the pointer is to an integer of 4 bytes.
            unsafe { (rdma.setsockopt)(socket, SOL_RDMA, option, (&raw const value).cast(), 4) };
        }
    }
}

/// Replaces the rsocket of `fd` by an ordinary socket with the same flags and common options.
/// Returns `false` on failure.
pub(crate) fn to_tcp(rdma: &Rdma, fd: c_int, socket: c_int) -> bool {
    // SAFETY: the pointers are to locals with their true lengths; this library owns the
    // descriptors.
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
            let value_ptr = (&raw mut value).cast::<c_void>();
            if (rdma.getsockopt)(socket, level, option, value_ptr, &raw mut len) == 0 && value != 0
            {
                real::setsockopt(tcp, level, option, value_ptr, 4);
            }
        }
        real::fcntl(tcp, libc::F_SETFL, (flags & libc::O_NONBLOCK).into());
        let replaced = real::dup3(
            tcp,
            fd,
            if cloexec & libc::FD_CLOEXEC != 0 {
                libc::O_CLOEXEC
            } else {
                0
            },
        );
        real::close(tcp);
        if replaced < 0 {
            return false;
        }
    }
    if let Some((socket, true)) = table::remove(fd) {
        // SAFETY: the rsocket has no placeholder any more.
        unsafe { (rdma.close)(socket) };
    }
    true
}

/// Makes the descriptor `fd` of an ordinary socket a placeholder for an rsocket. On failure, closes
/// the rsocket.
///
/// # Safety
/// Both descriptors are open.
pub(crate) unsafe fn become_rsocket(rdma: &Rdma, fd: c_int, socket: c_int) {
    // SAFETY: the descriptors are open, the path is valid, and the options have four bytes.
    unsafe {
        let mut value: c_int = 0;
        let mut len = 4;
        let value_ptr = (&raw mut value).cast::<c_void>();
        let (level, option) = (libc::IPPROTO_TCP, libc::TCP_NODELAY);
        if real::getsockopt(fd, level, option, value_ptr, &raw mut len) == 0 {
            (rdma.setsockopt)(socket, level, option, value_ptr, 4);
        }
        let keep_on_exec = real::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC == 0;
        let null = real::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC, 0);
        let flags = if keep_on_exec { 0 } else { libc::O_CLOEXEC };
        let replaced = null >= 0 && real::dup3(null, fd, flags) >= 0;
        if null >= 0 {
            real::close(null);
        }
        if !replaced || !table::insert(fd, socket) {
            (rdma.close)(socket);
        }
    }
}
