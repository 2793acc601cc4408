//! Runs all attacks on one server. Records its responses, its good client's latencies, and its
//! leaks.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use xtask::process::Log;

use super::acts::Target;
use super::kind::Attack;
use super::peer::Response;
use super::perf_port::PerfPort;
use super::server::{Figures, Kind, Programs, Server};

/// Number of repetitions with `--long`.
const LONG: u32 = 10;
/// Tolerated growth of a server's resident memory at any time, in KiB.
const GROWTH_KIB: u64 = 128 * 1024;
/// Time limit for a server to release the resources of attackers. It exceeds all time limits of a
/// closing connection.
const RELEASE_LIMIT: Duration = Duration::from_secs(20);
/// Tolerated growth of descriptors and threads after the attacks.
const TOLERATED_GROWTH: usize = 8;
/// Number of runs of the good client before the attacks.
const BASELINE_RUNS: usize = 5;

/// How thoroughly the attacks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Each attack once, while the good client runs continuously.
    Quick,
    /// Each attack repeatedly during one run of the good client.
    Each,
    /// Like `Each`, with more repetitions of everything.
    Long,
}

impl Form {
    const fn scale(self) -> u32 {
        match self {
            Self::Quick | Self::Each => 1,
            Self::Long => LONG,
        }
    }
}

/// The result of one attack on one server.
pub(super) struct Row {
    pub(super) server: &'static str,
    pub(super) attack: &'static str,
    pub(super) expected: String,
    pub(super) seen: String,
    pub(super) runs: usize,
    /// The good client's worst latencies.
    pub(super) good: Option<Figures>,
    /// The good client's 99th percentile, divided by that before the attacks.
    pub(super) ratio: Option<f64>,
    pub(super) resident_kib: u64,
    pub(super) failure: Option<String>,
}

/// Attacks one server.
pub(super) fn attack_server(
    programs: &Programs,
    kind: Kind,
    attacks: &[&Attack],
    form: Form,
    rows: &mut Vec<Row>,
    log: &mut Log,
) -> Result<()> {
    if attacks.is_empty() {
        return Ok(());
    }
    let mut server = Server::start(programs, kind)?;
    let runs = BASELINE_RUNS * form.scale() as usize;
    let baseline: Result<Vec<_>> = (0..runs)
        .map(|_| server.measure(&AtomicBool::new(true)))
        .collect();
    let base = worst(&baseline?).context("the good client was not run")?;
    let (before_kib, before) = (server.resident()?, server.descriptors_and_threads()?);
    log.say(format!(
        "{}: before the attacks p50 {:.0} µs, p99 {:.0} µs; {} KiB resident",
        kind.name(),
        base.p50,
        base.p99,
        before_kib
    ));
    let first = rows.len();
    match form {
        Form::Quick => run_quick(&server, attacks, rows),
        Form::Each | Form::Long => {
            for attack in attacks {
                rows.push(run_repeatedly(&server, attack, form.scale()));
                if server.check_alive().is_err() {
                    break;
                }
            }
        }
    }
    let mut last = Trial::default();
    // rping leaks the identifiers, and with them the descriptors, of connection requests that it
    // has lost.
    let end = server.check_alive().and_then(|()| match kind {
        Kind::Rping => Ok(()),
        _ => check_released(&server, before),
    });
    match end {
        Ok(()) => {}
        Err(e) => last.fail(format!("{e:#}")),
    }
    last.runs = 1;
    last.resident_kib = server.resident().unwrap_or(0);
    rows.push(last.row(kind, "afterwards", "no leaks".into(), None));
    for row in &mut rows[first..] {
        row.compare_with_baseline(base, before_kib);
        log.line(row.line());
    }
    Ok(())
}

/// Returns the worst latencies of several runs.
fn worst(all: &[Figures]) -> Option<Figures> {
    all.iter().copied().reduce(|a, b| Figures {
        p50: a.p50.max(b.p50),
        p99: a.p99.max(b.p99),
    })
}

/// The results of an attack so far.
#[derive(Default)]
struct Trial {
    seen: BTreeSet<Response>,
    runs: usize,
    resident_kib: u64,
    failure: Option<String>,
}

impl Trial {
    /// Records a failure, unless one is recorded already.
    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    /// Attacks once, and records the response. Returns `false` if the attack could not run.
    fn attack(&mut self, server: &Server<'_>, attack: &Attack, scale: u32) -> bool {
        self.runs += 1;
        match Self::attempt(server, attack, scale) {
            Ok(what) => {
                if !attack.expect.holds(what) {
                    self.fail(format!("unexpected response: {what}"));
                }
                self.seen.insert(what);
            }
            Err(e) => {
                self.fail(format!("{e:#}"));
                return false;
            }
        }
        self.resident_kib = self.resident_kib.max(server.resident().unwrap_or(0));
        true
    }

    fn attempt(server: &Server<'_>, attack: &Attack, scale: u32) -> Result<Response> {
        let perf_port = match server.kind {
            Kind::PerfRdma => Some(PerfPort::open(server.address)?),
            _ => None,
        };
        let address = perf_port
            .as_ref()
            .map_or(server.address, |perf_port| perf_port.address);
        attack.run(&Target {
            address,
            scale,
            release_limit: server.kind.release_limit(),
        })
    }

