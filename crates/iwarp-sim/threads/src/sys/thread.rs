//! Threads of the engine.

use crate::world;
use std::io;

/// Starts a thread that does not prevent the execution from ending.
#[allow(clippy::unnecessary_wraps, reason = "the real function can fail")]
pub(crate) fn spawn_without_signals(
    _: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    world::spawn_detached(run);
    Ok(())
}

/// Returns a random time for which the kernel did not run the thread although it could.
pub(crate) fn kept_from_processor(_since: u64) -> u64 {
    match world::random(4) {
        0 => world::random(3_000_000),
        _ => 0,
    }
}

/// Not called: only `engine/watch.rs` uses it, which the model does not start.
pub(crate) const fn thread_id() -> u32 {
    0
}

/// Not called, like [`thread_id`].
pub(crate) const fn is_runnable(_: u32) -> bool {
    true
}

/// Does nothing: the model decides which thread runs.
pub(crate) const fn request_time_slice(_: u64) {}

/// Does nothing, as [`request_time_slice`].
pub(crate) const fn request_precise_sleeps() {}
