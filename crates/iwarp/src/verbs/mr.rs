//! Memory that the RNIC and peers may access, owned by its registration.
//!
//! Invariant of the `unsafe` code: a [`MemoryRegion`] owns its pages. They are unmapped only after
//! deregistration has returned, and nothing accesses them from then on. Until then a peer may write
//! them at any time, so no reference to them is ever created: bytes are copied through raw
//! pointers, words are accessed as atomics.

use super::ProtectionDomain;
use super::pages::Pages;
use crate::error::{Error, Result};
use crate::runtime::Context;
use crate::sys::fork::Origin;
use crate::sys::mapping::Mapping;
use iwarp_rnic::memory::MemoryError;
use iwarp_rnic::{Access, PostError, Sge};
use std::mem::ManuallyDrop;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

#[derive(Debug)]
struct RegionInner {
    ctx: Context,
    pd: u32,
    stag: u32,
    access: Access,
    /// Tagged offset of the first byte: the address in scatter/gather elements and for peers.
    base: u64,
    origin: Origin,
    pages: ManuallyDrop<Pages>,
}

impl RegionInner {
    fn register(pd: &ProtectionDomain, pages: Pages, access: Access) -> Result<Self> {
        let (addr, len, ctx) = (pages.addr(), pages.len() as u64, pd.context());
        // SAFETY: the pages are owned by the region, outlive `deregister` in `Drop`, and are never
        // referenced while they can be written.
        let stag = unsafe { ctx.register(addr, len, addr, pd.number(), access) }?;
        Ok(Self {
            ctx: ctx.clone(),
            pd: pd.number(),
            stag,
            access,
            base: match access.contains(Access::ZERO_BASED) {
                true => 0,
                false => addr,
            },
            origin: Origin::current_process(),
            pages: ManuallyDrop::new(pages),
        })
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        if self.origin.is_foreign() {
            // In a forked child, a thread of the parent may have held the table's lock. Therefore
            // the child keeps the registration and its copy of the pages until it exits.
            return;
        }
        // `deregister` returns after the last access, so the pages can be unmapped.
        match self.ctx.deregister(self.stag) {
            // The program has deregistered the region by its key, so nothing accesses the pages.
            Ok(()) | Err(Error::Memory(MemoryError::NoSuchStag)) => {
                // SAFETY: the pages are dropped only here, and nothing accesses them any more.
                unsafe { ManuallyDrop::drop(&mut self.pages) }
            }
            // A window is still bound to the region, so a peer can still access the pages.
            Err(e) => tracing::warn!(
                "memory leaked: deallocate a region's windows before the region: {e}"
            ),
        }
    }
}

/// Registered memory. A clone refers to the same memory; dropping the last clone deregisters and
/// frees it. Deallocate memory windows first: a region with bound windows cannot be deregistered,
/// and its pages are never freed. In a forked child, dropping a region of the parent has no effect.
///
/// Work requests refer to the region by its key. If it is deregistered while a request is
/// outstanding, the request fails with
/// [`WcStatus::LocalProtection`](super::WcStatus::LocalProtection). A later access by a peer ends
/// the peer's connection. Freed memory is not accessed in either case.
#[derive(Debug, Clone)]
pub struct MemoryRegion {
    inner: Arc<RegionInner>,
}

/// Memory of a peer, as advertised by that peer: the target of RDMA Writes, Reads and atomics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteMemory {
    /// Tagged offset of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The peer's STag.
    pub rkey: u32,
}

impl RemoteMemory {
    /// Length of [`to_bytes`](Self::to_bytes) in bytes.
    pub const ENCODED_LEN: usize = 20;

    /// Encodes address, length and key in big-endian order. The result fits into private data.
    pub fn to_bytes(self) -> [u8; Self::ENCODED_LEN] {
        let mut out = [0; Self::ENCODED_LEN];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..16].copy_from_slice(&self.len.to_be_bytes());
        out[16..].copy_from_slice(&self.rkey.to_be_bytes());
        out
    }

    /// Decodes the result of [`to_bytes`](Self::to_bytes). Returns `None` if `bytes` is too short.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (addr, rest) = bytes.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (rkey, _) = rest.split_first_chunk()?;
        Some(Self {
            addr: u64::from_be_bytes(*addr),
            len: u64::from_be_bytes(*len),
            rkey: u32::from_be_bytes(*rkey),
        })
    }

    /// Returns `len` bytes from `offset` on, or `None` if they are not inside this memory.
    pub fn slice(self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then_some(Self {
            addr: self.addr.wrapping_add(offset),
            len,
            rkey: self.rkey,
        })
    }
}

impl MemoryRegion {
    pub(super) fn allocate(pd: &ProtectionDomain, len: usize, access: Access) -> Result<Self> {
        let mapping = Mapping::new(len).map_err(|_| Error::OutOfMemory)?;
        Self::of_pages(pd, Pages::Mapped(mapping), access)
    }

