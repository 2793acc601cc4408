//! The performance targets, and whether they are met. Most targets are ratios to plain TCP or other
//! software, computed from samples of the same turn.

use super::samples::{Key, Measured, Samples};

/// How a target is computed.
#[derive(Debug, Clone)]
enum Measure {
    /// The best value of the first list of series, divided by the best value of the second list.
    Ratio(Vec<Key<'static>>, Vec<Key<'static>>),
    /// The best value of these series.
    Value(Vec<Key<'static>>),
}

/// A limit for a metric or a ratio.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) group: &'static str,
    pub(super) what: String,
    pub(super) metric: &'static str,
    measure: Measure,
    /// `true` if the value must be at least `limit`; `false` if it must be at most `limit`.
    pub(super) at_least: bool,
    pub(super) limit: f64,
}

/// The result of checking a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Met,
    Missed,
    NotMeasured,
}

impl Verdict {
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "**not met**",
            Self::NotMeasured => "not measured",
        }
    }
}

impl Target {
    pub(super) fn check(&self, samples: &Samples) -> (Option<Measured>, Verdict) {
        let large = self.larger_is_better();
        let spread = match &self.measure {
            Measure::Ratio(a, b) => samples.ratio(a, b, self.metric, large),
            Measure::Value(a) => samples.best_value(a, self.metric, large),
        };
        let verdict = match spread {
            None => Verdict::NotMeasured,
            Some(s) if (s.median >= self.limit) == self.at_least || s.median == self.limit => {
                Verdict::Met
            }
            Some(_) => Verdict::Missed,
        };
        (spread, verdict)
    }

    fn larger_is_better(&self) -> bool {
        matches!(self.metric, "gbps" | "mmsg" | "echo_kmsg")
    }

    /// Returns the limit as text, for example `≥ 15`.
    pub(super) fn goal(&self) -> String {
        format!("{} {}", if self.at_least { "≥" } else { "≤" }, self.limit)
    }
}

struct List(Vec<Target>);

impl List {
    fn add(
        &mut self,
        group: &'static str,
        what: &str,
        metric: &'static str,
        measure: Measure,
        at_least: bool,
        limit: f64,
    ) {
        self.0.push(Target {
            group,
            what: what.to_owned(),
            metric,
            measure,
            at_least,
            limit,
        });
    }

    fn bandwidth(
        &mut self,
        what: &str,
        a: &'static str,
        a_crc: &'static str,
        size: u64,
        off: f64,
        on: f64,
    ) {
        for (series, limit, crc) in [(a, off, "CRC off"), (a_crc, on, "CRC on")] {
            let measure = Measure::Ratio(vec![(series, size)], vec![("bw:tcp", size)]);
            self.add(
                "bandwidth",
                &format!("{what}, {crc}: ÷ TCP"),
                "gbps",
                measure,
                true,
                limit,
            );
        }
    }

    fn latency(&mut self, what: &str, size: u64, spin: (f64, f64), event: (f64, f64)) {
        for (mode, series, base, limit) in [
            (
                "spinning, CRC off",
                "lat:write-spin",
                "lat:tcp-spin",
                spin.0,
            ),
            (
                "spinning, CRC on",
                "lat:write-spin-crc",
                "lat:tcp-spin",
                spin.1,
            ),
            (
                "event, CRC off",
                "lat:write-event",
                "lat:tcp-block",
                event.0,
            ),
            (
                "event, CRC on",
                "lat:write-event-crc",
                "lat:tcp-block",
                event.1,
            ),
        ] {
            let against = if base == "lat:tcp-spin" {
                "TCP spinning"
            } else {
                "TCP blocking"
            };
            let measure = Measure::Ratio(vec![(series, size)], vec![(base, size)]);
            let what = format!("{what} half round trip, {mode}: ÷ {against}");
            self.add("latency", &what, "med_us", measure, false, limit);
        }
    }
}

const M: u64 = 1 << 20;

pub(super) fn all() -> Vec<Target> {
    let mut l = List(Vec::new());
    for add in [bandwidth, latency, ops, verbs, peers, scale, cpu] {
        add(&mut l);
    }
    l.0
}

fn ratio(a: &[Key<'static>], b: &[Key<'static>]) -> Measure {
    Measure::Ratio(a.to_vec(), b.to_vec())
}

