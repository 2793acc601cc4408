//! Forks. A connection belongs to the process that made it: threads and locks do not survive a fork, and the child must not
//! send anything on its parent's connections.
//!
//! Invariant: the handler only adds to an atomic, which is safe whatever other threads did at the time of the fork.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);
static INSTALL: Once = Once::new();

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Counts forks from now on.
pub(crate) fn install() {
    INSTALL.call_once(|| {
        // SAFETY: the handler obeys the file's invariant and lives as long as the program.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Returns how many forks are between this process and the first one.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}
