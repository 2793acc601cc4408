//! The slots of the STag table. They are allocated in parts, each as large as all earlier parts
//! together. Parts and their entries never move.
//!
//! A 24-bit index consists of the number of the part (4 bits) and 20 random bits, the lowest of
//! which select the slot. A look-up therefore takes a few loads and one comparison, and growth
//! changes no index. Each part is at most half full, so a free slot is near every random one. There
//! is no part zero and so no index zero: many programs use STag 0 for "none".

use super::MemoryError;
use super::entry::{Entry, Kind};
use crate::limits::MAX_MR;
use alloc::vec::Vec;
use core::ops::Range;
use iwarp_proto::ddp::Stag;

/// Part numbers are below this.
const PARTS: usize = 16;
/// Slots of part 1.
const FIRST: usize = 128;
/// Position of the part number in an index.
const PART: u32 = 20;
/// Random bits of an STag: all except the part number.
const RANDOM: Stag = Stag::new((1 << PART) - 1, u8::MAX);

const _: () = assert!(size_of_part(PARTS - 1) == 1 << PART);
const _: () = assert!(size_of_part(PARTS - 1) == MAX_MR as usize);

/// Returns how many slots a part has: as many as all earlier parts together.
const fn size_of_part(number: usize) -> usize {
    FIRST << number.saturating_sub(2)
}

/// The slots to allocate for one more entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewSlotsSize {
    part: usize,
}

impl NewSlotsSize {
    /// Allocates the slots. No lock is needed, because this does not access the table.
    ///
    /// # Errors
    /// Fails with [`MemoryError::OutOfMemory`].
    pub fn make<M>(self) -> Result<Room<M>, MemoryError> {
        let size = size_of_part(self.part);
        let mut slots = Vec::new();
        slots
            .try_reserve_exact(size)
            .map_err(|_| MemoryError::OutOfMemory)?;
        slots.resize_with(size, Entry::free);
        Ok(Room {
            part: self.part,
            slots,
        })
    }
}

/// Slots for more entries, from [`NewSlotsSize::make`], to be passed to
/// [`MemoryTable::attach`](super::MemoryTable::attach).
#[derive(Debug)]
pub struct Room<M> {
    part: usize,
    slots: Vec<Entry<M>>,
}

/// One allocation of slots, and the number of slots in use.
#[derive(Debug)]
struct Part<M> {
    slots: Vec<Entry<M>>,
    used: usize,
}

impl<M> Part<M> {
    const NONE: Self = Self {
        slots: Vec::new(),
        used: 0,
    };

    /// Returns `true` if at least half of the slots stay free after one more entry.
    const fn has_room(&self) -> bool {
        self.used < self.slots.len() / 2
    }

    /// Returns the first free slot from `slot` on, wrapping around.
    #[inline]
    fn free_slot(&self, slot: usize) -> Option<usize> {
        let next = |from: usize| {
            let free = |entry: &Entry<M>| matches!(entry.kind, Kind::Free);
            let offset = self.slots.get(from..)?.iter().position(free)?;
            Some(from.wrapping_add(offset))
        };
        next(slot).or_else(|| next(0))
    }

    /// Returns the slot of an index. Sizes are powers of two.
    #[inline]
    const fn slot_of(&self, index: u32) -> usize {
        index as usize & self.slots.len().wrapping_sub(1)
    }
}

#[derive(Debug)]
pub(super) struct Slots<M> {
    parts: [Part<M>; PARTS],
    newest: usize,
    /// The part that receives new entries until it is half full.
    open: usize,
}

impl<M> Slots<M> {
    pub(super) const fn new() -> Self {
        Self {
            parts: [const { Part::NONE }; PARTS],
            newest: 0,
            open: 0,
        }
    }

    pub(super) fn used(&self) -> usize {
        self.parts.iter().map(|part| part.used).sum()
    }

    /// Returns the slot that an STag selects, even if it holds another STag.
    #[inline]
    pub(super) fn at(&self, stag: Stag) -> Option<&Entry<M>> {
        let part = self.parts.get((stag.index() >> PART) as usize)?;
        part.slots.get(part.slot_of(stag.index()))
    }

    /// Returns the entry with the index of an STag, even if it is invalid or has another key.
    #[inline]
    pub(super) fn entry(&self, stag: Stag) -> Option<&Entry<M>> {
        self.at(stag).filter(|entry| is_entry(entry, stag))
    }

