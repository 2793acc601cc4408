//! Latency and bandwidth curves, iWARP beside TCP.

use super::{Report, Row};
use crate::perf::point::{Op, Poll};
use iwarp_cli_common::error::{Context as _, Result};
use iwarp_figures::Spread;
use iwarp_figures::plot::{Band, Curve, Figure, Mark, Panel, Style, Theme, Unit};

/// Colours that colour-blind readers can distinguish (Okabe–Ito), and marks for use without colour.
fn style(op: Op, crc: bool) -> Style {
    let (colour, mark) = match op {
        Op::Tcp | Op::TcpPolls => ((0, 0, 0), Mark::Circle),
        Op::Send => ((0x00, 0x72, 0xb2), Mark::Square),
        Op::Write => ((0xd5, 0x5e, 0x00), Mark::Triangle),
        Op::Read => ((0x00, 0x9e, 0x73), Mark::Diamond),
        Op::FetchAdd => ((0xcc, 0x79, 0xa7), Mark::Inverted),
    };
    Style {
        colour,
        mark,
        dashed: op != Op::Tcp && !crc,
    }
}

fn name(op: Op, crc: bool) -> String {
    match (op, crc) {
        (Op::Tcp, _) => "TCP".to_owned(),
        (Op::TcpPolls, _) => "TCP, polls".to_owned(),
        (op, true) => format!("{}, CRC", op.name()),
        (op, false) => format!("{}, no CRC", op.name()),
    }
}

impl Report {
    /// Returns the drawing as an SVG document.
    pub(crate) fn svg(&self) -> Result<String> {
        let us = |row: &Row| row.p50.map(|spread| spread.times(1e-6));
        let rate = |row: &Row| row.bytes_per_s;
        let host = &self.host;
        let figure = Figure {
            title: format!("iwarp {} beside TCP, {} rounds", host.iwarp, self.rounds),
            theme: Theme::Light,
            size: None,
            band: Band::Extremes,
            facts: format!(
                "{} · {} · TCP {} · {} {}",
                host.cpu,
                host.kernel,
                host.congestion_control,
                host.date,
                self.busy_warning()
                    .map_or_else(String::new, |busy| format!("· {busy}"))
            ),
            panels: vec![
                self.panel("Half round trip, spinning", Unit::Seconds, Poll::Spin, us),
                self.panel("Half round trip, blocking", Unit::Seconds, Poll::Event, us),
                self.panel(
                    "Bandwidth, spinning",
                    Unit::OctetsPerSecond,
                    Poll::Spin,
                    rate,
                ),
                self.panel(
                    "Bandwidth, blocking",
                    Unit::OctetsPerSecond,
                    Poll::Event,
                    rate,
                ),
            ],
        };
        figure.svg().context("cannot draw the curves")
    }

    fn panel(
        &self,
        title: &str,
        unit: Unit,
        poll: Poll,
        value: fn(&Row) -> Option<Spread>,
    ) -> Panel {
        let mut curves: Vec<Curve> = Vec::new();
        let rows = self.tcp.iter().chain(&self.rows);
        for row in rows.filter(|row| row.poll == poll) {
            let Some(spread) = value(row) else {
                continue;
            };
            let name = name(row.op, row.crc);
            let point = (row.size, spread);
            match curves.iter_mut().find(|curve| curve.name == name) {
                Some(curve) => curve.points.push(point),
                None => curves.push(Curve {
                    name,
                    style: style(row.op, row.crc),
                    points: vec![point],
                }),
            }
        }
        for curve in &mut curves {
            curve.points.sort_by_key(|(size, _)| *size);
        }
        Panel {
            title: title.to_owned(),
            unit,
            curves,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;

    #[test]
    fn results_are_drawn_beside_tcp() {
        let svg = example().svg().unwrap();
        for piece in [
            "TCP",
            "write, CRC",
            "write, no CRC",
            "read, CRC",
            "64 B",
            "10 µs",
            "1 GB/s",
        ] {
            assert!(svg.contains(&format!("\n{piece}\n")), "{piece}");
        }
        assert_eq!(
            svg.matches("\nTCP\n").count(),
            1,
            "one legend for four panels"
        );
        assert!(svg.contains("&lt;3 GHz&gt; &amp; more") && !svg.contains("Busy"));
        let mut busy = example();
        busy.others.cpus_used = 1.0;
        let busy = busy.svg().unwrap();
        assert!(
            busy.contains("Busy machine: other programs used 1.0 of 2"),
            "{busy}"
        );
        if let Some(file) = std::env::var_os("IWARP_TEST_PLOT") {
            std::fs::write(file, svg).unwrap();
        }
    }
}
