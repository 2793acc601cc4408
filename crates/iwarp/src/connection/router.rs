//! Leads completions to the requests that they are about, for any number of tasks and threads.
//!
//! A connection has one completion queue. Whoever waits looks into it, and routes all that is there: results go to the slots of
//! their requests, messages to the inbox, and those who wait for them are woken. While nobody looks, a waker of the router's own
//! stands at the queue, and the thread that writes a completion routes it.
//!
//! Order: a thread that takes completions holds the baton, so messages enter the inbox in the order of their arrival. A thread that
//! does not get the baton leaves a note, and the holder looks again. Slots have no lock. `state` is locked for moments only. With it
//! locked nothing is posted and no code of the program runs: wakers are called, and memory is freed, when it is unlocked.

pub(super) use super::state::{Arrived, Entry, Held, Inbox, Priority, SlotId, receive_id};
use super::state::{RECEIVE, State};
use super::turns::Turns;
use super::waiters::{Place, Ticket};
use crate::error::Error;
use crate::failure::Refusal;
use crate::progress::baton::Baton;
use crate::progress::slots::Slots;
use crate::runtime::CompletionQueue;
use crate::runtime::Context;
use crate::sys::fork::Origin;
use iwarp_rnic::{Cqe, WcStatus};
use parking_lot::{Mutex, MutexGuard};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

/// Completions that are taken in one go.
const TAKE: usize = 32;

/// Wakers that are called and memory that is freed when nothing is locked.
#[derive(Debug, Default)]
struct Due {
    wakers: Vec<Waker>,
    freed: Vec<Held>,
    /// Room was given back, and somebody waits for it.
    crowded: bool,
}

/// What a thread needs that routes. It is used again and again, so that routing allocates nothing.
#[derive(Debug, Default)]
struct Desk {
    due: Due,
    taken: Box<[Cqe; TAKE]>,
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Router {
    pub(super) cq: CompletionQueue,
    ctx: Context,
    slots: Slots<Held, WcStatus>,
    state: Mutex<State>,
    /// The connection has ended: nothing is posted any more, and no message arrives. Set with `state` locked.
    ended: AtomicBool,
    /// The router's waker stands at the queue. A hint: if it is `true`, a completion that comes later is routed.
    watched: AtomicBool,
    turns: Turns,
    baton: Baton,
    /// Those that nobody uses at the moment: one for each thread that has ever routed at the same time as others.
    desks: Mutex<Vec<Desk>>,
    waker: Waker,
    pub(super) origin: Origin,
}

/// Wakes the router, and does not keep it.
struct Wakes(Weak<Router>);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        if let Some(router) = self.0.upgrade() {
            router.route_and_watch();
        }
    }
}

/// Calls a waker of the program, which may panic. The others are called all the same.
fn call(waker: Waker) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
        tracing::error!("a waker of the program panicked");
        // The payload is not dropped, because that may panic again.
        std::mem::forget(payload);
    }
}

/// Calls wakers that were taken off a list. Call it with nothing locked.
pub(super) fn call_all(wakers: impl IntoIterator<Item = Waker>) {
    wakers.into_iter().for_each(call);
}

