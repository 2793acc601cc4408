//! Slots for requests in flight: which slots are free, which requests have ended, and which tasks
//! wait for them.
//!
//! Before a request is posted, it takes a slot and one or more *places*. A place is an entry of the
//! send queue; a batch needs several. Three parties use the slots concurrently:
//!
//! - An *operation* takes a slot and waits until its request ends. It then returns the slot by
//!   [`collect`](Slots::collect), or gives up earlier by [`abandon`](Slots::abandon).
//! - The *router*, one thread at a time, reports by [`finish`](Slots::finish) that a request has
//!   ended.
//! - Operations that find no free slot or too few places wait in a list of the router.
//!   [`crowd`](Slots::crowd) sets a mark while this list is not empty.
//!
//! A request for which no task sleeps takes no lock. One atomic number, `room`, contains the head
//! of the free list, the number of free places, and the mark. So a thread that returns a slot
//! learns in the same step whether it must wake a waiter, and no wake-up is lost. The number also
//! contains a counter, which prevents the ABA problem of the free list. Wakers are code of the
//! program, so they are cloned and dropped without a lock.

use super::sync::{AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering};
use std::sync::PoisonError;
use std::task::Waker;

/// No operation uses the slot.
const FREE: u32 = 0;
/// The request is in flight, and no task waits for it.
const POSTED: u32 = 1;
/// The request is in flight, and a task or thread waits for it.
const WAITING: u32 = 2;
/// The request is in flight, and its operation has given up. The router returns the slot.
const ABANDONED: u32 = 3;
const DONE: u32 = 4;
const FAILED: u32 = 5;

/// Layout of `room`: the first free slot or [`NO_SLOT`], the number of free places, the counter,
/// and the mark.
mod room {
    pub(super) const BITS: u32 = 17;
    pub(super) const MASK: u64 = (1 << BITS) - 1;
    pub(super) const PLACES: u32 = BITS;
    pub(super) const COUNTER: u32 = 2 * BITS;
    pub(super) const CROWDED: u64 = 1 << 63;
}

const NO_SLOT: u32 = room::MASK as u32;

const SLOTS_MAX: u32 = NO_SLOT;

#[derive(Debug, Clone, Copy)]
struct Room(u64);

impl Room {
    const fn first(self) -> u32 {
        (self.0 & room::MASK) as u32
    }

    const fn places(self) -> u32 {
        (self.0 >> room::PLACES & room::MASK) as u32
    }

    const fn is_crowded(self) -> bool {
        self.0 & room::CROWDED != 0
    }

    const fn next(self, first: u32, places: u32) -> Self {
        let counter = (self.0 & !room::CROWDED) >> room::COUNTER;
        let counter = (counter.wrapping_add(1) << room::COUNTER) & !room::CROWDED;
        let contents = (places as u64) << room::PLACES | first as u64;
        Self(self.0 & room::CROWDED | counter | contents)
    }
}

#[derive(Debug)]
struct ColdState<K, F> {
    waker: Option<Waker>,
    /// Memory of an abandoned operation, to be dropped when the request has ended.
    kept: Option<K>,
    failure: Option<F>,
}

#[derive(Debug)]
struct Slot<K, F> {
    /// [`FREE`], [`POSTED`] and so on.
    stage: AtomicU32,
    /// The next free slot. Valid only while this slot is free.
    next: AtomicU32,
    /// Number of places that the request has taken.
    places: AtomicU32,
    cold: Mutex<ColdState<K, F>>,
}

