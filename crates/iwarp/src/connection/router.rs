//! Routes completions to their requests, and keeps requests in order, for any number of tasks and
//! threads.
//!
//! A connection has one completion queue. A thread that waits polls it and routes all completions:
//! results go to the slots of their requests, messages to the inbox, and the waiters for them are
//! woken. While no thread polls, a waker of the router is registered with the queue, and the thread
//! that writes a completion routes it.
//!
//! Order: a thread that takes completions holds the baton, so messages enter the inbox in the order
//! of their arrival. A thread that does not get the baton leaves a note, and the holder polls
//! again. Slots have no lock. `state` is locked only briefly. While it is locked nothing is posted
//! and no code of the program runs: wakers are called, and memory is freed, after unlocking.
//!
//! Requests are posted in the order in which they were started. If the send queue has no places, a
//! request enters the backlog, and so do all later ones until the backlog is empty. A thread that
//! returns places posts from it; a second baton preserves the order.

use super::handle::Inner;
pub(super) use super::state::{Arrived, Entry, Held, Inbox, SlotId, Unposted, receive_id};
use super::state::{Queued, RECEIVE, State};
use super::turns::Turns;
use super::waiters::{Place, Ticket};
use crate::engine::baton::Baton;
use crate::engine::slots::{Block, Slots};
use crate::error::Error;
use crate::failure::Refusal;
use crate::runtime::CompletionQueue;
use crate::runtime::Context;
use crate::sys::fork::Origin;
use iwarp_rnic::{Cqe, PostError, WcStatus};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Wake, Waker};

/// Completions taken per poll.
const TAKE: usize = 32;

/// Wakers to call and memory to free after unlocking.
#[derive(Debug, Default)]
struct Due {
    wakers: Vec<Waker>,
    freed: Vec<Held>,
    /// Places of the send queue to return.
    places: u32,
    /// Requests of the backlog that fail.
    unposted: VecDeque<Queued>,
}

/// Buffers of a routing thread, reused so that routing does not allocate.
#[derive(Debug, Default)]
struct Scratch {
    due: Due,
    taken: Box<[Cqe; TAKE]>,
}

/// Why a request has failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Its completion has this status.
    Completed(WcStatus),
    /// It was refused when it was posted from the backlog.
    Refused(Error),
}

/// A request that cannot be queued, and the reason.
pub(super) type NotQueued = (Error, Unposted);

#[derive(Debug)]
pub(super) struct Router {
    pub(super) cq: CompletionQueue,
    ctx: Context,
    /// The connection, to post requests of the backlog.
    connection: OnceLock<Weak<Inner>>,
    slots: Slots<Held, Failure>,
    state: Mutex<State>,
    /// The end is to be recorded: the next thread that has routed all completions does it.
    ending: AtomicBool,
    /// The connection has ended: nothing is posted any more, and no message arrives. Set while
    /// `state` is locked.
    ended: AtomicBool,
    /// The router's waker is registered with the queue. If `true`, a later completion is routed.
    watched: AtomicBool,
    turns: Turns,
    /// Held while completions are routed.
    baton: Baton,
    /// Held while requests of the backlog are posted.
    posting: Baton,
    /// Unused buffers: one per thread that has ever routed at the same time as others.
    scratch_pool: Mutex<Vec<Scratch>>,
    waker: Waker,
    pub(super) origin: Origin,
}

/// Wakes the router. A weak reference, so that the waker does not keep it alive.
struct Wakes(Weak<Router>);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        if let Some(router) = self.0.upgrade() {
            router.route_and_watch();
        }
    }
}

/// Calls a waker of the program. A panic does not prevent the calls of other wakers.
fn call(waker: Waker) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
        tracing::error!("a waker of the program panicked");
        // Dropping the payload may panic again.
        std::mem::forget(payload);
    }
}

/// Calls wakers that were taken from a list. No lock may be held.
pub(super) fn call_all(wakers: impl IntoIterator<Item = Waker>) {
    wakers.into_iter().for_each(call);
}

