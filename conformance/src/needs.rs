//! Decides what cases and suites need from this machine, and what a user reads if it is missing.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use xtask::context::find_program;
use xtask::packages;
use xtask::process::Log;

/// What a case needs. A case is skipped if the machine does not have all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A Debian package that `xtask/src/packages.rs` lists.
    Package(&'static str),
    /// An interface beside loopback, in a network namespace.
    Wire,
    /// A `/tmp` of its own, in a mount namespace. Elsewhere the files may be another user's.
    OwnTmp,
    /// The TAP device of a guest.
    Tap,
    /// These module parameters of siw; none for the unchanged driver.
    Siw(&'static str),
}

/// What this run can give to its cases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub(crate) namespaces: bool,
    pub(crate) tap: bool,
}

impl Need {
    /// Returns what a user reads if the need is not met, and `None` if it is met.
    fn unmet(self, offer: Offer) -> Option<&'static str> {
        match self {
            Self::Wire if !offer.namespaces => {
                Some("needs a network namespace: root, or unprivileged user namespaces")
            }
            Self::OwnTmp if !offer.namespaces => Some("needs namespaces, for a /tmp of its own"),
            Self::Tap if !offer.tap => Some("needs a TAP device: root, without --no-tap"),
            _ => None,
        }
    }
}

/// Returns why a case with these needs cannot run, or `None` if it can.
pub(crate) fn missing(needs: &[Need], offer: Offer) -> Option<String> {
    let absent: Vec<&str> = needs
        .iter()
        .filter_map(|need| match need {
            Need::Package(name) if !packages::have(name) => Some(*name),
            _ => None,
        })
        .collect();
    if !absent.is_empty() {
        return Some(not_installed(&absent));
    }
    let mut unmet = needs.iter().filter_map(|need| need.unmet(offer));
    unmet.next().map(str::to_owned)
}

/// Returns why something that needs these packages, and nothing else, cannot run.
pub(crate) fn missing_of(packages: &[&'static str]) -> Option<String> {
    let needs: Vec<Need> = packages.iter().map(|&name| Need::Package(name)).collect();
    let nothing = Offer {
        namespaces: false,
        tap: false,
    };
    missing(&needs, nothing)
}

fn not_installed(packages: &[&str]) -> String {
    format!("not installed: {}", packages.join(", "))
}

/// Programs that any guest needs, each with its package.
const GUEST_TOOLS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("depmod", "kmod"),
    ("modprobe", "kmod"),
    ("setpriv", "util-linux"),
    ("gcc", "gcc"),
    ("make", "make"),
    ("readelf", "binutils"),
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
    ("xz", "xz-utils"),
    ("ip", "iproute2"),
];
/// Files that any guest needs, each with its package: a library of the kernel's build tools, and
/// headers for `guest/peer.c`.
const GUEST_FILES: &[(&str, &str)] = &[
    ("/usr/lib/x86_64-linux-gnu/libelf.so.1", "libelf1"),
    ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
];
/// Programs that the cases with siw need, each with its package.
const TOOLS: &[(&str, &str)] = &[
    ("tcpdump", "tcpdump"),
    ("tshark", "tshark"),
    ("rping", "rdmacm-utils"),
    ("ib_write_bw", "perftest"),
    ("tgtd", "tgt"),
    ("iscsi-inq", "libiscsi-bin"),
    ("qemu-img", "qemu-utils"),
    ("debugfs", "e2fsprogs"),
];
/// Files that the cases with siw need, each with its package: QEMU's iSER driver.
const FILES: &[(&str, &str)] = &[(
    "/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so",
    "qemu-block-extra",
)];

/// What a suite with guests needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suite {
    /// Building and running a guest.
    Guest,
    /// The same, and running the cases with siw.
    Siw,
}

fn missing_packages(suite: Suite) -> Vec<&'static str> {
    let program = |name: &str| {
        find_program(name).is_some()
            || ["/usr/sbin", "/sbin"]
                .iter()
                .any(|dir| Path::new(dir).join(name).exists())
    };
    let (tools, files) = match suite {
        Suite::Guest => (&[][..], &[][..]),
        Suite::Siw => (TOOLS, FILES),
    };
    let mut names: Vec<&str> = GUEST_TOOLS
        .iter()
        .chain(tools)
        .filter(|(name, _)| !program(name))
        .chain(
            GUEST_FILES
                .iter()
                .chain(files)
                .filter(|(path, _)| !Path::new(path).exists()),
        )
        .map(|(_, package)| *package)
        .collect();
    names.dedup();
    names
}

/// Returns which packages are missing for guests, or `None` if none is.
pub(crate) fn missing_for_guests() -> Option<String> {
    match &missing_packages(Suite::Guest)[..] {
        [] => None,
        missing => Some(not_installed(missing)),
    }
}

/// Installs missing packages if root; otherwise fails with their names.
pub(crate) fn require_packages(suite: Suite, log: &mut Log) -> Result<()> {
    let missing = missing_packages(suite);
    if missing.is_empty() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        bail!("{}", not_installed(&missing));
    }
    log.say(format!("installing {}", missing.join(", ")));
    log.run(Command::new("apt-get").args(["-qq", "update"]))?;
    log.run(
        Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-qq", "-y", "--no-install-recommends", "install"])
            .args(&missing),
    )?;
    match missing_packages(suite)[..] {
        [] => Ok(()),
        ref still => bail!("{}", not_installed(still)),
    }
}