    #[inline]
    pub(super) fn entry_mut(&mut self, stag: Stag) -> Option<&mut Entry<M>> {
        let part = self.parts.get_mut((stag.index() >> PART) as usize)?;
        let slot = part.slot_of(stag.index());
        let entry = part.slots.get_mut(slot)?;
        is_entry(entry, stag).then_some(entry)
    }

    /// Returns a range of slots by number; `None` if the range is past the end.
    pub(super) fn entries_in(
        &self,
        range: Range<usize>,
    ) -> Option<impl Iterator<Item = &Entry<M>>> {
        let mut begin = 0usize;
        let all = self.parts.iter().map(|part| part.slots.len()).sum();
        (range.start < range.end.min(all)).then(|| {
            self.parts.iter().flat_map(move |part| {
                let from = range.start.saturating_sub(begin);
                let to = range.end.saturating_sub(begin).min(part.slots.len());
                begin = begin.saturating_add(part.slots.len());
                part.slots.get(from..to).unwrap_or_default()
            })
        })
    }

    fn part_with_free_slots(&self) -> Option<usize> {
        self.parts.iter().rposition(Part::has_room)
    }

    /// Returns the slots to allocate before the next entry; `None` if a slot is free.
    pub(super) fn missing_slots(&self) -> Option<NewSlotsSize> {
        let part = self.newest.wrapping_add(1);
        (part < PARTS && self.part_with_free_slots().is_none()).then_some(NewSlotsSize { part })
    }

    /// Adds slots; returns them if another caller has added slots meanwhile.
    pub(super) fn attach(&mut self, room: Room<M>) -> Option<Room<M>> {
        match self.parts.get_mut(room.part) {
            Some(part) if room.part == self.newest.wrapping_add(1) => {
                part.slots = room.slots;
                self.newest = room.part;
                None
            }
            _ => Some(room),
        }
    }

    /// Chooses the part for new entries. Allocates a part if all are half full.
    #[cold]
    #[inline(never)]
    fn open(&mut self) -> Result<(), MemoryError> {
        if let Some(size) = self.missing_slots() {
            self.attach(size.make()?);
        }
        self.open = self.part_with_free_slots().ok_or(MemoryError::TableFull)?;
        Ok(())
    }

    /// Finds a free slot for an STag made from `random`, and fills it by `fill`. Returns the STag.
    #[inline]
    pub(super) fn take(
        &mut self,
        random: u32,
        fill: impl FnOnce(&mut Entry<M>, Stag),
    ) -> Result<Stag, MemoryError> {
        if !self.parts.get(self.open).is_some_and(Part::has_room) {
            self.open()?;
        }
        let part = self.parts.get_mut(self.open);
        let part = part.ok_or(MemoryError::TableFull)?;
        let of_part = Stag::new((self.open as u32) << PART, 0);
        let stag = Stag(of_part.0 | random & RANDOM.0);
        let wanted = part.slot_of(stag.index());
        let slot = part.free_slot(wanted).ok_or(MemoryError::TableFull)?;
        let entry = part.slots.get_mut(slot).ok_or(MemoryError::TableFull)?;
        // Replace the bits that select the slot; the bits above them stay random.
        let stag = Stag(stag.0 ^ Stag::new((wanted ^ slot) as u32, 0).0);
        fill(entry, stag);
        part.used = part.used.wrapping_add(1);
        Ok(stag)
    }

    /// Frees the slot of an STag by `clear`, unless `clear` fails.
    #[inline]
    pub(super) fn free<R>(
        &mut self,
        stag: Stag,
        clear: impl FnOnce(&mut Entry<M>) -> Result<R, MemoryError>,
    ) -> Result<R, MemoryError> {
        let part = self.parts.get_mut((stag.index() >> PART) as usize);
        let part = part.ok_or(MemoryError::NoSuchStag)?;
        let slot = part.slot_of(stag.index());
        let entry = part.slots.get_mut(slot);
        let entry = entry.filter(|entry| is_entry(entry, stag));
        let cleared = clear(entry.ok_or(MemoryError::NoSuchStag)?)?;
        part.used = part.used.wrapping_sub(1);
        Ok(cleared)
    }
}

/// Returns `true` if the slot holds the index of the STag. Free slots have index zero, which
/// selects no slot.
#[inline]
fn is_entry<M>(entry: &Entry<M>, stag: Stag) -> bool {
    entry.state.stag().index() == stag.index()
}

#[cfg(test)]
mod tests {
    use super::super::{HostRange, MemoryTable};
    use super::*;
    use crate::Access;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    fn register(table: &mut MemoryTable, random: u32) -> Result<Stag, MemoryError> {
        table.register(HostRange::default(), 0, 1, Access::empty(), random)
    }

