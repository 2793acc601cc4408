//! One CPU for each end when both are on this machine: without it the scheduler moves them about
//! and latency jumps between "same CPU" and "two CPUs" from run to run.

use rustix::thread::{CpuSet, sched_setaffinity};

/// Binds the calling thread, and every thread it starts later, to one CPU. Not being allowed to
/// only costs steadiness.
pub(crate) fn pin_to(cpu: usize) {
    if cpu >= CpuSet::MAX_CPU {
        return;
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(e) = sched_setaffinity(None, &set) {
        tracing::warn!(cpu, "cannot bind to one CPU: {e}");
    }
}
