//! Memory that the RNIC and peers may touch, owned by its registration.
//!
//! Invariant of the `unsafe`: a [`MemoryRegion`] owns its pages. They are unmapped only after deregistration has
//! returned, and from then on nothing accesses them. A peer may write them at any time before, so no reference to
//! them is ever formed: octets are copied in and out through raw pointers, words through atomics.

use super::ProtectionDomain;
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
    /// Tagged offset of the first octet: what elements and peers call its address.
    base: u64,
    origin: Origin,
    mapping: ManuallyDrop<Mapping>,
}

impl RegionInner {
    fn register(pd: &ProtectionDomain, len: usize, access: Access) -> Result<Self> {
        let mapping = Mapping::new(len).map_err(|_| Error::OutOfMemory)?;
        let (addr, ctx) = (mapping.addr(), pd.context());
        // SAFETY: the mapping is ours alone, lives until after `deregister` in `Drop`, and no reference into it is formed.
        let stag = unsafe { ctx.register(addr, len as u64, addr, pd.number(), access) }?;
        Ok(Self {
            ctx: ctx.clone(),
            pd: pd.number(),
            stag,
            access,
            base: match access.contains(Access::ZERO_BASED) {
                true => 0,
                false => addr,
            },
            origin: Origin::here(),
            mapping: ManuallyDrop::new(mapping),
        })
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        if self.origin.is_foreign() {
            // A forked child: the table's lock may be held by a thread that does not exist here, and the entry stays, so the
            // pages stay, too. They are a copy, which ends with this process.
            return;
        }
        // `deregister` returns when no access is in progress, so the pages may go after it.
        match self.ctx.deregister(self.stag) {
            // The program has ended the registration by its key: then nothing accesses the pages, either.
            Ok(()) | Err(Error::Memory(MemoryError::NoSuchStag)) => {
                // SAFETY: it is dropped here alone, and nothing accesses the pages any more.
                unsafe { ManuallyDrop::drop(&mut self.mapping) }
            }
            // A window is still bound to the region, so a peer may still reach the pages: they have to stay.
            Err(e) => tracing::warn!("memory is never freed, deallocate windows first: {e}"),
        }
    }
}

/// Registered memory. A clone names the same memory; dropping the last clone deregisters and frees it. While memory windows
/// are bound to it, it cannot be deregistered, and its pages are never freed: deallocate windows first. In a forked child,
/// dropping what the parent has registered does nothing.
///
/// Work requests name it by key. If the memory goes while a request is outstanding, the request fails with
/// [`WcStatus::LocalProtection`](super::WcStatus::LocalProtection). If a peer accesses it afterwards, the peer's
/// connection ends. In neither case is freed memory touched.
#[derive(Debug, Clone)]
pub struct MemoryRegion {
    inner: Arc<RegionInner>,
}

/// A peer's memory, as the peer has advertised it: the target of RDMA Writes, Reads and atomics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteMemory {
    /// Tagged offset of the first octet.
    pub addr: u64,
    /// Length in octets.
    pub len: u64,
    /// The peer's STag.
    pub rkey: u32,
}

impl RemoteMemory {
    /// Length of [`to_bytes`](Self::to_bytes) in octets.
    pub const ENCODED_LEN: usize = 20;

