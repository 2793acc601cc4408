//! The two ways to wait: as a future of any runtime, or by blocking the thread.

use super::router::Router;
use crate::error::{Error, Result};
use crate::objects::wait::with_thread_waker;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

pub(super) trait Wait {
    type Output;

    /// Starts the operation if necessary, and checks whether it is complete. Does not read the
    /// socket.
    fn poll_now(&mut self) -> Poll<Result<Self::Output>>;

    /// Returns `true` if [`poll_now`](Self::poll_now) is likely to be ready. Cheap.
    fn is_likely_ready(&self) -> bool;

    /// Registers a waker for the next change.
    fn register(&mut self, waker: &Waker);

    /// Returns `true` if its own request has started. A waker that was registered before is not
    /// called when the request completes.
    fn has_begun(&self) -> bool {
        false
    }

    /// Returns the router of its completion.
    fn router(&self) -> &Router;
}

#[inline]
pub(super) fn poll<W: Wait>(what: &mut W, waker: &Waker) -> Poll<Result<W::Output>> {
    what.router().check_process()?;
    let begun = what.has_begun();
    match what.poll_now() {
        Poll::Ready(done) => Poll::Ready(done),
        Poll::Pending => poll_later(what, what.has_begun() && !begun, waker),
    }
}

/// Continues with an operation that is not complete. `began` is `true` if it was just posted.
fn poll_later<W: Wait>(what: &mut W, began: bool, waker: &Waker) -> Poll<Result<W::Output>> {
    if began && what.router().lets_others_post() {
        // The next poll checks for the completion.
        waker.wake_by_ref();
        return Poll::Pending;
    }
    // Otherwise the thread that writes the completion calls the waker.
    if !what.router().is_watched() {
        what.router().drive();
        let done = what.poll_now();
        if done.is_ready() {
            return done;
        }
    }
    register_and_poll(what, waker)
}

/// Registers a waker, and checks again: the event may have happened before the waker was
/// registered. If that check starts the request, for example because there is a credit now,
/// registers the waker for its completion.
fn register_and_poll<W: Wait>(what: &mut W, waker: &Waker) -> Poll<Result<W::Output>> {
    loop {
        let begun = what.has_begun();
        what.register(waker);
        what.router().watch();
        let done = what.poll_now();
        if done.is_ready() || what.has_begun() == begun {
            return done;
        }
    }
}

#[inline]
fn drive_and_poll<W: Wait>(what: &mut W) -> Poll<Result<W::Output>> {
    what.router().check_process()?;
    let done = what.poll_now();
    if done.is_ready() {
        return done;
    }
    what.router().drive();
    what.poll_now()
}

/// Blocks until the operation completes; `None` waits without limit. The thread polls briefly
/// before it sleeps, if the last waits were short.
///
/// # Errors
/// [`Error::TimedOut`], and those of the operation.
#[inline]
pub(super) fn block<W: Wait>(what: &mut W, timeout: Option<Duration>) -> Result<W::Output> {
    match drive_and_poll(what) {
        Poll::Ready(done) => done,
        Poll::Pending => sleep(what, timeout),
    }
}

fn sleep<W: Wait>(what: &mut W, timeout: Option<Duration>) -> Result<W::Output> {
    let begin = Instant::now();
    let deadline = timeout.and_then(|t| begin.checked_add(t));
    let limit = timeout.unwrap_or(Duration::MAX);
    let busy = {
        let what = &*what;
        let cq = &what.router().cq;
        cq.busy_poll_until(limit, || what.is_likely_ready())
    };
    if busy && let Poll::Ready(done) = drive_and_poll(what) {
        return done;
    }
    loop {
        if let Poll::Ready(done) = with_thread_waker(|waker| register_and_poll(what, waker)) {
            return done;
        }
        match deadline {
            None => std::thread::park(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Error::TimedOut("the operation did not complete in time"));
                }
                std::thread::park_timeout(left);
            }
        }
        if let Poll::Ready(done) = drive_and_poll(what) {
            what.router().cq.record_sleep(begin.elapsed());
            return done;
        }
    }
}

/// Makes a type with [`Wait`] a future, and adds the blocking calls.
macro_rules! impl_future_and_wait {
    ([$($generics:tt)*] $type:ty => $output:ty) => {
        impl<$($generics)*> $type {
            /// Blocks until the operation completes.
            ///
            /// # Errors
            /// See the call that created it.
            pub fn wait(mut self) -> $crate::error::Result<$output> {
                $crate::connection::wait::block(&mut self, None)
            }

            /// Blocks until the operation completes, for at most `limit`.
            ///
            /// # Errors
            /// See the call that created it; [`Error::TimedOut`](crate::Error::TimedOut): the
            /// operation is dropped.
            pub fn wait_for(
                mut self,
                limit: std::time::Duration,
            ) -> $crate::error::Result<$output> {
                $crate::connection::wait::block(&mut self, Some(limit))
            }
        }

        impl<$($generics)*> std::future::Future for $type {
            type Output = $crate::error::Result<$output>;

            fn poll(
                self: std::pin::Pin<&mut Self>,
                cx: &mut std::task::Context<'_>,
            ) -> std::task::Poll<Self::Output> {
                $crate::connection::wait::poll(self.get_mut(), cx.waker())
            }
        }
    };
    ($type:ty => $output:ty) => {
        impl_future_and_wait!([] $type => $output);
    };
}

pub(super) use impl_future_and_wait;

#[cfg(all(test, not(miri)))]
#[path = "wait_tests.rs"]
mod tests;
