//! References to registered memory, where nobody else can access it.
//!
//! Invariant of the `unsafe`: a reference exists only while nothing can write the memory, and if it is mutable, nothing can read
//! it, either.
//! - The memory was allocated without remote rights, so no peer reaches it. A window that gives such rights holds a handle.
//! - A request that uses the memory holds a handle until it has completed, and what this crate still does after a failed
//!   completion is waited for before that handle is given up.
//! - The keys of this memory never leave the module `connection`, and its endpoint's device and protection domain are the
//!   module's alone. So no other request can name it.
//! - [`Region::get_mut`] needs the only handle, exclusively borrowed. A [`Filled`] is made for memory that belongs to the receive
//!   queue of one connection and is not posted while the value lives.

use super::region::{REMOTE, Region};
use crate::verbs::MemoryRegion;
use bytemuck::Pod;
use iwarp_rnic::Access;

impl<T: Pod> Region<T> {
    /// Returns the elements themselves, if nobody else can access them now: the region is not shared, no request uses it, and no
    /// clone, slice or window of it exists. Otherwise returns `None`. Nothing is copied.
    pub fn get_mut(&mut self) -> Option<&mut [T]> {
        let (at, octets) = (self.at, self.octets());
        if self.memory.access().intersects(REMOTE) || !self.memory.is_only_handle() {
            return None;
        }
        let first = self.memory.pointer(at, octets).ok()?.cast::<T>();
        // Pages are aligned for every element that is not larger; an odd alignment is refused.
        if !first.is_aligned() {
            return None;
        }
        // SAFETY: `len` elements of plain data in memory that this only handle keeps, and by the file's invariant nothing else
        // accesses it while the handle is borrowed.
        Some(unsafe { std::slice::from_raw_parts_mut(first, self.len) })
    }
}

/// Octets of a message that has arrived.
#[derive(Debug)]
pub(super) struct Filled {
    memory: MemoryRegion,
    at: usize,
    len: usize,
}

impl Filled {
    /// Takes `len` octets at `at`. Returns `None` if they are outside the memory, or if a peer could write them.
    ///
    /// # Safety
    /// No request that names these octets may be posted, and no copy made into them, while the value lives.
    pub(super) unsafe fn new(memory: MemoryRegion, at: usize, len: usize) -> Option<Self> {
        let inside = at.checked_add(len).is_some_and(|end| end <= memory.len());
        let private = memory.access() & (REMOTE | Access::MW_BIND) == Access::empty();
        (inside && private).then_some(Self { memory, at, len })
    }

    /// Returns the octets.
    pub(super) fn octets(&self) -> &[u8] {
        match self.memory.pointer(self.at, self.len) {
            // SAFETY: initialised memory inside a mapping that the handle keeps; `new` was promised that nothing writes it.
            Ok(first) => unsafe { std::slice::from_raw_parts(first, self.len) },
            Err(_) => &[],
        }
    }
}
