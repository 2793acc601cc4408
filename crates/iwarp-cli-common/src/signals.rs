//! Reacts to Ctrl-C and SIGTERM.

use crate::error::{Context as _, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// On SIGINT or SIGTERM, calls `act` in a separate thread, and then exits with the code that `act`
/// returns. `act` gets the exit code that shells use for the signal. Other threads keep running
/// meanwhile.
///
/// # Errors
/// Fails if no file descriptors are left or the thread cannot be started.
pub fn on_interrupt(act: impl FnOnce(i32) -> i32 + Send + 'static) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot wait for signals")?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                std::process::exit(act(128 + signal));
            }
        })
        .context("cannot wait for signals")?;
    Ok(())
}
