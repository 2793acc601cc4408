//! Routes completions to their requests, for any number of tasks and threads.
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

pub(super) use super::state::{Arrived, Entry, Held, Inbox, Priority, SlotId, receive_id};
use super::state::{RECEIVE, State};
use super::turns::Turns;
use super::waiters::{Place, Ticket};
use crate::engine::baton::Baton;
use crate::engine::slots::Slots;
use crate::error::Error;
use crate::failure::Refusal;
use crate::runtime::CompletionQueue;
use crate::runtime::Context;
use crate::sys::fork::Origin;
use iwarp_rnic::{Cqe, WcStatus};
use parking_lot::{Mutex, MutexGuard};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

/// Completions taken per poll.
const TAKE: usize = 32;

/// Wakers to call and memory to free after unlocking.
#[derive(Debug, Default)]
struct Due {
    wakers: Vec<Waker>,
    freed: Vec<Held>,
    /// Room was returned while someone waits for it.
    crowded: bool,
}

/// Buffers of a routing thread, reused so that routing does not allocate.
#[derive(Debug, Default)]
struct Scratch {
    due: Due,
    taken: Box<[Cqe; TAKE]>,
}

#[derive(Debug)]
pub(super) struct Router {
    pub(super) cq: CompletionQueue,
    ctx: Context,
    slots: Slots<Held, WcStatus>,
    state: Mutex<State>,
    /// The connection has ended: nothing is posted any more, and no message arrives. Set while
    /// `state` is locked.
    ended: AtomicBool,
    /// The router's waker is registered with the queue. If `true`, a later completion is routed.
    watched: AtomicBool,
    turns: Turns,
    baton: Baton,
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
            slots: Slots::new(depth),
            state: Mutex::new(State::new(receives)),
            ended: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            turns: Turns::default(),
            baton: Baton::new(),
            scratch_pool: Mutex::default(),
            waker: Waker::from(Arc::new(Wakes(Weak::clone(weak)))),
            origin: Origin::here(),
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

    /// Takes a slot and `places` places of the send queue, if enough remain for requests of a
    /// higher `priority`.
    #[inline]
    pub(super) fn enter(
        &self,
        places: u32,
        priority: Priority,
        ticket: &mut Option<Ticket>,
    ) -> Entry {
        if self.has_ended() {
            return Entry::Ended;
        }
        let (reserve, queue) = match priority {
            Priority::Normal => (0, true),
            Priority::Leaves(reserve) => (u32::from(reserve), true),
            Priority::First => (0, false),
        };
        if ticket.is_some() {
            return self.enter_in_turn(places, reserve, queue, ticket);
        }
        match self.slots.take(places, reserve, queue) {
            Ok(id) => Entry::Taken(SlotId(id)),
            Err(_) => Entry::Full,
        }
    }

    /// Does the same as `enter` if there are waiters.
    #[cold]
    fn enter_in_turn(
        &self,
        places: u32,
        reserve: u32,
        queue: bool,
        ticket: &mut Option<Ticket>,
    ) -> Entry {
        let mut state = self.state.lock();
        if queue && !state.room.may_take(*ticket) {
            return Entry::Full;
        }
        let Ok(id) = self.slots.take(places, reserve, false) else {
            return Entry::Full;
        };
        let gone = state.room.leave(ticket.take()).1;
        // The remaining room may suffice for the next waiter.
        let next = self.spare(&mut state);
        drop(state);
        drop(gone);
        call_all(next);
        Entry::Taken(SlotId(id))
    }

    /// Takes the next waiter for room from the list if there is room.
    fn spare(&self, state: &mut State) -> Option<Waker> {
        let next = match self.slots.has_room() {
            true => state.room.next(),
            false => None,
        };
        if state.room.is_empty() {
            self.slots.uncrowd();
        }
        next
    }

    #[inline]
    fn gave_back(&self, crowded: bool) {
        if crowded {
            self.wake_next();
        }
    }

    #[cold]
    fn wake_next(&self) {
        let next = self.spare(&mut self.state.lock());
        call_all(next);
    }

