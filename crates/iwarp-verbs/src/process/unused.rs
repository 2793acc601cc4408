//! The message at the exit of a program that loaded the libraries but used no device.
//!
//! Such a program often silently runs over TCP instead. Many programs are linked with the libraries
//! without needing them, so the message is written in two cases only:
//!
//! * The process that `iwarp run` became exits and had no children. The children of a launcher
//!   such as `mpirun` use the devices.
//! * Another process listed the devices and opened none.
//!
//! A program that reads GUIDs without opening devices is a lister such as `ibv_devices` and gets no
//! message. A failure to open a device has been reported already.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// Set by `iwarp run` to its process ID, which becomes the program's.
const VARIABLE: &str = "IWARP_RUN";

static LISTED_BY: AtomicU32 = AtomicU32::new(0);
static GUID_READ: AtomicBool = AtomicBool::new(false);
static USED: AtomicBool = AtomicBool::new(false);

pub(crate) fn listed() {
    LISTED_BY.store(std::process::id(), Relaxed);
}

pub(crate) fn guid_read() {
    GUID_READ.store(true, Relaxed);
}

pub(crate) fn used() {
    // Avoids writes to a shared cache line: most programs call this often, on several threads.
    if !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

fn is_due(run: Option<u32>, process: u32, listed_by: u32, has_children: bool) -> bool {
    match run {
        None => false,
        Some(run) if run == process => !has_children,
        Some(_) => listed_by == process,
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
extern "C" fn at_end() {
    if USED.load(Relaxed) || GUID_READ.load(Relaxed) {
        return;
    }
    // A panic must not cross into the loader, and can no longer be reported.
    let _ = std::panic::catch_unwind(|| {
        let run = std::env::var(VARIABLE)
            .ok()
            .and_then(|run| run.parse().ok());
        let process = std::process::id();
        if !is_due(run, process, LISTED_BY.load(Relaxed), has_children()) {
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
static AT_END: extern "C" fn() = at_end;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_requires_interest_in_devices() {
        assert!(!is_due(None, 7, 7, false), "not started by iwarp run");
        assert!(is_due(Some(7), 7, 0, false), "the program itself");
        assert!(!is_due(Some(7), 7, 7, true), "a launcher");
        assert!(is_due(Some(7), 8, 8, false), "a child with a list");
        assert!(!is_due(Some(7), 8, 7, false), "a child after the list");
        assert!(!is_due(Some(7), 8, 0, false), "a child that is only linked");
    }

    #[test]
    fn children_are_detected() {
        std::process::Command::new("true").status().unwrap();
        assert!(has_children());
    }
}
