//! The Terminate header and its optional parts. RFC 5040 §4.8 figures 7, 8 and 10.
//!
//! Linux's siw writes the control word through C bit-fields. On little-endian hosts, that exchanges
//! the nibbles of the first octet, and puts the M, D and R bits at the other end of the third
//! octet. [`Terminate::parse`] reads both layouts.

use super::code::TerminateCode;
use crate::ddp::{Header, UNTAGGED_HEADER_LEN};
use crate::rdmap::ReadRequest;
use core::fmt;

mod field {
    use core::ops::Range;
    //= rfc5040 section 4.8
    //# The following figure depicts a Terminate Header that MUST be used for the
    //# Terminate Message:
    pub(super) const LAYER_ETYPE: usize = 0;
    pub(super) const CODE: usize = 1;
    pub(super) const HEADER_CONTROL: usize = 2;
    pub(super) const CONTROL: Range<usize> = 0..4;
}

/// DDP Segment Length valid.
const M: u8 = 0x80;
/// Terminated DDP Header included.
const D: u8 = 0x40;
/// Terminated RDMA Header included.
const R: u8 = 0x20;
/// The three flags in siw's layout, in which they are mirrored: `M` is the lowest bit.
const SIW_MDR: u8 = 0x07;

/// The layout of the control word.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// The layout of RFC 5040 §4.8.
    #[default]
    Rfc,
    /// The layout of siw on little-endian hosts.
    Siw,
}

/// A Terminate message is too short for its control word.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct TerminateError;

impl fmt::Display for TerminateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Terminate message is shorter than its control word")
    }
}

impl core::error::Error for TerminateError {}

/// The contents of a Terminate message after the DDP header.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Terminate {
    /// The reason.
    pub code: TerminateCode,
    /// Length of the offending DDP segment in octets, if known (M).
    pub ddp_segment_len: Option<u16>,
    /// Header of the offending DDP segment (D).
    pub ddp_header: Option<Header>,
    /// The Read Request that failed (R), advanced to the point of failure.
    pub read_request: Option<ReadRequest>,
}

impl Terminate {
    /// Length of the control word, which is always present.
    pub const CONTROL_LEN: usize = 4;
    /// Length of the longest Terminate: control word, length, untagged DDP header, Read Request.
    pub const MAX_LEN: usize = Self::CONTROL_LEN + 2 + UNTAGGED_HEADER_LEN + ReadRequest::LEN;

    /// Creates a Terminate that only consists of the control word.
    pub const fn new(code: TerminateCode) -> Self {
        Self {
            code,
            ddp_segment_len: None,
            ddp_header: None,
            read_request: None,
        }
    }

    /// Creates a Terminate for a received segment. It contains the parts of the segment that RFC
    /// 5040 §4.8 figure 10 requires for this code.
    pub const fn about(
        code: TerminateCode,
        segment_len: u16,
        header: Header,
        read_request: Option<ReadRequest>,
    ) -> Self {
        if !code.wants_ddp_header() {
            return Self::new(code);
        }
        Self {
            code,
            ddp_segment_len: Some(segment_len),
            ddp_header: Some(header),
            read_request: if code.wants_read_request() {
                read_request
            } else {
                None
            },
        }
    }

    /// Returns the length on the wire in octets.
    pub const fn wire_len(&self) -> usize {
        let mut len = Self::CONTROL_LEN;
        if self.ddp_segment_len.is_some() || self.ddp_header.is_some() {
            len = len.wrapping_add(2);
        }
        if let Some(header) = &self.ddp_header {
            len = len.wrapping_add(header.len());
        }
        if self.read_request.is_some() {
            len = len.wrapping_add(ReadRequest::LEN);
        }
        len
    }

    /// Reads a Terminate. If the M, D and R bits announce parts that the octets do not contain,
    /// these parts are `None`. That is not an error: the stream ends in any case, and only the code
    /// matters.
    ///
    /// If any of the low three bits of the third octet is set, and none of the high three bits, the
    /// layout is siw's. If none of the six bits is set, the layout is ambiguous. Then a code that
    /// is only defined with its nibbles exchanged is read in siw's layout, and any other code in
    /// the RFC's layout.
    pub fn parse(octets: &[u8]) -> Result<(Self, Layout), TerminateError> {
        let control: &[u8; Self::CONTROL_LEN] = octets.first_chunk().ok_or(TerminateError)?;
        let flags = control[field::HEADER_CONTROL];
        let code = TerminateCode {
            layer: control[field::LAYER_ETYPE] >> 4,
            etype: control[field::LAYER_ETYPE] & 0xf,
            code: control[field::CODE],
        };
        let undefined = |c: TerminateCode| c.description().is_none();
        let siw = if flags & (M | D | R) != 0 {
            false
        } else if flags & SIW_MDR != 0 {
            true
        } else {
            undefined(code) && !undefined(code.swapped())
        };
        let (layout, code, flags) = if siw {
            (Layout::Siw, code.swapped(), flags.reverse_bits())
        } else {
            (Layout::Rfc, code, flags)
        };
        let mut t = Self::new(code);
        let mut rest = octets.get(field::CONTROL.end..).unwrap_or_default();
        if flags & (M | D) != 0 {
            //= rfc5040 section 4.8
            //# It MUST be valid if the M bit is set.  It MUST be
            //# present when the D bit is set.
            let Some((len, after)) = rest.split_first_chunk() else {
                return Ok((t, layout));
            };
            if flags & M != 0 {
                t.ddp_segment_len = Some(u16::from_be_bytes(*len));
            }
            rest = after;
        }
        if flags & D != 0 {
            let Some(header) = Header::decode(rest) else {
                return Ok((t, layout));
            };
            t.ddp_header = Some(header);
            rest = rest.get(header.len()..).unwrap_or_default();
        }
        if flags & R != 0 {
            t.read_request = ReadRequest::parse(rest);
        }
        Ok((t, layout))
    }

    /// Writes the Terminate in the RFC's layout. Returns its length, at most [`Self::MAX_LEN`]. If
    /// `out` is too short, writes nothing and returns 0.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let Some(out) = out.get_mut(..self.wire_len()) else {
            return 0;
        };
        let Some((control, mut rest)) = out.split_first_chunk_mut() else {
            return 0;
        };
        let mut flags = 0;
        if self.ddp_segment_len.is_some() || self.ddp_header.is_some() {
            let Some((len, after)) = rest.split_first_chunk_mut() else {
                return 0;
            };
            //= rfc5040 section 4.8
            //# It MUST be valid if the M bit is set.  It MUST be
            //# present when the D bit is set.
            *len = self.ddp_segment_len.unwrap_or(0).to_be_bytes();
            flags |= if self.ddp_segment_len.is_some() { M } else { 0 };
            rest = after;
        }
        if let Some(header) = &self.ddp_header {
            //= rfc5040 section 4.8
            //# It MUST
            //# be present if the D bit is set.
            let n = header.emit(rest);
            rest = rest.get_mut(n..).unwrap_or_default();
            flags |= D;
        }
        if let Some(read_request) = &self.read_request {
            //= rfc5040 section 4.8
            //# It MUST be
            //# present if the R bit is set.
            read_request.emit(rest);
            flags |= R;
        }
        //= rfc5040 section 4.8
        //# This field MUST be set to zero on transmit,
        //# ignored on receive.
        //= rfc5040 section 4.8
        //# The Terminate Control field MUST have the format defined in Figure 8 below.
        *control = [
            (self.code.layer << 4) | (self.code.etype & 0xf),
            self.code.code,
            flags,
            0,
        ];
        self.wire_len()
    }
}
