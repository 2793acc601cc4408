//! Access to memory of this process that may not be mapped, for on-demand regions.
//!
//! Data are copied by `process_vm_readv` and `process_vm_writev` on the process itself. The kernel
//! looks up the pages, as a device with page faults does, and returns `EFAULT` for an unmapped
//! page. So no signal is raised, even if other threads map and unmap pages concurrently.
//!
//! The kernel has no such call for a 64-bit atomic operation, and some sandboxes forbid the two
//! calls. In these cases, a child process makes the access (`ChildAccess`). It shares this
//! process's memory, like the child of a `vfork`. If a page is unmapped, the child gets the signal,
//! and only the child ends. An access by a child takes about 100 µs.
//!
//! Invariant: this process only passes the addresses to the kernel. The child accesses only two
//! things: the requested bytes, by atomic instructions, and its `ChildAccess`, which exists until
//! the child has ended.

use iwarp_rnic::memory::Pager;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null_mut, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// The functions that access on-demand regions.
// SAFETY: each function only accesses the given bytes, by system calls or in a child. Both fail for
// an unmapped page.
pub static PAGER: Pager = unsafe { Pager::new(read, write, exchange) };

fn iovec(at: u64, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: with_exposed_provenance_mut(at as usize),
        iov_len: len,
    }
}

fn read(from: u64, to: &mut [u8]) -> bool {
    let buffer = to.as_mut_ptr().expose_provenance() as u64;
    let by_kernel = copy_in_parts(to.len(), |done, remaining| {
        let local = iovec(buffer + done, remaining);
        let remote = iovec(from + done, remaining);
        // SAFETY: the kernel only writes to `to`, which is borrowed, and checks the other address.
        unsafe {
            libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
        }
    });
    match by_kernel {
        Copied::All => true,
        Copied::Unmapped => false,
        Copied::Refused => ChildAccess::new(Access::Copy {
            from,
            to: buffer,
            len: to.len(),
        })
        .run(),
    }
}

fn write(to: u64, from: &[u8]) -> bool {
    let buffer = from.as_ptr().expose_provenance() as u64;
    let by_kernel = copy_in_parts(from.len(), |done, remaining| {
        // Programs wait for the last byte, so it is written separately after the others.
        let head = remaining - 1;
        let parts = |addr: u64| {
            [
                iovec(addr + done, head),
                iovec(addr + done + head as u64, 1),
            ]
        };
        let (local, remote) = (parts(buffer), parts(to));
        // SAFETY: the kernel only reads `from`, and checks the other address.
        unsafe { libc::process_vm_writev(libc::getpid(), local.as_ptr(), 2, remote.as_ptr(), 2, 0) }
    });
    match by_kernel {
        Copied::All => true,
        Copied::Unmapped => false,
        Copied::Refused => ChildAccess::new(Access::Copy {
            from: buffer,
            to,
            len: from.len(),
        })
        .run(),
    }
}

fn exchange(at: u64, old: u64, new: u64) -> Option<u64> {
    let access = ChildAccess::new(Access::Exchange { at, old, new });
    access.run().then(|| access.found.load(Ordering::Relaxed))
}

#[derive(Debug, PartialEq, Eq)]
enum Copied {
    All,
    /// A page is unmapped or does not allow the access.
    Unmapped,
    /// The kernel or a sandbox refuses the system call.
    Refused,
}

/// Copies `len` bytes by calls of `copy`. It gets the numbers of bytes already copied and
/// remaining, and returns the number of bytes it has copied, or -1.
fn copy_in_parts(len: usize, mut copy: impl FnMut(u64, usize) -> isize) -> Copied {
    let mut done = 0;
    while done < len {
        match usize::try_from(copy(done as u64, len - done)) {
            Ok(0) => return Copied::Unmapped,
            Ok(n) => done += n,
            Err(_) => {
                return match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EFAULT) => Copied::Unmapped,
                    _ => Copied::Refused,
                };
            }
        }
    }
    Copied::All
}

#[derive(Debug, Clone, Copy)]
enum Access {
    Copy { from: u64, to: u64, len: usize },
    Exchange { at: u64, old: u64, new: u64 },
}

/// An access by a child process that shares this process's memory.
#[derive(Debug)]
struct ChildAccess {
    access: Access,
    /// The previous value that an exchange has found.
    found: AtomicU64,
    /// The child has succeeded. `false` if a page was unmapped, or if the child could not be
    /// created.
    done: AtomicBool,
}

/// Size of the child's stack in bytes. The child calls a few functions of the C library, and the
/// kernel writes a signal frame to the stack.
const STACK: usize = 64 << 10;

impl ChildAccess {
    fn new(access: Access) -> Self {
        Self {
            access,
            found: AtomicU64::new(0),
            done: AtomicBool::new(false),
        }
    }

    /// Makes the access in a child, and waits for the child's end. Returns `true` if the access
    /// succeeded.
    fn run(&self) -> bool {
        let mut stack: Vec<u128> = Vec::new();
        if stack.try_reserve_exact(STACK / size_of::<u128>()).is_err() {
            return false;
        }
        let top = stack.spare_capacity_mut().as_mut_ptr_range().end;
        // The program's handlers must not run in the child.
        let mask = Mask::block_all();
        let argument: *const Self = self;
        // Like `vfork`: this thread waits until the child has ended. No signal reports the child's
        // end, so the program does not notice it.
        let flags = libc::CLONE_VM | libc::CLONE_VFORK;
        // SAFETY: only the child uses the stack and `self` until it has ended, and `clone` returns
        // after that. `child` ends by `_exit`.
        let pid = unsafe { libc::clone(child, top.cast(), flags, argument.cast_mut().cast()) };
        if pid > 0 {
            wait_for(pid);
        }
        drop(mask);
        self.done.load(Ordering::Acquire)
    }

