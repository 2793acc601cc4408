//! The send queue: posted requests, in-order start and completion, flush.

mod completion;
mod special;
#[cfg(test)]
mod tests;

use super::QpConfig;
use super::tagged::INTERNAL_REQUESTS;
use crate::boxed::zeros;
use crate::limits::MAX_MESSAGE;
use crate::storage::{Ring, filled};
use crate::tags::MAX_TAG_SGE;
use crate::tally::Tally;
use crate::{AllocError, PostError, SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus};
use alloc::vec::Vec;
use iwarp_proto::ddp::Stag;
use iwarp_proto::tag_matching::Tmh;

/// A posted send work request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) wr_id: u64,
    pub(super) op: SendOp,
    pub(super) flags: SendFlags,
    pub(super) num_sge: u8,
    /// Octets of payload, or octets requested by a Read or atomic.
    pub(super) len: u32,
    pub(super) done: bool,
    /// The peer's shared receive queue that the request is for; 0 if none.
    pub(super) srq: u32,
    pub(super) kind: Kind,
}

/// How a request differs from an ordinary request of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Kind {
    #[default]
    Ordinary,
    /// The RDMA Write that carries an Atomic Write.
    AtomicWrite,
    /// An internal request, which writes no completion for the program.
    Internal,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            wr_id: 0,
            op: SendOp::Send,
            flags: SendFlags::empty(),
            num_sge: 0,
            len: 0,
            done: false,
            srq: 0,
            kind: Kind::Ordinary,
        }
    }
}

impl Slot {
    /// Returns the operation for the completion, as it was posted.
    fn wc_opcode(&self) -> WcOpcode {
        match self.kind {
            Kind::AtomicWrite => WcOpcode::AtomicWrite,
            Kind::Ordinary | Kind::Internal => self.op.wc_opcode(),
        }
    }
}

/// A request that awaits the peer's response.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Awaited {
    /// Sequence number in the send queue.
    pub(super) seq: u32,
    /// The sink STag of a Read, which is unique to it.
    pub(super) sink_stag: Stag,
    /// Octets requested by a Read.
    pub(super) len: u32,
    /// Octets received.
    pub(super) received: u32,
    /// Message sequence number of the request on queue 1.
    pub(super) msn: u32,
    /// The request is an atomic; its response arrives on queue 3.
    pub(super) atomic: bool,
    /// A probe, which belongs to no request: its response acknowledges the requests up to `seq`.
    pub(super) probe: bool,
    /// A Read whose response invalidates the STag of its sink.
    pub(super) invalidates: bool,
    /// An internal Read.
    pub(super) internal: bool,
}

impl Awaited {
    /// Returns the entry for a sent RDMA Read.
    pub(super) const fn read(seq: u32, sink_stag: Stag, len: u32, msn: u32) -> Self {
        Self {
            seq,
            sink_stag,
            len,
            received: 0,
            msn,
            atomic: false,
            probe: false,
            invalidates: false,
            internal: false,
        }
    }
}

/// The failed request that ends the queue, and its completion.
#[derive(Debug, Clone, Copy)]
struct Failed {
    seq: u32,
    status: WcStatus,
    vendor_err: u32,
}

/// Maximum requests that one response or one sent message completes immediately. It usually
/// completes one, but later requests may have waited for that one. Requests beyond this limit are
/// due (`completions_due`).
pub(super) const RETIRE_MAX: u32 = 64;

/// The send queue, and the queue of requests that await a response.
#[derive(Debug)]
pub(super) struct SendQueue {
    slots: Ring<Slot>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    max_sge: u32,
    max_inline: u32,
    /// Flags added to each request: [`SendFlags::SIGNALED`] if all requests are signaled.
    all_flags: SendFlags,
    /// Maximum number of requests: those of the program plus the current `internal` ones.
    limit: u32,
    /// Total of internal requests that were removed from the queue.
    internal_retired: u32,
    /// Sequence number after the last slot that was freed: `front_seq` minus the slots that are
    /// [held](Self::held).
    held_from: u32,
    /// Mask: all ones if slots stay in use until they are [released](Self::release), otherwise
    /// zero.
    holds: u32,
    /// Number of internal requests in `slots`. They do not reduce the number of requests that the
    /// program can post.
    internal: u32,
    /// Internal Reads that ended without a response, and the status.
    flushed: Ring<(u32, WcStatus)>,
    /// Sequence number of the front slot.
    front_seq: u32,
    /// Number of slots at the front that were started.
    started: u32,
    /// Number of slots at the front that a later response acknowledged. They are done even if they
    /// are not marked as done.
    acknowledged: u32,
    failed: Option<Failed>,
    /// A request was flushed, so all later ones are flushed as well, even if they are done.
    flushing: bool,
    /// Outbound Reads and atomics in flight, oldest first.
    pub(super) awaited: Ring<Awaited>,
    ord: u16,
    /// Operations completed by the queue pair, receives included.
    pub(super) tally: Tally,
}

