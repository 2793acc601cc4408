//! The client: executes the plan, coordinates both ends and collects the samples.

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

/// Times of one run of both ends.
#[derive(Debug, Clone, Copy)]
struct RunTimes {
    /// Duration by this end's clock, in seconds.
    seconds: f64,
    /// Processor time of both ends, in microseconds.
    cpu_us: f64,
}

/// Limit of operations per measurement without `--iters`.
const MAX_ITERS: f64 = 1e8;

/// A client to which the server has granted the right to measure.
pub(crate) struct Runner {
    control: Control,
    links: HashMap<Link, (u32, Box<dyn Session>)>,
    /// Last known duration of one operation, in seconds.
    op_seconds: HashMap<Point, f64>,
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
    /// Opens the link of the first measurement, with which the server grants the right to measure.
    ///
    /// # Errors
    /// Returns [`Error::Busy`] if the server serves another client, otherwise the first failure of
    /// either end.
    pub(crate) fn begin(plan: &Plan, control: Control) -> Result<Self> {
        let mut r = Self {
            control,
            links: HashMap::new(),
            op_seconds: HashMap::new(),
            hist: Latencies::new(),
        };
        let first = plan.groups.first();
        if let Some(point) = first.and_then(|group| Plan::order(group, 0).next()) {
            r.open_link(plan, point)?;
        }
        r.control.set_link_opened();
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

    /// Measures one point within `limit`. A short run before warms up and shows how long one
    /// operation takes.
    pub(crate) fn measure(&mut self, plan: &Plan, point: &Point, limit: Limit) -> Result<Value> {
        let slot = match limit {
            Limit::Iters(n) => {
                self.execute(plan, point, (n / 10).clamp(1, 1000))?;
                return self.sample(plan, point, n);
            }
            Limit::Each(d) | Limit::Total(d) => d.as_secs_f64(),
        };
        let mut op_seconds = match self.op_seconds.get(point) {
            Some(&last) => {
                let n = iterations(slot * 0.1 / last);
                self.execute(plan, point, n)?.seconds / n as f64
            }
            None => self.find_op_seconds(plan, point, slot * 0.1)?,
        };
        op_seconds = op_seconds.max(1e-9);
        self.op_seconds.insert(*point, op_seconds);
        self.sample(plan, point, iterations(slot * 0.85 / op_seconds))
    }

    /// Returns the duration of one operation. Increases the number of operations until a run takes
    /// about `target` seconds, because short runs overstate the duration.
    fn find_op_seconds(&mut self, plan: &Plan, point: &Point, target: f64) -> Result<f64> {
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
        self.op_seconds.insert(*point, t / iters as f64);
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
    fn execute(&mut self, plan: &Plan, point: &Point, iters: u64) -> Result<RunTimes> {
        let link = self.open_link(plan, point)?;
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
                let client_cpu_us = host::cpu_us() - before;
                match self.control.expect("done", Reply::is_done)? {
                    Reply::Done { cpu_us } => Ok(RunTimes {
                        seconds: took.as_secs_f64(),
                        cpu_us: client_cpu_us + cpu_us,
                    }),
                    _ => Err(Error::failed("the measurement returned no figures")),
                }
            }
            Err(client_error) => {
                // Close the data connections, so that the server fails as well and reports why.
                self.links.remove(&link);
                match self.control.expect("done", Reply::is_done) {
                    Err(server_error) => {
                        Err(Error::failed(format!("{client_error}; {server_error}")))
                    }
                    Ok(_) => Err(client_error),
                }
            }
        }
    }

    /// Returns the link of a point, and opens it if necessary.
    fn open_link(&mut self, plan: &Plan, point: &Point) -> Result<Link> {
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
        let to = self.control.peer_with_port(port)?;
        let session = transport(link.wire).connect(link, to)?;
        self.control.expect("opened", |r| *r == Reply::Opened {})?;
        Ok((id, session))
    }
}

fn iterations(n: f64) -> u64 {
    n.clamp(1.0, MAX_ITERS) as u64
}
