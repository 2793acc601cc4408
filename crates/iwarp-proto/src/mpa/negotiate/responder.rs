//! The responder: checks the Request and sends the Reply. RFC 5044 §7.1.2 rule 2, RFC 6581 §9 and
//! §10.

use super::{Agreed, LocalParams, Rtr, RtrSet, emit_frame, min};
use crate::mpa::startup::{
    EnhancedPrefix, Flags, FrameKind, MAX_REVISION, NO_NEGOTIATION, RequestFrame, StartupError,
};
use core::ops::Range;

/// The responder's side of MPA start-up. It has no state before a request arrives.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Responder;

impl Responder {
    /// Checks a request. After an error, close the connection, preferably with a reset instead of a
    /// FIN: RNICs as initiators retry with revision 1 only after a reset.
    pub fn on_request(
        request: &RequestFrame<'_>,
        params: &LocalParams,
    ) -> Result<PendingRequest, StartupError> {
        PendingRequest::on_request(request, params)
    }
}

/// A valid request that the ULP has neither accepted nor rejected.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PendingRequest {
    revision: u8,
    flags: Flags,
    prefix: Option<EnhancedPrefix>,
    private_data: Range<usize>,
}

impl PendingRequest {
    fn on_request(request: &RequestFrame<'_>, params: &LocalParams) -> Result<Self, StartupError> {
        let header = request.header();
        //= rfc5044 section 7.1.1
        //# Responder mode receivers MUST check this field for the same value, and
        //# close the connection and report an error locally if any other
        //# value is detected.
        if header.kind != FrameKind::Request {
            return Err(StartupError::WrongRole);
        }
        //= rfc5044 section 7.1.1
        //# MPA
        //# receivers compliant with this version of the specification MUST
        //# check this field.
        //= rfc6581 section 6
        //# A host accepting MPA connections
        //# MUST continue to accept MPA Requests with version one, even if it
        //# supports version two.
        let revision = header.revision;
        //= rfc6581 section 10
        //# If the responder receives an enhanced MPA message and it does not support
        //# enhanced RDMA connection establishment, it MUST close the TCP connection and
        //# exit MPA.
        //= rfc6581 section 10
        //# The responder MUST continue to accept unenhanced connection requests.
        if revision > params.revision.clamp(1, MAX_REVISION) {
            return Err(StartupError::UnsupportedRevision { revision });
        }
        let prefix = request.prefix()?;
        let start = if prefix.is_some() {
            EnhancedPrefix::LEN
        } else {
            0
        };
        //= rfc5044 section 7.1.1
        //# R: This bit is set to zero, and not checked on reception in the MPA
        //# Request Frame.
        Ok(Self {
            revision,
            flags: header.flags,
            prefix,
            private_data: start..request.private_data().len(),
        })
    }

    /// Returns the revision of the request (0, 1 or 2), which the reply must have as well.
    pub const fn revision(&self) -> u8 {
        self.revision
    }

    /// Returns `true` if the request is enhanced.
    pub const fn enhanced(&self) -> bool {
        self.prefix.is_some()
    }

    /// Returns `true` if the initiator requires CRCs.
    pub const fn crc(&self) -> bool {
        self.flags.has(Flags::CRC)
    }

    /// Returns `true` if the initiator requires that we send markers.
    pub const fn markers(&self) -> bool {
        self.flags.has(Flags::MARKERS)
    }

    /// Returns the initiator's IRD, which limits our ORD. Returns `None` if the request contains
    /// none, and [`NO_NEGOTIATION`] if the ULPs decide.
    pub fn peer_ird(&self) -> Option<u16> {
        self.prefix.map(|p| p.ird)
    }

    /// Returns the initiator's ORD, the IRD that it requests from us. Returns `None` if the request
    /// contains none, and [`NO_NEGOTIATION`] if the ULPs decide.
    pub fn peer_ord(&self) -> Option<u16> {
        self.prefix.map(|p| p.ord)
    }

    /// Returns `true` if the initiator requests the peer-to-peer model.
    pub fn peer_to_peer(&self) -> bool {
        self.prefix.is_some_and(|p| p.peer_to_peer)
    }

    /// Returns the RTR messages that the initiator can send.
    pub fn rtr_offer(&self) -> RtrSet {
        self.prefix.as_ref().map_or(RtrSet::NONE, RtrSet::of)
    }

    /// Returns the range of the ULP's private data in the frame's private data.
    pub fn private_data(&self) -> Range<usize> {
        self.private_data.clone()
    }

