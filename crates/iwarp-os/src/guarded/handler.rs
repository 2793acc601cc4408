//! The handler of SIGSEGV and SIGBUS.
//!
//! It turns a fault of a guarded access into an error, and passes every other signal to the
//! previous handler, as the kernel would have called it: with the same mask, on the same stack,
//! with the same arguments. It uses only atomic numbers: no lock, no allocation, no thread-local
//! storage.
//!
//! # Programs with handlers
//!
//! Our handler calls the handler that was installed *before* it. If the program installs a handler
//! *later*, that replaces ours. Interposing `sigaction` would not detect all of these: libraries
//! opened with `dlopen` get the C library's function, and sanitizers interpose a function of their
//! own. So [`keep_installed`] checks from time to time whether our handler is still installed. If
//! not, it installs ours again, with the new handler as its predecessor.
//!
//! The new handler may have saved ours as its own predecessor, for signals that it does not handle.
//! So that the two do not call each other forever, we install a different function each time, a
//! *level*, with its own predecessor:
//!
//! ```text
//! kernel ──► level 1 ──► the program's new handler ──► level 0 ──► the program's first handler
//! ```
//!
//! If the program installs the same handler again, it gets the same level. If all levels are in
//! use, the program's new handler remains installed. When a program installs its new handler once
//! more, it may save level 1 as the predecessor. Then level 1 and that handler would call each
//! other. So each level marks the signals that it passes on, in bytes of `siginfo_t` that the
//! kernel clears and nothing uses. If a level gets a signal with its own mark, it passes the signal
//! to the predecessor of a lower level.

use super::machine;
use crate::process_lock::ProcessLock;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

/// The signals that a fault raises.
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

/// The predecessors, indexed by signal and by level.
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
static INSTALLING: ProcessLock<()> = ProcessLock::new("sys::guarded::INSTALLING", ());

impl Previous {
    /// The flags that are compared and stored. Our handler is installed with all other flags of its
    /// predecessor, so that the kernel applies them.
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

    /// Returns the action for a signal, and its flags. Removes an action with SA_RESETHAND.
    fn take(&self) -> (usize, c_int) {
        let flags = self.flags.load(Ordering::Acquire);
        let action = match flags & libc::SA_RESETHAND {
            0 => self.action.load(Ordering::Acquire),
            _ => self.action.swap(libc::SIG_DFL, Ordering::AcqRel),
        };
        (action, flags)
    }
}

pub(super) fn enable() {
    ENABLED.store(true, Ordering::Relaxed);
    keep_installed();
}

pub(super) fn keep_installed() {
    if !ENABLED.load(Ordering::Relaxed) {
        return;
    }
    unblock();
    // Do not wait: another thread that holds the lock is installing the handlers.
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

/// Returns the action for a signal, and replaces it by `new` if given. Returns `None` if the kernel
/// refuses.
fn sigaction(signal: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let new = new.map_or(null(), std::ptr::from_ref);
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both pointers are valid. The new action is one of `HANDLERS`, or has no function.
    match unsafe { libc::sigaction(signal, new, old.as_mut_ptr()) } {
        // SAFETY: the successful call has filled in the structure.
        0 => Some(unsafe { old.assume_init() }),
        _ => None,
    }
}

fn is_ours(action: &libc::sigaction) -> bool {
    HANDLERS
        .iter()
        .any(|handler| *handler as usize == action.sa_sigaction)
}

/// Returns an action for our handler whose predecessor is `before`: the kernel calls it with the
/// same mask and on the same stack.
fn with_predecessor(before: &libc::sigaction, handler: Handler) -> libc::sigaction {
    let mut ours = *before;
    ours.sa_sigaction = handler as usize;
    ours.sa_flags = match before.sa_sigaction {
        // There is no function that could depend on the stack. Use the alternate stack, because the
        // fault may be a stack overflow.
        libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
        _ => before.sa_flags & !libc::SA_RESETHAND,
    };
    ours.sa_flags |= libc::SA_SIGINFO;
    ours
}

/// Installs our handler for a signal, unless it is already installed.
fn install(signal: c_int, levels: &[Previous; HANDLERS.len()]) {
    let Some(before) = sigaction(signal, None) else {
        return;
    };
    if is_ours(&before) {
        return;
    }
    let known = levels.iter().position(|level| level.is(&before));
    let unused = || {
        let free = |level: &Previous| !level.used.load(Ordering::Relaxed);
        levels.iter().position(free)
    };
    let Some(level) = known.or_else(unused) else {
        return;
    };
    let (Some(previous), Some(handler)) = (levels.get(level), HANDLERS.get(level)) else {
        return;
    };
    previous.set(&before);
    let replaced = sigaction(signal, Some(&with_predecessor(&before, *handler)));
    // The program may have installed a handler since the first call.
    if let Some(replaced) = replaced
        && replaced.sa_sigaction != before.sa_sigaction
        && !is_ours(&replaced)
    {
        previous.set(&replaced);
        sigaction(signal, Some(&with_predecessor(&replaced, *handler)));
    }
}

extern "C" fn handle<const LEVEL: usize>(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: the arguments are the kernel's, which another handler may have passed on.
    unsafe {
        if is_fault(signal, &*info) && fail_guarded(context.cast()) {
            return;
        }
        forward(LEVEL, signal, info, context);
    }
}

/// Returns `true` if an instruction of this thread caused the signal. Returns `false` if a process
/// has sent it, or if it reports a memory error that no instruction has caused.
fn is_fault(signal: c_int, info: &libc::siginfo_t) -> bool {
    info.si_code > 0 && !(signal == libc::SIGBUS && info.si_code == libc::BUS_MCEERR_AO)
}

/// Returns a pointer to the program counter of the interrupted thread.
///
/// # Safety
/// The context is the argument of a signal handler.
unsafe fn program_counter(context: *mut libc::ucontext_t) -> *mut usize {
    // SAFETY: guaranteed by the caller.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        let counter = &raw mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize];
        #[cfg(target_arch = "aarch64")]
        let counter = &raw mut (*context).uc_mcontext.pc;
        counter.cast()
    }
}

