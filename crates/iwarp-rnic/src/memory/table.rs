//! The STag table: its slots, registration and deregistration.

use super::entry::{Entry, Kind, Reach};
use super::span::Memory;
use super::{HostRange, MemoryError};
use crate::Access;
use crate::limits::MAX_MR;
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};

const INDEX_MASK: u32 = 0x00ff_ffff;
const SLOTS_MIN: usize = 64;

/// All regions and windows of one device.
///
/// Registering, deregistering and binding take `&mut self`. Accesses take `&self`, and so do fast registrations and invalidations. A runtime puts a
/// readers-writer lock around it; deregistration then waits for accesses in progress.
#[derive(Debug)]
pub struct MemoryTable<M = HostRange> {
    slots: Vec<Option<Entry<M>>>,
    used: usize,
    /// Somebody waited until memory had no users, and it has none now.
    pub(super) unused: AtomicBool,
    #[cfg(feature = "planted-bugs")]
    pub(super) skip_bounds: bool,
}

impl<M: Memory> Default for MemoryTable<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Memory> MemoryTable<M> {
    /// Makes an empty table.
    pub const fn new() -> Self {
        Self {
            slots: Vec::new(),
            used: 0,
            unused: AtomicBool::new(false),
            #[cfg(feature = "planted-bugs")]
            skip_bounds: false,
        }
    }

    /// Plants a bug for the simulator to find: look-ups do not compare with the end of a region or window.
    /// The memory itself still bounds them, so the bug shows in windows and memory stays sound.
    #[cfg(feature = "planted-bugs")]
    pub const fn plant_skip_bounds(&mut self) {
        self.skip_bounds = true;
    }

    /// Returns how many regions and windows are in it.
    pub const fn len(&self) -> usize {
        self.used
    }

    /// Returns how many octets the regions in some slots of the table have, `None` if there are no such slots. Memory that two
    /// regions share counts twice. Callers ask for a part at a time, because the table may have two million slots and is locked meanwhile.
    pub fn octets_in(&self, slots: Range<usize>) -> Option<u64> {
        let end = slots.end.min(self.slots.len());
        let part = self.slots.get(slots.start..end).filter(|p| !p.is_empty())?;
        Some(
            part.iter()
                .flatten()
                .filter_map(Entry::memory)
                .map(Memory::len)
                .sum(),
        )
    }

    /// Returns `true` if nothing is registered.
    pub const fn is_empty(&self) -> bool {
        self.used == 0
    }

    fn slot_of(&self, index: u32) -> usize {
        index as usize & self.slots.len().wrapping_sub(1)
    }

    pub(super) fn entry(&self, stag: u32) -> Option<&Entry<M>> {
        let index = stag >> 8;
        self.slots
            .get(self.slot_of(index))?
            .as_ref()
            .filter(|e| e.index == index)
    }

    pub(super) fn entry_mut(&mut self, stag: u32) -> Option<&mut Entry<M>> {
        let index = stag >> 8;
        let slot = self.slot_of(index);
        self.slots
            .get_mut(slot)?
            .as_mut()
            .filter(|e| e.index == index)
    }

    fn grow(&mut self) -> Result<(), MemoryError> {
        let size = (self.slots.len().saturating_mul(2)).max(SLOTS_MIN);
        let mut slots: Vec<Option<Entry<M>>> = Vec::new();
        slots
            .try_reserve_exact(size)
            .map_err(|_| MemoryError::OutOfMemory)?;
        slots.resize_with(size, || None);
        // Two entries never collide: the low bits that were their old slots differ.
        for entry in self.slots.drain(..).flatten() {
            let slot = entry.index as usize & (size - 1);
            if let Some(s) = slots.get_mut(slot) {
                *s = Some(entry);
            }
        }
        self.slots = slots;
        Ok(())
    }

