//! The short path: runs of small messages, sent and received without the general code.
//!
//! Each function does exactly what the general paths (`tx` and `message`, `rx` and `deliver`) would do with the same
//! messages. It stops at the first message that it does not handle, and the general path goes on there. Such messages are:
//! an operation other than Send, Write or Read (`burst_reads`), a message of more than one element, a segment that is better
//! sent from where its payload lies, and each error. A test compares the two paths octet for octet.

use super::buffer::RxBuffer;
use super::plan::{Milestone, TxPlan};
use super::segment::{LOCAL_READ, Wire, emit_head, emit_trailer};
use super::send_queue::Slot;
use super::tx::{Job, SMALL_FRAME, Stage};
use super::{Env, Host, QueuePair};
use crate::limits::TX_COPY_MAX;
use crate::memory::{Memory, Span};
use crate::{Access, SendFlags, SendOp, WcFlags, WcOpcode};
use iwarp_proto::ddp::{
    Header, Stag, TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader,
    control_octets,
};
use iwarp_proto::mpa::framing::{CRC_LEN, MPA_LEN_FIELD, fpdu_len};
use iwarp_proto::rdmap::Opcode;

impl QueuePair {
    /// Returns `true` if [`send_burst`](Self::send_burst) may be tried with the next messages.
    #[inline]
    fn sends_bursts(&self, w: &Wire<'_, impl Memory>) -> bool {
        let known = match self.tx.job {
            None => self.sq.next().is_some_and(|(_, slot)| {
                matches!(
                    slot.op,
                    SendOp::Write { .. } | SendOp::Send | SendOp::Read { .. }
                )
            }),
            Some(Job::Request { stage, .. }) => {
                stage == Stage::Body && u32::from(self.tx.mulpdu) <= TX_COPY_MAX
            }
            Some(Job::Response { .. }) => false,
        };
        known
            && !w.markers
            && self.life.starts_requests()
            && !self.tx.rtr_pending()
            && self.responses.is_empty()
            && !self.acknowledge.on
            && !self.is_plodding()
    }

    /// Puts the next segments into the plan, as long as they are small segments of Sends and Writes.
    ///
    /// The caller has checked that FPDUs may be sent and that no Terminate waits.
    pub(super) fn send_burst(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        if !self.sends_bursts(w) {
            return;
        }
        let from = plan.scratch_end();
        loop {
            if self.tx.job.is_none() {
                self.send_small(plan, w);
                if self.send_reads(plan, w) {
                    continue;
                }
            }
            if !plan.has_room(SMALL_FRAME) || self.send_segments(plan, w).is_none() {
                break;
            }
        }
        if plan.scratch_end() > from {
            plan.join_frames(from);
            self.tx.spoke = true;
            self.tx.responses_in_row = 0;
        }
    }

    /// Sends messages of one segment each.
    #[inline]
    fn send_small(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        let room = u32::from(self.tx.mulpdu).saturating_sub(UNTAGGED_HEADER_LEN as u32);
        let len_max = TX_COPY_MAX.min(room);
        let (mut frames, mut payload) = (0u64, 0u64);
        while plan.has_room(SMALL_FRAME)
            && let Some((seq, slot, place)) = self.sq.next_with_place()
        {
            let waits = slot.flags.contains(SendFlags::FENCE) && !self.sq.awaited.is_empty();
            // Zero-length messages have other rules.
            if waits || slot.len == 0 || slot.len > len_max || slot.num_sge > 1 {
                break;
            }
            let msn = self.tx.msn.first().copied().unwrap_or(1);
            let Some(header) = header(slot, msn, 0, true) else {
                break;
            };
            let frame = Frame {
                header: &header,
                len: slot.len,
                what: Some(Milestone::Request(seq)),
                segment: self.tx.segment,
            };
            let (inline, held) = if slot.flags.contains(SendFlags::INLINE) {
                (self.sq.inline_at(place, slot.len as usize), None)
            } else {
                let Some(sge) = self.sq.sge_at(place).filter(|sge| sge.len == slot.len) else {
                    break;
                };
                let checked = w
                    .memory
                    .check(sge.lkey, sge.addr, sge.len, LOCAL_READ, w.who);
                let Ok(held) = checked else { break };
                (&[][..], Some(held))
            };
            frame.append(plan, w, |out| match &held {
                Some(held) => held.span().read(out),
                None => {
                    if let Some(data) = inline.get(..out.len()) {
                        out.copy_from_slice(data);
                    }
                }
            });
            frames += 1;
            payload += u64::from(slot.len);
            if matches!(header, Header::Untagged(_)) {
                self.tx.next_msn(0);
            }
            self.sq.advance();
        }
        self.counters.tx_fpdus = self.counters.tx_fpdus.wrapping_add(frames);
        self.counters.tx_payload = self.counters.tx_payload.wrapping_add(payload);
    }

