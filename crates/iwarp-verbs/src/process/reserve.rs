//! The library's allocator: the C library's, with a reserve for when that has no memory.
//!
//! What is large is allocated by calls that can fail, and the program hears `ENOMEM`. But Rust's collections and reference counts end the
//! process if one of their small allocations fails, which no library may do to a program. So small allocations are served from a reserve
//! that was part of the library when it was loaded.
//!
//! Invariant: a bit of `used` is set for each granule of the reserve that belongs to somebody. The bits are accessed by the thread that has
//! `locked` set, and memory is given to one owner at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

const GRANULE: usize = 64;
const GRANULES: usize = 4096;
const SIZE: usize = GRANULE * GRANULES;
/// Larger allocations are not served from the reserve.
const LARGEST: usize = SIZE / 8;
/// Looks at a lock that another thread has. In a child of a fork it may be locked for ever.
const LOOKS: u32 = 1_000_000;

#[repr(C, align(4096))]
struct Memory(UnsafeCell<[u8; SIZE]>);

/// The reserve.
struct Reserve {
    locked: AtomicBool,
    used: UnsafeCell<[bool; GRANULES]>,
    memory: Memory,
}

// SAFETY: `used` is accessed under the lock, and `memory` by those to whom it was given.
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

    fn has(&self, at: *mut u8) -> bool {
        (at as usize).wrapping_sub(self.start() as usize) < SIZE
    }

    /// Calls `f` with the bits. Returns `None` if another thread keeps them locked.
    fn locked<R>(&self, f: impl FnOnce(&mut [bool; GRANULES]) -> R) -> Option<R> {
        let mut looks = 0;
        while self.locked.swap(true, Ordering::Acquire) {
            looks += 1;
            if looks > LOOKS {
                return None;
            }
            std::hint::spin_loop();
        }
        // SAFETY: this thread has the lock, and `f` cannot keep the reference.
        let result = f(unsafe { &mut *self.used.get() });
        self.locked.store(false, Ordering::Release);
        Some(result)
    }

    #[cold]
    fn take(&self, layout: Layout) -> *mut u8 {
        let (count, step) = (granules(layout), layout.align().div_ceil(GRANULE));
        if layout.size() > LARGEST || layout.align() > align_of::<Memory>() {
            return null_mut();
        }
        let found = self.locked(|used| {
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
    fn give_back(&self, at: *mut u8, layout: Layout) {
        let first = (at as usize - self.start() as usize) / GRANULE;
        // What cannot be given back is lost, which only a child of a fork may see.
        let _ = self.locked(|used| used[first..first + granules(layout)].fill(false));
    }
}

/// The allocator of the library.
pub(crate) struct Allocator;

// SAFETY: memory comes from the C library's allocator, or from the reserve, which gives it to one owner at a time, in the layout's size and
// alignment. Where it came from is known by its address.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let at = System.alloc(layout);
        if at.is_null() {
            return RESERVE.take(layout);
        }
        at
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let mut at = System.alloc_zeroed(layout);
        if at.is_null() {
            at = RESERVE.take(layout);
            if !at.is_null() {
                at.write_bytes(0, layout.size());
            }
        }
        at
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if RESERVE.has(at) {
            RESERVE.give_back(at, layout);
        } else {
            System.dealloc(at, layout);
        }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !RESERVE.has(at) {
            let new = System.realloc(at, layout, size);
            if !new.is_null() {
                return new;
            }
        }
        let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
        if !new.is_null() {
            new.copy_from_nonoverlapping(at, layout.size().min(size));
            self.dealloc(at, layout);
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_gives_memory_once_and_takes_it_back() {
        let layout = Layout::from_size_align(1000, 256).unwrap();
        let mut all = Vec::new();
        loop {
            let at = RESERVE.take(layout);
            if at.is_null() {
                break;
            }
            assert!(RESERVE.has(at) && (at as usize).is_multiple_of(256));
            all.push(at as usize);
        }
        assert!(all.len() > SIZE / 1024 - 4, "{}", all.len());
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[1] - two[0] >= 1024));
        for at in &all {
            RESERVE.give_back(*at as *mut u8, layout);
        }
        let again = RESERVE.take(layout);
        assert!(all.contains(&(again as usize)));
        RESERVE.give_back(again, layout);
        let large = Layout::from_size_align(LARGEST + 1, 8).unwrap();
        assert!(RESERVE.take(large).is_null());
    }
}
