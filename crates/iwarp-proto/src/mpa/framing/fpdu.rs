//! Encoder and decoder of complete FPDUs in slices, and an iterator over the pieces between
//! markers. RFC 5044 §4.1 to §4.4.
//!
//! The data path builds and parses FPDUs in place and does not use this encoder and decoder. They
//! are for tests, fuzzing, tools and the simulator.

use super::{
    CRC_LEN, MARKER_LEN, MPA_LEN_FIELD, Marker, MarkerClock, fpdu_len_with_markers, pad_len,
};
use crate::crc32c::Crc32cFn;
use crate::rdmap::TerminateCode;
use core::fmt;

/// The agreed options of one direction of a stream.
#[derive(Copy, Clone, Debug, Default)]
pub struct FpduOptions {
    /// Insert or expect markers.
    pub markers: bool,
    /// Compute or check the CRC with this function; `None` leaves the field zero and unchecked.
    pub crc: Option<Crc32cFn>,
}

/// Why an FPDU cannot be encoded or decoded.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum FramingError {
    /// The ULPDU is too long for the length field, or for the pointer in a marker.
    UlpduTooLong,
    /// The output buffer is shorter than this many octets.
    OutputTooSmall {
        /// Octets needed.
        needed: usize,
    },
    /// The input ends before the end of the FPDU.
    Incomplete {
        /// Octets of input that are needed before the next attempt.
        needed: usize,
    },
    /// The CRC field does not match.
    BadCrc {
        /// The computed CRC.
        computed: u32,
        /// The received CRC.
        received: u32,
    },
    /// A marker does not point to the start of its FPDU.
    BadMarker {
        /// The correct pointer at this position.
        expected: u16,
        /// The pointer in the marker.
        received: u16,
    },
}

impl FramingError {
    /// Returns the Terminate to send if the peer made this error.
    pub const fn terminate(&self) -> Option<TerminateCode> {
        match self {
            Self::BadCrc { .. } => Some(TerminateCode::MPA_CRC),
            Self::BadMarker { .. } => Some(TerminateCode::MPA_MARKER),
            _ => None,
        }
    }
}

impl fmt::Display for FramingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UlpduTooLong => f.write_str("ULPDU too long for an FPDU"),
            Self::OutputTooSmall { needed } => write!(f, "output needs {needed} octets"),
            Self::Incomplete { needed } => write!(f, "FPDU needs {needed} octets"),
            Self::BadCrc { computed, received } => {
                write!(
                    f,
                    "CRC {received:#010x} received, {computed:#010x} computed"
                )
            }
            Self::BadMarker { expected, received } => {
                write!(
                    f,
                    "marker points {received} octets back instead of {expected}"
                )
            }
        }
    }
}

impl core::error::Error for FramingError {}

/// Writes the FPDU of `ulpdu`, with the markers before and inside it, and advances the clock.
/// Returns the number of octets written. On an error, neither `out` nor the clock changes.
pub fn encode_fpdu(
    ulpdu: &[u8],
    opts: &FpduOptions,
    clock: &mut MarkerClock,
    out: &mut [u8],
) -> Result<usize, FramingError> {
    let len = u16::try_from(ulpdu.len()).map_err(|_| FramingError::UlpduTooLong)?;
    let mut next = next_marker(opts, clock);
    let total = fpdu_len_with_markers(next, ulpdu.len());
    if opts.markers && total > usize::from(u16::MAX) + 1 {
        return Err(FramingError::UlpduTooLong);
    }
    let small = FramingError::OutputTooSmall { needed: total };
    let (body, trailer) = out
        .get_mut(..total)
        .and_then(|o| o.split_last_chunk_mut::<CRC_LEN>())
        .ok_or(small)?;
    let mut w = Writer {
        out: body,
        at: 0,
        next: &mut next,
        header_at: None,
    };
    //= rfc5044 section 4.1
    //# The format of an FPDU shown below MUST be used for all MPA FPDUs.
    w.put(&len.to_be_bytes());
    w.put(ulpdu);
    //= rfc5044 section 4.1
    //# The pad data MUST be set to zero by the sender and
    //# ignored by the receiver (except for CRC checking).
    w.put([0u8; 3].get(..pad_len(ulpdu.len())).unwrap_or_default());
    //= rfc5044 section 4.4
    //# If there is a
    //# Marker immediately following the PAD, the Marker is included in
    //# the CRC calculation for this FPDU.
    w.marker_if_due();
    //= rfc5044 section 4.4
    //# When sending an FPDU, the sender MUST include a CRC field.
    //= rfc5044 section 4.4
    //# The fields which MUST be included in the CRC calculation when sending an
    //# FPDU are as follows:
    //= rfc5044 section 4.3
    //# In this case, the Marker is considered to be contained in the following
    //# FPDU; the Marker MUST be included in the CRC calculation of the FPDU
    //# following the Marker (if CRCs are being generated or checked).
    *trailer = opts.crc.map_or(0, |crc| crc(0, body)).to_le_bytes();
    clock.advance(total);
    Ok(total)
}

