//! The table of the first software iWARP paper (2005), continued with this run.
//!
//! D. Dalessandro, A. Devulapalli, P. Wyckoff, "Design and Implementation of the iWarp Protocol in
//! Software", PDCS 2005, measured the half round trip of 4 B and 64 KB messages over Gigabit
//! Ethernet.

use super::table::align;
use super::{Report, Row};
use crate::perf::point::{Op, Poll};
use iwarp_cli_common::units::digits3;
use iwarp_figures::Spread;

const SMALL: u64 = 4;
const LARGE: u64 = 64 << 10;

const MISSING: &str = "–";

/// Measured cells of a line: blocking figures, their ratios to TCP, spinning figures, their ratios.
type Cells = [String; 4];

/// Formats the values of both sizes in one cell.
fn both_sizes(value: impl Fn(u64) -> Option<String>) -> String {
    match (value(SMALL), value(LARGE)) {
        (None, None) => MISSING.to_owned(),
        (small, large) => {
            let [small, large] = [small, large].map(|v| v.unwrap_or_else(|| MISSING.to_owned()));
            format!("{small} / {large}")
        }
    }
}

fn find(rows: &[Row], op: Op, crc: bool, poll: Poll, size: u64) -> Option<&Row> {
    rows.iter()
        .find(|r| (r.op, r.crc, r.poll, r.size) == (op, crc, poll, size))
}

fn median(spread: Spread) -> String {
    digits3(spread.median)
}

impl Report {
    /// Returns the table, or `None` if this run measured neither size.
    pub(super) fn paper(&self) -> Option<String> {
        let has = |s: u64| self.tcp.iter().any(|t| t.size == s && t.p50.is_some());
        if !has(SMALL) && !has(LARGE) {
            return None;
        }
        // The paper's ping-pong sent messages; without Sends, compare another operation.
        let op = [Op::Send, Op::Write, Op::Read]
            .into_iter()
            .find(|&op| self.rows.iter().any(|r| r.op == op));
        let line = |name: &str, of_2005: &str, ratio_of_2005: &str, cells: Cells| {
            let [blocking, blocking_ratio, spinning, spinning_ratio] = cells;
            [
                name.to_owned(),
                of_2005.to_owned(),
                ratio_of_2005.to_owned(),
                blocking,
                blocking_ratio,
                spinning,
                spinning_ratio,
            ]
        };
        let heads = ["blocking", "÷ tcp-tcp", "spinning", "÷ tcp-tcp"];
        let mut lines = vec![line("", "2005", "÷ tcp-tcp", heads.map(str::to_owned))];
        if let Some(op) = op {
            let (off, on) = (self.iwarp_cells(op, false), self.iwarp_cells(op, true));
            lines.push(line("sw-sw, no CRC", "62.7 / 687.5", "1.00 / 1.10", off));
            lines.push(line("sw-sw, with CRC", "62.2 / 1401.9", "0.99 / 2.24", on));
        }
        lines.push(line("tcp-tcp", "62.7 / 624.5", "1", self.tcp_cells()));
        let what = op.map_or(String::new(), |op| format!(", this run: {}", op.name()));
        Some(format!(
            "Half round trip in µs, 4 B / 64 KiB, beside the software iWARP of 2005{what}\n{}",
            align(&lines, 1)
        ))
    }

    fn iwarp_cells(&self, op: Op, crc: bool) -> Cells {
        let cells = |poll| {
            let row = |size| find(&self.rows, op, crc, poll, size);
            [
                both_sizes(|s| row(s)?.p50.map(median)),
                both_sizes(|s| row(s)?.lat_ratio.map(|x| format!("{:.2}", x.median))),
            ]
        };
        let ([blocking, blocking_ratio], [spinning, spinning_ratio]) =
            (cells(Poll::Event), cells(Poll::Spin));
        [blocking, blocking_ratio, spinning, spinning_ratio]
    }

    fn tcp_cells(&self) -> Cells {
        let cell =
            |poll| both_sizes(|size| find(&self.tcp, Op::Tcp, false, poll, size)?.p50.map(median));
        let one = |cell: &str| if cell == MISSING { MISSING } else { "1" }.to_owned();
        let (blocking, spinning) = (cell(Poll::Event), cell(Poll::Spin));
        let ratios = (one(&blocking), one(&spinning));
        [blocking, ratios.0, spinning, ratios.1]
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;

    #[test]
    fn table_has_rows_of_paper() {
        let t = example().paper().unwrap();
        let line = |name: &str| {
            t.lines()
                .find(|l| l.trim_start().starts_with(name))
                .unwrap()
                .to_owned()
        };
        assert!(line("sw-sw, with CRC").contains("62.2 / 1401.9"), "{t}");
        assert!(line("sw-sw, with CRC").contains("1.15 / 1.15"), "{t}");
        assert!(line("sw-sw, no CRC").contains("1.05 / 1.05"), "{t}");
        assert!(line("tcp-tcp").contains("62.7 / 624.5"), "{t}");
        // The median is that of the second round: (3.4 + 4/4000) * 1.1.
        assert!(line("tcp-tcp").contains("3.74 / 21.8"), "{t}");
    }
}
