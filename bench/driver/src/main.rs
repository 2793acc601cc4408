//! `cargo xtask bench` and `cargo xtask instructions`: run the measurements, compare them with
//! targets, and draw curves.
//!
//! The package `iwarp-bench` contains the measured programs, which are built in release mode. This
//! program only starts them and processes their figures, so it does not link the measured
//! libraries.

mod bench;
mod instructions;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::context::Context;
use xtask::outcome::Outcome;

#[derive(Parser)]
#[command(name = "iwarp-bench-driver", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure throughput, latency and CPU time, and compare them with plain TCP and other software
    Bench(bench::BenchArgs),
    /// Count the instructions of fixed pieces of work and compare them with recorded values
    Instructions(instructions::InstructionsArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::command(&args).map(|()| Outcome::Passed),
        Command::Instructions(args) => {
            Context::new(false, false).and_then(|context| instructions::command(&context, &args))
        }
    };
    result.map_or_else(
        |error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        },
        |outcome| outcome.exit_code(),
    )
}
