//! Views of the two DDP segment headers. RFC 5041 §4.2 and §4.3, RFC 5040 §4.1 figure 3.
//!
//! A view does not check the fields. [`Header::parse`](super::Header::parse) does.

use super::control::{bit, control_octets};
use super::{Opcode, Stag};
use crate::wire::{be32, be64, put};

/// Octets before the payload in the ULPDU of a tagged segment.
pub const TAGGED_HEADER_LEN: usize = 14;
/// Octets before the payload in the ULPDU of an untagged segment.
pub const UNTAGGED_HEADER_LEN: usize = 18;

/// The offsets of the fields from the start of the ULPDU.
mod field {
    use core::ops::Range;
    pub(super) const DDP_CONTROL: usize = 0;
    //= rfc5040 section 4.1
    //# The first octet reserved for ULP use in the DDP Protocol MUST be used by the
    //# RDMAP to carry the RDMAP Control Field.
    pub(super) const RDMAP_CONTROL: usize = 1;
    // Tagged.
    //= rfc5041 section 4.2
    //# Figure 4 shows the DDP Header format that MUST be used in all DDP Segments
    //# that target Tagged Buffers.
    pub(super) const STAG: Range<usize> = 2..6;
    pub(super) const TO: Range<usize> = 6..14;
    // Untagged.
    //= rfc5041 section 4.3
    //# Figure 5 shows the DDP Header format that MUST be used in all DDP Segments
    //# that target Untagged Buffers.
    //= rfc5040 section 4.1
    //# For Send with Invalidate and Send with Solicited Event and Invalidate, the
    //# second through fifth octets of the DDP RsvdULP field MUST be used by RDMAP
    //# to carry the Invalidate STag.
    pub(super) const RSVD_ULP: Range<usize> = 2..6;
    pub(super) const QN: Range<usize> = 6..10;
    pub(super) const MSN: Range<usize> = 10..14;
    pub(super) const MO: Range<usize> = 14..18;
}

