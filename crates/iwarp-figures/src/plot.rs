//! Draws curves over the message size as an SVG document. Both axes are logarithmic. All panels
//! share one legend, a band shows the spread of repeated measurements, and marks distinguish the
//! curves without colour.

use std::error::Error;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Spread;

/// Width and height of a panel in pixels: with other panels in the figure, and alone.
const PANEL: (u32, u32) = (760, 500);
const SINGLE_PANEL: (u32, u32) = (1080, 640);
/// Heights of the title and of each line of facts, in pixels.
const TITLE: u32 = 40;
const LINE: u32 = 20;
/// Width of a letter of the facts in pixels, rounded up.
const LETTER: u32 = 8;
/// Width and height of one entry of the legend in pixels.
const ENTRY: (u32, u32) = (240, 28);
/// Half the width of a mark in pixels.
const MARK: i32 = 6;
const FONT: &str = "sans-serif";
/// Largest ratio of the highest to the lowest rate on an axis. With a larger ratio, the rates of
/// tiny messages would take half of the panel, although their latency is more meaningful.
const MAX_RATE_RATIO: f64 = 1e4;

/// The colours of everything except the curves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Theme {
    /// Dark text on white.
    Light,
    /// Light text on the background of dark pages.
    Dark,
}

impl Theme {
    fn background(self) -> RGBColor {
        match self {
            Self::Light => WHITE,
            Self::Dark => RGBColor(0x0d, 0x11, 0x17),
        }
    }

    fn ink(self) -> RGBColor {
        match self {
            Self::Light => RGBColor(0x24, 0x29, 0x2f),
            Self::Dark => RGBColor(0xe6, 0xed, 0xf3),
        }
    }

    fn grid(self) -> RGBColor {
        match self {
            Self::Light => RGBColor(0xe1, 0xe4, 0xe8),
            Self::Dark => RGBColor(0x30, 0x36, 0x3d),
        }
    }

    fn font(self, size: u32) -> TextStyle<'static> {
        (FONT, size).into_font().color(&self.ink())
    }

    fn text(self, size: u32, to: HPos) -> TextStyle<'static> {
        self.font(size).pos(Pos::new(to, VPos::Center))
    }
}

/// The unit of a curve's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Times, in seconds.
    Seconds,
    /// Rates, in octets per second.
    OctetsPerSecond,
}

/// The shape that marks each measured size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// ●
    Circle,
    /// ■
    Square,
    /// ▲
    Triangle,
    /// ▼
    Inverted,
    /// ◆
    Diamond,
    /// ⬟
    Pentagon,
}

/// Appearance of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Red, green and blue.
    pub colour: (u8, u8, u8),
    /// The shape of the marks.
    pub mark: Mark,
    /// Dashed line and hollow marks.
    pub dashed: bool,
}

/// A curve. The legend has one entry per name, so curves with the same name must have the same
/// style.
#[derive(Debug, Clone)]
pub struct Curve {
    /// The name in the legend.
    pub name: String,
    /// The style, which must be the same in all panels for one name.
    pub style: Style,
    /// Message sizes in octets, each with its measurement. Points that are not positive are
    /// omitted.
    pub points: Vec<(u64, Spread)>,
}

/// One coordinate system with its curves.
#[derive(Debug, Clone)]
pub struct Panel {
    /// The heading of the panel.
    pub title: String,
    /// The unit of the values.
    pub unit: Unit,
    /// The curves, in the order of the legend.
    pub curves: Vec<Curve>,
}

/// The range of values that the band around a curve shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Band {
    /// From the smallest to the largest value. For few repetitions.
    Extremes,
    /// The middle half of the values. For many repetitions.
    Quartiles,
}

/// A picture of one or more panels, in two columns.
#[derive(Debug, Clone)]
pub struct Figure {
    /// The heading.
    pub title: String,
    /// The colours.
    pub theme: Theme,
    /// Width and height of each panel in pixels, or `None` for a size that suits their number.
    pub size: Option<(u32, u32)>,
    /// The range that the bands show.
    pub band: Band,
    /// The machine and the time of the measurement. A description of the bands is added to it.
    pub facts: String,
    /// Panels without any point are omitted.
    pub panels: Vec<Panel>,
}

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Pixel = (i32, i32);