impl<K, F> Slot<K, F> {
    fn cold(&self) -> MutexGuard<'_, ColdState<K, F>> {
        self.cold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the caller must handle after a request has ended, with no lock held.
#[derive(Debug)]
pub(crate) struct Finished<K> {
    /// To be woken.
    pub(crate) waker: Option<Waker>,
    pub(crate) kept: Option<K>,
    /// A slot was returned, and operations wait for room.
    pub(crate) crowded: bool,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// No slot is free, or too few places.
    Full,
    /// Other operations already wait.
    Crowded,
}

/// The slots of one send queue; see the head of the file. `K` is the memory of an operation, which
/// must outlive the request. `F` is the reason of a failure.
#[derive(Debug)]
pub(crate) struct Slots<K, F> {
    slots: Box<[Slot<K, F>]>,
    room: AtomicU64,
    /// Number of slots for whose request a task or thread waits. The count may lag behind.
    waiting: AtomicU32,
    /// Number of slots that keep the memory of an abandoned operation. The count may lag behind.
    keeping: AtomicU32,
}

impl<K, F> Slots<K, F> {
    /// Creates `count` free slots and as many places, at most [`SLOTS_MAX`].
    pub(crate) fn new(count: u32) -> Self {
        let count = count.min(SLOTS_MAX);
        let slot = |i: u32| Slot {
            stage: AtomicU32::new(FREE),
            next: AtomicU32::new(if i + 1 < count { i + 1 } else { NO_SLOT }),
            places: AtomicU32::new(0),
            cold: Mutex::new(ColdState {
                waker: None,
                kept: None,
                failure: None,
            }),
        };
        let first = if count == 0 { NO_SLOT } else { 0 };
        Self {
            slots: (0..count).map(slot).collect(),
            room: AtomicU64::new(Room(0).next(first, count).0),
            waiting: AtomicU32::new(0),
            keeping: AtomicU32::new(0),
        }
    }

    fn slot(&self, id: u32) -> Option<&Slot<K, F>> {
        self.slots.get(id as usize)
    }

    pub(crate) fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Takes a slot and `places` places, if `reserve` places remain free. With `queue`, fails if
    /// other operations wait for room.
    #[inline]
    pub(crate) fn take(&self, places: u32, reserve: u32, queue: bool) -> Result<u32, NoSlot> {
        let mut current = Room(self.room.load(Ordering::Acquire));
        loop {
            if queue && current.is_crowded() {
                return Err(NoSlot::Crowded);
            }
            let first = current.first();
            let enough = current.places() >= places.saturating_add(reserve);
            let Some(slot) = self.slot(first).filter(|_| enough) else {
                return Err(NoSlot::Full);
            };
            let next = slot.next.load(Ordering::Relaxed);
            let new = current.next(next, current.places() - places);
            match self.change(current, new) {
                Ok(()) => {
                    slot.places.store(places, Ordering::Relaxed);
                    // Posting the request makes these stores visible to the router.
                    slot.stage.store(POSTED, Ordering::Relaxed);
                    return Ok(first);
                }
                Err(changed) => current = changed,
            }
        }
    }

    #[inline]
    fn change(&self, from: Room, to: Room) -> Result<(), Room> {
        let room = &self.room;
        match room.compare_exchange_weak(from.0, to.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(changed) => Err(Room(changed)),
        }
    }

    /// Adds a slot and its places to the free ones. Returns `true` if operations wait for room.
    #[inline]
    fn release(&self, id: u32, slot: &Slot<K, F>) -> bool {
        let places = slot.places.load(Ordering::Relaxed);
        slot.stage.store(FREE, Ordering::Relaxed);
        let mut current = Room(self.room.load(Ordering::Relaxed));
        loop {
            slot.next.store(current.first(), Ordering::Relaxed);
            match self.change(current, current.next(id, current.places() + places)) {
                Ok(()) => return current.is_crowded(),
                Err(changed) => current = changed,
            }
        }
    }

    /// Releases the slot of a request that was not posted or has succeeded. Returns `true` if
    /// operations wait for room.
    #[inline]
    pub(crate) fn withdraw(&self, id: u32) -> bool {
        self.slot(id).is_some_and(|slot| self.release(id, slot))
    }

    /// Returns `Some(true)` if a request has succeeded, `Some(false)` if it has failed, and `None`
    /// if it has not ended.
    #[inline]
    pub(crate) fn outcome(&self, id: u32) -> Option<bool> {
        match self.slot(id)?.stage.load(Ordering::Acquire) {
            DONE => Some(true),
            FAILED => Some(false),
            _ => None,
        }
    }

