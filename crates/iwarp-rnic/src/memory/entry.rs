//! The entries of the STag table.

use super::state::State;
use super::window::WindowType;
use super::{Memory, MemoryError, Pager};
use crate::Access;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use iwarp_proto::ddp::Stag;

/// The kind of an entry.
#[derive(Debug)]
pub(super) enum Kind<M> {
    /// None: the slot is free.
    Free,
    /// An ordinary region.
    Region {
        memory: M,
        /// The address that it was registered with.
        iova: u64,
    },
    /// An ordinary region whose pages may be missing.
    OnDemand {
        memory: M,
        /// As of an ordinary region.
        iova: u64,
        pager: &'static Pager,
    },
    /// A region whose range and rights are given by a work request.
    Fast(M),
    /// A null region: what is written is lost, and what is read is zero (`ibv_alloc_null_mr(3)`).
    Null {
        /// What is read.
        zeros: M,
        /// What is written to.
        sink: M,
    },
    /// A memory window.
    Window {
        ty: WindowType,
        /// The region that it is bound to.
        parent: Option<Stag>,
        /// The queue pair that it serves. A type 2 window serves one once it is bound.
        qp: Option<u32>,
    },
}

/// A slot of the table, which is free or has a region or a window.
#[derive(Debug)]
pub(super) struct Entry<M> {
    /// STag, validity and users. A fast registration changes the fields of [`Reach`] while this says that it is busy.
    pub(super) state: State,
    pub(super) pd: u32,
    access: AtomicU32,
    base: AtomicU64,
    /// Not of an ordinary region, whose range is all of its memory.
    len: AtomicU64,
    /// As `len`.
    offset: AtomicU64,
    pub(super) kind: Kind<M>,
    /// Valid windows bound to this region.
    pub(super) windows: AtomicU32,
}

/// What can be reached by an STag, and how.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach {
    pub(super) access: Access,
    /// Tagged offset of the first octet.
    pub(super) base: u64,
    /// Octets that can be reached.
    pub(super) len: u64,
    /// Where `base` lies in the memory.
    pub(super) offset: u64,
}

impl Reach {
    /// Nothing can be reached.
    pub(super) const NOTHING: Self = Self {
        access: Access::empty(),
        base: 0,
        len: 0,
        offset: 0,
    };
}

impl<M> Entry<M> {
    /// Makes a free slot.
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

    /// Makes it an ordinary region, valid with this STag. `base` is the tagged offset of its first octet.
    #[inline]
    pub(super) fn be_region(
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

    /// Makes an ordinary region one whose pages may be missing.
    pub(super) fn be_on_demand(&mut self, pager: &'static Pager) {
        self.kind = match core::mem::replace(&mut self.kind, Kind::Free) {
            Kind::Region { memory, iova } => Kind::OnDemand {
                memory,
                iova,
                pager,
            },
            other => other,
        };
    }

    /// Returns `true` for a null region.
    pub(super) const fn is_null(&self) -> bool {
        matches!(self.kind, Kind::Null { .. })
    }

    /// Returns `true` if its pages may be missing.
    pub(super) const fn is_on_demand(&self) -> bool {
        matches!(self.kind, Kind::OnDemand { .. })
    }

    /// Makes it a null region, valid with this STag. It contains every tagged offset, and the peer has
    /// all rights: there is nothing that it could see or change.
    pub(super) fn be_null(&mut self, stag: Stag, pd: u32, (zeros, sink): (M, M)) {
        self.kind = Kind::Null { zeros, sink };
        self.pd = pd;
        self.set_reach(Reach {
            access: Access::WRITING.union(Access::REMOTE_READ),
            base: 0,
            len: u64::MAX,
            offset: 0,
        });
        self.state = State::new(true, stag);
    }

    /// Makes it a fast-registration region or a window, which is not valid yet.
    pub(super) fn be_invalid(&mut self, stag: Stag, pd: u32, kind: Kind<M>) {
        self.kind = kind;
        self.pd = pd;
        self.set_reach(Reach::NOTHING);
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

    // Out of line, so that the compiler knows the kind on the usual way.
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
            | Kind::Fast(memory)
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

    /// Frees the slot of a window.
    pub(super) fn clear(&mut self) {
        self.state = State::free();
        self.kind = Kind::Free;
    }

    /// Changes rights and first tagged offset of an ordinary region.
    pub(super) fn set_base(&mut self, access: Access, base: u64) {
        *self.access.get_mut() = access.bits();
        *self.base.get_mut() = base;
    }

    /// Changes what can be reached. The caller has the entry busy, or the table for itself.
    pub(super) fn set_reach(&self, reach: Reach) {
        self.access.store(reach.access.bits(), Ordering::Relaxed);
        self.base.store(reach.base, Ordering::Relaxed);
        self.len.store(reach.len, Ordering::Relaxed);
        self.offset.store(reach.offset, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn access(&self) -> Access {
        Access::from_bits_retain(self.access.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// Returns what can be reached. The caller is a user of the entry, or it is not one for fast registration.
    #[inline]
    pub(super) fn reach(&self) -> Reach
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
        Reach {
            access: self.access(),
            base: self.base(),
            len,
            offset,
        }
    }

    /// Returns its memory. A window has none of its own, a null region none that is one thing, an on-demand region none that is
    /// always there, and a free slot none.
    pub(super) const fn memory(&self) -> Option<&M> {
        match &self.kind {
            Kind::Region { memory, .. } | Kind::Fast(memory) => Some(memory),
            Kind::OnDemand { .. } | Kind::Window { .. } | Kind::Null { .. } | Kind::Free => None,
        }
    }

    /// Returns the memory of a region, and how it is accessed if its pages may be missing.
    pub(super) const fn backing(&self) -> Option<(&M, Option<&'static Pager>)> {
        match &self.kind {
            Kind::Region { memory, .. } | Kind::Fast(memory) => Some((memory, None)),
            Kind::OnDemand { memory, pager, .. } => Some((memory, Some(pager))),
            Kind::Window { .. } | Kind::Null { .. } | Kind::Free => None,
        }
    }
}

/// Facts about a registered region or window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    /// Its STag now.
    pub stag: Stag,
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
    /// Whether its pages may be missing.
    pub on_demand: bool,
}
