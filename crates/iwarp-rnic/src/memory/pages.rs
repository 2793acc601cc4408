//! Memory of a kernel: a list of pages in any order, or a range of addresses.
//!
//! A kernel pins the pages of a program, or receives a list of pages from an in-kernel client, and
//! has all of them mapped. The list of their addresses belongs to the creator of the memory. For
//! each fast registration the creator refills the list, as Linux's `ib_map_mr_sg()` does, and the
//! request carries the number of pages ([`ListedPages`]).
//!
//! Invariant: the creators of [`Pages`] and [`ListedPages`] have promised that the list contains an
//! entry for each page, and that the list and the pages stay valid while they are in use.
#![allow(unsafe_code)]

use super::span::{Fragment, Memory};
use core::num::NonZeroU32;
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Maximum number of contiguous pages that are merged into one fragment.
const MERGE_MAX: u64 = 16;

/// Bits of [`ListedPages`] that hold the page size.
const SHIFT_BITS: u32 = 6;

/// The pages of a fast registration: their number in the region's list, and their size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedPages {
    /// The number of pages; the low bits hold the logarithm of the page size. Packed because each
    /// slot of the send queue contains it.
    shape: NonZeroU32,
}

impl ListedPages {
    /// Refers to the first `count` pages, of `1 << shift` bytes, of a region's list
    /// ([`Pages::listed`]).
    ///
    /// Returns `None` if `count` is zero or at least 2^26, or if the total size overflows.
    ///
    /// # Safety
    /// When a request with this value (or a copy of it) is executed, the list of its region must
    /// contain the addresses of `count` pages of this size. The pages must stay in the list, and
    /// mapped readable and writable, until the invalidation of the registration completes or
    /// [`deregister`](super::MemoryTable::deregister) returns. No Rust reference to the pages
    /// may exist while the RNIC or a peer can access them.
    pub unsafe fn new(count: u32, shift: u32) -> Option<Self> {
        let size = 1u64.checked_shl(shift)?;
        u64::from(count).checked_mul(size)?;
        if count == 0 || count >> (u32::BITS - SHIFT_BITS) != 0 {
            return None;
        }
        NonZeroU32::new(count << SHIFT_BITS | shift).map(|shape| Self { shape })
    }

    const fn count(&self) -> u32 {
        self.shape.get() >> SHIFT_BITS
    }

    const fn shift(&self) -> u32 {
        self.shape.get() & ((1 << SHIFT_BITS) - 1)
    }

    const fn octets(&self) -> u64 {
        // The constructor checked that this does not overflow.
        (self.count() as u64).unbounded_shl(self.shift())
    }
}

/// Memory in pages of equal size, in any order, or one range of addresses.
#[derive(Debug)]
pub struct Pages {
    /// Address of the list of page addresses; zero if there is none.
    list: u64,
    /// Beginning of the range: an offset in the first page, or an address if there is no list.
    first: u64,
    /// Length in bytes. A fast registration changes it and `shift`, while the memory has no users.
    len: AtomicU64,
    shift: AtomicU32,
    /// Maximum pages of a fast registration; zero if fast registration is not possible.
    max_pages: u32,
}

impl Pages {
    /// Describes `len` bytes, starting at byte `first` of the first page, in pages of `1 << shift`
    /// bytes whose addresses are in `list`.
    ///
    /// Returns `None` if the range does not begin in the first page, or if it wraps.
    ///
    /// # Safety
    /// `list` must contain an entry for each page of the range. Until the value is removed from
    /// every table, the list must stay valid, and the pages mapped readable and writable. No Rust
    /// reference to the range may exist while the RNIC or a peer can access it.
    pub unsafe fn new(list: *const u64, shift: u32, first: u64, len: u64) -> Option<Self> {
        let size = 1u64.checked_shl(shift)?;
        first.checked_add(len)?;
        (!list.is_null() && first < size).then(|| Self {
            list: list.expose_provenance() as u64,
            len: AtomicU64::new(len),
            shift: AtomicU32::new(shift),
            first,
            max_pages: 0,
        })
    }

    /// Describes `len` bytes at address `addr`. Address 0 with length 2^64 - 1 covers all memory.
    ///
    /// Returns `None` if the range wraps around the address space.
    ///
    /// # Safety
    /// Until the value is removed from every table, all bytes that are accessed must be mapped
    /// readable, and writable if they are registered with a right to write. No Rust reference to
    /// them may exist while the RNIC or a peer can access them.
    pub const unsafe fn together(addr: u64, len: u64) -> Option<Self> {
        match addr.checked_add(len) {
            Some(end) if end <= usize::MAX as u64 => Some(Self {
                list: 0,
                len: AtomicU64::new(len),
                shift: AtomicU32::new(0),
                first: addr,
                max_pages: 0,
            }),
            _ => None,
        }
    }

