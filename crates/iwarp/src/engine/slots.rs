//! Slots for requests: which are free, which requests have ended, and which tasks wait.
//!
//! A request takes a slot before it is posted, and *places*: entries of the send queue, of which a
//! batch needs several. The places are free again when the request has ended, the slot when its
//! result has been taken. So there can be more slots than places: if all slots are taken, more are
//! added. Three parties use a slot, each at any time:
//!
//! - The *operation* takes it, waits for the end, and returns it by [`collect`](Slots::collect), or
//!   gives up by [`abandon`](Slots::abandon).
//! - The *router*, one thread at a time, reports by [`finish`](Slots::finish) that the request has
//!   ended, and returns the places by [`return_places`](Slots::return_places).
//! - Requests that find no place wait in a backlog of the router. [`crowd`](Slots::crowd) marks
//!   that it is not empty.
//!
//! A request that no task sleeps for takes no lock. One atomic number, `room`, holds the first slot
//! of the free list, the number of free places, and the mark. So a thread that returns places
//! learns in the same step whether the backlog needs them. A counter in the number distinguishes a
//! free list that was changed twice from the one before. Wakers are code of the program, so they
//! are cloned and dropped without a lock.

use super::sync::{AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering};
use std::sync::{OnceLock, PoisonError};
use std::task::Waker;

/// No operation has the slot.
const FREE: u32 = 0;
/// The request is in flight, and no task waits for it.
const POSTED: u32 = 1;
/// The request is in flight, and a task or thread is woken at its end.
const WAITING: u32 = 2;
/// The request is in flight, and the operation is gone: the router returns the slot.
const ABANDONED: u32 = 3;
const DONE: u32 = 4;
const FAILED: u32 = 5;

/// Layout of `room`: the first free slot or [`NO_SLOT`], free places, counter, and mark.
mod room {
    pub(super) const SLOT_BITS: u32 = 20;
    pub(super) const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;
    pub(super) const PLACES: u32 = SLOT_BITS;
    pub(super) const PLACES_BITS: u32 = 17;
    pub(super) const PLACES_MASK: u64 = (1 << PLACES_BITS) - 1;
    pub(super) const COUNTER: u32 = SLOT_BITS + PLACES_BITS;
    pub(super) const CROWDED: u64 = 1 << 63;
}

const NO_SLOT: u32 = room::SLOT_MASK as u32;

/// Maximum of the slots: of requests whose result has not been taken.
const SLOTS_MAX: u32 = NO_SLOT;
/// Maximum of the places.
const PLACES_MAX: u32 = room::PLACES_MASK as u32;
/// The first of these steps has as many slots as there are places, and each one doubles the slots.
const STEPS: usize = room::SLOT_BITS as usize;
/// Maximum of the [blocks](Block).
pub(crate) const BLOCKS: usize = STEPS + 1;

#[derive(Debug, Clone, Copy)]
struct Room(u64);

impl Room {
    const fn first(self) -> u32 {
        (self.0 & room::SLOT_MASK) as u32
    }

    const fn places(self) -> u32 {
        (self.0 >> room::PLACES & room::PLACES_MASK) as u32
    }

    const fn is_crowded(self) -> bool {
        self.0 & room::CROWDED != 0
    }

    /// Returns the next value, with another head of the free list and another number of places.
    const fn next(self, first: u32, places: u32) -> Self {
        let counter = (self.0 & !room::CROWDED) >> room::COUNTER;
        let counter = (counter.wrapping_add(1) << room::COUNTER) & !room::CROWDED;
        let rest = (places as u64) << room::PLACES | first as u64;
        Self(self.0 & room::CROWDED | counter | rest)
    }
}

/// State that is rarely needed: when a task sleeps or gives up, or when a request has failed.
#[derive(Debug)]
struct Rare<K, F> {
    waker: Option<Waker>,
    kept: Option<K>,
    failure: Option<F>,
}

#[derive(Debug)]
struct Slot<K, F> {
    stage: AtomicU32,
    /// The next free slot. Valid only while this slot is free.
    next: AtomicU32,
    /// Places that the request has taken.
    places: AtomicU32,
    rare: Mutex<Rare<K, F>>,
}

impl<K, F> Slot<K, F> {
    fn new(next: u32) -> Self {
        Self {
            stage: AtomicU32::new(FREE),
            next: AtomicU32::new(next),
            places: AtomicU32::new(0),
            rare: Mutex::new(Rare {
                waker: None,
                kept: None,
                failure: None,
            }),
        }
    }

