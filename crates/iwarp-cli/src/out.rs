//! Lines on stdout that nobody may be reading any more: `iwarp … | head -1` ends the reader first, and that is no reason
//! to panic, nor to stop serving others.

use std::fmt::Arguments;
use std::io::Write as _;

/// Prints a line at once.
pub(crate) fn line(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => tracing::debug!("stdout: {e}"),
        Err(e) => tracing::warn!("cannot write to stdout: {e}"),
        Ok(()) => {}
    }
}
