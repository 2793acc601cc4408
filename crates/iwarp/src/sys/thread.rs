//! Threads of the engine. Invariant: they run with every signal blocked, so that the program's handlers
//! only ever run on its own threads; the mask of the calling thread is as before afterwards.

use std::io;
use std::mem::MaybeUninit;

/// Starts a detached thread that receives no signals.
///
/// # Errors
/// The kernel's error if no thread can be made.
pub(crate) fn spawn_without_signals(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid to write; `sigfillset` initialises the first before it is read, and
    // `pthread_sigmask` initialises the second if it succeeds, which it does for these arguments.
    let masked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if masked == 0 {
        // SAFETY: initialised by the successful call above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    spawned.map(drop)
}