impl Router {
    /// Creates a router for a send queue of `depth` and `receives` receive buffers.
    pub(super) fn new(ctx: &Context, cq: CompletionQueue, depth: u32, receives: u32) -> Arc<Self> {
        Arc::new_cyclic(|weak| Self {
            cq,
            ctx: ctx.clone(),
            connection: OnceLock::new(),
            slots: Slots::new(depth),
            state: Mutex::new(State::new(receives)),
            ending: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            turns: Turns::default(),
            baton: Baton::new(),
            posting: Baton::new(),
            scratch_pool: Mutex::default(),
            waker: Waker::from(Arc::new(Wakes(Weak::clone(weak)))),
            origin: Origin::current_process(),
        })
    }

    /// Fails in a forked child, where a thread that no longer exists may hold the locks.
    #[inline]
    pub(super) fn check_process(&self) -> Result<(), Error> {
        match self.origin.is_foreign() {
            true => Err(Error::Refused(Refusal::Forked)),
            false => Ok(()),
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Sets the connection whose requests are posted from the backlog.
    pub(super) fn set_connection(&self, connection: Weak<Inner>) {
        // Called once.
        let _ = self.connection.set(connection);
    }

    /// Takes a slot and `places` places of the send queue.
    #[inline]
    pub(super) fn enter(&self, places: u32) -> Entry {
        if self.has_ended() {
            return Entry::Ended;
        }
        match self.slots.take(places) {
            Some(id) => Entry::Taken(SlotId(id)),
            None => Entry::Full,
        }
    }

    /// Adds a request to the backlog, which needs `places` places. It is posted after all requests
    /// that were started before it. Returns its slot, or the error and the request.
    #[cold]
    pub(super) fn queue(&self, places: u32, request: Unposted) -> Result<SlotId, Box<NotQueued>> {
        let holder = self.state.lock().holder.clone();
        call_all(holder);
        let id = self.enqueue(places, request)?;
        self.post_queued();
        Ok(id)
    }

    /// Does the same as [`queue`](Self::queue), but the caller must call
    /// [`post_queued`](Self::post_queued).
    pub(super) fn enqueue(&self, places: u32, request: Unposted) -> Result<SlotId, Box<NotQueued>> {
        let Some(id) = self.slots.take_without_places() else {
            return Err(Box::new((Error::OutOfMemory, request)));
        };
        let id = SlotId(id);
        let mut state = self.state.lock();
        if self.has_ended() {
            drop(state);
            self.slots.withdraw(id.0);
            return Err(Box::new((Error::Post(PostError::InvalidState), request)));
        }
        state.backlog.push_back(Queued {
            id,
            places,
            request,
        });
        self.slots.crowd();
        Ok(id)
    }

    /// Announces data that is held back. `holder` is called before another request is posted, and
    /// must then [enqueue](Self::enqueue) the data and call [`stop_holding`](Self::stop_holding).
    pub(super) fn hold_back(&self, holder: Waker) {
        let old = {
            let mut state = self.state.lock();
            // Others find no places from now on, so they call `queue`.
            self.slots.crowd();
            state.holder.replace(holder)
        };
        drop(old);
    }

    /// Records that no data is held back any more. Call [`post_queued`](Self::post_queued) then.
    pub(super) fn stop_holding(&self) {
        let old = self.state.lock().holder.take();
        drop(old);
    }

    /// Posts requests of the backlog now, if there are places, and later even if no thread waits
    /// for anything.
    pub(super) fn post_queued(&self) {
        self.post_backlog();
        self.watch();
    }

    /// Removes a request from the backlog. Returns `None` if it is not there, because it has been
    /// posted.
    #[cold]
    pub(super) fn cancel(&self, id: SlotId) -> Option<Unposted> {
        let mut state = self.state.lock();
        let at = state.backlog.iter().position(|queued| queued.id == id)?;
        let queued = state.backlog.remove(at)?;
        drop(state);
        self.slots.withdraw(id.0);
        // It may have been the first one, which needed more places than the next one.
        self.post_backlog();
        Some(queued.request)
    }

    /// Posts requests of the backlog for which there are places.
    #[cold]
    fn post_backlog(&self) {
        let Some(connection) = self.connection.get().and_then(Weak::upgrade) else {
            return;
        };
        self.posting.drive(|| {
            while let Some(Queued { id, request, .. }) = self.next_of_backlog() {
                if let Err(error) = request.post(&connection, id) {
                    let mut due = Due::default();
                    self.finish(id.wr_id(), Err(Failure::Refused(error)), &mut due);
                    self.slots.return_places(due.places);
                    call_all(due.wakers);
                }
            }
        });
    }

    /// Takes the first request from the backlog if there are places for it. The caller holds the
    /// baton `posting`. Only after it has posted the last one, others may post without queuing.
    fn next_of_backlog(&self) -> Option<Queued> {
        let mut state = self.state.lock();
        let Some(first) = state.backlog.front() else {
            if state.holder.is_none() {
                self.slots.uncrowd();
            }
            return None;
        };
        match self.slots.take_places(first.id.0, first.places) {
            true => state.backlog.pop_front(),
            false => None,
        }
    }

    /// Returns places of the send queue.
    #[inline]
    fn return_places(&self, places: u32) {
        if self.slots.return_places(places) {
            self.post_backlog();
        }
    }

    /// Returns a slot whose request was not posted.
    pub(super) fn withdraw(&self, id: SlotId) {
        if self.slots.withdraw(id.0) {
            self.post_backlog();
        }
    }

    /// Returns whether a request succeeded; `None` if it has not completed.
    #[inline]
    pub(super) fn outcome(&self, id: SlotId) -> Option<bool> {
        self.slots.outcome(id.0)
    }

    /// Returns the result of a request and frees its slot; `None` if it has not completed.
    #[inline]
    pub(super) fn collect(&self, id: SlotId) -> Option<Result<(), Failure>> {
        self.slots.collect(id.0)
    }

    /// Frees the slot of a request that has succeeded.
    #[inline]
    pub(super) fn release(&self, id: SlotId) {
        self.slots.release(id.0);
    }

    /// Returns the block of a slot.
    #[inline]
    pub(super) fn block_of(&self, id: SlotId) -> Block {
        self.slots.block_of(id.0)
    }

    /// Registers a waker for the completion of a request. Check the request once more after this
    /// call.
    pub(super) fn wait_for_end_of(&self, id: SlotId, waker: &Waker) {
        self.slots.wait(id.0, waker);
    }

    /// Drops the operation of a request that was posted or queued. What the request uses is freed
    /// when it completes.
    pub(super) fn abandon(&self, id: SlotId, held: Option<Held>) {
        if self.origin.is_foreign() {
            return;
        }
        let freed = self.slots.abandon(id.0, held);
        drop(freed);
        if self.slots.keeps_memory() {
            // Otherwise the memory would stay until the connection is used again.
            self.watch();
        }
    }
}

impl Router {
    pub(super) fn take_message(&self, ticket: &mut Option<Ticket>) -> Inbox {
        let mut state = self.state.lock();
        let ended = self.has_ended();
        if !state.readers.may_take(*ticket) && !ended {
            return Inbox::Empty;
        }
        let Some(arrived) = state.inbox.pop_front() else {
            return match ended {
                true => Inbox::Ended,
                false => Inbox::Empty,
            };
        };
        let gone = state.readers.leave(ticket.take()).1;
        let next = state.more_messages();
        drop(state);
        drop(gone);
        call_all(next);
        Inbox::Message(arrived)
    }

    /// Takes the oldest message for a caller that takes all, regardless of waiters.
    pub(super) fn pop_message(&self) -> Inbox {
        let mut state = self.state.lock();
        match (state.inbox.pop_front(), self.has_ended()) {
            (Some(arrived), _) => Inbox::Message(arrived),
            (None, true) => Inbox::Ended,
            (None, false) => Inbox::Empty,
        }
    }

    /// Returns `true` if there is a message, or no more will arrive.
    pub(super) fn has_message(&self) -> bool {
        let state = self.state.lock();
        !state.inbox.is_empty() || self.has_ended()
    }

    pub(super) fn wait_for_message(&self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let old = self.state.lock().readers.wait(ticket, waker);
        drop(old);
    }

    pub(super) fn leave_readers(&self, ticket: Option<Ticket>) {
        if ticket.is_none() || self.origin.is_foreign() {
            return;
        }
        let mut state = self.state.lock();
        let (place, gone) = state.readers.leave(ticket);
        let next = match place {
            Place::Woken => state.more_messages(),
            Place::Waiting => None,
        };
        drop(state);
        drop(gone);
        call_all(next);
    }

    pub(super) fn wait_for_end(&self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let old = self.state.lock().end_waiters.wait(ticket, waker);
        drop(old);
    }

    pub(super) fn leave_end_waiters(&self, ticket: Option<Ticket>) {
        if ticket.is_some() && !self.origin.is_foreign() {
            let gone = self.state.lock().end_waiters.leave(ticket);
            drop(gone);
        }
    }

    /// Records the end of the connection, and wakes all waiters for a message or the end. Requests
    /// of the backlog fail; posted requests still get their completions.
    ///
    /// The messages that arrived before the end are routed first.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
        // If another thread routes, it routes once more after this.
        self.route(false);
    }

    fn end_with(&self, state: &mut State, due: &mut Due) {
        self.ended.store(true, Ordering::Release);
        state.wake_all(&mut due.wakers);
        due.unposted.append(&mut state.backlog);
    }

    /// Fails the requests that were in the backlog at the end. `state` is not locked.
    fn fail_unposted(&self, due: &mut Due) {
        for queued in std::mem::take(&mut due.unposted) {
            let failure = Failure::Completed(WcStatus::Flushed);
            self.finish(queued.id.wr_id(), Err(failure), due);
        }
    }
}

impl Router {
    /// Routes the completions in the queue. If there are none, first reads and writes the socket.
    pub(super) fn drive(&self) {
        self.turns.over(self.slots.version());
        self.route(true);
    }

