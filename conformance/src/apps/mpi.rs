//! MPI, with a program that checks its results (`exchange.c`): Open MPI over libfabric's verbs
//! provider, and Open MPI and MPICH over UCX.
//!
//! Open MPI uses libfabric with `--mca mtl ofi`; `--mca btl ofi` excludes the provider
//! `verbs;ofi_rxm` by name. It uses UCX with `--mca pml ucx`. Its `btl openib` needs rdma_cm
//! support on Ethernet, without which Debian builds it. Debian's MPICH supports only UCX.

use anyhow::{Result, bail};

use super::checks::{expect, octets_sent};
use super::stage::{Stage, WIRE_V4, WIRE_V6};
use crate::case::{Case, Verdict};

const OPEN_MPI: &[&str] = &["openmpi-bin", "libopenmpi-dev"];
const MPICH: &[&str] = &["mpich", "libmpich-dev"];
const SOURCE: &str = include_str!("exchange.c");
/// The parts that `exchange.c` reports when all ranks have checked them.
const PARTS: [&str; 5] = ["ring", "allreduce", "alltoall", "neighbours", "windows"];
const SHMEM_SOURCE: &str = include_str!("shmem.c");
/// The parts that `shmem.c` reports when all processes have checked them.
const SHMEM_PARTS: [&str; 3] = ["put", "get", "atomics"];
/// Without these variables, ranks on one machine would use shared memory.
const OVER_UCX: &[(&str, &str)] = &[("UCX_TLS", "rc,self"), ("UCX_NET_DEVICES", "iwarp1:1")];
const OVER_UD: &[(&str, &str)] = &[("UCX_TLS", "ud,self"), ("UCX_NET_DEVICES", "iwarp1:1")];
#[rustfmt::skip]
const OFI: &[&str] = &[
    "--oversubscribe", "--mca", "plm", "isolated", "--mca", "pml", "cm", "--mca", "mtl", "ofi",
    "--mca", "mtl_ofi_provider_include", "verbs;ofi_rxm",
    // Without `osc pt2pt`, ranks on one machine use shared memory for put and get.
    "--mca", "osc", "pt2pt",
];
#[rustfmt::skip]
const UCX: &[&str] = &[
    "--oversubscribe", "--mca", "plm", "isolated", "--mca", "pml", "ucx", "--mca", "osc", "ucx",
];

/// An implementation of MPI, and its transport.
#[derive(Clone, Copy)]
struct MpiSetup {
    compiler: &'static str,
    launcher: &'static str,
    options: &'static [&'static str],
    /// Options of `iwarp run`.
    run: &'static [&'static str],
    variables: &'static [(&'static str, &'static str)],
}

const OPEN_MPI_OVER_OFI: MpiSetup = MpiSetup {
    compiler: "mpicc.openmpi",
    launcher: "mpirun.openmpi",
    options: OFI,
    // Offer a single address. Open MPI distributes the ranks over all devices, and ranks on devices
    // of different address families could not connect.
    run: &["--bind", WIRE_V4],
    variables: &[],
};
const OPEN_MPI_OVER_OFI_V6: MpiSetup = MpiSetup {
    run: &["--bind", WIRE_V6],
    ..OPEN_MPI_OVER_OFI
};
const OPEN_MPI_OVER_UCX: MpiSetup = MpiSetup {
    options: UCX,
    run: &["--as", "roce"],
    variables: OVER_UCX,
    ..OPEN_MPI_OVER_OFI
};
const OPEN_MPI_OVER_UD: MpiSetup = MpiSetup {
    variables: OVER_UD,
    ..OPEN_MPI_OVER_UCX
};
const MPICH_OVER_UCX: MpiSetup = MpiSetup {
    compiler: "mpicc.mpich",
    launcher: "mpirun.mpich",
    options: &["-launcher", "fork"],
    ..OPEN_MPI_OVER_UCX
};

