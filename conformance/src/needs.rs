//! Requirements of cases and suites, and the messages about unmet requirements.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use xtask::context::find_program;
use xtask::packages;
use xtask::process::Log;

/// A requirement of a case. A case is skipped unless the machine meets all its requirements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A Debian package that `xtask/src/packages.rs` lists.
    Package(&'static str),
    /// A network namespace with an interface other than loopback.
    Wire,
    /// A private `/tmp`, in a mount namespace. Files in the shared `/tmp` may belong to another
    /// user.
    OwnTmp,
    /// A TAP device between this machine and the guest.
    Tap,
    /// siw loaded with these module parameters; the unmodified driver if the text is empty.
    Siw(&'static str),
}

/// Which requirements this run can meet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capabilities {
    pub(crate) namespaces: bool,
    pub(crate) tap: bool,
}

impl Need {
    /// Returns the reason to skip the case if the need is not met, and `None` if it is met.
    fn unmet(self, capabilities: Capabilities) -> Option<&'static str> {
        match self {
            Self::Wire if !capabilities.namespaces => {
                Some("needs a network namespace: root, or unprivileged user namespaces")
            }
            Self::OwnTmp if !capabilities.namespaces => Some(
                "needs a mount namespace for a private /tmp: root, or unprivileged user namespaces",
            ),
            Self::Tap if !capabilities.tap => Some("needs a TAP device: root, without --no-tap"),
            _ => None,
        }
    }
}

/// Returns why a case with these needs cannot run, or `None` if it can.
pub(crate) fn missing(needs: &[Need], capabilities: Capabilities) -> Option<String> {
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
    let mut unmet = needs.iter().filter_map(|need| need.unmet(capabilities));
    unmet.next().map(str::to_owned)
}

/// Returns which of the packages are not installed, as a message, or `None` if all are installed.
pub(crate) fn missing_packages_of(packages: &[&'static str]) -> Option<String> {
    let needs: Vec<Need> = packages.iter().map(|&name| Need::Package(name)).collect();
    let nothing = Capabilities {
        namespaces: false,
        tap: false,
    };
    missing(&needs, nothing)
}

fn not_installed(packages: &[&str]) -> String {
    format!("not installed: {}", packages.join(", "))
}

/// Programs that building and running a guest needs, each with its Debian package.
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
/// Files that building a guest needs, each with its Debian package: a library for the kernel's
/// build tools, and headers for `guest/peer.c`.
const GUEST_FILES: &[(&str, &str)] = &[
    ("/usr/lib/x86_64-linux-gnu/libelf.so.1", "libelf1"),
    ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
];
/// Programs that the siw suite needs, each with its Debian package.
const SIW_TOOLS: &[(&str, &str)] = &[
    ("tcpdump", "tcpdump"),
    ("tshark", "tshark"),
    ("rping", "rdmacm-utils"),
    ("ib_write_bw", "perftest"),
    ("tgtd", "tgt"),
    ("iscsi-inq", "libiscsi-bin"),
    ("qemu-img", "qemu-utils"),
    ("debugfs", "e2fsprogs"),
];
/// Files that the siw suite needs, each with its Debian package: QEMU's iSER driver.
const SIW_FILES: &[(&str, &str)] = &[(
    "/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so",
    "qemu-block-extra",
)];

/// A set of required packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suite {
    /// Building and running a guest.
    Guest,
    /// Building and running a guest, and running the siw suite.
    Siw,
}

fn missing_packages(suite: Suite) -> Vec<&'static str> {
    let is_installed = |name: &str| {
        find_program(name).is_some()
            || ["/usr/sbin", "/sbin"]
                .iter()
                .any(|dir| Path::new(dir).join(name).exists())
    };
    let (tools, files) = match suite {
        Suite::Guest => (&[][..], &[][..]),
        Suite::Siw => (SIW_TOOLS, SIW_FILES),
    };
    let mut names: Vec<&str> = GUEST_TOOLS
        .iter()
        .chain(tools)
        .filter(|(name, _)| !is_installed(name))
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

/// Returns which packages for guests are not installed, as a message, or `None` if all are
/// installed.
pub(crate) fn missing_for_guests() -> Option<String> {
    match &missing_packages(Suite::Guest)[..] {
        [] => None,
        missing => Some(not_installed(missing)),
    }
}

/// Installs the missing packages of a suite. Fails with their names unless the user is root.
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
        ref missing => bail!("{}", not_installed(missing)),
    }
}
