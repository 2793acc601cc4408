//! Waiting: any change of a socket that a thread watches wakes the thread.
//!
//! Invariant: a waiter first enters the list of a socket, then asks the RNIC for a wake-up, then looks at the socket
//! once more, then sleeps. A thread that changes a socket signals afterwards. So no change is missed. While a waiter is
//! signalled, only the list is locked, because wake-ups come from calls that hold a socket's lock.

use crate::errno::{Errno, Result};
use crate::fork;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Wake;
use std::time::{Duration, Instant};

/// What a thread sleeps on. Its descriptor can be in a set for `poll` together with others.
#[derive(Debug)]
pub(crate) struct Waiter {
    fd: OwnedFd,
    signalled: AtomicBool,
    generation: u32,
}

thread_local! {
    static OWN: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
}

impl Waiter {
    fn new() -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            signalled: AtomicBool::new(false),
            generation: fork::generation(),
        }))
    }

    /// Returns the calling thread's own waiter.
    pub(crate) fn of_thread() -> Result<Arc<Self>> {
        let own = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            match &*own {
                // A waiter inherited by a fork would wake the parent, too.
                Some(waiter) if waiter.generation == fork::generation() => Ok(Arc::clone(waiter)),
                _ => Ok(Arc::clone(own.insert(Self::new()?))),
            }
        });
        // A thread that is ending has none any more.
        own.unwrap_or_else(|_| Self::new())
    }

    /// Wakes the thread, now or at its next wait.
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            // It can fail only if the counter is full, and then the thread wakes anyway.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Returns the descriptor, for a set of descriptors.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Returns `true` if there was a signal already, so that there is no need to sleep.
    pub(crate) fn take_signal(&self) -> bool {
        self.signalled.swap(false, Ordering::AcqRel)
    }

    /// Call it after the descriptor became readable. It drops signals; the caller looks at its sockets afterwards.
    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        self.signalled.store(false, Ordering::Release);
    }

    /// Sleeps until a signal or the deadline. Returns `false` at the deadline.
    ///
    /// # Errors
    /// [`Errno::INTR`] if a signal handler ran.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        if self.take_signal() {
            return Ok(true);
        }
        let mut set = [libc::pollfd {
            fd: self.raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        if sys_poll(&mut set, left)? == 0 {
            return Ok(false);
        }
        self.drain();
        Ok(true)
    }
}

/// Calls `poll` by its system call, because the C library's function may be the one that led here.
///
/// # Errors
/// [`Errno::INTR`], and what else ppoll(2) names.
pub(crate) fn sys_poll(set: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<usize> {
    let limit = timeout.map(|t| libc::timespec {
        // No wait lasts 68 years, and this fits into the seconds of every C library.
        tv_sec: t.as_secs().min(i32::MAX as u64) as _,
        tv_nsec: libc::c_long::from(t.subsec_nanos()),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let no_mask = std::ptr::null::<libc::sigset_t>();
    // SAFETY: the set and the time are valid for the call; no signal mask is given.
    let n = unsafe {
        libc::syscall(
            libc::SYS_ppoll,
            set.as_mut_ptr(),
            set.len(),
            limit,
            no_mask,
            size_of::<u64>(),
        )
    };
    usize::try_from(n).map_err(|_| Errno::last())
}

/// The threads that wait for a change of one socket.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    count: AtomicUsize,
    list: Mutex<Vec<Arc<Waiter>>>,
}

impl Waiters {
    /// Enters a waiter until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>, waiter: &Arc<Waiter>) -> Entered {
        let mut list = self.list.lock();
        list.push(Arc::clone(waiter));
        self.count.store(list.len(), Ordering::SeqCst);
        Entered {
            waiters: Arc::clone(self),
            waiter: Arc::clone(waiter),
        }
    }

    /// Wakes all waiters after a change.
    pub(crate) fn notify(&self) {
        if self.count.load(Ordering::SeqCst) > 0 {
            for waiter in &*self.list.lock() {
                waiter.signal();
            }
        }
    }
}

/// Takes a waiter off the list when it is dropped.
#[derive(Debug)]
pub(crate) struct Entered {
    waiters: Arc<Waiters>,
    waiter: Arc<Waiter>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut list = self.waiters.list.lock();
        if let Some(at) = list.iter().position(|w| Arc::ptr_eq(w, &self.waiter)) {
            list.swap_remove(at);
        }
        self.waiters.count.store(list.len(), Ordering::SeqCst);
    }
}

/// Called by the RNIC when there is a completion.
#[derive(Debug)]
pub(crate) struct CompletionWaker(pub(crate) Arc<Waiters>);

impl Wake for CompletionWaker {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

/// Called by connection management when there is an event.
#[derive(Debug)]
pub(crate) struct EventWaker {
    pub(crate) waiters: Arc<Waiters>,
    /// A listener. Requests must be answered even if the program does not call `accept`.
    pub(crate) service: AtomicBool,
    /// Makes the service thread answer them.
    pub(crate) kick: fn(),
}

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        self.waiters.notify();
        if self.service.load(Ordering::Acquire) {
            (self.kick)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_neither_lost_nor_kept() {
        let waiters = Arc::new(Waiters::default());
        let waiter = Waiter::of_thread().unwrap();
        waiters.notify();
        let soon = || Some(Instant::now() + Duration::from_millis(10));
        {
            let _entered = waiters.enter(&waiter);
            assert!(!waiter.wait(soon()).unwrap(), "nobody signalled");
            waiters.notify();
            waiters.notify();
            assert!(waiter.wait(soon()).unwrap());
            let told = AtomicBool::new(false);
            std::thread::scope(|s| {
                s.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    told.store(true, Ordering::Release);
                    waiters.notify();
                });
                // The two signals above may leave one spurious wake-up. However long the other thread takes, its signal comes.
                loop {
                    let late = Some(Instant::now() + Duration::from_secs(20));
                    assert!(waiter.wait(late).unwrap(), "the signal is lost");
                    if told.load(Ordering::Acquire) {
                        break;
                    }
                }
            });
            // A spurious wake-up may have ended the loop before the signal did.
            while waiter.wait(soon()).unwrap() {}
        }
        waiters.notify();
        assert!(!waiter.wait(soon()).unwrap(), "has left the list");
    }

    #[test]
    fn every_thread_has_its_own() {
        let mine = Waiter::of_thread().unwrap();
        assert!(Arc::ptr_eq(&mine, &Waiter::of_thread().unwrap()));
        let other = std::thread::spawn(|| Waiter::of_thread().unwrap())
            .join()
            .unwrap();
        assert!(!Arc::ptr_eq(&mine, &other));
    }
}
