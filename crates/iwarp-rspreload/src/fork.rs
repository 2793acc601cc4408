//! `RDMAV_FORK_SAFE`: connections that are established before a fork may be used after it.
//!
//! An RDMA connection belongs to the process that created it. With this variable, a stream begins
//! as a TCP connection, which a child inherits. It becomes an rsocket when it first sends or
//! receives: the accepting end listens with an rsocket on a free port, sends the port number over
//! TCP, and accepts the other end's rsocket. Both ends need the variable, as in rdma-core.
//! (rdma-core uses the port of the TCP connection again; here it is still in use by TCP.)
//!
//! As in rdma-core, polling does not create the rsocket. So a server that polls before it reads
//! waits forever: the client, which sends first, waits for the server's port number.

use crate::api::{Rdma, bypassed, rdma, real};
use crate::placeholder::{apply_size_options, become_rsocket};
use crate::table::MAX;
use crate::{errno, fail};
use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use std::sync::atomic::{AtomicU8, Ordering};

/// The accepting end sends these octets, with which programs are unlikely to begin, and the port.
const MAGIC: [u8; 4] = [0, 0xf5, 0x6b, 0x0d];
const MESSAGE_LEN: usize = 6;
/// Timeout of the accepting end for the rsocket of the other end.
const ACCEPT_TIMEOUT_MS: c_int = 30_000;

const ORDINARY: u8 = 0;
/// A new socket, which may change to any of the following states.
const NEW: u8 = 1;
const LISTENING: u8 = 2;
/// The connecting end of a connection that has not been used.
const CONNECTED: u8 = 3;
/// The accepting end of a connection that has not been used.
const ACCEPTED: u8 = 4;

static STATES: [AtomicU8; MAX] = [const { AtomicU8::new(ORDINARY) }; MAX];

fn slot(fd: c_int) -> Option<&'static AtomicU8> {
    STATES.get(usize::try_from(fd).ok()?)
}

fn state(fd: c_int) -> u8 {
    slot(fd).map_or(ORDINARY, |slot| slot.load(Ordering::Acquire))
}

fn set(fd: c_int, state: u8) {
    if let Some(slot) = slot(fd) {
        slot.store(state, Ordering::Release);
    }
}

pub(crate) fn is_on() -> bool {
    let value = std::env::var("RDMAV_FORK_SAFE").unwrap_or_default();
    value.trim().parse::<i32>().is_ok_and(|value| value != 0)
}

/// Records a new TCP socket that may become an rsocket later.
pub(crate) fn set_new(fd: c_int) {
    set(fd, NEW);
}

pub(crate) fn set_listening(fd: c_int) {
    if state(fd) == NEW {
        set(fd, LISTENING);
    }
}

pub(crate) fn set_accepted(listener: c_int, fd: c_int) {
    if fd >= 0 {
        let is_ours = state(listener) == LISTENING;
        set(fd, if is_ours { ACCEPTED } else { ORDINARY });
    }
}

pub(crate) fn set_connected(fd: c_int) {
    if state(fd) == NEW {
        set(fd, CONNECTED);
    }
}

/// Clears the state of a descriptor that is closed or replaced.
pub(crate) fn forget(fd: c_int) {
    if state(fd) != ORDINARY {
        set(fd, ORDINARY);
    }
}

/// Copies the state of `from` to its duplicate `to`. If one of them becomes an rsocket, the other
/// stays a TCP socket.
pub(crate) fn copy_state(from: c_int, to: c_int) {
    set(to, state(from));
}

/// At the first use of `fd`, replaces its TCP connection by an rsocket. On failure, keeps TCP.
pub(crate) fn first_use(fd: c_int) {
    let state = state(fd);
    if state != CONNECTED && state != ACCEPTED {
        return;
    }
    set(fd, ORDINARY);
    let before = errno();
    let Some(rdma) = bypassed(rdma) else { return };
    // SAFETY: `fd` is the descriptor of a connected TCP socket.
    bypassed(|| unsafe {
        // Make the socket blocking, because each end waits for the other.
        let flags = real::fcntl(fd, libc::F_GETFL, 0);
        real::fcntl(fd, libc::F_SETFL, 0);
        let socket_fd = match state {
            ACCEPTED => accept_over_rsocket(rdma, fd),
            _ => connect_over_rsocket(rdma, fd),
        };
        real::fcntl(fd, libc::F_SETFL, flags.into());
        if let Some(socket) = socket_fd {
            (rdma.fcntl)(socket, libc::F_SETFL, flags.into());
            become_rsocket(rdma, fd, socket);
        }
    });
    fail(before);
}

