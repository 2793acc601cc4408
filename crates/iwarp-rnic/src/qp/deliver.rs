//! The meaning of received segments: the checks of RFC 5041 section 7.1 and RFC 5040 section 7.2, and the delivery of whole
//! messages (RFC 5040 section 5, RFC 7306 sections 5 and 6).

use super::fault::RxFault;
use super::life::Heard;
use super::place::{Places, Target};
use super::rx::{Missed, Step};
use super::{Direction, Env, Events, Host, QueuePair, ReceiverNotReady};
use crate::memory::AccessError;
use crate::{Access, Cqe, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::ddp::{Header, TaggedHeader, UntaggedHeader};
use iwarp_proto::rdmap::{Opcode, TerminateCode};

impl QueuePair {
    /// Parses and checks a header. The first valid one tells that the peer is in full operation.
    #[inline]
    pub(super) fn parse_header(
        &mut self,
        ulpdu: &[u8],
        ulpdu_len: usize,
    ) -> Result<Header, RxFault> {
        let header = Header::parse(ulpdu)
            .map_err(|e| RxFault::header(&e, Header::decode(ulpdu), ulpdu_len as u16))?;
        if !self.life.has_heard() {
            self.first_fpdu();
        }
        Ok(header)
    }

    fn first_fpdu(&mut self) {
        //= rfc5044 section 7.1.2
        //# MPA Responder mode implementations MUST receive and validate at least one FPDU before sending any FPDUs or Markers.
        if self.life.hear() == Heard::Established {
            self.events |= Events::ESTABLISHED;
        }
    }

    //= rfc5044 section 5.1
    //# MPA receivers are REQUIRED to be able to operate correctly even if
    //# alignment is lost (see Section 6).
    //= rfc5044 section A.4
    //# However, MPA receivers MUST NOT depend on FPDU Alignment on TCP segment
    //# boundaries.
    /// Processes one whole ULPDU. With `Step::Hold` nothing has changed and the ULPDU must be offered again.
    #[inline]
    pub(super) fn receive_ulpdu<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &mut Env<'_, H>,
    ) -> Result<Step, RxFault> {
        if ulpdu.is_empty() && !self.life.has_heard() && self.rx.rtr_send_expected {
            // RFC 6581 section 9.2 speaks of a zero-length FULPDU; we also accept an FPDU without a header.
            self.rx.rtr_send_expected = false;
            self.first_fpdu();
            return Ok(Step::Again);
        }
        //= rfc5044 section 3
        //# On receive, MPA MUST pass each ULPDU with its length to DDP when it has
        //# been validated.
        //= rfc5041 section 3
        //# 7. On receive, the LLP MUST provide the length of the DDP Segment received.
        let ulpdu_len = ulpdu.len() as u16;
        if self.life.has_heard() {
            // The RTR message is the first FPDU or none.
            self.rx.rtr_send_expected = false;
        } else {
            // For MPA the FPDU is valid, whatever is in it.
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
            receive: &self.rx.receive,
            sends: &self.sq,
        };
        //= rfc5041 section 5.2
        //# At the Data Sink, the DDP layer MUST Place the ULP Payload contained in
        //# all valid incoming DDP Segments associated with a DDP Message into the
        //# ULP Buffer.
        places
            .write(target, 0, payload)
            .map_err(|e| self.placement_fault(e, &header, ulpdu_len))?;
        self.finish_segment(&header, payload.len() as u32, ulpdu_len, env)?;
        Ok(Step::Again)
    }

    /// Checks a segment that carries user payload, and returns where the payload goes; `None` if it has to wait for a receive.
    #[inline]
    pub(super) fn admit<H: Host>(
        &mut self,
        header: &Header,
        payload: u32,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<Option<Target>, RxFault> {
        //= rfc5041 section 4.1
        //# If set to one, the ULP Payload carried in this DDP Segment MUST be
        //# Placed into a Tagged Buffer.
        //= rfc5041 section 4.1
        //# If set to zero, the ULP Payload carried in this DDP Segment MUST be
        //# Placed into an Untagged Buffer.
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
                //= rfc5040 section 7.2
                //# The DDP layer MUST validate all DDP Segment fields.
                //= rfc5041 section 7.1
                //# For non-zero-length Tagged DDP Segments, the segment MUST be validated
                //# before Placement by verifying:
                if payload > 0 && !self.remote.contains(Access::REMOTE_WRITE) {
                    return Err(self.placement_fault(AccessError::AccessDenied, header, ulpdu_len));
                }
                // Whole segments are refused, before anything is placed.
                env.memory
                    .permits(
                        (h.stag.0, h.to, payload),
                        Access::REMOTE_WRITE,
                        self.accessor(),
                    )
                    //= rfc5041 section 7.1
                    //# If the DDP layer detects any of the receive errors listed in this
                    //# section, it MUST cease placing the remainder of the DDP Segment and
                    //# report the error(s) to the ULP.
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
            // The answer to the RTR message: it has no payload, and no request waits for it.
            return match payload == 0 && h.last {
                true => Ok(Target::Receive { off: 0 }),
                false => Err(fault(TerminateCode::RDMAP_UNEXPECTED_OPCODE)),
            };
        }
        let Some(awaited) = self.sq.awaited.front().filter(|a| !a.atomic) else {
            return Err(fault(TerminateCode::RDMAP_UNEXPECTED_OPCODE));
        };
        // Some peers return STag 0 for a zero-length Read.
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

    /// Checks the message sequence number of a queue: only the next one is valid, since TCP keeps the order.
    pub(super) fn check_msn(
        &self,
        header: &Header,
        h: &UntaggedHeader,
        ulpdu_len: u16,
    ) -> Result<(), RxFault> {
        //= rfc5041 section 5.3
        //# MUST Deliver a DDP Message to the ULP at most once,
        //= rfc5041 section 5.3
        //# MUST Deliver DDP Messages to the ULP in the order they were sent by the
        //# Data Source.
        if self.rx.msn.get(h.qn as usize) != Some(&h.msn) {
            return Err(RxFault::segment(
                TerminateCode::DDP_UNTAGGED_INVALID_MSN,
                header,
                ulpdu_len,
            ));
        }
        Ok(())
    }

    pub(super) fn advance_msn(&mut self, qn: u32) {
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
        //= rfc5040 section 7.2
        //# The DDP layer MUST validate all Untagged DDP Segment fields.
        //= rfc5041 section 7.1
        //# For non-zero-length Untagged DDP Segments, the DDP Segment MUST be
        //# validated before Placement by verifying:
        self.check_msn(header, h, ulpdu_len)?;
        if h.mo != self.rx.message_off {
            return Err(RxFault::segment(
                TerminateCode::DDP_UNTAGGED_INVALID_MO,
                header,
                ulpdu_len,
            ));
        }
        if !self.rx.receiving {
            if self.rx.rtr_send_expected && payload == 0 && h.last && h.opcode == Opcode::SEND {
                // The RTR message is consumed by the RNIC and takes no receive (RFC 6581 section 9.2).
                return Ok(Some(Target::Receive { off: 0 }));
            }
            //= rfc5040 section 5.3
            //# One Send Message Type MUST consume one Untagged Buffer.
            //= rfc5040 section 5.3
            //# A zero-length Send Message Type MUST consume an Untagged Buffer at the
            //# Data Sink.
            //= rfc5041 section 7.1
            //# Implementers' note: DDP implementations SHOULD consider lack of an
            //# associated buffer as a system fault.
            //= rfc5041 section 7.1
            //# DDP implementations SHOULD NOT permit system faults to occur repeatedly or
            //# frequently.
            if !self.take_receive(env.host) {
                self.no_receive(header, ulpdu_len)?;
                return Ok(None);
            }
        }
        //= rfc5041 section 5.2
        //# The ULP Message Length MUST be less than 2^32.
        let end = h.mo.checked_add(payload);
        if end.is_none_or(|end| u64::from(end) > self.rx.receive.len) {
            let fault = RxFault::segment(TerminateCode::DDP_UNTAGGED_TOO_LONG, header, ulpdu_len);
            return Err(fault.receive(WcStatus::LocalLength));
        }
        Ok(Some(Target::Receive { off: h.mo }))
    }

    #[inline]
    pub(super) fn take_receive<H: Host>(&mut self, host: &mut H) -> bool {
        self.rx.receiving = if self.config.shared_receive {
            host.take_shared_receive(&mut self.rx.receive)
        } else {
            self.rq.take(&mut self.rx.receive)
        };
        self.rx.receiving
    }

    /// A message needs a receive, and none is posted: holds it or refuses it, as the policy says.
    pub(super) fn no_receive(&mut self, header: &Header, ulpdu_len: u16) -> Result<(), RxFault> {
        let missed = Missed {
            header: *header,
            ulpdu_len,
        };
        if self.config.receiver_not_ready == ReceiverNotReady::Terminate {
            return Err(RxFault::no_buffer(&missed));
        }
        // The same message may be offered many times before a receive is posted.
        if self.rx.missed != Some(missed) {
            self.rx.missed = Some(missed);
            self.counters.receiver_not_ready = self.counters.receiver_not_ready.wrapping_add(1);
        }
        Ok(())
    }

    /// Ends the stream as RFC 5041 section 7.1 has it, after the time that the policy gives a held Send.
    pub(super) fn hold_ends<H: Host>(&mut self, host: &mut H) {
        if let Some(missed) = self.rx.missed {
            self.fail_stream(&RxFault::no_buffer(&missed), host);
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
        //= rfc5041 section 4.2
        //# At the Data Sink, DDP MUST provide the RsvdULP field to the ULP when the DDP
        //# Message is delivered.
        //= rfc5041 section 4.2
        //# At the Data Sink, the DDP MUST provide the STag field when the ULP Message
        //# is delivered.
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
                    //= rfc5040 section 5.1
                    //# A valid RDMA Write Message MUST NOT be delivered to the Data Sink's ULP
                    //# (i.e., it is placed by the DDP layer).
                    self.rx.last_write_len = self.rx.write_len;
                    self.rx.write_len = 0;
                    self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
                }
                Ok(())
            }
            Header::Untagged(h) => {
                self.rx.message_off = self.rx.message_off.wrapping_add(payload);
                if h.last {
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
                    self.deliver_send(header, h, ulpdu_len, env)
                } else {
                    Ok(())
                }
            }
        }
    }

    /// The answer to the oldest request is complete.
    pub(super) fn answered<H: Host>(&mut self, host: &mut H) {
        if let Some(awaited) = self.sq.awaited.pop() {
            self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
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
            if self.acknowledge.on {
                self.acknowledged(&awaited, host);
            } else {
                self.complete_request(awaited.seq, host);
            }
            // It may have been the last one for which a send queue that is being drained waited.
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
        if !self.rx.receiving {
            self.rx.rtr_send_expected = false;
            return Ok(());
        }
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
        if h.opcode.invalidates() {
            //= rfc5040 section 7.2
            //# The Invalidate STag MUST be valid.
            //= rfc5040 section 5.3
            //# When the Send with Invalidate and Send with Solicited Event and
            //# Invalidate Message are Delivered to the Remote Peer's RDMAP layer, the
            //# RDMAP layer MUST:
            let stag = h.invalidate_stag.0;
            let complete = env
                .memory
                .invalidate(stag, self.accessor(), true)
                .map_err(|_| {
                    RxFault::segment(TerminateCode::RDMAP_CANNOT_INVALIDATE, header, ulpdu_len)
                        .access()
                        .receive(WcStatus::LocalAccess)
                })?;
            cqe.flags |= WcFlags::WITH_INV;
            cqe.imm_or_stag = stag;
            if !complete {
                self.rx.ending = Some((stag, cqe));
                return Ok(());
            }
        }
        //= rfc5040 section 5.3
        //# At the Remote Peer, the Send Message Type MUST be Delivered to the
        //# Remote Peer's ULP in the order they were sent.
        //= rfc5040 section 5.5
        //# Send Messages MUST be Delivered to the ULP at the Remote Peer after they
        //# are Delivered to RDMAP by DDP and in the order that they were Delivered
        //# to RDMAP.
        self.finish_receive(cqe, env.host);
        Ok(())
    }

    /// Completes a Send with Invalidate whose STag was in use. Returns `false` if it still is.
    #[inline]
    pub(super) fn end_invalidation<H: Host>(&mut self, env: &mut Env<'_, H>) -> bool {
        let Some((stag, cqe)) = self.rx.ending else {
            return true;
        };
        if !env.memory.is_unused(stag) {
            return false;
        }
        self.rx.ending = None;
        self.finish_receive(cqe, env.host);
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
        }
    }

    #[inline]
    pub(super) fn finish_receive<H: Host>(&mut self, cqe: Cqe, host: &mut H) {
        self.rx.receiving = false;
        self.counters.completions = self.counters.completions.wrapping_add(1);
        host.complete(Direction::Recv, cqe);
    }
}
