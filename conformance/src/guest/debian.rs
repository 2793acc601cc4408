//! Finds, downloads and unpacks Debian packages for guests. It installs nothing on this machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use super::kernel_files::KernelFiles;
use super::omitted::{self, Omitted};
use xtask::debian::{fetch, fields};
use xtask::kernel::headers::Release;
use xtask::process::Log;

/// The Linux series that is tested by default: the newest in bookworm, and the default in trixie.
pub(crate) const NEWER: &str = "6.12";
/// The default Linux series of bookworm.
pub(crate) const OLDER: &str = "6.1";

/// Packages of the guest's programs. apt determines the packages of their libraries.
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

/// Name prefixes of dependencies that the guest does not need.
const UNWANTED: &[&str] = &[
    "perl",
    "libperl",
    "debconf",
    "adduser",
    "udev",
    "systemd",
    "init-system",
];

pub(crate) struct Kernel {
    /// The kernel's packages. Image, headers and source have the same version.
    pub(crate) release: Release,
    series: &'static str,
}

impl Kernel {
    /// Returns the newest kernel of a series whose image and source have the same version.
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
            "apt finds no kernel {series} with matching source; \
             add bookworm-security or trixie to its sources"
        );
    }

    /// Downloads the kernel image and headers, and unpacks them into `dir`.
    pub(crate) fn fetch(&self, dir: &Path, log: &mut Log) -> Result<()> {
        let Release { name, version, .. } = &self.release;
        let image = format!("linux-image-{name}={version}");
        self.release.fetch(dir, &[image], log)
    }

    /// Returns the modules that Debian omits and that are built for this kernel.
    fn omitted(&self) -> &'static [Omitted] {
        match self.series {
            NEWER => &[omitted::SIW, omitted::STORAGE],
            _ => &[omitted::SIW],
        }
    }

    /// Downloads the kernel's source, and unpacks the parts from which modules are built into
    /// `dir`.
    pub(crate) fn fetch_source(&self, dir: &Path, log: &mut Log) -> Result<()> {
        let tree = format!("linux-source-{}", self.series);
        let parts: Vec<String> = self
            .omitted()
            .iter()
            .flat_map(Omitted::source)
            .map(|part| format!("{tree}/{part}"))
            .collect();
        // tar reads the whole archive, which takes half a minute, so unpack all parts in one run.
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

    fn source(&self, dir: &Path) -> PathBuf {
        dir.join(format!("linux-source-{}", self.series))
    }

    /// Returns the paths of the kernel's files below `dir`.
    pub(crate) fn files(&self, dir: &Path) -> KernelFiles {
        let name = self.release.name.clone();
        KernelFiles {
            image: dir.join(format!("boot/vmlinuz-{name}")),
            headers: self.release.headers(dir),
            modules: dir.to_owned(),
            source: self.source(dir),
            builds_storage: self.series == NEWER,
            name,
        }
    }
}

/// Downloads the guest's programs with their libraries, and unpacks them into `dir`.
pub(crate) fn fetch_programs(dir: &Path, log: &mut Log) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    // With an empty status file, apt assumes that nothing is installed and names all needed
    // packages.
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
        bail!("apt did not list the packages of the guest's programs");
    }
    fetch(dir, &names.into_iter().collect::<Vec<_>>(), log)
}
