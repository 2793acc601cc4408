//! The project's own tasks, run as `cargo xtask COMMAND`.
//!
//! Everything that continuous integration runs is here, so a developer runs exactly the same thing.
//! A new subcommand is a variant of [`Command`] and a module; a new step of `test` is one row in [`steps::STEPS`].

mod apps;
mod bench;
mod compliance;
mod instructions;
mod interop;
mod licences;
mod no_std;
mod runner;
mod steps;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::context::Context;
use xtask::install;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own tasks", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the checks that continuous integration runs
    Test(runner::TestArgs),
    /// Compare the RFC annotations with the RFCs and write the reports
    Compliance {
        /// Rewrite the committed snapshot
        #[arg(long)]
        bless: bool,
    },
    /// Measure everything, interleaved, against plain TCP and other software
    Bench(bench::BenchArgs),
    /// Count the instructions of fixed work and compare them with recorded values
    Instructions {
        /// Record what is counted now
        #[arg(long)]
        bless: bool,
    },
    /// Build in release mode and put command and libraries below a prefix
    Install {
        /// Folder that gets bin/ and lib/iwarp/
        #[arg(long, value_name = "DIR")]
        prefix: std::path::PathBuf,
    },
    /// Build in release mode and write one file that is the command and carries its libraries
    Bundle {
        /// The file to write [default: iwarp-bundle in the target folder]
        #[arg(long, value_name = "FILE")]
        output: Option<std::path::PathBuf>,
    },
    /// Run programs between us and other implementations
    Interop {
        #[command(subcommand)]
        peer: interop::Peer,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Test(args) => runner::test(&args),
        Command::Compliance { bless } => {
            Context::new(false, false).and_then(|context| compliance::command(&context, bless))
        }
        Command::Install { prefix } => install::install(&prefix).map(|()| true),
        Command::Bundle { output } => install::bundle(output.as_deref()).map(|()| true),
        Command::Interop { peer } => interop::command(&peer),
        Command::Bench(args) => bench::command(&args),
        Command::Instructions { bless } => {
            Context::new(false, false).and_then(|context| instructions::command(&context, bless))
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
