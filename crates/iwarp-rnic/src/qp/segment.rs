//! One FPDU into a plan: header, payload by copy or by reference, pad, CRC, markers
//! (RFC 5044 sections 4.1 to 4.4).

use super::place::for_each_part;
use super::plan::TxPlan;
use super::tx::Tx;
use crate::limits::{SUM_PART, TX_COPY_MAX};
use crate::memory::{AccessError, Accessor, Memory, MemoryTable};
use crate::{Access, Sge};
use iwarp_proto::crc32c::Crc32cFn;
use iwarp_proto::ddp::{Header, UNTAGGED_HEADER_LEN};
use iwarp_proto::mpa::framing::{
    CRC_LEN, FpduOptions, MPA_LEN_FIELD, encode_fpdu, fpdu_len, fpdu_len_with_markers, pad_len,
};

/// The right that reading local memory needs: none of its own.
pub(super) const LOCAL_READ: Access = Access::empty();

/// Where the payload of a segment comes from.
#[derive(Clone, Copy)]
pub(super) enum Payload<'a> {
    Bytes(&'a [u8]),
    Local { sges: &'a [Sge], off: u32, len: u32 },
    Remote { stag: u32, to: u64, len: u32 },
}

impl Payload<'_> {
    const fn len(&self) -> usize {
        match self {
            Self::Bytes(b) => b.len(),
            Self::Local { len, .. } | Self::Remote { len, .. } => *len as usize,
        }
    }
}

/// What all FPDUs of one plan share.
pub(super) struct Wire<'a, M> {
    pub(super) memory: &'a MemoryTable<M>,
    pub(super) who: Accessor,
    pub(super) crc: Option<Crc32cFn>,
    pub(super) markers: bool,
    /// The program may change octets while they are sent.
    pub(super) snapshot: bool,
}

impl<M> Wire<'_, M> {
    /// Payload of any size is copied, for messages of the program.
    pub(super) const fn copies_local(&self) -> bool {
        self.crc.is_some() && self.snapshot
    }
}

impl Tx {
    /// Appends one FPDU to the plan. On an error the plan does not change.
    #[inline]
    pub(super) fn emit(
        &mut self,
        plan: &mut TxPlan,
        header: &Header,
        payload: Payload<'_>,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), AccessError> {
        self.spoke = true;
        let start = plan.len();
        self.emit_fpdu(plan, header, payload, w)?;
        if let Some(segment) = self.segment {
            plan.align(start, segment as usize);
        }
        Ok(())
    }

    #[inline]
    fn emit_fpdu(
        &mut self,
        plan: &mut TxPlan,
        header: &Header,
        payload: Payload<'_>,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), AccessError> {
        let copy = w.markers
            || payload.len() <= TX_COPY_MAX as usize
            // Anybody may write to a response's source at any time, and its CRC must cover what is sent.
            || (w.crc.is_some() && matches!(payload, Payload::Remote { .. }))
            || w.copies_local();
        if !copy {
            return emit_in_place(plan, header, payload, w);
        }
        let from = plan.scratch_end();
        //= rfc5044 section 3
        //# MPA MUST encapsulate the ULPDU such that there is exactly one ULPDU
        //# contained in one FPDU.
        let ulpdu_len = header.len() + payload.len();
        let total = fpdu_len(ulpdu_len);
        emit_copied(plan.scratch(from, total), header, payload, w)?;
        if w.markers {
            self.insert_markers(plan, from, ulpdu_len, w);
        } else {
            plan.add_scratch(from, total);
        }
        Ok(())
    }

    /// Puts markers into the FPDU that was built at `from`, in a copy behind it.
    fn insert_markers(
        &mut self,
        plan: &mut TxPlan,
        from: usize,
        ulpdu_len: usize,
        w: &Wire<'_, impl Memory>,
    ) {
        let at = from + MPA_LEN_FIELD + ulpdu_len;
        let total = fpdu_len_with_markers(self.clock.next_marker_in(), ulpdu_len);
        let (plain, rest) = plan.scratch_and_rest(from, at - from);
        let options = FpduOptions {
            markers: true,
            crc: w.crc,
        };
        let ulpdu = plain.get(MPA_LEN_FIELD..).unwrap_or(&[]);
        // It fits: there was room for two of the largest, and MULPDU limits the rest.
        let out = rest.get_mut(..total).unwrap_or(&mut []);
        let _ = encode_fpdu(ulpdu, &options, &mut self.clock, out);
        plan.add_scratch(at, total);
    }
}

