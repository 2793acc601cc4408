//! Draws curves over the message size. `DRAWINGS` defines which series are drawn, and how.

use anyhow::{Result, anyhow};
use iwarp_figures::plot::{Band, Curve, Figure, Mark, Panel, Style, Theme, Unit};
use serde_json::Value;

use super::report::facts_line;
use super::samples::Samples;

/// A picture: one file with one panel.
struct Drawing {
    file: &'static str,
    /// The heading of the picture.
    heading: &'static str,
    theme: Theme,
    size: Option<(u32, u32)>,
    title: &'static str,
    metric: &'static str,
    unit: Unit,
    /// Factor from the metric's unit to the unit of the axis.
    factor: f64,
    series: &'static [Series],
}

/// Name of the series, text in the legend, colour (of the Okabe–Ito palette, for colour-blind
/// readers), mark, and `true` if the curve is dashed.
type Series = (&'static str, &'static str, (u8, u8, u8), Mark, bool);

const BLACK: (u8, u8, u8) = (0, 0, 0);
const WHITE: (u8, u8, u8) = (0xe6, 0xed, 0xf3);
const GREY: (u8, u8, u8) = (0x99, 0x99, 0x99);
const RED: (u8, u8, u8) = (0xd5, 0x5e, 0x00);
const BLUE: (u8, u8, u8) = (0x00, 0x72, 0xb2);
const GREEN: (u8, u8, u8) = (0x00, 0x9e, 0x73);
const SKY: (u8, u8, u8) = (0x56, 0xb4, 0xe9);
const PINK: (u8, u8, u8) = (0xcc, 0x79, 0xa7);
const ORANGE: (u8, u8, u8) = (0xe6, 0x9f, 0x00);

const HEADING: &str = "iwarp beside others";
/// The curves of the README's picture, in colours for pages of each theme.
const README_LIGHT: &[Series] = &readme_series(BLACK, BLUE);
const README_DARK: &[Series] = &readme_series(WHITE, SKY);

const fn readme_series(tcp: (u8, u8, u8), read: (u8, u8, u8)) -> [Series; 3] {
    [
        ("bw:write-crc", "RDMA Write", ORANGE, Mark::Triangle, false),
        ("bw:read-crc", "RDMA Read", read, Mark::Diamond, false),
        ("bw:tcp", "TCP, a send() each", tcp, Mark::Circle, false),
    ]
}

const DRAWINGS: &[Drawing] = &[
    Drawing {
        file: "bandwidth.svg",
        heading: HEADING,
        theme: Theme::Light,
        size: None,
        title: "One direction",
        metric: "gbps",
        unit: Unit::OctetsPerSecond,
        factor: 1e9,
        series: &[
            ("bw:tcp", "TCP", BLACK, Mark::Circle, false),
            ("bw:tcp-nagle", "TCP, Nagle", BLACK, Mark::Circle, true),
            (
                "bw:probe-batch-crc",
                "framing only, CRC",
                GREY,
                Mark::Pentagon,
                false,
            ),
            (
                "bw:probe-batch",
                "framing only, no CRC",
                GREY,
                Mark::Pentagon,
                true,
            ),
            ("bw:write-crc", "Write, CRC", RED, Mark::Triangle, false),
            ("bw:write", "Write, no CRC", RED, Mark::Triangle, true),
            ("bw:send-crc", "Send, CRC", BLUE, Mark::Square, false),
            ("bw:read-crc", "Read, CRC", GREEN, Mark::Diamond, false),
            ("bw:ib-write", "ib_write_bw", SKY, Mark::Diamond, true),
            ("bw:ucx-tag", "UCX tag", PINK, Mark::Inverted, false),
            ("bw:ucx-stream", "UCX stream", PINK, Mark::Inverted, true),
            ("bw:fi-msg", "libfabric msg", ORANGE, Mark::Square, true),
        ],
    },
    Drawing {
        file: "latency.svg",
        heading: HEADING,
        theme: Theme::Light,
        size: None,
        title: "Half round trip",
        metric: "med_us",
        unit: Unit::Seconds,
        factor: 1e-6,
        series: &[
            ("lat:tcp-spin", "TCP spinning", BLACK, Mark::Circle, false),
            ("lat:tcp-block", "TCP blocking", BLACK, Mark::Circle, true),
            (
                "lat:probe-spin-crc",
                "framing only, CRC",
                GREY,
                Mark::Pentagon,
                false,
            ),
            (
                "lat:write-spin-crc",
                "Write, spinning, CRC",
                RED,
                Mark::Triangle,
                false,
            ),
            (
                "lat:write-event-crc",
                "Write, event, CRC",
                RED,
                Mark::Triangle,
                true,
            ),
            (
                "lat:send-spin-crc",
                "Send, spinning, CRC",
                BLUE,
                Mark::Square,
                false,
            ),
            ("lat:ib-write", "ib_write_lat", SKY, Mark::Diamond, false),
            ("lat:ucx-tag", "UCX tag", PINK, Mark::Inverted, false),
            (
                "lat:fi-pingpong",
                "libfabric ping-pong",
                ORANGE,
                Mark::Square,
                true,
            ),
        ],
    },
];

