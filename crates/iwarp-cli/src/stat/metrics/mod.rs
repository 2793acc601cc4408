//! Formats the statistics as text for Prometheus and for other programs that read its formats.
//!
//! `format` knows the formats, `objects` selects what has samples, and `list` contains the metrics.

mod format;
mod list;
mod objects;

use super::document::ProcessStats;
pub(super) use format::Format;
use format::Text;
use objects::Entry;

/// What to write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    pub(super) format: Format,
    /// Maximum number of queue pairs that have samples of their own.
    pub(super) queue_pairs: usize,
}

/// Returns the statistics of these processes. `silent` is the number of processes that have not
/// answered.
pub(super) fn text(stats: &[ProcessStats], silent: usize, options: Options) -> String {
    let entries = Entry::all(stats, options.queue_pairs);
    let mut text = Text::new(options.format);
    list::write(&mut text, &entries, silent);
    text.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::HashSet;

    fn stats(pid: u32, command: &str) -> ProcessStats {
        let text = json!({
            "format": 1,
            "process": {"command": command, "version": "0.1.0", "age_ns": 1_500_000_000u64},
            "devices": [{"name": "iwarp0", "registered_octets": 4096,
                         "counters": {"tx_bytes": 10}}],
            "queue_pairs": [
                {"device": "iwarp0", "number": 7, "state": "RTS", "kind": "cm",
                 "held_ns": 500_000_000u64,
                 "counters": {"tx_bytes": 9, "crc_errors": 1},
                 "connection": {"local": "127.0.0.1:1", "peer": "127.0.0.1:2",
                                "tcp_retransmits": 3, "tcp_rtt_us": 250}},
                {"device": "iwarp0", "number": 8, "state": "INIT", "kind": "cm",
                 "receives_posted": 4, "counters": {}},
            ],
        });
        ProcessStats::read(Some(pid), 1000, text.to_string().as_bytes()).unwrap()
    }

    fn written(stats: &[ProcessStats], format: Format) -> String {
        let queue_pairs = usize::MAX;
        text(
            stats,
            3,
            Options {
                format,
                queue_pairs,
            },
        )
    }

    /// Checks the rules of all formats: one header per metric, adjacent samples, counters end in
    /// `_total`, names end in the unit, and samples are unique. `header` returns the name in the
    /// header of a metric whose samples have this name and type.
    fn check(text: &str, header: fn(&str, &str) -> String) {
        let (mut families, mut samples) = (HashSet::new(), HashSet::new());
        let (mut family, mut kind) = (String::new(), "");
        for line in text.lines().filter(|line| *line != "# EOF") {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "HELP", name, help] => {
                    family = name.to_owned();
                    assert!(families.insert(family.clone()), "{line}: twice");
                    assert!(help.ends_with(['.', '1']), "{line}");
                    kind = "";
                }
                ["#", "TYPE", name, what] => {
                    assert_eq!(name, family, "{line}");
                    kind = what;
                }
                ["#", "UNIT", name, unit] => {
                    let ends = name.ends_with(&format!("_{unit}"));
                    assert!(name == family && ends, "{line}");
                }
                _ => {
                    let (series, value) = line.rsplit_once(' ').unwrap();
                    let name = series.split('{').next().unwrap();
                    assert_eq!(header(name, kind), family, "{line}");
                    assert_eq!(name.ends_with("_total"), kind != "gauge", "{line}");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    assert!(samples.insert(series.to_owned()), "{line}: twice");
                }
            }
        }
    }

    #[test]
    fn texts_obey_their_formats() {
        let stats = [stats(1, "a"), stats(2, "b"), stats(2, "c")];
        let prometheus = written(&stats, Format::Prometheus);
        check(&prometheus, |name, _| name.to_owned());
        assert!(!prometheus.contains("# UNIT") && !prometheus.contains("# EOF"));
        let open = written(&stats, Format::OpenMetrics);
        check(&open, |name, kind| match kind {
            "counter" => name.strip_suffix("_total").unwrap().to_owned(),
            _ => name.to_owned(),
        });
        assert!(open.contains("# UNIT") && open.ends_with("\n# EOF\n"));
        let both = written(&stats, Format::Both);
        check(&both, |name, _| name.to_owned());
        assert!(!both.contains(" counter\n") && both.ends_with("\n# EOF\n"));
        // The samples are the same.
        let samples = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.map(str::to_owned).collect()
        };
        assert_eq!(samples(&prometheus), samples(&open));
        assert_eq!(samples(&prometheus), samples(&both));
        for line in [
            "iwarp_processes 3",
            "iwarp_processes_silent 3",
            "iwarp_queue_pairs_omitted 0",
            "iwarp_process_info{pid=\"1\",uid=\"1000\",command=\"a\",version=\"0.1.0\"} 1",
            "iwarp_process_age_seconds{pid=\"2\",copy=\"1\"} 1.5",
            "iwarp_device_sent_bytes_total{pid=\"1\",device=\"iwarp0\"} 10",
            "iwarp_queue_pair_sent_bytes_total{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 9",
            "iwarp_queue_pair_held_seconds{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 0.5",
            "iwarp_queue_pair_receives_posted{pid=\"1\",device=\"iwarp0\",qp=\"8\"} 4",
            "iwarp_connection_tcp_rtt_seconds{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 0.00025",
            "iwarp_connection_tcp_retransmits_total{pid=\"1\",device=\"iwarp0\",qp=\"7\"} 3",
        ] {
            assert!(
                prometheus.lines().any(|l| l == line),
                "{line} in\n{prometheus}"
            );
        }
    }

    /// Each process gets a fair part of the queue pairs, and the rest is counted.
    #[test]
    fn number_of_samples_is_limited() {
        let process = |pid: u32, queue_pairs: u32| {
            let all: Vec<_> = (0..queue_pairs)
                .map(|n| json!({"device": "iwarp0", "number": n}))
                .collect();
            let text = json!({"format": 1, "queue_pairs": all}).to_string();
            ProcessStats::read(Some(pid), 0, text.as_bytes()).unwrap()
        };
        let stats = [process(1, 1000), process(2, 3), process(3, 8)];
        for (max, of_each, omitted) in [
            (2000, [1000, 3, 8], 0),
            (21, [10, 3, 8], 990),
            (11, [4, 3, 4], 1000),
            (2, [0, 0, 0], 1011),
        ] {
            let options = Options {
                format: Format::Prometheus,
                queue_pairs: max,
            };
            let text = text(&stats, 0, options);
            for (pid, count) in (1..).zip(of_each) {
                let start = format!("iwarp_queue_pair_info{{pid=\"{pid}\",");
                let samples = text.lines().filter(|line| line.starts_with(&start));
                assert_eq!(samples.count(), count, "{max} {pid}");
            }
            let line = format!("iwarp_queue_pairs_omitted {omitted}");
            assert!(text.lines().any(|l| l == line), "{max}: {line}");
        }
    }

    /// Prometheus refuses all samples if one occurs twice, so one dishonest process could stop the
    /// monitoring of others.
    #[test]
    fn repeated_objects_have_one_sample() {
        let text = json!({"format": 1,
            "devices": [{"name": "a"}, {"name": "a"}],
            "queue_pairs": [{"device": "a", "number": 1}, {"device": "a", "number": 1}]});
        let stats = ProcessStats::read(Some(1), 0, text.to_string().as_bytes()).unwrap();
        check(&written(&[stats], Format::Prometheus), |name, _| {
            name.to_owned()
        });
    }

    #[test]
    fn command_line_cannot_add_samples() {
        let text = written(&[stats(1, "x\"} 1\niwarp_evil 1")], Format::Both);
        assert!(!text.lines().any(|l| l.starts_with("iwarp_evil")), "{text}");
    }

    #[test]
    fn empty_document_is_valid() {
        let text = written(&[], Format::OpenMetrics);
        assert!(text.ends_with("# EOF\n") && !text.contains('{'), "{text}");
    }
}