    /// Returns memory for fast registrations. Each registration uses the first pages of `list`,
    /// which has space for `max_pages` entries.
    ///
    /// Returns `None` if there is no list.
    ///
    /// # Safety
    /// `list` must stay valid until the value is removed from every table. Its owner must change
    /// entries only while they are not in use: see [`ListedPages::new`].
    pub unsafe fn listed(list: *const u64, max_pages: u32) -> Option<Self> {
        (!list.is_null() && max_pages != 0).then(|| Self {
            list: list.expose_provenance() as u64,
            first: 0,
            len: AtomicU64::new(0),
            shift: AtomicU32::new(0),
            max_pages,
        })
    }
}

/// A position in [`Pages`].
#[derive(Debug, Clone, Copy)]
pub struct PagePlace {
    /// Address of the list of page addresses; zero if there is none.
    list: u64,
    /// Bytes from the beginning of the first page, or an address.
    at: u64,
    shift: u32,
}

impl PagePlace {
    /// Returns the address of a page.
    ///
    /// # Safety
    /// The list exists and has an entry `index`.
    #[inline]
    unsafe fn page(&self, index: u64) -> u64 {
        let list: *const u64 = ptr::with_exposed_provenance(self.list as usize);
        // SAFETY: guaranteed by the caller.
        unsafe { list.add(index as usize).read() }
    }
}

// SAFETY: the creator has promised that all pages of the list stay mapped. A fragment lies in one
// page or in contiguous pages, and does not extend beyond the range.
unsafe impl Memory for Pages {
    type Place = PagePlace;

    const NOWHERE: PagePlace = PagePlace {
        list: 0,
        at: 0,
        shift: 0,
    };

    #[inline]
    fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    fn set_pages(&self, pages: Option<ListedPages>) -> bool {
        if self.max_pages == 0 {
            return pages.is_none();
        }
        // The previous registration's pages are dropped even if the new registration has none.
        let (len, shift) = match pages {
            Some(pages) if pages.count() > self.max_pages => return false,
            Some(pages) => (pages.octets(), pages.shift()),
            None => (0, 0),
        };
        self.len.store(len, Ordering::Relaxed);
        self.shift.store(shift, Ordering::Relaxed);
        true
    }

    #[inline]
    fn place(&self, offset: u64) -> PagePlace {
        PagePlace {
            list: self.list,
            at: self.first.wrapping_add(offset),
            shift: self.shift.load(Ordering::Relaxed),
        }
    }

    #[inline]
    fn after(place: PagePlace, count: u32) -> PagePlace {
        PagePlace {
            at: place.at.wrapping_add(u64::from(count)),
            ..place
        }
    }

