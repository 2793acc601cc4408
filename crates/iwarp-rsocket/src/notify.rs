//! Wake-ups: a change of a socket wakes the threads that wait for it.
//!
//! Invariant: a waiter first joins a socket's list, then requests a wake-up from the RNIC, then
//! checks the socket again, then sleeps. A thread that changes a socket signals the list
//! afterwards, so no change is missed. A signal locks only the list, because the signalling thread
//! may hold a socket's lock.

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

/// An object on which a thread sleeps. Its descriptor can be polled together with others.
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

    /// Returns the waiter of the calling thread.
    pub(crate) fn for_this_thread() -> Result<Arc<Self>> {
        let own = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            match &*own {
                // A waiter inherited by a fork would also wake the parent.
                Some(waiter) if waiter.generation == fork::generation() => Ok(Arc::clone(waiter)),
                _ => Ok(Arc::clone(own.insert(Self::new()?))),
            }
        });
        // The waiter of an exiting thread was already dropped.
        own.unwrap_or_else(|_| Self::new())
    }

    /// Wakes the thread, now or at its next wait.
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            // This fails only if the counter is full, which wakes the thread, too.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Clears a pending signal. Returns `true` if there was one: the thread must not sleep then.
    pub(crate) fn take_signal(&self) -> bool {
        self.signalled.swap(false, Ordering::AcqRel)
    }

    /// Clears signals after the descriptor became readable. The caller then checks its sockets.
    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        self.signalled.store(false, Ordering::Release);
    }

    /// Sleeps until a signal or the deadline. Returns `false` at the deadline. Fails with
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
        let remaining = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        if sys_poll(&mut set, remaining)? == 0 {
            return Ok(false);
        }
        self.drain();
        Ok(true)
    }
}

/// Polls with the system call, because a preloaded `poll` may call this function. Fails with
/// [`Errno::INTR`], and the other errors of ppoll(2).
pub(crate) fn sys_poll(set: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<usize> {
    let limit = timeout.map(|t| libc::timespec {
        // At most 68 years, which fit into the type of every C library.
        tv_sec: t.as_secs().min(i32::MAX as u64) as _,
        tv_nsec: libc::c_long::from(t.subsec_nanos()),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let no_mask = std::ptr::null::<libc::sigset_t>();
    // SAFETY: `set` and `limit` are valid during the call; a null signal mask is allowed.
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

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    count: AtomicUsize,
    list: Mutex<Vec<Arc<Waiter>>>,
}

impl Waiters {
    /// Adds a waiter to the list, until the returned value is dropped.
    pub(crate) fn join(self: &Arc<Self>, waiter: &Arc<Waiter>) -> Joined {
        let mut list = self.list.lock();
        list.push(Arc::clone(waiter));
        self.count.store(list.len(), Ordering::SeqCst);
        Joined {
            waiters: Arc::clone(self),
            waiter: Arc::clone(waiter),
        }
    }

    pub(crate) fn notify(&self) {
        if self.count.load(Ordering::SeqCst) > 0 {
            for waiter in &*self.list.lock() {
                waiter.signal();
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Joined {
    waiters: Arc<Waiters>,
    waiter: Arc<Waiter>,
}

impl Drop for Joined {
    fn drop(&mut self) {
        let mut list = self.waiters.list.lock();
        if let Some(i) = list.iter().position(|w| Arc::ptr_eq(w, &self.waiter)) {
            list.swap_remove(i);
        }
        self.waiters.count.store(list.len(), Ordering::SeqCst);
    }
}

#[derive(Debug)]
pub(crate) struct CompletionWaker(pub(crate) Arc<Waiters>);

impl Wake for CompletionWaker {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

#[derive(Debug)]
pub(crate) struct EventWaker {
    pub(crate) waiters: Arc<Waiters>,
    /// The socket listens: connection requests must be answered even if the program does not call
    /// `accept`.
    pub(crate) is_listening: AtomicBool,
    /// Wakes the service thread, which answers connection requests.
    pub(crate) kick: fn(),
}

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        self.waiters.notify();
        if self.is_listening.load(Ordering::Acquire) {
            (self.kick)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_signal_wakes_once() {
        let waiters = Arc::new(Waiters::default());
        let waiter = Waiter::for_this_thread().unwrap();
        waiters.notify();
        let soon = || Some(Instant::now() + Duration::from_millis(10));
        {
            let _joined = waiters.join(&waiter);
            assert!(!waiter.wait(soon()).unwrap(), "there was no signal");
            waiters.notify();
            waiters.notify();
            assert!(waiter.wait(soon()).unwrap());
            let signalled = AtomicBool::new(false);
            std::thread::scope(|s| {
                s.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    signalled.store(true, Ordering::Release);
                    waiters.notify();
                });
                // The signals above may leave one spurious wake-up. The other thread's signal still
                // arrives.
                loop {
                    let deadline = Some(Instant::now() + Duration::from_secs(20));
                    assert!(waiter.wait(deadline).unwrap(), "the signal is lost");
                    if signalled.load(Ordering::Acquire) {
                        break;
                    }
                }
            });
            // A spurious wake-up may have ended the loop, so the signal may still be pending.
            while waiter.wait(soon()).unwrap() {}
        }
        waiters.notify();
        assert!(!waiter.wait(soon()).unwrap(), "it has left the list");
        assert_eq!(waiters.count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn inherited_waiter_is_replaced() {
        let mut inherited = Waiter::new().unwrap();
        Arc::get_mut(&mut inherited).unwrap().generation += 1;
        OWN.set(Some(Arc::clone(&inherited)));
        let own = Waiter::for_this_thread().unwrap();
        assert!(!Arc::ptr_eq(&own, &inherited));
    }

    #[test]
    fn each_thread_has_a_waiter() {
        let mine = Waiter::for_this_thread().unwrap();
        assert!(Arc::ptr_eq(&mine, &Waiter::for_this_thread().unwrap()));
        let other = std::thread::spawn(|| Waiter::for_this_thread().unwrap())
            .join()
            .unwrap();
        assert!(!Arc::ptr_eq(&mine, &other));
    }
}