impl SendQueue {
    pub(super) fn new(c: &QpConfig) -> Result<Self, AllocError> {
        let (internal, internal_sge, internal_inline) = match c.match_tags {
            true => (INTERNAL_REQUESTS, MAX_TAG_SGE, Tmh::LEN as u32),
            false => (0, 0, 0),
        };
        let slots = c.max_send_wr.saturating_add(internal);
        let max_sge = c.max_send_sge.max(internal_sge);
        let max_inline = c.max_inline.max(internal_inline);
        let depth = slots as usize;
        Ok(Self {
            slots: Ring::new(slots)?,
            sges: filled(depth.saturating_mul(max_sge as usize))?,
            inline: zeros(depth.saturating_mul(max_inline as usize))?,
            max_sge,
            max_inline,
            limit: c.max_send_wr,
            internal_retired: 0,
            held_from: 0,
            holds: if c.hold_slots { u32::MAX } else { 0 },
            flushed: Ring::new(internal)?,
            all_flags: match c.signal_all {
                true => SendFlags::SIGNALED,
                false => SendFlags::empty(),
            },
            internal: 0,
            front_seq: 0,
            started: 0,
            acknowledged: 0,
            failed: None,
            flushing: false,
            //= rfc7306 section 5.2.2
            //# The Requester MUST ensure that a sufficient number of Untagged Buffers
            //# are available on the RDMA Atomic Response Queue (Queue with DDP Queue
            //# Number 3) to support the maximum number of Atomic Operation Requests
            //# negotiated by the ULP.
            // One more than the ORD, because a probe needs an entry even if no Reads were granted.
            awaited: Ring::new(u32::from(c.max_ord).saturating_add(1))?,
            ord: c.max_ord,
            tally: Tally::default(),
        })
    }

    /// Returns `true` if Reads and atomics can be posted.
    const fn allows_reads(&self) -> bool {
        self.awaited.capacity() > 1
    }

    pub(super) const fn set_ord(&mut self, ord: u16) {
        self.ord = ord;
    }

    pub(super) const fn ord(&self) -> u16 {
        self.ord
    }

    /// Returns `true` if every request was handed to the stream.
    pub(super) const fn nothing_unsent(&self) -> bool {
        self.started >= self.slots.len()
    }

    /// Returns `true` if every started request has completed.
    pub(super) const fn nothing_outstanding(&self) -> bool {
        self.started == 0
    }

    /// Returns the sequence number and slot of the next request to start.
    #[inline]
    pub(super) fn next(&self) -> Option<(u32, &Slot)> {
        let slot = self.slots.get(self.started)?;
        Some((self.front_seq.wrapping_add(self.started), slot))
    }

    /// Like [`next`](Self::next), with the place of its elements and inline data.
    #[inline]
    pub(super) fn next_with_place(&self) -> Option<(u32, &Slot, usize)> {
        let place = self.slots.position(self.started)?;
        let seq = self.front_seq.wrapping_add(self.started);
        Some((seq, self.slots.at(place)?, place))
    }

    /// Returns a request, with the place of its elements and inline data.
    #[inline]
    pub(super) fn slot_with_place(&self, seq: u32) -> Option<(&Slot, usize)> {
        let place = self.slots.position(seq.wrapping_sub(self.front_seq))?;
        Some((self.slots.at(place)?, place))
    }

    /// Returns the index of a place's first element. It is inside `sges`.
    #[inline]
    const fn first_sge(&self, place: usize) -> usize {
        place.wrapping_mul(self.max_sge as usize)
    }

