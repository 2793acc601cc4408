//! The memory of an endpoint. It is accessed only through raw pointers, because the RNIC writes to
//! it without borrowing it.

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

/// Returns the initial byte at an offset.
pub(super) const fn pattern(offset: usize) -> u8 {
    (offset as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]
}

/// Returns the initial content of the memory, which is [`pattern`].
pub(super) fn template() -> &'static [u8] {
    static TEMPLATE: OnceLock<Vec<u8>> = OnceLock::new();
    TEMPLATE.get_or_init(|| (0..ARENA).map(pattern).collect())
}

impl Arena {
    /// Allocates a block that contains [`pattern`].
    pub(super) fn new() -> Self {
        let block: Box<[u64]> = vec![0; ARENA / 8].into();
        let at: *mut u8 = Box::into_raw(block).cast();
        // SAFETY: both are `ARENA` bytes long, and the new block does not overlap the template.
        unsafe { std::ptr::copy_nonoverlapping(template().as_ptr(), at, ARENA) };
        Self { at, len: ARENA }
    }

    /// Returns a part of the block for registration.
    pub(super) fn range(&self, at: usize, len: usize) -> HostRange {
        assert!(at + len <= self.len);
        // SAFETY: the range is inside the block, which outlives the table of the same endpoint and
        // is accessed only through raw pointers.
        unsafe { HostRange::new(self.at as u64 + at as u64, len as u64) }
            .expect("an allocation does not wrap")
    }

    /// Returns a copy of a part of the block.
    pub(super) fn copy(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut out = vec![0; len];
        // SAFETY: the range is inside the block, and the RNIC does not access it during this call.
        unsafe { std::ptr::copy_nonoverlapping(self.at.add(at), out.as_mut_ptr(), len) };
        out
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let block = std::ptr::slice_from_raw_parts_mut(self.at.cast::<u64>(), self.len / 8);
        // SAFETY: `new` created the pointer from a box of this length. The table, which may be
        // dropped later, does not access memory when it is dropped.
        drop(unsafe { Box::from_raw(block) });
    }
}

/// Copies bytes into the runs of a receive plan, as the kernel does in `recvmsg`.
pub(super) fn read_into(runs: &[Run<'_>], mut octets: &[u8]) {
    for fragment in runs.iter().map(|run| run.fragment) {
        let n = fragment.len().min(octets.len());
        // SAFETY: the caller has just created the plan, so each run is writable over its whole
        // length.
        unsafe { std::ptr::copy_nonoverlapping(octets.as_ptr(), fragment.as_ptr(), n) };
        octets = &octets[n..];
    }
    assert!(octets.is_empty(), "the plan is too short");
}
