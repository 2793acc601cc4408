//! Large messages of a channel: each end lends memory to its peer, which writes messages there.
//!
//! The memory consists of *slots*. A message in a slot is one RDMA Write with immediate data; the
//! immediate data name the slot and the length. docs/wire.md describes the format. The receiver
//! lends no slot before the sender wants some. It lends twice as many when the sender had to wait
//! for a slot although the program waits for messages, because then the slots limit the throughput.
//!
//! A sender uses the slot that was returned last, whose memory is in the caches of both processors.

use super::request::Target;
use crate::error::Result;
use crate::verbs::{LentMemory, ProtectionDomain};
use std::sync::Arc;

/// Maximum number of slots that an end lends. The kernel allocates their pages when they are used.
pub(super) const SLOTS_MAX: usize = 8;
/// Number of slots that an end lends first.
const SLOTS_FIRST: usize = 4;
/// Length of a slot in bytes, which is the length of the longest message.
pub(super) const SLOT_LEN: u32 = 1 << 20;
/// Maximum length of a peer's slot: the immediate data have 24 bits for the length.
pub(super) const SLOT_LEN_MAX: u32 = 1 << 24;
/// Length of a slot in a credit message: its number and its STag.
pub(super) const ENCODED_SLOT: usize = 8;

/// The immediate data of a message in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) slot: u8,
    /// Length of the message in bytes, 1 to [`SLOT_LEN_MAX`].
    pub(super) len: u32,
    /// The sender had to wait for a slot.
    pub(super) starved: bool,
    /// The slot contains several messages; see [`super::frames`].
    pub(super) several: bool,
}

impl Announced {
    pub(super) fn encode(self) -> u32 {
        let flags = u32::from(self.starved) << 31 | u32::from(self.several) << 30;
        flags | u32::from(self.slot) << 24 | (self.len - 1)
    }

    pub(super) fn decode(immediate: u32) -> Self {
        Self {
            slot: (immediate >> 24) as u8 & 0x3f,
            len: (immediate & (SLOT_LEN_MAX - 1)) + 1,
            starved: immediate >> 31 == 1,
            several: immediate >> 30 & 1 == 1,
        }
    }
}

/// A slot that this end may write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granted {
    pub(super) slot: u8,
    pub(super) stag: u32,
    /// See [`Announced::starved`].
    pub(super) starved: bool,
}

impl Granted {
    pub(super) const fn target(self) -> Target {
        Target {
            addr: 0,
            rkey: self.stag,
        }
    }
}

/// The sender's view: the slots of the peer.
#[derive(Debug, Default)]
pub(super) struct PeerSlots {
    /// Length of a slot in bytes; 0 if the peer lends none.
    pub(super) len: usize,
    /// Slots that can be written, the one that was returned last at the end.
    free: Vec<(u8, u32)>,
    /// For each slot that is being used, the length of its message in bytes.
    lens: [u32; SLOTS_MAX],
    /// The peer was asked for slots.
    wanted: bool,
    /// The peer has lent slots.
    lent: bool,
    starved: bool,
}

impl PeerSlots {
    pub(super) const fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns `true` if the peer has lent slots.
    pub(super) const fn are_lent(&self) -> bool {
        self.lent
    }

    /// Returns `true` if the peer must be asked for slots: at the first call, if it offers some.
    pub(super) const fn want(&mut self) -> bool {
        self.len > 0 && !std::mem::replace(&mut self.wanted, true)
    }

    /// Returns how many bytes the peer's program has not finished with.
    pub(super) fn in_flight(&self) -> u64 {
        self.lens.iter().map(|len| u64::from(*len)).sum()
    }

    /// Returns `true` if the peer's program has not finished with half of the slots.
    pub(super) fn are_half_used(&self) -> bool {
        let used = self.lens.iter().filter(|len| **len > 0).count();
        used > 0 && used >= self.free.len()
    }

    /// Records the length of the message in a slot.
    pub(super) fn set_len(&mut self, slot: u8, len: u32) {
        if let Some(place) = self.lens.get_mut(usize::from(slot)) {
            *place = len;
        }
    }

    /// Takes the slot that was returned last.
    pub(super) fn take(&mut self) -> Option<Granted> {
        let Some((slot, stag)) = self.free.pop() else {
            self.starved = self.are_lent();
            return None;
        };
        Some(Granted {
            slot,
            stag,
            starved: std::mem::take(&mut self.starved),
        })
    }

    /// Returns a slot that was taken and not used.
    pub(super) fn put_back(&mut self, granted: Granted) {
        self.free.push((granted.slot, granted.stag));
    }

    /// Adds slots that the peer lends or returns. Returns `false` if that breaks the rules.
    pub(super) fn add(&mut self, encoded: &[u8]) -> bool {
        let (slots, rest) = encoded.as_chunks::<ENCODED_SLOT>();
        rest.is_empty() && slots.iter().all(|slot| self.add_slot(*slot))
    }

