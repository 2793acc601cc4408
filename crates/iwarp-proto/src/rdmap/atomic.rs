//! Atomic Request and Response headers. RFC 7306 §5.2, figures 4 to 6.

use crate::ddp::Stag;
use crate::wire::{be32, be64, named_values, put};

named_values! {
    /// AOpCode: four bits on the wire. Any value can be represented. RFC 7306 also describes a
    /// Swap, but figure 5 defines no code for it. A CmpSwap with compare mask 0 does the same.
    pub struct AtomicOp(u8) {
        /// Adds `add_swap`, in the fields that `add_swap_mask` defines.
        FETCH_ADD = 0;
        /// Stores the bits of `add_swap` in `add_swap_mask`, if the value equals `compare` in the
        /// bits of `compare_mask`.
        CMP_SWAP = 2;
    }
}

mod request {
    use core::ops::Range;
    pub(super) const OP: Range<usize> = 0..4;
    pub(super) const REQUEST_ID: Range<usize> = 4..8;
    pub(super) const STAG: Range<usize> = 8..12;
    pub(super) const TO: Range<usize> = 12..20;
    pub(super) const ADD_SWAP: Range<usize> = 20..28;
    pub(super) const ADD_SWAP_MASK: Range<usize> = 28..36;
    pub(super) const COMPARE: Range<usize> = 36..44;
    pub(super) const COMPARE_MASK: Range<usize> = 44..52;
}

mod response {
    use core::ops::Range;
    pub(super) const REQUEST_ID: Range<usize> = 0..4;
    pub(super) const ORIGINAL: Range<usize> = 4..12;
}

/// A view of an Atomic Request header.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct AtomicRequestView<T>(T);

impl<T: AsRef<[u8]>> AtomicRequestView<T> {
    /// Creates a view of the header at the start of `octets`, or `None` if there are fewer than 52.
    #[inline]
    pub fn new(octets: T) -> Option<Self> {
        (octets.as_ref().len() >= AtomicRequest::LEN).then_some(Self(octets))
    }

    /// Returns the operation; the 28 reserved bits before it are ignored.
    #[inline]
    pub fn op(&self) -> AtomicOp {
        AtomicOp((be32(self.0.as_ref(), request::OP) & 0xf) as u8)
    }

    /// Returns the Request Identifier.
    #[inline]
    pub fn request_id(&self) -> u32 {
        be32(self.0.as_ref(), request::REQUEST_ID)
    }

    /// Returns the Remote STag.
    #[inline]
    pub fn stag(&self) -> Stag {
        Stag(be32(self.0.as_ref(), request::STAG))
    }

    /// Returns the Remote tagged offset.
    #[inline]
    pub fn to(&self) -> u64 {
        be64(self.0.as_ref(), request::TO)
    }

    /// Returns the Add or Swap Data.
    #[inline]
    pub fn add_swap(&self) -> u64 {
        be64(self.0.as_ref(), request::ADD_SWAP)
    }

    /// Returns the Add or Swap Mask.
    #[inline]
    pub fn add_swap_mask(&self) -> u64 {
        be64(self.0.as_ref(), request::ADD_SWAP_MASK)
    }

    /// Returns the Compare Data.
    #[inline]
    pub fn compare(&self) -> u64 {
        be64(self.0.as_ref(), request::COMPARE)
    }

    /// Returns the Compare Mask.
    #[inline]
    pub fn compare_mask(&self) -> u64 {
        be64(self.0.as_ref(), request::COMPARE_MASK)
    }
}

