//! Errors of a stream: which end is to blame, and what the peer and the program are notified of
//! (RFC 5040 sections 4.8 and 7, RFC 5041 section 7, RFC 5044 section 8).

use super::acknowledge::Verdict;
use super::admit::Refusal;
use super::life::Life;
use super::plan::{Milestone, TxPlan};
use super::rx::Missed;
use super::tx::Job;
use super::{Events, Host, QueuePair};
use crate::WcStatus;
use crate::limits::CONTROL_MAX;
use crate::memory::AccessError;
use iwarp_proto::ddp::{Header, HeaderError, Stag, UNTAGGED_HEADER_LEN, UntaggedHeader};
use iwarp_proto::mpa::framing::FramingError;
use iwarp_proto::rdmap::{Opcode, ReadRequest, Terminate, TerminateCode};

/// Which end caused a stream to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blame {
    /// The peer broke the protocol or accessed memory without permission; we sent a Terminate.
    Peer,
    /// The peer sent a Terminate.
    PeerTerminated,
    /// One of our own work requests failed.
    Local,
    /// The stream broke or ended inside a message.
    Transport,
}

/// Why a stream ended in error. Only the first reason is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The end to blame.
    pub blame: Blame,
    /// Code of the Terminate that was sent or received; without a Terminate, the closest code.
    pub code: TerminateCode,
}

impl Fault {
    pub(super) const fn transport() -> Self {
        Self {
            blame: Blame::Transport,
            code: TerminateCode::MPA_CONNECTION_LOST,
        }
    }
}

