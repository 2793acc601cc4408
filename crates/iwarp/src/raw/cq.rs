//! Completion queues: polling drives the sockets, arming hands them to the progress thread.

use super::channel::CompletionChannel;
use super::context::ContextInner;
use super::events::AsyncEventKind;
use super::qp::QpInner;
use crate::engine::Engine;
use crate::error::Result;
use crate::progress::busy_poll::BusyPoll;
use crate::progress::in_vain::{looked_before_sleep, looked_in_vain};
use crate::progress::wakers::{Registration, Wakers};
use crate::sys::clock::now_ns;
use iwarp_rnic::Cqe;
use iwarp_rnic::cq::{CompletionQueue as Ring, Pushed};
use parking_lot::{Mutex, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

/// With at most this many queue pairs an empty poll reads their sockets one by one; with more it asks `epoll`.
const POLL_DIRECTLY: usize = 4;
/// Every so many empty polls, the progress thread is told that somebody drives. A clock reading costs a tenth of a poll.
const NOTE_EVERY: u32 = 8;
/// At least every so many empty polls, everything else of the process is served, too.
const SERVE_ALL_EVERY: u32 = 64;

/// Counts, and returns how many there were. A hint: no locked instruction, so two threads at once may count for one.
#[inline]
fn count(counter: &AtomicU32) -> u32 {
    let before = counter.load(Ordering::Relaxed);
    counter.store(before.wrapping_add(1), Ordering::Relaxed);
    before
}

/// Why a queue gives no completions any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqError {
    /// Completions were lost because it was full.
    Overflow,
}

pub(crate) struct CqInner {
    ctx: Arc<ContextInner>,
    pub(super) ring: Mutex<Ring>,
    /// The ring may hold something, or has overflowed. Cleared under the ring's lock only; a poll that sees it clear needs no lock.
    ready: AtomicBool,
    channel: Option<CompletionChannel>,
    /// Queue pairs that report here; polling drives them.
    qps: RwLock<Vec<Weak<QpInner>>>,
    /// More than [`POLL_DIRECTLY`] of them. A hint.
    many: AtomicBool,
    empty_polls: AtomicU32,
    /// The empty poll that serves everything else next, and how long after the one before. Hints: a lost update costs a look.
    serve_all_at: AtomicU32,
    serve_all_after: AtomicU32,
    /// For the program's own use.
    user: AtomicU64,
    timestamps: AtomicBool,
    /// Times it was polled in vain; tells posting threads whether the program waits between posts.
    polls: AtomicU32,
    /// Queue pairs that have put off sending until the next poll in vain, each of them once: that poll may never come, because
    /// the program looks at another queue.
    deferred: Mutex<Vec<Weak<QpInner>>>,
    has_deferred: AtomicBool,
    /// Tasks that wait for a completion.
    wakers: Wakers,
    /// An event was asked for and has not been raised. A hint: the ring knows.
    armed: AtomicBool,
    /// What blocking waits have taught.
    pub(super) busy: BusyPoll,
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
            ready: AtomicBool::new(false),
            channel: channel.cloned(),
            qps: RwLock::default(),
            many: AtomicBool::new(false),
            empty_polls: AtomicU32::new(0),
            serve_all_at: AtomicU32::new(SERVE_ALL_EVERY),
            serve_all_after: AtomicU32::new(SERVE_ALL_EVERY),
            user: AtomicU64::new(0),
            timestamps: AtomicBool::new(false),
            polls: AtomicU32::new(0),
            deferred: Mutex::default(),
            has_deferred: AtomicBool::new(false),
            wakers: Wakers::default(),
            armed: AtomicBool::new(false),
            busy: BusyPoll::default(),
        };
        let inner = Arc::new(inner);
        ctx.cqs.fetch_add(1, Ordering::Relaxed);
        if let Some(channel) = channel {
            channel.attach(&inner);
        }
        Ok(Self { inner })
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
        if self.inner.ready.load(Ordering::Acquire) {
            let n = self.take(out)?;
            if n > 0 {
                if self.inner.many.load(Ordering::Relaxed) {
                    // Or else the progress thread would find the next completions first, and this one would never drive.
                    Engine::note_poll_of_all();
                }
                return Ok(n);
            }
        }
        if out.is_empty() {
            return Ok(0);
        }
        self.inner.note_poll();
        let looks = self.inner.progress();
        if self.inner.ready.load(Ordering::Acquire) {
            return self.take(out);
        }
        looked_in_vain(looks);
        Ok(0)
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
        let n = ring.poll(out);
        if ring.is_empty() && !ring.overflowed() {
            self.inner.ready.store(false, Ordering::Relaxed);
        }
        match n {
            0 if ring.overflowed() && !out.is_empty() => Err(CqError::Overflow),
            n => Ok(n),
        }
    }

    /// Asks for one event on the channel at the next completion (`ibv_req_notify_cq(3)`), or only at the next
    /// solicited or failed one. Completions that wait already raise none: poll once more afterwards.
    pub fn arm(&self, solicited_only: bool) {
        {
            let mut ring = self.inner.ring.lock();
            ring.arm(solicited_only);
            self.inner.armed.store(true, Ordering::Relaxed);
        }
        match &self.inner.channel {
            // A thread is going to wait there, and polls first.
            Some(channel) if channel.expects_wait() => self.inner.send_deferred(),
            _ => self.inner.hand_over(),
        }
    }

    /// Polls for a moment if a completion is likely to come soon. For blocking waits, before they sleep.
    pub(crate) fn busy_poll(&self, limit: Duration) -> bool {
        let window = self.inner.window().min(limit);
        if window.is_zero() || !self.inner.busy.is_worth_it() {
            return false;
        }
        let found = busy_poll(window, || {
            self.inner.drive(true, false);
            let ring = self.inner.ring.lock();
            !ring.is_empty() || ring.overflowed()
        });
        if found {
            self.inner.busy.hit();
        } else {
            self.inner.busy.miss();
        }
        found
    }

    /// A blocking wait ended in sleep.
    pub(crate) fn slept(&self, waited: Duration) {
        self.inner.busy.slept(waited, self.inner.window());
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
    ///
    /// The waker is called once, by the thread that writes the completion, with no lock held; it may poll this queue. It stays
    /// registered until then.
    pub fn wake_at_next(&self, waker: &Waker) {
        self.inner.wakers.register(waker);
        self.inner.expect_wake();
    }

    /// A place for a wait that may be given up.
    pub(crate) fn waits(&self) -> Registration<'_> {
        self.inner.wakers.registration()
    }

    /// As [`wake_at_next`](Self::wake_at_next), until `wait` is dropped.
    pub(crate) fn wake_wait(&self, wait: &mut Registration<'_>, waker: &Waker) {
        wait.renew(waker);
        self.inner.expect_wake();
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
    /// The limit of the shared receive queue was reached.
    pub(super) srq_limit: bool,
}