    /// Sends segments of one message from memory, until it ends or the plan is full. Returns `None` if there is no message that
    /// this path handles. The caller has checked that there is room for one segment.
    fn send_segments(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) -> Option<()> {
        let (seq, slot, place, mut off) = match self.tx.job {
            Some(Job::Request { seq, off, .. }) => {
                let (slot, place) = self.sq.slot_with_place(seq)?;
                (seq, slot, place, off)
            }
            _ => {
                let (seq, slot, place) = self.sq.next_with_place()?;
                (seq, slot, place, 0)
            }
        };
        let begins = off == 0;
        let waits = slot.flags.contains(SendFlags::FENCE) && !self.sq.awaited.is_empty();
        if slot.num_sge != 1 || (waits && begins) || off >= slot.len {
            return None;
        }
        let msn = self.tx.msn.first().copied().unwrap_or(1);
        let msn = if begins { msn } else { msn.wrapping_sub(1) };
        let first = header(slot, msn, off, false)?;
        let room = u32::from(self.tx.mulpdu).saturating_sub(first.len() as u32);
        if room == 0 || room > TX_COPY_MAX {
            return None;
        }
        let sge = self.sq.sge_at(place).filter(|sge| sge.len == slot.len)?;
        let addr = sge.addr.wrapping_add(u64::from(off));
        // All of the rest is checked first, so that a message that cannot be sent is not begun.
        let range = (sge.lkey, addr, slot.len - off);
        let mut frames = 0;
        let from = off;
        let sent = w.memory.access(range, LOCAL_READ, w.who, |mut rest| {
            while off < slot.len && (frames == 0 || plan.has_room(SMALL_FRAME)) {
                let (now, later) = rest.split_at(room);
                let last = later.is_empty();
                let header = header(slot, msn, off, last)?;
                let frame = Frame {
                    header: &header,
                    len: now.len(),
                    what: last.then_some(Milestone::Request(seq)),
                    segment: self.tx.segment,
                };
                frame.append(plan, w, |out| now.read(out));
                frames += 1;
                off += now.len();
                rest = later;
            }
            Some(())
        });
        sent.ok()??;
        let ends = off == slot.len;
        if begins {
            self.sq.advance();
            if matches!(first, Header::Untagged(_)) {
                self.tx.next_msn(0);
            }
        }
        self.tx.job = (!ends).then_some(Job::Request {
            seq,
            off,
            stage: Stage::Body,
        });
        self.counters.tx_fpdus = self.counters.tx_fpdus.wrapping_add(frames);
        let payload = u64::from(off - from);
        self.counters.tx_payload = self.counters.tx_payload.wrapping_add(payload);
        Some(())
    }

