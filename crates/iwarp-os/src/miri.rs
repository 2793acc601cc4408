//! System calls that Miri does not know, for tests that it interprets: the loopback interface,
//! transfers with lists of ranges, level-triggered events, signal masks, limits and `ppoll`.
//!
//! Miri calls an exported function of the program if it has no implementation of its own.
//!
//! Invariant: each function keeps to the contract of the C function of the same name.

use rustix::event::epoll;
use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Mutex;

/// The descriptors of an `epoll` set. Miri has only edge-triggered events; a change of a descriptor
/// reports its present state as an event.
#[derive(Debug, Default)]
pub(crate) struct Levels(Mutex<BTreeMap<RawFd, (u64, epoll::EventFlags)>>);

impl Levels {
    pub(crate) fn set(&self, fd: BorrowedFd<'_>, token: u64, flags: epoll::EventFlags) {
        self.0
            .lock()
            .unwrap()
            .insert(fd.as_raw_fd(), (token, flags));
    }

    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        self.0.lock().unwrap().remove(&fd.as_raw_fd());
    }

    /// Changes each descriptor to what it is.
    pub(crate) fn renew(&self, set: &OwnedFd) {
        for (fd, (token, flags)) in self.0.lock().unwrap().iter() {
            // SAFETY: a descriptor is removed before it is closed.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            let _ = epoll::modify(set, fd, epoll::EventData::new_u64(*token), *flags);
        }
    }
}

/// The calls of `stream::calls`.
pub(crate) mod calls {
    use libc::{c_int, c_long, c_void, iovec, msghdr, size_t};

    /// # Safety
    /// As `send(2)`.
    pub(crate) unsafe fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> c_long {
        // SAFETY: guaranteed by the caller.
        unsafe { libc::send(fd, from, len, flags & !libc::MSG_EOR & !libc::MSG_MORE) as c_long }
    }

    /// # Safety
    /// As `recv(2)`.
    pub(crate) unsafe fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> c_long {
        // SAFETY: guaranteed by the caller.
        unsafe { libc::recv(fd, to, len, flags) as c_long }
    }

    /// Transfers the ranges one after the other, until one is not transferred wholly.
    ///
    /// # Safety
    /// The list in `message` is valid.
    unsafe fn each(message: *const msghdr, one: impl Fn(&iovec) -> c_long) -> c_long {
        // SAFETY: guaranteed by the caller.
        let list = unsafe { std::slice::from_raw_parts((*message).msg_iov, (*message).msg_iovlen) };
        let mut total = 0;
        for range in list.iter().filter(|range| range.iov_len > 0) {
            let count = one(range);
            if count < 0 {
                return if total == 0 { count } else { total };
            }
            total += count;
            if (count as usize) < range.iov_len {
                break;
            }
        }
        total
    }

    /// # Safety
    /// As `sendmsg(2)`.
    pub(crate) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> c_long {
        // SAFETY: guaranteed by the caller.
        unsafe {
            each(message, |range| {
                send(fd, range.iov_base, range.iov_len, flags)
            })
        }
    }

    /// # Safety
    /// As `recvmsg(2)`.
    pub(crate) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> c_long {
        // SAFETY: guaranteed by the caller.
        unsafe {
            each(message, |range| {
                recv(fd, range.iov_base, range.iov_len, flags)
            })
        }
    }
}

/// One entry: `lo` with 127.0.0.1.
#[repr(C)]
struct Entry {
    entry: libc::ifaddrs,
    address: libc::sockaddr_in,
    mask: libc::sockaddr_in,
}

