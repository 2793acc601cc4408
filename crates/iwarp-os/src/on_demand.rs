//! Access to memory of this process that may not be mapped, for on-demand regions.
//!
//! Data are copied by `process_vm_readv` and `process_vm_writev` on the process itself. The kernel
//! looks up the pages, as a device with page faults does, and returns `EFAULT` for missing ones. So
//! the result does not depend on what other threads map and unmap meanwhile, and no signal is
//! raised.
//!
//! The kernel has no such call for a 64-bit atomic operation, and some sandboxes forbid those two
//! calls. The alternative is an `Errand`: a child process that shares this process's memory, as
//! `posix_spawn` creates it. The child accesses the memory. If a page is missing, the child gets
//! the signal, and only the child ends. That takes about 100 µs.
//!
//! Invariant: the memory is named by numbers only. This process passes them to the kernel. The
//! child accesses, by atomic instructions, only the bytes of its errand and the errand itself,
//! which lives until the child has ended.

use iwarp_rnic::memory::Pager;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null_mut, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// How on-demand regions are accessed.
// SAFETY: each function accesses only what it is given, by system calls or in a child; both fail
// for a missing page.
pub static PAGER: Pager = unsafe { Pager::new(read, write, exchange) };

fn iovec(at: u64, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: with_exposed_provenance_mut(at as usize),
        iov_len: len,
    }
}

fn read(from: u64, to: &mut [u8]) -> bool {
    let here = to.as_mut_ptr().expose_provenance() as u64;
    let by_kernel = in_parts(to.len(), |done, left| {
        let (local, remote) = (iovec(here + done, left), iovec(from + done, left));
        // SAFETY: the kernel writes only to `to`, which is borrowed, and checks the other address
        // itself.
        unsafe {
            libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
        }
    });
    match by_kernel {
        Copied::All => true,
        Copied::Missing => false,
        Copied::NotAllowed => Errand::new(Work::Copy {
            from,
            to: here,
            len: to.len(),
        })
        .run(),
    }
}

fn write(to: u64, from: &[u8]) -> bool {
    let here = from.as_ptr().expose_provenance() as u64;
    let by_kernel = in_parts(from.len(), |done, left| {
        // Programs wait for the last byte, so it is written separately after the others.
        let head = left - 1;
        let parts = |at: u64| [iovec(at + done, head), iovec(at + done + head as u64, 1)];
        let (local, remote) = (parts(here), parts(to));
        // SAFETY: the kernel only reads `from`, and checks the other address itself.
        unsafe { libc::process_vm_writev(libc::getpid(), local.as_ptr(), 2, remote.as_ptr(), 2, 0) }
    });
    match by_kernel {
        Copied::All => true,
        Copied::Missing => false,
        Copied::NotAllowed => Errand::new(Work::Copy {
            from: here,
            to,
            len: from.len(),
        })
        .run(),
    }
}

fn exchange(at: u64, old: u64, new: u64) -> Option<u64> {
    let errand = Errand::new(Work::Exchange { at, old, new });
    errand.run().then(|| errand.found.load(Ordering::Relaxed))
}

#[derive(Debug, PartialEq, Eq)]
enum Copied {
    All,
    /// A page is missing or does not allow the access.
    Missing,
    /// The kernel refuses to copy for this process.
    NotAllowed,
}

/// Copies `len` bytes by calls of `copy`, which gets the number of bytes done and remaining, and
/// returns how many it has copied, or -1.
fn in_parts(len: usize, mut copy: impl FnMut(u64, usize) -> isize) -> Copied {
    let mut done = 0;
    while done < len {
        match usize::try_from(copy(done as u64, len - done)) {
            Ok(0) => return Copied::Missing,
            Ok(n) => done += n,
            Err(_) => {
                return match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EFAULT) => Copied::Missing,
                    _ => Copied::NotAllowed,
                };
            }
        }
    }
    Copied::All
}

#[derive(Debug, Clone, Copy)]
enum Work {
    Copy { from: u64, to: u64, len: usize },
    Exchange { at: u64, old: u64, new: u64 },
}

/// An access by a child that shares this process's memory.
#[derive(Debug)]
struct Errand {
    work: Work,
    /// The previous value that an exchange has found.
    found: AtomicU64,
    /// The child has succeeded. Otherwise a page was missing, or there was no child.
    done: AtomicBool,
}

/// Bytes of the child's stack. It calls a few functions of the C library, and the kernel writes a
/// signal frame there.
const STACK: usize = 64 << 10;

impl Errand {
    fn new(work: Work) -> Self {
        Self {
            work,
            found: AtomicU64::new(0),
            done: AtomicBool::new(false),
        }
    }

