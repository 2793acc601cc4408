//! Latency and bandwidth curves as an SVG: double logarithmic, iWARP beside TCP.

use super::{Report, Row};
use crate::perf::point::{Op, Poll};
use crate::units::{digits3, size};
use std::fmt::Write as _;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 32.0;
const TOP: f64 = 76.0;
const BOTTOM: f64 = 96.0;
const INK: &str = "#24292f";
const GRID: &str = "#e1e4e8";

/// A colour per operation that colour-blind readers can tell apart too (Okabe–Ito).
fn colour(op: Op) -> &'static str {
    match op {
        Op::Tcp => "#000000",
        Op::Send => "#0072b2",
        Op::Write => "#d55e00",
        Op::Read => "#009e73",
        Op::FetchAdd => "#cc79a7",
    }
}

struct Panel {
    title: &'static str,
    unit: &'static str,
    curves: Vec<Curve>,
}

struct Curve {
    op: Op,
    crc: bool,
    /// Size in octets, value.
    points: Vec<(f64, f64)>,
}

impl Report {
    /// The drawing, as an SVG document.
    pub(crate) fn svg(&self) -> String {
        let us = |r: &Row| r.p50.map(|s| s.median);
        let gb = |r: &Row| r.bytes_per_s.map(|s| s.median / 1e9);
        let mut panels: Vec<Panel> = [
            self.panel("Half round trip, spinning", "µs", Poll::Spin, us),
            self.panel("Half round trip, blocking", "µs", Poll::Event, us),
            self.panel("Bandwidth, spinning", "GB/s", Poll::Spin, gb),
            self.panel("Bandwidth, blocking", "GB/s", Poll::Event, gb),
        ]
        .into_iter()
        .filter(|p| !p.curves.is_empty())
        .collect();
        panels.truncate(4);
        let columns = panels.len().clamp(1, 2);
        let (w, h) = (
            WIDTH * columns as f64,
            34.0 + HEIGHT * panels.len().div_ceil(columns) as f64,
        );
        let mut s = String::new();
        let _ = writeln!(
            s,
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" font-family="sans-serif" font-size="12" fill="{INK}">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="{LEFT}" y="24">{}</text>"##,
            escape(&format!(
                "iwarp {} · {} · {} · TCP {} · {}",
                self.host.iwarp,
                self.host.cpu,
                self.host.kernel,
                self.host.congestion_control,
                self.host.date
            ))
        );
        for (i, p) in panels.iter().enumerate() {
            let (x, y) = (
                (i % columns) as f64 * WIDTH,
                34.0 + (i / columns) as f64 * HEIGHT,
            );
            let _ = writeln!(s, r#"<g transform="translate({x} {y})">"#);
            draw(&mut s, p);
            s.push_str("</g>\n");
        }
        s.push_str("</svg>\n");
        s
    }

    fn panel(
        &self,
        title: &'static str,
        unit: &'static str,
        poll: Poll,
        value: fn(&Row) -> Option<f64>,
    ) -> Panel {
        let mut curves: Vec<Curve> = Vec::new();
        for r in self.tcp.iter().chain(&self.rows).filter(|r| r.poll == poll) {
            let Some(v) = value(r).filter(|&v| v > 0.0) else {
                continue;
            };
            let point = (r.size as f64, v);
            match curves.iter_mut().find(|c| (c.op, c.crc) == (r.op, r.crc)) {
                Some(c) => c.points.push(point),
                None => curves.push(Curve {
                    op: r.op,
                    crc: r.crc,
                    points: vec![point],
                }),
            }
        }
        for c in &mut curves {
            c.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        Panel {
            title,
            unit,
            curves,
        }
    }
}

fn draw(s: &mut String, p: &Panel) {
    let all = || p.curves.iter().flat_map(|c| &c.points);
    let bounds = |f: fn(&(f64, f64)) -> f64| {
        all()
            .map(f)
            .fold((f64::MAX, 0.0f64), |(a, b), v| (a.min(v), b.max(v)))
    };
    let ((x0, x1), (y0, y1)) = (bounds(|p| p.0), bounds(|p| p.1));
    // A single size still needs an axis with some length.
    let (x0, x1) = if x0 == x1 {
        (x0 / 2.0, x1 * 2.0)
    } else {
        (x0, x1)
    };
    let (y0, y1) = (step_below(y0 * 0.95), step_above(y1 * 1.05));
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let px = |v: f64| LEFT + (v / x0).ln() / (x1 / x0).ln() * (right - LEFT);
    let py = |v: f64| bottom - (v / y0).ln() / (y1 / y0).ln() * (bottom - TOP + 30.0);

    let _ = writeln!(
        s,
        r#"<text x="{LEFT}" y="30" font-size="15" font-weight="bold">{}, {}</text>"#,
        p.title, p.unit
    );
    let decades = (y1 / y0).log10();
    let mut y = y0;
    while y <= y1 * 1.001 {
        let yy = py(y);
        let _ = writeln!(
            s,
            r#"<line x1="{LEFT}" y1="{yy:.1}" x2="{right}" y2="{yy:.1}" stroke="{GRID}"/>"#
        );
        // Over many decades only the powers of ten are named.
        let tens = (y.log10() - y.log10().round()).abs() < 1e-6;
        if decades < 3.0 || tens {
            let _ = writeln!(
                s,
                r#"<text x="{}" y="{:.1}" text-anchor="end">{}</text>"#,
                LEFT - 8.0,
                yy + 4.0,
                trim(&digits3(y))
            );
        }
        y = step_above(y * 1.001);
    }
    let mut sizes: Vec<f64> = all().map(|p| p.0).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let mut free_from = f64::MIN;
    for v in sizes {
        let x = px(v);
        let _ = writeln!(
            s,
            r#"<line x1="{x:.1}" y1="46" x2="{x:.1}" y2="{bottom}" stroke="{GRID}"/>"#
        );
        if x >= free_from {
            let _ = writeln!(
                s,
                r#"<text x="{x:.1}" y="{}" text-anchor="middle">{}</text>"#,
                bottom + 18.0,
                size(v as u64)
            );
            free_from = x + 48.0;
        }
    }
    let _ = writeln!(
        s,
        r#"<path d="M{LEFT} 46V{bottom}H{right}" fill="none" stroke="{INK}"/>"#
    );
    for c in &p.curves {
        let (stroke, dash) = (colour(c.op), dash(c));
        let line: Vec<String> = c
            .points
            .iter()
            .map(|&(x, y)| format!("{:.1},{:.1}", px(x), py(y)))
            .collect();
        let _ = writeln!(
            s,
            r#"<polyline points="{}" fill="none" stroke="{stroke}" stroke-width="2"{dash}/>"#,
            line.join(" ")
        );
        let fill = if c.op == Op::Tcp || c.crc {
            stroke
        } else {
            "#ffffff"
        };
        for &(x, y) in &c.points {
            let _ = writeln!(
                s,
                r#"<circle cx="{:.1}" cy="{:.1}" r="3.2" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>"#,
                px(x),
                py(y)
            );
        }
    }
    for (i, c) in p.curves.iter().enumerate() {
        let (x, y) = (
            LEFT + (i % 4) as f64 * 120.0,
            bottom + 42.0 + (i / 4) as f64 * 20.0,
        );
        let (stroke, dash) = (colour(c.op), dash(c));
        let name = match (c.op, c.crc) {
            (Op::Tcp, _) => "TCP".to_owned(),
            (op, true) => format!("{}, CRC", op.name()),
            (op, false) => format!("{}, no CRC", op.name()),
        };
        let _ = writeln!(
            s,
            r#"<line x1="{x}" y1="{y}" x2="{}" y2="{y}" stroke="{stroke}" stroke-width="2"{dash}/>"#,
            x + 22.0
        );
        let _ = writeln!(
            s,
            r#"<text x="{}" y="{}" font-size="11">{name}</text>"#,
            x + 27.0,
            y + 4.0
        );
    }
}

fn dash(c: &Curve) -> &'static str {
    if c.op == Op::Tcp || c.crc {
        ""
    } else {
        r#" stroke-dasharray="5 4""#
    }
}

/// The nearest of …, 1, 2, 5, 10, … at or below `v`.
fn step_below(v: f64) -> f64 {
    let ten = 10f64.powf(v.log10().floor());
    [5.0, 2.0, 1.0]
        .into_iter()
        .map(|m| m * ten)
        .find(|s| *s <= v * 1.000_001)
        .unwrap_or(ten)
}

/// The nearest of …, 1, 2, 5, 10, … at or above `v`.
fn step_above(v: f64) -> f64 {
    let ten = 10f64.powf(v.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * ten)
        .find(|s| *s >= v * 0.999_999)
        .unwrap_or(ten * 10.0)
}

fn trim(number: &str) -> &str {
    if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        number
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::*;

    /// Enough of an XML reader to see that tags nest and attributes are quoted.
    fn well_formed(text: &str) -> Result<usize, String> {
        let mut open = Vec::new();
        let mut count = 0;
        let mut rest = text;
        while let Some(at) = rest.find('<') {
            if rest[..at].contains('>')
                || rest[..at]
                    .replace("&amp;", "")
                    .replace("&lt;", "")
                    .replace("&gt;", "")
                    .contains('&')
            {
                return Err(format!("bare character in {:?}", &rest[..at]));
            }
            let end = rest[at..].find('>').ok_or("tag without end")? + at;
            let tag = &rest[at + 1..end];
            if !tag.matches('"').count().is_multiple_of(2) || tag.contains('<') {
                return Err(format!("bad tag {tag}"));
            }
            if let Some(name) = tag.strip_prefix('/') {
                if open.pop() != Some(name) {
                    return Err(format!("unexpected </{name}>"));
                }
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap_or(""));
            }
            count += 1;
            rest = &rest[end + 1..];
        }
        if open.is_empty() {
            Ok(count)
        } else {
            Err(format!("left open: {open:?}"))
        }
    }

