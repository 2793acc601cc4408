//! The simulated hosts' memory, and the simulator's only `unsafe`.
//!
//! An [`Arena`] is one block of octets that is accessed only through raw pointers. References are not allowed, because the RNIC
//! under test writes to the block without borrowing it.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use iwarp_rnic::memory::Fragment;
use iwarp_rnic::memory::HostRange;
use iwarp_rnic::qp::Run;

const ALIGN: usize = 64;

/// The memory of one simulated host.
#[derive(Debug)]
pub struct Arena {
    at: NonNull<u8>,
    len: usize,
}

impl Arena {
    /// Allocates `len` octets of zeros, aligned to 64.
    ///
    /// # Panics
    /// If `len` is zero or too long for an allocation.
    pub fn new(len: usize) -> Self {
        assert!(len > 0);
        let layout = Layout::from_size_align(len, ALIGN).expect("arena too long");
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc_zeroed(layout) };
        let Some(at) = NonNull::new(at) else {
            handle_alloc_error(layout)
        };
        Self { at, len }
    }

    fn check(&self, off: usize, len: usize) {
        assert!(
            off <= self.len && len <= self.len - off,
            "outside the arena"
        );
    }

    /// Copies octets out.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub fn read(&self, off: usize, out: &mut [u8]) {
        self.check(off, out.len());
        // SAFETY: the range was checked to be inside our allocation. There are no references into it, so it does not overlap `out`.
        unsafe {
            std::ptr::copy_nonoverlapping(self.at.as_ptr().add(off), out.as_mut_ptr(), out.len());
        }
    }

    /// Returns a copy of `len` octets at `off`.
    pub fn copy(&self, off: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(off, &mut out);
        out
    }

    /// Copies octets in.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub fn write(&self, off: usize, src: &[u8]) {
        self.check(off, src.len());
        // SAFETY: as in `read`.
        unsafe {
            std::ptr::copy_nonoverlapping(src.as_ptr(), self.at.as_ptr().add(off), src.len());
        }
    }

    /// Returns a part of the arena for registration. It must be deregistered, or its STag table dropped, before the arena is dropped.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub fn range(&self, off: usize, len: usize) -> HostRange {
        self.check(off, len);
        let addr = self.at.as_ptr() as u64 + off as u64;
        // SAFETY: the octets live as long as the arena; `World` drops tables and queue pairs with their arena, and
        // tables do not touch memory when dropped. No reference into the arena is ever made.
        unsafe { HostRange::new(addr, len as u64) }.expect("an allocation does not wrap")
    }

    /// Returns `true` if this fragment is inside the arena.
    pub fn contains(&self, fragment: &Fragment<'_>) -> bool {
        let start = self.at.as_ptr() as usize;
        let addr = fragment.as_ptr() as usize;
        addr >= start && addr - start <= self.len && fragment.len() <= self.len - (addr - start)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout, which was valid there.
        unsafe {
            dealloc(
                self.at.as_ptr(),
                Layout::from_size_align_unchecked(self.len, ALIGN),
            );
        }
    }
}

/// Copies `src` into the runs, in order, as the kernel does in `recvmsg`.
///
/// # Safety
/// The runs come from a receive plan. Its STag table and buffer were not changed since the plan was made.
///
/// # Panics
/// If the runs are shorter than `src`.
pub unsafe fn read_into(runs: &[Run<'_>], mut src: &[u8]) {
    for fragment in runs.iter().map(|run| run.fragment) {
        let n = fragment.len().min(src.len());
        // SAFETY: the plan's runs are writable for their whole length (contract of this function).
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), fragment.as_ptr(), n) };
        src = &src[n..];
    }
    assert!(src.is_empty(), "the plan is too short");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_reads_what_was_written() {
        let arena = Arena::new(100);
        arena.write(90, &[1, 2, 3]);
        assert_eq!(arena.copy(89, 5), [0, 1, 2, 3, 0]);
        let range = arena.range(90, 3);
        let at = range.addr() as usize as *mut u8;
        // SAFETY: never read or written.
        let inside = |len| arena.contains(&unsafe { Fragment::new(at, len) });
        assert!(inside(10));
        assert!(!inside(11));
    }

    #[test]
    #[should_panic(expected = "outside the arena")]
    fn arena_is_bounded() {
        Arena::new(8).copy(7, 2);
    }
}
