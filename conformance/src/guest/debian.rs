//! Finds, downloads and unpacks Debian packages for the guest. Nothing is installed on this
//! machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use super::kernel_files::KernelFiles;
use super::omitted::{self, Omitted};
use xtask::debian::{fetch, fields};
use xtask::kernel::headers::Release;
use xtask::process::Log;

/// The series of Linux whose driver is tested: the newest that bookworm has, and trixie's own.
pub(crate) const NEWER: &str = "6.12";
/// Bookworm's own.
pub(crate) const OLDER: &str = "6.1";

/// Packages with the guest's programs. The packages of their libraries are found by apt.
const PROGRAM_PACKAGES: &[&str] = &[
    "rdma-core",
    "rdmacm-utils",
    "ibverbs-utils",
    "ibverbs-providers",
    "perftest",
    "qperf",
    "libfabric-bin",
    "python3-pyverbs",
    "iproute2",
    "open-iscsi",
    "e2fsprogs",
    "nvme-cli",
    "fio",
    "nfs-kernel-server",
    "nfs-common",
    "rpcbind",
    "netbase",
    "mount",
    "util-linux",
    "ksmbd-tools",
    "cifs-utils",
];

/// Beginnings of the names of packages that are left out although others depend on them. The guest
/// does not need them.
const UNWANTED: &[&str] = &[
    "perl",
    "libperl",
    "debconf",
    "adduser",
    "udev",
    "systemd",
    "init-system",
];

/// A kernel that guests boot.
pub(crate) struct Kernel {
    /// Its packages. Image, headers and source share their version.
    pub(crate) release: Release,
    series: &'static str,
}

impl Kernel {
    /// The newest kernel of a series for which image and source have the same version.
    pub(crate) fn newest(series: &'static str, log: &mut Log) -> Result<Self> {
        let source = format!("linux-source-{series}");
        let shown = log.run_and_read(Command::new("apt-cache").args(["show", &source]))?;
        let versions: Vec<&str> = fields(&shown, "Version").collect();
        for name in Release::names(series, log)? {
            let release = Release::named(&name, log)?;
            if versions.contains(&release.version.as_str()) {
                return Ok(Self { release, series });
            }
        }
        bail!(
            "apt knows no kernel {series} with its source; is bookworm-security or trixie in its sources?"
        );
    }

    /// Downloads and unpacks image and headers below `dir`.
    pub(crate) fn fetch(&self, dir: &Path, log: &mut Log) -> Result<()> {
        let Release { name, version, .. } = &self.release;
        let image = format!("linux-image-{name}={version}");
        self.release.fetch(dir, &[image], log)
    }

    /// What is built for it.
    fn omitted(&self) -> &'static [Omitted] {
        match self.series {
            NEWER => &[omitted::SIW, omitted::STORAGE],
            _ => &[omitted::SIW],
        }
    }

    /// Downloads the kernel's source and unpacks below `dir` what modules are built from.
    pub(crate) fn fetch_source(&self, dir: &Path, log: &mut Log) -> Result<()> {
        let tree = format!("linux-source-{}", self.series);
        let parts: Vec<String> = self
            .omitted()
            .iter()
            .flat_map(Omitted::source)
            .map(|part| format!("{tree}/{part}"))
            .collect();
        // tar takes half a minute to look through the whole source, so it runs only once, for all
        // parts.
        let stamp = dir.join("unpacked");
        let state = format!("{}\n{}", self.release.version, parts.join("\n"));
        if std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
            return Ok(());
        }
        let archive = dir.join("source");
        std::fs::create_dir_all(&archive)?;
        fetch(&archive, &[format!("{tree}={}", self.release.version)], log)?;
        if self.source(dir).exists() {
            std::fs::remove_dir_all(self.source(dir))?;
        }
        log.run(
            Command::new("tar")
                .arg("-C")
                .arg(dir)
                .arg("-xf")
                .arg(archive.join(format!("usr/src/{tree}.tar.xz")))
                .args(parts),
        )?;
        std::fs::write(stamp, state)?;
        Ok(())
    }

    /// Returns the directory of the source, as Debian ships it.
    fn source(&self, dir: &Path) -> PathBuf {
        dir.join(format!("linux-source-{}", self.series))
    }

    /// Where everything of it is, if its packages are below `dir`.
    pub(crate) fn files(&self, dir: &Path) -> KernelFiles {
        let name = self.release.name.clone();
        KernelFiles {
            image: dir.join(format!("boot/vmlinuz-{name}")),
            headers: self.release.headers(dir),
            modules: dir.to_owned(),
            source: self.source(dir),
            storage: self.series == NEWER,
            name,
        }
    }
}

/// Downloads and unpacks the guest's programs with their libraries below `dir`.
pub(crate) fn fetch_programs(dir: &Path, log: &mut Log) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    // With an empty package status apt believes that nothing is installed, so it names all packages
    // that the programs need.
    let nothing = dir.join("nothing-installed");
    std::fs::write(&nothing, "")?;
    let uris = log.run_and_read(
        Command::new("apt-get")
            .arg("-o")
            .arg(format!("Dir::State::status={}", nothing.display()))
            .args([
                "-o",
                "Debug::NoLocking=1",
                "-qq",
                "--print-uris",
                "--no-install-recommends",
                "install",
            ])
            .args(PROGRAM_PACKAGES),
    )?;
    let names: BTreeSet<String> = uris
        .lines()
        .filter(|line| line.starts_with('\''))
        .filter_map(|line| {
            Some(
                line.split_whitespace()
                    .nth(1)?
                    .split('_')
                    .next()?
                    .to_owned(),
            )
        })
        .filter(|name| !UNWANTED.iter().any(|word| name.starts_with(word)))
        .collect();
    if !names.contains("perftest") {
        bail!("apt does not say what the guest's programs need");
    }
    fetch(dir, &names.into_iter().collect::<Vec<_>>(), log)
}