    /// Records the result of the good client's thread. Returns the latencies unless it failed.
    fn take_client_result(
        &mut self,
        joined: std::thread::Result<Result<Vec<Figures>>>,
    ) -> Option<Figures> {
        match joined {
            Ok(Ok(all)) => worst(&all),
            Ok(Err(e)) => {
                self.fail(format!("{e:#}"));
                None
            }
            Err(_) => {
                self.fail("the good client's thread has panicked".into());
                None
            }
        }
    }

    fn row(self, kind: Kind, attack: &'static str, expected: String, good: Option<Figures>) -> Row {
        let seen: Vec<_> = self.seen.iter().map(ToString::to_string).collect();
        Row {
            server: kind.name(),
            attack,
            expected,
            seen: seen.join(", "),
            runs: self.runs,
            good,
            ratio: None,
            resident_kib: self.resident_kib,
            failure: self.failure,
        }
    }
}

/// Repeats an attack until the good client has finished.
fn run_repeatedly(server: &Server<'_>, attack: &Attack, scale: u32) -> Row {
    let mut trial = Trial::default();
    // rping loses one of two simultaneous connection requests, so no attack may run while the good
    // client connects.
    let (passes, runs) = match server.kind {
        Kind::Rping => (scale, 1),
        _ => (1, scale),
    };
    let good: Vec<_> = (0..passes)
        .map_while(|_| attack_during_client(server, attack, &mut trial, (scale, runs)))
        .collect();
    let good = worst(&good);
    trial.row(server.kind, attack.name, attack.expect.name(), good)
}

/// Attacks while the good client runs `runs` times. Returns its latencies unless it fails.
fn attack_during_client(
    server: &Server<'_>,
    attack: &Attack,
    trial: &mut Trial,
    (scale, runs): (u32, u32),
) -> Option<Figures> {
    let connected = AtomicBool::new(server.kind != Kind::Rping);
    let before = trial.runs;
    let good = std::thread::scope(|scope| {
        let good = scope.spawn(|| -> Result<Vec<Figures>> {
            (0..runs).map(|_| server.measure(&connected)).collect()
        });
        while !connected.load(Ordering::Acquire) && !good.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        while trial.runs == before || !good.is_finished() {
            if !trial.attack(server, attack, scale) {
                break;
            }
        }
        good.join()
    });
    trial.take_client_result(good)
}

/// Runs each attack once, while the good client runs continuously.
fn run_quick(server: &Server<'_>, attacks: &[&Attack], rows: &mut Vec<Row>) {
    let over = AtomicBool::new(false);
    let mut all = Trial::default();
    let good = std::thread::scope(|scope| {
        let good = scope.spawn(|| -> Result<Vec<Figures>> {
            let mut runs = Vec::new();
            while runs.is_empty() || !over.load(Ordering::Acquire) {
                runs.push(server.measure(&AtomicBool::new(true))?);
            }
            Ok(runs)
        });
        for attack in attacks {
            let mut trial = Trial::default();
            trial.attack(server, attack, 1);
            all.runs += 1;
            all.resident_kib = all.resident_kib.max(trial.resident_kib);
            rows.push(trial.row(server.kind, attack.name, attack.expect.name(), None));
            // The server has exited.
            if server.resident().is_err() {
                break;
            }
        }
        over.store(true, Ordering::Release);
        good.join()
    });
    let good = all.take_client_result(good);
    rows.push(all.row(server.kind, "all attacks", "-".into(), good));
}

impl Row {
    /// Compares latencies and memory with the values before the attacks.
    fn compare_with_baseline(&mut self, base: Figures, before_kib: u64) {
        self.ratio = self.good.map(|good| good.p99 / base.p99.max(1.0));
        if self.failure.is_none() && self.resident_kib > before_kib + GROWTH_KIB {
            self.failure = Some(format!(
                "the server's resident memory has grown to {} KiB",
                self.resident_kib
            ));
        }
    }

    fn line(&self) -> String {
        format!(
            "{} | {} | {} | {} | {} runs | {:.1} | {} KiB | {}",
            self.server,
            self.attack,
            self.expected,
            self.seen,
            self.runs,
            self.ratio.unwrap_or_default(),
            self.resident_kib,
            self.failure.as_deref().unwrap_or("passed")
        )
    }
}

/// Fails if the server does not release the attackers' descriptors and threads within
/// [`RELEASE_LIMIT`].
fn check_released(server: &Server<'_>, before: (usize, usize)) -> Result<()> {
    let start = Instant::now();
    loop {
        let now = server.descriptors_and_threads()?;
        if now.0 <= before.0 + TOLERATED_GROWTH && now.1 <= before.1 + TOLERATED_GROWTH {
            return Ok(());
        }
        if start.elapsed() > RELEASE_LIMIT {
            anyhow::bail!(
                "the server has {} descriptors and {} threads; before the attacks it had {} and {}",
                now.0,
                now.1,
                before.0,
                before.1
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