    /// Processes whole FPDUs at the start of the buffer, as long as they are RDMA Writes, Reads, or Sends of one segment.
    ///
    /// The caller has checked that the stream is in full operation and without markers, and that no FPDU is being read directly.
    pub(super) fn receive_burst<H: Host>(&mut self, buffer: &mut RxBuffer, env: &mut Env<'_, H>) {
        if !self.life.has_heard() || self.is_plodding() {
            return;
        }
        let octets = buffer.octets();
        let crc = self.rx.checks_crc().then_some(env.crc32c);
        let mut rest = octets;
        let mut frames = 0;
        while let Some(&[high, low, ddp, rdmap]) = rest.first_chunk::<4>() {
            let Some(kind) = Kind::of([ddp, rdmap]) else {
                break;
            };
            let ulpdu_len = usize::from(u16::from_be_bytes([high, low]));
            let Some((fpdu, behind)) = rest.split_at_checked(fpdu_len(ulpdu_len)) else {
                break;
            };
            let Some((covered, trailer)) = fpdu.split_last_chunk::<CRC_LEN>() else {
                break;
            };
            if let Some(crc) = crc
                && crc(0, covered).to_le_bytes() != *trailer
            {
                break;
            }
            let ulpdu = covered
                .get(MPA_LEN_FIELD..MPA_LEN_FIELD + ulpdu_len)
                .unwrap_or(&[]);
            let taken = match kind {
                Kind::Write => self.place_write(ulpdu, env),
                Kind::Send => self.take_send(ulpdu, env),
                Kind::ReadRequest => self.take_read_request(ulpdu, env),
                Kind::ReadResponse => self.place_response(ulpdu, env),
            };
            if taken.is_none() {
                break;
            }
            frames += 1;
            rest = behind;
        }
        if frames > 0 {
            let n = octets.len() - rest.len();
            buffer.consume(n);
            self.rx.small_fpdus(frames);
            self.counters.rx_fpdus = self.counters.rx_fpdus.wrapping_add(frames);
        }
    }

    /// Processes one segment of an RDMA Write. Returns `None` if nothing was done.
    #[inline]
    fn place_write<H: Host>(&mut self, ulpdu: &[u8], env: &Env<'_, H>) -> Option<()> {
        let (header, payload) = ulpdu.split_at_checked(TAGGED_HEADER_LEN)?;
        let h = TaggedHeader::decode(header)?;
        let len = payload.len() as u32;
        if len == 0 || !self.remote.contains(Access::REMOTE_WRITE) {
            return None;
        }
        let message_len = self.rx.write_len.checked_add(len)?;
        let access = Access::REMOTE_WRITE;
        let range = (h.stag.0, h.to, len);
        let place = |span: Span<'_, H::Memory>| span.write_last_octet_last(payload);
        let placed = env.memory.access(range, access, self.accessor(), place);
        placed.ok()?;
        if h.last {
            self.rx.last_write_len = message_len;
            self.rx.write_len = 0;
            self.counters.rx_messages = self.counters.rx_messages.wrapping_add(1);
        } else {
            self.rx.write_len = message_len;
        }
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(u64::from(len));
        Some(())
    }

    /// Processes a whole Send. Returns `None` if nothing was placed; a receive may have been taken for it.
    #[inline]
    fn take_send<H: Host>(&mut self, ulpdu: &[u8], env: &mut Env<'_, H>) -> Option<()> {
        let (header, payload) = ulpdu.split_at_checked(UNTAGGED_HEADER_LEN)?;
        let h = UntaggedHeader::decode(header)?;
        let len = payload.len() as u32;
        let expected = h.qn == 0
            && h.mo == 0
            && self.rx.msn.first() == Some(&h.msn)
            && len > 0
            && !self.rx.receiving
            && !self.rx.rtr_send_expected
            && self.rx.immediate.is_none();
        // The general path finds the receive that was taken.
        if !expected || !self.take_receive(env.host) || u64::from(len) > self.rx.receive.len {
            return None;
        }
        let sge = self
            .rx
            .receive
            .sges()
            .first()
            .filter(|sge| sge.len >= len)?;
        let access = Access::LOCAL_WRITE;
        let range = (sge.lkey, sge.addr, len);
        let place = |span: Span<'_, H::Memory>| span.write_last_octet_last(payload);
        let placed = env.memory.access(range, access, self.accessor(), place);
        placed.ok()?;
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(u64::from(len));
        self.advance_msn(0);
        self.rx.last_write_len = 0;
        let mut cqe = self.receive_cqe(WcOpcode::Recv, len);
        if h.opcode.solicited() {
            cqe.flags |= WcFlags::SOLICITED;
        }
        self.finish_receive(cqe, env.host);
        Some(())
    }

