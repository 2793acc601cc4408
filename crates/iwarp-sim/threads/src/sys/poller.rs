//! Simulated epoll sets. Each function is a system call.

use crate::world::{self, Set};
use std::io;
use std::time::Duration;

/// An object that has a descriptor in the world.
pub(crate) trait AsFd {
    fn number(&self) -> usize;
}

impl<T: AsFd> AsFd for &T {
    fn number(&self) -> usize {
        (**self).number()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) readable: bool,
}

impl Interest {
    pub(crate) const READ: Self = Self { readable: true };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Readiness {
    pub(crate) token: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) broken: bool,
}

#[derive(Debug)]
pub(crate) struct Events {
    capacity: usize,
    list: Vec<Readiness>,
}

impl Events {
    pub(crate) const fn with_capacity(capacity: usize) -> Self {
        let list = Vec::new();
        Self { capacity, list }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Readiness> + '_ {
        self.list.iter().copied()
    }

    fn fill(&mut self, tokens: impl Iterator<Item = u64>) -> usize {
        let events = tokens.take(self.capacity).map(|token| Readiness {
            token,
            readable: true,
            writable: false,
            broken: false,
        });
        self.list.clear();
        self.list.extend(events);
        self.list.len()
    }
}

#[derive(Debug)]
pub(crate) struct Poller(Set);

#[allow(clippy::unnecessary_wraps, reason = "the real functions can fail")]
impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Set::new()))
    }

    /// Adds a descriptor. The set also reports what arrived before the call.
    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        world::call();
        match self.0.add(fd.number(), token, interest.readable) {
            true => Ok(()),
            false => Err(io::ErrorKind::AlreadyExists.into()),
        }
    }

    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        self.remove(&fd)?;
        self.add(fd, token, interest)
    }

    pub(crate) fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        world::call();
        match self.0.remove(fd.number()) {
            true => Ok(()),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    pub(crate) fn wait(&self, events: &mut Events, time: Option<Duration>) -> io::Result<usize> {
        world::sleep_until(end_of(time), || !self.0.ready().is_empty());
        Ok(events.fill(self.0.ready().into_iter()))
    }

    pub(crate) fn wait_zero(&self, events: &mut Events) -> io::Result<usize> {
        world::call();
        Ok(events.fill(self.0.ready().into_iter()))
    }
}

/// Waits until the descriptor is readable. Returns `false` if the time expired first.
#[allow(clippy::unnecessary_wraps, reason = "the real function can fail")]
pub(crate) fn wait_fd(fd: impl AsFd, _: Interest, time: Option<Duration>) -> io::Result<bool> {
    let fd = fd.number();
    Ok(world::sleep_until(end_of(time), || world::pending(fd) > 0))
}

/// Returns the end of a sleep, counted from the thread's last reading of the clock. On a real
/// system, a thread that is preempted between reading the clock and sleeping sleeps longer. The
/// model must not report that as a bug.
fn end_of(time: Option<Duration>) -> Option<u64> {
    time.map(|time| world::last_clock_read().saturating_add(time.as_nanos() as u64))
}