    pub(super) fn wait_for_room(&self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let mut state = self.state.lock();
        let old = state.room.wait(ticket, waker);
        self.slots.crowd();
        drop(state);
        drop(old);
    }

    pub(super) fn leave_room(&self, ticket: Option<Ticket>) {
        if ticket.is_none() || self.origin.is_foreign() {
            return;
        }
        let mut state = self.state.lock();
        let (place, gone) = state.room.leave(ticket);
        // If it was woken and does not use the room, the next one may.
        let next = match place {
            Place::Woken => self.spare(&mut state),
            Place::Waiting => None,
        };
        if state.room.is_empty() {
            self.slots.uncrowd();
        }
        drop(state);
        drop(gone);
        call_all(next);
    }

    /// Returns a slot whose request was not posted.
    pub(super) fn withdraw(&self, id: SlotId) {
        self.gave_back(self.slots.withdraw(id.0));
    }

    /// Returns whether a request succeeded; `None` if it has not completed.
    #[inline]
    pub(super) fn outcome(&self, id: SlotId) -> Option<bool> {
        self.slots.outcome(id.0)
    }

    /// Returns the result of a request and frees its slot; `None` if it has not completed.
    #[inline]
    pub(super) fn collect(&self, id: SlotId) -> Option<Result<(), WcStatus>> {
        let (result, crowded) = self.slots.collect(id.0)?;
        self.gave_back(crowded);
        Some(result)
    }

    #[inline]
    pub(super) fn give_back(&self, id: SlotId) {
        self.gave_back(self.slots.withdraw(id.0));
    }

    /// Registers a waker for the completion of a request. Check the request once more after this
    /// call.
    pub(super) fn wait_for_end_of(&self, id: SlotId, waker: &Waker) {
        self.slots.wait(id.0, waker);
    }

    /// Drops the operation of a posted request. What the request uses is freed when it completes.
    pub(super) fn abandon(&self, id: SlotId, held: Option<Held>) {
        if self.origin.is_foreign() {
            return;
        }
        let (freed, crowded) = self.slots.abandon(id.0, held);
        drop(freed);
        self.gave_back(crowded);
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

    /// Records the end of the connection, and wakes all waiters for room, a message or the end.
    /// Posted requests still get their completions.
    pub(super) fn end(&self) {
        let mut due = Vec::new();
        self.end_with(&mut self.state.lock(), &mut due);
        call_all(due);
    }

    fn end_with(&self, state: &mut State, wakers: &mut Vec<Waker>) {
        self.ended.store(true, Ordering::Release);
        state.wake_all(wakers);
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
        let slots_wait = self.slots.somebody_waits() || self.slots.keeps_memory();
        if slots_wait || self.state.lock().somebody_waits() {
            self.watch();
        }
    }

    fn route(&self, drive: bool) {
        let mut scratch = None;
        self.baton.drive(|| {
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
        });
        if let Some(mut scratch) = scratch {
            let due = &mut scratch.due;
            due.freed.clear();
            call_all(due.wakers.drain(..));
            self.gave_back(std::mem::take(&mut due.crowded));
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

    fn finish(&self, id: u64, result: Result<(), WcStatus>, due: &mut Due) {
        let Ok(id) = u32::try_from(id) else {
            return;
        };
        if let Some(finished) = self.slots.finish(id, result) {
            due.wakers.extend(finished.waker);
            due.freed.extend(finished.kept);
            due.crowded |= finished.crowded;
        }
    }

    /// Handles lost completions by ending the connection. The queue has room for all of them, so
    /// this is a bug.
    #[cold]
    fn lose(&self, due: &mut Due) {
        tracing::error!("the completion queue of a connection has overflowed");
        self.ctx.wait_for_accesses();
        self.end_with(&mut self.state.lock(), &mut due.wakers);
        for id in 0..self.slots.count() {
            self.finish(id.into(), Err(WcStatus::Fatal), due);
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
            status => Err(status),
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
        self.router.end_with(state, &mut self.due.wakers);
    }
}

#[cfg(all(test, not(miri)))]
#[path = "router_tests.rs"]
mod tests;
