//! Threads of the engine. Invariant: they run with all signals blocked, so that the program's
//! handlers only run on its own threads. The calling thread's mask is restored. SIGSEGV and SIGBUS
//! are not blocked: otherwise, the kernel would kill the process instead of calling the handler
//! (`guarded`).

use crate::clock::now_ns;
use rustix::thread::set_current_timer_slack;
use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::thread::JoinHandle;

/// Starts a thread that receives no signals. Returns its handle.
///
/// # Errors
/// The kernel's error if the thread cannot be created.
pub fn spawn_without_signals(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are local variables. `sigfillset` initialises the first one before it is
    // read, and `pthread_sigmask` the second one if it succeeds.
    let masked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigdelset(all.as_mut_ptr(), libc::SIGSEGV);
        libc::sigdelset(all.as_mut_ptr(), libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if masked == 0 {
        // SAFETY: the successful call above has initialised the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    spawned
}

/// Returns the kernel's thread ID of the calling thread.
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Returns `true` if the thread with this ID is running or runnable. Returns `false` if it sleeps,
/// or if that is unknown.
pub fn is_runnable(number: u32) -> bool {
    if cfg!(miri) {
        return false;
    }
    let stat = std::fs::read_to_string(format!("/proc/self/task/{number}/stat"));
    // The state follows the name, which is in parentheses and may contain any character.
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|s| s.starts_with('R')))
}

/// Returns the scheduling attributes of the calling thread, or `None` if a sandbox refuses the
/// call.
fn scheduling() -> Option<libc::sched_attr> {
    let mut attributes = MaybeUninit::<libc::sched_attr>::zeroed();
    let size = size_of::<libc::sched_attr>();
    // SAFETY: the kernel writes at most `size` bytes to the local variable. Thread 0 is the caller.
    let failed =
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, attributes.as_mut_ptr(), size, 0) };
    // SAFETY: all bytes are zero or were written by the kernel, and every field is an integer.
    (failed == 0).then(|| unsafe { attributes.assume_init() })
}

/// Requests that the calling thread's sleeps end on time. By default the kernel may prolong a sleep
/// by 50 µs.
pub fn request_precise_sleeps() {
    if !cfg!(miri) {
        let _ = set_current_timer_slack(NonZeroU64::new(1));
    }
}

