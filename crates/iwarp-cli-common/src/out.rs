//! Writes to stdout. A closed pipe, as in `iwarp … | head -1`, must neither panic nor stop a
//! server. Any other failure, such as a full disk, makes the command fail when it ends ([`check`]).

use crate::error::{Error, Result};
use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write as _};
use std::sync::OnceLock;

/// The first failure of a write.
static FAILURE: OnceLock<String> = OnceLock::new();

/// Prints a line and flushes it.
pub fn line(text: Arguments<'_>) {
    let _ = self::text(&format!("{text}\n"));
}

/// Prints a text and flushes it. Returns `false` if stdout has been closed.
///
/// # Errors
/// The text cannot be written, for example because the disk is full.
pub fn text(text: &str) -> Result<bool> {
    let mut out = io::stdout().lock();
    note(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Keeps the failure of a write to stdout for [`check`]. Returns `false` if stdout has been closed.
///
/// # Errors
/// The write has failed, and not because the pipe was closed.
pub fn note(written: io::Result<()>) -> Result<bool> {
    match written {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => {
            tracing::debug!("stdout: {e}");
            Ok(false)
        }
        Err(e) => {
            tracing::debug!("stdout: {e}");
            let _ = FAILURE.set(e.to_string());
            check().map(|()| true)
        }
    }
}

/// Reports whether all output has been written. A command calls this before it exits with success.
///
/// # Errors
/// An earlier write has failed, and not because the pipe was closed.
pub fn check() -> Result<()> {
    match FAILURE.get() {
        Some(why) => Err(Error::failed(format!("cannot write to stdout: {why}"))),
        None => Ok(()),
    }
}
