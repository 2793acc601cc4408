//! `cargo xtask dist`: writes everything that users can download into one folder.
//!
//! `docs/packaging.md` lists the artefacts. Two runs at the same commit, with the same versions of
//! Rust and of the tools, write the same bytes, whatever the folders. `check` installs, uses and
//! removes the artefacts in fresh Debian roots.

mod build;
mod check;
mod containers;
mod contents;
mod image;
mod platform;
mod rpm;
mod sbom;
mod tools;
mod unwinder;
mod wheel;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use xtask::context::Context;
use xtask::install;
use xtask::kernel;
use xtask::process::Log;

use crate::deb::{self, output, source};
use build::Programs;
use platform::{GLIBC, PLATFORMS, Platform};
use tools::Tools;

/// The list of checksums.
const SUMS: &str = "SHA256SUMS";
/// Time limit of all commands together. Four builds in release mode take an hour on a slow machine.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// Arguments of `cargo xtask dist`.
#[derive(Args)]
pub(crate) struct DistArgs {
    /// The folder in which to put the artefacts [default: dist in the target folder]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// The processors to build for: x86_64, aarch64 [default: both]
    #[arg(long, value_name = "NAME", value_parser = Platform::named, num_args = 1..)]
    arch: Vec<&'static Platform>,
    /// Write only these kinds of artefacts
    #[arg(long, value_name = "KIND", value_enum, num_args = 1..)]
    only: Vec<Kind>,
    /// Do not build: install, use and remove the artefacts of an earlier build in fresh Debian
    /// roots (needs root and debootstrap)
    #[arg(long)]
    check: bool,
    /// The Debian releases of these roots
    #[arg(
        long,
        value_name = "NAME",
        num_args = 1..,
        requires = "check",
        default_values = ["bullseye", "bookworm", "trixie"]
    )]
    suite: Vec<String>,
}

/// A kind of artefact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// One executable file with the command and its libraries
    Bundle,
    /// Debian packages
    Deb,
    /// RPM packages
    Rpm,
    /// Python wheels
    Wheel,
    /// The source package of the kernel module
    Dkms,
    /// A container image, as an OCI archive
    Image,
    /// A list of the crates in the programs
    Sbom,
}

/// The artefacts that contain programs. The others need no build in release mode.
const PROGRAMS: [Kind; 5] = [Kind::Bundle, Kind::Deb, Kind::Rpm, Kind::Wheel, Kind::Image];

impl DistArgs {
    fn wants(&self, kind: Kind) -> bool {
        self.only.is_empty() || self.only.contains(&kind)
    }

    fn platforms(&self) -> Vec<&'static Platform> {
        match &self.arch[..] {
            [] => PLATFORMS.iter().collect(),
            some => some.to_vec(),
        }
    }
}

/// What all artefacts share.
struct Release {
    version: String,
    /// The time of the commit, in seconds since 1970. No file in an artefact is newer.
    epoch: String,
    /// The folder of the artefacts.
    output: PathBuf,
}

impl Release {
    fn new(context: &Context, output: Option<&Path>) -> Result<Self> {
        let default = context.target.join("dist");
        Ok(Self {
            version: source::version(context)?,
            epoch: source::epoch(context)?,
            output: std::path::absolute(output.unwrap_or(&default))?,
        })
    }

    /// Returns the time of the commit in the format of RFC 3339.
    fn rfc3339(&self) -> Result<String> {
        let mut date = Command::new("date");
        date.args(["--utc", "+%Y-%m-%dT%H:%M:%SZ", "--date"]);
        let text = output(date.arg(format!("@{}", self.epoch)))?;
        Ok(text.trim().to_owned())
    }

    /// Returns the path of a platform's bundle. The name has no version, so that the address of the
    /// newest one does not change.
    fn bundle(&self, platform: &Platform) -> PathBuf {
        self.output.join(format!("iwarp-linux-{}", platform.name))
    }
}

