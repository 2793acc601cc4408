//! The MPA Request and Reply frames. RFC 5044 §7.1.1 and §7.1.2, RFC 6581 §6 and §9.
//!
//! Each side sends one frame: key (16 octets), flags (1), revision (1), length of the private data
//! (2), private data. In an enhanced frame (S set, revision 2), the private data begin with 4
//! octets of IRD, ORD and RTR offers. [`FrameReader`] collects a frame from a stream.
//! [`negotiate`](super::negotiate) determines the meaning of the frames.

mod error;
mod frame;
mod prefix;
mod reader;

pub use error::StartupError;
pub use frame::{Flags, Frame, FrameHeader, FrameKind, FrameView, ReplyFrame, RequestFrame};
pub use prefix::{EnhancedPrefix, NO_NEGOTIATION};
pub use reader::{FrameReader, Progress};

/// Number of octets before the private data.
pub const FRAME_HEADER_LEN: usize = 20;
//= rfc5044 section 7.1.2
//# The buffer that receives the Private Data field MUST be large enough to
//# receive that data; the amount of Private Data MUST not exceed the PD_Length
//# or the application buffer.
/// The longest private data of a frame in octets, including the enhanced prefix.
pub const MAX_PRIVATE_DATA: usize = 512;
/// Length of the longest frame in octets.
pub const MAX_FRAME_LEN: usize = FRAME_HEADER_LEN + MAX_PRIVATE_DATA;

//= rfc5044 section 7.1.1
//# Initiator mode senders MUST set this field to
//# the fixed value "MPA ID Req Frame" or (in byte order) 4D 50 41 20
//# 49 44 20 52 65 71 20 46 72 61 6D 65 (in hexadecimal).
/// Key of a Request.
pub const REQUEST_KEY: [u8; 16] = *b"MPA ID Req Frame";

//= rfc5044 section 7.1.1
//# Responder mode senders MUST set this field to
//# the fixed value "MPA ID Rep Frame" or (in byte order) 4D 50 41 20
//# 49 44 20 52 65 70 20 46 72 61 6D 65 (in hexadecimal).
/// Key of a Reply.
pub const REPLY_KEY: [u8; 16] = *b"MPA ID Rep Frame";

/// The highest supported MPA revision: RFC 6581.
pub const MAX_REVISION: u8 = 2;
