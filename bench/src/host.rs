//! Facts about the machine, for the report.

use serde_json::{Value, json};
use std::fs;

/// Returns the facts. The network settings are those of this process's network namespace.
pub(crate) fn facts() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpuinfo
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .and_then(|l| l.split_once(':'))
        .map(|(_, name)| name.trim().to_owned());
    json!({
        "cpu": cpu,
        "cpus": std::thread::available_parallelism().map_or(1, usize::from),
        "kernel": line("/proc/sys/kernel/osrelease"),
        "congestion_control": line("/proc/sys/net/ipv4/tcp_congestion_control"),
        "tcp_rmem": line("/proc/sys/net/ipv4/tcp_rmem"),
        "tcp_wmem": line("/proc/sys/net/ipv4/tcp_wmem"),
        "loopback_mtu": line("/sys/class/net/lo/mtu"),
        "open_files": rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
        "iwarp": env!("CARGO_PKG_VERSION"),
    })
}

fn line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().replace('\t', " "))
}
