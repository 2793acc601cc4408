//! Taking events from a queue as `read(2)` would: blocking or not as the program set the descriptor, restarted after signals as
//! the program set them up, and a cancellation point.
//!
//! Programs cancel threads that wait here (`pthread_cancel`), which unwinds through these frames. So the waiting itself is a function
//! that owns nothing, with an ABI that may be unwound, and the C library's own `read`.

use std::ffi::{c_int, c_void};

unsafe extern "C-unwind" {
    fn read(fd: c_int, buf: *mut c_void, count: usize) -> isize;
}

/// Waits until the descriptor of an event queue was readable, and makes it unreadable. 0, or -1 and `errno`.
///
/// # Safety
/// `fd` is the descriptor of an event queue.
pub(crate) unsafe extern "C-unwind" fn consume(fd: c_int) -> c_int {
    let mut count = 0u64;
    let n = read(fd, (&raw mut count).cast(), 8);
    if n < 0 { -1 } else { 0 }
}

/// Would [`consume`] wait?
pub(crate) fn blocks(fd: c_int) -> bool {
    // SAFETY: reads a flag of a descriptor; a bad number only fails.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK == 0
}

/// Lets reads of a descriptor wait, which is what programs expect of a new one.
pub(crate) fn make_blocking(fd: c_int) {
    // SAFETY: changes a flag of a descriptor; a bad number only fails.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags >= 0 {
            libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK);
        }
    }
}
