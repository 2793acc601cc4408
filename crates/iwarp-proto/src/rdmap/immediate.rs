//! Immediate Data, and how its 64 bits carry the 32-bit immediate value of the verbs. RFC 7306 §6.
//!
//! In the RFC, an Immediate Data message has 8 octets without structure. The verbs have 4 octets.
//! This project uses the 8 octets as follows:
//!
//! | octets | content |
//! | --- | --- |
//! | 0 to 3 | the immediate value, in network order |
//! | 4 to 7 | 1 if the value belongs to the Send that follows, 0 otherwise |
//!
//! A Write with Immediate is sent as a Write and then Immediate Data, as RFC 7306 §6 describes. For
//! a Send with Immediate, the Immediate Data is sent first, so that a receiver that knows this
//! encoding can complete both messages with one receive.

/// The content of an Immediate Data message.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Immediate([u8; 8]);

impl Immediate {
    /// Octets on the wire.
    pub const LEN: usize = 8;

    const BEFORE_SEND: u32 = 1;

    /// Creates an immediate that does not belong to a Send.
    #[inline]
    pub const fn plain(imm: u32) -> Self {
        Self::with_word(imm, 0)
    }

    /// Creates an immediate that belongs to the next Send.
    #[inline]
    pub const fn before_send(imm: u32) -> Self {
        Self::with_word(imm, Self::BEFORE_SEND)
    }

    #[inline]
    const fn with_word(imm: u32, word: u32) -> Self {
        Self((((imm as u64) << 32) | word as u64).to_be_bytes())
    }

    /// Creates an immediate from its octets on the wire.
    #[inline]
    pub const fn from_octets(octets: [u8; 8]) -> Self {
        Self(octets)
    }

    /// Returns the octets on the wire.
    #[inline]
    pub const fn octets(self) -> [u8; 8] {
        self.0
    }

    /// Returns the verbs' 32-bit value.
    #[inline]
    pub const fn value(self) -> u32 {
        (u64::from_be_bytes(self.0) >> 32) as u32
    }

    /// Returns `true` if the value belongs to the next Send. Returns `false` if the second word is
    /// not 1, because another implementation may use all 8 octets for its own purposes.
    #[inline]
    pub const fn belongs_to_send(self) -> bool {
        u64::from_be_bytes(self.0) as u32 == Self::BEFORE_SEND
    }

    /// Reads the payload of an Immediate Data message. Returns `None` unless it has exactly 8
    /// octets.
    #[inline]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        //= rfc7306 section 6.3
        //# The Remote Peer MUST check that Immediate Data and Immediate Data
        //# with SE Messages include exactly 8 bytes of data from the DDP
        //# layer.
        payload.try_into().ok().map(Self)
    }

    /// Writes the octets. Returns their number, 8. If `out` is too short, writes nothing and
    /// returns 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        //= rfc7306 section 6.3
        //# For an Immediate Data or Immediate Data with SE Message, the Local
        //# Peer's RDMAP Layer MUST request that the DDP layer transmit 8
        //# bytes of data.
        match out.first_chunk_mut::<8>() {
            Some(out) => {
                *out = self.0;
                Self::LEN
            }
            None => 0,
        }
    }
}
