//! The `iwarp` command: RDMA over plain TCP for people with a shell.
//!
//! Each subcommand is a folder or a file. This file parses the arguments, starts the log and maps
//! the result to an exit code: 0 success, 1 runtime failure, 2 wrong usage.
#![forbid(unsafe_code)]

mod cli;
mod completions;
mod devices;
mod doctor;
mod logging;
mod man;
mod netlink;
mod perf;
mod ping;
mod run;
mod stat;

use clap::Parser as _;
use iwarp_cli_common::{out, text};
use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match cli::Cli::try_parse() {
        // Help and version; their exit code is 0 if they can be printed.
        Err(help) if !help.use_stderr() => {
            let printed = help.print().and_then(|()| std::io::stdout().flush());
            out::note(printed).map(drop)
        }
        // clap prints the mistake, and exits with 2.
        Err(wrong_usage) => wrong_usage.exit(),
        Ok(cli) => {
            logging::init(cli.log_level(), cli.log_format());
            cli.run()
        }
    };
    match result.and_then(|()| out::check()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            logging::failure(&e);
            e.exit_code()
        }
    }
}
