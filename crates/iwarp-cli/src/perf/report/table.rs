//! The report as text: one table each for spinning and blocking, the table under load, and the
//! comparison with the paper of 2005.

use super::disturbed::{NOTE, is_disturbed_under_load};
use super::{Report, Row};
use crate::perf::point::Poll;
use iwarp_cli_common::units::{digits3, message_rate, rate, size};
use iwarp_figures::Spread;
use std::fmt::Write as _;

/// The last column has the mark of disturbed rows.
const HEAD: [&str; 12] = [
    "op",
    "size",
    "CRC",
    "lat p50",
    "p99 µs",
    "CPU µs",
    "÷ TCP",
    "bandwidth",
    "messages",
    "CPU µs",
    "÷ TCP",
    "",
];

impl Report {
    /// Returns the whole report for a terminal of 100 columns.
    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        let h = &self.host;
        let _ = writeln!(
            out,
            "{}, {} CPUs, {}, TCP {}, {}",
            h.cpu, h.cores, h.kernel, h.congestion_control, h.date
        );
        if let Some(p) = &self.peer {
            let _ = writeln!(
                out,
                "peer: {}, {} CPUs, {}, TCP {}",
                p.cpu, p.cores, p.kernel, p.congestion_control
            );
        }
        if let Some(busy) = self.busy_warning() {
            let _ = writeln!(out, "{busy}");
        }
        let markers = if self.markers { ", markers" } else { "" };
        let _ = writeln!(
            out,
            "half round trips; {} connection(s), {} outstanding{markers}; medians of {} rounds, \
             ratios [min–max]; CPU: both ends",
            self.qps, self.depth, self.rounds
        );
        if self.rounds < self.planned_rounds {
            let _ = writeln!(
                out,
                "warning: the time was used up before the planned {} rounds were complete",
                self.planned_rounds
            );
        }
        for (poll, title) in [(Poll::Spin, "Spinning"), (Poll::Event, "Blocking (event)")] {
            let mut lines: Vec<_> = self
                .tcp
                .iter()
                .chain(&self.rows)
                .filter(|r| r.poll == poll)
                .collect();
            if lines.is_empty() {
                continue;
            }
            lines.sort_by_key(|r| (r.size, r.op, r.crc));
            let mut cells = vec![HEAD.map(str::to_owned)];
            let mut last = None;
            for r in lines {
                if last.is_some_and(|s| s != r.size) {
                    cells.push(Default::default());
                }
                last = Some(r.size);
                cells.push(line(r, mark(self.is_disturbed(r))));
            }
            let _ = write!(out, "\n{title}\n{}", align(&cells, 2));
        }
        out += &self.cpu_table();
        out += &self.under_load_table();
        if self.has_disturbed_rows() {
            let _ = write!(out, "\n{NOTE}");
        }
        if let Some(paper) = self.paper() {
            let _ = write!(out, "\n{paper}");
        }
        out
    }

    /// Returns the table of the processor time of streams.
    fn cpu_table(&self) -> String {
        let mut rows: Vec<_> = self.tcp.iter().chain(&self.rows).collect();
        rows.retain(|r| r.bw_cpu.is_some());
        if rows.is_empty() {
            return String::new();
        }
        rows.sort_by_key(|r| (r.poll, r.size, r.op, r.crc));
        let head = [
            "op",
            "size",
            "CRC",
            "waits",
            "s per GiB",
            "s per million",
            "÷ TCP",
        ];
        let mut cells = vec![head.map(str::to_owned)];
        cells.extend(rows.into_iter().map(|r| {
            [
                r.op.name().to_owned(),
                size(r.size),
                crc(r).to_owned(),
                r.poll.name().to_owned(),
                show(r.cpu_s_per_gib(), digits3),
                // Microseconds per message are seconds per million messages.
                show(r.bw_cpu, digits3),
                ratio(r.bw_cpu_ratio),
            ]
        }));
        format!(
            "\nCPU seconds of both ends, per GiB and per million messages of a stream\n{}",
            align(&cells, 2)
        )
    }

    /// Returns the table of measurements beside a computing program.
    fn under_load_table(&self) -> String {
        if self.under_load.is_empty() {
            return String::new();
        }
        let head = ["op", "size", "lat p50", "p99 µs", "left to the program", ""];
        let mut cells = vec![head.map(str::to_owned)];
        let us = |s: Option<Spread>| s.map(|s| digits3(s.median)).unwrap_or_default();
        cells.extend(self.under_load.iter().map(|u| {
            let share = u.program_share;
            let share = share.map(|s| format!("{:.0} %", s.median * 100.0));
            [
                u.op.name().to_owned(),
                size(u.size),
                us(u.p50),
                us(u.p99),
                share.unwrap_or_default(),
                mark(is_disturbed_under_load(u)),
            ]
        }));
        format!(
            "\nBlocking (event), beside a program that computes on every processor of this run\n{}",
            align(&cells, 2)
        )
    }
}

