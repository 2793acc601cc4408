//! The step `packages`: installs Debian packages that other steps need.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::context::{Context, find_program};
use crate::outcome::Outcome;
use crate::process::Log;

/// Time limit for installing a few packages, much longer than it takes.
const INSTALL_LIMIT: Duration = Duration::from_secs(600);

/// The file that shows that a package is installed.
enum Proof {
    /// A program in `PATH`.
    Program(&'static str),
    /// A file or directory by its absolute path.
    File(&'static str),
}

/// A Debian package that steps need.
struct Package {
    name: &'static str,
    proof: Proof,
    /// The steps that are skipped without the package, completely or in part.
    needed_by: &'static [&'static str],
    /// What the package is used for.
    why: &'static str,
}

/// All packages that steps and tests need.
const PACKAGES: &[Package] = &[
    Package {
        name: "tshark",
        proof: Proof::Program("tshark"),
        needed_by: &["unit", "lessons"],
        why: "an independent decoder for what we put on the wire",
    },
    Package {
        name: "codespell",
        proof: Proof::Program("codespell"),
        needed_by: &["spelling"],
        why: "a list of common misspellings",
    },
    Package {
        name: "default-jdk-headless",
        proof: Proof::Program("javac"),
        needed_by: &["unit"],
        why: "a virtual machine whose signal handlers coexist with ours",
    },
    Package {
        name: "golang-go",
        proof: Proof::Program("go"),
        needed_by: &["unit"],
        why: "a runtime whose signal handlers coexist with ours",
    },
    Package {
        name: "ibverbs-utils",
        proof: Proof::Program("ibv_devinfo"),
        needed_by: &["apps"],
        why: "lists and describes devices through the C library",
    },
    Package {
        name: "rdmacm-utils",
        proof: Proof::Program("rping"),
        needed_by: &["apps", "lessons"],
        why: "connects, pings and times connections through the C library",
    },
    Package {
        name: "perftest",
        proof: Proof::Program("ib_write_bw"),
        needed_by: &["apps", "lessons"],
        why: "measures and checks every operation through the C library",
    },
    Package {
        name: "prometheus",
        proof: Proof::Program("promtool"),
        needed_by: &["unit", "apps"],
        why: "scrapes and checks the metrics of `iwarp stat`",
    },
    Package {
        name: "ucx-utils",
        proof: Proof::Program("ucx_perftest"),
        needed_by: &["apps"],
        why: "UCX's transport for InfiniBand and RoCE through the C library",
    },
    Package {
        name: "libucx-dev",
        proof: Proof::File("/usr/include/ucp/api/ucp.h"),
        needed_by: &["apps"],
        why: "compiles UCX's examples and our own program on it",
    },
    Package {
        name: "qperf",
        proof: Proof::Program("qperf"),
        needed_by: &["apps"],
        why: "drives every operation through the C library",
    },
    Package {
        name: "dapl2-utils",
        proof: Proof::Program("dapltest"),
        needed_by: &["apps"],
        why: "DAPL over rdma_cm, and over queue pairs that DAPL connects itself",
    },
    Package {
        name: "fio",
        proof: Proof::Program("fio"),
        needed_by: &["apps"],
        why: "transfers and verifies blocks of files with its rdma engine",
    },
    Package {
        name: "iperf3",
        proof: Proof::Program("iperf3"),
        needed_by: &["apps"],
        why: "a TCP program to run with the preload library",
    },
    Package {
        name: "netcat-openbsd",
        proof: Proof::Program("nc.openbsd"),
        needed_by: &["apps"],
        why: "a TCP program to run with the preload library",
    },
    Package {
        name: "redis-server",
        proof: Proof::Program("redis-server"),
        needed_by: &["apps"],
        why: "a server for TCP to run with the preload library",
    },
    Package {
        name: "redis-tools",
        proof: Proof::Program("redis-cli"),
        needed_by: &["apps"],
        why: "clients for TCP to run with the preload library",
    },
    Package {
        name: "nginx-light",
        proof: Proof::Program("nginx"),
        needed_by: &["apps"],
        why: "a server for TCP to run with the preload library",
    },
    Package {
        name: "curl",
        proof: Proof::Program("curl"),
        needed_by: &["apps"],
        why: "a client for TCP to run with the preload library",
    },
    Package {
        name: "sockperf",
        proof: Proof::Program("sockperf"),
        needed_by: &["apps"],
        why: "both ends of TCP connections to run with the preload library",
    },
    Package {
        name: "python3-pyverbs",
        proof: Proof::File("/usr/lib/python3/dist-packages/pyverbs/__init__.py"),
        needed_by: &["apps", "lessons"],
        why: "rdma-core's own tests",
    },
    Package {
        name: "python3-pip",
        proof: Proof::File("/usr/lib/python3/dist-packages/pip"),
        needed_by: &["apps"],
        why: "installs published RDMA packages from PyPI",
    },
    Package {
        name: "libgloo-dev",
        proof: Proof::File("/usr/include/gloo/algorithm.h"),
        needed_by: &["apps"],
        why: "collectives of several processes, as PyTorch uses them",
    },
    Package {
        name: "debhelper",
        proof: Proof::Program("dh"),
        needed_by: &["deb"],
        why: "builds the Debian package",
    },
    Package {
        name: "g++",
        proof: Proof::Program("g++"),
        needed_by: &["apps", "fuzz-smoke"],
        why: "compiles our program for gloo, and libFuzzer",
    },
    Package {
        name: "cmake",
        proof: Proof::Program("cmake"),
        needed_by: &["apps"],
        why: "build scripts of published crates for RDMA",
    },
    Package {
        name: "libclang-dev",
        proof: Proof::File("/usr/share/doc/libclang-dev"),
        needed_by: &["apps"],
        why: "build scripts of published crates for RDMA read C headers",
    },
    Package {
        name: "libibverbs-dev",
        proof: Proof::File("/usr/include/infiniband/verbs.h"),
        needed_by: &["lessons"],
        why: "the C structures are compared with these headers",
    },
    Package {
        name: "librdmacm-dev",
        proof: Proof::File("/usr/include/rdma/rdma_cma.h"),
        needed_by: &["lessons"],
        why: "the C structures are compared with these headers",
    },
    Package {
        name: "libfabric-bin",
        proof: Proof::Program("fi_pingpong"),
        needed_by: &["apps"],
        why: "libfabric over verbs",
    },
    Package {
        name: "openmpi-bin",
        proof: Proof::Program("mpirun.openmpi"),
        needed_by: &["apps"],
        why: "MPI over libfabric and over UCX",
    },
    Package {
        name: "libopenmpi-dev",
        proof: Proof::Program("mpicc.openmpi"),
        needed_by: &["apps"],
        why: "compiles the MPI program",
    },
    Package {
        name: "mpich",
        proof: Proof::Program("mpirun.mpich"),
        needed_by: &["apps"],
        why: "another MPI over UCX",
    },
    Package {
        name: "libmpich-dev",
        proof: Proof::Program("mpicc.mpich"),
        needed_by: &["apps"],
        why: "compiles the MPI program",
    },
    Package {
        name: "tgt",
        proof: Proof::Program("tgtd"),
        needed_by: &["apps"],
        why: "an iSER target",
    },
    Package {
        name: "libiscsi-bin",
        proof: Proof::Program("iscsi-inq"),
        needed_by: &["apps"],
        why: "iSER initiators",
    },
    Package {
        name: "qemu-utils",
        proof: Proof::Program("qemu-img"),
        needed_by: &["apps"],
        why: "disk images over iSER",
    },
    Package {
        name: "qemu-block-extra",
        proof: Proof::File("/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so"),
        needed_by: &["apps"],
        why: "QEMU's iSER initiator",
    },
    Package {
        name: "qemu-system-x86",
        proof: Proof::Program("qemu-system-x86_64"),
        needed_by: &["apps"],
        why: "migrates guests over RDMA",
    },
    Package {
        name: "ceph-mon",
        proof: Proof::Program("ceph-mon"),
        needed_by: &["apps"],
        why: "the monitor of a Ceph cluster over RDMA",
    },
    Package {
        name: "ceph-mgr",
        proof: Proof::Program("ceph-mgr"),
        needed_by: &["apps"],
        why: "the manager of a Ceph cluster over RDMA",
    },
    Package {
        name: "ceph-osd",
        proof: Proof::Program("ceph-osd"),
        needed_by: &["apps"],
        why: "stores the objects of a Ceph cluster over RDMA",
    },
    Package {
        name: "ceph-common",
        proof: Proof::Program("rados"),
        needed_by: &["apps"],
        why: "the clients of a Ceph cluster over RDMA",
    },
    Package {
        name: "valgrind",
        proof: Proof::Program("valgrind"),
        needed_by: &["instructions", "apps"],
        why: "counts instructions; checks accesses to memory",
    },
    Package {
        name: "iproute2",
        proof: Proof::Program("ip"),
        needed_by: &["apps", "soak"],
        why: "creates the networks in which programs are tested",
    },
    Package {
        name: "ethtool",
        proof: Proof::File("/usr/sbin/ethtool"),
        needed_by: &[],
        why: "disables offloads, so that captured packets are TCP segments",
    },
];

/// Returns `true` if the package is in the table.
#[must_use]
pub fn known(name: &str) -> bool {
    PACKAGES.iter().any(|package| package.name == name)
}

/// Returns each package with the steps that are skipped without it.
pub fn needs() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    PACKAGES
        .iter()
        .map(|package| (package.name, package.needed_by))
}