    /// Returns `true` if an operation that was just posted should let other tasks post before it
    /// polls.
    pub(super) fn lets_others_post(&self) -> bool {
        self.turns.begin(self.slots.version())
    }

    /// Returns `true` if the router's waker is registered, so that every later completion is
    /// routed. Call it after registering a waker.
    pub(super) fn is_watched(&self) -> bool {
        // Either the caller's waker is registered before this, or the thread that takes the
        // router's waker sees it: see `route_and_watch`.
        fence(Ordering::SeqCst);
        self.watched.load(Ordering::Relaxed)
    }

    /// Routes the completions in the queue, and registers the router's waker for the next one. Call
    /// it after registering a waker: the completion may already be there, and then that waker is
    /// called.
    pub(super) fn watch(&self) {
        if self.is_watched() {
            self.cq.send_deferred_requests();
            return;
        }
        self.watched.store(true, Ordering::Relaxed);
        self.cq.wake_at_next(&self.waker);
        self.route(false);
    }

    /// Called by the thread that has written a completion and taken the router's waker from the
    /// queue.
    fn route_and_watch(&self) {
        self.watched.store(false, Ordering::Relaxed);
        // A thread that saw `true` registered its waker before this, so it is seen below.
        fence(Ordering::SeqCst);
        self.route(false);
        let slots_wait = self.slots.has_waiters() || self.slots.keeps_memory();
        if slots_wait || self.state.lock().has_waiters() {
            self.watch();
        }
    }

