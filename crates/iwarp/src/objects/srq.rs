//! Shared receive queues (`ibv_create_srq(3)`).

use super::any_qp::AnyQp;
use super::context::ContextInner;
use super::cq::CompletionQueue;
use super::events::AsyncEventKind;
use crate::engine::baton::Baton;
use crate::error::{PostFailed, Result};
use iwarp_rnic::receive_queue::{SharedReceiveQueue as Queue, Taken, TakenRecv};
use iwarp_rnic::{PostError, RecvWr};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

pub(crate) struct XrcMembership {
    pub(crate) number: u32,
    /// Gets the completions of the receives, whichever XRC target takes them.
    pub(crate) cq: CompletionQueue,
    /// Removes the queue from the list of its domain.
    pub(crate) forget: Box<dyn Fn() + Send + Sync>,
}

pub(crate) struct SrqInner {
    ctx: Arc<ContextInner>,
    pub(crate) pd: u32,
    /// Set if the queue belongs to an XRC domain.
    pub(crate) xrc: Option<XrcMembership>,
    /// If the queue matches tags, the queue for its completions.
    pub(crate) tags: Option<CompletionQueue>,
    user: AtomicU64,
    /// Held by the thread that drives waiting queue pairs.
    driver: Baton,
    state: Mutex<SrqState>,
}

struct SrqState {
    queue: Queue,
    /// Queue pairs that hold a Send until a receive is posted here.
    waiting: Vec<Weak<dyn AnyQp>>,
    /// The program has destroyed the queue. XRC targets may still hold a reference to it.
    destroyed: bool,
}

/// A receive queue that several queue pairs share (`ibv_create_srq(3)`).
#[derive(Clone)]
pub struct SharedReceiveQueue {
    pub(crate) inner: Arc<SrqInner>,
}

impl SharedReceiveQueue {
    pub(crate) fn create(
        ctx: &Arc<ContextInner>,
        pd: u32,
        depth: u32,
        max_sge: u32,
    ) -> Result<Self> {
        Self::create_for(ctx, pd, (depth, max_sge), None, None)
    }

    pub(crate) fn create_for(
        ctx: &Arc<ContextInner>,
        pd: u32,
        (depth, max_sge): (u32, u32),
        xrc: Option<XrcMembership>,
        tags: Option<(&CompletionQueue, u32)>,
    ) -> Result<Self> {
        let mut queue = Queue::new(depth, max_sge)?;
        if let Some((_, max_tags)) = tags {
            queue.match_tags(max_tags)?;
        }
        let state = Mutex::new(SrqState {
            queue,
            waiting: Vec::new(),
            destroyed: false,
        });
        Ok(Self {
            inner: Arc::new(SrqInner {
                ctx: Arc::clone(ctx),
                pd,
                xrc,
                tags: tags.map(|(cq, _)| cq.clone()),
                user: AtomicU64::new(0),
                driver: Baton::new(),
                state,
            }),
        })
    }

    /// Returns the program's own value for this queue, 0 if none was set.
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Sets [`user_data`](Self::user_data).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Returns the number by which peers address the queue (`ibv_get_srq_num(3)`); `None` if it
    /// belongs to no XRC domain.
    pub fn num(&self) -> Option<u32> {
        self.inner.xrc.as_ref().map(|xrc| xrc.number)
    }

    /// Destroys the queue (`ibv_destroy_srq(3)`). Messages that wait for a receive are refused,
    /// later messages get no receives, and peers can no longer address the queue. Destroy the queue
    /// pairs that use it first.
    pub fn destroy(&self) {
        let waiting = {
            let mut state = self.inner.state.lock();
            state.destroyed = true;
            std::mem::take(&mut state.waiting)
        };
        if let Some(xrc) = &self.inner.xrc {
            (xrc.forget)();
        }
        for qp in waiting.iter().filter_map(Weak::upgrade) {
            qp.resume_receiving();
        }
    }

    /// Returns the protection domain.
    pub fn pd(&self) -> u32 {
        self.inner.pd
    }

    /// Posts receives, in order (`ibv_post_srq_recv(3)`). Never blocks.
    ///
    /// # Errors
    /// Returns [`PostFailed`] for the first request that does not fit. The requests before it are
    /// posted.
    pub fn post(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        let mut result = Ok(());
        let queue_pairs_wait = {
            let mut state = self.inner.state.lock();
            for (i, wr) in wrs.iter().enumerate() {
                if let Some(plan) = &self.inner.ctx.hooks.faults
                    && plan.refuses_shared_receive()
                {
                    result = Err(PostFailed::new(i, PostError::QueueFull));
                    break;
                }
                if let Err(e) = state.queue.post(wr) {
                    result = Err(PostFailed::new(i, e));
                    break;
                }
            }
            !state.waiting.is_empty()
        };
        if queue_pairs_wait {
            self.inner.drive_waiting();
        }
        result
    }

