//! What the peer asked of us: inbound RDMA Reads and atomics, answered in order
//! (RFC 5040 section 5.2, RFC 7306 section 5).

use crate::AllocError;
use crate::util::Ring;

/// An answer that is due.
#[derive(Debug, Clone, Copy)]
pub(super) enum Response {
    /// Octets of our memory, to the peer's sink.
    Read {
        sink_stag: u32,
        sink_to: u64,
        source_stag: u32,
        source_to: u64,
        len: u32,
    },
    /// The old value of an atomic.
    Atomic { request_id: u32, original: u64 },
}

impl Default for Response {
    fn default() -> Self {
        Self::Atomic {
            request_id: 0,
            original: 0,
        }
    }
}

/// Requests that have come and are not answered yet. Its size is the IRD.
#[derive(Debug)]
pub(super) struct ResponseQueue {
    ring: Ring<Response>,
    limit: u16,
}

impl ResponseQueue {
    pub(super) fn new(max_ird: u16) -> Result<Self, AllocError> {
        // One more than agreed: the RTR message by Read comes on top when no reads were granted.
        Ok(Self {
            ring: Ring::new(u32::from(max_ird) + 1)?,
            limit: max_ird,
        })
    }

    /// Sets the IRD that the stream agreed on.
    pub(super) const fn set_limit(&mut self, ird: u16) {
        self.limit = ird;
    }

    /// The IRD that the stream agreed on.
    pub(super) const fn limit(&self) -> u16 {
        self.limit
    }

    /// Takes a request; false if the peer has exceeded the IRD.
    pub(super) fn push(&mut self, response: Response) -> bool {
        !self.is_full() && self.ring.push(response).is_ok()
    }

    pub(super) fn is_full(&self) -> bool {
        self.ring.len() >= u32::from(self.limit).max(1) || self.ring.is_full()
    }

    pub(super) fn front(&self) -> Option<&Response> {
        self.ring.front()
    }

    pub(super) fn pop(&mut self) {
        self.ring.pop();
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    pub(super) const fn clear(&mut self) {
        self.ring.clear();
    }
}