    fn route(&self, drive: bool) {
        let mut scratch = None;
        self.baton.drive(|| {
            // Read before the completions: those of the last messages were written before it was
            // set.
            let ending =
                self.ending.load(Ordering::Acquire) && self.ending.swap(false, Ordering::AcqRel);
            let mut first = [Cqe::default()];
            let looked = match drive {
                true => self.cq.poll(&mut first),
                false => self.cq.take_ready(&mut first),
            };
            match looked {
                Ok(0) => {}
                Ok(_) => self.take_all(&first, scratch.get_or_insert_with(|| self.take_scratch())),
                Err(_) => self.lose(&mut scratch.get_or_insert_with(|| self.take_scratch()).due),
            }
            // Even if a failed request has ended the connection: only now the reason is known, and
            // tasks may wait for it.
            if ending {
                let due = &mut scratch.get_or_insert_with(|| self.take_scratch()).due;
                self.end_with(&mut self.state.lock(), due);
            }
        });
        if let Some(mut scratch) = scratch {
            let due = &mut scratch.due;
            self.fail_unposted(due);
            due.freed.clear();
            self.return_places(std::mem::take(&mut due.places));
            call_all(due.wakers.drain(..));
            self.scratch_pool.lock().push(scratch);
        }
    }

    fn take_scratch(&self) -> Scratch {
        let scratch = self.scratch_pool.lock().pop();
        scratch.unwrap_or_default()
    }

