//! Admission checks of received segments that depend on the state of the stream (RFC 5041 section
//! 7.1, RFC 5040 section 7.2). They apply both to segments received in one piece and to segments
//! read directly to their destination. `deliver` processes admitted segments; `control` handles
//! untagged messages for the RNIC itself.

use super::fault::{RxFault, rdmap_code};
use super::place::Target;
use super::rx::Missed;
use super::{Env, Host, QueuePair, ReceiverNotReady};
use crate::memory::AccessError;
use crate::{Access, WcStatus};
use iwarp_proto::ddp::{Header, HeaderError, QueueNumber, TaggedHeader, UntaggedHeader};
use iwarp_proto::rdmap::{Opcode, ReadRequest, TerminateCode};

/// Why a segment was refused. The type is small, so that it does not slow down the loop over small
/// messages; [`QueuePair::fault_of`] derives the Terminate, statuses and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The header is invalid in any context.
    Header(HeaderError),
    /// The protocol does not allow the segment at this point of the stream.
    Protocol(TerminateCode),
    /// The segment is not the next one of the response to the oldest request.
    Answer(TerminateCode),
    /// The payload may not be placed.
    Memory(AccessError),
    /// The memory that a Read Request or an atomic names may not be accessed.
    Request(AccessError),
    /// The response to an atomic may not be placed in local memory.
    Sink,
    /// The message is longer than the receive buffer.
    TooLong,
    /// The peer may not invalidate the STag.
    Invalidation,
}

impl Refusal {
    /// The refusal of a length or flags that do not match the opcode.
    pub(super) const MALFORMED: Self = Self::Protocol(TerminateCode::RDMAP_OPERATION_UNSPECIFIED);
}

impl QueuePair {
    /// Checks a segment that is to be read directly to its destination. Returns the destination, or
    /// `None` if the segment has to wait for a receive.
    pub(super) fn admit_direct<H: Host>(
        &mut self,
        header: &Header,
        payload: u32,
        ulpdu_len: u16,
        env: &mut Env<'_, H>,
    ) -> Result<Option<Target>, Refusal> {
        match *header {
            Header::Tagged(h) if h.opcode == Opcode::READ_RESPONSE => {
                self.admit_read_response(h, payload).map(Some)
            }
            Header::Tagged(h) => {
                self.admit_write(payload)?;
                // Check the complete segment before any of it is placed.
                let range = (h.stag, h.to, payload);
                env.memory
                    .permits(range, Access::REMOTE_WRITE, self.accessor())
                    .map_err(Refusal::Memory)?;
                Ok(Some(Target::Tagged {
                    stag: h.stag,
                    to: h.to,
                }))
            }
            Header::Untagged(h) => {
                let admitted = self.admit_send(h, payload, ulpdu_len, env.host)?;
                Ok(admitted.then_some(Target::Receive { off: h.mo }))
            }
        }
    }

    /// Checks a segment of an RDMA Write, except for the STag, which is checked by the memory
    /// access.
    #[inline(always)]
    pub(super) const fn admit_write(&self, payload: u32) -> Result<(), Refusal> {
        //= rfc5041 section 4.1
        //# If set to one, the ULP Payload carried in this DDP Segment MUST be
        //# Placed into a Tagged Buffer.
        if self.rx.write_len.checked_add(payload).is_none() {
            return Err(Refusal::Protocol(TerminateCode::DDP_TAGGED_BASE_BOUNDS));
        }
        //= rfc5040 section 7.2
        //# The DDP layer MUST validate all DDP Segment fields.
        //= rfc5041 section 7.1
        //# For non-zero-length Tagged DDP Segments, the segment MUST be validated
        //# before Placement by verifying:
        if payload > 0 && !self.remote.contains(Access::REMOTE_WRITE) {
            return Err(Refusal::Memory(AccessError::AccessDenied));
        }
        Ok(())
    }

