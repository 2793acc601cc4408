//! An operation: the future of a request, from its start to its result.

#![allow(
    private_interfaces,
    reason = "the trait is sealed: programs name the types, but cannot call its functions"
)]

use super::farewell::Farewell;
use super::handle::{Connection, Inner};
use super::output::{Done, Yield};
use super::payload::Checked;
use super::request::{HEADER, Local, Op, Request};
use super::router::{Entry, Failure, NotQueued, Router, SlotId, Unposted};
use super::wait::{Wait, block, poll};
use crate::error::{Error, Result};
use crate::failure::Refusal;
use crate::verbs::MemoryRegion;
use iwarp_rnic::{PostError, WcStatus};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

#[derive(Debug)]
enum Stage {
    New,
    /// Refused; it can never be posted.
    Refused(Box<Error>),
    /// Posted, or in the backlog.
    Started(SlotId),
    Over,
}

/// A request on a connection: a future, and a blocking call ([`wait`](Self::wait)).
///
/// It starts when it is first polled or waited for, or by [`started`](Self::started), so that
/// several requests can be in flight. It owns a handle of the connection, and its data unless that
/// was passed by reference. So it can be moved to another task.
///
/// # Order
///
/// The requests of a connection are posted in the order in which they start, also those of
/// different tasks and threads if one starts after the other. If the send queue is full
/// ([`Options::send_depth`](super::Options::send_depth)), a request is queued, and posted by the
/// connection as soon as earlier ones have completed, even if no task waits for it. Any number of
/// operations can be started, and awaited in any order.
///
/// The peer receives Sends, and places Writes, in this order. A Read may be answered before earlier
/// Writes are placed at *this* end's memory, but it sees all earlier Writes of this end. Reads and
/// atomics are answered in order. An operation that follows a Read does not wait for the answer.
///
/// # Cancellation
///
/// Dropping an operation is safe at any time. If it has not started, nothing happens. If it was
/// started by [`started`](Self::started), or posted, the request is still executed and its result
/// discarded; its memory is kept until then. If it was only polled or waited for and is still
/// queued, it is removed from the queue. Forgetting a started operation ([`std::mem::forget`])
/// leaks a slot, and its memory.
#[must_use = "it does nothing unless it is awaited, waited for, or started"]
#[derive(Debug)]
pub struct Operation<'a, Y: Yield> {
    inner: Arc<Inner>,
    request: Request<'a>,
    stage: Stage,
    /// Only if spans are recorded, to cost nothing otherwise.
    span: Option<Box<tracing::Span>>,
    /// It has been posted or queued.
    begun: bool,
    /// It stays in the backlog when it is dropped.
    detached: bool,
    result: Y,
}

