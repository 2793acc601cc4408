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

// SAFETY: each call returns a range that no other call returns, aligned as asked within the aligned
// arena, or null.
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

// These functions use volatile accesses. The compiler would turn plain loops into calls of these
// same functions, which would never end.

// SAFETY: nobody else defines the name in this program.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    for at in 0..count {
        // SAFETY: the caller promises `count` octets at both places.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
    to
}

// SAFETY: nobody else defines the name in this program.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if to.addr() <= from.addr() {
        // SAFETY: going up, each octet is read before it is overwritten; the caller promises the
        // ranges.
        return unsafe { memcpy(to, from, count) };
    }
    for at in (0..count).rev() {
        // SAFETY: going down, each octet is read before it is overwritten; the caller promises the
        // ranges.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
    to
}

// SAFETY: nobody else defines the name in this program.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, count: usize) -> *mut u8 {
    for at in 0..count {
        // SAFETY: the caller promises `count` octets. C passes the octet in an int.
        unsafe { to.add(at).write_volatile(value as u8) };
    }
    to
}

// SAFETY: nobody else defines the name in this program.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, two: *const u8, count: usize) -> i32 {
    for at in 0..count {
        // SAFETY: the caller promises `count` octets at both places.
        let (a, b) = unsafe { (one.add(at).read_volatile(), two.add(at).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

// SAFETY: nobody else defines the name in this program.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, two: *const u8, count: usize) -> i32 {
    // SAFETY: the caller promises the same as for `memcmp`.
    unsafe { memcmp(one, two, count) }
}
