//! The two control octets of a segment, of DDP and of RDMAP. RFC 5041 §4.1, RFC 5040 §4.1 figure 3.

use super::Opcode;

//= rfc5041 section 4.1
//# This field MUST be set
//# to one to indicate the version of the specification described in
//# this document.
/// DV: the DDP version of RFC 5041.
pub const DDP_VERSION: u8 = 1;
//= rfc5040 section 4.1
//# For this version of the RDMAP, all RDMA Messages MUST have:
//= rfc7306 section 4.1
//# All RDMA Messages defined in this specification MUST have:
/// RV: the RDMAP version of RFC 5040. (0 would be the RDMA Consortium's older protocol.)
pub const RDMAP_VERSION: u8 = 1;

/// Bits of the two control octets.
pub(super) mod bit {
    pub(in crate::ddp) const TAGGED: u8 = 0x80;
    pub(in crate::ddp) const LAST: u8 = 0x40;
    pub(in crate::ddp) const DDP_VERSION: u8 = 0x03;
    pub(in crate::ddp) const OPCODE: u8 = 0x0f;
    pub(in crate::ddp) const RDMAP_VERSION_SHIFT: u32 = 6;
}

/// Returns the two control octets of a segment. Reserved bits are zero.
#[inline]
pub const fn control_octets(tagged: bool, last: bool, opcode: Opcode) -> [u8; 2] {
    let tagged = if tagged { bit::TAGGED } else { 0 };
    let last = if last { bit::LAST } else { 0 };
    [
        DDP_VERSION | tagged | last,
        RDMAP_VERSION << bit::RDMAP_VERSION_SHIFT | opcode.0 & bit::OPCODE,
    ]
}
