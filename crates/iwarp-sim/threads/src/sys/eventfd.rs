//! An event flag with a descriptor.

use super::poller::AsFd;
use crate::world::{self, Plant};
use std::io;

#[derive(Debug)]
pub(crate) struct EventFd(usize);

impl EventFd {
    #[allow(clippy::unnecessary_wraps, reason = "the real one can fail")]
    pub(crate) fn new() -> io::Result<Self> {
        world::call();
        Ok(Self(world::descriptor()))
    }

    /// A system call.
    pub(crate) fn signal(&self) {
        if world::has(Plant::LosesSignals) && world::random(2) == 0 {
            return;
        }
        self.raise();
    }

    /// Like [`signal`](Self::signal), for the threads of programs.
    pub(crate) fn raise(&self) {
        world::call();
        world::arrive(self.0);
    }

    /// A system call.
    pub(crate) fn drain(&self) -> bool {
        world::call();
        world::take_all(self.0) > 0
    }
}

impl AsFd for EventFd {
    fn number(&self) -> usize {
        self.0
    }
}