    /// Returns the index of a place's inline data. It is inside `inline`.
    #[inline]
    const fn first_inline(&self, place: usize) -> usize {
        place.wrapping_mul(self.max_inline as usize)
    }

    #[inline]
    pub(super) fn sge_at(&self, place: usize) -> Option<&Sge> {
        self.sges.get(self.first_sge(place))
    }

    #[inline]
    pub(super) fn at(&self, place: usize) -> Option<&Slot> {
        self.slots.at(place)
    }

    #[inline]
    pub(super) fn sges_at(&self, place: usize, slot: &Slot) -> &[Sge] {
        let at = self.first_sge(place);
        let end = at.wrapping_add(slot.num_sge as usize);
        self.sges.get(at..end).unwrap_or(&[])
    }

    #[inline]
    pub(super) fn inline_at(&self, place: usize, len: usize) -> &[u8] {
        let at = self.first_inline(place);
        self.inline.get(at..at.wrapping_add(len)).unwrap_or(&[])
    }

    /// Passes the addresses that the next posted request will use to `fetch`.
    #[inline]
    pub(super) fn prefetch(&self, fetch: &impl Fn(*const u8)) {
        let slot = self.slots.tail_slot();
        self.slots.prefetch(slot, fetch);
        if let Some(sge) = self.sge_at(slot as usize) {
            fetch(core::ptr::from_ref(sge).cast());
        }
    }

    /// Records that the next request was started.
    #[inline]
    pub(super) const fn advance(&mut self) {
        self.started = self.started.wrapping_add(1);
    }

    #[inline]
    pub(super) fn slot(&self, seq: u32) -> Option<&Slot> {
        self.slots.get(seq.wrapping_sub(self.front_seq))
    }

    #[inline]
    pub(super) fn sges(&self, seq: u32) -> &[Sge] {
        match self.slot_with_place(seq) {
            Some((slot, place)) => self.sges_at(place, slot),
            None => &[],
        }
    }

    #[inline]
    pub(super) fn first_sge_of(&self, seq: u32) -> Option<&Sge> {
        let (slot, place) = self.slot_with_place(seq)?;
        if slot.num_sge == 0 {
            return None;
        }
        self.sge_at(place)
    }

    /// Appends a request checked by [`check`](Self::check).
    #[inline]
    pub(super) fn push(&mut self, wr: &SendWr<'_>, len: u32) -> Result<(), PostError> {
        let inline = wr.flags.contains(SendFlags::INLINE);
        let num_sge = if inline { 0 } else { wr.sges.len() as u8 };
        let slot = Slot {
            wr_id: wr.wr_id,
            op: wr.op,
            flags: wr.flags.union(self.all_flags),
            num_sge,
            len,
            done: false,
            srq: 0,
            kind: Kind::Ordinary,
        };
        let at = self.slots.push(slot).map_err(|_| PostError::QueueFull)? as usize;
        if inline {
            let mut to = self.first_inline(at);
            for piece in wr.inline {
                let end = to.wrapping_add(piece.len());
                if let Some(dst) = self.inline.get_mut(to..end) {
                    dst.copy_from_slice(piece);
                }
                to = end;
            }
        } else {
            let from = self.first_sge(at);
            let end = from.wrapping_add(wr.sges.len());
            if let Some(to) = self.sges.get_mut(from..end) {
                // There are few elements: a call to copy them would cost more.
                for (to, sge) in to.iter_mut().zip(wr.sges) {
                    *to = *sge;
                }
            }
        }
        Ok(())
    }

    /// Sets the peer's shared receive queue for the last request.
    pub(super) fn set_last_srq(&mut self, srq: u32) {
        if let Some(last) = self.slots.len().checked_sub(1)
            && let Some(slot) = self.slots.get_mut(last)
        {
            slot.srq = srq;
        }
    }

