//! Warnings about the environment's settings. They go to the log, or to standard error in a program
//! without a log, such as a C program.

use crate::sys::process_lock::ProcessLock;

/// The reported texts. Settings are read again for each device that is opened.
static SAID: ProcessLock<Vec<String>> = ProcessLock::new("complain::SAID", Vec::new());
/// The largest number of different texts. Further ones are not reported.
const MANY: usize = 64;

/// Reports `text` once per process: by a `tracing` warning, or on standard error in a program
/// without a subscriber.
pub fn once(text: String) {
    {
        let mut said = SAID.lock();
        if said.len() >= MANY || said.contains(&text) {
            return;
        }
        said.push(text.clone());
    }
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        stderr(&format!("iwarp: {text}\n"));
    }
}

/// Writes to standard error in one call, so that the output of other processes is not mixed in.
pub(crate) fn stderr(text: &str) {
    // Without the standard library's lock, which a thread of the parent may have held at a fork.
    let _ = rustix::io::write(std::io::stderr(), text.as_bytes());
}
