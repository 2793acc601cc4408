//! Work at the normal end of the process. Invariant: the C library calls back a plain function that cannot unwind.

use parking_lot::Mutex;

static AT_EXIT: Mutex<Option<fn()>> = Mutex::new(None);

extern "C" fn run() {
    let work = AT_EXIT.lock().take();
    if let Some(work) = work {
        // A panic must not cross into C; there is nobody left to tell.
        let _ = std::panic::catch_unwind(work);
    }
}

/// Calls `work` once at the end of the process, before its exit handlers that were set earlier. Later calls change nothing.
pub(crate) fn at_exit(work: fn()) {
    let mut slot = AT_EXIT.lock();
    if slot.is_none() {
        *slot = Some(work);
        // SAFETY: a function of this program, which stays loaded; the call has no other condition.
        unsafe { libc::atexit(run) };
    }
}
