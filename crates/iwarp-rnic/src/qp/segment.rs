//! The segments of a message: how its payload is cut, looked up in the memory table, and copied or
//! referred to (RFC 5041 section 5.2). `fpdu` adds each segment to the plan.

use super::fpdu::{Out, Sum};
use super::place::for_each_part;
use super::plan::TxPlan;
use crate::limits::SUM_PART;
use crate::memory::{AccessError, CopyingCrc32cFn, Memory, Span};
use crate::{Access, Sge};
use core::convert::Infallible;
use iwarp_proto::ddp::{Header, Stag};

/// Local memory needs no right to be read.
pub(super) const LOCAL_READ: Access = Access::empty();

/// Registered memory that is the payload of a message.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) sges: &'a [Sge],
    /// The payload is a response: the peer has requested it by STag.
    pub(super) remote: bool,
}

impl Source<'_> {
    #[inline]
    pub(super) const fn need(&self) -> Access {
        match self.remote {
            true => Access::REMOTE_READ,
            false => LOCAL_READ,
        }
    }
}

/// Returns the length of the next segment of a message with `left` unsent octets, and whether it is
/// the last one. `room` is the maximum length.
//= rfc5041 section 5.2
//# At the Data Source, the DDP layer MUST send all the data contained in
//# the ULP message.
//= rfc5041 section 5.2
//# At the Data Source, the DDP layer MUST segment the data contained in a
//# ULP message into a series of DDP Segments, where each DDP Segment
//# contains a DDP Header and ULP Payload, and MUST be no larger than the
//# MULPDU value Advertised by the LLP.
//= rfc5044 section 3
//# The sending DDP MUST NOT post a ULPDU larger than 64768 octets to
//# MPA.
//= rfc5044 section 3
//# DDP SHOULD limit each record size to MULPDU.
//= rfc5044 section 4.5
//# DDP SHOULD provide ULPDUs that are as large as possible, but less than
//# or equal to MULPDU.
//= rfc5041 section 5.2
//# A zero-length DDP Message is allowed and MUST consume exactly one DDP
//# Segment.
//= rfc5041 section 4.1
//# It MUST be set to one on the last DDP Segment of every DDP Message.
//= rfc5041 section 4.1
//# It MUST NOT be set to one on any other DDP Segment.
//= rfc5041 section 4.1
//# The DDP Segment with the L bit set to 1 MUST be posted to the LLP after
//# all other DDP Segments of the associated DDP Message have been posted to
//# the LLP.
//= rfc5041 section 4.1
//# For an Untagged DDP Message, the DDP Segment with the L bit set to 1 MUST
//# carry the highest MO.
#[inline(always)]
pub(super) const fn next_segment(left: u32, room: u32) -> (u32, bool) {
    match left > room {
        true => (room, false),
        false => (left, true),
    }
}

impl<'a, 'w, M: Memory> Out<'a, 'w, M> {
    /// Appends segments of a message: the first one, for which the caller has checked for room, and
    /// as many more as fit into the plan. Of the message's `end` octets, `off` are already sent.
    /// `header` returns a segment's header; its arguments are the segment's offset, and whether it
    /// is the last one.
    #[inline(always)]
    pub(super) fn segments(
        &mut self,
        source: Source<'_>,
        off: &mut u32,
        end: u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
    ) -> Result<(), AccessError> {
        match source.sges {
            [sge] if sge.len == end && !self.wire.markers => {
                self.range_segments(sge, source.remote, off, room, header)
            }
            _ => self.scattered_segments(source, off, end, room, header),
        }
    }