/// The README's pictures.
const README: [Drawing; 2] = [
    readme("bandwidth-light.svg", Theme::Light, README_LIGHT),
    readme("bandwidth-dark.svg", Theme::Dark, README_DARK),
];

/// The README's picture, for pages of one theme.
const fn readme(file: &'static str, theme: Theme, series: &'static [Series]) -> Drawing {
    Drawing {
        file,
        heading: "Bandwidth by message size, one connection",
        theme,
        size: Some((480, 250)),
        title: "",
        metric: "gbps",
        unit: Unit::OctetsPerSecond,
        factor: 1e9,
        series,
    }
}

/// Returns file names and pictures. A picture without any measured series is omitted.
pub(super) fn all(samples: &Samples, facts: &Value) -> Result<Vec<(&'static str, String)>> {
    draw(DRAWINGS, samples, &facts_line(facts))
}

/// Returns file names and pictures for the README.
pub(super) fn for_readme(samples: &Samples, facts: &Value) -> Result<Vec<(&'static str, String)>> {
    let date = facts["date"].as_str().unwrap_or_default();
    let date = date.split('T').next().unwrap_or_default();
    draw(
        &README,
        samples,
        &format!("{date}, loopback, two processors"),
    )
}

fn draw(
    drawings: &[Drawing],
    samples: &Samples,
    facts: &str,
) -> Result<Vec<(&'static str, String)>> {
    let mut pictures = Vec::new();
    for drawing in drawings {
        let panel = drawing.panel(samples);
        if panel.curves.is_empty() {
            continue;
        }
        let figure = Figure {
            title: drawing.heading.into(),
            theme: drawing.theme,
            size: drawing.size,
            band: Band::Quartiles,
            facts: facts.to_owned(),
            panels: vec![panel],
        };
        let svg = figure.svg();
        let svg = svg.map_err(|error| anyhow!("cannot draw {}: {error}", drawing.file))?;
        pictures.push((drawing.file, svg));
    }
    Ok(pictures)
}

impl Drawing {
    fn panel(&self, samples: &Samples) -> Panel {
        let curve = |&(series, name, colour, mark, dashed): &Series| {
            let points: Vec<_> = samples
                .sizes(series)
                .into_iter()
                .filter_map(|size| {
                    let measured = samples.value((series, size), self.metric)?;
                    Some((size, measured.spread.times(self.factor)))
                })
                .collect();
            (!points.is_empty()).then(|| Curve {
                name: name.to_owned(),
                style: Style {
                    colour,
                    mark,
                    dashed,
                },
                points,
            })
        };
        Panel {
            title: self.title.into(),
            unit: self.unit,
            curves: self.series.iter().filter_map(curve).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::tests::sample;
    use super::*;
    use serde_json::json;

    #[test]
    fn missing_points_are_omitted() {
        let mut samples = Samples::new(1, 1);
        for (size, v) in [(64, 0.03), (1 << 20, 5.0)] {
            samples.add(sample(0, "bw:tcp", size, &[("gbps", v)], true));
        }
        let drawn = all(&samples, &json!({ "cpu": "<a> & b" })).unwrap();
        assert_eq!(drawn.len(), 1);
        let svg = &drawn[0].1;
        assert!(svg.contains("&lt;a&gt; &amp; b") && svg.contains("\n1 GB/s\n"));
        assert!(svg.contains("\nTCP\n") && !svg.contains("\nWrite, CRC\n"));
        samples.add(sample(0, "lat:tcp-spin", 4, &[("med_us", 10.0)], true));
        let drawn = all(&samples, &json!({})).unwrap();
        assert!(drawn[1].1.contains("\n10 µs\n"), "{}", drawn[1].1);
        let drawn = for_readme(&samples, &json!({ "date": "2026-01-02T03:04:05Z" })).unwrap();
        assert_eq!(drawn.len(), 2);
        assert!(
            drawn
                .iter()
                .all(|(_, svg)| svg.contains("2026-01-02, loopback"))
        );
    }

    #[test]
    fn curves_differ_without_colour() {
        for drawing in DRAWINGS {
            for (i, series) in drawing.series.iter().enumerate() {
                assert!(
                    drawing.series[..i]
                        .iter()
                        .all(|other| (series.3, series.4) != (other.3, other.4)),
                    "{} has the mark and the dashes of another curve",
                    series.1
                );
            }
        }
    }
}
