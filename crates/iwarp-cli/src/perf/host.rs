//! Describes the machine, for the report.

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// The machine, and the time of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostInfo {
    /// Name of the processor, from the kernel.
    pub(crate) cpu: String,
    /// Processors that this process may use.
    pub(crate) cores: usize,
    /// Kernel name and release.
    pub(crate) kernel: String,
    /// TCP congestion control of new connections.
    pub(crate) congestion_control: String,
    /// Current time, RFC 3339, UTC.
    pub(crate) date: String,
    pub(crate) iwarp: String,
}

impl HostInfo {
    /// Collects the facts; unavailable ones are "unknown".
    pub(crate) fn collect() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpuinfo.lines().find_map(|l| {
                l.split_once(':')
                    .filter(|(k, _)| k.trim() == name)
                    .map(|(_, v)| v.trim().to_owned())
            })
        };
        let unknown = || "unknown".to_owned();
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        Self {
            cpu: field("model name")
                .or_else(|| field("Model"))
                .unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: first_line("/proc/sys/kernel/osrelease")
                .map_or_else(unknown, |r| format!("Linux {r}")),
            congestion_control: first_line("/proc/sys/net/ipv4/tcp_congestion_control")
                .unwrap_or_else(unknown),
            date: rfc3339(seconds),
            iwarp: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Returns the processor time of this process so far, in microseconds.
pub(crate) fn cpu_us() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

fn first_line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned()).filter(|s| !s.is_empty())
}

/// Formats seconds since 1970 as `2005-12-30T23:59:59Z`.
fn rfc3339(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let leap = |y: u64| y.is_multiple_of(4) && !y.is_multiple_of(100) || y.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for len in [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ] {
        if days < len {
            break;
        }
        days -= len;
        month += 1;
    }
    format!(
        "{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}Z",
        days + 1,
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted() {
        for (s, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(s), text);
        }
    }

    #[test]
    fn this_host_is_described() {
        let h = HostInfo::collect();
        assert!(h.cores >= 1 && h.kernel.starts_with("Linux ") && h.date.ends_with('Z'));
    }
}
