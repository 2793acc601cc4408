//! `epoll` over any mixture of rsockets and other descriptors.
//!
//! The program's set stays a kernel set, with all ordinary descriptors. When the first rsocket is
//! added, a companion set of librdmacm (`repoll`) is created, which contains the rsockets and the
//! kernel set. A wait then uses the companion set, and reads events of ordinary descriptors from
//! the kernel set.
//!
//! As in rdma-core, events of rsockets are level-triggered: `EPOLLET` has no effect on them.

use crate::api::{Repoll, bypassed, rdma, real, repoll};
use crate::table::MAX;
use crate::waiting::masked;
use crate::{errno, fail, table};
use libc::{c_int, epoll_event, sigset_t, timespec};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const EVENTS_MAX: usize = 4096;

/// User data of the kernel set in the companion set. The user data of an rsocket is its
/// placeholder.
const KERNEL: u64 = u64::MAX;

/// A set with rsockets. It is never freed, but used again for the next set with the same
/// descriptor.
struct Set {
    /// The companion set; -1 if there is none.
    repoll: AtomicI32,
    pid: c_int,
    /// The program's user data for each rsocket.
    values: Mutex<BTreeMap<c_int, u64>>,
}

static SETS: [AtomicPtr<Set>; MAX] = [const { AtomicPtr::new(null_mut()) }; MAX];

impl Set {
    fn values(&self) -> MutexGuard<'_, BTreeMap<c_int, u64>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
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
fn find(epfd: c_int) -> Option<(&'static Set, c_int)> {
    let set = own_set(epfd)?;
    let number = set.repoll.load(Ordering::Acquire);
    (number >= 0).then_some((set, number))
}

/// Returns a set and its companion, which is created if necessary.
fn find_or_create(functions: &Repoll, epfd: c_int) -> Option<(&'static Set, c_int)> {
    if let Some(found) = find(epfd) {
        return Some(found);
    }
    let set = own_set(epfd).or_else(|| {
        let new = Box::leak(Box::new(Set {
            repoll: AtomicI32::new(-1),
            pid: pid(),
            values: Mutex::default(),
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
    set.values().clear();
    if number >= 0
        && let Some(rdma) = bypassed(rdma)
    {
        // SAFETY: the companion is not in use any more.
        bypassed(|| unsafe { (rdma.close)(number) });
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let (Some(socket), Some(functions)) = (table::find(fd), bypassed(repoll)) else {
        // SAFETY: the contract of the C function.
        return unsafe { real::epoll_ctl(epfd, op, fd, event) };
    };
    let Some((set, number)) = find_or_create(functions, epfd) else {
        return -1;
    };
    // SAFETY: the contract of the C function.
    let original = unsafe { event.as_ref() }.copied();
    let mut translated = epoll_event {
        events: original.map_or(0, |event| event.events),
        u64: fd as u64,
    };
    let event = match original {
        Some(_) => &raw mut translated,
        None => null_mut(),
    };
    // Lock before the call, because another thread may receive the event immediately.
    let mut values = set.values();
    // SAFETY: the event is null or valid.
    let result = bypassed(|| unsafe { (functions.ctl)(number, op, socket, event) });
    if result == 0 {
        match (op, original) {
            (libc::EPOLL_CTL_DEL, _) => drop(values.remove(&fd)),
            (_, Some(original)) => drop(values.insert(fd, original.u64)),
            _ => {}
        }
    }
    result
}

/// Waits for events of a set with rsockets, and writes them to `to`, which must not be empty.
/// Returns as `epoll_wait` does.
fn wait(
    functions: &Repoll,
    epfd: c_int,
    (set, number): (&Set, c_int),
    to: &mut [epoll_event],
    timeout: Option<Duration>,
) -> c_int {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut found = vec![epoll_event { events: 0, u64: 0 }; to.len().min(EVENTS_MAX)];
    loop {
        let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // Round up, so that a timeout below a millisecond does not spin.
        let ms = remaining.map_or(-1, |remaining| {
            c_int::try_from(remaining.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
        });
        // SAFETY: there is room for this many events.
        let n = bypassed(|| unsafe {
            (functions.wait)(number, found.as_mut_ptr(), found.len() as c_int, ms)
        });
        let Ok(n) = usize::try_from(n) else { return -1 };
        let (mut written, mut kernel) = (0, false);
        let values = set.values();
        for event in &found[..n] {
            if event.u64 == KERNEL {
                kernel = true;
            } else if let Some(value) = values.get(&(event.u64 as c_int)) {
                to[written] = epoll_event {
                    events: event.events,
                    u64: *value,
                };
                written += 1;
            }
        }
        drop(values);
        if kernel && written < to.len() {
            let rest = &mut to[written..];
            // SAFETY: there is room for this many events.
            let more = unsafe { real::epoll_wait(epfd, rest.as_mut_ptr(), rest.len() as c_int, 0) };
            written += usize::try_from(more).unwrap_or(0);
        }
        if written > 0 || remaining.is_some_and(|remaining| remaining.is_zero()) {
            return written as c_int;
        }
    }
}

/// Waits if the set has rsockets. Otherwise returns `None`.
unsafe fn wait_if_rsockets(
    epfd: c_int,
    to: *mut epoll_event,
    max: c_int,
    timeout: Option<Duration>,
) -> Option<c_int> {
    let set = find(epfd)?;
    let functions = bypassed(repoll)?;
    let Some(max) = usize::try_from(max).ok().filter(|max| *max > 0) else {
        return Some(fail(libc::EINVAL));
    };
    if to.is_null() {
        return Some(fail(libc::EFAULT));
    }
    // SAFETY: the contract of the C functions: room for `max` events.
    let to = unsafe { std::slice::from_raw_parts_mut(to, max) };
    Some(wait(functions, epfd, set, to, timeout))
}

fn timeout_from_ms(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(
    epfd: c_int,
    to: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe {
        wait_if_rsockets(epfd, to, max, timeout_from_ms(timeout))
            .unwrap_or_else(|| real::epoll_wait(epfd, to, max, timeout))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    epfd: c_int,
    to: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    if find(epfd).is_none() {
        // SAFETY: the contract of the C function.
        return unsafe { real::epoll_pwait(epfd, to, max, timeout, mask) };
    }
    // SAFETY: the contract of the C function.
    unsafe {
        masked(mask, || {
            wait_if_rsockets(epfd, to, max, timeout_from_ms(timeout))
                .unwrap_or_else(|| fail(libc::EBADF))
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    epfd: c_int,
    to: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if find(epfd).is_none() {
        // SAFETY: the contract of the C function.
        return unsafe { real::epoll_pwait2(epfd, to, max, timeout, mask) };
    }
    // SAFETY: the contract of the C function.
    unsafe {
        let timeout = timeout.as_ref().map(crate::waiting::duration);
        masked(mask, || {
            wait_if_rsockets(epfd, to, max, timeout).unwrap_or_else(|| fail(libc::EBADF))
        })
    }
}