    /// Appends segments of a message with several elements, or with markers.
    #[inline(never)]
    fn scattered_segments(
        &mut self,
        source: Source<'_>,
        off: &mut u32,
        end: u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
    ) -> Result<(), AccessError> {
        // Check all elements first, so that a message that cannot be sent is not started.
        if end > room && *off == 0 {
            self.wire.check_all(source.sges, source.need())?;
        }
        loop {
            let (len, last) = next_segment(end.wrapping_sub(*off), room);
            if !self.plan.has_room(self.wire.scratch(len, source.remote)) {
                return Ok(());
            }
            self.segment(&header(*off, last), source, *off, len)?;
            //= rfc5041 section 5.3
            //# SHOULD transmit DDP Segments within a DDP Message in increasing MO order
            //# for Untagged DDP Messages, and in increasing TO order for Tagged DDP
            //# Messages.
            *off = off.wrapping_add(len);
            self.count_payload(len);
            if last {
                return Ok(());
            }
        }
    }

    #[inline(never)]
    pub(super) fn octets(
        &mut self,
        octets: &[u8],
        off: &mut u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
    ) {
        let mut rest = octets.get(*off as usize..).unwrap_or(&[]);
        loop {
            let (len, last) = next_segment(rest.len() as u32, room);
            let (now, later) = rest.split_at_checked(len as usize).unwrap_or_default();
            let Ok(()) = self.append::<Infallible>(&header(*off, last), len, |out| {
                if let Some(out) = out.get_mut(..now.len()) {
                    out.copy_from_slice(now);
                }
                Ok(())
            });
            *off = off.wrapping_add(len);
            self.count_payload(len);
            if last || !self.plan.has_room(self.wire.scratch(room, false)) {
                return;
            }
            rest = later;
        }
    }

    /// Appends segments from one range of memory without markers: the range is looked up once.
    #[inline(always)]
    fn range_segments(
        &mut self,
        sge: &Sge,
        remote: bool,
        off: &mut u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
    ) -> Result<(), AccessError> {
        let (w, need) = (self.wire, Source { sges: &[], remote }.need());
        let addr = sge.addr.wrapping_add(u64::from(*off));
        let range = (sge.stag(), addr, sge.len.wrapping_sub(*off));
        let Some(span) = w.memory.check_ordinary(range, need, w.accessor) else {
            if w.copy_all {
                // Each segment checks whether its pages are present.
                let sges = core::slice::from_ref(sge);
                let source = Source { sges, remote };
                return self.scattered_segments(source, off, sge.len, room, header);
            }
            return self.counted_segments(range, remote, off, room, header);
        };
        self.span_segments(span, (range.0, addr), remote, off, room, header)
    }

    /// Appends segments from memory with a user count; out of line like
    /// [`append_small_counted`](Self::append_small_counted).
    #[cold]
    #[inline(never)]
    fn counted_segments(
        &mut self,
        (stag, to, len): (Stag, u64, u32),
        remote: bool,
        off: &mut u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
    ) -> Result<(), AccessError> {
        let (w, need) = (self.wire, Source { sges: &[], remote }.need());
        let held = w.memory.check(stag, to, len, need, w.accessor)?;
        self.span_segments(held.span(), (stag, to), remote, off, room, header)
    }

    /// Appends segments from `span`, checked memory with the STag and tagged offset `place`.
    #[inline(always)]
    fn span_segments(
        &mut self,
        span: Span<'_, M>,
        place: (Stag, u64),
        remote: bool,
        off: &mut u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
    ) -> Result<(), AccessError> {
        // Later segments are not longer than the first one.
        let longest = next_segment(span.len(), room).0;
        match self.wire.copies(longest, remote) {
            true => match self.wire.copying_crc(longest) {
                Some(f) => self.summed_segments(span, remote, off, room, header, f),
                None => self.copied_segments(span, remote, off, room, header, None),
            },
            false => self.referred_segments(span, place, remote, off, room, header),
        }
    }

    /// Appends copied segments, and computes their CRC during the copy. Not inlined, so that the
    /// loop over short segments needs no registers for a call.
    #[inline(never)]
    fn summed_segments(
        &mut self,
        span: Span<'_, M>,
        remote: bool,
        off: &mut u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
        f: CopyingCrc32cFn,
    ) -> Result<(), AccessError> {
        self.copied_segments(span, remote, off, room, header, Some(f))
    }

