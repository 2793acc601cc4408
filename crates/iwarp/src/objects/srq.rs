//! Shared receive queues (`ibv_create_srq(3)`).

use super::context::ContextInner;
use super::cq::CompletionQueue;
use super::events::AsyncEventKind;
use super::member::Member;
use crate::error::{PostFailed, Result};
use crate::progress::baton::Baton;
use iwarp_rnic::receive_queue::{SharedReceiveQueue as Queue, Taken, TakenRecv};
use iwarp_rnic::{PostError, RecvWr};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// What makes a shared receive queue one of an XRC domain.
pub(crate) struct XrcMembership {
    /// The number by which peers name the queue.
    pub(crate) number: u32,
    /// The receives complete here, whichever target takes them.
    pub(crate) cq: CompletionQueue,
    /// Takes the queue off the list of its domain.
    pub(crate) forget: Box<dyn Fn() + Send + Sync>,
}

pub(crate) struct SrqInner {
    ctx: Arc<ContextInner>,
    pub(crate) pd: u32,
    /// What it is in an XRC domain, if it belongs to one.
    pub(crate) xrc: Option<XrcMembership>,
    /// Where it completes, if it matches tags.
    pub(crate) tags: Option<CompletionQueue>,
    /// For the program's own use.
    user: AtomicU64,
    /// Whose thread drives those that have waited.
    turn: Baton,
    state: Mutex<SrqState>,
}

struct SrqState {
    queue: Queue,
    /// Queue pairs that hold a Send until a receive is posted here.
    waiting: Vec<Weak<dyn Member>>,
    /// The program has destroyed it. Queue pairs of an XRC domain may still have it.
    destroyed: bool,
}

/// A receive queue that several queue pairs draw from.
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
                turn: Baton::new(),
                state,
            }),
        })
    }

    /// A value of the program's own.
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Sets [`user_data`](Self::user_data).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Number by which peers name it (`ibv_get_srq_num(3)`); `None` if it belongs to no XRC domain.
    pub fn num(&self) -> Option<u32> {
        self.inner.xrc.as_ref().map(|xrc| xrc.number)
    }

    /// Destroys it (`ibv_destroy_srq(3)`): no message takes a receive from it any more, and no peer finds it. Messages that wait for it are refused.
    /// Queue pairs that were created with it must be destroyed first.
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

    /// Protection domain.
    pub fn pd(&self) -> u32 {
        self.inner.pd
    }

    /// Queues receives, in order (`ibv_post_srq_recv(3)`). Never blocks.
    ///
    /// # Errors
    /// [`PostFailed`] for the first request that does not fit; those before it were queued.
    pub fn post(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        let mut result = Ok(());
        let somebody_waits = {
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
        if somebody_waits {
            self.inner.drive_waiting();
        }
        result
    }

    /// Capacity, elements per request, and limit.
    pub fn attributes(&self) -> (u32, u32, u32) {
        let state = self.inner.state.lock();
        (
            state.queue.capacity(),
            state.queue.max_sge(),
            state.queue.limit(),
        )
    }

    /// Asks for one event when fewer than `limit` receives wait; zero disarms.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if it is above the capacity.
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        Ok(self.inner.state.lock().queue.set_limit(limit)?)
    }

    /// Changes the capacity and keeps what is posted.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn resize(&self, depth: u32) -> Result<()> {
        Ok(self.inner.state.lock().queue.resize(depth)?)
    }

    /// Changes capacity, limit, or both in one step. A refused call changes neither.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn modify(&self, depth: Option<u32>, limit: Option<u32>) -> Result<()> {
        Ok(self.inner.state.lock().queue.modify(depth, limit)?)
    }

    /// Receives that wait.
    pub fn len(&self) -> usize {
        self.inner.state.lock().queue.len() as usize
    }

    /// None waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns `true` if both handles mean the same queue.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl SrqInner {
    /// Takes a receive. Returns whether there was one, and whether [`tell_limit`](Self::tell_limit) must be called, without locks.
    pub(crate) fn take(&self, taken: &mut TakenRecv) -> (bool, bool) {
        let mut state = self.state.lock();
        match state.destroyed {
            true => (false, false),
            false => state.queue.take(taken),
        }
    }

    /// Lets `f` have the queue. Returns `None` if it is destroyed.
    pub(crate) fn with_queue<R>(&self, f: impl FnOnce(&mut Queue) -> Option<R>) -> Option<R> {
        let mut state = self.state.lock();
        match state.destroyed {
            true => None,
            false => f(&mut state.queue),
        }
    }

    /// Lets the queue pairs go on that have waited for a receive. Call it without locks.
    ///
    /// Such a queue pair may give a receive back for which others have begun to wait meanwhile. Then this goes round again, instead of
    /// calling itself as often as there are queue pairs.
    pub(crate) fn drive_waiting(&self) {
        self.turn.drive(|| {
            let waiting = std::mem::take(&mut self.state.lock().waiting);
            for qp in waiting.iter().filter_map(Weak::upgrade) {
                qp.resume_receiving();
            }
        });
    }

    /// Returns `true` if [`drive_waiting`](Self::drive_waiting) has something to do.
    pub(crate) fn has_waiting(&self) -> bool {
        let state = self.state.lock();
        !state.waiting.is_empty() && !state.queue.is_empty()
    }

    /// Takes a receive with room for `len` octets; otherwise as [`take`](Self::take).
    pub(crate) fn take_if_fits(&self, taken: &mut TakenRecv, len: u64) -> (Taken, bool) {
        let mut state = self.state.lock();
        match state.destroyed {
            true => (Taken::None, false),
            false => state.queue.take_if_fits(taken, len),
        }
    }

    /// Fewer receives than the limit wait.
    #[cold]
    pub(crate) fn tell_limit(self: &Arc<Self>) {
        let srq = SharedReceiveQueue {
            inner: Arc::clone(self),
        };
        self.ctx.raise(AsyncEventKind::SrqLimitReached(srq));
    }

    /// Enters a queue pair that holds a Send: it is told when a receive is posted. Returns `false` if one is there already.
    pub(crate) fn wait<M: Member>(&self, qp: &Arc<M>) -> bool {
        let mut state = self.state.lock();
        if state.destroyed || !state.queue.is_empty() {
            return false;
        }
        let weak: Weak<dyn Member> = Arc::downgrade(qp) as _;
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
