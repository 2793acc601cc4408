//! How a check that did not fail ended, within a program and from one program to another.

use std::process::{ExitCode, ExitStatus};

/// How a step that did not fail ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It checked what it is for.
    Passed,
    /// It could not check it here, and why.
    Skipped(String),
}

/// The exit code of a program of ours that could not check anything here. Other test drivers use the same number.
const SKIPPED: u8 = 77;
/// Begins the line in which that program says why.
const REASON: &str = "skipped: ";

impl Outcome {
    /// What a program ends with. A reason is printed first, in a line of its own.
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

    /// Reads back what [`Outcome::exit_code`] of a program was, from its exit status and its output.
    ///
    /// Returns `None` if the program failed.
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
        Some(Self::Skipped(reason.unwrap_or("it did not say why").into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    #[test]
    fn a_program_can_pass_fail_or_skip() {
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
