//! Untagged messages for the RNIC itself: Read Requests, atomics and their responses, immediate
//! data, and Terminate (RFC 5040 sections 5.2 and 5.4, RFC 7306 sections 5 and 6).

use super::admit::Refusal;
use super::place::Target;
use super::response::Response;
use super::rx::Step;
use super::{Env, Host, QueuePair};
use crate::memory::AccessError;
use crate::{Access, WcFlags, WcOpcode};
use iwarp_proto::ddp::{Header, UNTAGGED_HEADER_LEN, UntaggedHeader};
use iwarp_proto::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest, Terminate,
    TerminateCode,
};

impl QueuePair {
    /// Processes an untagged message for the RNIC itself, except for Read Requests. Each fits one
    /// segment.
    #[inline(never)]
    pub(super) fn control<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        let h = match UntaggedHeader::parse(ulpdu) {
            Ok(h) => h,
            Err(e) => return self.refuse_segment(Refusal::Header(e), ulpdu, env.host),
        };
        let payload = ulpdu.get(UNTAGGED_HEADER_LEN..).unwrap_or(&[]);
        let step = match h.opcode {
            Opcode::ATOMIC_REQUEST => self.atomic_request(h, payload, env),
            Opcode::ATOMIC_RESPONSE => self.atomic_response(h, payload, env),
            Opcode::TERMINATE => {
                self.terminate(payload, env.host);
                return Step::Again;
            }
            // Immediate data, solicited or not.
            _ => self.immediate(h, payload, env),
        };
        match step {
            Ok(step) => step,
            Err(refusal) => self.refuse_segment(refusal, ulpdu, env.host),
        }
    }

    #[inline(never)]
    pub(super) fn receive_read_request<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &mut Env<'_, H>,
    ) -> Step {
        let h = match UntaggedHeader::parse(ulpdu) {
            Ok(h) => h,
            Err(e) => return self.refuse_segment(Refusal::Header(e), ulpdu, env.host),
        };
        let payload = ulpdu.get(UNTAGGED_HEADER_LEN..).unwrap_or(&[]);
        match self.read_request(h, payload, env) {
            Ok(()) => Step::Next,
            Err(refusal) => self.refuse_segment(refusal, ulpdu, env.host),
        }
    }

    #[cold]
    fn terminate<H: Host>(&mut self, payload: &[u8], host: &mut H) {
        //= rfc5040 section 5.4
        //# On a single RDMAP Stream, the RDMAP layer MUST guarantee placement of a
        //# single Terminate Message.
        self.count_message();
        // Errors in a Terminate are ignored: the stream is over, and a Terminate is never answered.
        //= rfc5040 section 5.4
        //# * One Terminate Message MUST consume one Untagged Buffer.
        let terminate = Terminate::parse(payload).map(|(t, _)| t);
        let unknown = Terminate::new(TerminateCode::RDMAP_OPERATION_UNSPECIFIED);
        self.terminated_by_peer(&terminate.unwrap_or(unknown), host);
    }

    #[inline(always)]
    fn read_request<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: &[u8],
        env: &Env<'_, H>,
    ) -> Result<(), Refusal> {
        self.admit_control(h, payload, ReadRequest::LEN)?;
        let r = ReadRequest::parse(payload).ok_or(Refusal::MALFORMED)?;
        //= rfc5040 section 5.2.1
        //# The Remote Peer's RDMAP layer MUST process an RDMA Read Request Message.
        //= rfc5040 section 5.2.1
        //# A valid RDMA Read Request Message MUST NOT be delivered to the Data
        //# Sink's ULP (i.e., it is processed by the RDMAP layer).
        //= rfc5040 section 5.2.1
        //# If the Data Source receives a valid RDMA Read Request Message, it MUST
        //# respond with a valid RDMA Read Response Message.
        //= rfc5040 section 5.5
        //# RDMA Read Request Messages, including zero-length RDMA Read Requests,
        //# MUST NOT start processing at the Remote Peer until they have been
        //# Delivered to RDMAP by DDP.
        //= rfc5040 section 5.5
        //# RDMA Read Response Message processing at the Remote Peer (reading the
        //# specified Tagged Buffer) MUST be started only after the RDMA Read
        //# Request Message has been Delivered by the DDP layer (thus, all previous
        //# RDMA Messages have been properly submitted for ordered Placement).
        //= rfc5040 section 5.2.1
        //# If the Data Source receives a non-zero-length RDMA Read Message Size,
        //# the Data Source RDMAP MUST validate the Data Source STag and Data Source
        //# Tagged Offset contained in the RDMA Read Request Header.
        //= rfc5040 section 7.2
        //# The Data Source STag MUST be valid.
        //= rfc5040 section 7.2
        //# The Data Source STag MUST be associated to this RDMAP Stream.
        //= rfc5040 section 7.2
        //# The Data Source Tagged Offset MUST fall in the range of legal offsets
        //# associated with the Data Source STag.
        //= rfc5040 section 7.2
        //# The sum of the Data Source Tagged Offset and the RDMA Read Message Size
        //# MUST fall in the range of legal offsets associated with the Data Source
        //# STag.
        //= rfc5040 section 7.2
        //# The sum of the Data Source Tagged Offset and the RDMA Read Message Size
        //# MUST NOT cause the Data Source Tagged Offset to wrap.
        if r.size > 0 && !self.remote.contains(Access::REMOTE_READ) {
            return Err(Refusal::Request(AccessError::AccessDenied));
        }
        let range = (r.source_stag, r.source_to, r.size);
        env.memory
            .permits(range, Access::REMOTE_READ, self.accessor())
            .map_err(Refusal::Request)?;
        self.respond(Response::Read(r))?;
        //= rfc5040 section 5.2.1
        //# One RDMA Read Request Message MUST consume one Untagged Buffer.
        self.advance_msn(h.qn);
        Ok(())
    }

    /// Queues a response, if the IRD permits it.
    #[inline(always)]
    fn respond(&mut self, response: Response) -> Result<(), Refusal> {
        //= rfc5040 section 6.1
        //# For inbound RDMA Read Requests, the RDMAP layer MUST NOT exceed
        //# the maximum number of outstanding, inbound RDMA Read Requests that
        //# were negotiated between the ULP and the Local Peer's RDMAP layer.
        // If no Reads were granted, only an RTR message by Read is allowed, which reads nothing.
        let is_empty_read = matches!(response, Response::Read(ReadRequest { size: 0, .. }));
        if self.responses.limit() == 0 && !is_empty_read || !self.responses.push(response) {
            return Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_NO_BUFFER));
        }
        self.counters.rx_requests = self.counters.rx_requests.wrapping_add(1);
        Ok(())
    }

    fn atomic_request<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: &[u8],
        env: &Env<'_, H>,
    ) -> Result<Step, Refusal> {
        self.admit_control(h, payload, AtomicRequest::LEN)?;
        let r = AtomicRequest::parse(payload).ok_or(Refusal::MALFORMED)?;
        //= rfc7306 section 5.2.1
        //# One Atomic Operation Request Message MUST consume one Untagged Buffer.
        //= rfc7306 section 5.2.1
        //# The Responder's RDMAP layer MUST process an Atomic Operation Request
        //# Message.
        //= rfc7306 section 5.2.1
        //# A valid Atomic Operation Request Message MUST NOT be delivered to the
        //# Responder's ULP (i.e., it is processed by the RDMAP layer).
        //= rfc7306 section 5.2.1
        //# The Responder MUST process the Atomic Operation Request Messages in the
        //# order they were sent.
        //= rfc7306 section 5.2.1
        //# If the Responder receives a valid Atomic Operation Request Message, it
        //# MUST respond with a valid Atomic Operation Response Message.
        //= rfc7306 section 5.4
        //# If more than one outstanding Atomic Request Message is supported by both
        //# peers, the Atomic Operation Request Messages MUST be processed in the
        //# order they were delivered by the DDP layer on the Responder.
        //= rfc7306 section 5.4
        //# Atomic Operation Response Messages MUST be submitted to the DDP layer on
        //# the Responder in the order the Atomic Operation Request Messages were
        //# Delivered by DDP.
        //= rfc7306 section 5.4
        //# 3. Atomic Operation Request Messages MUST NOT start processing at the
        //# Responder until they have been Delivered to RDMAP by DDP.
        //= rfc7306 section 5.4
        //# 5. Atomic Operation Response Message processing at the Responder MUST be
        //# started only after the Atomic Operation Request Message has been Delivered
        //# by the DDP layer (thus, all previous RDMA Messages on that DDP Stream have
        //# been Delivered).
        let original = self.execute_atomic(&r, env)?;
        self.respond(Response::Atomic {
            request_id: r.request_id,
            original,
        })?;
        self.advance_msn(h.qn);
        Ok(Step::Next)
    }

    /// Performs an atomic operation. Returns the word's old value.
    fn execute_atomic<H: Host>(&self, r: &AtomicRequest, env: &Env<'_, H>) -> Result<u64, Refusal> {
        //= rfc7306 section 5.2.1
        //# At the Responder, an error MUST be surfaced in response to delivery to
        //# the Remote Peer's RDMAP layer of an Atomic Operation Request Message
        //# with an Atomic Operation Code that the RNIC does not support.
        //= rfc7306 section 5.2.1
        //# All Atomic Operation Codes from Figure 5 MUST be implemented by an RNIC
        //# that supports Atomic Operations.
        if r.op != AtomicOp::FETCH_ADD && r.op != AtomicOp::CMP_SWAP {
            return Err(Refusal::Protocol(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        }
        if self.responses.is_full() || self.responses.limit() == 0 {
            return Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_NO_BUFFER));
        }
        if !self.remote.contains(Access::REMOTE_ATOMIC) {
            return Err(Refusal::Request(AccessError::AccessDenied));
        }
        //= rfc7306 section 8.2
        //# The RDMAP layer MUST validate that the Remote Peer's Tagged ULP
        //# Buffer address references a ULP Buffer address that is 64-bit
        //# aligned.
        //= rfc7306 section 5.1.1
        //# FetchAdd Atomic Operations MUST target ULP Buffer addresses that are
        //# 64-bit aligned.
        //= rfc7306 section 5.1.1
        //# FetchAdd Atomic Operations that target ULP Buffer addresses that are not
        //# 64-bit aligned MUST be surfaced as errors, and the Responder's memory
        //# MUST NOT be modified in such cases.
        //= rfc7306 section 5.1.1
        //# Additionally, an error MUST be surfaced and a terminate message MUST be
        //# generated.
        //= rfc7306 section 5.1.2
        //# CmpSwap Atomic Operations MUST target ULP Buffer addresses that are
        //# 64-bit aligned.
        //= rfc7306 section 5.1.2
        //# The operation MUST NOT be performed,
        //= rfc7306 section 5.1.2
        //# The Responder's memory MUST NOT be modified,
        //= rfc7306 section 5.1.2
        //# The result MUST be surfaced as an error, and
        //= rfc7306 section 5.1.2
        //# A terminate message MUST be generated.
        //= rfc7306 section 8.2
        //# On incoming Atomic requests the following additional validation MUST be
        //# performed:
        //= rfc7306 section 8.2
        //# In the case of an error, the RDMAP layer MUST generate a Terminate
        //# Message indicating RDMA Layer Remote Operation Error with Error Code
        //# Name "Catastrophic error, localized to RDMAP Stream" as described in
        //# Section 4.8 of RFC 5040.
        //= rfc7306 section 5.2.1
        //# The Remote Tagged Offset MAY start at an arbitrary offset but MUST represent
        //# a ULP Buffer address that is 64-bit aligned.
        //= rfc7306 section 5
        //# An RNIC that supports Atomic Operations as specified in this document
        //# MUST implement both the FetchAdd operation as specified in Section 5.1.1
        //# and the CmpSwap operation as specified in Section 5.1.2.
        let change = |old| match r.op {
            AtomicOp::FETCH_ADD => masked_add(old, r.add_swap, r.add_swap_mask),
            //= rfc7306 section 5.1.2
            //# After the operation, the remote data Buffer MUST contain the "Original
            //# Remote Data Value" (if comparison did not match) or the masked "Swap
            //# Data" (if the comparison did match).
            _ if (r.compare ^ old) & r.compare_mask == 0 => {
                old & !r.add_swap_mask | r.add_swap & r.add_swap_mask
            }
            _ => old,
        };
        let old = env
            .memory
            .update_word((r.stag, r.to), self.accessor(), change)
            .map_err(Refusal::Request)?;
        old.ok_or(Refusal::Protocol(TerminateCode::RDMAP_CATASTROPHIC_STREAM))
    }

    fn atomic_response<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<Step, Refusal> {
        self.admit_control(h, payload, AtomicResponse::LEN)?;
        let r = AtomicResponse::parse(payload).ok_or(Refusal::MALFORMED)?;
        let Some(awaited) = self
            .sq
            .awaited
            .front()
            .filter(|a| a.atomic && a.seq == r.request_id)
            .copied()
        else {
            return Err(Refusal::Answer(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        };
        self.places(env.memory)
            .write(
                Target::Sink {
                    seq: awaited.seq,
                    off: 0,
                },
                0,
                //= rfc7306 section 5.2.2
                //# The RDMAP layer MUST Deliver the Atomic Operation Response Message to
                //# the ULP.
                //= rfc7306 section 5.4
                //# For an Atomic Operation, the Requester MUST NOT consider the contents of
                //# the Tagged Buffer at the Responder to be modified by that specific
                //# Atomic Operation until the Atomic Operation Response Message has been
                //# Delivered to RDMAP at the Requester.
                //= rfc7306 section 5.4
                //# An Atomic Operation MUST NOT be Completed at the Requester until the DDP
                //# layer Delivers the associated incoming Atomic Operation Response
                //# Message.
                &r.original.to_ne_bytes(),
            )
            .map_err(|_| Refusal::Sink)?;
        // Responses are counted in `finish_response`.
        self.expect_next(h.qn);
        Ok(self.finish_response(env))
    }

    fn immediate<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<Step, Refusal> {
        self.admit_control(h, payload, Immediate::LEN)?;
        if self.rx.receiving {
            // Immediate data must not interrupt a Send on the same queue.
            return Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_INVALID_MSN));
        }
        let immediate = Immediate::parse(payload).ok_or(Refusal::MALFORMED)?;
        if self.rx.immediate.is_some() {
            // The Send of the earlier immediate data must come first.
            return Err(Refusal::Protocol(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        }
        if immediate.belongs_to_send() {
            self.rx.immediate = Some(immediate.value());
            self.advance_msn(0);
            return Ok(Step::Next);
        }
        if self.drops_messages() && self.follows_dropped_write() {
            return Ok(self.discard_immediate());
        }
        //= rfc7306 section 6.3
        //# One Immediate Data or Immediate Data with SE Message MUST consume
        if !self.take_receive(env.host) {
            let ulpdu_len = UNTAGGED_HEADER_LEN.wrapping_add(payload.len());
            self.no_receive(Header::Untagged(h), ulpdu_len as u16, env.host)?;
            return Ok(match self.rx.dropping {
                true => self.discard_immediate(),
                false => Step::Hold,
            });
        }
        self.advance_msn(0);
        //= rfc7306 section 6.3
        //# At the Remote Peer, the Immediate Data and Immediate Data with SE
        //# Messages MUST be Delivered to the Remote Peer's ULP in the order they
        //# were sent.
        let byte_len = core::mem::take(&mut self.rx.last_write_len);
        let mut cqe = self.receive_cqe(WcOpcode::RecvWriteImm, byte_len);
        cqe.flags |= WcFlags::WITH_IMM;
        cqe.imm_or_stag = immediate.value();
        if h.opcode.solicited() {
            cqe.flags |= WcFlags::SOLICITED;
        }
        self.finish_counted_receive(cqe, env.host);
        Ok(Step::Next)
    }

    #[cold]
    fn discard_immediate(&mut self) -> Step {
        self.rx.dropping = false;
        self.rx.last_write_len = 0;
        self.advance_msn(0);
        Step::Next
    }
}

/// Adds field by field; a set bit of `mask` is the top bit of a field, and the carry out of it is
/// dropped (RFC 7306 section 5.1.1).
const fn masked_add(a: u64, b: u64, mask: u64) -> u64 {
    // The top bits are added without carry, so that no field overflows into the next one.
    ((a & !mask).wrapping_add(b & !mask)) ^ ((a ^ b) & mask)
}

#[cfg(test)]
mod tests {
    use super::masked_add;
    use proptest::prelude::*;

    /// The pseudocode of RFC 7306 section 5.1.1.
    fn reference_add(original: u64, add: u64, mask: u64) -> u64 {
        let (mut carry, mut result) = (0u64, 0u64);
        for bit in 0..64 {
            let bit = 1u64 << bit;
            let sum = carry + u64::from(original & bit != 0) + u64::from(add & bit != 0);
            if sum & 1 == 1 {
                result |= bit;
            }
            carry = u64::from(sum & 2 != 0 && mask & bit == 0);
        }
        result
    }

    /// Two fields of 16 bits in the low 32 bits: no carry leaves a field.
    #[test]
    fn masked_add_keeps_fields_apart() {
        let cases = [
            (0x00ff_00ff, 0x0001_0001, 0x0100_0100),
            (0xffff_ffff, 0x0001_0001, 0),
            (0x7fff_7fff, 0x0001_8001, 0x8000_0000),
            (0x8000_8000, 0x8000_0000, 0x0000_8000),
            (0x8000_0001, 0x0000_0001, 0x8000_0002),
            (0x1234_ffff, 0x0000_ffff, 0x1234_fffe),
        ];
        for (a, b, sum) in cases {
            assert_eq!(masked_add(a, b, 0x8000_8000), sum, "{a:x} {b:x}");
        }
        assert_eq!(masked_add(u64::MAX, 1, 0), 0);
    }

    proptest! {
        #[test]
        fn masked_add_matches_rfc_pseudocode(a: u64, b: u64, m: u64) {
            prop_assert_eq!(masked_add(a, b, m), reference_add(a, b, m));
            prop_assert_eq!(masked_add(a, b, 0), a.wrapping_add(b));
        }
    }
}
