//! What is measured, in the order of one round: everything of one size side by side.

use std::fmt;

use anyhow::{Result, bail};
use serde_json::Value;

use super::peers::Peer;

/// Names for `--only`.
pub(super) const GROUPS: &[&str] = &[
    "bandwidth",
    "latency",
    "ops",
    "peers",
    "verbs",
    "scale",
    "cpu",
];

/// How a point is measured.
#[derive(Debug, Clone)]
pub(super) enum What {
    /// By our own program with these arguments.
    Own(Vec<String>),
    /// By other software.
    Peer(Peer),
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(args) => write!(f, "iwarp-bench {}", args.join(" ")),
            Self::Peer(peer) => write!(f, "{} {}", peer.program(), peer.test()),
        }
    }
}

/// One point of a round.
#[derive(Debug, Clone)]
pub(super) struct Point {
    /// The groups that need it; the first is its own.
    pub(super) groups: &'static [&'static str],
    /// `bw:`, `lat:`, `scale:` or `cpu:` and a name; that of the run, if it measures several.
    pub(super) series: &'static str,
    /// Octets per message, or connections.
    pub(super) size: u64,
    pub(super) what: What,
    /// It is left out of later rounds.
    pub(super) max_rounds: u32,
}

impl Point {
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.series, super::sizes::show(self.size))
    }

    /// Is this one of several series that a run brings?
    #[cfg(test)]
    pub(super) fn brings(&self, series: &str) -> bool {
        self.series == SPIN && SPINNING.contains(&series)
    }

    /// What was measured, by series. A run that measures several names them itself.
    pub(super) fn results<'a>(&self, values: &'a Value) -> Vec<(String, &'a Value)> {
        let of_run = |name: &str| {
            let kind = self.series.split(':').next().unwrap_or_default();
            format!("{kind}:{name}")
        };
        match values.as_object() {
            Some(several) if several.values().any(Value::is_object) => several
                .iter()
                .map(|(name, values)| (of_run(name), values))
                .collect(),
            _ => vec![(self.series.to_owned(), values)],
        }
    }
}

/// Operations outstanding when many are: as much as keeps the socket busy.
pub(super) const fn depth(size: u64) -> u32 {
    match size {
        0..=256 => 1024,
        257..=1024 => 512,
        1025..=4096 => 256,
        4097..=16_384 => 64,
        16_385..=65_536 => 16,
        65_537..=262_144 => 8,
        _ => 4,
    }
}

/// Several series of one run, which names them.
const SPIN: &str = "lat:spin";
/// Those.
#[cfg(test)]
const SPINNING: [&str; 5] = [
    "lat:tcp-spin",
    "lat:probe-spin",
    "lat:probe-spin-crc",
    "lat:write-spin",
    "lat:write-spin-crc",
];

struct Plan {
    quick: bool,
    points: Vec<Point>,
}

type Groups = &'static [&'static str];

/// A yardstick that other groups are compared with.
const BW_BASE: Groups = &["bandwidth", "ops", "peers", "verbs"];
const LAT_BASE: Groups = &["latency", "peers", "verbs"];

impl Plan {
    fn own(&mut self, groups: Groups, series: &'static str, size: u64, args: &str) {
        self.points.push(Point {
            groups,
            series,
            size,
            what: What::Own(args.split_whitespace().map(str::to_owned).collect()),
            max_rounds: u32::MAX,
        });
    }

    fn peer(&mut self, group: Groups, series: &'static str, size: u64, peer: Peer) {
        self.points.push(Point {
            groups: group,
            series,
            size,
            what: What::Peer(peer),
            max_rounds: u32::MAX,
        });
    }