impl Figure {
    /// Draws the picture and returns the SVG document.
    ///
    /// # Errors
    /// Fails if the drawing library fails, which no input is known to cause.
    pub fn svg(&self) -> Outcome<String> {
        let panels: Vec<&Panel> = self
            .panels
            .iter()
            .filter(|panel| panel.points().next().is_some())
            .collect();
        let legend = legend(&panels);
        let columns = panels.len().clamp(1, 2);
        let rows = panels.len().div_ceil(columns);
        let default = if panels.len() > 1 {
            PANEL
        } else {
            SINGLE_PANEL
        };
        let panel = self.size.unwrap_or(default);
        let width = panel.0 * columns as u32;
        let facts = format!("{}; {}", self.facts.trim_end(), self.band.about());
        let facts = wrap(&facts, ((width - 40) / LETTER) as usize);
        let top = TITLE + LINE * facts.len() as u32;
        let per_line = (width / ENTRY.0).max(1) as usize;
        let foot = ENTRY.1 * (legend.len().div_ceil(per_line) as u32 + 1);
        let height = top + panel.1 * rows as u32 + foot;

        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
            root.fill(&self.theme.background())?;
            let (head, rest) = root.split_vertically(top);
            head.draw_text(&self.title, &self.theme.font(22), (20, 12))?;
            for (at, line) in facts.iter().enumerate() {
                let style = self.theme.text(14, HPos::Left);
                head.draw_text(line, &style, (20, 48 + at as i32 * LINE as i32))?;
            }
            let (body, foot) = rest.split_vertically(panel.1 * rows as u32);
            for (panel, area) in panels.iter().zip(body.split_evenly((rows, columns))) {
                panel.draw(&area, self.band, self.theme)?;
            }
            for (at, curve) in legend.into_iter().enumerate() {
                let x = 20 + (at % per_line) as i32 * ENTRY.0 as i32;
                let y = 20 + (at / per_line) as i32 * ENTRY.1 as i32;
                curve.style.line(&foot, &[(x, y), (x + 44, y)])?;
                curve.style.mark(&foot, (x + 22, y), self.theme)?;
                let style = self.theme.text(16, HPos::Left);
                foot.draw_text(&curve.name, &style, (x + 54, y))?;
            }
            root.present()?;
        }
        Ok(svg)
    }
}

/// Returns the first curve of each name.
fn legend<'a>(panels: &[&'a Panel]) -> Vec<&'a Curve> {
    let mut out: Vec<&Curve> = Vec::new();
    for curve in panels.iter().flat_map(|panel| &panel.curves) {
        if !out.iter().any(|known| known.name == curve.name) {
            out.push(curve);
        }
    }
    out
}

impl Panel {
    fn points(&self) -> impl Iterator<Item = &(u64, Spread)> {
        self.curves
            .iter()
            .flat_map(|curve| &curve.points)
            .filter(|(size, spread)| *size > 0 && spread.min > 0.0)
    }

    /// Returns the range of the value axis, which starts and ends at round numbers and leaves some
    /// room around the curves.
    fn values(&self, band: Band) -> Range<f64> {
        let bands = || self.points().map(|(_, spread)| band.of(spread));
        let low = bands().map(|(low, _)| low).fold(f64::MAX, f64::min);
        let high = bands().map(|(_, high)| high).fold(0.0, f64::max);
        let low = match self.unit {
            Unit::Seconds => low,
            Unit::OctetsPerSecond => low.max(high / MAX_RATE_RATIO),
        };
        round_below(low * 0.95)..round_above(high * 1.05)
    }

    /// Returns the range of the size axis, which is not empty even for a single size.
    fn sizes(&self) -> Range<f64> {
        let sizes = || self.points().map(|(size, _)| *size as f64);
        let low = sizes().fold(f64::MAX, f64::min);
        let high = sizes().fold(0.0, f64::max);
        low / 1.3..high * 1.3
    }

    /// Returns the title, and the number of points below the frame if there are any.
    fn caption(&self, lowest: f64) -> String {
        let below = self.points().filter(|(_, s)| s.median < lowest).count();
        match below {
            0 => self.title.clone(),
            _ => format!("{} ({below} below the frame)", self.title),
        }
    }

