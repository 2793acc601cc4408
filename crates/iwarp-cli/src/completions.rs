//! `iwarp completions SHELL`: prints a completion script.

use crate::cli::Cli;
use crate::error::{Context as _, Result};
use clap::{Args, CommandFactory as _};
use clap_complete::Shell;
use std::io::Write as _;

/// Arguments of `iwarp completions`.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES:
  iwarp completions bash > ~/.local/share/bash-completion/completions/iwarp
  iwarp completions zsh  > ~/.zfunc/_iwarp")]
pub(crate) struct CompletionsArgs {
    /// Shell to write the script for
    shell: Shell,
}

/// Writes the script to stdout.
pub(crate) fn run(args: &CompletionsArgs) -> Result<()> {
    // The script is made in memory first, so that a closed pipe is an error and not a panic.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "iwarp", &mut script);
    std::io::stdout()
        .write_all(&script)
        .context("cannot write the completion script")
}
