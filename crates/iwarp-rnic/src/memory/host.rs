//! Memory of a process: one range of addresses.
//!
//! Invariant: the creator of a [`HostRange`] has promised that its bytes stay readable and writable
//! for as long as the range is in a [`MemoryTable`](super::MemoryTable).
#![allow(unsafe_code)]

use super::span::{Fragment, Memory};
use core::ptr;

/// A memory range of this process that can be registered. The default range is empty.
#[derive(Debug, Default)]
pub struct HostRange {
    addr: u64,
    len: u64,
}

impl HostRange {
    /// Describes `len` bytes at address `addr` of this process.
    ///
    /// Returns `None` if the range wraps around the address space. Address 0 with length 2^64 - 1
    /// covers the entire address space.
    ///
    /// # Safety
    /// Until the range is removed from every table it was added to, all its bytes that are accessed
    /// must stay mapped readable, and writable if registered with a right to write. No Rust
    /// reference to them may exist while the RNIC or a peer can access them.
    pub const unsafe fn new(addr: u64, len: u64) -> Option<Self> {
        match addr.checked_add(len) {
            Some(end) if end <= usize::MAX as u64 => Some(Self { addr, len }),
            _ => None,
        }
    }

    /// Returns the first address.
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns `true` if the length is zero.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

// SAFETY: a range is one fragment, which its creator has promised to keep mapped.
unsafe impl Memory for HostRange {
    type Place = u64;

    const NOWHERE: u64 = 8;

    #[inline]
    fn len(&self) -> u64 {
        self.len
    }

    #[inline]
    fn place(&self, offset: u64) -> u64 {
        self.addr.wrapping_add(offset)
    }

    #[inline]
    fn after(place: u64, count: u32) -> u64 {
        place.wrapping_add(u64::from(count))
    }

    fn address(place: u64) -> Option<u64> {
        Some(place)
    }

    #[inline]
    unsafe fn fragment<'t>(place: u64, len: u32) -> Fragment<'t> {
        let at = ptr::with_exposed_provenance_mut(place as usize);
        // SAFETY: guaranteed by the caller: the bytes are inside the range.
        unsafe { Fragment::new(at, len as usize) }
    }

    // SAFETY: like the provided methods, limited to the bytes before the unmapped ones.
    #[cfg(test)]
    unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) -> bool {
        let mapped = unmapped::before(from, len);
        // SAFETY: guaranteed by the caller; tests run on one thread.
        unsafe { to.copy_from_nonoverlapping(from, mapped) };
        mapped == len
    }

    #[cfg(test)]
    unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) -> bool {
        let mapped = unmapped::before(to, len);
        // SAFETY: as above.
        unsafe { to.copy_from_nonoverlapping(from, mapped) };
        mapped == len
    }

    #[cfg(test)]
    unsafe fn store_octet(at: *mut u8, octet: u8) -> bool {
        // SAFETY: as above.
        unsafe { Self::copy_in(&raw const octet, at, 1) }
    }

    #[cfg(test)]
    unsafe fn store_word(at: *mut u64, word: u64) -> bool {
        // SAFETY: as above.
        unsafe { Self::copy_in((&raw const word).cast(), at.cast(), 8) }
    }

    #[cfg(test)]
    unsafe fn exchange(at: *mut u64, old: u64, new: u64) -> Option<u64> {
        if unmapped::before(at.cast(), 8) < 8 {
            return None;
        }
        // SAFETY: as above.
        let found = unsafe { at.read() };
        if found == old {
            // SAFETY: as above.
            unsafe { at.write(new) };
        }
        Some(found)
    }
}

/// Simulates memory that a program unmaps while it is registered: it stays mapped, but copies fail.
#[cfg(test)]
pub(crate) mod unmapped {
    use core::cell::Cell;

    std::thread_local! {
        static UNMAPPED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    }

    /// Makes accesses to `len` bytes at `at` fail. Earlier calls have no effect any more.
    pub(crate) fn unmap(at: u64, len: u64) {
        UNMAPPED.set((at, at + len));
    }

    /// Returns how many of these bytes lie before the unmapped ones.
    pub(crate) fn before(at: *const u8, len: usize) -> usize {
        let ((start, end), at) = (UNMAPPED.get(), at.addr() as u64);
        match at < end {
            true => len.min(start.saturating_sub(at) as usize),
            false => len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Span;
    use super::*;

    #[test]
    fn spans_stay_inside_range() {
        let mut mem = [0xaau8; 32];
        // SAFETY: `mem` outlives the range, and only the range accesses it until the end.
        let range = unsafe { HostRange::new(mem.as_mut_ptr() as u64, 32) }.unwrap();
        assert!((range.len(), range.is_empty()) == (32, false));
        assert!(HostRange::default().is_empty());
        assert!(Fragment::of(&[]).is_empty() && !Fragment::of(&[1]).is_empty());
        assert!(Span::new(&range, 0, 33).is_none());
        assert!(Span::new(&range, u64::MAX, 2).is_none());
        assert!(Span::new(&range, 32, 0).is_some());
        let span = Span::new(&range, 8, 8).unwrap();
        assert!(span.write_last_octet_last(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
        let mut copy = [0; 10];
        assert!(Span::new(&range, 7, 10).unwrap().read(&mut copy));
        assert_eq!(copy, [0xaa, 1, 2, 3, 4, 5, 6, 7, 8, 0xaa]);
        let (a, b) = span.split_at(3);
        assert_eq!((a.len(), b.len()), (3, 5));
        let at = |s: Span<'_, HostRange>| s.fragments().next().unwrap().as_ptr() as u64;
        assert_eq!(at(b) - at(a), 3);
        assert!(b.word().is_none());
    }

    #[test]
    fn range_must_not_wrap() {
        // SAFETY: the range is never registered.
        assert!(unsafe { HostRange::new(u64::MAX - 3, 8) }.is_none());
    }
}
