//! One server under all attacks: what it answers, how its good client does meanwhile, and what is
//! left afterwards.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use xtask::process::Log;

use super::acts::Target;
use super::door::Door;
use super::kind::Attack;
use super::peer::Seen;
use super::server::{Figures, Kind, Place, Server};

/// How much the long form repeats.
const LONG: u32 = 10;
/// Resident memory that a server may have more at any time than before the attacks, in KiB.
const GROWTH_KIB: u64 = 128 * 1024;
/// How long a server may keep what attackers have left: longer than all limits of a connection that
/// ends.
const SETTLE: Duration = Duration::from_secs(20);
/// Descriptors and threads that it may have more then than after the good client's first run.
const SPARE: usize = 8;
/// Runs of the good client without an attack.
const UNDISTURBED: usize = 5;

/// How thorough a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Each attack once, and the good client all the time.
    Quick,
    /// Each attack again and again during one run of the good client.
    Each,
    /// The same with more of all.
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

/// What became of one attack on one server.
pub(super) struct Row {
    pub(super) server: &'static str,
    pub(super) attack: &'static str,
    pub(super) expected: String,
    pub(super) seen: String,
    pub(super) runs: usize,
    /// The good client's largest figures.
    pub(super) good: Option<Figures>,
    /// Its 99th percentile, compared with the undisturbed one.
    pub(super) ratio: Option<f64>,
    pub(super) resident_kib: u64,
    pub(super) failure: Option<String>,
}

/// Attacks one server.
pub(super) fn against(
    place: &Place,
    kind: Kind,
    attacks: &[&Attack],
    form: Form,
    rows: &mut Vec<Row>,
    log: &mut Log,
) -> Result<()> {
    if attacks.is_empty() {
        return Ok(());
    }
    let mut server = Server::start(place, kind)?;
    let runs = UNDISTURBED * form.scale() as usize;
    let undisturbed: Result<Vec<_>> = (0..runs)
        .map(|_| server.measure(&AtomicBool::new(true)))
        .collect();
    let base = worst(&undisturbed?).context("no run")?;
    let (before_kib, before) = (server.resident()?, server.holds()?);
    log.say(format!(
        "{}: undisturbed p50 {:.0} µs, p99 {:.0} µs; {} KiB resident",
        kind.name(),
        base.p50,
        base.p99,
        before_kib
    ));
    let first = rows.len();
    match form {
        Form::Quick => together(&server, attacks, rows),
        Form::Each | Form::Long => {
            for attack in attacks {
                rows.push(one(&server, attack, form.scale()));
                if server.alive().is_err() {
                    break;
                }
            }
        }
    }
    let mut last = Trial::default();
    // rping never destroys the identifiers of requests that it has forgotten, and with them their
    // descriptors.
    let end = server.alive().and_then(|()| match kind {
        Kind::Rping => Ok(()),
        _ => leftovers(&server, before),
    });
    match end {
        Ok(()) => {}
        Err(e) => last.fail(format!("{e:#}")),
    }
    last.runs = 1;
    last.resident_kib = server.resident().unwrap_or(0);
    rows.push(last.row(kind, "afterwards", "nothing is left".into(), None));
    for row in &mut rows[first..] {
        row.judge(base, before_kib);
        log.line(row.line());
    }
    Ok(())
}

/// Returns the largest figures of several runs.
fn worst(all: &[Figures]) -> Option<Figures> {
    all.iter().copied().reduce(|a, b| Figures {
        p50: a.p50.max(b.p50),
        p99: a.p99.max(b.p99),
    })
}

/// What is known of an attack while it runs.
#[derive(Default)]
struct Trial {
    seen: BTreeSet<Seen>,
    runs: usize,
    resident_kib: u64,
    failure: Option<String>,
}

impl Trial {
    /// Keeps the first reason.
    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    /// Attacks once. Returns `false` if that was not possible.
    fn attack(&mut self, server: &Server<'_>, attack: &Attack, scale: u32) -> bool {
        self.runs += 1;
        match Self::attempt(server, attack, scale) {
            Ok(what) => {
                if !attack.expect.holds(what) {
                    self.fail(format!("the answer is: {what}"));
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

    fn attempt(server: &Server<'_>, attack: &Attack, scale: u32) -> Result<Seen> {
        let door = match server.kind {
            Kind::Measured => Some(Door::open(server.address)?),
            _ => None,
        };
        let address = door.as_ref().map_or(server.address, |door| door.address);
        attack.run(&Target {
            address,
            scale,
            leaving: server.kind.leaving(),
        })
    }

    /// Takes what the good client's thread has brought.
    fn good(&mut self, joined: std::thread::Result<Result<Vec<Figures>>>) -> Option<Figures> {
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

/// Runs one attack again and again until the good client has done its work.
fn one(server: &Server<'_>, attack: &Attack, scale: u32) -> Row {
    let mut trial = Trial::default();
    // rping serves one of two requests that come at the same moment, and forgets the other. So no
    // attack may run when its good client connects.
    let (passes, runs) = match server.kind {
        Kind::Rping => (scale, 1),
        _ => (1, scale),
    };
    let good: Vec<_> = (0..passes)
        .map_while(|_| pass(server, attack, &mut trial, (scale, runs)))
        .collect();
    let good = worst(&good);
    trial.row(server.kind, attack.name, attack.expect.name(), good)
}

/// Attacks while the good client works so many times. Returns its figures, unless something fails.
fn pass(
    server: &Server<'_>,
    attack: &Attack,
    trial: &mut Trial,
    (scale, runs): (u32, u32),
) -> Option<Figures> {
    let begun = AtomicBool::new(server.kind != Kind::Rping);
    let before = trial.runs;
    let good = std::thread::scope(|scope| {
        let good = scope.spawn(|| -> Result<Vec<Figures>> {
            (0..runs).map(|_| server.measure(&begun)).collect()
        });
        while !begun.load(Ordering::Acquire) && !good.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        while trial.runs == before || !good.is_finished() {
            if !trial.attack(server, attack, scale) {
                break;
            }
        }
        good.join()
    });
    trial.good(good)
}

/// Runs each attack once, while the good client works again and again.
fn together(server: &Server<'_>, attacks: &[&Attack], rows: &mut Vec<Row>) {
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
            // A server that has ended answers nothing.
            if server.resident().is_err() {
                break;
            }
        }
        over.store(true, Ordering::Release);
        good.join()
    });
    let good = all.good(good);
    rows.push(all.row(server.kind, "all of them", "-".into(), good));
}

impl Row {
    /// Compares the good client's figures with the undisturbed ones, and the memory with what it
    /// was.
    fn judge(&mut self, base: Figures, before_kib: u64) {
        self.ratio = self.good.map(|good| good.p99 / base.p99.max(1.0));
        if self.failure.is_none() && self.resident_kib > before_kib + GROWTH_KIB {
            self.failure = Some(format!("the server has grown to {} KiB", self.resident_kib));
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

/// Fails if the server still has something of the attackers although all limits of time are over.
fn leftovers(server: &Server<'_>, before: (usize, usize)) -> Result<()> {
    let start = Instant::now();
    loop {
        let now = server.holds()?;
        if now.0 <= before.0 + SPARE && now.1 <= before.1 + SPARE {
            return Ok(());
        }
        if start.elapsed() > SETTLE {
            anyhow::bail!(
                "{} descriptors and {} threads instead of {} and {}",
                now.0,
                now.1,
                before.0,
                before.1
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
