//! Adding one FPDU to a plan: header, payload by copy or by reference, pad, CRC, markers (RFC 5044
//! sections 4.1 to 4.4). `segment` divides messages into segments.

use super::plan::TxPlan;
use super::segment::Source;
use super::tx::Tx;
use crate::counters::Counters;
use crate::limits::{SUM_COPY_MIN, SUM_PART};
use crate::memory::{AccessError, Accessor, CopyingCrc32cFn, Crc32c, Memory, MemoryTable, Span};
use crate::{Access, Sge};
use iwarp_proto::ddp::{Header, Stag, UNTAGGED_HEADER_LEN};
use iwarp_proto::mpa::framing::{
    CRC_LEN, FpduOptions, MPA_LEN_FIELD, encode_fpdu, fpdu_len, fpdu_len_with_markers, pad_len,
};

/// Scratch for an FPDU besides its payload: length field, header, pad and CRC.
const FRAMING: usize = MPA_LEN_FIELD + UNTAGGED_HEADER_LEN + 3 + CRC_LEN;

/// Data shared by all FPDUs of one plan.
pub(super) struct Wire<'a, M> {
    pub(super) memory: &'a MemoryTable<M>,
    pub(super) accessor: Accessor,
    pub(super) crc: Option<Crc32c>,
    pub(super) markers: bool,
    /// The program may change payload while it is sent.
    pub(super) snapshot: bool,
    pub(super) copy_max: u32,
    /// The table has memory whose pages may be missing, which no plan may refer to.
    pub(super) copy_all: bool,
}

impl<M> Wire<'_, M> {
    /// Returns `true` if the payload of a segment is copied next to its header instead of being
    /// referred to.
    #[inline]
    pub(super) const fn copies(&self, len: u32, remote: bool) -> bool {
        // Others may write to a response's source at any time, and its CRC must match what is sent.
        len <= self.copy_max
            || self.copy_all
            || self.markers
            || (self.crc.is_some() && (self.snapshot || remote))
    }

    /// Returns the function that copies segments of up to this length and computes their CRC in one
    /// pass, if there is one and it pays off.
    #[inline]
    pub(super) fn copying_crc(&self, longest: u32) -> Option<CopyingCrc32cFn> {
        match longest >= SUM_COPY_MIN {
            true => self.crc.and_then(|crc| crc.copying_crc()),
            false => None,
        }
    }

    /// Returns how much scratch a segment's FPDU needs at most.
    #[inline]
    pub(super) const fn scratch(&self, len: u32, remote: bool) -> usize {
        let fpdu_max = FRAMING.wrapping_add(len as usize);
        match self.copies(len, remote) {
            // Markers are inserted into a copy: one per 512 octets, and one each at the front and
            // the back.
            true if self.markers => fpdu_max
                .wrapping_mul(2)
                .wrapping_add(len as usize / 64)
                .wrapping_add(64),
            true => fpdu_max,
            // The payload may be copied in parts for its CRC. The room is reserved even without
            // CRC.
            false => FRAMING + SUM_PART,
        }
    }

    /// Returns the maximum payload of a message that is one copied segment, whatever its header.
    /// With markers this is zero.
    #[inline]
    pub(super) fn small_max(&self, mulpdu: u16) -> u32 {
        let room = u32::from(mulpdu).saturating_sub(UNTAGGED_HEADER_LEN as u32);
        if self.markers {
            0
        } else {
            self.copy_max.min(room)
        }
    }

    /// Like [`scratch`](Self::scratch), for a message of at most [`small_max`](Self::small_max).
    #[inline]
    pub(super) const fn scratch_small(&self, len: u32) -> usize {
        FRAMING.wrapping_add(len as usize)
    }
}

impl<M: Memory> Wire<'_, M> {
    /// Returns `true` if an element may be used with these rights.
    #[inline(always)]
    pub(super) fn permits(&self, sge: &Sge, need: Access) -> bool {
        self.memory
            .permits((sge.stag(), sge.addr, sge.len), need, self.accessor)
            .is_ok()
    }

    /// Returns `Ok` if all of these elements may be used with these rights.
    #[cold]
    #[inline(never)]
    pub(super) fn check_all(&self, sges: &[Sge], need: Access) -> Result<(), AccessError> {
        sges.iter().try_for_each(|sge| {
            let range = (sge.stag(), sge.addr, sge.len);
            self.memory.permits(range, need, self.accessor)
        })
    }
}

pub(super) struct Out<'a, 'w, M> {
    pub(super) tx: &'a mut Tx,
    pub(super) plan: &'a mut TxPlan,
    pub(super) counters: &'a mut Counters,
    pub(super) wire: &'a Wire<'w, M>,
}

