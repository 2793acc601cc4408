//! The `iwarp` command: RDMA over plain TCP for people with a shell.
//!
//! Each subcommand is a folder or a file. This file parses the arguments, starts the log and maps
//! the result to an exit code: 0 success, 1 runtime failure, 2 wrong usage.
#![forbid(unsafe_code)]

mod cli;
mod completions;
mod devices;
mod logging;
mod man;
mod netlink;
mod perf;
mod ping;
mod run;
mod stat;

use clap::Parser as _;
use iwarp_cli_common::text;
use std::process::ExitCode;

fn main() -> ExitCode {
    // clap itself exits with 2 on wrong usage and 0 on --help and --version.
    let cli = cli::Cli::parse();
    logging::init(cli.log_level());
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("iwarp: {e}");
            e.exit_code()
        }
    }
}
