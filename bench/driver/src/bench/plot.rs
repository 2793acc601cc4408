//! Curves over the message size as SVG, double logarithmic.

use std::fmt::Write as _;

use serde_json::Value;

use super::report::facts_line;
use super::samples::Samples;
use super::sizes::{digits, show};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 230.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 56.0;
const INK: &str = "#24292f";
const GRID: &str = "#e1e4e8";

/// A curve: series, name, colour (Okabe–Ito, which colour-blind readers can tell apart), dashed.
type Style = (&'static str, &'static str, &'static str, bool);

const BANDWIDTH: &[Style] = &[
    ("bw:tcp", "TCP", "#000000", false),
    ("bw:tcp-nagle", "TCP, Nagle", "#000000", true),
    ("bw:probe-batch", "framing only", "#999999", true),
    ("bw:probe-batch-crc", "framing only, CRC", "#999999", false),
    ("bw:write", "Write", "#d55e00", true),
    ("bw:write-crc", "Write, CRC", "#d55e00", false),
    ("bw:send-crc", "Send, CRC", "#0072b2", false),
    ("bw:read-crc", "Read, CRC", "#009e73", false),
    ("bw:ib-write", "ib_write_bw", "#56b4e9", false),
    ("bw:ucx-tag", "UCX tag", "#cc79a7", false),
    ("bw:ucx-stream", "UCX stream", "#cc79a7", true),
    ("bw:fi-msg", "libfabric msg", "#e69f00", false),
];

const LATENCY: &[Style] = &[
    ("lat:tcp-block", "TCP blocking", "#000000", true),
    ("lat:tcp-spin", "TCP spinning", "#000000", false),
    ("lat:probe-spin-crc", "framing only, CRC", "#999999", false),
    ("lat:write-event-crc", "Write, event, CRC", "#d55e00", true),
    (
        "lat:write-spin-crc",
        "Write, spinning, CRC",
        "#d55e00",
        false,
    ),
    ("lat:send-spin-crc", "Send, spinning, CRC", "#0072b2", false),
    ("lat:ib-write", "ib_write_lat", "#56b4e9", false),
    ("lat:ucx-tag", "UCX tag", "#cc79a7", false),
    ("lat:fi-pingpong", "libfabric ping-pong", "#e69f00", false),
];

/// File names and drawings; none for what was not measured.
pub(super) fn all(samples: &Samples, facts: &Value) -> Vec<(&'static str, String)> {
    let line = facts_line(facts);
    [
        ("bandwidth.svg", "One direction, GB/s", "gbps", BANDWIDTH),
        ("latency.svg", "Half round trip, µs", "med_us", LATENCY),
    ]
    .into_iter()
    .filter_map(|(file, title, metric, styles)| {
        Some((file, draw(samples, title, &line, metric, styles)?))
    })
    .collect()
}

fn draw(
    samples: &Samples,
    title: &str,
    line: &str,
    metric: &str,
    styles: &[Style],
) -> Option<String> {
    let curves: Vec<(&Style, Vec<(f64, f64)>)> = styles
        .iter()
        .map(|style| {
            let points = samples.sizes(style.0).into_iter().filter_map(|size| {
                let spread = samples.value((style.0, size), metric)?;
                (spread.median > 0.0).then_some((size as f64, spread.median))
            });
            (style, points.collect::<Vec<_>>())
        })
        .filter(|(_, points)| !points.is_empty())
        .collect();
    let all = || curves.iter().flat_map(|c| &c.1);
    let range = |of: fn(&(f64, f64)) -> f64| {
        all()
            .map(of)
            .fold((f64::MAX, 0.0f64), |(a, b), v| (a.min(v), b.max(v)))
    };
    if curves.is_empty() {
        return None;
    }
    let ((x0, x1), (y0, y1)) = (range(|p| p.0), range(|p| p.1));
    // A single size still needs an axis with some length.
    let (x0, x1) = (x0 / 1.2, x1 * 1.2);
    let (y0, y1) = (
        10f64.powf(y0.log10().floor()),
        10f64.powf(y1.log10().ceil()),
    );
    let y1 = if y1 > y0 { y1 } else { y0 * 10.0 };
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let px = |v: f64| LEFT + (v / x0).ln() / (x1 / x0).ln() * (right - LEFT);
    let py = |v: f64| bottom - (v / y0).ln() / (y1 / y0).ln() * (bottom - TOP);
    let mut s = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"{INK}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"26\" font-size=\"16\" font-weight=\"bold\">{title}</text>\n\
         <text x=\"{LEFT}\" y=\"44\" font-size=\"10\">{}</text>\n",
        escape(line)
    );
    let mut ten = y0;
    while ten <= y1 * 1.001 {
        for step in [1.0, 2.0, 5.0] {
            let v = ten * step;
            if v > y1 * 1.001 {
                break;
            }
            let y = py(v);
            let _ = writeln!(
                s,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"{GRID}\"/>"
            );
            let _ = writeln!(
                s,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                digits(v)
            );
        }
        ten *= 10.0;
    }
    let mut sizes: Vec<f64> = all().map(|p| p.0).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    for v in sizes {
        let x = px(v);
        let _ = writeln!(
            s,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"{GRID}\"/>"
        );
        let _ = writeln!(
            s,
            "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            bottom + 18.0,
            show(v as u64)
        );
    }
    for (at, ((_, name, colour, dashed), points)) in curves.iter().enumerate() {
        let dash = if *dashed {
            " stroke-dasharray=\"6 4\""
        } else {
            ""
        };
        let path: Vec<String> = points
            .iter()
            .map(|&(x, y)| format!("{:.1},{:.1}", px(x), py(y)))
            .collect();
        let _ = writeln!(
            s,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
            path.join(" ")
        );
        for &(x, y) in points {
            let _ = writeln!(
                s,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                px(x),
                py(y)
            );
        }
        let (x, y) = (right + 16.0, TOP + 10.0 + at as f64 * 20.0);
        let _ = writeln!(
            s,
            "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>\
             <text x=\"{}\" y=\"{}\">{name}</text>",
            x + 26.0,
            x + 32.0,
            y + 4.0
        );
    }
    s.push_str("</svg>\n");
    Some(s)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::samples::tests::sample;
    use super::*;
    use serde_json::json;

    #[test]
    fn curves_are_finite_and_what_is_missing_is_left_out() {
        let mut samples = Samples::new(1, 1);
        for (size, v) in [(64, 0.03), (1 << 20, 5.0)] {
            samples.add(sample(0, "bw:tcp", size, &[("gbps", v)], true));
        }
        let drawn = all(&samples, &json!({ "cpu": "<a> & b" }));
        assert_eq!(drawn.len(), 1);
        let svg = &drawn[0].1;
        assert!(svg.contains("&lt;a&gt; &amp; b") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert_eq!(
            (
                svg.matches("<circle").count(),
                svg.matches("<polyline").count()
            ),
            (2, 1)
        );
    }

    #[test]
    fn a_single_point_can_be_drawn() {
        let mut samples = Samples::new(1, 1);
        samples.add(sample(0, "lat:tcp-spin", 4, &[("med_us", 10.0)], true));
        let drawn = all(&samples, &json!({}));
        assert!(drawn[0].1.contains("<circle") && !drawn[0].1.contains("NaN"));
    }
}
