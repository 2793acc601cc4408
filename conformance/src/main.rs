//! `cargo xtask interop`: programs that others wrote show that we do what they expect.
//!
//! [`apps`] runs the distribution's RDMA programs on our libraries. [`siw`] runs programs between us and the kernel's
//! software iWARP in an emulated machine.

mod apps;
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

/// Which peer.
#[derive(Subcommand)]
enum Peer {
    /// The Linux kernel's software iWARP, in an emulated machine
    Siw(siw::SiwArgs),
    /// Programs of the distribution, as they are, on our libraries
    Apps(apps::AppsArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().peer {
        Peer::Siw(args) => siw::command(&args).map(|()| Outcome::Passed),
        Peer::Apps(args) => apps::command(&args),
    };
    result.map_or_else(
        |error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        },
        |outcome| outcome.exit_code(),
    )
}
