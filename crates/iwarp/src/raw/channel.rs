//! Completion channels (`ibv_create_comp_channel(3)`).

use super::cq::CompletionQueue;
use super::events::EventQueue;
use crate::error::Result;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Completion events of any number of completion queues, with a pollable descriptor.
#[derive(Debug, Clone)]
pub struct CompletionChannel {
    pub(super) queue: Arc<EventQueue<CompletionQueue>>,
}

impl CompletionChannel {
    pub(super) fn create() -> Result<Self> {
        Ok(Self {
            queue: Arc::new(EventQueue::new()?),
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

    /// Waits for an event (`ibv_get_cq_event(3)`); `None` waits for ever.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut).
    pub fn event(&self, timeout: Option<Duration>) -> Result<CompletionQueue> {
        self.queue.next(timeout)
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}
