//! Live statistics: other processes can query the state of a process that uses the library.
//!
//! ```
//! use iwarp::stat::Question;
//!
//! let _listener = iwarp::listen("127.0.0.1:0").bind().expect("a listener");
//! let mut question = Question::default();
//! question.pid = Some(std::process::id());
//! for answer in question.ask()? {
//!     let json = String::from_utf8(answer.document?).expect("UTF-8");
//!     assert!(json.contains("queue_pairs"));
//! }
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! When its progress thread starts, a process listens on a Unix socket (`place`), to which only its
//! own user and root can connect. A client receives one JSON document (`document`) and then the end
//! of the stream. There is no network socket. Without a client, the statistics cost nothing: the
//! data path has no extra counters, and no thread wakes.
//!
//! * `IWARP_STAT=off` disables the socket; `IWARP_STAT=/DIRECTORY` sets its directory. If the
//!   socket cannot be created, the process works without statistics.
//! * A child of `fork` gets its own socket when it first uses the library, and closes its parent's.
//! * If a process has other mounts of `/tmp` and `/run/user` (a container), ask it from inside, or
//!   let it use a directory that both sides can see.
//! * `chroot` and a change of user do not close the socket. After a change of user only root and
//!   the old user can connect, and only root and the new user get an answer.
//!
//! # The document
//!
//! An object with `format` (1; readers reject other values and ignore unknown members) and
//!
//! * `process`: `pid` and `uid` as the process sees itself, `command`, `version` of the library,
//!   `age_ns` since it first used the library;
//! * `queue_pairs`: `device`, `number`, `state`, `kind` (`cm`, or `numbered` for those connected by
//!   number), `pd`, `sends_outstanding`, `receives_posted` (null with a shared receive queue),
//!   `send_completions_waiting`, `recv_completions_waiting`, `held_ns` (how long a Send has been
//!   waiting for a receive, or null), `held_total_ns`, `counters` (those of
//!   [`Counters`](iwarp_rnic::counters::Counters), by name), `end` (why the last connection ended,
//!   or null), and `connection`: null, or `local`, `peer`, `age_ns`, `unacknowledged_octets` and
//!   TCP's statistics (`tcp_…`);
//! * `devices`: `name`, `address`, `opened` (how often), `queue_pairs`, `completion_queues`,
//!   `registrations` (regions and windows), `registered_octets`, and `counters` of all queue pairs
//!   since the process began, including destroyed ones.
//!
//! Queue pairs are in no particular order. They are read one after the other while they work, so
//! their figures are not a consistent snapshot.
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

/// When this process started to use the library, in nanoseconds of the monotonic clock.
static BEGAN: AtomicU64 = AtomicU64::new(0);
/// The ID of the process that created the socket, and the socket's path, which is removed when the
/// process exits.
static ENTRY: ProcessLock<Option<(u32, PathBuf)>> = ProcessLock::new("stat::ENTRY", None);

/// Creates the statistics socket, unless `IWARP_STAT` is `off`. Called once per process, with its
/// engine.
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
            // If the user has set a directory, the failure is reported.
            match directory {
                Some(dir) => complain::once(format!(
                    "IWARP_STAT={}: cannot create a socket there ({error}); \
                     this process has no statistics",
                    dir.display()
                )),
                None => tracing::debug!(%error, "no statistics of this process"),
            }
            return;
        }
    };
    fork::close_in_child(socket.as_raw_fd());
    *ENTRY.lock() = Some((std::process::id(), path));
    REMOVE.plan();
    if let Err(error) = serve::Server::open(engine, socket) {
        fork::close_in_child(-1);
        remove_entry();
        tracing::debug!(%error, "no statistics of this process");
    }
}

/// Parses `IWARP_STAT`. Returns `None` if it is disabled, and `Some(None)` for the default
/// directories.
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
        "IWARP_STAT={}: not on, off or an absolute path; it is on",
        path.display()
    ));
    Some(None)
}

/// Removes the socket when the process exits. A forked child calls this function, too; it does not
/// remove its parent's socket.
fn remove_entry() {
    // The program may exit in a signal handler on a thread that holds the lock, so waiting for the
    // lock could block forever.
    let Some(mut entry) = ENTRY.try_lock() else {
        return;
    };
    remove_own(&mut entry);
}

/// Removes the socket of `entry` if this process has created it.
fn remove_own(entry: &mut Option<(u32, PathBuf)>) {
    if let Some((_, path)) = entry.take_if(|(pid, _)| *pid == std::process::id()) {
        let _ = std::fs::remove_file(path);
    }
}

/// Returns the time since this process started to use the library, in nanoseconds.
fn age_ns() -> u64 {
    now_ns().saturating_sub(BEGAN.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_is_switch_or_directory() {
        let set = |value: &str, untrusted| setting(Some(value.into()), untrusted);
        assert_eq!(setting(None, false), Some(None));
        assert_eq!(set("off", false), None);
        assert_eq!(set("off", true), None);
        assert_eq!(set("on", false), Some(None));
        assert_eq!(set("/srv/iwarp", false), Some(Some("/srv/iwarp".into())));
        // A setuid program ignores the caller's directory.
        assert_eq!(set("/srv/iwarp", true), Some(None));
        assert_eq!(set("relative", false), Some(None));
    }

    #[test]
    fn only_own_socket_is_removed() {
        let own = std::process::id();
        let path = std::env::temp_dir().join(format!("iwarp-stat-own-{own}"));
        std::fs::write(&path, "").unwrap();
        for (pid, remains) in [(own + 1, true), (own, false)] {
            remove_own(&mut Some((pid, path.clone())));
            assert_eq!(path.exists(), remains);
        }
    }
}
