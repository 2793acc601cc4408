//! The measuring end: executes the plan, keeps both ends in step and collects the samples.

use super::control::{Control, Reply, Request};
use super::plan::{Governor, Limit, Plan};
use super::point::{Link, Metric, Point, Role, Session};
use super::{host, transport};
use indicatif::{ProgressBar, ProgressStyle};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_figures::Latencies;
use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    /// Half round trips in microseconds.
    Latency {
        p50: f64,
        p99: f64,
        /// Processor time of both ends per half round trip, in microseconds.
        cpu: f64,
    },
    Bandwidth {
        /// Payload bytes per second.
        bytes_per_s: f64,
        /// Messages per second.
        msgs_per_s: f64,
        /// Processor time of both ends per message, in microseconds.
        cpu: f64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    /// Ratios are computed only between samples of one round.
    pub(crate) round: u32,
    pub(crate) point: Point,
    pub(crate) value: Value,
}

/// What one run of both ends took.
#[derive(Debug, Clone, Copy)]
struct Took {
    /// Seconds, by this end's clock.
    seconds: f64,
    /// Processor time of both ends, in microseconds.
    cpu_us: f64,
}

/// Limit of operations per measurement without `--iters`.
const MAX_ITERS: f64 = 1e8;

/// A client that may measure.
pub(crate) struct Runner {
    control: Control,
    links: HashMap<Link, (u32, Box<dyn Session>)>,
    /// Last known duration of an operation, in seconds.
    pace: HashMap<Point, f64>,
    hist: Latencies,
}

fn describe(p: &Point) -> String {
    let metric = if p.metric == Metric::Latency {
        "latency"
    } else {
        "bandwidth"
    };
    let crc = if p.crc { ", CRC" } else { "" };
    format!(
        "{} {} {metric}, {}{crc}",
        p.op.name(),
        iwarp_cli_common::units::size(p.size),
        p.poll.name()
    )
}

impl Runner {
    /// Opens the link of the first measurement. By that the server admits this client to measure.
    ///
    /// # Errors
    /// Returns [`Error::Busy`] if the server serves another client, and the first failure of either
    /// end.
    pub(crate) fn begin(plan: &Plan, control: Control) -> Result<Self> {
        let mut r = Self {
            control,
            links: HashMap::new(),
            pace: HashMap::new(),
            hist: Latencies::new(),
        };
        let first = plan.groups.first();
        if let Some(point) = first.and_then(|group| Plan::order(group, 0).next()) {
            r.link_of(plan, point)?;
        }
        r.control.begun();
        Ok(r)
    }

