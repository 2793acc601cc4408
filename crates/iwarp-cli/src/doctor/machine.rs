//! The kernel's calls, filters of calls, and limits of the process.

use super::{Finding, problem};
use iwarp_os::eventfd::EventFd;
use iwarp_os::mapping::{Mapping, page_size};
use iwarp_os::poller::{Interest, Poller};
use iwarp_os::probe::probe_range;
use iwarp_os::{interfaces, limits};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// Fewer descriptors are a problem: each connection needs one, and programs need some, too.
const DESCRIPTORS_MIN: u64 = 256;
/// A smaller limit of the address space is a problem: staging and stacks need room.
const ADDRESS_SPACE_MIN: u64 = 1 << 30;

/// Tries a group of calls.
type Trial = fn() -> io::Result<()>;

/// The groups of calls without which the library does not work.
const NEEDED: [(&str, Trial); 5] = [
    ("epoll and eventfd", epoll),
    ("TCP sockets", tcp),
    ("the list of interfaces (netlink sockets)", || {
        interfaces::addresses().map(drop)
    }),
    ("shared memory mappings", || {
        let mapping = Mapping::new(page_size());
        mapping
            .map(drop)
            .map_err(|e| io::Error::other(e.to_string()))
    }),
    ("threads", || {
        let thread = std::thread::Builder::new().spawn(|| {})?;
        thread
            .join()
            .map_err(|_| io::Error::other("the thread has ended"))
    }),
];

fn epoll() -> io::Result<()> {
    let (poller, event) = (Poller::new()?, EventFd::new()?);
    poller.add(&event, 1, Interest::READ)
}

fn tcp() -> io::Result<()> {
    // Binding works without any interface.
    std::net::TcpListener::bind("127.0.0.1:0").map(drop)
}

/// Returns the groups of calls that fail, with their errors.
fn failing() -> Vec<(&'static str, io::Error)> {
    let tried = NEEDED.iter().map(|(name, attempt)| (*name, attempt()));
    let failed = tried.filter_map(|(name, result)| Some((name, result.err()?)));
    failed.collect()
}

/// Returns `true` for the errors with which a filter refuses a call.
fn is_refusal(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS))
}

fn sentence(failing: &[(&str, io::Error)]) -> String {
    let all: Vec<_> = failing
        .iter()
        .map(|(name, e)| format!("{name}: {e}"))
        .collect();
    all.join(", ")
}

pub(super) fn kernel() -> Finding {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let machine = name.machine().to_string_lossy();
    // What a filter refuses is reported by `seccomp`.
    let filtered = filter() != Some(0);
    let failing: Vec<_> = failing()
        .into_iter()
        .filter(|(_, e)| !filtered || !is_refusal(e))
        .collect();
    if !failing.is_empty() {
        return problem(
            format!("Linux {release} fails: {}", sentence(&failing)),
            "raise the limits of this process, or use another kernel or sandbox",
        );
    }
    let here = 0u64;
    let address = (&raw const here).addr() as u64;
    if !probe_range(address, size_of_val(&here) as u64, false) {
        return problem(
            "registered memory cannot be checked: /proc is not mounted, and the kernel is older \
             than 5.14",
            "mount /proc",
        );
    }
    Ok(format!("Linux {release}, {machine}"))
}

/// Returns the seccomp mode of this process: 0 without a filter. `None` if it is not known.
fn filter() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mode = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"))?;
    mode.trim().parse().ok()
}

pub(super) fn seccomp() -> Finding {
    let mode = filter();
    if mode == Some(0) {
        return Ok("no filter".to_owned());
    }
    let refused: Vec<_> = failing()
        .into_iter()
        .filter(|(_, e)| is_refusal(e))
        .collect();
    if !refused.is_empty() {
        return problem(
            format!("a filter refuses {}", sentence(&refused)),
            "allow these calls in the profile of the container or service; the default profiles \
             of Docker, Podman and Kubernetes do",
        );
    }
    Ok(match mode {
        Some(_) => "a filter is active, and permits all needed calls".to_owned(),
        None => "not known without /proc; all needed calls are permitted".to_owned(),
    })
}

pub(super) fn limits() -> Finding {
    let unlimited = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
    let files = getrlimit(Resource::Nofile).maximum;
    if files.is_some_and(|hard| hard < DESCRIPTORS_MIN) {
        return problem(
            format!(
                "at most {} open files, and each connection needs one",
                unlimited(files)
            ),
            "raise the hard limit: `ulimit -Hn 4096` as root, LimitNOFILE= of a service, or \
             --ulimit nofile= of a container",
        );
    }
    let address_space = getrlimit(Resource::As).current;
    if address_space.is_some_and(|limit| limit < ADDRESS_SPACE_MIN) {
        return problem(
            format!(
                "at most {} octets of address space",
                unlimited(address_space)
            ),
            "raise it: `ulimit -v unlimited`",
        );
    }
    let raised = limits::raise_open_files();
    Ok(format!(
        "{} open files, one for each connection; no limit of locked memory applies",
        unlimited((raised.now != u64::MAX).then_some(raised.now))
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_from_failures() {
        for (errno, refusal) in [
            (Errno::PERM, true),
            (Errno::ACCESS, true),
            (Errno::NOSYS, true),
            (Errno::MFILE, false),
            (Errno::NOMEM, false),
        ] {
            assert_eq!(is_refusal(&errno.into()), refusal, "{errno}");
        }
        assert!(!is_refusal(&io::Error::other("no number")));
    }
}
