//! On-demand memory: regions whose pages may be missing at any time (`IBV_ACCESS_ON_DEMAND`), and
//! copies to and from memory by STag.
//!
//! The RNIC never accesses this memory directly, because a missing page would kill the process. The
//! environment copies it by means of a [`Pager`], which reports missing pages. Payload of an
//! on-demand region is therefore always copied: no plan refers to it, and the stream is never read
//! directly into it. To keep per-region checks off the common path, the same applies to all memory
//! of a table that contains an on-demand region ([`MemoryTable::has_on_demand`]).
//!
//! Invariant: as promised by its creator, a pager's functions access only the memory that their
//! arguments specify.
#![allow(unsafe_code)]

use super::access::{Accessor, Miss};
use super::entry::Entry;
use super::span::{Memory, Span};
use super::table::MemoryTable;
use super::{AccessError, MemoryError};
use crate::Access;
use iwarp_proto::ddp::Stag;

/// Copies bytes at this address to private memory. Returns `false` if some of them could not be
/// read.
pub type ReadFn = fn(from: u64, to: &mut [u8]) -> bool;
/// Copies bytes to this address, the last byte after all others. Returns `false` if some could not
/// be written; the others may have been written.
pub type WriteFn = fn(to: u64, from: &[u8]) -> bool;
/// Replaces the aligned word at this address by `new` if it equals `old`. Returns the previous
/// value, or `None` if the word could not be accessed.
pub type ExchangeFn = fn(at: u64, old: u64, new: u64) -> Option<u64>;

/// Functions that access memory whose pages may be missing.
#[derive(Debug, Clone, Copy)]
pub struct Pager {
    read: ReadFn,
    write: WriteFn,
    exchange: ExchangeFn,
}

impl Pager {
    /// Creates a pager. `exchange` must be atomic with respect to all processors.
    ///
    /// # Safety
    /// Each function accesses only the memory that its arguments specify. If a page is missing or
    /// does not allow the access, it returns `false` or `None` and has no other effect, even if
    /// other threads map and unmap memory meanwhile.
    pub const unsafe fn new(read: ReadFn, write: WriteFn, exchange: ExchangeFn) -> Self {
        Self {
            read,
            write,
            exchange,
        }
    }

    /// Replaces a word by the result of `f` and returns the old value; `None` if the page is
    /// missing.
    fn update(&self, at: u64, mut f: impl FnMut(u64) -> u64) -> Option<u64> {
        let mut octets = [0; 8];
        if !(self.read)(at, &mut octets) {
            return None;
        }
        let mut old = u64::from_ne_bytes(octets);
        // If the exchange fails, another processor has made progress, so the loop is lock-free.
        loop {
            let found = (self.exchange)(at, old, f(old))?;
            if found == old {
                return Some(old);
            }
            old = found;
        }
    }
}

/// The result of checking a counted access.
pub(super) enum Checked<'t, M: Memory> {
    /// Memory that stays mapped.
    Mapped(Span<'t, M>),
    /// Memory whose pages may be missing.
    OnDemand(&'static Pager, Span<'t, M>),
}

impl<'t, M: Memory> Checked<'t, M> {
    /// Returns mapped memory; fails for other memory.
    pub(super) fn mapped(self) -> Result<Span<'t, M>, AccessError> {
        match self {
            Self::Mapped(span) => Ok(span),
            Self::OnDemand(..) => Err(AccessError::NotMapped),
        }
    }

    fn read(&self, to: &mut [u8]) -> bool {
        match self {
            Self::Mapped(span) => span.read(to),
            Self::OnDemand(pager, span) => span.address().is_some_and(|at| (pager.read)(at, to)),
        }
    }

    fn write(&self, from: &[u8]) -> bool {
        match self {
            Self::Mapped(span) => span.write_last_octet_last(from),
            Self::OnDemand(pager, span) => span.address().is_some_and(|at| (pager.write)(at, from)),
        }
    }

    /// Like [`MemoryTable::update_word`].
    fn update(&self, f: impl FnMut(u64) -> u64) -> Result<Option<u64>, AccessError> {
        match self {
            Self::Mapped(span) => match span.word() {
                Some(word) => word.update(f).map(Some).ok_or(AccessError::NotMapped),
                None => Ok(None),
            },
            Self::OnDemand(pager, span) => {
                let at = span.address().ok_or(AccessError::NotMapped)?;
                if !at.is_multiple_of(8) {
                    return Ok(None);
                }
                let old = pager.update(at, f).ok_or(AccessError::NotMapped)?;
                Ok(Some(old))
            }
        }
    }
}

