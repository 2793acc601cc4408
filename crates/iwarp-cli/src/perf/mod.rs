//! `iwarp perf`: latency, bandwidth and message rate, beside plain TCP in the same run.

mod args;
mod control;
mod host;
mod local;
mod pin;
mod plan;
mod point;
mod rdma;
mod report;
mod run;
mod serve;
mod tcp;
mod under_load;

pub(crate) use args::PerfArgs;

use args::{ConnectArgs, MeasureArgs, PerfCommand};
use control::{Control, DEFAULT_PORT};
use host::HostInfo;
use iwarp_cli_common::error::{Context as _, Result};
use iwarp_cli_common::{out, retry};
use iwarp_figures::load::{self, Watch, Watched};
use plan::Plan;
use point::{Transport, Wire};
use report::{OtherLoad, Report};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

/// Rounds of the measurements beside a computing program.
const UNDER_LOAD_ROUNDS: u32 = 3;

/// Runs `iwarp perf`.
pub(crate) fn run(args: PerfArgs) -> Result<()> {
    match args.command {
        None => run_local(&args.measure),
        Some(PerfCommand::Serve(s)) => serve::run(&s),
        Some(PerfCommand::Connect(c)) => run_remote(&c),
    }
}

fn transport(wire: Wire) -> &'static dyn Transport {
    match wire {
        Wire::Tcp => &tcp::Tcp,
        Wire::Rdma => &rdma::Rdma,
    }
}

fn run_local(m: &MeasureArgs) -> Result<()> {
    let plan = Plan::new(m)?;
    let outputs = Outputs::open(m)?;
    // Collect the facts before binding to one CPU, or they would report a single CPU.
    let host = HostInfo::collect();
    let cpus = if m.no_pin { None } else { load::two_cpus() };
    // Start the peer first: it must not inherit this end's CPU.
    let peer = local::Peer::spawn(cpus.map(|c| c.1))?;
    if let Some((cpu, _)) = cpus {
        pin::pin_to(cpu);
    }
    let (control, _) = Control::connect(peer.addr)?;
    let mut runner = run::Runner::begin(&plan, control)?;
    let watch = LoadWatch::start(cpus, Some(peer.id()));
    let samples = runner.run(&plan, false)?;
    let others = watch.others();
    let run_cpus = cpus.map_or_else(load::allowed_cpus, |(a, b)| vec![a, b]);
    let under_load = under_load::measure(&mut runner, &plan, &run_cpus, UNDER_LOAD_ROUNDS)?;
    drop((runner, peer));
    outputs.write(&Report::new(&plan, &samples, host, None, others).with_under_load(under_load))
}

fn run_remote(c: &ConnectArgs) -> Result<()> {
    let plan = Plan::new(&c.measure)?;
    let outputs = Outputs::open(&c.measure)?;
    let addresses = control::resolve(&c.addr, DEFAULT_PORT)?;
    let (mut runner, peer) = retry::retry_while_busy(|| {
        retry::try_addresses(&addresses, |address| {
            let (control, peer) = Control::connect(address)?;
            Ok((run::Runner::begin(&plan, control)?, peer))
        })
    })?;
    let watch = LoadWatch::start(None, None);
    let samples = runner.run(&plan, false)?;
    let host = HostInfo::collect();
    outputs.write(&Report::new(&plan, &samples, host, peer, watch.others()))
}

/// Measures the load by other programs during a run.
#[derive(Debug)]
struct LoadWatch {
    watch: Watch,
    cpus: usize,
}

impl LoadWatch {
    /// Starts measuring on the `pinned` CPUs, or on all CPUs that this process may use. `peer` is
    /// the peer process of a local run, which is not counted.
    fn start(pinned: Option<(usize, usize)>, peer: Option<u32>) -> Self {
        let cpus = pinned.map_or_else(load::allowed_cpus, |(a, b)| vec![a, b]);
        Self {
            cpus: cpus.len(),
            watch: Watch::start(Watched {
                cpus,
                own: peer.into_iter().collect(),
                interrupts: false,
            }),
        }
    }

    /// Returns the load so far.
    fn others(&self) -> OtherLoad {
        OtherLoad {
            cpus_used: self.watch.others(),
            cpus: self.cpus,
        }
    }
}

/// Output files. They are opened before the run, so that a bad path fails early.
#[derive(Debug)]
struct Outputs {
    /// `Some(None)` is standard output.
    json: Option<Option<File>>,
    plot: Option<File>,
}

impl Outputs {
    fn open(m: &MeasureArgs) -> Result<Self> {
        let create =
            |p: &Path| File::create(p).context(format_args!("cannot write {}", p.display()));
        let json = match &m.json {
            None => None,
            Some(p) if p.as_os_str() == "-" => Some(None),
            Some(p) => Some(Some(create(p)?)),
        };
        Ok(Self {
            json,
            plot: m.plot.as_deref().map(create).transpose()?,
        })
    }

    fn write(self, report: &Report) -> Result<()> {
        if let Some(mut f) = self.plot {
            f.write_all(report.svg()?.as_bytes())
                .context("cannot write the plot")?;
        }
        match self.json {
            Some(None) => return out::text(&report.json()).map(drop),
            Some(Some(mut f)) => f
                .write_all(report.json().as_bytes())
                .context("cannot write the JSON file")?,
            None => {}
        }
        out::text(&report.table()).map(drop)
    }
}
