//! The short path for RDMA Reads: runs of requests and of answers, without the general code (RFC 5040 section 5.2).
//!
//! As in `burst`, each function does what `message`, `control` and `deliver` would do with the same messages. Zero-length
//! Reads, atomics, scattered sinks and errors take the general path.

use super::burst::Frame;
use super::plan::{Milestone, TxPlan};
use super::response::Response;
use super::segment::Wire;
use super::send_queue::Awaited;
use super::tx::SMALL_FRAME;
use super::{Env, Host, QueuePair};
use crate::limits::{RESPONSE_BURST, TX_COPY_MAX};
use crate::memory::{Memory, Span};
use crate::{Access, SendFlags, SendOp};
use iwarp_proto::ddp::{
    Header, Stag, TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader,
};
use iwarp_proto::rdmap::{Opcode, ReadRequest};

impl QueuePair {
    /// Puts the next Read Requests into the plan, up to the ORD. Returns `false` if there was none.
    #[inline]
    pub(super) fn send_reads(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) -> bool {
        // An RTR message by Read also waits for an answer of the peer.
        let ord = u32::from(self.sq.ord()).saturating_sub(u32::from(self.rx.rtr_response_due));
        let mut frames = 0u64;
        while plan.has_room(SMALL_FRAME)
            && self.sq.awaited.len() < ord
            && let Some((seq, slot, place)) = self.sq.next_with_place()
            && let SendOp::Read { remote_addr, rkey } = slot.op
        {
            let waits = slot.flags.contains(SendFlags::FENCE) && !self.sq.awaited.is_empty();
            let (len, num_sge) = (slot.len, slot.num_sge);
            if waits || len == 0 || num_sge != 1 {
                break;
            }
            let Some(sge) = self.sq.sge_at(place).filter(|sge| sge.len == len) else {
                break;
            };
            let range = (sge.lkey, sge.addr, len);
            let sink = w.memory.permits(range, Access::LOCAL_WRITE, w.who);
            if sink.is_err() {
                break;
            }
            let sink_stag = self.next_sink();
            let msn = self.tx.next_msn(1);
            let header = Header::Untagged(UntaggedHeader {
                last: true,
                opcode: Opcode::READ_REQUEST,
                invalidate_stag: Stag(0),
                qn: 1,
                msn,
                mo: 0,
            });
            let request = ReadRequest {
                sink_stag: Stag(sink_stag),
                sink_to: 0,
                size: len,
                source_stag: Stag(rkey),
                source_to: remote_addr,
            };
            let frame = Frame {
                header: &header,
                len: ReadRequest::LEN as u32,
                what: None,
                segment: self.tx.segment,
            };
            frame.append(plan, w, |out| {
                request.emit(out);
            });
            // There is room: the number was compared with the ORD.
            let awaited = Awaited::read(seq, sink_stag, len, msn);
            let _ = self.sq.awaited.push(awaited);
            self.sq.advance();
            frames += 1;
        }
        self.counters.tx_fpdus = self.counters.tx_fpdus.wrapping_add(frames);
        frames > 0
    }

