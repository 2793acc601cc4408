//! Requests with special handling: atomic writes, which are sent as RDMA Writes, and internal
//! requests for rendezvous, which use additional slots and write no completions.

use super::{Kind, SendQueue, Slot};
use crate::{Cqe, PostError, SendFlags, SendOp, SendWr, WcStatus};

impl SendQueue {
    /// Turns an atomic write into an RDMA Write. Returns `true` if the request is one.
    pub(in super::super) fn start_atomic_write(&mut self, seq: u32) -> bool {
        if let Some(slot) = self.slots.get_mut(seq.wrapping_sub(self.front_seq))
            && let SendOp::AtomicWrite { remote_addr, rkey } = slot.op
        {
            slot.op = SendOp::Write { remote_addr, rkey };
            slot.kind = Kind::AtomicWrite;
            return true;
        }
        false
    }

    /// Returns `true` if the peer can answer a request of `len` octets. An atomic write is one
    /// aligned word.
    #[inline(never)]
    pub(super) const fn may_be_answered(&self, op: &SendOp, len: u64) -> bool {
        let fits = match op {
            SendOp::AtomicWrite { remote_addr, .. } => len == 8 && remote_addr.is_multiple_of(8),
            _ => true,
        };
        fits && self.allows_reads()
    }

    /// Removes the front request like `take_front`, for requests that are not ordinary or must be
    /// counted. Returns its completion, if any.
    #[cold]
    #[inline(never)]
    pub(super) fn take_special(&mut self) -> Option<Cqe> {
        let slot = self.slots.pop()?;
        self.front_seq = self.front_seq.wrapping_add(1);
        if slot.kind == Kind::Internal {
            self.remove_internal();
            return None;
        }
        self.tally
            .add_request(&slot.op, WcStatus::Success, slot.len);
        let signalled = slot.flags.contains(SendFlags::SIGNALED);
        signalled.then(|| Cqe {
            wr_id: slot.wr_id,
            opcode: slot.wc_opcode(),
            byte_len: slot.len,
            position: self.position(),
            ..Cqe::default()
        })
    }

    #[cold]
    #[inline(never)]
    pub(in super::super) fn push_internal(
        &mut self,
        wr: &SendWr<'_>,
        len: u32,
    ) -> Result<(), PostError> {
        self.push(wr, len)?;
        if let Some(last) = self.slots.len().checked_sub(1)
            && let Some(slot) = self.slots.get_mut(last)
        {
            slot.kind = Kind::Internal;
        }
        self.internal = self.internal.wrapping_add(1);
        self.limit = self.limit.wrapping_add(1);
        Ok(())
    }

    /// Updates the counts when an internal request is removed from the queue.
    pub(super) const fn remove_internal(&mut self) {
        self.internal_retired = self.internal_retired.wrapping_add(1);
        self.held_from = self.held_from.wrapping_add(1);
        self.internal = self.internal.wrapping_sub(1);
        self.limit = self.limit.wrapping_sub(1);
    }

    pub(in super::super) const fn internal_requests(&self) -> u32 {
        self.internal
    }

    /// Removes and returns the `wr_id` and the status of a flushed internal Read.
    pub(in super::super) fn next_flushed(&mut self) -> Option<(u32, WcStatus)> {
        self.flushed.pop()
    }

    #[cold]
    pub(super) fn flush_internal(&mut self, slot: &Slot, status: WcStatus) {
        self.remove_internal();
        if matches!(slot.op, SendOp::Read { .. }) {
            // The ring has an entry for each internal request.
            let _ = self.flushed.push((slot.wr_id as u32, status));
        }
    }
}