    fn add_slot(&mut self, [a, b, c, slot, stag @ ..]: [u8; ENCODED_SLOT]) -> bool {
        let is_free = self.free.iter().any(|(free, _)| *free == slot);
        let exists = [a, b, c] == [0; 3] && usize::from(slot) < SLOTS_MAX && self.len > 0;
        if !exists || is_free {
            return false;
        }
        self.set_len(slot, 0);
        self.lent = true;
        self.free.push((slot, u32::from_be_bytes(stag)));
        true
    }
}

/// Whether there should be more slots.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Growth {
    #[default]
    Enough,
    Wanted,
    /// A thread allocates them.
    Underway,
}

/// The receiver's view: the slots of this end.
#[derive(Debug, Default)]
pub(super) struct OwnSlots {
    /// The peer was told that it may ask for slots. Only such an end may ask the peer for slots.
    pub(super) offered: bool,
    memories: Vec<Arc<LentMemory>>,
    /// Bit set of the slots that are lent.
    lent: u32,
    /// Bit set of the slots that the program has finished, or that are new.
    owed: u32,
    growth: Growth,
}

impl OwnSlots {
    pub(super) fn new(offered: bool) -> Self {
        Self {
            offered,
            ..Self::default()
        }
    }

    pub(super) const fn are_none(&self) -> bool {
        self.memories.is_empty()
    }

    /// Records that the sender wants slots. `waits` is `true` if the program waits for messages.
    pub(super) fn want(&mut self, waits: bool) {
        let count = self.memories.len();
        if self.growth == Growth::Enough && (count == 0 || (waits && count < SLOTS_MAX)) {
            self.growth = Growth::Wanted;
        }
    }

    /// Returns how many slots the caller must [add](Self::add) now.
    pub(super) fn missing(&mut self) -> usize {
        if self.growth != Growth::Wanted {
            return 0;
        }
        self.growth = Growth::Underway;
        let count = self.memories.len();
        count.max(SLOTS_FIRST).min(SLOTS_MAX - count)
    }

    /// Adds slots; none if they could not be allocated.
    pub(super) fn add(&mut self, memories: Vec<Arc<LentMemory>>) {
        self.growth = Growth::Enough;
        for memory in memories {
            self.owed |= 1 << self.memories.len();
            self.memories.push(memory);
        }
    }

    /// Takes the memory of a slot that the peer has written. Returns `None` if it was not lent.
    pub(super) fn written(&mut self, slot: u8) -> Option<Arc<LentMemory>> {
        let bit = 1u32.checked_shl(slot.into())?;
        let memory = self
            .memories
            .get(usize::from(slot))
            .filter(|_| self.lent & bit != 0)?;
        self.lent &= !bit;
        Some(Arc::clone(memory))
    }

    /// Records that the program has finished with a slot.
    pub(super) fn finished(&mut self, slot: u8) {
        self.owed |= 1 << slot;
    }

    /// Returns `true` if the slots that the program has finished should be lent again: a quarter of
    /// all, or any if it waits for messages, because then the sender may be waiting.
    pub(super) const fn are_due(&self, waits: bool) -> bool {
        let owed = self.owed.count_ones() as usize;
        owed > 0 && (waits || owed >= self.memories.len() / 4)
    }

    /// Takes the slots to lend again.
    pub(super) fn take_owed(&mut self) -> Owed {
        let mut owed = Owed::default();
        for (slot, (memory, place)) in (0..).zip(self.memories.iter().zip(&mut owed.0)) {
            if self.owed & 1 << slot != 0 {
                *place = Some(Arc::clone(memory));
            }
        }
        self.lent |= std::mem::take(&mut self.owed);
        owed
    }
}

/// Slots to lend, by number.
#[derive(Debug, Default)]
pub(super) struct Owed([Option<Arc<LentMemory>>; SLOTS_MAX]);

impl Owed {
    /// Lends the slots, and writes their numbers and STags to `out`. Returns the length.
    pub(super) fn lend(self, out: &mut [u8; ENCODED_SLOT * SLOTS_MAX]) -> Result<usize> {
        let mut len = 0;
        let owed = self.0.iter().enumerate();
        let owed = owed.filter_map(|(slot, memory)| Some((slot, memory.as_ref()?)));
        for ((slot, memory), room) in owed.zip(out.as_chunks_mut::<ENCODED_SLOT>().0) {
            room[..4].copy_from_slice(&(slot as u32).to_be_bytes());
            room[4..].copy_from_slice(&memory.lend()?.to_be_bytes());
            len += ENCODED_SLOT;
        }
        Ok(len)
    }
}

/// Allocates `count` slots for the peer of a queue pair.
pub(super) fn allocate(
    pd: &ProtectionDomain,
    qp: u32,
    count: usize,
) -> Result<Vec<Arc<LentMemory>>> {
    (0..count)
        .map(|_| LentMemory::new(pd, qp, SLOT_LEN as usize))
        .collect()
}

#[cfg(all(test, not(miri)))]
#[path = "large_tests.rs"]
mod tests;