/// Packages of other software for comparison in `cargo xtask bench`. No step needs them.
const PEERS: &[Package] = &[
    Package {
        name: "libfabric-bin",
        proof: Proof::Program("fi_pingpong"),
        needed_by: &[],
        why: "libfabric over TCP, a ping-pong",
    },
    Package {
        name: "libfabric-dev",
        proof: Proof::File("/usr/include/rdma/fabric.h"),
        needed_by: &[],
        why: "libfabric over TCP, a program of our own for bandwidth",
    },
    Package {
        name: "ucx-utils",
        proof: Proof::Program("ucx_perftest"),
        needed_by: &[],
        why: "UCX over TCP",
    },
    Package {
        name: "perftest",
        proof: Proof::Program("ib_write_bw"),
        needed_by: &[],
        why: "the verbs' own benchmarks",
    },
];

impl Package {
    fn installed(&self) -> bool {
        match self.proof {
            Proof::Program(name) => {
                find_program(name).is_some() || Path::new("/usr/sbin").join(name).is_file()
            }
            Proof::File(path) => Path::new(path).exists(),
        }
    }

    /// Describes the missing package and names the steps that are skipped.
    fn describe_missing(&self) -> String {
        let skipped = match self.needed_by {
            [] => "no step is skipped".to_owned(),
            steps => format!("skipped without it: {}", steps.join(", ")),
        };
        format!("missing package {}: {} ({skipped})", self.name, self.why)
    }
}

