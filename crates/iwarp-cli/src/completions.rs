//! `iwarp completions SHELL`: prints a completion script.

use clap::{Args, Command};
use clap_complete::Shell;
use iwarp_cli_common::error::{Context as _, Result};
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

pub(crate) fn run(args: &CompletionsArgs, mut command: Command) -> Result<()> {
    // Generate into memory first, so that a closed pipe is an error and not a panic.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "iwarp", &mut script);
    std::io::stdout()
        .write_all(&script)
        .context("cannot write the completion script")
}
