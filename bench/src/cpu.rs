//! CPU time, CPU pinning and memory of this process.

use anyhow::{Context as _, Result, bail};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

/// Binds this thread and its future children to one CPU.
pub(crate) fn pin_to(cpu: usize) -> Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        bail!("CPU {cpu} does not exist");
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("cannot bind to CPU {cpu}"))
}

/// Returns the CPU time (user and system) of this process so far, in microseconds.
pub(crate) fn process_us() -> f64 {
    microseconds(ClockId::ProcessCPUTime)
}

/// Returns the CPU time (user and system) of this thread so far, in microseconds.
pub(crate) fn thread_us() -> f64 {
    microseconds(ClockId::ThreadCPUTime)
}

fn microseconds(clock: ClockId) -> f64 {
    let t = clock_gettime(clock);
    t.tv_sec as f64 * 1e6 + t.tv_nsec as f64 / 1e3
}

/// Returns the resident anonymous memory of this process in bytes, without pages of the program and
/// its libraries, which do not depend on the number of connections.
pub(crate) fn resident() -> u64 {
    status_field("/proc/self/status", "RssAnon:").unwrap_or(0) * 1024
}

/// Returns how often the threads of this process have gone to sleep: the number of their wake-ups.
pub(crate) fn sleeps() -> u64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0;
    };
    tasks
        .flatten()
        .filter_map(|task| {
            let path = task.path().join("status");
            status_field(path.to_str()?, "voluntary_ctxt_switches:")
        })
        .sum()
}

/// Returns the slab memory of the whole kernel in bytes. Sockets are allocated from it.
pub(crate) fn slab() -> u64 {
    status_field("/proc/meminfo", "Slab:").unwrap_or(0) * 1024
}

fn status_field(path: &str, name: &str) -> Option<u64> {
    std::fs::read_to_string(path)
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix(name))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_increases_time_and_memory() {
        let (p, t, r) = (process_us(), thread_us(), resident());
        let block = vec![1u8; 32 << 20];
        let sum: u64 = block.iter().map(|b| u64::from(*b)).sum();
        assert_eq!(sum, 32 << 20);
        assert!(thread_us() > t && process_us() > p);
        assert!(resident() >= r + (30 << 20));
    }

    #[test]
    fn sleeping_is_counted() {
        let before = sleeps();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(sleeps() > before);
        assert!(slab() > 0);
    }
}
