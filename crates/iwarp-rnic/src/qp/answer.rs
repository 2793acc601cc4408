//! Responses to the peer: RDMA Read Responses and atomic responses (RFC 5040 section 5.2, RFC 7306
//! section 5).

use super::fpdu::{Out, Wire};
use super::headers::response_header;
use super::message::has_room_for_control;
use super::plan::{Milestone, TxPlan};
use super::response::Response;
use super::segment::{Source, next_segment};
use super::tx::Job;
use super::{Host, QueuePair};
use crate::Sge;
use crate::memory::{AccessError, Memory};
use crate::tally::Counted;
use iwarp_proto::ddp::TAGGED_HEADER_LEN;
use iwarp_proto::rdmap::{AtomicResponse, Opcode, ReadRequest};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The plan has no room; nothing was planned.
    NoRoom,
    Complete,
    /// The plan is full, or the response failed.
    Stopped,
}

impl QueuePair {
    /// Plans up to `most` responses, none of which is in progress. Returns `false` if there is no
    /// room for the next one.
    #[inline(never)]
    pub(super) fn send_responses<H: Host>(
        &mut self,
        most: u32,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        host: &mut H,
    ) -> bool {
        let small = w.small_max(self.tx.mulpdu);
        for _ in 0..most {
            let Some(response) = self.responses.front() else {
                break;
            };
            let Response::Read(request) = response else {
                if !self.answer_atomic(plan, w) {
                    return false;
                }
                continue;
            };
            let len = request.size;
            if len.wrapping_sub(1) >= small {
                match self.continue_response(0, plan, w, host) {
                    Answer::NoRoom => return false,
                    Answer::Complete => continue,
                    Answer::Stopped => break,
                }
            }
            if !plan.has_room(w.scratch_small(len)) {
                return false;
            }
            let out = Out::new(&mut self.tx, &mut self.counters, plan, w);
            let range = (request.source_stag, request.source_to, len);
            let header = response_header(request, 0, true);
            if let Err(e) = out.append_small(header, range, true) {
                if !plan.is_empty() {
                    return false;
                }
                self.fail_deregistered_response(0, e, host);
                break;
            }
            self.response_planned(plan);
        }
        true
    }

    #[inline]
    fn response_planned(&mut self, plan: &mut TxPlan) {
        self.tx.responses_in_row = self.tx.responses_in_row.saturating_add(1);
        plan.add_milestone(Milestone::Response);
        if self.sq.tally.is_on() {
            self.tally_answer();
        }
        self.responses.pop();
    }

    /// Counts the response to the peer's oldest request if it is a Read.
    #[cold]
    #[inline(never)]
    fn tally_answer(&mut self) {
        if let Some(Response::Read(request)) = self.responses.front() {
            self.sq.tally.add_remote(Counted::RemoteRead, request.size);
        }
    }

    /// Plans the response to the oldest Read from `off` on, as far as there is room.
    pub(super) fn continue_response<H: Host>(
        &mut self,
        mut off: u32,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        host: &mut H,
    ) -> Answer {
        let Some(Response::Read(request)) = self.responses.front() else {
            self.tx.job = None;
            return Answer::Stopped;
        };
        let room = u32::from(self.tx.mulpdu).saturating_sub(TAGGED_HEADER_LEN as u32);
        let first = next_segment(request.size.wrapping_sub(off), room).0;
        if !plan.has_room(w.scratch(first, true)) {
            return Answer::NoRoom;
        }
        let mut out = Out::new(&mut self.tx, &mut self.counters, plan, w);
        let result = out.response(request, &mut off, room);
        let is_complete = off == request.size;
        match result {
            // Write the plan first, so that local requests in it complete.
            Err(_) if !plan.is_empty() => {
                self.tx.job = (off > 0).then_some(Job::Response { off });
                return Answer::NoRoom;
            }
            Err(e) => self.fail_deregistered_response(off, e, host),
            Ok(()) if is_complete => {
                self.tx.job = None;
                self.response_planned(plan);
                return Answer::Complete;
            }
            Ok(()) => self.tx.job = Some(Job::Response { off }),
        }
        Answer::Stopped
    }

    /// Fails a response of which `off` octets are planned, because its memory was deregistered
    /// after the request.
    #[cold]
    #[inline(never)]
    fn fail_deregistered_response<H: Host>(&mut self, off: u32, e: AccessError, host: &mut H) {
        let Some(&Response::Read(request)) = self.responses.front() else {
            return;
        };
        let rest = ReadRequest {
            sink_to: request.sink_to.wrapping_add(u64::from(off)),
            size: request.size.wrapping_sub(off),
            source_to: request.source_to.wrapping_add(u64::from(off)),
            ..request
        };
        self.fail_response(e, &rest, host);
    }

    /// Plans the response to an atomic. Returns `false` if there is no room.
    #[cold]
    #[inline(never)]
    fn answer_atomic(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) -> bool {
        let Some(&Response::Atomic {
            request_id,
            original,
        }) = self.responses.front()
        else {
            return true;
        };
        if !has_room_for_control(plan, w) {
            return false;
        }
        let response = AtomicResponse {
            request_id,
            original,
        };
        //= rfc7306 section 5
        //# Atomic Operation Response Messages MUST use the Untagged Buffer model
        //# with QN=3.
        //= rfc7306 section 5.2.2
        //# An Atomic Operation Response Message MUST consume an Untagged Buffer.
        //= rfc7306 section 5.2.2
        //# An Atomic Operation Response Message MUST reference the Queue Number 3.
        //= rfc7306 section 5.2.2
        //# When the Responder receives Atomic Operation Request messages, the
        //# Responder RDMAP layer MUST pass Atomic Operation Response Messages to
        //# the DDP layer, in the order that the Atomic Operation Request Messages
        //# were received by the RDMAP layer, at the Responder.
        let (opcode, len) = (Opcode::ATOMIC_RESPONSE, AtomicResponse::LEN);
        self.emit_control(opcode, 3, len, plan, w, |out| response.emit(out));
        self.response_planned(plan);
        true
    }
}

impl<M: Memory> Out<'_, '_, M> {
    #[inline]
    fn response(
        &mut self,
        request: &ReadRequest,
        off: &mut u32,
        room: u32,
    ) -> Result<(), AccessError> {
        let source = Sge {
            addr: request.source_to,
            len: request.size,
            lkey: request.source_stag.0,
        };
        let source = Source {
            sges: &[source],
            remote: true,
        };
        self.segments(source, off, request.size, room, |off, last| {
            response_header(request, off, last)
        })
    }
}
