//! Formats the statistics as a table. In a file or pipe, it has at most 100 columns, unless a name
//! or an address is longer than usual. On a terminal, it is as wide as the terminal.

use super::document::{Counters, Device, Document, ProcessStats, QueuePair, counter};
use super::rates::{Previous, Rates};
use super::view::{Row, View};
use iwarp_cli_common::text::visible;
use iwarp_cli_common::units::{digits3, rate};
use std::fmt::Write as _;

const COLUMNS: usize = 100;

/// Escapes text of another program for the terminal. If the result is longer than `max` characters,
/// it is truncated with an ellipsis.
pub(super) fn escaped(text: &str, max: usize) -> String {
    let mut out = String::new();
    let mut len = 0;
    for c in text.chars() {
        let piece = visible(c);
        len += piece.chars().count();
        if len > max {
            out.push('…');
            break;
        }
        out.push_str(&piece);
    }
    out
}

/// Formats a byte count in decimal units.
fn octets(n: u64) -> String {
    rate(n as f64).trim_end_matches("/s").to_owned()
}

/// Formats a duration with a suitable unit.
fn duration(ns: u64) -> String {
    let s = ns / 1_000_000_000;
    match ns {
        0..1_000_000 => format!("{} µs", digits3(ns as f64 / 1e3)),
        1_000_000..1_000_000_000 => format!("{} ms", digits3(ns as f64 / 1e6)),
        1_000_000_000..100_000_000_000 => format!("{} s", digits3(ns as f64 / 1e9)),
        _ if s < 100 * 60 => format!("{} min", s / 60),
        _ if s < 100 * 3600 => format!("{} h", s / 3600),
        _ => format!("{} d", s / 86400),
    }
}

/// Returns the table. With `width`, no line is longer, and less important columns are left out if
/// they do not fit.
pub(super) fn table(
    stats: &[ProcessStats],
    previous: &Previous,
    view: &View,
    width: Option<usize>,
) -> String {
    let mut out = String::new();
    for (at, group) in view.groups(stats, previous).iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        process(&mut out, group.stats, width.unwrap_or(COLUMNS));
        devices(&mut out, &group.stats.document.devices);
        queue_pairs(&mut out, &group.rows, previous.is_some(), width);
        problems(&mut out, &group.stats.document, &group.rows);
    }
    match width {
        Some(width) => truncated(&out, width),
        None => out,
    }
}