    fn rare(&self) -> MutexGuard<'_, Rare<K, F>> {
        self.rare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type SlotList<K, F> = Box<[Slot<K, F>]>;

/// Creates the slots `from..to`, each of which names the following one as the next free slot.
fn chain<K, F>(from: u32, to: u32) -> SlotList<K, F> {
    let next = |i: u32| if i + 1 < to { i + 1 } else { NO_SLOT };
    (from..to).map(|i| Slot::new(next(i))).collect()
}

/// What the caller has to do after a request has ended, with nothing locked.
#[derive(Debug)]
pub(crate) struct Finished<K> {
    /// Places to [return](Slots::return_places).
    pub(crate) places: u32,
    pub(crate) waker: Option<Waker>,
    /// Left by an abandoned operation, to be dropped.
    pub(crate) kept: Option<K>,
}

/// Slots that were created together.
#[derive(Debug)]
pub(crate) struct Block {
    /// 0 for the first slots.
    pub(crate) number: usize,
    /// Index of a slot in its block.
    pub(crate) index: usize,
    pub(crate) slots: usize,
}

/// See the head of the file. `K` is what an operation leaves behind when it gives up. `F` is the
/// reason of a failure.
#[derive(Debug)]
pub(crate) struct Slots<K, F> {
    slots: SlotList<K, F>,
    /// Slots that were added because all were taken.
    added: [OnceLock<SlotList<K, F>>; STEPS],
    /// Held while slots are added; the number of steps.
    adding: Mutex<usize>,
    room: AtomicU64,
    /// Slots whose operation waits. The count may lag behind.
    waiting: AtomicU32,
    /// Slots whose operation has left memory behind. The count may lag behind.
    keeping: AtomicU32,
}

impl<K, F> Slots<K, F> {
    /// Creates `count` free slots and as many places, at most [`PLACES_MAX`].
    pub(crate) fn new(count: u32) -> Self {
        let count = count.min(PLACES_MAX);
        let first = if count == 0 { NO_SLOT } else { 0 };
        Self {
            slots: chain(0, count),
            added: [const { OnceLock::new() }; STEPS],
            adding: Mutex::new(0),
            room: AtomicU64::new(Room(0).next(first, count).0),
            waiting: AtomicU32::new(0),
            keeping: AtomicU32::new(0),
        }
    }

    #[inline]
    fn slot(&self, id: u32) -> Option<&Slot<K, F>> {
        match self.slots.get(id as usize) {
            Some(slot) => Some(slot),
            None => self.added_slot(id),
        }
    }

    #[cold]
    fn added_slot(&self, id: u32) -> Option<&Slot<K, F>> {
        let (step, at) = step_of(id, self.base())?;
        self.added.get(step)?.get()?.get(at as usize)
    }

    /// Returns the block of a slot.
    #[inline]
    pub(crate) fn block_of(&self, id: u32) -> Block {
        match step_of(id, self.base()).filter(|_| id >= self.base()) {
            None => Block {
                number: 0,
                index: id as usize,
                slots: self.slots.len(),
            },
            Some((step, index)) => Block {
                number: step + 1,
                index: index as usize,
                slots: self.slots.len() << step,
            },
        }
    }

    /// Returns the number of slots that were there from the beginning.
    fn base(&self) -> u32 {
        // At most `PLACES_MAX`.
        self.slots.len() as u32
    }

    /// Returns the number of slots.
    pub(crate) fn count(&self) -> u32 {
        let steps = *self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        self.base() << steps
    }

    /// Doubles the slots if none is free. Returns `false` if there are as many as possible.
    #[cold]
    fn add(&self) -> bool {
        let mut steps = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        if Room(self.room.load(Ordering::Acquire)).first() != NO_SLOT {
            return true;
        }
        let from = self.base() << *steps;
        let to = from.saturating_mul(2);
        let Some(step) = self
            .added
            .get(*steps)
            .filter(|_| to > from && to <= SLOTS_MAX)
        else {
            return false;
        };
        let added = step.get_or_init(|| chain(from, to));
        *steps += 1;
        let Some(last) = added.last() else {
            return false;
        };
        self.push_free(from, last, 0);
        true
    }

    /// Takes a slot and `places` places. Returns `None` if there are too few places, or if a
    /// backlog waits for them.
    #[inline]
    pub(crate) fn take(&self, places: u32) -> Option<u32> {
        self.take_if(places, |now| !now.is_crowded() && now.places() >= places)
    }

    /// Takes a slot for a request of the backlog, which has no places yet. Returns `None` if the
    /// results of too many requests have not been taken.
    #[cold]
    pub(crate) fn take_without_places(&self) -> Option<u32> {
        self.take_if(0, |_| true)
    }

