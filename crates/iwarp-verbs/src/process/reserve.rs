//! The library's allocator: the C library's allocator, with a reserve for when it is out of memory.
//!
//! Large allocations can fail, and the program gets `ENOMEM`. Rust's collections and reference
//! counts, however, abort the process if a small allocation fails, which a library must not do. So
//! small allocations fall back to a static reserve.
//!
//! Invariant: a flag in `used` is set for each granule of the reserve that is allocated. Only the
//! thread that set `locked` accesses the flags, and each granule has one owner at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

const GRANULE: usize = 64;
const GRANULES: usize = 4096;
const SIZE: usize = GRANULE * GRANULES;
/// Larger allocations never come from the reserve.
const LARGEST: usize = SIZE / 8;
/// Attempts to take the lock. In a forked child, the lock may be held forever.
const ATTEMPTS: u32 = 1_000_000;

#[repr(C, align(4096))]
struct Memory(UnsafeCell<[u8; SIZE]>);

struct Reserve {
    locked: AtomicBool,
    used: UnsafeCell<[bool; GRANULES]>,
    memory: Memory,
}

// SAFETY: `used` is accessed under the lock, and granules in `memory` only by their owners.
unsafe impl Sync for Reserve {}

static RESERVE: Reserve = Reserve {
    locked: AtomicBool::new(false),
    used: UnsafeCell::new([false; GRANULES]),
    memory: Memory(UnsafeCell::new([0; SIZE])),
};

const fn granules(layout: Layout) -> usize {
    layout.size().div_ceil(GRANULE)
}

impl Reserve {
    fn start(&self) -> *mut u8 {
        self.memory.0.get().cast()
    }

    fn contains(&self, p: *mut u8) -> bool {
        (p as usize).wrapping_sub(self.start() as usize) < SIZE
    }

    /// Calls `f` with the flags. Returns `None` if another thread holds the lock for too long.
    fn with_flags<R>(&self, f: impl FnOnce(&mut [bool; GRANULES]) -> R) -> Option<R> {
        let mut attempts = 0;
        while self.locked.swap(true, Ordering::Acquire) {
            attempts += 1;
            if attempts > ATTEMPTS {
                return None;
            }
            std::hint::spin_loop();
        }
        // SAFETY: this thread holds the lock, and `f` cannot keep the reference.
        let result = f(unsafe { &mut *self.used.get() });
        self.locked.store(false, Ordering::Release);
        Some(result)
    }

    #[cold]
    fn allocate(&self, layout: Layout) -> *mut u8 {
        let (count, step) = (granules(layout), layout.align().div_ceil(GRANULE));
        if layout.size() > LARGEST || layout.align() > align_of::<Memory>() {
            return null_mut();
        }
        let found = self.with_flags(|used| {
            let mut starts = (0..GRANULES.saturating_sub(count)).step_by(step);
            let first = starts.find(|&i| used[i..i + count].iter().all(|used| !used))?;
            used[first..first + count].fill(true);
            Some(first)
        });
        match found.flatten() {
            Some(first) => self.start().wrapping_add(first * GRANULE),
            None => null_mut(),
        }
    }

    #[cold]
    fn free(&self, p: *mut u8, layout: Layout) {
        let first = (p as usize - self.start() as usize) / GRANULE;
        // If the lock is not available, the memory is lost. That happens only in a forked child.
        let _ = self.with_flags(|used| used[first..first + granules(layout)].fill(false));
    }
}

pub(crate) struct Allocator;

// SAFETY: memory comes from the C library's allocator or from the reserve. Both give it to one
// owner at a time, with the layout's size and alignment. `contains` shows which of them must free
// it.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let p = System.alloc(layout);
        if p.is_null() {
            return RESERVE.allocate(layout);
        }
        p
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let mut p = System.alloc_zeroed(layout);
        if p.is_null() {
            p = RESERVE.allocate(layout);
            if !p.is_null() {
                p.write_bytes(0, layout.size());
            }
        }
        p
    }

    #[inline]
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        if RESERVE.contains(p) {
            RESERVE.free(p, layout);
        } else {
            System.dealloc(p, layout);
        }
    }

    #[inline]
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !RESERVE.contains(p) {
            let new = System.realloc(p, layout, size);
            if !new.is_null() {
                return new;
            }
        }
        let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
        if !new.is_null() {
            new.copy_from_nonoverlapping(p, layout.size().min(size));
            self.dealloc(p, layout);
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_reuses_freed_memory() {
        let layout = Layout::from_size_align(1000, 256).unwrap();
        let mut all = Vec::new();
        loop {
            let p = RESERVE.allocate(layout);
            if p.is_null() {
                break;
            }
            assert!(RESERVE.contains(p) && (p as usize).is_multiple_of(256));
            all.push(p as usize);
        }
        assert!(all.len() > SIZE / 1024 - 4, "{}", all.len());
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[1] - two[0] >= 1024));
        for p in &all {
            RESERVE.free(*p as *mut u8, layout);
        }
        let again = RESERVE.allocate(layout);
        assert!(all.contains(&(again as usize)));
        RESERVE.free(again, layout);
        let large = Layout::from_size_align(LARGEST + 1, 8).unwrap();
        assert!(RESERVE.allocate(large).is_null());
    }
}
