//! `cargo xtask interop`: tests our libraries and our kernel module against other implementations
//! and with unmodified RDMA programs.
//!
//! Every suite is a list of cases ([`case`]). [`needs`] decides whether a case can run on this
//! machine; [`rows`] runs the cases and reports the results.
//!
//! [`apps`] runs the distribution's RDMA programs on our libraries, with both ends on this machine.
//! [`siw`] connects our libraries to the Linux kernel's software iWARP, which runs in a virtual
//! machine ([`guest`]). [`attack`] is a peer that violates the protocol. [`kernel`] (`cargo xtask
//! kernel`) builds our kernel module and runs programs on it in a virtual machine. [`soak`] (`cargo
//! xtask soak`) runs two processes on our libraries under load, while it kills processes and cuts
//! the network.

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
/// Test iwarp against other implementations and with unmodified programs
struct Cli {
    #[command(subcommand)]
    suite: Suite,
}

/// The suite to run.
#[derive(Subcommand)]
enum Suite {
    /// Against the Linux kernel's software iWARP, in a virtual machine
    Siw(siw::SiwArgs),
    /// The distribution's unmodified programs on our libraries
    Apps(apps::AppsArgs),
    /// Attacks on servers by a peer that violates the protocol, while a good client uses them
    Hostile(attack::HostileArgs),
    /// Programs on our kernel module, in a virtual machine
    Kernel(kernel::KernelArgs),
    /// Two processes on our libraries under load, with killed processes and network failures
    Soak(soak::SoakArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().suite {
        Suite::Siw(args) => siw::command(&args).map(|()| Outcome::Passed),
        Suite::Apps(args) => apps::command(&args),
        Suite::Hostile(args) => attack::command(&args),
        Suite::Kernel(args) => kernel::command(&args),
        Suite::Soak(args) => soak::command(&args),
    };
    result.map_or_else(
        |error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        },
        |outcome| outcome.exit_code(),
    )
}
