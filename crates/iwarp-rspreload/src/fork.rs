//! `RDMAV_FORK_SAFE`: connections that are accepted or made before a fork may be used after it.
//!
//! An RDMA connection belongs to the process that created it. With this variable, a stream begins
//! as a TCP connection, which a child inherits, and becomes an rsocket when it first sends or
//! receives: the accepting end listens on a free port, sends its number, and accepts the other
//! end's rsocket. Both ends need the variable, as in rdma-core. (rdma-core reuses the TCP
//! connection's port, which is in use by TCP here.)
//!
//! As in rdma-core, waiting does not start the change: a server that polls before it reads waits
//! for a client that waits for the server.

use crate::api::{Rdma, inside, rdma, real};
use crate::placeholder::{become_rsocket, tune};
use crate::{errno, fail};
use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use std::sync::atomic::{AtomicU8, Ordering};

const MAX: usize = 1 << 16;
/// What the accepting end sends: four octets that no program begins with by chance, and the port.
const MAGIC: [u8; 4] = [0, 0xf5, 0x6b, 0x0d];
const MESSAGE_LEN: usize = 6;
/// Time limit of the accepting end for the other end's rsocket.
const PATIENCE_MS: c_int = 30_000;

const PLAIN: u8 = 0;
/// A new socket, which may get any of the following states.
const NEW: u8 = 1;
const LISTENS: u8 = 2;
/// A connecting end that has not been used.
const CONNECTED: u8 = 3;
/// An accepting end that has not been used.
const ACCEPTED: u8 = 4;

static STATES: [AtomicU8; MAX] = [const { AtomicU8::new(PLAIN) }; MAX];

fn slot(fd: c_int) -> Option<&'static AtomicU8> {
    STATES.get(usize::try_from(fd).ok()?)
}

fn state(fd: c_int) -> u8 {
    slot(fd).map_or(PLAIN, |slot| slot.load(Ordering::Acquire))
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

/// Records an ordinary socket that would otherwise be an rsocket.
pub(crate) fn created(fd: c_int) {
    set(fd, NEW);
}

pub(crate) fn listens(fd: c_int) {
    if state(fd) == NEW {
        set(fd, LISTENS);
    }
}

pub(crate) fn accepted(listener: c_int, fd: c_int) {
    if fd >= 0 {
        let is_ours = state(listener) == LISTENS;
        set(fd, if is_ours { ACCEPTED } else { PLAIN });
    }
}

pub(crate) fn connects(fd: c_int) {
    if state(fd) == NEW {
        set(fd, CONNECTED);
    }
}

/// Clears the state of a descriptor that is closed or replaced.
pub(crate) fn forget(fd: c_int) {
    if state(fd) != PLAIN {
        set(fd, PLAIN);
    }
}

/// Copies the state of `from` to its copy `to`. If one becomes an rsocket, the others remain TCP.
pub(crate) fn copied(from: c_int, to: c_int) {
    set(to, state(from));
}

/// Creates the RDMA connection at the first use of `fd`. On failure it remains a TCP connection.
pub(crate) fn first_use(fd: c_int) {
    let side = state(fd);
    if side != CONNECTED && side != ACCEPTED {
        return;
    }
    set(fd, PLAIN);
    let before = errno();
    let Some(rdma) = inside(rdma) else { return };
    // SAFETY: the descriptor of a connected TCP socket, which becomes a placeholder.
    inside(|| unsafe {
        // Blocking, because each end waits for the other one.
        let flags = real::fcntl(fd, libc::F_GETFL, 0);
        real::fcntl(fd, libc::F_SETFL, 0);
        let made = match side {
            ACCEPTED => invite(rdma, fd),
            _ => follow(rdma, fd),
        };
        real::fcntl(fd, libc::F_SETFL, flags.into());
        if let Some(socket) = made {
            (rdma.fcntl)(socket, libc::F_SETFL, flags.into());
            become_rsocket(rdma, fd, socket);
        }
    });
    fail(before);
}

struct Name {
    address: sockaddr_storage,
    len: socklen_t,
}

impl Name {
    unsafe fn of(get: impl FnOnce(*mut sockaddr, *mut socklen_t) -> c_int) -> Option<Self> {
        let mut name = Self {
            // SAFETY: zero is an address without a family.
            address: unsafe { std::mem::zeroed() },
            len: size_of::<sockaddr_storage>() as socklen_t,
        };
        let done = get((&raw mut name.address).cast(), &raw mut name.len) == 0;
        done.then_some(name)
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

/// Listens beside an accepted TCP connection, and accepts the other end's rsocket.
unsafe fn invite(rdma: &Rdma, fd: c_int) -> Option<c_int> {
    // SAFETY: the pointers are to valid locals with their true lengths.
    unsafe {
        let mut name = Name::of(|to, len| real::getsockname(fd, to, len))?;
        *name.port() = 0;
        let listener = (rdma.socket)(name.address.ss_family.into(), libc::SOCK_STREAM, 0);
        if listener < 0 {
            return None;
        }
        tune(rdma, listener);
        let accepted = invite_to(rdma, fd, listener, &name);
        (rdma.close)(listener);
        accepted
    }
}

unsafe fn invite_to(rdma: &Rdma, fd: c_int, listener: c_int, name: &Name) -> Option<c_int> {
    // SAFETY: as above.
    unsafe {
        if (rdma.bind)(listener, name.as_ptr(), name.len) != 0 || (rdma.listen)(listener, 1) != 0 {
            return None;
        }
        let mut bound = Name::of(|to, len| (rdma.getsockname)(listener, to, len))?;
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
        if (rdma.poll)(&raw mut set, 1, PATIENCE_MS) != 1 {
            return None;
        }
        let socket = (rdma.accept)(listener, std::ptr::null_mut(), std::ptr::null_mut());
        (socket >= 0).then_some(socket)
    }
}

/// Receives the port of the accepting end, and connects to it.
unsafe fn follow(rdma: &Rdma, fd: c_int) -> Option<c_int> {
    // SAFETY: the pointers are to valid locals with their true lengths.
    unsafe {
        let mut message = [0u8; MESSAGE_LEN];
        let to = message.as_mut_ptr().cast();
        let flags = libc::MSG_PEEK | libc::MSG_WAITALL;
        let no_name = (std::ptr::null_mut(), std::ptr::null_mut());
        let got = real::recvfrom(fd, to, MESSAGE_LEN, flags, no_name.0, no_name.1);
        if usize::try_from(got) != Ok(MESSAGE_LEN) || message[..4] != MAGIC {
            return None;
        }
        real::recvfrom(fd, to, MESSAGE_LEN, 0, no_name.0, no_name.1);
        let mut peer = Name::of(|to, len| real::getpeername(fd, to, len))?;
        *peer.port() = u16::from_ne_bytes([message[4], message[5]]);
        let socket = (rdma.socket)(peer.address.ss_family.into(), libc::SOCK_STREAM, 0);
        if socket < 0 {
            return None;
        }
        tune(rdma, socket);
        if (rdma.connect)(socket, peer.as_ptr(), peer.len) != 0 {
            (rdma.close)(socket);
            return None;
        }
        Some(socket)
    }
}
