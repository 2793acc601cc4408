//! The initiator: sends the Request and checks the Reply. RFC 5044 §7.1.2 rules 1 and 3, RFC 6581
//! §9.

use super::{Agreed, LocalParams, Rtr, RtrSet, emit_frame, min};
use crate::mpa::startup::{
    EnhancedPrefix, Flags, FrameKind, MAX_FRAME_LEN, MAX_REVISION, NO_NEGOTIATION, ReplyFrame,
    RequestFrame, StartupError,
};
use core::fmt;

/// The meaning of a valid reply. In both cases, [`ReplyFrame::ulp_private_data`] returns the
/// private data.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The connection enters full operation. If [`Agreed::rtr`] is set, that message must be sent
    /// first.
    Accepted(Agreed),
    /// The responder's ULP rejected the connection. TCP is still open and belongs to the ULP.
    Rejected {
        /// The responder's IRD, if the reply contains it.
        peer_ird: Option<u16>,
        /// The responder's ORD, if the reply contains it. If it exceeds the IRD in our request,
        /// that may be the reason for the rejection.
        peer_ord: Option<u16>,
    },
}

/// The initiator's side of MPA start-up. Contains the request that it sends.
#[derive(Clone)]
pub struct Initiator {
    params: LocalParams,
    enhanced: bool,
    /// The enhanced request was prepared a second time.
    request_repeated: bool,
    request: [u8; MAX_FRAME_LEN],
    request_len: usize,
}

impl Initiator {
    /// Prepares a request. Fails if the private data are longer than 512 octets (508 octets in an
    /// enhanced request), or if the revision is neither 1 nor 2.
    pub fn new(params: LocalParams, private_data: &[u8]) -> Result<Self, StartupError> {
        let LocalParams { revision, .. } = params;
        if !(1..=MAX_REVISION).contains(&revision) {
            return Err(StartupError::UnsupportedRevision { revision });
        }
        //= rfc6581 section 10
        //# The initiator MUST NOT use the enhanced RDMA connection establishment
        //# formats or function codes when no enhanced functionality is desired.
        let enhanced = revision >= 2 && (params.peer_to_peer || params.ird_ord_negotiate);
        //= rfc5044 section 7.1.1
        //# For this version of
        //# the specification, senders MUST set this field to one.
        let revision = if enhanced { revision } else { 1 };
        let mut this = Self {
            params,
            enhanced,
            request_repeated: false,
            request: [0; MAX_FRAME_LEN],
            request_len: 0,
        };
        //= rfc5044 section 7.1.1
        //# It MUST be set to zero
        //# when sending, and not checked on reception.
        let flags = Flags::NONE
            .with(Flags::MARKERS, params.markers_rx)
            .with(Flags::CRC, params.crc);
        let prefix = enhanced.then(|| this.prefix());
        //= rfc5044 section 7.1.2
        //# When MPA is started in the Initiator mode, the MPA implementation
        //# MUST send a valid MPA Request Frame.
        this.request_len = emit_frame(
            FrameKind::Request,
            revision,
            flags,
            prefix,
            private_data,
            &mut this.request,
        )?;
        Ok(this)
    }

    fn offer(&self) -> RtrSet {
        if !self.params.peer_to_peer {
            return RtrSet::NONE;
        }
        let offer = match self.params.rtr_offer {
            // If A is set, but none of B, C and D, the responder would have to guess.
            RtrSet::NONE => RtrSet::WRITE_READ,
            offer => offer,
        };
        // A ULP that issues no Reads has an ORD of zero, which is passed to the peer's ULP. With a
        // Read as RTR message, the ORD would have to be 1.
        let without_read = RtrSet {
            read: false,
            ..offer
        };
        match self.params.ord() {
            0 if without_read != RtrSet::NONE => without_read,
            _ => offer,
        }
    }

