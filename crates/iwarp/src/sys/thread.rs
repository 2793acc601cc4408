//! Threads of the engine. Invariant: they run with every signal blocked, so that the program's handlers
//! only ever run on its own threads; the mask of the calling thread is as before afterwards.

use crate::sys::clock::now_ns;
use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::thread::JoinHandle;

/// Starts a thread that receives no signals. Returns its handle.
///
/// # Errors
/// The kernel's error if no thread can be made.
pub(crate) fn spawn_without_signals(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid to write; `sigfillset` initialises the first before it is read, and
    // `pthread_sigmask` initialises the second if it succeeds, which it does for these arguments.
    let masked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if masked == 0 {
        // SAFETY: initialised by the successful call above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    spawned
}

/// Returns the kernel's number of the calling thread.
pub(crate) fn own_number() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Returns `true` if this thread of the process has a processor or waits for one; `false` if it sleeps, or if that cannot be found out.
pub(crate) fn is_runnable(number: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{number}/stat"));
    // The state is behind the name, which is in parentheses and may have any character.
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|s| s.starts_with('R')))
}

thread_local! {
    /// The time of the last call of [`kept_from_processor`], the processor time at that moment, and how often the thread had slept.
    static BEFORE: Cell<(u64, u64, libc::c_long)> = const { Cell::new((0, 0, 0)) };
}

/// Returns for how long the calling thread was kept from a processor since the last call, in nanoseconds. 0 if it has slept
/// meanwhile, or if this is the first call: then it is not known how much of the time it was ready to run.
#[cold]
pub(crate) fn kept_from_processor() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: valid to write; the kernel fills it in if the call succeeds.
    if unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0 {
        return 0;
    }
    // SAFETY: initialised by the successful call above.
    let usage = unsafe { usage.assume_init() };
    let used = nanoseconds(usage.ru_utime) + nanoseconds(usage.ru_stime);
    let (now, sleeps) = (now_ns(), usage.ru_nvcsw);
    // A thread that is ending has no place to note it.
    let before = BEFORE.try_with(|before| before.replace((now, used, sleeps)));
    match before {
        Ok((then, used_before, sleeps_before)) if then != 0 && sleeps_before == sleeps => {
            (now - then).saturating_sub(used.saturating_sub(used_before))
        }
        _ => 0,
    }
}

fn nanoseconds(time: libc::timeval) -> u64 {
    let (seconds, micros) = (time.tv_sec.unsigned_abs(), time.tv_usec.unsigned_abs());
    seconds * 1_000_000_000 + micros * 1_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_thread_that_works_or_sleeps_is_not_kept() {
        std::thread::spawn(|| {
            assert_eq!(kept_from_processor(), 0, "the first call");
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(kept_from_processor(), 0, "it has slept");
            // Other threads may have the processor for a part of this time, so the figure is at most what this one did not use.
            let begin = now_ns();
            let mut sum = 0u64;
            while now_ns() - begin < 20_000_000 {
                sum = std::hint::black_box(sum.wrapping_add(1));
            }
            assert!(kept_from_processor() <= now_ns() - begin);
        })
        .join()
        .expect("thread");
    }
}
