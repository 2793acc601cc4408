//! Who uses the CPUs: the kernel's total less what this program and its children used.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity};

/// CPUs that other programs may use during a sample.
pub(super) const LIMIT: f64 = 0.15;
/// How long a look at the machine takes.
const LOOK: Duration = Duration::from_millis(250);
/// Ticks of /proc per second: fixed for programs on Linux, whatever the kernel's own.
const TICKS: f64 = 100.0;

/// CPU time used so far, in seconds.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    all: f64,
    own: f64,
}

impl Reading {
    fn now() -> Self {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let own = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self {
            at: Instant::now(),
            all: busy(&stat),
            own: own_and_children(&own),
        }
    }

    fn others_until(&self, end: &Self) -> f64 {
        let time = (end.at - self.at).as_secs_f64().max(1e-3);
        ((end.all - self.all) - (end.own - self.own)).max(0.0) / time
    }
}

/// Watches samples, and waits for a quiet machine.
#[derive(Debug)]
pub(super) struct Quiet {
    start: Reading,
    patience: Duration,
}

impl Quiet {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            start: Reading::now(),
            patience,
        }
    }

    /// A sample begins.
    pub(super) fn begin(&mut self) {
        self.start = Reading::now();
    }

    /// CPUs that others used since it began. Its processes have ended and were waited for.
    pub(super) fn others(&self) -> f64 {
        self.start.others_until(&Reading::now())
    }

    /// Returns when the machine is quiet, or the patience for the whole run is used up.
    pub(super) fn wait(&mut self) {
        while !self.patience.is_zero() {
            let start = Reading::now();
            std::thread::sleep(LOOK);
            self.patience = self.patience.saturating_sub(LOOK);
            if start.others_until(&Reading::now()) <= LIMIT {
                return;
            }
        }
    }
}

/// Seconds of user, nice, system, interrupt and stolen time of all CPUs.
fn busy(stat: &str) -> f64 {
    let ticks: Vec<f64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|w| w.parse().ok())
        .collect();
    [0, 1, 2, 5, 6, 7]
        .iter()
        .filter_map(|&i| ticks.get(i))
        .sum::<f64>()
        / TICKS
}

/// Seconds that a process and its children that have ended used.
fn own_and_children(stat: &str) -> f64 {
    // The program's name stands in parentheses and may contain anything.
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return 0.0;
    };
    let fields: Vec<f64> = rest
        .split_whitespace()
        .map(|w| w.parse().unwrap_or(0.0))
        .collect();
    fields.iter().skip(11).take(4).sum::<f64>() / TICKS
}

/// Two CPUs for the two ends; `None` where there is only one.
pub(super) fn two_cpus() -> Option<(usize, usize)> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&c| allowed.is_set(c));
    Some((cpus.next()?, cpus.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc() {
        assert_eq!(busy("cpu  100 20 300 9999 50 1 2 7 0 0\ncpu0 1\n"), 4.3);
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 50 30 20 0 0";
        assert_eq!(own_and_children(stat), 2.0);
        assert_eq!((busy(""), own_and_children("")), (0.0, 0.0));
    }

    #[test]
    fn waiting_ends_when_patience_does() {
        let mut quiet = Quiet::new(Duration::from_millis(1));
        quiet.wait();
        assert!(quiet.others() >= 0.0 && quiet.patience.is_zero());
    }
}
