//! Warnings, for example about settings in the environment. They are written to the log, or to
//! standard error in a program without a log, such as a C program.

use crate::sys::process_lock::ProcessLock;

/// The reported warnings. Each is reported once, although settings are read for each opened device.
static REPORTED: ProcessLock<Vec<String>> = ProcessLock::new("complain::REPORTED", Vec::new());
/// Maximum number of warnings. Further warnings are not reported.
const REPORTED_MAX: usize = 64;

/// Reports `text` once per process: by a `tracing` warning, or on standard error in a program
/// without a subscriber.
pub fn once(text: String) {
    {
        let mut reported = REPORTED.lock();
        if reported.len() >= REPORTED_MAX || reported.contains(&text) {
            return;
        }
        reported.push(text.clone());
    }
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        stderr(&format!("iwarp: {text}\n"));
    }
}

/// Writes to standard error with one system call, so that lines of several processes are not
/// interleaved.
pub(crate) fn stderr(text: &str) {
    // Does not use the standard library's lock, which a thread of the parent may have held at a
    // fork.
    let _ = rustix::io::write(std::io::stderr(), text.as_bytes());
}
