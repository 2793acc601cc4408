//! The limit of open files. Each connection needs a TCP socket, so programs soon reach the usual
//! soft limit of 1024.
//!
//! No `unsafe`.

use rustix::fd::AsFd;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The size to which [`enlarge_descriptor_table`] enlarges the descriptor table, unless the limit
/// of open files is lower. The table takes 128 KiB of kernel memory.
const TABLE_SIZE: usize = 16 << 10;

/// The limit of open files, before and after [`raise_open_files`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFiles {
    /// The previous soft limit; `u64::MAX` if there was none.
    pub before: u64,
    /// The current soft limit; `u64::MAX` if there is none.
    pub now: u64,
}

/// Raises the soft limit of open files to the hard limit, which needs no privilege.
///
/// Never lowers the limit. If the kernel refuses (in some sandboxes), the old limit is kept and
/// returned.
pub fn raise_open_files() -> OpenFiles {
    let limit = getrlimit(Resource::Nofile);
    let before = limit.current.unwrap_or(u64::MAX);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    if before < hard {
        // If it fails, the old limit remains.
        let _ = setrlimit(
            Resource::Nofile,
            Rlimit {
                current: limit.maximum,
                maximum: limit.maximum,
            },
        );
    }
    let now = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    OpenFiles { before, now }
}

/// Returns the current limit of open files; `usize::MAX` if there is none.
pub fn descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// Makes the kernel enlarge the process's descriptor table, by duplicating `any` to a high number
/// for a moment. May block for a few hundredths of a second. Errors are ignored.
///
/// Otherwise, the kernel doubles the table each time it is full. In a process with threads, the
/// thread that opens a descriptor then waits until no processor uses the old table: 5 to 8 ms, four
/// times for 3,000 connections.
pub fn enlarge_descriptor_table(any: impl AsFd) {
    let last = descriptors().min(TABLE_SIZE).saturating_sub(1);
    if let Ok(last) = i32::try_from(last) {
        drop(fcntl_dupfd_cloexec(any, last));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::check_in_child;

    #[test]
    fn descriptor_table_is_enlarged() {
        let status = std::fs::File::open("/proc/self/status").expect("a file of the kernel");
        enlarge_descriptor_table(&status);
        let status = std::io::read_to_string(status).expect("text");
        let size = status
            .lines()
            .find_map(|line| line.strip_prefix("FDSize:"))
            .expect("the size of the table");
        let size: usize = size.trim().parse().expect("a number");
        let wanted = descriptors().min(TABLE_SIZE);
        // The kernel rounds the size up to a power of two.
        assert!((wanted..2 * wanted).contains(&size), "{size}");
    }

    #[test]
    fn soft_limit_is_raised() {
        let first = raise_open_files();
        assert!(first.now >= first.before);
        let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
        assert_eq!(first.now, hard);
        let second = raise_open_files();
        assert_eq!(second.before, second.now);
    }

    #[test]
    fn low_limit_is_raised() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        let current = Some(64);
        // The other tests keep their limit.
        assert!(check_in_child(|| {
            setrlimit(Resource::Nofile, Rlimit { current, maximum }).is_ok()
                && descriptors() == 64
                && raise_open_files().before == 64
                && descriptors() > 64
        }));
    }
}
