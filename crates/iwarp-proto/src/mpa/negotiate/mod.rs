//! Contents and meaning of the start-up frames: both roles as state machines without I/O. RFC 5044
//! §7.1.2, RFC 6581 §9.
//!
//! Where the RFCs leave a choice, the implementation follows existing peers:
//!
//! - As in siw and cxgb4, ORD is lowered to the peer's IRD, and IRD is raised to the peer's ORD as
//!   far as the device allows. A peer that requests more is not refused.
//! - The responder selects exactly one RTR message, because cxgb4 as initiator terminates the
//!   connection otherwise. If several are offered, it selects Write (which needs no response and no
//!   IRD), then Read, then Send, as siw does.
//! - If the responder does not return flag A (early versions of siw), the client-server model
//!   without RTR message is used.
//! - Every reply contains flag C if either side requires CRCs, because siw as initiator only
//!   considers the reply.
//! - Reserved bits are ignored. Below revision 2, flag S is a reserved bit.

mod initiator;
mod responder;

pub use initiator::{Initiator, Outcome};
pub use responder::{PendingRequest, Responder};

use super::startup::{
    EnhancedPrefix, FRAME_HEADER_LEN, Flags, FrameHeader, FrameKind, MAX_PRIVATE_DATA,
    NO_NEGOTIATION, StartupError,
};

/// The largest IRD or ORD that can be negotiated. The fields have 14 bits, and all ones mean "no
/// negotiation".
pub const MAX_DEPTH: u16 = NO_NEGOTIATION - 1;

/// The message by which the initiator signals that it is ready to receive.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Rtr {
    /// A zero-length Send.
    Send,
    /// A zero-length RDMA Write.
    Write,
    /// A zero-length RDMA Read.
    Read,
}

/// A set of RTR messages.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct RtrSet {
    /// Zero-length Send.
    pub send: bool,
    /// Zero-length Write.
    pub write: bool,
    /// Zero-length Read.
    pub read: bool,
}

impl RtrSet {
    /// The empty set.
    pub const NONE: Self = Self {
        send: false,
        write: false,
        read: false,
    };
    /// All three messages.
    pub const ALL: Self = Self {
        send: true,
        write: true,
        read: true,
    };
    /// The messages that RNICs commonly support: Write and Read.
    pub const WRITE_READ: Self = Self {
        send: false,
        write: true,
        read: true,
    };

    /// Returns the set of one message.
    pub const fn only(rtr: Rtr) -> Self {
        match rtr {
            Rtr::Send => Self {
                send: true,
                ..Self::NONE
            },
            Rtr::Write => Self {
                write: true,
                ..Self::NONE
            },
            Rtr::Read => Self {
                read: true,
                ..Self::NONE
            },
        }
    }

    /// Returns `true` if `rtr` is in the set.
    pub const fn contains(self, rtr: Rtr) -> bool {
        match rtr {
            Rtr::Send => self.send,
            Rtr::Write => self.write,
            Rtr::Read => self.read,
        }
    }

    /// Returns the messages that are in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            send: self.send && other.send,
            write: self.write && other.write,
            read: self.read && other.read,
        }
    }

    /// Returns the message to use: Write if possible, because it needs no response and no IRD; then
    /// Read, which RNICs support best; then Send, which consumes a receive of the peer.
    pub const fn preferred(self) -> Option<Rtr> {
        if self.write {
            Some(Rtr::Write)
        } else if self.read {
            Some(Rtr::Read)
        } else if self.send {
            Some(Rtr::Send)
        } else {
            None
        }
    }

    /// Reads the flags B, C, D of a prefix. They are ignored if A is 0.
    const fn of(prefix: &EnhancedPrefix) -> Self {
        //= rfc6581 section 9.2
        //# On reception, if Control
        //# Flag A is set to 0, then Control Flags B, C, and D MUST be ignored.
        if prefix.peer_to_peer {
            Self {
                send: prefix.rtr_send,
                write: prefix.rtr_write,
                read: prefix.rtr_read,
            }
        } else {
            Self::NONE
        }
    }
}

