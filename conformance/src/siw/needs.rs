//! The programs and files that this machine must have, and the Debian packages that they are in.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use xtask::context::find_program;
use xtask::process::Log;

/// Programs that this machine must have for any guest, and the package of each.
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
/// Files that this machine must have for any guest, and the package of each: a library of the kernel's build tools, and headers for
/// `guest/peer.c`.
const GUEST_FILES: &[(&str, &str)] = &[
    ("/usr/lib/x86_64-linux-gnu/libelf.so.1", "libelf1"),
    ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
];
/// Programs that this machine must have for the cases with siw, and the package of each.
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
/// Files that this machine must have for them, and the package of each: QEMU's iSER driver.
const FILES: &[(&str, &str)] = &[(
    "/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so",
    "qemu-block-extra",
)];

/// What a guest needs of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// To build and run a guest.
    Guest,
    /// To run the cases with siw too.
    Siw,
}

/// Returns the packages that this machine lacks.
pub(crate) fn missing_packages(needs: Needs) -> Vec<&'static str> {
    let program = |name: &str| {
        find_program(name).is_some()
            || ["/usr/sbin", "/sbin"]
                .iter()
                .any(|dir| Path::new(dir).join(name).exists())
    };
    let (tools, files) = match needs {
        Needs::Guest => (&[][..], &[][..]),
        Needs::Siw => (TOOLS, FILES),
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

/// Installs missing packages as root. An ordinary user gets an error that names them.
///
/// # Errors
/// When packages are missing and cannot be installed.
pub(crate) fn require_packages(needs: Needs, log: &mut Log) -> Result<()> {
    let missing = missing_packages(needs);
    if missing.is_empty() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        bail!("these packages are needed: {}", missing.join(" "));
    }
    log.say(format!("installing {}", missing.join(", ")));
    log.run(Command::new("apt-get").args(["-qq", "update"]))?;
    log.run(
        Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-qq", "-y", "--no-install-recommends", "install"])
            .args(&missing),
    )?;
    match missing_packages(needs)[..] {
        [] => Ok(()),
        ref still => bail!("these packages are needed: {}", still.join(" ")),
    }
}
