//! On-demand memory: regions whose pages may be missing at any time (`IBV_ACCESS_ON_DEMAND`), and copies to and from memory by STag.
//!
//! The RNIC never touches such memory itself, because a missing page would end the process. The surroundings copy
//! for it by a [`Pager`], which answers whether the pages were there. So octets of such a region are always copied: no plan
//! refers to them, and nothing is read from the stream straight into them. To keep the usual way free of questions about single regions, that holds for all memory of a
//! table that has such a region ([`MemoryTable::has_on_demand`]).
//!
//! Invariant: the functions of a pager access no other memory than they are asked to, as their giver has promised.
#![allow(unsafe_code)]

use super::access::{Accessor, Miss};
use super::span::{Memory, Span};
use super::table::MemoryTable;
use super::{AccessError, MemoryError};
use crate::Access;
use iwarp_proto::ddp::Stag;

/// Copies octets at this address to memory of our own. Returns `false` if not all of them could be read.
pub type ReadFn = fn(from: u64, to: &mut [u8]) -> bool;
/// Copies octets to this address, the last one last. Returns `false` if not all of them could be written; then some of the first may be.
pub type WriteFn = fn(to: u64, from: &[u8]) -> bool;
/// Replaces the aligned word at this address by the second value if it has the first. Returns what it had, or `None` if it could not be
/// accessed.
pub type ExchangeFn = fn(at: u64, old: u64, new: u64) -> Option<u64>;

/// How memory is accessed whose pages may be missing.
#[derive(Debug, Clone, Copy)]
pub struct Pager {
    read: ReadFn,
    write: WriteFn,
    exchange: ExchangeFn,
}

impl Pager {
    /// Takes the three functions. `exchange` is atomic with respect to every processor.
    ///
    /// # Safety
    /// Each of them accesses the octets it is asked to and no others. It returns `false` or `None`, and nothing worse happens, if a page is missing or
    /// does not allow the access, also if other threads map and unmap memory meanwhile.
    pub const unsafe fn new(read: ReadFn, write: WriteFn, exchange: ExchangeFn) -> Self {
        Self {
            read,
            write,
            exchange,
        }
    }

    /// Replaces a word by the result of `f`, and returns the old value; `None` if the page is missing.
    fn update(&self, at: u64, mut f: impl FnMut(u64) -> u64) -> Option<u64> {
        let mut octets = [0; 8];
        if !(self.read)(at, &mut octets) {
            return None;
        }
        let mut old = u64::from_ne_bytes(octets);
        // The loop ends: a failed exchange means that another processor made progress.
        loop {
            let found = (self.exchange)(at, old, f(old))?;
            if found == old {
                return Some(old);
            }
            old = found;
        }
    }
}

/// Memory that a counted access may use.
pub(super) enum Reached<'t, M: Memory> {
    /// It is there.
    Here(Span<'t, M>),
    /// Its pages may be missing.
    OnDemand(&'static Pager, Span<'t, M>),
}

impl<'t, M: Memory> Reached<'t, M> {
    /// Returns memory that is there; an error for other memory.
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

    /// As [`MemoryTable::update_word`].
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

/// Turns the answer of a copy into a result.
#[inline(always)]
const fn all(mapped: bool) -> Result<(), AccessError> {
    match mapped {
        true => Ok(()),
        false => Err(AccessError::NotMapped),
    }
}

impl<M: Memory> MemoryTable<M> {
    /// Registers memory whose pages may be missing, as [`register`](Self::register) registers other memory. The range may have holes, and may be all
    /// addresses. An access to what is not mapped is refused when it happens.
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
            entry.be_on_demand(pager);
            self.on_demand = self.on_demand.wrapping_add(1);
        }
        Ok(stag)
    }

    /// Returns `true` if a region's pages may be missing. Then all payload has to be copied.
    #[inline]
    pub const fn has_on_demand(&self) -> bool {
        self.on_demand != 0
    }

    /// Copies octets of registered memory, as many as the range has, to as many of `out`.
    ///
    /// # Errors
    /// Why the access is refused. Some of `out` may have been written.
    pub fn read(
        &self,
        (stag, to, len): (Stag, u64, u32),
        need: Access,
        who: Accessor,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        match self.check_uncounted((stag, to, len), need, who) {
            Ok(span) => all(span.read(out)),
            Err(Miss::Counted) => {
                let (reached, _hold) = self.check_counted(stag, to, len, need, who)?;
                all(reached.read(out))
            }
            Err(Miss::Refused(e)) => Err(e),
        }
    }

    /// Copies octets to a tagged offset of registered memory. The last one becomes visible last.
    ///
    /// # Errors
    /// Why the access is refused. Only if that is a page that is missing may some octets have been written.
    #[inline(always)]
    pub fn write(
        &self,
        (stag, to): (Stag, u64),
        need: Access,
        who: Accessor,
        from: &[u8],
    ) -> Result<(), AccessError> {
        match self.check_uncounted((stag, to, from.len() as u32), need, who) {
            Ok(span) => all(span.write_last_octet_last(from)),
            Err(Miss::Counted) => self.write_counted(stag, to, need, who, from),
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
        who: Accessor,
        from: &[u8],
    ) -> Result<(), AccessError> {
        let len = from.len() as u32;
        let (reached, _hold) = self.check_counted(stag, to, len, need, who)?;
        all(reached.write(from))
    }

    /// Replaces the word at a tagged offset by the result of `f`, for an atomic operation of the peer. Returns the old value, or `None` if the
    /// word is not aligned; then nothing is changed.
    pub(crate) fn update_word(
        &self,
        (stag, to): (Stag, u64),
        who: Accessor,
        f: impl FnMut(u64) -> u64,
    ) -> Result<Option<u64>, AccessError> {
        let need = Access::REMOTE_ATOMIC;
        match self.check_uncounted((stag, to, 8), need, who) {
            Ok(span) => Reached::Here(span).update(f),
            Err(Miss::Counted) => {
                let (reached, _hold) = self.check_counted(stag, to, 8, need, who)?;
                reached.update(f)
            }
            Err(Miss::Refused(e)) => Err(e),
        }
    }
}
