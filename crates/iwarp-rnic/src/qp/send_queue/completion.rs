//! In-order completion of requests: success, failure, and flush.

use super::{Failed, Kind, RETIRE_MAX, SendQueue, Slot};
use crate::{Cqe, SendFlags, WcStatus};

impl SendQueue {
    /// Marks a request as done. The front request completes immediately. Returns `true` if the
    /// caller has to call [`retire_done`](Self::retire_done) for up to [`RETIRE_MAX`] others.
    #[inline(always)]
    #[must_use]
    pub(in super::super) fn complete(&mut self, seq: u32, emit: impl FnOnce(Cqe)) -> bool {
        // Nearly always it is the front request.
        if seq == self.front_seq && self.started > 0 {
            // Acknowledged requests have already completed.
            debug_assert_eq!(self.acknowledged, 0);
            self.retire_front(emit);
        } else {
            self.mark_done(seq);
        }
        self.is_front_done()
    }

    #[inline]
    fn mark_done(&mut self, seq: u32) {
        let index = seq.wrapping_sub(self.front_seq);
        if index < self.started
            && let Some(slot) = self.slots.get_mut(index)
        {
            slot.done = true;
        }
    }

    /// Marks all started requests up to `seq` as done, and completes up to [`RETIRE_MAX`] in
    /// order.
    pub(in super::super) fn complete_through(&mut self, seq: u32, emit: impl FnMut(Cqe)) {
        let last = seq.wrapping_sub(self.front_seq);
        if last < self.started {
            self.acknowledged = self.acknowledged.max(last.saturating_add(1));
            self.retire_done(RETIRE_MAX, emit);
        }
    }

    #[inline]
    pub(in super::super) fn is_front_done(&self) -> bool {
        self.started > 0 && self.is_front_marked()
    }

    /// Like [`is_front_done`](Self::is_front_done), also during a flush.
    #[inline]
    fn is_front_marked(&self) -> bool {
        self.acknowledged > 0 || self.slots.front().is_some_and(|slot| slot.done)
    }

    #[inline]
    pub(in super::super) fn retire_done(&mut self, most: u32, mut emit: impl FnMut(Cqe)) {
        //= rfc5040 section 5.5
        //# RDMA Operations MUST be Completed at the Local Peer in the order that
        //# they were submitted by the ULP.
        for _ in 0..most {
            if !self.is_front_done() {
                break;
            }
            self.acknowledged = self.acknowledged.saturating_sub(1);
            self.retire_front(&mut emit);
        }
    }

    /// Completes the front request, which was started.
    #[inline]
    fn retire_front(&mut self, emit: impl FnOnce(Cqe)) {
        self.started = self.started.wrapping_sub(1);
        self.take_front(emit);
    }

    /// Removes the front request, which has succeeded, and writes its completion.
    #[inline(always)]
    fn take_front(&mut self, emit: impl FnOnce(Cqe)) {
        let Some(slot) = self.slots.front() else {
            return;
        };
        if slot.kind != Kind::Ordinary || self.tally.is_on() {
            // `emit` is not passed on, so that the compiler can keep it in registers.
            if let Some(cqe) = self.take_special() {
                emit(cqe);
            }
            return;
        }
        if !slot.flags.contains(SendFlags::SIGNALED) {
            return self.drop_front();
        }
        // Read in place, because slots are large.
        let (wr_id, opcode, byte_len) = (slot.wr_id, slot.op.wc_opcode(), slot.len);
        self.drop_front();
        emit(Cqe {
            wr_id,
            opcode,
            byte_len,
            position: self.position(),
            ..Cqe::default()
        });
    }

    #[inline(always)]
    const fn drop_front(&mut self) {
        self.slots.skip();
        self.front_seq = self.front_seq.wrapping_add(1);
    }

    fn retire(&mut self) -> Option<Slot> {
        let slot = self.slots.pop()?;
        self.front_seq = self.front_seq.wrapping_add(1);
        self.started = self.started.saturating_sub(1);
        self.acknowledged = self.acknowledged.saturating_sub(1);
        Some(slot)
    }

    /// Ends the queue at request `seq`, which [`flush`](Self::flush) completes with `status`.
    pub(in super::super) fn fail(&mut self, seq: u32, status: WcStatus, vendor_err: u32) {
        self.failed = Some(Failed {
            seq,
            status,
            vendor_err,
        });
    }

    /// Completes up to `most` requests in order and returns how many. Requests at the front that
    /// are done succeed, the failed request completes with its status, and all others are flushed.
    pub(in super::super) fn flush(&mut self, most: u32, mut emit: impl FnMut(Cqe)) -> u32 {
        self.awaited.clear();
        // Requests still in a plan complete nothing from now on.
        self.started = 0;
        let n = most.min(self.slots.len());
        for _ in 0..n {
            if !self.flushing && self.is_front_marked() {
                self.acknowledged = self.acknowledged.saturating_sub(1);
                self.take_front(&mut emit);
                continue;
            }
            self.flushing = true;
            let failed = self.failed.filter(|failed| failed.seq == self.front_seq);
            let Some(slot) = self.retire() else { break };
            let status = failed.map_or(WcStatus::Flushed, |failed| failed.status);
            if slot.kind == Kind::Internal {
                self.flush_internal(&slot, status);
                continue;
            }
            self.tally.add_request(&slot.op, status, slot.len);
            emit(Cqe {
                wr_id: slot.wr_id,
                status,
                vendor_err: failed.map_or(0, |failed| failed.vendor_err),
                opcode: slot.wc_opcode(),
                position: self.position(),
                ..Cqe::default()
            });
        }
        if self.slots.is_empty() {
            self.clear();
        }
        n
    }
}
