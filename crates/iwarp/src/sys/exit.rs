//! Work at the normal end of the process. Invariant: the C library calls back a plain function that cannot unwind.

use parking_lot::Mutex;

static AT_EXIT: Mutex<Vec<fn()>> = Mutex::new(Vec::new());

extern "C" fn run() {
    let all = std::mem::take(&mut *AT_EXIT.lock());
    for work in all {
        // A panic must not cross into C, and at this point it cannot be reported.
        let _ = std::panic::catch_unwind(work);
    }
}

/// Calls `work` at the end of the process, before exit handlers that were set earlier. Each call adds one.
pub(crate) fn at_exit(work: fn()) {
    let mut all = AT_EXIT.lock();
    if all.is_empty() {
        // SAFETY: a function of this program, which stays loaded; the call has no other condition.
        unsafe { libc::atexit(run) };
    }
    all.push(work);
}
