//! The report of a soak run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::disturb::Kind;
use super::end::End;
use super::growth::{Growth, Sample};
use super::network::Side;

/// Counters that both processes report, and their labels in the report.
const OPERATIONS: [(&str, &str); 13] = [
    ("send", "Sends, with acknowledgements"),
    ("write", "Writes, read back"),
    ("read_back", "Reads that verify an earlier Write"),
    ("write_imm", "Writes with immediate data"),
    ("read", "Reads"),
    ("fetch_add", "fetch-and-add"),
    ("compare_swap", "compare-and-swap"),
    ("bind", "memory windows bound"),
    ("write_window", "Writes through a window"),
    ("send_inv", "Sends that invalidate a window"),
    ("local_inv", "local invalidations"),
    ("messages", "messages received and verified"),
    ("announced", "immediate data received and verified"),
];
const CONNECTIONS: [(&str, &str); 6] = [
    ("made", "connections established"),
    ("closed", "closed gracefully"),
    ("lost", "lost"),
    ("failed", "attempts that failed"),
    ("flushed", "requests and receives flushed"),
    ("other_errors", "other error completions"),
];

/// Results of one kind of disturbance.
#[derive(Default)]
struct Row {
    count: u32,
    longest_recovery: Duration,
    /// Lost connections and failed attempts, by reason.
    reasons: BTreeMap<String, u64>,
}

pub(super) struct Report {
    seed: u64,
    run_start: Instant,
    disturbance_start: Instant,
    rows: BTreeMap<Kind, Row>,
}

impl Report {
    pub(super) fn new(seed: u64) -> Self {
        let now = Instant::now();
        Self {
            seed,
            run_start: now,
            disturbance_start: now,
            rows: BTreeMap::new(),
        }
    }

    /// Records the start of a disturbance.
    pub(super) fn begin(&mut self, kind: Kind) {
        self.disturbance_start = Instant::now();
        self.rows.entry(kind).or_default().count += 1;
    }

    /// Records that all connections are up again after a disturbance.
    pub(super) fn recovered(&mut self, kind: Kind, ends: &mut [End; 2]) {
        let row = self.rows.entry(kind).or_default();
        row.longest_recovery = row.longest_recovery.max(self.disturbance_start.elapsed());
        for (reason, count) in ends.iter_mut().flat_map(End::take_reasons) {
            *row.reasons.entry(reason).or_default() += count;
        }
    }

    pub(super) fn print(&self, ends: &[End; 2], growth: &Growth) {
        println!(
            "seed {}, {} s",
            self.seed,
            self.run_start.elapsed().as_secs()
        );
        for (table, rows) in [
            ("operations", &OPERATIONS[..]),
            ("connections", &CONNECTIONS),
        ] {
            println!("\n{table:<40} {:>12} {:>12}", "server", "client");
            for (name, meaning) in rows {
                let [server, client] = ends.each_ref().map(|end| end.total(name));
                println!("  {meaning:<38} {server:>12} {client:>12}");
            }
        }
        println!(
            "\ndisturbances: count, longest recovery, expected effect; below each, lost \
             connections by reason"
        );
        for (kind, row) in &self.rows {
            let effect = if kind.ends_connections() {
                "may end connections"
            } else {
                "must not end any connection"
            };
            println!(
                "  {:<28} {:>4} {:>7.1} s  {effect}",
                kind.name(),
                row.count,
                row.longest_recovery.as_secs_f64()
            );
            for (reason, count) in &row.reasons {
                println!("      {count:>6} {reason}");
            }
        }
        for side in [Side::Server, Side::Client] {
            println!(
                "\n{}: longest-lived process, sampled between disturbances:",
                side.name()
            );
            print_samples(growth.longest(side));
        }
    }
}

/// Prints about ten samples at even intervals, and the last one.
fn print_samples(samples: &[Sample]) {
    let step = samples.len().div_ceil(10).max(1);
    let chosen: Vec<&Sample> = samples.iter().step_by(step).chain(samples.last()).collect();
    let line = |name: &str, value: fn(&Sample) -> u64| {
        let values: Vec<String> = chosen.iter().map(|s| value(s).to_string()).collect();
        println!("  {name:<12} {}", values.join(" "));
    };
    line("RSS, KiB", |sample| sample.rss);
    line("allocated, KiB", |sample| sample.heap >> 10);
    line("descriptors", |sample| sample.descriptors);
    line("threads", |sample| sample.threads);
}
