//! Prints one direction of an MPA connection, one line per frame or FPDU. It is for tools and for
//! fuzzing: it passes the octets through every decoder of this crate.

use super::framing::{
    FpduOptions, MARKER_LEN, MPA_LEN_FIELD, MarkerClock, Piece, fpdu_len_with_markers, fpdu_pieces,
};
use super::startup::{Flags, Frame, FrameKind};
use crate::ddp::{Header, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader};
use crate::rdmap::{
    AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest, Terminate, TerminateCode,
};
use core::fmt;

/// Number of octets at the start of a ULPDU that are printed: the longest DDP header and the
/// longest RDMAP header after it.
const HEAD: usize = UNTAGGED_HEADER_LEN + AtomicRequest::LEN;
const _: () = assert!(AtomicRequest::LEN >= Terminate::MAX_LEN);

/// One direction of a connection, for printing. The output of `{}` ends with a newline.
#[derive(Copy, Clone, Debug)]
pub struct Stream<'a> {
    octets: &'a [u8],
    opts: FpduOptions,
}

impl<'a> Stream<'a> {
    /// Creates a printer for the octets of one direction, which start with its first octet. Without
    /// markers, they may start with any FPDU. An initial Request or Reply frame is recognised by
    /// its key.
    pub const fn new(octets: &'a [u8], opts: FpduOptions) -> Self {
        Self { octets, opts }
    }
}

impl fmt::Display for Stream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.octets;
        let mut at = 0usize;
        if let Ok(Some(frame)) = Frame::parse(rest) {
            write!(f, "{at:>8} ")?;
            print_frame(f, &frame)?;
            at = frame.header().frame_len();
            rest = rest.get(at..).unwrap_or_default();
        }
        let mut clock = MarkerClock::new();
        while !rest.is_empty() {
            let Some(fpdu) = Fpdu::parse(rest, &self.opts, &clock) else {
                return writeln!(f, "{at:>8} {} octets of an incomplete FPDU", rest.len());
            };
            write!(f, "{at:>8} {fpdu}")?;
            clock.advance(fpdu.total);
            at = at.saturating_add(fpdu.total);
            rest = rest.get(fpdu.total..).unwrap_or_default();
        }
        Ok(())
    }
}

fn print_frame(f: &mut fmt::Formatter<'_>, frame: &Frame<'_>) -> fmt::Result {
    let h = frame.header();
    let kind = match h.kind {
        FrameKind::Request => "Request",
        FrameKind::Reply => "Reply",
    };
    write!(f, "MPA {kind} revision {}", h.revision)?;
    for (flag, name) in [
        (Flags::MARKERS, "markers"),
        (Flags::CRC, "CRC"),
        (Flags::REJECT, "reject"),
        (Flags::ENHANCED, "enhanced"),
    ] {
        if h.flags.has(flag) {
            write!(f, " {name}")?;
        }
    }
    if let Ok(Some(p)) = frame.prefix() {
        write!(f, " IRD {} ORD {}", p.ird, p.ord)?;
        for (on, name) in [
            (p.peer_to_peer, "peer-to-peer"),
            (p.rtr_send, "RTR-Send"),
            (p.rtr_write, "RTR-Write"),
            (p.rtr_read, "RTR-Read"),
        ] {
            if on {
                write!(f, " {name}")?;
            }
        }
    }
    writeln!(
        f,
        ", {} octets private data",
        frame.ulp_private_data().len()
    )
}

/// The printed properties of an FPDU.
struct Fpdu {
    /// Number of octets in the stream, including markers.
    total: usize,
    ulpdu_len: usize,
    /// The first octets of the ULPDU.
    head: [u8; HEAD],
    head_len: usize,
    markers: usize,
    bad_markers: usize,
    /// Whether the CRC is correct, if it was checked.
    crc: Option<bool>,
}

