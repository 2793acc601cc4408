//! The results as Markdown for people and as JSON for programs.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::samples::{Measured, Samples};
use super::sizes::{digits, show};
use super::targets::{self, Verdict};

pub(super) struct Report<'a> {
    pub(super) facts: &'a Value,
    pub(super) samples: &'a Samples,
    pub(super) omitted: &'a [(String, String)],
    pub(super) failures: &'a [(String, String)],
    pub(super) quick: bool,
}

/// Formats JSON with one line per sample. There are thousands of samples with a dozen figures each,
/// so one line per figure would make the file many times longer.
pub(super) fn lines(all: &Value) -> serde_json::Result<String> {
    let mut rest = all.clone();
    let Some(Value::Array(samples)) = rest.get_mut("samples").map(Value::take) else {
        return serde_json::to_string_pretty(all);
    };
    let samples: Vec<String> = samples.iter().map(Value::to_string).collect();
    let samples = format!("\"samples\": [\n{}\n]", samples.join(",\n"));
    let rest = serde_json::to_string_pretty(&rest)?;
    Ok(rest.replacen("\"samples\": null", &samples, 1))
}

/// Returns one line about the machine and the time of the run.
pub(super) fn facts_line(facts: &Value) -> String {
    let text = |name: &str| match &facts[name] {
        Value::String(s) => s.clone(),
        Value::Null => "unknown".into(),
        other => other.to_string(),
    };
    format!(
        "{}, commit {}, {} × {}, Linux {}, TCP congestion control {}, {}, {}",
        text("date"),
        text("commit"),
        text("cpus"),
        text("cpu"),
        text("kernel"),
        text("congestion_control"),
        if facts["namespace"] == true {
            "private network namespace"
        } else {
            "host's loopback interface"
        },
        if facts["pinned"] == true {
            "sender and receiver on a CPU each"
        } else {
            "CPUs chosen by the kernel"
        },
    )
}

fn cell_with_range(spread: Option<Measured>) -> String {
    spread.map_or_else(
        || "–".into(),
        |s| {
            let mark = if s.noisy { " (!)" } else { "" };
            format!(
                "{} [{}–{}]{mark}",
                digits(s.median),
                digits(s.min),
                digits(s.max)
            )
        },
    )
}

fn cell_with_median(spread: Option<Measured>) -> String {
    spread.map_or_else(|| "–".into(), |s| digits(s.median))
}

/// A table column: the heading, and a function that returns the cell for a series at a size.
type Column<'a> = (&'a str, Box<dyn Fn(&str, u64) -> String + 'a>);