    /// Puts an entry under an index made from `random`, and returns its STag.
    pub(super) fn insert(&mut self, mut entry: Entry<M>, random: u32) -> Result<u32, MemoryError> {
        if self.used >= MAX_MR as usize {
            return Err(MemoryError::TableFull);
        }
        // The table is at most half full, so that a free slot is near every random one.
        if (self.used + 1).saturating_mul(2) > self.slots.len() {
            self.grow()?;
        }
        let mask = self.slots.len() - 1;
        let mut index = random >> 8 & INDEX_MASK;
        for _ in 0..self.slots.len() {
            let slot = index as usize & mask;
            // Index zero is left out, because STag 0 means "none" to many programs.
            if index != 0 && self.slots.get(slot).is_some_and(Option::is_none) {
                entry.index = index;
                let valid = entry.state.is_valid();
                entry.state.set(valid, random as u8);
                let stag = entry.stag();
                if let Some(s) = self.slots.get_mut(slot) {
                    *s = Some(entry);
                    self.used += 1;
                }
                return Ok(stag);
            }
            // Advance the slot bits only; the upper bits stay random.
            index = index & !(mask as u32) | index.wrapping_add(1) & mask as u32;
            index &= INDEX_MASK;
            if index == 0 {
                index = (mask as u32).wrapping_add(1) & INDEX_MASK;
            }
        }
        Err(MemoryError::TableFull)
    }

    fn check_access(access: Access) -> Result<(), MemoryError> {
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !access.contains(Access::LOCAL_WRITE)
        {
            return Err(MemoryError::BadAccess);
        }
        Ok(())
    }

    /// Registers memory; tagged offsets start at `iova` (at zero with `ZERO_BASED`).
    ///
    //= rfc5040 section 8.1.1
    //# An RNIC MUST choose the value of STags in a way difficult to predict.
    /// `random` becomes the STag and must be unguessable. The range stays in use until
    /// [`deregister`](Self::deregister) gives it back.
    pub fn register(
        &mut self,
        memory: M,
        iova: u64,
        pd: u32,
        access: Access,
        random: u32,
    ) -> Result<u32, MemoryError> {
        Self::check_access(access)?;
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        let len = memory.len();
        base.checked_add(len).ok_or(MemoryError::OutOfRange)?;
        let reach = Reach {
            access,
            base,
            len,
            offset: 0,
        };
        let entry = Entry::new(Kind::Region { memory, iova }, true, pd, reach);
        self.insert(entry, random)
    }

    /// Reserves memory for fast registration: it has an STag but no range or rights before
    /// [`fast_register`](Self::fast_register).
    pub fn allocate_fast(&mut self, memory: M, pd: u32, random: u32) -> Result<u32, MemoryError> {
        let entry = Entry::new(Kind::Fast(memory), false, pd, Reach::NOTHING);
        self.insert(entry, random)
    }

    //= rfc5040 section 8.1.1
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke the
    //# association of a ULP Buffer to an STag and TO range.
    //= rfc5040 section 8.1.1
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke
    //# read, write, or read and write access to the ULP Buffer referenced by an
    //# STag.
    //= rfc5041 section 8.3.1
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke the
    //# association of a ULP Buffer to an STag and TO range.
    //= rfc5041 section 8.3.1
    //# An RNIC MUST provide a mechanism for the ULP to establish and revoke
    //# read, write, or read and write access to the ULP Buffer referenced by an
    //# STag.
    //= rfc5041 section 8.3
    //# DDP MUST provide a mechanism for the ULP to establish and revoke the TO
    //# range associated with the ULP Buffer referenced by the STag.
    //= rfc5041 section 8.3
    //# DDP MUST provide a mechanism for the ULP to establish and revoke STag
    //# validity.
    /// Carries out a fast registration (verbs "Register Memory Region by work request").
    ///
    /// It shares the table with all accesses. Fails with `InUse` while an access of the last registration has not ended.
    pub fn fast_register(&self, wr: &crate::FastRegister, pd: u32) -> Result<(), MemoryError> {
        Self::check_access(wr.access)?;
        let entry = self.entry(wr.new_stag).ok_or(MemoryError::NoSuchStag)?;
        let Kind::Fast(memory) = &entry.kind else {
            return Err(MemoryError::NoSuchStag);
        };
        if entry.pd != pd {
            return Err(MemoryError::WrongProtectionDomain);
        }
        let base = if wr.access.contains(Access::ZERO_BASED) {
            0
        } else {
            wr.iova
        };
        entry.state.begin()?;
        let end = wr.offset.checked_add(wr.len);
        if end.is_none_or(|end| end > memory.len()) || base.checked_add(wr.len).is_none() {
            entry.state.cancel();
            return Err(MemoryError::OutOfRange);
        }
        entry.set_reach(Reach {
            access: wr.access,
            base,
            len: wr.len,
            offset: wr.offset,
        });
        entry.state.finish(wr.new_stag as u8);
        Ok(())
    }