    /// Registers memory of the program. Without write access, only local requests can read it.
    pub(crate) fn of_pages(pd: &ProtectionDomain, pages: Pages, access: Access) -> Result<Self> {
        let inner = Arc::new(RegionInner::register(pd, pages, access)?);
        Ok(Self { inner })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.inner.pages.len()
    }

    /// Returns `true` if the region is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the region's access rights.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// Returns the local key.
    pub fn lkey(&self) -> u32 {
        self.inner.stag
    }

    /// Returns the address, length and key that a peer needs to access the region. The region's
    /// access rights limit the peer.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.inner.base,
            len: self.len() as u64,
            rkey: self.inner.stag,
        }
    }

    /// Returns a scatter/gather element for a part of the region.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the range is outside the region. [`Error::Post`]: it is 4 GiB or
    /// longer.
    pub fn sge(&self, range: impl RangeBounds<usize>) -> Result<Sge> {
        let (start, len) = self.resolve(range)?;
        // A queue pair reports the same error for lengths that fit into an element but not into a
        // message.
        let len = u32::try_from(len).map_err(|_| Error::Post(PostError::MessageTooLong))?;
        Ok(Sge {
            addr: self.inner.base + start as u64,
            len,
            lkey: self.inner.stag,
        })
    }

    fn resolve(&self, range: impl RangeBounds<usize>) -> Result<(usize, usize)> {
        let start = match range.start_bound() {
            Bound::Included(s) => *s,
            Bound::Excluded(s) => s.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(e) => e.saturating_add(1),
            Bound::Excluded(e) => *e,
            Bound::Unbounded => self.len(),
        };
        if start > end || end > self.len() {
            return Err(Error::InvalidArgument("the range is not inside the region"));
        }
        Ok((start, end - start))
    }

    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.inner.pd == pd.number() && self.inner.ctx.is_same(pd.context())
    }

    /// Returns `true` if both handles refer to the same memory.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns `true` if no other handle refers to this memory. While this handle is borrowed, its
    /// access is then exclusive.
    pub(crate) fn is_only_handle(&mut self) -> bool {
        Arc::get_mut(&mut self.inner).is_some()
    }

    /// Returns a pointer to `len` bytes at `offset`. It is valid while a handle to the memory
    /// exists.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the range is outside the region.
    pub(crate) fn pointer(&self, offset: usize, len: usize) -> Result<*mut u8> {
        let (start, _) = self.resolve(offset..offset.saturating_add(len))?;
        // SAFETY: the offset is inside the pages, or one byte past their end for an empty range.
        Ok(unsafe { self.inner.pages.as_ptr().add(start) })
    }

    /// Copies bytes out of the region. If a peer or the RNIC writes them at the same time, the
    /// result may be a mix of old and new bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the range is outside the region.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let from = self.pointer(offset, out.len())?;
        // SAFETY: `from` is valid for that length; `out` cannot overlap it, because no references
        // to it exist.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the range is outside the region.
    pub fn write_at(&self, offset: usize, octets: &[u8]) -> Result<()> {
        let to = self.pointer(offset, octets.len())?;
        // SAFETY: the pointer is valid for that length. `octets` cannot overlap it, because no
        // references to it exist.
        unsafe { std::ptr::copy_nonoverlapping(octets.as_ptr(), to, octets.len()) };
        Ok(())
    }

    /// Copies bytes of the region into a new vector.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the range is outside the region.
    pub fn to_vec(&self, range: impl RangeBounds<usize>) -> Result<Vec<u8>> {
        let (start, len) = self.resolve(range)?;
        let mut out = vec![0; len];
        self.read_at(start, &mut out)?;
        Ok(out)
    }

    /// Loads one byte with acquire ordering: octets that the peer's RDMA Write placed before this
    /// byte are visible afterwards. Programs poll the last byte of a Write to wait for it without a
    /// message.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the range is outside the region.
    #[inline]
    pub fn load_u8(&self, offset: usize) -> Result<u8> {
        let at = self.pointer(offset, 1)?;
        // SAFETY: the pointer is to a valid byte, which is only accessed atomically.
        Ok(unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Acquire))
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let at = self.pointer(offset, 8)?;
        if !(at as usize).is_multiple_of(8) {
            return Err(Error::InvalidArgument("a word starts at a multiple of 8"));
        }
        // SAFETY: the eight bytes are valid, aligned, and live as long as `self`. Atomics may be
        // shared.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    /// Loads the word at `offset`, a multiple of 8, in native byte order. Atomic with respect to
    /// RDMA atomics.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the word is outside the region or misaligned.
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores the word at `offset`, a multiple of 8, in native byte order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the word is outside the region or misaligned.
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Adds to the word at `offset`, a multiple of 8, and returns the old value. Atomic with
    /// respect to RDMA atomics.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the word is outside the region or misaligned.
    pub fn fetch_add_u64(&self, offset: usize, add: u64) -> Result<u64> {
        Ok(self.word(offset)?.fetch_add(add, Ordering::AcqRel))
    }
}

#[cfg(test)]
#[path = "mr_tests.rs"]
mod tests;
