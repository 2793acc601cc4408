//! Nonblocking connects in progress, which fall back to TCP if the peer is not an rsocket.
//!
//! `connect` returns before it is known whether the peer is an rsocket. When `poll`, `select` or
//! `epoll_wait` find that the rsocket has failed, a TCP socket takes its place and connects to the
//! same address, and the program continues to wait. A program that only asks for `SO_ERROR`,
//! without waiting first, gets the error of the rsocket.

use crate::api::{Rdma, bypassed, rdma, real};
use crate::placeholder::to_tcp;
use crate::{errno, sets, table};
use iwarp_os::process_lock::ProcessLock;
use libc::{c_int, c_void, sockaddr, sockaddr_storage, socklen_t};
use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A descriptor after `connect`.
enum Attempt {
    /// The rsocket connects to this address.
    Connecting(Box<sockaddr_storage>, socklen_t),
    /// A thread finds out what has become of the rsocket.
    Settling,
    /// The error that the program has not asked for yet.
    Failed(c_int),
}

static ATTEMPTS: ProcessLock<BTreeMap<c_int, Attempt>> =
    ProcessLock::new("rspreload::ATTEMPTS", BTreeMap::new());
/// Number of [`ATTEMPTS`], so that usually no lock is taken.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn attempts() -> MutexGuard<'static, BTreeMap<c_int, Attempt>> {
    ATTEMPTS.lock()
}

fn publish(attempts: &BTreeMap<c_int, Attempt>) {
    COUNT.store(attempts.len(), Ordering::Release);
}

/// Returns `true` if a descriptor may be connecting.
pub(crate) fn is_pending() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// Records that the rsocket of `fd` connects to an address.
///
/// # Safety
/// `addr` points to an address of `len` bytes.
pub(crate) unsafe fn begin(fd: c_int, addr: *const sockaddr, len: socklen_t) {
    // SAFETY: an address of zeros is valid.
    let mut storage: Box<sockaddr_storage> = Box::new(unsafe { std::mem::zeroed() });
    let bytes = len as usize;
    if addr.is_null() || bytes > size_of::<sockaddr_storage>() {
        return;
    }
    let to = (&raw mut *storage).cast::<u8>();
    // SAFETY: both have this many bytes.
    unsafe { to.copy_from_nonoverlapping(addr.cast(), bytes) };
    let mut attempts = attempts();
    attempts.insert(fd, Attempt::Connecting(storage, len));
    publish(&attempts);
}

/// Forgets a descriptor that the program closes or replaces.
pub(crate) fn forget(fd: c_int) {
    if is_pending() {
        let mut attempts = attempts();
        attempts.remove(&fd);
        publish(&attempts);
    }
}

/// Returns the error of a failed attempt once, for `SO_ERROR`.
pub(crate) fn take_error(fd: c_int) -> Option<c_int> {
    if !is_pending() {
        return None;
    }
    let mut attempts = attempts();
    let &Attempt::Failed(error) = attempts.get(&fd)? else {
        return None;
    };
    attempts.remove(&fd);
    publish(&attempts);
    Some(error)
}

/// Acts on the events of the rsocket of `fd`, if it is connecting. If it has failed, a TCP socket
/// takes its place. Returns `true` if these events must not be reported to the program.
pub(crate) fn settle(fd: c_int, events: i16) -> bool {
    if events & (libc::POLLOUT | libc::POLLERR | libc::POLLHUP) == 0 {
        return false;
    }
    let (Some(rdma), Some(socket)) = (bypassed(rdma), table::find(fd)) else {
        return false;
    };
    let Some((address, len)) = take_address(fd) else {
        // Another thread may be replacing the rsocket.
        return matches!(attempts().get(&fd), Some(Attempt::Settling));
    };
    // The lock is not held: closing an rsocket closes its descriptors, each of which is forgotten.
    let error = socket_error(rdma, socket);
    let (replaced, outcome) = match error {
        Some(error) => fall_back(rdma, (fd, socket), error, (&address, len)),
        None => (false, None),
    };
    let mut attempts = attempts();
    match outcome {
        Some(error) => drop(attempts.insert(fd, Attempt::Failed(error))),
        None => drop(attempts.remove(&fd)),
    }
    publish(&attempts);
    replaced
}

/// Returns the address to which the rsocket of `fd` connects, and marks the attempt as settling.
fn take_address(fd: c_int) -> Option<(Box<sockaddr_storage>, socklen_t)> {
    let mut attempts = attempts();
    let attempt = attempts.get_mut(&fd)?;
    match std::mem::replace(attempt, Attempt::Settling) {
        Attempt::Connecting(address, len) => Some((address, len)),
        other => {
            *attempt = other;
            None
        }
    }
}

/// Returns the error with which an rsocket has failed to connect, if it has.
fn socket_error(rdma: &Rdma, socket: c_int) -> Option<c_int> {
    let (mut error, mut len): (c_int, socklen_t) = (0, 4);
    let value = (&raw mut error).cast::<c_void>();
    // SAFETY: the pointers are to locals of these lengths.
    let asked = bypassed(|| unsafe {
        (rdma.getsockopt)(
            socket,
            libc::SOL_SOCKET,
            libc::SO_ERROR,
            value,
            &raw mut len,
        )
    });
    (asked == 0 && error != 0).then_some(error)
}

/// Replaces an rsocket, which has failed with `error`, by a TCP socket that connects. Returns
/// whether it was replaced, and the error that the program must get.
fn fall_back(
    rdma: &Rdma,
    (fd, socket): (c_int, c_int),
    error: c_int,
    (address, len): (&sockaddr_storage, socklen_t),
) -> (bool, Option<c_int>) {
    let registrations = sets::withdraw(fd, socket);
    if !bypassed(|| to_tcp(rdma, fd, socket)) {
        sets::register_in_companions(fd, socket, &registrations);
        return (false, Some(error));
    }
    // SAFETY: the address has `len` bytes.
    let result = unsafe { real::connect(fd, (&raw const *address).cast(), len) };
    let failed = (result != 0 && errno() != libc::EINPROGRESS).then(errno);
    sets::register_in_kernel(fd, &registrations);
    (true, failed)
}
