//! The entries of the STag table.

use super::state::State;
use super::window::WindowType;
use super::{Memory, MemoryError, Pager};
use crate::Access;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use iwarp_proto::ddp::Stag;

#[derive(Debug)]
pub(super) enum Kind<M> {
    Free,
    Region {
        memory: M,
        /// The address at which the memory was registered.
        iova: u64,
    },
    /// An ordinary region whose pages may be missing.
    OnDemand {
        memory: M,
        /// The address at which it was registered.
        iova: u64,
        pager: &'static Pager,
    },
    /// A region whose range and rights are set by a work request.
    Fast {
        memory: M,
        /// The only queue pair that may use the region; `None` for those of its protection domain.
        qp: Option<u32>,
    },
    /// A null region: writes are discarded, reads return zeros (`ibv_alloc_null_mr(3)`).
    Null {
        /// Source of reads.
        zeros: M,
        /// Target of writes.
        sink: M,
    },
    Window {
        ty: WindowType,
        /// The region to which it is bound.
        parent: Option<Stag>,
        /// The only queue pair that may use the window. A bind sets it for a type 2 window.
        qp: Option<u32>,
    },
}

/// A slot of the table: free, or a region or window.
#[derive(Debug)]
pub(super) struct Entry<M> {
    /// STag, validity and users. The state is busy while a fast registration changes the fields
    /// that make up a [`Grant`].
    pub(super) state: State,
    pub(super) pd: u32,
    access: AtomicU32,
    base: AtomicU64,
    /// Unused in an ordinary region, whose range is its entire memory.
    len: AtomicU64,
    offset: AtomicU64,
    pub(super) kind: Kind<M>,
    /// Valid windows bound to this region.
    pub(super) windows: AtomicU32,
}

/// The range and the rights that an STag grants.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grant {
    pub(super) access: Access,
    /// Tagged offset of the first octet.
    pub(super) base: u64,
    /// Bytes that can be accessed.
    pub(super) len: u64,
    /// Position of `base` in the memory.
    pub(super) offset: u64,
}

impl Grant {
    /// An empty range without rights.
    pub(super) const NONE: Self = Self {
        access: Access::empty(),
        base: 0,
        len: 0,
        offset: 0,
    };
}

impl<M> Entry<M> {
    pub(super) const fn free() -> Self {
        Self {
            state: State::free(),
            pd: 0,
            access: AtomicU32::new(0),
            base: AtomicU64::new(0),
            len: AtomicU64::new(0),
            offset: AtomicU64::new(0),
            kind: Kind::Free,
            windows: AtomicU32::new(0),
        }
    }

    /// Turns the slot into an ordinary region, valid with this STag. `base` is the tagged offset of
    /// its first byte.
    #[inline]
    pub(super) fn set_region(
        &mut self,
        stag: Stag,
        pd: u32,
        (memory, iova): (M, u64),
        access: Access,
        base: u64,
    ) {
        self.kind = Kind::Region { memory, iova };
        self.pd = pd;
        self.set_base(access, base);
        self.state = State::new(true, stag);
    }

    /// Turns an ordinary region into one whose pages may be missing.
    pub(super) fn set_on_demand(&mut self, pager: &'static Pager) {
        self.kind = match core::mem::replace(&mut self.kind, Kind::Free) {
            Kind::Region { memory, iova } => Kind::OnDemand {
                memory,
                iova,
                pager,
            },
            other => other,
        };
    }

    pub(super) const fn is_null(&self) -> bool {
        matches!(self.kind, Kind::Null { .. })
    }

    /// Returns the only queue pair that may use the region or window, if there is one.
    pub(super) const fn only_qp(&self) -> Option<u32> {
        match self.kind {
            Kind::Fast { qp, .. } | Kind::Window { qp, .. } => qp,
            _ => None,
        }
    }

    pub(super) const fn is_on_demand(&self) -> bool {
        matches!(self.kind, Kind::OnDemand { .. })
    }