    /// Releases the slot of a request that has ended, and returns the result of the request. The
    /// second value is `true` if operations wait for room. Returns `None` if the request has not
    /// ended.
    #[inline]
    pub(crate) fn collect(&self, id: u32) -> Option<(Result<(), F>, bool)> {
        let slot = self.slot(id)?;
        let result = match slot.stage.load(Ordering::Acquire) {
            DONE => Ok(()),
            FAILED => slot.cold().failure.take().map_or(Ok(()), Err),
            _ => return None,
        };
        Some((result, self.release(id, slot)))
    }

    /// Registers a waker for the end of a request. Check the outcome once more after this call, and
    /// then wait.
    pub(crate) fn wait(&self, id: u32, waker: &Waker) {
        let Some(slot) = self.slot(id) else {
            return;
        };
        let waker = waker.clone();
        let old = slot.cold().waker.replace(waker);
        drop(old);
        match exchange(&slot.stage, POSTED, WAITING) {
            Ok(()) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
            }
            Err(WAITING) => {}
            // The request has ended already.
            Err(_) => {
                let gone = slot.cold().waker.take();
                drop(gone);
            }
        }
    }

    /// Gives up an operation, and keeps `kept` until the request has ended. If it has ended
    /// already, returns `kept` and releases the slot. The second value is `true` if operations wait
    /// for room.
    pub(crate) fn abandon(&self, id: u32, kept: Option<K>) -> (Option<K>, bool) {
        let Some(slot) = self.slot(id) else {
            return (kept, false);
        };
        let has_memory = kept.is_some();
        if has_memory {
            slot.cold().kept = kept;
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
                        let mut cold = slot.cold();
                        cold.failure = None;
                        cold.kept.take()
                    };
                    return (kept, self.release(id, slot));
                }
            }
        }
        if has_memory {
            self.keeping.fetch_add(1, Ordering::Relaxed);
        }
        if stage == WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            let gone = slot.cold().waker.take();
            drop(gone);
        }
        (None, false)
    }

    /// Reports the end of a request. Called by one thread at a time. Later reports for the same
    /// request have no effect. Returns what the caller must handle, if anything.
    #[inline]
    pub(crate) fn finish(&self, id: u32, result: Result<(), F>) -> Option<Finished<K>> {
        let slot = self.slot(id)?;
        if matches!(slot.stage.load(Ordering::Acquire), FREE | DONE | FAILED) {
            return None;
        }
        let stage = match result {
            Ok(()) => DONE,
            Err(failure) => {
                slot.cold().failure = Some(failure);
                FAILED
            }
        };
        match slot.stage.swap(stage, Ordering::AcqRel) {
            POSTED => None,
            before => Some(self.finish_cold(id, slot, before)),
        }
    }

    #[cold]
    fn finish_cold(&self, id: u32, slot: &Slot<K, F>, before: u32) -> Finished<K> {
        let mut cold = slot.cold();
        let waker = cold.waker.take();
        if before == WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        if before != ABANDONED {
            return Finished {
                waker,
                kept: None,
                crowded: false,
            };
        }
        cold.failure = None;
        let kept = cold.kept.take();
        drop(cold);
        if kept.is_some() {
            self.keeping.fetch_sub(1, Ordering::Relaxed);
        }
        Finished {
            waker,
            kept,
            crowded: self.release(id, slot),
        }
    }

    pub(crate) fn somebody_waits(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn keeps_memory(&self) -> bool {
        self.keeping.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn has_room(&self) -> bool {
        Room(self.room.load(Ordering::Acquire)).places() > 0
    }

    /// Returns a number that changes whenever a slot is taken or released.
    #[inline]
    pub(crate) fn version(&self) -> u32 {
        // The lower half of the counter is enough.
        (self.room.load(Ordering::Relaxed) >> room::COUNTER) as u32
    }

    /// Sets the mark that operations wait for room. Check for room once more after this call, and
    /// then wait.
    pub(crate) fn crowd(&self) {
        self.room.fetch_or(room::CROWDED, Ordering::AcqRel);
    }

    pub(crate) fn uncrowd(&self) {
        self.room.fetch_and(!room::CROWDED, Ordering::AcqRel);
    }
}

fn exchange(stage: &AtomicU32, from: u32, to: u32) -> Result<(), u32> {
    let changed = stage.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    changed.map(drop)
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
