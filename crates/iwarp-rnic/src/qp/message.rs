//! The messages of the transmit side, segment by segment: Sends and Writes, Read Requests and atomics, immediate
//! data, the answers to the peer, RTR messages and Terminate (RFC 5040 section 5, RFC 7306 sections 5 and 6,
//! RFC 6581 section 9.2).

use super::fault::TerminateOctets;
use super::plan::{Milestone, TxPlan};
use super::response::Response;
use super::segment::{LOCAL_READ, Payload, Wire};
use super::send_queue::{Awaited, Slot};
use super::tx::{Job, Stage};
use super::{Host, QueuePair, Rtr};
use crate::memory::Memory;
use crate::{Access, SendFlags, SendOp, WcStatus};
use iwarp_proto::ddp::{
    Header, Stag, TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader,
};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest};

/// Some receivers refuse STag 0 whatever the length, so zero-length messages carry STag 1.
const STAG_OF_NOTHING: Stag = Stag(1);

impl QueuePair {
    /// Emits the next FPDU of the message that is being sent.
    #[inline]
    pub(super) fn step<H: Host>(
        &mut self,
        job: Job,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        host: &mut H,
    ) {
        match job {
            Job::Response { off } => self.step_response(off, plan, w, host),
            Job::Request { seq, off, stage } => {
                if let Err(status) = self.step_request(seq, off, stage, plan, w) {
                    self.fail_request(seq, status, host);
                }
            }
        }
    }

    #[inline]
    fn step_request(
        &mut self,
        seq: u32,
        off: u32,
        stage: Stage,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        let Some(slot) = self.sq.slot(seq) else {
            self.tx.job = None;
            return Ok(());
        };
        if stage != Stage::Body {
            let imm = match slot.op {
                SendOp::SendImm(imm) | SendOp::WriteImm { imm, .. } => imm,
                _ => 0,
            };
            let solicited = slot.flags.contains(SendFlags::SOLICITED);
            self.step_immediate(seq, stage, imm, solicited, plan, w);
            return Ok(());
        }
        match slot.op {
            SendOp::Read { remote_addr, rkey } => {
                self.emit_read(seq, slot.len, remote_addr, rkey, plan, w)
            }
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => {
                let op = slot.op;
                self.emit_atomic(seq, &op, plan, w)
            }
            _ => self.emit_payload(seq, off, plan, w),
        }
    }

    fn step_immediate(
        &mut self,
        seq: u32,
        stage: Stage,
        imm: u32,
        solicited: bool,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) {
        if stage == Stage::ImmediateFirst {
            self.emit_immediate(Immediate::before_send(imm), false, plan, w);
            self.tx.job = Some(Job::Request {
                seq,
                off: 0,
                stage: Stage::Body,
            });
        } else {
            self.emit_immediate(Immediate::plain(imm), solicited, plan, w);
            self.sent(seq, plan);
        }
    }

    /// The whole request is in the plan.
    #[inline]
    fn sent(&mut self, seq: u32, plan: &mut TxPlan) {
        plan.add_milestone(Milestone::Request(seq));
        self.acknowledge.sent();
        self.tx.job = None;
    }

