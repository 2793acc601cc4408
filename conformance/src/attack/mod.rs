//! `cargo xtask interop hostile`: a hostile peer attacks servers while they serve a good client.
//!
//! Each attack of [`list`] runs against each suitable server of [`server`], while a good client
//! uses the server. The suite fails if the server's response is not the one that the RFCs require,
//! or if the good client fails or gets wrong data. It also fails if the server exits, lets a peer
//! change memory that it has not granted, or leaks memory, descriptors or threads. Latencies are
//! only reported, because the machine may be busy.
//!
//! With `--device`, the only server is the one in C, on an RDMA device of this machine. `cargo
//! xtask kernel test --only "hostile suite"` attacks the kernel module in this way.

mod acts;
mod kind;
mod list;
mod mixed;
mod peer;
mod perf_port;
mod run;
mod server;
mod starting;
mod wire;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::Args;

use kind::{Attack, Needs};
use run::Row;
use server::{Kind, Programs};
use xtask::context::Context;
use xtask::install;
use xtask::outcome::Outcome;
use xtask::process::Log;

use crate::case::is_chosen;
use crate::needs;
use crate::tempdir::tempdir;

/// Arguments of `cargo xtask interop hostile`.
#[derive(Args)]
pub(crate) struct HostileArgs {
    /// Run only the attacks, or all attacks on the servers, whose names contain one of these
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    only: Vec<String>,
    /// Run each attack for longer, and with more connections, messages and guesses
    #[arg(long)]
    long: bool,
    /// Run each attack once, while the good client runs continuously; do not attack rping
    #[arg(long, conflicts_with = "long")]
    quick: bool,
    /// List the attacks
    #[arg(long)]
    list: bool,
    /// Use this installation (of `cargo xtask install`) instead of building one
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// Attack only the server in C, on the RDMA device of this machine (an RNIC, siw, or the kernel
    /// module) that has this address
    #[arg(long, value_name = "ADDRESS", conflicts_with = "prefix")]
    device: Option<Ipv4Addr>,
    /// With --device: use this program instead of compiling granting.c
    #[arg(long, value_name = "FILE", requires = "device")]
    granting: Option<PathBuf>,
}

impl HostileArgs {
    /// Returns the selected attacks on a server. Without `--long`, the server that requests markers
    /// gets only the attacks on markers.
    fn selected_attacks(&self, kind: Kind) -> Vec<&'static Attack> {
        let is_selected = |attack: &&Attack| {
            let by_name = [attack.name, kind.name()]
                .iter()
                .any(|name| is_chosen(name, &self.only));
            let suits_markers = kind != Kind::CServerMarkers || attack.needs == Needs::Markers;
            kind.has(attack.needs) && (suits_markers || self.long) && by_name
        };
        // rping loses one of two simultaneous connection requests, and here the good client
        // connects continuously.
        let server_suits = !self.quick || kind != Kind::Rping;
        // perf serves one client at a time, so each attack has to wait for the good client.
        let is_quick = |attack: &&Attack| {
            !self.quick || kind != Kind::PerfRdma || attack.needs == Needs::Region
        };
        list::all()
            .filter(|attack| server_suits && is_quick(attack) && is_selected(attack))
            .collect()
    }

    const fn form(&self) -> run::Form {
        match (self.quick, self.long) {
            (true, _) => run::Form::Quick,
            (_, true) => run::Form::Long,
            _ => run::Form::Each,
        }
    }
}

/// Time limit of the whole run. It is long, and only stops a run that hangs.
const LIMIT: Duration = Duration::from_secs(3600);

/// Runs the selected attacks.
pub(crate) fn command(args: &HostileArgs) -> Result<Outcome> {
    if args.list {
        list::all().for_each(|attack| println!("{}", attack.name));
        return Ok(Outcome::Passed);
    }
    let dir = tempdir()?;
    match args.device {
        Some(address) => attack_device(args, address, &dir.path),
        None => attack_software_rnic(args, &dir.path),
    }
}

