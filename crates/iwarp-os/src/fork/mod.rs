//! Detection of `fork`. Threads do not survive a fork, so a child must not wait for an engine
//! thread that it does not have.
//!
//! Invariant: the handlers of `pthread_atfork` change two atomics, close a descriptor, which is
//! async-signal-safe, and handle the locks of `process_lock`. They access no other memory that
//! another thread may have been changing at the time of the fork. (A raw `clone` system call
//! bypasses the C library and is not detected.)

pub mod process_lock;

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

static GENERATION: AtomicU32 = AtomicU32::new(0);
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// The descriptor that each child closes, or -1.
static CLOSED_IN_CHILD: AtomicI32 = AtomicI32::new(-1);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let fd = CLOSED_IN_CHILD.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        // Make the system call directly. A preloaded library may replace `close` and take a lock,
        // which may be held forever in a child.
        // SAFETY: the caller of `close_in_child` guarantees that no child uses this descriptor.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
    process_lock::after_fork_in_child();
}

extern "C" fn before() {
    process_lock::before_fork();
}

extern "C" fn in_parent() {
    process_lock::after_fork();
}

/// Closes `fd` in each future child of this process, at the time of the fork. It replaces the
/// descriptor of an earlier call; -1 closes none.
///
/// The child must not use or close the descriptor otherwise. It belongs to an engine, and a child
/// leaks its parent's engines.
pub fn close_in_child(fd: RawFd) {
    CLOSED_IN_CHILD.store(fd, Ordering::Relaxed);
}

/// Calls `attempt` until it returns a value, for at most `patience`.
///
/// Use it for a lock of `parking_lot` that another thread may have held at the time of a fork. The
/// lock's own timed wait may block forever in a child: it uses a table that all locks share, whose
/// own locks may have been held as well.
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
    // Two threads may install the handlers twice, which is harmless, because generations are only
    // compared. A lock that prevents it could be held forever in a child.
    // SAFETY: the handlers are functions of this library, which is not unloaded, and obey the
    // invariant at the head of the file.
    let status = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    if status != 0 {
        return Err(io::Error::from_raw_os_error(libc::ENOMEM));
    }
    IS_INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// Returns the number of forks between the process that called this first and this process. It
/// never changes within a process, so a different number shows that a value is from a parent.
///
/// Once the handlers are installed, the call costs two loads, so it may be made on every post.
#[inline]
pub fn generation() -> u32 {
    if !IS_INSTALLED.load(Ordering::Acquire) {
        // If there is no memory for the handlers, forks are not detected.
        let _ = install();
    }
    GENERATION.load(Ordering::Relaxed)
}

/// The process that created an object. In a child, an inherited object's locks may be held by
/// threads that do not exist there. So the child must not lock them, not even to drop the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin(u32);

impl Origin {
    /// Returns the current process.
    #[inline]
    pub fn current_process() -> Self {
        Self(generation())
    }

    /// Returns `true` if the object was created by a parent of the current process.
    #[inline]
    pub fn is_foreign(self) -> bool {
        self != Self::current_process()
    }
}

/// Runs `check` in a child of this process and returns its result, or `false` if it takes longer
/// than 20 seconds. For tests.
///
/// `check` must not allocate, nor wait for a lock that another thread of this process may hold.
#[cfg(any(test, feature = "testing"))]
pub fn check_in_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only runs `check`, which the caller restricts as described above, and
    // exits by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", io::Error::last_os_error());
    if child == 0 {
        let passed = check();
        // SAFETY: `_exit` is async-signal-safe.
        unsafe { libc::_exit(if passed { 7 } else { 1 }) };
    }
    let mut status = 0;
    let waited = try_for(Duration::from_secs(20), || {
        // SAFETY: `status` is a valid `int`, and the child was forked above.
        let waited = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        (waited != 0).then_some(waited)
    });
    if waited.is_none() {
        // SAFETY: the child was forked above, and was not reaped.
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
    use std::os::fd::AsRawFd;

    #[test]
    fn try_for_gives_up_after_patience() {
        let mut failures = 2;
        let third = try_for(Duration::from_secs(60), || {
            failures -= 1;
            (failures < 0).then_some(7)
        });
        assert_eq!((third, failures), (Some(7), -1));
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

    #[test]
    fn descriptor_is_closed_in_child() {
        let file = std::fs::File::open("/proc/self/status").expect("a file of the kernel");
        install().expect("handler");
        close_in_child(file.as_raw_fd());
        let is_open = || rustix::io::fcntl_getfd(&file).is_ok();
        assert!(check_in_child(|| !is_open()));
        close_in_child(-1);
        assert!(is_open() && check_in_child(is_open));
    }
}