    /// Turns the slot into a null region, valid with this STag. It contains every tagged offset and
    /// grants the peer all rights, since there is nothing to read or change.
    pub(super) fn set_null(&mut self, stag: Stag, pd: u32, (zeros, sink): (M, M)) {
        self.kind = Kind::Null { zeros, sink };
        self.pd = pd;
        self.set_grant(Grant {
            access: Access::WRITING.union(Access::REMOTE_READ),
            base: 0,
            len: u64::MAX,
            offset: 0,
        });
        self.state = State::new(true, stag);
    }

    /// Turns the slot into a fast-registration region or a window, not valid yet.
    pub(super) fn set_invalid(&mut self, stag: Stag, pd: u32, kind: Kind<M>) {
        self.kind = kind;
        self.pd = pd;
        self.set_grant(Grant::NONE);
        self.state = State::new(false, stag);
    }

    /// Frees the slot of a region and returns its memory.
    #[inline]
    pub(super) fn clear_region(&mut self) -> Result<M, MemoryError> {
        match self.kind {
            Kind::Region { .. } => self.clear_any_region(),
            _ => self.clear_other_region(),
        }
    }

    // Not inlined, so that the compiler knows the kind on the common path.
    #[cold]
    #[inline(never)]
    fn clear_other_region(&mut self) -> Result<M, MemoryError> {
        self.clear_any_region()
    }

    #[inline(always)]
    fn clear_any_region(&mut self) -> Result<M, MemoryError> {
        match core::mem::replace(&mut self.kind, Kind::Free) {
            Kind::Region { memory, .. }
            | Kind::OnDemand { memory, .. }
            | Kind::Fast { memory, .. }
            | Kind::Null { zeros: memory, .. } => {
                self.state = State::free();
                Ok(memory)
            }
            other => {
                self.kind = other;
                Err(MemoryError::NoSuchStag)
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.state = State::free();
        self.kind = Kind::Free;
    }

    /// Changes the rights and the first tagged offset of an ordinary region.
    pub(super) fn set_base(&mut self, access: Access, base: u64) {
        *self.access.get_mut() = access.bits();
        *self.base.get_mut() = base;
    }

    /// Changes range and rights. The caller has marked the entry busy, or owns the table.
    pub(super) fn set_grant(&self, grant: Grant) {
        self.access.store(grant.access.bits(), Ordering::Relaxed);
        self.base.store(grant.base, Ordering::Relaxed);
        self.len.store(grant.len, Ordering::Relaxed);
        self.offset.store(grant.offset, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn access(&self) -> Access {
        Access::from_bits_retain(self.access.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// Returns range and rights. For a fast-registration region, the caller must be a user of the
    /// entry, so that they do not change meanwhile.
    #[inline]
    pub(super) fn grant(&self) -> Grant
    where
        M: Memory,
    {
        let (len, offset) = match &self.kind {
            Kind::Region { memory, .. } | Kind::OnDemand { memory, .. } => (memory.len(), 0),
            _ => (
                self.len.load(Ordering::Relaxed),
                self.offset.load(Ordering::Relaxed),
            ),
        };
        Grant {
            access: self.access(),
            base: self.base(),
            len,
            offset,
        }
    }

    /// Returns the memory of a region that has exactly one and whose pages are not missing: not of
    /// windows, null regions and on-demand regions.
    pub(super) const fn memory(&self) -> Option<&M> {
        match &self.kind {
            Kind::Region { memory, .. } | Kind::Fast { memory, .. } => Some(memory),
            Kind::OnDemand { .. } | Kind::Window { .. } | Kind::Null { .. } | Kind::Free => None,
        }
    }

    /// Returns the memory of a region, and its pager if pages may be missing.
    pub(super) const fn backing(&self) -> Option<(&M, Option<&'static Pager>)> {
        match &self.kind {
            Kind::Region { memory, .. } | Kind::Fast { memory, .. } => Some((memory, None)),
            Kind::OnDemand { memory, pager, .. } => Some((memory, Some(pager))),
            Kind::Window { .. } | Kind::Null { .. } | Kind::Free => None,
        }
    }
}

/// Describes a registered region or window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    /// The current STag.
    pub stag: Stag,
    /// Protection domain.
    pub pd: u32,
    /// Rights.
    pub access: Access,
    /// Tagged offset of the first byte.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whether the STag is valid at present.
    pub valid: bool,
    /// Whether its pages may be missing.
    pub on_demand: bool,
}
