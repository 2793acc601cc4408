//! What a received segment means: the checks of RFC 5041 section 7.1 and RFC 5040 section 7.2,
//! and the delivery of whole messages (RFC 5040 section 5, RFC 7306 sections 5 and 6).

use super::fault::{RxFault, rdmap_code};
use super::place::{Places, Target};
use super::response::Response;
use super::rx::Step;
use super::{Direction, Env, Events, Host, QueuePair, ReceiverNotReady};
use crate::{Access, Cqe, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::ddp::{Header, TaggedHeader, UntaggedHeader};
use iwarp_proto::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest, Terminate,
    TerminateCode,
};

impl QueuePair {
    /// Parses and checks a header. The first good one tells that the peer is in full operation.
    #[inline]
    pub(super) fn parse_header(
        &mut self,
        ulpdu: &[u8],
        ulpdu_len: usize,
    ) -> Result<Header, RxFault> {
        let header = Header::parse(ulpdu)
            .map_err(|e| RxFault::header(&e, Header::decode(ulpdu), ulpdu_len as u16))?;
        if !self.rx.seen_fpdu {
            self.first_fpdu();
        }
        Ok(header)
    }

    fn first_fpdu(&mut self) {
        self.rx.seen_fpdu = true;
        //= rfc5044 section 7.1.2
        //# MPA Responder mode implementations MUST receive and validate at least one FPDU before sending any FPDUs or Markers.
        if self.tx.open_by_peer() {
            self.events |= Events::ESTABLISHED;
        }
    }

    /// Processes one whole ULPDU. With `Step::Hold` nothing has changed and the ULPDU must be offered again.
    #[inline]
    pub(super) fn receive_ulpdu<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<Step, RxFault> {
        if ulpdu.is_empty() && !self.rx.seen_fpdu && self.rx.rtr_send_expected {
            // RFC 6581 section 9.2 speaks of a zero-length FULPDU: an FPDU without even a header will do.
            self.rx.rtr_send_expected = false;
            self.first_fpdu();
            return Ok(Step::Again);
        }
        let ulpdu_len = ulpdu.len() as u16;
        if !self.rx.seen_fpdu {
            // To MPA the FPDU is valid, whatever is in it.
            self.first_fpdu();
        }
        let header = self.parse_header(ulpdu, ulpdu.len())?;
        let payload = ulpdu.get(header.len()..).unwrap_or(&[]);
        if let Header::Untagged(h) = &header
            && !h.opcode.is_send()
        {
            return self.control(&header, h, payload, env);
        }
        let Some(target) = self.admit(&header, payload.len() as u32, ulpdu_len, env)? else {
            return Ok(Step::Hold);
        };
        let places = Places {
            memory: env.memory,
            who: self.accessor(),
            receive: &self.rx.taken,
            sends: &self.sq,
        };
        places
            .write(target, 0, payload)
            .map_err(|e| self.placement_fault(e, &header, ulpdu_len))?;
        self.finish_segment(&header, payload.len() as u32, ulpdu_len, env)?;
        Ok(Step::Again)
    }