fn mark(disturbed: bool) -> String {
    if disturbed { "!" } else { "" }.to_owned()
}

fn crc(r: &Row) -> &'static str {
    match r.op.is_tcp() {
        true => "",
        false if r.crc => "on",
        false => "off",
    }
}

fn show(s: Option<Spread>, f: fn(f64) -> String) -> String {
    s.map(|s| f(s.median)).unwrap_or_default()
}

fn line(r: &Row, mark: String) -> [String; 12] {
    [
        r.op.name().to_owned(),
        size(r.size),
        crc(r).to_owned(),
        show(r.p50, digits3),
        show(r.p99, digits3),
        show(r.lat_cpu, digits3),
        ratio(r.lat_ratio),
        show(r.bytes_per_s, rate),
        show(r.msgs_per_s, message_rate),
        show(r.bw_cpu, digits3),
        ratio(r.bw_ratio),
        mark,
    ]
}

/// Formats `1.04 [0.98–1.10]`.
pub(super) fn ratio(s: Option<Spread>) -> String {
    s.map(|s| format!("{:.2} [{:.2}–{:.2}]", s.median, s.min, s.max))
        .unwrap_or_default()
}

/// Pads the cells to columns; the first `left` columns are left-aligned, the others right-aligned.
pub(super) fn align<const N: usize>(lines: &[[String; N]], left: usize) -> String {
    let width = |i: usize| {
        lines
            .iter()
            .filter_map(|l| l.get(i))
            .map(|c| c.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut out = String::new();
    for l in lines {
        let mut text = String::from(" ");
        for (i, (cell, w)) in l.iter().zip(&widths).enumerate() {
            let _ = if i < left {
                write!(text, " {cell:<w$} ")
            } else {
                write!(text, " {cell:>w$} ")
            };
        }
        let _ = writeln!(out, "{}", text.trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::*;

    #[test]
    fn table_is_complete_and_narrow() {
        let t = example().table();
        for piece in [
            "Spinning",
            "Blocking (event)",
            "tcp",
            "write",
            "64 KiB",
            "tcp, polls",
            "61 %",
            "1.20 [1.20–1.20]",
            "GB/s",
            "medians of 3 rounds",
            "2005",
            "CPU seconds of both ends",
            "s per million",
        ] {
            assert!(t.contains(piece), "{piece} is missing in\n{t}");
        }
        for l in t.lines() {
            assert!(l.chars().count() <= 120, "too wide: {l}");
            assert_eq!(l, l.trim_end());
        }
    }

    #[test]
    fn warnings_precede_the_table() {
        let mut report = example();
        let before = |report: &Report, piece: &str| {
            let table = report.table();
            let head = table.split("Spinning").next().unwrap_or_default();
            head.contains(piece)
        };
        assert!(!before(&report, "Busy") && !before(&report, "planned"));
        report.others.cpus_used = 1.3;
        report.planned_rounds = 5;
        assert!(before(
            &report,
            "Busy machine: other programs used 1.3 of 2 CPU(s)"
        ));
        assert!(before(&report, "planned 5 rounds"));
    }

    #[test]
    fn columns_line_up() {
        let cells = [["a", "bb"], ["ccc", "µ"]].map(|l| l.map(str::to_owned));
        assert_eq!(align(&cells, 1), "  a    bb\n  ccc   µ\n");
    }
}
