//! The table of the first software iWARP paper (2005), continued with this run.
//!
//! D. Dalessandro, A. Devulapalli, P. Wyckoff, "Design and Implementation of the iWarp Protocol in
//! Software", PDCS 2005, measured the half round trip of 4 B and 64 KB messages over Gigabit
//! Ethernet.

use super::table::align;
use super::{Report, Row};
use crate::perf::point::{Op, Poll};
use iwarp_cli_common::units::digits3;

const SMALL: u64 = 4;
const LARGE: u64 = 64 << 10;

impl Report {
    /// `None` when this run has neither size.
    pub(super) fn paper(&self) -> Option<String> {
        // The paper's ping-pong sent messages; Write stands in when Send was not measured.
        let op = [Op::Send, Op::Write, Op::Read]
            .into_iter()
            .find(|&op| self.rows.iter().any(|r| r.op == op));
        let has = |s: u64| self.tcp.iter().any(|t| t.size == s && t.p50.is_some());
        if !has(SMALL) && !has(LARGE) {
            return None;
        }
        let find = |rows: &[Row], op: Op, crc: bool, poll: Poll, size: u64| {
            rows.iter()
                .find(|r| (r.op, r.crc, r.poll, r.size) == (op, crc, poll, size))
                .cloned()
        };
        let both = |f: &dyn Fn(u64) -> Option<String>| match (f(SMALL), f(LARGE)) {
            (None, None) => "–".to_owned(),
            (a, b) => format!(
                "{} / {}",
                a.unwrap_or_else(|| "–".to_owned()),
                b.unwrap_or_else(|| "–".to_owned())
            ),
        };
        let mut lines = vec![
            [
                "",
                "2005",
                "÷ tcp-tcp",
                "blocking",
                "÷ tcp-tcp",
                "spinning",
                "÷ tcp-tcp",
            ]
            .map(str::to_owned),
        ];
        for (name, crc, then, then_ratio) in [
            ("sw-sw, no CRC", false, "62.7 / 687.5", "1.00 / 1.10"),
            ("sw-sw, with CRC", true, "62.2 / 1401.9", "0.99 / 2.24"),
        ] {
            let Some(op) = op else { continue };
            let of = |poll| {
                let row = |size| find(&self.rows, op, crc, poll, size);
                (
                    both(&|s| row(s)?.p50.map(|x| digits3(x.median))),
                    both(&|s| row(s)?.lat_ratio.map(|x| format!("{:.2}", x.median))),
                )
            };
            let ((b, br), (s, sr)) = (of(Poll::Event), of(Poll::Spin));
            lines.push([
                name.to_owned(),
                then.to_owned(),
                then_ratio.to_owned(),
                b,
                br,
                s,
                sr,
            ]);
        }
        let tcp = |poll| {
            both(&|size| {
                find(&self.tcp, Op::Tcp, false, poll, size)?
                    .p50
                    .map(|x| digits3(x.median))
            })
        };
        let one = |cell: &str| {
            if cell == "–" {
                "–".to_owned()
            } else {
                "1".to_owned()
            }
        };
        let (b, s) = (tcp(Poll::Event), tcp(Poll::Spin));
        lines.push([
            "tcp-tcp".to_owned(),
            "62.7 / 624.5".to_owned(),
            "1".to_owned(),
            b.clone(),
            one(&b),
            s.clone(),
            one(&s),
        ]);
        let what = op.map_or(String::new(), |op| format!(", this run: {}", op.name()));
        Some(format!(
            "Half round trip in µs, 4 B / 64 KiB, beside the software iWARP of 2005{what}\n{}",
            align(&lines, 1)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;

    #[test]
    fn has_the_papers_rows() {
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
        // 1.1 is the middle round: (3.4 + 4/4000) * 1.1.
        assert!(line("tcp-tcp").contains("3.74 / 21.8"), "{t}");
    }
}
