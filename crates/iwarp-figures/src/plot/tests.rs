//! Unit tests of the drawing.

use super::*;

fn spread(median: f64) -> Spread {
    Spread {
        median,
        min: median * 0.9,
        max: median * 1.2,
        quartiles: (median * 0.95, median * 1.1),
        count: 3,
    }
}

fn curve(name: &str, mark: Mark, points: &[(u64, f64)]) -> Curve {
    Curve {
        name: name.to_owned(),
        style: Style {
            colour: (0xd5, 0x5e, 0x00),
            mark,
            dashed: name.ends_with("no CRC"),
        },
        points: points.iter().map(|&(size, v)| (size, spread(v))).collect(),
    }
}

fn figure(units: &[Unit], curves: &[Curve]) -> String {
    let figure = Figure {
        title: "measured".to_owned(),
        theme: Theme::Light,
        size: None,
        band: Band::Extremes,
        facts: "CPU <3 GHz> & more".to_owned(),
        panels: units
            .iter()
            .map(|&unit| Panel {
                title: format!("{unit:?}"),
                unit,
                curves: curves.to_vec(),
            })
            .collect(),
    };
    let svg = figure.svg().unwrap();
    assert!(
        svg.starts_with("<svg") && svg.ends_with("</svg>\n"),
        "{svg}"
    );
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    svg
}

#[test]
fn legend_names_each_curve_once() {
    let points = [(4, 3e-6), (65_536, 3e-5)];
    let curves = [
        curve("write, CRC", Mark::Circle, &points),
        curve("write, no CRC", Mark::Circle, &points),
    ];
    let svg = figure(&[Unit::Seconds, Unit::Seconds], &curves);
    assert_eq!(svg.matches("\nwrite, CRC\n").count(), 1, "{svg}");
    assert_eq!(svg.matches("\nwrite, no CRC\n").count(), 1);
    assert!(svg.contains("CPU &lt;3 GHz&gt; &amp; more"));
}

#[test]
fn axes_have_labels_with_units() {
    let svg = figure(
        &[Unit::Seconds],
        &[curve("tcp", Mark::Square, &[(4, 3e-6), (1 << 20, 3e-4)])],
    );
    for label in ["4 B", "1 KiB", "256 KiB", "5 µs", "10 µs", "200 µs"] {
        assert!(svg.contains(&format!("\n{label}\n")), "{label} in {svg}");
    }
}

#[test]
fn rate_axis_ignores_tiny_messages() {
    let points = [(1, 1e4), (64, 6e5), (1 << 20, 4e9)];
    let svg = figure(
        &[Unit::OctetsPerSecond],
        &[curve("tcp", Mark::Diamond, &points)],
    );
    assert!(svg.contains("\n1 GB/s\n") && svg.contains("\n1 MB/s\n"));
    assert!(!svg.contains("\n10 kB/s\n"), "{svg}");
    let panel = Panel {
        title: String::new(),
        unit: Unit::OctetsPerSecond,
        curves: vec![curve("tcp", Mark::Diamond, &points)],
    };
    assert!(panel.values(Band::Extremes).start >= 1e5);
    // Hollow marks are white: two points inside the frame and one in the legend. The background is
    // white as well.
    let hollow = figure(
        &[Unit::OctetsPerSecond],
        &[curve("no CRC", Mark::Diamond, &points)],
    );
    assert!(hollow.contains("(1 below the frame)"), "{hollow}");
    assert_eq!(
        hollow.matches("fill=\"#FFFFFF\"").count(),
        1 + 2 + 1,
        "{hollow}"
    );
}

#[test]
fn band_spans_the_extremes() {
    let points = [(4, 1e-5), (1024, 1e-5)];
    let svg = figure(&[Unit::Seconds], &[curve("tcp", Mark::Circle, &points)]);
    let band = svg
        .lines()
        .find(|line| line.contains("opacity=\"0.16\""))
        .expect("a band");
    let corners = band.split("points=\"").nth(1).unwrap();
    let corners = corners.split('"').next().unwrap();
    let rows: Vec<i32> = corners
        .split_whitespace()
        .map(|corner| corner.split(',').nth(1).unwrap().parse().unwrap())
        .collect();
    // The outline follows the smallest values forward, and the largest, which are higher, back.
    assert_eq!(rows.len(), 4);
    assert!(rows[0] == rows[1] && rows[2] == rows[3] && rows[2] < rows[1]);
}

#[test]
fn long_facts_are_wrapped() {
    assert_eq!(wrap("a bb ccc dddddd e", 6), ["a bb", "ccc", "dddddd", "e"]);
    assert_eq!(wrap("", 6), [""]);
}

#[test]
fn empty_and_single_point_are_drawn() {
    let one = figure(
        &[Unit::Seconds],
        &[curve("tcp", Mark::Inverted, &[(64, 1e-5)])],
    );
    assert!(one.contains("\n64 B\n"));
    let none = figure(
        &[Unit::Seconds],
        &[curve("tcp", Mark::Pentagon, &[(64, 0.0)])],
    );
    assert!(!none.contains("tcp"));
}

#[test]
fn labels_are_round_numbers_with_units() {
    let label = |unit: Unit, v: f64| unit.label(v);
    assert_eq!(label(Unit::Seconds, 2e-5), "20 µs");
    assert_eq!(label(Unit::Seconds, 1e-3), "1 ms");
    assert_eq!(label(Unit::Seconds, 5e-7), "500 ns");
    assert_eq!(label(Unit::OctetsPerSecond, 1e9), "1 GB/s");
    assert_eq!(label(Unit::OctetsPerSecond, 5e5), "500 kB/s");
    assert_eq!(
        (octets(4.0), octets(65536.0)),
        ("4 B".into(), "64 KiB".into())
    );
    assert_eq!(
        powers_of_two(&(3.0..1.4e6)),
        [4.0, 64.0, 1024.0, 16384.0, 262144.0]
    );
    assert_eq!(ticks(&(0.9..11.0)), [1.0, 2.0, 5.0, 10.0]);
    assert_eq!(ticks(&(1.0..1e4)).len(), 5);
    assert_eq!((round_below(3.4), round_below(10.0)), (2.0, 10.0));
    assert_eq!((round_above(3.4), round_above(5.001)), (5.0, 10.0));
}

#[test]
fn dark_theme_changes_all_but_curves() {
    let mut figure = Figure {
        title: "measured".to_owned(),
        theme: Theme::Light,
        size: Some((400, 300)),
        band: Band::Extremes,
        facts: String::new(),
        panels: vec![Panel {
            title: String::new(),
            unit: Unit::Seconds,
            curves: vec![curve("no CRC", Mark::Circle, &[(4, 1e-5), (64, 1e-5)])],
        }],
    };
    let light = figure.svg().unwrap();
    figure.theme = Theme::Dark;
    let dark = figure.svg().unwrap();
    assert!(light.contains("svg width=\"400\""), "{light}");
    assert!(
        light.contains("#FFFFFF") && !light.contains("#0D1117"),
        "{light}"
    );
    assert!(
        dark.contains("#0D1117") && !dark.contains("#FFFFFF"),
        "{dark}"
    );
    assert_eq!(
        light.matches("#D55E00").count(),
        dark.matches("#D55E00").count()
    );
}
