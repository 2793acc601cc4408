//! Completion queues. Polling drives the sockets, and arming hands them to the progress thread.

use super::any_qp::{AnyQp, PollOutcome};
use super::channel::CompletionChannel;
use super::context::ContextInner;
use super::events::AsyncEventKind;
use super::members::UdMembers;
use super::slots::{Account, Ring};
use crate::engine::Pollers;
use crate::engine::answers::Answers;
use crate::engine::busy_poll::BusyPoll;
use crate::engine::policy::{self, POLL_DIRECTLY_MAX, Seen};
use crate::engine::wakers::{Registration, Wakers};
use crate::engine::yield_pacing::after_empty_poll;
use crate::error::Result;
use crate::sys::clock::now_ns;
use iwarp_rnic::cq::Pushed;
use iwarp_rnic::{Cqe, WcOpcode, WcStatus, Work};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

/// Completions that [`CqInner::purge`] checks each time it holds the ring's lock.
const PURGE_STEP: u32 = 4096;

/// Why a queue no longer returns completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqError {
    /// The queue was full, and completions were lost.
    Overflow,
}

pub(crate) struct CqInner {
    ctx: Arc<ContextInner>,
    pub(crate) ring: Mutex<Ring>,
    /// Serializes [`count_members`](Self::count_members).
    counting_members: Mutex<()>,
    /// Serializes [`purge`](Self::purge). It unlocks the ring between its steps, and the ring
    /// stores only one unfinished purge: the calls of a second one would continue the first.
    purging: Mutex<()>,
    /// `true` if the ring may hold completions or has overflowed. Cleared only with the ring
    /// locked, so a poll that reads `false` need not lock it.
    ready: AtomicBool,
    channel: Option<CompletionChannel>,
    /// Queue pairs, except datagram queue pairs, whose completions go to this queue. Polling drives
    /// their sockets.
    qps: RwLock<Vec<Weak<dyn AnyQp>>>,
    pub(crate) datagrams: UdMembers,
    pub(crate) pollers: Pollers,
    user: AtomicU64,
    timestamps: AtomicBool,
    /// Queue pairs that defer sending until the next empty poll. Each is listed at most once.
    /// Otherwise the list would grow without limit if the program polls only the queue pair's other
    /// completion queue.
    deferred: Mutex<Vec<Weak<dyn AnyQp>>>,
    has_deferred: AtomicBool,
    wakers: Wakers,
    /// Decides whether a wait polls before it sleeps.
    pub(crate) busy: BusyPoll,
    /// Decides whether a poll that found completions waits for the peer's answer.
    answers: Answers,
}

/// A completion queue.
#[derive(Clone)]
pub struct CompletionQueue {
    pub(crate) inner: Arc<CqInner>,
}