impl Default for RtrSet {
    fn default() -> Self {
        Self::WRITE_READ
    }
}

/// What this side requests, and its limits.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct LocalParams {
    /// The MPA revision: 1 (RFC 5044) or 2 (RFC 6581). A responder of revision 2 also accepts 0 and
    /// 1.
    pub revision: u8,
    /// This side requires CRCs. They are used if either side requires them.
    pub crc: bool,
    /// The peer must send markers.
    pub markers_rx: bool,
    /// Number of inbound Read Requests that this side offers.
    pub ird: u16,
    /// Number of outbound Read Requests that this side requests.
    pub ord: u16,
    /// The largest IRD that this side grants if the peer requests more than `ird`.
    pub max_ird: u16,
    /// The largest ORD that this side supports.
    pub max_ord: u16,
    /// Initiator: request the peer-to-peer model. A responder uses the model of the request.
    pub peer_to_peer: bool,
    /// The RTR messages that this side can send (initiator) or recognise (responder).
    pub rtr_offer: RtrSet,
    /// Initiator: negotiate IRD and ORD. If `false`, both sides keep their own values.
    pub ird_ord_negotiate: bool,
}

impl Default for LocalParams {
    /// Revision 2, peer-to-peer with Write or Read as RTR message, CRC, no markers. RNICs and siw
    /// accept that.
    fn default() -> Self {
        //= rfc5044 section 1.2
        //# It is possible to disable this CRC check; however, CRCs MUST be enabled
        //# unless it is clear that the end-to-end connection through the network has
        //# data integrity at least as good as an MPA with CRC enabled (for example,
        //# when IPsec is implemented end to end).
        //= rfc5044 section 4.4
        //# The default configuration for a
        //# connection MUST be to use CRCs.
        Self {
            revision: 2,
            crc: true,
            markers_rx: false,
            ird: 16,
            ord: 16,
            max_ird: 128,
            max_ord: 128,
            peer_to_peer: true,
            rtr_offer: RtrSet::default(),
            ird_ord_negotiate: true,
        }
    }
}

impl LocalParams {
    const fn ird(&self) -> u16 {
        min(self.ird, self.max_ird())
    }

    const fn ord(&self) -> u16 {
        min(self.ord, min(self.max_ord, MAX_DEPTH))
    }

    const fn max_ird(&self) -> u16 {
        min(self.max_ird, MAX_DEPTH)
    }

    /// Returns the agreement with a peer whose frame has these flags, before IRD, ORD and the RTR
    /// message are determined.
    const fn agree(&self, revision: u8, enhanced: bool, peer: Flags) -> Agreed {
        Agreed {
            revision,
            enhanced,
            //= rfc5044 section 7.1.1
            //# When this bit is '1' in either the MPA Request Frame
            //# or MPA Reply Frame, CRCs MUST be generated and checked by both
            //# endpoints.
            //= rfc5044 section 7.1.1
            //# When this field is '0' in the MPA Request Frame and the MPA Reply Frame,
            //# CRCs MUST not be checked and need not be generated by either endpoint.
            //= rfc5044 section 4.4
            //# An MPA implementation MUST implement CRC support and MUST either:
            //= rfc5044 section 4.4
            //# If an MPA instance has declared that it does not require CRCs, it MUST turn
            //# off CRC checking immediately after receipt of an MPA mode declaration
            //# indicating that its peer also does not require CRCs.
            //= rfc5044 section 4.4
            //# After receipt of an MPA startup declaration indicating that its peer
            //# requires CRCs, an MPA instance MUST continue generating and checking CRCs
            //# until the connection terminates.
            //= rfc5044 section C.1
            //# Since the RDMAC RNIC will always request CRC use, then, according to the
            //# IETF MPA specification, both peers MUST generate and check CRCs.
            crc: self.crc || peer.has(Flags::CRC),
            //= rfc5044 section 7.1.1
            //# M: This bit declares an endpoint's REQUIRED Marker usage.
            //= rfc5044 section 7.1.1
            //# When '1' Markers MUST be added as described in Section 4.3, MPA
            //# Markers.
            //= rfc5044 section 7.1.1
            //# When this bit is '1' in an MPA Request Frame, the Initiator declares that
            //# Markers are REQUIRED in FPDUs sent from the Responder.
            //= rfc5044 section 7.1.1
            //# When set to '1' in an MPA Reply Frame, this bit declares that Markers are
            //# REQUIRED in FPDUs sent from the Initiator.
            //= rfc5044 section 7.1.1
            //# When in a received MPA Request Frame or MPA Reply Frame and the value is
            //# '0', Markers MUST NOT be added to the data stream by that endpoint.
            markers_tx: peer.has(Flags::MARKERS),
            markers_rx: self.markers_rx,
            ird: self.ird(),
            ord: self.ord(),
            peer_ird: NO_NEGOTIATION,
            peer_ord: NO_NEGOTIATION,
            rtr: None,
            peer_to_peer: false,
        }
    }
}