    /// Checks a segment that carries user payload and says where that goes; `None` if it has to wait for a receive.
    #[inline]
    pub(super) fn admit<H: Host>(
        &mut self,
        header: &Header,
        payload: u32,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<Option<Target>, RxFault> {
        match header {
            Header::Tagged(h) if h.opcode == Opcode::READ_RESPONSE => self
                .admit_read_response(header, h, payload, ulpdu_len)
                .map(Some),
            Header::Tagged(h) => {
                let Some(sum) = self.rx.write_len.checked_add(payload) else {
                    return Err(RxFault::segment(
                        TerminateCode::DDP_TAGGED_BASE_BOUNDS,
                        header,
                        ulpdu_len,
                    ));
                };
                // Refuse before anything is placed, and whole segments only.
                env.memory
                    .check(
                        h.stag.0,
                        h.to,
                        payload,
                        Access::REMOTE_WRITE,
                        self.accessor(),
                    )
                    .map_err(|e| self.placement_fault(e, header, ulpdu_len))?;
                self.rx.write_len = sum;
                Ok(Some(Target::Tagged {
                    stag: h.stag.0,
                    to: h.to,
                }))
            }
            Header::Untagged(h) => self.admit_send(header, h, payload, ulpdu_len, env),
        }
    }

    fn admit_read_response(
        &self,
        header: &Header,
        h: &TaggedHeader,
        payload: u32,
        ulpdu_len: u16,
    ) -> Result<Target, RxFault> {
        let fault = |code| RxFault::segment(code, header, ulpdu_len).request(WcStatus::BadResponse);
        if self.rx.rtr_response_due {
            // The answer to the RTR message: nothing, for nobody.
            return match payload == 0 && h.last {
                true => Ok(Target::Receive { off: 0 }),
                false => Err(fault(TerminateCode::RDMAP_UNEXPECTED_OPCODE)),
            };
        }
        let Some(awaited) = self.sq.awaited.front().filter(|a| !a.atomic) else {
            return Err(fault(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        };
        // A peer exists that echoes STag 0 for a zero-length read.
        if awaited.sink_stag != h.stag.0 && awaited.len != 0 {
            return Err(fault(TerminateCode::DDP_TAGGED_INVALID_STAG));
        }
        let end = u64::from(awaited.received) + u64::from(payload);
        let in_order = h.to == u64::from(awaited.received) || awaited.len == 0;
        if !in_order || end > u64::from(awaited.len) || h.last != (end == u64::from(awaited.len)) {
            return Err(fault(TerminateCode::DDP_TAGGED_BASE_BOUNDS));
        }
        Ok(Target::Sink {
            seq: awaited.seq,
            off: awaited.received,
        })
    }

    /// Message sequence number of a queue: the next one only, since TCP keeps the order.
    fn check_msn(
        &self,
        header: &Header,
        h: &UntaggedHeader,
        ulpdu_len: u16,
    ) -> Result<(), RxFault> {
        //= rfc5041 section 5.3
        //# the data sink's DDP MUST validate
        if self.rx.msn.get(h.qn as usize) != Some(&h.msn) {
            return Err(RxFault::segment(
                TerminateCode::DDP_UNTAGGED_INVALID_MSN,
                header,
                ulpdu_len,
            ));
        }
        Ok(())
    }

    fn advance_msn(&mut self, qn: u32) {
        if let Some(msn) = self.rx.msn.get_mut(qn as usize) {
            *msn = msn.wrapping_add(1);
        }
        self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
    }

    fn admit_send<H: Host>(
        &mut self,
        header: &Header,
        h: &UntaggedHeader,
        payload: u32,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<Option<Target>, RxFault> {
        self.check_msn(header, h, ulpdu_len)?;
        if h.mo != self.rx.message_off {
            return Err(RxFault::segment(
                TerminateCode::DDP_UNTAGGED_INVALID_MO,
                header,
                ulpdu_len,
            ));
        }
        if !self.rx.taking {
            let first = h.msn == 1 && self.rx.immediate.is_none();
            if self.rx.rtr_send_expected
                && first
                && payload == 0
                && h.last
                && h.opcode == Opcode::SEND
            {
                // The RTR message is the RNIC's own and takes no receive (RFC 6581 section 9.2).
                return Ok(Some(Target::Receive { off: 0 }));
            }
            if !self.take_receive(env.host) {
                return match self.config.receiver_not_ready {
                    ReceiverNotReady::Hold => Ok(None),
                    ReceiverNotReady::Terminate => Err(RxFault::segment(
                        TerminateCode::DDP_UNTAGGED_NO_BUFFER,
                        header,
                        ulpdu_len,
                    )),
                };
            }
        }
        if u64::from(h.mo) + u64::from(payload) > self.rx.taken.len {
            let fault = RxFault::segment(TerminateCode::DDP_UNTAGGED_TOO_LONG, header, ulpdu_len);
            return Err(fault.receive(WcStatus::LocalLength));
        }
        Ok(Some(Target::Receive { off: h.mo }))
    }

    #[inline]
    fn take_receive<H: Host>(&mut self, host: &mut H) -> bool {
        self.rx.taking = if self.config.shared_receive {
            host.take_shared_receive(&mut self.rx.taken)
        } else {
            self.rq.take(&mut self.rx.taken)
        };
        self.rx.taking
    }

    /// The policy's time for a held Send is over: ends the stream as RFC 5041 section 7.1 has it.
    pub fn hold_expired<H: Host>(&mut self, host: &mut H) {
        if self.is_held() {
            let terminate = Terminate::new(TerminateCode::DDP_UNTAGGED_NO_BUFFER);
            self.fail_stream(&RxFault::bare(terminate), host);
        }
    }

    /// All payload of a segment is placed.
    #[inline]
    pub(super) fn finish_segment<H: Host>(
        &mut self,
        header: &Header,
        payload: u32,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<(), RxFault> {
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(u64::from(payload));
        match header {
            Header::Tagged(h) if h.opcode == Opcode::READ_RESPONSE => {
                if self.rx.rtr_response_due {
                    self.rx.rtr_response_due = false;
                } else if let Some(awaited) = self.sq.awaited.front_mut() {
                    awaited.received = awaited.received.saturating_add(payload);
                    if h.last {
                        self.answered(env.host);
                    }
                }
                Ok(())
            }
            Header::Tagged(h) => {
                if h.last {
                    self.rx.last_write_len = self.rx.write_len;
                    self.rx.write_len = 0;
                    self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
                }
                Ok(())
            }
            Header::Untagged(h) => {
                self.rx.message_off = self.rx.message_off.wrapping_add(payload);
                if h.last {
                    self.deliver_send(header, h, ulpdu_len, env)
                } else {
                    Ok(())
                }
            }
        }
    }

    /// The request that waited first is answered.
    fn answered<H: Host>(&mut self, host: &mut H) {
        if let Some(awaited) = self.sq.awaited.pop() {
            self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
            self.complete_request(awaited.seq, host);
            // It may have been the last one that a drained send queue waited for.
            self.note_drained();
        }
    }

    #[inline]
    fn deliver_send<H: Host>(
        &mut self,
        header: &Header,
        h: &UntaggedHeader,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<(), RxFault> {
        let byte_len = core::mem::take(&mut self.rx.message_off);
        self.advance_msn(0);
        self.rx.last_write_len = 0;
        if !self.rx.taking {
            self.rx.rtr_send_expected = false;
            return Ok(());
        }
        let mut cqe = self.receive_cqe(WcOpcode::Recv, byte_len);
        if h.opcode.solicited() {
            cqe.flags |= WcFlags::SOLICITED;
        }
        if let Some((imm, _)) = self.rx.immediate.take() {
            cqe.flags |= WcFlags::WITH_IMM;
            cqe.imm_or_stag = imm;
        }
        if h.opcode.invalidates() {
            //= rfc5040 section 7.2
            //# The Invalidate STag MUST be valid.
            let stag = h.invalidate_stag.0;
            env.memory
                .invalidate(stag, self.accessor(), true)
                .map_err(|_| {
                    RxFault::segment(TerminateCode::RDMAP_CANNOT_INVALIDATE, header, ulpdu_len)
                        .access()
                        .receive(WcStatus::LocalAccess)
                })?;
            cqe.flags |= WcFlags::WITH_INV;
            cqe.imm_or_stag = stag;
        }
        self.finish_receive(cqe, env.host);
        Ok(())
    }

    const fn receive_cqe(&self, opcode: WcOpcode, byte_len: u32) -> Cqe {
        Cqe {
            wr_id: self.rx.taken.wr_id,
            status: WcStatus::Success,
            opcode,
            byte_len,
            qp_num: self.config.qp_num,
            flags: WcFlags::empty(),
            imm_or_stag: 0,
            vendor_err: 0,
            timestamp_ns: 0,
        }
    }

    #[inline]
    fn finish_receive<H: Host>(&mut self, cqe: Cqe, host: &mut H) {
        self.rx.taking = false;
        self.counters.completions = self.counters.completions.wrapping_add(1);
        host.complete(Direction::Recv, cqe);
    }

    /// Untagged messages that the RNIC itself consumes. All of them fit one segment.
    fn control<H: Host>(
        &mut self,
        header: &Header,
        h: &UntaggedHeader,
        payload: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<Step, RxFault> {
        let ulpdu_len = (header.len() + payload.len()) as u16;
        if h.opcode == Opcode::TERMINATE {
            // Whatever else is wrong with it: the stream is over, and a Terminate is not answered.
            let terminate = Terminate::parse(payload).map(|(t, _)| t);
            let unknown = Terminate::new(TerminateCode::RDMAP_OPERATION_UNSPECIFIED);
            self.terminated_by_peer(&terminate.unwrap_or(unknown), env.host);
            return Ok(Step::Again);
        }
        self.check_msn(header, h, ulpdu_len)?;
        let bad_offset = if h.qn == 0 {
            h.mo != self.rx.message_off
        } else {
            h.mo != 0
        };
        if bad_offset {
            return Err(RxFault::segment(
                TerminateCode::DDP_UNTAGGED_INVALID_MO,
                header,
                ulpdu_len,
            ));
        }
        let malformed = || {
            RxFault::segment(
                TerminateCode::RDMAP_OPERATION_UNSPECIFIED,
                header,
                ulpdu_len,
            )
        };
        if !h.last {
            return Err(malformed());
        }
        match h.opcode {
            Opcode::READ_REQUEST if payload.len() == ReadRequest::LEN => {
                let request = ReadRequest::parse(payload).ok_or_else(malformed)?;
                self.read_request(header, &request, ulpdu_len, env)?;
            }
            Opcode::ATOMIC_REQUEST if payload.len() == AtomicRequest::LEN => {
                let request = AtomicRequest::parse(payload).ok_or_else(malformed)?;
                self.atomic_request(header, &request, ulpdu_len, env)?;
            }
            Opcode::ATOMIC_RESPONSE if payload.len() == AtomicResponse::LEN => {
                let response = AtomicResponse::parse(payload).ok_or_else(malformed)?;
                self.atomic_response(header, &response, ulpdu_len, env)?;
            }
            Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE if payload.len() == Immediate::LEN => {
                if self.rx.taking {
                    // In the middle of a Send on the same queue.
                    return Err(RxFault::segment(
                        TerminateCode::DDP_UNTAGGED_INVALID_MSN,
                        header,
                        ulpdu_len,
                    ));
                }
                let immediate = Immediate::parse(payload).ok_or_else(malformed)?;
                return self.immediate(header, h, immediate, ulpdu_len, env);
            }
            _ => return Err(malformed()),
        }
        self.advance_msn(h.qn);
        Ok(Step::Again)
    }

    fn read_request<H: Host>(
        &mut self,
        header: &Header,
        r: &ReadRequest,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<(), RxFault> {
        env.memory
            .covers(
                r.source_stag.0,
                r.source_to,
                u64::from(r.size),
                Access::REMOTE_READ,
                self.accessor(),
            )
            .map_err(|e| {
                RxFault::about_request(rdmap_code(e), header, ulpdu_len, Some(*r)).access()
            })?;
        let response = Response::Read {
            sink_stag: r.sink_stag.0,
            sink_to: r.sink_to,
            source_stag: r.source_stag.0,
            source_to: r.source_to,
            len: r.size,
        };
        self.respond(response, header, ulpdu_len)
    }

    /// Queues an answer, within the IRD.
    fn respond(
        &mut self,
        response: Response,
        header: &Header,
        ulpdu_len: u16,
    ) -> Result<(), RxFault> {
        //= rfc5040 section 6.1
        //# For inbound RDMA Read Requests, the RDMAP layer MUST NOT exceed
        //# the maximum number of outstanding, inbound RDMA Read Requests that
        //# were negotiated between the ULP and the Local Peer's RDMAP layer.
        // Without any granted only the RTR message by Read is in order: it asks for nothing.
        let nothing = matches!(response, Response::Read { len: 0, .. });
        if self.responses.limit() == 0 && !nothing || !self.responses.push(response) {
            return Err(RxFault::segment(
                TerminateCode::DDP_UNTAGGED_NO_BUFFER,
                header,
                ulpdu_len,
            ));
        }
        self.counters.rx_requests = self.counters.rx_requests.wrapping_add(1);
        Ok(())
    }

    fn atomic_request<H: Host>(
        &mut self,
        header: &Header,
        r: &AtomicRequest,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<(), RxFault> {
        let fault = |code| RxFault::about_request(code, header, ulpdu_len, None);
        if r.op != AtomicOp::FETCH_ADD && r.op != AtomicOp::CMP_SWAP {
            return Err(fault(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        }
        if self.responses.is_full() || self.responses.limit() == 0 {
            return Err(fault(TerminateCode::DDP_UNTAGGED_NO_BUFFER));
        }
        let span = env
            .memory
            .check(r.stag.0, r.to, 8, Access::REMOTE_ATOMIC, self.accessor())
            .map_err(|e| fault(rdmap_code(e)).access())?;
        //= rfc7306 section 8.2
        //# The RDMAP layer MUST validate that the Remote Peer's Tagged ULP
        //# Buffer address references a ULP Buffer address that is 64-bit
        //# aligned.
        let word = span
            .word()
            .ok_or_else(|| fault(TerminateCode::RDMAP_CATASTROPHIC_STREAM))?;
        let original = word.update(|old| match r.op {
            AtomicOp::FETCH_ADD => masked_add(old, r.add_swap, r.add_swap_mask),
            _ if (r.compare ^ old) & r.compare_mask == 0 => {
                old & !r.add_swap_mask | r.add_swap & r.add_swap_mask
            }
            _ => old,
        });
        self.respond(
            Response::Atomic {
                request_id: r.request_id,
                original,
            },
            header,
            ulpdu_len,
        )
    }

    fn atomic_response<H: Host>(
        &mut self,
        header: &Header,
        r: &AtomicResponse,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<(), RxFault> {
        let Some(awaited) = self
            .sq
            .awaited
            .front()
            .filter(|a| a.atomic && a.seq == r.request_id)
            .copied()
        else {
            return Err(RxFault::segment(
                TerminateCode::RDMAP_UNEXPECTED_OPCODE,
                header,
                ulpdu_len,
            )
            .request(WcStatus::BadResponse));
        };
        let places = Places {
            memory: env.memory,
            who: self.accessor(),
            receive: &self.rx.taken,
            sends: &self.sq,
        };
        places
            .write(
                Target::Sink {
                    seq: awaited.seq,
                    off: 0,
                },
                0,
                &r.original.to_ne_bytes(),
            )
            .map_err(|_| RxFault::local().request(WcStatus::LocalProtection))?;
        self.answered(env.host);
        Ok(())
    }

    fn immediate<H: Host>(
        &mut self,
        header: &Header,
        h: &UntaggedHeader,
        immediate: Immediate,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<Step, RxFault> {
        if immediate.belongs_to_send() {
            self.rx.immediate = Some((immediate.value(), h.opcode.solicited()));
            self.advance_msn(0);
            return Ok(Step::Again);
        }
        //= rfc7306 section 6.3
        //# One Immediate Data or Immediate Data with SE Message MUST consume
        if !self.take_receive(env.host) {
            return match self.config.receiver_not_ready {
                ReceiverNotReady::Hold => Ok(Step::Hold),
                ReceiverNotReady::Terminate => Err(RxFault::segment(
                    TerminateCode::DDP_UNTAGGED_NO_BUFFER,
                    header,
                    ulpdu_len,
                )),
            };
        }
        self.advance_msn(0);
        let byte_len = core::mem::take(&mut self.rx.last_write_len);
        let mut cqe = self.receive_cqe(WcOpcode::RecvWriteImm, byte_len);
        cqe.flags |= WcFlags::WITH_IMM;
        cqe.imm_or_stag = immediate.value();
        if h.opcode.solicited() {
            cqe.flags |= WcFlags::SOLICITED;
        }
        self.finish_receive(cqe, env.host);
        Ok(Step::Again)
    }
}

/// Adds field by field; a set bit of `mask` is the top bit of a field, and drops the carry out of it
/// (RFC 7306 section 5.1.1).
const fn masked_add(a: u64, b: u64, mask: u64) -> u64 {
    // The top bits are added without carry, so no field can reach into the next.
    ((a & !mask).wrapping_add(b & !mask)) ^ ((a ^ b) & mask)
}

#[cfg(test)]
mod tests {
    use super::masked_add;
    use proptest::prelude::*;

    /// The pseudocode of RFC 7306 section 5.1.1.
    fn by_the_book(original: u64, add: u64, mask: u64) -> u64 {
        let (mut carry, mut result) = (0u64, 0u64);
        for bit in 0..64 {
            let at = 1u64 << bit;
            let sum = carry + u64::from(original & at != 0) + u64::from(add & at != 0);
            if sum & 1 == 1 {
                result |= at;
            }
            carry = u64::from(sum & 2 != 0 && mask & at == 0);
        }
        result
    }

    proptest! {
        #[test]
        fn masked_add_is_the_rfcs(a: u64, b: u64, m: u64) {
            prop_assert_eq!(masked_add(a, b, m), by_the_book(a, b, m));
            prop_assert_eq!(masked_add(a, b, 0), a.wrapping_add(b));
        }
    }
}