    /// Returns the capacity, the maximum number of SGEs per request, and the limit.
    pub fn attributes(&self) -> (u32, u32, u32) {
        let state = self.inner.state.lock();
        (
            state.queue.capacity(),
            state.queue.max_sge(),
            state.queue.limit(),
        )
    }

    /// Requests one event when fewer than `limit` receives are posted. Zero cancels the request.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `limit` is above the
    /// capacity.
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        Ok(self.inner.state.lock().queue.set_limit(limit)?)
    }

    /// Changes the capacity and keeps the posted receives.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the capacity is out of
    /// range or too small for the queue's contents, and
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the queue cannot be allocated.
    pub fn resize(&self, depth: u32) -> Result<()> {
        Ok(self.inner.state.lock().queue.resize(depth)?)
    }

    /// Changes the capacity, the limit, or both. On an error, neither changes.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if a value is out of range
    /// or the capacity is too small for the queue's contents, and
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the queue cannot be allocated.
    pub fn modify(&self, depth: Option<u32>, limit: Option<u32>) -> Result<()> {
        Ok(self.inner.state.lock().queue.modify(depth, limit)?)
    }

    /// Returns the number of posted receives.
    pub fn len(&self) -> usize {
        self.inner.state.lock().queue.len() as usize
    }

    /// Returns `true` if no receive is posted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns `true` if both handles refer to the same queue.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl SrqInner {
    /// Takes a receive. Returns whether there was one, and whether the caller must call
    /// [`raise_limit_event`](Self::raise_limit_event) when it holds no lock.
    pub(crate) fn take(&self, taken: &mut TakenRecv) -> (bool, bool) {
        let mut state = self.state.lock();
        match state.destroyed {
            true => (false, false),
            false => state.queue.take(taken),
        }
    }

    pub(crate) fn with_queue<R>(&self, f: impl FnOnce(&mut Queue) -> Option<R>) -> Option<R> {
        let mut state = self.state.lock();
        match state.destroyed {
            true => None,
            false => f(&mut state.queue),
        }
    }

    /// Drives the queue pairs that wait for a receive. Call it with no lock held.
    ///
    /// A driven queue pair may return its receive and call this function again. The baton turns
    /// that recursion, which could be as deep as there are queue pairs, into a loop.
    pub(crate) fn drive_waiting(&self) {
        self.driver.drive(|| {
            let waiting = std::mem::take(&mut self.state.lock().waiting);
            for qp in waiting.iter().filter_map(Weak::upgrade) {
                qp.resume_receiving();
            }
        });
    }

    pub(crate) fn has_waiting(&self) -> bool {
        let state = self.state.lock();
        !state.waiting.is_empty() && !state.queue.is_empty()
    }

    /// Does the same as [`take`](Self::take), but only if the receive has room for `len` bytes.
    pub(crate) fn take_if_fits(&self, taken: &mut TakenRecv, len: u64) -> (Taken, bool) {
        let mut state = self.state.lock();
        match state.destroyed {
            true => (Taken::None, false),
            false => state.queue.take_if_fits(taken, len),
        }
    }

    /// Raises the event that fewer receives than the limit are posted.
    #[cold]
    pub(crate) fn raise_limit_event(self: &Arc<Self>) {
        let srq = SharedReceiveQueue {
            inner: Arc::clone(self),
        };
        self.ctx.raise(AsyncEventKind::SrqLimitReached(srq));
    }

    /// Adds a queue pair that holds a Send to those that wait for a receive. Returns `false` if
    /// there is a receive, or if the queue is destroyed.
    pub(crate) fn wait<M: AnyQp>(&self, qp: &Arc<M>) -> bool {
        let mut state = self.state.lock();
        if state.destroyed || !state.queue.is_empty() {
            return false;
        }
        let weak: Weak<dyn AnyQp> = Arc::downgrade(qp) as _;
        if !state.waiting.iter().any(|w| w.ptr_eq(&weak)) {
            state.waiting.push(weak);
        }
        true
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        if let Some(xrc) = &self.xrc {
            (xrc.forget)();
        }
    }
}

impl std::fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (capacity, ..) = self.attributes();
        f.debug_struct("SharedReceiveQueue")
            .field("capacity", &capacity)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "srq_tests.rs"]
mod tests;
