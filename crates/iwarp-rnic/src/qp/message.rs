//! The messages of the program and of the protocol: Sends and Writes, Read Requests and atomics,
//! immediate data, RTR messages and Terminate (RFC 5040 section 5, RFC 7306 sections 5 and 6, RFC
//! 6581 section 9.2).
//!
//! `next` chooses the next message, `headers` builds headers, `segment` adds FPDUs to a plan, and
//! `answer` plans the responses to the peer.

use super::answer::Answer;
use super::fault::TerminateOctets;
use super::fpdu::{Out, Wire};
use super::headers::{
    EMPTY_MESSAGE_STAG, control_header, empty_write_header, payload_header, payload_header_len,
};
use super::plan::{Milestone, TxPlan};
use super::segment::{Source, next_segment};
use super::send_queue::{SendQueue, Slot};
use super::tx::{Job, Stage};
use super::{Host, QueuePair, Rtr};
use crate::limits::CONTROL_MAX;
use crate::memory::{AccessError, Memory};
use crate::{SendFlags, SendOp, Sge, WcStatus};
use core::convert::Infallible;
use iwarp_proto::rdmap::{Immediate, Opcode};

/// Returns `true` if the plan has room for a message that carries no payload of a program.
pub(super) const fn has_room_for_control(plan: &TxPlan, w: &Wire<'_, impl Memory>) -> bool {
    plan.has_room(w.scratch(CONTROL_MAX as u32, false))
}

pub(super) enum PlannedRequest {
    /// The plan has no room; nothing was planned.
    NoRoom,
    /// The request is planned, and is to be counted as sent (`acknowledge`).
    Sent,
    /// The request is planned, and counted if necessary.
    Complete,
    Part,
    Failed(WcStatus),
}

impl QueuePair {
    /// Plans up to `most` requests. Returns `false` if there is no room for the next one.
    #[inline]
    pub(super) fn send_requests<H: Host>(
        &mut self,
        most: u32,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        host: &mut H,
    ) -> bool {
        let small = w.small_max(self.tx.mulpdu);
        for _ in 0..most {
            let Some((seq, slot, place)) = self.sq.next_with_place() else {
                break;
            };
            if !self.may_start(slot) || slot.op.is_local() {
                break;
            }
            let is_small = slot.num_sge == 1 && slot.len.wrapping_sub(1) < small;
            let planned = match slot.op {
                // Separate arms, so that the compiler knows the kind of header in each.
                SendOp::Write { .. } if is_small => {
                    let out = Out::new(&mut self.tx, &mut self.counters, plan, w);
                    out.send_small(seq, slot, self.sq.sge_at(place))
                }
                SendOp::Send if is_small => {
                    let out = Out::new(&mut self.tx, &mut self.counters, plan, w);
                    out.send_small(seq, slot, self.sq.sge_at(place))
                }
                SendOp::Read { remote_addr, rkey }
                | SendOp::ReadInv { remote_addr, rkey }
                | SendOp::Flush { remote_addr, rkey } => {
                    self.plan_read(seq, place, (remote_addr, rkey), plan, w)
                }
                _ => self.plan_request(seq, place, plan, w),
            };
            match planned {
                PlannedRequest::Sent => {
                    self.acknowledge.count_sent();
                    self.start_next();
                }
                PlannedRequest::Complete => self.start_next(),
                PlannedRequest::NoRoom => return false,
                PlannedRequest::Part => {
                    self.start_next();
                    break;
                }
                PlannedRequest::Failed(status) => {
                    // Requests before this one are in the plan, and complete when it is written.
                    // This request is tried again afterwards.
                    let is_alone = plan.is_empty();
                    if is_alone || self.tx.job.is_some() {
                        self.start_next();
                    }
                    if !is_alone {
                        return false;
                    }
                    self.fail_request(seq, status, host);
                    break;
                }
            }
        }
        true
    }

