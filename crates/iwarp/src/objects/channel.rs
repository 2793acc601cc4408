//! Completion channels (`ibv_create_comp_channel(3)`).

use super::cq::{CompletionQueue, CqInner};
use super::events::EventQueue;
use crate::engine::busy_poll::BusyPoll;
use crate::error::Result;
use parking_lot::RwLock;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A queue of completion events, for any number of completion queues, with a pollable descriptor.
#[derive(Debug, Clone)]
pub struct CompletionChannel {
    pub(crate) queue: Arc<EventQueue<CompletionQueue>>,
    waits: Arc<Waits>,
}

/// What the waits on a channel have shown.
#[derive(Debug)]
struct Waits {
    busy: BusyPoll,
    window: Duration,
    cqs: RwLock<Vec<Weak<CqInner>>>,
    /// Completion queues armed since a thread last waited here. [`CompletionChannel::busy_poll`]
    /// drives their progress.
    armed: AtomicUsize,
}

impl Waits {
    fn each(&self, mut f: impl FnMut(&CqInner)) {
        for cq in self.cqs.read().iter().filter_map(Weak::upgrade) {
            f(&cq);
        }
    }
}

impl CompletionChannel {
    pub(crate) fn create(window: Duration) -> Result<Self> {
        Ok(Self {
            queue: Arc::new(EventQueue::new()?),
            waits: Arc::new(Waits {
                busy: BusyPoll::default(),
                window,
                cqs: RwLock::default(),
                armed: AtomicUsize::new(0),
            }),
        })
    }

    /// Returns the queue of the events.
    pub fn events(&self) -> &EventQueue<CompletionQueue> {
        &self.queue
    }

    /// Takes the oldest event: the completion queue that got a completion after it was armed.
    pub fn try_event(&self) -> Option<CompletionQueue> {
        self.queue.try_next()
    }

    /// Waits for an event (`ibv_get_cq_event(3)`); `None` waits without limit. Polls for a moment
    /// before it sleeps, as [`CompletionQueue::wait`] does.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`](crate::Error::TimedOut) if no event comes in time, or the
    /// operating system's error if it cannot wait.
    pub fn event(&self, timeout: Option<Duration>) -> Result<CompletionQueue> {
        if let Some(cq) = self.try_event() {
            return Ok(cq);
        }
        let begin = Instant::now();
        let polled = self.busy_poll(timeout.unwrap_or(Duration::MAX));
        let remaining = timeout.map(|t| t.saturating_sub(begin.elapsed()));
        let cq = self.queue.next(remaining)?;
        if !polled {
            self.slept(begin.elapsed());
        }
        Ok(cq)
    }

    /// Polls the completion queues of this channel for a moment, if an event is likely to come
    /// soon. Returns `true` if one has come. If not, the caller sleeps on the descriptor and calls
    /// [`slept`](Self::slept) afterwards.
    ///
    /// It takes at most `limit` and [`Config::busy_poll`](crate::Config::busy_poll). When it
    /// returns `false`, the progress thread drives, and the caller may sleep.
    pub fn busy_poll(&self, limit: Duration) -> bool {
        let waits = &*self.waits;
        let left_to_us = waits.armed.swap(0, Ordering::Relaxed) > 0;
        let found = waits.busy.poll(waits.window.min(limit), |now| {
            waits.each(|cq| {
                cq.drive_at(now);
            });
            !self.queue.is_empty()
        });
        if found {
            return true;
        }
        if left_to_us {
            waits.each(CqInner::hand_over);
        }
        // An event may have come between the last poll and the hand-over.
        !self.queue.is_empty()
    }

    /// Records that a wait for an event took this long, and that the thread slept.
    pub fn slept(&self, waited: Duration) {
        self.waits.busy.slept(waited, self.waits.window);
    }

    pub(crate) fn attach(&self, cq: &Arc<CqInner>) {
        let mut cqs = self.waits.cqs.write();
        cqs.retain(|cq| cq.strong_count() > 0);
        cqs.push(Arc::downgrade(cq));
    }

