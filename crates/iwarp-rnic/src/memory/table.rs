//! The STag table: registration, look-up with every check, invalidation.

use super::span::{Memory, Span};
use super::window::WindowType;
use super::{AccessError, HostRange, MemoryError};
use crate::Access;
use crate::limits::MAX_MR;
use alloc::vec::Vec;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

const INDEX_MASK: u32 = 0x00ff_ffff;
const SLOTS_MIN: usize = 64;

/// The kind of an entry.
#[derive(Debug)]
pub(super) enum Kind<M> {
    /// An ordinary region.
    Region {
        memory: M,
        /// The address that it was registered with.
        iova: u64,
    },
    /// A region whose range and rights are given by a work request.
    Fast(M),
    /// A memory window.
    Window {
        ty: WindowType,
        /// The region that it is bound to.
        parent: Option<u32>,
        /// The queue pair that it serves. A type 2 window serves one once it is bound.
        qp: Option<u32>,
    },
}

#[derive(Debug)]
pub(super) struct Entry<M> {
    /// The index, 24 bits.
    pub(super) index: u32,
    pub(super) key: AtomicU8,
    pub(super) valid: AtomicBool,
    pub(super) pd: u32,
    pub(super) access: Access,
    /// Tagged offset of the first octet.
    pub(super) base: u64,
    /// Octets that can be reached.
    pub(super) len: u64,
    /// Where `base` lies in the memory.
    pub(super) offset: u64,
    pub(super) kind: Kind<M>,
    /// Valid windows bound to this region.
    pub(super) windows: AtomicU32,
}

impl<M> Entry<M> {
    /// Returns its memory. A window has none of its own.
    const fn memory(&self) -> Option<&M> {
        match &self.kind {
            Kind::Region { memory, .. } | Kind::Fast(memory) => Some(memory),
            Kind::Window { .. } => None,
        }
    }

    fn stag(&self) -> u32 {
        self.index << 8 | u32::from(self.key.load(Ordering::Relaxed))
    }
}

/// Facts about a registered region or window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    /// Its STag now.
    pub stag: u32,
    /// Protection domain.
    pub pd: u32,
    /// Rights.
    pub access: Access,
    /// Tagged offset of the first octet.
    pub iova: u64,
    /// Octets.
    pub len: u64,
    /// Whether it can be used now.
    pub valid: bool,
}

