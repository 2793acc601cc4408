//! Decides which points are measured, in which order, and for how long.
//!
//! A TCP point and the RDMA points that are compared with it form a group: they have the same size,
//! way of waiting and metric, and are measured one after another. On shared machines absolute
//! figures drift by tens of per cent within minutes; ratios of neighbouring measurements do not.

use super::args::MeasureArgs;
use super::point::{Link, MAX_SIZE, Metric, Op, Point, Poll, Wire};
use iwarp_cli_common::error::{Error, Result};
use iwarp_cli_common::units;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time for the measurements of a default run. The whole run takes less than two minutes.
const DEFAULT_BUDGET: Duration = Duration::from_secs(100);
/// Time for the measurements of `--quick`. The whole run takes less than 20 seconds.
const QUICK_BUDGET: Duration = Duration::from_secs(13);
/// Longer measurements do not give steadier medians.
const SLOT_MAX: Duration = Duration::from_millis(400);
/// Shorter measurements would measure only start-up.
const SLOT_MIN: Duration = Duration::from_millis(3);
const DEFAULT_SIZES: [u64; 6] = [4, 64, 1024, 8192, 65536, 1 << 20];
const QUICK_SIZES: [u64; 3] = [4, 65536, 1 << 20];
const DEFAULT_ROUNDS: u32 = 3;
const ATOMIC_SIZE: u64 = 8;

/// How long each measurement lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Exactly this many operations.
    Iters(u64),
    /// About this long for each measurement.
    Each(Duration),
    /// About this long for all measurements together.
    Total(Duration),
}

/// Points that are compared with each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// The TCP points, then the RDMA points.
    pub(crate) points: Vec<Point>,
}

impl Group {
    fn new(tcp: Point, ops: impl Iterator<Item = Op>, crcs: &[bool]) -> Self {
        let mut points: Vec<_> = ops
            .flat_map(|op| crcs.iter().map(move |&crc| Point { op, crc, ..tcp }))
            .collect();
        let blocks = (tcp.metric, tcp.poll) == (Metric::Latency, Poll::Event);
        if blocks && !points.is_empty() {
            // Blocking calls of the library poll before they sleep. Also measure TCP that polls for
            // the same time, to show what polling gains and costs.
            points.insert(
                0,
                Point {
                    op: Op::TcpPolls,
                    ..tcp
                },
            );
        }
        points.insert(0, tcp);
        Self { points }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Groups in the order of measurement, visited once per round.
    pub(crate) groups: Vec<Group>,
    pub(crate) rounds: u32,
    pub(crate) limit: Limit,
    pub(crate) qps: u32,
    /// Outstanding operations per connection.
    pub(crate) depth: u32,
    /// MPA markers on the RDMA connections.
    pub(crate) markers: bool,
}

impl Plan {
    /// Returns the plan for these arguments.
    pub(crate) fn new(a: &MeasureArgs) -> Result<Self> {
        let mut ops: Vec<Op> = if a.op.is_empty() {
            vec![Op::Send, Op::Write, Op::Read, Op::FetchAdd]
        } else {
            a.op.clone()
        };
        ops.sort_unstable();
        ops.dedup();
        ops.retain(|o| !o.is_tcp());
        let crcs: Vec<bool> = a.crc.map_or(vec![false, true], |c| vec![c.is_on()]);
        let polls: Vec<Poll> = a.poll.map_or(vec![Poll::Spin, Poll::Event], |p| vec![p]);
        let mut sizes: BTreeSet<u64> = match (a.size.is_empty(), a.quick) {
            (false, _) => a.size.iter().copied().collect(),
            (true, true) => QUICK_SIZES.into(),
            (true, false) => DEFAULT_SIZES.into(),
        };
        if let Some(bad) = sizes.iter().find(|&&s| s == 0 || s > MAX_SIZE) {
            return Err(Error::usage(format!(
                "--size must be between 1 and {}, not {bad}",
                units::size(MAX_SIZE)
            )));
        }
        let sizes_without_atomics = sizes.clone();
        if ops == [Op::FetchAdd] {
            sizes.clear();
        }
        if ops.contains(&Op::FetchAdd) {
            sizes.insert(ATOMIC_SIZE);
        }

        let mut groups = Vec::new();
        for &size in &sizes {
            for metric in [Metric::Latency, Metric::Bandwidth] {
                for &poll in &polls {
                    let tcp = Point {
                        op: Op::Tcp,
                        size,
                        crc: false,
                        poll,
                        metric,
                    };
                    let fits = |op: &Op| match op {
                        Op::FetchAdd => size == ATOMIC_SIZE,
                        _ => sizes_without_atomics.contains(&size),
                    };
                    groups.push(Group::new(tcp, ops.iter().copied().filter(fits), &crcs));
                }
            }
        }
        let limit = match (a.iters, a.seconds) {
            (Some(n), _) => Limit::Iters(n),
            (None, Some(s)) => Limit::Each(Duration::from_secs_f64(s)),
            (None, None) if a.quick => Limit::Total(QUICK_BUDGET),
            (None, None) => Limit::Total(DEFAULT_BUDGET),
        };
        Ok(Self {
            groups,
            rounds: a.rounds.unwrap_or(DEFAULT_ROUNDS),
            limit,
            qps: a.qps,
            depth: a.depth,
            markers: a.markers,
        })
    }

