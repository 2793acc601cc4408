//! The metrics: their names, help texts and values.
//!
//! All samples of a metric must be adjacent, so the writer visits all processes once per metric.

use super::super::document::{Connection, Counters, Device, ProcessStats, QueuePair, counter};
use super::format::{Family, Labels, Text};
use super::objects::Entry;
use std::fmt::Display;

/// The library's counters: name in the library, name of the metric, and help text.
const COUNTERS: [(&str, &str, &str); 16] = [
    (
        "tx_bytes",
        "sent_bytes",
        "Octets handed to TCP, framing included.",
    ),
    (
        "rx_bytes",
        "received_bytes",
        "Octets taken from TCP, framing included.",
    ),
    ("tx_payload", "sent_payload_bytes", "Payload octets sent."),
    (
        "rx_payload",
        "received_payload_bytes",
        "Payload octets placed.",
    ),
    (
        "rx_direct",
        "received_direct_bytes",
        "Payload octets read straight to their destination.",
    ),
    ("tx_fpdus", "sent_fpdus", "FPDUs sent."),
    ("rx_fpdus", "received_fpdus", "FPDUs accepted."),
    ("tx_messages", "sent_messages", "Messages sent in full."),
    (
        "rx_messages",
        "received_messages",
        "Messages received in full.",
    ),
    (
        "rx_requests",
        "served_requests",
        "RDMA Read requests and atomics served.",
    ),
    ("completions", "completions", "Completions written."),
    (
        "crc_errors",
        "crc_errors",
        "FPDUs dropped because of a wrong CRC.",
    ),
    (
        "marker_errors",
        "marker_errors",
        "FPDUs dropped because of a wrong marker.",
    ),
    (
        "receiver_not_ready",
        "receiver_not_ready",
        "Sends that arrived before a receive was posted.",
    ),
    (
        "terminates_sent",
        "sent_terminates",
        "Terminate messages sent.",
    ),
    (
        "terminates_received",
        "received_terminates",
        "Terminate messages received.",
    ),
];

/// Writes all metrics of these processes. `silent` is the number of processes that have not
/// answered.
pub(super) fn write(text: &mut Text, entries: &[Entry<'_>], silent: usize) {
    let mut w = Writer { text, entries };
    let all = entries.iter().map(|e| e.stats.document.queue_pairs.len());
    let shown = entries.iter().map(|e| e.queue_pairs.len());
    w.single(
        Family::gauge("iwarp_processes", "Processes that have answered."),
        entries.len(),
    );
    w.single(
        Family::gauge(
            "iwarp_processes_silent",
            "Processes that have not answered: they are stopped, or use another version.",
        ),
        silent,
    );
    w.single(
        Family::gauge(
            "iwarp_queue_pairs_omitted",
            "Queue pairs without samples of their own, because there are too many.",
        ),
        all.sum::<usize>() - shown.sum::<usize>(),
    );
    processes(&mut w);
    devices(&mut w);
    states(&mut w);
    queue_pairs(&mut w);
    connections(&mut w);
}

/// The text so far, and the processes that it describes.
struct Writer<'a, 't> {
    text: &'t mut Text,
    entries: &'a [Entry<'a>],
}

impl<'a> Writer<'a, '_> {
    /// Writes a metric with one sample.
    fn single(&mut self, family: Family<'_>, value: usize) {
        self.text.family(&family);
        self.text.sample(&family, &Vec::new(), value);
    }

    /// Writes a metric with one sample per process, whose labels `label` extends.
    fn processes(
        &mut self,
        family: Family<'_>,
        value: impl Fn(&ProcessStats) -> f64,
        label: impl Fn(&mut Labels<'a>, &'a ProcessStats),
    ) {
        self.text.family(&family);
        for entry in self.entries {
            let mut labels = entry.labels();
            label(&mut labels, entry.stats);
            self.text.sample(&family, &labels, value(entry.stats));
        }
    }

    /// Writes a metric with one sample per device.
    fn devices(&mut self, family: Family<'_>, value: impl Fn(&Device) -> u64) {
        self.text.family(&family);
        for entry in self.entries {
            for device in &entry.devices {
                let mut labels = entry.labels();
                labels.push(("device", &device.name));
                self.text.sample(&family, &labels, value(device));
            }
        }
    }

    /// Writes a metric with one sample per queue pair that has a value.
    fn queue_pairs<V: Display>(
        &mut self,
        family: Family<'_>,
        value: impl Fn(&QueuePair) -> Option<V>,
    ) {
        self.text.family(&family);
        for entry in self.entries {
            for qp in &entry.queue_pairs {
                let Some(value) = value(qp) else { continue };
                let mut labels = entry.labels();
                labels.push(("device", &qp.device));
                labels.push(("qp", &qp.number));
                self.text.sample(&family, &labels, value);
            }
        }
    }

    /// Writes a metric with one sample per queue pair whose connection has a value.
    fn connections(&mut self, family: Family<'_>, value: impl Fn(&Connection) -> Option<f64>) {
        self.queue_pairs(family, |qp| value(qp.connection.as_ref()?));
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn processes(w: &mut Writer<'_, '_>) {
    w.processes(
        Family::gauge(
            "iwarp_process_info",
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
        Family::gauge(
            "iwarp_process_age_seconds",
            "Time since the process began to use the library.",
        ),
        |stats| seconds(stats.document.process.age_ns),
        |_, _| {},
    );
}

/// Writes the text values of queue pairs, as labels.
fn states(w: &mut Writer<'_, '_>) {
    let help = "State, kind, addresses and end of a queue pair; always 1.";
    let family = Family::gauge("iwarp_queue_pair_info", help);
    w.text.family(&family);
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
            w.text.sample(&family, &labels, 1);
        }
    }
}