/// All regions and windows of one device.
///
/// Registering takes `&mut self`, looking up `&self`. A runtime puts a readers-writer lock around it; deregistration then
/// waits for accesses in progress.
#[derive(Debug)]
pub struct MemoryTable<M = HostRange> {
    slots: Vec<Option<Entry<M>>>,
    used: usize,
    #[cfg(feature = "planted-bugs")]
    skip_bounds: bool,
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
                entry.key = AtomicU8::new(random as u8);
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
        let entry = Entry {
            index: 0,
            key: AtomicU8::new(0),
            valid: AtomicBool::new(true),
            pd,
            access,
            base,
            len,
            offset: 0,
            kind: Kind::Region { memory, iova },
            windows: AtomicU32::new(0),
        };
        self.insert(entry, random)
    }

    /// Reserves memory for fast registration: it has an STag but no range or rights before
    /// [`fast_register`](Self::fast_register).
    pub fn allocate_fast(&mut self, memory: M, pd: u32, random: u32) -> Result<u32, MemoryError> {
        let entry = Entry {
            index: 0,
            key: AtomicU8::new(0),
            valid: AtomicBool::new(false),
            pd,
            access: Access::empty(),
            base: 0,
            len: 0,
            offset: 0,
            kind: Kind::Fast(memory),
            windows: AtomicU32::new(0),
        };
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
    pub fn fast_register(&mut self, wr: &crate::FastRegister, pd: u32) -> Result<(), MemoryError> {
        Self::check_access(wr.access)?;
        let entry = self.entry_mut(wr.new_stag).ok_or(MemoryError::NoSuchStag)?;
        let Kind::Fast(memory) = &entry.kind else {
            return Err(MemoryError::NoSuchStag);
        };
        if entry.pd != pd {
            return Err(MemoryError::WrongProtectionDomain);
        }
        if entry.valid.load(Ordering::Relaxed) {
            return Err(MemoryError::StillValid);
        }
        let end = wr
            .offset
            .checked_add(wr.len)
            .ok_or(MemoryError::OutOfRange)?;
        let base = if wr.access.contains(Access::ZERO_BASED) {
            0
        } else {
            wr.iova
        };
        if end > memory.len() || base.checked_add(wr.len).is_none() {
            return Err(MemoryError::OutOfRange);
        }
        entry.offset = wr.offset;
        entry.len = wr.len;
        entry.base = base;
        entry.access = wr.access;
        entry.key = AtomicU8::new(wr.new_stag as u8);
        entry.valid = AtomicBool::new(true);
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
        let now = entry.stag();
        let Kind::Region { memory: held, iova } = &mut entry.kind else {
            return Err(MemoryError::NoSuchStag);
        };
        if now != stag {
            return Err(MemoryError::NoSuchStag);
        }
        if entry.windows.load(Ordering::Relaxed) > 0 {
            return Err(MemoryError::Busy);
        }
        let access = access.unwrap_or(entry.access);
        Self::check_access(access)?;
        let begins = memory.as_ref().map_or(*iova, |m| m.1);
        let len = memory.as_ref().map_or(entry.len, |m| m.0.len());
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            begins
        };
        base.checked_add(len).ok_or(MemoryError::OutOfRange)?;
        entry.access = access;
        entry.pd = pd.unwrap_or(entry.pd);
        entry.base = base;
        entry.len = len;
        *iova = begins;
        let old = memory.map(|(memory, _)| core::mem::replace(held, memory));
        if old.is_some() {
            entry.key.store(
                entry.key.load(Ordering::Relaxed).wrapping_add(1),
                Ordering::Relaxed,
            );
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
    /// Removes a region and gives its memory back. Fails with `Busy` while windows are bound to it.
    pub fn deregister(&mut self, stag: u32) -> Result<M, MemoryError> {
        let entry = self.entry(stag).ok_or(MemoryError::NoSuchStag)?;
        if matches!(entry.kind, Kind::Window { .. }) {
            return Err(MemoryError::NoSuchStag);
        }
        if entry.windows.load(Ordering::Relaxed) > 0 {
            return Err(MemoryError::Busy);
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

    /// Looks up an entry by index, valid or not.
    pub fn info(&self, stag: u32) -> Option<RegionInfo> {
        let e = self.entry(stag)?;
        Some(RegionInfo {
            stag: e.stag(),
            pd: e.pd,
            access: e.access,
            iova: e.base,
            len: e.len,
            valid: e.valid.load(Ordering::Relaxed),
        })
    }

    /// Checks an access of `len` octets at tagged offset `to`, and names the memory.
    ///
    /// A zero-length access is not checked at all (RFC 5041 section 5.2, RFC 5040 section 7.2).
    #[inline]
    pub fn check(
        &self,
        stag: u32,
        to: u64,
        len: u32,
        need: Access,
        who: Accessor,
    ) -> Result<Span<'_, M>, AccessError> {
        //= rfc5041 section 5.2
        //# The STag and TO fields MUST NOT be checked for a zero-length Tagged DDP
        //# Message.
        //= rfc5041 section 5.2
        //# Only the DDP Control and RsvdULP Fields MUST be valid for a zero-length
        //# Tagged DDP Segment.
        if len == 0 {
            return Ok(Span::EMPTY);
        }
        //= rfc5041 section 4.2
        //# The STag MUST be valid for this DDP Stream.
        let entry = self.entry(stag).ok_or(AccessError::InvalidStag)?;
        if entry.key.load(Ordering::Relaxed) != stag as u8 || !entry.valid.load(Ordering::Acquire) {
            return Err(AccessError::InvalidStag);
        }
        //= rfc5040 section 8.1.1
        //# An RNIC MUST ensure that a specific Stream in a specific Protection
        //# Domain cannot access an STag in a different Protection Domain.
        //= rfc5041 section 8.3.1
        //# An RNIC MUST ensure that a specific DDP Stream in a specific Protection
        //# Domain cannot access an STag in a different Protection Domain.
        //= rfc5041 section 8.2
        //# For an incoming DDP Segment of a Tagged DDP Message on a DDP Stream, if
        //# the PD ID of the DDP Stream is not the same as the PD ID of the STag
        //# targeted by the Tagged DDP Message, then the DDP Segment is not Placed,
        //# and the DDP layer MUST surface a local error to the ULP.
        if entry.pd != who.pd {
            return Err(AccessError::NotAssociated);
        }
        let memory = match &entry.kind {
            Kind::Region { memory, .. } | Kind::Fast(memory) => memory,
            // A window gives rights to the peer. The elements of local requests name regions.
            Kind::Window { .. } if !need.intersects(Access::REMOTE) => {
                return Err(AccessError::AccessDenied);
            }
            Kind::Window { parent, qp, .. } => self.behind_window(*parent, *qp, who)?,
        };
        if !entry.access.contains(need) {
            return Err(AccessError::AccessDenied);
        }
        //= rfc5040 section 8.1.1
        //# An RNIC MUST ensure that a Remote Peer is not able to access memory
        //# outside of the buffer specified when the STag was enabled for remote
        //# access.
        //= rfc5041 section 8.3.1
        //# An RNIC MUST ensure that a Remote Peer is not able to access memory
        //# outside the buffer specified when the STag was enabled for remote
        //# access.
        let end = to.checked_add(u64::from(len)).ok_or(AccessError::ToWrap)?;
        let offset = to
            .checked_sub(entry.base)
            .ok_or(AccessError::BaseOrBounds)?;
        #[cfg(feature = "planted-bugs")]
        let bounded = !self.skip_bounds;
        #[cfg(not(feature = "planted-bugs"))]
        let bounded = true;
        if bounded && end.wrapping_sub(entry.base) > entry.len {
            return Err(AccessError::BaseOrBounds);
        }
        // The range of a region is inside its memory, so this does not wrap. `Span::new` compares again.
        let at = entry.offset.wrapping_add(offset);
        Span::new(memory, at, len).ok_or(AccessError::BaseOrBounds)
    }

    /// Returns the memory of the region that a window is bound to, if it serves this queue pair.
    #[cold]
    fn behind_window(
        &self,
        parent: Option<u32>,
        qp: Option<u32>,
        who: Accessor,
    ) -> Result<&M, AccessError> {
        //= rfc5040 section 7.2
        //# The STag MUST be associated to this RDMAP Stream.
        //= rfc5040 section 7.2
        //# The STag MUST be associated to this RDMAP Stream.
        //= rfc5040 section 8.1.1
        //# An RNIC MUST ensure that if an STag is limited in scope to a single
        //# Stream, no other Stream can use the STag.
        //= rfc5041 section 8.3.1
        //# An RNIC MUST ensure that if an STag is limited in scope to a single DDP
        //# Stream, no other DDP Stream can use the STag.
        //= rfc5041 section 8.2
        //# In this case, for an incoming DDP Segment of a Tagged DDP Message on a
        //# DDP Stream, if the DDP Stream ID of the DDP Stream is not the same as
        //# the DDP Stream ID of the STag targeted by the Tagged DDP Message, then
        //# the DDP Segment is not Placed and the DDP layer MUST surface a local
        //# error to the ULP.
        //= rfc5041 section 8.2
        //# DDP MUST support Protection Domain association and DDP Stream
        //# association mechanisms for associating an STag and a DDP Stream.
        if qp.is_some_and(|qp| qp != who.qp) {
            return Err(AccessError::NotAssociated);
        }
        let region = parent.and_then(|parent| self.entry(parent));
        region
            .and_then(Entry::memory)
            .ok_or(AccessError::InvalidStag)
    }

    /// Returns `true` if the whole range can be reached. As [`check`](Self::check), also for ranges above 4 GiB or of zero length.
    pub fn covers(
        &self,
        stag: u32,
        to: u64,
        len: u64,
        need: Access,
        who: Accessor,
    ) -> Result<(), AccessError> {
        //= rfc5040 section 5.2.1
        //# MUST NOT validate the Data Source STag and Data Source Tagged Offset
        //# contained in the RDMA Read Request Header, and
        if len == 0 {
            return Ok(());
        }
        let end = to.checked_add(len);
        match self.check(stag, to, 1, need, who) {
            Err(AccessError::BaseOrBounds) if end.is_none() => return Err(AccessError::ToWrap),
            first => first?,
        };
        let end = end.ok_or(AccessError::ToWrap)?;
        self.check(stag, end.wrapping_sub(1), 1, need, who)
            .map(|_| ())
    }

    /// Invalidates an STag for a peer (`remote`) or for a local work request.
    ///
    /// Only fast-registration regions and type 2 windows can be invalidated. Only the program ends an ordinary region, because a
    /// peer must not end more than it was given (RFC 5042 section 6.2).
    pub fn invalidate(&self, stag: u32, who: Accessor, remote: bool) -> Result<(), AccessError> {
        let entry = self.entry(stag).ok_or(AccessError::InvalidStag)?;
        if entry.key.load(Ordering::Relaxed) != stag as u8 || !entry.valid.load(Ordering::Acquire) {
            return Err(AccessError::InvalidStag);
        }
        if entry.pd != who.pd {
            return Err(AccessError::NotAssociated);
        }
        match entry.kind {
            Kind::Window {
                ty: WindowType::Type2,
                qp,
                ..
            } => {
                if qp != Some(who.qp) {
                    return Err(AccessError::NotAssociated);
                }
            }
            Kind::Fast(_) => {
                if remote && !entry.access.intersects(Access::REMOTE) {
                    return Err(AccessError::AccessDenied);
                }
                // A window must not outlive what it was bound to.
                if entry.windows.load(Ordering::Acquire) > 0 {
                    return Err(AccessError::AccessDenied);
                }
            }
            //= rfc5040 section 8.1.1
            //# An RNIC MUST ensure that a Remote Peer is not able to invalidate an STag
            //# enabled for remote access, if the STag is shared on multiple streams.
            _ => return Err(AccessError::AccessDenied),
        }
        self.retire(entry);
        Ok(())
    }

    /// Marks an entry invalid; a window no longer holds its region then.
    pub(super) fn retire(&self, entry: &Entry<M>) {
        if entry.valid.swap(false, Ordering::AcqRel)
            && let Kind::Window {
                parent: Some(parent),
                ..
            } = entry.kind
            && let Some(region) = self.entry(parent)
        {
            region.windows.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The queue pair for which memory is accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accessor {
    /// Protection domain of the queue pair.
    pub pd: u32,
    /// Its number.
    pub qp: u32,
}