    /// Returns the number of measurements in a round.
    pub(crate) fn slots_per_round(&self) -> u64 {
        self.groups.iter().map(|g| g.points.len() as u64).sum()
    }

    pub(crate) fn slots(&self) -> u64 {
        self.slots_per_round() * u64::from(self.rounds)
    }

    pub(crate) fn link(&self, p: &Point) -> Link {
        let max_size = self
            .groups
            .iter()
            .flat_map(|g| &g.points)
            .map(|p| p.size)
            .max()
            .unwrap_or(1);
        let tcp = p.op.is_tcp();
        Link {
            wire: if tcp { Wire::Tcp } else { Wire::Rdma },
            crc: p.crc,
            markers: self.markers && !tcp,
            poll: if tcp { Poll::Event } else { p.poll },
            qps: self.qps,
            depth: if tcp { 1 } else { self.depth },
            max_size,
        }
    }

    /// Returns a group's points in the order for this round. The order rotates, so that no point is
    /// always the first.
    pub(crate) fn order(group: &Group, round: u32) -> impl Iterator<Item = &Point> {
        let n = group.points.len();
        let start = (round as usize * 2) % n.max(1);
        group.points.iter().cycle().skip(start).take(n)
    }
}

/// Divides the remaining time among the remaining measurements. A slow start or a slow machine
/// shortens later measurements instead of prolonging the run.
#[derive(Debug)]
pub(crate) struct Governor {
    limit: Limit,
    end: Option<Instant>,
    remaining_slots: u64,
}

impl Governor {
    /// Starts the clock.
    pub(crate) fn start(plan: &Plan, now: Instant) -> Self {
        let end = match plan.limit {
            Limit::Total(t) => Some(now + t),
            Limit::Iters(_) | Limit::Each(_) => None,
        };
        Self {
            limit: plan.limit,
            end,
            remaining_slots: plan.slots(),
        }
    }

    /// Returns the limit for the next measurement, and counts that measurement.
    pub(crate) fn next_slot(&mut self, now: Instant) -> Limit {
        let slots = u32::try_from(self.remaining_slots.max(1)).unwrap_or(u32::MAX);
        self.remaining_slots = self.remaining_slots.saturating_sub(1);
        match self.end {
            Some(end) => {
                let share = end.saturating_duration_since(now) / slots;
                Limit::Each(share.clamp(SLOT_MIN, SLOT_MAX))
            }
            None => self.limit,
        }
    }

    /// Returns `true` if the time is used up. Call this between rounds only: ratios need complete
    /// rounds.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.end.is_some_and(|end| now >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Wrap {
        #[command(flatten)]
        m: MeasureArgs,
    }

    fn plan(args: &[&str]) -> Result<Plan> {
        Plan::new(&Wrap::try_parse_from([&["x"], args].concat()).unwrap().m)
    }

    #[test]
    fn default_plan_covers_promised_points() {
        let p = plan(&[]).unwrap();
        let all: Vec<_> = p.groups.iter().flat_map(|g| g.points.clone()).collect();
        for op in [Op::Send, Op::Write, Op::Read] {
            for size in [4, 64, 65536, 1 << 20] {
                for crc in [false, true] {
                    for poll in [Poll::Spin, Poll::Event] {
                        for metric in [Metric::Latency, Metric::Bandwidth] {
                            assert!(all.contains(&Point {
                                op,
                                size,
                                crc,
                                poll,
                                metric
                            }));
                        }
                    }
                }
            }
        }
        assert!(all.iter().all(|p| p.op != Op::FetchAdd || p.size == 8));
        assert!(all.iter().any(|p| p.op == Op::FetchAdd));
        assert!(
            all.iter()
                .all(|p| p.size != 8 || p.op == Op::FetchAdd || p.op.is_tcp())
        );
        for g in &p.groups {
            assert_eq!(g.points[0].op, Op::Tcp);
            assert_eq!(g.points.iter().filter(|p| p.op == Op::Tcp).count(), 1);
            let first = &g.points[0];
            let blocks = first.poll == Poll::Event && first.metric == Metric::Latency;
            let polling = g.points.iter().filter(|p| p.op == Op::TcpPolls).count();
            assert_eq!(polling, usize::from(blocks));
            assert!(g.points.iter().all(|q| q.size == g.points[0].size
                && q.poll == g.points[0].poll
                && q.metric == g.points[0].metric));
        }
    }