/// Operations are moved into lists and tasks, which must be cheap.
const _: () = assert!(size_of::<Operation<'_, Done>>() <= 128);

impl<'a, Y: Yield> Operation<'a, Y> {
    #[inline]
    pub(super) fn new(
        connection: &Connection,
        checked: Checked,
        request: Request<'a>,
        result: Y,
    ) -> Self {
        let stage = match checked {
            Ok(()) => Stage::New,
            Err(error) => Stage::Refused(error),
        };
        let span = match tracing::enabled!(tracing::Level::DEBUG) {
            true => Some(request.span(connection)),
            false => None,
        };
        Self {
            inner: Arc::clone(&connection.inner),
            request,
            stage,
            span,
            begun: false,
            detached: false,
            result,
        }
    }

    /// Starts the request now: posts it, or queues it if the send queue is full. Does not block.
    /// Errors are returned when it is awaited or waited for.
    ///
    /// Requests started in quick succession may be sent together: when the program waits for
    /// something on the connection, when enough have gathered, or after 0.1 ms.
    #[inline]
    pub fn started(mut self) -> Self {
        self.detach();
        self
    }

    /// Starts the request if it has not started. It is executed even if the operation is dropped.
    #[inline]
    pub(super) fn detach(&mut self) {
        self.detached = true;
        if matches!(self.stage, Stage::New) && !self.inner.router.origin.is_foreign() {
            self.start();
        }
    }

    /// Blocks until the operation completes. The thread polls briefly before it sleeps, if the last
    /// waits were short.
    ///
    /// # Errors
    /// [`Error::Refused`]: the request is invalid; [`Error::Operation`]: it failed;
    /// [`Error::Closed`]: the connection was already closed.
    #[inline]
    pub fn wait(mut self) -> Result<Y::Output> {
        match self.has_succeeded() {
            Some(id) => self.take_result(id),
            None => block(&mut self, None),
        }
    }

    /// Blocks until the operation completes, for at most `limit`.
    ///
    /// # Errors
    /// See [`wait`](Self::wait); [`Error::TimedOut`]: the operation is dropped, and its request may
    /// still be executed.
    pub fn wait_for(mut self, limit: Duration) -> Result<Y::Output> {
        block(&mut self, Some(limit))
    }

    pub(super) const fn with_header(mut self, header: [u8; HEADER]) -> Self {
        self.request.header = header;
        self.request.octets += HEADER as u64;
        self
    }

    /// Returns `true` if its data is copied when it is posted.
    pub(super) const fn is_copied(&self) -> bool {
        matches!(self.request.local, Local::Copied(_))
    }

    /// Returns the data that is copied when it is posted, if it has not been posted.
    pub(super) fn unsent(&self) -> Option<&[u8]> {
        match self.stage {
            Stage::New => self.request.local.copied(),
            _ => None,
        }
    }

    /// Ends it without posting it, because its data has been copied to a later request.
    pub(super) fn supersede(&mut self) {
        self.stage = Stage::Over;
        self.begun = true;
    }

    /// Makes it another operation, which `op` creates from the length of the data. If there is
    /// `staging`, copies the data to this memory, and sends them from there.
    pub(super) fn aim(
        &mut self,
        staging: Option<(MemoryRegion, Farewell)>,
        op: impl FnOnce(u32) -> Op,
    ) -> Result<()> {
        if let Some((memory, farewell)) = staging {
            memory.write_at(0, self.request.local.copied().unwrap_or_default())?;
            self.request.local = Local::Staged(memory, farewell);
        }
        let len = u32::try_from(self.request.octets);
        self.request.op = op(len.map_err(|_| Error::Post(PostError::MessageTooLong))?);
        Ok(())
    }

    /// Adds it to the backlog, without posting it. It is executed even if the operation is dropped.
    /// Call [`Router::post_queued`] soon.
    pub(super) fn enqueue(&mut self) {
        self.detached = true;
        if matches!(self.stage, Stage::New) {
            self.queue_with(Router::enqueue);
        }
    }

    /// Returns `true` if it was posted or queued, and its result has not been taken.
    #[cfg(test)]
    pub(super) const fn is_started(&self) -> bool {
        matches!(self.stage, Stage::Started(_))
    }

    /// Returns `true` if its data was copied, and the connection stays until it has completed.
    pub(super) const fn is_staged(&self) -> bool {
        matches!(self.request.local, Local::Staged(..))
    }

    pub(super) const fn is_refused(&self) -> bool {
        matches!(self.stage, Stage::Refused(_))
    }

    /// Returns the slot if the request succeeded. Results are large, so they are read separately.
    #[inline]
    fn has_succeeded(&self) -> Option<SlotId> {
        match self.stage {
            Stage::Started(id)
                if self.router().outcome(id) == Some(true)
                    && !self.router().origin.is_foreign() =>
            {
                Some(id)
            }
            _ => None,
        }
    }

    #[inline]
    fn take_result(&mut self, id: SlotId) -> Result<Y::Output> {
        if Y::ANSWERS {
            self.result.read(&self.inner, id)?;
        }
        self.stage = Stage::Over;
        self.inner.router.release(id);
        if let Some(span) = &self.span {
            span.in_scope(|| tracing::trace!("completed"));
        }
        self.result.finish(&mut self.request.local)
    }

    fn start(&mut self) {
        if let Local::Owned(_) = self.request.local
            && let Err(error) = self.request.register_long(&self.inner)
        {
            return self.refuse(error);
        }
        let id = match self.inner.router.enter(1) {
            Entry::Taken(id) => id,
            Entry::Full => return self.queue(),
            Entry::Ended => return self.refuse(Error::Post(PostError::InvalidState)),
        };
        // Set before posting: moving a value right after writing it is slow.
        self.stage = Stage::Started(id);
        self.begun = true;
        let posted = {
            let _entered = self.span.as_ref().map(|span| span.enter());
            tracing::trace!("posting");
            self.request.post(&self.inner, id, self.request.send_op())
        };
        if let Err(error) = posted {
            self.inner.router.withdraw(id);
            self.begun = false;
            self.refuse(error);
        }
    }

    #[cold]
    fn queue(&mut self) {
        self.queue_with(Router::queue);
    }

    fn queue_with(
        &mut self,
        queue: impl FnOnce(&Router, u32, Unposted) -> Result<SlotId, Box<NotQueued>>,
    ) {
        let request = self.request.queued();
        match queue(&self.inner.router, 1, request) {
            Ok(id) => {
                self.stage = Stage::Started(id);
                self.begun = true;
            }
            Err(refused) => self.refuse(refused.0),
        }
    }

    #[cold]
    fn refuse(&mut self, error: Error) {
        self.stage = Stage::Refused(Box::new(self.refusal(error)));
    }

    /// Returns the error of a request that was not posted.
    fn refusal(&self, error: Error) -> Error {
        match error {
            // The end of the connection may not have been noticed yet.
            Error::Post(PostError::InvalidState) => self.failure(WcStatus::Flushed),
            Error::Post(error) => Error::Refused(Refusal::Post(error)),
            error => error,
        }
    }

    #[cold]
    fn failure(&self, status: WcStatus) -> Error {
        let kind = self.request.op.kind();
        self.inner.failure(kind, self.request.octets, status)
    }

    /// Takes the error of a failed request, if it has completed.
    #[cold]
    fn take_failure(&mut self, id: SlotId) -> Poll<Error> {
        let Some(result) = self.router().collect(id) else {
            return Poll::Pending;
        };
        self.stage = Stage::Over;
        Poll::Ready(match result {
            Err(Failure::Completed(status)) => self.failure(status),
            Err(Failure::Refused(error)) => self.refusal(error),
            // Only called for requests that did not succeed.
            Ok(()) => self.failure(WcStatus::General),
        })
    }

    #[cold]
    fn give_error(&mut self) -> Error {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Refused(error) => *error,
            _ => Error::InvalidState("the operation has ended already"),
        }
    }
}

