//! Computes results from samples: medians over rounds, and ratios within rounds.

mod disturbed;
mod json;
mod paper;
mod plot;
mod table;

use super::host::HostInfo;
use super::plan::Plan;
use super::point::{Metric, Op, Point, Poll};
use super::run::{Sample, Value};
use super::under_load::UnderLoad;
use iwarp_figures::Spread;
use std::collections::BTreeSet;

/// Load by other programs during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct OtherLoad {
    /// CPUs that other programs used, on average.
    pub(super) cpus_used: f64,
    /// Observed CPUs: those that the run was bound to, or all that it might use.
    pub(super) cpus: usize,
}

/// If other programs use more than this fraction of the CPUs, the report warns about it.
const BUSY_FRACTION: f64 = 0.1;

/// One line of results, for an operation, size, CRC setting and way of waiting.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) op: Op,
    pub(super) size: u64,
    pub(super) crc: bool,
    pub(super) poll: Poll,
    /// Half round trip in µs.
    pub(super) p50: Option<Spread>,
    pub(super) p99: Option<Spread>,
    /// Processor time of both ends per half round trip, in µs.
    pub(super) lat_cpu: Option<Spread>,
    pub(super) bytes_per_s: Option<Spread>,
    pub(super) msgs_per_s: Option<Spread>,
    /// Processor time of both ends per message of a stream, in µs.
    pub(super) bw_cpu: Option<Spread>,
    /// iWARP ÷ TCP; `None` for TCP itself.
    pub(super) lat_ratio: Option<Spread>,
    pub(super) bw_ratio: Option<Spread>,
    pub(super) bw_cpu_ratio: Option<Spread>,
}

