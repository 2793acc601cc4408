//! `cargo xtask interop`: tests our libraries with programs that others wrote.
//!
//! [`apps`] runs the distribution's RDMA programs on our libraries, with both ends on this machine.
//! [`siw`] connects our libraries with the Linux kernel's software iWARP (siw), which runs in an
//! emulated machine. [`attack`] is a peer that breaks the rules. [`kernel`] (`cargo xtask kernel`)
//! builds our kernel module, runs programs on it in such a machine ([`device`]), and the engine
//! alone ([`engine`]), on a kernel of choice ([`boot`]). [`soak`] (`cargo xtask soak`) keeps two
//! processes on our libraries busy while all around them fails.

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
    /// Programs of the distribution, as they are, on our libraries
    Apps(apps::AppsArgs),
    /// A peer that breaks the rules, against servers on our libraries that serve a good client at
    /// the same time
    Hostile(attack::HostileArgs),
    /// Our own kernel module
    Kernel(kernel::KernelArgs),
    /// Both ends ours, busy for long, while processes and network are disturbed
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