impl<Y: Yield> Wait for Operation<'_, Y> {
    type Output = Y::Output;

    #[inline]
    fn poll_now(&mut self) -> Poll<Result<Y::Output>> {
        if matches!(self.stage, Stage::New) {
            self.start();
        }
        match self.stage {
            Stage::Started(id) => match self.router().outcome(id) {
                None => Poll::Pending,
                Some(true) => Poll::Ready(self.take_result(id)),
                Some(false) => self.take_failure(id).map(Err),
            },
            Stage::New | Stage::Refused(_) | Stage::Over => Poll::Ready(Err(self.give_error())),
        }
    }

    fn is_likely_ready(&self) -> bool {
        match self.stage {
            Stage::Started(id) => self.router().outcome(id).is_some(),
            _ => false,
        }
    }

    fn register(&mut self, waker: &Waker) {
        if let Stage::Started(id) = self.stage {
            self.router().wait_for_end_of(id, waker);
        }
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    #[inline]
    fn router(&self) -> &Router {
        &self.inner.router
    }
}

impl<Y: Yield + Unpin> Future for Operation<'_, Y> {
    type Output = Result<Y::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        poll(self.get_mut(), cx.waker())
    }
}

impl<Y: Yield> Drop for Operation<'_, Y> {
    #[inline]
    fn drop(&mut self) {
        if let Stage::Started(id) = self.stage {
            self.abandon(id);
        }
    }
}

impl<Y: Yield> Operation<'_, Y> {
    #[cold]
    fn abandon(&mut self, id: SlotId) {
        let router = &self.inner.router;
        if router.origin.is_foreign() || (!self.detached && router.cancel(id).is_some()) {
            return;
        }
        let local = std::mem::replace(&mut self.request.local, Local::None);
        router.abandon(id, local.into_held());
    }
}
