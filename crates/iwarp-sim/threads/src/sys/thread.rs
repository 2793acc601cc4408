//! Threads of the engine.

use crate::world;
use std::io;

/// Starts a thread that does not keep the execution from its end.
#[allow(clippy::unnecessary_wraps, reason = "the real one can fail")]
pub(crate) fn spawn_without_signals(
    _: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    world::spawn_detached(run);
    Ok(())
}

/// The kernel keeps threads from their processor now and then, for any time.
pub(crate) fn kept_from_processor(_since: u64) -> u64 {
    match world::random(4) {
        0 => world::random(3_000_000),
        _ => 0,
    }
}

/// Only the watch asks, which does not run here.
pub(crate) const fn own_number() -> u32 {
    0
}

/// The same.
pub(crate) const fn is_runnable(_: u32) -> bool {
    true
}