impl Report<'_> {
    pub(super) fn markdown(&self) -> String {
        let mut text = String::new();
        let (undisturbed, all) = self.samples.undisturbed_and_all();
        let _ = writeln!(text, "{}.\n", facts_line(self.facts));
        let _ = writeln!(
            text,
            "{} rounds of {} turns{}; {undisturbed} of {all} samples were undisturbed. Cells: \
             median [minimum–maximum]. Ratios are computed from samples of the same turn; every \
             second turn measures in reverse order. (!): there are only disturbed samples.\n",
            self.samples.rounds(),
            self.samples.turns(),
            if self.quick {
                " (quick: short samples)"
            } else {
                ""
            },
        );
        for (program, reason) in self.omitted {
            let _ = writeln!(text, "Omitted: {program} ({reason}).\n");
        }
        for (point, error) in self.failures {
            let _ = writeln!(text, "Failed: {point}: {error}.\n");
        }
        self.targets(&mut text);
        self.bandwidth(&mut text);
        self.latency(&mut text);
        self.scale(&mut text);
        self.cpu(&mut text);
        text
    }

    fn targets(&self, text: &mut String) {
        let checked: Vec<_> = targets::all()
            .into_iter()
            .map(|t| {
                let (spread, verdict) = t.check(self.samples);
                (t, spread, verdict)
            })
            .collect();
        let count = |v: Verdict| checked.iter().filter(|c| c.2 == v).count();
        let _ = writeln!(
            text,
            "## Targets\n\n{} met, {} not met, {} not measured.\n",
            count(Verdict::Met),
            count(Verdict::Missed),
            count(Verdict::NotMeasured)
        );
        text.push_str(
            "| group | what | target | measured | |\n| --- | --- | ---: | ---: | --- |\n",
        );
        for (t, spread, verdict) in &checked {
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} |",
                t.group,
                t.what,
                t.goal(),
                cell_with_range(*spread),
                verdict.text()
            );
        }
        text.push('\n');
    }

    fn table(&self, text: &mut String, title: &str, prefix: &str, columns: &[Column<'_>]) {
        let sizes = self.samples.sizes(prefix);
        if sizes.is_empty() {
            return;
        }
        let _ = writeln!(text, "## {title}\n");
        let heads: Vec<&str> = columns.iter().map(|c| c.0).collect();
        let _ = writeln!(text, "| size | what | {} |", heads.join(" | "));
        let _ = writeln!(text, "| ---: | --- |{}", " ---: |".repeat(columns.len()));
        for size in sizes {
            for series in self.samples.series(prefix, size) {
                let cells: Vec<String> = columns.iter().map(|c| (c.1)(series, size)).collect();
                let name = series.strip_prefix(prefix).unwrap_or(series);
                let _ = writeln!(text, "| {} | {name} | {} |", show(size), cells.join(" | "));
            }
        }
        text.push('\n');
    }

    fn value<'a>(&'a self, head: &'a str, metric: &'static str, range: bool) -> Column<'a> {
        let f = move |series: &str, size| {
            let spread = self.samples.value((series, size), metric);
            if range {
                cell_with_range(spread)
            } else {
                cell_with_median(spread)
            }
        };
        (head, Box::new(f))
    }

    fn ratio<'a>(&'a self, head: &'a str, base: &'static str, metric: &'static str) -> Column<'a> {
        let f = move |series: &str, size| {
            cell_with_range(self.samples.ratio(
                &[(series, size)],
                &[(base, size)],
                metric,
                metric == "gbps",
            ))
        };
        (head, Box::new(f))
    }

    fn bandwidth(&self, text: &mut String) {
        let columns = [
            self.value("GB/s", "gbps", true),
            self.value("million messages/s", "mmsg", false),
            self.ratio("÷ TCP", "bw:tcp", "gbps"),
            self.value("CPU s per GiB, both ends", "cpu_s_gib", false),
            self.value("per million messages", "cpu_s_mmsg", false),
            self.ratio("CPU ÷ TCP", "bw:tcp", "cpu_s_gib"),
        ];
        self.table(text, "One direction", "bw:", &columns);
    }

    fn latency(&self, text: &mut String) {
        let columns = [
            self.value("half round trip, µs", "med_us", true),
            self.value("99 %, µs", "p99_us", false),
            self.ratio("÷ TCP spinning", "lat:tcp-spin", "med_us"),
            self.ratio("÷ TCP blocking", "lat:tcp-block", "med_us"),
        ];
        self.table(text, "Half round trip", "lat:", &columns);
    }

    fn scale(&self, text: &mut String) {
        let columns = [
            self.value("set-up, µs each", "setup_us", true),
            self.ratio("÷ plain connect", "scale:tcp", "setup_us"),
            self.value("octets each, client", "client_bytes", false),
            self.value("server", "server_bytes", false),
            self.value("kernel slab, both ends", "slab_bytes_both", false),
            self.value("files each", "client_files", false),
            self.value("echo, thousand/s", "echo_kmsg", true),
        ];
        self.table(text, "Connections", "scale:", &columns);
    }

    fn cpu(&self, text: &mut String) {
        let columns = [
            self.value("CPU µs per second", "cpu_us_per_s", false),
            self.value("wake-ups per second", "wakeups_per_s", false),
            self.value("application thread, CPU µs", "application_cpu_us", false),
            self.value("process, CPU µs per 64 KiB", "target_cpu_us_64k", false),
            self.value("GB/s", "gbps", false),
        ];
        self.table(text, "CPU", "cpu:", &columns);
    }

    /// Returns facts, targets and all samples.
    pub(super) fn json(&self) -> Value {
        let pairs = |list: &[(String, String)]| -> Value {
            list.iter()
                .map(|(a, b)| json!({ "what": a, "why": b }))
                .collect()
        };
        let targets: Vec<Value> = targets::all()
            .iter()
            .map(|t| {
                let (spread, verdict) = t.check(self.samples);
                json!({
                    "group": t.group,
                    "what": t.what,
                    "metric": t.metric,
                    "at_least": t.at_least,
                    "limit": t.limit,
                    "median": spread.map(|s| s.median),
                    "min": spread.map(|s| s.min),
                    "max": spread.map(|s| s.max),
                    "turns": spread.map(|s| s.count),
                    "met": match verdict {
                        Verdict::Met => json!(true),
                        Verdict::Missed => json!(false),
                        Verdict::NotMeasured => Value::Null,
                    },
                })
            })
            .collect();
        json!({
            "facts": self.facts,
            "rounds": self.samples.rounds(),
            "turns": self.samples.turns(),
            "quick": self.quick,
            "left_out": pairs(self.omitted),
            "failures": pairs(self.failures),
            "targets": targets,
            "samples": self.samples.json(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::tests::sample;
    use super::*;

    #[test]
    fn small_run_gives_tables_and_json() {
        let mut samples = Samples::new(1, 1);
        samples.add(sample(
            0,
            "bw:tcp",
            64,
            &[("gbps", 0.5), ("mmsg", 8.0)],
            true,
        ));
        samples.add(sample(
            0,
            "bw:write",
            64,
            &[("gbps", 10.0), ("mmsg", 156.0)],
            true,
        ));
        samples.add(sample(
            0,
            "lat:tcp-spin",
            4,
            &[("med_us", 3.0), ("p99_us", 6.0)],
            false,
        ));
        let facts = json!({ "cpu": "X", "commit": "abc", "namespace": true });
        let report = Report {
            facts: &facts,
            samples: &samples,
            omitted: &[("ucx_perftest".into(), "not installed".into())],
            failures: &[],
            quick: true,
        };
        let text = report.markdown();
        for piece in [
            "commit abc",
            "private network namespace",
            "Omitted: ucx_perftest (not installed)",
            "| 64 | write | 10.0 [10.0–10.0] | 156 | 20.0 [20.0–20.0] |",
            "| ≥ 15 | 20.0 [20.0–20.0] | met |",
            "3.00 [3.00–3.00] (!)",
            "not measured",
        ] {
            assert!(text.contains(piece), "{piece} is missing in\n{text}");
        }
        assert!(!text.contains("## Connections"));
        let j = report.json();
        assert_eq!(j["targets"][0]["met"], true);
        assert_eq!(j["samples"].as_array().unwrap().len(), 3);
        let file = lines(&j).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&file).unwrap(), j);
        let sample = |line: &&str| line.contains("\"series\"");
        assert_eq!(file.lines().filter(sample).count(), 3);
    }
}