/// The parameters that both sides have agreed on.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Agreed {
    //= rfc5044 section 3
    //# MPA MUST provide the protocol version negotiated with its peer to DDP.
    /// The revision of the frames exchanged.
    pub revision: u8,
    /// The frames were enhanced.
    pub enhanced: bool,
    /// CRCs are generated and checked, in both directions.
    pub crc: bool,
    /// Sent data contain markers.
    pub markers_tx: bool,
    /// Received data contain markers.
    pub markers_rx: bool,
    /// Number of inbound Read Requests that this side must support.
    pub ird: u16,
    /// Number of outbound Read Requests that this side may have in flight.
    pub ord: u16,
    /// The IRD in the peer's frame, or [`NO_NEGOTIATION`] if the frame contains none.
    pub peer_ird: u16,
    /// The ORD in the peer's frame, or [`NO_NEGOTIATION`] if the frame contains none.
    pub peer_ord: u16,
    /// The RTR message that the initiator sends first in the peer-to-peer model. A responder may
    /// receive another first message, because siw sends no RTR message if it offered none.
    pub rtr: Option<Rtr>,
    /// The peer-to-peer model is used: after the RTR message, either side may send first.
    pub peer_to_peer: bool,
}

const fn min(a: u16, b: u16) -> u16 {
    if a < b { a } else { b }
}

/// Writes a frame. Returns its length.
fn emit_frame(
    kind: FrameKind,
    revision: u8,
    flags: Flags,
    prefix: Option<EnhancedPrefix>,
    private_data: &[u8],
    out: &mut [u8],
) -> Result<usize, StartupError> {
    let prefix_len = if prefix.is_some() {
        EnhancedPrefix::LEN
    } else {
        0
    };
    //= rfc5044 section 7.1.1
    //# The Private Data field MUST be between 0 and 512
    //# octets in length.
    let max = MAX_PRIVATE_DATA.saturating_sub(prefix_len);
    if private_data.len() > max {
        return Err(StartupError::PrivateDataTooLong {
            len: private_data.len(),
            max,
        });
    }
    //= rfc5044 section 7.1.1
    //# This field MUST contain the length in octets of the
    //# Private Data field.
    let pd_length = private_data.len().wrapping_add(prefix_len) as u16;
    let flags = flags.with(Flags::ENHANCED, prefix.is_some());
    let header = FrameHeader {
        kind,
        flags,
        revision,
        pd_length,
    };
    let needed = header.frame_len();
    let out = out
        .get_mut(..needed)
        .ok_or(StartupError::OutputTooSmall { needed })?;
    header.emit(out);
    let pd = out.get_mut(FRAME_HEADER_LEN..).unwrap_or_default();
    if let Some(prefix) = prefix {
        prefix.emit(pd);
    }
    if let Some(dst) = pd.get_mut(prefix_len..)
        && dst.len() == private_data.len()
    {
        dst.copy_from_slice(private_data);
    }
    Ok(needed)
}
