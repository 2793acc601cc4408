//! `cargo xtask interop`: tests our libraries with other people's programs.
//!
//! Every suite is a list of cases ([`case`]). [`needs`] decides whether a case can run on this
//! machine, and [`rows`] runs and reports it.
//!
//! [`apps`] runs the distribution's RDMA programs on our libraries, with both ends on this machine.
//! [`siw`] connects our libraries with the Linux kernel's software iWARP, which runs in an emulated
//! machine ([`guest`]). [`attack`] is a peer that violates the protocol. [`kernel`] (`cargo xtask
//! kernel`) builds our kernel module and runs programs on it in such a machine. [`soak`] (`cargo
//! xtask soak`) keeps two processes on our libraries busy while processes and network fail.

mod apps;
mod attack;
mod case;
mod complaints;
mod excuses;
mod guest;
mod kernel;
mod needs;
mod programs;
mod rows;
mod siw;
mod soak;
mod tempdir;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::outcome::Outcome;

#[derive(Parser)]
#[command(name = "iwarp-conformance", bin_name = "cargo xtask interop", version)]
/// Run programs between us and other implementations
struct Cli {
    #[command(subcommand)]
    peer: Peer,
}

/// The other side of the tests.
#[derive(Subcommand)]
enum Peer {
    /// The Linux kernel's software iWARP, in an emulated machine
    Siw(siw::SiwArgs),
    /// The distribution's unmodified programs on our libraries
    Apps(apps::AppsArgs),
    /// A peer that violates the protocol, against servers that serve a good client meanwhile
    Hostile(attack::HostileArgs),
    /// Our own kernel module
    Kernel(kernel::KernelArgs),
    /// Two processes on our libraries under load, while processes and network fail
    Soak(soak::SoakArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().peer {
        Peer::Siw(args) => siw::command(&args).map(|()| Outcome::Passed),
        Peer::Apps(args) => apps::command(&args),
        Peer::Hostile(args) => attack::command(&args),
        Peer::Kernel(args) => kernel::command(&args),
        Peer::Soak(args) => soak::command(&args),
    };
    result.map_or_else(
        |error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        },
        |outcome| outcome.exit_code(),
    )
}