    /// Returns the ORD to request. If a Read is offered as RTR message, the ORD is at least 1, even
    /// if the ULP issues no Reads.
    fn requested_ord(&self) -> u16 {
        let ord = self.params.ord();
        if self.offer().read && self.params.max_ord > 0 {
            ord.max(1)
        } else {
            ord
        }
    }

    fn prefix(&self) -> EnhancedPrefix {
        let negotiate = self.params.ird_ord_negotiate;
        let offer = self.offer();
        //= rfc6581 section 9.2
        //# The initiator MUST set
        //# Control Flag A to 1 for the peer-to-peer model.
        //= rfc6581 section 9.2
        //# The initiator MUST
        //# set each Control Flag B, C, and D to 1 for each of the options it
        //# supports, if Control Flag A is set to 1.
        //= rfc6581 section 9.2
        //# The initiator MUST set Control Flag A to 0 for the client-server
        //# model.
        //= rfc6581 section 9.2
        //# If Control Flag A is set to 0, then Control
        //# Flags B, C, and D MUST also be set to 0.
        EnhancedPrefix {
            ird: if negotiate {
                self.params.ird()
            } else {
                NO_NEGOTIATION
            },
            ord: if negotiate {
                self.requested_ord()
            } else {
                NO_NEGOTIATION
            },
            peer_to_peer: self.params.peer_to_peer,
            rtr_send: offer.send,
            rtr_write: offer.write,
            rtr_read: offer.read,
        }
    }

    /// Returns the request frame. Send it in one write, because some RNICs require that it arrives
    /// in one TCP segment.
    pub fn request_octets(&self) -> &[u8] {
        self.request.get(..self.request_len).unwrap_or_default()
    }

    /// Copies the request frame. Returns its length, or 0 if `out` is too short.
    pub fn request(&self, out: &mut [u8]) -> usize {
        let request = self.request_octets();
        match out.get_mut(..request.len()) {
            Some(out) => {
                out.copy_from_slice(request);
                request.len()
            }
            None => 0,
        }
    }

    /// Records that the peer closed or reset the connection instead of replying. Prepares the
    /// request for the next connection attempt. Returns `false` if there should be no further
    /// attempt.
    ///
    /// A responder that does not support RFC 6581 closes the connection after an enhanced request.
    /// But the connection may also end for another reason: the peer's process was killed, its queue
    /// pair was reset, or a middlebox reset the connection. If the peer supports revision 2, a
    /// connection with revision 1 would be worse, because IRD and ORD would not be negotiated. So
    /// the enhanced request is repeated once. If the second connection ends in the same way, the
    /// next request has revision 1 and the same private data. The ULP then decides about IRD, ORD
    /// and the connection model.
    pub fn prepare_retry(&mut self) -> bool {
        if !self.enhanced {
            return false;
        }
        if !self.request_repeated {
            self.request_repeated = true;
            return true;
        }
        //= rfc6581 section 10
        //# In this case, the
        //# initiator MAY attempt to establish an RDMA connection using the
        //# unenhanced MPA protocol as defined in [RFC5044] if this protocol
        //# is compatible with the application, and let the ULP deal with ORD
        //# and IRD and peer-to-peer negotiations.
        let params = LocalParams {
            revision: 1,
            ..self.params
        };
        let Ok(Some(request)) = RequestFrame::parse(self.request_octets()) else {
            return false;
        };
        match Self::new(params, request.ulp_private_data()) {
            Ok(plain) => {
                *self = plain;
                true
            }
            Err(_) => false,
        }
    }

