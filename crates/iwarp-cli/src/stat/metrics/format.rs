//! The text formats of Prometheus and of programs that read the same: headers, samples and labels.

use super::super::table::escaped;
use std::fmt::{Display, Write as _};

/// A text format. Their samples are the same; their headers differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Format {
    /// Version 0.0.4 of Prometheus' own format: the header of a counter has the name of its
    /// samples, which ends in `_total`.
    Prometheus,
    /// OpenMetrics 1.0: the header of a counter has the name without `_total`.
    OpenMetrics,
    /// Valid in both formats. Because they disagree about the header of counters, counters have a
    /// help text and no type.
    Both,
}

impl Format {
    /// Returns the media type of the format, for HTTP.
    pub(in super::super) const fn media_type(self) -> &'static str {
        match self {
            Self::Prometheus | Self::Both => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Longest value of a label in characters. A command line may be much longer, and Prometheus keeps
/// it for each series.
const LABEL_MAX: usize = 128;
/// The units, with which the names of their metrics end.
const UNITS: [&str; 2] = ["bytes", "seconds"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge => "",
        }
    }
}

/// A metric.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family<'a> {
    /// The name without `_total`.
    name: &'a str,
    kind: Kind,
    help: &'a str,
}

impl<'a> Family<'a> {
    pub(super) const fn counter(name: &'a str, help: &'a str) -> Self {
        let kind = Kind::Counter;
        Self { name, kind, help }
    }

    pub(super) const fn gauge(name: &'a str, help: &'a str) -> Self {
        let kind = Kind::Gauge;
        Self { name, kind, help }
    }

    /// Returns the unit, with which the name ends.
    fn unit(&self) -> Option<&'static str> {
        let (_, last) = self.name.rsplit_once('_')?;
        UNITS.into_iter().find(|unit| *unit == last)
    }
}

/// The labels of a sample, in order.
pub(super) type Labels<'a> = Vec<(&'static str, &'a dyn Display)>;

/// A text in one of the formats.
pub(super) struct Text {
    out: String,
    format: Format,
}

impl Text {
    pub(super) const fn new(format: Format) -> Self {
        let out = String::new();
        Self { out, format }
    }

    /// Writes the header of a metric. Its samples must follow.
    pub(super) fn family(&mut self, family: &Family<'_>) {
        let Family { name, kind, help } = *family;
        let suffix = match self.format {
            Format::OpenMetrics => "",
            Format::Prometheus | Format::Both => kind.suffix(),
        };
        let _ = writeln!(self.out, "# HELP {name}{suffix} {help}");
        if self.format != Format::Both || kind != Kind::Counter {
            let _ = writeln!(self.out, "# TYPE {name}{suffix} {}", kind.name());
        }
        if self.format == Format::OpenMetrics
            && let Some(unit) = family.unit()
        {
            let _ = writeln!(self.out, "# UNIT {name} {unit}");
        }
    }

    pub(super) fn sample(&mut self, family: &Family<'_>, labels: &Labels<'_>, value: impl Display) {
        let _ = write!(self.out, "{}{}", family.name, family.kind.suffix());
        for (i, (label, value)) in labels.iter().enumerate() {
            let separator = if i == 0 { '{' } else { ',' };
            let value = label_value(&value.to_string());
            let _ = write!(self.out, "{separator}{label}=\"{value}\"");
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.out, "{end} {value}");
    }

    /// Ends the text and returns it.
    pub(super) fn finish(mut self) -> String {
        if self.format != Format::Prometheus {
            self.out.push_str("# EOF\n");
        }
        self.out
    }
}

/// Returns the value of a label: on one line, truncated, and escaped.
fn label_value(value: &str) -> String {
    escaped(value, LABEL_MAX)
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(label_value("a\\b\"c\nd"), "a\\\\b\\\"c\\\\nd");
        assert_eq!(
            label_value(&"x".repeat(1000)).chars().count(),
            LABEL_MAX + 1
        );
    }

    #[test]
    fn name_ends_with_unit() {
        let unit = |name| Family::gauge(name, "").unit();
        assert_eq!(unit("iwarp_sent_bytes"), Some("bytes"));
        assert_eq!(unit("iwarp_bytes_sent"), None);
        assert_eq!(unit("iwarp_kilobytes"), None);
    }
}