impl Owed {
    #[inline]
    pub(super) const fn is_nothing(self) -> bool {
        !(self.notify | self.wake | self.overflow | self.srq_limit)
    }
}

/// Calls `look` until it finds something, at most for `window`.
pub(super) fn busy_poll(window: Duration, mut look: impl FnMut() -> bool) -> bool {
    let mut now = now_ns();
    let end = now.saturating_add(u64::try_from(window.as_nanos()).unwrap_or(u64::MAX));
    for turn in 0u32.. {
        Engine::note_empty_poll_at(now);
        if look() {
            return true;
        }
        looked_before_sleep(turn);
        now = now_ns();
        if now >= end {
            break;
        }
    }
    false
}

impl Drop for CqInner {
    fn drop(&mut self) {
        self.ctx.cqs.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CqInner {
    /// How long blocking waits poll before they sleep.
    pub(super) fn window(&self) -> Duration {
        self.ctx.config.busy_poll
    }

    /// Writes a completion into its ring, which the caller has locked; `owed` is settled later, without locks.
    #[inline]
    pub(super) fn push(&self, ring: &mut Ring, mut cqe: Cqe, owed: &mut Owed) {
        if self.timestamps.load(Ordering::Relaxed) {
            cqe.timestamp_ns = now_ns();
        }
        self.ready.store(true, Ordering::Release);
        match ring.push(cqe) {
            Pushed::Quiet => {}
            Pushed::Notify => {
                self.armed.store(false, Ordering::Relaxed);
                owed.notify = true;
            }
            Pushed::Overflow { first } => owed.overflow |= first,
        }
        // A lost completion is news, too.
        owed.wake |= self.wakers.any();
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
        if owed.wake {
            self.wakers.wake_all();
        }
        if owed.overflow {
            self.ctx.raise(AsyncEventKind::CqError(CompletionQueue {
                inner: Arc::clone(self),
            }));
        }
        owed.overflow
    }

    /// Times it was polled in vain.
    #[inline]
    pub(super) fn polls(&self) -> u32 {
        self.polls.load(Ordering::Relaxed)
    }

    #[inline]
    fn note_poll(&self) {
        count(&self.polls);
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
        for qp in list.iter().filter_map(Weak::upgrade) {
            // First: what is posted from here on is seen now, or brings it back.
            self.defers(&qp).swap(false, Ordering::AcqRel);
            qp.drive_tx();
        }
    }

    /// A queue pair puts off sending until the next poll in vain.
    pub(super) fn defer(&self, qp: &Arc<QpInner>) {
        if !self.defers(qp).swap(true, Ordering::AcqRel) {
            self.deferred.lock().push(Arc::downgrade(qp));
            self.has_deferred.store(true, Ordering::Release);
        }
    }

    /// Whether a queue pair waits here for that.
    fn defers<'a>(&self, qp: &'a QpInner) -> &'a AtomicBool {
        let [send, recv] = &qp.deferred;
        match std::ptr::eq(&*qp.send_cq.inner, self) {
            true => send,
            false => recv,
        }
    }

