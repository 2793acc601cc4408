//! Memory for registration, and the copy that the kernel performs in a real program. This module
//! contains the only `unsafe` code of the benchmarks.
//!
//! Invariant: an arena is accessed only through raw pointers. It is never freed, so it outlives
//! every memory table.
#![allow(unsafe_code)]

use iwarp_rnic::memory::HostRange;
use iwarp_rnic::qp::Run;
use std::alloc::{Layout, alloc_zeroed};

/// Memory that is never freed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arena {
    addr: u64,
    len: usize,
}

impl Arena {
    /// Allocates `len` zeroed bytes at a page boundary, because the counts would depend on the
    /// alignment.
    pub(crate) fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), 4096).expect("a valid length");
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        assert!(!ptr.is_null(), "out of memory");
        Self {
            addr: ptr as u64,
            len,
        }
    }

    pub(crate) const fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the whole arena as a range for registration.
    pub(crate) fn range(&self) -> HostRange {
        // SAFETY: the memory stays mapped until the process exits, and no reference to it exists.
        unsafe { HostRange::new(self.addr, self.len as u64) }.expect("an allocation does not wrap")
    }

    /// Sets all octets to `octet`.
    pub(crate) fn fill(&self, octet: u8) {
        // SAFETY: the memory is this arena's allocation, and no reference to it exists.
        unsafe { std::ptr::write_bytes(self.addr as *mut u8, octet, self.len) };
    }

    /// Returns `true` if all octets are `octet`.
    pub(crate) fn is_filled_with(&self, octet: u8) -> bool {
        // SAFETY: the address is inside this arena's allocation.
        (0..self.len).all(|i| unsafe { (self.addr as *const u8).add(i).read_volatile() } == octet)
    }
}

/// Copies `src` into the runs, in order, as the kernel does in `readv`. Returns how many octets
/// were copied.
pub(crate) fn read_into(runs: &[Run<'_>], src: &[u8]) -> usize {
    let mut copied = 0;
    for fragment in runs.iter().map(|run| run.fragment) {
        let n = fragment.len().min(src.len() - copied);
        // SAFETY: the runs come from a receive plan that was just created, so they are writable for
        // their whole length. Neither its memory table nor its buffer was used since.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr().add(copied), fragment.as_ptr(), n) };
        copied += n;
    }
    copied
}
