//! Warnings for the person who set the environment. They go to the log. A C program has no log, and gets them on standard error,
//! as `IWARP_STATS` does it.

use crate::sys::process_lock::ProcessLock;

/// The texts that were reported. Settings are read again for each device that is opened.
static SAID: ProcessLock<Vec<String>> = ProcessLock::new("complain::SAID", Vec::new());
/// Most different texts that are kept. Further ones are not reported.
const MANY: usize = 64;

/// Reports `text`, once in a process: by a `tracing` warning, or on standard error in a program without a subscriber.
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

/// Writes to standard error in one call: other processes write there, too, and the pieces would mingle.
pub(crate) fn stderr(text: &str) {
    // Without the lock of the standard library, which a thread of the parent may have in a child of a fork.
    let _ = rustix::io::write(std::io::stderr(), text.as_bytes());
}