    fn draw(&self, area: &Area<'_>, band: Band, theme: Theme) -> Outcome<()> {
        let (sizes, values) = (self.sizes(), self.values(band));
        let mut chart = ChartBuilder::on(area)
            .margin(14)
            .margin_right(28)
            .caption(self.caption(values.start), theme.font(18))
            .x_label_area_size(34)
            .y_label_area_size(84)
            .build_cartesian_2d(
                sizes
                    .clone()
                    .log_scale()
                    .with_key_points(powers_of_two(&sizes)),
                values.clone().log_scale().with_key_points(ticks(&values)),
            )?;
        chart
            .configure_mesh()
            .max_light_lines(0)
            .bold_line_style(theme.grid())
            .axis_style(theme.ink())
            .label_style(theme.font(15))
            .x_label_formatter(&|size| octets(*size))
            .y_label_formatter(&|value| self.unit.label(*value))
            .draw()?;
        // Draw the curves in pixels, with the functions that also draw the legend.
        let (x, y) = area.get_base_pixel();
        let pixel = |size: u64, value: f64| -> Pixel {
            let at = chart.backend_coord(&(size as f64, value.max(values.start)));
            (at.0 - x, at.1 - y)
        };
        let points = |curve: &Curve| -> Vec<(Pixel, Pixel, Pixel)> {
            curve
                .points
                .iter()
                // Omit points below the frame.
                .filter(|(size, spread)| *size > 0 && spread.median >= values.start)
                .map(|(size, spread)| {
                    let at = |value| pixel(*size, value);
                    let (low, high) = band.of(spread);
                    (at(low), at(spread.median), at(high))
                })
                .collect()
        };
        // Draw all bands first, so that no band covers another curve's marks.
        for curve in &self.curves {
            curve.style.band(area, &points(curve))?;
        }
        for curve in &self.curves {
            let line: Vec<Pixel> = points(curve).iter().map(|(_, median, _)| *median).collect();
            curve.style.line(area, &line)?;
            for at in line {
                curve.style.mark(area, at, theme)?;
            }
        }
        Ok(())
    }
}

impl Band {
    fn of(self, spread: &Spread) -> (f64, f64) {
        match self {
            Self::Extremes => (spread.min, spread.max),
            Self::Quartiles => spread.quartiles,
        }
    }

    fn about(self) -> &'static str {
        match self {
            Self::Extremes => "medians, and bands from the smallest to the largest value",
            Self::Quartiles => "medians, and bands with the middle half of the values",
        }
    }
}

/// Breaks `text` between words into lines of at most `length` letters, unless a word is longer.
fn wrap(text: &str, length: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        if let Some(line) = lines.last_mut() {
            if line.is_empty() {
                line.push_str(word);
                continue;
            }
            if line.chars().count() + 1 + word.chars().count() <= length {
                line.push(' ');
                line.push_str(word);
                continue;
            }
        }
        lines.push(word.to_owned());
    }
    lines
}

impl Style {
    fn colour(self) -> RGBColor {
        let (red, green, blue) = self.colour;
        RGBColor(red, green, blue)
    }

    /// Draws the band between the lowest and the highest value at each size. Draws a line if there
    /// is only one size.
    fn band(self, area: &Area<'_>, points: &[(Pixel, Pixel, Pixel)]) -> Outcome<()> {
        if let [(low, _, high)] = points {
            let path = PathElement::new(vec![*low, *high], self.colour().stroke_width(2));
            return Ok(area.draw(&path)?);
        }
        let below = points.iter().map(|(low, _, _)| *low);
        let above = points.iter().rev().map(|(_, _, high)| *high);
        let outline: Vec<Pixel> = below.chain(above).collect();
        Ok(area.draw(&Polygon::new(outline, self.colour().mix(0.16)))?)
    }

    fn line(self, area: &Area<'_>, points: &[Pixel]) -> Outcome<()> {
        let stroke = self.colour().stroke_width(2);
        if self.dashed {
            let path = DashedPathElement::new(points.iter().copied(), 9, 6, stroke);
            return Ok(area.draw(&path)?);
        }
        Ok(area.draw(&PathElement::new(points.to_vec(), stroke))?)
    }

