//! The handler of SIGSEGV and SIGBUS.
//!
//! It turns a fault of a guarded access into an error, and passes every other signal to the
//! previous handler, as the kernel would have called it: with the same mask, on the same stack,
//! with the same arguments. It uses only atomic numbers: no lock, no allocation, no thread-local
//! storage.
//!
//! # Programs with handlers
//!
//! A handler that was installed *before* ours is called by ours. A program that installs one
//! *later* replaces ours. Interposing `sigaction` would not catch all of these: libraries opened
//! with `dlopen` get the C library's function, and sanitizers put a function of their own in front.
//! So [`keep`] checks from time to time whether ours is still installed, and if not, installs it
//! again in front of the new one.
//!
//! The new handler may have saved the old one (ours) to call it for signals that it does not
//! handle. So that the two do not call each other forever, ours is a different function each time,
//! a *level*, with its own predecessor:
//!
//! ```text
//! kernel ──► level 1 ──► the program's new handler ──► level 0 ──► the program's first handler
//! ```
//!
//! The program's same handler always gets the same level. If all levels are used up, a new handler
//! stays in front. A program may also take level 1 for the predecessor of its new handler, when it
//! installs that once more. So each level marks the signals that it has passed on, in bytes of
//! `siginfo_t` that the kernel clears and nothing uses, and passes a marked one to a lower level's
//! predecessor.

use super::machine;
use crate::process_lock::ProcessLock;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

/// The signals of a fault.
const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

const HANDLERS: [Handler; 8] = [
    handle::<0>,
    handle::<1>,
    handle::<2>,
    handle::<3>,
    handle::<4>,
    handle::<5>,
    handle::<6>,
    handle::<7>,
];

/// The predecessor of one level for one signal.
#[derive(Debug)]
struct Previous {
    /// The level has been installed.
    used: AtomicBool,
    /// `SIG_DFL`, `SIG_IGN`, or a function.
    action: AtomicUsize,
    flags: AtomicI32,
}

/// By signal, then by level.
static PREVIOUS: [[Previous; HANDLERS.len()]; SIGNALS.len()] = [const {
    [const {
        Previous {
            used: AtomicBool::new(false),
            action: AtomicUsize::new(libc::SIG_DFL),
            flags: AtomicI32::new(0),
        }
    }; HANDLERS.len()]
}; SIGNALS.len()];

static ENABLED: AtomicBool = AtomicBool::new(false);
/// Held while a level is installed.
static INSTALLING: ProcessLock<()> = ProcessLock::new("sys::guarded::INSTALLING", ());

impl Previous {
    /// The flags that are compared and kept. The kernel applies the others to our handler as well.
    const FLAGS: c_int = libc::SA_SIGINFO | libc::SA_RESETHAND;

    fn is(&self, action: &libc::sigaction) -> bool {
        self.used.load(Ordering::Acquire)
            && self.action.load(Ordering::Acquire) == action.sa_sigaction
            && self.flags.load(Ordering::Acquire) == action.sa_flags & Self::FLAGS
    }

    fn set(&self, action: &libc::sigaction) {
        self.action.store(action.sa_sigaction, Ordering::Release);
        self.flags
            .store(action.sa_flags & Self::FLAGS, Ordering::Release);
        self.used.store(true, Ordering::Release);
    }

    /// Returns the action for a signal, and its flags. An action with SA_RESETHAND is then removed.
    fn take(&self) -> (usize, c_int) {
        let flags = self.flags.load(Ordering::Acquire);
        let action = match flags & libc::SA_RESETHAND {
            0 => self.action.load(Ordering::Acquire),
            _ => self.action.swap(libc::SIG_DFL, Ordering::AcqRel),
        };
        (action, flags)
    }
}

/// See [`super::enable`].
pub(super) fn enable() {
    ENABLED.store(true, Ordering::Relaxed);
    keep();
}

