//! Event queues in tokio's reactor (feature `tokio`).
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> iwarp::Result<()> {
//! use iwarp::{tokio::Watched, verbs::{Config, Context, Device}};
//! # use std::time::Duration;
//! let ctx = Context::open(&Device::by_address("127.0.0.1".parse().unwrap())?, Config::default())?;
//! let events = Watched::new(ctx)?;
//! tokio::select! {
//!     event = events.next() => println!("{event:?}"),
//!     () = tokio::time::sleep(Duration::from_millis(1)) => println!("all is quiet"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The crate's futures need no runtime: its progress threads wake the task. This module is for
//! programs that want tokio's reactor to watch a file descriptor, for example beside other sockets
//! in one `select!`, and for completion channels shared by many completion queues.

use crate::error::Result;
use crate::objects::wait::require_room;
use crate::runtime::AsyncEvent;
use crate::runtime::CompletionChannel;
use crate::runtime::CompletionQueue;
use crate::runtime::Context;
use crate::runtime::EventQueue;
use iwarp_rnic::Cqe;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

mod sealed {
    pub trait Sealed {}
}

/// A source of events with a file descriptor that is readable while events are pending.
pub trait EventSource: sealed::Sealed {
    /// Type of the events.
    type Event;

    /// Takes the oldest event. Does not block.
    fn take(&self) -> Option<Self::Event>;

    /// Duplicates the file descriptor.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io): no file descriptors left.
    fn descriptor(&self) -> Result<OwnedFd>;
}

impl sealed::Sealed for CompletionChannel {}
impl EventSource for CompletionChannel {
    type Event = CompletionQueue;

    fn take(&self) -> Option<CompletionQueue> {
        self.try_event()
    }

    fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self.as_fd().try_clone_to_owned()?)
    }
}

impl<T> sealed::Sealed for Arc<EventQueue<T>> {}
impl<T> EventSource for Arc<EventQueue<T>> {
    type Event = T;

    fn take(&self) -> Option<T> {
        self.try_next()
    }

    fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self.as_fd().try_clone_to_owned()?)
    }
}

impl sealed::Sealed for Context {}
/// Yields the asynchronous events of the device.
impl EventSource for Context {
    type Event = AsyncEvent;

    fn take(&self) -> Option<AsyncEvent> {
        self.try_async_event()
    }

    fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self.async_fd().try_clone_to_owned()?)
    }
}

/// An event source in tokio's reactor. See the [module](self).
#[derive(Debug)]
pub struct Watched<S> {
    source: S,
    fd: AsyncFd<OwnedFd>,
}

impl<S: EventSource> Watched<S> {
    /// Registers the source. Call it within a runtime whose I/O driver is enabled.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io): no file descriptors left.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(source: S) -> Result<Self> {
        let fd = source.descriptor()?;
        // The function that replaces this one came with tokio 1.53.3 and is `unsafe`, because
        // descriptors of some types may change. An `OwnedFd` does not.
        #[allow(deprecated)]
        let fd = AsyncFd::with_interest(fd, Interest::READABLE)?;
        Ok(Self { source, fd })
    }

    /// Returns the source.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Waits for the next event. Cancel safe: dropping the future loses no event.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io): the runtime is shutting down.
    pub async fn next(&self) -> Result<S::Event> {
        loop {
            // Several events may have made the descriptor readable only once.
            if let Some(event) = self.source.take() {
                return Ok(event);
            }
            let mut ready = self.fd.readable().await?;
            match self.source.take() {
                Some(event) => return Ok(event),
                // An event that arrives now makes the descriptor readable again, even after the
                // readiness is cleared.
                None => ready.clear_ready(),
            }
        }
    }
}

impl Watched<CompletionChannel> {
    /// Waits for completions of `cq`, which reports to this channel, and takes up to `out.len()` of
    /// them. Discards events of other queues that arrive meanwhile, so use one task per channel.
    ///
    /// # Errors
    /// [`Error::CompletionQueueOverflow`](crate::Error::CompletionQueueOverflow),
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `out` is empty, and the errors
    /// of [`next`](Self::next).
    pub async fn completions(&self, cq: &CompletionQueue, out: &mut [Cqe]) -> Result<usize> {
        require_room(out)?;
        loop {
            let n = cq.poll(out)?;
            if n > 0 {
                return Ok(n);
            }
            cq.arm(false);
            // A completion may have arrived between the poll and the arming of the queue.
            let n = cq.poll(out)?;
            if n > 0 {
                return Ok(n);
            }
            self.next().await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::cq::Owed;
    use crate::testing;
    use std::time::Duration;

    #[tokio::test]
    async fn any_completion_ends_the_wait() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let cq = ctx.create_cq(4, Some(&channel)).unwrap();
        let watched = Watched::new(channel).unwrap();
        let no_room = watched.completions(&cq, &mut []);
        let no_room = tokio::time::timeout(Duration::from_secs(20), no_room).await;
        assert!(matches!(no_room, Ok(Err(_))), "it waits for ever");
        let mut out = [Cqe::default(); 2];
        let complete = async {
            let mut owed = Owed::default();
            let inner = &cq.inner;
            inner.push(&mut inner.ring.lock(), Cqe::default(), &mut owed);
            inner.raise_due(owed);
        };
        let wait = async { tokio::join!(watched.completions(&cq, &mut out), complete).0 };
        let found = tokio::time::timeout(Duration::from_secs(20), wait).await;
        assert!(matches!(found, Ok(Ok(1))), "{found:?}");
    }
}
