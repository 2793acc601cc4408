//! The debug kernel: Debian's source with a small configuration (`kernel/debug/config`) that looks
//! for faults of a module.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::toolchain::show;
use crate::context::Context;
use crate::debian::{fetch, fields};
use crate::process::Log;

/// The release of which Debian has the source as a package.
const SOURCE: &str = "linux-source-6.12";
/// What the build needs besides. The packages are unpacked in the target folder.
const TOOLS: &[&str] = &["flex", "bison", "m4", "libelf-dev", "libelf1"];
/// The configuration, below the root of the project.
const CONFIG: &str = "kernel/debug/config";

/// A kernel that was built here.
pub struct DebugKernel {
    /// What `uname -r` says.
    pub name: String,
    /// Its source, which modules are built against.
    pub source: PathBuf,
    /// What is booted.
    pub image: PathBuf,
    /// The folder with `lib/modules`.
    pub modules: PathBuf,
}

/// Builds the debug kernel below the target folder, unless it is there.
///
/// # Errors
/// When the packages cannot be had, an option is not in the configuration afterwards, or the kernel
/// does not build.
pub fn build(context: &Context, log: &mut Log) -> Result<DebugKernel> {
    let dir = context.target.join("kernel/debug");
    std::fs::create_dir_all(&dir)?;
    let build = Build {
        // The kernel's build needs absolute paths.
        dir: dir.canonicalize()?,
        wanted: crate::files::read(&context.root, CONFIG)?,
    };
    let stamp = build.dir.join("built");
    let version = source_version(log)?;
    let state = format!("{version}\n{}", build.wanted);
    if !std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        let _ = std::fs::remove_file(&stamp);
        build.unpack(&version, log)?;
        log.say("configuring the debug kernel");
        build.configure(context, log)?;
        log.say("building the debug kernel, which takes a while");
        build.make(log)?;
        std::fs::write(stamp, state)?;
    }
    build.result()
}

/// The newest version that apt knows.
fn source_version(log: &mut Log) -> Result<String> {
    let shown = show(SOURCE, log)?;
    let version = fields(&shown, "Version").next().map(str::to_owned);
    version.with_context(|| format!("apt knows no {SOURCE}"))
}

/// The kernel while it is being built.
struct Build {
    dir: PathBuf,
    wanted: String,
}

impl Build {
    fn source(&self) -> PathBuf {
        self.dir.join(SOURCE)
    }

    fn modules(&self) -> PathBuf {
        self.dir.join("installed")
    }

    /// Fetches source and tools, and unpacks the source if it is another than before.
    fn unpack(&self, version: &str, log: &mut Log) -> Result<()> {
        log.say("fetching Debian's source of the kernel");
        let mut packages = vec![format!("{SOURCE}={version}")];
        packages.extend(TOOLS.iter().map(|&tool| tool.to_owned()));
        fetch(&self.dir, &packages, log)?;
        let stamp = self.dir.join("unpacked");
        if std::fs::read_to_string(&stamp).is_ok_and(|text| text == version) {
            return Ok(());
        }
        if self.source().exists() {
            std::fs::remove_dir_all(self.source())?;
        }
        let archive = self.dir.join(format!("usr/src/{SOURCE}.tar.xz"));
        log.run(
            Command::new("tar")
                .arg("-C")
                .arg(&self.dir)
                .arg("-xf")
                .arg(archive),
        )?;
        std::fs::write(stamp, version)?;
        Ok(())
    }

    /// The kernel's `make`, with the tools of the unpacked packages.
    fn command(&self) -> Command {
        let below = |path: &str| self.dir.join(path);
        let mut path = below("usr/bin").into_os_string();
        if let Some(installed) = std::env::var_os("PATH") {
            path.push(":");
            path.push(installed);
        }
        let mut command = Command::new("make");
        command
            .arg("-C")
            .arg(self.source())
            .env("PATH", path)
            .env("M4", below("usr/bin/m4"))
            .env("BISON_PKGDATADIR", below("usr/share/bison"))
            .env("C_INCLUDE_PATH", below("usr/include"))
            .env("LIBRARY_PATH", below("usr/lib/x86_64-linux-gnu"));
        command
    }

    fn configure(&self, context: &Context, log: &mut Log) -> Result<()> {
        let file = context.root.join(CONFIG).canonicalize()?;
        log.run(
            self.command()
                .env("KCONFIG_ALLCONFIG", file)
                .arg("allnoconfig"),
        )?;
        let made = std::fs::read_to_string(self.source().join(".config"))?;
        let lost: Vec<&str> = lost(&self.wanted, &made).collect();
        if !lost.is_empty() {
            bail!("{CONFIG} has options that need others: {}", lost.join(", "));
        }
        Ok(())
    }

    fn make(&self, log: &mut Log) -> Result<()> {
        let jobs = std::thread::available_parallelism()?;
        log.run(
            self.command()
                .arg(format!("-j{jobs}"))
                .args(["bzImage", "modules"]),
        )
        .context("the debug kernel does not build")?;
        if self.modules().exists() {
            std::fs::remove_dir_all(self.modules())?;
        }
        log.run(
            self.command()
                .arg(format!("INSTALL_MOD_PATH={}", self.modules().display()))
                .arg("modules_install"),
        )
    }

    fn result(&self) -> Result<DebugKernel> {
        let source = self.source();
        let name = std::fs::read_to_string(source.join("include/config/kernel.release"))?;
        Ok(DebugKernel {
            name: name.trim().to_owned(),
            image: source.join("arch/x86/boot/bzImage"),
            modules: self.modules(),
            source,
        })
    }
}

/// The wanted options that the configuration does not have.
fn lost<'a>(wanted: &'a str, made: &str) -> impl Iterator<Item = &'a str> {
    let made: std::collections::BTreeSet<String> = made.lines().map(str::to_owned).collect();
    wanted
        .lines()
        .filter(|line| line.starts_with("CONFIG_") || line.starts_with("# CONFIG_"))
        .filter(move |line| !made.contains(*line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disabled_option_is_named() {
        let wanted = "# Text.\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\n";
        let made = "CONFIG_A=y\nCONFIG_B=y\nCONFIG_C=y\n";
        let lost: Vec<_> = lost(wanted, made).collect();
        assert_eq!(lost, ["# CONFIG_B is not set", "CONFIG_C=m"]);
    }
}
