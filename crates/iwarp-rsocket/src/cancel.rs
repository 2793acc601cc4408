//! Disables thread cancellation (`pthread_cancel(3)`) inside the library.
//!
//! The C library's `read`, `write`, `close`, `poll` and others are cancellation points. If a thread
//! is cancelled in one of them, its stack is unwound. When the unwinding reaches a Rust function
//! that C called, the process aborts ("exception not rethrown"), and locks stay locked. So the C
//! interfaces disable cancellation; a request takes effect at the program's next cancellation
//! point.
//!
//! Invariant: the saved state is the C library's, and is restored on the same thread.
#![allow(unsafe_code)]

use libc::c_int;
use std::marker::PhantomData;
use std::ptr::null_mut;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const DISABLE: c_int = 1;

/// Disables cancellation of the calling thread until dropped.
#[derive(Debug)]
pub struct Uncancelled {
    old: c_int,
    /// The state belongs to the thread, so this value must not move to another thread.
    not_send: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Disables cancellation of the calling thread.
    #[inline]
    #[must_use]
    pub fn new() -> Self {
        let mut old = 0;
        // SAFETY: `old` is writable, and the state is a valid value.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut old) };
        Self {
            old,
            not_send: PhantomData,
        }
    }
}

impl Default for Uncancelled {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Uncancelled {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `old` is a valid state, and a null pointer is allowed.
        unsafe { pthread_setcancelstate(self.old, null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the state of this thread.
    fn state() -> c_int {
        Uncancelled::new().old
    }

    #[test]
    fn state_is_restored() {
        let before = state();
        assert_ne!(before, DISABLE);
        let outer = Uncancelled::new();
        drop(Uncancelled::new());
        assert_eq!(state(), DISABLE);
        drop(outer);
        assert_eq!(state(), before);
    }
}