    /// Encodes address, length and key in big-endian order. The result is small enough for private data.
    pub fn to_bytes(self) -> [u8; Self::ENCODED_LEN] {
        let mut out = [0; Self::ENCODED_LEN];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..16].copy_from_slice(&self.len.to_be_bytes());
        out[16..].copy_from_slice(&self.rkey.to_be_bytes());
        out
    }

    /// Decodes the result of [`to_bytes`](Self::to_bytes). Returns `None` if there are too few octets.
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

    /// Returns a part of it, or `None` if the part is not inside.
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
    pub(super) fn register(pd: &ProtectionDomain, len: usize, access: Access) -> Result<Self> {
        let inner = Arc::new(RegionInner::register(pd, len, access)?);
        Ok(Self { inner })
    }

    /// Returns its length in octets.
    pub fn len(&self) -> usize {
        self.inner.mapping.len()
    }

    /// Returns `true` if it has no octets.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the rights it was registered with.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// Returns its key for local use.
    pub fn lkey(&self) -> u32 {
        self.inner.stag
    }

    /// Returns what a peer has to know to access it. What the peer may do is decided by the region's rights.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.inner.base,
            len: self.len() as u64,
            rkey: self.inner.stag,
        }
    }

    /// Makes a scatter/gather element for a part of it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the range is outside the region. [`Error::Post`]: it has 4 GiB or more.
    pub fn sge(&self, range: impl RangeBounds<usize>) -> Result<Sge> {
        let (start, len) = self.resolve(range)?;
        // The error that a queue pair gives for a length that fits in an element and is too long for a message.
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

    /// Returns `true` if it was registered in this protection domain. Domains of one device have different numbers.
    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.inner.pd == pd.number() && self.inner.ctx.is_same(pd.context())
    }

    /// Returns `true` if both handles name the same memory.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns `true` if no other handle names this memory, which is then this handle's alone while it is borrowed.
    pub(crate) fn is_only_handle(&mut self) -> bool {
        Arc::get_mut(&mut self.inner).is_some()
    }

    /// Returns where `len` octets at `offset` lie. The address stays valid as long as a handle to the memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region.
    pub(crate) fn pointer(&self, offset: usize, len: usize) -> Result<*mut u8> {
        let (start, _) = self.resolve(offset..offset.saturating_add(len))?;
        // SAFETY: inside the mapping, or one past its end for an empty range.
        Ok(unsafe { self.inner.mapping.as_ptr().add(start) })
    }

    /// Copies octets out. If a peer or the RNIC writes them at the same time, the result is a mix of old and new octets.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let from = self.pointer(offset, out.len())?;
        // SAFETY: valid mapped memory of that length; `out` is not part of it, since no references into it exist.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies octets in.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region.
    pub fn write_at(&self, offset: usize, octets: &[u8]) -> Result<()> {
        let to = self.pointer(offset, octets.len())?;
        // SAFETY: as in `read_at`.
        unsafe { std::ptr::copy_nonoverlapping(octets.as_ptr(), to, octets.len()) };
        Ok(())
    }

    /// Copies octets out into a new vector.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region.
    pub fn to_vec(&self, range: impl RangeBounds<usize>) -> Result<Vec<u8>> {
        let (start, len) = self.resolve(range)?;
        let mut out = vec![0; len];
        self.read_at(start, &mut out)?;
        Ok(out)
    }

    /// Loads one octet, with acquire ordering: what a peer's RDMA Write placed before this octet is visible afterwards.
    /// Programs that wait for a Write without a message poll its last octet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region.
    #[inline]
    pub fn load_u8(&self, offset: usize) -> Result<u8> {
        let at = self.pointer(offset, 1)?;
        // SAFETY: one valid octet, accessed atomically.
        Ok(unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Acquire))
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let at = self.pointer(offset, 8)?;
        if !(at as usize).is_multiple_of(8) {
            return Err(Error::InvalidArgument("a word starts at a multiple of 8"));
        }
        // SAFETY: eight valid aligned octets that live as long as `self`; an atomic may be shared with anybody.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    /// Loads the word at `offset`, a multiple of 8, in this machine's byte order. Atomic with respect to RDMA atomics.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region or misaligned.
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores the word at `offset`, a multiple of 8, in this machine's byte order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region or misaligned.
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Adds to the word at `offset`, a multiple of 8, and returns the old value. Atomic with respect to RDMA atomics.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: outside the region or misaligned.
    pub fn fetch_add_u64(&self, offset: usize, add: u64) -> Result<u64> {
        Ok(self.word(offset)?.fetch_add(add, Ordering::AcqRel))
    }
}

#[cfg(test)]
#[path = "mr_tests.rs"]
mod tests;
