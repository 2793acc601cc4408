//! Formats the statistics as OpenMetrics text (version 1.0), which Prometheus and others read.
//!
//! All samples of a metric must be adjacent, so the writer visits all processes once per metric.

use super::document::{Connection, Counters, Device, ProcessStats, QueuePair, counter};
use std::fmt::{Display, Write as _};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Info,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Info => "info",
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge => "",
            Self::Info => "_info",
        }
    }
}

/// The library's counters: name in the library, name of the metric, unit, and help text.
const COUNTERS: [(&str, &str, &str, &str); 16] = [
    (
        "tx_bytes",
        "sent_bytes",
        "bytes",
        "Octets handed to TCP, framing included.",
    ),
    (
        "rx_bytes",
        "received_bytes",
        "bytes",
        "Octets taken from TCP, framing included.",
    ),
    (
        "tx_payload",
        "sent_payload_bytes",
        "bytes",
        "Payload octets sent.",
    ),
    (
        "rx_payload",
        "received_payload_bytes",
        "bytes",
        "Payload octets placed.",
    ),
    (
        "rx_direct",
        "received_direct_bytes",
        "bytes",
        "Payload octets read straight to their destination.",
    ),
    ("tx_fpdus", "sent_fpdus", "", "FPDUs sent."),
    ("rx_fpdus", "received_fpdus", "", "FPDUs accepted."),
    ("tx_messages", "sent_messages", "", "Messages sent in full."),
    (
        "rx_messages",
        "received_messages",
        "",
        "Messages received in full.",
    ),
    (
        "rx_requests",
        "served_requests",
        "",
        "RDMA Read requests and atomics served.",
    ),
    ("completions", "completions", "", "Completions written."),
    (
        "crc_errors",
        "crc_errors",
        "",
        "FPDUs dropped because of a wrong CRC.",
    ),
    (
        "marker_errors",
        "marker_errors",
        "",
        "FPDUs dropped because of a wrong marker.",
    ),
    (
        "receiver_not_ready",
        "receiver_not_ready",
        "",
        "Sends that arrived before a receive was posted.",
    ),
    (
        "terminates_sent",
        "sent_terminates",
        "",
        "Terminate messages sent.",
    ),
    (
        "terminates_received",
        "received_terminates",
        "",
        "Terminate messages received.",
    ),
];

/// The text so far, and the processes that it describes.
struct Writer<'a> {
    out: String,
    stats: &'a [ProcessStats],
}

/// The labels of a sample, in order.
type Labels<'a> = Vec<(&'static str, &'a dyn Display)>;

impl Writer<'_> {
    fn family(&mut self, name: &str, kind: Kind, unit: &str, help: &str) {
        let _ = writeln!(self.out, "# TYPE {name} {}", kind.name());
        if !unit.is_empty() {
            let _ = writeln!(self.out, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.out, "# HELP {name} {help}");
    }

    fn sample(&mut self, name: &str, kind: Kind, labels: &Labels<'_>, value: impl Display) {
        let _ = write!(self.out, "{name}{}", kind.suffix());
        for (i, (label, value)) in labels.iter().enumerate() {
            let separator = if i == 0 { '{' } else { ',' };
            let _ = write!(
                self.out,
                "{separator}{label}=\"{}\"",
                escaped(&value.to_string())
            );
        }
        let _ = writeln!(self.out, "}} {value}");
    }

    /// Writes a metric with one sample per process.
    fn processes(
        &mut self,
        name: &str,
        unit: &str,
        help: &str,
        value: impl Fn(&ProcessStats) -> f64,
    ) {
        self.family(name, Kind::Gauge, unit, help);
        for (copy, stats) in copies(self.stats) {
            self.sample(
                name,
                Kind::Gauge,
                &process_labels(stats, &copy),
                value(stats),
            );
        }
    }

    /// Writes a metric with one sample per device.
    fn devices(
        &mut self,
        (name, kind, unit, help): (&str, Kind, &str, &str),
        value: impl Fn(&Device) -> u64,
    ) {
        self.family(name, kind, unit, help);
        for (copy, stats) in copies(self.stats) {
            for device in &stats.document.devices {
                let mut labels = process_labels(stats, &copy);
                labels.push(("device", &device.name));
                self.sample(name, kind, &labels, value(device));
            }
        }
    }

    /// Writes a metric with one sample per queue pair that has a value.
    fn queue_pairs<V: Display>(
        &mut self,
        (name, kind, unit, help): (&str, Kind, &str, &str),
        value: impl Fn(&QueuePair) -> Option<V>,
    ) {
        self.family(name, kind, unit, help);
        for (copy, stats) in copies(self.stats) {
            for qp in &stats.document.queue_pairs {
                let Some(value) = value(qp) else { continue };
                let mut labels = process_labels(stats, &copy);
                labels.push(("device", &qp.device));
                labels.push(("qp", &qp.number));
                self.sample(name, kind, &labels, value);
            }
        }
    }

    /// Writes a metric with one sample per queue pair whose connection has a value.
    fn connections(
        &mut self,
        head: (&str, Kind, &str, &str),
        value: impl Fn(&Connection) -> Option<f64>,
    ) {
        self.queue_pairs(head, |qp| value(qp.connection.as_ref()?));
    }
}