fn devices(w: &mut Writer<'_, '_>) {
    w.devices(
        Family::gauge("iwarp_device_queue_pairs", "Queue pairs that exist."),
        |d| d.queue_pairs,
    );
    w.devices(
        Family::gauge(
            "iwarp_device_completion_queues",
            "Completion queues that exist.",
        ),
        |d| d.completion_queues,
    );
    w.devices(
        Family::gauge("iwarp_device_registrations", "Memory regions and windows."),
        |d| d.registrations,
    );
    w.devices(
        Family::gauge(
            "iwarp_device_registered_bytes",
            "Octets of memory that are registered.",
        ),
        |d| d.registered_octets,
    );
    for (key, name, help) in COUNTERS {
        let name = format!("iwarp_device_{name}");
        let help = format!("{help} All queue pairs of the device since the process began.");
        w.devices(Family::counter(&name, &help), |d| counter(&d.counters, key));
    }
}

fn queue_pairs(w: &mut Writer<'_, '_>) {
    for (key, name, help) in COUNTERS {
        let name = format!("iwarp_queue_pair_{name}");
        let of = |counters: &Counters| counters.get(key).copied();
        w.queue_pairs(Family::counter(&name, help), |qp| of(&qp.counters));
    }
    w.queue_pairs(
        Family::gauge(
            "iwarp_queue_pair_sends_outstanding",
            "Send work requests posted and not complete.",
        ),
        |qp| Some(qp.sends_outstanding),
    );
    w.queue_pairs(
        Family::gauge(
            "iwarp_queue_pair_receives_posted",
            "Receives posted, without those of shared receive queues.",
        ),
        |qp| qp.receives_posted,
    );
    w.queue_pairs(
        Family::gauge(
            "iwarp_queue_pair_held_seconds",
            "How long a Send has been waiting for a receive; 0 if none is waiting.",
        ),
        |qp| Some(seconds(qp.held_ns.unwrap_or(0))),
    );
    w.queue_pairs(
        Family::counter(
            "iwarp_queue_pair_held_in_all_seconds",
            "Time in which Sends waited for a receive.",
        ),
        |qp| Some(seconds(qp.held_total_ns)),
    );
}

fn connections(w: &mut Writer<'_, '_>) {
    w.connections(
        Family::counter(
            "iwarp_connection_tcp_retransmits",
            "Segments that TCP sent again since the connection began.",
        ),
        |c| c.tcp_retransmits.map(|n| n as f64),
    );
    w.connections(
        Family::gauge(
            "iwarp_connection_tcp_rtt_seconds",
            "TCP's smoothed round-trip time.",
        ),
        |c| c.tcp_rtt_us.map(|us| us as f64 / 1e6),
    );
    w.connections(
        Family::gauge(
            "iwarp_connection_unacknowledged_bytes",
            "Octets that TCP has taken and the peer has not acknowledged.",
        ),
        |c| c.unacknowledged_octets.map(|n| n as f64),
    );
    w.connections(
        Family::gauge(
            "iwarp_connection_tcp_unacknowledged_segments",
            "Segments that TCP has sent and the peer has not acknowledged.",
        ),
        |c| c.tcp_unacknowledged_segments.map(|n| n as f64),
    );
    w.connections(
        Family::gauge(
            "iwarp_connection_tcp_congestion_window_segments",
            "TCP's congestion window in segments.",
        ),
        |c| c.tcp_congestion_window_segments.map(|n| n as f64),
    );
    w.connections(
        Family::gauge(
            "iwarp_connection_age_seconds",
            "Time since the connection began.",
        ),
        |c| Some(seconds(c.age_ns)),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter without an entry in [`COUNTERS`] would be missing from monitoring.
    #[test]
    fn every_counter_has_a_metric() {
        let named = iwarp::runtime::Counters::default().named();
        assert_eq!(named.len(), COUNTERS.len());
        for (name, _) in named {
            assert!(COUNTERS.iter().any(|c| c.0 == name), "{name}");
        }
    }
}
