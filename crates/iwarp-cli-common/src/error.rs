//! The errors that a subcommand can return, and their exit codes.

use crate::text::printable;
use std::fmt;
use std::process::ExitCode;

/// Result type of the subcommands.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure, described for the user at the terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The arguments are wrong or contradict each other; exit code 2.
    Usage(String),
    /// The command failed; exit code 1.
    Failed(String),
    /// The server is full; the client may retry. Exit code 1 if it stays full.
    Busy(String),
    /// The command failed, and the message is trusted text of several lines; exit code 1.
    Advice(String),
    /// A program could not be started; the exit code is 126 or 127, as in shells.
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

    /// Prefixes the message with a description of the failed operation. [`Error::Busy`] stays
    /// `Busy`; every other error becomes `Failed`.
    #[must_use]
    pub fn during(self, what: impl fmt::Display) -> Self {
        match self {
            Self::Busy(m) => Self::Busy(format!("{what}: {m}")),
            other => Self::Failed(format!("{what}: {other}")),
        }
    }

    /// Returns the exit code of the process.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
            Self::Failed(_) | Self::Busy(_) | Self::Advice(_) => ExitCode::from(1),
            Self::Program(_, code) => ExitCode::from(*code),
        }
    }
}

/// Writes the message. Control characters are escaped, except in [`Error::Advice`].
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(m) | Self::Failed(m) | Self::Busy(m) | Self::Program(m, _) => {
                // The message may contain file names and text from peers.
                f.write_str(&printable(m))
            }
            Self::Advice(m) => {
                let lines: Vec<_> = m.split('\n').map(printable).collect();
                f.write_str(&lines.join("\n"))
            }
        }
    }
}

/// Adds a description of the failed operation to an error.
pub trait Context<T> {
    /// Turns the error into a runtime failure that starts with `what`.
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|e| Error::Failed(format!("{what}: {e}")))
    }
}
