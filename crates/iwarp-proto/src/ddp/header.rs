//! Header values: the headers of a segment, parsed and checked. RFC 5041 §4 and §7.1, RFC 5040 §4.1 figure 4 and §7.2.

use super::view::{DDP_VERSION, RDMAP_VERSION, bit};
use super::{QueueNumber, Stag, TAGGED_HEADER_LEN, TaggedView, UNTAGGED_HEADER_LEN, UntaggedView};
use crate::rdmap::Opcode;
use core::fmt;

/// Returns the header length that the first octet of a ULPDU announces: 14 if its T bit is set, else 18. A stream receiver
/// gathers so many octets before it parses.
#[inline]
pub const fn header_len(first_octet: u8) -> usize {
    if first_octet & bit::TAGGED != 0 {
        TAGGED_HEADER_LEN
    } else {
        UNTAGGED_HEADER_LEN
    }
}

/// Returns the two control octets of a segment, with reserved bits zero. Receivers compare them before they parse.
#[inline]
pub const fn control_octets(tagged: bool, last: bool, opcode: Opcode) -> [u8; 2] {
    let tagged = if tagged { bit::TAGGED } else { 0 };
    let last = if last { bit::LAST } else { 0 };
    [
        DDP_VERSION | tagged | last,
        RDMAP_VERSION << bit::RDMAP_VERSION_SHIFT | opcode.0 & bit::OPCODE,
    ]
}

/// The header of a tagged segment.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct TaggedHeader {
    /// Last segment of its message.
    pub last: bool,
    /// The RDMAP opcode: Write or Read Response. Only the low four bits go on the wire.
    pub opcode: Opcode,
    /// The buffer at the data sink.
    pub stag: Stag,
    /// Where in that buffer this segment's payload starts, in octets.
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

    /// Writes the header. Returns its length, or 0 when `out` is shorter than that and nothing was written.
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
    /// The RDMAP opcode. Only the low four bits go on the wire.
    pub opcode: Opcode,
    /// The STag to invalidate, in messages that do; zero in all others.
    pub invalidate_stag: Stag,
    /// The queue.
    pub qn: u32,
    /// The message's sequence number in its queue, starting with 1.
    pub msn: u32,
    /// Where in the message this segment's payload starts, in octets.
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

    /// Writes the header. Returns its length, or 0 when `out` is shorter than that and nothing was written.
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
    /// Returns its length on the wire in octets: 14 or 18.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "a header is never empty")]
    pub const fn len(&self) -> usize {
        match self {
            Self::Tagged(_) => TAGGED_HEADER_LEN,
            Self::Untagged(_) => UNTAGGED_HEADER_LEN,
        }
    }

    /// Reads a header without checking version, opcode or queue. Returns `None` if it is cut short.
    #[inline]
    pub fn decode(ulpdu: &[u8]) -> Option<Self> {
        if ulpdu.first()? & bit::TAGGED != 0 {
            TaggedHeader::decode(ulpdu).map(Self::Tagged)
        } else {
            UntaggedHeader::decode(ulpdu).map(Self::Untagged)
        }
    }

    /// Reads and checks the header at the start of a ULPDU: versions, opcode, that the opcode suits the T bit, and that an
    /// untagged segment is on the opcode's queue. Checks that need state (STags, MSN, MO) are left to the caller.
    #[inline]
    pub fn parse(ulpdu: &[u8]) -> Result<Self, HeaderError> {
        let &[ddp, rdmap, ..] = ulpdu else {
            return Err(HeaderError::TooShort);
        };
        Self::check_control(ddp, rdmap)?;
        //= rfc5041 section 4.4
        //# Each DDP Segment MUST contain a DDP Header.
        let header = Self::decode(ulpdu).ok_or(HeaderError::TooShort)?;
        header.check_queue()?;
        Ok(header)
    }

    /// Checks the two control octets. They are enough to refuse a segment of another protocol version.
    #[inline]
    pub fn check_control(ddp_control: u8, rdmap_control: u8) -> Result<(), HeaderError> {
        //= rfc5044 section C.1
        //# Moreover, the DDP and RDMAP version MUST be identical in the two directions.
        let tagged = ddp_control & bit::TAGGED != 0;
        if ddp_control & bit::DDP_VERSION != DDP_VERSION {
            return Err(HeaderError::BadDdpVersion { tagged });
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
            return Err(HeaderError::BadRdmapVersion);
        }
        //= rfc5040 section 7.2
        //# The RDMA OpCode MUST be valid.
        //= rfc7306 section 8.2
        //# The RDMA OpCode MUST be valid.
        let opcode = Opcode(rdmap_control & bit::OPCODE);
        if opcode.is_tagged() != tagged || !opcode.is_known() {
            return Err(HeaderError::UnexpectedOpcode(opcode.0));
        }
        Ok(())
    }

    /// Checks that an untagged header names the queue of its opcode.
    #[inline]
    fn check_queue(&self) -> Result<(), HeaderError> {
        //= rfc5041 section 7.1
        //# The QN is valid for this stream.
        let Self::Untagged(h) = self else {
            return Ok(());
        };
        //= rfc5040 section 4.1
        //# Figure 4 defines when the STag, Queue Number, and Tagged Offset fields MUST
        //# be provided for each RDMA Message.
        if h.opcode.queue_number() == Some(h.qn) {
            Ok(())
        } else if h.qn > QueueNumber::ATOMIC_RESPONSE.0 {
            Err(HeaderError::InvalidQueue { qn: h.qn })
        } else {
            // The queue exists, so this is no error of DDP: RDMAP did not expect this opcode on it.
            Err(HeaderError::UnexpectedOpcode(h.opcode.0))
        }
    }

    /// Writes the header. Returns its length, or 0 when `out` is shorter than that and nothing was written.
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

    /// The RDMAP opcode.
    #[inline]
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Tagged(h) => h.opcode,
            Self::Untagged(h) => h.opcode,
        }
    }
}

/// What a header alone can have wrong. Each error has a [`TerminateCode`](crate::rdmap::TerminateCode).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum HeaderError {
    /// The ULPDU ends before its header does.
    TooShort,
    /// DV is not 1.
    BadDdpVersion {
        /// The T bit of the segment: tagged and untagged buffers have error codes of their own.
        tagged: bool,
    },
    /// RV is not 1.
    BadRdmapVersion,
    /// The opcode is not defined, has the wrong T bit, or is on another opcode's queue.
    UnexpectedOpcode(u8),
    /// There is no untagged queue of this number.
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