impl<'a, 'w, M: Memory> Out<'a, 'w, M> {
    #[inline(always)]
    pub(super) const fn new(
        tx: &'a mut Tx,
        counters: &'a mut Counters,
        plan: &'a mut TxPlan,
        wire: &'a Wire<'w, M>,
    ) -> Self {
        Self {
            tx,
            plan,
            counters,
            wire,
        }
    }

    /// Appends one FPDU with `len` octets of payload, written by `fill`. On an error the plan does
    /// not change.
    //= rfc5044 section 3
    //# MPA MUST encapsulate the ULPDU such that there is exactly one ULPDU
    //# contained in one FPDU.
    #[inline(always)]
    pub(super) fn append<E>(
        &mut self,
        header: &Header,
        len: u32,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.wire.markers {
            // Pass everything by value: references would force the arguments into memory even
            // without markers.
            return Out::new(self.tx, self.counters, self.plan, self.wire)
                .append_marked(*header, len, fill);
        }
        self.append_plain(header, len, fill)
    }

    #[inline(always)]
    fn append_plain<E>(
        &mut self,
        header: &Header,
        len: u32,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let ulpdu_len = header.len().wrapping_add(len as usize);
        let total = fpdu_len(ulpdu_len);
        if let Some(out) = self.plan.scratch(total)
            && let Some((covered, trailer)) = out.split_last_chunk_mut::<CRC_LEN>()
            && let Some(end) = covered.last_chunk_mut::<4>()
        {
            // The pad is in the last four octets; the octets before it are overwritten below.
            *end = [0; 4];
            let n = emit_head(covered, header, ulpdu_len);
            if let Some(body) = covered.get_mut(n..n.wrapping_add(len as usize)) {
                fill(body)?;
            }
            let crc = self.wire.crc.map_or(0, |f| f.append(0, covered));
            *trailer = crc.to_le_bytes();
        }
        let start = self.plan.len();
        self.plan.add_scratch(total);
        self.appended(start);
        Ok(())
    }

    /// Appends an FPDU with markers. The ULPDU is first built in the scratch behind the FPDU.
    #[cold]
    #[inline(never)]
    fn append_marked<E>(
        mut self,
        header: Header,
        len: u32,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let ulpdu_len = header.len().wrapping_add(len as usize);
        let total = fpdu_len_with_markers(self.tx.clock.next_marker_in(), ulpdu_len);
        let fpdu_and_ulpdu = self.plan.scratch(total.wrapping_add(ulpdu_len));
        let fpdu_and_ulpdu = fpdu_and_ulpdu.unwrap_or_default();
        let (out, ulpdu) = fpdu_and_ulpdu
            .split_at_mut_checked(total)
            .unwrap_or_default();
        let n = header.emit(ulpdu);
        fill(ulpdu.get_mut(n..).unwrap_or(&mut []))?;
        let options = FpduOptions {
            markers: true,
            crc: self.wire.crc.map(|f| f.octets()),
        };
        // The FPDU fits: the caller has checked for room, and the MULPDU limits its length.
        let _ = encode_fpdu(ulpdu, &options, &mut self.tx.clock, out);
        let start = self.plan.len();
        self.plan.add_scratch(total);
        self.appended(start);
        Ok(())
    }

    #[inline]
    pub(super) const fn count_payload(&mut self, len: u32) {
        self.counters.tx_payload = self.counters.tx_payload.wrapping_add(len as u64);
    }

    #[inline(always)]
    fn appended(&mut self, start: usize) {
        self.tx.has_sent = true;
        self.counters.tx_fpdus = self.counters.tx_fpdus.wrapping_add(1);
        if let Some(segment) = self.tx.segment {
            self.plan.align(start, segment as usize);
        }
    }

    /// Appends a message that is one [small](Wire::small_max) segment of one range: STag, tagged
    /// offset, length.
    #[inline(always)]
    pub(super) fn append_small(
        self,
        header: Header,
        range: (Stag, u64, u32),
        remote: bool,
    ) -> Result<(), AccessError> {
        let (w, need) = (self.wire, Source { sges: &[], remote }.need());
        match w.memory.check_ordinary(range, need, w.accessor) {
            Some(span) => self.append_span(&header, span),
            None => self.append_small_counted(header, range, need),
        }
    }