/// Returns the processes. If a program has loaded the library twice, its process ID occurs twice.
/// The second occurrence gets a number for the label `copy`, because samples must be unique.
fn copies(stats: &[ProcessStats]) -> impl Iterator<Item = (Option<usize>, &ProcessStats)> {
    stats.iter().enumerate().map(|(i, one)| {
        let copy = stats.iter().take(i).filter(|t| t.pid == one.pid).count();
        ((copy > 0).then_some(copy), one)
    })
}

fn process_labels<'a>(stats: &'a ProcessStats, copy: &'a Option<usize>) -> Labels<'a> {
    let mut labels: Labels<'a> = vec![("pid", &stats.pid)];
    if let Some(copy) = copy {
        labels.push(("copy", copy));
    }
    labels
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    let mut out = String::new();
    for c in value.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

pub(super) fn text(stats: &[ProcessStats]) -> String {
    let mut w = Writer {
        out: String::new(),
        stats,
    };
    infos(&mut w);
    w.processes(
        "iwarp_process_age_seconds",
        "seconds",
        "Time since the process began to use the library.",
        |stats| seconds(stats.document.process.age_ns),
    );
    devices(&mut w);
    queue_pairs(&mut w);
    connections(&mut w);
    w.out.push_str("# EOF\n");
    w.out
}

/// Writes the metrics of type `info`, whose values are text.
fn infos(w: &mut Writer<'_>) {
    let name = "iwarp_process";
    w.family(name, Kind::Info, "", "Processes that use the library.");
    for (copy, stats) in copies(w.stats) {
        let p = &stats.document.process;
        let mut labels = process_labels(stats, &copy);
        labels.push(("uid", &stats.uid));
        labels.push(("command", &p.command));
        labels.push(("version", &p.version));
        w.sample(name, Kind::Info, &labels, 1);
    }
    let name = "iwarp_queue_pair";
    w.family(name, Kind::Info, "", "Queue pairs, their states and peers.");
    for (copy, stats) in copies(w.stats) {
        for qp in &stats.document.queue_pairs {
            let mut labels = process_labels(stats, &copy);
            labels.push(("device", &qp.device));
            labels.push(("qp", &qp.number));
            labels.push(("state", &qp.state));
            labels.push(("kind", &qp.kind));
            if let Some(connection) = &qp.connection {
                labels.push(("local", &connection.local));
                labels.push(("peer", &connection.peer));
            }
            w.sample(name, Kind::Info, &labels, 1);
        }
    }
}

fn devices(w: &mut Writer<'_>) {
    use Kind::{Counter, Gauge};
    w.devices(
        (
            "iwarp_device_queue_pairs",
            Gauge,
            "",
            "Queue pairs that exist.",
        ),
        |d| d.queue_pairs,
    );
    w.devices(
        (
            "iwarp_device_completion_queues",
            Gauge,
            "",
            "Completion queues that exist.",
        ),
        |d| d.completion_queues,
    );
    w.devices(
        (
            "iwarp_device_registrations",
            Gauge,
            "",
            "Memory regions and windows.",
        ),
        |d| d.registrations,
    );
    w.devices(
        (
            "iwarp_device_registered_bytes",
            Gauge,
            "bytes",
            "Octets of memory that are registered.",
        ),
        |d| d.registered_octets,
    );
    for (key, name, unit, help) in COUNTERS {
        let name = format!("iwarp_device_{name}");
        let help = format!("{help} All queue pairs of the device since the process began.");
        w.devices((&name, Counter, unit, &help), |d| counter(&d.counters, key));
    }
}

fn queue_pairs(w: &mut Writer<'_>) {
    use Kind::{Counter, Gauge};
    for (key, name, unit, help) in COUNTERS {
        let name = format!("iwarp_queue_pair_{name}");
        let of = |counters: &Counters| counters.get(key).copied();
        w.queue_pairs((&name, Counter, unit, help), |qp| of(&qp.counters));
    }
    w.queue_pairs(
        (
            "iwarp_queue_pair_sends_outstanding",
            Gauge,
            "",
            "Send work requests posted and not complete.",
        ),
        |qp| Some(qp.sends_outstanding),
    );
    w.queue_pairs(
        (
            "iwarp_queue_pair_receives_posted",
            Gauge,
            "",
            "Receives posted, without those of shared receive queues.",
        ),
        |qp| qp.receives_posted,
    );
    w.queue_pairs(
        (
            "iwarp_queue_pair_held_seconds",
            Gauge,
            "seconds",
            "How long a Send has been waiting for a receive; 0 if none is waiting.",
        ),
        |qp| Some(seconds(qp.held_ns.unwrap_or(0))),
    );
    w.queue_pairs(
        (
            "iwarp_queue_pair_held_in_all_seconds",
            Counter,
            "seconds",
            "Time in which Sends waited for a receive.",
        ),
        |qp| Some(seconds(qp.held_total_ns)),
    );
}

fn connections(w: &mut Writer<'_>) {
    use Kind::{Counter, Gauge};
    w.connections(
        (
            "iwarp_connection_tcp_retransmits",
            Counter,
            "",
            "Segments that TCP sent again since the connection began.",
        ),
        |c| c.tcp_retransmits.map(|n| n as f64),
    );
    w.connections(
        (
            "iwarp_connection_tcp_rtt_seconds",
            Gauge,
            "seconds",
            "TCP's smoothed round-trip time.",
        ),
        |c| c.tcp_rtt_us.map(|us| us as f64 / 1e6),
    );
    w.connections(
        (
            "iwarp_connection_unacknowledged_bytes",
            Gauge,
            "bytes",
            "Octets that TCP has taken and the peer has not acknowledged.",
        ),
        |c| c.unacknowledged_octets.map(|n| n as f64),
    );
    w.connections(
        (
            "iwarp_connection_tcp_unacknowledged_segments",
            Gauge,
            "",
            "Segments that TCP has sent and the peer has not acknowledged.",
        ),
        |c| c.tcp_unacknowledged_segments.map(|n| n as f64),
    );
    w.connections(
        (
            "iwarp_connection_tcp_congestion_window_segments",
            Gauge,
            "",
            "TCP's congestion window in segments.",
        ),
        |c| c.tcp_congestion_window_segments.map(|n| n as f64),
    );
    w.connections(
        (
            "iwarp_connection_age_seconds",
            Gauge,
            "seconds",
            "Time since the connection began.",
        ),
        |c| Some(seconds(c.age_ns)),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::HashSet;

    fn stats(pid: u32, command: &str) -> ProcessStats {
        let text = json!({
            "format": 1,
            "process": {"command": command, "version": "0.1.0", "age_ns": 1_500_000_000u64},
            "devices": [{"name": "iwarp0", "registered_octets": 4096,
                         "counters": {"tx_bytes": 10}}],
            "queue_pairs": [
                {"device": "iwarp0", "number": 7, "state": "RTS", "kind": "cm",
                 "held_ns": 500_000_000u64,
                 "counters": {"tx_bytes": 9, "crc_errors": 1},
                 "connection": {"local": "127.0.0.1:1", "peer": "127.0.0.1:2",
                                "tcp_retransmits": 3, "tcp_rtt_us": 250}},
                {"device": "iwarp0", "number": 8, "state": "INIT", "kind": "cm",
                 "receives_posted": 4, "counters": {}},
            ],
        });
        ProcessStats::read(Some(pid), 1000, text.to_string().as_bytes()).unwrap()
    }

    /// Checks the format's rules: one header per metric, adjacent samples, counters end in
    /// `_total`, names end in the unit, samples are unique, and the end is marked.
    #[test]
    fn text_obeys_the_format() {
        let text = text(&[stats(1, "a"), stats(2, "b"), stats(2, "c")]);
        assert!(text.ends_with("\n# EOF\n"));
        let (mut families, mut samples) = (HashSet::new(), HashSet::new());
        let (mut family, mut kind) = (String::new(), String::new());
        for line in text.lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "EOF"] => {}
                ["#", "TYPE", name, what] => {
                    (family, kind) = (name.to_owned(), what.to_owned());
                    assert!(families.insert(family.clone()), "{line}: twice");
                }
                ["#", "UNIT", name, unit] => {
                    assert!(
                        name == family && name.ends_with(&format!("_{unit}")),
                        "{line}"
                    );
                }
                ["#", "HELP", name, help] => {
                    assert!(name == family && help.ends_with('.'), "{line}");
                }
                _ => {
                    let (series, value) = line.rsplit_once(' ').unwrap();
                    let name = series.split('{').next().unwrap();
                    let suffix = match &kind[..] {
                        "counter" => "_total",
                        "info" => "_info",
                        _ => "",
                    };
                    assert_eq!(name, format!("{family}{suffix}"), "{line}");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    assert!(samples.insert(series.to_owned()), "{line}: twice");
                }
            }
        }
        for line in [
            "iwarp_process_info{pid=\"1\",uid=\"1000\",command=\"a\",version=\"0.1.0\"} 1",
            "iwarp_process_age_seconds{pid=\"2\",copy=\"1\"} 1.5",
            "iwarp_device_sent_bytes_total{pid=\"1\",device=\"iwarp0\"} 10",
            "iwarp_queue_pair_sent_bytes_total{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 9",
            "iwarp_queue_pair_held_seconds{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 0.5",
            "iwarp_queue_pair_receives_posted{pid=\"1\",device=\"iwarp0\",qp=\"8\"} 4",
            "iwarp_connection_tcp_rtt_seconds{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 0.00025",
            "iwarp_connection_tcp_retransmits_total{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }

    /// A counter without an entry in [`COUNTERS`] would be missing from monitoring.
    #[test]
    fn every_counter_has_a_metric() {
        let named = iwarp::runtime::Counters::default().named();
        assert_eq!(named.len(), COUNTERS.len());
        for (name, _) in named {
            assert!(COUNTERS.iter().any(|c| c.0 == name), "{name}");
        }
    }

    #[test]
    fn labels_are_escaped() {
        assert_eq!(escaped("a\\b\"c\nd"), "a\\\\b\\\"c\\nd");
        let text = text(&[stats(1, "x\"} 1\niwarp_evil 1")]);
        assert!(!text.lines().any(|l| l.starts_with("iwarp_evil")), "{text}");
    }

    #[test]
    fn empty_document_is_valid() {
        let text = text(&[]);
        assert!(text.ends_with("# EOF\n") && !text.contains('{'), "{text}");
    }
}