/// If the thread was interrupted in a guarded access, makes the access fail. Otherwise, returns
/// `false`.
///
/// # Safety
/// As for [`program_counter`].
unsafe fn fail_guarded(context: *mut libc::ucontext_t) -> bool {
    let section = machine::bounds();
    // SAFETY: guaranteed by the caller. Any function of the section may continue in `failed`.
    unsafe {
        let counter = program_counter(context);
        let is_guarded = (section.start..section.end).contains(&*counter);
        if is_guarded {
            *counter = machine::failed as extern "C" fn() as usize;
        }
        is_guarded
    }
}

/// The levels that have passed on a signal, stored in unused bytes of its `siginfo_t`.
mod mark {
    /// Shows that the mark is ours.
    const MAGIC: u64 = 0x1a7b_93e2_65c4 << 16;
    /// One bit for each level.
    const LEVELS: u64 = 0xffff;

    /// Adds a level to the mark. Returns the levels of the mark before that.
    ///
    /// # Safety
    /// `info` is valid, and nothing else uses it.
    pub(super) unsafe fn add(info: *mut libc::siginfo_t, level: usize) -> u64 {
        const { assert!(size_of::<libc::siginfo_t>() == 128) };
        // SAFETY: the mark is the last eight bytes of the structure, which is aligned for them.
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
/// The last three arguments are those of a signal handler.
unsafe fn forward(
    mut level: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    let which = usize::from(signal == libc::SIGBUS);
    let levels = PREVIOUS.get(which);
    // SAFETY: guaranteed by the caller.
    let mut before = unsafe { mark::add(info, level) };
    // If the predecessor has called this level again, continue with the next lower level that has
    // not passed on the signal.
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
    // SAFETY: the program has installed the action with these flags, and the arguments are those of
    // a signal handler.
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

/// Performs the signal's default action: ends the process, with a core dump if enabled.
///
/// # Safety
/// `info` is the argument of the signal handler.
unsafe fn act_by_default(signal: c_int, info: *mut libc::siginfo_t) {
    // SAFETY: all zeros are a valid action, with no function, an empty mask and no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = libc::SIG_DFL;
    sigaction(signal, Some(&action));
    // Send the signal again. It is blocked now, so it is delivered when the handler returns, with
    // the registers of the fault. If a sandbox forbids the call, the instruction faults again.
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (process, thread) = (libc::getpid(), libc::syscall(libc::SYS_gettid));
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sent_signals_are_no_faults() {
        const SEGV_MAPERR: c_int = 1;
        // SAFETY: all zeros are a valid `siginfo_t`.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        for (signal, code, expected) in [
            (libc::SIGSEGV, libc::SI_USER, false),
            (libc::SIGSEGV, libc::SI_TKILL, false),
            (libc::SIGSEGV, SEGV_MAPERR, true),
            (libc::SIGBUS, libc::BUS_ADRERR, true),
            (libc::SIGBUS, libc::BUS_MCEERR_AO, false),
        ] {
            info.si_code = code;
            assert_eq!(is_fault(signal, &info), expected, "{signal} {code}");
        }
    }

    #[test]
    fn one_shot_handler_is_taken_once() {
        let previous = Previous {
            used: AtomicBool::new(true),
            action: AtomicUsize::new(7),
            flags: AtomicI32::new(0),
        };
        assert_eq!([previous.take(), previous.take()], [(7, 0); 2]);
        let flags = libc::SA_RESETHAND;
        previous.flags.store(flags, Ordering::Relaxed);
        assert_eq!(previous.take(), (7, flags));
        assert_eq!(previous.take(), (libc::SIG_DFL, flags));
    }
}
