//! One FPDU into a plan: header, payload by copy or by reference, pad, CRC, markers
//! (RFC 5044 sections 4.1 to 4.4).

use super::place::for_each_part;
use super::plan::TxPlan;
use super::tx::Tx;
use crate::limits::TX_COPY_MAX;
use crate::memory::{AccessError, Accessor, MemoryTable};
use crate::{Access, Sge};
use iwarp_proto::crc32c::Crc32cFn;
use iwarp_proto::ddp::{Header, UNTAGGED_HEADER_LEN};
use iwarp_proto::mpa::framing::{
    CRC_LEN, FpduOptions, MPA_LEN_FIELD, encode_fpdu, fpdu_len_with_markers, pad_len,
};

/// Reading local memory needs no right of its own.
pub(super) const NO_MEMORY: Access = Access::empty();

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

/// What all emissions of one fill share.
#[derive(Clone, Copy)]
pub(super) struct Wire<'a> {
    pub(super) memory: &'a MemoryTable,
    pub(super) who: Accessor,
    pub(super) crc: Option<Crc32cFn>,
    pub(super) markers: bool,
    /// The program may change what it sends.
    pub(super) snapshot: bool,
}

impl Wire<'_> {
    /// Copies of any size are made for messages of the program.
    pub(super) const fn copies_local(&self) -> bool {
        self.crc.is_some() && self.snapshot
    }
}

impl Tx {
    /// Appends one FPDU to the plan. On error the plan is as before.
    #[inline]
    pub(super) fn emit(
        &mut self,
        plan: &mut TxPlan,
        header: &Header,
        payload: Payload<'_>,
        w: &Wire<'_>,
    ) -> Result<(), AccessError> {
        self.spoke = true;
        let start = plan.len();
        self.emit_fpdu(plan, header, payload, w)?;
        if let Some(segment) = self.segment {
            plan.align(start, segment as usize);
        }
        Ok(())
    }

    fn emit_fpdu(
        &mut self,
        plan: &mut TxPlan,
        header: &Header,
        payload: Payload<'_>,
        w: &Wire<'_>,
    ) -> Result<(), AccessError> {
        let from = plan.scratch.len();
        let copy = w.markers
            || payload.len() <= TX_COPY_MAX as usize
            // A response's source may be written by anyone at any time: its CRC must cover what is sent.
            || (w.crc.is_some() && matches!(payload, Payload::Remote { .. }))
            || w.copies_local();
        //= rfc5044 section 3
        //# MPA MUST encapsulate the ULPDU such that there is exactly one ULPDU
        //# contained in one FPDU.
        let ulpdu_len = header.len() + payload.len();
        let mut head = [0u8; MPA_LEN_FIELD + UNTAGGED_HEADER_LEN];
        let (len_field, rest) = head.split_at_mut(MPA_LEN_FIELD);
        len_field.copy_from_slice(&(ulpdu_len as u16).to_be_bytes());
        let n = header.emit(rest);
        plan.scratch
            .extend_from_slice(head.get(..MPA_LEN_FIELD + n).unwrap_or(&[]));
        if copy {
            if let Err(e) = append_payload(plan, payload, w) {
                plan.scratch.truncate(from);
                return Err(e);
            }
            if w.markers {
                self.finish_with_markers(plan, from, w);
            } else {
                finish(plan, from, ulpdu_len, |b| w.crc.map(|f| f(0, b)));
                plan.add_scratch(from);
            }
            return Ok(());
        }
        self.emit_in_place(plan, from, payload, w)
    }

    /// Completes an FPDU whose payload stays where it is. The length field and header lie at `from`.
    fn emit_in_place(
        &mut self,
        plan: &mut TxPlan,
        from: usize,
        payload: Payload<'_>,
        w: &Wire<'_>,
    ) -> Result<(), AccessError> {
        let mut crc = w.crc.map(|f| f(0, plan.scratch.get(from..).unwrap_or(&[])));
        // First look at all of it, so that an error leaves the plan alone.
        let checked = each_piece(payload, w, |stag, to, len, need| {
            let span = w.memory.check(stag, to, len, need, w.who)?;
            if let (Some(f), Some(crc)) = (w.crc, crc.as_mut()) {
                *crc = span.crc32c(f, *crc);
            }
            Ok(())
        });
        if let Err(e) = checked {
            plan.scratch.truncate(from);
            return Err(e);
        }
        let ulpdu_len = plan.scratch.len() - from - MPA_LEN_FIELD + payload.len();
        plan.add_scratch(from);
        let _ = each_piece(payload, w, |stag, to, len, need| {
            plan.add_memory(stag, to, len, need);
            Ok(())
        });
        let trailer = plan.scratch.len();
        finish(plan, trailer, ulpdu_len, |pad| {
            crc.and_then(|crc| w.crc.map(|f| f(crc, pad)))
        });
        plan.add_scratch(trailer);
        Ok(())
    }

    /// Puts markers into the FPDU that was built at `from`.
    fn finish_with_markers(&mut self, plan: &mut TxPlan, from: usize, w: &Wire<'_>) {
        let at = plan.scratch.len();
        let ulpdu_len = at.saturating_sub(from + MPA_LEN_FIELD);
        let total = fpdu_len_with_markers(self.clock.next_marker_in(), ulpdu_len);
        plan.scratch.resize(at + total, 0);
        let (plain, out) = plan.scratch.split_at_mut(at);
        let options = FpduOptions {
            markers: true,
            crc: w.crc,
        };
        let ulpdu = plain.get(from + MPA_LEN_FIELD..).unwrap_or(&[]);
        // It fits: `out` has just been made long enough, and MULPDU bounds the rest.
        let _ = encode_fpdu(ulpdu, &options, &mut self.clock, out);
        plan.add_scratch(at);
    }
}

/// Appends pad and CRC. `crc` gets what `from..` holds with the pad.
#[inline]
fn finish(
    plan: &mut TxPlan,
    from: usize,
    ulpdu_len: usize,
    crc: impl FnOnce(&[u8]) -> Option<u32>,
) {
    let pad = pad_len(ulpdu_len);
    plan.scratch
        .extend_from_slice([0u8; 3].get(..pad).unwrap_or(&[]));
    let crc = crc(plan.scratch.get(from..).unwrap_or(&[])).unwrap_or(0);
    let trailer: [u8; CRC_LEN] = crc.to_le_bytes();
    plan.scratch.extend_from_slice(&trailer);
}

/// Visits the registered ranges of a payload.
#[inline]
fn each_piece(
    payload: Payload<'_>,
    _w: &Wire<'_>,
    mut visit: impl FnMut(u32, u64, u32, Access) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    match payload {
        Payload::Bytes(_) => Ok(()),
        Payload::Local { sges, off, len } => for_each_part(sges, off, len, |lkey, addr, len| {
            visit(lkey, addr, len, NO_MEMORY)
        }),
        Payload::Remote { stag, to, len } => visit(stag, to, len, Access::REMOTE_READ),
    }
}

/// Copies a payload to the end of the scratch.
#[inline]
fn append_payload(
    plan: &mut TxPlan,
    payload: Payload<'_>,
    w: &Wire<'_>,
) -> Result<(), AccessError> {
    if let Payload::Bytes(b) = payload {
        plan.scratch.extend_from_slice(b);
        return Ok(());
    }
    each_piece(payload, w, |stag, to, len, need| {
        let span = w.memory.check(stag, to, len, need, w.who)?;
        span.append_to(&mut plan.scratch);
        Ok(())
    })
}
