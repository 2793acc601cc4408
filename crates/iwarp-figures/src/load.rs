//! Measures the load by other programs: the kernel's total minus the time of the measuring
//! processes.

use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity};

/// Ticks per second in /proc (`USER_HZ`), which do not depend on the kernel's own timer.
const TICKS: f64 = 100.0;

/// Columns of /proc/stat: user, nice, system, and steal (time that a hypervisor took away).
const PROGRAMS: &[usize] = &[0, 1, 2, 7];
/// Columns of programs and of interrupts.
const INTERRUPTS: &[usize] = &[0, 1, 2, 5, 6, 7];

/// Returns the CPUs that this thread may use, in ascending order. The list is empty if they are
/// unknown.
#[must_use]
pub fn allowed_cpus() -> Vec<usize> {
    sched_getaffinity(None).map_or_else(
        |_| Vec::new(),
        |allowed| {
            (0..CpuSet::MAX_CPU)
                .filter(|&cpu| allowed.is_set(cpu))
                .collect()
        },
    )
}

/// Returns two CPUs for the two ends of a connection, or `None` if this thread may use only one.
#[must_use]
pub fn two_cpus() -> Option<(usize, usize)> {
    match allowed_cpus()[..] {
        [first, second, ..] => Some((first, second)),
        _ => None,
    }
}

/// The CPUs to watch, and the processes that are excluded.
#[derive(Debug, Clone, Default)]
pub struct Watched {
    /// The CPUs to watch. If empty, all CPUs of the machine are watched.
    pub cpus: Vec<usize>,
    /// Running processes whose time is excluded. This process and its ended children are always
    /// excluded.
    pub own: Vec<u32>,
    /// Include the time of interrupts. Some kernels charge the work for packets to interrupts and
    /// not to the processes of the connection. On such kernels, the measured connection itself
    /// counts as another program.
    pub interrupts: bool,
}

/// A period of measurement.
#[derive(Debug)]
pub struct Watch {
    watched: Watched,
    start: Reading,
}

/// CPU times since the system started, in seconds.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    all: f64,
    own: f64,
}

impl Watch {
    /// Starts a period.
    #[must_use]
    pub fn start(watched: Watched) -> Self {
        let start = Reading::now(&watched);
        Self { watched, start }
    }

    /// Returns the number of CPUs that other programs used on average since the start, from 0 to
    /// the number of watched CPUs. The processes of [`Watched::own`] must still run. Returns 0 if
    /// the kernel does not provide the figures.
    #[must_use]
    pub fn others(&self) -> f64 {
        self.start.others_until(&Reading::now(&self.watched))
    }
}

impl Reading {
    fn now(watched: &Watched) -> Self {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let columns = if watched.interrupts {
            INTERRUPTS
        } else {
            PROGRAMS
        };
        let process = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            with_children(&stat)
        };
        let own = watched.own.iter().map(|pid| process(&pid.to_string()));
        Self {
            at: Instant::now(),
            all: busy(&stat, &watched.cpus, columns),
            own: process("self") + own.sum::<f64>(),
        }
    }

    fn others_until(&self, end: &Self) -> f64 {
        let time = (end.at - self.at).as_secs_f64().max(1e-3);
        ((end.all - self.all) - (end.own - self.own)).max(0.0) / time
    }
}

/// Returns the seconds that `cpus`, or all CPUs if it is empty, have spent in `columns` of
/// /proc/stat.
fn busy(stat: &str, cpus: &[usize], columns: &[usize]) -> f64 {
    let names: Vec<String> = match cpus {
        [] => vec!["cpu".to_owned()],
        _ => cpus.iter().map(|cpu| format!("cpu{cpu}")).collect(),
    };
    let ticks: f64 = stat
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next()?;
            names.iter().any(|known| known == name).then_some(words)
        })
        .map(|words| {
            words
                .enumerate()
                .filter(|(at, _)| columns.contains(at))
                .filter_map(|(_, word)| word.parse::<f64>().ok())
                .sum::<f64>()
        })
        .sum();
    ticks / TICKS
}

/// Returns the CPU seconds of a process and its ended children, from its /proc/PID/stat.
fn with_children(stat: &str) -> f64 {
    // The program's name is in parentheses and may contain any characters, including parentheses.
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return 0.0;
    };
    let fields = rest.split_whitespace().skip(11).take(4);
    fields
        .filter_map(|word| word.parse::<f64>().ok())
        .sum::<f64>()
        / TICKS
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn proc_fields_are_summed() {
        let stat = "cpu  100 20 300 9999 50 1 2 7 0 0\ncpu0 1 0 0\ncpu1 2 0 0\n\
                    cpu10 4 0 0 9 9 3 9\nintr 1\n";
        assert_eq!(busy(stat, &[], INTERRUPTS), 4.3);
        assert_eq!(busy(stat, &[], PROGRAMS), 4.27);
        assert_eq!(busy(stat, &[1, 10], PROGRAMS), 0.06);
        assert_eq!(
            with_children("7 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 50 30 20 0 0"),
            2.0
        );
        assert_eq!((busy("", &[], PROGRAMS), with_children("")), (0.0, 0.0));
    }

    #[test]
    fn own_work_is_not_counted() {
        let at = Instant::now();
        let reading = |seconds, all, own| Reading {
            at: at + Duration::from_secs(seconds),
            all,
            own,
        };
        let start = reading(0, 100.0, 10.0);
        assert_eq!(start.others_until(&reading(2, 103.0, 12.0)), 0.5);
        assert_eq!(start.others_until(&reading(2, 101.0, 12.0)), 0.0);
        assert!(Watch::start(Watched::default()).others() >= 0.0);
    }

    #[test]
    fn two_cpus_exist_if_allowed() {
        let allowed = allowed_cpus();
        assert!(!allowed.is_empty());
        assert_eq!(two_cpus().is_some(), allowed.len() > 1);
    }
}
