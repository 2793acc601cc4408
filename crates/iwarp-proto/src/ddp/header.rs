//! Header values: the headers of a segment, parsed and checked. RFC 5041 §4 and §7.1, RFC 5040 §4.1
//! figure 4 and §7.2.

use super::control::{DDP_VERSION, RDMAP_VERSION, bit, control_octets};
use super::view::{TAGGED_HEADER_LEN, TaggedView, UNTAGGED_HEADER_LEN, UntaggedView};
use super::{Opcode, QueueNumber, Stag};
use core::fmt;

/// Returns the length of the header of a ULPDU that starts with this octet: 14 if its T bit is set,
/// otherwise 18. A stream receiver collects that many octets before it parses the header.
#[inline]
pub const fn header_len(first_octet: u8) -> usize {
    if first_octet & bit::TAGGED != 0 {
        TAGGED_HEADER_LEN
    } else {
        UNTAGGED_HEADER_LEN
    }
}

/// The bits of the control octets whose values the opcode determines: T, both versions, and the
/// opcode itself.
const FIXED: u16 = u16::from_be_bytes([
    bit::TAGGED | bit::DDP_VERSION,
    u8::MAX << bit::RDMAP_VERSION_SHIFT | bit::OPCODE,
]);

/// The values of the [`FIXED`] bits in a valid segment, indexed by opcode. For an unknown opcode,
/// the entry is 0, which never matches because the opcode is not 0.
const VALID: [u16; 16] = {
    let mut valid = [0; 16];
    let mut rest: &mut [u16] = &mut valid;
    let mut opcode = Opcode(0);
    while let Some((here, later)) = rest.split_first_mut() {
        if opcode.is_known() {
            *here = FIXED & u16::from_be_bytes(control_octets(opcode.is_tagged(), false, opcode));
        }
        opcode = Opcode(opcode.0.wrapping_add(1));
        rest = later;
    }
    valid
};

/// The queue of each opcode, or the number of a nonexistent queue for opcodes without one.
const QUEUES: [u32; 16] = {
    let mut queues = [u32::MAX; 16];
    let mut rest: &mut [u32] = &mut queues;
    let mut opcode = Opcode(0);
    while let Some((here, later)) = rest.split_first_mut() {
        if let Some(queue) = opcode.queue_number() {
            *here = queue;
        }
        opcode = Opcode(opcode.0.wrapping_add(1));
        rest = later;
    }
    queues
};

/// The header of a tagged segment.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct TaggedHeader {
    /// Last segment of its message.
    pub last: bool,
    /// The RDMAP opcode: Write or Read Response. Only the low four bits are sent.
    pub opcode: Opcode,
    /// The buffer at the data sink.
    pub stag: Stag,
    /// Offset of this segment's payload in that buffer, in octets.
    pub to: u64,
}

impl TaggedHeader {
    /// Reads the fields without checking them. Returns `None` if there are fewer than 14 octets.
    #[inline]
    pub fn decode(ulpdu: &[u8]) -> Option<Self> {
        let v = TaggedView::new(ulpdu.first_chunk::<TAGGED_HEADER_LEN>()?)?;
        Some(Self {
            last: v.last(),
            opcode: v.opcode(),
            stag: v.stag(),
            to: v.to(),
        })
    }

    /// Writes the header. Returns its length. If `out` is too short, writes nothing and returns 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let Some(out) = out.first_chunk_mut::<TAGGED_HEADER_LEN>() else {
            return 0;
        };
        let Some(mut v) = TaggedView::new(&mut *out) else {
            return 0;
        };
        v.set_control(self.last, self.opcode);
        v.set_stag(self.stag);
        v.set_to(self.to);
        TAGGED_HEADER_LEN
    }
}

/// The header of an untagged segment.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct UntaggedHeader {
    /// Last segment of its message.
    pub last: bool,
    /// The RDMAP opcode. Only the low four bits are sent.
    pub opcode: Opcode,
    /// The STag to invalidate, in messages that do so; zero in all others.
    pub invalidate_stag: Stag,
    /// The queue.
    pub qn: u32,
    /// The message sequence number in the queue, starting with 1.
    pub msn: u32,
    /// Offset of this segment's payload in the message, in octets.
    pub mo: u32,
}