    /// Emits the next segment of a Send or RDMA Write.
    #[inline]
    fn emit_payload(
        &mut self,
        seq: u32,
        off: u32,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        let Some(slot) = self.sq.slot(seq) else {
            return Err(WcStatus::LocalQpOperation);
        };
        //= rfc5041 section 5.2
        //# At the Data Source, the DDP layer MUST send all the data contained in
        //# the ULP message.
        let left = slot.len.wrapping_sub(off);
        let tagged = match slot.op {
            SendOp::Write { remote_addr, rkey }
            | SendOp::WriteImm {
                remote_addr, rkey, ..
            } => Some((remote_addr, rkey)),
            _ => None,
        };
        let header_len = if tagged.is_some() {
            TAGGED_HEADER_LEN
        } else {
            UNTAGGED_HEADER_LEN
        };
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
        let room = u32::from(self.tx.mulpdu).saturating_sub(header_len as u32);
        //= rfc5041 section 5.2
        //# A zero-length DDP Message is allowed and MUST consume exactly one DDP
        //# Segment.
        let len = left.min(room);
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
        let last = len == left;
        let inline = slot.flags.contains(SendFlags::INLINE);
        if off == 0 {
            if !last && !inline {
                self.check_local(seq, LOCAL_READ, w)?;
            }
            if tagged.is_none() {
                self.tx.next_msn(0);
            }
        }
        //= rfc5041 section 4.2
        //# At the Data Source, DDP MUST set RsvdULP Field to the value specified by the
        //# ULP.
        //= rfc5041 section 4.2
        //# Each DDP Segment within a specific DDP Message MUST contain the same value
        //# for this field.
        //= rfc5041 section 4.2
        //# The Data Source MUST ensure that each DDP Segment within a specific DDP
        //# Message contains the same value for this field.
        //= rfc5041 section 4.2
        //# Each DDP Segment within a specific DDP Message MUST contain the same value
        //# for this field and MUST be the value supplied by the ULP.
        //= rfc5041 section 4.3
        //# At the Data Source, DDP MUST set RsvdULP Field to the value specified by the
        //# ULP.
        //= rfc5041 section 4.3
        //# Each DDP Segment within a specific DDP Message MUST contain the same value
        //# for the RsvdULP field.
        //= rfc5041 section 4.3
        //# Each DDP segment within a specific DDP message MUST contain the same value
        //# for this field and MUST be the value supplied by the ULP at the Data Source.
        //= rfc5041 section 4.3
        //# The Data Source MUST ensure that each DDP Segment within a specific DDP
        //# Message contains the same value for this field.
        //= rfc5041 section 4.3
        //# Each DDP segment within a specific DDP message MUST contain the same value
        //# for this field.
        let header = match tagged {
            //= rfc5040 section 5.1
            //# An RDMA Write Message MUST reference a Tagged Buffer.
            //= rfc5040 section 5.1
            //# That is, the Data Source RDMAP layer MUST request that the DDP layer
            //# mark the Message as Tagged.
            //= rfc5041 section 4.2
            //# At the Data Source, DDP MUST set the STag field to the value specified
            //# by the ULP.
            Some((to, rkey)) => Header::Tagged(TaggedHeader {
                last,
                opcode: Opcode::WRITE,
                stag: if slot.len == 0 && rkey == 0 {
                    STAG_OF_NOTHING
                } else {
                    Stag(rkey)
                },
                //= rfc5041 section 5.2
                //# For each DDP Segment of a Tagged DDP Message, the TO MUST be set to the
                //# octet offset from the first octet in the associated ULP Message to the
                //# first octet in the ULP Payload contained in the DDP Segment, plus the TO
                //# assigned to the first octet in the associated ULP Message.
                to: to.wrapping_add(u64::from(off)),
            }),
            None => {
                //= rfc5040 section 5.3
                //# A Send Message Type MUST reference an Untagged Buffer.
                //= rfc5040 section 5.3
                //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
                //# mark the Message as Untagged.
                //= rfc5040 section 5.3
                //# For a Send Message Type, the Local Peer's RDMAP layer MUST request that
                //# the DDP layer set the Queue Number field to zero.
                //= rfc5040 section 5.3
                //# The Local Peer MUST issue Send Message Type Messages in the order they
                //# were submitted by the ULP.
                let (opcode, invalidate) = send_opcode(slot);
                Header::Untagged(UntaggedHeader {
                    last,
                    opcode,
                    invalidate_stag: Stag(invalidate),
                    qn: 0,
                    msn: self.tx.msn.first().copied().unwrap_or(1).wrapping_sub(1),
                    //= rfc5041 section 4.3
                    //# The MO referencing the first octet of the DDP Message MUST be set to
                    //# zero by the DDP layer.
                    //= rfc5041 section 5.2
                    //# For each DDP Segment of a Untagged DDP Message, the MO MUST be set to
                    //# the octet offset from the first octet in the associated ULP Message
                    //# (which is defined to be zero) to the first octet in the ULP Payload
                    //# contained in the DDP Segment.
                    mo: off,
                })
            }
        };
        let payload = if inline {
            let data = self.sq.inline(seq);
            Payload::Bytes(data.get(off as usize..(off + len) as usize).unwrap_or(&[]))
        } else {
            Payload::Local {
                sges: self.sq.sges(seq),
                off,
                len,
            }
        };
        let immediate_follows = matches!(slot.op, SendOp::WriteImm { .. });
        self.tx
            .emit(plan, &header, payload, w)
            .map_err(|_| WcStatus::LocalProtection)?;
        self.count_fpdu(len);
        if !last {
            self.tx.job = Some(Job::Request {
                seq,
                //= rfc5041 section 5.3
                //# SHOULD transmit DDP Segments within a DDP Message in increasing MO order
                //# for Untagged DDP Messages, and in increasing TO order for Tagged DDP
                //# Messages.
                off: off.wrapping_add(len),
                stage: Stage::Body,
            });
        } else if immediate_follows {
            self.tx.job = Some(Job::Request {
                seq,
                off: 0,
                stage: Stage::ImmediateLast,
            });
        } else {
            self.sent(seq, plan);
        }
        Ok(())
    }

