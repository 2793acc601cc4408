//! Disables thread cancellation (`pthread_cancel(3)`) inside the library.
//!
//! The C library's `read`, `write`, `close`, `poll` and others are cancellation points. Cancelling
//! a thread there unwinds its stack. Where that reaches Rust's border to C, the process aborts
//! ("exception not rethrown"), and the thread's locks stay locked. So the C interfaces work with
//! cancellation disabled, and a request is acted upon at the program's next cancellation point.
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
    /// The state belongs to the thread, so this value must not move to another one.
    of_thread: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Disables cancellation of the calling thread.
    #[inline]
    #[must_use]
    pub fn new() -> Self {
        let mut old = 0;
        // SAFETY: `old` is a valid place, and the state exists.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut old) };
        Self {
            old,
            of_thread: PhantomData,
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
        // SAFETY: restores this thread's previous state; the replaced one is not needed.
        unsafe { pthread_setcancelstate(self.old, null_mut()) };
    }
}
