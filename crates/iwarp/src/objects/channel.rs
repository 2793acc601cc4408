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

/// State of the waits on a channel.
#[derive(Debug)]
struct Waits {
    /// Decides whether a wait polls before it sleeps.
    busy: BusyPoll,
    /// Longest time for which a wait polls.
    window: Duration,
    cqs: RwLock<Vec<Weak<CqInner>>>,
    /// Number of times that completion queues were armed since a thread last waited.
    /// [`CompletionChannel::busy_poll`] drives their sockets.
    armed: AtomicUsize,
}

impl Waits {
    fn each_cq(&self, mut f: impl FnMut(&CqInner)) {
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

    /// Takes the oldest event, and returns its completion queue; `None` if no event is pending.
    pub fn try_event(&self) -> Option<CompletionQueue> {
        self.queue.try_next()
    }

    /// Waits for an event (`ibv_get_cq_event(3)`), and returns its completion queue. A timeout of
    /// `None` waits without limit. Polls for a moment before it sleeps, as
    /// [`CompletionQueue::wait`] does.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`](crate::Error::TimedOut) if no event comes in time, or the
    /// operating system's error if it cannot wait.
    pub fn event(&self, timeout: Option<Duration>) -> Result<CompletionQueue> {
        if let Some(cq) = self.try_event() {
            return Ok(cq);
        }
        let start = Instant::now();
        let found = self.busy_poll(timeout.unwrap_or(Duration::MAX));
        let remaining = timeout.map(|t| t.saturating_sub(start.elapsed()));
        let cq = self.queue.next(remaining)?;
        if !found {
            self.record_sleep(start.elapsed());
        }
        Ok(cq)
    }

    /// Polls the completion queues of this channel for a moment, if an event is likely to come
    /// soon. Returns `true` if an event is pending. Returns `false` if the caller should sleep on
    /// the descriptor, and call [`record_sleep`](Self::record_sleep) afterwards; the
    /// progress thread then drives the sockets.
    ///
    /// Polls for at most `limit`, and at most [`Config::busy_poll`](crate::Config::busy_poll).
    pub fn busy_poll(&self, limit: Duration) -> bool {
        let waits = &*self.waits;
        // `arm` has not handed these queues over, because it expected this wait.
        let any_armed = waits.armed.swap(0, Ordering::Relaxed) > 0;
        let found = waits.busy.poll(waits.window.min(limit), |now| {
            waits.each_cq(|cq| {
                cq.drive_at(now);
            });
            !self.queue.is_empty()
        });
        if found {
            return true;
        }
        if any_armed {
            waits.each_cq(CqInner::hand_over);
        }
        // An event may have come between the last poll and the hand-over.
        !self.queue.is_empty()
    }

    /// Records that a wait for an event slept, and lasted `waited`.
    pub fn record_sleep(&self, waited: Duration) {
        self.waits.busy.record_sleep(waited, self.waits.window);
    }

    pub(crate) fn attach(&self, cq: &Arc<CqInner>) {
        let mut cqs = self.waits.cqs.write();
        cqs.retain(|cq| cq.strong_count() > 0);
        cqs.push(Arc::downgrade(cq));
    }

    /// Called when a completion queue is armed. Returns `true` if a thread is expected to call
    /// [`busy_poll`](Self::busy_poll) soon, and so to drive the queue's sockets.
    ///
    /// A program that arms repeatedly without such a call watches the descriptor itself.
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
    use crate::objects::cq::Owed;
    use crate::sys::clock::now_ns;
    use crate::testing;
    use iwarp_rnic::{Cqe, WcFlags};

    const LONG: Duration = Duration::from_secs(20);

    /// Records short waits, until the channel's waits poll before they sleep.
    fn record_short_waits(channel: &CompletionChannel) {
        assert!(!channel.waits.busy.is_worth_it());
        for _ in 0..2 {
            channel.record_sleep(Duration::ZERO);
        }
        assert!(channel.waits.busy.is_worth_it());
    }

    #[test]
    fn channel_lists_live_queues_only() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let create = || ctx.create_cq(4, Some(&channel)).unwrap();
        let listed = || {
            let mut listed = Vec::new();
            channel
                .waits
                .each_cq(|cq| listed.push(std::ptr::from_ref(cq) as usize));
            listed
        };
        let address = |cq: &CompletionQueue| Arc::as_ptr(&cq.inner) as usize;
        let (first, second) = (create(), create());
        assert_eq!(listed(), [&first, &second].map(address));
        drop(first);
        assert_eq!(listed(), [address(&second)]);
        let third = create();
        assert_eq!(listed(), [&second, &third].map(address));
        assert_eq!(channel.waits.cqs.read().len(), 2);
    }

