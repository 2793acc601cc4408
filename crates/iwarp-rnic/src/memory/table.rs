//! The STag table: registration and deregistration.

use super::access::Accessor;
use super::entry::{Entry, Grant, Kind};
use super::slots::{NewSlotsSize, Room, Slots};
use super::span::Memory;
use super::{HostRange, MemoryError};
use crate::Access;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};
use iwarp_proto::ddp::Stag;

/// All regions and windows of one device.
///
/// Registering, deregistering and binding take `&mut self`. Accesses, fast registrations and
/// invalidations take `&self`. A runtime wraps the table in a readers-writer lock; deregistration
/// then waits for accesses in progress.
///
/// The table grows when it has no free slot for a new entry. To avoid an allocation under the lock,
/// a caller can call [`missing_slots`](Self::missing_slots), allocate the slots without the lock,
/// and [`attach`](Self::attach) them.
#[derive(Debug)]
pub struct MemoryTable<M = HostRange> {
    pub(super) slots: Slots<M>,
    /// Number of regions whose pages may be missing.
    pub(super) on_demand: u32,
    /// Set when memory that an invalidation or a registration waits for has lost its last user.
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
    /// Creates an empty table.
    pub const fn new() -> Self {
        Self {
            slots: Slots::new(),
            on_demand: 0,
            unused: AtomicBool::new(false),
            #[cfg(feature = "planted-bugs")]
            skip_bounds: false,
        }
    }

    /// Plants a bug for the simulator to find: the end of regions and windows is not checked.
    /// Accesses are still limited to the region's memory, so only windows are affected and the bug
    /// is memory-safe.
    #[cfg(feature = "planted-bugs")]
    pub const fn plant_skip_bounds(&mut self) {
        self.skip_bounds = true;
    }

    /// Returns the number of regions and windows.
    pub fn len(&self) -> usize {
        self.slots.used()
    }

    /// Returns `true` if nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the total length of the regions in a range of slots, in bytes; `None` if the range
    /// is past the end. Memory shared by two regions is counted twice. On-demand regions are not
    /// counted, because their memory may be missing. Callers should pass a part of the table at a
    /// time, because it may have two million slots and is locked during the call.
    pub fn bytes_in(&self, slots: Range<usize>) -> Option<u64> {
        let entries = self.slots.entries_in(slots)?;
        let lengths = entries.filter_map(Entry::memory).map(Memory::len);
        Some(lengths.fold(0, u64::saturating_add))
    }

    /// Returns how many slots to allocate for the next region or window; `None` if a slot is free,
    /// or if the table has its maximum size.
    pub fn missing_slots(&self) -> Option<NewSlotsSize> {
        self.slots.missing_slots()
    }

    /// Adds slots from [`NewSlotsSize::make`]. No entry moves. If another caller has added slots
    /// meanwhile, returns the new ones, to be dropped without the lock.
    pub fn attach(&mut self, room: Room<M>) -> Option<Room<M>> {
        self.slots.attach(room)
    }

    #[inline]
    pub(super) fn at(&self, stag: Stag) -> Option<&Entry<M>> {
        self.slots.at(stag)
    }

    #[inline]
    pub(super) fn entry(&self, stag: Stag) -> Option<&Entry<M>> {
        self.slots.entry(stag)
    }

    #[inline]
    pub(super) fn entry_mut(&mut self, stag: Stag) -> Option<&mut Entry<M>> {
        self.slots.entry_mut(stag)
    }