/// Returns the number of octets until the next marker, or a number that is never reached if markers
/// are off.
fn next_marker(opts: &FpduOptions, clock: &MarkerClock) -> usize {
    if opts.markers {
        clock.next_marker_in()
    } else {
        usize::MAX
    }
}

/// Copies octets, and inserts markers.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
    /// Position in `out` of the next marker.
    next: &'a mut usize,
    /// Position in `out` of the ULPDU length field, once it is written.
    header_at: Option<usize>,
}

impl Writer<'_> {
    fn raw(&mut self, octets: &[u8]) {
        if let Some(dst) = self
            .out
            .get_mut(self.at..self.at.wrapping_add(octets.len()))
        {
            dst.copy_from_slice(octets);
        }
        self.at = self.at.wrapping_add(octets.len());
    }

    fn marker_if_due(&mut self) {
        //= rfc5044 section 4.3
        //# When Markers are enabled, MPA senders MUST insert a Marker into the data
        //# stream at a 512-octet periodic interval in the TCP Sequence Number Space.
        //= rfc5044 section 4.3
        //# All MPA senders MUST be able to generate Markers when their use is declared
        //# by the opposing receiver (see Section 7.1, Connection Setup).
        if self.at == *self.next {
            //= rfc5044 section 4.3
            //# If an FPDU is large enough to contain multiple Markers, they MUST all point
            //# to the same point in the TCP stream: the first octet of the ULPDU Length
            //# field for the FPDU.
            //= rfc5044 section 4.3
            //# If a Marker interval contains multiple FPDUs (the FPDUs are small), the
            //# Marker MUST point to the start of the ULPDU Length field for the FPDU
            //# containing the Marker unless the Marker falls between FPDUs, in which case
            //# the Marker MUST be zero.
            let back = self.header_at.map_or(0, |h| self.at.wrapping_sub(h));
            self.raw(&MarkerClock::fpdu_ptr(back).octets());
            *self.next = self.next.wrapping_add(super::MARKER_INTERVAL);
        }
    }

    fn put(&mut self, mut octets: &[u8]) {
        while !octets.is_empty() {
            self.marker_if_due();
            self.header_at.get_or_insert(self.at);
            let n = octets.len().min(self.next.wrapping_sub(self.at));
            let (now, later) = octets.split_at_checked(n).unwrap_or((octets, &[]));
            self.raw(now);
            octets = later;
        }
    }
}

/// A piece of an FPDU in the stream.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A marker, and its correct pointer.
    Marker {
        /// The octets of the marker, as received.
        octets: [u8; MARKER_LEN],
        /// The correct pointer at its position.
        expected: Marker,
    },
    /// Octets of the length field, ULPDU, pad and CRC, in order.
    Octets(&'a [u8]),
}

/// The iterator of [`fpdu_pieces`].
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    rest: &'a [u8],
    at: usize,
    next: usize,
    header_at: usize,
}

/// Iterates over the octets of a stream, from the start of an FPDU or of the marker before it, and
/// separates the markers from the other octets. The iterator does not detect the end of the FPDU.
pub fn fpdu_pieces<'a>(stream: &'a [u8], opts: &FpduOptions, clock: &MarkerClock) -> Pieces<'a> {
    let next = next_marker(opts, clock);
    Pieces {
        rest: stream,
        at: 0,
        next,
        header_at: if next == 0 { MARKER_LEN } else { 0 },
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        if self.at == self.next {
            let (octets, rest) = self.rest.split_first_chunk()?;
            let back = self.at.saturating_sub(self.header_at);
            self.rest = rest;
            self.next = self.next.wrapping_add(super::MARKER_INTERVAL);
            self.at = self.at.wrapping_add(MARKER_LEN);
            return Some(Piece::Marker {
                octets: *octets,
                expected: MarkerClock::fpdu_ptr(back),
            });
        }
        if self.rest.is_empty() {
            return None;
        }
        let n = self.rest.len().min(self.next.wrapping_sub(self.at));
        let (now, rest) = self.rest.split_at_checked(n)?;
        self.rest = rest;
        self.at = self.at.wrapping_add(n);
        Some(Piece::Octets(now))
    }
}

/// The lengths of a decoded FPDU.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Decoded {
    /// Number of octets of the stream that the FPDU takes, including markers.
    pub consumed: usize,
    /// Number of octets of the ULPDU, which were written to the output.
    pub ulpdu_len: usize,
}

