//! An allocator that never frees, and the memory functions that the compiler calls by name.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering};

const ARENA_BYTES: usize = 4 << 20;

#[repr(align(4096))]
struct Arena {
    bytes: UnsafeCell<[u8; ARENA_BYTES]>,
    used: AtomicUsize,
}

// SAFETY: `used` hands out each octet of `bytes` once, and it is atomic.
unsafe impl Sync for Arena {}

#[global_allocator]
static ARENA: Arena = Arena {
    bytes: UnsafeCell::new([0; ARENA_BYTES]),
    used: AtomicUsize::new(0),
};

// SAFETY: each call returns null, or a range of the arena that no other call returns. The arena is
// aligned to 4096, so the range has the requested alignment.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() > 4096 {
            return null_mut();
        }
        let mut start = 0;
        let claim = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                start = used.checked_next_multiple_of(layout.align())?;
                start
                    .checked_add(layout.size())
                    .filter(|&end| end <= ARENA_BYTES)
            });
        match claim {
            Ok(_) => self.bytes.get().cast::<u8>().wrapping_add(start),
            Err(_) => null_mut(),
        }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

// These functions use volatile accesses, because the compiler would replace plain loops by calls of
// these functions. The recursion would never end.

// SAFETY: no other function of this program has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(dest: *mut u8, src: *const u8, count: usize) -> *mut u8 {
    for i in 0..count {
        // SAFETY: the caller guarantees `count` octets at both addresses.
        unsafe { dest.add(i).write_volatile(src.add(i).read_volatile()) };
    }
    dest
}

// SAFETY: no other function of this program has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(dest: *mut u8, src: *const u8, count: usize) -> *mut u8 {
    if dest.addr() <= src.addr() {
        // SAFETY: in ascending order, each octet is read before it is overwritten. The caller
        // guarantees both ranges.
        return unsafe { memcpy(dest, src, count) };
    }
    for i in (0..count).rev() {
        // SAFETY: in descending order, each octet is read before it is overwritten. The caller
        // guarantees both ranges.
        unsafe { dest.add(i).write_volatile(src.add(i).read_volatile()) };
    }
    dest
}

// SAFETY: no other function of this program has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(dest: *mut u8, value: i32, count: usize) -> *mut u8 {
    for i in 0..count {
        // SAFETY: the caller guarantees `count` octets. C passes the octet in an int.
        unsafe { dest.add(i).write_volatile(value as u8) };
    }
    dest
}

// SAFETY: no other function of this program has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    for i in 0..count {
        // SAFETY: the caller guarantees `count` octets at both addresses.
        let (a, b) = unsafe { (left.add(i).read_volatile(), right.add(i).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

// SAFETY: no other function of this program has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    // SAFETY: the conditions are those of `memcmp`.
    unsafe { memcmp(left, right, count) }
}
