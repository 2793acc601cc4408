//! Completion channels (`ibv_create_comp_channel(3)`).

use super::cq::{CompletionQueue, CqInner};
use super::events::EventQueue;
use crate::error::Result;
use crate::progress::busy_poll::BusyPoll;
use parking_lot::RwLock;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Completion events of any number of completion queues, with a pollable descriptor.
#[derive(Debug, Clone)]
pub struct CompletionChannel {
    pub(super) queue: Arc<EventQueue<CompletionQueue>>,
    waits: Arc<Waits>,
}

/// What the waits of a channel's threads have shown.
#[derive(Debug)]
struct Waits {
    busy: BusyPoll,
    /// How long blocking waits poll before they sleep.
    window: Duration,
    /// Queues that report here.
    cqs: RwLock<Vec<Weak<CqInner>>>,
    /// Queues that were armed since a thread last waited here. [`CompletionChannel::busy_poll`] drives their progress.
    armed: AtomicUsize,
}

impl Waits {
    /// Calls `f` for each queue that reports here.
    fn each(&self, mut f: impl FnMut(&CqInner)) {
        for cq in self.cqs.read().iter().filter_map(Weak::upgrade) {
            f(&cq);
        }
    }
}

impl CompletionChannel {
    pub(super) fn create(window: Duration) -> Result<Self> {
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

    /// The queue behind it.
    pub fn events(&self) -> &EventQueue<CompletionQueue> {
        &self.queue
    }

    /// Takes the oldest event: the queue that got a completion after it was armed.
    pub fn try_event(&self) -> Option<CompletionQueue> {
        self.queue.try_next()
    }

    /// Waits for an event (`ibv_get_cq_event(3)`); `None` waits without limit. Polls for a moment before it sleeps, as
    /// [`CompletionQueue::wait`] does.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut).
    pub fn event(&self, timeout: Option<Duration>) -> Result<CompletionQueue> {
        if let Some(cq) = self.try_event() {
            return Ok(cq);
        }
        let begin = Instant::now();
        let polled = self.busy_poll(timeout.unwrap_or(Duration::MAX));
        let left = timeout.map(|t| t.saturating_sub(begin.elapsed()));
        let cq = self.queue.next(left)?;
        if !polled {
            self.slept(begin.elapsed());
        }
        Ok(cq)
    }

    /// Polls the queues that report here for a moment, if an event is likely to come soon. Returns `true` if one has come. If not,
    /// the caller sleeps on the descriptor and calls [`slept`](Self::slept) afterwards.
    ///
    /// It takes at most `limit` and [`Config::busy_poll`](crate::Config::busy_poll). When it returns `false`, the progress thread
    /// drives, and the caller may sleep.
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
        // An event may have come between the last look and the hand-over.
        !self.queue.is_empty()
    }

    /// Notes that a wait for an event took this long, and that the thread slept.
    pub fn slept(&self, waited: Duration) {
        self.waits.busy.slept(waited, self.waits.window);
    }

    pub(super) fn attach(&self, cq: &Arc<CqInner>) {
        let mut cqs = self.waits.cqs.write();
        cqs.retain(|cq| cq.strong_count() > 0);
        cqs.push(Arc::downgrade(cq));
    }

    /// A queue is being armed. Returns `true` if a thread will call [`busy_poll`](Self::busy_poll) and drive.
    ///
    /// A program that arms again and again without such a call watches the descriptor in another way.
    pub(super) fn expects_wait(&self) -> bool {
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
