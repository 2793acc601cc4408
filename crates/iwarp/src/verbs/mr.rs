//! Memory that the RNIC and peers may access, owned by its registration.
//!
//! Invariant of the `unsafe` code: a [`MemoryRegion`] owns its pages. They are unmapped only after
//! deregistration has returned, and nothing accesses them from then on. Until then a peer may write
//! them at any time, so no reference to them is ever created: bytes are copied through raw
//! pointers, words are accessed as atomics.
//!
//! Pages of a file may disappear at any time, because the file is truncated. They are accessed only
//! by guarded functions, which then fail.

use super::ProtectionDomain;
use super::borrows::Borrows;
use super::lease::Lease;
use super::pages::Pages;
use crate::error::{Error, Result};
use crate::failure::MapError;
use crate::runtime::Context;
use crate::sys::clock::now_ns;
use crate::sys::fork::Origin;
use crate::sys::guarded::{self, ProcessRange};
use crate::sys::mapping::Mapping;
use iwarp_rnic::memory::{Memory, MemoryError};
use iwarp_rnic::{Access, PostError, Sge};
use std::mem::ManuallyDrop;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

#[derive(Debug)]
pub(super) struct RegionInner {
    ctx: Context,
    pd: u32,
    stag: u32,
    access: Access,
    /// Tagged offset of the first byte: the address in scatter/gather elements and for peers.
    base: u64,
    origin: Origin,
    /// Its pages may disappear, so accesses are guarded.
    is_file: bool,
    borrows: Borrows,
    /// Only of a buffer of a pool.
    lease: Option<Lease>,
    pages: ManuallyDrop<Pages>,
}

impl RegionInner {
    /// Returns a buffer of a pool: `len` bytes at `at` of a registered block.
    pub(super) fn part(block: MemoryRegion, at: usize, len: usize, lease: Lease) -> Self {
        let inner = &block.inner;
        Self {
            ctx: inner.ctx.clone(),
            pd: inner.pd,
            stag: inner.stag,
            access: inner.access,
            base: inner.base + at as u64,
            origin: Origin::current_process(),
            is_file: inner.is_file,
            borrows: Borrows::default(),
            lease: Some(lease),
            pages: ManuallyDrop::new(Pages::Part(block, at, len)),
        }
    }

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
            is_file: pages.is_file(),
            borrows: Borrows::default(),
            lease: None,
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
        if self.lease.is_some() {
            // SAFETY: the pages are dropped only here. They are a handle of the block.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
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
#[derive(Debug)]
pub struct MemoryRegion {
    inner: Arc<RegionInner>,
}

impl Clone for MemoryRegion {
    fn clone(&self) -> Self {
        if let Some(lease) = &self.inner.lease {
            lease.add_handle();
        }
        Self {
            inner: Arc::clone(&self.inner),
        }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        if let Some(lease) = &self.inner.lease
            // In a forked child, the buffer belongs to the parent.
            && !self.inner.origin.is_foreign()
        {
            lease.remove_handle();
        }
    }
}

/// The right to write a region during a call.
#[derive(Debug)]
pub(crate) struct Writing<'a>(Option<&'a Borrows>);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if let Some(borrows) = self.0 {
            borrows.end_write();
        }
    }
}

/// The right to write a region, from the creation of a request until its end: while it exists, no
/// reference to the memory is created.
#[derive(Debug)]
pub(crate) struct WriteAccess(MemoryRegion);

impl WriteAccess {
    /// Returns `None` while references to the memory exist.
    pub(crate) fn new(memory: MemoryRegion) -> Option<Self> {
        match !memory.can_be_referred_to() || memory.inner.borrows.try_write() {
            true => Some(Self(memory)),
            false => None,
        }
    }

    pub(crate) const fn memory(&self) -> &MemoryRegion {
        &self.0
    }
}

impl Clone for WriteAccess {
    fn clone(&self) -> Self {
        let memory = &self.0;
        if memory.can_be_referred_to() && !memory.inner.borrows.try_write() {
            // There are 2^32 others. Without a count, references could be created too early.
            std::process::abort();
        }
        Self(memory.clone())
    }
}

impl Drop for WriteAccess {
    fn drop(&mut self) {
        if self.0.can_be_referred_to() {
            self.0.inner.borrows.end_write();
        }
    }
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

/// Returns the first index of a range and the index after its last one. `len` is the number of all
/// indices; the range may exceed it.
pub(crate) fn bounds(range: impl RangeBounds<usize>, len: usize) -> (usize, usize) {
    let start = match range.start_bound() {
        Bound::Included(s) => *s,
        Bound::Excluded(s) => s.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(e) => e.saturating_add(1),
        Bound::Excluded(e) => *e,
        Bound::Unbounded => len,
    };
    (start, end)
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

    /// Returns the first handle of a buffer of a pool.
    pub(super) fn first_handle(inner: &Arc<RegionInner>) -> Self {
        if let Some(lease) = &inner.lease {
            lease.add_handle();
        }
        Self {
            inner: Arc::clone(inner),
        }
    }

    /// Returns `true` if references to the memory may be created: its pages do not change or
    /// disappear by themselves, and peers have no right to write them. A constant of the memory.
    pub(crate) fn can_be_referred_to(&self) -> bool {
        let remote = Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC);
        !self.inner.is_file && !self.inner.access.intersects(remote)
    }

