//! Markers and their positions. RFC 5044 §4.2 and §4.3.

use super::{MARKER_INTERVAL, MARKER_LEN, fpdu_len};

/// Number of FPDU octets between two markers.
const GAP: usize = MARKER_INTERVAL - MARKER_LEN;

/// A marker: a pointer back to the start of its FPDU.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Marker {
    /// Number of octets in the stream from the ULPDU length field to this marker, including other
    /// markers; 0 if the marker is directly before its FPDU. A multiple of four.
    pub fpdu_ptr: u16,
}

impl Marker {
    /// Reads a marker.
    #[inline]
    pub const fn parse(octets: [u8; MARKER_LEN]) -> Self {
        //= rfc5044 section 4.2
        //# The least significant two
        //# bits MUST always be set to zero at the transmitter, and the receivers
        //# MUST always treat these as zero for calculations.
        //= rfc5044 section 4.3
        //# MPA reserves these bits so they MUST be treated as zero for computation at
        //# the receiver.
        let [_, _, hi, lo] = octets;
        Self {
            fpdu_ptr: u16::from_be_bytes([hi, lo & !3]),
        }
    }

    /// Returns the octets of the marker.
    #[inline]
    pub const fn octets(self) -> [u8; MARKER_LEN] {
        //= rfc5044 section 4.2
        //# The Reserved field MUST be set to zero on transmit and
        //# ignored on receive (except for CRC calculation).
        //= rfc5044 section 4.2
        //# The format of a Marker MUST be as specified in Figure 3:
        let [hi, lo] = self.fpdu_ptr.to_be_bytes();
        [0, 0, hi, lo & !3]
    }
}

/// Counts the octets of one direction of a stream modulo 512, to find the positions of markers. The
/// first marker is due immediately.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct MarkerClock {
    /// Number of octets since the start of the last marker position, 0 to 511.
    offset: u16,
}

impl MarkerClock {
    /// Creates the clock of a stream without FPDUs.
    #[inline]
    pub const fn new() -> Self {
        //= rfc5044 section 4.3
        //# When Markers are enabled (see Section 7.1, Connection Setup), the MPA
        //# Markers MUST be inserted immediately preceding the first FPDU of Full
        //# Operation Phase, and at every 512th octet of the TCP octet stream
        //# thereafter.
        Self { offset: 0 }
    }

    /// Creates a clock at this offset in the stream, counted from the first marker.
    #[inline]
    pub const fn at(stream_offset: u64) -> Self {
        Self {
            offset: (stream_offset as usize % MARKER_INTERVAL) as u16,
        }
    }

    /// Returns the number of octets since the start of the last marker position, 0 to 511.
    #[inline]
    pub const fn offset(self) -> usize {
        self.offset as usize
    }

    /// Returns the number of octets until the next marker; 0 if it is due now.
    #[inline]
    pub const fn next_marker_in(self) -> usize {
        MARKER_INTERVAL.wrapping_sub(self.offset as usize) % MARKER_INTERVAL
    }

    /// Advances by this many octets of stream, including markers.
    #[inline]
    pub const fn advance(&mut self, octets: usize) {
        //= rfc5044 section 4.3
        //# Note that this computation MUST take into account that the TCP sequence
        //# number could have wrapped between the Marker and the header.
        self.offset = ((self.offset as usize).wrapping_add(octets) % MARKER_INTERVAL) as u16;
    }

    /// Returns the marker that is `octets_since_length_field` octets (including other markers)
    /// after the FPDU's length field. For the marker before the length field, pass 0.
    #[inline]
    pub const fn fpdu_ptr(octets_since_length_field: usize) -> Marker {
        //= rfc5044 section 4.3
        //# FPDUPTR MUST contain the number of octets in
        //# the TCP stream from the beginning of the ULPDU Length field to the
        //# first octet of the Marker, unless the Marker falls between FPDUs.
        Marker {
            fpdu_ptr: octets_since_length_field as u16 & !3,
        }
    }
}

/// Returns the number of octets in the stream that an FPDU takes if the next marker is due in
/// `next_marker_in` octets: the FPDU, the markers in it, and a marker before it if that is due
/// immediately. A marker directly after the CRC belongs to the next FPDU.
#[inline]
pub const fn fpdu_len_with_markers(next_marker_in: usize, ulpdu_len: usize) -> usize {
    let body = fpdu_len(ulpdu_len);
    if body > next_marker_in {
        let after_the_first = body.wrapping_sub(1).wrapping_sub(next_marker_in) / GAP;
        body.wrapping_add(after_the_first.wrapping_add(1).wrapping_mul(MARKER_LEN))
    } else {
        body
    }
}