    /// Returns `true` if the short path is off, for tests that compare the two.
    #[inline]
    pub(super) const fn is_plodding(&self) -> bool {
        #[cfg(test)]
        return self.plodding;
        #[cfg(not(test))]
        false
    }
}

/// The messages that the short path takes, by the first two octets of a segment.
#[derive(Clone, Copy)]
enum Kind {
    Write,
    Send,
    ReadRequest,
    ReadResponse,
}

impl Kind {
    #[inline]
    const fn of(control: [u8; 2]) -> Option<Self> {
        const fn is(tagged: bool, last: bool, opcode: Opcode) -> u16 {
            u16::from_be_bytes(control_octets(tagged, last, opcode))
        }
        const WRITE: u16 = is(true, false, Opcode::WRITE);
        const LAST_WRITE: u16 = is(true, true, Opcode::WRITE);
        const LAST_SEND: u16 = is(false, true, Opcode::SEND);
        const LAST_SEND_SE: u16 = is(false, true, Opcode::SEND_SE);
        const REQUEST: u16 = is(false, true, Opcode::READ_REQUEST);
        const RESPONSE: u16 = is(true, false, Opcode::READ_RESPONSE);
        const LAST_RESPONSE: u16 = is(true, true, Opcode::READ_RESPONSE);
        match u16::from_be_bytes(control) {
            LAST_WRITE | WRITE => Some(Self::Write),
            LAST_SEND | LAST_SEND_SE => Some(Self::Send),
            REQUEST => Some(Self::ReadRequest),
            LAST_RESPONSE | RESPONSE => Some(Self::ReadResponse),
            _ => None,
        }
    }
}

/// One FPDU of a run.
pub(super) struct Frame<'a> {
    pub(super) header: &'a Header,
    /// Payload.
    pub(super) len: u32,
    /// The event after it is written.
    pub(super) what: Option<Milestone>,
    /// Octets in a TCP segment, if FPDUs are aligned with segments.
    pub(super) segment: Option<u32>,
}

impl Frame<'_> {
    /// Puts it into the plan, which has room for it. `fill` writes the payload.
    #[inline(always)]
    pub(super) fn append(
        self,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        fill: impl FnOnce(&mut [u8]),
    ) {
        let len = self.len as usize;
        let ulpdu_len = self.header.len() + len;
        let total = fpdu_len(ulpdu_len);
        let start = plan.len();
        let out = plan.frame(total);
        let n = emit_head(out, self.header, ulpdu_len);
        fill(out.get_mut(n..n + len).unwrap_or(&mut []));
        emit_trailer(out, MPA_LEN_FIELD + ulpdu_len, w.crc);
        plan.framed(total, self.what);
        if let Some(segment) = self.segment {
            plan.align(start, segment as usize);
        }
    }
}

/// Returns the header of the segment that begins `off` octets into a Send or Write; `None` for other requests.
#[inline]
fn header(slot: &Slot, msn: u32, off: u32, last: bool) -> Option<Header> {
    match slot.op {
        SendOp::Write { remote_addr, rkey } => Some(Header::Tagged(TaggedHeader {
            last,
            opcode: Opcode::WRITE,
            stag: Stag(rkey),
            to: remote_addr.wrapping_add(u64::from(off)),
        })),
        SendOp::Send => Some(Header::Untagged(UntaggedHeader {
            last,
            opcode: if slot.flags.contains(SendFlags::SOLICITED) {
                Opcode::SEND_SE
            } else {
                Opcode::SEND
            },
            invalidate_stag: Stag(0),
            qn: 0,
            msn,
            mo: off,
        })),
        _ => None,
    }
}
