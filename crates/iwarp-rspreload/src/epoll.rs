//! `epoll` over any mixture of rsockets and other descriptors.
//!
//! The program's set remains a set of the kernel with all ordinary descriptors. When the first
//! rsocket is added, a companion set of librdmacm (`repoll`) is created, which contains the
//! rsockets and the kernel's set itself. A wait then waits for the companion, and takes events of
//! ordinary descriptors from the kernel's set.
//!
//! As in rdma-core, events of rsockets are level-triggered: `EPOLLET` has no effect on them.

use crate::api::{Repoll, inside, rdma, real, repoll};
use crate::waiting::masked;
use crate::{errno, fail, table};
use libc::{c_int, epoll_event, sigset_t, timespec};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MAX: usize = 1 << 16;
const EVENTS_MAX: usize = 4096;

/// The kernel set's user data in the companion set. Those of rsockets are placeholder descriptors.
const KERNEL: u64 = u64::MAX;

/// A set with rsockets. It is never freed, but reused for the next set with the same descriptor.
struct Set {
    /// The companion set; -1 if there is none.
    repoll: AtomicI32,
    process: c_int,
    /// The program's user data for each rsocket.
    values: Mutex<BTreeMap<c_int, u64>>,
}

static SETS: [AtomicPtr<Set>; MAX] = [const { AtomicPtr::new(null_mut()) }; MAX];

impl Set {
    fn values(&self) -> MutexGuard<'_, BTreeMap<c_int, u64>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn process() -> c_int {
    // SAFETY: returns a number and has no effect.
    unsafe { libc::getpid() }
}

fn slot(epfd: c_int) -> Option<&'static AtomicPtr<Set>> {
    SETS.get(usize::try_from(epfd).ok()?)
}

/// Returns the entry for a descriptor if this process owns it.
fn entry(epfd: c_int) -> Option<&'static Set> {
    // SAFETY: null, or a set that is never freed.
    let set = unsafe { slot(epfd)?.load(Ordering::Acquire).as_ref() }?;
    // A forked child cannot use the rsockets that its parent added.
    (set.process == process()).then_some(set)
}

/// Returns a set and its companion, if there is one.
fn find(epfd: c_int) -> Option<(&'static Set, c_int)> {
    let set = entry(epfd)?;
    let number = set.repoll.load(Ordering::Acquire);
    (number >= 0).then_some((set, number))
}

/// Returns a set and its companion, which is created if necessary.
fn find_or_create(functions: &Repoll, epfd: c_int) -> Option<(&'static Set, c_int)> {
    if let Some(found) = find(epfd) {
        return Some(found);
    }
    let set = entry(epfd).or_else(|| {
        let new = Box::leak(Box::new(Set {
            repoll: AtomicI32::new(-1),
            process: process(),
            values: Mutex::default(),
        }));
        slot(epfd)?.store(new, Ordering::Release);
        Some(&*new)
    })?;
    // SAFETY: no pointers.
    let number = inside(|| unsafe { (functions.create)(libc::EPOLL_CLOEXEC) });
    if number < 0 {
        return None;
    }
    let mut event = epoll_event {
        events: libc::EPOLLIN as u32,
        u64: KERNEL,
    };
    // Only a set answers ENOENT, because the new set is not in it.
    // SAFETY: there is no event.
    let probed = unsafe { real::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, number, null_mut()) };
    let is_set = probed != 0 && errno() == libc::ENOENT;
    let added = is_set.then(|| {
        // SAFETY: the event is valid.
        inside(|| unsafe { (functions.ctl)(number, libc::EPOLL_CTL_ADD, epfd, &raw mut event) })
    });
    if added == Some(0)
        && set
            .repoll
            .compare_exchange(-1, number, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    {
        return Some((set, number));
    }
    let why = errno();
    // Another thread was faster, or the descriptor is not a set.
    if let Some(rdma) = inside(rdma) {
        // SAFETY: the new set is not in use.
        inside(|| unsafe { (rdma.close)(number) });
    }
    let found = find(epfd);
    if found.is_none() {
        fail(why);
    }
    found
}

/// Closes the companion when the program closes a set's descriptor.
pub(crate) fn closed(epfd: c_int) {
    let Some(set) = entry(epfd) else { return };
    let number = set.repoll.swap(-1, Ordering::AcqRel);
    set.values().clear();
    if number >= 0
        && let Some(rdma) = inside(rdma)
    {
        // SAFETY: the set's descriptor is closed.
        inside(|| unsafe { (rdma.close)(number) });
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let (Some(socket), Some(functions)) = (table::find(fd), inside(repoll)) else {
        // SAFETY: the contract of the C function.
        return unsafe { real::epoll_ctl(epfd, op, fd, event) };
    };
    let Some((set, number)) = find_or_create(functions, epfd) else {
        return -1;
    };
    // SAFETY: the contract of the C function.
    let given = unsafe { event.as_ref() }.copied();
    let mut translated = epoll_event {
        events: given.map_or(0, |event| event.events),
        u64: fd as u64,
    };
    let event = match given {
        Some(_) => &raw mut translated,
        None => null_mut(),
    };
    // Locked first, because a wait in another thread may get the event immediately.
    let mut values = set.values();
    // SAFETY: the event is null or valid.
    let result = inside(|| unsafe { (functions.ctl)(number, op, socket, event) });
    if result == 0 {
        match (op, given) {
            (libc::EPOLL_CTL_DEL, _) => drop(values.remove(&fd)),
            (_, Some(given)) => drop(values.insert(fd, given.u64)),
            _ => {}
        }
    }
    result
}

/// Waits for events of a set with rsockets and writes them to `to`, which has room for at least
/// one. Returns as `epoll_wait` does.
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
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // Rounded up, so that waits below a millisecond do not spin.
        let ms = left.map_or(-1, |left| {
            c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
        });
        // SAFETY: there is room for this many events.
        let n = inside(|| unsafe {
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
            let room = &mut to[written..];
            // SAFETY: there is room for this many events.
            let more = unsafe { real::epoll_wait(epfd, room.as_mut_ptr(), room.len() as c_int, 0) };
            written += usize::try_from(more).unwrap_or(0);
        }
        if written > 0 || left.is_some_and(|left| left.is_zero()) {
            return written as c_int;
        }
    }
}

/// Waits if the set has rsockets. Otherwise returns `None`.
unsafe fn waited(
    epfd: c_int,
    to: *mut epoll_event,
    max: c_int,
    timeout: Option<Duration>,
) -> Option<c_int> {
    let set = find(epfd)?;
    let functions = inside(repoll)?;
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

fn limit(timeout: c_int) -> Option<Duration> {
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
        waited(epfd, to, max, limit(timeout))
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
            waited(epfd, to, max, limit(timeout)).unwrap_or_else(|| fail(libc::EBADF))
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
        let limit = timeout.as_ref().map(crate::waiting::duration);
        masked(mask, || {
            waited(epfd, to, max, limit).unwrap_or_else(|| fail(libc::EBADF))
        })
    }
}
