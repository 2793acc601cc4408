//! Requests that are more than they look: atomic writes, which go on as RDMA Writes, and those of our own for rendezvous, which have room
//! besides the program's and complete nothing for it.

use super::{Kind, SendQueue, Slot};
use crate::{Cqe, PostError, SendFlags, SendOp, SendWr, WcStatus};

impl SendQueue {
    /// If this request is an atomic write, returns `true`, and lets it go on as an RDMA Write.
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

    /// Returns `true` if the peer can be asked about a request of `len` octets. An atomic write is one aligned word.
    #[inline(never)]
    pub(super) const fn may_be_answered(&self, op: &SendOp, len: u64) -> bool {
        let fits = match op {
            SendOp::AtomicWrite { remote_addr, .. } => len == 8 && remote_addr.is_multiple_of(8),
            _ => true,
        };
        fits && self.takes_reads()
    }

    /// Takes the front request as `take_front` does, where it is not an ordinary one or is to be
    /// counted. Returns its completion, if it has one.
    #[cold]
    #[inline(never)]
    pub(super) fn take_special(&mut self) -> Option<Cqe> {
        let slot = self.slots.pop()?;
        self.front_seq = self.front_seq.wrapping_add(1);
        if slot.kind == Kind::Internal {
            self.own_left();
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

    /// Appends a request of our own.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn push_own(
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

    /// One of them has left the queue.
    pub(super) const fn own_left(&mut self) {
        self.own_gone = self.own_gone.wrapping_add(1);
        self.held_from = self.held_from.wrapping_add(1);
        self.internal = self.internal.wrapping_sub(1);
        self.limit = self.limit.wrapping_sub(1);
    }

    /// Returns how many requests of our own it has.
    pub(in super::super) const fn own_requests(&self) -> u32 {
        self.internal
    }

    /// Takes the `wr_id` of a Read of our own that was flushed, and its status.
    pub(in super::super) fn next_flushed(&mut self) -> Option<(u32, WcStatus)> {
        self.flushed.pop()
    }

    #[cold]
    pub(super) fn flush_own(&mut self, slot: &Slot, status: WcStatus) {
        self.own_left();
        if matches!(slot.op, SendOp::Read { .. }) {
            // There is room for all that the queue has room for.
            let _ = self.flushed.push((slot.wr_id as u32, status));
        }
    }
}
