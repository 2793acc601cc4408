//! `cargo xtask soak`: two processes issue operations of all kinds on 64 connections, while this
//! program disturbs the network and the processes.
//!
//! The two processes, server and client, run a C program on our libraries (`main.c` and the other C
//! files of this directory). It verifies all data, and that each request has exactly one
//! completion, in order. This program causes one disturbance at a time ([`disturb`]). Only some
//! kinds of disturbance may end connections, and after each disturbance all connections must come
//! up again. Between disturbances, it samples memory, descriptors and threads of both processes
//! ([`growth`]).

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
    /// Duration of the run, in minutes
    #[arg(long, value_name = "N", default_value_t = 20)]
    minutes: u64,
    /// Seed of the disturbances and of the operations [default: random]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Short run for `cargo xtask test`: each kind of disturbance once
    #[arg(long, conflicts_with = "minutes")]
    step: bool,
    /// Set by this program when it restarts itself in new namespaces
    #[arg(long, hide = true)]
    inside: Option<std::path::PathBuf>,
}

/// Time limit for all connections to come back, also on a busy machine.
const RECOVERY: Duration = Duration::from_secs(120);
/// Undisturbed time between two disturbances.
const UNDISTURBED: Duration = Duration::from_millis(1500);
/// Undisturbed time between two disturbances with `--step`.
const SHORT_UNDISTURBED: Duration = Duration::from_millis(500);
/// How long after a cut connections may still time out: 1.5 times the peers' time-out.
const TIMEOUT_WAIT: Duration = Duration::from_secs(6);

/// Runs the command.
///
/// Fails if a connection was lost without cause, data was corrupted, a request completed twice or
/// never, or the resource usage of a process has grown.
pub(crate) fn command(args: &SoakArgs) -> Result<Outcome> {
    if let Some(prefix) = &args.inside {
        return soak(args, prefix).map(|()| Outcome::Passed);
    }
    if let Some(why) = needs::missing_packages_of(&["libibverbs-dev", "librdmacm-dev", "iproute2"])
    {
        return Ok(Outcome::Skipped(why));
    }
    if let Some(why) = network::namespaces_unavailable(geteuid().is_root()) {
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
        bail!("the soak test with seed {seed} failed");
    }
    Ok(Outcome::Passed)
}

struct Soak {
    network: Network,
    ends: [End; 2],
    growth: Growth,
    report: Report,
}

/// Runs the test. The process is in new network and PID namespaces.
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
        let undisturbed = if args.step {
            SHORT_UNDISTURBED
        } else {
            UNDISTURBED
        };
        let deadline = Instant::now() + Duration::from_secs(args.minutes * 60);
        let mut all = Kind::ALL.iter().copied();
        loop {
            let next = if args.step {
                all.next()
            } else {
                (Instant::now() < deadline).then(|| random.kind())
            };
            let Some(kind) = next else { break };
            self.run_undisturbed(undisturbed)?;
            self.growth.measure(&self.ends)?;
            self.report.begin(kind);
            let may_end = kind.run(&self.network, &mut self.ends, random)?;
            if may_end && kind.is_cut() {
                self.wait_for_timeouts()?;
            }
            self.recover(may_end)?;
            self.report.recovered(kind, &mut self.ends);
        }
        self.run_undisturbed(undisturbed)?;
        self.growth.measure(&self.ends)?;
        self.finish()?;
        self.growth.check()
    }

    /// Waits until all connections are up.
    ///
    /// Fails if one was lost, unless losses are `expected`.
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

    /// Waits until each connection has either resumed or timed out after a cut. TCP may retransmit
    /// only seconds after the cut, and the peer time-out may expire before that.
    fn wait_for_timeouts(&mut self) -> Result<()> {
        let end = Instant::now() + TIMEOUT_WAIT;
        while Instant::now() < end {
            for one in &mut self.ends {
                one.read_lines()?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Lets both processes work undisturbed for a while.
    ///
    /// Fails if a connection is lost.
    fn run_undisturbed(&mut self, time: Duration) -> Result<()> {
        // A few connections are closed and opened again, as in ordinary work.
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