/// Builds the artefacts, or checks them.
///
/// # Errors
/// If a tool is missing, if a build fails, or if an artefact has a defect.
pub(crate) fn command(args: &DistArgs) -> Result<bool> {
    let context = Context::new(false, false)?;
    let release = Release::new(&context, args.output.as_deref())?;
    if args.check {
        return check::run(&context, &release, args);
    }
    let mut log = Log::create(&context.log_dir().join("dist.log"), LIMIT)?;
    if args.wants(Kind::Deb)
        && let Some(tool) = deb::missing_tool()
    {
        bail!("{tool} is not installed (Debian: debhelper, dpkg-dev)");
    }
    fs::create_dir_all(&release.output)?;
    let tools = Tools::prepare(&context, &mut log)?;
    let mut all = Vec::new();
    if PROGRAMS.into_iter().any(|kind| args.wants(kind)) {
        for platform in args.platforms() {
            all.push(build::build(&context, &mut log, &tools, platform)?);
        }
    }
    let host = all.iter().find(|programs| programs.platform.is_host());
    if let Some(runnable) = host.map(|programs| programs.portable.clone()) {
        // Manual pages do not depend on the platform. The command of another platform would need an
        // emulator.
        for programs in &mut all {
            programs.built.runnable.clone_from(&runnable);
        }
    }
    write(&context, &mut log, &tools, &release, &all, args)?;
    checksums(&mut log, &release.output)?;
    Ok(true)
}

/// Writes the artefacts of the compiled programs.
fn write(
    context: &Context,
    log: &mut Log,
    tools: &Tools,
    release: &Release,
    all: &[Programs],
    args: &DistArgs,
) -> Result<()> {
    for programs in all {
        let platform = programs.platform;
        if args.wants(Kind::Bundle) {
            let to = release.bundle(platform);
            let (command, second_name) = (&programs.portable, &programs.second_name);
            install::write_bundle(command, &programs.built, second_name, &to)?;
        }
        if args.wants(Kind::Deb) {
            let foreign = deb::Foreign {
                architecture: platform.debian,
                // Until Debian 10 and Ubuntu 18.04, the second package had another name.
                depends: format!("libc6 (>= {GLIBC}), libgcc-s1 | libgcc1"),
            };
            deb::build(
                context,
                log,
                &programs.built,
                Some(&foreign),
                &release.output,
            )?;
        }
        if args.wants(Kind::Rpm) {
            rpm::build(context, log, tools, release, programs)?;
        }
        if args.wants(Kind::Wheel) {
            wheel::build(context, log, tools, release, programs)?;
        }
    }
    if args.wants(Kind::Image) {
        image::build(context, log, release, all)?;
    }
    if args.wants(Kind::Sbom) {
        sbom::build(context, release)?;
    }
    if args.wants(Kind::Dkms) && args.platforms().iter().any(|platform| platform.module) {
        match kernel::source_package(context, log)? {
            Ok(package) => {
                let name = package.file_name().unwrap_or_default();
                fs::copy(&package, release.output.join(name))?;
            }
            Err(why) => bail!("the package for DKMS cannot be built here ({why}); see --only"),
        }
    }
    Ok(())
}

/// Writes the checksums of all files in the folder, and prints names and sizes.
fn checksums(log: &mut Log, dir: &Path) -> Result<()> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_file() && name != SUMS {
            let size = entry.metadata()?.len();
            names.push((name, size));
        }
    }
    names.sort();
    let mut sums = Command::new("sha256sum");
    sums.current_dir(dir).arg("--");
    sums.args(names.iter().map(|(name, _)| name));
    fs::write(dir.join(SUMS), output(&mut sums)?)?;
    log.say(format!("{}:", dir.display()));
    for (name, size) in names {
        let mib = size as f64 / f64::from(1 << 20);
        log.say(format!("  {mib:5.1} MiB  {}", name.display()));
    }
    Ok(())
}
