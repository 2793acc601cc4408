//! A pollable flag: the file descriptor behind completion channels and connection-event channels.
//!
//! No `unsafe`. The descriptor is readable from the first [`EventFd::signal`] until the next
//! [`EventFd::drain`], regardless of the number of signals. So it works with level-triggered
//! `poll`, `select` and `epoll`.

use super::poller::{Interest, wait_fd};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

/// A non-blocking, close-on-exec eventfd.
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
}

impl EventFd {
    /// Creates a descriptor that is not readable yet.
    ///
    /// # Errors
    /// No descriptor (`EMFILE`, `ENFILE`) or memory (`ENOMEM`) is left.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd })
    }

    /// Makes the descriptor readable. A thread that drains it sees all memory that was written
    /// before the call.
    pub fn signal(&self) {
        loop {
            match write(&self.fd, &1u64.to_ne_bytes()) {
                Err(Errno::INTR) => {}
                // If the counter is full, the descriptor is already readable. No other error can
                // occur on a descriptor that we own.
                Ok(_) | Err(_) => return,
            }
        }
    }

    /// Makes the descriptor unreadable. Returns `true` if it was signaled.
    pub fn drain(&self) -> bool {
        self.take() > 0
    }

    /// Like [`drain`](Self::drain), but returns the number of signals since the last drain.
    pub fn take(&self) -> u64 {
        let mut count = [0u8; 8];
        loop {
            let got = match self.read_without_waiting(&mut count) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::SPIPE) => {
                    self.take_if_readable(&mut count)
                }
                other => other,
            };
            match got {
                Ok(_) => return u64::from_ne_bytes(count),
                Err(Errno::INTR) => {}
                Err(_) => return 0,
            }
        }
    }

    /// Reads the counter. Does not rely on O_NONBLOCK: programs get the descriptor, and may clear
    /// the flag.
    fn read_without_waiting(&self, count: &mut [u8; 8]) -> Result<usize, Errno> {
        if cfg!(miri) {
            return Err(Errno::NOSYS);
        }
        let mut list = [IoSliceMut::new(count)];
        preadv2(&self.fd, &mut list, u64::MAX, ReadWriteFlags::NOWAIT)
    }

    /// Replaces the read on kernels before 5.8, where eventfds do not support `RWF_NOWAIT`.
    fn take_if_readable(&self, count: &mut [u8; 8]) -> Result<usize, Errno> {
        match wait_fd(self, Interest::READ, Some(Duration::ZERO)) {
            Ok(true) => read(&self.fd, &mut count[..]),
            _ => Err(Errno::AGAIN),
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_is_readable_until_drained() {
        let event = EventFd::new().expect("eventfd");
        let readable = |limit| wait_fd(&event, Interest::READ, Some(limit)).expect("poll");
        assert!(!readable(Duration::ZERO));
        assert!(!event.drain());
        event.signal();
        event.signal();
        event.signal();
        assert!(readable(Duration::ZERO));
        assert!(readable(Duration::ZERO), "level-triggered");
        assert_eq!(event.take(), 3);
        assert!(!readable(Duration::ZERO));
        assert!(!event.drain());
    }

    #[test]
    fn signal_wakes_poll() {
        let event = EventFd::new().expect("eventfd");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                event.signal();
            });
            assert!(wait_fd(&event, Interest::READ, Some(Duration::from_secs(10))).expect("poll"));
        });
        assert!(event.drain());
    }

    #[test]
    fn drain_never_blocks() {
        let event = EventFd::new().expect("eventfd");
        rustix::io::ioctl_fionbio(&event, false).expect("blocking");
        assert!(!event.drain());
        let mut count = [0u8; 8];
        assert_eq!(event.take_if_readable(&mut count), Err(Errno::AGAIN));
        event.signal();
        assert_eq!(event.take_if_readable(&mut count), Ok(8));
        event.signal();
        assert!(event.drain());
        assert!(!event.drain());
    }

    #[test]
    fn descriptor_is_closed_on_exec() {
        let event = EventFd::new().expect("eventfd");
        let flags = rustix::io::fcntl_getfd(&event).expect("flags");
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
