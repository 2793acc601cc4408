//! A line at the end of a program that loaded the libraries and used no device.
//!
//! Such a program often runs over TCP instead, and says nothing about it. The line is written in two
//! cases only, because many programs are linked with the libraries and have no use for them:
//!
//! * The process that `iwarp run` became ends, and has started no other processes. A launcher such as
//!   `mpirun` has: its children use the devices.
//! * Another process asked for the list of devices and opened none.
//!
//! A program that reads the GUIDs of devices without opening them lists devices, as `ibv_devices`
//! does, so it gets no line. A call that fails to open a device has reported that already.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// `iwarp run` sets it to the number of its process, which is that of the program.
const VARIABLE: &str = "IWARP_RUN";

/// The process that asked for the list of devices.
static LISTED_BY: AtomicU32 = AtomicU32::new(0);
/// The program has read a GUID.
static GUID_READ: AtomicBool = AtomicBool::new(false);
/// The program has opened a device, or has tried to.
static USED: AtomicBool = AtomicBool::new(false);

/// Records that the program has got a list of devices.
pub(crate) fn listed() {
    LISTED_BY.store(std::process::id(), Relaxed);
}

/// Records that the program has read a device's GUID.
pub(crate) fn guid_read() {
    GUID_READ.store(true, Relaxed);
}

/// Records that the program opens a device, or has the connection manager do so.
pub(crate) fn used() {
    // Most programs call this more than once, and on several threads.
    if !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

/// Decides whether the line is due at the end of a process.
fn is_due(run: Option<u32>, process: u32, listed_by: u32, has_children: bool) -> bool {
    match run {
        None => false,
        Some(run) if run == process => !has_children,
        Some(_) => listed_by == process,
    }
}

/// Returns `true` if the process has waited for a child.
fn has_children() -> bool {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure has room for the answer, and zeros are valid values of its fields.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_maxrss != 0
}

/// Writes the line. The loader calls this when the process ends.
extern "C" fn at_end() {
    if USED.load(Relaxed) || GUID_READ.load(Relaxed) {
        return;
    }
    // A panic must not cross into the loader, and at this point it cannot be reported.
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
    fn line_is_for_programs_that_seem_to_want_devices() {
        assert!(!is_due(None, 7, 7, false), "not started by iwarp run");
        assert!(is_due(Some(7), 7, 0, false), "the program itself");
        assert!(!is_due(Some(7), 7, 7, true), "a launcher");
        assert!(is_due(Some(7), 8, 8, false), "a child with a list");
        assert!(!is_due(Some(7), 8, 7, false), "a child after the list");
        assert!(!is_due(Some(7), 8, 0, false), "a child that is only linked");
    }

    #[test]
    fn children_are_noticed() {
        std::process::Command::new("true").status().unwrap();
        assert!(has_children());
    }
}
