//! The debug kernel: Debian's source with a small configuration (`kernel/debug/config`) whose
//! checks detect errors of a module.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::toolchain::show;
use crate::context::Context;
use crate::debian::{fetch, fields};
use crate::process::Log;

/// Debian's package with the source.
const SOURCE: &str = "linux-source-6.12";
/// Packages that the build needs. They are unpacked in the target folder.
const TOOLS: &[&str] = &["flex", "bison", "m4", "libelf-dev", "libelf1"];
/// The configuration, below the root of the project.
const CONFIG: &str = "kernel/debug/config";

/// A kernel that was built here.
pub struct DebugKernel {
    /// The output of `uname -r`.
    pub name: String,
    /// The folder with the source, against which modules are built.
    pub source: PathBuf,
    /// The file to boot.
    pub image: PathBuf,
    /// The folder with `lib/modules`.
    pub modules: PathBuf,
}

/// Builds the debug kernel below the target folder, unless an earlier call has done that.
///
/// # Errors
/// If the packages cannot be downloaded, if the configuration lacks a wanted option, or if the
/// build fails.
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

/// Returns the newest version of the source that apt offers.
fn source_version(log: &mut Log) -> Result<String> {
    let shown = show(SOURCE, log)?;
    let version = fields(&shown, "Version").next().map(str::to_owned);
    version.with_context(|| format!("apt offers no package {SOURCE}"))
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

    /// Downloads source and tools, and unpacks the source if its version has changed.
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

    /// Returns the command `make` in the source, with the tools of the unpacked packages.
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
        let config = std::fs::read_to_string(self.source().join(".config"))?;
        let missing: Vec<&str> = missing_options(&self.wanted, &config).collect();
        if !missing.is_empty() {
            bail!(
                "options of {CONFIG} that have unmet dependencies: {}",
                missing.join(", ")
            );
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

/// Returns the wanted options that are not in the configuration.
fn missing_options<'a>(wanted: &'a str, config: &str) -> impl Iterator<Item = &'a str> {
    let config: std::collections::BTreeSet<String> = config.lines().map(str::to_owned).collect();
    wanted
        .lines()
        .filter(|line| line.starts_with("CONFIG_") || line.starts_with("# CONFIG_"))
        .filter(move |line| !config.contains(*line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_options_are_named() {
        let wanted = "# Text.\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\n";
        let config = "CONFIG_A=y\nCONFIG_B=y\nCONFIG_C=y\n";
        let missing: Vec<_> = missing_options(wanted, config).collect();
        assert_eq!(missing, ["# CONFIG_B is not set", "CONFIG_C=m"]);
    }
}