/// Truncates each line to `width` characters, with an ellipsis.
pub(super) fn truncated(text: &str, width: usize) -> String {
    let mut out = String::new();
    for line in text.lines() {
        match line.char_indices().nth(width) {
            Some(_) => {
                out.extend(line.chars().take(width.saturating_sub(1)));
                out.push('…');
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

fn process(out: &mut String, stats: &ProcessStats, columns: usize) {
    let p = &stats.document.process;
    let head = format!(
        "process {}, user {}, for {}, iwarp {}: ",
        stats.pid,
        stats.uid,
        duration(p.age_ns),
        escaped(&p.version, 20),
    );
    let width = columns.saturating_sub(head.chars().count() + 1);
    let _ = writeln!(out, "{head}{}", escaped(&p.command, width));
    if stats.document.devices.is_empty() {
        out.push_str("  no device is open\n");
    }
}

/// Returns a number and what is counted, with the ending of the plural.
pub(super) fn plural(n: u64, what: &str, ending: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { ending })
}

fn devices(out: &mut String, all: &[Device]) {
    for d in all {
        let _ = writeln!(
            out,
            "  {} ({}): {}, {}, {} with {}\n    sent {}, received {} since the process began",
            escaped(&d.name, 64),
            escaped(&d.address, 64),
            plural(d.queue_pairs, "queue pair", "s"),
            plural(d.completion_queues, "completion queue", "s"),
            plural(d.registrations, "region", "s"),
            octets(d.registered_octets),
            octets(counter(&d.counters, "tx_bytes")),
            octets(counter(&d.counters, "rx_bytes")),
        );
    }
}

/// The columns of the queue pairs: heading; `true` for numbers, which are right-aligned; and how
/// important the column is. The less important ones are left out on a narrow terminal.
const HEADS: [(&str, bool, u8); 9] = [
    ("QP", true, 9),
    ("STATE", false, 6),
    ("PEER", false, 9),
    ("SENT", true, 8),
    ("RECEIVED", true, 7),
    ("OUT", true, 4),
    ("IN", true, 3),
    ("RETRANS", true, 5),
    ("RTT", true, 2),
];

fn queue_pairs(out: &mut String, all: &[Row<'_>], rates: bool, width: Option<usize>) {
    if all.is_empty() {
        return;
    }
    let mut rows = vec![HEADS.map(|(head, ..)| head.to_owned())];
    for row in all {
        rows.push(cells(row.qp, row.rates));
    }
    if rates {
        rows[0][3] = "SENDING".to_owned();
        rows[0][4] = "RECEIVING".to_owned();
    }
    let mut widths = [0; HEADS.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let least = width.map_or(0, |width| least_importance(&widths, width));
    for row in &rows {
        let mut line = String::from(" ");
        for ((cell, width), (_, right, importance)) in row.iter().zip(widths).zip(HEADS) {
            let _ = match right {
                _ if importance < least => Ok(()),
                true => write!(line, " {cell:>width$} "),
                false => write!(line, " {cell:<width$} "),
            };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

/// Returns the importance that a column needs, so that all columns fit into `width`.
fn least_importance(widths: &[usize; HEADS.len()], width: usize) -> u8 {
    let fits = |least: u8| {
        let shown = widths.iter().zip(HEADS).filter(|(_, head)| head.2 >= least);
        // A line begins with a space, each cell has one on both sides, and the last is trimmed.
        shown.map(|(width, _)| width + 2).sum::<usize>() <= width
    };
    (0..=9).find(|least| fits(*least)).unwrap_or(9)
}

fn cells(qp: &QueuePair, rates: Option<Rates>) -> [String; HEADS.len()] {
    let link = qp.connection.as_ref();
    let none = || "–".to_owned();
    let number = |n: Option<u64>| n.map_or_else(none, |n| n.to_string());
    let rate_or_total = |total: &str, rate_of: fn(Rates) -> f64| match rates {
        Some(r) => rate(rate_of(r)),
        None => octets(counter(&qp.counters, total)),
    };
    let mark = if qp.kind == "numbered" { "#" } else { "" };
    [
        format!("{mark}{}", qp.number),
        escaped(&qp.state, 8),
        link.map_or_else(none, |l| escaped(&l.peer, 64)),
        rate_or_total("tx_bytes", |r| r.sent_octets),
        rate_or_total("rx_bytes", |r| r.received_octets),
        qp.sends_outstanding.to_string(),
        qp.receives_posted
            .map_or_else(|| "srq".to_owned(), |n| n.to_string()),
        number(link.and_then(|l| l.tcp_retransmits)),
        link.and_then(|l| l.tcp_rtt_us)
            .map_or_else(none, |us| duration(us * 1000)),
    ]
}

/// Writes a line for each shown queue pair, and for each device, that had errors.
fn problems(out: &mut String, document: &Document, shown: &[Row<'_>]) {
    let mut write = |name: &str, counters: &Counters, mut parts: Vec<String>| {
        for (counter_name, what) in [
            ("crc_errors", "CRC errors"),
            ("marker_errors", "marker errors"),
            ("terminates_sent", "Terminates sent"),
            ("terminates_received", "Terminates received"),
            ("receiver_not_ready", "Sends without a posted receive"),
        ] {
            match counter(counters, counter_name) {
                0 => {}
                n => parts.push(format!("{what}: {n}")),
            }
        }
        for part in parts {
            let _ = writeln!(out, "  {name}: {part}");
        }
    };
    for Row { qp, .. } in shown {
        let mut parts = Vec::new();
        if let Some(end) = &qp.end {
            parts.push(format!("ended: {}", escaped(end, 72)));
        }
        if let Some(ns) = qp.held_ns {
            parts.push(format!(
                "a Send has been waiting for a receive for {}",
                duration(ns)
            ));
        }
        if qp.held_total_ns > 0 {
            parts.push(format!(
                "Sends have waited for receives for {} in total",
                duration(qp.held_total_ns)
            ));
        }
        write(&format!("QP {}", qp.number), &qp.counters, parts);
    }
    // The counters of destroyed queue pairs are included in the device's counters only.
    for d in &document.devices {
        let of_device = d.counters.iter().map(|(name, n)| {
            let existing = document.queue_pairs.iter().filter(|qp| qp.device == d.name);
            let existing: u64 = existing.map(|qp| counter(&qp.counters, name)).sum();
            (name.clone(), n.saturating_sub(existing))
        });
        let destroyed: Counters = of_device.collect();
        write(
            &format!("destroyed queue pairs of {}", escaped(&d.name, 64)),
            &destroyed,
            Vec::new(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stats() -> ProcessStats {
        let counters = json!({"tx_bytes": 1_234_567_890u64, "rx_bytes": 42, "crc_errors": 2,
            "terminates_sent": 1});
        let text = json!({
            "format": 1,
            "process": {"pid": 4_194_304, "version": "0.1.0", "age_ns": 90_000_000_000u64,
                        "command": format!("evil\u{1b}[2J\u{202e}name {}", "x".repeat(200))},
            "devices": [{"name": "iwarp0", "address": "192.168.100.200", "queue_pairs": 2,
                "completion_queues": 1, "registrations": 1, "registered_octets": 65536,
                "counters": {"crc_errors": 5}}],
            "queue_pairs": [
                {"device": "iwarp0", "number": 16_777_215, "state": "RTS", "kind": "cm",
                 "sends_outstanding": 65536, "receives_posted": 65536, "held_ns": 1_500_000u64,
                 "held_total_ns": 2_500_000u64, "counters": counters,
                 "connection": {"peer": "192.168.100.200:65535", "tcp_retransmits": 123_456,
                                "tcp_rtt_us": 123_456}},
                {"device": "iwarp0", "number": 2, "state": "ERR", "kind": "numbered",
                 "sends_outstanding": 0, "end": "connection lost", "counters": {}},
            ],
        });
        ProcessStats::read(Some(4_194_304), 1000, text.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn table_is_narrow_and_complete() {
        let text = table(&[stats()], &Previous::default(), &View::default(), None);
        for line in text.lines() {
            assert!(line.chars().count() <= COLUMNS, "{line}");
        }
        for part in [
            "process 4194304, user 1000, for 90.0 s, iwarp 0.1.0: evil\\u{1b}[2J\\u{202e}name",
            "iwarp0 (192.168.100.200): 2 queue pairs, 1 completion queue, 1 region with 65.5 kB",
            "1.23 GB",
            "192.168.100.200:65535",
            "123456",
            "123 ms",
            "#2",
            "QP 16777215: a Send has been waiting for a receive for 1.50 ms",
            "QP 16777215: Sends have waited for receives for 2.50 ms in total",
            "QP 16777215: CRC errors: 2",
            "QP 16777215: Terminates sent: 1",
            "QP 2: ended: connection lost",
            "destroyed queue pairs of iwarp0: CRC errors: 3",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    /// On a narrow terminal, the number, the peer and the rates are shown longest.
    #[test]
    fn narrow_terminal_has_fewer_columns() {
        for (width, shown) in [
            (
                200,
                &[
                    "QP", "STATE", "PEER", "SENT", "RECEIVED", "OUT", "IN", "RETRANS", "RTT",
                ][..],
            ),
            (
                80,
                &["QP", "STATE", "PEER", "SENT", "RECEIVED", "OUT", "RETRANS"],
            ),
            (60, &["QP", "STATE", "PEER", "SENT", "RECEIVED"]),
            (55, &["QP", "PEER", "SENT", "RECEIVED"]),
            (40, &["QP", "PEER"]),
            (5, &["QP…"]),
        ] {
            let text = table(
                &[stats()],
                &Previous::default(),
                &View::default(),
                Some(width),
            );
            let heads = text.lines().find(|l| l.contains("QP")).unwrap();
            assert_eq!(
                heads.split_whitespace().collect::<Vec<_>>(),
                shown,
                "{text}"
            );
            for line in text.lines() {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
    }

    #[test]
    fn untrusted_text_is_escaped() {
        let text = table(&[stats()], &Previous::default(), &View::default(), None);
        assert!(
            text.chars().all(|c| c == '\n' || !c.is_control()),
            "{text:?}"
        );
        assert!(!text.contains('\u{202e}'));
        assert_eq!(escaped("abc", 2), "ab…");
    }

    /// Errors of destroyed queue pairs: the device's count minus the counts of its existing ones.
    #[test]
    fn errors_of_destroyed_qps_belong_to_their_device() {
        let device = |n: u32, errors: u64| {
            let name = format!("iwarp{n}");
            json!({"name": name, "counters": {"crc_errors": errors}})
        };
        let qp = |n: u32, number: u32, errors: u64| {
            json!({"device": format!("iwarp{n}"), "number": number,
                   "counters": {"crc_errors": errors}})
        };
        let text = json!({"format": 1, "devices": [device(0, 20), device(1, 9), device(2, 4)],
            "queue_pairs": [qp(0, 1, 2), qp(1, 1, 3), qp(0, 2, 5), qp(1, 2, 6)]});
        let stats = ProcessStats::read(Some(1), 0, text.to_string().as_bytes()).unwrap();
        let text = table(&[stats], &Previous::default(), &View::default(), None);
        let destroyed: Vec<_> = text.lines().filter(|l| l.contains("destroyed")).collect();
        assert_eq!(
            destroyed,
            [
                "  destroyed queue pairs of iwarp0: CRC errors: 13",
                "  destroyed queue pairs of iwarp2: CRC errors: 4"
            ]
        );
    }

    #[test]
    fn durations_have_suitable_units() {
        for (ns, text) in [
            (0, "0 µs"),
            (56_000, "56.0 µs"),
            (1_500_000, "1.50 ms"),
            (99_000_000_000, "99.0 s"),
            (100_000_000_000, "1 min"),
            (100 * 60 * 1_000_000_000, "1 h"),
            (100 * 3600 * 1_000_000_000, "4 d"),
        ] {
            assert_eq!(duration(ns), text);
        }
    }
}
