//! `epoll` over any mixture of rsockets and other descriptors, with the sets of `sets`.
//!
//! A wait of a set with rsockets uses the companion set, and reads events of ordinary descriptors
//! from the kernel set.
//!
//! As in rdma-core, events of rsockets are level-triggered: `EPOLLET` has no effect on them.

use crate::api::{Repoll, bypassed, real, repoll};
use crate::connecting;
use crate::sets::{KERNEL, Set, find, find_or_create};
use crate::waiting::masked;
use crate::{fail, table};
use libc::{c_int, epoll_event, sigset_t, timespec};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const EVENTS_MAX: usize = 4096;

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
    let mut events = set.events();
    // SAFETY: the event is null or valid.
    let result = bypassed(|| unsafe { (functions.ctl)(number, op, socket, event) });
    if result == 0 {
        match (op, original) {
            (libc::EPOLL_CTL_DEL, _) => drop(events.remove(&fd)),
            (_, Some(original)) => drop(events.insert(fd, original)),
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
        if connecting::is_pending() {
            // An rsocket that becomes a TCP socket is no longer in the set, so it has no event.
            for event in found[..n].iter().filter(|event| event.u64 != KERNEL) {
                connecting::settle(event.u64 as c_int, event.events as i16);
            }
        }
        let (mut written, mut kernel) = (0, false);
        let registered = set.events();
        for event in &found[..n] {
            if event.u64 == KERNEL {
                kernel = true;
            } else if let Some(original) = registered.get(&(event.u64 as c_int)) {
                to[written] = epoll_event {
                    events: event.events,
                    u64: original.u64,
                };
                written += 1;
            }
        }
        drop(registered);
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
