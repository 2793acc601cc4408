//! Requests of the peer: inbound RDMA Reads and atomics, answered in order (RFC 5040 section 5.2,
//! RFC 7306 section 5).

use crate::AllocError;
use crate::storage::Ring;
use iwarp_proto::rdmap::ReadRequest;

#[derive(Debug, Clone, Copy)]
pub(super) enum Response {
    /// The contents of our memory.
    Read(ReadRequest),
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

//= rfc5040 section 5.2.2
//# The Data Source RDMAP layer MUST pass RDMA Read Response Messages to the
//# DDP layer, in the order that the RDMA Read Request Messages were
//# received by the RDMAP layer, at the Data Source.
//= rfc5040 section 5.5
//# If more than one outstanding RDMA Read Request Messages are supported by
//# both peers, the RDMA Read Response Messages MUST be submitted to the DDP
//# layer on the Remote Peer in the order the RDMA Read Request Messages
//# were Delivered by DDP, but the actual read of the buffer contents MAY
//# take place in any order at the Remote Peer.
/// Requests that have arrived and are not answered yet. Their maximum number is the IRD.
#[derive(Debug)]
pub(super) struct ResponseQueue {
    ring: Ring<Response>,
    limit: u16,
    /// Responses that were planned or dropped; wraps.
    served: u32,
}

impl ResponseQueue {
    pub(super) fn new(max_ird: u16) -> Result<Self, AllocError> {
        // One more than agreed, because an RTR message by Read needs an entry even if no Reads were
        // granted.
        Ok(Self {
            //= rfc5040 section 5.2.2
            //# The Data Source MUST ensure that a sufficient number of Untagged Buffers
            //# are available on the RDMA Read Request Queue (Queue with DDP Queue
            //# Number 1) to support the maximum number of RDMA Read Requests negotiated
            //# by the ULP.
            //= rfc7306 section 5.2.2
            //# 4. The Responder MUST ensure that a sufficient number of Untagged Buffers
            //# are available on the RDMA Read Request Queue (Queue with DDP Queue Number 1)
            //# to support the maximum number of Atomic Operation Requests negotiated by the
            //# ULP in addition to the maximum number of RDMA Read Requests negotiated by
            //# the ULP.
            ring: Ring::new(u32::from(max_ird) + 1)?,
            limit: max_ird,
            served: 0,
        })
    }

    //= rfc5040 section 6.1
    //# The RDMAP layer MUST provide the maximum number of outstanding, inbound
    //# RDMA Read Requests per RDMAP Stream direction that were negotiated
    //# between the ULP and the Local Peer's RDMAP layer.
    //= rfc5040 section 8.1.1
    //# An RNIC implementation SHOULD provide a mechanism to cap the number of
    //# outstanding RDMA Read Requests.
    /// Sets the IRD that the stream agreed on.
    pub(super) const fn set_limit(&mut self, ird: u16) {
        self.limit = ird;
    }

    pub(super) const fn limit(&self) -> u16 {
        self.limit
    }

    //= rfc5040 section 5.2.1
    //# The Remote Peer MUST process the RDMA Read Request Messages in the order
    //# they were sent.
    /// Adds a request. Returns `false` if the peer has exceeded the IRD.
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
        self.served = self.served.wrapping_add(1);
    }

    pub(super) const fn len(&self) -> u32 {
        self.ring.len()
    }

    /// Returns a mark for which [`has_served`](Self::has_served) returns `true` once all requests
    /// received so far are answered.
    pub(super) const fn mark(&self) -> u32 {
        self.served.wrapping_add(self.ring.len())
    }

    /// Returns `true` if all requests received before the mark are answered or dropped.
    pub(super) const fn has_served(&self, mark: u32) -> bool {
        self.served.wrapping_sub(mark) as i32 >= 0
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    pub(super) const fn clear(&mut self) {
        self.served = self.mark();
        self.ring.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests received after the mark are ignored, and the total wraps.
    #[test]
    fn mark_is_reached_when_answered() {
        for before in [0, u32::MAX - 2, u32::MAX - 1, u32::MAX] {
            let mut queue = ResponseQueue::new(8).unwrap();
            queue.served = before;
            assert!(queue.has_served(queue.mark()), "nothing has arrived");
            for _ in 0..3 {
                assert!(queue.push(Response::default()));
            }
            let mark = queue.mark();
            assert!(queue.push(Response::default()));
            for answered in 0..=4 {
                assert_eq!(queue.has_served(mark), answered >= 3, "after {before}");
                queue.pop();
            }
        }
    }

    /// Dropped requests need no response, and later ones have marks of their own.
    #[test]
    fn mark_is_reached_when_dropped() {
        for before in [0, u32::MAX - 1] {
            let mut queue = ResponseQueue::new(8).unwrap();
            queue.served = before;
            for _ in 0..3 {
                assert!(queue.push(Response::default()));
            }
            queue.pop();
            let mark = queue.mark();
            assert!(!queue.has_served(mark));
            queue.clear();
            assert!(queue.is_empty() && queue.has_served(mark), "{before}");
            assert!(queue.push(Response::default()));
            assert!(queue.has_served(mark) && !queue.has_served(queue.mark()));
        }
    }
}