    /// Checks a request against the sizes of the queue; returns its length.
    #[inline]
    pub(super) fn check(&self, wr: &SendWr<'_>) -> Result<u32, PostError> {
        if self.room() == 0 {
            return Err(PostError::QueueFull);
        }
        let inline = wr.flags.contains(SendFlags::INLINE);
        let len: u64 = if inline {
            wr.inline.iter().map(|p| p.len() as u64).sum()
        } else {
            wr.sges.iter().map(|s| u64::from(s.len)).sum()
        };
        if inline {
            if !wr.op.has_payload() {
                return Err(PostError::InvalidRequest);
            }
            if len > u64::from(self.max_inline) {
                return Err(PostError::InlineTooLong);
            }
        } else if wr.sges.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        //= rfc5041 section 5.2
        //# The ULP Message Length MUST be less than 2^32.
        if len > u64::from(MAX_MESSAGE) {
            return Err(PostError::MessageTooLong);
        }
        match wr.op {
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } if len < 8 => {
                Err(PostError::InvalidRequest)
            }
            // The element's STag is invalidated, so there must be exactly one.
            SendOp::ReadInv { .. } if wr.sges.len() != 1 => Err(PostError::InvalidRequest),
            SendOp::Flush { .. } if !wr.sges.is_empty() => Err(PostError::InvalidRequest),
            _ if wr.op.completes_by_response() && !self.may_be_answered(&wr.op, len) => {
                Err(PostError::InvalidRequest)
            }
            // Eight octets are returned for elements of any length.
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => Ok(8),
            _ => Ok(len as u32),
        }
    }

    /// Returns the request started last, if it is incomplete.
    pub(super) const fn last_started(&self) -> Option<u32> {
        match self.started.checked_sub(1) {
            Some(n) => Some(self.front_seq.wrapping_add(n)),
            None => None,
        }
    }

    /// Returns the oldest request that is not done, started or not.
    pub(super) fn first_not_done(&self) -> Option<u32> {
        let mut index = self.acknowledged;
        while self.slots.get(index)?.done {
            index = index.wrapping_add(1);
        }
        Some(self.front_seq.wrapping_add(index))
    }

    /// Returns how many requests were started and are not acknowledged.
    pub(super) const fn unacknowledged(&self) -> u32 {
        self.started.saturating_sub(self.acknowledged)
    }

    /// Returns the `i`-th oldest of the unacknowledged started requests.
    pub(super) fn started_from(&self, i: u32) -> Option<(u32, &Slot)> {
        let index = self.acknowledged.saturating_add(i);
        let slot = self.slots.get(index).filter(|_| index < self.started)?;
        Some((self.front_seq.wrapping_add(index), slot))
    }

    /// Returns the `i`-th newest of the unacknowledged started requests.
    pub(super) fn started_from_end(&self, i: u32) -> Option<(u32, &Slot)> {
        let older = self.unacknowledged().checked_sub(1)?.checked_sub(i)?;
        self.started_from(older)
    }

    /// Returns the total of the program's requests that have completed or were dropped.
    #[inline]
    pub(super) const fn position(&self) -> u32 {
        self.front_seq.wrapping_sub(self.internal_retired)
    }

    /// Returns the number of slots still in use by completed requests.
    #[inline]
    const fn held(&self) -> u32 {
        self.front_seq.wrapping_sub(self.held_from) & self.holds
    }

    pub(super) fn release(&mut self, n: u32) {
        self.held_from = self.held_from.wrapping_add(n.min(self.held()));
    }

    /// Drops all requests without completions, and frees all slots.
    pub(super) fn reset(&mut self) {
        self.clear();
        self.held_from = self.front_seq;
    }

    fn clear(&mut self) {
        self.front_seq = self.front_seq.wrapping_add(self.slots.len());
        self.slots.clear();
        self.limit = self.limit.wrapping_sub(self.internal);
        self.internal = 0;
        self.started = 0;
        self.acknowledged = 0;
        self.failed = None;
        self.flushing = false;
        self.awaited.clear();
    }

    /// Returns the request whose response comes next.
    pub(super) fn first_awaited(&self) -> Option<u32> {
        self.awaited.front().map(|a| a.seq)
    }

    pub(super) const fn len(&self) -> u32 {
        self.slots.len()
    }

    /// Returns how many more requests the program can post.
    #[inline]
    pub(super) const fn room(&self) -> u32 {
        // This cannot overflow: both are at most the number of slots.
        let used = self.slots.len().wrapping_add(self.held());
        self.limit.saturating_sub(used)
    }

    /// Returns how many requests are not in a plan yet.
    pub(super) const fn unsent(&self) -> u32 {
        self.slots.len().saturating_sub(self.started)
    }
}
