//! Writes lines to stdout. A closed pipe, as in `iwarp … | head -1`, must neither panic nor stop a
//! server.

use std::fmt::Arguments;
use std::io::Write as _;

/// Prints a line and flushes it.
pub fn line(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => tracing::debug!("stdout: {e}"),
        Err(e) => tracing::warn!("cannot write to stdout: {e}"),
        Ok(()) => {}
    }
}