    /// Puts the answers that are due into the plan, as long as they are small answers to Reads.
    ///
    /// The caller has checked that FPDUs may be sent and that no Terminate waits.
    pub(super) fn respond_burst(&mut self, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        if self.responses.is_empty()
            || self.tx.job.is_some()
            || w.markers
            || self.tx.rtr_pending()
            || self.is_plodding()
        {
            return;
        }
        let room = u32::from(self.tx.mulpdu).saturating_sub(TAGGED_HEADER_LEN as u32);
        let len_max = TX_COPY_MAX.min(room);
        let most = match self.has_startable() {
            true => RESPONSE_BURST.saturating_sub(self.tx.responses_in_row),
            false => u32::MAX,
        };
        let from = plan.scratch_end();
        let (mut frames, mut payload) = (0u32, 0u64);
        while plan.has_room(SMALL_FRAME)
            && frames < most
            && let Some(&Response::Read {
                sink_stag,
                sink_to,
                source_stag,
                source_to,
                len,
            }) = self.responses.front()
        {
            if len == 0 || len > len_max {
                break;
            }
            let access = Access::REMOTE_READ;
            let header = Header::Tagged(TaggedHeader {
                last: true,
                opcode: Opcode::READ_RESPONSE,
                stag: Stag(sink_stag),
                to: sink_to,
            });
            let frame = Frame {
                header: &header,
                len,
                what: Some(Milestone::Response),
                segment: self.tx.segment,
            };
            let Ok(source) = w.memory.check(source_stag, source_to, len, access, w.who) else {
                break;
            };
            frame.append(plan, w, |out| source.span().read(out));
            self.responses.pop();
            frames += 1;
            payload += u64::from(len);
        }
        if frames == 0 {
            return;
        }
        plan.join_frames(from);
        self.tx.spoke = true;
        self.tx.responses_in_row = self.tx.responses_in_row.saturating_add(frames);
        self.counters.tx_fpdus = self.counters.tx_fpdus.wrapping_add(u64::from(frames));
        self.counters.tx_payload = self.counters.tx_payload.wrapping_add(payload);
    }

    /// Processes a Read Request of the peer. Returns `None` if nothing was done.
    #[inline(never)]
    pub(super) fn take_read_request<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &Env<'_, H>,
    ) -> Option<()> {
        let (header, body) = ulpdu.split_at_checked(UNTAGGED_HEADER_LEN)?;
        let h = UntaggedHeader::decode(header)?;
        let r = ReadRequest::parse(body)?;
        let expected = h.qn == 1
            && h.mo == 0
            && self.rx.msn.get(1) == Some(&h.msn)
            && body.len() == ReadRequest::LEN
            && r.size > 0
            && self.remote.contains(Access::REMOTE_READ)
            && self.responses.limit() > 0;
        if !expected {
            return None;
        }
        let (access, who) = (Access::REMOTE_READ, self.accessor());
        let range = (r.source_stag.0, r.source_to, r.size);
        env.memory.permits(range, access, who).ok()?;
        // Returns `false` beyond the IRD; the general path then ends the stream.
        self.responses.push(Response::to(&r)).then_some(())?;
        self.counters.rx_requests = self.counters.rx_requests.wrapping_add(1);
        self.advance_msn(1);
        Some(())
    }

    /// Processes one segment of the answer to the oldest Read. Returns `None` if nothing was done.
    #[inline(never)]
    pub(super) fn place_response<H: Host>(
        &mut self,
        ulpdu: &[u8],
        env: &mut Env<'_, H>,
    ) -> Option<()> {
        let (header, payload) = ulpdu.split_at_checked(TAGGED_HEADER_LEN)?;
        let h = TaggedHeader::decode(header)?;
        let len = payload.len() as u32;
        let awaited = self.sq.awaited.front()?;
        let received = awaited.received;
        let end = received.checked_add(len)?;
        let expected = len > 0
            && !awaited.atomic
            && !self.rx.rtr_response_due
            && h.stag.0 == awaited.sink_stag
            && h.to == u64::from(received)
            && end <= awaited.len
            && h.last == (end == awaited.len);
        if !expected {
            return None;
        }
        let (slot, place) = self.sq.slot_with_place(awaited.seq)?;
        if slot.num_sge != 1 {
            return None;
        }
        let sge = self.sq.sge_at(place).filter(|sge| sge.len >= end)?;
        let addr = sge.addr.wrapping_add(u64::from(received));
        let access = Access::LOCAL_WRITE;
        let place = |span: Span<'_, H::Memory>| span.write_last_octet_last(payload);
        let range = (sge.lkey, addr, len);
        let placed = env.memory.access(range, access, self.accessor(), place);
        placed.ok()?;
        self.counters.rx_payload = self.counters.rx_payload.wrapping_add(u64::from(len));
        if h.last {
            self.answered(env.host);
        } else if let Some(awaited) = self.sq.awaited.front_mut() {
            awaited.received = end;
        }
        Some(())
    }
}