    /// Checks the reply. After an error, send the Terminate of [`StartupError::terminate`], if
    /// there is one, and close the connection.
    pub fn on_reply(&self, reply: &ReplyFrame<'_>) -> Result<Outcome, StartupError> {
        //= rfc5044 section 7.1.2
        //# MPA Initiator mode implementations MUST receive and validate an
        //# MPA Reply Frame.
        let header = reply.header();
        //= rfc5044 section 7.1.1
        //# Initiator
        //# mode receivers MUST check this field for the same value, and
        //# close the connection and report an error locally if any other
        //# value is detected.
        if header.kind != FrameKind::Reply {
            return Err(StartupError::WrongRole);
        }
        //= rfc5044 section 7.1.1
        //# If the MPA receiver cannot interoperate with
        //# the received version, then it MUST close the connection and
        //# report an error locally.
        if header.revision > MAX_REVISION {
            return Err(StartupError::UnsupportedRevision {
                revision: header.revision,
            });
        }
        // A rejection may be unenhanced even if the request was enhanced.
        if header.flags.has(Flags::REJECT) {
            let prefix = reply.prefix().ok().flatten();
            //= rfc6581 section 9.1
            //# The initiator MUST pass the responder provided IRD and ORD to the ULP for
            //# both MPA Accept and Reject messages.
            return Ok(Outcome::Rejected {
                peer_ird: prefix.map(|p| p.ird),
                peer_ord: prefix.map(|p| p.ord),
            });
        }
        let prefix = reply.prefix()?;
        let mut agreed = self
            .params
            .agree(header.revision, self.enhanced, header.flags);
        match (self.enhanced, prefix) {
            (true, Some(prefix)) => self.agree_on_ird_ord(&prefix, &mut agreed)?,
            (true, None) => return Err(StartupError::NotEnhanced),
            (false, Some(_)) => return Err(StartupError::EnhancedUnasked),
            (false, None) => {}
        }
        Ok(Outcome::Accepted(agreed))
    }

    /// Determines IRD, ORD and the RTR message from an enhanced reply.
    fn agree_on_ird_ord(
        &self,
        reply: &EnhancedPrefix,
        agreed: &mut Agreed,
    ) -> Result<(), StartupError> {
        //= rfc6581 section 9.1
        //# The responder and initiator MUST pass the peer's provided IRD and ORD
        //# values to the ULP, in addition to using the values as calculated by
        //# the preceding rules.
        agreed.peer_ird = reply.ird;
        agreed.peer_ord = reply.ord;
        let negotiate = self.params.ird_ord_negotiate;
        //= rfc6581 section 9.1
        //# The initiator MUST leave its
        //# local endpoint ORD value unchanged upon receiving a responder IRD
        //# value of 0x3FFF.
        if negotiate && reply.ird != NO_NEGOTIATION {
            //= rfc6581 section 9.1
            //# Upon receiving the MPA Accept Frame from the responder, the initiator
            //# MUST set its IRD at least to the responder ORD and its ORD at most to
            //# the responder IRD.
            agreed.ord = min(self.requested_ord(), reply.ird);
        }
        //= rfc6581 section 9.1
        //# The initiator MUST
        //# leave its local endpoint IRD value unchanged upon receiving a
        //# responder ORD value of 0x3FFF.
        if negotiate && reply.ord != NO_NEGOTIATION {
            let max = self.params.max_ird();
            if reply.ord > max {
                return Err(StartupError::InsufficientIrd {
                    needed: reply.ord,
                    max,
                });
            }
            agreed.ird = agreed.ird.max(reply.ord);
        }
        // Flag A is ignored if we did not set it.
        if self.params.peer_to_peer && reply.peer_to_peer {
            agreed.rtr = Some(self.rtr(reply)?);
            agreed.peer_to_peer = true;
        }
        Ok(())
    }

    //= rfc6581 section 9.2
    //# Upon receiving the MPA Accept Frame with Control Flag A set to 1, the
    //# initiator MUST generate one of the negotiated RTR indications.
    fn rtr(&self, reply: &EnhancedPrefix) -> Result<Rtr, StartupError> {
        RtrSet::of(reply)
            .and(self.offer())
            .preferred()
            .ok_or(StartupError::NoMatchingRtr)
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator")
            .field("params", &self.params)
            .field("enhanced", &self.enhanced)
            .field("request_len", &self.request_len)
            .finish()
    }
}
