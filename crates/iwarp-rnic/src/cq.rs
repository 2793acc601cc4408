//! Completion queues (`ibv_create_cq(3)`, `ibv_poll_cq(3)`, `ibv_req_notify_cq(3)`).

use crate::limits::MAX_CQE;
use crate::storage::Ring;
use crate::{AllocError, Cqe, WcFlags, WcStatus};

/// When the next completion raises an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    Any,
    Solicited,
}

/// The result of writing a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// Written.
    Quiet,
    /// Written, and the queue was armed for it: the caller raises one completion event.
    Notify,
    /// The queue is full. The completion is lost, and the queue cannot be used any more. If this is the first loss, the caller
    /// raises the asynchronous event "CQ error".
    Overflow {
        /// `true` for the first loss.
        first: bool,
    },
}

/// A completion queue of fixed capacity.
#[derive(Debug)]
pub struct CompletionQueue {
    ring: Ring<Cqe>,
    armed: Armed,
    overflowed: bool,
}

/// Why a completion queue cannot have the size that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqSizeError {
    /// Zero, above the limit, or below the completions it holds (EINVAL).
    Invalid,
    /// No memory (ENOMEM).
    OutOfMemory,
}

impl From<AllocError> for CqSizeError {
    fn from(_: AllocError) -> Self {
        Self::OutOfMemory
    }
}

impl CompletionQueue {
    /// Makes a queue for `capacity` completions, 1 to [`MAX_CQE`].
    pub fn new(capacity: u32) -> Result<Self, CqSizeError> {
        if capacity == 0 || capacity > MAX_CQE {
            return Err(CqSizeError::Invalid);
        }
        Ok(Self {
            ring: Ring::new(capacity)?,
            armed: Armed::No,
            overflowed: false,
        })
    }

    /// Returns how many completions it can hold.
    pub const fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Returns how many completions wait.
    pub const fn len(&self) -> u32 {
        self.ring.len()
    }

    /// Returns `true` if no completion waits.
    pub const fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Returns `true` after a completion was lost. The queue pairs that report here must fail.
    pub const fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// Writes a completion.
    #[inline]
    pub fn push(&mut self, cqe: Cqe) -> Pushed {
        if self.overflowed || self.ring.push(cqe).is_err() {
            //= rfc5040 section 8.1.1
            //# 10. An RNIC MUST ensure that if a CQ overflows, any Streams that do not use
            //# the CQ MUST remain unaffected.
            let first = !self.overflowed;
            self.overflowed = true;
            return Pushed::Overflow { first };
        }
        match self.armed {
            Armed::No => Pushed::Quiet,
            // An error counts as solicited (ibv_req_notify_cq(3)).
            Armed::Solicited
                if cqe.status == WcStatus::Success && !cqe.flags.contains(WcFlags::SOLICITED) =>
            {
                Pushed::Quiet
            }
            Armed::Any | Armed::Solicited => {
                self.armed = Armed::No;
                Pushed::Notify
            }
        }
    }

    /// Takes the oldest completion.
    #[inline]
    pub fn pop(&mut self) -> Option<Cqe> {
        self.ring.pop()
    }

    /// Takes up to `out.len()` completions, oldest first; returns how many.
    #[inline]
    pub fn poll(&mut self, out: &mut [Cqe]) -> usize {
        let mut n = 0;
        for slot in out {
            match self.ring.pop() {
                Some(cqe) => *slot = cqe,
                None => break,
            }
            n += 1;
        }
        n
    }

    /// Asks for one event at the next completion, or at the next solicited or failed one. Completions that wait already raise
    /// none. A request for any completion stays in force if one for solicited completions follows.
    pub fn arm(&mut self, solicited_only: bool) {
        self.armed = match (self.armed, solicited_only) {
            (Armed::Any, _) | (_, false) => Armed::Any,
            (_, true) => Armed::Solicited,
        };
    }

    /// Returns `true` if an event was asked for and has not been raised.
    pub fn is_armed(&self) -> bool {
        self.armed != Armed::No
    }

    /// Changes the capacity and keeps the completions that wait.
    pub fn resize(&mut self, capacity: u32) -> Result<(), CqSizeError> {
        if capacity == 0 || capacity > MAX_CQE || capacity < self.ring.len() {
            return Err(CqSizeError::Invalid);
        }
        let mut ring = Ring::new(capacity)?;
        while let Some(cqe) = self.ring.pop() {
            // It fits: the length was compared above.
            let _ = ring.push(cqe);
        }
        self.ring = ring;
        Ok(())
    }

    /// Drops the completions of a queue pair that is being destroyed (verbs: they must not be polled afterwards).
    pub fn purge(&mut self, qp_num: u32) {
        for _ in 0..self.ring.len() {
            if let Some(cqe) = self.ring.pop()
                && cqe.qp_num != qp_num
            {
                let _ = self.ring.push(cqe);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cqe(wr_id: u64) -> Cqe {
        Cqe {
            wr_id,
            ..Cqe::default()
        }
    }

    #[test]
    fn overflow_is_reported_once_and_loses_nothing_older() {
        let mut cq = CompletionQueue::new(2).unwrap();
        assert_eq!(cq.push(cqe(1)), Pushed::Quiet);
        assert_eq!(cq.push(cqe(2)), Pushed::Quiet);
        assert_eq!(cq.push(cqe(3)), Pushed::Overflow { first: true });
        assert_eq!(cq.push(cqe(4)), Pushed::Overflow { first: false });
        assert_eq!(cq.pop().map(|c| c.wr_id), Some(1));
        // The queue stays unusable, even when it has room again.
        assert_eq!(cq.push(cqe(5)), Pushed::Overflow { first: false });
        assert_eq!(cq.pop().map(|c| c.wr_id), Some(2));
        assert_eq!(cq.pop(), None);
    }

    #[test]
    fn arming_fires_once() {
        let mut cq = CompletionQueue::new(8).unwrap();
        cq.arm(true);
        assert_eq!(cq.push(cqe(1)), Pushed::Quiet);
        assert_eq!(
            cq.push(Cqe {
                flags: WcFlags::SOLICITED,
                ..cqe(2)
            }),
            Pushed::Notify
        );
        assert_eq!(
            cq.push(Cqe {
                flags: WcFlags::SOLICITED,
                ..cqe(3)
            }),
            Pushed::Quiet
        );
        cq.arm(true);
        assert_eq!(
            cq.push(Cqe {
                status: WcStatus::Flushed,
                ..cqe(4)
            }),
            Pushed::Notify
        );
        cq.arm(false);
        cq.arm(true);
        assert_eq!(cq.push(cqe(5)), Pushed::Notify);
    }

    #[test]
    fn resize_and_purge() {
        let mut cq = CompletionQueue::new(4).unwrap();
        for i in 0..4 {
            let _ = cq.push(Cqe {
                qp_num: i % 2,
                ..cqe(u64::from(i))
            });
        }
        assert_eq!(cq.resize(3), Err(CqSizeError::Invalid));
        cq.purge(0);
        cq.resize(2).unwrap();
        let mut out = [Cqe::default(); 4];
        assert_eq!(cq.poll(&mut out), 2);
        assert_eq!((out[0].wr_id, out[1].wr_id), (1, 3));
    }
}
