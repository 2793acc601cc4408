//! The limit of open files. One TCP socket per connection reaches the usual soft limit of 1024 quickly.
//!
//! No `unsafe`.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The number of file descriptors this process may have, before and after [`raise_open_files`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenFiles {
    /// The soft limit found; `u64::MAX` if there was none.
    pub(crate) before: u64,
    /// The soft limit in force now; `u64::MAX` if there is none.
    pub(crate) now: u64,
}

/// Raises the soft limit of open files to the hard limit, which needs no privilege.
///
/// Never lowers it. A refusal (some sandboxes) is not an error: the old limit stays and is reported.
pub(crate) fn raise_open_files() -> OpenFiles {
    let limit = getrlimit(Resource::Nofile);
    let before = limit.current.unwrap_or(u64::MAX);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    if before < hard {
        // Failure leaves the old limit, which the read below reports.
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

/// Returns how many file descriptors the process may have now; `usize::MAX` if there is no limit.
pub(crate) fn descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_reaches_the_hard_one() {
        let first = raise_open_files();
        assert!(first.now >= first.before);
        let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
        assert_eq!(first.now, hard);
        let second = raise_open_files();
        assert_eq!(second.before, second.now);
    }
}