    /// Creates an entry that is not valid yet, with an STag made from `random`. Returns the STag.
    pub(super) fn insert(
        &mut self,
        kind: Kind<M>,
        pd: u32,
        random: u32,
    ) -> Result<Stag, MemoryError> {
        self.slots
            .take(random, |entry, stag| entry.set_invalid(stag, pd, kind))
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
    /// `random` becomes the STag and must be unguessable. The memory is in use until
    /// [`deregister`](Self::deregister) returns it.
    pub fn register(
        &mut self,
        memory: M,
        iova: u64,
        pd: u32,
        access: Access,
        random: u32,
    ) -> Result<Stag, MemoryError> {
        Self::check_access(access)?;
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        base.checked_add(memory.len())
            .ok_or(MemoryError::OutOfRange)?;
        self.slots.take(random, |entry, stag| {
            entry.set_region(stag, pd, (memory, iova), access, base);
        })
    }

    /// Creates a null region: writes to it are discarded, and reads return zeros, for local
    /// requests and for the peer. Each access begins at the first byte of `sink` or of `zeros`, at
    /// any tagged offset; `zeros` is never written. An access longer than `sink` or `zeros` is
    /// refused.
    ///
    /// [`deregister`](Self::deregister) returns `zeros`.
    pub fn register_null(
        &mut self,
        zeros: M,
        sink: M,
        pd: u32,
        random: u32,
    ) -> Result<Stag, MemoryError> {
        self.slots.take(random, |entry, stag| {
            entry.set_null(stag, pd, (zeros, sink));
        })
    }

    /// Allocates an STag for the fast registration of `memory`. The STag has no range and no rights
    /// before [`fast_register`](Self::fast_register). The memory may have no pages until then
    /// ([`Pages::listed`](super::Pages::listed)).
    pub fn allocate_fast(&mut self, memory: M, pd: u32, random: u32) -> Result<Stag, MemoryError> {
        self.insert(Kind::Fast { memory, qp: None }, pd, random)
    }

    /// Does the same as [`allocate_fast`](Self::allocate_fast) for a region that only one queue
    /// pair and its peer may use.
    pub fn allocate_fast_for(
        &mut self,
        memory: M,
        accessor: Accessor,
        random: u32,
    ) -> Result<Stag, MemoryError> {
        let qp = Some(accessor.qp);
        self.insert(Kind::Fast { memory, qp }, accessor.pd, random)
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
    /// Performs a fast registration (verbs "Register Memory Region by work request").
    ///
    /// Accesses may be in progress in other threads. Fails with `InUse` while one of them still
    /// uses the previous registration of this STag.
    pub fn fast_register(&self, wr: &crate::FastRegister, pd: u32) -> Result<(), MemoryError> {
        Self::check_access(wr.access)?;
        let entry = self.entry(wr.new_stag).ok_or(MemoryError::NoSuchStag)?;
        let Kind::Fast { memory, .. } = &entry.kind else {
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
        if !memory.set_pages(wr.pages)
            || end.is_none_or(|end| end > memory.len())
            || base.checked_add(wr.len).is_none()
        {
            entry.state.cancel();
            return Err(MemoryError::OutOfRange);
        }
        entry.set_grant(Grant {
            access: wr.access,
            base,
            len: wr.len,
            offset: wr.offset,
        });
        entry.state.finish(wr.new_stag);
        Ok(())
    }

    /// Changes the rights, protection domain or memory of a region; `None` keeps the current value.
    /// Returns the new STag and the replaced memory.
    ///
    /// The index does not change. New memory gets a new key, so that the STag known to a peer
    /// becomes invalid. With the same memory the STag stays valid, because programs advertise the
    /// key first and change rights later.
    pub fn reregister(
        &mut self,
        stag: Stag,
        memory: Option<(M, u64)>,
        pd: Option<u32>,
        access: Option<Access>,
    ) -> Result<(Stag, Option<M>), MemoryError> {
        let entry = self.entry_mut(stag).ok_or(MemoryError::NoSuchStag)?;
        if entry.state.stag() != stag {
            return Err(MemoryError::NoSuchStag);
        }
        let rights = entry.access();
        let (Kind::Region { memory: held, iova }
        | Kind::OnDemand {
            memory: held, iova, ..
        }) = &mut entry.kind
        else {
            return Err(MemoryError::NoSuchStag);
        };
        if entry.windows.load(Ordering::Relaxed) > 0 {
            return Err(MemoryError::Busy);
        }
        entry.state.check_unused()?;
        let access = access.unwrap_or(rights);
        Self::check_access(access)?;
        let new_iova = memory.as_ref().map_or(*iova, |m| m.1);
        let len = memory.as_ref().map_or(held.len(), |m| m.0.len());
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            new_iova
        };
        base.checked_add(len).ok_or(MemoryError::OutOfRange)?;
        *iova = new_iova;
        let old = memory.map(|(memory, _)| core::mem::replace(held, memory));
        entry.pd = pd.unwrap_or(entry.pd);
        entry.set_base(access, base);
        if old.is_some() {
            let new = stag.with_key(stag.key().wrapping_add(1));
            entry.state.set(true, new);
        }
        Ok((entry.state.stag(), old))
    }

    //= rfc5040 section 8.1.1
    //# An RNIC MUST ensure that the network interface can no longer modify an
    //# Advertised Buffer after the ULP revokes remote access rights for an
    //# STag.
    //= rfc5041 section 8.3.1
    //# An RNIC MUST ensure that the network interface can no longer modify an
    //# Advertised Buffer after the ULP revokes remote access rights for an
    //# STag.
    /// Removes a region and returns its memory. Fails with `Busy` while windows are bound to it,
    /// and with `InUse` while a plan that refers to it is being written or filled.
    pub fn deregister(&mut self, stag: Stag) -> Result<M, MemoryError> {
        let on_demand_regions = &mut self.on_demand;
        self.slots.free(stag, |entry| {
            if entry.windows.load(Ordering::Relaxed) > 0 {
                return Err(MemoryError::Busy);
            }
            entry.state.check_unused()?;
            let on_demand = entry.is_on_demand();
            let memory = entry.clear_region()?;
            if on_demand {
                *on_demand_regions = on_demand_regions.wrapping_sub(1);
            }
            Ok(memory)
        })
    }

    pub(super) fn remove_window(&mut self, stag: Stag) -> Result<(), MemoryError> {
        self.slots.free(stag, |entry| {
            entry.clear();
            Ok(())
        })
    }
}