/// Slots: which requests may be posted, and what has become of them.
impl Router {
    /// Makes a router for a send queue of `depth`, and `receives` receive buffers.
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
            desks: Mutex::default(),
            waker: Waker::from(Arc::new(Wakes(Weak::clone(weak)))),
            origin: Origin::here(),
        })
    }

    /// Refuses in a forked child, where a thread that does not exist may hold the locks.
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

    /// Takes a slot and `places` places of the send queue, if what `priority` leaves for others is left then.
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

    /// Does the same for somebody who has waited.
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
        // What is left may do for the next one, too.
        let next = self.spare(&mut state);
        drop(state);
        drop(gone);
        call_all(next);
        Entry::Taken(SlotId(id))
    }

    /// Takes the next one off the list that waits for room, if there is some.
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

    /// Room was given back, and somebody may wait for it.
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

    /// Registers a waker for the moment when there is room.
    pub(super) fn wait_for_room(&self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let mut state = self.state.lock();
        let old = state.room.wait(ticket, waker);
        self.slots.crowd();
        drop(state);
        drop(old);
    }

    /// Gives up waiting for room.
    pub(super) fn leave_room(&self, ticket: Option<Ticket>) {
        if ticket.is_none() || self.origin.is_foreign() {
            return;
        }
        let mut state = self.state.lock();
        let (place, gone) = state.room.leave(ticket);
        // If it was woken and does not take the room, the next one may.
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

    /// Gives a slot back whose request was not posted.
    pub(super) fn withdraw(&self, id: SlotId) {
        self.gave_back(self.slots.withdraw(id.0));
    }

    /// Returns whether a request has succeeded; `None` if it has not ended.
    #[inline]
    pub(super) fn outcome(&self, id: SlotId) -> Option<bool> {
        self.slots.outcome(id.0)
    }

    /// Returns how a request has ended, and frees its slot. `None`: it has not ended.
    #[inline]
    pub(super) fn collect(&self, id: SlotId) -> Option<Result<(), WcStatus>> {
        let (result, crowded) = self.slots.collect(id.0)?;
        self.gave_back(crowded);
        Some(result)
    }

    /// Frees the slot of a request that has succeeded.
    #[inline]
    pub(super) fn give_back(&self, id: SlotId) {
        self.gave_back(self.slots.withdraw(id.0));
    }

    /// Registers a waker for the moment when a request has ended. Look once more after this, and then wait.
    pub(super) fn wait_for_end_of(&self, id: SlotId, waker: &Waker) {
        self.slots.wait(id.0, waker);
    }

    /// The operation of a request is gone, and leaves what the request uses. It is freed when the request has ended.
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

/// Messages, and the end.
impl Router {
    /// Takes the oldest message.
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

    /// Takes the oldest message, for a caller that takes all of them, whoever waits.
    pub(super) fn pop_message(&self) -> Inbox {
        let mut state = self.state.lock();
        match (state.inbox.pop_front(), self.has_ended()) {
            (Some(arrived), _) => Inbox::Message(arrived),
            (None, true) => Inbox::Ended,
            (None, false) => Inbox::Empty,
        }
    }

    /// Returns `true` if a message is there, or none will come any more.
    pub(super) fn has_message(&self) -> bool {
        let state = self.state.lock();
        !state.inbox.is_empty() || self.has_ended()
    }

    /// Registers a waker for the moment when a message is there.
    pub(super) fn wait_for_message(&self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let old = self.state.lock().readers.wait(ticket, waker);
        drop(old);
    }

    /// Gives up waiting for a message.
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

    /// Registers a waker for the end of the connection.
    pub(super) fn wait_for_end(&self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let old = self.state.lock().mourners.wait(ticket, waker);
        drop(old);
    }

    /// Gives up waiting for the end.
    pub(super) fn leave_mourners(&self, ticket: Option<Ticket>) {
        if ticket.is_some() && !self.origin.is_foreign() {
            let gone = self.state.lock().mourners.leave(ticket);
            drop(gone);
        }
    }

    /// The connection has ended: whoever waits for room, a message or the end is woken. Requests that were posted still get their
    /// completions.
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

/// Completions.
impl Router {
    /// Routes what is in the queue. If nothing is there, this thread first reads and writes the socket.
    pub(super) fn drive(&self) {
        self.turns.over(self.slots.version());
        self.route(true);
    }

    /// Returns `true` if an operation that has just been posted should let other tasks post theirs before it looks for completions.
    pub(super) fn lets_others_post(&self) -> bool {
        self.turns.begin(self.slots.version())
    }

    /// Makes sure that each completion from now on is routed, by the thread that writes it if nobody looks. Call it after a waker was
    /// registered. Returns `true` if that was so already: then requests that were put off are sent.
    pub(super) fn is_watched(&self) -> bool {
        // The waker of the caller is registered before this, or the thread that takes the router's waker sees it: see `route_and_watch`.
        fence(Ordering::SeqCst);
        self.watched.load(Ordering::Relaxed)
    }

    /// Routes what is in the queue, and leaves the rest to the thread that writes the next completion. Call it after a waker was
    /// registered: the completion may be there already, and then that waker is called.
    pub(super) fn watch(&self) {
        if self.is_watched() {
            self.cq.send_put_off();
            return;
        }
        self.watched.store(true, Ordering::Relaxed);
        self.cq.wake_at_next(&self.waker);
        self.route(false);
    }

    /// The thread that has written a completion has taken the router's waker off the queue.
    fn route_and_watch(&self) {
        self.watched.store(false, Ordering::Relaxed);
        // Somebody who saw `true` has registered before this, and is seen below.
        fence(Ordering::SeqCst);
        self.route(false);
        let slots_wait = self.slots.somebody_waits() || self.slots.keeps_memory();
        if slots_wait || self.state.lock().somebody_waits() {
            self.watch();
        }
    }

    fn route(&self, drive: bool) {
        let mut desk = None;
        self.baton.drive(|| {
            let mut first = [Cqe::default()];
            let looked = match drive {
                true => self.cq.poll(&mut first),
                false => self.cq.take_ready(&mut first),
            };
            match looked {
                Ok(0) => {}
                Ok(_) => self.take_all(&first, desk.get_or_insert_with(|| self.desk())),
                Err(_) => self.lose(&mut desk.get_or_insert_with(|| self.desk()).due),
            }
        });
        if let Some(mut desk) = desk {
            let due = &mut desk.due;
            due.freed.clear();
            call_all(due.wakers.drain(..));
            self.gave_back(std::mem::take(&mut due.crowded));
            self.desks.lock().push(desk);
        }
    }

    fn desk(&self) -> Desk {
        let desk = self.desks.lock().pop();
        desk.unwrap_or_default()
    }

    /// Routes a completion and those behind it. The caller holds the baton.
    fn take_all(&self, first: &[Cqe; 1], desk: &mut Desk) {
        let mut run = Run {
            router: self,
            state: None,
            due: &mut desk.due,
        };
        run.take(&first[0]);
        loop {
            let Ok(n) = self.cq.take_ready(&mut *desk.taken) else {
                drop(run);
                return self.lose(&mut desk.due);
            };
            desk.taken.iter().take(n).for_each(|cqe| run.take(cqe));
            if n < TAKE {
                return;
            }
        }
    }

    fn finish(&self, id: u64, result: Result<(), WcStatus>, due: &mut Due) {
        // Numbers of slots are small.
        let Ok(id) = u32::try_from(id) else {
            return;
        };
        if let Some(finished) = self.slots.finish(id, result) {
            due.wakers.extend(finished.waker);
            due.freed.extend(finished.kept);
            due.crowded |= finished.crowded;
        }
    }

    /// Completions were lost. The queue has room for all of them, so this is the end of the connection, and a mistake of ours.
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

/// Completions that are routed one after the other.
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

    /// A request or receive has failed, and so the connection ends.
    #[cold]
    fn fail(&mut self) {
        // A thread may still copy into memory of a request that was flushed meanwhile. Nobody waits for `state` while it accesses memory.
        self.router.ctx.wait_for_accesses();
        let state = self.state.get_or_insert_with(|| self.router.state.lock());
        self.router.end_with(state, &mut self.due.wakers);
    }
}

#[cfg(all(test, not(miri)))]
#[path = "router_tests.rs"]
mod tests;