/// See [`super::keep`].
pub(super) fn keep() {
    if !ENABLED.load(Ordering::Relaxed) {
        return;
    }
    unblock();
    // A forked child may have inherited a lock that is never released. Its handlers are the
    // parent's.
    let Some(_installing) = INSTALLING.try_lock() else {
        return;
    };
    for (signal, levels) in SIGNALS.into_iter().zip(&PREVIOUS) {
        install(signal, levels);
    }
}

fn unblock() {
    let mut blocked = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the sets are local, and the calls change the mask of this thread only.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, null(), blocked.as_mut_ptr());
        if SIGNALS
            .into_iter()
            .all(|signal| libc::sigismember(blocked.as_ptr(), signal) == 0)
        {
            return;
        }
        let mut faults = MaybeUninit::<libc::sigset_t>::zeroed();
        libc::sigemptyset(faults.as_mut_ptr());
        for signal in SIGNALS {
            libc::sigaddset(faults.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, faults.as_ptr(), null_mut());
    }
}

/// Returns the action for a signal, and replaces it by `new` if given; `None` if the kernel
/// refuses.
fn sigaction(signal: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let new = new.map_or(null(), std::ptr::from_ref);
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both are valid, and what is installed is one of `HANDLERS` or an action without a
    // function.
    match unsafe { libc::sigaction(signal, new, old.as_mut_ptr()) } {
        // SAFETY: all zeros are a valid value, and the call has overwritten it.
        0 => Some(unsafe { old.assume_init() }),
        _ => None,
    }
}

fn is_ours(action: &libc::sigaction) -> bool {
    HANDLERS
        .iter()
        .any(|handler| *handler as usize == action.sa_sigaction)
}

/// Returns an action like `before` with our handler: the kernel calls it with the same mask and on
/// the same stack.
fn in_front_of(before: &libc::sigaction, handler: Handler) -> libc::sigaction {
    let mut ours = *before;
    ours.sa_sigaction = handler as usize;
    ours.sa_flags = match before.sa_sigaction {
        // No program function can depend on the stack. An overflow of a thread's stack needs
        // another one.
        libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
        _ => before.sa_flags & !libc::SA_RESETHAND,
    };
    ours.sa_flags |= libc::SA_SIGINFO;
    ours
}

/// Installs the handler for a signal unless it is installed.
fn install(signal: c_int, levels: &[Previous; HANDLERS.len()]) {
    let Some(before) = sigaction(signal, None) else {
        return;
    };
    if is_ours(&before) {
        return;
    }
    let again = levels.iter().position(|level| level.is(&before));
    let unused = || {
        let free = |level: &Previous| !level.used.load(Ordering::Relaxed);
        levels.iter().position(free)
    };
    let Some(level) = again.or_else(unused) else {
        return;
    };
    let (Some(previous), Some(handler)) = (levels.get(level), HANDLERS.get(level)) else {
        return;
    };
    previous.set(&before);
    let replaced = sigaction(signal, Some(&in_front_of(&before, *handler)));
    // Another thread may have installed one since the first call.
    if let Some(replaced) = replaced
        && replaced.sa_sigaction != before.sa_sigaction
        && !is_ours(&replaced)
    {
        previous.set(&replaced);
        sigaction(signal, Some(&in_front_of(&replaced, *handler)));
    }
}

extern "C" fn handle<const LEVEL: usize>(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: both come from the kernel, or from a handler that passes on what the kernel gave it.
    unsafe {
        if is_fault(signal, &*info) && fail_guarded(context.cast()) {
            return;
        }
        forward(LEVEL, signal, info, context);
    }
}

/// Returns `true` if this thread caused the signal, and `false` if a process has sent it, or if it
/// concerns memory that no instruction has accessed.
fn is_fault(signal: c_int, info: &libc::siginfo_t) -> bool {
    info.si_code > 0 && !(signal == libc::SIGBUS && info.si_code == libc::BUS_MCEERR_AO)
}