/// An Atomic Request: reads a 64-bit value at the target, changes it according to `op`, and returns
/// the original value.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct AtomicRequest {
    /// The operation. Only the low four bits are sent.
    pub op: AtomicOp,
    /// A number that the requester chooses, and the response returns.
    pub request_id: u32,
    /// The target buffer.
    pub stag: Stag,
    /// Offset of the target in that buffer; the address at that offset must be a multiple of 8.
    pub to: u64,
    /// The value to add or to store.
    pub add_swap: u64,
    /// For a swap, the bits of `add_swap` to store. For an addition, each set bit is the highest
    /// bit of a field (RFC 7306 §5.1.1).
    pub add_swap_mask: u64,
    /// The value to compare with (CmpSwap).
    pub compare: u64,
    /// The bits to compare (CmpSwap).
    pub compare_mask: u64,
}

impl AtomicRequest {
    /// Octets on the wire.
    pub const LEN: usize = 52;

    /// Reads the header. Returns `None` if there are fewer than 52 octets. Does not refuse unknown
    /// operations.
    #[inline]
    pub fn parse(octets: &[u8]) -> Option<Self> {
        let v = AtomicRequestView::new(octets.first_chunk::<{ Self::LEN }>()?)?;
        Some(Self {
            op: v.op(),
            request_id: v.request_id(),
            stag: v.stag(),
            to: v.to(),
            add_swap: v.add_swap(),
            add_swap_mask: v.add_swap_mask(),
            compare: v.compare(),
            compare_mask: v.compare_mask(),
        })
    }

    /// Writes the header. Returns its length, 52. If `out` is too short, writes nothing and returns
    /// 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let Some(out) = out.first_chunk_mut::<{ Self::LEN }>() else {
            return 0;
        };
        put(out, request::OP, &u32::from(self.op.0 & 0xf).to_be_bytes());
        put(out, request::REQUEST_ID, &self.request_id.to_be_bytes());
        put(out, request::STAG, &self.stag.0.to_be_bytes());
        put(out, request::TO, &self.to.to_be_bytes());
        put(out, request::ADD_SWAP, &self.add_swap.to_be_bytes());
        put(
            out,
            request::ADD_SWAP_MASK,
            &self.add_swap_mask.to_be_bytes(),
        );
        put(out, request::COMPARE, &self.compare.to_be_bytes());
        put(out, request::COMPARE_MASK, &self.compare_mask.to_be_bytes());
        Self::LEN
    }
}

/// A view of an Atomic Response header.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct AtomicResponseView<T>(T);

impl<T: AsRef<[u8]>> AtomicResponseView<T> {
    /// Creates a view of the header at the start of `octets`, or `None` if there are fewer than 12.
    #[inline]
    pub fn new(octets: T) -> Option<Self> {
        (octets.as_ref().len() >= AtomicResponse::LEN).then_some(Self(octets))
    }

    /// Returns the Original Request Identifier.
    #[inline]
    pub fn request_id(&self) -> u32 {
        be32(self.0.as_ref(), response::REQUEST_ID)
    }

    /// Returns the Original Remote Data Value.
    #[inline]
    pub fn original(&self) -> u64 {
        be64(self.0.as_ref(), response::ORIGINAL)
    }
}

/// An Atomic Response.
///
/// According to RFC 7306 §4, the header has 32 octets. But figure 6 and the DDP segment in appendix
/// A.2 only contain the two fields below, 12 octets, and these are sent.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct AtomicResponse {
    /// The request's identifier.
    pub request_id: u32,
    /// The value before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Octets on the wire.
    pub const LEN: usize = 12;

    /// Reads the header. Returns `None` if there are fewer than 12 octets.
    #[inline]
    pub fn parse(octets: &[u8]) -> Option<Self> {
        let v = AtomicResponseView::new(octets.first_chunk::<{ Self::LEN }>()?)?;
        Some(Self {
            request_id: v.request_id(),
            original: v.original(),
        })
    }

    /// Writes the header. Returns its length, 12. If `out` is too short, writes nothing and returns
    /// 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let Some(out) = out.first_chunk_mut::<{ Self::LEN }>() else {
            return 0;
        };
        put(out, response::REQUEST_ID, &self.request_id.to_be_bytes());
        put(out, response::ORIGINAL, &self.original.to_be_bytes());
        Self::LEN
    }
}