impl CompletionQueue {
    pub(crate) fn create(
        ctx: &Arc<ContextInner>,
        capacity: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self> {
        let inner = CqInner {
            ctx: Arc::clone(ctx),
            ring: Mutex::new(Ring::new(capacity)?),
            counting_members: Mutex::default(),
            purging: Mutex::default(),
            ready: AtomicBool::new(false),
            channel: channel.cloned(),
            qps: RwLock::default(),
            datagrams: UdMembers::default(),
            pollers: Pollers::default(),
            user: AtomicU64::new(0),
            timestamps: AtomicBool::new(false),
            deferred: Mutex::default(),
            has_deferred: AtomicBool::new(false),
            wakers: Wakers::default(),
            busy: BusyPoll::default(),
            answers: Answers::default(),
        };
        let inner = Arc::new(inner);
        ctx.cq_count.fetch_add(1, Ordering::Relaxed);
        if let Some(channel) = channel {
            channel.attach(&inner);
        }
        Ok(Self { inner })
    }

    /// Takes up to `out.len()` completions (`ibv_poll_cq(3)`), and frees their slots in the send
    /// and receive queues. Never sleeps. After it has taken completions of Sends and Writes, it may
    /// poll the sockets a little longer, if the peer's answer is likely to come soon.
    ///
    /// If the queue is empty, the calling thread reads and writes the sockets of its queue pairs.
    /// So a program that polls needs no other thread to make progress.
    ///
    /// # Errors
    /// Returns [`CqError::Overflow`] if the queue has overflowed, but only once all completions
    /// from before the overflow have been taken.
    #[inline]
    pub fn poll(&self, out: &mut [Cqe]) -> Result<usize, CqError> {
        if self.inner.ready.load(Ordering::Acquire) {
            let n = self.take(out)?;
            if n > 0 {
                self.inner.pollers.record_taken(n);
                self.inner.after_taking(&out[..n]);
                return Ok(n);
            }
        }
        if out.is_empty() {
            return Ok(0);
        }
        self.inner.send_deferred();
        self.inner
            .pollers
            .drive_for_poll(|serve_all| self.inner.drive(serve_all).others_were_ready);
        if self.inner.ready.load(Ordering::Acquire) {
            let n = self.take(out)?;
            self.inner.after_taking(&out[..n]);
            return Ok(n);
        }
        after_empty_poll();
        Ok(0)
    }

    /// Takes completions that are already in the queue, and reads no socket. Callers that are about
    /// to wait use this.
    ///
    /// # Errors
    /// Fails as [`poll`](Self::poll) does.
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

    /// Requests one event on the channel at the next completion (`ibv_req_notify_cq(3)`). With
    /// `solicited_only`, only a solicited or failed completion raises the event. Completions that
    /// are already in the queue raise no event, so poll once more after this call.
    pub fn arm(&self, solicited_only: bool) {
        self.inner.ring.lock().arm(solicited_only);
        match &self.inner.channel {
            // A thread will soon wait on the channel, and drive the sockets before it sleeps.
            Some(channel) if channel.expects_wait() => self.inner.send_deferred(),
            _ => self.inner.hand_over(),
        }
    }

    /// Polls for at most `limit` if a completion is likely to come soon. Returns `true` if the
    /// queue holds a completion or has overflowed. Blocking waits call this before they sleep.
    pub(crate) fn busy_poll(&self, limit: Duration) -> bool {
        self.busy_poll_until(limit, || false)
    }

    /// Does the same as [`busy_poll`](Self::busy_poll), and also ends when `done` returns `true`:
    /// another thread may have taken the completion that the caller waits for.
    pub(crate) fn busy_poll_until(&self, limit: Duration, done: impl Fn() -> bool) -> bool {
        let limit = self.inner.busy_poll_max().min(limit);
        self.inner.busy.poll(limit, |now| {
            self.inner.drive_at(now);
            let found = {
                let ring = self.inner.ring.lock();
                !ring.is_empty() || ring.overflowed()
            };
            found || done()
        })
    }

    /// Records that a wait slept, and lasted `waited`.
    pub(crate) fn record_sleep(&self, waited: Duration) {
        let window = self.inner.busy_poll_max();
        self.inner.busy.record_sleep(waited, window);
    }

    /// Returns the program's own value for this queue, 0 if none was set.
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Sets [`user_data`](Self::user_data).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Returns the number of completions that the queue can hold.
    pub fn capacity(&self) -> u32 {
        self.inner.ring.lock().capacity()
    }

    /// Returns the number of completions in the queue.
    pub fn len(&self) -> usize {
        self.inner.ring.lock().len() as usize
    }

    /// Returns `true` if the queue holds no completions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes the capacity and keeps the completions (`ibv_resize_cq(3)`).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the capacity is out of
    /// range or too small for the queue's contents, and
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the queue cannot be allocated.
    pub fn resize(&self, capacity: u32) -> Result<()> {
        Ok(self.inner.ring.lock().resize(capacity)?)
    }

    /// Stamps later completions with the monotonic clock, in nanoseconds. This costs one clock
    /// reading for each completion.
    pub fn enable_timestamps(&self) {
        self.inner.timestamps.store(true, Ordering::Relaxed);
    }

    /// Returns the channel that the queue was created with, if any.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.inner.channel.as_ref()
    }

