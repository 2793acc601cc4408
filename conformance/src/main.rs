//! `cargo xtask interop`: tests our libraries with programs that others wrote.
//!
//! [`apps`] runs the distribution's RDMA programs on our libraries, with both ends on this machine. [`siw`] connects our
//! libraries with the Linux kernel's software iWARP (siw), which runs in an emulated machine. [`engine`] (`cargo xtask kernel`)
//! runs the engine in the kernel of such a machine.

mod apps;
mod engine;
mod siw;

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
    /// Nobody: two queue pairs of ours in a Linux kernel, in an emulated machine
    Kernel(engine::KernelArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().peer {
        Peer::Siw(args) => siw::command(&args).map(|()| Outcome::Passed),
        Peer::Apps(args) => apps::command(&args),
        Peer::Kernel(args) => engine::command(&args),
    };
    result.map_or_else(
        |error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        },
        |outcome| outcome.exit_code(),
    )
}