    /// Plans a request of any kind that sends a message, as far as there is room.
    #[inline(never)]
    fn plan_request(
        &mut self,
        seq: u32,
        place: usize,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> PlannedRequest {
        if self.sq.start_atomic_write(seq) {
            self.complete_when_placed();
        }
        let Some(slot) = self.sq.at(place) else {
            return PlannedRequest::Failed(WcStatus::LocalQpOperation);
        };
        let result = match slot.op {
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => {
                if !has_room_for_control(plan, w) {
                    return PlannedRequest::NoRoom;
                }
                self.plan_atomic(seq, place, plan, w)
            }
            SendOp::SendImm(_) => {
                let stage = Stage::ImmediateFirst;
                self.tx.job = Some(Job::Request { seq, off: 0, stage });
                Ok(())
            }
            _ => {
                let len = next_segment(slot.len, self.payload_room(slot)).0;
                if !plan.has_room(w.scratch(len, false)) {
                    return PlannedRequest::NoRoom;
                }
                let before = self.counters.tx_payload;
                let result = self.send_payload(seq, place, 0, plan, w);
                result.inspect_err(|_| self.payload_failed(seq, place, 0, before))
            }
        };
        match result {
            Err(status) => PlannedRequest::Failed(status),
            Ok(()) if self.tx.job.is_some() => PlannedRequest::Part,
            Ok(()) => PlannedRequest::Complete,
        }
    }

    #[inline]
    pub(super) const fn start_next(&mut self) {
        self.sq.advance();
        self.tx.responses_in_row = 0;
    }

    /// Plans more of the message in progress. Returns `false` if there is no room.
    #[inline(never)]
    pub(super) fn send_rest<H: Host>(
        &mut self,
        job: Job,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        host: &mut H,
    ) -> bool {
        let (seq, off, stage) = match job {
            Job::Response { off } => {
                return self.continue_response(off, plan, w, host) != Answer::NoRoom;
            }
            Job::Request { seq, off, stage } => (seq, off, stage),
        };
        let Some((slot, place)) = self.sq.slot_with_place(seq) else {
            self.tx.job = None;
            return true;
        };
        let needed = match stage {
            Stage::Body => next_segment(slot.len.wrapping_sub(off), self.payload_room(slot)).0,
            Stage::ImmediateFirst | Stage::ImmediateLast => Immediate::LEN as u32,
        };
        if !plan.has_room(w.scratch(needed, false)) {
            return false;
        }
        self.tx.job = None;
        let before = self.counters.tx_payload;
        if stage != Stage::Body {
            self.send_immediate(seq, stage, plan, w);
        } else if let Err(status) = self.send_payload(seq, place, off, plan, w) {
            self.payload_failed(seq, place, off, before);
            if !plan.is_empty() {
                self.tx.job = self.tx.job.or(Some(job));
                return false;
            }
            self.fail_request(seq, status, host);
        }
        true
    }

    /// Returns the maximum payload of a segment of a Send or RDMA Write.
    #[inline]
    fn payload_room(&self, slot: &Slot) -> u32 {
        u32::from(self.tx.mulpdu).saturating_sub(payload_header_len(slot) as u32)
    }

    /// Plans a Send or RDMA Write from `off` on, as far as there is room. The caller has checked
    /// that one segment fits, and calls [`payload_failed`](Self::payload_failed) after an error.
    #[inline(never)]
    fn send_payload(
        &mut self,
        seq: u32,
        place: usize,
        off: u32,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        let Some(slot) = self.sq.at(place) else {
            return Err(WcStatus::LocalQpOperation);
        };
        let room = self.payload_room(slot);
        let mut out = Out::new(&mut self.tx, &mut self.counters, plan, w);
        let mut end = off;
        let result = out.payload(&self.sq, slot, place, &mut end, room);
        result.map_err(|_| WcStatus::LocalProtection)?;
        let stage = match slot.op {
            _ if end != slot.len => Stage::Body,
            SendOp::WriteImm { .. } => {
                self.acknowledge.count_sent();
                Stage::ImmediateLast
            }
            _ => {
                self.request_planned(seq, plan);
                return Ok(());
            }
        };
        self.tx.job = Some(Job::Request {
            seq,
            off: end,
            stage,
        });
        Ok(())
    }

    /// Handles a segment that cannot be sent. If segments from `off` on were planned, the rest of
    /// the message is the next job. `before` is the count of payload octets before `off`.
    #[cold]
    #[inline(never)]
    fn payload_failed(&mut self, seq: u32, place: usize, off: u32, before: u64) {
        let sent = self.counters.tx_payload.wrapping_sub(before) as u32;
        let end = off.wrapping_add(sent);
        if end == 0
            && let Some(slot) = self.sq.at(place)
        {
            self.tx.unassign_msn(slot);
        }
        let stage = Stage::Body;
        let rest = Job::Request {
            seq,
            off: end,
            stage,
        };
        self.tx.job = (sent > 0).then_some(rest);
    }

    #[inline]
    fn request_planned(&mut self, seq: u32, plan: &mut TxPlan) {
        plan.add_milestone(Milestone::Request(seq));
        self.acknowledge.count_sent();
    }

    /// Plans immediate data. The caller has checked for room.
    #[cold]
    #[inline(never)]
    fn send_immediate(
        &mut self,
        seq: u32,
        stage: Stage,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) {
        let Some(slot) = self.sq.slot(seq) else {
            return;
        };
        let (SendOp::SendImm(imm) | SendOp::WriteImm { imm, .. }) = slot.op else {
            return;
        };
        let first = stage == Stage::ImmediateFirst;
        let opcode = match slot.flags.contains(SendFlags::SOLICITED) && !first {
            true => Opcode::IMMEDIATE_SE,
            false => Opcode::IMMEDIATE,
        };
        //= rfc7306 section 6.3
        //# An Immediate Data or Immediate Data with SE Message MUST reference an
        //# Untagged Buffer.
        //= rfc7306 section 6.3
        //# The Local Peer MUST issue Immediate Data and Immediate Data with SE
        //# Messages in the order they were submitted by the ULP.
        let imm = match first {
            true => Immediate::before_send(imm),
            false => Immediate::plain(imm),
        };
        self.emit_control(opcode, 0, Immediate::LEN, plan, w, |out| imm.emit(out));
        if first {
            self.acknowledge.count_sent();
            let stage = Stage::Body;
            self.tx.job = Some(Job::Request { seq, off: 0, stage });
        } else {
            self.request_planned(seq, plan);
        }
    }

    /// Plans a message of one untagged segment with `len` octets, written by `fill`. Returns its
    /// message sequence number.
    #[inline(always)]
    pub(super) fn emit_control(
        &mut self,
        opcode: Opcode,
        qn: u32,
        len: usize,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> u32 {
        let msn = self.tx.next_msn(qn);
        let mut out = Out::new(&mut self.tx, &mut self.counters, plan, w);
        let header = control_header(opcode, qn, msn);
        let Ok(()) = out.append::<Infallible>(&header, len as u32, move |out| {
            fill(out);
            Ok(())
        });
        msn
    }

    #[cold]
    #[inline(never)]
    pub(super) fn emit_rtr(&mut self, rtr: Rtr, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        self.tx.rtr = None;
        match rtr {
            Rtr::Send => {
                self.emit_control(Opcode::SEND, 0, 0, plan, w, |_| 0);
                // The peer counts this Send, although it belongs to no request.
                self.acknowledge.count_sent();
                self.acknowledge.cover_sent();
            }
            Rtr::Write => {
                let mut out = Out::new(&mut self.tx, &mut self.counters, plan, w);
                let Ok(()) = out.append::<Infallible>(&empty_write_header(0), 0, |_| Ok(()));
            }
            Rtr::Read => {
                self.emit_empty_read(EMPTY_MESSAGE_STAG, plan, w);
                self.rx.expect_rtr_response();
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn emit_terminate(
        &mut self,
        terminate: &TerminateOctets,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) {
        //= rfc5040 section 5.4
        //# A Terminate Message MUST reference an Untagged Buffer.
        //= rfc5040 section 5.4
        //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
        //# mark the Message as Untagged.
        //= rfc5040 section 5.4
        //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
        //# set the Queue Number field to two.
        let octets = terminate.octets();
        self.emit_control(Opcode::TERMINATE, 2, octets.len(), plan, w, |out| {
            if let Some(out) = out.get_mut(..octets.len()) {
                out.copy_from_slice(octets);
            }
            octets.len()
        });
        plan.add_milestone(Milestone::Terminate);
    }
}

impl<M: Memory> Out<'_, '_, M> {
    /// Appends a small Send or RDMA Write of one element, the most frequent kind of message.
    #[inline(always)]
    fn send_small(self, seq: u32, slot: &Slot, sge: Option<&Sge>) -> PlannedRequest {
        if !self.plan.has_room(self.wire.scratch_small(slot.len)) {
            return PlannedRequest::NoRoom;
        }
        let Some(sge) = sge else {
            return PlannedRequest::Failed(WcStatus::LocalQpOperation);
        };
        let header = payload_header(slot, self.tx.begin_payload(slot), 0, true);
        let range = (sge.stag(), sge.addr, slot.len);
        let out = Out::new(self.tx, self.counters, self.plan, self.wire);
        if out.append_small(header, range, false).is_err() {
            self.tx.unassign_msn(slot);
            return PlannedRequest::Failed(WcStatus::LocalProtection);
        }
        self.plan.add_milestone(Milestone::Request(seq));
        PlannedRequest::Sent
    }

    /// Appends segments of a Send or RDMA Write from `off` on, like [`segments`](Self::segments).
    #[inline]
    fn payload(
        &mut self,
        sq: &SendQueue,
        slot: &Slot,
        place: usize,
        off: &mut u32,
        room: u32,
    ) -> Result<(), AccessError> {
        let msn = match *off {
            0 => self.tx.begin_payload(slot),
            _ => self.tx.msn.first().map_or(0, |next| next.wrapping_sub(1)),
        };
        let header = |off, last| payload_header(slot, msn, off, last);
        if slot.flags.contains(SendFlags::INLINE) {
            self.octets(sq.inline_at(place, slot.len as usize), off, room, header);
            return Ok(());
        }
        let sges = sq.sges_at(place, slot);
        let remote = false;
        self.segments(Source { sges, remote }, off, slot.len, room, header)
    }
}