    /// Checks a segment of the response to the oldest request.
    #[inline(always)]
    pub(super) fn admit_read_response(
        &self,
        h: TaggedHeader,
        payload: u32,
    ) -> Result<Target, Refusal> {
        let fault = |code| Err(Refusal::Answer(code));
        if self.rx.rtr_response_due {
            // The response to the RTR message has no payload and no request.
            return match payload == 0 && h.last {
                true => Ok(Target::Receive { off: 0 }),
                false => fault(TerminateCode::RDMAP_UNEXPECTED_OPCODE),
            };
        }
        let Some(awaited) = self.sq.awaited.front().filter(|a| !a.atomic) else {
            return fault(TerminateCode::RDMAP_UNEXPECTED_OPCODE);
        };
        // Some peers return STag 0 for a zero-length Read.
        if awaited.sink_stag != h.stag && awaited.len != 0 {
            return fault(TerminateCode::DDP_TAGGED_INVALID_STAG);
        }
        let end = u64::from(awaited.received).wrapping_add(u64::from(payload));
        let in_order = h.to == u64::from(awaited.received) || awaited.len == 0;
        if !in_order || end > u64::from(awaited.len) || h.last != (end == u64::from(awaited.len)) {
            return fault(TerminateCode::DDP_TAGGED_BASE_BOUNDS);
        }
        Ok(Target::Sink {
            seq: awaited.seq,
            off: awaited.received,
        })
    }

