//! Completion channels (`ibv_create_comp_channel(3)`).

use super::cq::{CompletionQueue, CqInner, busy_poll};
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

/// What is known of the threads that wait for a channel's events.
#[derive(Debug, Default)]
struct Waits {
    busy: BusyPoll,
    /// Queues that report here.
    cqs: RwLock<Vec<Weak<CqInner>>>,
    /// Queues that were armed since a thread last waited here.
    armed: AtomicUsize,
}

impl Waits {
    /// The queues, and how long to poll them.
    fn members(&self) -> (Vec<Arc<CqInner>>, Duration) {
        let cqs: Vec<_> = self.cqs.read().iter().filter_map(Weak::upgrade).collect();
        let window = cqs.first().map_or(Duration::ZERO, |cq| cq.window());
        (cqs, window)
    }
}

impl CompletionChannel {
    pub(super) fn create() -> Result<Self> {
        Ok(Self {
            queue: Arc::new(EventQueue::new()?),
            waits: Arc::default(),
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

    /// Waits for an event (`ibv_get_cq_event(3)`); `None` waits for ever. Polls for a moment before it sleeps, as
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

    /// Polls the queues that report here for a moment, if an event is likely to come soon. True if one has come. Call it before
    /// sleeping on the descriptor, and [`slept`](Self::slept) afterwards unless this was true.
    ///
    /// It takes at most `limit` and [`Config::busy_poll`](crate::Config::busy_poll). When it returns false the progress thread
    /// drives, and the caller may sleep.
    pub fn busy_poll(&self, limit: Duration) -> bool {
        self.waits.armed.store(0, Ordering::Relaxed);
        if !self.waits.busy.is_worth_it() {
            return false;
        }
        let (cqs, window) = self.waits.members();
        let found = busy_poll(window.min(limit), || {
            for cq in &cqs {
                cq.drive(true, false);
            }
            !self.queue.is_empty()
        });
        if found {
            self.waits.busy.hit();
            return true;
        }
        self.waits.busy.miss();
        // `arm` has left this to us.
        for cq in &cqs {
            cq.hand_over();
        }
        // One may have come between the last look and the change of hands.
        !self.queue.is_empty()
    }

    /// A wait for an event took this long, and the thread slept.
    pub fn slept(&self, waited: Duration) {
        let (_, window) = self.waits.members();
        self.waits.busy.slept(waited, window);
    }

    pub(super) fn attach(&self, cq: &Arc<CqInner>) {
        let mut cqs = self.waits.cqs.write();
        cqs.retain(|cq| cq.strong_count() > 0);
        cqs.push(Arc::downgrade(cq));
    }

    /// A queue is being armed: will a thread come to [`busy_poll`](Self::busy_poll), and drive?
    ///
    /// One that arms again and again without coming watches the descriptor by other means.
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