impl UntaggedHeader {
    /// Reads the fields without checking them. Returns `None` if there are fewer than 18 octets.
    #[inline]
    pub fn decode(ulpdu: &[u8]) -> Option<Self> {
        let v = UntaggedView::new(ulpdu.first_chunk::<UNTAGGED_HEADER_LEN>()?)?;
        Some(Self {
            last: v.last(),
            opcode: v.opcode(),
            invalidate_stag: v.invalidate_stag(),
            qn: v.qn(),
            msn: v.msn(),
            mo: v.mo(),
        })
    }

    /// Reads the header and checks that it is on its opcode's queue. The caller has checked the
    /// control octets ([`Header::parse_opcode`]).
    #[inline(always)]
    pub fn parse(ulpdu: &[u8]) -> Result<Self, HeaderError> {
        //= rfc5041 section 4.4
        //# Each DDP Segment MUST contain a DDP Header.
        let Some(header) = Self::decode(ulpdu) else {
            return Err(HeaderError::TooShort);
        };
        //= rfc5041 section 7.1
        //# The QN is valid for this stream.
        //= rfc5040 section 4.1
        //# Figure 4 defines when the STag, Queue Number, and Tagged Offset fields MUST
        //# be provided for each RDMA Message.
        if QUEUES.get(usize::from(header.opcode.0)) == Some(&header.qn) {
            return Ok(header);
        }
        Err(header.queue_error())
    }

    #[cold]
    const fn queue_error(&self) -> HeaderError {
        if self.qn > QueueNumber::ATOMIC_RESPONSE.0 {
            HeaderError::InvalidQueue { qn: self.qn }
        } else {
            // The queue exists, so this is not a DDP error: the opcode is unexpected on this queue.
            HeaderError::UnexpectedOpcode(self.opcode.0)
        }
    }

    /// Writes the header. Returns its length. If `out` is too short, writes nothing and returns 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let Some(out) = out.first_chunk_mut::<UNTAGGED_HEADER_LEN>() else {
            return 0;
        };
        let Some(mut v) = UntaggedView::new(&mut *out) else {
            return 0;
        };
        v.set_control(self.last, self.opcode);
        v.set_invalidate_stag(self.invalidate_stag);
        v.set_qn(self.qn);
        v.set_msn(self.msn);
        v.set_mo(self.mo);
        UNTAGGED_HEADER_LEN
    }
}

//= rfc5040 section 3.1
//# RDMAP MUST be layered on top of the Direct Data Placement Protocol [DDP].
/// A DDP segment's header with its RDMAP control octet: everything in the ULPDU before the payload.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Header {
    /// A tagged segment (T = 1).
    Tagged(TaggedHeader),
    /// An untagged segment (T = 0).
    Untagged(UntaggedHeader),
}

impl Header {
    /// Returns the length of the header on the wire in octets: 14 or 18.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "a header is never empty")]
    pub const fn len(&self) -> usize {
        match self {
            Self::Tagged(_) => TAGGED_HEADER_LEN,
            Self::Untagged(_) => UNTAGGED_HEADER_LEN,
        }
    }

    /// Reads a header without checking version, opcode or queue. Returns `None` if it is
    /// incomplete.
    #[inline]
    pub fn decode(ulpdu: &[u8]) -> Option<Self> {
        if ulpdu.first()? & bit::TAGGED != 0 {
            TaggedHeader::decode(ulpdu).map(Self::Tagged)
        } else {
            UntaggedHeader::decode(ulpdu).map(Self::Untagged)
        }
    }

    /// Reads and checks the header at the start of a ULPDU: the versions and the opcode, that the
    /// opcode matches the T bit, and that an untagged segment is on the opcode's queue. The caller
    /// makes the checks that need state (STags, MSN, MO).
    #[inline]
    pub fn parse(ulpdu: &[u8]) -> Result<Self, HeaderError> {
        if Self::parse_opcode(ulpdu)?.is_tagged() {
            TaggedHeader::decode(ulpdu)
                .map(Self::Tagged)
                .ok_or(HeaderError::TooShort)
        } else {
            UntaggedHeader::parse(ulpdu).map(Self::Untagged)
        }
    }

    /// Reads and checks the control octets at the start of a ULPDU. Returns the opcode, which is
    /// known and matches the T bit.
    #[inline(always)]
    pub fn parse_opcode(ulpdu: &[u8]) -> Result<Opcode, HeaderError> {
        let Some(&[ddp, rdmap]) = ulpdu.first_chunk() else {
            return Err(HeaderError::TooShort);
        };
        Self::check_control(ddp, rdmap)?;
        Ok(Opcode(rdmap & bit::OPCODE))
    }

