//! Queue pairs with one owner, and waiting for completions, for threads and for async tasks. The public layer above is `verbs`.

#[doc(hidden)]
pub mod cm;
pub(crate) mod memory;

use crate::conn::qp::QpAttributes;
use crate::conn::qp::QueuePair as Raw;
use crate::error::{Error, Result};
use crate::objects::cq::CompletionQueue;
use crate::objects::cq::CqError;
use crate::objects::srq::SharedReceiveQueue;
use crate::owned::memory::ProtectionDomain;
use crate::progress::wakers::Registration;
use iwarp_rnic::Cqe;
use iwarp_rnic::qp::State;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// The sizes of a queue pair that is to be created.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct QueuePairBuilder {
    pd: ProtectionDomain,
    srq: Option<SharedReceiveQueue>,
    max_send_wr: u32,
    max_recv_wr: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    max_inline: u32,
    signal_all: bool,
    max_ird: u16,
    max_ord: u16,
}

impl QueuePairBuilder {
    pub(crate) fn new(pd: &ProtectionDomain) -> Self {
        Self {
            pd: pd.clone(),
            srq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 256,
            signal_all: false,
            max_ird: 16,
            max_ord: 16,
        }
    }

    /// Sets how many send and receive work requests may be outstanding; default 128 each.
    pub fn depth(mut self, send: u32, recv: u32) -> Self {
        self.max_send_wr = send;
        self.max_recv_wr = recv;
        self
    }

    /// Sets the scatter/gather elements per send and receive work request; default 4 each.
    pub fn max_sge(mut self, send: u32, recv: u32) -> Self {
        self.max_send_sge = send;
        self.max_recv_sge = recv;
        self
    }

    /// Sets the octets of inline data per work request; default 256.
    pub fn max_inline(mut self, octets: u32) -> Self {
        self.max_inline = octets;
        self
    }

    /// Sets how many RDMA Reads and atomics may be in flight: inbound to serve (`ird`), outbound to have outstanding (`ord`);
    /// default 16 each, at most 4096.
    pub fn reads(mut self, ird: u16, ord: u16) -> Self {
        self.max_ird = ird;
        self.max_ord = ord;
        self
    }

    /// If `yes`, every send work request writes a completion. Otherwise only signaled ones do.
    pub fn signal_all(mut self, yes: bool) -> Self {
        self.signal_all = yes;
        self
    }

    /// Takes receives from this shared receive queue instead of a receive queue of its own.
    pub fn shared_receive_queue(mut self, srq: &SharedReceiveQueue) -> Self {
        self.srq = Some(srq.clone());
        self
    }

    /// Creates the queue pair. Both completion queues may be the same one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: a size above the device's limit; [`Error::OutOfMemory`].
    pub fn build(self, send_cq: &CompletionQueue, recv_cq: &CompletionQueue) -> Result<QueuePair> {
        let raw = self.pd.context().create_qp(&QpAttributes {
            pd: self.pd.number(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: self.srq,
            unreliable: false,
            max_send_wr: self.max_send_wr,
            max_recv_wr: self.max_recv_wr,
            max_send_sge: self.max_send_sge,
            max_recv_sge: self.max_recv_sge,
            max_inline: self.max_inline,
            signal_all: self.signal_all,
            max_ird: self.max_ird,
            max_ord: self.max_ord,
        })?;
        // Receives may be posted before the connection is there.
        raw.modify(State::Init)?;
        Ok(QueuePair { raw, _pd: self.pd })
    }
}

/// A queue pair that is destroyed when it is dropped. All verbs are those of [`runtime::QueuePair`](Raw).
#[derive(Debug)]
pub struct QueuePair {
    raw: Raw,
    _pd: ProtectionDomain,
}

impl QueuePair {
    /// Returns a handle to it, which does not own it.
    pub(crate) fn handle(&self) -> Raw {
        self.raw.clone()
    }
}

impl Deref for QueuePair {
    type Target = Raw;

    fn deref(&self) -> &Raw {
        &self.raw
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.raw.destroy();
    }
}

/// Wakes a thread that is parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static WAKER: Waker = Waker::from(Arc::new(Unpark(std::thread::current())));
}

/// Calls `f` with a waker that unparks this thread.
pub(crate) fn with_thread_waker<R>(f: impl FnOnce(&Waker) -> R) -> R {
    WAKER.with(f)
}

impl From<CqError> for Error {
    fn from(e: CqError) -> Self {
        match e {
            CqError::Overflow => Self::CompletionQueueOverflow,
        }
    }
}

impl CompletionQueue {
    /// Waits for completions and takes up to `out.len()` of them. The thread sleeps meanwhile. `None` waits without limit.
    ///
    /// If the last waits on this queue were short, it polls for up to [`Config::busy_poll`](crate::Config::busy_poll) before
    /// it sleeps, because the wake-up would take longer than the rest of the wait.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::CompletionQueueOverflow`], [`Error::InvalidArgument`] for an empty `out`.
    pub fn wait(&self, out: &mut [Cqe], timeout: Option<Duration>) -> Result<usize> {
        room_in(out)?;
        let n = self.poll(out)?;
        if n > 0 {
            return Ok(n);
        }
        let begin = Instant::now();
        let deadline = timeout.and_then(|t| begin.checked_add(t));
        if self.busy_poll(timeout.unwrap_or(Duration::MAX)) {
            let n = self.take_ready(out)?;
            // Another thread may have taken the completion.
            if n > 0 {
                return Ok(n);
            }
        }
        let mut wait = self.waits();
        loop {
            with_thread_waker(|waker| self.wake_wait(&mut wait, waker));
            // A completion may have come after the poll and before the waker was set.
            let n = self.take_ready(out)?;
            if n > 0 {
                return Ok(n);
            }
            match deadline {
                None => std::thread::park(),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Error::TimedOut("no completion came"));
                    }
                    std::thread::park_timeout(left);
                }
            }
            let n = self.poll(out)?;
            if n > 0 {
                self.slept(begin.elapsed());
                return Ok(n);
            }
        }
    }

    /// Waits for completions in an async task of any runtime; see [`wait`](Self::wait), also for the errors.
    pub fn completions<'a>(&'a self, out: &'a mut [Cqe]) -> Completions<'a> {
        Completions {
            cq: self,
            out,
            wait: self.waits(),
        }
    }
}

/// Nobody can wait for completions without room for one: the wait would never end.
pub(crate) fn room_in(out: &[Cqe]) -> Result<()> {
    match out.is_empty() {
        true => Err(Error::InvalidArgument(
            "there must be room for a completion",
        )),
        false => Ok(()),
    }
}

/// The future of [`CompletionQueue::completions`]. It returns how many completions were taken. Dropping it loses none.
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
        room_in(this.out)?;
        match this.cq.poll(this.out) {
            Ok(0) => {}
            done => return Poll::Ready(Ok(done?)),
        }
        this.cq.wake_wait(&mut this.wait, cx.waker());
        match this.cq.take_ready(this.out) {
            Ok(0) => Poll::Pending,
            done => Poll::Ready(Ok(done?)),
        }
    }
}
