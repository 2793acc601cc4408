//! Registered memory of typed elements, whole or in parts, reference-counted.
//!
//! Elements are plain data: every bit pattern is a valid value, because a peer may write any. They
//! are copied in and out, so no reference to memory exists that a peer or the RNIC may write. The
//! calls that return references are in `exclusive.rs`, and those that map memory in `mapped.rs`.

use super::remote::RemoteRegion;
use crate::error::{Error, Result};
use crate::failure::{MapError, Refusal};
use crate::verbs::{Elements, MemoryRegion, Pages, ProtectionDomain, WriteAccess, Writing, bounds};
use bytemuck::Pod;
use iwarp_rnic::{Access, Sge};
use std::marker::PhantomData;
use std::ops::RangeBounds;

pub(crate) const REMOTE: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);

/// Registered memory of elements `T`, or a part of it. A clone or a [slice](Self::slice) refers to
/// the same memory, which is freed when the last of them and the last request that uses it are
/// gone.
///
/// A local region is only the source or destination of requests. A [shared](super::Endpoint::share)
/// one can also be accessed by peers at any time: treat its contents as input from the network.
///
/// Elements are copied out of and into a region. [`view`](Self::view) and
/// [`get_mut`](Self::get_mut) return references if no one else can write the memory.
///
/// Elements may be structures of the program. With the feature `derive`, bytemuck's macros check
/// that every bit pattern is valid and that there is no padding:
///
/// ```
/// # #[cfg(feature = "derive")]
/// # fn main() -> iwarp::Result<()> {
/// use iwarp::bytemuck::{Pod, Zeroable};
///
/// #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
/// #[bytemuck(crate = "iwarp::bytemuck")]
/// #[repr(C)]
/// struct Record {
///     key: u64,
///     name: [u8; 24], // arrays of any length
/// }
///
/// let endpoint = iwarp::Endpoint::local([127, 0, 0, 1].into())?;
/// let table = endpoint.share::<Record>(1000, iwarp::Access::REMOTE_READ)?;
/// let record = Record { key: 7, name: *b"the record with number 7" };
/// table.set(7, record)?;
/// assert_eq!(table.get(7)?, record);
/// assert_eq!(table.remote().at(7)?.octets(), 32);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "derive"))]
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct Region<T> {
    pub(super) memory: MemoryRegion,
    /// Offset of the part in bytes.
    pub(super) at: usize,
    /// Length of the part in elements.
    pub(super) len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T> Clone for Region<T> {
    fn clone(&self) -> Self {
        Self {
            memory: self.memory.clone(),
            at: self.at,
            len: self.len,
            elements: PhantomData,
        }
    }
}

impl<T> From<&Self> for Region<T> {
    fn from(region: &Self) -> Self {
        region.clone()
    }
}

/// Resolves a range; returns its first element and its length.
pub(super) fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<(usize, usize)> {
    let (start, end) = bounds(range, len);
    if start > end || end > len {
        return Err(Error::Refused(Refusal::OutOfRange {
            end: end.max(start) as u64,
            len: len as u64,
        }));
    }
    Ok((start, end - start))
}

impl<T: Pod> Region<T> {
    pub(super) fn allocate(pd: &ProtectionDomain, len: usize, shared: Access) -> Result<Self> {
        let access = Self::access(shared)?;
        let octets = len
            .checked_mul(size_of::<T>())
            .ok_or(Error::InvalidArgument("the region is too long"))?;
        let memory = pd.reg_mr(octets, access)?;
        Ok(Self::part(memory, 0, len))
    }

    pub(super) fn adopt(pd: &ProtectionDomain, elements: Vec<T>, shared: Access) -> Result<Self>
    where
        T: Send,
    {
        let access = Self::access(shared)?;
        let len = elements.len();
        let pages = Pages::Elements(Elements::new(elements));
        Self::of_pages(pd, pages, len, access)
    }

    /// Registers pages of `len` elements with the rights of [`access`](Self::access).
    pub(super) fn of_pages(
        pd: &ProtectionDomain,
        pages: Pages,
        len: usize,
        access: Access,
    ) -> Result<Self> {
        let memory = MemoryRegion::of_pages(pd, pages, access)?;
        Ok(Self::part(memory, 0, len))
    }

    /// Returns the rights of a region that is shared with these.
    pub(super) fn access(shared: Access) -> Result<Access> {
        if !REMOTE.contains(shared) {
            return Err(Error::InvalidArgument(
                "a region is shared with remote rights only",
            ));
        }
        if size_of::<T>() == 0 {
            return Err(Error::InvalidArgument("elements have at least one octet"));
        }
        Ok(Access::LOCAL_WRITE | Access::MW_BIND | shared)
    }

    /// Returns `len` elements at byte offset `at`, which the caller has checked.
    pub(super) const fn part(memory: MemoryRegion, at: usize, len: usize) -> Self {
        Self {
            memory,
            at,
            len,
            elements: PhantomData,
        }
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if it has no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the length in bytes.
    pub const fn octets(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the rights of peers.
    pub fn shared(&self) -> Access {
        self.memory.access() & REMOTE
    }

    /// Returns a range of its elements.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, len) = resolve(range, self.len)?;
        let at = self.at + start * size_of::<T>();
        Ok(Self::part(self.memory.clone(), at, len))
    }

    /// Returns the same memory as bytes.
    pub fn bytes(&self) -> Region<u8> {
        Region::part(self.memory.clone(), self.at, self.octets())
    }

    /// Returns the token that a peer needs to access it, with the rights of
    /// [`shared`](Self::shared).
    pub fn remote(&self) -> RemoteRegion<T> {
        let there = self.memory.remote();
        let addr = there.addr + self.at as u64;
        RemoteRegion::from_parts(addr, self.octets() as u64, there.rkey, self.shared())
    }

    pub(super) fn sge(&self) -> Result<Sge> {
        self.memory.sge(self.at..self.at + self.octets())
    }

    fn check_writable(&self) -> Result<()> {
        match self.memory.access().contains(Access::LOCAL_WRITE) {
            true => Ok(()),
            false => Err(Error::Map(MapError::ReadOnly)),
        }
    }

    /// Prevents references to the memory while a request or a window may write it. Fails if there
    /// are any.
    pub(super) fn write_access(&self) -> Result<WriteAccess> {
        self.check_writable()?;
        WriteAccess::new(self.memory.clone()).ok_or(Error::Refused(Refusal::Viewed))
    }

    /// Prevents references to the memory during a call that writes it. Fails if there are any.
    #[inline]
    fn writing(&self) -> Result<Writing<'_>> {
        self.check_writable()?;
        self.memory.writing().ok_or(Error::Refused(Refusal::Viewed))
    }

    fn offset(&self, index: usize, count: usize) -> Result<usize> {
        let (start, _) = resolve(index..index.saturating_add(count), self.len)?;
        Ok(self.at + start * size_of::<T>())
    }

    /// Copies elements from `index` on into `out`. If a peer or a request writes them meanwhile,
    /// the result is a mix of old and new bytes.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`]; [`MapError::NoPage`]: it is a truncated file.
    pub fn read_at(&self, index: usize, out: &mut [T]) -> Result<()> {
        let at = self.offset(index, out.len())?;
        self.memory.read_at(at, bytemuck::cast_slice_mut(out))
    }

    /// Copies `elements` into the region, from `index` on.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`]; [`Refusal::Viewed`]; [`MapError::NoPage`] and
    /// [`MapError::ReadOnly`], if it is a file.
    pub fn write_at(&self, index: usize, elements: &[T]) -> Result<()> {
        let at = self.offset(index, elements.len())?;
        let _writing = self.writing()?;
        self.memory.write_at(at, bytemuck::cast_slice(elements))
    }

    /// Copies one element out.
    ///
    /// # Errors
    /// See [`read_at`](Self::read_at).
    pub fn get(&self, index: usize) -> Result<T> {
        let mut one = T::zeroed();
        self.read_at(index, std::slice::from_mut(&mut one))?;
        Ok(one)
    }

    /// Copies one element in.
    ///
    /// # Errors
    /// See [`write_at`](Self::write_at).
    pub fn set(&self, index: usize, element: T) -> Result<()> {
        self.write_at(index, &[element])
    }

    /// Copies all elements into a new vector.
    ///
    /// # Errors
    /// See [`read_at`](Self::read_at).
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut out = vec![T::zeroed(); self.len];
        self.read_at(0, &mut out)?;
        Ok(out)
    }
}

impl Region<u8> {
    /// Loads one byte with acquire ordering: what the peer's RDMA Write placed before it is visible
    /// afterwards.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn load(&self, index: usize) -> Result<u8> {
        self.memory.load_u8(self.offset(index, 1)?)
    }
}

/// Access to words is atomic, also with respect to the peer's
/// [`fetch_add`](super::Connection::fetch_add) and
/// [`compare_swap`](super::Connection::compare_swap).
impl Region<u64> {
    /// Loads a word with acquire ordering.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn load(&self, index: usize) -> Result<u64> {
        self.memory.load_u64(self.offset(index, 1)?)
    }

    /// Stores a word with release ordering.
    ///
    /// # Errors
    /// See [`write_at`](Self::write_at).
    pub fn store(&self, index: usize, value: u64) -> Result<()> {
        let _writing = self.writing()?;
        self.memory.store_u64(self.offset(index, 1)?, value)
    }

    /// Adds to a word, and returns the old value.
    ///
    /// # Errors
    /// See [`write_at`](Self::write_at).
    pub fn fetch_add(&self, index: usize, add: u64) -> Result<u64> {
        let _writing = self.writing()?;
        self.memory.fetch_add_u64(self.offset(index, 1)?, add)
    }
}