#[inline(always)]
const fn copy_result(mapped: bool) -> Result<(), AccessError> {
    match mapped {
        true => Ok(()),
        false => Err(AccessError::NotMapped),
    }
}

impl<M: Memory> MemoryTable<M> {
    /// Registers memory like [`register`](Self::register), but its pages may be missing. The range
    /// may contain holes, and may cover the entire address space. Accesses to unmapped parts fail.
    ///
    /// Fails with [`OutOfRange`](MemoryError::OutOfRange) for memory that has no addresses.
    pub fn register_on_demand(
        &mut self,
        (memory, pager): (M, &'static Pager),
        iova: u64,
        pd: u32,
        access: Access,
        random: u32,
    ) -> Result<Stag, MemoryError> {
        if M::address(memory.place(0)).is_none() {
            return Err(MemoryError::OutOfRange);
        }
        let stag = self.register(memory, iova, pd, access, random)?;
        if let Some(entry) = self.entry_mut(stag) {
            entry.set_on_demand(pager);
            self.on_demand = self.on_demand.wrapping_add(1);
        }
        Ok(stag)
    }

    /// Returns `true` if the pages of any region may be missing. If so, all payload has to be
    /// copied.
    #[inline]
    pub const fn has_on_demand(&self) -> bool {
        self.on_demand != 0
    }

    /// Copies the `len` bytes of the range to the beginning of `out`.
    ///
    /// # Errors
    /// Returns why the access was refused. Part of `out` may have been written.
    pub fn read(
        &self,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        accessor: Accessor,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        match self.check_uncounted((stag, to, len), need, accessor) {
            Ok(span) => copy_result(span.read(out)),
            Err(Miss::NeedsCount) => {
                let (checked, _hold) = self.check_counted(stag, to, len, need, accessor)?;
                copy_result(checked.read(out))
            }
            Err(Miss::Refused(e)) => Err(e),
        }
    }

    /// Copies bytes to a tagged offset of registered memory. The last byte becomes visible after
    /// all others.
    ///
    /// # Errors
    /// Returns why the access was refused. Only if a page was missing, part may have been written.
    #[inline(always)]
    pub fn write(
        &self,
        (stag, to): (Stag, u64),
        need: Access,
        accessor: Accessor,
        from: &[u8],
    ) -> Result<(), AccessError> {
        match self.check_uncounted((stag, to, from.len() as u32), need, accessor) {
            Ok(span) => copy_result(span.write_last_octet_last(from)),
            Err(Miss::NeedsCount) => self.write_counted(stag, to, need, accessor, from),
            Err(Miss::Refused(e)) => Err(e),
        }
    }

    #[cold]
    #[inline(never)]
    fn write_counted(
        &self,
        stag: Stag,
        to: u64,
        need: Access,
        accessor: Accessor,
        from: &[u8],
    ) -> Result<(), AccessError> {
        let len = from.len() as u32;
        let (checked, _hold) = self.check_counted(stag, to, len, need, accessor)?;
        copy_result(checked.write(from))
    }

    /// Replaces the word at a tagged offset by the result of `f`, for an atomic operation of the
    /// peer. Returns the old value, or `None` (and changes nothing) if the word is not aligned.
    pub(crate) fn update_word(
        &self,
        (stag, to): (Stag, u64),
        accessor: Accessor,
        f: impl FnMut(u64) -> u64,
    ) -> Result<Option<u64>, AccessError> {
        let need = Access::REMOTE_ATOMIC;
        match self.check_uncounted((stag, to, 8), need, accessor) {
            Ok(span) => Checked::Mapped(span).update(f),
            Err(Miss::NeedsCount) => {
                let (checked, _hold) = self.check_counted(stag, to, 8, need, accessor)?;
                // The sink of a null region holds data that others wrote, so it must never be read.
                if self.entry(stag).is_some_and(Entry::is_null) {
                    return Ok(to.is_multiple_of(8).then_some(0));
                }
                checked.update(f)
            }
            Err(Miss::Refused(e)) => Err(e),
        }
    }
}