    #[inline]
    unsafe fn fragment<'t>(place: PagePlace, len: u32) -> Fragment<'t> {
        let len = u64::from(len);
        let (mut addr, mut together) = (place.at, len);
        if place.list != 0 && len != 0 {
            let size = 1u64.wrapping_shl(place.shift);
            let inside = place.at & size.wrapping_sub(1);
            let mut index = place.at >> place.shift;
            let end = index.saturating_add(MERGE_MAX);
            // SAFETY: the list contains an entry for each page of the range, and the first byte is
            // inside the range.
            addr = unsafe { place.page(index) }.wrapping_add(inside);
            together = size.wrapping_sub(inside);
            while together < len && index < end {
                index = index.wrapping_add(1);
                // SAFETY: as above; the byte at offset `together` is inside the range as well.
                if unsafe { place.page(index) } != addr.wrapping_add(together) {
                    break;
                }
                together = together.saturating_add(size);
            }
        }
        let at = ptr::with_exposed_provenance_mut(addr as usize);
        // SAFETY: guaranteed by the caller: all `len` bytes are in pages of the list.
        unsafe { Fragment::new(at, together.min(len) as usize) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::{MemoryTable, Span};
    use super::*;
    use crate::memory::{Accessor, Crc32c, HostRange, MemoryError, Pager};
    use crate::{Access, FastRegister};
    use iwarp_proto::crc32c;
    use proptest::prelude::*;
    use std::vec;
    use std::vec::Vec;

    /// Small pages, so that few bytes span many of them.
    const SHIFT: u32 = 6;
    const SIZE: usize = 1 << SHIFT;

    /// Pages in random order, between other pages that must not be accessed.
    pub(crate) struct Scattered {
        arena: Vec<u64>,
        list: Vec<u64>,
        first: usize,
        len: usize,
    }

    impl Scattered {
        /// Creates `len` bytes, starting at byte `first` of the first page. `order` decides where
        /// the pages lie.
        pub(crate) fn new(first: usize, len: usize, order: u64) -> Self {
            let count = (first + len).div_ceil(SIZE).max(1);
            // Pages that must not be accessed lie at both ends, and between some of the others.
            let places = 2 * count + 1;
            let mut arena = vec![0u64; places * SIZE / 8];
            let at = arena.as_mut_ptr().expose_provenance() as u64;
            let mut free: Vec<usize> = (1..places).collect();
            let mut random = order | 1;
            let list = (0..count)
                .map(|i| {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(99);
                    let pick = (random >> 33) as usize % free.len();
                    // Every fourth page is contiguous with its predecessor if possible.
                    let pick = if i % 4 == 0 { pick } else { pick.min(i % 3) };
                    at + (free.remove(pick) * SIZE) as u64
                })
                .collect();
            let scattered = Self {
                arena,
                list,
                first,
                len,
            };
            for i in 0..scattered.arena.len() * 8 {
                // SAFETY: the address is inside the arena.
                unsafe { scattered.base().add(i).write(0xa5) };
            }
            scattered
        }

        fn base(&self) -> *mut u8 {
            ptr::with_exposed_provenance_mut(self.arena.as_ptr().addr())
        }

        pub(crate) fn pages(&self) -> Pages {
            let (first, len) = (self.first as u64, self.len as u64);
            // SAFETY: the test keeps the pages until the table is dropped.
            unsafe { Pages::new(self.list.as_ptr(), SHIFT, first, len) }.unwrap()
        }

        /// Returns the page addresses, their [`ListedPages`], and the offset of the first byte.
        pub(crate) fn list(&self) -> (&[u64], ListedPages, u64) {
            // SAFETY: as above. The test copies the addresses into the region's list.
            let pages = unsafe { ListedPages::new(self.list.len() as u32, SHIFT) };
            (&self.list, pages.unwrap(), self.first as u64)
        }

        fn octet(&self, at: usize) -> *mut u8 {
            let at = self.first + at;
            let page: *mut u8 = ptr::with_exposed_provenance_mut(self.list[at / SIZE] as usize);
            // SAFETY: the address is inside the page.
            unsafe { page.add(at % SIZE) }
        }

        pub(crate) fn fill(&self, octets: &[u8]) {
            assert_eq!(octets.len(), self.len);
            for (i, octet) in octets.iter().enumerate() {
                // SAFETY: the address is inside the arena.
                unsafe { self.octet(i).write(*octet) };
            }
        }

        /// Returns the contents of the range, and how many other bytes of the arena have changed.
        pub(crate) fn contents(&self) -> (Vec<u8>, usize) {
            // SAFETY: the address is inside the arena.
            let inside = (0..self.len).map(|i| unsafe { self.octet(i).read() });
            let inside_range: Vec<usize> = (0..self.len).map(|i| self.octet(i).addr()).collect();
            let inside_range: std::collections::BTreeSet<usize> =
                inside_range.into_iter().collect();
            let changed_others = (0..self.arena.len() * 8).filter(|i| {
                // SAFETY: the address is inside the arena.
                let at = unsafe { self.base().add(*i) };
                // SAFETY: as above.
                !inside_range.contains(&at.addr()) && unsafe { at.read() } != 0xa5
            });
            (inside.collect(), changed_others.count())
        }
    }

    /// # Safety
    /// Like [`SharedCrc32cFn`](crate::memory::SharedCrc32cFn), and nobody changes the bytes.
    unsafe fn sum_in_place(crc: u32, from: *const u8, len: usize) -> Option<u32> {
        // SAFETY: guaranteed by the caller.
        let octets = unsafe { core::slice::from_raw_parts(from, len) };
        Some(crc32c::append(crc, octets))
    }

    /// # Safety
    /// Like [`CopyingCrc32cFn`](crate::memory::CopyingCrc32cFn), and nobody changes the bytes.
    unsafe fn sum_and_copy(crc: u32, from: *const u8, to: *mut u8, len: usize) -> Option<u32> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            to.copy_from_nonoverlapping(from, len);
            sum_in_place(crc, to, len)
        }
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
    }

