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
    if !record(&mut REPORTED.lock(), &text) {
        return;
    }
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        stderr(&format!("iwarp: {text}\n"));
    }
}

/// Records a warning. Returns `false` if it must not be reported.
fn record(reported: &mut Vec<String>, text: &str) -> bool {
    let is_new = reported.len() < REPORTED_MAX && reported.iter().all(|known| known != text);
    if is_new {
        reported.push(text.to_owned());
    }
    is_new
}

/// Writes to standard error with one system call, so that lines of several processes are not
/// interleaved.
pub(crate) fn stderr(text: &str) {
    // Does not use the standard library's lock, which a thread of the parent may have held at a
    // fork.
    let _ = rustix::io::write(std::io::stderr(), text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_unique_and_limited() {
        let mut reported = Vec::new();
        let texts: Vec<_> = (0..REPORTED_MAX + 1).map(|n| n.to_string()).collect();
        for (n, text) in texts.iter().enumerate() {
            assert_eq!(record(&mut reported, text), n < REPORTED_MAX, "{text}");
            assert!(!record(&mut reported, text), "{text} twice");
        }
        assert_eq!(reported, texts[..REPORTED_MAX]);
    }
}
