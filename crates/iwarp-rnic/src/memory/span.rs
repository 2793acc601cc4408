//! What registered memory is to the RNIC, and its hands on it.
//!
//! The surroundings bring the memory: one range of addresses in a process ([`HostRange`](super::HostRange)), pages that lie
//! anywhere in a kernel ([`Pages`](super::Pages)). To the RNIC it is a sequence of [`Fragment`]s, octets that lie together.
//! A [`Span`] is a checked part of such a sequence. Everything that the RNIC does to memory is a method of it.
//!
//! Invariant: a [`Span`] denotes octets that lie inside a [`Memory`]. The creator of the memory has promised that they stay
//! readable and writable for as long as it is in a [`MemoryTable`](super::MemoryTable), or the memory's accesses can fail. Only the table makes spans, and a span
//! borrows the table, so no span outlives its registration.
//!
//! Other threads, the peer and the kernel change this memory at any time. `memory` says how it is accessed nevertheless.
#![allow(unsafe_code)]

use super::copy::{copy_in, copy_out};
use super::pages::ListedPages;
use super::sum::{CopyingCrc32cFn, Crc32c};
use crate::limits::SUM_PART;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Memory that may be registered: a sequence of fragments.
///
/// # Safety
/// The fragments have to be inside of what the creator of the value has promised to keep mapped, readable and writable, until
/// the value has left every table. If the creator has not promised that, the five accesses are overridden by functions that find
/// out whether the octets are mapped, and the functions for CRCs are of that kind, too. [`fragment`](Self::fragment) returns at most as many octets as were asked for, and at
/// least one if any were. No Rust reference to the octets may exist while the RNIC or a peer can access them.
pub unsafe trait Memory: core::fmt::Debug {
    /// What a span keeps to find its octets: an address, or a list of pages and a position in it.
    type Place: Copy + core::fmt::Debug;

    /// The place of an access of zero length.
    const NOWHERE: Self::Place;

    /// Returns how many octets it has. Only [`set_pages`](Self::set_pages) changes that.
    fn len(&self) -> u64;

    /// Returns `true` if it has no octets.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes over which pages a fast registration names, if any. Returns `false` if this memory cannot have them: it is of another
    /// kind, or they are too many. The table calls it while nobody uses the memory.
    fn set_pages(&self, pages: Option<ListedPages>) -> bool {
        pages.is_none()
    }

    /// Returns the place of octet `offset`, which is inside or behind the last octet.
    fn place(&self, offset: u64) -> Self::Place;

    /// Returns the place `count` octets behind `place`.
    fn after(place: Self::Place, count: u32) -> Self::Place;

    /// Returns the address of a place, `None` if it has none that a [`Pager`](super::Pager) could use.
    fn address(_place: Self::Place) -> Option<u64> {
        None
    }

    /// Returns the octets from `place` on that lie together, at most `len`.
    ///
    /// # Safety
    /// The memory that `place` belongs to is in a table for `'t`, and all `len` octets from there on are inside.
    unsafe fn fragment<'t>(place: Self::Place, len: u32) -> Fragment<'t>;