    proptest! {
        #[test]
        fn pages_behave_like_flat_memory(
            first in 0usize..SIZE,
            len in 0usize..1500,
            order: u64,
            from in 0usize..1500,
            n in 0usize..1500,
            at in 0u32..1500,
        ) {
            let scattered = Scattered::new(first, len, order);
            let mut flat = pattern(len);
            scattered.fill(&flat);
            let pages = scattered.pages();
            let Some(span) = Span::new(&pages, from as u64, n as u32) else {
                prop_assert!(from + n > len);
                return Ok(());
            };
            prop_assert!(from + n <= len);
            let mut copy = vec![0x11; n + 3];
            assert!(span.read(&mut copy));
            prop_assert_eq!(&copy[..n], &flat[from..from + n]);
            prop_assert_eq!(&copy[n..], &[0x11; 3]);
            let mut second_copy = vec![0x11; n + 3];
            let crc = span.read_summed(sum_and_copy, 7, &mut second_copy);
            prop_assert_eq!(crc, Some(crc32c::append(7, &flat[from..from + n])));
            prop_assert_eq!(&second_copy, &copy);
            // A part of the range.
            let crc = span.read_summed(sum_and_copy, 7, &mut second_copy[..n.min(at as usize)]);
            prop_assert_eq!(crc, Some(crc32c::append(7, &copy[..n.min(at as usize)])));
            let mut room = [0; crate::limits::SUM_PART];
            let copied = Crc32c::new(crc32c::append);
            // SAFETY: the function reads only what it is given.
            let in_place = unsafe { copied.with_shared(sum_in_place) };
            for f in [copied, in_place] {
                let expected = crc32c::append(7, &flat[from..from + n]);
                prop_assert_eq!(span.crc32c(f, 7, &mut room), Some(expected));
            }
            let parts: Vec<_> = span.fragments().map(|f| (f.as_ptr().addr(), f.len())).collect();
            prop_assert_eq!(parts.iter().map(|p| p.1).sum::<usize>(), n);
            // Contiguous pages are merged into one fragment.
            for neighbours in parts.windows(2) {
                prop_assert_ne!(neighbours[0].0 + neighbours[0].1, neighbours[1].0);
            }

            let (front, tail) = span.split_at(at);
            let (cut, octets) = (n.min(at as usize), vec![0x77; n]);
            prop_assert_eq!((front.len() as usize, tail.len() as usize), (cut, n - cut));
            assert!(tail.write(&octets[cut..]));
            flat[from + cut..from + n].fill(0x77);
            prop_assert_eq!(scattered.contents(), (flat.clone(), 0));
            // Write more bytes than the span has, then fewer.
            assert!(front.write_last_octet_last(&pattern(n + 9)));
            flat[from..from + cut].copy_from_slice(&pattern(cut));
            prop_assert_eq!(scattered.contents(), (flat.clone(), 0));
            assert!(span.write_last_octet_last(&[0x99; 3][..n.min(3)]));
            flat[from..from + n.min(3)].fill(0x99);
            prop_assert_eq!(scattered.contents(), (flat, 0));
        }

        #[test]
        fn word_lies_in_one_page(first in 0usize..SIZE, order: u64, from in 0usize..200) {
            let scattered = Scattered::new(first, 400, order);
            let mut flat = pattern(400);
            scattered.fill(&flat);
            let pages = scattered.pages();
            prop_assert!(Span::new(&pages, from as u64, 7).unwrap().word().is_none());
            let word = Span::new(&pages, from as u64, 8).unwrap().word();
            prop_assert_eq!(word.is_some(), (first + from).is_multiple_of(8));
            if let Some(word) = word {
                let old = u64::from_ne_bytes(flat[from..from + 8].try_into().unwrap());
                prop_assert_eq!(word.update(|old| old.wrapping_add(3)), Some(old));
                flat[from..from + 8].copy_from_slice(&old.wrapping_add(3).to_ne_bytes());
            }
            prop_assert_eq!(scattered.contents(), (flat, 0));
        }
    }