    /// Returns the right to write the memory for a short time, or `None` while references to it
    /// exist.
    #[inline]
    pub(crate) fn writing(&self) -> Option<Writing<'_>> {
        match self.can_be_referred_to() {
            false => Some(Writing(None)),
            true if self.inner.borrows.try_write() => Some(Writing(Some(&self.inner.borrows))),
            true => None,
        }
    }

    /// Returns the counts of references and writers.
    pub(crate) fn borrows(&self) -> &Borrows {
        &self.inner.borrows
    }

    /// Returns `true` if the memory is that of a file.
    pub(crate) fn is_file(&self) -> bool {
        self.inner.is_file
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
        let (start, end) = bounds(range, self.len());
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
        match &self.inner.lease {
            Some(lease) => lease.has_one_handle(),
            None => Arc::get_mut(&mut self.inner).is_some(),
        }
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
        if self.inner.is_file {
            // SAFETY: as below, except that the pages may have disappeared.
            return unsafe { copy_guarded(from, out.as_mut_ptr(), out.len()) };
        }
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
        if self.inner.is_file {
            self.check_writable()?;
            // SAFETY: as below, except that the pages may have disappeared.
            return unsafe { copy_guarded(octets.as_ptr(), to, octets.len()) };
        }
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
        if self.inner.is_file {
            let mut octet = [0];
            self.read_at(offset, &mut octet)?;
            fence(Ordering::Acquire);
            return Ok(octet[0]);
        }
        // SAFETY: the pointer is to a valid byte, which is only accessed atomically.
        Ok(unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Acquire))
    }

    /// Refuses writes to a file that is mapped read-only.
    fn check_writable(&self) -> Result<()> {
        match self.inner.access.contains(Access::LOCAL_WRITE) {
            true => Ok(()),
            false => Err(Error::Map(MapError::ReadOnly)),
        }
    }

    /// Returns a pointer to a word.
    fn word_pointer(&self, offset: usize) -> Result<*mut u64> {
        let at = self.pointer(offset, 8)?;
        if !(at as usize).is_multiple_of(8) {
            return Err(Error::InvalidArgument("a word starts at a multiple of 8"));
        }
        Ok(at.cast())
    }

    /// Returns a word of pages that cannot disappear.
    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let at = self.word_pointer(offset)?;
        // SAFETY: the eight bytes are valid, aligned, and live as long as `self`. Atomics may be
        // shared.
        Ok(unsafe { AtomicU64::from_ptr(at) })
    }

    /// Loads the word at `offset`, a multiple of 8, in native byte order. Atomic with respect to
    /// RDMA atomics.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the word is outside the region or misaligned.
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        if self.inner.is_file {
            self.word_pointer(offset)?;
            let mut octets = [0; 8];
            // A copy of an aligned word is one load.
            self.read_at(offset, &mut octets)?;
            fence(Ordering::Acquire);
            return Ok(u64::from_ne_bytes(octets));
        }
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores the word at `offset`, a multiple of 8, in native byte order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the word is outside the region or misaligned.
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        if self.inner.is_file {
            self.check_writable()?;
            let at = self.word_pointer(offset)?;
            guarded::keep_regularly(now_ns());
            // SAFETY: the word is aligned, and owned by the region.
            return match unsafe { ProcessRange::store_word(at, value) } {
                true => Ok(()),
                false => Err(Error::Map(MapError::NoPage)),
            };
        }
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Adds to the word at `offset`, a multiple of 8, and returns the old value. Atomic with
    /// respect to RDMA atomics.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the word is outside the region or misaligned.
    pub fn fetch_add_u64(&self, offset: usize, add: u64) -> Result<u64> {
        if !self.inner.is_file {
            return Ok(self.word(offset)?.fetch_add(add, Ordering::AcqRel));
        }
        self.check_writable()?;
        let (mut old, at) = (self.load_u64(offset)?, self.word_pointer(offset)?);
        loop {
            // SAFETY: the word is aligned, and owned by the region.
            match unsafe { ProcessRange::exchange(at, old, old.wrapping_add(add)) } {
                Some(found) if found == old => return Ok(old),
                Some(found) => old = found,
                None => return Err(Error::Map(MapError::NoPage)),
            }
        }
    }
}

/// Copies bytes from or to pages that may have disappeared.
///
/// # Safety
/// As for [`guarded::copy`].
unsafe fn copy_guarded(from: *const u8, to: *mut u8, len: usize) -> Result<()> {
    guarded::keep_regularly(now_ns());
    // SAFETY: guaranteed by the caller.
    match unsafe { guarded::copy(from, to, len) } {
        true => Ok(()),
        false => Err(Error::Map(MapError::NoPage)),
    }
}

#[cfg(test)]
#[path = "mr_tests.rs"]
mod tests;