/// Decodes the FPDU at the start of `stream`: checks its CRC and markers, copies its ULPDU (without
/// markers) to `ulpdu`, and advances the clock. On an error, the clock does not change, and the
/// contents of `ulpdu` are unspecified.
pub fn decode_fpdu(
    stream: &[u8],
    opts: &FpduOptions,
    clock: &mut MarkerClock,
    ulpdu: &mut [u8],
) -> Result<Decoded, FramingError> {
    let next = next_marker(opts, clock);
    let header_at = if next == 0 { MARKER_LEN } else { 0 };
    let header_end = MPA_LEN_FIELD.wrapping_add(header_at);
    // A marker never splits the length field: both start at multiples of four.
    let len = stream
        .get(header_at..header_end)
        .and_then(|h| h.first_chunk())
        .ok_or(FramingError::Incomplete { needed: header_end })?;
    //= rfc5044 section 5.2
    //# The receivers MUST identify FPDU boundaries by using the ULPDU_LENGTH field,
    //# as described in Section 6.
    //= rfc5044 section 6
    //# To detect the start of the FPDU unambiguously one of the following MUST be
    //# used:
    //= rfc5044 section 6
    //# The ULPDU Length field (see Section 4) MUST be used to determine if the
    //# entire FPDU is present before forwarding the ULPDU to DDP.
    let ulpdu_len = usize::from(u16::from_be_bytes(*len));
    let total = fpdu_len_with_markers(next, ulpdu_len);
    let (covered, trailer) = stream
        .get(..total)
        .and_then(|f| f.split_last_chunk::<CRC_LEN>())
        .ok_or(FramingError::Incomplete { needed: total })?;
    check_crc(opts, covered, *trailer)?;
    let out = ulpdu
        .get_mut(..ulpdu_len)
        .ok_or(FramingError::OutputTooSmall { needed: ulpdu_len })?;
    copy_ulpdu(covered, opts, clock, out)?;
    clock.advance(total);
    Ok(Decoded {
        consumed: total,
        ulpdu_len,
    })
}

/// Checks the CRC field of an FPDU, if CRCs are on.
fn check_crc(
    opts: &FpduOptions,
    covered: &[u8],
    trailer: [u8; CRC_LEN],
) -> Result<(), FramingError> {
    //= rfc5044 section 4.4
    //# Verify that the calculated CRC-32c value is the same as the
    //# received CRC-32c value found in the FPDU CRC field.  If not, the
    //# receiver MUST treat the FPDU as an invalid FPDU.
    //= rfc5044 section 4.1
    //# When CRCs are not
    //# enabled, this field is still present, may contain any value, and MUST
    //# NOT be checked.
    //= rfc5044 section 4.4
    //# When an FPDU is received, and CRC checking is enabled, the receiver MUST
    //# first perform the following:
    //= rfc5044 section 7.1.1
    //# When CRCs are not in use, the CRC field MUST be considered valid for FPDU
    //# checking regardless of its contents.
    //= rfc5044 section 6
    //# To do this, the receiver MUST:
    if let Some(crc) = opts.crc {
        //= rfc5041 section 3
        //# 6. LLP MUST provide a strong digest (at least equivalent to CRC32-C) to
        //# cover at least the DDP Segment.
        let (computed, received) = (crc(0, covered), u32::from_le_bytes(trailer));
        if computed != received {
            return Err(FramingError::BadCrc { computed, received });
        }
    }
    Ok(())
}

/// Copies the ULPDU from an FPDU whose CRC field was removed, and checks the markers.
fn copy_ulpdu(
    covered: &[u8],
    opts: &FpduOptions,
    clock: &MarkerClock,
    ulpdu: &mut [u8],
) -> Result<(), FramingError> {
    let mut skip = MPA_LEN_FIELD;
    let mut filled = 0;
    //= rfc5044 section 4.3
    //# MPA Receivers MUST pass the ULPDU data and the ULPDU Length to DDP and not
    //# the Markers, headers, and CRC.
    //= rfc5044 section 4.3
    //# MPA Receivers MUST preserve ULPDU boundaries when passing data to DDP.
    //= rfc5041 section 3
    //# 4. The LLP MUST preserve DDP Segment and Message boundaries at the Data
    //# Sink.
    for piece in fpdu_pieces(covered, opts, clock) {
        match piece {
            Piece::Marker { octets, expected } => {
                //= rfc5044 section 8
                //# If the FPDU start determined from previous ULPDU Length
                //# fields does not match with the MPA Marker position, MPA SHOULD
                //# deliver an error to DDP.
                //= rfc5044 section 8
                //# It may not be possible to make this check as a segment arrives, but the
                //# check SHOULD be made when a gap creating an out-of-order sequence is closed
                //# and any time a Marker points to an already identified FPDU.
                let received = Marker::parse(octets);
                if received != expected {
                    return Err(FramingError::BadMarker {
                        expected: expected.fpdu_ptr,
                        received: received.fpdu_ptr,
                    });
                }
            }
            Piece::Octets(octets) => {
                let octets = octets.get(skip.min(octets.len())..).unwrap_or_default();
                skip = 0;
                // Octets beyond the output are pad.
                let n = octets.len().min(ulpdu.len().wrapping_sub(filled));
                let end = filled.wrapping_add(n);
                if let (Some(dst), Some(src)) = (ulpdu.get_mut(filled..end), octets.get(..n)) {
                    dst.copy_from_slice(src);
                }
                filled = end;
            }
        }
    }
    Ok(())
}