    /// Returns `true` if both handles refer to the same queue.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns the number of queue pairs whose completions go to this queue.
    pub fn queue_pairs(&self) -> usize {
        let connected = self.inner.qps.read();
        let connected = connected.iter().filter(|q| q.strong_count() > 0).count();
        connected + self.inner.datagrams.len()
    }

    /// Registers a task's waker for the next completion. Poll once more after this call, and then
    /// wait.
    ///
    /// The thread that writes the completion calls the waker once, with no lock held. The waker may
    /// poll this queue.
    pub fn wake_at_next(&self, waker: &Waker) {
        self.inner.wakers.register(waker);
        self.inner.prepare_for_wait();
    }

    /// Returns a registration without a waker, for a wait that may be cancelled.
    /// [`register_wait`](Self::register_wait) sets its waker; dropping it removes the waker.
    pub(crate) fn registration(&self) -> Registration<'_> {
        self.inner.wakers.registration()
    }

    /// Does the same as [`wake_at_next`](Self::wake_at_next), but only until `wait` is dropped.
    pub(crate) fn register_wait(&self, wait: &mut Registration<'_>, waker: &Waker) {
        wait.renew(waker);
        self.inner.prepare_for_wait();
    }

    /// Sends the requests that queue pairs have deferred until the next empty poll.
    #[inline]
    pub(crate) fn send_deferred_requests(&self) {
        self.inner.send_deferred();
    }

    /// Drops pending channel events of this queue.
    pub fn forget_events(&self) {
        if let Some(channel) = &self.inner.channel {
            channel.queue.retain(|cq| !cq.is_same(self));
        }
    }
}

/// Events and wake-ups that are due after a completion was written. The caller delivers them when
/// it holds no lock, because they may run the program's code.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Owed {
    notify: bool,
    wake: bool,
    overflow: bool,
    pub(crate) srq_limit: bool,
}

impl Owed {
    #[inline]
    pub(crate) const fn is_nothing(self) -> bool {
        !(self.notify | self.wake | self.overflow | self.srq_limit)
    }
}

struct Driven {
    /// What arrived for the queue pairs that were polled one by one.
    seen: Seen,
    /// All sockets of the process were checked, not only those of this queue, and one of them was
    /// ready.
    others_were_ready: bool,
}

