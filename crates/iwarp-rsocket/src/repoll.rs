//! `repoll_create`, `repoll_ctl` and `repoll_wait`: sets of rsockets and ordinary descriptors, used
//! like `epoll(7)`.
//!
//! Differences from the kernel: events are level-triggered, as in rdma-core (`EPOLLET` is accepted
//! without effect), and a set cannot be added to another set or passed to `rpoll`.
//!
//! Invariant: changing a set first increments its version, then notifies. A wait joins the list of
//! waiters, then checks the version, then sleeps. So a wait never sleeps on an outdated list.

use crate::errno::{Errno, Result};
use crate::fork;
use crate::notify::Waiters;
use crate::poll::{Watch, poll_unchanged};
use crate::table;
use iwarp::runtime::ProcessLock;
use libc::{c_int, epoll_event, pollfd};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Events that have the same values in `poll`.
const EVENTS: u32 = 0xffff;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;

struct Entry {
    events: u32,
    data: u64,
    /// The rsocket that had this number when it was added. A later socket may reuse the number.
    socket: Option<Weak<dyn Any + Send + Sync>>,
    /// A one-shot event was delivered, and `repoll_ctl` has not re-armed it.
    spent: bool,
}

impl Entry {
    fn new(fd: RawFd, event: &epoll_event) -> Self {
        Self {
            events: event.events,
            data: event.u64,
            socket: table::find(fd).map(|s| Arc::downgrade(&s.object())),
            spent: false,
        }
    }

    /// Returns `false` if the number now belongs to another descriptor.
    fn is_current(&self, fd: RawFd) -> bool {
        match (&self.socket, table::find(fd)) {
            (Some(old), Some(new)) => std::ptr::addr_eq(old.as_ptr(), Arc::as_ptr(&new.object())),
            (old, new) => old.is_none() && new.is_none(),
        }
    }
}

#[derive(Default)]
struct Entries {
    by_number: BTreeMap<RawFd, Entry>,
    version: u64,
    /// The descriptor to check first. It changes, so that a short list of events starves no
    /// descriptor.
    first: RawFd,
    /// The set was destroyed while a thread waited.
    closed: bool,
}

impl Entries {
    fn pollfds(&mut self) -> Vec<pollfd> {
        self.by_number.retain(|fd, entry| entry.is_current(*fd));
        let later = self.by_number.range(self.first..);
        later
            .chain(self.by_number.range(..self.first))
            .filter(|(_, entry)| !entry.spent)
            .map(|(fd, entry)| pollfd {
                fd: *fd,
                events: (entry.events & EVENTS) as i16,
                revents: 0,
            })
            .collect()
    }

    fn collect(&mut self, found: &[pollfd], to: &mut [epoll_event]) -> usize {
        let mut n = 0;
        for f in found.iter().filter(|f| f.revents != 0) {
            if f.revents & libc::POLLNVAL != 0 {
                self.by_number.remove(&f.fd);
                continue;
            }
            let Some(entry) = self.by_number.get_mut(&f.fd) else {
                continue;
            };
            let Some(event) = to.get_mut(n) else {
                self.first = f.fd;
                break;
            };
            *event = epoll_event {
                events: u32::from(f.revents as u16),
                u64: entry.data,
            };
            entry.spent = entry.events & ONE_SHOT != 0;
            n += 1;
        }
        n
    }
}

struct PollSet {
    /// Never readable; reserves a number that no other descriptor has.
    number: OwnedFd,
    entries: Mutex<Entries>,
    waiters: Arc<Waiters>,
    generation: u32,
}

type Sets = BTreeMap<RawFd, Arc<PollSet>>;

static SETS: ProcessLock<Sets> = ProcessLock::new("rsocket::repoll::SETS", BTreeMap::new());

fn find(number: RawFd) -> Result<Arc<PollSet>> {
    let set = SETS.lock().get(&number).cloned().ok_or(Errno::BADF)?;
    if set.generation != fork::generation() {
        return Err(Errno::NOTSUP);
    }
    Ok(set)
}

/// Creates an empty set and returns its number. `flags` may contain `EPOLL_CLOEXEC` and, as in
/// rdma-core, `O_NONBLOCK`. Fails with EINVAL for other flags, and with EMFILE.
pub(crate) fn create(flags: c_int) -> Result<RawFd> {
    if flags & !(libc::EPOLL_CLOEXEC | libc::O_NONBLOCK) != 0 {
        return Err(Errno::INVAL);
    }
    // If there is no memory for the handlers, forks are not detected.
    let _ = fork::notice_forks();
    let cloexec = match flags & libc::EPOLL_CLOEXEC {
        0 => EventfdFlags::empty(),
        _ => EventfdFlags::CLOEXEC,
    };
    let set = PollSet {
        number: eventfd(0, cloexec | EventfdFlags::NONBLOCK)?,
        entries: Mutex::default(),
        waiters: Arc::default(),
        generation: fork::generation(),
    };
    let number = set.number.as_raw_fd();
    SETS.lock().insert(number, Arc::new(set));
    Ok(number)
}