    /// Returns `true` if a completion queue that is being armed may rely on a thread to call
    /// [`busy_poll`](Self::busy_poll) and to drive.
    ///
    /// A program that arms repeatedly without such a call watches the descriptor in another way.
    pub(crate) fn expects_wait(&self) -> bool {
        if !self.waits.busy.is_worth_it() {
            return false;
        }
        if self.waits.armed.fetch_add(1, Ordering::Relaxed) < self.waits.cqs.read().len() {
            return true;
        }
        self.waits.busy.miss();
        false
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Source as _;
    use crate::sys::clock::now_ns;
    use crate::testing;
    use iwarp_rnic::Cqe;

    const LONG: Duration = Duration::from_secs(20);

    /// Records short waits for events.
    fn trusted(channel: &CompletionChannel) {
        assert!(!channel.waits.busy.is_worth_it());
        for _ in 0..2 {
            channel.slept(Duration::ZERO);
        }
        assert!(channel.waits.busy.is_worth_it());
    }

    /// The list of completion queues does not keep dead entries.
    #[test]
    fn channel_knows_live_queues() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let create = || ctx.create_cq(4, Some(&channel)).unwrap();
        let known = || {
            let mut known = Vec::new();
            channel
                .waits
                .each(|cq| known.push(std::ptr::from_ref(cq) as usize));
            known
        };
        let address = |cq: &CompletionQueue| Arc::as_ptr(&cq.inner) as usize;
        let (first, second) = (create(), create());
        assert_eq!(known(), [&first, &second].map(address));
        drop(first);
        assert_eq!(known(), [address(&second)]);
        let third = create();
        assert_eq!(known(), [&second, &third].map(address));
        assert_eq!(channel.waits.cqs.read().len(), 2);
    }

    /// A program arms each queue once before it waits. If it arms more often, it watches the
    /// descriptor.
    #[test]
    fn each_queue_may_be_armed_once() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let _cqs = [0; 2].map(|_| ctx.create_cq(4, Some(&channel)).unwrap());
        assert!(!channel.expects_wait(), "no wait was short yet");
        trusted(&channel);
        for _ in 0..3 {
            assert_eq!([0; 2].map(|_| channel.expects_wait()), [true; 2]);
            // This is the wait.
            channel.busy_poll(Duration::ZERO);
        }
        assert_eq!([0; 3].map(|_| channel.expects_wait()), [true, true, false]);
        assert!(!channel.waits.busy.is_worth_it(), "no thread waits");
    }

    #[test]
    fn busy_poll_ends_with_event() {
        let ctx = testing::context();
        let channel = CompletionChannel::create(Duration::from_micros(50)).unwrap();
        let cq = ctx.create_cq(4, Some(&channel)).unwrap();
        for polls in [false, true] {
            if polls {
                trusted(&channel);
            }
            assert!(!channel.busy_poll(LONG));
            channel.queue.push(cq.clone());
            assert!(channel.busy_poll(LONG));
            assert!(channel.event(None).unwrap().is_same(&cq));
        }
    }

    /// Waits that end in sleep decide whether the next ones poll. With this window each counts as
    /// short.
    #[test]
    fn slept_wait_counts() {
        let ctx = testing::context();
        let channel = CompletionChannel::create(Duration::from_secs(1000)).unwrap();
        let cq = ctx.create_cq(4, Some(&channel)).unwrap();
        for _ in 0..1000 {
            std::thread::scope(|scope| {
                // If the event comes before the first check, the wait does not count.
                scope.spawn(|| channel.queue.push(cq.clone()));
                assert!(channel.event(Some(LONG)).unwrap().is_same(&cq));
            });
            if channel.waits.busy.is_worth_it() {
                return;
            }
        }
        panic!("no wait has counted");
    }

    /// The waiting thread drives the queues that were armed, and hands them to the progress thread
    /// before it sleeps.
    #[test]
    fn wait_hands_over_armed_queues() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let cq = ctx.create_cq(4, Some(&channel)).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        trusted(&channel);
        let start = Instant::now();
        let driven = || qp.inner.driven_until(now_ns()).is_some();
        for armed in [false, true] {
            loop {
                assert!(start.elapsed() < LONG, "{armed}");
                while !driven() {
                    assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
                    assert!(start.elapsed() < LONG, "the queue is never driven");
                }
                if armed {
                    cq.arm(false);
                }
                // On a busy machine the lease may have ended by now. Then try again.
                let before = driven();
                assert!(!channel.busy_poll(Duration::ZERO));
                if armed {
                    assert!(!driven(), "not handed over");
                }
                if before && driven() != armed {
                    break;
                }
            }
        }
        qp.destroy();
    }
}
