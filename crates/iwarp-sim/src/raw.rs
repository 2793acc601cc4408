//! The simulated hosts' memory, and the simulator's only `unsafe`.
//!
//! An [`Arena`] is a block of octets that is accessed only through raw pointers. References are
//! not allowed, because the RNIC under test writes to the block without borrowing it.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ops::Range;
use std::ptr::NonNull;

use iwarp_rnic::memory::{Fragment, HostRange, Memory};
use iwarp_rnic::qp::Run;

const ALIGN: usize = 64;

/// The memory of one simulated host.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
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
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            handle_alloc_error(layout)
        };
        Self { start, len }
    }

    fn check(&self, off: usize, len: usize) {
        assert!(
            off <= self.len && len <= self.len - off,
            "outside the arena"
        );
    }

    /// Copies octets at `off` to `out`.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub fn read(&self, off: usize, out: &mut [u8]) {
        self.check(off, out.len());
        // SAFETY: the range was checked to be inside our allocation. There are no references into
        // it, so it does not overlap `out`.
        unsafe {
            let from = self.start.as_ptr().add(off);
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
        }
    }

    /// Returns a copy of `len` octets at `off`.
    pub fn copy(&self, off: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(off, &mut out);
        out
    }

    /// Copies `src` to offset `off`.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub fn write(&self, off: usize, src: &[u8]) {
        self.check(off, src.len());
        // SAFETY: the range was checked to be inside our allocation. There are no references into
        // it, so it does not overlap `src`.
        unsafe {
            std::ptr::copy_nonoverlapping(src.as_ptr(), self.start.as_ptr().add(off), src.len());
        }
    }

    /// Returns a part of the arena for registration. Before the arena is dropped, the part must be
    /// deregistered, or its STag table dropped.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub fn range(&self, off: usize, len: usize) -> SimRange {
        self.check(off, len);
        let addr = self.start.as_ptr() as u64 + off as u64;
        // SAFETY: the octets stay allocated as long as the arena exists. `World` drops tables and
        // queue pairs with their arena, and tables do not access memory when dropped. There are no
        // references into the arena.
        let range = unsafe { HostRange::new(addr, len as u64) };
        SimRange(range.expect("an allocation does not wrap"))
    }

    /// Simulates a program that unmaps `len` octets of registered memory: from now on, the RNIC's
    /// accesses to them fail. The simulator still reads them, to detect changes.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub fn unmap(&self, off: usize, len: usize) {
        self.check(off, len);
        let start = self.start.as_ptr().addr() + off;
        UNMAPPED.with_borrow_mut(|unmapped| unmapped.push(start..start + len));
    }

    /// Returns `true` if this fragment is inside the arena.
    pub fn contains(&self, fragment: &Fragment<'_>) -> bool {
        let start = self.start.as_ptr() as usize;
        let addr = fragment.as_ptr() as usize;
        addr >= start && addr - start <= self.len && fragment.len() <= self.len - (addr - start)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with the same layout, and checked the layout.
        unsafe {
            dealloc(
                self.start.as_ptr(),
                Layout::from_size_align_unchecked(self.len, ALIGN),
            );
        }
    }
}

thread_local! {
    /// The addresses that the simulation on this thread has unmapped.
    static UNMAPPED: RefCell<Vec<Range<usize>>> = const { RefCell::new(Vec::new()) };
}

/// Maps all memory again, for the next simulation.
pub fn map_all() {
    UNMAPPED.with_borrow_mut(Vec::clear);
}

/// Returns `true` if all of these octets are mapped.
fn is_mapped(at: *const u8, len: usize) -> bool {
    let at = at.addr();
    UNMAPPED.with_borrow(|all| all.iter().all(|u| at + len <= u.start || u.end <= at))
}

/// Memory of a simulated host: a range whose octets may be unmapped while it is registered.
#[derive(Debug)]
pub struct SimRange(HostRange);

// SAFETY: the range is a `HostRange` inside an arena. Unmapped octets are only marked as unmapped,
// and remain allocated.
unsafe impl Memory for SimRange {
    type Place = u64;

    const NOWHERE: u64 = HostRange::NOWHERE;

    fn len(&self) -> u64 {
        self.0.len()
    }

    fn place(&self, offset: u64) -> u64 {
        self.0.place(offset)
    }

    fn after(place: u64, count: u32) -> u64 {
        HostRange::after(place, count)
    }

    fn address(place: u64) -> Option<u64> {
        HostRange::address(place)
    }

    unsafe fn fragment<'t>(place: u64, len: u32) -> Fragment<'t> {
        // SAFETY: guaranteed by the caller.
        unsafe { HostRange::fragment(place, len) }
    }

    unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        is_mapped(from, len) && unsafe { HostRange::copy_out(from, to, len) }
    }

    unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        is_mapped(to, len) && unsafe { HostRange::copy_in(from, to, len) }
    }

    unsafe fn store_octet(at: *mut u8, octet: u8) -> bool {
        // SAFETY: guaranteed by the caller.
        is_mapped(at, 1) && unsafe { HostRange::store_octet(at, octet) }
    }

    unsafe fn store_word(at: *mut u64, word: u64) -> bool {
        // SAFETY: guaranteed by the caller.
        is_mapped(at.cast(), 8) && unsafe { HostRange::store_word(at, word) }
    }

    unsafe fn exchange(at: *mut u64, old: u64, new: u64) -> Option<u64> {
        // SAFETY: guaranteed by the caller.
        is_mapped(at.cast(), 8)
            .then(|| unsafe { HostRange::exchange(at, old, new) })
            .flatten()
    }
}

/// Copies `src` into the runs, in order, as the kernel does in `recvmsg`. Returns `false` if a run
/// is unmapped; runs before it may have been filled.
///
/// # Safety
/// The runs are those of a receive plan. Neither the STag table nor the plan's buffer has changed
/// since the plan was created.
///
/// # Panics
/// If the runs are shorter than `src`.
pub unsafe fn read_into(runs: &[Run<'_>], mut src: &[u8]) -> bool {
    for fragment in runs.iter().map(|run| run.fragment) {
        let n = fragment.len().min(src.len());
        if !is_mapped(fragment.as_ptr(), n) {
            return false;
        }
        // SAFETY: the caller guarantees that the plan's runs are writable over their whole length.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), fragment.as_ptr(), n) };
        src = &src[n..];
    }
    assert!(src.is_empty(), "the plan is too short");
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_returns_written_octets() {
        let arena = Arena::new(100);
        arena.write(90, &[1, 2, 3]);
        assert_eq!(arena.copy(89, 5), [0, 1, 2, 3, 0]);
        let range = arena.range(90, 3);
        let at = range.0.addr() as usize as *mut u8;
        // SAFETY: the fragment is never read or written.
        let inside = |len| arena.contains(&unsafe { Fragment::new(at, len) });
        assert!(inside(10));
        assert!(!inside(11));
    }

    #[test]
    #[should_panic(expected = "outside the arena")]
    fn read_outside_arena_panics() {
        Arena::new(8).copy(7, 2);
    }
}
