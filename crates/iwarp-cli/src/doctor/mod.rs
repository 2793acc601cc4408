//! `iwarp doctor`: checks what the library needs from this machine.
//!
//! Each check prints one line, which is `OK` or says what to do. The checks try what the library
//! does, instead of comparing versions: a container may forbid what its kernel can do.

mod connection;
mod machine;
mod network;

use crate::run;
use clap::Args;
use iwarp_cli_common::error::{Error, Result};
use iwarp_cli_common::out;
use iwarp_cli_common::text::printable;

/// Arguments of `iwarp doctor`.
#[derive(Debug, Args)]
#[command(
    after_help = "Each line is OK or says what to do (FIX). The exit code is 1 if there is \
something to do.

LINES:
  kernel       the calls that the library needs
  seccomp      whether a filter forbids one of them, as in some containers
  limits       of file descriptors and threads; locked memory is not needed
  interfaces   the network interfaces, each of which is a device
  loopback     whether 127.0.0.1 works, for both ends on this host
  settings     the variables IWARP_* of the environment
  connection   a connection to this process itself, and a message
  statistics   whether `iwarp stat` can query this user's processes
  loader       whether the system's programs load our libraries, with `iwarp run`

EXAMPLES:
  iwarp doctor
  iwarp run --check -- PROGRAM    the same for the libraries of one program"
)]
pub(crate) struct DoctorArgs {}

/// The result of a check: a description, or what is wrong and what to do.
type Finding = std::result::Result<String, Problem>;

/// What is wrong, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Problem {
    what: String,
    remedy: String,
}

fn problem<T>(
    what: impl Into<String>,
    remedy: impl Into<String>,
) -> std::result::Result<T, Problem> {
    Err(Problem {
        what: what.into(),
        remedy: remedy.into(),
    })
}

type Check = fn() -> Finding;

/// The checks. Later ones rely on earlier ones.
const CHECKS: [(&str, Check); 9] = [
    ("kernel", machine::kernel),
    ("seccomp", machine::seccomp),
    ("limits", machine::limits),
    ("interfaces", network::interfaces),
    ("loopback", network::loopback),
    ("settings", network::settings),
    ("connection", connection::connection),
    ("statistics", connection::statistics),
    ("loader", loader),
];

/// Runs all checks and prints their lines.
///
/// # Errors
/// A check has found a problem.
pub(crate) fn run(_: &DoctorArgs) -> Result<()> {
    let mut problems = 0;
    for (name, check) in CHECKS {
        let line = match check() {
            Ok(text) => format!("OK   {name:<11} {}", printable(&text)),
            Err(Problem { what, remedy }) => {
                problems += 1;
                format!(
                    "FIX  {name:<11} {}; {}",
                    printable(&what),
                    printable(&remedy)
                )
            }
        };
        out::line(format_args!("{line}"));
    }
    outcome(problems)
}

fn outcome(problems: usize) -> Result<()> {
    match problems {
        0 => Ok(()),
        1 => Err(Error::failed("one thing to do, see the line with FIX")),
        n => Err(Error::failed(format!(
            "{n} things to do, see the lines with FIX"
        ))),
    }
}

/// Loads the libraries into the system's shell, as `iwarp run` does with any program.
fn loader() -> Finding {
    match run::try_loading() {
        Ok(loaded) => Ok(loaded),
        Err(error) => problem(
            // The instructions for installing have several lines.
            error.to_string().replace('\n', " "),
            "until then, programs get the system's libraries",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_counts_the_problems() {
        let text = |problems| outcome(problems).err().map(|error| error.to_string());
        assert_eq!(text(0), None);
        assert!(text(1).unwrap().contains("one thing"));
        assert!(text(2).unwrap().contains("2 things"));
    }
}
