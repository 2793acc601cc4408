//! Requests that the peer answers: Read Requests and atomics (RFC 5040 section 5.2, RFC 7306
//! section 5). `answered` completes them.

use super::QueuePair;
use super::fpdu::Wire;
use super::headers::{EMPTY_MESSAGE_STAG, peer_stag};
use super::message::{PlannedRequest, has_room_for_control};
use super::plan::TxPlan;
use super::send_queue::{Awaited, Kind, Slot};
use crate::memory::Memory;
use crate::{Access, SendOp, Sge, WcStatus};
use iwarp_proto::ddp::Stag;
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, Opcode, ReadRequest};

impl QueuePair {
    /// Returns `Ok` if all local elements of a request may be written.
    #[inline(always)]
    pub(super) fn check_sinks(
        &self,
        sges: &[Sge],
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        let permitted = match sges {
            _ if self.sq.ord() == 0 => return Err(WcStatus::LocalQpOperation),
            [sge] => w.permits(sge, Access::LOCAL_WRITE),
            _ => w.check_all(sges, Access::LOCAL_WRITE).is_ok(),
        };
        if permitted {
            Ok(())
        } else {
            Err(WcStatus::LocalProtection)
        }
    }

    /// Returns a sink STag for one Read. It is never 0 or 1.
    #[inline]
    pub(super) const fn next_sink(&mut self) -> Stag {
        let sink = self.tx.next_sink;
        self.tx.next_sink = if sink == u32::MAX {
            2
        } else {
            sink.wrapping_add(1)
        };
        Stag(sink)
    }

    /// Plans a Read Request for memory of the peer at this tagged offset.
    #[inline]
    pub(super) fn plan_read(
        &mut self,
        seq: u32,
        place: usize,
        (source_to, rkey): (u64, u32),
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> PlannedRequest {
        let Some(slot) = self.sq.at(place) else {
            return PlannedRequest::Failed(WcStatus::LocalQpOperation);
        };
        if !has_room_for_control(plan, w) {
            return PlannedRequest::NoRoom;
        }
        if let Err(status) = self.check_sinks(self.sq.sges_at(place, slot), w) {
            return PlannedRequest::Failed(status);
        }
        let len = slot.len;
        let invalidates = matches!(slot.op, SendOp::ReadInv { .. });
        let internal = slot.kind == Kind::Internal;
        let sink_stag = self.next_sink();
        let request = ReadRequest {
            sink_stag,
            sink_to: 0,
            size: len,
            source_stag: peer_stag(rkey, len),
            source_to,
        };
        //= rfc5040 section 5.2
        //# The RDMA Read operation MUST consist of a single RDMA Read Request
        //# Message and a single RDMA Read Response Message.
        //= rfc5040 section 5.2.1
        //# An RDMA Read Request Message MUST reference an Untagged Buffer.
        //= rfc5040 section 5.2.1
        //# That is, the Local Peer's RDMAP layer MUST request that the DDP mark the
        //# Message as Untagged.
        //= rfc5040 section 5.2.1
        //# An RDMA Read Request Message MUST reference the RDMA Read Request Queue.
        //= rfc5040 section 5.2.1
        //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
        //# set the Queue Number field to one.
        //= rfc5040 section 5.2.1
        //# The Local Peer MUST pass to the DDP layer RDMA Read Request Messages in
        //# the order they were submitted by the ULP.
        let msn = self.emit_read(&request, plan, w);
        // There is room: `may_send_read` compared the number of outstanding requests with the ORD.
        let awaited = Awaited {
            invalidates,
            internal,
            ..Awaited::read(seq, sink_stag, len, msn)
        };
        let _ = self.sq.awaited.push(awaited);
        self.acknowledge.cover_sent();
        PlannedRequest::Complete
    }

    #[inline(always)]
    pub(super) fn emit_read(
        &mut self,
        request: &ReadRequest,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> u32 {
        let (opcode, len, request) = (Opcode::READ_REQUEST, ReadRequest::LEN, *request);
        self.emit_control(opcode, 1, len, plan, w, move |out| request.emit(out))
    }

    /// Plans an atomic. The caller has checked for room.
    #[cold]
    #[inline(never)]
    pub(super) fn plan_atomic(
        &mut self,
        seq: u32,
        place: usize,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        let Some(slot) = self.sq.at(place) else {
            return Err(WcStatus::LocalQpOperation);
        };
        self.check_sinks(self.sq.sges_at(place, slot), w)?;
        let Some(request) = atomic_request(seq, slot) else {
            return Err(WcStatus::LocalQpOperation);
        };
        //= rfc7306 section 5.2.1
        //# An Atomic Operation Request Message MUST reference an Untagged Buffer.
        //= rfc7306 section 5.2.1
        //# An Atomic Operation Request Message MUST reference the RDMA Read Request
        //# Queue.
        //= rfc7306 section 5.2.1
        //# The Requester MUST pass to the DDP layer Atomic Operation Request
        //# Messages in the order they were submitted by the ULP.
        let (opcode, len) = (Opcode::ATOMIC_REQUEST, AtomicRequest::LEN);
        let msn = self.emit_control(opcode, 1, len, plan, w, |out| request.emit(out));
        let _ = self.sq.awaited.push(Awaited {
            seq,
            msn,
            atomic: true,
            ..Awaited::default()
        });
        self.acknowledge.cover_sent();
        Ok(())
    }

    #[cold]
    #[inline(never)]
    pub(super) fn emit_empty_read(
        &mut self,
        sink_stag: Stag,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) {
        let request = ReadRequest {
            sink_stag,
            sink_to: 0,
            size: 0,
            source_stag: EMPTY_MESSAGE_STAG,
            source_to: 0,
        };
        self.emit_read(&request, plan, w);
    }
}

fn atomic_request(seq: u32, slot: &Slot) -> Option<AtomicRequest> {
    let request = match slot.op {
        SendOp::FetchAdd {
            remote_addr,
            rkey,
            add,
            mask,
        } => AtomicRequest {
            op: AtomicOp::FETCH_ADD,
            request_id: seq,
            stag: Stag(rkey),
            to: remote_addr,
            add_swap: add,
            add_swap_mask: mask,
            compare: 0,
            compare_mask: 0,
        },
        SendOp::CmpSwap {
            remote_addr,
            rkey,
            compare,
            swap,
            compare_mask,
            swap_mask,
        } => AtomicRequest {
            op: AtomicOp::CMP_SWAP,
            request_id: seq,
            stag: Stag(rkey),
            to: remote_addr,
            add_swap: swap,
            add_swap_mask: swap_mask,
            compare,
            compare_mask,
        },
        _ => return None,
    };
    Some(request)
}