    /// Returns `true` if the control octets at the start of a ULPDU are valid and have one of these
    /// opcodes.
    #[inline(always)]
    pub fn is_any_of(ulpdu: &[u8], opcodes: &[Opcode]) -> bool {
        let Some(control) = ulpdu.first_chunk() else {
            return false;
        };
        let control = u16::from_be_bytes(*control) & FIXED;
        // The caller's opcodes are constants, so the compiler turns this into comparisons.
        opcodes
            .iter()
            .any(|opcode| opcode.is_known() && VALID.get(usize::from(opcode.0)) == Some(&control))
    }

    /// Checks the two control octets: versions, opcode, and T bit.
    #[inline]
    pub fn check_control(ddp_control: u8, rdmap_control: u8) -> Result<(), HeaderError> {
        let control = u16::from_be_bytes([ddp_control, rdmap_control]);
        match VALID.get(usize::from(rdmap_control & bit::OPCODE)) {
            Some(valid) if control & FIXED == *valid => Ok(()),
            _ => Err(Self::control_error(ddp_control, rdmap_control)),
        }
    }

    #[cold]
    const fn control_error(ddp_control: u8, rdmap_control: u8) -> HeaderError {
        //= rfc5044 section C.1
        //# Moreover, the DDP and RDMAP version MUST be identical in the two directions.
        if ddp_control & bit::DDP_VERSION != DDP_VERSION {
            let tagged = ddp_control & bit::TAGGED != 0;
            return HeaderError::BadDdpVersion { tagged };
        }
        //= rfc5040 section 7.2
        //# The RDMA Version MUST be valid.
        //= rfc5040 section 4.1
        //= type=exception
        //= reason=Version 0 belongs to the RDMA Consortium's protocol; no known peer sends it over MPA revision 1 or 2.
        //# 00b for an RNIC that complies
        //# with the RDMA Consortium's RDMA protocol specification.
        //= rfc7306 section 8.2
        //# The RDMA Version MUST be valid.
        if rdmap_control >> bit::RDMAP_VERSION_SHIFT != RDMAP_VERSION {
            return HeaderError::BadRdmapVersion;
        }
        //= rfc5040 section 7.2
        //# The RDMA OpCode MUST be valid.
        //= rfc7306 section 8.2
        //# The RDMA OpCode MUST be valid.
        HeaderError::UnexpectedOpcode(rdmap_control & bit::OPCODE)
    }

    /// Writes the header. Returns its length. If `out` is too short, writes nothing and returns 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        match self {
            Self::Tagged(h) => h.emit(out),
            Self::Untagged(h) => h.emit(out),
        }
    }

    /// Returns `true` if this is the last segment of its message.
    #[inline]
    pub const fn last(&self) -> bool {
        match self {
            Self::Tagged(h) => h.last,
            Self::Untagged(h) => h.last,
        }
    }

    /// Returns the RDMAP opcode.
    #[inline]
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Tagged(h) => h.opcode,
            Self::Untagged(h) => h.opcode,
        }
    }
}

/// Errors that are detected in a header without any state. Each has a
/// [`TerminateCode`](crate::rdmap::TerminateCode).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum HeaderError {
    /// The ULPDU is shorter than its header.
    TooShort,
    /// DV is not 1.
    BadDdpVersion {
        /// The T bit of the segment: tagged and untagged buffers have different error codes.
        tagged: bool,
    },
    /// RV is not 1.
    BadRdmapVersion,
    /// The opcode is not defined, has the wrong T bit, or is on another opcode's queue.
    UnexpectedOpcode(u8),
    /// There is no untagged queue with this number.
    InvalidQueue {
        /// The queue number received.
        qn: u32,
    },
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort => f.write_str("ULPDU is shorter than its DDP header"),
            Self::BadDdpVersion { .. } => f.write_str("DDP version is not 1"),
            Self::BadRdmapVersion => f.write_str("RDMAP version is not 1"),
            Self::UnexpectedOpcode(op) => write!(f, "unexpected RDMAP opcode {op}"),
            Self::InvalidQueue { qn } => write!(f, "no untagged queue {qn}"),
        }
    }
}

impl core::error::Error for HeaderError {}