    /// Writes a reply that accepts the connection. Send it in one write, and send nothing after it
    /// until the first FPDU has arrived.
    pub fn accept(
        &self,
        params: &LocalParams,
        private_data: &[u8],
        out: &mut [u8],
    ) -> Result<(usize, Agreed), StartupError> {
        let mut agreed = params.agree(self.revision, self.enhanced(), self.flags);
        //= rfc6581 section 10
        //# If the responder receives an
        //# enhanced MPA message, it MUST respond with an enhanced MPA
        //# message.
        //= rfc6581 section 10
        //# If the responder receives an unenhanced
        //# MPA message ('S' is set to 0), it MUST respond with an unenhanced
        //# MPA message.
        //= rfc6581 section 10
        //# All responders are REQUIRED to issue unenhanced RDMA connection
        //# establishment responses in response to unenhanced RDMA connection
        //# establishment requests.
        //= rfc6581 section 10
        //# The initiator requests enhanced RDMA connection establishment by sending an
        //# enhanced RDMA establishment request; an enhanced responder is REQUIRED to
        //# respond with an enhanced RDMA connection establishment response, whereas an
        //# unenhanced responder treats the enhanced request as incorrectly formatted
        //# and closes the TCP connection.
        let prefix = match &self.prefix {
            Some(request) => Some(agree_on_ird_ord(request, params, &mut agreed)),
            None => {
                // cxgb4 also sends a zero-length Read as RTR message on unenhanced connections.
                agreed.ird = agreed.ird.max(1);
                None
            }
        };
        //= rfc5044 section 7.1.2
        //# If the MPA Request Frame is properly formatted and the Private Data is
        //# acceptable, the implementation SHOULD return an MPA Reply Frame with the
        //# Rejected Connection bit set to '0';
        //= rfc6581 section 6
        //# [RFC5044] specifies that 'Res' MUST be set to zero when sending and MUST NOT
        //# be checked on reception, making use of 'S' bit backwards compatibility with
        //# the original MPA Frame format.
        let flags = Flags::NONE
            .with(Flags::MARKERS, agreed.markers_rx)
            .with(Flags::CRC, agreed.crc);
        let len = self.emit_reply(flags, prefix, private_data, out)?;
        Ok((len, agreed))
    }

    /// Writes a reply that rejects the connection. It contains the initiator's own IRD and ORD, so
    /// that these do not appear to be the reason. Returns the length of the reply, or 0 if `out` is
    /// too short or the private data are too long (more than 512 octets, or 508 if enhanced). The
    /// TCP connection may remain open.
    pub fn reject(&self, private_data: &[u8], out: &mut [u8]) -> usize {
        let prefix = self.prefix.map(|p| reject_prefix(&p, p.ird));
        self.emit_reject(prefix, private_data, out)
    }

    /// Like [`Self::reject`], but the reply contains the ORD that our ULP requires, which exceeds
    /// the initiator's IRD.
    pub fn reject_insufficient_ird(
        &self,
        required_ord: u16,
        private_data: &[u8],
        out: &mut [u8],
    ) -> usize {
        //= rfc6581 section 9.1
        //# The
        //# responder MAY reject the connection request if the initiator IRD is
        //# not sufficient for the ULP-required ORD and specify the required ORD
        //# in the MPA Reject Frame responder ORD.
        let prefix = self.prefix.map(|p| reject_prefix(&p, required_ord));
        self.emit_reject(prefix, private_data, out)
    }

    fn emit_reject(
        &self,
        prefix: Option<EnhancedPrefix>,
        private_data: &[u8],
        out: &mut [u8],
    ) -> usize {
        //= rfc5044 section 7.1.2
        //# The Responder SHOULD return an MPA Reply Frame with the
        //# "Reject Connection" bit set to '1' if the validation of the
        //# Private Data is not acceptable to the ULP.
        //= rfc5044 section 7.1.2
        //# If the MPA Request Frame is properly formatted but the Private Data is not
        //# acceptable, the implementation SHOULD return an MPA Reply Frame with the
        //# Rejected Connection bit set to '1';
        let flags = Flags::REJECT.with(Flags::CRC, self.crc());
        self.emit_reply(flags, prefix, private_data, out)
            .unwrap_or(0)
    }

    fn emit_reply(
        &self,
        flags: Flags,
        prefix: Option<EnhancedPrefix>,
        private_data: &[u8],
        out: &mut [u8],
    ) -> Result<usize, StartupError> {
        let kind = FrameKind::Reply;
        emit_frame(kind, self.revision, flags, prefix, private_data, out)
    }
}

