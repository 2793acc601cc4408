//! Binds each end of a local run to a CPU of its own. Otherwise the scheduler migrates them, and
//! latency varies between "same CPU" and "two CPUs" from run to run.

use rustix::thread::{CpuSet, sched_setaffinity};

/// Binds the calling thread and its future children to one CPU. A failure is only logged.
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
