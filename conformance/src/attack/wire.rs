//! Encodes and decodes what a hostile peer sends and receives: MPA frames and FPDUs (RFC 5044), DDP
//! segments (RFC 5041), and RDMAP headers (RFC 5040, RFC 7306).
//!
//! It does not use the codecs under test, so that it finds their mistakes.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Op {
    Write = 0,
    Read = 1,
    ReadResponse = 2,
    Send = 3,
    SendInvalidate = 4,
    Terminate = 7,
    Immediate = 8,
    Atomic = 10,
    AtomicResponse = 11,
}

impl Op {
    /// Returns the queue number of untagged messages (RFC 5040 section 4.1, RFC 7306 section 5).
    const fn queue(self) -> u32 {
        match self {
            Self::Read | Self::Atomic => 1,
            Self::Terminate => 2,
            Self::AtomicResponse => 3,
            _ => 0,
        }
    }
}

/// Offsets of header fields that attacks change (of the last octet of longer fields).
pub(super) mod header_offset {
    pub(in super::super) const DDP_CONTROL: usize = 0;
    pub(in super::super) const RDMAP_CONTROL: usize = 1;
    pub(in super::super) const QN: usize = 9;
    pub(in super::super) const MSN: usize = 13;
    pub(in super::super) const MO: usize = 17;
    pub(in super::super) const ATOMIC_OP: usize = 21;
}

pub(super) fn untagged(op: Op, invalidate: u32, msn: u32, body: &[u8]) -> Vec<u8> {
    let mut out = vec![0x41, 0x40 | op as u8];
    for field in [invalidate, op.queue(), msn, 0] {
        out.extend(field.to_be_bytes());
    }
    out.extend(body);
    out
}

pub(super) fn tagged(op: Op, stag: u32, offset: u64, body: &[u8]) -> Vec<u8> {
    let mut out = vec![0xc1, 0x40 | op as u8];
    out.extend(stag.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(body);
    out
}

/// The header of a Read Request for `len` octets.
pub(super) fn read_request(stag: u32, offset: u64, len: u32) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(0x1122_3300_u32.to_be_bytes());
    out.extend(0_u64.to_be_bytes());
    out.extend(len.to_be_bytes());
    out.extend(stag.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out
}

/// The header of a FetchAdd of one.
pub(super) fn fetch_add(stag: u32, offset: u64) -> Vec<u8> {
    let mut out = vec![0; 4];
    out.extend(1_u32.to_be_bytes());
    out.extend(stag.to_be_bytes());
    out.extend(offset.to_be_bytes());
    for field in [1, u64::MAX, 0, u64::MAX] {
        out.extend(field.to_be_bytes());
    }
    out
}

/// CRC32C (RFC 3720 appendix B.4).
pub(super) fn crc32c(octets: &[u8]) -> u32 {
    let sum = octets.iter().fold(u32::MAX, |sum, octet| {
        (0..8).fold(sum ^ u32::from(*octet), |sum, _| {
            (sum >> 1) ^ (if sum & 1 == 1 { 0x82f6_3b78 } else { 0 })
        })
    });
    !sum
}

/// Returns the length of an FPDU without its CRC, for a ULPDU of this length.
pub(super) const fn padded(ulpdu: usize) -> usize {
    (2 + ulpdu).next_multiple_of(4)
}

/// Returns an FPDU with a correct CRC.
pub(super) fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = (ulpdu.len() as u16).to_be_bytes().to_vec();
    out.extend(ulpdu);
    out.resize(padded(ulpdu.len()), 0);
    let sum = crc32c(&out);
    // The CRC is sent with its lowest octet first (RFC 5044 section 4.4).
    out.extend(sum.to_le_bytes());
    out
}

/// The key of an MPA request.
pub(super) const REQUEST: &[u8; 16] = b"MPA ID Req Frame";
/// The key of an MPA reply.
pub(super) const REPLY: &[u8; 16] = b"MPA ID Rep Frame";
/// Length of a start-up frame without private data.
pub(super) const FRAME_LEN: usize = 20;
/// The flag that requests CRCs.
pub(super) const CRC: u8 = 0x40;
/// The flag that rejects a request.
pub(super) const REJECT: u8 = 0x20;
/// The flag of revision 2: the private data begin with IRD and ORD (RFC 6581 section 9).
pub(super) const ENHANCED: u8 = 0x10;
/// The flag that requests markers.
pub(super) const MARKERS: u8 = 0x80;

/// Returns the fixed part of a start-up frame. `private` is the length of the private data that the
/// caller appends.
pub(super) fn frame(key: &[u8; 16], flags: u8, revision: u8, private: u16) -> Vec<u8> {
    let mut out = key.to_vec();
    out.extend([flags, revision]);
    out.extend(private.to_be_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_matches_rfc() {
        // RFC 3720 appendix B.4: 32 octets of zeros, and the numbers from 0 to 31.
        assert_eq!(crc32c(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
    }

    #[test]
    fn header_lengths_match_rfcs() {
        assert_eq!(untagged(Op::Send, 0, 1, &[]).len(), 18);
        assert_eq!(tagged(Op::Write, 1, 2, &[]).len(), 14);
        assert_eq!(read_request(1, 2, 3).len(), 28);
        assert_eq!(fetch_add(1, 2).len(), 52);
        assert_eq!(fpdu(&[0; 5]).len(), 12);
        assert_eq!(frame(REQUEST, CRC, 1, 0).len(), FRAME_LEN);
    }
}