    /// Takes a slot and places while `allowed` returns `true`. Adds slots if none is free.
    #[inline]
    fn take_if(&self, places: u32, allowed: impl Fn(Room) -> bool) -> Option<u32> {
        let mut now = Room(self.room.load(Ordering::Acquire));
        while allowed(now) {
            match self.pop_free(now, places) {
                Ok(id) => return Some(id),
                Err(Some(changed)) => now = changed,
                Err(None) if self.add() => now = Room(self.room.load(Ordering::Acquire)),
                Err(None) => return None,
            }
        }
        None
    }

    /// Takes the first free slot, and places of which there are enough. Fails with the changed
    /// state, or `None` if no slot is free.
    #[inline]
    fn pop_free(&self, now: Room, places: u32) -> Result<u32, Option<Room>> {
        let first = now.first();
        let slot = self.slot(first).ok_or(None)?;
        let next = slot.next.load(Ordering::Relaxed);
        self.change(now, now.next(next, now.places() - places))
            .map_err(Some)?;
        slot.places.store(places, Ordering::Relaxed);
        // Posting the request publishes this to the router.
        slot.stage.store(POSTED, Ordering::Relaxed);
        Ok(first)
    }

    /// Takes places for a request of the backlog. Returns `false` if there are too few.
    pub(crate) fn take_places(&self, id: u32, places: u32) -> bool {
        let Some(slot) = self.slot(id) else {
            return false;
        };
        let mut now = Room(self.room.load(Ordering::Acquire));
        while now.places() >= places {
            match self.change(now, now.next(now.first(), now.places() - places)) {
                Ok(()) => {
                    slot.places.store(places, Ordering::Relaxed);
                    return true;
                }
                Err(changed) => now = changed,
            }
        }
        false
    }

    #[inline]
    fn change(&self, from: Room, to: Room) -> Result<(), Room> {
        let room = &self.room;
        match room.compare_exchange_weak(from.0, to.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(changed) => Err(Room(changed)),
        }
    }

    /// Puts slots into the free list, from `id` to `last`, and returns places. Returns `true` if
    /// there is a backlog.
    #[inline]
    fn push_free(&self, id: u32, last: &Slot<K, F>, places: u32) -> bool {
        let mut now = Room(self.room.load(Ordering::Relaxed));
        loop {
            last.next.store(now.first(), Ordering::Relaxed);
            match self.change(now, now.next(id, now.places() + places)) {
                Ok(()) => return now.is_crowded(),
                Err(changed) => now = changed,
            }
        }
    }

    /// Returns the places of requests that have [ended](Self::finish). Returns `true` if there is a
    /// backlog.
    #[inline]
    pub(crate) fn return_places(&self, places: u32) -> bool {
        if places == 0 {
            return false;
        }
        let mut now = Room(self.room.load(Ordering::Relaxed));
        loop {
            match self.change(now, now.next(now.first(), now.places() + places)) {
                Ok(()) => return now.is_crowded(),
                Err(changed) => now = changed,
            }
        }
    }

    /// Returns the slot of a request that was not posted, and its places. Returns `true` if there
    /// is a backlog.
    pub(crate) fn withdraw(&self, id: u32) -> bool {
        let Some(slot) = self.slot(id) else {
            return false;
        };
        if slot.stage.swap(FREE, Ordering::AcqRel) == WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            let gone = slot.rare().waker.take();
            drop(gone);
        }
        self.push_free(id, slot, slot.places.load(Ordering::Relaxed))
    }

    /// Returns the slot of a request that has succeeded.
    #[inline]
    pub(crate) fn release(&self, id: u32) {
        if let Some(slot) = self.slot(id) {
            self.release_slot(id, slot);
        }
    }

    #[inline]
    fn release_slot(&self, id: u32, slot: &Slot<K, F>) {
        slot.stage.store(FREE, Ordering::Relaxed);
        self.push_free(id, slot, 0);
    }

    /// Returns whether a request has succeeded; `None` if it has not ended.
    #[inline]
    pub(crate) fn outcome(&self, id: u32) -> Option<bool> {
        match self.slot(id)?.stage.load(Ordering::Acquire) {
            DONE => Some(true),
            FAILED => Some(false),
            _ => None,
        }
    }

    /// Returns the result of a request, and returns its slot; `None` if the request has not ended.
    #[inline]
    pub(crate) fn collect(&self, id: u32) -> Option<Result<(), F>> {
        let slot = self.slot(id)?;
        let result = match slot.stage.load(Ordering::Acquire) {
            DONE => Ok(()),
            FAILED => slot.rare().failure.take().map_or(Ok(()), Err),
            _ => return None,
        };
        self.release_slot(id, slot);
        Some(result)
    }

