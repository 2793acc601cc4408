//! Keeps `pthread_cancel(3)` out of the library.
//!
//! The C library's own `read`, `write`, `close`, `poll` and others are cancellation points. Cancelling a thread unwinds its stack from there, and
//! where that meets Rust's border to C, the whole process ends ("exception not rethrown"). Locks that the thread holds would stay
//! locked besides. So the functions of the C interfaces do their work with cancellation disabled, and a request to cancel that comes meanwhile
//! is obeyed at the program's next cancellation point.
//!
//! Invariant: the state is what the C library gave, and is put back on the same thread.
#![allow(unsafe_code)]

use libc::c_int;
use std::marker::PhantomData;
use std::ptr::null_mut;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

/// Cancellation of the calling thread is disabled until it is dropped.
#[derive(Debug)]
pub struct Uncancelled {
    old: c_int,
    /// The state is the thread's, so the value stays with it.
    of_thread: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Disables cancellation of the calling thread.
    #[inline]
    #[must_use]
    pub fn new() -> Self {
        let mut old = 0;
        // SAFETY: `old` is a valid place; the state is one that there is.
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
        // SAFETY: the state that this thread had; nobody wants to know the one that ends.
        unsafe { pthread_setcancelstate(self.old, null_mut()) };
    }
}
