//! What a person who presses Ctrl-C still gets to see.

use crate::error::{Context as _, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Runs `act` when the process is interrupted or asked to end, and ends the process with the exit code that `act` returns.
/// `act` gets the exit code that shells have for this signal. It runs in a thread of its own, while the others go on.
///
/// # Errors
/// When the system has no descriptors or no thread for it.
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