    /// A program that waits on the channel arms each queue at most once before each wait. One that
    /// arms more often watches the descriptor itself.
    #[test]
    fn repeated_arming_expects_no_wait() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let _cqs = [0; 2].map(|_| ctx.create_cq(4, Some(&channel)).unwrap());
        assert!(!channel.expects_wait(), "no wait was short yet");
        record_short_waits(&channel);
        for _ in 0..3 {
            assert_eq!([0; 2].map(|_| channel.expects_wait()), [true; 2]);
            // Wait, without time to poll.
            channel.busy_poll(Duration::ZERO);
        }
        assert_eq!([0; 3].map(|_| channel.expects_wait()), [true, true, false]);
        assert!(!channel.waits.busy.is_worth_it(), "no thread waits here");
    }

    #[test]
    fn busy_poll_ends_with_event() {
        let ctx = testing::context();
        let channel = CompletionChannel::create(Duration::from_micros(50)).unwrap();
        let cq = ctx.create_cq(4, Some(&channel)).unwrap();
        for polls in [false, true] {
            if polls {
                record_short_waits(&channel);
            }
            assert!(!channel.busy_poll(LONG));
            channel.queue.push(cq.clone());
            assert!(channel.busy_poll(LONG));
            assert!(channel.event(None).unwrap().is_same(&cq));
        }
    }

    #[test]
    fn armed_queue_notifies_once() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let cq = ctx.create_cq(8, Some(&channel)).unwrap();
        let complete = |flags| {
            let (mut owed, cqe) = (
                Owed::default(),
                Cqe {
                    flags,
                    ..Cqe::default()
                },
            );
            cq.inner.push(&mut cq.inner.ring.lock(), cqe, &mut owed);
            cq.inner.raise_due(owed);
            channel.try_event().is_some()
        };
        let (plain, solicited) = (WcFlags::empty(), WcFlags::SOLICITED);
        assert!(!complete(solicited), "not armed");
        for solicited_only in [false, true] {
            cq.arm(solicited_only);
            assert_eq!(complete(plain), !solicited_only);
            assert_eq!(complete(solicited), solicited_only);
            assert!(!complete(solicited), "armed once");
        }
    }

    /// Short waits that slept make the next waits poll. With a window of 1000 s every wait is
    /// short.
    #[test]
    fn short_slept_wait_is_recorded() {
        let ctx = testing::context();
        let channel = CompletionChannel::create(Duration::from_secs(1000)).unwrap();
        let cq = ctx.create_cq(4, Some(&channel)).unwrap();
        for _ in 0..1000 {
            std::thread::scope(|scope| {
                // If the event comes before the thread sleeps, no wait is recorded.
                scope.spawn(|| channel.queue.push(cq.clone()));
                assert!(channel.event(Some(LONG)).unwrap().is_same(&cq));
            });
            if channel.waits.busy.is_worth_it() {
                return;
            }
        }
        panic!("no wait was recorded");
    }

    /// A wait hands the sockets to the progress thread before it sleeps, but only if a queue was
    /// armed.
    #[test]
    fn wait_hands_over_armed_queues() {
        let ctx = testing::context();
        let channel = ctx.create_channel().unwrap();
        let cq = ctx.create_cq(4, Some(&channel)).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        record_short_waits(&channel);
        let start = Instant::now();
        let driven = || qp.inner.driven_until(now_ns()).is_some();
        for armed in [false, true] {
            loop {
                assert!(
                    start.elapsed() < LONG,
                    "the lease is never kept, armed: {armed}"
                );
                while !driven() {
                    assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
                    assert!(start.elapsed() < LONG, "the lease is never held");
                }
                if armed {
                    cq.arm(false);
                }
                // On a busy machine the lease may end before the wait. The test then tries again.
                let was_driven = driven();
                assert!(!channel.busy_poll(Duration::ZERO));
                if armed {
                    assert!(!driven(), "not handed over");
                }
                if was_driven && driven() != armed {
                    break;
                }
            }
        }
        qp.destroy();
    }
}
