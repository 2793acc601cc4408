//! References to registered memory, created only where no one else can access it.
//!
//! Invariant of the `unsafe` code: a reference exists only while nothing can write the memory, and
//! a mutable one only while nothing can read it either.
//! - The memory was allocated without remote rights, so no peer can access it. A window, which
//!   grants such rights, holds a handle.
//! - A request that uses the memory holds a handle until it completes. After a failed completion
//!   the handle is kept until this crate's accesses have ended.
//! - The keys of this memory never leave the module `connection`, which alone has its endpoint's
//!   device and protection domain. So no other request can name it.
//! - [`Region::get_mut`] needs the only handle, exclusively borrowed. A [`ReceivedBytes`] refers to
//!   memory of the receive queue of one connection that is not posted while the value lives.

use super::region::{REMOTE, Region};
use crate::verbs::MemoryRegion;
use bytemuck::Pod;
use iwarp_rnic::Access;

impl<T: Pod> Region<T> {
    /// Returns the elements in place if no one else can access them: the region is not shared, no
    /// request uses it, and no clone, slice or window of it exists. Otherwise returns `None`.
    pub fn get_mut(&mut self) -> Option<&mut [T]> {
        let (at, octets) = (self.at, self.octets());
        if self.memory.access().intersects(REMOTE) || !self.memory.is_only_handle() {
            return None;
        }
        let first = self.memory.pointer(at, octets).ok()?.cast::<T>();
        // Pages are aligned for every element of at most their size.
        if !first.is_aligned() {
            return None;
        }
        // SAFETY: `len` plain elements in memory that is kept by this only handle; by the invariant
        // above nothing else accesses it while the handle is borrowed.
        Some(unsafe { std::slice::from_raw_parts_mut(first, self.len) })
    }
}

/// Bytes of a received message. A clone refers to the same bytes.
#[derive(Debug, Clone)]
pub(super) struct ReceivedBytes {
    memory: MemoryRegion,
    at: usize,
    len: usize,
}

impl ReceivedBytes {
    /// Refers to `len` bytes at `at`. Returns `None` if they are outside the memory, or if a peer
    /// could write them.
    ///
    /// # Safety
    /// While the value or a clone of it lives, no request that names these bytes may be posted, and
    /// nothing may be copied into them.
    pub(super) unsafe fn new(memory: MemoryRegion, at: usize, len: usize) -> Option<Self> {
        let inside = at.checked_add(len).is_some_and(|end| end <= memory.len());
        let private = memory.access() & (REMOTE | Access::MW_BIND) == Access::empty();
        (inside && private).then_some(Self { memory, at, len })
    }

    /// Restricts it to `len` of its bytes from `at` on, which the caller has checked.
    pub(super) const fn restrict(&mut self, at: usize, len: usize) {
        self.at += at;
        self.len = len;
    }

    /// Returns the octets.
    pub(super) fn octets(&self) -> &[u8] {
        match self.memory.pointer(self.at, self.len) {
            // SAFETY: initialised memory of a mapping that the handle keeps; `new` requires that
            // nothing writes it.
            Ok(first) => unsafe { std::slice::from_raw_parts(first, self.len) },
            Err(_) => &[],
        }
    }
}