impl Drop for CqInner {
    fn drop(&mut self) {
        self.ctx.cq_count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CqInner {
    /// Returns the longest time for which a wait polls before it sleeps.
    pub(crate) fn busy_poll_max(&self) -> Duration {
        self.ctx.config.busy_poll
    }

    /// Writes a completion into the locked ring, and notes in `owed` which events are then due. The
    /// caller passes `owed` to [`raise_due`](Self::raise_due) after it has dropped its locks.
    #[inline]
    pub(crate) fn push(&self, ring: &mut Ring, mut cqe: Cqe, owed: &mut Owed) {
        if self.timestamps.load(Ordering::Relaxed) {
            cqe.timestamp_ns = now_ns();
        }
        self.ready.store(true, Ordering::Release);
        match ring.push(cqe) {
            Pushed::Quiet => {}
            Pushed::Notify => owed.notify = true,
            Pushed::Overflow { first } => owed.overflow |= first,
        }
        // A lost completion also wakes waiting tasks: their next poll returns the overflow.
        owed.wake |= self.wakers.any();
    }

    /// Records that a completion was lost, as [`push`](Self::push) does when the ring is full.
    #[cold]
    pub(crate) fn record_loss(&self, ring: &mut Ring, owed: &mut Owed) {
        self.ready.store(true, Ordering::Release);
        if let Pushed::Overflow { first } = ring.overflow() {
            owed.overflow |= first;
        }
        owed.wake |= self.wakers.any();
    }

    /// Raises the events in `owed` and wakes waiting tasks. Call it with no lock held. Returns
    /// `true` if the queue has just overflowed.
    #[inline]
    pub(crate) fn raise_due(self: &Arc<Self>, owed: Owed) -> bool {
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

    #[inline]
    fn send_deferred(&self) {
        if self.has_deferred.load(Ordering::Acquire) {
            self.send_deferred_now();
        }
    }

    #[cold]
    fn send_deferred_now(&self) {
        self.has_deferred.store(false, Ordering::Release);
        let mut list = std::mem::take(&mut *self.deferred.lock());
        for qp in list.drain(..).filter_map(|qp| qp.upgrade()) {
            // Clear the mark before sending: a request that is posted meanwhile then either is sent
            // at once, or puts the queue pair on the list again.
            if let Some(mark) = qp.deferred_mark(self) {
                mark.swap(false, Ordering::AcqRel);
            }
            qp.send_deferred();
        }
        // Reuse the list's memory, so that adding the next entry does not allocate.
        let mut deferred = self.deferred.lock();
        if deferred.capacity() == 0 {
            *deferred = list;
        }
    }

    pub(crate) fn defer<M: AnyQp>(&self, qp: &Arc<M>) {
        let mark = qp.deferred_mark(self);
        if mark.is_some_and(|mark| !mark.swap(true, Ordering::AcqRel)) {
            self.deferred.lock().push(Arc::downgrade(qp) as _);
            self.has_deferred.store(true, Ordering::Release);
        }
    }

    /// Opens an account: the place where polls note which slots of a send or receive queue are free
    /// again (`slots.rs`).
    pub(crate) fn open_account(&self) -> Account {
        self.ring.lock().open_account()
    }

    /// Closes the account of a queue pair whose completions were dropped.
    pub(crate) fn close_account(&self, account: &Account) {
        self.ring.lock().close_account(account);
    }

    pub(crate) fn attach<M: AnyQp>(&self, qp: &Arc<M>) {
        let mut qps = self.qps.write();
        // Remove dead entries only when the list is full: there may be thousands of entries.
        if qps.len() == qps.capacity() {
            qps.retain(|q| q.strong_count() > 0);
            let live = qps.len();
            qps.reserve(live + 1);
        }
        qps.push(Arc::downgrade(qp) as _);
        drop(qps);
        self.count_members();
    }

    pub(crate) fn count_members(&self) {
        // Only one thread at a time counts. If two did, the older count could be stored last. It
        // would then not fit the list: `drive` would not poll a long list one by one, and the
        // pollers would not drive the whole process instead. The progress thread would leave the
        // sockets to them.
        let _counting = self.counting_members.lock();
        let many = policy::are_many(self.qps.read().len()) || self.datagrams.are_many();
        self.pollers.set_many_qps(many);
    }

    /// Removes a queue pair that is destroyed, and drops its completions.
    pub(crate) fn detach<M: AnyQp>(&self, qp: &Arc<M>) {
        self.remove_member(qp);
        self.purge(qp.num());
    }

    /// Removes a queue pair, and keeps its completions.
    pub(crate) fn remove_member<M: AnyQp>(&self, qp: &Arc<M>) {
        let gone: Weak<dyn AnyQp> = Arc::downgrade(qp) as _;
        let mut qps = self.qps.write();
        if let Some(index) = qps.iter().rposition(|q| q.ptr_eq(&gone)) {
            qps.swap_remove(index);
        }
        drop(qps);
        self.count_members();
        self.deferred.lock().retain(|q| !q.ptr_eq(&gone));
    }

    /// Drops the completions of the queue pair `qp_num`. Releases the ring's lock between steps.
    pub(crate) fn purge(&self, qp_num: u32) {
        let _purging = self.purging.lock();
        let mut work = Work::More;
        while work == Work::More {
            let mut ring = self.ring.lock();
            work = ring.purge(qp_num, PURGE_STEP);
            MutexGuard::unlock_fair(ring);
        }
    }

    /// Returns `true` if the ring holds a successful completion of the queue pair `qp_num`.
    pub(crate) fn has_success_of(&self, qp_num: u32) -> bool {
        self.ring.lock().has_success_of(qp_num)
    }

    pub(crate) fn has_overflowed(&self) -> bool {
        self.ring.lock().overflowed()
    }

    pub(crate) fn members(&self) -> Vec<Arc<dyn AnyQp>> {
        self.qps.read().iter().filter_map(Weak::upgrade).collect()
    }

    /// Prepares the queue for a task that has registered a waker and is about to wait.
    fn prepare_for_wait(&self) {
        // The writer of a completion may not see the waker yet. Then the next poll must find the
        // completion, so it must lock the ring and not trust an old `ready`.
        self.ready.store(true, Ordering::Release);
        self.hand_over();
    }

    /// Drives the sockets, for a caller that polls in a loop. `now` is the current time, which the
    /// caller has read already. Returns what has arrived since the program's last request.
    pub(crate) fn drive_at(&self, now: u64) -> Seen {
        self.pollers.renew(now);
        self.drive(false).seen
    }

    /// Called after a poll has taken `completions`. If the peer's answer is likely to come soon,
    /// waits for it.
    #[inline]
    fn after_taking(&self, completions: &[Cqe]) {
        self.answers.record_taken(self.pollers.empty_polls());
        if self.answers.are_expected_soon() && !self.ready.load(Ordering::Relaxed) {
            self.await_answer(completions);
        }
    }

    /// Drives the sockets until the peer's answer arrives. Returns at once if `completions` contain
    /// anything else than successful Sends and Writes: the program must get receives, Reads and
    /// failures without delay.
    #[cold]
    fn await_answer(&self, completions: &[Cqe]) {
        let is_sent = |cqe: &Cqe| {
            cqe.status == WcStatus::Success
                && matches!(cqe.opcode, WcOpcode::Send | WcOpcode::Write)
        };
        if self.pollers.have_many_qps() || !completions.iter().all(is_sent) {
            return;
        }
        self.send_deferred();
        let window = u64::try_from(self.busy_poll_max().as_nanos()).unwrap_or(u64::MAX);
        let answered = self.answers.wait(window, |now| {
            let seen = self.drive_at(now);
            match self.ready.load(Ordering::Relaxed) {
                true => Seen::Answer,
                false => seen,
            }
        });
        if !answered {
            // The program will probably watch memory, and not poll. With the lease that this wait
            // has renewed, the progress thread would not receive the answer for up to 2 ms.
            self.pollers.stop_driving();
        }
    }

    /// Records that the progress thread has received data for a queue pair of this queue.
    pub(crate) fn record_arrival(&self) {
        if !self.pollers.have_many_qps() {
            self.answers.record_arrival(self.pollers.empty_polls());
        }
    }

    /// Reads and writes the sockets of this queue's queue pairs, and all other sockets of the
    /// process if `serve_all`.
    fn drive(&self, mut serve_all: bool) -> Driven {
        let mut few: [Option<Arc<dyn AnyQp>>; POLL_DIRECTLY_MAX] = Default::default();
        {
            let qps = self.qps.read();
            if policy::are_many(qps.len()) {
                serve_all = true;
            } else {
                for (slot, qp) in few.iter_mut().zip(qps.iter()) {
                    *slot = qp.upgrade();
                }
            }
        }
        let more = self.datagrams.drive_first();
        serve_all |= more;
        let mut driven_elsewhere = false;
        let mut moved_bytes = 0;
        let mut answered = false;
        for qp in few.into_iter().flatten() {
            let polled: PollOutcome = qp.poll_sockets();
            answered |= polled.answered;
            driven_elsewhere |= polled.driven_elsewhere;
            moved_bytes += polled.moved;
        }
        if let Some(duration_ns) = policy::long_drive_ns(moved_bytes) {
            self.pollers.record_drive(duration_ns);
        }
        if driven_elsewhere {
            // Another thread holds the baton of a socket, and may be waiting for this processor.
            std::thread::yield_now();
        }
        Driven {
            seen: policy::drive_outcome(answered, moved_bytes),
            others_were_ready: serve_all && self.pollers.serve_all(),
        }
    }

    /// Gives the sockets to the progress thread, because the caller is about to wait.
    pub(crate) fn hand_over(&self) {
        self.send_deferred();
        self.pollers.hand_over();
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