    /// Appends copied segments. If there is a function `f`, it copies and computes the CRC.
    #[inline(always)]
    fn copied_segments(
        &mut self,
        mut rest: Span<'_, M>,
        remote: bool,
        off: &mut u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
        f: Option<CopyingCrc32cFn>,
    ) -> Result<(), AccessError> {
        let w = self.wire;
        loop {
            let (len, last) = next_segment(rest.len(), room);
            let (now, later) = rest.split_at(len);
            let out = Out::new(self.tx, self.counters, self.plan, w);
            match f {
                Some(f) => out.append_summed(&header(*off, last), now, f)?,
                None => out.append_span(&header(*off, last), now)?,
            }
            *off = off.wrapping_add(len);
            if last || !self.plan.has_room(w.scratch(room, remote)) {
                return Ok(());
            }
            rest = later;
        }
    }

    /// Appends segments by reference. The last one may be short enough to be copied.
    #[inline]
    fn referred_segments(
        &mut self,
        mut rest: Span<'_, M>,
        (stag, mut to): (Stag, u64),
        remote: bool,
        off: &mut u32,
        room: u32,
        header: impl Fn(u32, bool) -> Header,
    ) -> Result<(), AccessError> {
        let (w, need) = (self.wire, Source { sges: &[], remote }.need());
        loop {
            let (len, last) = next_segment(rest.len(), room);
            let (now, later) = rest.split_at(len);
            let header = header(*off, last);
            match w.copies(len, remote) {
                true => Out::new(self.tx, self.counters, self.plan, w).append_span(&header, now)?,
                false => self.refer_to_span(&header, now, (stag, to), need)?,
            }
            *off = off.wrapping_add(len);
            if last || !self.plan.has_room(w.scratch(room, remote)) {
                return Ok(());
            }
            rest = later;
            to = to.wrapping_add(u64::from(len));
        }
    }

    /// Appends one segment with `len` octets of a message from `off` on.
    #[inline(never)]
    fn segment(
        &mut self,
        header: &Header,
        source: Source<'_>,
        off: u32,
        len: u32,
    ) -> Result<(), AccessError> {
        if !self.wire.copies(len, source.remote) {
            return self.refer_to(header, source, off, len);
        }
        let w = self.wire;
        self.append(header, len, |mut out| {
            for_each_part(source.sges, off, len, |stag, to, len| {
                let range = (stag, to, len);
                let (now, later) = core::mem::take(&mut out)
                    .split_at_mut_checked(len as usize)
                    .unwrap_or_default();
                out = later;
                w.memory.read(range, source.need(), w.accessor, now)
            })
        })
    }

    #[inline(always)]
    fn refer_to_span(
        &mut self,
        header: &Header,
        span: Span<'_, M>,
        (stag, to): (Stag, u64),
        need: Access,
    ) -> Result<(), AccessError> {
        let len = span.len();
        self.append_around(
            header,
            len,
            SUM_PART,
            |sum| sum.add(span),
            |plan| plan.add_memory(stag, to, len, need),
        )?;
        self.count_payload(len);
        Ok(())
    }

    fn refer_to(
        &mut self,
        header: &Header,
        source: Source<'_>,
        off: u32,
        len: u32,
    ) -> Result<(), AccessError> {
        let (w, need) = (self.wire, source.need());
        // Check all elements first, so that an error does not change the plan.
        let check = |sum: &mut Sum<'_>| {
            for_each_part(source.sges, off, len, |stag, to, len| {
                let range = (stag, to, len);
                w.memory
                    .access(range, need, w.accessor, |span| sum.add(span))?
            })
        };
        let add = |plan: &mut TxPlan| {
            let _ = for_each_part(source.sges, off, len, |stag, to, len| {
                plan.add_memory(stag, to, len, need);
                Ok(())
            });
        };
        self.append_around(header, len, SUM_PART, check, add)
    }
}
