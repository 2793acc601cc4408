//! Memory for registration, and the copy that the kernel performs in a real program. This is the
//! only `unsafe` of the benchmarks.
//!
//! Invariant: an arena is accessed through raw pointers only, and is never freed, so no memory
//! table can outlive it.
#![allow(unsafe_code)]

use iwarp_rnic::memory::HostRange;
use iwarp_rnic::qp::Run;
use std::alloc::{Layout, alloc_zeroed};

/// Octets that are never freed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arena {
    addr: u64,
    len: usize,
}

impl Arena {
    /// Allocates `len` zero octets at a page boundary: the counts must not depend on the alignment.
    pub(crate) fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), 4096).expect("a valid length");
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc_zeroed(layout) };
        assert!(!at.is_null(), "out of memory");
        Self {
            addr: at as u64,
            len,
        }
    }

    pub(crate) const fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the whole arena as a range for registration.
    pub(crate) fn range(&self) -> HostRange {
        // SAFETY: mapped for the life of the process, and no reference to it exists.
        unsafe { HostRange::new(self.addr, self.len as u64) }.expect("an allocation does not wrap")
    }

    /// Sets all octets to `octet`.
    pub(crate) fn fill(&self, octet: u8) {
        // SAFETY: our own allocation, to which no reference exists.
        unsafe { std::ptr::write_bytes(self.addr as *mut u8, octet, self.len) };
    }

    /// Returns `true` if all octets are `octet`.
    pub(crate) fn is_filled_with(&self, octet: u8) -> bool {
        // SAFETY: inside our own allocation.
        (0..self.len).all(|i| unsafe { (self.addr as *const u8).add(i).read_volatile() } == octet)
    }
}

/// Copies the octets into the runs, in order, like the kernel in `readv`. Returns how many fitted.
pub(crate) fn read_into(runs: &[Run<'_>], src: &[u8]) -> usize {
    let mut at = 0;
    for fragment in runs.iter().map(|run| run.fragment) {
        let n = fragment.len().min(src.len() - at);
        // SAFETY: the runs are those of a receive plan that was just made, and neither its table
        // nor its buffer was touched since; they are writable for their whole length.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr().add(at), fragment.as_ptr(), n) };
        at += n;
    }
    at
}