    /// Copies `len` octets of this memory at `from` to memory of the RNIC at `to`. Returns `false` if not all of them could be
    /// read; `to` then has any octets.
    ///
    /// This method and the four below are for memory that stays mapped, as its creator has promised. Memory that a program may
    /// unmap in spite of its promise overrides all five.
    ///
    /// # Safety
    /// The `len` octets at `from` are in fragments of this kind of memory, `len` octets at `to` are writable, and the two do
    /// not overlap.
    #[inline(always)]
    unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: the caller's promise, and the memory is mapped.
        unsafe { copy_out(from, to, len) };
        true
    }

    /// Copies `len` octets from memory of the RNIC at `from` to this memory at `to`. Returns `false` if not all of them could be
    /// written; some of them may have been.
    ///
    /// # Safety
    /// As [`copy_out`](Self::copy_out), in the other direction.
    #[inline(always)]
    unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: the caller's promise, and the memory is mapped.
        unsafe { copy_in(from, to, len) };
        true
    }

    /// Stores one octet of this memory, behind all stores before it. Returns `false` if it could not be written.
    ///
    /// # Safety
    /// `at` is in a fragment of this kind of memory.
    #[inline(always)]
    unsafe fn store_octet(at: *mut u8, octet: u8) -> bool {
        // SAFETY: the caller's promise, and the memory is mapped; an octet is always aligned.
        unsafe { AtomicU8::from_ptr(at) }.store(octet, Ordering::Release);
        true
    }

    /// Stores a word of this memory at once, behind all stores before it. Returns `false` if it could not be written.
    ///
    /// # Safety
    /// The eight octets at `at`, which is aligned, are in a fragment of this kind of memory.
    #[inline(always)]
    unsafe fn store_word(at: *mut u64, word: u64) -> bool {
        // SAFETY: the caller's promise, and the memory is mapped.
        unsafe { AtomicU64::from_ptr(at) }.store(word, Ordering::Release);
        true
    }

    /// Replaces a word of this memory by `new` if it is `old`, atomically with respect to every processor. Returns what it was,
    /// or `None` if it could not be accessed.
    ///
    /// # Safety
    /// As [`store_word`](Self::store_word).
    #[inline(always)]
    unsafe fn exchange(at: *mut u64, old: u64, new: u64) -> Option<u64> {
        let (order, on_failure) = (Ordering::AcqRel, Ordering::Acquire);
        // SAFETY: the caller's promise, and the memory is mapped.
        let word = unsafe { AtomicU64::from_ptr(at) };
        let (Ok(found) | Err(found)) = word.compare_exchange(old, new, order, on_failure);
        Some(found)
    }
}

/// Octets that lie together, borrowed for `'t`: of registered memory, of a plan's scratch, or of staging.
///
/// It is an address and a length, and gives no safe access: other threads, the peer and the kernel may change the octets.
#[derive(Debug, Clone, Copy)]
pub struct Fragment<'t> {
    at: *mut u8,
    len: usize,
    owner: PhantomData<&'t ()>,
}

impl<'t> Fragment<'t> {
    /// Names `len` octets at `at`.
    ///
    /// # Safety
    /// All of them are mapped for `'t`, readable, and writable where the memory is registered with a right that writes. Fragments of
    /// memory that overrides [`Memory::copy_out`] need not be mapped.
    #[inline]
    pub const unsafe fn new(at: *mut u8, len: usize) -> Self {
        Self {
            at,
            len,
            owner: PhantomData,
        }
    }

    /// Names octets that are only read.
    #[inline]
    pub(crate) const fn of(octets: &'t [u8]) -> Self {
        Self {
            at: octets.as_ptr().cast_mut(),
            len: octets.len(),
            owner: PhantomData,
        }
    }

    /// Names octets that may be written.
    #[inline]
    pub(crate) const fn of_mut(octets: &'t mut [u8]) -> Self {
        Self {
            at: octets.as_mut_ptr(),
            len: octets.len(),
            owner: PhantomData,
        }
    }

    /// Returns where it begins.
    #[inline]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.at
    }

    /// Returns its length in octets.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if it has no octets.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns its first `len` octets, all of it if it is shorter.
    #[inline]
    #[must_use]
    pub const fn first(self, len: usize) -> Self {
        let len = if len < self.len { len } else { self.len };
        Self { len, ..self }
    }
}

/// Checked octets of registered memory, valid while the STag table is borrowed.
#[derive(Debug)]
pub struct Span<'t, M: Memory> {
    place: M::Place,
    len: u32,
    table: PhantomData<&'t M>,
}

impl<M: Memory> Clone for Span<'_, M> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for Span<'_, M> {}

impl<'t, M: Memory> Span<'t, M> {
    /// No octets: the result of a zero-length access.
    pub(super) const EMPTY: Self = Self {
        place: M::NOWHERE,
        len: 0,
        table: PhantomData,
    };

    /// Returns the part of `memory` at `offset`; `None` if that is not inside.
    #[inline]
    pub(super) fn new(memory: &'t M, offset: u64, len: u32) -> Option<Self> {
        let end = offset.checked_add(u64::from(len))?;
        if end > memory.len() {
            return None;
        }
        Some(Self {
            place: memory.place(offset),
            len,
            table: PhantomData,
        })
    }

    /// Length in octets.
    #[inline]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// No octets.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of its first octet, if it has one.
    pub(super) fn address(&self) -> Option<u64> {
        M::address(self.place)
    }

    /// Splits it into the first `at` octets and the rest. If it is shorter, the first part is all of it.
    #[inline]
    pub fn split_at(self, at: u32) -> (Self, Self) {
        let at = at.min(self.len);
        (
            Self { len: at, ..self },
            Self {
                place: M::after(self.place, at),
                len: self.len.wrapping_sub(at),
                ..self
            },
        )
    }

