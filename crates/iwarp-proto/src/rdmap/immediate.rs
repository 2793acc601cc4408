//! Immediate Data, and how its 64 bits carry the verbs' 32. RFC 7306 §6.
//!
//! The RFC gives an Immediate Data message 8 octets without structure; the verbs have 4. This
//! project's mapping:
//!
//! | octets | content |
//! | --- | --- |
//! | 0 to 3 | the immediate value, network order |
//! | 4 to 7 | 0: stands alone or ends a Write with Immediate; 1: belongs to the Send that follows |
//!
//! A Write with Immediate is the Write followed by the Immediate Data, as RFC 7306 §6 describes it.
//! For a Send with Immediate the Immediate Data comes first, so that a receiver that knows the
//! mapping can hold it back and complete both with one receive.

/// The content of an Immediate Data message.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Immediate([u8; 8]);

impl Immediate {
    /// Octets on the wire.
    pub const LEN: usize = 8;

    const BEFORE_SEND: u32 = 1;

    /// Creates an immediate that completes on its own.
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

    /// Creates it from any octets, with any second word.
    #[inline]
    pub const fn from_octets(octets: [u8; 8]) -> Self {
        Self(octets)
    }

    /// Returns its octets on the wire.
    #[inline]
    pub const fn octets(self) -> [u8; 8] {
        self.0
    }

    /// Returns the verbs' 32-bit value.
    #[inline]
    pub const fn value(self) -> u32 {
        (u64::from_be_bytes(self.0) >> 32) as u32
    }

    /// Returns `true` if the next Send carries this value. A second word other than 1 counts as
    /// plain, because another implementation may use all 8 octets for its own purposes.
    #[inline]
    pub const fn belongs_to_send(self) -> bool {
        u64::from_be_bytes(self.0) as u32 == Self::BEFORE_SEND
    }

    /// Reads the payload of an Immediate Data message; `None` unless it has exactly 8 octets.
    #[inline]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        //= rfc7306 section 6.3
        //# The Remote Peer MUST check that Immediate Data and Immediate Data
        //# with SE Messages include exactly 8 bytes of data from the DDP
        //# layer.
        payload.try_into().ok().map(Self)
    }

    /// Writes the octets. Returns 8, or 0 when `out` is shorter and nothing was written.
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