struct Address {
    address: sockaddr_storage,
    len: socklen_t,
}

impl Address {
    unsafe fn of(get: impl FnOnce(*mut sockaddr, *mut socklen_t) -> c_int) -> Option<Self> {
        let mut address = Self {
            // SAFETY: zero is an address without a family.
            address: unsafe { std::mem::zeroed() },
            len: size_of::<sockaddr_storage>() as socklen_t,
        };
        let done = get((&raw mut address.address).cast(), &raw mut address.len) == 0;
        done.then_some(address)
    }

    /// Returns the port in network byte order. Both families have it at the same offset.
    fn port(&mut self) -> &mut u16 {
        // SAFETY: both structures begin with family and port, and are shorter than the storage.
        unsafe { &mut (*(&raw mut self.address).cast::<libc::sockaddr_in>()).sin_port }
    }

    fn as_ptr(&self) -> *const sockaddr {
        (&raw const self.address).cast()
    }
}

/// For an accepted TCP connection: creates a listening rsocket, and accepts the other end's
/// rsocket.
unsafe fn accept_over_rsocket(rdma: &Rdma, fd: c_int) -> Option<c_int> {
    // SAFETY: the pointers are to valid locals with their true lengths.
    unsafe {
        let mut address = Address::of(|to, len| real::getsockname(fd, to, len))?;
        *address.port() = 0;
        let listener = (rdma.socket)(address.address.ss_family.into(), libc::SOCK_STREAM, 0);
        if listener < 0 {
            return None;
        }
        apply_size_options(rdma, listener);
        let set_accepted = listen_and_accept(rdma, fd, listener, &address);
        (rdma.close)(listener);
        set_accepted
    }
}

unsafe fn listen_and_accept(
    rdma: &Rdma,
    fd: c_int,
    listener: c_int,
    address: &Address,
) -> Option<c_int> {
    // SAFETY: the pointers are to valid locals with their true lengths.
    unsafe {
        if (rdma.bind)(listener, address.as_ptr(), address.len) != 0
            || (rdma.listen)(listener, 1) != 0
        {
            return None;
        }
        let mut bound = Address::of(|to, len| (rdma.getsockname)(listener, to, len))?;
        let mut message = [0; MESSAGE_LEN];
        message[..4].copy_from_slice(&MAGIC);
        message[4..].copy_from_slice(&bound.port().to_ne_bytes());
        let sent = real::write(fd, message.as_ptr().cast(), MESSAGE_LEN);
        if usize::try_from(sent) != Ok(MESSAGE_LEN) {
            return None;
        }
        let mut set = libc::pollfd {
            fd: listener,
            events: libc::POLLIN,
            revents: 0,
        };
        if (rdma.poll)(&raw mut set, 1, ACCEPT_TIMEOUT_MS) != 1 {
            return None;
        }
        let socket = (rdma.accept)(listener, std::ptr::null_mut(), std::ptr::null_mut());
        (socket >= 0).then_some(socket)
    }
}

/// For a connecting TCP connection: receives the accepting end's port, and connects an rsocket.
unsafe fn connect_over_rsocket(rdma: &Rdma, fd: c_int) -> Option<c_int> {
    // SAFETY: the pointers are to valid locals with their true lengths.
    unsafe {
        let mut message = [0u8; MESSAGE_LEN];
        let to = message.as_mut_ptr().cast();
        let flags = libc::MSG_PEEK | libc::MSG_WAITALL;
        let no_address = (std::ptr::null_mut(), std::ptr::null_mut());
        let got = real::recvfrom(fd, to, MESSAGE_LEN, flags, no_address.0, no_address.1);
        if usize::try_from(got) != Ok(MESSAGE_LEN) || message[..4] != MAGIC {
            return None;
        }
        real::recvfrom(fd, to, MESSAGE_LEN, 0, no_address.0, no_address.1);
        let mut peer = Address::of(|to, len| real::getpeername(fd, to, len))?;
        *peer.port() = u16::from_ne_bytes([message[4], message[5]]);
        let socket = (rdma.socket)(peer.address.ss_family.into(), libc::SOCK_STREAM, 0);
        if socket < 0 {
            return None;
        }
        apply_size_options(rdma, socket);
        if (rdma.connect)(socket, peer.as_ptr(), peer.len) != 0 {
            (rdma.close)(socket);
            return None;
        }
        Some(socket)
    }
}