    /// Returns its fragments, in order. Together they have all its octets.
    #[inline]
    pub const fn fragments(self) -> Fragments<'t, M> {
        Fragments { rest: self }
    }

    /// Returns the octets at its beginning that lie together.
    #[inline]
    fn fragment(&self) -> Fragment<'t> {
        // SAFETY: the table has compared with the memory's length, and is borrowed for `'t`.
        unsafe { M::fragment(self.place, self.len) }
    }

    /// Visits the fragments of its first `most` octets, which it has, until `visit` returns `false`. Returns what it returned
    /// last. Where all memory lies together, that is one visit without a comparison.
    #[inline]
    fn each(&self, most: u32, mut visit: impl FnMut(Fragment<'t>) -> bool) -> bool {
        let mut rest = Self { len: most, ..*self };
        loop {
            let fragment = rest.fragment();
            if !visit(fragment) {
                return false;
            }
            rest = rest.split_at(fragment.len as u32).1;
            if rest.len == 0 {
                return true;
            }
        }
    }

    /// Copies octets out. Copies as many as both sides have. Returns `false` if some of them could not be read.
    #[inline]
    #[must_use]
    pub fn read(&self, dst: &mut [u8]) -> bool {
        let n = dst.len().min(self.len as usize);
        let mut to = dst.as_mut_ptr();
        self.each(n as u32, |from| {
            // SAFETY: the fragment is valid registered memory (module invariant). The fragments together have at most as many
            // octets as `dst`, which is ours. The two cannot overlap: the program promised not to hold references into
            // registered memory.
            unsafe {
                let copied = M::copy_out(from.at, to, from.len);
                to = to.add(from.len);
                copied
            }
        })
    }

    /// As [`read`](Self::read), and continues a CRC over what it has copied. Returns `None` if some of it could not be read.
    #[inline]
    pub(crate) fn read_summed(
        &self,
        f: CopyingCrc32cFn,
        mut crc: u32,
        dst: &mut [u8],
    ) -> Option<u32> {
        let n = dst.len().min(self.len as usize);
        let mut to = dst.as_mut_ptr();
        let all = self.each(n as u32, |from| {
            // SAFETY: as in `read`.
            let summed = unsafe { f(crc, from.at, to, from.len) };
            to = to.wrapping_add(from.len);
            crc = summed.unwrap_or_default();
            summed.is_some()
        });
        all.then_some(crc)
    }

    /// Copies octets in. Copies as many as both sides have. Returns `false` if some of them could not be written.
    #[inline]
    #[must_use]
    pub fn write(&self, src: &[u8]) -> bool {
        let n = src.len().min(self.len as usize);
        let mut from = src.as_ptr();
        self.each(n as u32, |to| {
            // SAFETY: as in `read`, and the table gave the span for writing.
            unsafe {
                let copied = M::copy_in(from, to.at, to.len);
                from = from.add(to.len);
                copied
            }
        })
    }

    /// Copies octets in so that the last one becomes visible after all others, because programs wait for an RDMA Write by
    /// looking at its last octet. Eight octets that are aligned in memory become visible at once, because they may be an atomic write.
    /// Returns `false` if some of them could not be written.
    #[inline]
    #[must_use]
    pub fn write_last_octet_last(&self, src: &[u8]) -> bool {
        match self.len {
            8 => self.write_eight(src),
            _ => self.write_others_first(src),
        }
    }

    /// The same, where nothing is stored at once but the last octet.
    #[inline(always)]
    fn write_others_first(&self, src: &[u8]) -> bool {
        let n = src.len().min(self.len as usize);
        let Some((last, head)) = src.get(..n).and_then(|s| s.split_last()) else {
            return true;
        };
        let end = Self {
            place: M::after(self.place, head.len() as u32),
            len: 1,
            ..*self
        };
        // SAFETY: the last octet of the span, which the table gave for writing.
        self.write(head) && unsafe { M::store_octet(end.fragment().at, *last) }
    }

    /// The same for eight octets. It ends here and does not come back to the other way, which therefore costs nothing more.
    #[cold]
    #[inline(never)]
    fn write_eight(self, src: &[u8]) -> bool {
        match (<[u8; 8]>::try_from(src), self.word()) {
            (Ok(octets), Some(word)) => word.store(octets),
            _ => self.write_others_first(src),
        }
    }

    /// Continues a CRC over the octets. If there is no function for registered memory, they are copied to `room` part by part.
    /// Octets that change meanwhile make the CRC wrong, which the contract of posting a work request leaves to the program.
    /// Returns `None` if some of the octets could not be read.
    pub fn crc32c(&self, f: Crc32c, mut crc: u32, room: &mut [u8; SUM_PART]) -> Option<u32> {
        if let Some(shared) = f.shared() {
            let all = self.each(self.len, |of| {
                // SAFETY: the fragment is valid registered memory (module invariant).
                let summed = unsafe { shared(crc, of.at, of.len) };
                crc = summed.unwrap_or_default();
                summed.is_some()
            });
            return all.then_some(crc);
        }
        let mut rest = *self;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(SUM_PART as u32);
            if !part.read(room) {
                return None;
            }
            crc = f.append(crc, room.get(..part.len as usize).unwrap_or(&[]));
            rest = later;
        }
        Some(crc)
    }

    /// Returns the 64-bit word, for atomics; `None` if it has not 8 octets, does not lie together, or is not aligned.
    pub fn word(&self) -> Option<Word<'t, M>> {
        if self.len != 8 {
            return None;
        }
        let at = self.fragment();
        let whole = at.len == 8 && at.at.addr().is_multiple_of(8);
        whole.then_some(Word {
            at,
            memory: PhantomData,
        })
    }
}

