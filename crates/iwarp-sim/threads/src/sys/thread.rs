//! Threads of the engine.

use crate::world;
use std::io;

/// Starts a thread that does not prevent the execution from ending.
#[allow(clippy::unnecessary_wraps, reason = "the real one can fail")]
pub(crate) fn spawn_without_signals(
    _: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    world::spawn_detached(run);
    Ok(())
}

/// Returns how long the kernel kept the thread from its processor, at random.
pub(crate) fn kept_from_processor(_since: u64) -> u64 {
    match world::random(4) {
        0 => world::random(3_000_000),
        _ => 0,
    }
}

/// Only used by the watch, which does not run here.
pub(crate) const fn own_number() -> u32 {
    0
}

/// Only used by the watch.
pub(crate) const fn is_runnable(_: u32) -> bool {
    true
}
