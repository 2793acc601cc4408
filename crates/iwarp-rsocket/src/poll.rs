//! `rpoll` and `rselect` for any mixture of rsockets and ordinary descriptors. `repoll` uses the
//! same code to wait. A datagram socket is an ordinary descriptor.

use crate::errno::{Errno, Result};
use crate::notify::{Joined, Waiter, Waiters, sys_poll};
use crate::settings::Settings;
use crate::socket::{Socket, after_empty_poll};
use crate::spin;
use crate::table;
use libc::{c_int, fd_set, pollfd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Waits for an event on any of the descriptors; without a timeout, waits forever. Returns the
/// number of descriptors with events.
///
/// # Errors
/// EINTR if a signal handler ran, and the other errors of poll(2).
pub fn poll(fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize> {
    poll_unchanged(fds, timeout, None)
}

/// Ends a wait when the list of descriptors has changed.
pub(crate) struct Watch<'a> {
    pub(crate) waiters: &'a Arc<Waiters>,
    /// Returns `true` if the list has changed since the wait began.
    pub(crate) changed: &'a dyn Fn() -> bool,
}

/// As [`poll`], but returns 0 as soon as `watch` reports a change. Fails as [`poll`].
pub(crate) fn poll_unchanged(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    watch: Option<&Watch<'_>>,
) -> Result<usize> {
    let sockets: Vec<_> = fds.iter().map(|f| table::find_stream(f.fd)).collect();
    if watch.is_none() && sockets.iter().all(Option::is_none) {
        return sys_poll(fds, timeout);
    }
    let start = Instant::now();
    let mut call = Call {
        set: kernel_set(fds, &sockets),
        fds,
        sockets,
        deadline: timeout.and_then(|t| start.checked_add(t)),
        watch,
    };
    if let Some(n) = call.spin(start, spin::window())? {
        return Ok(n);
    }
    let n = call.sleep()?;
    if n > 0 {
        spin::slept(start.elapsed());
    }
    Ok(n)
}

/// Returns the set for the kernel. Ordinary descriptors keep their positions; a stream socket's
/// position is empty. An additional last entry is for wake-ups.
fn kernel_set(fds: &[pollfd], sockets: &[Option<Arc<Socket>>]) -> Vec<pollfd> {
    fds.iter()
        .zip(sockets)
        .map(|(f, s)| pollfd {
            fd: if s.is_some() { -1 } else { f.fd },
            events: f.events,
            revents: 0,
        })
        .chain([pollfd {
            fd: -1,
            events: libc::POLLIN,
            revents: 0,
        }])
        .collect()
}

struct Call<'a> {
    fds: &'a mut [pollfd],
    sockets: Vec<Option<Arc<Socket>>>,
    set: Vec<pollfd>,
    deadline: Option<Instant>,
    watch: Option<&'a Watch<'a>>,
}

