//! The entries of the STag table.

use super::state::State;
use super::window::WindowType;
use crate::Access;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

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
    /// Key, validity and users. A fast registration changes the four fields below while this says that it is busy.
    pub(super) state: State,
    pub(super) pd: u32,
    access: AtomicU32,
    base: AtomicU64,
    len: AtomicU64,
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
    /// Makes an entry without users, which gets index and key when it is put into the table.
    pub(super) fn new(kind: Kind<M>, valid: bool, pd: u32, reach: Reach) -> Self {
        let entry = Self {
            index: 0,
            state: State::new(valid, 0),
            pd,
            access: AtomicU32::new(0),
            base: AtomicU64::new(0),
            len: AtomicU64::new(0),
            offset: AtomicU64::new(0),
            kind,
            windows: AtomicU32::new(0),
        };
        entry.set_reach(reach);
        entry
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

    /// Returns what can be reached. The caller is a user of the entry, or it is not one for fast registration.
    #[inline]
    pub(super) fn reach(&self) -> Reach {
        Reach {
            access: self.access(),
            base: self.base.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            offset: self.offset.load(Ordering::Relaxed),
        }
    }

    /// Returns its memory. A window has none of its own.
    pub(super) const fn memory(&self) -> Option<&M> {
        match &self.kind {
            Kind::Region { memory, .. } | Kind::Fast(memory) => Some(memory),
            Kind::Window { .. } => None,
        }
    }

    pub(super) fn stag(&self) -> u32 {
        self.index << 8 | u32::from(self.state.key())
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
