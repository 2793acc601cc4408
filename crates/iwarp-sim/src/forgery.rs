//! Forged FPDUs: each violates a rule of DDP or RDMAP. A peer sends it after all requests have
//! completed. RFC 5040 section 4.8 and RFC 5041 section 7.2 define the code with which the receiver
//! must terminate the stream.

use iwarp_proto::rdmap::TerminateCode as Code;

/// The violated rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forgery {
    /// An untagged segment of DDP version 2.
    UntaggedVersion,
    /// A tagged segment of DDP version 2.
    TaggedVersion,
    /// A Send of RDMAP version 2.
    RdmapVersion,
    /// A segment for queue 9, which does not exist.
    QueueNumber,
    /// A Send whose message sequence number is far ahead of the expected one.
    SequenceNumber,
    /// A Send whose first segment does not start at message offset 0.
    MessageOffset,
    /// An undefined opcode.
    Opcode,
    /// A ULPDU that is shorter than any header.
    TooShort,
}

impl Forgery {
    /// All forgeries.
    pub const ALL: &'static [Self] = &[
        Self::UntaggedVersion,
        Self::TaggedVersion,
        Self::RdmapVersion,
        Self::QueueNumber,
        Self::SequenceNumber,
        Self::MessageOffset,
        Self::Opcode,
        Self::TooShort,
    ];

    /// Returns the code with which the receiver terminates the stream.
    pub const fn code(self) -> Code {
        match self {
            Self::UntaggedVersion => Code::DDP_UNTAGGED_INVALID_VERSION,
            Self::TaggedVersion => Code::DDP_TAGGED_INVALID_VERSION,
            Self::RdmapVersion => Code::RDMAP_INVALID_VERSION,
            Self::QueueNumber => Code::DDP_UNTAGGED_INVALID_QN,
            Self::SequenceNumber => Code::DDP_UNTAGGED_INVALID_MSN,
            Self::MessageOffset => Code::DDP_UNTAGGED_INVALID_MO,
            Self::Opcode => Code::RDMAP_UNEXPECTED_OPCODE,
            Self::TooShort => Code::MPA_MARKER,
        }
    }

    /// Returns the ULPDU. `next_msn` is the message sequence number of the next Send.
    pub(crate) fn ulpdu(self, next_msn: u32) -> Vec<u8> {
        // Last segment, DDP version 1; RDMAP version 1, Send.
        let (mut ddp, mut rdmap) = (0x41, 0x43);
        let (mut queue, mut msn, mut offset) = (0_u32, next_msn, 0_u32);
        match self {
            Self::UntaggedVersion => ddp = 0x42,
            Self::TaggedVersion => {
                let mut octets = vec![0xc2, 0x40];
                octets.extend([0; 12]);
                return octets;
            }
            Self::RdmapVersion => rdmap = 0x83,
            Self::QueueNumber => queue = 9,
            Self::SequenceNumber => msn = next_msn.wrapping_add(0x4000_0000),
            Self::MessageOffset => offset = 4,
            Self::Opcode => rdmap = 0x4e,
            Self::TooShort => return vec![0x41, 0x43, 0, 0],
        }
        let mut octets = vec![ddp, rdmap, 0, 0, 0, 0];
        for field in [queue, msn, offset] {
            octets.extend(field.to_be_bytes());
        }
        octets
    }
}
