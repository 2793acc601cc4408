//! The RNIC's view of registered memory, and all accesses to it.
//!
//! The environment supplies the memory: one address range in a process
//! ([`HostRange`](super::HostRange)), or pages in a kernel ([`Pages`](super::Pages)). The RNIC sees
//! a sequence of contiguous [`Fragment`]s. A [`Span`] is a checked part of such a sequence, and its
//! methods are the only accesses to the memory.
//!
//! Invariant: a [`Span`] lies inside a [`Memory`]. The memory's creator has promised that it stays
//! readable and writable while it is in a [`MemoryTable`](super::MemoryTable), or that accesses to
//! it fail safely. Only the table creates spans, and a span borrows the table, so no span outlives
//! its registration.
//!
//! The module `memory` explains how this memory is accessed, because others may change it at any
//! time.
#![allow(unsafe_code)]

use super::copy::{copy_in, copy_out};
use super::pages::ListedPages;
use super::sum::{CopyingCrc32cFn, Crc32c};
use crate::limits::SUM_PART;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Memory that can be registered: a sequence of fragments.
///
/// # Safety
/// All fragments lie in memory that the value's creator has promised to keep mapped, readable and
/// writable, until the value is removed from every table. Without this promise, the implementation
/// overrides the five access functions, and its environment supplies CRC functions; all of these
/// detect unmapped memory. [`fragment`](Self::fragment) returns at most the requested length, and
/// at least one byte of a non-empty request. No Rust reference to the memory may exist while the
/// RNIC or a peer can access it.
pub unsafe trait Memory: core::fmt::Debug {
    /// A position: an address, or a list of pages and an offset.
    type Place: Copy + core::fmt::Debug;

    /// The place of a zero-length access.
    const NOWHERE: Self::Place;

    /// Returns the length in bytes. Only [`set_pages`](Self::set_pages) changes it.
    fn len(&self) -> u64;

    /// Returns `true` if the length is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sets or clears the pages of a fast registration. Returns `false` if this kind of memory has
    /// no pages, or if the list is too long. The table calls it while the memory has no users.
    fn set_pages(&self, pages: Option<ListedPages>) -> bool {
        pages.is_none()
    }

    /// Returns the place of byte `offset`, which is at most the length.
    fn place(&self, offset: u64) -> Self::Place;

    /// Returns the place `count` bytes after `place`.
    fn after(place: Self::Place, count: u32) -> Self::Place;

    /// Returns the address of a place; `None` if there is none that a [`Pager`](super::Pager) can
    /// use.
    fn address(_place: Self::Place) -> Option<u64> {
        None
    }

    /// Returns the contiguous bytes starting at `place`, at most `len`.
    ///
    /// # Safety
    /// The memory of `place` is in a table for `'t`, and has at least `len` bytes from `place` on.
    unsafe fn fragment<'t>(place: Self::Place, len: u32) -> Fragment<'t>;

    /// Copies `len` bytes of this memory at `from` to private memory at `to`. Returns `false` if
    /// some of them could not be read; the contents of `to` are then undefined.
    ///
    /// This method and the next four are for memory that stays mapped, as promised by its creator.
    /// If a program may break that promise, its memory type overrides all five.
    ///
    /// # Safety
    /// The `len` bytes at `from` are in fragments of this kind of memory, `len` bytes at `to` are
    /// writable, and the two do not overlap.
    #[inline(always)]
    unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller, and the memory is mapped.
        unsafe { copy_out(from, to, len) };
        true
    }

    /// Copies `len` bytes of private memory at `from` to this memory at `to`. Returns `false` if
    /// some of them could not be written; the others may have been written.
    ///
    /// # Safety
    /// Like [`copy_out`](Self::copy_out), in the other direction.
    #[inline(always)]
    unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller, and the memory is mapped.
        unsafe { copy_in(from, to, len) };
        true
    }

    /// Stores one byte of this memory after all earlier stores. Returns `false` if it could not be
    /// written.
    ///
    /// # Safety
    /// `at` is in a fragment of this kind of memory.
    #[inline(always)]
    unsafe fn store_octet(at: *mut u8, octet: u8) -> bool {
        // SAFETY: guaranteed by the caller, and the memory is mapped; a byte is always aligned.
        unsafe { AtomicU8::from_ptr(at) }.store(octet, Ordering::Release);
        true
    }

    /// Stores a word of this memory atomically after all earlier stores. Returns `false` if it
    /// could not be written.
    ///
    /// # Safety
    /// The eight bytes at `at`, which is aligned, are in a fragment of this kind of memory.
    #[inline(always)]
    unsafe fn store_word(at: *mut u64, word: u64) -> bool {
        // SAFETY: guaranteed by the caller, and the memory is mapped.
        unsafe { AtomicU64::from_ptr(at) }.store(word, Ordering::Release);
        true
    }

    /// Replaces a word of this memory by `new` if it equals `old`, atomically with respect to all
    /// processors. Returns the previous value, or `None` if it could not be accessed.
    ///
    /// # Safety
    /// Like [`store_word`](Self::store_word).
    #[inline(always)]
    unsafe fn exchange(at: *mut u64, old: u64, new: u64) -> Option<u64> {
        let (order, on_failure) = (Ordering::AcqRel, Ordering::Acquire);
        // SAFETY: guaranteed by the caller, and the memory is mapped.
        let word = unsafe { AtomicU64::from_ptr(at) };
        let (Ok(found) | Err(found)) = word.compare_exchange(old, new, order, on_failure);
        Some(found)
    }
}