impl Row {
    /// Returns the processor seconds of both ends per GiB of a stream.
    pub(super) fn cpu_s_per_gib(&self) -> Option<Spread> {
        let messages_per_gib = f64::from(1 << 30) / self.size as f64;
        self.bw_cpu.map(|us| us.times(messages_per_gib / 1e6))
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Report {
    host: HostInfo,
    peer: Option<HostInfo>,
    depth: u32,
    qps: u32,
    markers: bool,
    tcp: Vec<Row>,
    rows: Vec<Row>,
    rounds: u32,
    planned_rounds: u32,
    others: OtherLoad,
    under_load: Vec<UnderLoad>,
}

impl Report {
    /// Evaluates the samples of a run.
    pub(crate) fn new(
        plan: &Plan,
        samples: &[Sample],
        host: HostInfo,
        peer: Option<HostInfo>,
        others: OtherLoad,
    ) -> Self {
        let keys: BTreeSet<_> = samples
            .iter()
            .map(|s| (s.point.op, s.point.size, s.point.crc, s.point.poll))
            .collect();
        let (tcp, rows) = keys
            .into_iter()
            .map(|k| row(samples, k))
            .partition(|r| r.op == Op::Tcp);
        let rounds = samples.iter().map(|s| s.round + 1).max().unwrap_or(0);
        Self {
            host,
            peer,
            depth: plan.depth,
            qps: plan.qps,
            markers: plan.markers,
            tcp,
            rows,
            rounds,
            planned_rounds: plan.rounds,
            others,
            under_load: Vec::new(),
        }
    }

    /// Adds the measurements beside a computing program.
    pub(crate) fn with_under_load(self, under_load: Vec<UnderLoad>) -> Self {
        Self { under_load, ..self }
    }

    /// Returns a warning if other programs disturbed the run.
    fn busy_warning(&self) -> Option<String> {
        let OtherLoad { cpus_used, cpus } = self.others;
        (cpus_used > cpus as f64 * BUSY_FRACTION).then(|| {
            format!(
                "Busy machine: other programs used {cpus_used:.1} of {cpus} CPU(s) during this \
                 run. Stop them for better and steadier figures."
            )
        })
    }

    /// Returns the TCP row that a row is compared with.
    fn tcp_for(&self, r: &Row) -> Option<&Row> {
        self.tcp
            .iter()
            .find(|t| t.size == r.size && t.poll == r.poll)
    }
}

fn row(samples: &[Sample], (op, size, crc, poll): (Op, u64, bool, Poll)) -> Row {
    let pick = |metric, f: fn(&Value) -> Option<f64>| {
        let p = Point {
            op,
            size,
            crc,
            poll,
            metric,
        };
        Spread::of(
            samples
                .iter()
                .filter(|s| s.point == p)
                .filter_map(|s| f(&s.value))
                .collect(),
        )
    };
    let ratio = |metric, f: fn(&Value) -> Option<f64>| {
        let point = Point {
            op,
            size,
            crc,
            poll,
            metric,
        };
        let tcp = Point {
            op: Op::Tcp,
            crc: false,
            ..point
        };
        let tcp_of_round = |s: &Sample| {
            samples
                .iter()
                .find(|t| t.round == s.round && t.point == tcp)
                .and_then(|t| f(&t.value))
        };
        Spread::of(
            samples
                .iter()
                .filter(|s| s.point == point)
                .filter_map(|s| Some(f(&s.value)? / tcp_of_round(s)?))
                .collect(),
        )
    };
    let unless_tcp = |s: Option<Spread>| if op == Op::Tcp { None } else { s };
    Row {
        op,
        size,
        crc,
        poll,
        p50: pick(Metric::Latency, p50),
        p99: pick(Metric::Latency, p99),
        lat_cpu: pick(Metric::Latency, cpu),
        bytes_per_s: pick(Metric::Bandwidth, bytes),
        msgs_per_s: pick(Metric::Bandwidth, msgs),
        bw_cpu: pick(Metric::Bandwidth, cpu),
        lat_ratio: unless_tcp(ratio(Metric::Latency, p50)),
        bw_ratio: unless_tcp(ratio(Metric::Bandwidth, bytes)),
        bw_cpu_ratio: unless_tcp(ratio(Metric::Bandwidth, cpu)),
    }
}

fn p50(v: &Value) -> Option<f64> {
    if let Value::Latency { p50, .. } = v {
        Some(*p50)
    } else {
        None
    }
}

fn p99(v: &Value) -> Option<f64> {
    if let Value::Latency { p99, .. } = v {
        Some(*p99)
    } else {
        None
    }
}

fn cpu(v: &Value) -> Option<f64> {
    let (Value::Latency { cpu, .. } | Value::Bandwidth { cpu, .. }) = v;
    Some(*cpu)
}

fn bytes(v: &Value) -> Option<f64> {
    if let Value::Bandwidth { bytes_per_s, .. } = v {
        Some(*bytes_per_s)
    } else {
        None
    }
}

fn msgs(v: &Value) -> Option<f64> {
    if let Value::Bandwidth { msgs_per_s, .. } = v {
        Some(*msgs_per_s)
    } else {
        None
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::plan::{Group, Limit};
    use super::*;

    /// Returns plausible samples of 3 rounds; the machine gets 10 % slower in each round.
    fn samples() -> Vec<Sample> {
        let mut samples = Vec::new();
        for round in 0..3 {
            let drift = 1.0 + f64::from(round) * 0.1;
            for size in [4u64, 64, 1024, 8192, 65536, 1 << 20] {
                for poll in [Poll::Spin, Poll::Event] {
                    for (op, crc, k) in [
                        (Op::Tcp, false, 1.0),
                        (Op::Send, false, 1.05),
                        (Op::Send, true, 1.15),
                        (Op::Write, false, 1.1),
                        (Op::Write, true, 1.2),
                        (Op::Read, true, 1.4),
                    ] {
                        let base = if poll == Poll::Spin { 3.4 } else { 8.3 };
                        let lat = (base + size as f64 / 4000.0) * k * drift;
                        let bw = 6e9 * size as f64 / (size as f64 + 12_000.0) / k / drift;
                        let point = |metric| Point {
                            op,
                            size,
                            crc,
                            poll,
                            metric,
                        };
                        samples.push(Sample {
                            round,
                            point: point(Metric::Latency),
                            value: Value::Latency {
                                p50: lat,
                                p99: lat * 2.0,
                                cpu: lat * 1.5,
                            },
                        });
                        let value = Value::Bandwidth {
                            bytes_per_s: bw,
                            msgs_per_s: bw / size as f64,
                            cpu: size as f64 / bw * 1e6,
                        };
                        samples.push(Sample {
                            round,
                            point: point(Metric::Bandwidth),
                            value,
                        });
                    }
                }
            }
        }
        samples
    }

    /// Returns a report of [`samples`].
    pub(crate) fn example() -> Report {
        let plan = Plan {
            groups: vec![Group { points: vec![] }],
            rounds: 3,
            limit: Limit::Iters(1),
            qps: 1,
            depth: 64,
            markers: false,
        };
        let host = HostInfo {
            cpu: "Example CPU <3 GHz> & more".to_owned(),
            cores: 2,
            kernel: "Linux 6.1".to_owned(),
            congestion_control: "cubic".to_owned(),
            date: "2024-02-29T12:00:00Z".to_owned(),
            iwarp: "0.1.0".to_owned(),
        };
        let others = OtherLoad {
            cpus_used: 0.1,
            cpus: 2,
        };
        let under_load = [Op::Tcp, Op::TcpPolls, Op::Send].map(|op| UnderLoad {
            op,
            size: 4,
            p50: Spread::of(vec![9.0]),
            p99: Spread::of(vec![12.0]),
            program_share: Spread::of(vec![0.61]),
        });
        Report::new(&plan, &samples(), host, None, others).with_under_load(under_load.into())
    }

    #[test]
    fn ratios_are_computed_within_rounds() {
        let r = example();
        let row = r
            .rows
            .iter()
            .find(|r| r.op == Op::Write && r.crc && r.size == 4)
            .unwrap();
        let ratio = row.lat_ratio.unwrap();
        // The machine's drift affects the latencies and cancels in the ratios.
        assert!(
            (ratio.max - ratio.min).abs() < 1e-9 && (ratio.median - 1.2).abs() < 1e-9,
            "{ratio:?}"
        );
        let lat = row.p50.unwrap();
        assert!(lat.max / lat.min > 1.19);
        assert!((row.bw_ratio.unwrap().median - 1.0 / 1.2).abs() < 1e-9);
        assert!(
            r.tcp
                .iter()
                .all(|t| t.lat_ratio.is_none() && t.bw_ratio.is_none())
        );
    }
}
