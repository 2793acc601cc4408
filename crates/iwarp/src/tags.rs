//! Shared receive queues that match messages with tags (`IBV_SRQT_TM`, `ibv_post_srq_ops(3)`).
//!
//! [`iwarp_rnic::tags`] implements the matching. Here the list of tagged buffers is protected by
//! the lock of its shared receive queue. Its buffers complete in one completion queue, regardless
//! of the queue pair that receives the message.

use crate::conn::effects::overflowed;
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::objects::cq::{CompletionQueue, Owed};
use crate::objects::srq::SharedReceiveQueue;
use iwarp_rnic::tags::{MAX_TAGS, TagError, TagList, TaggedBuffer};
use iwarp_rnic::{Cqe, WcFlags, WcOpcode, WcStatus};

/// An operation on the list of tagged buffers.
#[derive(Debug, Clone, Copy)]
pub enum TagOperation<'a> {
    /// Post a buffer (`IBV_WR_TAG_ADD`).
    Add(TaggedBuffer<'a>),
    /// Remove the buffer with this handle (`IBV_WR_TAG_DEL`).
    Remove(u32),
    /// Only pass on [`TagRequest::handled`] (`IBV_WR_TAG_SYNC`).
    Synchronize,
}

/// A request to the list of tagged buffers.
#[derive(Debug, Clone, Copy)]
pub struct TagRequest<'a> {
    /// The program's value, which is returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: TagOperation<'a>,
    /// `true` to write a completion on success. Errors always write one.
    pub signaled: bool,
    /// Number of messages without a matching buffer that the program has handled since the queue
    /// was created, modulo 2^32. Posted buffers are not matched until the program has handled all
    /// such messages.
    pub handled: Option<u32>,
}

impl Context {
    /// Creates a shared receive queue that matches messages with up to `max_tags` tagged buffers.
    /// Messages complete in `cq`, regardless of the receive completion queue of the queue pair. The
    /// queue pairs have to be reliable connections.
    ///
    /// # Errors
    /// The errors of [`create_srq`](Self::create_srq), and [`Error::InvalidArgument`] if `max_tags`
    /// is 0 or above 1024.
    pub fn create_tag_srq(
        &self,
        cq: &CompletionQueue,
        pd: u32,
        depth: u32,
        max_sge: u32,
        max_tags: u32,
    ) -> Result<SharedReceiveQueue> {
        if max_tags == 0 || max_tags > MAX_TAGS {
            return Err(Error::InvalidArgument("max_tags must be from 1 to 1024"));
        }
        SharedReceiveQueue::create_for(
            &self.inner,
            pd,
            (depth, max_sge),
            None,
            Some((cq, max_tags)),
        )
    }
}

/// Tag matching.
impl SharedReceiveQueue {
    /// Returns the completion queue of a queue that matches tags; `None` for other queues.
    pub fn tag_cq(&self) -> Option<&CompletionQueue> {
        self.inner.tags.as_ref()
    }

    /// Performs a request to the list of tagged buffers (`ibv_post_srq_ops(3)`). Never blocks.
    /// Returns the handle of a posted buffer.
    ///
    /// # Errors
    /// - [`Error::OutOfMemory`]: the list is full.
    /// - [`Error::InvalidArgument`]: the buffer has more elements than
    ///   [`MAX_TAG_SGE`](iwarp_rnic::tags::MAX_TAG_SGE), the handle is unknown, or the queue does
    ///   not match tags.
    /// - [`Error::InvalidState`]: the queue was destroyed.
    ///
    /// If a message has already consumed a buffer that is to be removed, the call succeeds, and the
    /// completion has the status [`WcStatus::TagMatching`].
    pub fn post_tag(&self, request: &TagRequest<'_>) -> Result<Option<u32>> {
        let Some(cq) = self.tag_cq() else {
            return Err(Error::InvalidArgument("the queue does not match tags"));
        };
        let mut owed = Owed::default();
        // The completion is written before the list is unlocked, so that no message completes in
        // the buffer earlier.
        let result = self.inner.with_queue(|queue| {
            let tags = queue.tags()?;
            Some(perform(tags, request).map(|(handle, cqe)| {
                if request.signaled || cqe.status != WcStatus::Success {
                    cq.inner.push(&mut cq.inner.ring.lock(), cqe, &mut owed);
                }
                handle
            }))
        });
        if cq.inner.raise_due(owed) {
            overflowed([cq]);
        }
        match result {
            Some(Ok(handle)) => Ok(handle),
            Some(Err(TagError::Full)) => Err(Error::OutOfMemory),
            Some(Err(_)) => Err(Error::InvalidArgument(
                "unknown tagged buffer, or a buffer with too many elements",
            )),
            None => Err(Error::InvalidState("the queue is destroyed")),
        }
    }
}

/// Performs a request. Returns the new buffer's handle and the completion.
fn perform(
    tags: &mut TagList,
    request: &TagRequest<'_>,
) -> std::result::Result<(Option<u32>, Cqe), TagError> {
    if let Some(handled) = request.handled {
        tags.synchronize(handled);
    }
    let mut status = WcStatus::Success;
    let mut handle = None;
    let opcode = match request.operation {
        TagOperation::Add(buffer) => {
            handle = Some(tags.add(&buffer)?);
            WcOpcode::TagAdd
        }
        TagOperation::Remove(handle) => {
            match tags.remove(handle) {
                Err(TagError::Gone) => status = WcStatus::TagMatching,
                result => result?,
            }
            WcOpcode::TagRemove
        }
        TagOperation::Synchronize => WcOpcode::TagSync,
    };
    let flags = match tags.is_synchronized() {
        true => WcFlags::empty(),
        false => WcFlags::TAG_SYNC,
    };
    let cqe = Cqe {
        wr_id: request.wr_id,
        status,
        opcode,
        flags,
        ..Cqe::default()
    };
    Ok((handle, cqe))
}

#[cfg(test)]
mod tests {
    use crate::testing;

    #[test]
    fn list_size_is_limited() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        for (tags, fits) in [(0, false), (1, true), (1024, true), (1025, false)] {
            match ctx.create_tag_srq(&cq, 1, 4, 1, tags) {
                Ok(queue) => assert!(fits && queue.tag_cq().is_some_and(|own| own.is_same(&cq))),
                // The error contains the valid range.
                Err(error) => assert!(!fits && error.to_string().contains("1 to 1024"), "{error}"),
            }
        }
    }
}