pub(super) fn cases() -> Vec<Case<Stage>> {
    let open_mpi = [
        case(
            "mpirun",
            "`--mca mtl ofi`, 4 ranks: ring, allreduce, alltoall, neighbours, windows",
            OPEN_MPI_OVER_OFI,
        ),
        case("mpirun", "IPv6", OPEN_MPI_OVER_OFI_V6),
        long("mpirun", "8 ranks, messages up to 8 MiB", OPEN_MPI_OVER_OFI),
        case(
            "mpirun",
            "`--as roce`, `--mca pml ucx --mca osc ucx`, 4 ranks, the same",
            OPEN_MPI_OVER_UCX,
        ),
        long(
            "mpirun",
            "`--as roce`, `--mca pml ucx --mca osc ucx`, 8 ranks, messages up to 8 MiB",
            OPEN_MPI_OVER_UCX,
        ),
        long(
            "mpirun",
            "`--as roce`, `--mca pml ucx --mca osc ucx`, `UCX_TLS=ud`, \
             8 ranks, messages up to 8 MiB",
            OPEN_MPI_OVER_UD,
        ),
    ];
    let mpich = [
        case(
            "mpirun.mpich",
            "`--as roce`, 4 ranks over UCX: ring, allreduce, alltoall, neighbours, windows",
            MPICH_OVER_UCX,
        ),
        long(
            "mpirun.mpich",
            "`--as roce`, 8 ranks, messages up to 8 MiB",
            MPICH_OVER_UCX,
        ),
    ];
    let shmem = ["rc", "ud"].map(|transport| {
        let what = match transport {
            "rc" => "OpenSHMEM, `--as roce`, `UCX_TLS=rc`, 4 processes: put, get, atomics",
            _ => "`--as roce`, `UCX_TLS=ud`, the same",
        };
        Case::new("oshrun", what, move |stage| shmem(stage, transport))
            .needs(OPEN_MPI)
            .long()
            .limit(180)
    });
    let open_mpi = open_mpi.map(|case| case.needs(OPEN_MPI));
    let mpich = mpich.map(|case| case.needs(MPICH));
    open_mpi
        .into_iter()
        .chain(mpich)
        .chain(shmem)
        .map(Case::wire)
        .collect()
}

fn case(program: &'static str, what: &str, setup: MpiSetup) -> Case<Stage> {
    Case::new(program, what, move |stage| {
        exchange(stage, setup, 4, 1 << 18)
    })
}

fn long(program: &'static str, what: &str, setup: MpiSetup) -> Case<Stage> {
    let run = move |stage: &Stage| exchange(stage, setup, 8, 1 << 21);
    Case::new(program, what, run).long().limit(180)
}

/// Runs `exchange.c`. `longest` is the length of the longest message, in words of 4 bytes.
fn exchange(stage: &Stage, setup: MpiSetup, ranks: usize, longest: usize) -> Result<Verdict> {
    std::fs::write(stage.dir().join("exchange.c"), SOURCE)?;
    stage
        .start_plain(&[setup.compiler, "-O2", "-o", "exchange", "exchange.c"])?
        .success()?;
    let (count, longest) = (ranks.to_string(), longest.to_string());
    let dir = stage.dir().display().to_string();
    let mut variables = vec![("TMPDIR", dir.as_str())];
    variables.extend(setup.variables);
    let mut words = vec![setup.launcher, "-np", &count];
    words.extend(setup.options);
    words.extend(["./exchange", &longest]);
    let run = [setup.run, &["--stats"]].concat();
    let output = stage
        .start_with(&run, None, &variables, &words)?
        .success()?;
    for part in PARTS {
        expect(&output, &format!("{part}: correct on {ranks} ranks"))?;
    }
    // The messages of each rank must have gone through our library.
    let sent: Vec<u64> = output.lines().filter_map(octets_sent).collect();
    let busy = sent.iter().filter(|octets| **octets > 1 << 20).count();
    if busy != ranks {
        bail!("only {busy} of {ranks} ranks sent more than 1 MiB through our library");
    }
    let total: u64 = sent.iter().sum();
    Ok(Verdict::passed(format!("{} MiB sent", total >> 20)))
}

/// Runs `shmem.c` with Open MPI's OpenSHMEM over UCX.
fn shmem(stage: &Stage, transport: &str) -> Result<Verdict> {
    std::fs::write(stage.dir().join("shmem.c"), SHMEM_SOURCE)?;
    stage
        .start_plain(&["oshcc", "-O2", "-o", "shmem", "shmem.c"])?
        .success()?;
    let dir = stage.dir().display().to_string();
    let transports = format!("{transport},self");
    let variables = [
        ("TMPDIR", dir.as_str()),
        ("UCX_TLS", &transports),
        ("UCX_NET_DEVICES", "iwarp1:1"),
    ];
    #[rustfmt::skip]
    let words = [
        "oshrun", "-np", "4", "--oversubscribe", "--mca", "plm", "isolated", "--mca", "spml", "ucx",
        "--mca", "scoll", "basic", "./shmem", "65536",
    ];
    // With these transports, the processes can communicate only over our devices.
    let output = stage
        .start_with(&["--as", "roce"], None, &variables, &words)?
        .success()?;
    for part in SHMEM_PARTS {
        expect(&output, &format!("{part}: correct on 4 processes"))?;
    }
    Ok(Verdict::passed("4 processes"))
}
