//! STags and untagged queue numbers. RFC 5041 §4.2 and §4.3, RFC 5040 §4.1, RFC 7306 §5.2.

use crate::wire::named_values;
use core::fmt;

/// A Steering Tag, which identifies a tagged buffer. The RFCs leave its structure to the owner. In
/// this project, as in the RDMA verbs, it consists of a 24-bit index (upper bits) and an 8-bit key
/// that the consumer may choose.
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Stag(pub u32);

impl Stag {
    /// Creates an STag from a 24-bit index (higher bits are dropped) and a key.
    #[inline]
    pub const fn new(index: u32, key: u8) -> Self {
        Self((index << 8) | key as u32)
    }

    /// Returns the upper 24 bits.
    #[inline]
    pub const fn index(self) -> u32 {
        self.0 >> 8
    }

    /// Returns the low octet.
    #[inline]
    pub const fn key(self) -> u8 {
        self.0 as u8
    }

    /// Returns the STag with the same index and another key.
    #[inline]
    pub const fn with_key(self, key: u8) -> Self {
        Self::new(self.index(), key)
    }
}

impl fmt::Debug for Stag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

impl fmt::Display for Stag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

named_values! {
    /// The queue of an untagged message.
    pub struct QueueNumber(u32) {
        /// Sends and Immediate Data.
        SEND = 0;
        /// Read Requests and Atomic Requests.
        READ_REQUEST = 1;
        /// Terminate.
        TERMINATE = 2;
        /// Atomic Responses (RFC 7306 §5.2).
        ATOMIC_RESPONSE = 3;
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::format;

    #[test]
    fn stag_consists_of_index_and_key() {
        let s = Stag::new(0xabcdef, 0x12);
        assert_eq!((s.0, s.index(), s.key()), (0xabcd_ef12, 0xabcdef, 0x12));
        assert_eq!(s.with_key(0xff), Stag(0xabcd_efff));
        assert_eq!(Stag::new(0xff00_0001, 0), Stag(0x100));
        assert_eq!(
            format!("{:?} {}", Stag(0x1f), Stag::default()),
            "0x0000001f 0x00000000"
        );
        assert_eq!(
            format!("{:?} {:?}", QueueNumber::TERMINATE, QueueNumber(9)),
            "TERMINATE QueueNumber(9)"
        );
    }
}