/// Contiguous bytes of registered memory, of a plan's scratch or of staging, borrowed for `'t`.
///
/// It offers no safe access to the bytes, because other threads and the peer may change them at any
/// time.
#[derive(Debug, Clone, Copy)]
pub struct Fragment<'t> {
    ptr: *mut u8,
    len: usize,
    owner: PhantomData<&'t ()>,
}

impl<'t> Fragment<'t> {
    /// Describes `len` bytes at `ptr`.
    ///
    /// # Safety
    /// All of them are mapped for `'t`, readable, and writable if the memory is registered with a
    /// right to write. If the memory overrides [`Memory::copy_out`], they need not be mapped.
    #[inline]
    pub const unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self {
            ptr,
            len,
            owner: PhantomData,
        }
    }

    /// Describes bytes that are only read.
    #[inline]
    pub(crate) const fn of(octets: &'t [u8]) -> Self {
        Self {
            ptr: octets.as_ptr().cast_mut(),
            len: octets.len(),
            owner: PhantomData,
        }
    }

    /// Describes bytes that may be written.
    #[inline]
    pub(crate) const fn of_mut(octets: &'t mut [u8]) -> Self {
        Self {
            ptr: octets.as_mut_ptr(),
            len: octets.len(),
            owner: PhantomData,
        }
    }

    /// Returns the address.
    #[inline]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Returns the length in bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the length is zero.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the first `len` bytes, or all of them if there are fewer.
    #[inline]
    #[must_use]
    pub const fn first(self, len: usize) -> Self {
        let len = if len < self.len { len } else { self.len };
        Self { len, ..self }
    }
}