    fn execute(&self) {
        match self.access {
            Access::Copy { from, to, len } => {
                for i in 0..len {
                    let from = with_exposed_provenance::<u8>(from as usize + i);
                    let to = with_exposed_provenance_mut::<u8>(to as usize + i);
                    // SAFETY: the caller of `run` borrows one of the two ranges. If the other one
                    // is not mapped, only this child ends.
                    unsafe {
                        let octet = AtomicU8::from_ptr(from.cast_mut()).load(Ordering::Relaxed);
                        AtomicU8::from_ptr(to).store(octet, Ordering::Release);
                    }
                }
            }
            Access::Exchange { at, old, new } => {
                // SAFETY: the RNIC has checked the alignment. If the word is not mapped, only this
                // child ends.
                let word = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(at as usize)) };
                let (order, on_failure) = (Ordering::AcqRel, Ordering::Acquire);
                let (Ok(found) | Err(found)) = word.compare_exchange(old, new, order, on_failure);
                self.found.store(found, Ordering::Relaxed);
            }
        }
    }
}

/// The main function of the child: executes a [`ChildAccess`] and ends. The child has its own table
/// of signal handlers, and only calls async-signal-safe functions.
extern "C" fn child(access: *mut c_void) -> c_int {
    // Without a handler, a fault would write a core dump, and some kernels would then kill all
    // processes that share the memory.
    // SAFETY: `run` has passed the argument, and waits. The calls only change the child's handlers
    // and mask.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = exit_on_fault as extern "C" fn(c_int) as usize;
        let mut faults = MaybeUninit::<libc::sigset_t>::zeroed();
        libc::sigemptyset(faults.as_mut_ptr());
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            libc::sigaddset(faults.as_mut_ptr(), signal);
            if libc::sigaction(signal, &raw const action, null_mut()) != 0 {
                libc::_exit(1);
            }
        }
        libc::sigprocmask(libc::SIG_UNBLOCK, faults.as_ptr(), null_mut());
        let access = &*access.cast::<ChildAccess>();
        access.execute();
        access.done.store(true, Ordering::Release);
        libc::_exit(0)
    }
}

/// The child's signal handler: a page is unmapped.
extern "C" fn exit_on_fault(_signal: c_int) {
    // SAFETY: the call only ends the child process.
    unsafe { libc::_exit(1) }
}

fn wait_for(child: libc::pid_t) {
    loop {
        // SAFETY: the call writes to no memory.
        let waited = unsafe { libc::waitpid(child, null_mut(), libc::__WALL) };
        let interrupted = io::Error::last_os_error().raw_os_error() == Some(libc::EINTR);
        if waited >= 0 || !interrupted {
            return;
        }
    }
}

struct Mask(MaybeUninit<libc::sigset_t>);

impl Mask {
    fn block_all() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut old = Self(MaybeUninit::zeroed());
        // SAFETY: both sets are local variables.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), old.0.as_mut_ptr());
        }
        old
    }
}

impl Drop for Mask {
    fn drop(&mut self) {
        // SAFETY: `block_all` has stored the previous mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, self.0.as_ptr(), null_mut()) };
    }
}

/// The purpose of a prefetch (`ibv_advise_mr(3)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    /// To read the pages.
    Read,
    /// To write the pages.
    Write,
}

/// Faults in the pages of a range.
///
/// # Errors
/// `EFAULT` if a page is not mapped or does not allow the access. On kernels before 5.14, the call
/// does nothing; the pages are faulted in when they are first used.
pub fn prefetch(addr: u64, len: u64, how: Prefetch) -> io::Result<()> {
    let page = super::mapping::page_size() as u64;
    let start = addr - addr % page;
    let end = addr
        .checked_add(len)
        .and_then(|end| end.checked_next_multiple_of(page));
    let fault = || io::Error::from_raw_os_error(libc::EFAULT);
    // Check this first: the kernel returns the same error for an unknown advice and for a page that
    // does not allow the access.
    if !super::probe::probe_range(addr, len, how == Prefetch::Write) {
        return Err(fault());
    }
    let len = end.ok_or_else(fault)? - start;
    let advice = match how {
        Prefetch::Read => libc::MADV_POPULATE_READ,
        Prefetch::Write => libc::MADV_POPULATE_WRITE,
    };
    // SAFETY: populating pages does not change their contents.
    let status = unsafe {
        libc::madvise(
            with_exposed_provenance_mut(start as usize),
            len as usize,
            advice,
        )
    };
    match io::Error::last_os_error() {
        _ if status == 0 => Ok(()),
        error => match error.raw_os_error() {
            // A page was unmapped concurrently, or is beyond the end of a file.
            Some(libc::ENOMEM | libc::EFAULT) => Err(fault()),
            // The kernel does not know the advice, or the memory belongs to a device.
            Some(libc::EINVAL | libc::ENOSYS | libc::EPERM) => Ok(()),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
#[path = "on_demand_tests.rs"]
mod tests;