macro_rules! view {
    ($(#[$meta:meta])* $name:ident, $len:ident, tagged: $tagged:expr) => {
        $(#[$meta])*
        #[derive(Copy, Clone, Debug, PartialEq, Eq)]
        pub struct $name<T>(T);

        impl<T: AsRef<[u8]>> $name<T> {
            /// Creates a view of the header at the start of `octets`. Returns `None` if they are
            /// too short. Ignores the T bit.
            #[inline]
            pub fn new(octets: T) -> Option<Self> {
                (octets.as_ref().len() >= $len).then_some(Self(octets))
            }

            /// Returns the octets.
            pub fn into_inner(self) -> T {
                self.0
            }

            #[inline(always)]
            fn head(&self) -> &[u8; $len] {
                // `new` has checked the length. If the container has become shorter since then, all
                // octets read as zero.
                self.0.as_ref().first_chunk().unwrap_or(&[0; $len])
            }

            /// Returns the T bit: `true` if the segment is tagged.
            #[inline]
            pub fn tagged(&self) -> bool {
                self.head()[field::DDP_CONTROL] & bit::TAGGED != 0
            }

            /// Returns the L bit: `true` if this is the last segment of its message.
            #[inline]
            pub fn last(&self) -> bool {
                self.head()[field::DDP_CONTROL] & bit::LAST != 0
            }

            /// Returns DV, 0 to 3.
            #[inline]
            pub fn ddp_version(&self) -> u8 {
                self.head()[field::DDP_CONTROL] & bit::DDP_VERSION
            }

            /// Returns RV, 0 to 3.
            #[inline]
            pub fn rdmap_version(&self) -> u8 {
                self.head()[field::RDMAP_CONTROL] >> bit::RDMAP_VERSION_SHIFT
            }

            /// Returns the RDMAP opcode, 0 to 15.
            #[inline]
            pub fn opcode(&self) -> Opcode {
                Opcode(self.head()[field::RDMAP_CONTROL] & bit::OPCODE)
            }

            /// Returns the octets after the header.
            pub fn payload(&self) -> &[u8] {
                self.0.as_ref().get($len..).unwrap_or_default()
            }
        }

        impl<T: AsRef<[u8]> + AsMut<[u8]>> $name<T> {
            /// Writes both control octets, with the T bit of this view's type, versions 1 and 1,
            /// and reserved bits zero.
            #[inline]
            pub fn set_control(&mut self, last: bool, opcode: Opcode) {
                //= rfc5041 section 4.1
                //# This field MUST be
                //# set to zero on transmit, and not checked on receive.
                //= rfc5041 section 4.1
                //# The value of DV MUST be the same for all the DDP Segments transmitted or
                //# received on a DDP Stream.
                //= rfc5040 section 4.1
                //# All RDMA Messages handed by the RDMAP layer to the DDP layer MUST define the
                //# value of the Tagged flag in the DDP Header.
                //= rfc5040 section 4.1
                //# Reserved.  MUST be set to zero by sender, ignored by
                //# the receiver.
                //= rfc5040 section 4.1
                //# The ordering of the bits in the first octet MUST be as defined in Figure 3,
                //# "DDP Control, RDMAP Control, and Invalidate STag Fields".
                let control = control_octets($tagged, last, opcode);
                self.put(field::DDP_CONTROL..field::RDMAP_CONTROL + 1, &control);
            }

            #[inline(always)]
            fn put(&mut self, at: core::ops::Range<usize>, value: &[u8]) {
                if let Some(head) = self.0.as_mut().first_chunk_mut::<$len>() {
                    put(head, at, value);
                }
            }
        }
    };
}

view! {
    /// A view of a tagged header (RDMA Write, Read Response).
    TaggedView, TAGGED_HEADER_LEN, tagged: true
}
view! {
    /// A view of an untagged header (all other messages).
    UntaggedView, UNTAGGED_HEADER_LEN, tagged: false
}

impl<T: AsRef<[u8]>> TaggedView<T> {
    /// Returns the STag of the sink's buffer.
    #[inline]
    pub fn stag(&self) -> Stag {
        Stag(be32(self.head(), field::STAG))
    }

    /// Returns the tagged offset of this segment's payload, in octets.
    #[inline]
    pub fn to(&self) -> u64 {
        be64(self.head(), field::TO)
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> TaggedView<T> {
    /// Sets the STag.
    #[inline]
    pub fn set_stag(&mut self, stag: Stag) {
        self.put(field::STAG, &stag.0.to_be_bytes());
    }

    /// Sets the tagged offset.
    #[inline]
    pub fn set_to(&mut self, to: u64) {
        self.put(field::TO, &to.to_be_bytes());
    }
}

impl<T: AsRef<[u8]>> UntaggedView<T> {
    /// Returns the last four RsvdULP octets, which contain RDMAP's STag to invalidate.
    #[inline]
    pub fn invalidate_stag(&self) -> Stag {
        Stag(be32(self.head(), field::RSVD_ULP))
    }

    /// Returns the queue number.
    #[inline]
    pub fn qn(&self) -> u32 {
        be32(self.head(), field::QN)
    }

    /// Returns the message sequence number. The first message of a queue has number 1.
    #[inline]
    pub fn msn(&self) -> u32 {
        be32(self.head(), field::MSN)
    }

    /// Returns the message offset of this segment's payload, in octets.
    #[inline]
    pub fn mo(&self) -> u32 {
        be32(self.head(), field::MO)
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> UntaggedView<T> {
    /// Sets the STag to invalidate; zero in messages that invalidate nothing.
    #[inline]
    pub fn set_invalidate_stag(&mut self, stag: Stag) {
        self.put(field::RSVD_ULP, &stag.0.to_be_bytes());
    }

    /// Sets the queue number.
    #[inline]
    pub fn set_qn(&mut self, qn: u32) {
        self.put(field::QN, &qn.to_be_bytes());
    }

    /// Sets the message sequence number.
    #[inline]
    pub fn set_msn(&mut self, msn: u32) {
        self.put(field::MSN, &msn.to_be_bytes());
    }

    /// Sets the message offset.
    #[inline]
    pub fn set_mo(&mut self, mo: u32) {
        self.put(field::MO, &mo.to_be_bytes());
    }
}
