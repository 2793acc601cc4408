//! Shared receive queues that match messages with tags (`IBV_SRQT_TM`, `ibv_post_srq_ops(3)`).
//!
//! The rules are the engine's ([`iwarp_rnic::tags`]). Here the list is locked with its queue, and completes in one completion queue what becomes
//! of its buffers, whichever queue pair a message has come to.

use crate::conn::effects::overflowed;
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::objects::cq::{CompletionQueue, Owed};
use crate::objects::srq::SharedReceiveQueue;
use iwarp_rnic::tags::{MAX_TAGS, TagError, TagList, TaggedBuffer};
use iwarp_rnic::{Cqe, WcFlags, WcOpcode, WcStatus};

/// What is to be done with the list of tagged buffers.
#[derive(Debug, Clone, Copy)]
pub enum TagOperation<'a> {
    /// Post a buffer (`IBV_WR_TAG_ADD`).
    Add(TaggedBuffer<'a>),
    /// Take the buffer with this handle away (`IBV_WR_TAG_DEL`).
    Remove(u32),
    /// Nothing but what [`TagRequest::handled`] says (`IBV_WR_TAG_SYNC`).
    Synchronize,
}

/// A request to the list of tagged buffers.
#[derive(Debug, Clone, Copy)]
pub struct TagRequest<'a> {
    /// A number of the program's, which comes back in the completion.
    pub wr_id: u64,
    /// What is to be done.
    pub operation: TagOperation<'a>,
    /// Writes a completion. One that tells of an error is written in any case.
    pub signaled: bool,
    /// How many messages that matched no buffer the program knows, since the queue was made, modulo 2^32. Until it knows all of them, buffers
    /// that it posts are not matched.
    pub handled: Option<u32>,
}

impl Context {
    /// Makes a shared receive queue that matches messages with up to `max_tags` tagged buffers. What comes to its queue pairs completes in `cq`, whichever
    /// completion queue they have for receives. They are reliable connections.
    ///
    /// # Errors
    /// As [`create_srq`](Self::create_srq).
    pub fn create_tag_srq(
        &self,
        cq: &CompletionQueue,
        pd: u32,
        depth: u32,
        max_sge: u32,
        max_tags: u32,
    ) -> Result<SharedReceiveQueue> {
        if max_tags == 0 || max_tags > MAX_TAGS {
            return Err(Error::InvalidArgument(
                "a list has from 1 to 1024 tagged buffers",
            ));
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
    /// Returns the completion queue of a queue that matches tags; `None` if it is another queue.
    pub fn tag_cq(&self) -> Option<&CompletionQueue> {
        self.inner.tags.as_ref()
    }

    /// Carries out a request to the list of tagged buffers (`ibv_post_srq_ops(3)`). Never blocks. Returns the handle of a buffer that was posted.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the list is full; [`Error::InvalidArgument`] for more elements than [`MAX_TAG_SGE`](iwarp_rnic::tags::MAX_TAG_SGE), for
    /// a handle that was never given, and for a queue that does not match tags. A buffer that a message has taken already is no error of
    /// this call: the completion says so ([`WcStatus::TagMatching`]).
    pub fn post_tag(&self, request: &TagRequest<'_>) -> Result<Option<u32>> {
        let Some(cq) = self.tag_cq() else {
            return Err(Error::InvalidArgument("the queue does not match tags"));
        };
        let mut owed = Owed::default();
        // The completion is written before the list is unlocked, so that no message completes in the buffer earlier.
        let result = self.inner.with_queue(|queue| {
            let tags = queue.tags()?;
            Some(carry_out(tags, request).map(|(handle, cqe)| {
                if request.signaled || cqe.status != WcStatus::Success {
                    cq.inner.push(&mut cq.inner.ring.lock(), cqe, &mut owed);
                }
                handle
            }))
        });
        if cq.inner.settle(owed) {
            overflowed([cq]);
        }
        match result {
            Some(Ok(handle)) => Ok(handle),
            Some(Err(TagError::Full)) => Err(Error::OutOfMemory),
            Some(Err(_)) => Err(Error::InvalidArgument(
                "no such tagged buffer, or one of too many elements",
            )),
            None => Err(Error::InvalidState("the queue is destroyed")),
        }
    }
}

/// Carries a request out, and makes its completion.
fn carry_out(
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
    fn a_list_is_not_empty_and_not_too_long() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        for (tags, fits) in [(0, false), (1, true), (1024, true), (1025, false)] {
            match ctx.create_tag_srq(&cq, 1, 4, 1, tags) {
                Ok(queue) => assert!(fits && queue.tag_cq().is_some_and(|own| own.is_same(&cq))),
                // The program learns which of the sizes is wrong.
                Err(error) => assert!(!fits && error.to_string().contains("1 to 1024"), "{error}"),
            }
        }
    }
}
