//! What registered memory is to the RNIC, and its hands on it.
//!
//! The surroundings bring the memory: one range of addresses in a process ([`HostRange`](super::HostRange)), pages that lie
//! anywhere in a kernel ([`Pages`](super::Pages)). To the RNIC it is a sequence of [`Fragment`]s, octets that lie together.
//! A [`Span`] is a checked part of such a sequence. Everything that the RNIC does to memory is a method of it.
//!
//! Invariant: a [`Span`] denotes octets that lie inside a [`Memory`]. The creator of the memory has promised that they stay
//! readable and writable for as long as it is in a [`MemoryTable`](super::MemoryTable). Only the table makes spans, and a span
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
/// the value has left every table. [`fragment`](Self::fragment) returns at most as many octets as were asked for, and at
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
    /// All of them are mapped for `'t`, readable, and writable where the memory is registered with a right that writes.
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

    /// Visits the fragments of its first `most` octets, which it has. Where all memory lies together, that is one visit without
    /// a comparison.
    #[inline]
    fn each(&self, most: u32, mut visit: impl FnMut(Fragment<'t>)) {
        let mut rest = Self { len: most, ..*self };
        loop {
            let fragment = rest.fragment();
            visit(fragment);
            rest = rest.split_at(fragment.len as u32).1;
            if rest.len == 0 {
                break;
            }
        }
    }

    /// Copies octets out. Copies as many as both sides have.
    #[inline]
    pub fn read(&self, dst: &mut [u8]) {
        let n = dst.len().min(self.len as usize);
        let mut to = dst.as_mut_ptr();
        self.each(n as u32, |from| {
            // SAFETY: the fragment is valid registered memory (module invariant). The fragments together have at most as many
            // octets as `dst`, which is ours. The two cannot overlap: the program promised not to hold references into
            // registered memory.
            unsafe {
                copy_out(from.at, to, from.len);
                to = to.add(from.len);
            }
        });
    }

    /// As [`read`](Self::read), and continues a CRC over what it has copied.
    #[inline]
    pub(crate) fn read_summed(&self, f: CopyingCrc32cFn, mut crc: u32, dst: &mut [u8]) -> u32 {
        let n = dst.len().min(self.len as usize);
        let mut to = dst.as_mut_ptr();
        self.each(n as u32, |from| {
            // SAFETY: as in `read`.
            unsafe {
                crc = f(crc, from.at, to, from.len);
                to = to.add(from.len);
            }
        });
        crc
    }

    /// Copies octets in. Copies as many as both sides have.
    #[inline]
    pub fn write(&self, src: &[u8]) {
        let n = src.len().min(self.len as usize);
        let mut from = src.as_ptr();
        self.each(n as u32, |to| {
            // SAFETY: as in `read`, and the table gave the span for writing.
            unsafe {
                copy_in(from, to.at, to.len);
                from = from.add(to.len);
            }
        });
    }

    /// Copies octets in so that the last one becomes visible after all others, because programs wait for an RDMA Write by
    /// looking at its last octet. Eight octets that are aligned in memory become visible at once, because they may be an atomic write.
    #[inline]
    pub fn write_last_octet_last(&self, src: &[u8]) {
        match self.len {
            8 => self.write_eight(src),
            _ => self.write_others_first(src),
        }
    }

    /// The same, where nothing is stored at once but the last octet.
    #[inline(always)]
    fn write_others_first(&self, src: &[u8]) {
        let n = src.len().min(self.len as usize);
        let Some((last, head)) = src.get(..n).and_then(|s| s.split_last()) else {
            return;
        };
        self.write(head);
        let end = Self {
            place: M::after(self.place, head.len() as u32),
            len: 1,
            ..*self
        };
        // SAFETY: the last octet of the span; an octet is always aligned.
        unsafe { AtomicU8::from_ptr(end.fragment().at) }.store(*last, Ordering::Release);
    }

    /// The same for eight octets. It ends here and does not come back to the other way, which therefore costs nothing more.
    #[cold]
    #[inline(never)]
    fn write_eight(self, src: &[u8]) {
        match (<[u8; 8]>::try_from(src), self.word()) {
            (Ok(octets), Some(word)) => word.store(octets),
            _ => self.write_others_first(src),
        }
    }

    /// Continues a CRC over the octets. If there is no function for registered memory, they are copied to `room` part by part.
    /// Octets that change meanwhile make the CRC wrong, which the contract of posting a work request leaves to the program.
    pub fn crc32c(&self, f: Crc32c, mut crc: u32, room: &mut [u8; SUM_PART]) -> u32 {
        if let Some(shared) = f.shared() {
            self.each(self.len, |of| {
                // SAFETY: the fragment is valid registered memory (module invariant).
                crc = unsafe { shared(crc, of.at, of.len) };
            });
            return crc;
        }
        let mut rest = *self;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(SUM_PART as u32);
            part.read(room);
            crc = f.append(crc, room.get(..part.len as usize).unwrap_or(&[]));
            rest = later;
        }
        crc
    }

    /// Returns the 64-bit word, for atomics; `None` if it has not 8 octets, does not lie together, or is not aligned.
    pub fn word(&self) -> Option<Word<'t>> {
        if self.len != 8 {
            return None;
        }
        let at = self.fragment();
        let whole = at.len == 8 && at.at.addr().is_multiple_of(8);
        whole.then_some(Word { at })
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
pub struct Word<'t> {
    at: Fragment<'t>,
}

impl Word<'_> {
    /// Replaces the word by these octets with one store: whoever reads all of it sees the old octets or these, and never some of each.
    fn store(&self, octets: [u8; 8]) {
        // SAFETY: eight valid, aligned octets, and the table gave the span for writing. Others who change them at the same time are the
        // processor's atomics, other stores like this, and copies that no reference of Rust takes part in (module invariant).
        let word = unsafe { AtomicU64::from_ptr(self.at.at.cast()) };
        word.store(u64::from_ne_bytes(octets), Ordering::Release);
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
    /// Replaces the word by the result of `f`, atomically with respect to every processor, and returns the old value.
    pub fn update(&self, mut f: impl FnMut(u64) -> u64) -> u64 {
        // SAFETY: eight valid, aligned octets, only touched atomically here.
        let word = unsafe { AtomicU64::from_ptr(self.at.at.cast()) };
        let mut old = word.load(Ordering::Relaxed);
        // The loop ends: a failed exchange means that another processor made progress.
        while let Err(now) =
            word.compare_exchange_weak(old, f(old), Ordering::AcqRel, Ordering::Relaxed)
        {
            old = now;
        }
        old
    }
}
