//! The enhanced connection establishment data: IRD, ORD and RTR offers in 32 bits. RFC 6581 §9.

use crate::wire::{be16, put};

mod field {
    use core::ops::Range;
    pub(super) const IRD: Range<usize> = 0..2;
    pub(super) const ORD: Range<usize> = 2..4;
}

/// Flags A (in the IRD half) and C (in the ORD half).
const HIGH: u16 = 0x8000;
/// Flags B (in the IRD half) and D (in the ORD half).
const LOW: u16 = 0x4000;
/// The 14 bits of IRD or ORD.
const DEPTH: u16 = 0x3fff;

/// The value of IRD or ORD if the sender does not negotiate it.
pub const NO_NEGOTIATION: u16 = 0x3fff;

/// The octets before the ULP's private data in an enhanced frame.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct EnhancedPrefix {
    /// Number of inbound Read Requests that the sender supports, 0 to 0x3ffe, or
    /// [`NO_NEGOTIATION`].
    pub ird: u16,
    /// Number of outbound Read Requests that the sender requests, 0 to 0x3ffe, or
    /// [`NO_NEGOTIATION`].
    pub ord: u16,
    /// A: the peer-to-peer model is used, in which the initiator sends an RTR message first.
    pub peer_to_peer: bool,
    /// B: the RTR message may be a zero-length Send.
    pub rtr_send: bool,
    /// C: the RTR message may be a zero-length Write.
    pub rtr_write: bool,
    /// D: the RTR message may be a zero-length Read.
    pub rtr_read: bool,
}

impl EnhancedPrefix {
    /// Length on the wire in octets.
    pub const LEN: usize = 4;

    /// Reads the prefix. Returns `None` if there are fewer than 4 octets.
    pub fn parse(octets: &[u8]) -> Option<Self> {
        let octets = octets.first_chunk::<{ Self::LEN }>()?;
        let (ird, ord) = (be16(octets, field::IRD), be16(octets, field::ORD));
        Some(Self {
            ird: ird & DEPTH,
            ord: ord & DEPTH,
            peer_to_peer: ird & HIGH != 0,
            rtr_send: ird & LOW != 0,
            rtr_write: ord & HIGH != 0,
            rtr_read: ord & LOW != 0,
        })
    }

    /// Writes the prefix. An IRD or ORD of more than 14 bits is written as 0x3ffe. Returns the
    /// length, 4. If `out` is too short, writes nothing and returns 0.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        //= rfc6581 section 9
        //# Note that this field MUST be
        //# sent in network byte order, with the IRD and ORD encoded as 14-bit
        //# unsigned integers.
        let Some(out) = out.first_chunk_mut::<{ Self::LEN }>() else {
            return 0;
        };
        let half = |depth: u16, high: bool, low: bool| {
            let depth = if depth > DEPTH { DEPTH - 1 } else { depth };
            depth | if high { HIGH } else { 0 } | if low { LOW } else { 0 }
        };
        let ird = half(self.ird, self.peer_to_peer, self.rtr_send);
        let ord = half(self.ord, self.rtr_write, self.rtr_read);
        put(out, field::IRD, &ird.to_be_bytes());
        put(out, field::ORD, &ord.to_be_bytes());
        Self::LEN
    }
}
