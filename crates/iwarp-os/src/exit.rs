//! Work at the normal end of the process. Invariant: the C library calls a plain function that
//! cannot unwind.

use super::process_lock::ProcessLock;
use std::sync::atomic::{AtomicBool, Ordering};

static AT_EXIT: ProcessLock<Vec<fn()>> = ProcessLock::new("sys::exit::AT_EXIT", Vec::new());

extern "C" fn run() {
    let all = std::mem::take(&mut *AT_EXIT.lock());
    for work in all {
        // A panic must not unwind into C, and it can no longer be reported.
        let _ = std::panic::catch_unwind(work);
    }
}

/// Work that runs at most once, at the end of the process. A forked child runs what its parent had
/// planned.
#[derive(Debug)]
pub struct AtExit {
    work: fn(),
    is_planned: AtomicBool,
}

impl AtExit {
    /// Creates work that runs at the end of the process once it is planned.
    pub const fn new(work: fn()) -> Self {
        Self {
            work,
            is_planned: AtomicBool::new(false),
        }
    }

    /// Plans the work; it runs before exit handlers that were installed earlier.
    pub fn plan(&self) {
        if self.is_planned.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut all = AT_EXIT.lock();
        if all.is_empty() {
            // SAFETY: a function of this program, which stays loaded; the call has no other
            // condition.
            unsafe { libc::atexit(run) };
        }
        all.push(self.work);
    }
}
