//! Measures how blocking calls and CPU-bound programs affect each other.
//!
//! A blocking call of the library polls for a while before it sleeps
//! ([`Config::busy_poll`](iwarp::Config::busy_poll)). On an idle machine that only shortens the
//! wait. On a busy machine, polling takes time from other programs, and the scheduler preempts the
//! polling thread. So the ping-pong is also measured beside one computing thread per processor of
//! the run: for plain TCP that sleeps, for plain TCP that first polls for as long as the library,
//! and for an RDMA operation.

use super::pin;
use super::plan::{Limit, Plan};
use super::point::{Metric, Op, Point, Poll};
use super::run::{Runner, Value};
use iwarp_cli_common::error::Result;
use iwarp_figures::Spread;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Duration of each measurement: many time slices of the scheduler.
const SLOT: Duration = Duration::from_millis(150);

/// One operation, measured beside a computing program.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UnderLoad {
    pub(crate) op: Op,
    /// Message size in octets.
    pub(crate) size: u64,
    /// Half round trip in µs, median.
    pub(crate) p50: Option<Spread>,
    /// Half round trip in µs, 99th percentile.
    pub(crate) p99: Option<Spread>,
    /// Fraction of the processors that the computing program got, 0 to 1.
    pub(crate) program_share: Option<Spread>,
}

/// Measures all operations alternately, `rounds` times, beside a computing thread on each of
/// `cpus`.
pub(crate) fn measure(
    runner: &mut Runner,
    plan: &Plan,
    cpus: &[usize],
    rounds: u32,
) -> Result<Vec<UnderLoad>> {
    let points = points(plan);
    let mut all: Vec<_> = points.iter().map(|_| <[Vec<f64>; 3]>::default()).collect();
    for _ in 0..rounds {
        for (point, [p50s, p99s, shares]) in points.iter().zip(&mut all) {
            let (value, share) =
                beside_computing_threads(cpus, || runner.measure(plan, point, Limit::Each(SLOT)))?;
            if let Value::Latency { p50, p99, .. } = value {
                p50s.push(p50);
                p99s.push(p99);
                shares.push(share);
            }
        }
    }
    let rows = points.iter().zip(all).map(|(point, figures)| {
        let [p50, p99, program_share] = figures.map(Spread::of);
        UnderLoad {
            op: point.op,
            size: point.size,
            p50,
            p99,
            program_share,
        }
    });
    Ok(rows.collect())
}

/// Returns the ping-pongs of the plan's smallest message: plain TCP that sleeps, plain TCP that
/// polls, and an RDMA operation. Empty if the plan has no blocking RDMA calls.
fn points(plan: &Plan) -> Vec<Point> {
    let blocking = |p: &&Point| (p.poll, p.metric) == (Poll::Event, Metric::Latency);
    let rdma = plan
        .groups
        .iter()
        .flat_map(|group| &group.points)
        .filter(blocking)
        .filter(|p| !p.op.is_tcp())
        .min_by_key(|p| (p.size, p.op, !p.crc));
    let Some(&rdma) = rdma else {
        return Vec::new();
    };
    let tcp = |op| Point {
        op,
        crc: false,
        ..rdma
    };
    vec![tcp(Op::Tcp), tcp(Op::TcpPolls), rdma]
}

/// Runs `f` beside a computing thread on each of `cpus`. Returns the result of `f`, and the
/// fraction of the processors that the computing threads got.
fn beside_computing_threads<T>(cpus: &[usize], f: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let threads: Vec<_> = cpus
            .iter()
            .map(|&cpu| {
                let stop = &stop;
                scope.spawn(move || {
                    pin::pin_to(cpu);
                    compute(stop)
                })
            })
            .collect();
        let result = f();
        stop.store(true, Ordering::Relaxed);
        let shares = threads.into_iter().map(|t| t.join().unwrap_or_default());
        let share = shares.sum::<f64>() / cpus.len().max(1) as f64;
        Ok((result?, share))
    })
}

/// Computes until `stop`. Returns the fraction of the time for which this thread had a processor.
fn compute(stop: &AtomicBool) -> f64 {
    let used = || clock_gettime(ClockId::ThreadCPUTime);
    let (begin, before) = (Instant::now(), used());
    let mut x = 1_u64;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..10_000 {
            x = std::hint::black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
    let after = used();
    let used =
        (after.tv_sec - before.tv_sec) as f64 + (after.tv_nsec - before.tv_nsec) as f64 / 1e9;
    used / begin.elapsed().as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::PerfArgs;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        perf: PerfArgs,
    }

    fn points_of(args: &str) -> Vec<Point> {
        let cli = Cli::parse_from(std::iter::once("perf").chain(args.split_whitespace()));
        points(&Plan::new(&cli.perf.measure).unwrap())
    }

    #[test]
    fn smallest_blocking_message_is_measured() {
        let ops = |args: &str| -> Vec<_> {
            let points = points_of(args);
            points.iter().map(|p| (p.op, p.size, p.crc)).collect()
        };
        let expected = [
            (Op::Tcp, 4, false),
            (Op::TcpPolls, 4, false),
            (Op::Send, 4, true),
        ];
        assert_eq!(ops(""), expected);
        assert_eq!(
            ops("--op read --size 64K,1K --crc off")[2],
            (Op::Read, 1024, false)
        );
        assert_eq!(ops("--poll spin"), []);
        assert_eq!(ops("--op tcp"), []);
        assert!(points_of("").iter().all(|p| p.poll == Poll::Event));
    }

    #[test]
    fn computing_threads_get_remaining_time() {
        let (seven, share) = beside_computing_threads(&[0], || {
            std::thread::sleep(Duration::from_millis(20));
            Ok(7)
        })
        .unwrap();
        assert_eq!(seven, 7);
        assert!(share > 0.0 && share <= 1.1, "{share}");
    }
}