fn inet(address: u32) -> libc::sockaddr_in {
    // SAFETY: zeros are a valid address.
    let mut inet: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    inet.sin_family = libc::AF_INET as libc::sa_family_t;
    inet.sin_addr.s_addr = address.to_be();
    inet
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getifaddrs(list: *mut *mut libc::ifaddrs) -> libc::c_int {
    let flags = libc::IFF_UP | libc::IFF_RUNNING | libc::IFF_LOOPBACK;
    // SAFETY: zeros are a valid entry.
    let mut entry: libc::ifaddrs = unsafe { std::mem::zeroed() };
    entry.ifa_name = c"lo".as_ptr().cast_mut();
    entry.ifa_flags = flags as libc::c_uint;
    let all = Box::into_raw(Box::new(Entry {
        entry,
        address: inet(0x7f00_0001),
        mask: inet(0xff00_0000),
    }));
    // SAFETY: `all` was allocated above; the caller guarantees that `list` is valid.
    unsafe {
        (*all).entry.ifa_addr = (&raw mut (*all).address).cast();
        (*all).entry.ifa_netmask = (&raw mut (*all).mask).cast();
        *list = all.cast();
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn freeifaddrs(list: *mut libc::ifaddrs) {
    // SAFETY: `getifaddrs` allocated it.
    drop(unsafe { Box::from_raw(list.cast::<Entry>()) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn if_nametoindex(_name: *const libc::c_char) -> libc::c_uint {
    1
}

/// Returns an address with a free port. Miri does not know the port of a socket that is only bound.
pub(crate) fn with_port(address: SocketAddr) -> io::Result<SocketAddr> {
    match address.port() {
        0 => TcpListener::bind(address)?.local_addr(),
        _ => Ok(address),
    }
}

/// As `interfaces::mtu_of`, for the only interface.
#[allow(clippy::unnecessary_wraps, reason = "as the function that it replaces")]
pub(crate) fn mtu_of(_name: &str) -> io::Result<u32> {
    Ok(65_536)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getrlimit64(
    _resource: libc::c_uint,
    limit: *mut libc::rlimit64,
) -> libc::c_int {
    let unlimited = libc::rlimit64 {
        rlim_cur: libc::RLIM64_INFINITY,
        rlim_max: libc::RLIM64_INFINITY,
    };
    // SAFETY: the caller guarantees that `limit` is valid.
    unsafe { limit.write(unlimited) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn atexit(_at_exit: extern "C" fn()) -> libc::c_int {
    0
}

// Miri delivers no signals, so a set of signals has no content.

#[unsafe(no_mangle)]
extern "C" fn sigfillset(_set: *mut libc::sigset_t) -> libc::c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn sigdelset(_set: *mut libc::sigset_t, _signal: libc::c_int) -> libc::c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn pthread_sigmask(
    _how: libc::c_int,
    _set: *const libc::sigset_t,
    old: *mut libc::sigset_t,
) -> libc::c_int {
    if !old.is_null() {
        // SAFETY: the caller guarantees that it is null or valid; zeros are an empty set.
        unsafe { old.write(std::mem::zeroed()) };
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn getauxval(_which: libc::c_ulong) -> libc::c_ulong {
    0
}

/// By a set of `epoll` that exists during the call. The flags have the same values.
#[unsafe(no_mangle)]
unsafe extern "C" fn ppoll(
    entries: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    _mask: *const libc::sigset_t,
) -> libc::c_int {
    // SAFETY: the caller guarantees that both are valid.
    let (entries, timeout) = unsafe {
        (
            std::slice::from_raw_parts_mut(entries, count as usize),
            timeout.as_ref(),
        )
    };
    let milliseconds = timeout.map_or(-1, |time| {
        (time.tv_sec * 1000 + (time.tv_nsec + 999_999) / 1_000_000) as i32
    });
    // SAFETY: returns a descriptor and has no other effect.
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    for (at, entry) in entries.iter_mut().enumerate() {
        entry.revents = 0;
        let mut event = libc::epoll_event {
            events: (entry.events as u32 & !(libc::POLLNVAL as u32)) | libc::EPOLLET as u32,
            u64: at as u64,
        };
        // SAFETY: the event is a local variable.
        unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, entry.fd, &raw mut event) };
    }
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
    // SAFETY: there is room for this number of events.
    let ready = unsafe { libc::epoll_wait(set, events.as_mut_ptr(), 16, milliseconds) };
    for event in &events[..ready.max(0) as usize] {
        entries[event.u64 as usize].revents = event.events as i16;
    }
    // SAFETY: the descriptor was created above.
    unsafe { libc::close(set) };
    ready
}