    pub(super) fn attach(&self, qp: &Arc<QpInner>) {
        let mut qps = self.qps.write();
        // Now and then, not each time: there may be thousands.
        if qps.len() == qps.capacity() {
            qps.retain(|q| q.strong_count() > 0);
            let live = qps.len();
            qps.reserve(live + 1);
        }
        qps.push(Arc::downgrade(qp));
        self.many
            .store(qps.len() > POLL_DIRECTLY, Ordering::Relaxed);
    }

    pub(super) fn detach(&self, qp: &Arc<QpInner>) {
        let gone = Arc::downgrade(qp);
        let mut qps = self.qps.write();
        if let Some(at) = qps.iter().rposition(|q| q.ptr_eq(&gone)) {
            qps.swap_remove(at);
        }
        self.many
            .store(qps.len() > POLL_DIRECTLY, Ordering::Relaxed);
        drop(qps);
        self.deferred.lock().retain(|q| !q.ptr_eq(&gone));
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

    /// Somebody is registered and is about to wait.
    fn expect_wake(&self) {
        // The next poll takes the ring's lock: without it, it could miss a completion whose thread misses the waker.
        self.ready.store(true, Ordering::Release);
        self.hand_over();
    }

    /// An empty poll: this thread drives. Returns how many there were before.
    pub(super) fn progress(&self) -> u32 {
        let polls = count(&self.empty_polls);
        // A program that has armed the queue looks once more before it waits: that is not driving.
        let driving = !self.armed.load(Ordering::Relaxed);
        if driving && polls.is_multiple_of(NOTE_EVERY) {
            Engine::note_empty_poll();
        }
        let serve_all =
            polls.wrapping_sub(self.serve_all_at.load(Ordering::Relaxed)) < u32::MAX / 2;
        let served = self.drive(driving, serve_all);
        if serve_all {
            self.note_served(polls, served);
        }
        polls
    }

    /// Where there was something for others there will be more: then the next look comes at once. A program that polls one queue
    /// while its peer writes to memory behind another is the target of most of the traffic.
    fn note_served(&self, polls: u32, served: bool) {
        let after = match served {
            true => 1,
            false => (self.serve_all_after.load(Ordering::Relaxed) * 2).min(SERVE_ALL_EVERY),
        };
        self.serve_all_after.store(after, Ordering::Relaxed);
        self.serve_all_at
            .store(polls.wrapping_add(after), Ordering::Relaxed);
    }

    /// Moves what can be moved for the queue pairs that report here. `driving`: the caller will be back soon.
    /// True if it was asked to serve everything, and something was ready.
    pub(super) fn drive(&self, driving: bool, mut serve_all: bool) -> bool {
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
        let mut others = false;
        for qp in few.iter().flatten() {
            if driving {
                qp.drives.note();
            }
            // Writes, too, if anything waits to be written.
            qp.drive_rx();
            others |= qp.is_driven_elsewhere();
        }
        if others {
            // Who does may be waiting for this very processor, and there is nothing to do here meanwhile.
            std::thread::yield_now();
        }
        serve_all && Engine::current().is_ok_and(|engine| engine.poll_once())
    }

    /// The caller is going to wait: the progress thread takes over.
    pub(super) fn hand_over(&self) {
        self.send_deferred();
        for qp in self.qps.read().iter().take(POLL_DIRECTLY) {
            if let Some(qp) = qp.upgrade() {
                qp.drives.take();
            }
        }
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

#[cfg(test)]
#[path = "cq_tests.rs"]
mod tests;