    /// Runs the whole plan.
    pub(crate) fn run(&mut self, plan: &Plan, quiet: bool) -> Result<Vec<Sample>> {
        let bar = if !quiet && std::io::stderr().is_terminal() {
            ProgressBar::new(plan.slots())
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) =
            ProgressStyle::with_template("{bar:30} {pos}/{len}  {elapsed}  {wide_msg}")
        {
            bar.set_style(style);
        }
        let mut samples = Vec::new();
        let mut governor = Governor::start(plan, Instant::now());
        for round in 0..plan.rounds {
            if round > 0 && governor.is_over(Instant::now()) {
                // The report shows how many rounds were completed.
                break;
            }
            for group in &plan.groups {
                for point in Plan::order(group, round) {
                    bar.set_message(describe(point));
                    let limit = governor.next_slot(Instant::now());
                    let value = self.measure(plan, point, limit).context(describe(point))?;
                    samples.push(Sample {
                        round,
                        point: *point,
                        value,
                    });
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        Ok(samples)
    }

    /// Measures one point within `limit`, after a short run that warms up and determines the pace.
    pub(crate) fn measure(&mut self, plan: &Plan, point: &Point, limit: Limit) -> Result<Value> {
        let slot = match limit {
            Limit::Iters(n) => {
                self.execute(plan, point, (n / 10).clamp(1, 1000))?;
                return self.sample(plan, point, n);
            }
            Limit::Each(d) | Limit::Total(d) => d.as_secs_f64(),
        };
        let mut pace = match self.pace.get(point) {
            Some(&pace) => {
                let n = iterations(slot * 0.1 / pace);
                self.execute(plan, point, n)?.seconds / n as f64
            }
            None => self.find_pace(plan, point, slot * 0.1)?,
        };
        pace = pace.max(1e-9);
        self.pace.insert(*point, pace);
        self.sample(plan, point, iterations(slot * 0.85 / pace))
    }

    /// Doubles the count until a run takes about `target` seconds; short runs overstate the time.
    fn find_pace(&mut self, plan: &Plan, point: &Point, target: f64) -> Result<f64> {
        let mut n = u64::from(plan.qps) * 2;
        loop {
            let t = self.execute(plan, point, n)?.seconds;
            if t >= target / 2.0 || n as f64 >= MAX_ITERS {
                return Ok(t / n as f64);
            }
            n = iterations((n * 8) as f64)
                .min(iterations(n as f64 * target / t.max(1e-9)))
                .max(n + 1);
        }
    }

    fn sample(&mut self, plan: &Plan, point: &Point, iters: u64) -> Result<Value> {
        let took = self.execute(plan, point, iters)?;
        let t = took.seconds.max(1e-9);
        let cpu = took.cpu_us / iters as f64;
        self.pace.insert(*point, t / iters as f64);
        match point.metric {
            Metric::Latency => {
                let half = |share| self.hist.quantile_us(share).map(|us| us / 2.0);
                match (half(0.5), half(0.99)) {
                    // A transport that loses round trips would appear faster.
                    (Some(p50), Some(p99)) if self.hist.count() == iters => {
                        let cpu = cpu / 2.0;
                        Ok(Value::Latency { p50, p99, cpu })
                    }
                    _ => Err(Error::failed(format!(
                        "only {} of {iters} round trips were recorded",
                        self.hist.count()
                    ))),
                }
            }
            Metric::Bandwidth => {
                let msgs_per_s = iters as f64 / t;
                Ok(Value::Bandwidth {
                    bytes_per_s: msgs_per_s * point.size as f64,
                    msgs_per_s,
                    cpu,
                })
            }
        }
    }

    /// Runs one measurement at both ends.
    fn execute(&mut self, plan: &Plan, point: &Point, iters: u64) -> Result<Took> {
        let link = self.link_of(plan, point)?;
        let Some((id, session)) = self.links.get_mut(&link) else {
            return Err(Error::failed("the link is not open"));
        };
        session.prepare(Role::Client, point, iters)?;
        self.control.send(&Request::Run {
            id: *id,
            point: *point,
            iters,
        })?;
        self.control.expect("ready", |r| *r == Reply::Ready {})?;
        self.hist.clear();
        let before = host::cpu_us();
        let t0 = Instant::now();
        let outcome = match point.metric {
            Metric::Latency => session
                .latency(Role::Client, point, iters, &mut self.hist)
                .map(|()| t0.elapsed()),
            Metric::Bandwidth => session.bandwidth(Role::Client, point, iters),
        };
        match outcome {
            Ok(took) => {
                let mine = host::cpu_us() - before;
                match self.control.expect("done", Reply::is_done)? {
                    Reply::Done { cpu_us } => Ok(Took {
                        seconds: took.as_secs_f64(),
                        cpu_us: mine + cpu_us,
                    }),
                    _ => Err(Error::failed("the measurement returned no figures")),
                }
            }
            Err(mine) => {
                // Prefer the server's error: its data connection ends with this session.
                self.links.remove(&link);
                match self.control.expect("done", Reply::is_done) {
                    Err(theirs) => Err(Error::failed(format!("{mine}; {theirs}"))),
                    Ok(_) => Err(mine),
                }
            }
        }
    }

    fn link_of(&mut self, plan: &Plan, point: &Point) -> Result<Link> {
        let link = plan.link(point);
        if !self.links.contains_key(&link) {
            let opened = self.open(&link)?;
            self.links.insert(link.clone(), opened);
        }
        Ok(link)
    }

    fn open(&mut self, link: &Link) -> Result<(u32, Box<dyn Session>)> {
        let id = u32::try_from(self.links.len()).context("links")?;
        self.control.send(&Request::Open {
            id,
            link: link.clone(),
        })?;
        let reply = self
            .control
            .expect("listening", |r| matches!(r, Reply::Listening { .. }))?;
        let Reply::Listening { port } = reply else {
            return Err(Error::failed("the server named no port"));
        };
        let to = self.control.peer_at(port)?;
        let session = transport(link.wire).connect(link, to)?;
        self.control.expect("opened", |r| *r == Reply::Opened {})?;
        Ok((id, session))
    }
}

fn iterations(n: f64) -> u64 {
    n.clamp(1.0, MAX_ITERS) as u64
}
