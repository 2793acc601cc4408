//! Takes events from a queue as `read(2)` would: it blocks or not as the program has set the descriptor, is restarted after
//! signals as the program has set them up, and is a cancellation point.
//!
//! Programs cancel threads that wait here (`pthread_cancel`), which unwinds through these frames. So the function that waits
//! owns nothing, has an ABI that may be unwound, and calls the C library's own `read`.

use std::ffi::{c_int, c_void};

unsafe extern "C-unwind" {
    fn read(fd: c_int, buf: *mut c_void, count: usize) -> isize;
}

/// Waits until the descriptor of an event queue is readable, and makes it unreadable. Returns 0, or -1 with `errno` set.
///
/// # Safety
/// `fd` is the descriptor of an event queue.
pub(crate) unsafe extern "C-unwind" fn consume(fd: c_int) -> c_int {
    let mut count = 0u64;
    let n = read(fd, (&raw mut count).cast(), 8);
    if n < 0 { -1 } else { 0 }
}

/// Returns `true` if [`consume`] would wait.
pub(crate) fn blocks(fd: c_int) -> bool {
    // SAFETY: reads a flag of a descriptor; a bad number only fails.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK == 0
}

/// Lets reads of a descriptor wait, as programs expect of a new one.
pub(crate) fn make_blocking(fd: c_int) {
    // SAFETY: changes a flag of a descriptor; a bad number only fails.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags >= 0 {
            libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK);
        }
    }
}
