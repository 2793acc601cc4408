//! The memory of an end, accessed only through raw pointers, because the RNIC writes to it without
//! borrowing it.

use std::sync::OnceLock;

use iwarp_rnic::memory::HostRange;
use iwarp_rnic::qp::Run;

use super::end::ARENA;

/// A block of bytes.
#[derive(Debug)]
pub(super) struct Arena {
    at: *mut u8,
    len: usize,
}

/// The initial byte at offset `at`.
pub(super) const fn pattern(at: usize) -> u8 {
    (at as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]
}

/// The initial memory of an end: [`pattern`] everywhere.
pub(super) fn template() -> &'static [u8] {
    static TEMPLATE: OnceLock<Vec<u8>> = OnceLock::new();
    TEMPLATE.get_or_init(|| (0..ARENA).map(pattern).collect())
}

impl Arena {
    /// Creates a block that contains [`pattern`].
    pub(super) fn new() -> Self {
        let block: Box<[u64]> = vec![0; ARENA / 8].into();
        let at: *mut u8 = Box::into_raw(block).cast();
        // SAFETY: both have this length, and the block is new.
        unsafe { std::ptr::copy_nonoverlapping(template().as_ptr(), at, ARENA) };
        Self { at, len: ARENA }
    }

    /// Returns a part of the block for registration.
    pub(super) fn range(&self, at: usize, len: usize) -> HostRange {
        assert!(at + len <= self.len);
        // SAFETY: the range is inside the block, which stays allocated as long as the table of the
        // same end exists, and is accessed only through raw pointers.
        unsafe { HostRange::new(self.at as u64 + at as u64, len as u64) }
            .expect("an allocation does not wrap")
    }

    /// Returns a copy of a part of the block.
    pub(super) fn copy(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut out = vec![0; len];
        // SAFETY: the range is inside the block, and nothing else accesses it now.
        unsafe { std::ptr::copy_nonoverlapping(self.at.add(at), out.as_mut_ptr(), len) };
        out
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let block = std::ptr::slice_from_raw_parts_mut(self.at.cast::<u64>(), self.len / 8);
        // SAFETY: created by `new` from a box of this length. Tables do not access memory when they
        // are dropped.
        drop(unsafe { Box::from_raw(block) });
    }
}

/// Copies bytes into the runs of a receive plan, as the kernel does in `recvmsg`.
pub(super) fn read_into(runs: &[Run<'_>], mut octets: &[u8]) {
    for fragment in runs.iter().map(|run| run.fragment) {
        let n = fragment.len().min(octets.len());
        // SAFETY: the caller has just created the plan, so its runs are writable over their whole
        // length.
        unsafe { std::ptr::copy_nonoverlapping(octets.as_ptr(), fragment.as_ptr(), n) };
        octets = &octets[n..];
    }
    assert!(octets.is_empty(), "the plan is too short");
}
