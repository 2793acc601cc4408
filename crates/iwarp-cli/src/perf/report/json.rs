//! The report as JSON. Scripts rely on the keys: add keys, but never rename any.

use super::disturbed::is_disturbed_under_load;
use super::{Report, Row};
use crate::perf::under_load::UnderLoad;
use iwarp_figures::Spread;
use serde_json::{Value, json};

impl Report {
    /// Returns `{"host":{…},"tcp":{…},"results":[…]}` and a line feed.
    pub(crate) fn json(&self) -> String {
        let mut all = json!({
            "host": self.host,
            "tcp": {
                "congestion_control": self.host.congestion_control,
                "nodelay": true,
                "connections": self.qps,
                "results": self.tcp.iter().map(|t| self.tcp(t)).collect::<Vec<_>>(),
            },
            "results": self.rows.iter().map(|r| self.result(r)).collect::<Vec<_>>(),
            "beside_a_program": self.under_load.iter().map(under_load).collect::<Vec<_>>(),
            "rounds": self.rounds,
            "markers": self.markers,
            "cpus": self.others.cpus,
            "cpus_used_by_others": six_digits(self.others.cpus_used),
        });
        if let (Some(peer), Some(map)) = (&self.peer, all.as_object_mut()) {
            map.insert("peer".to_owned(), json!(peer));
        }
        format!("{all:#}\n")
    }

    fn result(&self, r: &Row) -> Value {
        let t = self.tcp_for(r);
        json!({
            "op": r.op.name(),
            "size_bytes": r.size,
            "crc": r.crc,
            "poll": r.poll.name(),
            "depth": self.depth,
            "qps": self.qps,
            "lat_us_p50": median(r.p50),
            "lat_us_p99": median(r.p99),
            "lat_cpu_us": median(r.lat_cpu),
            "bw_bytes_per_s": median(r.bytes_per_s),
            "msgs_per_s": median(r.msgs_per_s),
            "bw_cpu_us": median(r.bw_cpu),
            "bw_cpu_s_per_gib": median(r.cpu_s_per_gib()),
            "tcp_lat_us_p50": median(t.and_then(|t| t.p50)),
            "tcp_bw_bytes_per_s": median(t.and_then(|t| t.bytes_per_s)),
            "lat_ratio": median(r.lat_ratio),
            "bw_ratio": median(r.bw_ratio),
            "bw_cpu_ratio": median(r.bw_cpu_ratio),
            "lat_ratio_min_max": min_max(r.lat_ratio),
            "bw_ratio_min_max": min_max(r.bw_ratio),
            "disturbed": self.is_disturbed(r),
        })
    }

    fn tcp(&self, t: &Row) -> Value {
        json!({
            "size_bytes": t.size,
            "poll": t.poll.name(),
            "lat_us_p50": median(t.p50),
            "lat_us_p99": median(t.p99),
            "lat_cpu_us": median(t.lat_cpu),
            "bw_bytes_per_s": median(t.bytes_per_s),
            "msgs_per_s": median(t.msgs_per_s),
            "bw_cpu_us": median(t.bw_cpu),
            "bw_cpu_s_per_gib": median(t.cpu_s_per_gib()),
            "lat_us_p50_min_max": min_max(t.p50),
            "bw_bytes_per_s_min_max": min_max(t.bytes_per_s),
            "disturbed": self.is_disturbed(t),
        })
    }
}

fn under_load(u: &UnderLoad) -> Value {
    json!({
        "op": u.op.name(),
        "size_bytes": u.size,
        "lat_us_p50": median(u.p50),
        "lat_us_p99": median(u.p99),
        "left_to_the_program": median(u.program_share),
        "disturbed": is_disturbed_under_load(u),
    })
}

/// Rounds to six significant digits.
fn six_digits(v: f64) -> f64 {
    format!("{v:.5e}").parse().unwrap_or(v)
}

fn median(s: Option<Spread>) -> Value {
    s.map_or(Value::Null, |s| json!(six_digits(s.median)))
}

fn min_max(s: Option<Spread>) -> Value {
    s.map_or(Value::Null, |s| {
        json!([six_digits(s.min), six_digits(s.max)])
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::*;

    #[test]
    fn documented_keys_are_present() {
        let text = example().json();
        let v: Value = serde_json::from_str(&text).unwrap();
        for key in [
            "host",
            "tcp",
            "results",
            "beside_a_program",
            "cpus",
            "cpus_used_by_others",
        ] {
            assert!(v.get(key).is_some(), "{key}");
        }
        for key in [
            "cpu",
            "cores",
            "kernel",
            "congestion_control",
            "date",
            "iwarp",
        ] {
            assert!(v["host"].get(key).is_some(), "{key}");
        }
        let results = v["results"].as_array().unwrap();
        assert_eq!(results.len(), 6 * 2 * 5);
        for r in results {
            for key in [
                "size_bytes",
                "depth",
                "qps",
                "lat_us_p50",
                "lat_us_p99",
                "lat_cpu_us",
                "bw_cpu_us",
                "bw_cpu_s_per_gib",
                "bw_cpu_ratio",
                "bw_bytes_per_s",
                "msgs_per_s",
                "tcp_lat_us_p50",
                "tcp_bw_bytes_per_s",
                "lat_ratio",
                "bw_ratio",
            ] {
                assert!(r[key].is_number(), "{key} in {r}");
            }
            assert!(r["op"].is_string() && r["crc"].is_boolean() && r["poll"].is_string());
        }
        assert!(text.ends_with("}\n"));
    }

    #[test]
    fn figures_keep_six_digits() {
        assert_eq!(six_digits(4_521_234_567.8), 4_521_230_000.0);
        assert_eq!(six_digits(0.0), 0.0);
    }
}
