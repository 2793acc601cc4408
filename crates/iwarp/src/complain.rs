//! Warnings for the person who set the environment. They go to the log; a C program has none, and gets them on standard
//! error, as `IWARP_STATS` does it.

use parking_lot::Mutex;
use std::io::Write as _;

/// What was said already. Settings are read again for each device that is opened.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// More different complaints than this are not worth the memory.
const MANY: usize = 64;

/// Says `text`, once in a process.
pub(crate) fn once(text: String) {
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

/// Writes to standard error at once: other processes write there, too, and pieces would mingle.
pub(crate) fn stderr(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
