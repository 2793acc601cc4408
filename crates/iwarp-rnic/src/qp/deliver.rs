//! Processing of received segments: each is admitted (`admit`) and placed (`place`); the last one
//! of a message is delivered (RFC 5040 section 5, RFC 7306 sections 5 and 6).

use super::admit::Refusal;
use super::headers::EMPTY_MESSAGE_STAG;
use super::life::Heard;
use super::place::Target;
use super::rx::Step;
use super::{Env, Events, Host, QueuePair};
use crate::tally::Counted;
use iwarp_proto::ddp::{
    Header, HeaderError, TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader,
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
    pub(super) fn place<H: Host>(
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
    pub(super) const fn count_payload(&mut self, payload: u32) {
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(payload as u64);
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
}
