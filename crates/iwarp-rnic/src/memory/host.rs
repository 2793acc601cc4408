//! Access to host memory: the crate's only `unsafe`.
//!
//! Invariant: a [`Span`] denotes octets that lie inside a [`HostRange`]. The creator of the range has promised that they
//! stay readable and writable for as long as the range is in a [`MemoryTable`](super::MemoryTable). Only the table makes
//! spans, and a span borrows the table, so no span outlives its registration.
//!
//! Other threads, the peer and the kernel change this memory at any time, so no reference to it is ever formed: octets are
//! copied through raw pointers, as a device would. The program that shares the memory with the RNIC has to read it in the
//! same way (volatile or atomic, or after a completion).
//!
//! A port to a kernel replaces this file by one that maps pages.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use iwarp_proto::crc32c::Crc32cFn;

/// A range of host memory that may be registered. The default range is empty.
#[derive(Debug, Default)]
pub struct HostRange {
    addr: u64,
    len: u64,
}

impl HostRange {
    /// Names `len` octets at address `addr` of this process.
    ///
    /// Returns `None` if the range wraps around the address space.
    ///
    /// # Safety
    /// Until the range has left every table it was put in, all its octets must stay
    /// mapped readable, and writable if it is registered with a right that writes.
    /// No Rust reference to them may exist while the RNIC or a peer can access them.
    pub const unsafe fn new(addr: u64, len: u64) -> Option<Self> {
        match addr.checked_add(len) {
            Some(end) if end <= usize::MAX as u64 && len <= isize::MAX as u64 => {
                Some(Self { addr, len })
            }
            _ => None,
        }
    }

    /// First address.
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in octets.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// No octets.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the part of it at `offset`; `None` if that is not inside.
    pub(super) fn span(&self, offset: u64, len: u32) -> Option<Span<'_>> {
        let end = offset.checked_add(u64::from(len))?;
        if end > self.len {
            return None;
        }
        Some(Span {
            addr: self.addr.wrapping_add(offset),
            len,
            table: PhantomData,
        })
    }
}

/// Checked octets of registered memory, valid while the STag table is borrowed.
#[derive(Debug, Clone, Copy)]
pub struct Span<'t> {
    addr: u64,
    len: u32,
    table: PhantomData<&'t ()>,
}

impl<'t> Span<'t> {
    /// No octets: the result of a zero-length access.
    pub const EMPTY: Span<'static> = Span {
        addr: 8,
        len: 0,
        table: PhantomData,
    };

    /// Host address of the first octet.
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in octets.
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// No octets.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Splits it into the first `at` octets and the rest. If it is shorter, the first part is all of it.
    pub fn split_at(self, at: u32) -> (Self, Self) {
        let at = at.min(self.len);
        (
            Self { len: at, ..self },
            Self {
                addr: self.addr.wrapping_add(u64::from(at)),
                len: self.len.wrapping_sub(at),
                ..self
            },
        )
    }

    /// Copies octets out. Copies as many as both sides have.
    #[inline]
    pub fn read(&self, dst: &mut [u8]) {
        let n = dst.len().min(self.len as usize);
        // SAFETY: the span is valid registered memory (module invariant); `dst` is ours and `n` fits both.
        // The two cannot overlap: the program promised not to hold references into registered memory.
        unsafe {
            core::ptr::copy_nonoverlapping(self.addr as usize as *const u8, dst.as_mut_ptr(), n)
        }
    }

    /// Copies octets in. Copies as many as both sides have.
    #[inline]
    pub fn write(&self, src: &[u8]) {
        let n = src.len().min(self.len as usize);
        // SAFETY: as in `read`, and the table gave the span for writing.
        unsafe { core::ptr::copy_nonoverlapping(src.as_ptr(), self.addr as usize as *mut u8, n) }
    }

    /// Copies octets in so that the last one becomes visible after all others, because programs wait for an RDMA Write by
    /// looking at its last octet.
    #[inline]
    pub fn write_last_octet_last(&self, src: &[u8]) {
        let n = src.len().min(self.len as usize);
        let Some((last, head)) = src.get(..n).and_then(|s| s.split_last()) else {
            return;
        };
        self.write(head);
        let end = self.addr.wrapping_add(head.len() as u64) as usize as *mut u8;
        // SAFETY: `end` is the last octet of the span; an octet is always aligned.
        unsafe { AtomicU8::from_ptr(end) }.store(*last, Ordering::Release);
    }

    /// Continues a CRC over the octets.
    #[inline]
    pub fn crc32c(&self, f: Crc32cFn, crc: u32) -> u32 {
        // SAFETY: valid registered memory. The slice lives only for this call; octets that change meanwhile
        // make the CRC wrong, which the contract of posting a work request leaves to the program.
        f(crc, unsafe {
            core::slice::from_raw_parts(self.addr as usize as *const u8, self.len as usize)
        })
    }

    /// Returns the aligned 64-bit word, for atomics; `None` if it has not 8 octets or is not aligned.
    pub fn word(&self) -> Option<Word<'t>> {
        (self.len == 8 && self.addr.is_multiple_of(8)).then_some(Word {
            addr: self.addr,
            table: PhantomData,
        })
    }
}

/// A 64-bit word of registered memory.
#[derive(Debug)]
pub struct Word<'t> {
    addr: u64,
    table: PhantomData<&'t ()>,
}

impl Word<'_> {
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
        let word = unsafe { AtomicU64::from_ptr(self.addr as usize as *mut u64) };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_stay_inside() {
        let mut mem = [0xaau8; 32];
        // SAFETY: `mem` outlives the range and is only reached through it until the end.
        let range = unsafe { HostRange::new(mem.as_mut_ptr() as u64, 32) }.unwrap();
        assert!(range.span(0, 33).is_none());
        assert!(range.span(u64::MAX, 2).is_none());
        assert!(range.span(32, 0).is_some());
        let span = range.span(8, 8).unwrap();
        span.write_last_octet_last(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let mut back = [0; 10];
        range.span(7, 10).unwrap().read(&mut back);
        assert_eq!(back, [0xaa, 1, 2, 3, 4, 5, 6, 7, 8, 0xaa]);
        let (a, b) = span.split_at(3);
        assert_eq!((a.len(), b.len(), b.addr() - a.addr()), (3, 5, 3));
        assert!(b.word().is_none());
    }

    #[test]
    fn range_must_not_wrap() {
        // SAFETY: never registered.
        assert!(unsafe { HostRange::new(u64::MAX - 3, 8) }.is_none());
    }
}
