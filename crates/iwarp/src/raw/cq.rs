//! Completion queues: polling drives the sockets, arming hands them to the progress thread.

use super::channel::CompletionChannel;
use super::context::ContextInner;
use super::events::AsyncEventKind;
use super::qp::QpInner;
use crate::engine::Engine;
use crate::error::Result;
use crate::sys::clock::now_ns;
use iwarp_rnic::Cqe;
use iwarp_rnic::cq::{CompletionQueue as Ring, Pushed};
use parking_lot::{Mutex, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;

/// With at most this many queue pairs an empty poll reads their sockets one by one; with more it asks `epoll`.
const POLL_DIRECTLY: usize = 4;
/// Every so many empty polls, the progress thread is told that somebody drives. A clock reading costs a tenth of a poll.
const NOTE_EVERY: u32 = 8;
/// Every so many empty polls, everything else of the process is served, too.
const SERVE_ALL_EVERY: u32 = 64;

/// Why a queue gives no completions any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqError {
    /// Completions were lost because it was full.
    Overflow,
}

pub(crate) struct CqInner {
    ctx: Arc<ContextInner>,
    ring: Mutex<Ring>,
    channel: Option<CompletionChannel>,
    /// Queue pairs that report here; polling drives them.
    qps: RwLock<Vec<Weak<QpInner>>>,
    empty_polls: AtomicU32,
    /// For the program's own use.
    user: AtomicU64,
    timestamps: AtomicBool,
    /// Times it was polled; tells posting threads whether the program polls between posts.
    polls: AtomicU32,
    /// Queue pairs that have put off sending until the next poll.
    deferred: Mutex<Vec<Arc<QpInner>>>,
    has_deferred: AtomicBool,
    /// Tasks that wait for a completion.
    wakers: Mutex<Vec<Waker>>,
    has_wakers: AtomicBool,
}

/// A completion queue.
#[derive(Clone)]
pub struct CompletionQueue {
    pub(super) inner: Arc<CqInner>,
}

impl CompletionQueue {
    pub(super) fn create(
        ctx: &Arc<ContextInner>,
        capacity: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self> {
        let inner = CqInner {
            ctx: Arc::clone(ctx),
            ring: Mutex::new(Ring::new(capacity)?),
            channel: channel.cloned(),
            qps: RwLock::default(),
            empty_polls: AtomicU32::new(0),
            user: AtomicU64::new(0),
            timestamps: AtomicBool::new(false),
            polls: AtomicU32::new(0),
            deferred: Mutex::default(),
            has_deferred: AtomicBool::new(false),
            wakers: Mutex::default(),
            has_wakers: AtomicBool::new(false),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Takes up to `out.len()` completions (`ibv_poll_cq(3)`). Never blocks.
    ///
    /// If there are none, the calling thread reads and writes the sockets of the queue's queue pairs itself: a
    /// program that polls needs no other thread to make progress.
    ///
    /// # Errors
    /// [`CqError::Overflow`] once the completions from before the overflow are taken.
    #[inline]
    pub fn poll(&self, out: &mut [Cqe]) -> Result<usize, CqError> {
        self.inner.note_poll();
        let n = self.take(out)?;
        if n > 0 || out.is_empty() {
            return Ok(n);
        }
        self.inner.progress();
        self.take(out)
    }

    /// Takes what is there already, and does nothing to make more: for callers that are about to wait.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn take_ready(&self, out: &mut [Cqe]) -> Result<usize, CqError> {
        self.take(out)
    }

    #[inline]
    fn take(&self, out: &mut [Cqe]) -> Result<usize, CqError> {
        let mut ring = self.inner.ring.lock();
        match ring.poll(out) {
            0 if ring.overflowed() && !out.is_empty() => Err(CqError::Overflow),
            n => Ok(n),
        }
    }

    /// Asks for one event on the channel at the next completion (`ibv_req_notify_cq(3)`), or only at the next
    /// solicited or failed one. Completions that wait already raise none: poll once more afterwards.
    pub fn arm(&self, solicited_only: bool) {
        self.inner.ring.lock().arm(solicited_only);
        self.inner.hand_over();
    }

    /// A value of the program's own.
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Sets [`user_data`](Self::user_data).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Completions it can hold.
    pub fn capacity(&self) -> u32 {
        self.inner.ring.lock().capacity()
    }

    /// Completions that wait.
    pub fn len(&self) -> usize {
        self.inner.ring.lock().len() as usize
    }

    /// None waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes the capacity and keeps what waits (`ibv_resize_cq(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn resize(&self, capacity: u32) -> Result<()> {
        Ok(self.inner.ring.lock().resize(capacity)?)
    }

    /// Stamps completions with the monotonic clock, in nanoseconds. Costs a clock reading each.
    pub fn enable_timestamps(&self) {
        self.inner.timestamps.store(true, Ordering::Relaxed);
    }

    /// The channel it reports to.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.inner.channel.as_ref()
    }

    /// Do both handles mean the same queue?
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Queue pairs that report here.
    pub fn queue_pairs(&self) -> usize {
        self.inner
            .qps
            .read()
            .iter()
            .filter(|q| q.strong_count() > 0)
            .count()
    }

