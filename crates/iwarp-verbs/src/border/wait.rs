//! Reads an event descriptor as `read(2)` does: blocks unless the program set `O_NONBLOCK`,
//! restarts after signals as `sigaction` requests, and is a cancellation point.
//!
//! If the program cancels a thread that waits here (`pthread_cancel`), the stack is unwound. The
//! waiting function therefore has no destructors to run and an unwinding ABI, and it calls the C
//! library's own `read`.

use std::ffi::{c_int, c_void};

unsafe extern "C-unwind" {
    fn read(fd: c_int, buf: *mut c_void, count: usize) -> isize;
}

/// Waits until the event descriptor is readable, and drains it. Returns 0, or -1 with `errno` set.
///
/// # Safety
/// `fd` is the descriptor of an event queue.
pub(crate) unsafe extern "C-unwind" fn consume(fd: c_int) -> c_int {
    let mut count = 0u64;
    let n = read(fd, (&raw mut count).cast(), 8);
    if n < 0 { -1 } else { 0 }
}

/// Returns `true` if [`consume`] blocks when no event is pending.
pub(crate) fn blocks(fd: c_int) -> bool {
    // SAFETY: reads a flag of a descriptor; an invalid number only fails.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK == 0
}

/// Clears `O_NONBLOCK`, which programs expect of a new descriptor.
pub(crate) fn make_blocking(fd: c_int) {
    // SAFETY: changes a flag of a descriptor; an invalid number only fails.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags >= 0 {
            libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK);
        }
    }
}
