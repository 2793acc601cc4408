//! `cargo xtask soak`: two processes keep 64 connections busy with every operation, while the
//! network and the processes are disturbed.
//!
//! The ends are a C program on our libraries (`main.c` and its neighbours). It verifies the content
//! of all that completes, and that each request has exactly one completion, in order. This side
//! disturbs, one kind at a time ([`disturb`]), and holds both ends to what they may lose: a
//! connection is lost only by a disturbance that ends connections, and after each disturbance all
//! of them are there again. Memory, descriptors and threads of both processes are measured in each
//! quiet time ([`growth`]).

mod disturb;
mod end;
mod growth;
mod place;
mod report;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use rustix::process::geteuid;
use xtask::context::Context;
use xtask::install;
use xtask::outcome::Outcome;

use crate::needs;

use disturb::{Kind, Random};
use end::End;
use growth::Growth;
use place::{Place, Side};
use report::Report;

/// Arguments of `cargo xtask soak`.
#[derive(Args)]
pub(crate) struct SoakArgs {
    /// How long disturbances go on
    #[arg(long, value_name = "N", default_value_t = 20)]
    minutes: u64,
    /// Decides which disturbances come when, and what the ends do [default: a random one]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// The short form for `cargo xtask test`: each kind of disturbance once
    #[arg(long, conflicts_with = "minutes")]
    step: bool,
    /// Set by this program when it has started itself again in namespaces of its own
    #[arg(long, hide = true)]
    inside: Option<std::path::PathBuf>,
}

/// How long all connections may take to come back. A busy machine needs some time for 64 of them,
/// and nothing measures time here.
const RECOVERY: Duration = Duration::from_secs(120);
/// Quiet time between two disturbances.
const QUIET: Duration = Duration::from_millis(1500);
/// The same in the short form.
const SHORT_QUIET: Duration = Duration::from_millis(500);
/// So long after a cut connections may still end: one and a half of the peers' time-out.
const SILENCE: Duration = Duration::from_secs(6);

/// Runs the command.
///
/// Fails if something was lost, corrupted, completed twice or not at all, or has grown, or when it
/// cannot be run.
pub(crate) fn command(args: &SoakArgs) -> Result<Outcome> {
    if let Some(prefix) = &args.inside {
        return soak(args, prefix).map(|()| Outcome::Passed);
    }
    if let Some(why) = needs::missing_of(&["libibverbs-dev", "librdmacm-dev", "iproute2"]) {
        return Ok(Outcome::Skipped(why));
    }
    if let Some(why) = place::obstacle(geteuid().is_root()) {
        return Ok(Outcome::Skipped(format!("no network namespaces: {why}")));
    }
    let context = Context::new(false, false)?;
    let prefix = context.target.join("soak");
    install::install(&context, &prefix)?;
    place::compile(&context, &prefix)?;
    let seed = args.seed.map_or_else(disturb::fresh_seed, Ok)?;
    let mut again = place::namespaces(geteuid().is_root());
    again.arg(std::env::current_exe()?).arg("soak");
    if args.step {
        again.arg("--step");
    } else {
        again.args(["--minutes", &args.minutes.to_string()]);
    }
    let status = again
        .args(["--seed", &seed.to_string(), "--inside"])
        .arg(&prefix)
        .status()?;
    if !status.success() {
        bail!("the soak of seed {seed} failed");
    }
    Ok(Outcome::Passed)
}

/// The two ends and what is known of them.
struct Soak {
    place: Place,
    ends: [End; 2],
    growth: Growth,
    report: Report,
}

/// Runs inside the namespaces, where this process and its children are alone.
fn soak(args: &SoakArgs, prefix: &std::path::Path) -> Result<()> {
    let seed = args.seed.unwrap_or(1);
    let mut random = Random::new(seed);
    let place = Place::new(prefix)?;
    let mut ends = [Side::Server, Side::Client].map(|side| End::new(side, seed));
    for end in &mut ends {
        end.start(&place)?;
    }
    let mut soak = Soak {
        place,
        ends,
        growth: Growth::default(),
        report: Report::new(seed),
    };
    let result = soak.run(args, &mut random);
    soak.report.print(&soak.ends, &soak.growth);
    result
}

impl Soak {
    fn run(&mut self, args: &SoakArgs, random: &mut Random) -> Result<()> {
        self.recover(true)?;
        let quiet = if args.step { SHORT_QUIET } else { QUIET };
        let end = Instant::now() + Duration::from_secs(args.minutes * 60);
        let mut all = Kind::ALL.iter().copied();
        loop {
            let next = if args.step {
                all.next()
            } else {
                (Instant::now() < end).then(|| random.kind())
            };
            let Some(kind) = next else { break };
            self.rest_for(quiet)?;
            self.growth.measure(&self.ends)?;
            self.report.begin(kind);
            let may_end = kind.happen(&self.place, &mut self.ends, random)?;
            if may_end && kind.is_cut() {
                self.let_silence_end()?;
            }
            self.recover(may_end)?;
            self.report.end(kind, &mut self.ends);
        }
        self.rest_for(quiet)?;
        self.growth.measure(&self.ends)?;
        self.finish()?;
        self.growth.verdict()
    }

    /// Waits until all connections are there. Losses are an error unless they are `expected`.
    fn recover(&mut self, expected: bool) -> Result<()> {
        let start = Instant::now();
        loop {
            for end in &mut self.ends {
                end.listen()?;
                if !expected {
                    end.lost_nothing()?;
                }
            }
            if self.ends.iter().all(End::is_whole) {
                break;
            }
            if start.elapsed() > RECOVERY {
                bail!(
                    "connections did not come back: server {}; client {}",
                    self.ends[0].last_line(),
                    self.ends[1].last_line()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        for end in &mut self.ends {
            end.forgive();
        }
        Ok(())
    }

    /// Waits until the ends have judged all connections that were silent. When a cut is over, TCP
    /// repeats what was lost only seconds later, and until then the time runs after which a silent
    /// peer is taken for gone.
    fn let_silence_end(&mut self) -> Result<()> {
        let end = Instant::now() + SILENCE;
        while Instant::now() < end {
            for one in &mut self.ends {
                one.listen()?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Lets the ends work undisturbed. Nothing may be lost.
    fn rest_for(&mut self, time: Duration) -> Result<()> {
        // Closing and opening connections belongs to ordinary work.
        self.ends[1].say("churn 3");
        let end = Instant::now() + time;
        while Instant::now() < end {
            for one in &mut self.ends {
                one.listen()?;
                one.lost_nothing()?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.recover(false)
    }

    /// All connections are closed in order, and both ends free what they have.
    fn finish(&mut self) -> Result<()> {
        self.ends[1].say("rest");
        self.ends[1].ends_well(RECOVERY)?;
        self.ends[0].say("rest");
        self.ends[0].ends_well(RECOVERY)
    }
}
