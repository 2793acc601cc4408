//! Errors before full operation, and the Terminate for each. RFC 5044 §7.1.2 and §8, RFC 6581 §8.

use crate::rdmap::TerminateCode;
use core::fmt;

/// Why MPA start-up fails.
///
/// After an error in a peer's frame, close the connection and report the error locally. Only an
/// initiator that has received an enhanced reply sends a Terminate after some errors, because only
/// then the peer reads FPDUs; see [`Self::terminate`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum StartupError {
    /// The first 16 octets are not an MPA key.
    BadKey,
    /// A Request arrived instead of a Reply, or vice versa: both sides started in the same role.
    WrongRole,
    /// This side does not support the revision, or is configured not to use it.
    UnsupportedRevision {
        /// The revision received.
        revision: u8,
    },
    /// The peer announces more than 512 octets of private data.
    PeerPrivateDataTooLong {
        /// The announced length in octets.
        len: u16,
    },
    /// S is set but the private data is shorter than the enhanced prefix.
    MissingEnhancedPrefix,
    /// The reply to an enhanced request is not enhanced.
    NotEnhanced,
    /// The reply to a plain request is enhanced.
    EnhancedUnasked,
    /// The responder's ORD exceeds the largest IRD of this side.
    InsufficientIrd {
        /// The responder's ORD.
        needed: u16,
        /// The largest IRD of this side.
        max: u16,
    },
    /// The responder's reply contains no RTR message that we can send.
    NoMatchingRtr,
    /// Our own private data is too long.
    PrivateDataTooLong {
        /// The length in octets.
        len: usize,
        /// The maximum length: 512, or 508 in an enhanced frame.
        max: usize,
    },
    /// The output buffer is shorter than the frame.
    OutputTooSmall {
        /// Octets needed.
        needed: usize,
    },
    /// A local error (no memory, no queue pair) after the peer had accepted.
    Local,
}

impl StartupError {
    /// Returns the Terminate that the initiator sends before it closes, if any.
    pub const fn terminate(&self) -> Option<TerminateCode> {
        match self {
            //= rfc6581 section 9.1
            //# If the initiator does not have sufficient
            //# resources for the required IRD, it MUST send a TERM message to the
            //# responder indicating insufficient resources and terminate the
            //# connection due to insufficient resources.
            //= rfc6581 section 9.1
            //# Thus, the TERM message MUST contain Layer 2, Error Type 0, Error Code 6.
            Self::InsufficientIrd { .. } => Some(TerminateCode::MPA_INSUFFICIENT_IRD),
            //= rfc6581 section 9.2
            //# If
            //# the initiator is not able to generate any of the responder-supported
            //# RTR indications, then it MUST send a TERM message to the responder
            //# indicating failure to negotiate a mutually compatible connection
            //# model or RTR option, and terminate the connection.
            //= rfc6581 section 9.2
            //# Thus, the TERM message MUST contain Layer 2, Error Type 0, Error Code 7.
            Self::NoMatchingRtr => Some(TerminateCode::MPA_NO_MATCHING_RTR),
            //= rfc6581 section 9.3
            //# The initiator or responder MUST generate the TERM message that
            //# contains Layer 2, Error Type 0, Error Code 5 when it encounters
            //# any error locally for which the special Error Code is not defined
            //# in Section 8 before resetting the connection.
            Self::Local => Some(TerminateCode::MPA_LOCAL_CATASTROPHIC),
            // After a malformed frame, RFC 5044 §8 requires that TCP is closed immediately. The
            // peer would not read a Terminate.
            _ => None,
        }
    }

    /// Returns the MPA error code of RFC 5044 §8 and RFC 6581 §8 to report locally; `None` if this
    /// side misused the call.
    //= rfc5044 section 8
    //# The following errors MUST be detected by MPA and the codes SHOULD be
    //# provided to DDP or other Consumer:
    pub const fn code(&self) -> Option<TerminateCode> {
        match self {
            Self::BadKey
            | Self::WrongRole
            | Self::UnsupportedRevision { .. }
            | Self::PeerPrivateDataTooLong { .. }
            | Self::MissingEnhancedPrefix
            | Self::NotEnhanced
            | Self::EnhancedUnasked => Some(TerminateCode::MPA_INVALID_FRAME),
            Self::PrivateDataTooLong { .. } | Self::OutputTooSmall { .. } => None,
            _ => self.terminate(),
        }
    }
}

impl fmt::Display for StartupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadKey => f.write_str("frame does not start with an MPA key"),
            Self::WrongRole => f.write_str("the peer started in the same MPA role"),
            Self::UnsupportedRevision { revision } => {
                write!(f, "MPA revision {revision} is not supported")
            }
            Self::PeerPrivateDataTooLong { len } => {
                write!(
                    f,
                    "peer announces {len} octets of private data, more than 512"
                )
            }
            Self::MissingEnhancedPrefix => f.write_str("enhanced frame without IRD and ORD"),
            Self::NotEnhanced => f.write_str("reply to an enhanced request is not enhanced"),
            Self::EnhancedUnasked => f.write_str("reply to a plain request is enhanced"),
            Self::InsufficientIrd { needed, max } => {
                write!(f, "peer's ORD {needed} exceeds the largest IRD {max}")
            }
            Self::NoMatchingRtr => f.write_str("no common RTR message"),
            Self::PrivateDataTooLong { len, max } => {
                write!(
                    f,
                    "{len} octets of private data exceed the maximum of {max}"
                )
            }
            Self::OutputTooSmall { needed } => write!(f, "output needs {needed} octets"),
            Self::Local => f.write_str("local error during MPA start-up"),
        }
    }
}

impl core::error::Error for StartupError {}
