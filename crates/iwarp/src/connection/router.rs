//! Leads completions to the requests that they are about, for any number of tasks and threads.
//!
//! A connection has one completion queue. Whoever waits looks into it, and routes all that is there: results go to the slots of
//! their requests, messages to the inbox, and those who wait for them are woken. While nobody looks, a waker of the router's own
//! stands at the queue, and the thread that writes a completion routes it.
//!
//! Order: a thread that takes completions holds the baton, so messages enter the inbox in the order of their arrival. A thread that
//! does not get the baton leaves a note, and the holder looks again. `state` is locked for moments only. With it locked nothing is
//! posted and no code of the program runs: wakers are called, and memory is freed, when it is unlocked.

pub(super) use super::state::{Arrived, Entry, Held, Inbox, Priority, SlotId, receive_id};
use super::state::{Slot, Stage, State};
use super::waiters::{Place, Waiters};
use crate::error::Error;
use crate::failure::Refusal;
use crate::progress::baton::Baton;
use crate::raw::{CompletionQueue, Context};
use crate::sys::fork::Origin;
use iwarp_rnic::{Cqe, WcStatus};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

/// Completions that are taken in one go.
const TAKE: usize = 32;

/// Wakers that are called and memory that is freed when nothing is locked, and room for completions.
#[derive(Debug, Default)]
struct Due {
    wakers: Vec<Waker>,
    freed: Vec<Held>,
    taken: Box<[Cqe; TAKE]>,
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Router {
    pub(super) cq: CompletionQueue,
    ctx: Context,
    state: Mutex<State>,
    baton: Baton,
    /// Lists that nobody uses at the moment: one for each thread that has ever routed at the same time as others.
    lists: Mutex<Vec<Due>>,
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

impl Router {
    /// Makes a router for a send queue of `depth`, and `receives` receive buffers.
    pub(super) fn new(ctx: &Context, cq: CompletionQueue, depth: u32, receives: u32) -> Arc<Self> {
        let state = State {
            slots: (0..depth).map(|_| Slot::default()).collect(),
            free: (0..depth).rev().collect(),
            places: depth,
            room: Waiters::default(),
            inbox: VecDeque::with_capacity(receives as usize),
            readers: Waiters::default(),
            mourners: Waiters::default(),
            sleeping: 0,
            ended: false,
        };
        Arc::new_cyclic(|weak| Self {
            cq,
            ctx: ctx.clone(),
            state: Mutex::new(state),
            baton: Baton::new(),
            lists: Mutex::default(),
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

    /// Takes a slot and `places` places of the send queue, for a request that keeps `held`, if what `priority` leaves for others is left
    /// then.
    #[inline]
    pub(super) fn enter(
        &self,
        places: u32,
        priority: Priority,
        held: &mut Held,
        ticket: &mut Option<u64>,
    ) -> Entry {
        let mut state = self.state.lock();
        if state.ended {
            return Entry::Ended;
        }
        let (reserve, waits) = match priority {
            Priority::Normal => (0, true),
            Priority::Leaves(reserve) => (reserve, true),
            Priority::First => (0, false),
        };
        let enough =
            state.places >= places.saturating_add(reserve) && state.free.len() > reserve as usize;
        if !enough || (waits && !state.room.may_take(*ticket)) {
            return Entry::Full;
        }
        let Some(id) = state.free.pop() else {
            return Entry::Full;
        };
        let gone = state.room.leave(ticket.take()).1;
        state.places -= places;
        if let Some(slot) = state.slots.get_mut(id as usize) {
            slot.stage = Stage::Posted;
            slot.places = places;
            slot.held = std::mem::take(held);
        }
        // What is left may do for the next one, too.
        let next = state.spare();
        drop(state);
        drop(gone);
        call_all(next);
        Entry::Taken(SlotId(id))
    }

    /// Registers a waker for the moment when there is room.
    pub(super) fn wait_for_room(&self, ticket: &mut Option<u64>, waker: &Waker) {
        let waker = waker.clone();
        let old = self.state.lock().room.wait(ticket, waker);
        drop(old);
    }

    /// Gives up waiting for room.
    pub(super) fn leave_room(&self, ticket: Option<u64>) {
        if ticket.is_none() || self.origin.is_foreign() {
            return;
        }
        let mut state = self.state.lock();
        let (place, gone) = state.room.leave(ticket);
        // It was woken and does not take the room: the next one may.
        let next = match place {
            Place::Woken => state.spare(),
            Place::Waiting => None,
        };
        drop(state);
        drop(gone);
        call_all(next);
    }

    /// Gives a slot back whose request was not posted; returns what it kept.
    pub(super) fn withdraw(&self, id: SlotId) -> Held {
        let mut state = self.state.lock();
        let places = state.slots.get(id.index()).map_or(0, |slot| slot.places);
        state.places += places;
        let (held, next) = (state.release(id.0), state.spare());
        drop(state);
        call_all(next);
        held
    }

    /// Returns how a request has ended; `None` if it has not.
    pub(super) fn outcome(&self, id: SlotId) -> Option<WcStatus> {
        match self.state.lock().slots.get(id.index())?.stage {
            Stage::Done(status) => Some(status),
            _ => None,
        }
    }

    /// Returns how a request has ended, and what it kept, and frees its slot. `None`: it has not ended.
    #[inline]
    pub(super) fn collect(&self, id: SlotId) -> Option<(WcStatus, Held)> {
        let mut state = self.state.lock();
        let status = match state.slots.get(id.index())?.stage {
            Stage::Done(status) => status,
            _ => return None,
        };
        let held = state.release(id.0);
        let next = state.spare();
        drop(state);
        call_all(next);
        Some((status, held))
    }

    /// Returns `true` if a request has ended.
    pub(super) fn is_done(&self, id: SlotId) -> bool {
        let state = self.state.lock();
        let slot = state.slots.get(id.index());
        slot.is_none_or(|slot| matches!(slot.stage, Stage::Done(_)))
    }

    /// Registers a waker for the moment when a request has ended. Look once more after this, and then wait.
    pub(super) fn wait_for_end_of(&self, id: SlotId, waker: &Waker) {
        let waker = waker.clone();
        let mut state = self.state.lock();
        let Some(slot) = state.slots.get_mut(id.index()) else {
            return;
        };
        let old = match slot.stage {
            Stage::Posted | Stage::Waiting(_) => {
                std::mem::replace(&mut slot.stage, Stage::Waiting(waker))
            }
            _ => Stage::Waiting(waker),
        };
        if matches!(old, Stage::Posted) {
            state.sleeping += 1;
        }
        drop(state);
        drop(old);
    }

    /// The operation of a request is gone. What the request keeps is freed when it has ended.
    pub(super) fn abandon(&self, id: SlotId) {
        if self.origin.is_foreign() {
            return;
        }
        let mut state = self.state.lock();
        let Some(slot) = state.slots.get_mut(id.index()) else {
            return;
        };
        let old = std::mem::replace(&mut slot.stage, Stage::Abandoned);
        let mut freed = Held::Nothing;
        let mut next = None;
        match old {
            Stage::Waiting(_) => state.sleeping -= 1,
            Stage::Done(_) => {
                freed = state.release(id.0);
                next = state.spare();
            }
            _ => {}
        }
        drop(state);
        drop((old, freed));
        call_all(next);
    }

    /// Takes the oldest message.
    pub(super) fn take_message(&self, ticket: &mut Option<u64>) -> Inbox {
        let mut state = self.state.lock();
        if !state.readers.may_take(*ticket) && !state.ended {
            return Inbox::Empty;
        }
        let Some(arrived) = state.inbox.pop_front() else {
            return match state.ended {
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
        match (state.inbox.pop_front(), state.ended) {
            (Some(arrived), _) => Inbox::Message(arrived),
            (None, true) => Inbox::Ended,
            (None, false) => Inbox::Empty,
        }
    }

    /// Returns `true` if a message is there, or none will come any more.
    pub(super) fn has_message(&self) -> bool {
        let state = self.state.lock();
        !state.inbox.is_empty() || state.ended
    }

    /// Registers a waker for the moment when a message is there.
    pub(super) fn wait_for_message(&self, ticket: &mut Option<u64>, waker: &Waker) {
        let waker = waker.clone();
        let old = self.state.lock().readers.wait(ticket, waker);
        drop(old);
    }

    /// Gives up waiting for a message.
    pub(super) fn leave_readers(&self, ticket: Option<u64>) {
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
    pub(super) fn wait_for_end(&self, ticket: &mut Option<u64>, waker: &Waker) {
        let waker = waker.clone();
        let old = self.state.lock().mourners.wait(ticket, waker);
        drop(old);
    }

    /// Gives up waiting for the end.
    pub(super) fn leave_mourners(&self, ticket: Option<u64>) {
        if ticket.is_some() && !self.origin.is_foreign() {
            let gone = self.state.lock().mourners.leave(ticket);
            drop(gone);
        }
    }

    /// The connection has ended: whoever waits for room, a message or the end is woken. Requests that were posted still get their
    /// completions.
    pub(super) fn end(&self) {
        let mut due = Vec::new();
        self.state.lock().end(&mut due);
        call_all(due);
    }

    /// Routes what is in the queue. If nothing is there, this thread first reads and writes the socket.
    pub(super) fn drive(&self) {
        self.route(true);
    }

    /// Routes what is in the queue, and leaves the rest to the thread that writes the next completion. Call it after a waker was
    /// registered: the completion may be there already, and then that waker is called.
    pub(super) fn watch(&self) {
        self.cq.wake_at_next(&self.waker);
        self.route(false);
    }

    fn route_and_watch(&self) {
        self.route(false);
        if self.state.lock().somebody_waits() {
            self.watch();
        }
    }

    fn route(&self, drive: bool) {
        let mut due = None;
        self.baton.drive(|| {
            let mut first = [Cqe::default()];
            let looked = match drive {
                true => self.cq.poll(&mut first),
                false => self.cq.take_ready(&mut first),
            };
            match looked {
                Ok(0) => {}
                Ok(_) => self.take_all(&first, due.get_or_insert_with(|| self.lists())),
                Err(_) => self.lose(due.get_or_insert_with(|| self.lists())),
            }
        });
        if let Some(mut due) = due {
            due.freed.clear();
            call_all(due.wakers.drain(..));
            self.lists.lock().push(due);
        }
    }

    /// Returns lists for what is due. They are used again and again, so that routing allocates nothing.
    fn lists(&self) -> Due {
        let lists = self.lists.lock().pop();
        lists.unwrap_or_default()
    }

    /// Routes a completion and those behind it. The caller holds the baton.
    fn take_all(&self, first: &[Cqe; 1], due: &mut Due) {
        let mut settled = false;
        let mut state = self.state.lock();
        let mut take = |state: &mut State, cqe: &Cqe, wakers: &mut _, freed: &mut _| {
            if cqe.status != WcStatus::Success && !settled {
                // A thread may still copy into memory of a request that was flushed meanwhile. Nobody waits for `state` while it
                // accesses memory.
                self.ctx.wait_for_accesses();
                settled = true;
            }
            state.take(cqe, wakers, freed);
        };
        take(&mut state, &first[0], &mut due.wakers, &mut due.freed);
        loop {
            let Ok(n) = self.cq.take_ready(&mut *due.taken) else {
                drop(state);
                return self.lose(due);
            };
            for cqe in due.taken.iter().take(n) {
                take(&mut state, cqe, &mut due.wakers, &mut due.freed);
            }
            if n < TAKE {
                return;
            }
        }
    }

    /// Completions were lost. The queue has room for all of them, so this is the end of the connection, and a mistake of ours.
    #[cold]
    fn lose(&self, due: &mut Due) {
        tracing::error!("the completion queue of a connection has overflowed");
        self.ctx.wait_for_accesses();
        let mut state = self.state.lock();
        state.end(&mut due.wakers);
        for id in 0..state.slots.len() as u64 {
            let failed = Cqe {
                wr_id: id,
                status: WcStatus::Fatal,
                ..Cqe::default()
            };
            state.take(&failed, &mut due.wakers, &mut due.freed);
        }
    }
}