    /// Wakes a task at the next completion. Poll once more after this, then wait.
    pub fn wake_at_next(&self, waker: &Waker) {
        {
            let mut wakers = self.inner.wakers.lock();
            if !wakers.iter().any(|w| w.will_wake(waker)) {
                wakers.push(waker.clone());
            }
            self.inner.has_wakers.store(true, Ordering::Release);
        }
        self.inner.hand_over();
    }

    /// Drops the channel events that were raised for this queue and not taken.
    pub fn forget_events(&self) {
        if let Some(channel) = &self.inner.channel {
            channel.queue.retain(|cq| !cq.is_same(self));
        }
    }
}

/// What has to be done for a queue after the queue pair's lock is dropped.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Owed {
    notify: bool,
    wake: bool,
    overflow: bool,
}

impl CqInner {
    /// Writes a completion; `owed` is settled later, without locks.
    #[inline]
    pub(super) fn push(&self, mut cqe: Cqe, owed: &mut Owed) {
        if self.timestamps.load(Ordering::Relaxed) {
            cqe.timestamp_ns = now_ns();
        }
        match self.ring.lock().push(cqe) {
            Pushed::Quiet => {}
            Pushed::Notify => owed.notify = true,
            Pushed::Overflow { first } => owed.overflow |= first,
        }
        owed.wake |= self.has_wakers.load(Ordering::Acquire);
    }

    /// Raises the events that are due. True if the queue overflowed just now.
    #[inline]
    pub(super) fn settle(self: &Arc<Self>, owed: Owed) -> bool {
        if owed.notify
            && let Some(channel) = &self.channel
        {
            channel.queue.push(CompletionQueue {
                inner: Arc::clone(self),
            });
        }
        if owed.wake || owed.overflow {
            self.has_wakers.store(false, Ordering::Release);
            for waker in std::mem::take(&mut *self.wakers.lock()) {
                waker.wake();
            }
        }
        if owed.overflow {
            self.ctx.raise(AsyncEventKind::CqError(CompletionQueue {
                inner: Arc::clone(self),
            }));
        }
        owed.overflow
    }

    /// Times it was polled.
    #[inline]
    pub(super) fn polls(&self) -> u32 {
        self.polls.load(Ordering::Relaxed)
    }

    #[inline]
    fn note_poll(&self) {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.send_deferred();
    }

    /// Sends what was put off.
    #[inline]
    fn send_deferred(&self) {
        if self.has_deferred.load(Ordering::Acquire) {
            self.send_deferred_now();
        }
    }

    #[cold]
    fn send_deferred_now(&self) {
        self.has_deferred.store(false, Ordering::Release);
        let list = std::mem::take(&mut *self.deferred.lock());
        for qp in list {
            qp.drive_tx();
        }
    }

    /// A queue pair puts off sending until the next poll.
    pub(super) fn defer(&self, qp: &Arc<QpInner>) {
        self.deferred.lock().push(Arc::clone(qp));
        self.has_deferred.store(true, Ordering::Release);
    }

    pub(super) fn attach(&self, qp: &Arc<QpInner>) {
        let mut qps = self.qps.write();
        qps.retain(|q| q.strong_count() > 0);
        qps.push(Arc::downgrade(qp));
    }

    pub(super) fn detach(&self, qp: &Arc<QpInner>) {
        let gone = Arc::downgrade(qp);
        self.qps.write().retain(|q| !q.ptr_eq(&gone));
        self.purge(qp.num);
    }

    /// Drops the completions of a queue pair.
    pub(super) fn purge(&self, qp_num: u32) {
        self.ring.lock().purge(qp_num);
    }

    /// Completions were lost.
    pub(super) fn is_dead(&self) -> bool {
        self.ring.lock().overflowed()
    }

    /// All queue pairs that report here.
    pub(super) fn members(&self) -> Vec<Arc<QpInner>> {
        self.qps.read().iter().filter_map(Weak::upgrade).collect()
    }

    /// An empty poll: this thread drives.
    fn progress(&self) {
        let polls = self.empty_polls.fetch_add(1, Ordering::Relaxed);
        // A program that has armed the queue looks once more before it waits: that is not driving.
        if polls.is_multiple_of(NOTE_EVERY) && !self.ring.lock().is_armed() {
            Engine::note_empty_poll();
        }
        let mut serve_all = polls % SERVE_ALL_EVERY == SERVE_ALL_EVERY - 1;
        let mut few: [Option<Arc<QpInner>>; POLL_DIRECTLY] = Default::default();
        {
            let qps = self.qps.read();
            if qps.len() <= POLL_DIRECTLY {
                for (slot, qp) in few.iter_mut().zip(qps.iter()) {
                    *slot = qp.upgrade();
                }
            } else {
                serve_all = true;
            }
        }
        for qp in few.iter().flatten() {
            // Writes, too, if anything waits to be written.
            qp.drive_rx();
        }
        if serve_all && let Ok(engine) = Engine::current() {
            engine.poll_once();
        }
    }

    /// The caller is going to wait: the progress thread takes over.
    fn hand_over(&self) {
        self.send_deferred();
        if let Ok(engine) = Engine::current() {
            engine.hand_over();
        }
    }
}

impl std::fmt::Debug for CqInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ring = self.ring.lock();
        f.debug_struct("CompletionQueue")
            .field("capacity", &ring.capacity())
            .field("waiting", &ring.len())
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}