/// Changes a set, as `epoll_ctl(2)`. The change applies to waits in progress. Fails with EBADF,
/// EEXIST or ENOENT, and with EINVAL if the operation is unknown or `fd` is a set.
pub(crate) fn control(
    number: RawFd,
    op: c_int,
    fd: RawFd,
    event: Option<&epoll_event>,
) -> Result<()> {
    let set = find(number)?;
    if fd < 0 {
        return Err(Errno::BADF);
    }
    if SETS.lock().contains_key(&fd) {
        return Err(Errno::INVAL);
    }
    {
        let mut entries = set.entries.lock();
        // Remove an entry whose number was closed and reused.
        if entries
            .by_number
            .get(&fd)
            .is_some_and(|e| !e.is_current(fd))
        {
            entries.by_number.remove(&fd);
        }
        let known = entries.by_number.contains_key(&fd);
        let efault = Errno(libc::EFAULT);
        match (op, known) {
            (libc::EPOLL_CTL_ADD, false) => {
                if table::find(fd).is_none() && !is_open(fd) {
                    return Err(Errno::BADF);
                }
                let entry = Entry::new(fd, event.ok_or(efault)?);
                entries.by_number.insert(fd, entry);
            }
            (libc::EPOLL_CTL_ADD, true) => return Err(Errno(libc::EEXIST)),
            (libc::EPOLL_CTL_MOD, true) => {
                let entry = Entry::new(fd, event.ok_or(efault)?);
                entries.by_number.insert(fd, entry);
            }
            (libc::EPOLL_CTL_DEL, true) => {
                entries.by_number.remove(&fd);
            }
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, false) => {
                return Err(Errno(libc::ENOENT));
            }
            _ => return Err(Errno::INVAL),
        }
        entries.version += 1;
    }
    set.waiters.notify();
    Ok(())
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: reads a flag of a descriptor; an invalid number only fails.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// Waits for events of a set, as `epoll_wait(2)`; without a timeout, waits forever. Returns the
/// number of events, or 0 after the timeout. Fails with EBADF, with EINVAL if `to` is empty, and
/// with EINTR if a signal handler ran.
pub(crate) fn wait(
    number: RawFd,
    to: &mut [epoll_event],
    timeout: Option<Duration>,
) -> Result<usize> {
    let set = find(number)?;
    if to.is_empty() {
        return Err(Errno::INVAL);
    }
    let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
    loop {
        let (mut list, version) = {
            let mut entries = set.entries.lock();
            if entries.closed {
                return Err(Errno::BADF);
            }
            (entries.pollfds(), entries.version)
        };
        let watch = Watch {
            waiters: &set.waiters,
            changed: &|| set.entries.lock().version != version,
        };
        let remaining = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let n = poll_unchanged(&mut list, remaining, Some(&watch))?;
        let written = match n {
            0 => 0,
            _ => set.entries.lock().collect(&list, to),
        };
        if written > 0 {
            return Ok(written);
        }
        if deadline.is_some_and(|d| Instant::now() >= d) {
            return Ok(0);
        }
    }
}

/// Destroys a set. Its descriptors stay open. Fails with EBADF if there is no such set.
pub(crate) fn close(number: RawFd) -> Result<()> {
    let set = SETS.lock().remove(&number).ok_or(Errno::BADF)?;
    if set.generation != fork::generation() {
        // The set belongs to the parent: its lock may be held by a thread that exists only in the
        // parent. Dropping the set closes this process's descriptor.
        return Ok(());
    }
    // Waits in progress return EBADF. The descriptor is closed when the last one returns.
    {
        let mut entries = set.entries.lock();
        entries.version += 1;
        entries.closed = true;
    }
    set.waiters.notify();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notify::Waiter;
    use std::os::fd::AsFd as _;

    /// Without the wake-up, a wait would notice the change only after the polling interval.
    #[test]
    fn set_changes_wake_waiters() {
        let number = create(0).unwrap();
        let set = find(number).unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        let fd = reader.as_fd().as_raw_fd();
        let waiter = Waiter::for_this_thread().unwrap();
        let _joined = set.waiters.join(&waiter);
        let event = epoll_event { events: 1, u64: 0 };
        for op in [
            libc::EPOLL_CTL_ADD,
            libc::EPOLL_CTL_MOD,
            libc::EPOLL_CTL_DEL,
        ] {
            let before = set.entries.lock().version;
            control(number, op, fd, Some(&event)).unwrap();
            assert!(waiter.take_signal(), "operation {op} woke no waiter");
            assert_ne!(set.entries.lock().version, before, "operation {op}");
        }
        // A refused call changes nothing.
        assert_eq!(
            control(number, libc::EPOLL_CTL_DEL, fd, None),
            Err(Errno(libc::ENOENT))
        );
        assert!(!waiter.take_signal());
        close(number).unwrap();
        assert!(waiter.take_signal(), "closing woke no waiter");
    }
}
