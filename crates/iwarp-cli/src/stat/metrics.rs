//! Formats the statistics as text for Prometheus and for other programs that read its formats.
//!
//! All samples of a metric must be adjacent, so the writer visits all processes once per metric.

use super::document::{Connection, Counters, Device, ProcessStats, QueuePair, counter};
use super::table::escaped;
use std::collections::{HashMap, HashSet};
use std::fmt::{Display, Write as _};

/// A text format. Their samples are the same; their headers differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// Version 0.0.4 of Prometheus' own format: the header of a counter has the name of its
    /// samples, which ends in `_total`.
    Prometheus,
    /// OpenMetrics 1.0: the header of a counter has the name without `_total`.
    OpenMetrics,
    /// Valid in both formats. Because they disagree about the header of counters, counters have a
    /// help text and no type.
    Both,
}

impl Format {
    /// Returns the media type of the format, for HTTP.
    pub(super) const fn media_type(self) -> &'static str {
        match self {
            Self::Prometheus | Self::Both => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// What to write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    pub(super) format: Format,
    /// Maximum number of queue pairs that have samples of their own.
    pub(super) queue_pairs: usize,
}

/// Longest value of a label in characters. A command line may be much longer, and Prometheus keeps
/// it for each series.
const LABEL_MAX: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge => "",
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

/// A process, with what has samples. A second queue pair or device of the same name is left out,
/// because Prometheus refuses a whole document in which a sample occurs twice.
struct Entry<'a> {
    stats: &'a ProcessStats,
    /// If a program has loaded the library twice, its process ID occurs twice. The second
    /// occurrence gets a number for the label `copy`.
    copy: Option<usize>,
    devices: Vec<&'a Device>,
    /// The queue pairs that have samples of their own.
    queue_pairs: Vec<&'a QueuePair>,
}

impl<'a> Entry<'a> {
    /// Returns the processes, with at most `max` queue pairs together.
    fn all(stats: &'a [ProcessStats], max: usize) -> Vec<Self> {
        let mut seen = HashMap::<u32, usize>::new();
        let mut entries: Vec<_> = stats
            .iter()
            .map(|one| {
                let before = seen.entry(one.pid).or_default();
                let copy = (*before > 0).then_some(*before);
                *before += 1;
                Self::new(one, copy)
            })
            .collect();
        let counts: Vec<usize> = entries.iter().map(|e| e.queue_pairs.len()).collect();
        let most = fair_share(&counts, max);
        for entry in &mut entries {
            entry.queue_pairs.truncate(most);
        }
        entries
    }

    fn new(stats: &'a ProcessStats, copy: Option<usize>) -> Self {
        let (mut names, mut numbers) = (HashSet::new(), HashSet::new());
        let document = &stats.document;
        Self {
            stats,
            copy,
            devices: document
                .devices
                .iter()
                .filter(|d| names.insert(&d.name))
                .collect(),
            queue_pairs: document
                .queue_pairs
                .iter()
                .filter(|qp| numbers.insert((&qp.device, qp.number)))
                .collect(),
        }
    }

    fn labels(&self) -> Labels<'_> {
        let mut labels: Labels<'_> = vec![("pid", &self.stats.pid)];
        if let Some(copy) = &self.copy {
            labels.push(("copy", copy));
        }
        labels
    }
}

/// Returns the largest number of queue pairs for each process with which all processes together
/// have at most `max`, so that a process with very many does not displace those of others.
fn fair_share(counts: &[usize], max: usize) -> usize {
    let mut ascending = counts.to_vec();
    ascending.sort_unstable();
    let mut left = max;
    for (i, &count) in ascending.iter().enumerate() {
        let share = left / (ascending.len() - i);
        if count > share {
            return share;
        }
        left -= count;
    }
    max
}

/// The text so far, and the processes that it describes.
struct Writer<'a> {
    out: String,
    format: Format,
    entries: &'a [Entry<'a>],
}

/// The labels of a sample, in order.
type Labels<'a> = Vec<(&'static str, &'a dyn Display)>;

impl<'a> Writer<'a> {
    fn family(&mut self, name: &str, kind: Kind, unit: &str, help: &str) {
        let suffix = match self.format {
            Format::OpenMetrics => "",
            Format::Prometheus | Format::Both => kind.suffix(),
        };
        let _ = writeln!(self.out, "# HELP {name}{suffix} {help}");
        if self.format != Format::Both || kind != Kind::Counter {
            let _ = writeln!(self.out, "# TYPE {name}{suffix} {}", kind.name());
        }
        if self.format == Format::OpenMetrics && !unit.is_empty() {
            let _ = writeln!(self.out, "# UNIT {name} {unit}");
        }
    }

    fn sample(&mut self, name: &str, kind: Kind, labels: &Labels<'_>, value: impl Display) {
        let _ = write!(self.out, "{name}{}", kind.suffix());
        for (i, (label, value)) in labels.iter().enumerate() {
            let separator = if i == 0 { '{' } else { ',' };
            let value = label_value(&value.to_string());
            let _ = write!(self.out, "{separator}{label}=\"{value}\"");
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.out, "{end} {value}");
    }

