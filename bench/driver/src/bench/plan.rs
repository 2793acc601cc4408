//! The plan of a round: which points are measured, and in which order.
//!
//! Points of one size form a block, with the points that they are compared with. The speed of a
//! shared machine changes within seconds, so a block is measured in several turns, and every second
//! turn has the reverse order.

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
    /// By `iwarp-bench` with these arguments.
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

#[derive(Debug, Clone)]
pub(super) struct Point {
    /// The group of the point, followed by the groups that compare their points with it.
    pub(super) groups: &'static [&'static str],
    /// Name of the series, with the prefix `bw:`, `lat:`, `scale:` or `cpu:`. A run that measures
    /// several series has a name of its own.
    pub(super) series: &'static str,
    /// Octets per message, or number of connections.
    pub(super) size: u64,
    pub(super) what: What,
    /// Maximum number of rounds in which the point is measured.
    pub(super) max_rounds: u32,
    /// Number of the point's block.
    pub(super) block: u32,
    /// Number of turns per round in which the point is measured.
    pub(super) turns: u32,
}

impl Point {
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.series, super::sizes::show(self.size))
    }

    /// Returns `true` if the run of this point also measures `series`.
    #[cfg(test)]
    pub(super) fn measures(&self, series: &str) -> bool {
        self.series == SPIN && SPINNING.contains(&series)
    }

    /// Returns the values for each series. The output of a run that measures several series
    /// contains their names.
    pub(super) fn results<'a>(&self, values: &'a Value) -> Vec<(String, &'a Value)> {
        let full_name = |name: &str| {
            let kind = self.series.split(':').next().unwrap_or_default();
            format!("{kind}:{name}")
        };
        match values.as_object() {
            Some(several) if several.values().any(Value::is_object) => several
                .iter()
                .map(|(name, values)| (full_name(name), values))
                .collect(),
            _ => vec![(self.series.to_owned(), values)],
        }
    }
}

/// Returns the number of outstanding operations that keeps the socket busy at a message size.
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

/// Returns the number of turns of one size in a round.
const fn turns(quick: bool) -> u32 {
    if quick { 1 } else { 3 }
}

/// Name of the run that measures all spinning ping-pongs.
const SPIN: &str = "lat:spin";
/// The series that this run measures.
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
    block: u32,
    turns: u32,
}

type Groups = &'static [&'static str];

/// Groups of a bandwidth point with which other groups compare their points.
const BW_BASE: Groups = &["bandwidth", "ops", "peers", "verbs"];
/// Groups of a latency point with which other groups compare their points.
const LAT_BASE: Groups = &["latency", "peers", "verbs"];

impl Plan {
    /// Begins a new block, whose points are measured in `turns` turns.
    fn begin(&mut self, turns: u32) {
        self.block += 1;
        self.turns = turns;
    }

    fn add(&mut self, groups: Groups, series: &'static str, size: u64, what: What) {
        self.points.push(Point {
            groups,
            series,
            size,
            what,
            max_rounds: u32::MAX,
            block: self.block,
            turns: self.turns,
        });
    }

    fn own(&mut self, groups: Groups, series: &'static str, size: u64, args: &str) {
        let args = args.split_whitespace().map(str::to_owned).collect();
        self.add(groups, series, size, What::Own(args));
    }

    fn peer(&mut self, groups: Groups, series: &'static str, size: u64, peer: Peer) {
        self.add(groups, series, size, What::Peer(peer));
        if let (true, Some(point)) = (peer.takes_long(), self.points.last_mut()) {
            point.turns = point.turns.min(turns(self.quick));
        }
    }

    fn bandwidth(&mut self, size: u64) {
        // Use twice as many turns, which are shorter: large messages run at one of two speeds, and
        // a turn shows only one of these.
        self.begin(2 * turns(self.quick));
        let s = format!("--size {size} --ms 100");
        let w = format!("iwarp-bw --op write {s}");
        self.bare_framing(size, &s);
        let b: Groups = &["bandwidth"];
        for (series, more) in [
            ("bw:write-event", "--wait event --crc off"),
            ("bw:write-event-crc", "--wait event --crc on"),
        ] {
            self.own(
                b,
                series,
                size,
                &format!("{w} --depth {} {more}", depth(size)),
            );
        }
        if size <= 4096 {
            self.own(b, "bw:tcp-nagle", size, &format!("tcp-bw {s} --nagle"));
        }
        self.own(b, "bw:write-one", size, &format!("{w} --depth 1 --crc off"));
        self.own(
            b,
            "bw:write-one-crc",
            size,
            &format!("{w} --depth 1 --crc on"),
        );
        if size == 65_536 {
            let mtu = format!("{w} --depth {} --mss 1460", depth(size));
            self.own(b, "bw:write-mtu", size, &format!("{mtu} --crc off"));
            self.own(b, "bw:write-mtu-crc", size, &format!("{mtu} --crc on"));
        }
        self.operations(size, &s);
        if size == 64 {
            let f = s.replace("--size 64", "--size 8");
            let f = format!("iwarp-bw --op fetchadd {f} --depth 64 --crc on");
            self.own(&["ops"], "bw:fetchadd-crc", 8, &f);
        }
    }