    /// Checks the message sequence number of a queue. TCP keeps the order, so only the next number
    /// is valid.
    #[inline(always)]
    pub(super) fn check_msn(&self, queue: u32, msn: u32) -> Result<(), Refusal> {
        //= rfc5041 section 5.3
        //# MUST Deliver a DDP Message to the ULP at most once,
        //= rfc5041 section 5.3
        //# MUST Deliver DDP Messages to the ULP in the order they were sent by the
        //# Data Source.
        match self.rx.msn.get(queue as usize) {
            Some(expected) if *expected == msn => Ok(()),
            _ => Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_INVALID_MSN)),
        }
    }

    /// Checks an untagged message for the RNIC itself, which is always one segment.
    #[inline(always)]
    pub(super) fn admit_control(
        &self,
        h: UntaggedHeader,
        payload: &[u8],
        len: usize,
    ) -> Result<(), Refusal> {
        //= rfc7306 section 8.2
        //# On incoming Atomic Requests, Atomic Responses, Immediate Data, and Immediate
        //# Data with Solicited Event, the following MUST be validated:
        //= rfc7306 section 8.2
        //# o The DDP layer MUST validate all DDP Segment fields.
        self.check_msn(h.qn, h.msn)?;
        // Immediate data follow Sends on queue 0.
        let off = match h.qn {
            0 => self.rx.message_off,
            _ => 0,
        };
        if h.mo != off {
            return Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_INVALID_MO));
        }
        //= rfc5040 section 4.2
        //# The following figure defines which RDMA Headers MUST be used on each RDMA
        //# Message and which RDMA Messages are allowed to carry ULP Payload:
        if !h.last || payload.len() != len {
            return Err(Refusal::MALFORMED);
        }
        Ok(())
    }

    /// Checks a segment of a Send. The first segment of a message consumes a receive. Returns
    /// `false` if none is posted: the message is then held, or dropped if
    /// [`drops_messages`](Self::drops_messages).
    #[inline(always)]
    pub(super) fn admit_send<H: Host>(
        &mut self,
        h: UntaggedHeader,
        payload: u32,
        ulpdu_len: u16,
        host: &mut H,
    ) -> Result<bool, Refusal> {
        //= rfc5041 section 4.1
        //# If set to zero, the ULP Payload carried in this DDP Segment MUST be
        //# Placed into an Untagged Buffer.
        //= rfc5040 section 7.2
        //# The DDP layer MUST validate all Untagged DDP Segment fields.
        //= rfc5041 section 7.1
        //# For non-zero-length Untagged DDP Segments, the DDP Segment MUST be
        //# validated before Placement by verifying:
        self.check_msn(QueueNumber::SEND.0, h.msn)?;
        if h.mo != self.rx.message_off {
            return Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_INVALID_MO));
        }
        if !self.rx.receiving {
            if self.rx.rtr_send_expected && Self::may_be_rtr(h, payload) {
                // The RNIC consumes the RTR message, without a receive (RFC 6581 section 9.2).
                return Ok(true);
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
            // If the first segment was dropped, so is the rest of the message.
            if self.rx.dropping || !self.take_receive(host) {
                self.no_receive(Header::Untagged(h), ulpdu_len, host)?;
                return Ok(false);
            }
        }
        //= rfc5041 section 5.2
        //# The ULP Message Length MUST be less than 2^32.
        match h.mo.checked_add(payload) {
            Some(end) if u64::from(end) <= self.rx.receive.len => Ok(true),
            _ => Self::too_long(),
        }
    }

    #[cold]
    fn may_be_rtr(h: UntaggedHeader, payload: u32) -> bool {
        payload == 0 && h.last && h.opcode == Opcode::SEND
    }

    #[cold]
    const fn too_long() -> Result<bool, Refusal> {
        Err(Refusal::TooLong)
    }

    /// Returns `true` if messages that find no receive are dropped and the stream continues.
    pub(super) fn drops_messages(&self) -> bool {
        self.config.receiver_not_ready == ReceiverNotReady::Drop
    }

    /// Applies the policy for a message without a posted receive: hold, drop or refuse it.
    #[cold]
    pub(super) fn no_receive<H: Host>(
        &mut self,
        header: Header,
        ulpdu_len: u16,
        host: &mut H,
    ) -> Result<(), Refusal> {
        self.check_queue(host)?;
        let missed = Missed { header, ulpdu_len };
        match self.receiver_not_ready() {
            ReceiverNotReady::Terminate => {
                return Err(Refusal::Protocol(TerminateCode::DDP_UNTAGGED_NO_BUFFER));
            }
            ReceiverNotReady::Drop => {
                self.count_not_ready(u64::from(!self.rx.dropping));
                self.rx.dropping = true;
                return Ok(());
            }
            ReceiverNotReady::Hold { .. } => {}
        }
        // The driver may pass the same message many times before a receive is posted.
        if self.rx.missed != Some(missed) {
            self.rx.missed = Some(missed);
            self.count_not_ready(1);
            if let Header::Untagged(h) = header {
                self.record_hold(h.msn);
            }
        }
        Ok(())
    }

    const fn count_not_ready(&mut self, messages: u64) {
        self.counters.receiver_not_ready = self.counters.receiver_not_ready.wrapping_add(messages);
    }

    /// Returns the error of a refused segment, with as much of its header as could be parsed, and
    /// with the Read Request if it is one.
    #[cold]
    pub(super) fn fault_of(
        &self,
        refusal: Refusal,
        header: Option<Header>,
        request: Option<ReadRequest>,
        ulpdu_len: u16,
    ) -> RxFault {
        if let Refusal::Header(e) = refusal {
            return RxFault::header(&e, header, ulpdu_len);
        }
        let Some(header) = &header else {
            return RxFault::header(&HeaderError::TooShort, None, ulpdu_len);
        };
        let segment = |code| RxFault::segment(code, header, ulpdu_len);
        match refusal {
            Refusal::Header(e) => RxFault::header(&e, Some(*header), ulpdu_len),
            Refusal::Protocol(code) => segment(code),
            Refusal::Answer(code) => segment(code).request(WcStatus::BadResponse),
            Refusal::Memory(e) => self.placement_fault(e, header, ulpdu_len),
            Refusal::Request(e) => {
                RxFault::about_request(rdmap_code(e), header, ulpdu_len, request).access()
            }
            Refusal::Sink => RxFault::local().request(WcStatus::LocalProtection),
            Refusal::TooLong => {
                segment(TerminateCode::DDP_UNTAGGED_TOO_LONG).receive(WcStatus::LocalLength)
            }
            Refusal::Invalidation => segment(TerminateCode::RDMAP_CANNOT_INVALIDATE)
                .access()
                .receive(WcStatus::LocalAccess),
        }
    }
}
