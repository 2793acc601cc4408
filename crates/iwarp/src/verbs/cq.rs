//! Completion queues and their channels.

use crate::error::Result;
use crate::owned;
use crate::runtime;
use iwarp_rnic::Cqe;
use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

/// A completion queue (`ibv_create_cq(3)`). A clone is another handle to it. Several queue pairs may share one.
///
/// ```
/// use iwarp::verbs::{CompletionQueue, Cqe};
/// use std::time::Duration;
///
/// /// Sleeps until something is finished, for at most a second.
/// fn blocking(cq: &CompletionQueue, out: &mut [Cqe]) -> iwarp::Result<usize> {
///     cq.wait(out, Some(Duration::from_secs(1)))
/// }
///
/// /// Never sleeps: the shortest latency, and a processor of its own.
/// fn polling(cq: &CompletionQueue, out: &mut [Cqe]) -> iwarp::Result<usize> {
///     loop {
///         let n = cq.poll_cq(out)?;
///         if n > 0 {
///             return Ok(n);
///         }
///         std::hint::spin_loop();
///     }
/// }
///
/// /// As a task of any runtime.
/// async fn asynchronous(cq: &CompletionQueue, out: &mut [Cqe]) -> iwarp::Result<usize> {
///     cq.completions(out).await
/// }
/// ```
#[derive(Debug, Clone)]
pub struct CompletionQueue(pub(crate) runtime::CompletionQueue);

impl CompletionQueue {
    /// Takes up to `out.len()` completions (`ibv_poll_cq(3)`). Never blocks. If there are none, this thread reads and writes the sockets
    /// of the queue's queue pairs, which gives the lowest latency.
    ///
    /// # Errors
    /// [`Error::CompletionQueueOverflow`](crate::Error::CompletionQueueOverflow), when those from before the overflow are taken.
    #[inline]
    pub fn poll_cq(&self, out: &mut [Cqe]) -> Result<usize> {
        Ok(self.0.poll(out)?)
    }

    /// Asks for one event on the channel at the next completion (`ibv_req_notify_cq(3)`); with `solicited_only`, at the next one that is
    /// solicited or has failed. Completions that wait already raise no event, so poll once more after this.
    pub fn req_notify_cq(&self, solicited_only: bool) {
        self.0.arm(solicited_only);
    }

    /// Waits for completions and takes up to `out.len()` of them; `None` waits without limit. The thread sleeps meanwhile. If the last waits
    /// on this queue were short, it polls for up to [`Config::busy_poll`](crate::Config::busy_poll) before it sleeps.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut); [`Error::CompletionQueueOverflow`](crate::Error::CompletionQueueOverflow);
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an empty `out`.
    pub fn wait(&self, out: &mut [Cqe], timeout: Option<Duration>) -> Result<usize> {
        self.0.wait(out, timeout)
    }

    /// Waits for completions in a task of any runtime; see [`wait`](Self::wait), also for the errors. Dropping the future loses none.
    pub fn completions<'a>(&'a self, out: &'a mut [Cqe]) -> Completions<'a> {
        Completions(self.0.completions(out))
    }

    /// Wakes a task at the next completion. Poll once more after this, then wait. The waker is called once.
    pub fn wake_at_next(&self, waker: &Waker) {
        self.0.wake_at_next(waker);
    }

    /// Changes how many completions it can hold (`ibv_resize_cq(3)`), and keeps those that wait.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument): fewer than wait, or above the limit;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn resize_cq(&self, cqe: u32) -> Result<()> {
        self.0.resize(cqe)
    }

    /// Stamps completions from now on with the monotonic clock, in nanoseconds. This costs one clock reading for each completion.
    pub fn enable_timestamps(&self) {
        self.0.enable_timestamps();
    }

    /// Returns how many completions it can hold.
    pub fn capacity(&self) -> u32 {
        self.0.capacity()
    }

    /// Returns how many completions wait.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if no completion waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns `true` if both handles mean the same queue.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.is_same(&other.0)
    }
}

/// The future of [`CompletionQueue::completions`]. It returns how many completions were taken. Dropping it loses none.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Completions<'a>(owned::Completions<'a>);

impl Future for Completions<'_> {
    type Output = Result<usize>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Result<usize>> {
        Pin::new(&mut self.0).poll(cx)
    }
}

/// A completion channel (`ibv_create_comp_channel(3)`): the events of any number of completion queues. Its descriptor is readable while an
/// event waits.
///
/// ```
/// use iwarp::verbs::{CompletionChannel, Cqe};
///
/// /// Serves all queues that report to a channel.
/// fn serve(channel: &CompletionChannel, mut each: impl FnMut(&Cqe)) -> iwarp::Result<()> {
///     let mut done = [Cqe::default(); 16];
///     loop {
///         let cq = channel.get_cq_event(None)?;
///         cq.req_notify_cq(false);
///         loop {
///             let n = cq.poll_cq(&mut done)?;
///             done[..n].iter().for_each(&mut each);
///             if n == 0 {
///                 break;
///             }
///         }
///     }
/// }
/// ```
#[derive(Debug, Clone)]
pub struct CompletionChannel(pub(crate) runtime::CompletionChannel);

impl CompletionChannel {
    /// Waits for an event (`ibv_get_cq_event(3)`), and blocks the thread; `None` waits without limit. Returns the queue that got a completion
    /// after it was armed. Events need no acknowledgement.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut); the operating system's.
    pub fn get_cq_event(&self, timeout: Option<Duration>) -> Result<CompletionQueue> {
        self.0.event(timeout).map(CompletionQueue)
    }

    /// Takes the oldest event, without waiting.
    pub fn try_get_cq_event(&self) -> Option<CompletionQueue> {
        self.0.try_event().map(CompletionQueue)
    }

    /// Waits for an event in a task of any runtime. Dropping the future loses none.
    pub async fn cq_event(&self) -> CompletionQueue {
        CompletionQueue(self.0.events().recv().await)
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