    /// Adds bare framing, which is the upper limit for the other points.
    fn bare_framing(&mut self, size: u64, s: &str) {
        let batch = (256 * 1024 / size).clamp(1, 1024);
        for (off, on, more, applies) in [
            ("bw:probe", "bw:probe-crc", String::new(), true),
            (
                "bw:probe-batch",
                "bw:probe-batch-crc",
                format!("--batch {batch}"),
                batch > 1,
            ),
            (
                "bw:probe-mtu",
                "bw:probe-mtu-crc",
                "--fpdu 1440".to_owned(),
                size == 65_536,
            ),
        ] {
            for (series, crc) in [(off, "off"), (on, "on")] {
                if applies {
                    let args = format!("probe-bw {s} {more} --crc {crc}");
                    self.own(&["bandwidth"], series, size, &args);
                }
            }
        }
    }

    /// Adds all operations, next to the points that they are compared with.
    fn operations(&mut self, size: u64, s: &str) {
        let o: Groups = &["ops"];
        let ov: Groups = &["ops", "verbs"];
        let b: Groups = &["bandwidth"];
        let bv: Groups = &["bandwidth", "verbs"];
        let with =
            |op: &str, more: &str| format!("iwarp-bw --op {op} {s} --depth {} {more}", depth(size));
        self.own(o, "bw:read", size, &with("read", "--crc off"));
        self.own(o, "bw:send", size, &with("send", "--crc off"));
        self.own(BW_BASE, "bw:write", size, &with("write", "--crc off"));
        self.own(BW_BASE, "bw:tcp", size, &format!("tcp-bw {s}"));
        self.own(BW_BASE, "bw:write-crc", size, &with("write", "--crc on"));
        self.own(ov, "bw:send-crc", size, &with("send", "--crc on"));
        self.own(ov, "bw:read-crc", size, &with("read", "--crc on"));
        if size <= 65_536 {
            let single = |crc: &str| with("write", &format!("--post single --crc {crc}"));
            self.own(bv, "bw:write-single-crc", size, &single("on"));
            self.own(b, "bw:write-single", size, &single("off"));
        }
        if matches!(size, 64 | 4096 | 65_536 | 1_048_576) {
            self.other_software(size, s);
        }
    }

    /// Adds other software.
    fn other_software(&mut self, size: u64, s: &str) {
        let p: Groups = &["peers"];
        let v: Groups = &["verbs"];
        if size == 64 {
            // Post single requests, as perftest does. The C library's queue pairs also allow 64
            // Reads in flight.
            let single = format!("{s} --depth {} --post single --crc on", depth(size));
            let read = format!("iwarp-bw --op read {single} --reads 64");
            self.own(v, "bw:read-single-crc", size, &read);
            let send = format!("iwarp-bw --op send {single}");
            self.own(v, "bw:send-single-crc", size, &send);
            let lists = Peer::verbs("ib_write_bw").in_lists(64);
            self.peer(v, "bw:ib-write-list", size, lists);
        }
        self.peer(v, "bw:ib-read", size, Peer::verbs("ib_read_bw"));
        self.peer(v, "bw:ib-send", size, Peer::verbs("ib_send_bw"));
        self.peer(v, "bw:ib-write", size, Peer::verbs("ib_write_bw"));
        self.peer(p, "bw:ucx-tag", size, Peer::ucx("tag_bw"));
        self.peer(p, "bw:ucx-put", size, Peer::ucx("ucp_put_bw"));
        self.peer(p, "bw:ucx-stream", size, Peer::ucx("stream_bw"));
        self.peer(p, "bw:fi-rma", size, Peer::fabric("rma"));
        self.peer(p, "bw:fi-msg", size, Peer::fabric("msg"));
    }