    /// Appends a small message from memory with a user count. Out of line, so that the common path
    /// needs no stack for the count.
    #[cold]
    #[inline(never)]
    fn append_small_counted(
        mut self,
        header: Header,
        range: (Stag, u64, u32),
        need: Access,
    ) -> Result<(), AccessError> {
        let w = self.wire;
        self.append_plain(&header, range.2, |out| {
            w.memory.read(range, need, w.accessor, out)
        })?;
        self.count_payload(range.2);
        Ok(())
    }

    /// Appends one FPDU without markers whose payload is a copy of `span`.
    #[inline(always)]
    pub(super) fn append_span(
        mut self,
        header: &Header,
        span: Span<'_, M>,
    ) -> Result<(), AccessError> {
        self.append_plain(header, span.len(), |out| copy_result(span.read(out)))?;
        self.count_payload(span.len());
        Ok(())
    }

    /// Appends one FPDU whose CRC is computed while the payload is copied.
    #[inline(never)]
    pub(super) fn append_summed(
        mut self,
        header: &Header,
        span: Span<'_, M>,
        f: CopyingCrc32cFn,
    ) -> Result<(), AccessError> {
        let len = span.len();
        self.append_around(
            header,
            len,
            len as usize,
            |sum| {
                let crc = span.read_summed(f, sum.crc, sum.room);
                sum.crc = crc.ok_or(AccessError::NotMapped)?;
                Ok(())
            },
            |plan| plan.add_scratch(len as usize),
        )?;
        self.count_payload(len);
        Ok(())
    }

    /// Appends an FPDU with `len` octets of payload. `sum_payload` continues the CRC over the
    /// payload, and may use `room` bytes of scratch behind the header; `add_payload` adds the
    /// payload to the plan. If `sum_payload` fails, the plan does not change.
    #[inline(always)]
    pub(super) fn append_around<E>(
        &mut self,
        header: &Header,
        len: u32,
        room: usize,
        sum_payload: impl FnOnce(&mut Sum<'_>) -> Result<(), E>,
        add_payload: impl FnOnce(&mut TxPlan),
    ) -> Result<(), E> {
        let ulpdu_len = header.len().wrapping_add(len as usize);
        let head_len = MPA_LEN_FIELD.wrapping_add(header.len());
        // The caller has checked for room.
        let room = self.plan.scratch(head_len.wrapping_add(room));
        let room = room.unwrap_or_default();
        let (head, room) = room.split_at_mut_checked(head_len).unwrap_or_default();
        emit_head(head, header, ulpdu_len);
        let mut sum = Sum {
            f: self.wire.crc,
            crc: self.wire.crc.map_or(0, |f| f.append(0, head)),
            room,
        };
        sum_payload(&mut sum)?;
        let crc = sum.crc;
        let start = self.plan.len();
        self.plan.add_scratch(head_len);
        add_payload(self.plan);
        let trailer_len = pad_len(ulpdu_len).wrapping_add(CRC_LEN);
        if let Some(out) = self.plan.scratch(trailer_len)
            && let Some((zeros, trailer)) = out.split_last_chunk_mut::<CRC_LEN>()
        {
            zeros.fill(0);
            let crc = self.wire.crc.map_or(0, |f| f.append(crc, zeros));
            *trailer = crc.to_le_bytes();
        }
        self.plan.add_scratch(trailer_len);
        self.appended(start);
        Ok(())
    }
}

/// The CRC of an FPDU, computed separately over header and payload.
pub(super) struct Sum<'r> {
    /// `None` without CRC.
    f: Option<Crc32c>,
    crc: u32,
    /// Scratch after the header.
    room: &'r mut [u8],
}

impl Sum<'_> {
    /// Continues the CRC over registered memory.
    #[inline]
    pub(super) fn add(&mut self, span: Span<'_, impl Memory>) -> Result<(), AccessError> {
        if let (Some(f), Some(room)) = (self.f, self.room.first_chunk_mut()) {
            let crc = span.crc32c(f, self.crc, room);
            self.crc = crc.ok_or(AccessError::NotMapped)?;
        }
        Ok(())
    }
}

#[inline(always)]
const fn copy_result(copied: bool) -> Result<(), AccessError> {
    match copied {
        true => Ok(()),
        false => Err(AccessError::NotMapped),
    }
}

/// Writes the length field and the header; returns their total length.
#[inline(always)]
fn emit_head(out: &mut [u8], header: &Header, ulpdu_len: usize) -> usize {
    let Some((len_field, rest)) = out.split_first_chunk_mut::<MPA_LEN_FIELD>() else {
        return 0;
    };
    *len_field = (ulpdu_len as u16).to_be_bytes();
    MPA_LEN_FIELD.wrapping_add(header.emit(rest))
}
