//! Live statistics: a process that uses the library can be asked while it runs.
//!
//! From the moment its progress thread starts, a process listens on a Unix socket (`place`), to which only its own user and root
//! can connect. A process that connects gets one JSON document (`document`) and the end of the stream. Nothing listens on the
//! network. The data path keeps no figures for this. While no process asks, no thread wakes up for it.
//!
//! * `IWARP_STAT=off` turns it off; `IWARP_STAT=/DIRECTORY` puts the socket there. If the socket cannot be made, the process
//!   works without it.
//! * A child of `fork` gets a socket of its own when it first uses the library. It does not keep its parent's.
//! * If the mounts of a process hide `/tmp` and `/run/user` (a container), ask it from inside, or through a directory that both see.
//! * `chroot` and a change of user do not close the socket. After a change of user only root and the old user find it, and
//!   only root and the new user are answered.
//!
//! # The document
//!
//! An object with `format` (1; a reader refuses others and ignores members that it does not know) and
//!
//! * `process`: `pid` and `uid` as the process sees itself, `command`, `version` of the library, `age_ns` since it began to use the library;
//! * `queue_pairs`: `device`, `number`, `state`, `kind` (`cm`, or `numbered` for those that are connected by number), `pd`,
//!   `sends_outstanding`, `receives_posted` (null with a shared receive queue), `send_completions_waiting`, `recv_completions_waiting`, `held_ns`
//!   (how long a Send has been waiting for a receive, or null), `held_total_ns`, `counters` (those of [`Counters`](iwarp_rnic::counters::Counters), by name),
//!   `end` (why the last connection ended, or null), and `connection`: null, or `local`, `peer`, `age_ns`, `unacknowledged_octets` and what
//!   TCP tells of it (`tcp_…`);
//! * `devices`: `name`, `address`, `opened` (how often), `queue_pairs`, `completion_queues`, `registrations` (regions and windows),
//!   `registered_octets`, and `counters` of all queue pairs since the process began, those that are gone too.
//!
//! Queue pairs come in no order. They are read one after the other while they work, so their figures are not of one moment.
//!
//! [`Question`] asks processes; the command `iwarp stat` shows the answers.

mod ask;
mod document;
mod json;
mod place;
mod report;
mod serve;

pub use ask::{Answer, Question};

use crate::complain;
use crate::engine::Engine;
use crate::sys::clock::now_ns;
use crate::sys::exit::AtExit;
use crate::sys::process_lock::ProcessLock;
use crate::sys::{fork, secure};
use std::ffi::OsString;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The time at which this process began to use the library, in nanoseconds of the monotonic clock.
static BEGAN: AtomicU64 = AtomicU64::new(0);
/// The socket's entry, to be removed at the end of the process, and the number of the process that made it.
static ENTRY: ProcessLock<Option<(u32, PathBuf)>> = ProcessLock::new("stat::ENTRY", None);

/// Begins to answer other processes, unless `IWARP_STAT` is `off`. Called once in each process, with its engine.
pub(crate) fn start(engine: &Arc<Engine>) {
    static REMOVE: AtExit = AtExit::new(remove_entry);
    BEGAN.store(now_ns(), Ordering::Relaxed);
    let untrusted = secure::environment_is_untrusted();
    let Some(directory) = setting(std::env::var_os("IWARP_STAT"), untrusted) else {
        return;
    };
    let opened = place::open(directory.as_deref());
    let (socket, path) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            // If the environment names a directory, the user expects the socket there, so a failure is reported.
            match directory {
                Some(dir) => complain::once(format!(
                    "IWARP_STAT={}: no socket can be made there ({error}); this process cannot be asked",
                    dir.display()
                )),
                None => tracing::debug!(%error, "this process cannot be asked"),
            }
            return;
        }
    };
    fork::close_in_child(socket.as_raw_fd());
    *ENTRY.lock() = Some((std::process::id(), path));
    REMOVE.plan();
    if let Err(error) = serve::Desk::open(engine, socket) {
        fork::close_in_child(-1);
        remove_entry();
        tracing::debug!(%error, "this process cannot be asked");
    }
}

/// Reads `IWARP_STAT`. Returns `None` if there shall be no socket, and `Some(None)` for the default directories.
fn setting(value: Option<OsString>, untrusted: bool) -> Option<Option<PathBuf>> {
    let value = value.unwrap_or_default();
    match value.to_str() {
        Some("off" | "0" | "no" | "false") => return None,
        Some("" | "on" | "1" | "yes" | "true") => return Some(None),
        _ if untrusted => return Some(None),
        _ => {}
    }
    let path = PathBuf::from(value);
    if path.is_absolute() {
        return Some(Some(path));
    }
    complain::once(format!(
        "IWARP_STAT={}: neither on nor off nor an absolute path; it is on",
        path.display()
    ));
    Some(None)
}

/// Removes the socket's entry. The end of the process calls this. A forked child calls it, too, but leaves its parent's entry.
fn remove_entry() {
    // A program may end in a signal handler, on a thread that holds the lock. Waiting for the lock would then never end.
    let Some(mut entry) = ENTRY.try_lock() else {
        return;
    };
    if let Some((_, path)) = entry.take_if(|(pid, _)| *pid == std::process::id()) {
        let _ = std::fs::remove_file(path);
    }
}

/// Returns for how long this process has used the library, in nanoseconds.
fn age_ns() -> u64 {
    now_ns().saturating_sub(BEGAN.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_on_off_or_a_directory() {
        let set = |value: &str, untrusted| setting(Some(value.into()), untrusted);
        assert_eq!(setting(None, false), Some(None));
        assert_eq!(set("off", false), None);
        assert_eq!(set("off", true), None);
        assert_eq!(set("on", false), Some(None));
        assert_eq!(set("/srv/iwarp", false), Some(Some("/srv/iwarp".into())));
        // In a program with more rights than its caller, the caller's directory is ignored.
        assert_eq!(set("/srv/iwarp", true), Some(None));
        assert_eq!(set("relative", false), Some(None));
    }
}
