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

pub(crate) fn run(args: &CompletionsArgs, command: Command) -> Result<()> {
    out::text(&script(args.shell, command)).map(drop)
}

fn script(shell: Shell, mut command: Command) -> String {
    // Generate into memory first, because a failing write would panic.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "iwarp", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory as _;

    #[test]
    fn script_completes_this_command() {
        for (shell, words) in [
            (Shell::Bash, "complete -F _iwarp"),
            (Shell::Zsh, "#compdef iwarp\n"),
            (Shell::Fish, "complete -c iwarp"),
        ] {
            assert!(script(shell, Cli::command()).contains(words), "{shell}");
        }
    }
}