    fn mark(self, area: &Area<'_>, (x, y): Pixel, theme: Theme) -> Outcome<()> {
        let (colour, m) = (self.colour(), MARK);
        let inside = match self.dashed {
            true => theme.background(),
            false => colour,
        };
        let corners: &[Pixel] = match self.mark {
            Mark::Circle => {
                area.draw(&Circle::new((x, y), m - 1, inside.filled()))?;
                return Ok(area.draw(&Circle::new((x, y), m - 1, colour.stroke_width(2)))?);
            }
            Mark::Square => &[(-5, -5), (5, -5), (5, 5), (-5, 5)],
            Mark::Triangle => &[(0, -m - 1), (m, m - 2), (-m, m - 2)],
            Mark::Inverted => &[(0, m + 1), (m, 2 - m), (-m, 2 - m)],
            Mark::Diamond => &[(0, -m - 1), (m + 1, 0), (0, m + 1), (-m - 1, 0)],
            Mark::Pentagon => &[(0, -m), (m, -1), (4, m), (-4, m), (-m, -1)],
        };
        let mut outline: Vec<Pixel> = corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
        area.draw(&Polygon::new(outline.clone(), inside.filled()))?;
        outline.extend(outline.first().copied());
        Ok(area.draw(&PathElement::new(outline, colour.stroke_width(2)))?)
    }
}

impl Unit {
    /// Formats a round number as an axis label, for example `10 µs` or `1 GB/s`.
    fn label(self, value: f64) -> String {
        let (unit, prefixes): (_, &[(f64, &str)]) = match self {
            Self::Seconds => ("s", &[(1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")]),
            Self::OctetsPerSecond => ("B/s", &[(1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")]),
        };
        let fits = |(factor, _): &&(f64, &str)| value >= factor * 0.999_999;
        let (factor, prefix) = prefixes
            .iter()
            .find(fits)
            .or(prefixes.last())
            .unwrap_or(&(1.0, ""));
        // Six digits remove the error of dividing by a power of ten.
        let number = (value / factor * 1e6).round() / 1e6;
        format!("{number} {prefix}{unit}")
    }
}

/// Formats a size as an axis label, for example `4 B`, `64 KiB` or `1 MiB`.
fn octets(size: f64) -> String {
    let (factor, unit) = [(30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")]
        .map(|(power, unit)| (2f64.powi(power), unit))
        .into_iter()
        .find(|(factor, _)| size >= *factor)
        .unwrap_or((1.0, "B"));
    format!("{} {unit}", size / factor)
}

/// Returns at most nine powers of two inside a range, evenly spaced.
fn powers_of_two(range: &Range<f64>) -> Vec<f64> {
    let (low, high) = (
        range.start.log2().ceil() as i32,
        range.end.log2().floor() as i32,
    );
    let step = [1, 2, 4, 8]
        .into_iter()
        .find(|step| (high - low) / step < 9)
        .unwrap_or(16);
    (low..=high)
        .filter(|power| (power - low).rem_euclid(step) == 0)
        .map(|power| 2f64.powi(power))
        .collect()
}

/// Returns the numbers …, 1, 2, 5, 10, … in a range, or only powers of ten for many decades.
fn ticks(range: &Range<f64>) -> Vec<f64> {
    let (low, high) = (
        range.start.log10().floor() as i32,
        range.end.log10().ceil() as i32,
    );
    let steps: &[f64] = if range.end / range.start > 2e3 {
        &[1.0]
    } else {
        &[1.0, 2.0, 5.0]
    };
    (low..=high)
        .flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)))
        .filter(|tick| (range.start * 0.999..=range.end * 1.001).contains(tick))
        .collect()
}

/// Returns the largest of …, 1, 2, 5, 10, … that is not above a positive value.
fn round_below(value: f64) -> f64 {
    let ten = 10f64.powf(value.log10().floor());
    [5.0, 2.0, 1.0]
        .into_iter()
        .map(|step| step * ten)
        .find(|round| *round <= value * 1.000_001)
        .unwrap_or(ten)
}

/// Returns the smallest of …, 1, 2, 5, 10, … that is not below a positive value.
fn round_above(value: f64) -> f64 {
    let ten = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|step| step * ten)
        .find(|round| *round >= value * 0.999_999)
        .unwrap_or(ten * 10.0)
}

#[cfg(test)]
mod tests;
