//! The functions that this library calls: the C library's, and librdmacm's rsocket functions.
//!
//! Invariant of the `unsafe` code: `dlsym` returns the function with the given name, and the type
//! declared here is the type in its manual page.

use libc::{
    c_char, c_int, c_long, c_void, epoll_event, fd_set, iovec, msghdr, nfds_t, off_t, pollfd,
    sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use std::cell::Cell;
use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`. While it runs, this thread creates ordinary sockets. All calls of librdmacm need this,
/// because librdmacm uses ordinary sockets.
pub(crate) fn bypassed<R>(f: impl FnOnce() -> R) -> R {
    let before = INSIDE.replace(true);
    let result = f();
    INSIDE.set(before);
    result
}

/// Returns `true` if this thread must create ordinary sockets: it is in [`bypassed`], or it is a
/// thread of librdmacm.
pub(crate) fn is_bypassed() -> bool {
    if INSIDE.get() {
        return true;
    }
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(b"iwarp-")
}

/// Returns the next library's function of this name, or null. Stores it in `cache`.
fn next_symbol(cache: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = cache.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name is valid. RTLD_NEXT searches the libraries after this one.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    cache.store(found, Ordering::Release);
    found
}

macro_rules! c_library {
    ($($name:ident, $text:literal, ($($arg:ident: $t:ty),*) -> $r:ty;)*) => {
        pub(crate) mod real {
            use super::*;
            $(
                pub(crate) unsafe fn $name($($arg: $t),*) -> $r {
                    static CACHE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
                    let f = next_symbol(&CACHE, $text);
                    if f.is_null() {
                        return crate::fail(libc::ENOSYS) as $r;
                    }
                    // SAFETY: see the invariant at the top of the file.
                    let f: unsafe extern "C" fn($($t),*) -> $r = unsafe { std::mem::transmute(f) };
                    // SAFETY: guaranteed by the caller.
                    unsafe { f($($arg),*) }
                }
            )*
        }
    };
}

c_library! {
    socket, c"socket", (domain: c_int, ty: c_int, protocol: c_int) -> c_int;
    bind, c"bind", (fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    listen, c"listen", (fd: c_int, backlog: c_int) -> c_int;
    accept4, c"accept4",
        (fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    connect, c"connect", (fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    shutdown, c"shutdown", (fd: c_int, how: c_int) -> c_int;
    close, c"close", (fd: c_int) -> c_int;
    recvfrom, c"recvfrom",
        (fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, addr: *mut sockaddr,
         alen: *mut socklen_t) -> ssize_t;
    recvmsg, c"recvmsg", (fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t;
    read, c"read", (fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    readv, c"readv", (fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    sendto, c"sendto",
        (fd: c_int, buf: *const c_void, len: size_t, flags: c_int, addr: *const sockaddr,
         alen: socklen_t) -> ssize_t;
    sendmsg, c"sendmsg", (fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t;
    write, c"write", (fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    writev, c"writev", (fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    sendfile, c"sendfile64",
        (out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    poll, c"poll", (fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int;
    ppoll, c"ppoll",
        (fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    select, c"select",
        (n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *mut timeval) -> c_int;
    pselect, c"pselect",
        (n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *const timespec,
         mask: *const sigset_t) -> c_int;
    fcntl, c"fcntl64", (fd: c_int, command: c_int, argument: c_long) -> c_int;
    ioctl, c"ioctl", (fd: c_int, request: libc::Ioctl, argument: *mut c_void) -> c_int;
    getsockopt, c"getsockopt",
        (fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    setsockopt, c"setsockopt",
        (fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    getpeername, c"getpeername",
        (fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getsockname, c"getsockname",
        (fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    dup, c"dup", (fd: c_int) -> c_int;
    dup3, c"dup3", (from: c_int, to: c_int, flags: c_int) -> c_int;
    dup2, c"dup2", (from: c_int, to: c_int) -> c_int;
    epoll_ctl, c"epoll_ctl",
        (epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_wait, c"epoll_wait",
        (epfd: c_int, to: *mut epoll_event, max: c_int, timeout: c_int) -> c_int;
    epoll_pwait, c"epoll_pwait",
        (epfd: c_int, to: *mut epoll_event, max: c_int, timeout: c_int,
         mask: *const sigset_t) -> c_int;
    epoll_pwait2, c"epoll_pwait2",
        (epfd: c_int, to: *mut epoll_event, max: c_int, timeout: *const timespec,
         mask: *const sigset_t) -> c_int;
    fstat, c"fstat", (fd: c_int, to: *mut libc::stat) -> c_int;
    fstat64, c"fstat64", (fd: c_int, to: *mut libc::stat64) -> c_int;
    open, c"open64", (path: *const c_char, flags: c_int, mode: c_int) -> c_int;
}

macro_rules! rsockets {
    ($(#[$doc:meta])* $type:ident; $($name:ident, $text:literal, ($($t:ty),*) -> $r:ty;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $type {
            $(pub(crate) $name: unsafe extern "C" fn($($t),*) -> $r,)*
        }

        impl $type {
            fn load() -> Option<Self> {
                let flags = libc::RTLD_NOW | libc::RTLD_GLOBAL;
                // SAFETY: the name is valid. The library is never unloaded.
                let library = unsafe { libc::dlopen(c"librdmacm.so.1".as_ptr(), flags) };
                if library.is_null() {
                    return None;
                }
                Some(Self {
                    $($name: {
                        // SAFETY: the library is open and the name is valid.
                        let f = unsafe { libc::dlsym(library, $text.as_ptr()) };
                        if f.is_null() {
                            return None;
                        }
                        type F = unsafe extern "C" fn($($t),*) -> $r;
                        // SAFETY: see the invariant at the top of the file.
                        unsafe { std::mem::transmute::<*mut c_void, F>(f) }
                    },)*
                })
            }
        }
    };
}

rsockets! {
    Rdma;
    socket, c"rsocket", (c_int, c_int, c_int) -> c_int;
    bind, c"rbind", (c_int, *const sockaddr, socklen_t) -> c_int;
    listen, c"rlisten", (c_int, c_int) -> c_int;
    accept, c"raccept", (c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    connect, c"rconnect", (c_int, *const sockaddr, socklen_t) -> c_int;
    shutdown, c"rshutdown", (c_int, c_int) -> c_int;
    close, c"rclose", (c_int) -> c_int;
    recvfrom, c"rrecvfrom",
        (c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t;
    recvmsg, c"rrecvmsg", (c_int, *mut msghdr, c_int) -> ssize_t;
    recv, c"rrecv", (c_int, *mut c_void, size_t, c_int) -> ssize_t;
    readv, c"rreadv", (c_int, *const iovec, c_int) -> ssize_t;
    sendto, c"rsendto",
        (c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t;
    sendmsg, c"rsendmsg", (c_int, *const msghdr, c_int) -> ssize_t;
    send, c"rsend", (c_int, *const c_void, size_t, c_int) -> ssize_t;
    writev, c"rwritev", (c_int, *const iovec, c_int) -> ssize_t;
    poll, c"rpoll", (*mut pollfd, nfds_t, c_int) -> c_int;
    fcntl, c"rfcntl", (c_int, c_int, c_long) -> c_int;
    getsockopt, c"rgetsockopt", (c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int;
    setsockopt, c"rsetsockopt", (c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;
    getpeername, c"rgetpeername", (c_int, *mut sockaddr, *mut socklen_t) -> c_int;
    getsockname, c"rgetsockname", (c_int, *mut sockaddr, *mut socklen_t) -> c_int;
}

rsockets! {
    /// The functions for `repoll` sets, which older versions of librdmacm do not have.
    Repoll;
    create, c"repoll_create", (c_int) -> c_int;
    ctl, c"repoll_ctl", (c_int, c_int, c_int, *mut epoll_event) -> c_int;
    wait, c"repoll_wait", (c_int, *mut epoll_event, c_int, c_int) -> c_int;
}

/// Returns the functions in `cache`, and loads them first if necessary. Several threads may load
/// them at the same time. A lock would avoid that, but it could stay locked in a forked child.
fn cached_or_load<T>(cache: &AtomicPtr<Option<T>>, load: fn() -> Option<T>) -> Option<&'static T> {
    // SAFETY: null, or a value that is never freed.
    if let Some(known) = unsafe { cache.load(Ordering::Acquire).as_ref() } {
        return known.as_ref();
    }
    let new = Box::leak(Box::new(load()));
    cache.store(new, Ordering::Release);
    new.as_ref()
}

/// Returns librdmacm's functions, or `None` if the library or one of its functions is missing. Must
/// be called in [`bypassed`], because loading may create sockets.
pub(crate) fn rdma() -> Option<&'static Rdma> {
    static RDMA: AtomicPtr<Option<Rdma>> = AtomicPtr::new(null_mut());
    cached_or_load(&RDMA, Rdma::load)
}

/// Returns the functions for `repoll` sets, as [`rdma`] does.
pub(crate) fn repoll() -> Option<&'static Repoll> {
    static REPOLL: AtomicPtr<Option<Repoll>> = AtomicPtr::new(null_mut());
    cached_or_load(&REPOLL, Repoll::load)
}

/// Calls `f` with the rsocket if the descriptor is a placeholder. Otherwise returns `None`.
pub(crate) fn on_rsocket<R>(fd: c_int, f: impl FnOnce(&'static Rdma, c_int) -> R) -> Option<R> {
    let socket = crate::table::find(fd)?;
    let rdma = bypassed(rdma)?;
    Some(bypassed(|| f(rdma, socket)))
}
