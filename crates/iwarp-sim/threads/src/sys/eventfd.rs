//! A simulated eventfd.

use super::poller::AsFd;
use crate::world::{self, Plant};
use std::io;

#[derive(Debug)]
pub(crate) struct EventFd(usize);

impl EventFd {
    #[allow(clippy::unnecessary_wraps, reason = "the real function can fail")]
    pub(crate) fn new() -> io::Result<Self> {
        world::call();
        Ok(Self(world::descriptor()))
    }

    /// Makes the descriptor readable.
    pub(crate) fn signal(&self) {
        if world::has_plant(Plant::LosesSignals) && world::random(2) == 0 {
            return;
        }
        self.signal_reliably();
    }

    /// Like [`signal`](Self::signal), but [`Plant::LosesSignals`] has no effect.
    pub(crate) fn signal_reliably(&self) {
        world::call();
        world::arrive(self.0);
    }

    /// Resets the flag. Returns `true` if it was set.
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
