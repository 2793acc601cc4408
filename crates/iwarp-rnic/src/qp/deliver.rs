//! Processing of received segments: each is admitted (`admit`) and placed (`place`); the last one
//! of a message is delivered (RFC 5040 section 5, RFC 7306 sections 5 and 6).

use super::admit::Refusal;
use super::fault::RxFault;
use super::headers::EMPTY_MESSAGE_STAG;
use super::life::Heard;
use super::place::Target;
use super::rx::{Invalidating, Step};
use super::send_queue::Awaited;
use super::{Direction, Env, Events, Host, QueuePair};
use crate::tally::Counted;
use crate::{Cqe, Sge, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::ddp::{
    Header, HeaderError, Stag, TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader,
};
use iwarp_proto::rdmap::{Opcode, ReadRequest};

impl QueuePair {
    /// Returns `true` while the arrival of the next FPDU has an effect regardless of its contents
    /// ([`on_first_fpdu`](Self::on_first_fpdu)).
    #[inline]
    pub(super) const fn expects_first_fpdu(&self) -> bool {
        !self.life.has_first_fpdu() || self.rx.rtr_send_expected
    }

    /// Applies the effects of a stream's first FPDUs. Returns `true` if this FPDU needs no further
    /// processing.
    #[cold]
    pub(super) fn on_first_fpdu(&mut self, ulpdu: &[u8]) -> bool {
        if self.life.has_first_fpdu() {
            // Only the first FPDU can be the RTR message.
            self.rx.rtr_send_expected = false;
            return false;
        }
        //= rfc5044 section 7.1.2
        //# MPA Responder mode implementations MUST receive and validate at least one FPDU before sending any FPDUs or Markers.
        if self.life.fpdu_arrived() == Heard::Established {
            self.events |= Events::ESTABLISHED;
        }
        // RFC 6581 section 9.2 specifies a zero-length FULPDU. An FPDU without a header is also
        // accepted.
        let is_rtr = ulpdu.is_empty() && self.rx.rtr_send_expected;
        if is_rtr {
            self.rx.rtr_send_expected = false;
        }
        is_rtr
    }

    //= rfc5044 section 5.1
    //# MPA receivers are REQUIRED to be able to operate correctly even if
    //# alignment is lost (see Section 6).
    //= rfc5044 section A.4
    //# However, MPA receivers MUST NOT depend on FPDU Alignment on TCP segment
    //# boundaries.
    /// Processes one complete ULPDU. After `Step::Hold` nothing has changed, and the caller must
    /// pass the ULPDU again.
    #[inline(never)]
    pub(super) fn receive_ulpdu<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        //= rfc5044 section 3
        //# On receive, MPA MUST pass each ULPDU with its length to DDP when it has
        //# been validated.
        //= rfc5041 section 3
        //# 7. On receive, the LLP MUST provide the length of the DDP Segment received.
        match Header::parse_opcode(ulpdu) {
            Ok(Opcode::READ_RESPONSE) => self.receive_read_response(ulpdu, env),
            Ok(Opcode::WRITE) => self.receive_lone_write(ulpdu, env),
            Ok(opcode) if opcode.is_send() => self.receive_lone_send(ulpdu, env),
            Ok(Opcode::READ_REQUEST) => self.receive_read_request(ulpdu, env),
            Ok(_) => self.control(ulpdu, env),
            Err(e) => self.refuse_segment(Refusal::Header(e), ulpdu, env.host),
        }
    }

    /// Like [`receive_ulpdu`](Self::receive_ulpdu), inlined in the loop over FPDUs that are neither
    /// Writes nor Sends.
    #[inline(always)]
    pub(super) fn receive_other<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        if Header::is_any_of(ulpdu, &[Opcode::READ_RESPONSE]) {
            self.receive_read_response(ulpdu, env)
        } else if Header::is_any_of(ulpdu, &[Opcode::READ_REQUEST]) {
            self.receive_read_request(ulpdu, env)
        } else {
            self.receive_ulpdu(ulpdu, env)
        }
    }

    /// Like [`receive_ulpdu`](Self::receive_ulpdu), for a ULPDU with the control octets of a Write.
    #[inline(always)]
    pub(super) fn receive_write<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        match self.write(ulpdu, env) {
            Ok(()) => Step::Next,
            Err(refusal) => self.refuse_segment(refusal, ulpdu, env.host),
        }
    }

    /// Refuses or drops a segment of a Write that is invalid or may not be placed.
    #[cold]
    #[inline(never)]
    fn refuse_write<H: Host>(&mut self, refusal: Refusal, ulpdu: &[u8], host: &mut H) -> Step {
        match (refusal, TaggedHeader::decode(ulpdu)) {
            (Refusal::Memory(_), Some(h)) if self.drops_messages() => {
                let payload = ulpdu.len().saturating_sub(TAGGED_HEADER_LEN) as u32;
                self.rx.dropped_write = Some(self.counters.rx_messages);
                self.end_write_segment(h, payload);
                Step::Next
            }
            _ => self.refuse_segment(refusal, ulpdu, host),
        }
    }

    /// Returns `true` if the last complete message is an RDMA Write that was dropped; immediate
    /// data that follow it are dropped as well.
    pub(super) fn follows_dropped_write(&self) -> bool {
        let dropped_at = self.rx.dropped_write;
        dropped_at.is_some_and(|before| before.wrapping_add(1) == self.counters.rx_messages)
    }

    /// Like [`receive_ulpdu`](Self::receive_ulpdu), for a ULPDU with the control octets of a Send.
    #[inline(always)]
    pub(super) fn receive_send<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        let h = match UntaggedHeader::parse(ulpdu) {
            Ok(h) => h,
            Err(e) => return self.refuse_segment(Refusal::Header(e), ulpdu, env.host),
        };
        let payload = ulpdu.get(UNTAGGED_HEADER_LEN..).unwrap_or(&[]);
        let len = payload.len() as u32;
        match self.admit_send(h, len, ulpdu.len() as u16, env.host) {
            Ok(true) => {}
            Ok(false) => return self.without_receive(h, len, env),
            Err(refusal) => return self.refuse_segment(refusal, ulpdu, env.host),
        }
        match self.place(Target::Receive { off: h.mo }, payload, env) {
            Ok(()) => self.finish_send(h, len, env),
            Err(refusal) => self.refuse_segment(refusal, ulpdu, env.host),
        }
    }

    /// Drops or holds a segment of a Send that has no receive.
    #[cold]
    #[inline(never)]
    fn without_receive<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        match self.rx.dropping {
            true => self.end_send_segment(h, payload, env),
            false => Step::Hold,
        }
    }

    /// Like [`receive_write`](Self::receive_write), but outside the loop: for a Write that may have
    /// to be dropped, and for an empty Write, which may be a note.
    #[inline(never)]
    fn receive_lone_write<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        if let Err(refusal) = self.write(ulpdu, env) {
            return self.refuse_write(refusal, ulpdu, env.host);
        }
        if ulpdu.len() == TAGGED_HEADER_LEN
            && let Some(h) = TaggedHeader::decode(ulpdu)
        {
            if h.stag == EMPTY_MESSAGE_STAG {
                // Notes and reminders are not messages of the peer's program.
                self.rx.writes = self.rx.writes.wrapping_sub(1);
            }
            return match self.process_note(h, env.host) {
                Ok(()) => Step::Next,
                Err(refusal) => self.refuse_segment(refusal, ulpdu, env.host),
            };
        }
        Step::Next
    }

    #[inline(never)]
    fn receive_lone_send<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        self.receive_send(ulpdu, env)
    }

    #[inline(never)]
    fn receive_read_response<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Step {
        match self.read_response(ulpdu, env) {
            Ok(step) => step,
            Err(refusal) => self.refuse_segment(refusal, ulpdu, env.host),
        }
    }

    /// Refuses a segment, which ends the stream.
    #[cold]
    #[inline(never)]
    pub(super) fn refuse_segment<H: Host>(
        &mut self,
        refusal: Refusal,
        ulpdu: &[u8],
        host: &mut H,
    ) -> Step {
        let header = Header::decode(ulpdu);
        let request = match header {
            Some(Header::Untagged(h)) if h.opcode == Opcode::READ_REQUEST => ulpdu
                .get(UNTAGGED_HEADER_LEN..)
                .and_then(ReadRequest::parse),
            _ => None,
        };
        let fault = self.fault_of(refusal, header, request, ulpdu.len() as u16);
        self.fail_stream(&fault, host);
        Step::Failed
    }

    /// Refuses a segment of which only the header is still known, which ends the stream.
    #[cold]
    #[inline(never)]
    pub(super) fn refuse_by_header<H: Host>(
        &mut self,
        refusal: Refusal,
        header: Option<Header>,
        ulpdu_len: u16,
        host: &mut H,
    ) -> Step {
        let fault = self.fault_of(refusal, header, None, ulpdu_len);
        self.fail_stream(&fault, host);
        Step::Failed
    }

    #[inline(always)]
    fn write<H: Host>(&mut self, ulpdu: &[u8], env: &Env<'_, H>) -> Result<(), Refusal> {
        let h = TaggedHeader::decode(ulpdu).ok_or(Refusal::Header(HeaderError::TooShort))?;
        let payload = ulpdu.get(TAGGED_HEADER_LEN..).unwrap_or(&[]);
        let len = payload.len() as u32;
        self.admit_write(len)?;
        let target = Target::Tagged {
            stag: h.stag,
            to: h.to,
        };
        self.place(target, payload, env)?;
        self.finish_write(h, len);
        Ok(())
    }

    #[inline(always)]
    fn read_response<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<Step, Refusal> {
        let h = TaggedHeader::decode(ulpdu).ok_or(Refusal::Header(HeaderError::TooShort))?;
        let payload = ulpdu.get(TAGGED_HEADER_LEN..).unwrap_or(&[]);
        let len = payload.len() as u32;
        let target = self.admit_read_response(h, len)?;
        self.place(target, payload, env)?;
        Ok(self.finish_read_response(h, len, env))
    }

    #[inline(always)]
    fn place<H: Host>(
        &self,
        target: Target,
        payload: &[u8],
        env: &Env<'_, H>,
    ) -> Result<(), Refusal> {
        //= rfc5041 section 5.2
        //# At the Data Sink, the DDP layer MUST Place the ULP Payload contained in
        //# all valid incoming DDP Segments associated with a DDP Message into the
        //# ULP Buffer.
        //= rfc5041 section 7.1
        //# If the DDP layer detects any of the receive errors listed in this
        //# section, it MUST cease placing the remainder of the DDP Segment and
        //# report the error(s) to the ULP.
        let places = self.places(env.memory);
        match places.write(target, 0, payload) {
            Ok(()) => Ok(()),
            Err(e) => Err(Refusal::Memory(e)),
        }
    }

    /// Advances the queue after a complete untagged message, and counts it.
    pub(super) fn advance_msn(&mut self, qn: u32) {
        self.expect_next(qn);
        self.count_message();
    }

    pub(super) fn expect_next(&mut self, qn: u32) {
        if let Some(msn) = self.rx.msn.get_mut(qn as usize) {
            *msn = msn.wrapping_add(1);
        }
    }

    #[inline(always)]
    pub(super) const fn count_message(&mut self) {
        self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
    }

    #[inline(always)]
    pub(super) fn take_receive<H: Host>(&mut self, host: &mut H) -> bool {
        self.rx.receiving = if !host.receiver_ready() {
            false
        } else if self.config.shared_receive {
            // A receive that an earlier message did not need, or the next posted one.
            core::mem::take(&mut self.tagged.spare)
                || host.take_shared_receive(&mut self.rx.receive)
        } else {
            self.rq.take(&mut self.rx.receive)
        };
        self.rx.receiving
    }

    /// Ends the stream as required by RFC 5041 section 7.1, because a Send was held for the longest
    /// time that the policy allows.
    pub(super) fn hold_timed_out<H: Host>(&mut self, host: &mut H) {
        if let Some(missed) = self.rx.missed {
            self.fail_stream(&RxFault::no_buffer(&missed), host);
        }
    }

    /// Completes a segment that was read directly to its destination.
    pub(super) fn finish_direct<H: Host>(
        &mut self,
        header: &Header,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        match *header {
            Header::Tagged(h) if h.opcode == Opcode::READ_RESPONSE => {
                self.finish_read_response(h, payload, env)
            }
            Header::Tagged(h) => {
                self.finish_write(h, payload);
                Step::Next
            }
            Header::Untagged(h) => self.finish_send(h, payload, env),
        }
    }

    #[inline(always)]
    const fn count_payload(&mut self, payload: u32) {
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(payload as u64);
    }

    //= rfc5041 section 4.2
    //# At the Data Sink, DDP MUST provide the RsvdULP field to the ULP when the DDP
    //# Message is delivered.
    //= rfc5041 section 4.2
    //# At the Data Sink, the DDP MUST provide the STag field when the ULP Message
    //# is delivered.
    /// Completes a placed segment of the response to the oldest request.
    #[inline]
    fn finish_read_response<H: Host>(
        &mut self,
        h: TaggedHeader,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        self.count_payload(payload);
        if self.rx.rtr_response_due {
            self.rx.rtr_response_due = false;
            self.count_message();
        } else if h.last {
            return self.finish_response(env);
        } else if let Some(awaited) = self.sq.awaited.front_mut() {
            awaited.received = awaited.received.saturating_add(payload);
        }
        Step::Next
    }

    #[inline(always)]
    fn finish_write(&mut self, h: TaggedHeader, payload: u32) {
        self.count_payload(payload);
        self.end_write_segment(h, payload);
        if h.last && self.sq.tally.is_on() {
            self.tally_write();
        }
    }

    #[cold]
    #[inline(never)]
    fn tally_write(&mut self) {
        let octets = self.rx.last_write_len;
        self.sq.tally.add_remote(Counted::RemoteWrite, octets);
    }

    /// Ends a segment of an RDMA Write, whether or not its payload was placed.
    #[inline(always)]
    const fn end_write_segment(&mut self, h: TaggedHeader, payload: u32) {
        // `admit_write` has checked that this does not wrap.
        let message_len = self.rx.write_len.wrapping_add(payload);
        if h.last {
            //= rfc5040 section 5.1
            //# A valid RDMA Write Message MUST NOT be delivered to the Data Sink's ULP
            //# (i.e., it is placed by the DDP layer).
            self.rx.last_write_len = message_len;
            self.rx.write_len = 0;
            self.rx.writes = self.rx.writes.wrapping_add(1);
            self.count_message();
        } else {
            self.rx.write_len = message_len;
        }
    }

    #[inline(always)]
    fn finish_send<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        self.count_payload(payload);
        self.end_send_segment(h, payload, env)
    }

    /// Ends a segment of a Send, whether or not its payload was placed.
    #[inline(always)]
    fn end_send_segment<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        self.rx.message_off = self.rx.message_off.wrapping_add(payload);
        if !h.last {
            return Step::Next;
        }
        //= rfc5040 section 5.5
        //# At the Data Sink, an incoming Send Message MUST be Delivered to the ULP
        //# only after the DDP Message has been Delivered to the RDMAP layer by the
        //# DDP layer.
        //= rfc5041 section 4.1
        //# If the Last flag is set to one, the DDP Message payload MUST be
        //# Delivered to the ULP after:
        //= rfc5041 section 5.4
        //# At the Data Sink, DDP MUST Deliver a DDP Message if and only if all of
        //# the following are true:
        self.deliver_send(h, payload, env)
    }

    /// Completes the oldest request that awaits a response.
    pub(super) fn finish_response<H: Host>(&mut self, env: &mut Env<'_, H>) -> Step {
        let Some(awaited) = self.sq.awaited.pop() else {
            return Step::Next;
        };
        self.count_message();
        if awaited.invalidates | awaited.internal {
            return self.finish_special_response(&awaited, env);
        }
        self.complete_answered(&awaited, env.host);
        Step::Next
    }

    #[inline]
    fn complete_answered<H: Host>(&mut self, awaited: &Awaited, host: &mut H) {
        //= rfc5040 section 5.2.2
        //# The RDMAP layer MUST Deliver the RDMA Read Response Message to the ULP.
        //= rfc5040 section 5.5
        //# RDMA Read Response Messages MUST be Delivered to the ULP at the Remote
        //# Peer after they are Delivered to RDMAP by DDP and in the order that the
        //# they were Delivered to RDMAP.
        //= rfc5040 section 5.5
        //# An RDMA Read operation MUST NOT be Completed at the Local Peer until the
        //# DDP layer Delivers the associated incoming RDMA Read Response Message.
        //= rfc5040 section 5.5
        //# This simplifies Local Peer Completion processing for RDMA Reads in that
        //# a Delivered RDMA Read Response MUST be sufficient to Complete the RDMA
        //# Read operation.
        if self.acknowledge.enabled {
            self.acknowledged(awaited, host);
        } else {
            self.complete_request(awaited.seq, host);
        }
        // A draining send queue may have waited for this response.
        self.note_drained();
    }

    /// Like [`finish_response`](Self::finish_response), for a Read with Invalidate or an internal
    /// Read.
    #[cold]
    #[inline(never)]
    fn finish_special_response<H: Host>(
        &mut self,
        awaited: &Awaited,
        env: &mut Env<'_, H>,
    ) -> Step {
        if awaited.invalidates {
            return self.finish_invalidating_read(awaited, env);
        }
        self.finish_internal_read(awaited, env.host);
        self.complete_answered(awaited, env.host);
        Step::Next
    }

    /// Invalidates the STag of a Read's sink and completes the Read. If the memory is in use, the
    /// Read completes later.
    #[cold]
    #[inline(never)]
    fn finish_invalidating_read<H: Host>(
        &mut self,
        awaited: &Awaited,
        env: &mut Env<'_, H>,
    ) -> Step {
        // A Read with Invalidate has one element.
        let sink = self.sq.first_sge_of(awaited.seq).map_or(Stag(0), Sge::stag);
        match env.memory.invalidate(sink, self.accessor(), false) {
            Ok(true) => {
                self.complete_answered(awaited, env.host);
                Step::Next
            }
            Ok(false) => {
                self.rx.invalidating = Some((sink, Invalidating::Read(*awaited)));
                Step::Again
            }
            // Another request has invalidated the STag meanwhile, or it cannot be invalidated.
            Err(_) => {
                self.fail_request(awaited.seq, WcStatus::LocalProtection, env.host);
                Step::Failed
            }
        }
    }

    #[inline(always)]
    fn deliver_send<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        let byte_len = core::mem::take(&mut self.rx.message_off);
        self.advance_msn(0);
        self.rx.last_write_len = 0;
        if !self.rx.receiving {
            return self.end_without_receive();
        }
        if h.opcode != Opcode::SEND || self.receives_out_of_line {
            return self.deliver_out_of_line(h, byte_len, payload, env);
        }
        //= rfc5040 section 5.3
        //# At the Remote Peer, the Send Message Type MUST be Delivered to the
        //# Remote Peer's ULP in the order they were sent.
        //= rfc5040 section 5.5
        //# Send Messages MUST be Delivered to the ULP at the Remote Peer after they
        //# are Delivered to RDMAP by DDP and in the order that they were Delivered
        //# to RDMAP.
        let cqe = self.send_cqe(h, byte_len);
        self.finish_receive(cqe, env.host);
        Step::Next
    }

    /// Delivers a Send that is solicited, invalidates an STag, is counted, or may have a tag.
    #[inline(never)]
    fn deliver_out_of_line<H: Host>(
        &mut self,
        h: UntaggedHeader,
        byte_len: u32,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        if h.opcode.invalidates() {
            return self.deliver_with_invalidate(h, byte_len, payload, env);
        }
        if self.config.match_tags {
            return self.deliver_tagged(h, byte_len, payload, env);
        }
        let cqe = self.send_cqe(h, byte_len);
        self.finish_counted_receive(cqe, env.host);
        Step::Next
    }

    /// Ends a Send that has no receive: the RTR message, or a dropped message.
    #[cold]
    const fn end_without_receive(&mut self) -> Step {
        if self.rx.dropping {
            self.rx.dropping = false;
            self.rx.immediate = None;
        } else {
            self.rx.rtr_send_expected = false;
        }
        Step::Next
    }

    #[inline(always)]
    pub(super) fn send_cqe(&mut self, h: UntaggedHeader, byte_len: u32) -> Cqe {
        //= rfc5041 section 5.4
        //# At the Data Sink, DDP MUST provide the ULP Message Length to the ULP
        //# when an Untagged DDP Message is Delivered.
        let mut cqe = self.receive_cqe(WcOpcode::Recv, byte_len);
        //= rfc5041 section 4.3
        //# At the Data Sink, DDP MUST provide RsvdULP field to the ULP when the ULP
        //# Message is Delivered.
        //= rfc5041 section 5.4
        //# At the Data Sink, DDP MUST provide the RsvdULP Field of the DDP Message to
        //# the ULP when the DDP Message is delivered.
        if h.opcode.solicited() {
            cqe.flags |= WcFlags::SOLICITED;
        }
        if let Some(imm) = self.rx.immediate.take() {
            cqe.flags |= WcFlags::WITH_IMM;
            cqe.imm_or_stag = imm;
        }
        cqe
    }

    /// Invalidates the STag of a Send with Invalidate and delivers the Send. If the memory is in
    /// use, the Send is delivered later.
    #[cold]
    #[inline(never)]
    fn deliver_with_invalidate<H: Host>(
        &mut self,
        h: UntaggedHeader,
        byte_len: u32,
        payload: u32,
        env: &mut Env<'_, H>,
    ) -> Step {
        let mut cqe = self.send_cqe(h, byte_len);
        //= rfc5040 section 7.2
        //# The Invalidate STag MUST be valid.
        //= rfc5040 section 5.3
        //# When the Send with Invalidate and Send with Solicited Event and
        //# Invalidate Message are Delivered to the Remote Peer's RDMAP layer, the
        //# RDMAP layer MUST:
        let stag = h.invalidate_stag;
        let Ok(complete) = env.memory.invalidate(stag, self.accessor(), true) else {
            let ulpdu_len = (UNTAGGED_HEADER_LEN as u32).wrapping_add(payload);
            let header = Some(Header::Untagged(h));
            return self.refuse_by_header(
                Refusal::Invalidation,
                header,
                ulpdu_len as u16,
                env.host,
            );
        };
        if self.config.match_tags {
            cqe.opcode = WcOpcode::TagNone;
        }
        cqe.flags |= WcFlags::WITH_INV;
        cqe.imm_or_stag = stag.0;
        if !complete {
            self.rx.invalidating = Some((stag, Invalidating::Receive(cqe)));
            return Step::Again;
        }
        self.finish_counted_receive(cqe, env.host);
        Step::Next
    }

    /// Completes the request that waits for an invalidation. Returns `false` if the memory is still
    /// in use.
    #[inline]
    pub(super) fn finish_invalidation<H: Host>(&mut self, env: &mut Env<'_, H>) -> bool {
        let Some((stag, ended)) = self.rx.invalidating else {
            return true;
        };
        if !env.memory.is_unused(stag) {
            return false;
        }
        self.rx.invalidating = None;
        match ended {
            Invalidating::Receive(cqe) => self.finish_counted_receive(cqe, env.host),
            Invalidating::Read(awaited) => self.complete_answered(&awaited, env.host),
        }
        true
    }

    pub(super) const fn receive_cqe(&self, opcode: WcOpcode, byte_len: u32) -> Cqe {
        Cqe {
            wr_id: self.rx.receive.wr_id,
            status: WcStatus::Success,
            opcode,
            byte_len,
            qp_num: self.config.qp_num,
            flags: WcFlags::empty(),
            imm_or_stag: 0,
            vendor_err: 0,
            timestamp_ns: 0,
            position: 0,
            account: 0,
        }
    }

    /// Completes the receive of a Send without adding it to the tally. Other receives complete in
    /// [`finish_counted_receive`](Self::finish_counted_receive), so that this is inlined once.
    #[inline(always)]
    fn finish_receive<H: Host>(&mut self, cqe: Cqe, host: &mut H) {
        self.rx.receiving = false;
        self.counters.completions = self.counters.completions.wrapping_add(1);
        host.complete(Direction::Recv, cqe);
    }

    #[cold]
    #[inline(never)]
    pub(super) fn finish_counted_receive<H: Host>(&mut self, cqe: Cqe, host: &mut H) {
        self.sq.tally.add(Counted::Recv, cqe.byte_len);
        self.finish_receive(cqe, host);
    }
}
