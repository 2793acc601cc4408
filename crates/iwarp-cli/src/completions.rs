//! `iwarp completions SHELL`: prints a completion script.

use clap::{Args, Command};
use clap_complete::Shell;
use iwarp_cli_common::error::Result;
use iwarp_cli_common::out;

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
    // Generate into memory first, because a failing write would panic.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "iwarp", &mut script);
    out::text(&String::from_utf8_lossy(&script)).map(drop)
}
