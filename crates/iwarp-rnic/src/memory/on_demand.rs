//! On-demand memory: regions whose pages may be missing at any time (`IBV_ACCESS_ON_DEMAND`), and
//! copies to and from memory by STag.
//!
//! The RNIC never touches such memory directly, because a missing page would kill the process. The
//! environment copies it by means of a [`Pager`], which reports missing pages. Payload of such a
//! region is therefore always copied: no plan refers to it, and the stream is never read directly
//! into it. To keep per-region checks off the common path, this applies to all memory of a table
//! that has such a region ([`MemoryTable::has_on_demand`]).
//!
//! Invariant: as promised by its creator, a pager's functions access only the memory they are asked
//! to.
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
/// Copies bytes to this address, the last one last. Returns `false` if some could not be written;
/// others may have been.
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
    /// Takes the three functions. `exchange` is atomic with respect to all processors.
    ///
    /// # Safety
    /// Each function accesses only the memory it is asked to. If a page is missing or does not
    /// allow the access, it returns `false` or `None` without further harm, even if other threads
    /// map and unmap memory meanwhile.
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
        // This loop ends: a failed exchange means that another processor made progress.
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
pub(super) enum Reached<'t, M: Memory> {
    /// Memory that is mapped.
    Here(Span<'t, M>),
    /// Memory whose pages may be missing.
    OnDemand(&'static Pager, Span<'t, M>),
}

impl<'t, M: Memory> Reached<'t, M> {
    /// Returns mapped memory; fails for other memory.
    pub(super) fn here(self) -> Result<Span<'t, M>, AccessError> {
        match self {
            Self::Here(span) => Ok(span),
            Self::OnDemand(..) => Err(AccessError::NotMapped),
        }
    }

    fn read(&self, to: &mut [u8]) -> bool {
        match self {
            Self::Here(span) => span.read(to),
            Self::OnDemand(pager, span) => span.address().is_some_and(|at| (pager.read)(at, to)),
        }
    }

    fn write(&self, from: &[u8]) -> bool {
        match self {
            Self::Here(span) => span.write_last_octet_last(from),
            Self::OnDemand(pager, span) => span.address().is_some_and(|at| (pager.write)(at, from)),
        }
    }

    /// Like [`MemoryTable::update_word`].
    fn update(&self, f: impl FnMut(u64) -> u64) -> Result<Option<u64>, AccessError> {
        match self {
            Self::Here(span) => match span.word() {
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
const fn all(mapped: bool) -> Result<(), AccessError> {
    match mapped {
        true => Ok(()),
        false => Err(AccessError::NotMapped),
    }
}

impl<M: Memory> MemoryTable<M> {
    /// Registers memory whose pages may be missing; otherwise like [`register`](Self::register).
    /// The range may have holes, and may cover the whole address space. Accesses to unmapped parts
    /// fail when they are made.
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

    /// Returns `true` if the pages of some region may be missing. All payload has to be copied
    /// then.
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
            Ok(span) => all(span.read(out)),
            Err(Miss::Counted) => {
                let (reached, _hold) = self.check_counted(stag, to, len, need, accessor)?;
                all(reached.read(out))
            }
            Err(Miss::Refused(e)) => Err(e),
        }
    }

    /// Copies bytes to a tagged offset of registered memory. The last one becomes visible last.
    ///
    /// # Errors
    /// Returns why the access was refused. Nothing was written, unless a page was missing.
    #[inline(always)]
    pub fn write(
        &self,
        (stag, to): (Stag, u64),
        need: Access,
        accessor: Accessor,
        from: &[u8],
    ) -> Result<(), AccessError> {
        match self.check_uncounted((stag, to, from.len() as u32), need, accessor) {
            Ok(span) => all(span.write_last_octet_last(from)),
            Err(Miss::Counted) => self.write_counted(stag, to, need, accessor, from),
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
        let (reached, _hold) = self.check_counted(stag, to, len, need, accessor)?;
        all(reached.write(from))
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
            Ok(span) => Reached::Here(span).update(f),
            Err(Miss::Counted) => {
                let (reached, _hold) = self.check_counted(stag, to, 8, need, accessor)?;
                // The sink of a null region holds what others wrote: it must never be read.
                if self.entry(stag).is_some_and(Entry::is_null) {
                    return Ok(to.is_multiple_of(8).then_some(0));
                }
                reached.update(f)
            }
            Err(Miss::Refused(e)) => Err(e),
        }
    }
}