    /// Simulates a run in which every measurement takes `k` times its slot.
    fn simulate(p: &Plan, k: f64) -> Duration {
        let t0 = Instant::now();
        let mut now = t0;
        let mut g = Governor::start(p, now);
        for round in 0..p.rounds {
            if round > 0 && g.is_over(now) {
                break;
            }
            for _ in 0..p.slots_per_round() {
                let Limit::Each(d) = g.next_slot(now) else {
                    panic!("a budget gives durations")
                };
                now += d.mul_f64(k) + Duration::from_millis(1);
            }
        }
        now - t0
    }

    #[test]
    fn total_time_is_bounded() {
        let (d, q) = (plan(&[]).unwrap(), plan(&["--quick"]).unwrap());
        assert!(d.slots() < 700, "{}", d.slots());
        assert!(q.slots() < 350, "{}", q.slots());
        // The measurements use the time up.
        assert!(simulate(&q, 1.0) > QUICK_BUDGET.mul_f64(0.9));
        for k in [0.5, 1.0, 1.5] {
            assert!(
                simulate(&d, k) < Duration::from_secs(115),
                "{k}: {:?}",
                simulate(&d, k)
            );
            assert!(
                simulate(&q, k) < Duration::from_secs(17),
                "{k}: {:?}",
                simulate(&q, k)
            );
        }
    }

    #[test]
    fn explicit_options_narrow_the_plan() {
        let p = plan(&[
            "--op", "write", "--size", "64K", "--crc", "on", "--poll", "spin", "--iters", "100",
            "--rounds", "1",
        ])
        .unwrap();
        assert_eq!(p.groups.len(), 2);
        assert_eq!(p.slots(), 4);
        assert_eq!(p.limit, Limit::Iters(100));
        let p = plan(&["--op", "tcp", "--size", "4"]).unwrap();
        assert!(p.groups.iter().all(|g| g.points.len() == 1));
        let p = plan(&["--op", "fetchadd", "--size", "4"]).unwrap();
        assert!(p.groups.iter().flat_map(|g| &g.points).all(|p| p.size == 8));
        assert!(matches!(plan(&["--size", "0"]), Err(Error::Usage(_))));
        assert!(matches!(plan(&["--size", "1G"]), Err(Error::Usage(_))));
    }

    /// `--quick` has no effect on what another option sets.
    #[test]
    fn explicit_options_win_over_quick() {
        for (options, limit, rounds) in [
            (&[][..], Limit::Total(DEFAULT_BUDGET), DEFAULT_ROUNDS),
            (&["--quick"], Limit::Total(QUICK_BUDGET), DEFAULT_ROUNDS),
            (&["--iters", "9"], Limit::Iters(9), DEFAULT_ROUNDS),
            (
                &["--quick", "--iters", "9", "--rounds", "2"],
                Limit::Iters(9),
                2,
            ),
            (
                &["--seconds", "2"],
                Limit::Each(Duration::from_secs(2)),
                DEFAULT_ROUNDS,
            ),
            (
                &["--rounds", "1", "--seconds", "2", "--quick"],
                Limit::Each(Duration::from_secs(2)),
                1,
            ),
        ] {
            let p = plan(options).unwrap();
            assert_eq!((p.limit, p.rounds), (limit, rounds), "{options:?}");
        }
        let p = plan(&["--quick", "--size", "12", "--op", "send"]).unwrap();
        let mut points = p.groups.iter().flat_map(|g| &g.points);
        assert!(points.all(|p| p.size == 12));
    }

    /// TCP and RDMA links have the same number of connections, with buffers for the largest
    /// message. Options of RDMA do not affect TCP links.
    #[test]
    fn links_follow_the_options() {
        let p = plan(&[
            "--qps",
            "5",
            "--depth",
            "9",
            "--markers",
            "--size",
            "4,64K,1K",
        ])
        .unwrap();
        for point in p.groups.iter().flat_map(|g| &g.points) {
            let (link, tcp) = (p.link(point), point.op.is_tcp());
            assert_eq!((link.qps, link.max_size), (5, 65536), "{point:?}");
            assert_eq!(link.depth, if tcp { 1 } else { 9 }, "{point:?}");
            assert_eq!((link.markers, link.wire == Wire::Rdma), (!tcp, !tcp));
            assert_eq!(link.crc, point.crc, "{point:?}");
        }
    }

    #[test]
    fn order_rotates_and_keeps_all() {
        let g = plan(&[]).unwrap().groups[0].clone();
        let mut firsts = BTreeSet::new();
        for r in 0..3 {
            let o: Vec<_> = Plan::order(&g, r).copied().collect();
            assert_eq!(o.len(), g.points.len());
            assert!(g.points.iter().all(|p| o.contains(p)));
            firsts.insert(g.points.iter().position(|p| *p == o[0]));
        }
        assert_eq!(firsts.len(), 3);
    }
}
