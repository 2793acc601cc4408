//! Runs functions when the process exits normally. Invariant: the C library calls a function that
//! does not unwind.

use super::process_lock::ProcessLock;
use std::sync::atomic::{AtomicBool, Ordering};

static AT_EXIT: ProcessLock<Vec<fn()>> = ProcessLock::new("sys::exit::AT_EXIT", Vec::new());

extern "C" fn run() {
    let all = std::mem::take(&mut *AT_EXIT.lock());
    for work in all {
        // A panic must not unwind into C, and can no longer be reported.
        let _ = std::panic::catch_unwind(work);
    }
}

/// A function that runs at most once, when the process exits. A forked child also runs the
/// functions that its parent had planned before the fork.
#[derive(Debug)]
pub struct AtExit {
    work: fn(),
    is_planned: AtomicBool,
}

impl AtExit {
    /// Creates the object. [`plan`](Self::plan) must be called for `work` to run.
    pub const fn new(work: fn()) -> Self {
        Self {
            work,
            is_planned: AtomicBool::new(false),
        }
    }

    /// Plans the function. It runs before exit handlers that were installed earlier.
    pub fn plan(&self) {
        if self.is_planned.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut all = AT_EXIT.lock();
        if all.is_empty() {
            // SAFETY: `run` is a function of this library, which is not unloaded. `atexit` requires
            // nothing else.
            unsafe { libc::atexit(run) };
        }
        all.push(self.work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// A panic does not keep later work from running.
    #[test]
    fn each_work_runs_once() {
        static RUNS: AtomicU32 = AtomicU32::new(0);
        fn add(count: u32) {
            RUNS.fetch_add(count, Ordering::Relaxed);
        }
        static ADD_1: AtExit = AtExit::new(|| add(1));
        static PANIC: AtExit = AtExit::new(|| std::panic::resume_unwind(Box::new(())));
        static ADD_10: AtExit = AtExit::new(|| add(10));
        for work in [&ADD_1, &PANIC, &ADD_10, &ADD_1] {
            work.plan();
        }
        for _ in 0..2 {
            run();
            assert_eq!(RUNS.load(Ordering::Relaxed), 11);
        }
    }
}
