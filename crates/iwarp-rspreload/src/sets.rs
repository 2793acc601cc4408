//! The program's `epoll` sets that contain rsockets.
//!
//! The program's set stays a kernel set, with all ordinary descriptors. When the first rsocket is
//! added, a companion set of librdmacm (`repoll`) is created, which contains the rsockets and the
//! kernel set. If an rsocket is replaced by a TCP socket, it moves to the kernel set.

use crate::api::{Repoll, bypassed, rdma, real, repoll};
use crate::table::MAX;
use crate::{errno, fail};
use libc::{c_int, epoll_event};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// User data of the kernel set in the companion set. The user data of an rsocket is its
/// placeholder.
pub(crate) const KERNEL: u64 = u64::MAX;

/// A set with rsockets. It is never freed, but used again for the next set with the same
/// descriptor.
pub(crate) struct Set {
    /// The companion set; -1 if there is none.
    repoll: AtomicI32,
    pid: c_int,
    /// The program's events and user data for each rsocket, by placeholder.
    events: Mutex<BTreeMap<c_int, epoll_event>>,
}

static SETS: [AtomicPtr<Set>; MAX] = [const { AtomicPtr::new(null_mut()) }; MAX];

impl Set {
    /// Returns the program's events and user data for each rsocket, by placeholder.
    pub(crate) fn events(&self) -> MutexGuard<'_, BTreeMap<c_int, epoll_event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn pid() -> c_int {
    // SAFETY: returns a number and has no effect.
    unsafe { libc::getpid() }
}

fn slot(epfd: c_int) -> Option<&'static AtomicPtr<Set>> {
    SETS.get(usize::try_from(epfd).ok()?)
}

/// Returns the set of a descriptor if this process created it.
fn own_set(epfd: c_int) -> Option<&'static Set> {
    // SAFETY: null, or a set that is never freed.
    let set = unsafe { slot(epfd)?.load(Ordering::Acquire).as_ref() }?;
    // A forked child cannot use the rsockets that its parent added.
    (set.pid == pid()).then_some(set)
}

/// Returns a set and its companion, if there is one.
pub(crate) fn find(epfd: c_int) -> Option<(&'static Set, c_int)> {
    let set = own_set(epfd)?;
    let number = set.repoll.load(Ordering::Acquire);
    (number >= 0).then_some((set, number))
}

/// Returns a set and its companion, which is created if necessary.
pub(crate) fn find_or_create(functions: &Repoll, epfd: c_int) -> Option<(&'static Set, c_int)> {
    if let Some(found) = find(epfd) {
        return Some(found);
    }
    let set = own_set(epfd).or_else(|| {
        let new = Box::leak(Box::new(Set {
            repoll: AtomicI32::new(-1),
            pid: pid(),
            events: Mutex::default(),
        }));
        slot(epfd)?.store(new, Ordering::Release);
        Some(&*new)
    })?;
    // SAFETY: no pointers.
    let number = bypassed(|| unsafe { (functions.create)(libc::EPOLL_CLOEXEC) });
    if number < 0 {
        return None;
    }
    let mut event = epoll_event {
        events: libc::EPOLLIN as u32,
        u64: KERNEL,
    };
    // Only an epoll set fails with ENOENT, because the new set is not in it.
    // SAFETY: EPOLL_CTL_DEL ignores the event.
    let probed = unsafe { real::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, number, null_mut()) };
    let is_set = probed != 0 && errno() == libc::ENOENT;
    let added = is_set.then(|| {
        // SAFETY: the event is valid.
        bypassed(|| unsafe { (functions.ctl)(number, libc::EPOLL_CTL_ADD, epfd, &raw mut event) })
    });
    if added == Some(0)
        && set
            .repoll
            .compare_exchange(-1, number, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    {
        return Some((set, number));
    }
    let error = errno();
    // Another thread has created a companion, or the descriptor is not an epoll set.
    if let Some(rdma) = bypassed(rdma) {
        // SAFETY: the new set is not in use.
        bypassed(|| unsafe { (rdma.close)(number) });
    }
    let found = find(epfd);
    if found.is_none() {
        fail(error);
    }
    found
}

/// Closes the companion when the program closes a set's descriptor.
pub(crate) fn close_companion(epfd: c_int) {
    let Some(set) = own_set(epfd) else { return };
    let number = set.repoll.swap(-1, Ordering::AcqRel);
    set.events().clear();
    if number >= 0
        && let Some(rdma) = bypassed(rdma)
    {
        // SAFETY: the companion is not in use any more.
        bypassed(|| unsafe { (rdma.close)(number) });
    }
}

/// A descriptor in a set: the set, and the program's events and user data.
pub(crate) type Registration = (c_int, epoll_event);

/// Removes the rsocket of a placeholder from all companions. Returns where it was.
pub(crate) fn withdraw(fd: c_int, socket: c_int) -> Vec<Registration> {
    let Some(functions) = bypassed(repoll) else {
        return Vec::new();
    };
    let mut registrations = Vec::new();
    for epfd in 0..MAX as c_int {
        let Some((set, number)) = find(epfd) else {
            continue;
        };
        if let Some(event) = set.events().remove(&fd) {
            // SAFETY: EPOLL_CTL_DEL ignores the event.
            bypassed(|| unsafe {
                (functions.ctl)(number, libc::EPOLL_CTL_DEL, socket, null_mut())
            });
            registrations.push((epfd, event));
        }
    }
    registrations
}

/// Adds a descriptor, which is an ordinary socket now, to the kernel sets.
pub(crate) fn register_in_kernel(fd: c_int, registrations: &[Registration]) {
    for &(epfd, mut event) in registrations {
        // SAFETY: the event is valid.
        unsafe { real::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &raw mut event) };
    }
}

/// Adds the rsocket of a placeholder to the companions again.
pub(crate) fn register_in_companions(fd: c_int, socket: c_int, registrations: &[Registration]) {
    let Some(functions) = bypassed(repoll) else {
        return;
    };
    for &(epfd, event) in registrations {
        let Some((set, number)) = find(epfd) else {
            continue;
        };
        let mut translated = epoll_event {
            u64: fd as u64,
            ..event
        };
        set.events().insert(fd, event);
        // SAFETY: the event is valid.
        bypassed(|| unsafe {
            (functions.ctl)(number, libc::EPOLL_CTL_ADD, socket, &raw mut translated)
        });
    }
}