    fn bandwidth(&mut self, size: u64) {
        let ms = if self.quick { 100 } else { 300 };
        let (s, d) = (format!("--size {size} --ms {ms}"), depth(size));
        let b: Groups = &["bandwidth"];
        self.own(BW_BASE, "bw:tcp", size, &format!("tcp-bw {s}"));
        if size <= 4096 {
            self.own(b, "bw:tcp-nagle", size, &format!("tcp-bw {s} --nagle"));
        }
        self.own(b, "bw:probe", size, &format!("probe-bw {s} --crc off"));
        self.own(b, "bw:probe-crc", size, &format!("probe-bw {s} --crc on"));
        let batch = (256 * 1024 / size).clamp(1, 1024);
        if batch > 1 {
            let p = format!("probe-bw {s} --batch {batch}");
            self.own(b, "bw:probe-batch", size, &format!("{p} --crc off"));
            self.own(b, "bw:probe-batch-crc", size, &format!("{p} --crc on"));
        }
        let w = format!("iwarp-bw --op write {s}");
        self.own(
            BW_BASE,
            "bw:write",
            size,
            &format!("{w} --depth {d} --crc off"),
        );
        self.own(
            BW_BASE,
            "bw:write-crc",
            size,
            &format!("{w} --depth {d} --crc on"),
        );
        let event = format!("{w} --depth {d} --wait event");
        self.own(b, "bw:write-event", size, &format!("{event} --crc off"));
        self.own(b, "bw:write-event-crc", size, &format!("{event} --crc on"));
        self.own(b, "bw:write-one", size, &format!("{w} --depth 1 --crc off"));
        self.own(
            b,
            "bw:write-one-crc",
            size,
            &format!("{w} --depth 1 --crc on"),
        );
        if size <= 65_536 {
            let single = format!("{w} --depth {d} --post single");
            self.own(b, "bw:write-single", size, &format!("{single} --crc off"));
            self.own(
                &["bandwidth", "verbs"],
                "bw:write-single-crc",
                size,
                &format!("{single} --crc on"),
            );
        }
        if size == 65_536 {
            let mtu = format!("{w} --depth {d} --mss 1460");
            self.own(
                b,
                "bw:probe-mtu",
                size,
                &format!("probe-bw {s} --fpdu 1440 --crc off"),
            );
            self.own(
                b,
                "bw:probe-mtu-crc",
                size,
                &format!("probe-bw {s} --fpdu 1440 --crc on"),
            );
            self.own(b, "bw:write-mtu", size, &format!("{mtu} --crc off"));
            self.own(b, "bw:write-mtu-crc", size, &format!("{mtu} --crc on"));
        }
        let o: Groups = &["ops"];
        let verbs: Groups = &["ops", "verbs"];
        self.own(
            verbs,
            "bw:send",
            size,
            &format!("iwarp-bw --op send {s} --depth {d} --crc off"),
        );
        self.own(
            verbs,
            "bw:send-crc",
            size,
            &format!("iwarp-bw --op send {s} --depth {d} --crc on"),
        );
        self.own(
            verbs,
            "bw:read",
            size,
            &format!("iwarp-bw --op read {s} --depth {d} --crc off"),
        );
        self.own(
            verbs,
            "bw:read-crc",
            size,
            &format!("iwarp-bw --op read {s} --depth {d} --crc on"),
        );
        if size == 64 {
            for (series, op) in [
                ("bw:send-single-crc", "send"),
                ("bw:read-single-crc", "read"),
            ] {
                // The C library's queue pairs have room for as many.
                let reads = if op == "read" { " --reads 64" } else { "" };
                let single =
                    format!("iwarp-bw --op {op} {s} --depth {d} --post single --crc on{reads}");
                self.own(&["verbs"], series, size, &single);
            }
            let f = format!("iwarp-bw --op fetchadd --size 8 --ms {ms} --depth 64");
            self.own(o, "bw:fetchadd-crc", 8, &format!("{f} --crc on"));
        }
        if matches!(size, 64 | 4096 | 65_536 | 1_048_576) {
            self.bandwidth_peers(size);
        }
    }

    fn bandwidth_peers(&mut self, size: u64) {
        let p: Groups = &["peers"];
        let v: Groups = &["verbs"];
        self.peer(p, "bw:ucx-tag", size, Peer::ucx("tag_bw"));
        self.peer(p, "bw:ucx-put", size, Peer::ucx("ucp_put_bw"));
        self.peer(p, "bw:ucx-stream", size, Peer::ucx("stream_bw"));
        self.peer(p, "bw:fi-rma", size, Peer::fabric("rma"));
        self.peer(p, "bw:fi-msg", size, Peer::fabric("msg"));
        self.peer(v, "bw:ib-write", size, Peer::verbs("ib_write_bw"));
        self.peer(v, "bw:ib-send", size, Peer::verbs("ib_send_bw"));
        self.peer(v, "bw:ib-read", size, Peer::verbs("ib_read_bw"));
        if size == 64 {
            let lists = Peer::verbs("ib_write_bw").in_lists(64);
            self.peer(v, "bw:ib-write-list", size, lists);
        }
    }

    fn latency(&mut self, size: u64) {
        let full = match size {
            0..=4096 => 10_000,
            4097..=65_536 => 3000,
            _ => 600,
        };
        let iters = if self.quick { full / 5 } else { full };
        let s = format!("--size {size} --iters {iters}");
        let l: Groups = &["latency"];
        self.own(
            LAT_BASE,
            "lat:tcp-block",
            size,
            &format!("tcp-lat {s} --wait event"),
        );
        let p = format!("probe-lat {s} --wait event");
        self.own(l, "lat:probe-block", size, &format!("{p} --crc off"));
        self.own(l, "lat:probe-block-crc", size, &format!("{p} --crc on"));
        let w = format!("iwarp-lat --op write {s} --wait event");
        self.own(LAT_BASE, "lat:write-event", size, &format!("{w} --crc off"));
        self.own(
            LAT_BASE,
            "lat:write-event-crc",
            size,
            &format!("{w} --crc on"),
        );
        // One run for all that spin: these differ by less than the machine does from one second to the next.
        self.own(LAT_BASE, SPIN, size, &format!("spin-lat {s}"));
        let o: Groups = &["ops", "verbs"];
        let op = |op: &str| format!("iwarp-lat --op {op} {s} --wait spin --crc on");
        self.own(o, "lat:send-spin-crc", size, &op("send"));
        self.own(o, "lat:read-spin-crc", size, &op("read"));
        if size == 4 {
            let f =
                format!("iwarp-lat --op fetchadd --size 8 --iters {iters} --wait spin --crc on");
            self.own(&["ops"], "lat:fetchadd-spin-crc", 8, &f);
        }
        let p: Groups = &["peers"];
        let v: Groups = &["verbs"];
        self.peer(p, "lat:ucx-tag", size, Peer::ucx("tag_lat"));
        self.peer(p, "lat:ucx-stream", size, Peer::ucx("stream_lat"));
        self.peer(p, "lat:ucx-put", size, Peer::ucx("ucp_put_lat"));
        self.peer(p, "lat:fi-pingpong", size, Peer::pingpong());
        self.peer(v, "lat:ib-write", size, Peer::verbs("ib_write_lat"));
        self.peer(v, "lat:ib-send", size, Peer::verbs("ib_send_lat"));
    }