    /// Writes a metric with one sample.
    fn single(&mut self, name: &str, help: &str, value: usize) {
        self.family(name, Kind::Gauge, "", help);
        self.sample(name, Kind::Gauge, &Vec::new(), value);
    }

    /// Writes a metric with one sample per process, whose labels `label` extends.
    fn processes(
        &mut self,
        (name, unit, help): (&str, &str, &str),
        value: impl Fn(&ProcessStats) -> f64,
        label: impl Fn(&mut Labels<'a>, &'a ProcessStats),
    ) {
        self.family(name, Kind::Gauge, unit, help);
        for entry in self.entries {
            let mut labels = entry.labels();
            label(&mut labels, entry.stats);
            self.sample(name, Kind::Gauge, &labels, value(entry.stats));
        }
    }

    /// Writes a metric with one sample per device.
    fn devices(
        &mut self,
        (name, kind, unit, help): (&str, Kind, &str, &str),
        value: impl Fn(&Device) -> u64,
    ) {
        self.family(name, kind, unit, help);
        for entry in self.entries {
            for device in &entry.devices {
                let mut labels = entry.labels();
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
        for entry in self.entries {
            for qp in &entry.queue_pairs {
                let Some(value) = value(qp) else { continue };
                let mut labels = entry.labels();
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

/// Returns the value of a label: on one line, truncated, and escaped.
fn label_value(value: &str) -> String {
    escaped(value, LABEL_MAX)
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Returns the statistics of these processes. `silent` is the number of processes that have not
/// answered.
pub(super) fn text(stats: &[ProcessStats], silent: usize, options: Options) -> String {
    let entries = Entry::all(stats, options.queue_pairs);
    let mut w = Writer {
        out: String::new(),
        format: options.format,
        entries: &entries,
    };
    let all: usize = stats.iter().map(|s| s.document.queue_pairs.len()).sum();
    let shown: usize = entries.iter().map(|e| e.queue_pairs.len()).sum();
    w.single(
        "iwarp_processes",
        "Processes that have answered.",
        stats.len(),
    );
    w.single(
        "iwarp_processes_silent",
        "Processes that have not answered: they are stopped, or use another version.",
        silent,
    );
    w.single(
        "iwarp_queue_pairs_omitted",
        "Queue pairs without samples of their own, because there are too many.",
        all - shown,
    );
    processes(&mut w);
    devices(&mut w);
    states(&mut w);
    queue_pairs(&mut w);
    connections(&mut w);
    if options.format != Format::Prometheus {
        w.out.push_str("# EOF\n");
    }
    w.out
}

fn processes(w: &mut Writer<'_>) {
    w.processes(
        (
            "iwarp_process_info",
            "",
            "User, command line and library version of a process; always 1.",
        ),
        |_| 1.0,
        |labels, stats| {
            labels.push(("uid", &stats.uid));
            labels.push(("command", &stats.document.process.command));
            labels.push(("version", &stats.document.process.version));
        },
    );
    w.processes(
        (
            "iwarp_process_age_seconds",
            "seconds",
            "Time since the process began to use the library.",
        ),
        |stats| seconds(stats.document.process.age_ns),
        |_, _| {},
    );
}

/// Writes the text values of queue pairs, as labels.
fn states(w: &mut Writer<'_>) {
    let name = "iwarp_queue_pair_info";
    let help = "State, kind, addresses and end of a queue pair; always 1.";
    w.family(name, Kind::Gauge, "", help);
    for entry in w.entries {
        for qp in &entry.queue_pairs {
            let mut labels = entry.labels();
            labels.push(("device", &qp.device));
            labels.push(("qp", &qp.number));
            labels.push(("state", &qp.state));
            labels.push(("kind", &qp.kind));
            if let Some(connection) = &qp.connection {
                labels.push(("local", &connection.local));
                labels.push(("peer", &connection.peer));
            }
            if let Some(end) = &qp.end {
                labels.push(("end", end));
            }
            w.sample(name, Kind::Gauge, &labels, 1);
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

    fn written(stats: &[ProcessStats], format: Format) -> String {
        let queue_pairs = usize::MAX;
        text(
            stats,
            3,
            Options {
                format,
                queue_pairs,
            },
        )
    }

    /// Checks the rules of all formats: one header per metric, adjacent samples, counters end in
    /// `_total`, names end in the unit, and samples are unique. `header` returns the name in the
    /// header of a metric whose samples have this name and type.
    fn check(text: &str, header: fn(&str, &str) -> String) {
        let (mut families, mut samples) = (HashSet::new(), HashSet::new());
        let (mut family, mut kind) = (String::new(), "");
        for line in text.lines().filter(|line| *line != "# EOF") {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "HELP", name, help] => {
                    family = name.to_owned();
                    assert!(families.insert(family.clone()), "{line}: twice");
                    assert!(help.ends_with(['.', '1']), "{line}");
                    kind = "";
                }
                ["#", "TYPE", name, what] => {
                    assert_eq!(name, family, "{line}");
                    kind = what;
                }
                ["#", "UNIT", name, unit] => {
                    let ends = name.ends_with(&format!("_{unit}"));
                    assert!(name == family && ends, "{line}");
                }
                _ => {
                    let (series, value) = line.rsplit_once(' ').unwrap();
                    let name = series.split('{').next().unwrap();
                    assert_eq!(header(name, kind), family, "{line}");
                    assert_eq!(name.ends_with("_total"), kind != "gauge", "{line}");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    assert!(samples.insert(series.to_owned()), "{line}: twice");
                }
            }
        }
    }

    #[test]
    fn texts_obey_their_formats() {
        let stats = [stats(1, "a"), stats(2, "b"), stats(2, "c")];
        let prometheus = written(&stats, Format::Prometheus);
        check(&prometheus, |name, _| name.to_owned());
        assert!(!prometheus.contains("# UNIT") && !prometheus.contains("# EOF"));
        let open = written(&stats, Format::OpenMetrics);
        check(&open, |name, kind| match kind {
            "counter" => name.strip_suffix("_total").unwrap().to_owned(),
            _ => name.to_owned(),
        });
        assert!(open.contains("# UNIT") && open.ends_with("\n# EOF\n"));
        let both = written(&stats, Format::Both);
        check(&both, |name, _| name.to_owned());
        assert!(!both.contains(" counter\n") && both.ends_with("\n# EOF\n"));
        // The samples are the same.
        let samples = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.map(str::to_owned).collect()
        };
        assert_eq!(samples(&prometheus), samples(&open));
        assert_eq!(samples(&prometheus), samples(&both));
        for line in [
            "iwarp_processes 3",
            "iwarp_processes_silent 3",
            "iwarp_queue_pairs_omitted 0",
            "iwarp_process_info{pid=\"1\",uid=\"1000\",command=\"a\",version=\"0.1.0\"} 1",
            "iwarp_process_age_seconds{pid=\"2\",copy=\"1\"} 1.5",
            "iwarp_device_sent_bytes_total{pid=\"1\",device=\"iwarp0\"} 10",
            "iwarp_queue_pair_sent_bytes_total{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 9",
            "iwarp_queue_pair_held_seconds{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 0.5",
            "iwarp_queue_pair_receives_posted{pid=\"1\",device=\"iwarp0\",qp=\"8\"} 4",
            "iwarp_connection_tcp_rtt_seconds{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 0.00025",
            "iwarp_connection_tcp_retransmits_total{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 3",
        ] {
            assert!(
                prometheus.lines().any(|l| l == line),
                "{line} in\n{prometheus}"
            );
        }
    }

    /// Each process gets a fair part of the queue pairs, and the rest is counted.
    #[test]
    fn number_of_samples_is_limited() {
        let process = |pid: u32, queue_pairs: u32| {
            let all: Vec<_> = (0..queue_pairs)
                .map(|n| json!({"device": "iwarp0", "number": n}))
                .collect();
            let text = json!({"format": 1, "queue_pairs": all}).to_string();
            ProcessStats::read(Some(pid), 0, text.as_bytes()).unwrap()
        };
        let stats = [process(1, 1000), process(2, 3), process(3, 8)];
        for (max, of_each, omitted) in [
            (2000, [1000, 3, 8], 0),
            (21, [10, 3, 8], 990),
            (11, [4, 3, 4], 1000),
            (2, [0, 0, 0], 1011),
        ] {
            let options = Options {
                format: Format::Prometheus,
                queue_pairs: max,
            };
            let text = text(&stats, 0, options);
            for (pid, count) in (1..).zip(of_each) {
                let start = format!("iwarp_queue_pair_info{{pid=\"{pid}\",");
                let samples = text.lines().filter(|line| line.starts_with(&start));
                assert_eq!(samples.count(), count, "{max} {pid}");
            }
            let line = format!("iwarp_queue_pairs_omitted {omitted}");
            assert!(text.lines().any(|l| l == line), "{max}: {line}");
        }
    }

    /// Prometheus refuses all samples if one occurs twice, so one dishonest process could stop the
    /// monitoring of others.
    #[test]
    fn repeated_objects_have_one_sample() {
        let text = json!({"format": 1,
            "devices": [{"name": "a"}, {"name": "a"}],
            "queue_pairs": [{"device": "a", "number": 1}, {"device": "a", "number": 1}]});
        let stats = ProcessStats::read(Some(1), 0, text.to_string().as_bytes()).unwrap();
        check(&written(&[stats], Format::Prometheus), |name, _| {
            name.to_owned()
        });
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
        assert_eq!(label_value("a\\b\"c\nd"), "a\\\\b\\\"c\\\\nd");
        assert_eq!(
            label_value(&"x".repeat(1000)).chars().count(),
            LABEL_MAX + 1
        );
        let text = written(&[stats(1, "x\"} 1\niwarp_evil 1")], Format::Both);
        assert!(!text.lines().any(|l| l.starts_with("iwarp_evil")), "{text}");
    }

    #[test]
    fn empty_document_is_valid() {
        let text = written(&[], Format::OpenMetrics);
        assert!(text.ends_with("# EOF\n") && !text.contains('{'), "{text}");
    }
}