/// The fragments of a [`Span`].
#[derive(Debug)]
pub struct Fragments<'t, M: Memory> {
    rest: Span<'t, M>,
}

impl<'t, M: Memory> Iterator for Fragments<'t, M> {
    type Item = Fragment<'t>;

    #[inline]
    fn next(&mut self) -> Option<Fragment<'t>> {
        let rest = self.rest;
        if rest.is_empty() {
            return None;
        }
        let fragment = rest.fragment();
        self.rest = rest.split_at(fragment.len as u32).1;
        Some(fragment)
    }
}

/// A 64-bit word of registered memory.
#[derive(Debug)]
pub struct Word<'t, M: Memory> {
    at: Fragment<'t>,
    memory: PhantomData<M>,
}

impl<M: Memory> Word<'_, M> {
    /// Replaces the word by these octets with one store: whoever reads all of it sees the old octets or these, and never some of each.
    /// Returns `false` if it could not be written.
    fn store(&self, octets: [u8; 8]) -> bool {
        // SAFETY: eight valid, aligned octets, and the table gave the span for writing. Others who change them at the same time are the
        // processor's atomics, other stores like this, and copies that no reference of Rust takes part in (module invariant).
        unsafe { M::store_word(self.at.at.cast(), u64::from_ne_bytes(octets)) }
    }

    //= rfc7306 section 5
    //# Therefore, the Responder RNIC MUST implement mechanisms to prevent
    //# Atomic Operations to a memory registered for Atomic Operations while an
    //# Atomic Operation targeting the memory is in progress.
    //= rfc7306 section 5.3
    //# Atomicity of the Read-Modify-Write (RMW) on the Responder's node by the
    //# Atomic Operation MUST be assured in the context of concurrent atomic
    //# accesses by other RDMAP Streams on the same RNIC.
    //= rfc7306 section 5.4
    //# Atomicity guarantees MUST be provided within the scope of a single RNIC.
    /// Replaces the word by the result of `f`, atomically with respect to every processor, and returns the old value; `None` if
    /// it could not be accessed.
    pub fn update(&self, mut f: impl FnMut(u64) -> u64) -> Option<u64> {
        let mut first = [0; 8];
        // SAFETY: eight valid octets of this memory, and as many of ours.
        if !unsafe { M::copy_out(self.at.at, first.as_mut_ptr(), first.len()) } {
            return None;
        }
        // Others may have changed it meanwhile, or in the middle of the copy. The exchange then fails and tells what it is.
        let mut old = u64::from_ne_bytes(first);
        // The loop ends: a failed exchange means that another processor made progress.
        loop {
            // SAFETY: eight valid, aligned octets, which are changed atomically only.
            let found = unsafe { M::exchange(self.at.at.cast(), old, f(old)) }?;
            if found == old {
                return Some(old);
            }
            old = found;
        }
    }
}