    #[inline]
    const fn count_fpdu(&mut self, payload: u32) {
        self.counters.tx_fpdus = self.counters.tx_fpdus.wrapping_add(1);
        self.counters.tx_payload = self.counters.tx_payload.wrapping_add(payload as u64);
    }

    /// Returns `true` if all local elements of a request may be used like this.
    fn check_local(
        &self,
        seq: u32,
        need: Access,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        for sge in self.sq.sges(seq) {
            w.memory
                .covers(sge.lkey, sge.addr, u64::from(sge.len), need, w.who)
                .map_err(|_| WcStatus::LocalProtection)?;
        }
        Ok(())
    }

    pub(super) fn emit_control(
        &mut self,
        opcode: Opcode,
        qn: u32,
        body: &[u8],
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> u32 {
        let msn = self.tx.next_msn(qn);
        let header = Header::Untagged(UntaggedHeader {
            last: true,
            opcode,
            //= rfc5040 section 4.1
            //# For Send, Send with Solicited Event, RDMA Read Request, and Terminate, the
            //# Invalidate STag field MUST be set to zero on transmit and ignored by the
            //# receiver.
            invalidate_stag: Stag(0),
            qn,
            msn,
            mo: 0,
        });
        // Inline octets are ours: no access to memory can fail.
        let _ = self.tx.emit(plan, &header, Payload::Bytes(body), w);
        self.count_fpdu(0);
        msn
    }

    fn emit_immediate(
        &mut self,
        imm: Immediate,
        solicited: bool,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) {
        let opcode = if solicited {
            Opcode::IMMEDIATE_SE
        } else {
            Opcode::IMMEDIATE
        };
        //= rfc7306 section 6.3
        //# An Immediate Data or Immediate Data with SE Message MUST reference an
        //# Untagged Buffer.
        //= rfc7306 section 6.3
        //# The Local Peer MUST issue Immediate Data and Immediate Data with SE
        //# Messages in the order they were submitted by the ULP.
        self.emit_control(opcode, 0, &imm.octets(), plan, w);
    }

    /// Makes a sink STag for one Read. It is never 0 or 1.
    pub(super) const fn next_sink(&mut self) -> u32 {
        let sink = self.tx.next_sink;
        self.tx.next_sink = if sink == u32::MAX {
            2
        } else {
            sink.wrapping_add(1)
        };
        sink
    }

    fn emit_read(
        &mut self,
        seq: u32,
        len: u32,
        to: u64,
        rkey: u32,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        if self.sq.ord() == 0 {
            return Err(WcStatus::LocalQpOperation);
        }
        self.check_local(seq, Access::LOCAL_WRITE, w)?;
        let sink_stag = self.next_sink();
        let request = ReadRequest {
            sink_stag: Stag(sink_stag),
            sink_to: 0,
            size: len,
            source_stag: if len == 0 && rkey == 0 {
                STAG_OF_NOTHING
            } else {
                Stag(rkey)
            },
            source_to: to,
        };
        let mut body = [0u8; ReadRequest::LEN];
        request.emit(&mut body);
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
        let msn = self.emit_control(Opcode::READ_REQUEST, 1, &body, plan, w);
        // There is room: `startable` compared the number with the ORD.
        let awaited = Awaited::read(seq, sink_stag, len, msn);
        let _ = self.sq.awaited.push(awaited);
        self.acknowledge.asked();
        self.tx.job = None;
        Ok(())
    }

    fn emit_atomic(
        &mut self,
        seq: u32,
        op: &SendOp,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> Result<(), WcStatus> {
        if self.sq.ord() == 0 {
            return Err(WcStatus::LocalQpOperation);
        }
        self.check_local(seq, Access::LOCAL_WRITE, w)?;
        let request = match *op {
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
            _ => return Err(WcStatus::LocalQpOperation),
        };
        let mut body = [0u8; AtomicRequest::LEN];
        request.emit(&mut body);
        //= rfc7306 section 5.2.1
        //# An Atomic Operation Request Message MUST reference an Untagged Buffer.
        //= rfc7306 section 5.2.1
        //# An Atomic Operation Request Message MUST reference the RDMA Read Request
        //# Queue.
        //= rfc7306 section 5.2.1
        //# The Requester MUST pass to the DDP layer Atomic Operation Request
        //# Messages in the order they were submitted by the ULP.
        let msn = self.emit_control(Opcode::ATOMIC_REQUEST, 1, &body, plan, w);
        let _ = self.sq.awaited.push(Awaited {
            seq,
            sink_stag: 0,
            len: 8,
            received: 0,
            msn,
            atomic: true,
            probe: false,
        });
        self.acknowledge.asked();
        self.tx.job = None;
        Ok(())
    }

    /// Emits a zero-length Read Request, and returns its message sequence number.
    pub(super) fn emit_empty_read(
        &mut self,
        sink_stag: Stag,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) -> u32 {
        let request = ReadRequest {
            sink_stag,
            sink_to: 0,
            size: 0,
            source_stag: STAG_OF_NOTHING,
            source_to: 0,
        };
        let mut body = [0u8; ReadRequest::LEN];
        request.emit(&mut body);
        self.emit_control(Opcode::READ_REQUEST, 1, &body, plan, w)
    }

    pub(super) fn emit_rtr(&mut self, rtr: Rtr, plan: &mut TxPlan, w: &Wire<'_, impl Memory>) {
        match rtr {
            Rtr::Send => {
                self.emit_control(Opcode::SEND, 0, &[], plan, w);
            }
            Rtr::Write => {
                let header = TaggedHeader {
                    last: true,
                    opcode: Opcode::WRITE,
                    stag: STAG_OF_NOTHING,
                    to: 0,
                };
                let _ = self
                    .tx
                    .emit(plan, &Header::Tagged(header), Payload::Bytes(&[]), w);
                self.count_fpdu(0);
            }
            Rtr::Read => {
                self.emit_empty_read(STAG_OF_NOTHING, plan, w);
                self.rx.expect_rtr_response();
            }
        }
    }

    fn step_response<H: Host>(
        &mut self,
        off: u32,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
        host: &mut H,
    ) {
        let Some(response) = self.responses.front().copied() else {
            self.tx.job = None;
            return;
        };
        let done = match response {
            Response::Atomic {
                request_id,
                original,
            } => {
                let mut body = [0u8; AtomicResponse::LEN];
                AtomicResponse {
                    request_id,
                    original,
                }
                .emit(&mut body);
                //= rfc7306 section 5
                //# Atomic Operation Response Messages MUST use the Untagged Buffer model
                //# with QN=3.
                //= rfc7306 section 5.2.2
                //# An Atomic Operation Response Message MUST consume an Untagged Buffer.
                //= rfc7306 section 5.2.2
                //# An Atomic Operation Response Message MUST reference the Queue Number 3.
                //= rfc7306 section 5.2.2
                //# When the Responder receives Atomic Operation Request messages, the
                //# Responder RDMAP layer MUST pass Atomic Operation Response Messages to
                //# the DDP layer, in the order that the Atomic Operation Request Messages
                //# were received by the RDMAP layer, at the Responder.
                self.emit_control(Opcode::ATOMIC_RESPONSE, 3, &body, plan, w);
                true
            }
            Response::Read {
                sink_stag,
                sink_to,
                source_stag,
                source_to,
                len: total,
            } => {
                //= rfc5040 section 5.2.1
                //# MUST respond with a zero-length RDMA Read Response Message.
                let left = total.wrapping_sub(off);
                let len =
                    left.min(u32::from(self.tx.mulpdu).saturating_sub(TAGGED_HEADER_LEN as u32));
                //= rfc5040 section 5.2.2
                //# * A single RDMA Read Response Message MUST write to one remote Tagged
                //# Buffer.
                let header = Header::Tagged(TaggedHeader {
                    last: len == left,
                    //= rfc5040 section 5.2.2
                    //# An RDMA Read Response Message MUST reference a Tagged Buffer.
                    //= rfc5040 section 5.2.2
                    //# That is, the Data Source RDMAP layer MUST request that the DDP mark the
                    //# Message as Tagged.
                    opcode: Opcode::READ_RESPONSE,
                    stag: Stag(sink_stag),
                    to: sink_to.wrapping_add(u64::from(off)),
                });
                let to = source_to.wrapping_add(u64::from(off));
                if let Err(e) = self.tx.emit(
                    plan,
                    &header,
                    Payload::Remote {
                        stag: source_stag,
                        to,
                        len,
                    },
                    w,
                ) {
                    // The region was deregistered between the request and its answer.
                    let request = ReadRequest {
                        sink_stag: Stag(sink_stag),
                        sink_to: sink_to.wrapping_add(u64::from(off)),
                        size: left,
                        source_stag: Stag(source_stag),
                        source_to: to,
                    };
                    self.fail_response(e, &request, host);
                    return;
                }
                self.count_fpdu(len);
                self.tx.job = Some(Job::Response {
                    off: off.wrapping_add(len),
                });
                len == left
            }
        };
        if done {
            plan.add_milestone(Milestone::Response);
            self.responses.pop();
            self.tx.job = None;
        }
    }

    pub(super) fn emit_terminate(
        &mut self,
        terminate: &TerminateOctets,
        plan: &mut TxPlan,
        w: &Wire<'_, impl Memory>,
    ) {
        //= rfc5040 section 5.4
        //# A Terminate Message MUST reference an Untagged Buffer.
        //= rfc5040 section 5.4
        //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
        //# mark the Message as Untagged.
        //= rfc5040 section 5.4
        //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
        //# set the Queue Number field to two.
        self.emit_control(Opcode::TERMINATE, 2, terminate.octets(), plan, w);
        plan.add_milestone(Milestone::Terminate);
    }
}

/// Returns the opcode of a Send, and the STag it invalidates.
const fn send_opcode(slot: &Slot) -> (Opcode, u32) {
    let solicited = slot.flags.contains(SendFlags::SOLICITED);
    match (slot.op, solicited) {
        //= rfc5040 section 5.3
        //# A Send with Invalidate or Send with Solicited Event and Invalidate
        //# Message MUST reference an STag.
        //= rfc5040 section 5.3
        //# That is, the Local Peer's RDMAP layer MUST pass the RDMA control field
        //# and the STag that will be Invalidated to the DDP layer.
        (SendOp::SendInv(stag), false) => (Opcode::SEND_INV, stag),
        (SendOp::SendInv(stag), true) => (Opcode::SEND_SE_INV, stag),
        (_, false) => (Opcode::SEND, 0),
        (_, true) => (Opcode::SEND_SE, 0),
    }
}