fn value(a: &[Key<'static>]) -> Measure {
    Measure::Value(a.to_vec())
}

fn bandwidth(l: &mut List) {
    l.bandwidth(
        "64 B, many outstanding",
        "bw:write",
        "bw:write-crc",
        64,
        15.0,
        12.0,
    );
    for (series, crc) in [("bw:write", "CRC off"), ("bw:write-crc", "CRC on")] {
        let what = format!("64 B, many outstanding, {crc}: million messages/s");
        l.add(
            "bandwidth",
            &what,
            "mmsg",
            value(&[(series, 64)]),
            true,
            5.0,
        );
    }
    l.bandwidth(
        "1 KiB, many outstanding",
        "bw:write",
        "bw:write-crc",
        1024,
        6.0,
        5.0,
    );
    l.bandwidth(
        "4 KiB, many outstanding",
        "bw:write",
        "bw:write-crc",
        4096,
        3.0,
        2.6,
    );
    l.bandwidth("16 KiB", "bw:write", "bw:write-crc", 16_384, 1.25, 1.15);
    l.bandwidth(
        "64 KiB, one at a time",
        "bw:write-one",
        "bw:write-one-crc",
        65_536,
        0.97,
        0.92,
    );
    l.bandwidth(
        "64 KiB, many outstanding",
        "bw:write",
        "bw:write-crc",
        65_536,
        1.15,
        1.03,
    );
    l.bandwidth("256 KiB", "bw:write", "bw:write-crc", 262_144, 0.95, 0.87);
    l.bandwidth("1 MiB", "bw:write", "bw:write-crc", M, 1.2, 1.05);
    l.bandwidth(
        "64 KiB, FPDUs for a 1460-octet MSS",
        "bw:write-mtu",
        "bw:write-mtu-crc",
        65_536,
        0.60,
        0.55,
    );
}

/// Half round trips of Writes, compared with TCP.
fn latency(l: &mut List) {
    l.latency("4 B", 4, (1.10, 1.15), (1.15, 1.15));
    l.latency("64 B", 64, (1.10, 1.15), (1.15, 1.15));
    l.latency("4 KiB", 4096, (1.10, 1.18), (1.15, 1.15));
    l.latency("64 KiB", 65_536, (1.00, 1.10), (1.10, 1.20));
    l.latency("1 MiB", M, (1.05, 1.15), (1.10, 1.20));
}

fn ops(l: &mut List) {
    for size in [64, 4096, 65_536, M] {
        let s = super::sizes::show(size);
        for (op, series, base) in [
            ("Send, CRC off", "bw:send", "bw:write"),
            ("Send, CRC on", "bw:send-crc", "bw:write-crc"),
            ("Read, CRC off", "bw:read", "bw:write"),
            ("Read, CRC on", "bw:read-crc", "bw:write-crc"),
        ] {
            let measure = ratio(&[(series, size)], &[(base, size)]);
            l.add(
                "ops",
                &format!("{s} {op}: ÷ Write"),
                "gbps",
                measure,
                true,
                0.9,
            );
        }
    }
    let sends = value(&[("bw:send", 64), ("bw:send-crc", 64)]);
    l.add(
        "ops",
        "64 B Send into posted receives: million messages/s",
        "mmsg",
        sends,
        true,
        3.0,
    );
}

/// perftest on our C libraries, compared with the Rust interface and TCP.
fn verbs(l: &mut List) {
    for (program, rust, size) in [
        ("bw:ib-write", "bw:write-crc", 65_536),
        ("bw:ib-send", "bw:send-crc", 65_536),
        ("bw:ib-read", "bw:read-crc", 65_536),
        // Both programs post in the same way: single requests (perftest's default), or lists.
        ("bw:ib-write", "bw:write-single-crc", 64),
        ("bw:ib-write-list", "bw:write-crc", 64),
        ("bw:ib-send", "bw:send-single-crc", 64),
        ("bw:ib-read", "bw:read-single-crc", 64),
    ] {
        let what = format!(
            "{} through the C ABI, {}: ÷ Rust API",
            &program[3..],
            super::sizes::show(size)
        );
        l.add(
            "verbs",
            &what,
            "gbps",
            ratio(&[(program, size)], &[(rust, size)]),
            true,
            0.9,
        );
    }
    let send_lat = ratio(&[("lat:ib-send", 4)], &[("lat:send-spin-crc", 4)]);
    l.add(
        "verbs",
        "ib-send latency, 4 B: ÷ Rust API",
        "med_us",
        send_lat,
        false,
        1.1,
    );
    let write_lat = ratio(&[("lat:ib-write", 4)], &[("lat:tcp-block", 4)]);
    l.add(
        "verbs",
        "ib-write latency, 4 B: ÷ TCP blocking",
        "med_us",
        write_lat,
        false,
        2.0,
    );
}

/// Our library, compared with other software in user space.
fn peers(l: &mut List) {
    // The other software computes no CRC. Our library is measured with CRC, its default.
    let ucx = |size| {
        [
            ("bw:ucx-tag", size),
            ("bw:ucx-put", size),
            ("bw:ucx-stream", size),
        ]
    };
    let fi = |size| [("bw:fi-rma", size), ("bw:fi-msg", size)];
    let ours = |size| [("bw:write-crc", size)];
    for (what, size, peers, limit) in [
        (
            "64 B, many outstanding, CRC on: ÷ best of UCX",
            64,
            ucx(64).to_vec(),
            10.0,
        ),
        (
            "64 B, many outstanding, CRC on: ÷ best of libfabric",
            64,
            fi(64).to_vec(),
            10.0,
        ),
        (
            "64 KiB, CRC on: ÷ best of UCX",
            65_536,
            ucx(65_536).to_vec(),
            1.1,
        ),
        (
            "64 KiB, CRC on: ÷ best of libfabric",
            65_536,
            fi(65_536).to_vec(),
            1.0,
        ),
        (
            "1 MiB, CRC on: ÷ best of all peers",
            M,
            [ucx(M).to_vec(), fi(M).to_vec()].concat(),
            0.9,
        ),
    ] {
        l.add(
            "peers",
            what,
            "gbps",
            ratio(&ours(size), &peers),
            true,
            limit,
        );
    }
    let ucx_lat = [
        ("lat:ucx-tag", 4),
        ("lat:ucx-stream", 4),
        ("lat:ucx-put", 4),
    ];
    let lat = ratio(&[("lat:write-spin-crc", 4)], &ucx_lat);
    l.add(
        "peers",
        "4 B half round trip, CRC on: ÷ best of UCX (8 B)",
        "med_us",
        lat,
        false,
        0.95,
    );
}

fn scale(l: &mut List) {
    let iwarp = |n| [("scale:iwarp-spin", n), ("scale:iwarp-event", n)];
    let tcp = |n| [("scale:tcp", n)];
    let setup = ratio(&iwarp(10_000), &tcp(10_000));
    l.add(
        "scale",
        "10,000 connections, set-up with MPA: ÷ plain connect",
        "setup_us",
        setup,
        false,
        3.0,
    );
    let bytes = value(&iwarp(10_000));
    l.add(
        "scale",
        "octets of user memory per idle queue pair, queues included",
        "bytes",
        bytes,
        false,
        4096.0,
    );
    for n in [1000, 10_000] {
        let what = format!("64 B echo over {n} queue pairs: ÷ plain epoll");
        l.add(
            "scale",
            &what,
            "echo_kmsg",
            ratio(&iwarp(n), &tcp(n)),
            true,
            0.9,
        );
    }
    let kept = ratio(&iwarp(10_000), &iwarp(1000));
    l.add(
        "scale",
        "echo over 10,000 ÷ over 1,000 queue pairs",
        "echo_kmsg",
        kept,
        true,
        0.75,
    );
}

/// CPU time of waiting processes.
fn cpu(l: &mut List) {
    let wakeups = value(&[("cpu:idle", 0)]);
    l.add(
        "cpu",
        "idle process: wake-ups per second",
        "wakeups_per_s",
        wakeups,
        false,
        1.0,
    );
    let idle = value(&[("cpu:idle", 0)]);
    l.add(
        "cpu",
        "idle process: CPU microseconds per second",
        "cpu_us_per_s",
        idle,
        false,
        100.0,
    );
    // The thread wakes up only once, when it is notified of the end of the measurement.
    let passive = value(&[("cpu:passive", 65_536)]);
    l.add(
        "cpu",
        "target of Writes: CPU microseconds of its application thread",
        "application_cpu_us",
        passive,
        false,
        100.0,
    );
}

#[cfg(test)]
mod tests {
    use super::super::plan;
    use super::super::samples::tests::sample;
    use super::*;

    #[test]
    fn every_series_is_measured() {
        let points = plan::points(false, &[]).unwrap();
        for t in all() {
            let keys = match &t.measure {
                Measure::Ratio(a, b) => [a.clone(), b.clone()].concat(),
                Measure::Value(a) => a.clone(),
            };
            for (series, size) in keys {
                let has_series = |p: &plan::Point| p.series == series || p.measures(series);
                assert!(
                    points.iter().any(|p| p.size == size && has_series(p)),
                    "{}: {series}/{size} is not measured",
                    t.what
                );
            }
            assert!(plan::GROUPS.contains(&t.group));
        }
    }

    #[test]
    fn verdicts_depend_on_samples() {
        let mut s = Samples::new(1, 1);
        s.add(sample(0, "bw:tcp", 64, &[("gbps", 1.0)], true));
        s.add(sample(
            0,
            "bw:write",
            64,
            &[("gbps", 15.0), ("mmsg", 4.0)],
            true,
        ));
        let targets = all();
        let verdict = |i: usize| targets[i].check(&s).1;
        assert_eq!(targets[0].goal(), "≥ 15");
        assert_eq!(
            (verdict(0), verdict(1), verdict(2)),
            (Verdict::Met, Verdict::NotMeasured, Verdict::Missed)
        );
    }
}
