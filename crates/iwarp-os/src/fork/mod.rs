//! Detection of `fork`. Threads do not survive a fork, so a child must not wait for an engine
//! thread that it does not have.
//!
//! Invariant: the handlers of `pthread_atfork` change two atomics, close a descriptor, which is
//! async-signal-safe, and handle the locks of `process_lock`. They touch no other memory that
//! another thread could have left half-written at the time of the fork. (A raw `clone` system call
//! bypasses the C library and is not detected.)

pub mod process_lock;

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

static GENERATION: AtomicU32 = AtomicU32::new(0);
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// A descriptor that belongs to this process alone, or -1.
static OWN: AtomicI32 = AtomicI32::new(-1);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let own = OWN.swap(-1, Ordering::Relaxed);
    if own >= 0 {
        // A direct system call: a preloaded library that replaces `close` takes a lock, which may
        // be held forever here.
        // SAFETY: `close_in_child` was promised that nothing uses this descriptor in a child.
        unsafe { libc::syscall(libc::SYS_close, own) };
    }
    process_lock::after_fork_in_child();
}

extern "C" fn before() {
    process_lock::before_fork();
}

extern "C" fn in_parent() {
    process_lock::after_fork();
}

/// Closes `fd` in each future child of this process, at the moment of the fork. There is one such
/// descriptor; -1 removes it.
///
/// The child must not use or close it: its owner belongs to an engine, and a child leaks its
/// parent's engines.
pub fn close_in_child(fd: RawFd) {
    OWN.store(fd, Ordering::Relaxed);
}

/// Calls `attempt` until it returns a value, for at most `patience`.
///
/// For locks that another thread may have held at the time of a fork. Their own timed waits do not
/// work: they use a lock of the library that waiting threads share, which may be held forever, too.
pub fn try_for<T>(patience: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        let got = attempt();
        if got.is_some() || start.elapsed() >= patience {
            return got;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Installs the handlers if necessary. Call it before the first thread is started.
///
/// # Errors
/// The C library had no memory for the handlers.
pub fn install() -> io::Result<()> {
    if IS_INSTALLED.load(Ordering::Acquire) {
        return Ok(());
    }
    // Threads that do this concurrently install the handlers twice, which is harmless: generations
    // are only compared. Waiting for each other could last forever in a child.
    // SAFETY: the handlers are functions that live as long as the program and obey the file's
    // invariant.
    let status = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    if status != 0 {
        return Err(io::Error::from_raw_os_error(libc::ENOMEM));
    }
    IS_INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// Returns how many forks lie between this process and the one that called this first. Equal
/// numbers mean the same process.
///
/// Costs one relaxed load once the handler is installed; it may be called on every post.
#[inline]
pub fn generation() -> u32 {
    if !IS_INSTALLED.load(Ordering::Acquire) {
        // Without memory for the handler, forks are not detected.
        let _ = install();
    }
    GENERATION.load(Ordering::Relaxed)
}

/// The process in which an object was created. A child's copy of its locks may have been held by
/// threads that do not exist in the child; so the child takes none of them to drop what it
/// inherited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin(u32);

impl Origin {
    /// This process.
    #[inline]
    pub fn here() -> Self {
        Self(generation())
    }

    /// Returns `true` if a fork lies between that process and this one.
    #[inline]
    pub fn is_foreign(self) -> bool {
        self != Self::here()
    }
}

/// Runs `check` in a child of this process and returns its result, or `false` if it takes longer
/// than 20 seconds. For tests.
///
/// `check` must not allocate, nor wait for a lock that another thread of this process may hold.
#[cfg(any(test, feature = "testing"))]
pub fn check_in_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child does what the caller has promised, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", io::Error::last_os_error());
    if child == 0 {
        let good = check();
        // SAFETY: `_exit` is async-signal-safe.
        unsafe { libc::_exit(if good { 7 } else { 1 }) };
    }
    let mut status = 0;
    let waited = try_for(Duration::from_secs(20), || {
        // SAFETY: `status` is a valid place for an int; the child is ours.
        let waited = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        (waited != 0).then_some(waited)
    });
    if waited.is_none() {
        // SAFETY: the child is ours, and has not been waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: as above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        return false;
    }
    assert_eq!(waited, Some(child));
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn try_for_gives_up_after_patience() {
        let mut left = 3;
        let third = try_for(Duration::from_secs(60), || {
            left -= 1;
            (left == 0).then_some(7)
        });
        assert_eq!((third, left), (Some(7), 0));
        assert_eq!(try_for(Duration::ZERO, || Some(1)), Some(1));
        assert_eq!(try_for(Duration::from_millis(5), || None::<()>), None);
    }

    #[test]
    fn child_has_another_generation() {
        let before = generation();
        install().expect("handler");
        assert!(check_in_child(|| generation() == before.wrapping_add(1)));
        assert_eq!(generation(), before);
    }
}
