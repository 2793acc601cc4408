//! `cargo xtask interop siw`: tests our library against the Linux kernel's software iWARP, siw.
//!
//! Boots Debian's kernel with siw in a virtual machine (the guest). Then runs the cases of
//! [`cases`]: one end uses our library on this machine, the other siw in the guest.
//! `docs/interop.md` describes where siw differs from the RFCs.

mod cases;
mod figures;
mod iser;
mod lab;
mod operations;
mod programs;
mod wire;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use xtask::context::Context;
use xtask::process::Log;

use crate::case::{Case, is_chosen};
use crate::guest::host::Host;
use crate::guest::image::{self, Image};
use crate::guest::{Clock, Guest, Machine};
use crate::needs::{self, Capabilities, Need};
use crate::rows::Rows;
use crate::{complaints, excuses};
use lab::Lab;

/// Arguments of `cargo xtask interop siw`.
#[derive(Args)]
pub(crate) struct SiwArgs {
    /// Keep the guest running after the cases, until Enter is pressed
    #[arg(long)]
    keep: bool,
    /// Run only the cases whose names contain one of these
    #[arg(long, value_name = "CASE", num_args = 1..)]
    only: Vec<String>,
    /// Run every case N times
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: u32,
    /// Use only QEMU's user-mode network (the TAP device needs root)
    #[arg(long)]
    no_tap: bool,
    /// Capture the packets of each case
    #[arg(long)]
    capture: bool,
    /// Afterwards, measure our library with siw, and siw with itself
    #[arg(long)]
    figures: bool,
    /// List the cases
    #[arg(long)]
    list: bool,
    /// Run a command in the guest instead of the cases
    #[arg(long, value_name = "COMMAND", conflicts_with = "only")]
    exec: Option<String>,
}

/// Time limit of the whole run. It is long, and only stops a run that hangs.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Runs the cases.
pub(crate) fn command(args: &SiwArgs) -> Result<()> {
    let mut selected: Vec<Case<Lab>> = (0..args.repeat)
        .flat_map(|_| cases::all())
        .filter(|case| !(args.no_tap && case.needs.contains(&Need::Tap)))
        .filter(|case| is_chosen(&case.name, &args.only))
        .collect();
    if args.list {
        for case in &selected {
            println!("{}", case.name);
        }
        return Ok(());
    }
    if selected.is_empty() {
        bail!("--only matches no case; --list shows the cases");
    }
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("interop-siw.log"), LIMIT)?;
    let cache = context.target.join("interop");
    std::fs::create_dir_all(&cache)?;
    // The kernel build needs absolute paths.
    let cache = cache.canonicalize()?;

    needs::require_packages(needs::Suite::Siw, &mut log)?;
    let host = Host::build(&context, &cache, &mut log)?;
    let start = Instant::now();
    let image = image::build(&context, &cache, &mut log)?;
    log.say(format!(
        "built the guest in {:.0} s",
        start.elapsed().as_secs_f64()
    ));

    let root = rustix::process::geteuid().is_root();
    let tap = root && !args.no_tap;
    if !root {
        log.say("not root: skipping the cases over the TAP device");
    }
    let guest = boot(&image, &cache, tap, args.capture, &mut log)?;
    if let Some(command) = &args.exec {
        let out = guest.run(command, 300)?;
        println!("{}", out.text);
        if out.code != 0 {
            bail!("the command exited with status {}", out.code);
        }
        return Ok(());
    }
    let lab = Lab::new(guest, host, cache.join("captures"), args.capture)?;
    let capabilities = Capabilities {
        namespaces: root,
        tap,
    };
    selected.retain(|case| needs::missing(&case.needs, capabilities).is_none());
    let load = |parameters: &str| lab.guest.load_siw(parameters);
    let failed = run(&lab, selected, load, &mut log)?;
    if args.figures && tap {
        log.say("measuring");
        lab.guest.load_siw("")?;
        println!("\n{}", figures::table(&lab)?);
    }
    if args.keep {
        println!("the guest runs until Enter is pressed");
        let _ = std::io::stdin().read_line(&mut String::new());
    }
    if failed > 0 {
        bail!("{failed} cases failed");
    }
    Ok(())
}

fn boot(image: &Image, cache: &Path, tap: bool, record: bool, log: &mut Log) -> Result<Guest> {
    let start = Instant::now();
    let machine = Machine {
        clock: Clock::Wall,
        tap,
        cable: None,
        disk: None,
        record,
        cpu: "max",
        arguments: "mitigations=off".to_owned(),
    };
    let guest = Guest::start(image, cache, &machine, log)?;
    log.say(format!(
        "booted Linux {} in {:.0} s",
        image.release,
        start.elapsed().as_secs_f64()
    ));
    Ok(guest)
}

/// Returns the known fault that made the case fail.
fn excuse(case: &Case<Lab>, kernel: &str, error: &str) -> Option<&'static str> {
    // If a CRC is split across two segments, siw copies both parts to the same address. We align
    // FPDUs with segments, but QEMU's user-mode network re-segments the stream.
    if !case.needs.contains(&Need::Tap) && kernel.contains("siw: crc error") {
        return Some("siw cannot read a CRC that is split across segments");
    }
    excuses::known_fault(error)
}

/// Runs the iSER cases between our library and the RDMA device of the guest, which need not be
/// siw's. Returns the guest and the number of failures.
pub(crate) fn iser(
    guest: Guest,
    host: Host,
    cache: &Path,
    selects: impl Fn(&str) -> bool,
    log: &mut Log,
) -> Result<(Guest, usize)> {
    let lab = Lab::new(guest, host, cache.join("captures"), false)?;
    let mut selected = iser::cases();
    selected.retain(|case| selects(&case.name));
    for case in &mut selected {
        case.name = case.name.replace("siw", "module");
    }
    let failed = run(&lab, selected, |_| Ok(()), log)?;
    Ok((lab.guest, failed))
}

/// Runs the cases, and prints the table. `load` reloads the driver with the given parameters.
/// Returns the number of failures.
fn run(
    lab: &Lab,
    cases: Vec<Case<Lab>>,
    load: impl Fn(&str) -> Result<()>,
    log: &mut Log,
) -> Result<usize> {
    let mut rows = Rows::default();
    // Discard the kernel messages of the boot.
    lab.guest.kernel_messages();
    let mut driver: Option<&'static str> = None;
    for case in cases {
        let parameters = cases::driver(&case);
        if driver != Some(parameters) {
            load(parameters)?;
            driver = Some(parameters);
        }
        let output = rows.run(
            case.name.clone(),
            log,
            |_| Ok(((case.run)(lab), lab.guest.kernel_messages())),
            |output, error| excuse(&case, output, error),
            complaints::fatal,
        )?;
        if complaints::fatal(&output).is_some() {
            break;
        }
    }
    Ok(rows.print(log))
}
