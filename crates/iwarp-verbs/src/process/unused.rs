//! The message at the exit of a program that loaded the libraries but used no device.
//!
//! Such a program often silently runs over TCP instead. Many programs are linked with the libraries
//! without needing them, so the message is written in two cases only:
//!
//! * The process that `iwarp run` started exits and had no children. (A launcher such as
//!   `mpirun` has children, which use the devices.)
//! * Any other process listed the devices but opened none.
//!
//! There is no message if the program read a GUID: programs such as `ibv_devices` only list
//! devices. A failure to open a device has its own message.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// Set by `iwarp run` to its process ID, which is also the program's: `iwarp run` executes
/// it.
const VARIABLE: &str = "IWARP_RUN";

static LISTED_BY: AtomicU32 = AtomicU32::new(0);
static GUID_READ: AtomicBool = AtomicBool::new(false);
static USED: AtomicBool = AtomicBool::new(false);

pub(crate) fn record_listing() {
    LISTED_BY.store(std::process::id(), Relaxed);
}

pub(crate) fn record_guid_read() {
    GUID_READ.store(true, Relaxed);
}

pub(crate) fn record_use() {
    // Do not write if it is set: many threads may call this often, and would share the cache line.
    if !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

fn is_message_due(run_pid: Option<u32>, pid: u32, listed_by: u32, has_children: bool) -> bool {
    match run_pid {
        None => false,
        Some(run_pid) if run_pid == pid => !has_children,
        Some(_) => listed_by == pid,
    }
}

fn has_children() -> bool {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure has room for the result, and zero is valid for its fields.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_maxrss != 0
}

/// Writes the message. The loader calls this at exit.
extern "C" fn write_message_at_exit() {
    if USED.load(Relaxed) || GUID_READ.load(Relaxed) {
        return;
    }
    // A panic must not cross into the loader, and can no longer be reported.
    let _ = std::panic::catch_unwind(|| {
        let run_pid = std::env::var(VARIABLE)
            .ok()
            .and_then(|run_pid| run_pid.parse().ok());
        let pid = std::process::id();
        if !is_message_due(run_pid, pid, LISTED_BY.load(Relaxed), has_children()) {
            return;
        }
        let name = std::env::args_os().next().unwrap_or_default();
        let name = Path::new(&name).file_name().unwrap_or_default();
        eprintln!(
            "iwarp: {} loaded the RDMA libraries, but opened no device",
            name.display()
        );
    });
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = write_message_at_exit;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_requires_interest_in_devices() {
        assert!(
            !is_message_due(None, 7, 7, false),
            "not started by iwarp run"
        );
        assert!(is_message_due(Some(7), 7, 0, false), "the program itself");
        assert!(!is_message_due(Some(7), 7, 7, true), "a launcher");
        assert!(is_message_due(Some(7), 8, 8, false), "a child with a list");
        assert!(
            !is_message_due(Some(7), 8, 7, false),
            "a child after the list"
        );
        assert!(
            !is_message_due(Some(7), 8, 0, false),
            "a child that is only linked"
        );
    }

    #[test]
    fn children_are_detected() {
        std::process::Command::new("true").status().unwrap();
        assert!(has_children());
    }
}