/// Writes a whole FPDU without markers to `out`, which has its length.
#[inline]
fn emit_copied(
    out: &mut [u8],
    header: &Header,
    payload: Payload<'_>,
    w: &Wire<'_, impl Memory>,
) -> Result<(), AccessError> {
    let ulpdu_len = header.len() + payload.len();
    let n = emit_head(out, header, ulpdu_len);
    let body = out.get_mut(n..n + payload.len()).unwrap_or(&mut []);
    copy_payload(body, payload, w)?;
    emit_trailer(out, MPA_LEN_FIELD + ulpdu_len, w.crc);
    Ok(())
}

/// Writes pad and CRC of the FPDU in `out`, whose ULPDU ends at `end`.
#[inline]
pub(super) fn emit_trailer(out: &mut [u8], end: usize, crc: Option<Crc32cFn>) {
    if let Some((covered, trailer)) = out.split_last_chunk_mut::<CRC_LEN>() {
        for octet in covered.iter_mut().skip(end) {
            *octet = 0;
        }
        *trailer = crc.map_or(0, |f| f(0, covered)).to_le_bytes();
    }
}

/// Writes length field and header; returns their length.
#[inline]
pub(super) fn emit_head(out: &mut [u8], header: &Header, ulpdu_len: usize) -> usize {
    let Some((len_field, rest)) = out.split_first_chunk_mut::<MPA_LEN_FIELD>() else {
        return 0;
    };
    *len_field = (ulpdu_len as u16).to_be_bytes();
    MPA_LEN_FIELD + header.emit(rest)
}

/// Appends an FPDU whose payload stays where it is.
fn emit_in_place(
    plan: &mut TxPlan,
    header: &Header,
    payload: Payload<'_>,
    w: &Wire<'_, impl Memory>,
) -> Result<(), AccessError> {
    let from = plan.scratch_end();
    let ulpdu_len = header.len() + payload.len();
    let head_len = MPA_LEN_FIELD + UNTAGGED_HEADER_LEN;
    let head = plan.scratch(from, head_len);
    let n = emit_head(head, header, ulpdu_len);
    let mut crc = w.crc.map(|f| f(0, head.get(..n).unwrap_or(&[])));
    // Parts of the payload are summed behind the header. There is room: the caller asked for `SUMMED_FRAME`.
    let mut room = plan.scratch(from + head_len, SUM_PART).first_chunk_mut();
    // All of it is checked first, so that an error does not change the plan.
    each_piece(payload, |stag, to, len, need| {
        w.memory.access((stag, to, len), need, w.who, |span| {
            if let (Some(f), Some(crc), Some(room)) = (w.crc, crc.as_mut(), room.as_mut()) {
                *crc = span.crc32c(f, *crc, room);
            }
        })
    })?;
    plan.add_scratch(from, n);
    let _ = each_piece(payload, |stag, to, len, need| {
        plan.add_memory(stag, to, len, need);
        Ok(())
    });
    // Pad and CRC. The octets that they belong to lie elsewhere.
    let at = plan.scratch_end();
    let pad = pad_len(ulpdu_len);
    let out = plan.scratch(at, pad + CRC_LEN);
    let (zeros, trailer) = out.split_at_mut_checked(pad).unwrap_or((&mut [], &mut []));
    zeros.fill(0);
    let crc = crc.and_then(|crc| w.crc.map(|f| f(crc, zeros)));
    if let Some(trailer) = trailer.first_chunk_mut::<CRC_LEN>() {
        *trailer = crc.unwrap_or(0).to_le_bytes();
    }
    plan.add_scratch(at, pad + CRC_LEN);
    Ok(())
}

/// Visits the registered ranges of a payload.
#[inline]
fn each_piece(
    payload: Payload<'_>,
    mut visit: impl FnMut(u32, u64, u32, Access) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    match payload {
        Payload::Bytes(_) => Ok(()),
        Payload::Local { sges, off, len } => for_each_part(sges, off, len, |lkey, addr, len| {
            visit(lkey, addr, len, LOCAL_READ)
        }),
        Payload::Remote { stag, to, len } => visit(stag, to, len, Access::REMOTE_READ),
    }
}

/// Copies a payload to `out`, which has its length.
#[inline]
fn copy_payload(
    mut out: &mut [u8],
    payload: Payload<'_>,
    w: &Wire<'_, impl Memory>,
) -> Result<(), AccessError> {
    if let Payload::Bytes(b) = payload {
        if let Some(out) = out.get_mut(..b.len()) {
            out.copy_from_slice(b);
        }
        return Ok(());
    }
    each_piece(payload, |stag, to, len, need| {
        w.memory
            .access((stag, to, len), need, w.who, |span| span.read(out))?;
        out = core::mem::take(&mut out)
            .get_mut(len as usize..)
            .unwrap_or(&mut []);
        Ok(())
    })
}