/// Requests time slices of this length for the calling thread, in nanoseconds, at least 100 µs. A
/// thread that wakes up then preempts a computing thread with longer slices, instead of waiting for
/// the scheduler's next tick. Its share of the processor does not change.
///
/// Needs no privilege. Has no effect before Linux 6.12, under another policy than `SCHED_OTHER`,
/// and in a sandbox that refuses the call. See sched_setattr(2).
pub fn request_time_slice(nanoseconds: u64) {
    if cfg!(miri) {
        return;
    }
    let Some(mut attributes) = scheduling() else {
        return;
    };
    if attributes.sched_policy == libc::SCHED_OTHER as u32 {
        attributes.sched_runtime = nanoseconds;
        // SAFETY: the kernel reads the local variable, which begins with its size.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

/// A sample of a thread's scheduling history.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    /// When the sample was taken; 0 for an unused entry.
    at: u64,
    /// Total time without a processor up to that time, from an arbitrary origin.
    idle: u64,
    /// Number of sleeps up to that time.
    sleeps: libc::c_long,
}

/// Number of samples kept. A thread that polls several queues requests the duration of the same
/// pause for each of them.
const SAMPLES: usize = 4;
/// A sample is only kept if the thread was without a processor for at least this long since the
/// previous sample, in nanoseconds.
const MIN_IDLE: u64 = 5_000;

/// The last samples of a thread, newest first.
#[derive(Debug, Clone, Copy, Default)]
struct History([Sample; SAMPLES]);

impl History {
    /// Returns how long the thread was kept from a processor since the newest sample that is not
    /// after `since`; if there is none, since the oldest sample. Returns 0 if the thread has slept
    /// since that sample, or if there are no samples.
    fn kept_since(&self, since: u64, now: Sample) -> u64 {
        let known = self.0.iter().take_while(|sample| sample.at != 0);
        let before = known.clone().find(|sample| sample.at <= since);
        match before.or(known.last()) {
            Some(before) if before.sleeps == now.sleeps => now.idle.saturating_sub(before.idle),
            _ => 0,
        }
    }

    fn add(&mut self, now: Sample) {
        let [newest, ..] = self.0;
        let idle = now.idle.saturating_sub(newest.idle);
        if newest.at == 0 || newest.sleeps != now.sleeps || idle >= MIN_IDLE {
            self.0.rotate_right(1);
            self.0[0] = now;
        }
    }
}

thread_local! {
    static HISTORY: Cell<History> = const {
        Cell::new(History([Sample { at: 0, idle: 0, sleeps: 0 }; SAMPLES]))
    };
}

/// Returns how long the calling thread was runnable without a processor since the time `since`, in
/// nanoseconds. The result may include a short time before `since`. Returns 0 if the thread has
/// slept since then, and on the thread's first call.
#[cold]
pub fn kept_from_processor(since: u64) -> u64 {
    if cfg!(miri) {
        return 0;
    }
    let at = now_ns();
    let (Some(sleeps), Some(used)) = (sleeps(), processor_time()) else {
        return 0;
    };
    let idle = at.saturating_sub(used);
    let now = Sample { at, idle, sleeps };
    // A thread that is exiting may have no thread-local storage any longer.
    let kept = HISTORY.try_with(|cell| {
        let mut history = cell.get();
        let kept = history.kept_since(since, now);
        history.add(now);
        cell.set(history);
        kept
    });
    kept.unwrap_or(0)
}

/// Returns the calling thread's processor time in nanoseconds, or `None` if a sandbox refuses the
/// call.
fn processor_time() -> Option<u64> {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: `time` is a local variable, which the kernel fills in if the call succeeds.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, time.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the successful call above has initialised the value.
    let time = unsafe { time.assume_init() };
    Some(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}

/// Returns the number of times that the calling thread has slept.
fn sleeps() -> Option<libc::c_long> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: `usage` is a local variable, which the kernel fills in if the call succeeds.
    if unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the successful call above has initialised the value.
    Some(unsafe { usage.assume_init() }.ru_nvcsw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Returns which of these signals the calling thread blocks: an ordinary one and the two of a
    /// fault.
    fn blocked() -> [bool; 3] {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the call initialises the local set, and changes no mask.
        let set = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
            set.assume_init()
        };
        // SAFETY: the set is initialised.
        [libc::SIGUSR1, libc::SIGSEGV, libc::SIGBUS]
            .map(|signal| unsafe { libc::sigismember(&raw const set, signal) == 1 })
    }

    #[test]
    fn only_faults_reach_helper_thread() {
        let (of_thread, masks) = std::sync::mpsc::channel();
        let run = move || of_thread.send(blocked()).expect("the test waits");
        spawn_without_signals("test", run)
            .expect("thread")
            .join()
            .expect("end");
        assert_eq!(masks.recv(), Ok([true, false, false]));
        assert_eq!(blocked(), [false; 3], "the caller's mask");
    }

    #[test]
    fn working_or_sleeping_thread_is_not_kept() {
        std::thread::spawn(|| {
            assert_eq!(kept_from_processor(now_ns()), 0, "the first call");
            let begin = now_ns();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(kept_from_processor(begin), 0, "the thread has slept");
            // Other threads may use the processor for a part of this time, so the result need not
            // be 0.
            let begin = now_ns();
            let mut sum = 0u64;
            while now_ns() - begin < 20_000_000 {
                sum = std::hint::black_box(sum.wrapping_add(1));
            }
            assert!(kept_from_processor(begin) <= now_ns() - begin);
        })
        .join()
        .expect("thread");
    }

    /// A kernel without time slices reports a length of 0.
    #[test]
    fn requested_slice_keeps_other_attributes() {
        const SLICE: u64 = 300_000;
        let attributes = || scheduling().expect("attributes");
        std::thread::spawn(move || {
            let before = attributes();
            request_time_slice(SLICE);
            let after = attributes();
            assert_eq!(after.sched_runtime, before.sched_runtime.min(SLICE));
            let others = |a: libc::sched_attr| (a.sched_policy, a.sched_nice, a.sched_flags);
            assert_eq!(others(after), others(before));
        })
        .join()
        .expect("thread");
    }

    /// A thread that polls several queues requests the duration of the same pause for each of them.
    #[test]
    fn pause_is_reported_for_each_queue() {
        let sample = |at, idle| Sample {
            at,
            idle,
            sleeps: 7,
        };
        let mut history = History::default();
        assert_eq!(history.kept_since(1, sample(100_000, 30_000)), 0, "unknown");
        history.add(sample(100_000, 30_000));
        for pause in 1..20 {
            let (at, idle) = (100_000 + pause * 200_000, 30_000 + pause * 90_000);
            for queue in 0..6 {
                let now = sample(at + queue * 1_000, idle + queue * 10);
                let renewed = at - 170_000 + queue * 1_000;
                let kept = history.kept_since(renewed, now);
                assert!((90_000..91_000).contains(&kept), "{pause} {queue} {kept}");
                history.add(now);
            }
        }
        let now = sample(4_000_000, 1_800_000);
        assert!(
            history.kept_since(10, now) >= 90_000,
            "before the oldest sample"
        );
        assert_eq!(
            history.kept_since(3_950_000, Sample { sleeps: 8, ..now }),
            0,
            "the thread has slept"
        );
    }
}