/// Checked bytes of registered memory, valid while the STag table is borrowed.
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
    /// An empty span: the result of a zero-length access.
    pub(super) const EMPTY: Self = Self {
        place: M::NOWHERE,
        len: 0,
        table: PhantomData,
    };

    /// Returns `len` bytes of `memory` at `offset`; `None` if they extend beyond its end.
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

    /// Returns the length in bytes.
    #[inline]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Returns `true` if the length is zero.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte, if it has one.
    pub(super) fn address(&self) -> Option<u64> {
        M::address(self.place)
    }

    /// Splits the span after at most `at` bytes.
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

    /// Returns the fragments in order.
    #[inline]
    pub const fn fragments(self) -> Fragments<'t, M> {
        Fragments { rest: self }
    }

    #[inline]
    fn fragment(&self) -> Fragment<'t> {
        // SAFETY: the table checked the range, and is borrowed for `'t`.
        unsafe { M::fragment(self.place, self.len) }
    }

    /// Calls `visit` for the fragments of the first `limit` bytes (at most `len`) until it returns
    /// `false`; returns the last result. For contiguous memory this is one call without a
    /// comparison.
    #[inline]
    fn visit_fragments(&self, limit: u32, mut visit: impl FnMut(Fragment<'t>) -> bool) -> bool {
        let mut rest = Self {
            len: limit,
            ..*self
        };
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

    /// Copies bytes to `dst`, up to the shorter of the two lengths. Returns `false` if some could
    /// not be read.
    #[inline]
    #[must_use]
    pub fn read(&self, dst: &mut [u8]) -> bool {
        let n = dst.len().min(self.len as usize);
        let mut to = dst.as_mut_ptr();
        self.visit_fragments(n as u32, |from| {
            // SAFETY: the fragment is valid registered memory (module invariant). The fragments
            // together are no longer than `dst`, which is private. The two cannot overlap: the
            // program promised to hold no references into registered memory.
            unsafe {
                let copied = M::copy_out(from.ptr, to, from.len);
                to = to.add(from.len);
                copied
            }
        })
    }

    /// Copies like [`read`](Self::read), and continues a CRC over the copy. Returns `None` if some
    /// bytes could not be read.
    #[inline]
    pub(crate) fn read_summed(
        &self,
        f: CopyingCrc32cFn,
        mut crc: u32,
        dst: &mut [u8],
    ) -> Option<u32> {
        let n = dst.len().min(self.len as usize);
        let mut to = dst.as_mut_ptr();
        let all = self.visit_fragments(n as u32, |from| {
            // SAFETY: as in `read`.
            let summed = unsafe { f(crc, from.ptr, to, from.len) };
            to = to.wrapping_add(from.len);
            crc = summed.unwrap_or_default();
            summed.is_some()
        });
        all.then_some(crc)
    }

    /// Copies bytes from `src`, up to the shorter of the two lengths. Returns `false` if some could
    /// not be written.
    #[inline]
    #[must_use]
    pub fn write(&self, src: &[u8]) -> bool {
        let n = src.len().min(self.len as usize);
        let mut from = src.as_ptr();
        self.visit_fragments(n as u32, |to| {
            // SAFETY: as in `read`; the table granted write access.
            unsafe {
                let copied = M::copy_in(from, to.ptr, to.len);
                from = from.add(to.len);
                copied
            }
        })
    }

    /// Copies bytes from `src`, and makes the last one visible after all others, because programs
    /// poll the last octet to detect an RDMA Write. Eight aligned bytes become visible together:
    /// they may be an Atomic Write. Returns `false` if some bytes could not be written.
    #[inline]
    #[must_use]
    pub fn write_last_octet_last(&self, src: &[u8]) -> bool {
        match self.len {
            8 => self.write_eight(src),
            _ => self.write_others_first(src),
        }
    }

    /// Writes all bytes but the last, then stores the last byte.
    #[inline(always)]
    fn write_others_first(&self, src: &[u8]) -> bool {
        let n = src.len().min(self.len as usize);
        let Some((last, head)) = src.get(..n).and_then(|s| s.split_last()) else {
            return true;
        };
        let last_byte = Self {
            place: M::after(self.place, head.len() as u32),
            len: 1,
            ..*self
        };
        // SAFETY: `last_byte` is in the span, to which the table granted write access.
        self.write(head) && unsafe { M::store_octet(last_byte.fragment().ptr, *last) }
    }

    /// Writes eight bytes by a single store if they are aligned. Not inlined, so that other lengths
    /// are as fast as without this case.
    #[cold]
    #[inline(never)]
    fn write_eight(self, src: &[u8]) -> bool {
        match (<[u8; 8]>::try_from(src), self.word()) {
            (Ok(octets), Some(word)) => word.store(octets),
            _ => self.write_others_first(src),
        }
    }

    /// Continues a CRC over the span. Without a CRC function for registered memory, the bytes are
    /// copied to `buffer` in parts. If a program changes them meanwhile, the CRC is wrong; programs
    /// must not change the memory of a posted request. Returns `None` if some bytes could not be
    /// read.
    pub fn crc32c(&self, f: Crc32c, mut crc: u32, buffer: &mut [u8; SUM_PART]) -> Option<u32> {
        if let Some(shared) = f.shared() {
            let all = self.visit_fragments(self.len, |from| {
                // SAFETY: the fragment is valid registered memory (module invariant).
                let summed = unsafe { shared(crc, from.ptr, from.len) };
                crc = summed.unwrap_or_default();
                summed.is_some()
            });
            return all.then_some(crc);
        }
        let mut rest = *self;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(SUM_PART as u32);
            if !part.read(buffer) {
                return None;
            }
            crc = f.append(crc, buffer.get(..part.len as usize).unwrap_or(&[]));
            rest = later;
        }
        Some(crc)
    }

    /// Returns the span as a word for atomics; `None` unless it is 8 contiguous, aligned bytes.
    pub fn word(&self) -> Option<Word<'t, M>> {
        if self.len != 8 {
            return None;
        }
        let fragment = self.fragment();
        let suitable = fragment.len == 8 && fragment.ptr.addr().is_multiple_of(8);
        suitable.then_some(Word {
            fragment,
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
    fragment: Fragment<'t>,
    memory: PhantomData<M>,
}

impl<M: Memory> Word<'_, M> {
    /// Replaces the word by a single store, so that no reader sees a mix of old and new octets.
    /// Returns `false` if it could not be written.
    fn store(&self, octets: [u8; 8]) -> bool {
        // SAFETY: eight valid, aligned bytes, to which the table granted write access. Concurrent
        // accesses are atomic instructions, stores like this one, and copies that involve no Rust
        // reference (module invariant).
        unsafe { M::store_word(self.fragment.ptr.cast(), u64::from_ne_bytes(octets)) }
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
    /// Replaces the word by the result of `f`, atomically with respect to all processors. Returns
    /// the old value, or `None` if the word could not be accessed.
    pub fn update(&self, mut f: impl FnMut(u64) -> u64) -> Option<u64> {
        let mut first = [0; 8];
        // SAFETY: eight valid bytes of this memory, and as many private ones.
        if !unsafe { M::copy_out(self.fragment.ptr, first.as_mut_ptr(), first.len()) } {
            return None;
        }
        // If the word has changed since, or changed during the copy, the exchange fails and returns
        // the present value.
        let mut old = u64::from_ne_bytes(first);
        // If the exchange fails, another processor has made progress, so the loop is lock-free.
        loop {
            // SAFETY: eight valid, aligned bytes, which are only changed atomically.
            let found = unsafe { M::exchange(self.fragment.ptr.cast(), old, f(old)) }?;
            if found == old {
                return Some(old);
            }
            old = found;
        }
    }
}