    /// Registers a waker for the end of a request. Check the outcome once more after this, and then
    /// wait.
    pub(crate) fn wait(&self, id: u32, waker: &Waker) {
        let Some(slot) = self.slot(id) else {
            return;
        };
        let waker = waker.clone();
        let old = slot.rare().waker.replace(waker);
        drop(old);
        match exchange(&slot.stage, POSTED, WAITING) {
            Ok(()) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
            }
            Err(WAITING) => {}
            // The request has ended already.
            Err(_) => {
                let gone = slot.rare().waker.take();
                drop(gone);
            }
        }
    }

    /// Gives up an operation, and leaves `kept` until the request has ended. If it has ended
    /// already, returns `kept` and frees the slot.
    pub(crate) fn abandon(&self, id: u32, kept: Option<K>) -> Option<K> {
        let Some(slot) = self.slot(id) else {
            return kept;
        };
        let keeps = kept.is_some();
        if keeps {
            slot.rare().kept = kept;
        }
        let mut stage = slot.stage.load(Ordering::Acquire);
        loop {
            match stage {
                POSTED | WAITING => match exchange(&slot.stage, stage, ABANDONED) {
                    Ok(()) => break,
                    Err(changed) => stage = changed,
                },
                _ => {
                    let kept = {
                        let mut rare = slot.rare();
                        rare.failure = None;
                        rare.kept.take()
                    };
                    self.release_slot(id, slot);
                    return kept;
                }
            }
        }
        if keeps {
            self.keeping.fetch_add(1, Ordering::Relaxed);
        }
        if stage == WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            let gone = slot.rare().waker.take();
            drop(gone);
        }
        None
    }

    /// Reports the end of a request. Called by one thread at a time. Only the first report of a
    /// request counts. Returns what the caller has to do.
    #[inline]
    pub(crate) fn finish(&self, id: u32, result: Result<(), F>) -> Option<Finished<K>> {
        let slot = self.slot(id)?;
        if matches!(slot.stage.load(Ordering::Acquire), FREE | DONE | FAILED) {
            return None;
        }
        // Read first: the operation may return the slot as soon as it sees the end.
        let places = slot.places.load(Ordering::Relaxed);
        let stage = match result {
            Ok(()) => DONE,
            Err(failure) => {
                slot.rare().failure = Some(failure);
                FAILED
            }
        };
        let (waker, kept) = match slot.stage.swap(stage, Ordering::AcqRel) {
            POSTED => (None, None),
            before => self.finish_rare(id, slot, before),
        };
        Some(Finished {
            places,
            waker,
            kept,
        })
    }

    /// Ends a request that a task waits for, or that was abandoned.
    #[cold]
    fn finish_rare(&self, id: u32, slot: &Slot<K, F>, before: u32) -> (Option<Waker>, Option<K>) {
        let mut rare = slot.rare();
        let waker = rare.waker.take();
        if before == WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        if before != ABANDONED {
            return (waker, None);
        }
        rare.failure = None;
        let kept = rare.kept.take();
        drop(rare);
        if kept.is_some() {
            self.keeping.fetch_sub(1, Ordering::Relaxed);
        }
        self.release_slot(id, slot);
        (waker, kept)
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
    }

    /// Returns `true` if an operation has left memory behind, to be freed at the end of its
    /// request.
    pub(crate) fn keeps_memory(&self) -> bool {
        self.keeping.load(Ordering::Relaxed) != 0
    }

    /// Returns a number that changes whenever a slot is taken or returned.
    #[inline]
    pub(crate) fn version(&self) -> u32 {
        // The lower half of the counter is enough.
        (self.room.load(Ordering::Relaxed) >> room::COUNTER) as u32
    }

    /// Marks that there is a backlog. [Take places](Self::take_places) once more after this.
    pub(crate) fn crowd(&self) {
        self.room.fetch_or(room::CROWDED, Ordering::AcqRel);
    }

    /// Marks that there is no backlog any more.
    pub(crate) fn uncrowd(&self) {
        self.room.fetch_and(!room::CROWDED, Ordering::AcqRel);
    }
}

/// Returns the step in which a slot was added, and its index there. Step `n` has the slots from
/// `base << n` on.
fn step_of(id: u32, base: u32) -> Option<(usize, u32)> {
    let step = id.checked_div(base)?.checked_ilog2()?;
    Some((step as usize, id - (base << step)))
}

fn exchange(stage: &AtomicU32, from: u32, to: u32) -> Result<(), u32> {
    let changed = stage.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    changed.map(drop)
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