/// Determines IRD, ORD and the RTR message from an enhanced request. Returns the prefix of the
/// reply.
fn agree_on_ird_ord(
    request: &EnhancedPrefix,
    params: &LocalParams,
    agreed: &mut Agreed,
) -> EnhancedPrefix {
    //= rfc6581 section 9.1
    //# The responder and initiator MUST pass the peer's provided IRD and ORD
    //# values to the ULP, in addition to using the values as calculated by
    //# the preceding rules.
    agreed.peer_ird = request.ird;
    agreed.peer_ord = request.ord;
    agreed.peer_to_peer = request.peer_to_peer;
    if request.peer_to_peer {
        agreed.rtr = Some(choose_rtr(RtrSet::of(request), params.rtr_offer));
    }
    let mut reply = EnhancedPrefix {
        ird: NO_NEGOTIATION,
        ord: NO_NEGOTIATION,
        //= rfc6581 section 9.2
        //# If Control Flag A
        //# is 1 in the MPA Request message, then the responder MUST set Control
        //# Flag A to 1 in the MPA reply message.
        //= rfc6581 section 9.2
        //# The responder MUST set Control Flag A to 0 if Control Flag A
        //# is 0 in the request.
        peer_to_peer: request.peer_to_peer,
        //= rfc6581 section 9.2
        //# The responder is not required to specify all RTR indication
        //# options it supports.
        //= rfc6581 section 9.2
        //= type=exception
        //= reason=one flag only, because deployed initiators terminate the connection when the reply names a type they are not set up for
        //# For each initiator-supported RTR indication option, the responder SHOULD set
        //# the corresponding Control Flag if the responder can support that option in
        //# an MPA reply.
        rtr_send: agreed.rtr == Some(Rtr::Send),
        rtr_write: agreed.rtr == Some(Rtr::Write),
        rtr_read: agreed.rtr == Some(Rtr::Read),
    };
    //= rfc6581 section 9.1
    //# The responder MUST respond to an initiator ORD value of
    //# 0x3FFF by leaving its local endpoint IRD value unchanged and setting
    //# the IRD to 0x3FFF in its reply message.
    if request.ord != NO_NEGOTIATION {
        agreed.ird = agreed.ird.max(min(request.ord, params.max_ird()));
        reply.ird = agreed.ird;
    }
    if agreed.rtr == Some(Rtr::Read) {
        //= rfc6581 section 9.1
        //# If the initiator ORD is insufficient to support the
        //# selected connection model, the responder IRD MAY be increased;
        agreed.ird = agreed.ird.max(1);
        reply.ird = reply.ird.max(1);
    }
    //= rfc6581 section 9.1
    //# The responder MUST respond to an initiator IRD
    //# value of 0x3FFF by leaving its local endpoint ORD value unchanged,
    //# and setting ORD to 0x3FFF in its reply message.
    if request.ird != NO_NEGOTIATION {
        //= rfc6581 section 9.1
        //# The
        //# responder MUST set its ORD at most to the initiator IRD.
        //= rfc6581 section 9.1
        //# The responder ORD SHOULD be set to a value less than or equal to the
        //# initiator IRD.
        agreed.ord = min(agreed.ord, request.ird);
        reply.ord = agreed.ord;
    }
    reply
}

/// Returns the preferred RTR message that both sides support. If there is none, returns one that we
/// support.
fn choose_rtr(offered: RtrSet, supported: RtrSet) -> Rtr {
    //= rfc6581 section 9.2
    //# If the responder does
    //# not support any of the initiator-specified RTR indication options,
    //# then the responder MUST set at least one RTR indication type option
    //# it supports.
    //= rfc6581 section 9.2
    //# The responder MUST support at least one RTR indication option if it
    //# supports Enhanced RDMA connection establishment.
    //= rfc6581 section 9.2
    //# The responder MUST set at least one RTR indication option if it supports
    //# more than one initiator-specified RTR indication option.
    offered
        .and(supported)
        .preferred()
        .or(supported.preferred())
        .unwrap_or(Rtr::Write)
}

/// Returns the prefix of a rejection. Its IRD is the initiator's ORD.
fn reject_prefix(request: &EnhancedPrefix, ord: u16) -> EnhancedPrefix {
    EnhancedPrefix {
        ird: request.ord,
        ord,
        peer_to_peer: request.peer_to_peer,
        ..Default::default()
    }
}
