//! FPDUs: lengths, pads, markers, CRC. RFC 5044 §4.
//!
//! On the wire an FPDU is `ULPDU length (2) | ULPDU | pad (0 to 3) | CRC (4)`. If the receiver
//! requested markers, the sender inserts four octets before every 512th octet of the stream; a
//! [`MarkerClock`] counts that for one direction. A marker directly before an FPDU belongs to that
//! FPDU.

mod fpdu;
mod marker;

pub use fpdu::{
    Decoded, FpduOptions, FramingError, Piece, Pieces, decode_fpdu, encode_fpdu, fpdu_pieces,
};
pub use marker::{Marker, MarkerClock, fpdu_len_with_markers};

/// Length of the ULPDU length field, the FPDU's only header.
pub const MPA_LEN_FIELD: usize = 2;
/// Length of the CRC field, which is present even if CRCs are off.
pub const CRC_LEN: usize = 4;
/// Octets from the start of one marker to the start of the next.
pub const MARKER_INTERVAL: usize = 512;
/// Length of a marker.
pub const MARKER_LEN: usize = 4;
/// The smallest MULPDU, even if TCP's segments are smaller (RFC 5044 §4.5).
pub const MIN_MULPDU: u16 = 128;
/// The longest ULPDU that may be sent (RFC 5044 §3). The length field and the segments of the
/// loopback interface would allow longer ones.
pub const MAX_ULPDU: u16 = 64768;
/// The largest MULPDU: the longest ULPDU that may be sent and needs no pad.
pub const MAX_MULPDU: u16 = MAX_ULPDU - 2;

const _: () = assert!(pad_len(MAX_MULPDU as usize) == 0);

/// Returns the number of pad octets after a ULPDU of this length, 0 to 3.
#[inline]
pub const fn pad_len(ulpdu_len: usize) -> usize {
    //= rfc5044 section 4.1
    //# The length of the
    //# pad is set so as to make the size of the FPDU an integral multiple of
    //# four.
    MPA_LEN_FIELD.wrapping_add(ulpdu_len).wrapping_neg() & 3
}

/// Returns the length of an FPDU without markers: length field, ULPDU, pad and CRC. A ULPDU has at
/// most 65,535 octets.
#[inline]
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    let padded = MPA_LEN_FIELD.wrapping_add(ulpdu_len);
    let padded = padded.wrapping_add(pad_len(ulpdu_len));
    padded.wrapping_add(CRC_LEN)
}

/// Returns the length of the longest ULPDU whose FPDU fits into a TCP segment of `emss` octets,
/// wherever the markers are; at least [`MIN_MULPDU`] and at most [`MAX_MULPDU`].
pub fn mulpdu(emss: u32, markers: bool) -> u16 {
    //= rfc5044 section 4.5
    //# The maximum ULPDU Length for a single ULPDU when Markers are
    //# present MUST be computed as:
    //# MULPDU = EMSS - (6 + 4 * Ceiling(EMSS / 512) + EMSS mod 4)
    //= rfc5044 section 4.5
    //# The maximum ULPDU Length for a single ULPDU when Markers are NOT
    //# present MUST be computed as:
    //# MULPDU = EMSS - (6 + EMSS mod 4)
    //= rfc5044 section 3
    //# MPA MUST provide information to DDP on the current maximum size of the
    //# record that is acceptable to send (MULPDU).
    //= rfc5041 section 3
    //# 1. LLPs MUST expose MULPDU and MULPDU changes.
    let marker_room = if markers {
        4 * u64::from(emss.div_ceil(512))
    } else {
        0
    };
    let pad = u64::from(emss % 4);
    let overhead = marker_room.saturating_add(6).saturating_add(pad);
    let fits = u64::from(emss).saturating_sub(overhead);
    //= rfc5044 section 4.5
    //# If this occurs, the MPA on TCP sender MUST NOT shrink the
    //# MULPDU below 128 octets
    //= rfc5044 section 3
    //# The range of MULPDU values MUST be
    //# between 128 octets and 64768 octets, inclusive.
    //= rfc5044 section 4.5
    //# If one or more FPDUs are already packed into a TCP segment, such that the
    //# remaining room is less than 128 octets, MPA MUST NOT provide a MULPDU
    //# smaller than 128.
    u16::try_from(fits)
        .unwrap_or(MAX_MULPDU)
        .clamp(MIN_MULPDU, MAX_MULPDU)
}