    /// Runs it in a child and waits for its end. Returns `true` if it succeeded.
    fn run(&self) -> bool {
        let mut stack: Vec<u128> = Vec::new();
        if stack.try_reserve_exact(STACK / size_of::<u128>()).is_err() {
            return false;
        }
        let top = stack.spare_capacity_mut().as_mut_ptr_range().end;
        // The program's handlers must not run in the child.
        let mask = Mask::block_all();
        let argument: *const Self = self;
        // Like `vfork`: this thread stops until the child has ended. No signal reports its end, so
        // the program does not notice it.
        let flags = libc::CLONE_VM | libc::CLONE_VFORK;
        // SAFETY: the stack and the errand belong to the child until it has ended, before `clone`
        // returns. `child` ends by `_exit`.
        let pid = unsafe { libc::clone(child, top.cast(), flags, argument.cast_mut().cast()) };
        if pid > 0 {
            wait_for(pid);
        }
        drop(mask);
        self.done.load(Ordering::Acquire)
    }

    fn carry_out(&self) {
        match self.work {
            Work::Copy { from, to, len } => {
                for i in 0..len {
                    let from = with_exposed_provenance::<u8>(from as usize + i);
                    let to = with_exposed_provenance_mut::<u8>(to as usize + i);
                    // SAFETY: the caller of `run` borrows one side. If the other one is not mapped,
                    // only this child ends.
                    unsafe {
                        let octet = AtomicU8::from_ptr(from.cast_mut()).load(Ordering::Relaxed);
                        AtomicU8::from_ptr(to).store(octet, Ordering::Release);
                    }
                }
            }
            Work::Exchange { at, old, new } => {
                // SAFETY: the RNIC has checked the alignment. If it is not mapped, only this child
                // ends.
                let word = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(at as usize)) };
                let (order, on_failure) = (Ordering::AcqRel, Ordering::Acquire);
                let (Ok(found) | Err(found)) = word.compare_exchange(old, new, order, on_failure);
                self.found.store(found, Ordering::Relaxed);
            }
        }
    }
}

/// The child: executes an errand and ends. It has its own table of signal handlers, and calls only
/// async-signal-safe functions.
extern "C" fn child(errand: *mut c_void) -> c_int {
    // SAFETY: `run` has passed it, and waits. The calls change this process's own handlers and
    // mask. A handler is needed because a process killed by such a signal writes a core dump, and
    // some kernels then kill all processes that share its memory.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = leave as extern "C" fn(c_int) as usize;
        let mut faults = MaybeUninit::<libc::sigset_t>::zeroed();
        libc::sigemptyset(faults.as_mut_ptr());
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            libc::sigaddset(faults.as_mut_ptr(), signal);
            if libc::sigaction(signal, &raw const action, null_mut()) != 0 {
                libc::_exit(1);
            }
        }
        libc::sigprocmask(libc::SIG_UNBLOCK, faults.as_ptr(), null_mut());
        let errand = &*errand.cast::<Errand>();
        errand.carry_out();
        errand.done.store(true, Ordering::Release);
        libc::_exit(0)
    }
}

/// The child's signal handler: a page is missing.
extern "C" fn leave(_signal: c_int) {
    // SAFETY: ends this process, which is the child.
    unsafe { libc::_exit(1) }
}

fn wait_for(child: libc::pid_t) {
    loop {
        // SAFETY: only passes numbers.
        let waited = unsafe { libc::waitpid(child, null_mut(), libc::__WALL) };
        let interrupted = io::Error::last_os_error().raw_os_error() == Some(libc::EINTR);
        if waited >= 0 || !interrupted {
            return;
        }
    }
}

/// Blocks all signals for this thread until it is dropped.
struct Mask(MaybeUninit<libc::sigset_t>);

impl Mask {
    fn block_all() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut old = Self(MaybeUninit::zeroed());
        // SAFETY: both sets are local.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), old.0.as_mut_ptr());
        }
        old
    }
}

impl Drop for Mask {
    fn drop(&mut self) {
        // SAFETY: the previous mask.
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
/// `EFAULT` if a page is not mapped or does not allow the access. Before 5.14, kernels cannot do
/// this; the call then does nothing, because the pages are faulted in on first use.
pub fn prefetch(addr: u64, len: u64, how: Prefetch) -> io::Result<()> {
    let page = super::mapping::page_size() as u64;
    let start = addr - addr % page;
    let end = addr
        .checked_add(len)
        .and_then(|end| end.checked_next_multiple_of(page));
    let fault = || io::Error::from_raw_os_error(libc::EFAULT);
    // The kernel's answer does not distinguish an unknown advice from a page that does not allow
    // the access.
    if !super::probe::probe_range(addr, len, how == Prefetch::Write) {
        return Err(fault());
    }
    let len = end.ok_or_else(fault)? - start;
    let advice = match how {
        Prefetch::Read => libc::MADV_POPULATE_READ,
        Prefetch::Write => libc::MADV_POPULATE_WRITE,
    };
    // SAFETY: populating changes no content.
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
            // Unmapped meanwhile, or beyond the end of a file.
            Some(libc::ENOMEM | libc::EFAULT) => Err(fault()),
            // This kernel does not know the advice, or a device is mapped.
            Some(libc::EINVAL | libc::ENOSYS | libc::EPERM) => Ok(()),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
#[path = "on_demand_tests.rs"]
mod tests;
