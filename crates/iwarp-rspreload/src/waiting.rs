//! `poll` and `select` for any mixture of rsockets and other descriptors.

use crate::api::{bypassed, rdma, real};
use crate::{connecting, errno, fail, table};
use libc::{c_int, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use std::time::{Duration, Instant};

/// Calls `rpoll` with placeholders replaced by their rsockets. Returns `None` if there are no
/// placeholders.
fn poll_if_rsockets(fds: &mut [pollfd], timeout: Option<Duration>) -> Option<c_int> {
    if fds.iter().all(|f| table::find(f.fd).is_none()) {
        return None;
    }
    let rdma = bypassed(rdma)?;
    let mut set: Vec<pollfd> = fds
        .iter()
        .map(|f| pollfd {
            fd: table::find(f.fd).unwrap_or(f.fd),
            revents: 0,
            ..*f
        })
        .collect();
    let (begin, ms) = (Instant::now(), milliseconds(timeout));
    // SAFETY: the set is valid.
    let result = bypassed(|| unsafe { (rdma.poll)(set.as_mut_ptr(), set.len() as nfds_t, ms) });
    if result < 0 {
        return Some(result);
    }
    let mut hidden = 0;
    for (f, got) in fds.iter_mut().zip(&set) {
        f.revents = got.revents;
        if f.revents != 0 && connecting::is_pending() && connecting::settle(f.fd, f.revents) {
            f.revents = 0;
            hidden += 1;
        }
    }
    if hidden == 0 || hidden < result {
        return Some(result - hidden);
    }
    // The only events belong to rsockets that have become TCP sockets, so wait on.
    let remaining = timeout.map(|timeout| timeout.saturating_sub(begin.elapsed()));
    Some(poll_if_rsockets(fds, remaining).unwrap_or_else(|| {
        // SAFETY: the list is valid.
        unsafe {
            real::poll(
                fds.as_mut_ptr(),
                fds.len() as nfds_t,
                milliseconds(remaining),
            )
        }
    }))
}

/// Returns a timeout for `poll`. Rounds up, so that a timeout below a millisecond does not spin.
fn milliseconds(timeout: Option<Duration>) -> c_int {
    timeout.map_or(-1, |t| {
        c_int::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
    })
}

/// Returns the entries of a C array, which may be null if it is empty.
unsafe fn slice<'a>(fds: *mut pollfd, n: nfds_t) -> &'a mut [pollfd] {
    if fds.is_null() || n == 0 {
        return &mut [];
    }
    // SAFETY: the contract of the C functions: `n` entries.
    unsafe { std::slice::from_raw_parts_mut(fds, n as usize) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int {
    let timeout_duration = u64::try_from(timeout).ok().map(Duration::from_millis);
    // SAFETY: the contract of the C function.
    unsafe {
        poll_if_rsockets(slice(fds, n), timeout_duration)
            .unwrap_or_else(|| real::poll(fds, n, timeout))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    let (timeout_duration, set) = unsafe { (timeout.as_ref().map(duration), slice(fds, n)) };
    if set.iter().all(|f| table::find(f.fd).is_none()) {
        // SAFETY: the contract of the C function.
        return unsafe { real::ppoll(fds, n, timeout, mask) };
    }
    // SAFETY: the contract of the C function.
    unsafe {
        masked(mask, || {
            poll_if_rsockets(set, timeout_duration).unwrap_or_else(|| fail(libc::EBADF))
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: c_int,
    _room: size_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe { poll(fds, n, timeout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    _room: size_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe { ppoll(fds, n, timeout, mask) }
}

pub(crate) fn duration(t: &timespec) -> Duration {
    Duration::new(
        u64::try_from(t.tv_sec).unwrap_or(0),
        u32::try_from(t.tv_nsec).unwrap_or(0).min(999_999_999),
    )
}

/// Runs `f` with the signal mask `mask`, or with the current mask if it is null. Preserves the
/// `errno` of `f`.
pub(crate) unsafe fn masked(mask: *const sigset_t, f: impl FnOnce() -> c_int) -> c_int {
    if mask.is_null() {
        return f();
    }
    // SAFETY: the mask is valid, as the caller guarantees. The old mask is written before it is
    // read.
    unsafe {
        let mut before: sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, mask, &raw mut before);
        let result = f();
        let error = errno();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        if result < 0 { fail(error) } else { result }
    }
}

/// Performs `select` with `rpoll`: converts the sets to a list, polls, and writes the result to the
/// sets. Returns `None` if there are no placeholders.
unsafe fn select_if_rsockets(
    n: c_int,
    sets: [*mut fd_set; 3],
    timeout: Option<Duration>,
) -> Option<c_int> {
    const WANTED: [i16; 3] = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
    const GOT: [i16; 3] = [
        libc::POLLIN | libc::POLLHUP | libc::POLLERR,
        libc::POLLOUT | libc::POLLERR,
        libc::POLLPRI,
    ];
    let mut fds = Vec::new();
    for fd in 0..n.clamp(0, libc::FD_SETSIZE as c_int) {
        let mut events = 0;
        for (set, wanted) in sets.iter().zip(WANTED) {
            // SAFETY: each set is null or valid, as the caller guarantees; the number is below
            // FD_SETSIZE.
            if !set.is_null() && unsafe { libc::FD_ISSET(fd, *set) } {
                events |= wanted;
            }
        }
        if events != 0 {
            fds.push(pollfd {
                fd,
                events,
                revents: 0,
            });
        }
    }
    let result = poll_if_rsockets(&mut fds, timeout)?;
    if result < 0 {
        return Some(result);
    }
    if fds.iter().any(|f| f.revents & libc::POLLNVAL != 0) {
        return Some(fail(libc::EBADF));
    }
    let mut count = 0;
    for ((set, wanted), got) in sets.into_iter().zip(WANTED).zip(GOT) {
        if set.is_null() {
            continue;
        }
        // SAFETY: as above.
        unsafe { libc::FD_ZERO(set) };
        for f in fds
            .iter()
            .filter(|f| f.events & wanted != 0 && f.revents & got != 0)
        {
            // SAFETY: as above.
            unsafe { libc::FD_SET(f.fd, set) };
            count += 1;
        }
    }
    Some(count)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe {
        let timeout_duration = timeout.as_ref().map(|t| {
            let seconds = Duration::from_secs(u64::try_from(t.tv_sec).unwrap_or(0));
            seconds.saturating_add(Duration::from_micros(u64::try_from(t.tv_usec).unwrap_or(0)))
        });
        select_if_rsockets(n, [r, w, e], timeout_duration)
            .unwrap_or_else(|| real::select(n, r, w, e, timeout))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the contract of the C function.
    unsafe {
        let timeout_duration = timeout.as_ref().map(duration);
        let mut ours = true;
        let result = masked(mask, || {
            select_if_rsockets(n, [r, w, e], timeout_duration).unwrap_or_else(|| {
                ours = false;
                0
            })
        });
        if ours {
            result
        } else {
            real::pselect(n, r, w, e, timeout, mask)
        }
    }
}