    fn latency(&mut self, size: u64) {
        self.begin(turns(self.quick));
        let full = match size {
            0..=4096 => 5000,
            4097..=65_536 => 1500,
            _ => 300,
        };
        let iters = if self.quick { full / 3 } else { full };
        let s = format!("--size {size} --iters {iters}");
        let (l, o, p, v): (Groups, Groups, Groups, Groups) =
            (&["latency"], &["ops"], &["peers"], &["verbs"]);
        let probe = format!("probe-lat {s} --wait event");
        self.own(l, "lat:probe-block", size, &format!("{probe} --crc off"));
        self.own(l, "lat:probe-block-crc", size, &format!("{probe} --crc on"));
        let w = format!("iwarp-lat --op write {s} --wait event");
        self.own(LAT_BASE, "lat:write-event", size, &format!("{w} --crc off"));
        self.own(
            LAT_BASE,
            "lat:write-event-crc",
            size,
            &format!("{w} --crc on"),
        );
        self.own(
            LAT_BASE,
            "lat:tcp-block",
            size,
            &format!("tcp-lat {s} --wait event"),
        );
        self.peer(v, "lat:ib-write", size, Peer::verbs("ib_write_lat"));
        self.peer(v, "lat:ib-send", size, Peer::verbs("ib_send_lat"));
        let op = |op: &str| format!("iwarp-lat --op {op} {s} --wait spin --crc on");
        let ov: Groups = &["ops", "verbs"];
        self.own(ov, "lat:send-spin-crc", size, &op("send"));
        self.own(ov, "lat:read-spin-crc", size, &op("read"));
        if size == 4 {
            let f = op("fetchadd").replace("--size 4", "--size 8");
            self.own(o, "lat:fetchadd-spin-crc", 8, &f);
        }
        // One run measures all spinning ping-pongs alternately: they differ less from each other
        // than the machine's speed changes within a second.
        let spin = format!("spin-lat --size {size} --iters {}", 2 * iters);
        self.own(LAT_BASE, SPIN, size, &spin);
        self.peer(p, "lat:ucx-tag", size, Peer::ucx("tag_lat"));
        self.peer(p, "lat:ucx-stream", size, Peer::ucx("stream_lat"));
        self.peer(p, "lat:ucx-put", size, Peer::ucx("ucp_put_lat"));
        self.peer(p, "lat:fi-pingpong", size, Peer::pingpong());
    }

    fn scale(&mut self, n: u64) {
        self.begin(1);
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
        self.begin(1);
        let c: Groups = &["cpu"];
        let (seconds, ms) = if self.quick { (2, 200) } else { (5, 1000) };
        self.own(
            c,
            "cpu:idle",
            0,
            &format!("idle --seconds {seconds} --wait event"),
        );
        // Three rounds are enough, because the figures of an idle process hardly vary.
        if let Some(idle) = self.points.last_mut() {
            idle.max_rounds = 3;
        }
        self.own(c, "cpu:passive", 65_536, &format!("passive --ms {ms}"));
    }
}

pub(super) fn points(quick: bool, only: &[String]) -> Result<Vec<Point>> {
    for name in only {
        if !GROUPS.contains(&name.as_str()) {
            bail!(
                "unknown group {name:?}; the groups are: {}",
                GROUPS.join(", ")
            );
        }
    }
    let mut plan = Plan {
        quick,
        points: Vec::new(),
        block: 0,
        turns: 1,
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

/// Returns the number of turns in a round: the maximum number of turns of any point.
pub(super) fn turns_of_a_round(points: &[Point]) -> u32 {
    points.iter().map(|p| p.turns).max().unwrap_or(1)
}

/// Returns the measurements of a round in order, each as the number of its turn and the index of
/// its point. Every second turn is reversed, so that a point does not always follow the same one.
pub(super) fn in_turns(points: &[Point]) -> Vec<(u32, usize)> {
    let mut round = Vec::new();
    let mut from = 0;
    for block in points.chunk_by(|a, b| a.block == b.block) {
        for turn in 0..turns_of_a_round(block) {
            let mut these: Vec<usize> = (from..from + block.len()).collect();
            if turn % 2 == 1 {
                these.reverse();
            }
            these.retain(|&at| turn < points[at].turns);
            round.extend(these.into_iter().map(|at| (turn, at)));
        }
        from += block.len();
    }
    round
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_groups_exist() {
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
    fn every_second_turn_is_reversed() {
        let all = points(false, &["ops".to_owned()]).unwrap();
        let taken = in_turns(&all);
        let last = taken.iter().map(|t| t.0).max().unwrap();
        assert_eq!(last + 1, turns_of_a_round(&all));
        let of_64 = |turn| -> Vec<&str> {
            let mine = taken.iter().filter(|(t, _)| *t == turn);
            let names = mine.map(|(_, index)| &all[*index]);
            names
                .filter(|p| p.block == all[0].block)
                .map(|p| p.series)
                .collect()
        };
        let mut back = of_64(1);
        assert!(back.len() > 3);
        back.reverse();
        assert_eq!((&of_64(0), &of_64(2)), (&back, &back));
        // All turns of one size precede the next size.
        let blocks: Vec<u32> = taken.iter().map(|(_, index)| all[*index].block).collect();
        assert!(blocks.is_sorted());
    }

    #[test]
    fn run_may_measure_several_series() {
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
    fn group_includes_points_for_comparison() {
        let of = |group: &str| points(false, &[group.to_owned()]).unwrap();
        let has = |group, name| of(group).iter().any(|p| p.series == name);
        assert!(has("peers", "bw:tcp") && has("peers", "bw:write-crc") && has("peers", SPIN));
        assert!(!has("scale", "bw:tcp") && has("ops", "bw:write"));
        assert!(points(false, &["scales".to_owned()]).is_err());
    }
}
