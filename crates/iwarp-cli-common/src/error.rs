//! The errors that a subcommand may end with, and the exit code of each.

use crate::text::printable;
use std::fmt;
use std::process::ExitCode;

/// Result of the functions of this command.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure, in words for the person at the terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The arguments do not fit each other; exit code 2.
    Usage(String),
    /// Something failed while running; exit code 1.
    Failed(String),
    /// The server has no place for another client now; exit code 1 if that does not change.
    Busy(String),
    /// Something failed while running, and the message has several lines of our own; exit code 1.
    Advice(String),
    /// A program that cannot be started, and the exit code that shells have for that.
    Program(String, u8),
}

impl Error {
    /// A runtime failure.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into())
    }

    /// A usage failure.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    /// Adds a description of what was being done in front. A busy server stays one.
    #[must_use]
    pub fn during(self, what: impl fmt::Display) -> Self {
        match self {
            Self::Busy(m) => Self::Busy(format!("{what}: {m}")),
            other => Self::Failed(format!("{what}: {other}")),
        }
    }

    /// The process exit code of this failure.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
            Self::Failed(_) | Self::Busy(_) | Self::Advice(_) => ExitCode::from(1),
            Self::Program(_, code) => ExitCode::from(*code),
        }
    }
}

/// The message, with everything escaped that a terminal or a log could mistake.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(m) | Self::Failed(m) | Self::Busy(m) | Self::Program(m, _) => {
                // Names of files and the words of peers are in it.
                f.write_str(&printable(m))
            }
            Self::Advice(m) => {
                let lines: Vec<_> = m.split('\n').map(printable).collect();
                f.write_str(&lines.join("\n"))
            }
        }
    }
}

/// Adds a description of what was being done in front of a lower error.
pub trait Context<T> {
    /// Turns the error into a runtime failure that starts with `what`.
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|e| Error::Failed(format!("{what}: {e}")))
    }
}
