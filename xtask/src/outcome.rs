//! The result of a check that did not fail: passed or skipped. Programs pass it to each other as
//! exit code and last line.

use std::process::{ExitCode, ExitStatus};

/// The result of a step that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The step checked everything that it is for.
    Passed,
    /// The step could not run its checks on this machine, with the reason.
    Skipped(String),
}

/// The exit code of a program of ours that could not check anything on this machine. Automake's
/// test driver uses the same code.
const SKIPPED: u8 = 77;
/// The beginning of the line in which that program prints the reason.
const REASON: &str = "skipped: ";

impl Outcome {
    /// Returns the exit code for this result. Prints the reason of [`Outcome::Skipped`] first, in a
    /// line of its own.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Passed => ExitCode::SUCCESS,
            Self::Skipped(why) => {
                println!("{REASON}{why}");
                ExitCode::from(SKIPPED)
            }
        }
    }

    /// Returns the result of a program that ended with [`Outcome::exit_code`], from its exit status
    /// and its output. Returns `None` if the program failed.
    #[must_use]
    pub fn of_program(status: ExitStatus, output: &str) -> Option<Self> {
        if status.success() {
            return Some(Self::Passed);
        }
        if status.code() != Some(i32::from(SKIPPED)) {
            return None;
        }
        let reason = output
            .lines()
            .rev()
            .find_map(|line| line.strip_prefix(REASON));
        Some(Self::Skipped(
            reason.unwrap_or("for an unknown reason").into(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    #[test]
    fn program_can_pass_fail_or_skip() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        assert_eq!(Outcome::of_program(exited(0), ""), Some(Outcome::Passed));
        assert_eq!(Outcome::of_program(exited(1), "skipped: why\n"), None);
        assert_eq!(Outcome::of_program(ExitStatus::from_raw(9), ""), None);
        assert_eq!(
            Outcome::of_program(exited(77), "one case\nskipped: no namespaces\n"),
            Some(Outcome::Skipped("no namespaces".into()))
        );
    }
}