    fn scrambled(seed: u64) -> impl Iterator<Item = u32> {
        let numbers = (seed..).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        numbers.map(|n| ((n ^ n >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32)
    }

    #[test]
    fn growth_moves_no_entry() {
        let mut table = MemoryTable::new();
        let mut places = Vec::new();
        let mut sizes = Vec::new();
        for random in scrambled(1).take(5_000) {
            sizes.extend(table.missing_slots().map(|size| size_of_part(size.part)));
            let stag = register(&mut table, random).unwrap();
            assert_eq!(stag.key(), Stag(random).key(), "the consumer's key");
            places.push((stag, core::ptr::from_ref(table.entry(stag).unwrap())));
        }
        assert_eq!(sizes, [128, 128, 256, 512, 1024, 2048, 4096, 8192]);
        let moved = places.iter().filter(|(stag, at)| {
            let now = table.entry(*stag).map(core::ptr::from_ref);
            now != Some(*at)
        });
        assert_eq!((moved.count(), table.len()), (0, 5_000));
        assert_eq!(
            (0..)
                .map_while(|n| table.slots.entries_in(n * 1000..(n + 1) * 1000))
                .flatten()
                .count(),
            16_384
        );
    }

    #[test]
    fn slots_are_allocated_without_table() {
        let mut table = MemoryTable::new();
        let mut randoms = scrambled(2);
        let rooms = [0, 1].map(|_| table.missing_slots().unwrap().make().unwrap());
        let [first, second_room] = rooms;
        let slots = first.slots.as_ptr();
        assert!(table.attach(first).is_none());
        assert!(
            table.attach(second_room).is_some(),
            "another caller has added slots"
        );
        for random in randoms.by_ref().take(FIRST / 2) {
            assert_eq!(table.missing_slots(), None);
            register(&mut table, random).unwrap();
        }
        let first: Vec<_> = table.slots.entries_in(0..1).unwrap().collect();
        assert!(core::ptr::eq(first[0], slots));
        assert!(table.slots.entries_in(FIRST..FIRST + 1).is_none());
        assert!(table.missing_slots().is_some());
        // A caller that does not attach slots in advance allocates them implicitly.
        register(&mut table, randoms.next().unwrap()).unwrap();
        assert!(table.slots.entries_in(FIRST..FIRST + 1).is_some());
    }

    #[test]
    fn slots_are_reused() {
        let mut table = MemoryTable::new();
        let mut randoms = scrambled(3);
        let mut stags = BTreeMap::new();
        for round in 0..6_000u32 {
            // Grow to 900 entries, shrink, and grow again.
            let grows = !(2_000..4_000).contains(&round) || stags.is_empty();
            let random = randoms.next().unwrap();
            if stags.len() < 900 && grows {
                let stag = register(&mut table, random).unwrap();
                assert!(stag.index() != 0 && stags.insert(stag, round).is_none());
            } else {
                let nth = random as usize % stags.len();
                let stag = *stags.keys().nth(nth).unwrap();
                stags.remove(&stag);
                table.deregister(stag).unwrap();
                assert!(table.deregister(stag).is_err());
            }
            assert_eq!(table.len(), stags.len());
        }
        assert!(stags.keys().all(|stag| table.info(*stag).is_some()));
        // There are about twice as many slots as the maximum number of entries.
        assert!(table.slots.entries_in(2047..2048).is_some());
        assert!(table.slots.entries_in(2048..2049).is_none());
    }

    #[test]
    fn slot_matches_its_stag_only() {
        let mut table = MemoryTable::new();
        let stag = register(&mut table, 0x0765_4321).unwrap();
        assert_eq!(stag, Stag(0x1765_4321));
        assert!(table.info(stag).is_some());
        // STags with other index bits, with other part numbers, and with part number zero.
        let other = |bit: u32| stag.0 ^ 1 << bit;
        for wrong in [other(27), other(28), other(31), 0, 0xff] {
            let wrong = Stag(wrong);
            assert_eq!(table.info(wrong), None);
            assert!(table.deregister(wrong).is_err());
        }
        // The next entry for this slot is put into the next slot; its other bits stay random.
        let next = register(&mut table, 0x0000_4300).unwrap();
        assert_eq!(next, Stag(0x1000_4400));
    }

    #[test]
    fn full_table_is_reported() {
        let mut slots = Slots::<HostRange>::new();
        slots.newest = PARTS - 1;
        assert_eq!(slots.missing_slots(), None);
        assert_eq!(slots.take(1, |_, _| ()), Err(MemoryError::TableFull));
    }
}