/// Returns `true` if the package is installed. Also returns `false` for a name that is not in the
/// table.
#[must_use]
pub fn have(name: &str) -> bool {
    PACKAGES
        .iter()
        .any(|package| package.name == name && package.installed())
}

fn missing() -> Vec<&'static Package> {
    PACKAGES
        .iter()
        .filter(|package| !package.installed())
        .collect()
}

/// Installs missing packages where that is possible, and lists the packages that are still missing.
pub fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    // Installing a package may remove another package of the table, so try twice.
    for _ in 0..2 {
        let names: Vec<_> = missing().iter().map(|package| package.name).collect();
        if names.is_empty()
            || !context.install
            || !rustix::process::geteuid().is_root()
            || find_program("apt-get").is_none()
        {
            break;
        }
        log.say(format!("installing {}", names.join(", ")));
        if let Err(error) = install(log, &names) {
            // Do not fail, for example without a network: the steps that need the package are
            // skipped.
            log.say(format!("cannot install: {error:#}"));
        }
    }
    let absent = missing();
    for package in &absent {
        log.say(package.describe_missing());
    }
    if absent.is_empty() {
        log.say(format!("all {} packages are installed", PACKAGES.len()));
        return Ok(Outcome::Passed);
    }
    let names: Vec<_> = absent.iter().map(|package| package.name).collect();
    Ok(Outcome::Skipped(format!(
        "not installed: {}",
        names.join(", ")
    )))
}

/// Installs the software for comparison in `cargo xtask bench`, where that is possible. The
/// benchmark omits missing software.
pub fn install_peers(context: &Context) {
    let names: Vec<_> = PEERS
        .iter()
        .filter(|peer| !peer.installed())
        .map(|peer| peer.name)
        .collect();
    if names.is_empty()
        || !rustix::process::geteuid().is_root()
        || find_program("apt-get").is_none()
    {
        return;
    }
    let path = context.log_dir().join("bench-packages.log");
    let result = Log::create(&path, INSTALL_LIMIT).and_then(|mut log| install(&mut log, &names));
    if let Err(error) = result {
        println!("cannot install {}: {error:#}", names.join(", "));
    }
}

/// Installs all packages together. If that fails, installs them one by one, so that only the
/// packages that cannot be installed are missing.
fn install(log: &mut Log, names: &[&str]) -> Result<()> {
    log.run(apt().arg("update"))?;
    let Err(error) = install_together(log, names) else {
        return Ok(());
    };
    log.say(format!("cannot install them together: {error:#}"));
    let mut failed = Vec::new();
    for name in names {
        if let Err(error) = install_together(log, &[name]) {
            log.say(format!("{name}: {error:#}"));
            failed.push(*name);
        }
    }
    anyhow::ensure!(failed.is_empty(), "{}", failed.join(", "));
    Ok(())
}

fn install_together(log: &mut Log, names: &[&str]) -> Result<()> {
    log.run(
        apt()
            .args(["-y", "--no-install-recommends", "install"])
            .args(names),
    )
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .arg("--quiet");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_package_names_skipped_steps() {
        let package = Package {
            name: "surely-not-there",
            proof: Proof::File("/surely/not/there"),
            needed_by: &["apps"],
            why: "why not",
        };
        assert!(!package.installed());
        assert_eq!(
            package.describe_missing(),
            "missing package surely-not-there: why not (skipped without it: apps)"
        );
    }

    #[test]
    fn program_in_path_is_found() {
        let package = Package {
            name: "dash",
            proof: Proof::Program("sh"),
            needed_by: &[],
            why: "",
        };
        assert!(package.installed());
        assert!(!have("surely-not-there"));
    }
}
