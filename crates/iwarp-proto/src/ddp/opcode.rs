//! RDMAP opcodes and their properties. RFC 5040 §4.1 figure 4, RFC 7306 §4.1 figure 2.

use super::QueueNumber;
use crate::wire::named_values;

named_values! {
    /// An RDMAP opcode: four bits on the wire. Any value can be represented; see
    /// [`Opcode::is_known`].
    pub struct Opcode(u8) {
        //= rfc5040 section 4.1
        //# Figure 4 defines the value of the RDMA Opcode field that MUST be used for
        //# each RDMA Message.
        /// RDMA Write.
        WRITE = 0;
        /// RDMA Read Request.
        READ_REQUEST = 1;
        /// RDMA Read Response.
        READ_RESPONSE = 2;
        /// Send.
        SEND = 3;
        /// Send with Invalidate.
        SEND_INV = 4;
        /// Send with Solicited Event.
        SEND_SE = 5;
        /// Send with Solicited Event and Invalidate.
        SEND_SE_INV = 6;
        /// Terminate.
        TERMINATE = 7;
        /// Immediate Data.
        IMMEDIATE = 8;
        /// Immediate Data with Solicited Event.
        IMMEDIATE_SE = 9;
        /// Atomic Request.
        ATOMIC_REQUEST = 10;
        /// Atomic Response.
        ATOMIC_RESPONSE = 11;
    }
}

impl Opcode {
    /// Returns `true` if RFC 5040 or RFC 7306 defines the opcode.
    #[inline]
    pub const fn is_known(self) -> bool {
        self.0 <= Self::ATOMIC_RESPONSE.0
    }

    /// The four Sends.
    pub const SENDS: [Self; 4] = [Self::SEND, Self::SEND_INV, Self::SEND_SE, Self::SEND_SE_INV];

    /// Returns `true` for the four Sends, but not for Immediate Data, which also consumes a
    /// receive.
    #[inline]
    pub const fn is_send(self) -> bool {
        matches!(
            self,
            Self::SEND | Self::SEND_INV | Self::SEND_SE | Self::SEND_SE_INV
        )
    }

    /// Returns `true` if the segments of the message are tagged: Write and Read Response.
    #[inline]
    pub const fn is_tagged(self) -> bool {
        //= rfc5040 section 4.1
        //# Figure 4,
        //# "RDMA Usage of DDP Fields", MUST be used to define the value of the
        //# Tagged flag that is handed to the DDP layer for each RDMA Message.
        //= rfc7306 section 5.2.1
        //# That is, the Local Peer's RDMAP layer MUST request that the DDP mark the
        //# Message as Untagged.
        //= rfc7306 section 5.2.2
        //# That is, the Responder RDMAP layer MUST request that the DDP mark the
        //# Message as Untagged.
        //= rfc7306 section 6.3
        //# That is, the Local Peer's RDMAP Layer MUST request that the DDP layer mark
        //# the Message as Untagged.
        matches!(self, Self::WRITE | Self::READ_RESPONSE)
    }

    /// Returns `true` if the message requests a solicited event at the data sink.
    #[inline]
    pub const fn solicited(self) -> bool {
        matches!(self, Self::SEND_SE | Self::SEND_SE_INV | Self::IMMEDIATE_SE)
    }

    /// Returns `true` if the message carries an STag to invalidate.
    #[inline]
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SEND_INV | Self::SEND_SE_INV)
    }

    /// Returns the untagged queue of the message; `None` for tagged and unknown opcodes.
    #[inline]
    pub const fn queue_number(self) -> Option<u32> {
        //= rfc7306 section 5.2
        //# Atomic
        //# Operation Request messages MUST use the same Queue Number as RDMA
        //# Read Requests (QN=1).
        //= rfc7306 section 5.2
        //# Atomic
        //# Operation Response messages MUST set Queue Number (QN) to 3 in the
        //# DDP header.
        //= rfc7306 section 6.3
        //# For an Immediate Data or Immediate Data with SE Message, the Local
        //# Peer's RDMAP Layer MUST request that the DDP layer set the Queue
        //# Number field to zero.
        Some(match self {
            Self::SEND
            | Self::SEND_INV
            | Self::SEND_SE
            | Self::SEND_SE_INV
            | Self::IMMEDIATE
            | Self::IMMEDIATE_SE => QueueNumber::SEND.0,
            //= rfc7306 section 5.2.1
            //# That is, the Requester's RDMAP layer MUST request that the DDP layer set the
            //# Queue Number field to one.
            Self::READ_REQUEST | Self::ATOMIC_REQUEST => QueueNumber::READ_REQUEST.0,
            Self::TERMINATE => QueueNumber::TERMINATE.0,
            //= rfc7306 section 5.2.2
            //# That is, the Responder's RDMAP layer MUST request that the DDP layer set the
            //# Queue Number field to 3.
            Self::ATOMIC_RESPONSE => QueueNumber::ATOMIC_RESPONSE.0,
            _ => return None,
        })
    }
}
