//! The short path for RDMA Reads: requests and answers of the peer, without the general code (RFC 5040 section 5.2).
//!
//! As in `burst`, each function does what `control` and `deliver` would do with the same messages. Zero-length
//! Reads, atomics, scattered sinks and errors take the general path.

use super::response::Response;
use super::{Env, Host, QueuePair};
use crate::Access;
use crate::memory::Span;
use iwarp_proto::ddp::{TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader};
use iwarp_proto::rdmap::ReadRequest;

impl QueuePair {
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
        self.responses.push(Response::Read(r)).then_some(())?;
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