impl Fpdu {
    fn parse(stream: &[u8], opts: &FpduOptions, clock: &MarkerClock) -> Option<Self> {
        let next = if opts.markers {
            clock.next_marker_in()
        } else {
            usize::MAX
        };
        let header_at = if next == 0 { MARKER_LEN } else { 0 };
        let len = stream.get(header_at..)?.first_chunk::<MPA_LEN_FIELD>()?;
        let ulpdu_len = usize::from(u16::from_be_bytes(*len));
        let total = fpdu_len_with_markers(next, ulpdu_len);
        let (covered, trailer) = stream.get(..total)?.split_last_chunk::<4>()?;
        let mut this = Self {
            total,
            ulpdu_len,
            head: [0; HEAD],
            head_len: ulpdu_len.min(HEAD),
            markers: 0,
            bad_markers: 0,
            crc: opts
                .crc
                .map(|crc| crc(0, covered).to_le_bytes() == *trailer),
        };
        let mut filled = 0;
        let mut skip = MPA_LEN_FIELD;
        for piece in fpdu_pieces(covered, opts, clock) {
            match piece {
                Piece::Marker { octets, expected } => {
                    this.markers = this.markers.saturating_add(1);
                    if super::framing::Marker::parse(octets) != expected {
                        this.bad_markers = this.bad_markers.saturating_add(1);
                    }
                }
                Piece::Octets(octets) => {
                    let octets = octets.get(skip..).unwrap_or_default();
                    skip = 0;
                    let n = octets.len().min(this.head_len.saturating_sub(filled));
                    let end = filled.saturating_add(n);
                    if let (Some(dst), Some(src)) =
                        (this.head.get_mut(filled..end), octets.get(..n))
                    {
                        dst.copy_from_slice(src);
                    }
                    filled = end;
                }
            }
        }
        Some(this)
    }
}

impl fmt::Display for Fpdu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FPDU {}", self.ulpdu_len)?;
        if self.markers > 0 {
            write!(f, " markers {}", self.markers)?;
        }
        if self.bad_markers > 0 {
            write!(f, " BAD MARKERS {}", self.bad_markers)?;
        }
        match self.crc {
            Some(true) => f.write_str(" CRC good: ")?,
            Some(false) => f.write_str(" CRC BAD: ")?,
            None => f.write_str(": ")?,
        }
        let ulpdu = self.head.get(..self.head_len).unwrap_or_default();
        let Some(header) = Header::decode(ulpdu) else {
            return writeln!(f, "shorter than a DDP header");
        };
        let payload = self.ulpdu_len.saturating_sub(header.len());
        match header {
            Header::Tagged(TaggedHeader {
                opcode, stag, to, ..
            }) => {
                write!(f, "{opcode:?} STag {stag} TO {to:#x}, {payload} octets")?;
            }
            Header::Untagged(UntaggedHeader {
                opcode,
                invalidate_stag,
                qn,
                msn,
                mo,
                ..
            }) => {
                write!(f, "{opcode:?} QN {qn} MSN {msn} MO {mo}, {payload} octets")?;
                if invalidate_stag.0 != 0 {
                    write!(f, ", invalidates {invalidate_stag}")?;
                }
                let body = ulpdu.get(header.len()..).unwrap_or_default();
                print_body(f, opcode, body)?;
            }
        }
        if header.last() {
            f.write_str(", last")?;
        }
        if let Err(error) = Header::parse(ulpdu) {
            write!(
                f,
                " -- {error}, terminate {:?}",
                TerminateCode::from(&error)
            )?;
        }
        writeln!(f)
    }
}

fn print_body(f: &mut fmt::Formatter<'_>, opcode: Opcode, body: &[u8]) -> fmt::Result {
    match opcode {
        Opcode::READ_REQUEST => match ReadRequest::parse(body) {
            Some(r) => write!(
                f,
                ": {} octets from STag {} TO {:#x} to STag {} TO {:#x}",
                r.size, r.source_stag, r.source_to, r.sink_stag, r.sink_to
            ),
            None => f.write_str(": cut short"),
        },
        Opcode::ATOMIC_REQUEST => match AtomicRequest::parse(body) {
            Some(a) => write!(
                f,
                ": {:?} id {} STag {} TO {:#x} data {:#x} mask {:#x} compare {:#x} mask {:#x}",
                a.op,
                a.request_id,
                a.stag,
                a.to,
                a.add_swap,
                a.add_swap_mask,
                a.compare,
                a.compare_mask
            ),
            None => f.write_str(": cut short"),
        },
        Opcode::ATOMIC_RESPONSE => match AtomicResponse::parse(body) {
            Some(a) => write!(f, ": id {} original {:#x}", a.request_id, a.original),
            None => f.write_str(": cut short"),
        },
        Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE => match Immediate::parse(body) {
            Some(i) if i.belongs_to_send() => write!(f, ": {:#x} before Send", i.value()),
            Some(i) => write!(f, ": {:#x}", i.value()),
            None => f.write_str(": not 8 octets"),
        },
        Opcode::TERMINATE => match Terminate::parse(body) {
            Ok((t, layout)) => {
                write!(f, ": {:?} {layout:?} layout", t.code)?;
                if let Some(len) = t.ddp_segment_len {
                    write!(f, ", segment {len}")?;
                }
                if let Some(h) = t.ddp_header {
                    write!(f, ", about {h:?}")?;
                }
                if let Some(r) = t.read_request {
                    write!(f, ", {r:?}")?;
                }
                Ok(())
            }
            Err(error) => write!(f, ": {error}"),
        },
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "pretty_tests.rs"]
mod tests;