impl core::fmt::Display for Fault {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let cause = match self.blame {
            Blame::Peer => "terminated because the peer broke the protocol",
            Blame::PeerTerminated => "terminated by the peer",
            Blame::Local => "a local work request failed",
            Blame::Transport => "connection lost",
        };
        match self.code.description() {
            Some(text) => write!(f, "{cause} ({text})"),
            None => write!(
                f,
                "{cause} (layer {}, type {}, code {})",
                self.code.layer, self.code.etype, self.code.code
            ),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TerminateOctets {
    body: [u8; CONTROL_MAX],
    len: u8,
}

const _: () = assert!(Terminate::MAX_LEN <= CONTROL_MAX);

impl TerminateOctets {
    pub(super) fn new(terminate: &Terminate) -> Self {
        let mut body = [0; CONTROL_MAX];
        let len = terminate.emit(&mut body) as u8;
        Self { body, len }
    }

    pub(super) fn octets(&self) -> &[u8] {
        self.body.get(..usize::from(self.len)).unwrap_or(&[])
    }
}

/// An error found while receiving.
#[derive(Debug, Clone, Copy)]
pub(super) struct RxFault {
    terminate: Terminate,
    /// Status of the receive that is being filled.
    receive: WcStatus,
    /// Status of the oldest request, if the error is in its response.
    request: Option<WcStatus>,
    event: Events,
    blame: Blame,
}

impl RxFault {
    /// Returns an error of the peer, with the Terminate for it.
    pub(super) const fn peer(terminate: Terminate) -> Self {
        Self {
            terminate,
            receive: WcStatus::Flushed,
            request: None,
            event: Events::REQUEST_ERROR,
            blame: Blame::Peer,
        }
    }

    pub(super) const fn segment(code: TerminateCode, header: &Header, ulpdu_len: u16) -> Self {
        //= rfc5041 section 7.1
        //# The DDP layer SHOULD include in the error report the DDP Header, the
        //# type of error, and the length of the DDP segment, if available.
        Self::peer(Terminate::about(code, ulpdu_len, *header, None))
    }

    /// Returns the error of a message that finds no receive.
    pub(super) const fn no_buffer(missed: &Missed) -> Self {
        Self::segment(
            TerminateCode::DDP_UNTAGGED_NO_BUFFER,
            &missed.header,
            missed.ulpdu_len,
        )
    }

    //= rfc5044 section 8
    //# For Error codes 2 and 3, MPA MUST NOT close the TCP connection following
    //# a reported error.
    pub(super) const fn crc() -> Self {
        Self::peer(Terminate::new(TerminateCode::MPA_CRC))
    }

    /// Returns the error of a header that is invalid by itself.
    pub(super) fn header(error: &HeaderError, header: Option<Header>, ulpdu_len: u16) -> Self {
        let code = TerminateCode::from(error);
        Self::peer(match header {
            Some(h) => Terminate::about(code, ulpdu_len, h, None),
            None => Terminate::new(code),
        })
    }

    pub(super) const fn local() -> Self {
        Self {
            blame: Blame::Local,
            event: Events::FATAL,
            ..Self::peer(Terminate::new(TerminateCode::RDMAP_LOCAL_CATASTROPHIC))
        }
    }

    pub(super) const fn receive(self, status: WcStatus) -> Self {
        Self {
            receive: status,
            ..self
        }
    }

    pub(super) const fn request(self, status: WcStatus) -> Self {
        Self {
            request: Some(status),
            ..self
        }
    }

    /// Marks the error as a refused memory access.
    pub(super) const fn access(self) -> Self {
        Self {
            event: Events::ACCESS_ERROR,
            ..self
        }
    }

    /// Returns the error of a refused Read Request or atomic.
    pub(super) const fn about_request(
        code: TerminateCode,
        header: &Header,
        ulpdu_len: u16,
        request: Option<ReadRequest>,
    ) -> Self {
        Self::peer(Terminate::about(code, ulpdu_len, *header, request))
    }
}

/// Returns the code for a refused RDMA Read, atomic or invalidation (RFC 5040 section 4.8).
pub(super) const fn rdmap_code(e: AccessError) -> TerminateCode {
    match e {
        AccessError::InvalidStag => TerminateCode::RDMAP_INVALID_STAG,
        AccessError::NotAssociated => TerminateCode::RDMAP_STAG_NOT_ASSOCIATED,
        AccessError::AccessDenied => TerminateCode::RDMAP_ACCESS,
        AccessError::ToWrap => TerminateCode::RDMAP_TO_WRAP,
        // No code says that a page is missing, and the peer need not know.
        AccessError::BaseOrBounds | AccessError::NotMapped => TerminateCode::RDMAP_BASE_BOUNDS,
    }
}

/// Returns the code for a refused tagged segment (RFC 5041 section 7.2). Missing rights are an
/// error of RDMAP.
pub(super) const fn tagged_code(e: AccessError) -> TerminateCode {
    match e {
        AccessError::InvalidStag => TerminateCode::DDP_TAGGED_INVALID_STAG,
        AccessError::NotAssociated => TerminateCode::DDP_TAGGED_NOT_ASSOCIATED,
        AccessError::AccessDenied => TerminateCode::RDMAP_ACCESS,
        AccessError::ToWrap => TerminateCode::DDP_TAGGED_TO_WRAP,
        AccessError::BaseOrBounds | AccessError::NotMapped => TerminateCode::DDP_TAGGED_BASE_BOUNDS,
    }
}

/// Returns the completion status of the work request that a peer's Terminate refers to.
pub(super) const fn status_of(code: TerminateCode) -> WcStatus {
    match (code.layer, code.etype) {
        (0, 1) | (1, 1) => WcStatus::RemoteAccess,
        (1, 2) => WcStatus::RemoteInvalidRequest,
        (0, 2) if code.code == TerminateCode::RDMAP_CATASTROPHIC_STREAM.code => {
            WcStatus::RemoteInvalidRequest
        }
        // The peer had an internal error.
        (0, 0 | 2) => WcStatus::RemoteOperation,
        _ => WcStatus::Fatal,
    }
}

impl QueuePair {
    pub(super) const fn record_fault(&mut self, fault: Fault) {
        if self.fault.is_none() {
            self.fault = Some(fault);
        }
    }

    pub(super) fn framing_fault(&mut self, e: FramingError) -> RxFault {
        let code = e.terminate().unwrap_or(TerminateCode::MPA_MARKER);
        if code == TerminateCode::MPA_CRC {
            self.counters.crc_errors = self.counters.crc_errors.wrapping_add(1);
        } else {
            self.counters.marker_errors = self.counters.marker_errors.wrapping_add(1);
        }
        RxFault::peer(Terminate::new(code))
    }

    /// Returns the error of a payload that could not be placed. The end that supplied the STag is
    /// to blame.
    #[cold]
    pub(super) fn placement_fault(
        &self,
        e: AccessError,
        header: &Header,
        ulpdu_len: u16,
    ) -> RxFault {
        match header {
            Header::Tagged(h) if h.opcode == Opcode::WRITE => {
                RxFault::segment(tagged_code(e), header, ulpdu_len).access()
            }
            Header::Tagged(_) => RxFault::local().request(WcStatus::LocalProtection),
            Header::Untagged(_) => RxFault::local().receive(WcStatus::LocalProtection),
        }
    }

    /// Ends the stream because of a received segment.
    pub(super) fn fail_stream<H: Host>(&mut self, fault: &RxFault, host: &mut H) {
        self.record_fault(Fault {
            blame: fault.blame,
            code: fault.terminate.code,
        });
        //= rfc5041 section 8.3
        //# If an STag is not valid on a DDP Stream, DDP MUST pass the invalid
        //# access attempt to the ULP.
        //= rfc5041 section 6.2.2
        //# Thus, any of the following fatal errors on a DDP Stream MUST cause DDP to
        //# indicate to the ULP that a fatal error has occurred:
        self.events |= fault.event | Events::FATAL;
        //= rfc5040 section 7.1
        //# If an error occurs at the Local Peer, the RDMAP layer MUST attempt to
        //# inform the local ULP that the error has occurred.
        //= rfc5040 section 6.2.1
        //# RDMAP defines a Terminate operation that SHOULD be invoked when either
        //# an RDMAP error is encountered or an LLP error is surfaced to the RDMAP
        //# layer by the LLP.
        //= rfc5040 section 6.2.1
        //# Thus, the state of all outstanding RDMA Messages is indeterminate, and
        //# the Messages SHOULD be considered Completed in error.
        //= rfc5041 section 7.1
        //# Since each of these errors represents a failure of the sending ULP or
        //# protocol, DDP SHOULD enable the ULP to send one additional DDP Message
        //# before terminating the DDP Stream.
        match (fault.request, self.sq.first_awaited()) {
            (Some(status), Some(seq)) => self.sq.fail(seq, status, 0),
            _ => self.fail_own_request(&fault.terminate, host),
        }
        if self.rx.receiving {
            self.rx.receiving = false;
            let wr_id = self.rx.receive.wr_id;
            self.complete_receive(wr_id, fault.receive, host);
        }
        self.end_with(&fault.terminate, host);
    }

    /// Ends the stream because one of our own requests failed. The request completes with
    /// `status`; all others are flushed.
    pub(super) fn fail_request<H: Host>(&mut self, seq: u32, status: WcStatus, host: &mut H) {
        //= rfc5040 section 7.1
        //# For errors detected while creating RDMA Write, Send, Send with
        //# Invalidate, Send with Solicited Event, Send with Solicited Event
        //# and Invalidate, or RDMA Read Requests, or other reasons not
        //# directly associated with an incoming Message, the Terminate
        //# Message and Error code are sent instead of the request.
        self.record_fault(Fault {
            blame: Blame::Local,
            code: TerminateCode::RDMAP_LOCAL_CATASTROPHIC,
        });
        //= rfc5040 section 7.1
        //# The Local Peer MUST send a Terminate Message for each of the following
        //# cases:
        //= rfc7306 section 8.1
        //# The Local Peer MUST send a Terminate Message for each of the following
        //# cases:
        let terminate = Terminate::new(TerminateCode::RDMAP_LOCAL_CATASTROPHIC);
        self.sq.fail(seq, status, 0);
        self.end_with(&terminate, host);
    }

    /// Ends the stream as if a local request had failed, and flushes all others. The caller writes
    /// the completion of the failed request. For hosts that inject faults.
    pub fn give_up<H: Host>(&mut self, host: &mut H) {
        self.record_fault(Fault {
            blame: Blame::Local,
            code: TerminateCode::RDMAP_LOCAL_CATASTROPHIC,
        });
        let terminate = Terminate::new(TerminateCode::RDMAP_LOCAL_CATASTROPHIC);
        self.end_with(&terminate, host);
    }

    /// Ends the stream as if the peer had accessed memory without permission (`access`) or broken
    /// the protocol. For hosts that inject faults.
    pub fn accuse_peer<H: Host>(&mut self, access: bool, host: &mut H) {
        let fault = match access {
            true => RxFault::peer(Terminate::new(TerminateCode::RDMAP_ACCESS)).access(),
            false => RxFault::peer(Terminate::new(TerminateCode::RDMAP_UNEXPECTED_OPCODE)),
        };
        self.fail_stream(&fault, host);
    }

    /// Ends the stream with a Terminate and flushes everything. Has no effect if an earlier error
    /// already ends the stream.
    fn end_with<H: Host>(&mut self, terminate: &Terminate, host: &mut H) {
        //= rfc5040 section 7.1
        //# the first RDMA
        //# Message (and its associated DDP Segment) that experienced an
        //# error MUST be captured by the Terminate Message
        //= rfc5041 section 6.2.2
        //# If the underlying LLP Stream is still intact, DDP SHOULD continue to allow
        //# the ULP to transfer additional DDP Messages on the outgoing half connection
        //# after the fatal error was indicated to the ULP.
        //= rfc5041 section 6.2.2
        //# After indicating to the ULP a fatal error has occurred, the DDP Stream MUST
        //# NOT be terminated until the Local Peer ULP indicates to the DDP layer that
        //# the DDP Stream should be abortively torn down.
        let message = TerminateOctets::new(terminate);
        self.step_and_flush(|life| life.fail(message), host);
    }

    /// If this queue pair is its own peer, fails the request that a Terminate refers to, because
    /// nobody will receive the Terminate.
    fn fail_own_request<H: Host>(&mut self, terminate: &Terminate, host: &mut H) {
        if self.acknowledge.own_peer {
            self.refused_by_peer(terminate, host);
        }
    }

    /// Ends the stream because the memory of a response was deregistered or unmapped after the Read
    /// Request. `request` is the oldest unanswered request, advanced to the failed position.
    pub(super) fn fail_response<H: Host>(
        &mut self,
        e: AccessError,
        request: &ReadRequest,
        host: &mut H,
    ) {
        self.fail_response_at(e, self.responses.len(), Some(*request), host);
    }

    /// Like `fail_response`, for the Read Request at position `from_end` of the received requests,
    /// where the latest has position 1.
    fn fail_response_at<H: Host>(
        &mut self,
        e: AccessError,
        from_end: u32,
        request: Option<ReadRequest>,
        host: &mut H,
    ) {
        let code = rdmap_code(e);
        // Requests on queue 1 are answered in order, so their numbers follow from how many are
        // pending.
        let next = self.rx.msn.get(1).copied().unwrap_or(1);
        let header = Header::Untagged(UntaggedHeader {
            last: true,
            opcode: Opcode::READ_REQUEST,
            invalidate_stag: Stag(0),
            qn: 1,
            msn: next.wrapping_sub(from_end),
            mo: 0,
        });
        let len = UNTAGGED_HEADER_LEN + ReadRequest::LEN;
        self.record_fault(Fault {
            blame: Blame::Peer,
            code,
        });
        self.events |= Events::ACCESS_ERROR | Events::FATAL;
        let terminate = Terminate::about(code, len as u16, header, request);
        self.fail_own_request(&terminate, host);
        self.end_with(&terminate, host);
    }

    /// Ends the stream because registered memory that `plan` refers to could not be read when the
    /// plan was written. The caller must still write the rest of the plan, if any.
    ///
    /// The request that owns the memory completes with a protection error; a Read of the peer is
    /// refused. If the written part ends at the end of a message, the peer gets a Terminate.
    /// Otherwise the stream is cut inside an FPDU and must be reset.
    pub fn tx_unreadable<H: Host>(&mut self, plan: &mut TxPlan, host: &mut H) {
        let owner = plan.first_unwritten_memory();
        let e = AccessError::NotMapped;
        if plan.is_between_messages() {
            self.life.written(false);
        }
        match (owner, self.tx.job) {
            (Some((_, Milestone::Request(seq))), _) | (None, Some(Job::Request { seq, .. })) => {
                self.fail_request(seq, WcStatus::LocalProtection, host);
            }
            (Some((index, _)), _) => {
                let from_end = self
                    .responses
                    .len()
                    .wrapping_add(plan.responses_from(index));
                self.fail_response_at(e, from_end, None, host);
            }
            (None, _) => self.fail_response_at(e, self.responses.len(), None, host),
        }
        plan.clear();
        if self.life.has_unwritten() {
            self.step_and_flush(Life::abandon, host);
        }
    }

    /// Ends the stream because registered memory from [`rx_plan`](Self::rx_plan) could not be
    /// written by the read. The driver discards the contents of the staging buffer.
    pub fn rx_unwritable<H: Host>(&mut self, host: &mut H) {
        match self.rx.direct {
            Some(d) => {
                let refusal = Refusal::Memory(AccessError::NotMapped);
                self.refuse_by_header(refusal, Some(d.header), d.ulpdu_len, host);
            }
            // The staging belongs to the driver, so this is the driver's fault.
            None => self.abort(host),
        }
    }

    pub(super) fn terminated_by_peer<H: Host>(&mut self, terminate: &Terminate, host: &mut H) {
        //= rfc5040 section 5.4
        //# A Terminate Message MUST be Delivered to the Remote Peer's RDMAP layer.
        //= rfc5040 section 5.4
        //# The RDMAP layer MUST Deliver the Terminate Message to the ULP.
        self.counters.terminates_received = self.counters.terminates_received.wrapping_add(1);
        let code = terminate.code;
        self.record_fault(Fault {
            blame: Blame::PeerTerminated,
            code,
        });
        self.events |= Events::FATAL;
        self.refused_by_peer(terminate, host);
        //= rfc5040 section 6.2.1
        //# The peer SHOULD perform a graceful LLP
        //# teardown to ensure the Terminate Message is successfully Delivered.
        // A stream has only one Terminate: it is not answered.
        self.step_and_flush(Life::terminated, host);
    }

    /// Fails the request that a Terminate of the peer refers to, or starts the search for it.
    fn refused_by_peer<H: Host>(&mut self, terminate: &Terminate, host: &mut H) {
        let code = terminate.code;
        let no_receive = self.is_by_number() && code == TerminateCode::DDP_UNTAGGED_NO_BUFFER;
        let verdict = Verdict {
            status: match no_receive {
                true => WcStatus::ReceiverNotReady,
                false => status_of(code),
            },
            vendor_err: u32::from(code.layer) << 12
                | u32::from(code.etype) << 8
                | u32::from(code.code),
        };
        match self.awaited_request_of(terminate) {
            Some(seq) => self.refuse(seq, verdict, host),
            None => self.start_search(self.search(terminate), verdict),
        }
    }

    /// Returns the send work request that a Terminate refers to, if that request awaits a response.
    fn awaited_request_of(&self, terminate: &Terminate) -> Option<u32> {
        let by_sink = terminate.read_request.map(|r| r.sink_stag);
        let by_msn = match terminate.ddp_header {
            Some(Header::Untagged(h)) if h.qn == 1 => Some(h.msn),
            _ => None,
        };
        let mut i = 0u32;
        while let Some(a) = self.sq.awaited.get(i) {
            // The sink STag is unique to this Read. Some peers return a wrong sequence number, so
            // the STag takes precedence.
            let matches = match by_sink {
                Some(sink) if !a.atomic => a.sink_stag == sink,
                _ => by_msn == Some(a.msn),
            };
            if matches && !a.probe {
                return Some(a.seq);
            }
            i = i.wrapping_add(1);
        }
        None
    }
}
