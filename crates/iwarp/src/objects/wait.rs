//! Threads and async tasks that wait for completions.

use super::cq::{CompletionQueue, CqError};
use crate::engine::wakers::Registration;
use crate::error::{Error, Result};
use iwarp_rnic::Cqe;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static WAKER: Waker = Waker::from(Arc::new(Unpark(std::thread::current())));
}

pub(crate) fn with_thread_waker<R>(f: impl FnOnce(&Waker) -> R) -> R {
    WAKER.with(f)
}

impl From<CqError> for Error {
    fn from(error: CqError) -> Self {
        match error {
            CqError::Overflow => Self::CompletionQueueOverflow,
        }
    }
}

impl CompletionQueue {
    /// Waits for completions, and takes up to `out.len()` of them. A timeout of `None` waits
    /// without limit.
    ///
    /// If the last waits on this queue were short, the thread polls for up to
    /// [`Config::busy_poll`](crate::Config::busy_poll) before it sleeps, because waking it would
    /// take longer than the rest of the wait.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if no completion comes in time,
    /// [`Error::CompletionQueueOverflow`] if completions were lost, and [`Error::InvalidArgument`]
    /// if `out` is empty.
    pub fn wait(&self, out: &mut [Cqe], timeout: Option<Duration>) -> Result<usize> {
        require_room(out)?;
        let n = self.poll(out)?;
        if n > 0 {
            return Ok(n);
        }
        let start = Instant::now();
        let deadline = timeout.and_then(|t| start.checked_add(t));
        if self.busy_poll(timeout.unwrap_or(Duration::MAX)) {
            let n = self.take_ready(out)?;
            // Another thread may have taken the completion.
            if n > 0 {
                return Ok(n);
            }
        }
        let mut wait = self.registration();
        loop {
            with_thread_waker(|waker| self.register_wait(&mut wait, waker));
            // A completion may have come before the waker was registered.
            let n = self.take_ready(out)?;
            if n > 0 {
                return Ok(n);
            }
            match deadline {
                None => std::thread::park(),
                Some(deadline) => {
                    let remaining = deadline.saturating_duration_since(Instant::now());
                    if remaining.is_zero() {
                        return Err(Error::TimedOut("no completion came"));
                    }
                    std::thread::park_timeout(remaining);
                }
            }
            let n = self.poll(out)?;
            if n > 0 {
                self.record_sleep(start.elapsed());
                return Ok(n);
            }
        }
    }

    /// Waits for completions in a task of any async runtime. Fails as [`wait`](Self::wait) does.
    /// Dropping the future loses no completions.
    pub fn completions<'a>(&'a self, out: &'a mut [Cqe]) -> Completions<'a> {
        Completions {
            cq: self,
            out,
            wait: self.registration(),
        }
    }
}

/// Returns [`Error::InvalidArgument`] if `out` is empty: a wait would never end, because no
/// completion fits.
pub(crate) fn require_room(out: &[Cqe]) -> Result<()> {
    match out.is_empty() {
        true => Err(Error::InvalidArgument("the slice for completions is empty")),
        false => Ok(()),
    }
}

/// The future of [`CompletionQueue::completions`]. Its output is the number of completions taken.
/// Dropping it loses no completions.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Completions<'a> {
    cq: &'a CompletionQueue,
    out: &'a mut [Cqe],
    wait: Registration<'a>,
}

impl Future for Completions<'_> {
    type Output = Result<usize>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Result<usize>> {
        let this = &mut *self;
        require_room(this.out)?;
        match this.cq.poll(this.out) {
            Ok(0) => {}
            done => return Poll::Ready(Ok(done?)),
        }
        this.cq.register_wait(&mut this.wait, cx.waker());
        match this.cq.take_ready(this.out) {
            Ok(0) => Poll::Pending,
            done => Poll::Ready(Ok(done?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::any_qp::{AnyQp, PollOutcome};
    use crate::objects::cq::Owed;
    use crate::testing;
    use iwarp_rnic::counters::Counters;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    /// A queue pair that writes a completion after the task has registered its waker, and wakes no
    /// task: like a thread that checked for wakers just before the registration.
    struct MissesWaker {
        cq: CompletionQueue,
        calls: AtomicU32,
        mark: AtomicBool,
    }

    impl AnyQp for MissesWaker {
        fn num(&self) -> u32 {
            0
        }

        fn user_data(&self) -> u64 {
            0
        }

        fn poll_sockets(self: Arc<Self>) -> PollOutcome {
            PollOutcome::default()
        }

        fn fail(self: Arc<Self>) {}

        fn counters(&self, _wait: bool) -> Option<Counters> {
            None
        }

        fn send_deferred(self: Arc<Self>) {
            let cq = &self.cq.inner;
            // The first call is by the poll before the registration, the second by the hand-over
            // after it.
            match self.calls.fetch_add(1, Ordering::Relaxed) {
                0 => cq.defer(&self),
                _ => cq.push(&mut cq.ring.lock(), Cqe::default(), &mut Owed::default()),
            }
        }

        fn deferred_mark(&self, _cq: &crate::objects::cq::CqInner) -> Option<&AtomicBool> {
            Some(&self.mark)
        }
    }

    #[test]
    fn completion_without_wake_is_taken() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = Arc::new(MissesWaker {
            cq: cq.clone(),
            calls: AtomicU32::new(0),
            mark: AtomicBool::new(false),
        });
        cq.inner.defer(&qp);
        let mut out = [Cqe::default(); 2];
        let mut wait = std::pin::pin!(cq.completions(&mut out));
        let mut task = TaskContext::from_waker(Waker::noop());
        assert!(matches!(wait.as_mut().poll(&mut task), Poll::Ready(Ok(1))));
        assert_eq!(qp.calls.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn wait_without_completion_times_out() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let limit = Some(Duration::from_millis(1));
        let result = cq.wait(&mut [Cqe::default()], limit);
        assert!(matches!(result, Err(Error::TimedOut(_))), "{result:?}");
    }
}