    #[test]
    fn drawing_is_well_formed_and_finite() {
        let s = example().svg();
        assert!(well_formed(&s).unwrap() > 200);
        assert!(!s.contains("NaN") && !s.contains("inf"));
        for piece in [
            "TCP",
            "write, CRC",
            "write, no CRC",
            "64 KiB",
            "µs",
            "GB/s",
            "&lt;3 GHz&gt; &amp; more",
        ] {
            assert!(s.contains(piece), "{piece}");
        }
        if let Some(file) = std::env::var_os("IWARP_TEST_PLOT") {
            std::fs::write(file, s).unwrap();
        }
    }

    #[test]
    fn one_size_and_no_size_can_be_drawn() {
        let mut r = example();
        r.tcp.retain(|t| t.size == 64);
        r.rows.clear();
        let s = r.svg();
        assert!(well_formed(&s).is_ok() && !s.contains("NaN"), "{s}");
        r.tcp.clear();
        assert!(well_formed(&r.svg()).is_ok());
    }

    #[test]
    fn axis_steps() {
        assert_eq!(step_below(3.4), 2.0);
        assert_eq!(step_above(3.4), 5.0);
        assert_eq!(step_above(5.001), 10.0);
        assert_eq!(step_below(10.0), 10.0);
    }
}
