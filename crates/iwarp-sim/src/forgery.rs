//! FPDUs that no RNIC sends: a peer that violates a rule of DDP or RDMAP after everything else has
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
    /// RDMAP version 2.
    RdmapVersion,
    /// Queue 9.
    Queue,
    /// A Send far ahead of the last one.
    Number,
    /// A Send that starts in the middle.
    Offset,
    /// An undefined opcode.
    Opcode,
    /// A ULPDU that is shorter than any header.
    Short,
}

impl Forgery {
    /// All forgeries.
    pub const ALL: &'static [Self] = &[
        Self::UntaggedVersion,
        Self::TaggedVersion,
        Self::RdmapVersion,
        Self::Queue,
        Self::Number,
        Self::Offset,
        Self::Opcode,
        Self::Short,
    ];

    /// Returns the code with which the receiver terminates the stream.
    pub const fn code(self) -> Code {
        match self {
            Self::UntaggedVersion => Code::DDP_UNTAGGED_INVALID_VERSION,
            Self::TaggedVersion => Code::DDP_TAGGED_INVALID_VERSION,
            Self::RdmapVersion => Code::RDMAP_INVALID_VERSION,
            Self::Queue => Code::DDP_UNTAGGED_INVALID_QN,
            Self::Number => Code::DDP_UNTAGGED_INVALID_MSN,
            Self::Offset => Code::DDP_UNTAGGED_INVALID_MO,
            Self::Opcode => Code::RDMAP_UNEXPECTED_OPCODE,
            Self::Short => Code::MPA_MARKER,
        }
    }

    /// Returns the ULPDU. `next` is the number of the next Send.
    pub(crate) fn ulpdu(self, next: u32) -> Vec<u8> {
        // Last segment, DDP version 1; RDMAP version 1, Send.
        let (mut ddp, mut rdmap) = (0x41, 0x43);
        let (mut queue, mut number, mut offset) = (0_u32, next, 0_u32);
        match self {
            Self::UntaggedVersion => ddp = 0x42,
            Self::TaggedVersion => {
                let mut octets = vec![0xc2, 0x40];
                octets.extend([0; 12]);
                return octets;
            }
            Self::RdmapVersion => rdmap = 0x83,
            Self::Queue => queue = 9,
            Self::Number => number = next.wrapping_add(0x4000_0000),
            Self::Offset => offset = 4,
            Self::Opcode => rdmap = 0x4e,
            Self::Short => return vec![0x41, 0x43, 0, 0],
        }
        let mut octets = vec![ddp, rdmap, 0, 0, 0, 0];
        for field in [queue, number, offset] {
            octets.extend(field.to_be_bytes());
        }
        octets
    }
}
