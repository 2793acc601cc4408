//! `cargo xtask soak`: two processes keep 64 connections busy with all operations, while the
//! network and the processes are disturbed.
//!
//! Both ends run a C program on our libraries (`main.c` and the files beside it). It verifies all
//! data, and that each request has exactly one completion, in order. This program causes one
//! disturbance at a time ([`disturb`]). Connections may be lost only by disturbances that end
//! connections, and all of them must be up again afterwards. Between disturbances, memory,
//! descriptors and threads of both processes are measured ([`growth`]).

mod disturb;
mod end;
mod growth;
mod network;
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
use network::{Network, Side};
use report::Report;

/// Arguments of `cargo xtask soak`.
#[derive(Args)]
pub(crate) struct SoakArgs {
    /// How long the disturbances last
    #[arg(long, value_name = "N", default_value_t = 20)]
    minutes: u64,
    /// Seed of the disturbances and of the ends' operations [default: random]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// The short form for `cargo xtask test`: each kind of disturbance once
    #[arg(long, conflicts_with = "minutes")]
    step: bool,
    /// Set by this program when it restarts itself in new namespaces
    #[arg(long, hide = true)]
    inside: Option<std::path::PathBuf>,
}

/// Time limit for all connections to come back, also on a busy machine.
const RECOVERY: Duration = Duration::from_secs(120);
/// Quiet time between two disturbances.
const QUIET: Duration = Duration::from_millis(1500);
/// Quiet time in the short form.
const SHORT_QUIET: Duration = Duration::from_millis(500);
/// Time after a cut in which connections may still end: 1.5 times the peers' time-out.
const SILENCE: Duration = Duration::from_secs(6);

/// Runs the command.
///
/// Fails if anything was lost, corrupted, completed twice or not at all, or has grown.
pub(crate) fn command(args: &SoakArgs) -> Result<Outcome> {
    if let Some(prefix) = &args.inside {
        return soak(args, prefix).map(|()| Outcome::Passed);
    }
    if let Some(why) = needs::missing_of(&["libibverbs-dev", "librdmacm-dev", "iproute2"]) {
        return Ok(Outcome::Skipped(why));
    }
    if let Some(why) = network::obstacle(geteuid().is_root()) {
        return Ok(Outcome::Skipped(format!("no network namespaces: {why}")));
    }
    let context = Context::new(false, false)?;
    let prefix = context.target.join("soak");
    install::install(&context, &prefix)?;
    network::compile(&context, &prefix)?;
    let seed = args.seed.map_or_else(disturb::fresh_seed, Ok)?;
    let mut again = network::namespaces(geteuid().is_root());
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

struct Soak {
    network: Network,
    ends: [End; 2],
    growth: Growth,
    report: Report,
}

/// Runs inside the namespaces, where this process and its children are alone.
fn soak(args: &SoakArgs, prefix: &std::path::Path) -> Result<()> {
    let seed = args.seed.unwrap_or(1);
    let mut random = Random::new(seed);
    let network = Network::new(prefix)?;
    let mut ends = [Side::Server, Side::Client].map(|side| End::new(side, seed));
    for end in &mut ends {
        end.start(&network)?;
    }
    let mut soak = Soak {
        network,
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
            self.run_undisturbed(quiet)?;
            self.growth.measure(&self.ends)?;
            self.report.begin(kind);
            let may_end = kind.run(&self.network, &mut self.ends, random)?;
            if may_end && kind.is_cut() {
                self.wait_for_timeouts()?;
            }
            self.recover(may_end)?;
            self.report.recovered(kind, &mut self.ends);
        }
        self.run_undisturbed(quiet)?;
        self.growth.measure(&self.ends)?;
        self.finish()?;
        self.growth.verdict()
    }

    /// Waits until all connections are up. Losses are an error unless they are `expected`.
    fn recover(&mut self, expected: bool) -> Result<()> {
        let start = Instant::now();
        loop {
            for end in &mut self.ends {
                end.read_lines()?;
                if !expected {
                    end.check_no_loss()?;
                }
            }
            if self.ends.iter().all(End::has_all_connections) {
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
            end.forget_losses();
        }
        Ok(())
    }

    /// Waits until silent connections have resumed or timed out. After a cut, TCP retransmits only
    /// seconds later, and until then the peer's time-out runs.
    fn wait_for_timeouts(&mut self) -> Result<()> {
        let end = Instant::now() + SILENCE;
        while Instant::now() < end {
            for one in &mut self.ends {
                one.read_lines()?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Lets the ends work undisturbed. No connection may be lost.
    fn run_undisturbed(&mut self, time: Duration) -> Result<()> {
        // Closing and opening connections is part of ordinary work.
        self.ends[1].send_command("churn 3");
        let end = Instant::now() + time;
        while Instant::now() < end {
            for one in &mut self.ends {
                one.read_lines()?;
                one.check_no_loss()?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.recover(false)
    }

    /// Makes both ends close all connections gracefully and free all resources.
    fn finish(&mut self) -> Result<()> {
        self.ends[1].send_command("rest");
        self.ends[1].wait_for_success(RECOVERY)?;
        self.ends[0].send_command("rest");
        self.ends[0].wait_for_success(RECOVERY)
    }
}