/// Attacks the servers on the software RNIC.
fn attack_software_rnic(args: &HostileArgs, dir: &Path) -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("interop-hostile.log"), LIMIT)?;
    let prefix = match &args.prefix {
        Some(prefix) => std::path::absolute(prefix)?,
        None => {
            let prefix = dir.join("prefix");
            install::install(&context, &prefix)?;
            prefix
        }
    };
    let granting = dir.join("granting");
    let compiled = server::compile(&context.root.join(SOURCE), &granting);
    let programs = Programs {
        address: Ipv4Addr::LOCALHOST,
        iwarp: prefix.join("bin/iwarp"),
        granting: compiled.is_ok().then_some(granting),
        dir: dir.to_owned(),
    };
    let mut rows = Vec::new();
    let mut skipped = Vec::new();
    for kind in Kind::ALL {
        match missing(kind, &compiled) {
            Some(why) => skipped.push(format!("skipped: {}: {why}", kind.name())),
            None => {
                let selected_attacks = args.selected_attacks(kind);
                run::attack_server(
                    &programs,
                    kind,
                    &selected_attacks,
                    args.form(),
                    &mut rows,
                    &mut log,
                )?;
            }
        }
    }
    if rows.is_empty() && skipped.is_empty() {
        bail!("{NOTHING_SELECTED}");
    }
    skipped.iter().for_each(|line| log.say(line));
    if rows.is_empty() {
        return Ok(Outcome::Skipped(
            "none of the servers can be built here".into(),
        ));
    }
    report(&rows, &mut log)
}

/// Attacks the server in C on a device of this machine. With `--granting`, needs neither our
/// programs nor the source tree.
fn attack_device(args: &HostileArgs, address: Ipv4Addr, dir: &Path) -> Result<Outcome> {
    let mut log = Log::create(&dir.join("hostile.log"), LIMIT)?;
    let granting = match &args.granting {
        Some(program) => std::path::absolute(program)?,
        None => {
            let program = dir.join("granting");
            let source = Context::new(false, false)?.root.join(SOURCE);
            server::compile(&source, &program).map_err(|why| anyhow!(why))?;
            program
        }
    };
    let programs = Programs {
        address,
        iwarp: PathBuf::new(),
        granting: Some(granting),
        dir: dir.to_owned(),
    };
    let mut rows = Vec::new();
    let (kind, form) = (Kind::CServerDevice, args.form());
    run::attack_server(
        &programs,
        kind,
        &args.selected_attacks(kind),
        form,
        &mut rows,
        &mut log,
    )?;
    if rows.is_empty() {
        bail!("{NOTHING_SELECTED}");
    }
    report(&rows, &mut log)
}

const NOTHING_SELECTED: &str = "--only matches no attack and no server; --list shows the attacks";
const SOURCE: &str = "conformance/src/attack/granting.c";

fn report(rows: &[Row], log: &mut Log) -> Result<Outcome> {
    print_table(rows, log);
    let failed = rows.iter().filter(|row| row.failure.is_some()).count();
    if failed > 0 {
        bail!("{failed} of {} attacks failed", rows.len());
    }
    Ok(Outcome::Passed)
}

/// Returns why a server cannot run on this machine.
fn missing(kind: Kind, compiled: &Result<(), String>) -> Option<String> {
    match kind {
        Kind::CServer | Kind::CServerMarkers => compiled.as_ref().err().cloned(),
        Kind::Rping => needs::missing_packages_of(&["rdmacm-utils"]),
        _ => None,
    }
}

fn print_table(rows: &[Row], log: &mut Log) {
    log.say(format!(
        "\n{:18} {:46} {:17} {:24} {:>5} {:>9} {:>6} {:>8}",
        "server", "attack", "expected", "response", "runs", "good p99", "ratio", "RSS KiB"
    ));
    for row in rows {
        let p99 = row
            .good
            .map_or("-".into(), |good| format!("{:.0} µs", good.p99));
        let ratio = row.ratio.map_or("-".into(), |ratio| format!("{ratio:.1}"));
        log.say(format!(
            "{:18} {:46} {:17} {:24} {:>5} {p99:>9} {ratio:>6} {:>8}",
            row.server, row.attack, row.expected, row.seen, row.runs, row.resident_kib
        ));
        if let Some(failure) = &row.failure {
            log.say(format!("FAILED: {failure}"));
        }
    }
    let measured = rows.iter().filter_map(|row| row.ratio);
    let within = measured.clone().filter(|ratio| *ratio <= 3.0).count();
    log.say(format!(
        "\nthe good client's p99 was at most 3 times its p99 without attacks \
         in {within} of {} measured rows",
        measured.count()
    ));
}