    #[test]
    fn all_of_memory_can_be_registered() {
        let octets = [5u8; 16];
        let addr = octets.as_ptr().expose_provenance() as u64;
        let accessor = Accessor { pd: 1, qp: 1 };
        let mut table = MemoryTable::new();
        // SAFETY: only `octets` is accessed, and only read.
        let all = unsafe { Pages::together(0, u64::MAX) }.unwrap();
        let stag = table.register(all, 0, 1, Access::empty(), 0x4567_8901);
        let stag = stag.unwrap();
        let mut copy = [0; 16];
        let span = table
            .check(stag, addr, 16, Access::empty(), accessor)
            .unwrap();
        assert!(span.span().read(&mut copy));
        assert_eq!(copy, octets);
        assert!(
            table
                .check(stag, u64::MAX - 16, 16, Access::empty(), accessor)
                .is_ok()
        );
        assert!(
            table
                .check(stag, u64::MAX - 15, 16, Access::empty(), accessor)
                .is_err()
        );
        let mut table = MemoryTable::new();
        // SAFETY: as above.
        let all = unsafe { HostRange::new(0, u64::MAX) }.unwrap();
        let stag = table.register(all, 0, 1, Access::empty(), 0x4567_8901);
        let span = table.check(stag.unwrap(), addr, 16, Access::empty(), accessor);
        copy = [0; 16];
        assert!(span.unwrap().span().read(&mut copy));
        assert_eq!(copy, octets);
    }

    #[test]
    fn empty_memory_is_empty() {
        fn is_empty(memory: impl Memory) -> bool {
            memory.is_empty()
        }
        for len in [0, 1, 65] {
            let scattered = Scattered::new(0, len, 1);
            assert_eq!(is_empty(scattered.pages()), len == 0);
            // SAFETY: the memory is never accessed.
            let range = unsafe { HostRange::new(8, len as u64) }.unwrap();
            assert_eq!(is_empty(range), len == 0);
        }
    }

    #[test]
    fn memory_without_list_refuses_pages() {
        fn assert_refuses_pages<M: Memory>(memory: M, pages: ListedPages) {
            let mut table = MemoryTable::new();
            let new_stag = table.allocate_fast(memory, 1, 0x4567_8901).unwrap();
            let mut wr = FastRegister {
                new_stag,
                offset: 0,
                len: 64,
                iova: 0,
                access: Access::empty(),
                pages: Some(pages),
            };
            let refused = table.fast_register(&wr, 1);
            assert_eq!(refused, Err(MemoryError::OutOfRange));
            assert!(!table.info(new_stag).unwrap().valid);
            wr.pages = None;
            assert_eq!(table.fast_register(&wr, 1), Ok(()));
        }
        let scattered = Scattered::new(0, 64, 1);
        let (_, pages, _) = scattered.list();
        assert_refuses_pages(scattered.pages(), pages);
        // SAFETY: the memory is never accessed.
        assert_refuses_pages(unsafe { HostRange::new(0x1000, 64) }.unwrap(), pages);
    }

    /// A pager works by address, and the pages of a list are not contiguous.
    #[test]
    fn pages_are_not_registered_on_demand() {
        // SAFETY: the functions access nothing.
        static NONE: Pager = unsafe { Pager::new(|_, _| false, |_, _| false, |_, _, _| None) };
        let scattered = Scattered::new(0, 64, 1);
        let mut table = MemoryTable::new();
        let memory = (scattered.pages(), &NONE);
        let refused = table.register_on_demand(memory, 0, 1, Access::empty(), 7);
        assert_eq!(refused, Err(MemoryError::OutOfRange));
        assert!(table.is_empty() && !table.has_on_demand());
    }

    #[test]
    fn range_begins_in_first_page() {
        let list = [0x1000u64, 0x2000];
        // SAFETY: the memory is never accessed.
        unsafe {
            assert!(Pages::new(list.as_ptr(), 12, 4095, 4097).is_some());
            assert!(Pages::new(list.as_ptr(), 12, 4096, 1).is_none());
            assert!(Pages::new(list.as_ptr(), 12, 1, u64::MAX).is_none());
            assert!(Pages::new(list.as_ptr(), 64, 1, 1).is_none());
            assert!(Pages::new(ptr::null(), 12, 1, 1).is_none());
            assert!(Pages::together(2, u64::MAX).is_none());
            assert!(Pages::listed(list.as_ptr(), 0).is_none());
            assert!(Pages::listed(ptr::null(), 1).is_none());
            let count = (1 << 26) - 1;
            let most = ListedPages::new(count, 37).unwrap();
            assert_eq!((most.count(), most.shift()), (count, 37));
            assert_eq!(most.octets(), u64::from(count) << 37);
            for (count, shift) in [(0, 12), (1 << 26, 12), (2, 63), (1, 64), (count, 39)] {
                assert!(ListedPages::new(count, shift).is_none());
            }
        }
    }
}