/// Returns where the interrupted thread is.
///
/// # Safety
/// The context is that of a signal handler.
unsafe fn program_counter(context: *mut libc::ucontext_t) -> *mut usize {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        let at = &raw mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize];
        #[cfg(target_arch = "aarch64")]
        let at = &raw mut (*context).uc_mcontext.pc;
        at.cast()
    }
}

/// Ends the guarded access in which the thread was interrupted. Returns `false` if there was none.
///
/// # Safety
/// As [`program_counter`].
unsafe fn fail_guarded(context: *mut libc::ucontext_t) -> bool {
    let section = machine::bounds();
    // SAFETY: the caller's promise. `failed` may replace the rest of any function of the section.
    unsafe {
        let at = program_counter(context);
        let guarded = (section.start..section.end).contains(&*at);
        if guarded {
            *at = machine::failed as extern "C" fn() as usize;
        }
        guarded
    }
}

/// The levels that have passed a signal on, in unused bytes of its `siginfo_t`.
mod mark {
    /// Marks the 16 bits as ours.
    const MAGIC: u64 = 0x1a7b_93e2_65c4 << 16;
    const LEVELS: u64 = 0xffff;

    /// Adds a level. Returns the levels that were present before, one bit for each.
    ///
    /// # Safety
    /// `info` is valid, and nothing else uses it.
    pub(super) unsafe fn add(info: *mut libc::siginfo_t, level: usize) -> u64 {
        const { assert!(size_of::<libc::siginfo_t>() == 128) };
        // SAFETY: the last eight bytes of the structure, which is aligned for them.
        unsafe {
            let mark = info.cast::<u64>().add(15);
            let before = match *mark & !LEVELS == MAGIC {
                true => *mark & LEVELS,
                false => 0,
            };
            *mark = MAGIC | before | 1 << level;
            before
        }
    }
}

/// Passes a signal to the predecessor of a level.
///
/// # Safety
/// The arguments are those of a signal handler.
unsafe fn forward(
    mut level: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    let which = usize::from(signal == libc::SIGBUS);
    let levels = PREVIOUS.get(which);
    // SAFETY: the caller's promise.
    let mut before = unsafe { mark::add(info, level) };
    // The predecessor has called this level again: continue with the next lower level that was not
    // called.
    while before & 1 << level != 0 {
        let Some(lower) = level.checked_sub(1) else {
            // SAFETY: as above.
            return unsafe { act_by_default(signal, info) };
        };
        level = lower;
        // SAFETY: as above.
        before = unsafe { mark::add(info, level) };
    }
    let previous = levels.and_then(|levels| levels.get(level));
    let (action, flags) = previous.map_or((libc::SIG_DFL, 0), Previous::take);
    // SAFETY: the program has installed the action with these flags. The arguments are the
    // kernel's.
    unsafe {
        match action {
            libc::SIG_DFL => act_by_default(signal, info),
            // A fault cannot be ignored: the kernel ends the process.
            libc::SIG_IGN if !is_fault(signal, &*info) => {}
            libc::SIG_IGN => act_by_default(signal, info),
            _ if flags & libc::SA_SIGINFO != 0 => {
                let call: Handler = std::mem::transmute(action);
                call(signal, info, context);
            }
            _ => {
                let call: extern "C" fn(c_int) = std::mem::transmute(action);
                call(signal);
            }
        }
    }
}

/// Ends the process by the signal, with a core dump if enabled.
///
/// # Safety
/// `info` is the signal's.
unsafe fn act_by_default(signal: c_int, info: *mut libc::siginfo_t) {
    // SAFETY: all zeros are an action without a function, mask and flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = libc::SIG_DFL;
    sigaction(signal, Some(&action));
    // The signal is blocked, so it is delivered when the handler returns, with the registers of the
    // fault. If a sandbox forbids the call, the instruction faults again.
    // SAFETY: the caller's promise.
    unsafe {
        let (process, thread) = (libc::getpid(), libc::syscall(libc::SYS_gettid));
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info);
    }
}