impl Call<'_> {
    fn changed(&self) -> bool {
        self.watch.is_some_and(|w| (w.changed)())
    }

    /// Polls for a short time and drives the rsockets. Returns `None` when it is time to sleep.
    fn spin(&mut self, start: Instant, window: Duration) -> Result<Option<usize>> {
        let ordinary = self.set.iter().any(|f| f.fd >= 0);
        // Driving costs system calls, which a program that finds its sockets ready does not need.
        let mut drive = false;
        loop {
            let mut n = self.check_rsockets(drive, false);
            if ordinary {
                sys_poll(&mut self.set, Some(Duration::ZERO))?;
                n += self.collect();
            }
            if n > 0 {
                if drive {
                    spin::hit();
                }
                return Ok(Some(n));
            }
            let now = Instant::now();
            if self.changed() {
                return Ok(Some(0));
            }
            if !std::mem::replace(&mut drive, true) {
                continue;
            }
            after_empty_poll();
            if self.deadline.is_some_and(|d| now >= d) {
                return Ok(Some(0));
            }
            let elapsed = now.duration_since(start);
            if elapsed >= window {
                spin::miss(window, elapsed);
                return Ok(None);
            }
        }
    }

    fn sleep(&mut self) -> Result<usize> {
        let waiter = Waiter::for_this_thread()?;
        let _joined: Vec<Joined> = self
            .sockets
            .iter()
            .flatten()
            .map(|s| s.waiters())
            .chain(self.watch.map(|w| w.waiters))
            .map(|waiters| waiters.join(&waiter))
            .collect();
        if let Some(last) = self.set.last_mut() {
            last.fd = waiter.raw_fd();
        }
        loop {
            if self.changed() {
                return Ok(0);
            }
            let n = self.check_rsockets(false, true);
            let now = Instant::now();
            let remaining = self.deadline.map(|d| d.saturating_duration_since(now));
            // If an rsocket is ready already, only check the ordinary descriptors.
            let sleep = match (n, waiter.take_signal()) {
                (0, false) => {
                    let max = Settings::get().wake_up_interval;
                    remaining.map_or(max, |r| r.min(max))
                }
                _ => Duration::ZERO,
            };
            sys_poll(&mut self.set, Some(sleep))?;
            if self.set.last().is_some_and(|f| f.revents != 0) {
                waiter.drain();
            }
            let n = n + self.collect();
            if n > 0 {
                return Ok(n);
            }
            if remaining.is_some_and(|r| r.is_zero()) {
                return Ok(0);
            }
        }
    }

    fn check_rsockets(&mut self, drive: bool, arm: bool) -> usize {
        let mut n = 0;
        for (fd, socket) in self.fds.iter_mut().zip(&self.sockets) {
            if let Some(socket) = socket {
                fd.revents = socket.poll_events(fd.events, drive, arm);
                n += usize::from(fd.revents != 0);
            }
        }
        n
    }

    fn collect(&mut self) -> usize {
        let mut n = 0;
        for ((fd, socket), got) in self.fds.iter_mut().zip(&self.sockets).zip(&self.set) {
            if socket.is_none() {
                fd.revents = got.revents;
                n += usize::from(got.revents != 0);
            }
        }
        n
    }
}

/// The three sets of `select`; each may be null.
#[derive(Debug, Clone, Copy)]
pub struct Sets {
    /// Descriptors to read from.
    pub read: *mut fd_set,
    /// Descriptors to write to.
    pub write: *mut fd_set,
    /// Descriptors to check for exceptional conditions.
    pub except: *mut fd_set,
}

/// As [`poll`], with sets, which are replaced by the sets of ready descriptors.
///
/// # Errors
/// EINVAL if `count` is negative or too large for a set; EBADF if a descriptor is not open; EINTR.
///
/// # Safety
/// Each set is null or valid for reading and writing.
pub unsafe fn select(count: c_int, sets: Sets, timeout: Option<Duration>) -> Result<usize> {
    const READ: i16 = libc::POLLIN | libc::POLLHUP | libc::POLLERR | libc::POLLRDNORM;
    const WRITE: i16 = libc::POLLOUT | libc::POLLERR | libc::POLLWRNORM;
    if !usize::try_from(count).is_ok_and(|n| n <= libc::FD_SETSIZE) {
        return Err(Errno::INVAL);
    }
    let mut fds = Vec::new();
    for fd in 0..count {
        let event_if_set = |set: *mut fd_set, event: i16| {
            // SAFETY: the set is valid, as the caller guarantees; `fd` is below FD_SETSIZE.
            if !set.is_null() && unsafe { libc::FD_ISSET(fd, set) } {
                event
            } else {
                0
            }
        };
        let events = event_if_set(sets.read, libc::POLLIN)
            | event_if_set(sets.write, libc::POLLOUT)
            | event_if_set(sets.except, libc::POLLPRI);
        if events != 0 {
            fds.push(pollfd {
                fd,
                events,
                revents: 0,
            });
        }
    }
    poll(&mut fds, timeout)?;
    if fds.iter().any(|f| f.revents & libc::POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    for set in [sets.read, sets.write, sets.except] {
        if !set.is_null() {
            // SAFETY: the set is valid, as the caller guarantees.
            unsafe { libc::FD_ZERO(set) };
        }
    }
    let mut n = 0;
    for f in &fds {
        let mut mark = |set: *mut fd_set, wanted: i16, events: i16| {
            if f.events & wanted != 0 && f.revents & events != 0 {
                // SAFETY: the set was read above, so it is not null.
                unsafe { libc::FD_SET(f.fd, set) };
                n += 1;
            }
        };
        mark(sets.read, libc::POLLIN, READ);
        mark(sets.write, libc::POLLOUT, WRITE);
        mark(sets.except, libc::POLLPRI, libc::POLLPRI);
    }
    Ok(n)
}