    /// Changes rights, protection domain or memory of a region; each `None` stays as it is. Returns the new STag and the range
    /// that was replaced.
    ///
    /// The index stays. New memory gets a new key, so that STags that a peer knows stop working. With the same memory the STag
    /// stays valid, because programs tell a peer the key first and change rights later.
    pub fn reregister(
        &mut self,
        stag: u32,
        memory: Option<(M, u64)>,
        pd: Option<u32>,
        access: Option<Access>,
    ) -> Result<(u32, Option<M>), MemoryError> {
        let entry = self.entry_mut(stag).ok_or(MemoryError::NoSuchStag)?;
        if entry.stag() != stag {
            return Err(MemoryError::NoSuchStag);
        }
        let reach = entry.reach();
        let Kind::Region { memory: held, iova } = &mut entry.kind else {
            return Err(MemoryError::NoSuchStag);
        };
        if entry.windows.load(Ordering::Relaxed) > 0 {
            return Err(MemoryError::Busy);
        }
        if entry.state.is_used() {
            return Err(MemoryError::InUse);
        }
        let access = access.unwrap_or(reach.access);
        Self::check_access(access)?;
        let begins = memory.as_ref().map_or(*iova, |m| m.1);
        let len = memory.as_ref().map_or(reach.len, |m| m.0.len());
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            begins
        };
        base.checked_add(len).ok_or(MemoryError::OutOfRange)?;
        *iova = begins;
        let old = memory.map(|(memory, _)| core::mem::replace(held, memory));
        entry.pd = pd.unwrap_or(entry.pd);
        entry.set_reach(Reach {
            access,
            base,
            len,
            offset: 0,
        });
        if old.is_some() {
            entry.state.set(true, (stag as u8).wrapping_add(1));
        }
        Ok((entry.stag(), old))
    }

    //= rfc5040 section 8.1.1
    //# An RNIC MUST ensure that the network interface can no longer modify an
    //# Advertised Buffer after the ULP revokes remote access rights for an
    //# STag.
    //= rfc5041 section 8.3.1
    //# An RNIC MUST ensure that the network interface can no longer modify an
    //# Advertised Buffer after the ULP revokes remote access rights for an
    //# STag.
    /// Removes a region and gives its memory back. Fails with `Busy` while windows are bound to it, and with `InUse` while a plan
    /// that names it is being written or filled.
    pub fn deregister(&mut self, stag: u32) -> Result<M, MemoryError> {
        let entry = self.entry(stag).ok_or(MemoryError::NoSuchStag)?;
        if matches!(entry.kind, Kind::Window { .. }) {
            return Err(MemoryError::NoSuchStag);
        }
        if entry.windows.load(Ordering::Relaxed) > 0 {
            return Err(MemoryError::Busy);
        }
        if entry.state.is_used() {
            return Err(MemoryError::InUse);
        }
        match self.remove(stag).map(|e| e.kind) {
            Some(Kind::Region { memory, .. } | Kind::Fast(memory)) => Ok(memory),
            Some(Kind::Window { .. }) | None => Err(MemoryError::NoSuchStag),
        }
    }

    pub(super) fn remove(&mut self, stag: u32) -> Option<Entry<M>> {
        self.entry(stag)?;
        let slot = self.slot_of(stag >> 8);
        let entry = self.slots.get_mut(slot)?.take();
        self.used = self.used.saturating_sub(1);
        entry
    }
}