    fn scale(&mut self, n: u64) {
        let ms = if self.quick { 200 } else { 1000 };
        let s: Groups = &["scale"];
        let args = format!("--n {n} --ms {ms}");
        self.own(s, "scale:tcp", n, &format!("scale --kind tcp {args}"));
        self.own(
            s,
            "scale:iwarp-spin",
            n,
            &format!("scale --kind iwarp {args} --wait spin"),
        );
        self.own(
            s,
            "scale:iwarp-event",
            n,
            &format!("scale --kind iwarp {args} --wait event"),
        );
    }

    fn cpu(&mut self) {
        let c: Groups = &["cpu"];
        let (seconds, ms) = if self.quick { (2, 200) } else { (5, 1000) };
        self.own(
            c,
            "cpu:idle",
            0,
            &format!("idle --seconds {seconds} --wait event"),
        );
        // Nothing else runs meanwhile, and doing nothing does not vary.
        if let Some(idle) = self.points.last_mut() {
            idle.max_rounds = 3;
        }
        self.own(c, "cpu:passive", 65_536, &format!("passive --ms {ms}"));
    }
}

/// All points of a round.
///
/// # Errors
/// When a group is unknown.
pub(super) fn points(quick: bool, only: &[String]) -> Result<Vec<Point>> {
    for name in only {
        if !GROUPS.contains(&name.as_str()) {
            bail!(
                "no group is called {name:?}; there are: {}",
                GROUPS.join(", ")
            );
        }
    }
    let mut plan = Plan {
        quick,
        points: Vec::new(),
    };
    let bandwidth: &[u64] = if quick {
        &[64, 4096, 65_536, 1 << 20]
    } else {
        &[64, 1024, 4096, 16_384, 65_536, 262_144, 1 << 20]
    };
    for &size in bandwidth {
        plan.bandwidth(size);
    }
    let latency: &[u64] = if quick {
        &[4, 65_536]
    } else {
        &[4, 64, 4096, 65_536, 1 << 20]
    };
    for &size in latency {
        plan.latency(size);
    }
    let scale: &[u64] = if quick {
        &[1, 1000]
    } else {
        &[1, 100, 1000, 10_000]
    };
    for &n in scale {
        plan.scale(n);
    }
    plan.cpu();
    plan.points
        .retain(|p| only.is_empty() || p.groups.iter().any(|g| only.iter().any(|o| o == g)));
    Ok(plan.points)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_groups_are_known() {
        for quick in [false, true] {
            let all = points(quick, &[]).unwrap();
            let names: HashSet<String> = all.iter().map(Point::name).collect();
            assert_eq!(names.len(), all.len());
            assert!(
                all.iter()
                    .flat_map(|p| p.groups)
                    .all(|g| GROUPS.contains(g))
            );
        }
    }

    #[test]
    fn a_run_may_measure_several() {
        let all = points(false, &[]).unwrap();
        let of = |series: &str| all.iter().find(|p| p.series == series).unwrap();
        let one = serde_json::json!({ "med_us": 1.0 });
        assert_eq!(of("bw:tcp").results(&one)[0].0, "bw:tcp");
        let two = serde_json::json!({ "tcp-spin": one, "write-spin": { "med_us": 2.0 } });
        let several = of(SPIN).results(&two);
        assert_eq!(several[1].0, "lat:write-spin");
        assert_eq!(several[1].1["med_us"], 2.0);
    }

    #[test]
    fn a_group_brings_its_yardsticks() {
        let of = |group: &str| points(false, &[group.to_owned()]).unwrap();
        let has = |group, name| of(group).iter().any(|p| p.series == name);
        assert!(has("peers", "bw:tcp") && has("peers", "bw:write-crc") && has("peers", SPIN));
        assert!(!has("scale", "bw:tcp") && has("ops", "bw:write"));
        assert!(points(false, &["scales".to_owned()]).is_err());
    }
}