    /// Routes a completion and those behind it. The caller holds the baton.
    fn take_all(&self, first: &[Cqe; 1], scratch: &mut Scratch) {
        let mut run = Run {
            router: self,
            state: None,
            due: &mut scratch.due,
        };
        run.take(&first[0]);
        loop {
            let Ok(n) = self.cq.take_ready(&mut *scratch.taken) else {
                drop(run);
                return self.lose(&mut scratch.due);
            };
            scratch.taken.iter().take(n).for_each(|cqe| run.take(cqe));
            if n < TAKE {
                return;
            }
        }
    }

    #[inline]
    fn finish(&self, id: u64, result: Result<(), Failure>, due: &mut Due) {
        let Ok(id) = u32::try_from(id) else {
            return;
        };
        if let Some(finished) = self.slots.finish(id, result) {
            due.places += finished.places;
            due.wakers.extend(finished.waker);
            due.freed.extend(finished.kept);
        }
    }

    /// Handles lost completions by ending the connection. The queue has room for all of them, so
    /// this is a bug.
    #[cold]
    fn lose(&self, due: &mut Due) {
        tracing::error!("the completion queue of a connection has overflowed");
        self.ctx.wait_for_accesses();
        self.end_with(&mut self.state.lock(), due);
        for id in 0..self.slots.count() {
            let failure = Failure::Completed(WcStatus::Fatal);
            self.finish(id.into(), Err(failure), due);
        }
    }
}

/// State of routing a series of completions.
struct Run<'a> {
    router: &'a Router,
    /// Locked from the first message on.
    state: Option<MutexGuard<'a, State>>,
    due: &'a mut Due,
}

impl Run<'_> {
    #[inline]
    fn take(&mut self, cqe: &Cqe) {
        let result = match cqe.status {
            WcStatus::Success => Ok(()),
            status => Err(Failure::Completed(status)),
        };
        if result.is_err() {
            self.fail();
        }
        if cqe.wr_id & RECEIVE == 0 {
            self.router.finish(cqe.wr_id, result, self.due);
        } else if result.is_ok() {
            let state = self.state.get_or_insert_with(|| self.router.state.lock());
            state.arrive(cqe, &mut self.due.wakers);
        }
    }

    /// Ends the connection after a failed request or receive.
    #[cold]
    fn fail(&mut self) {
        // A thread may still copy into memory of a flushed request. No thread waits for `state`
        // while it accesses memory.
        self.router.ctx.wait_for_accesses();
        let state = self.state.get_or_insert_with(|| self.router.state.lock());
        self.router.end_with(state, self.due);
    }
}

#[cfg(all(test, not(miri)))]
#[path = "router_tests.rs"]
mod tests;
