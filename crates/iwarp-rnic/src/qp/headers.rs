//! Headers of sent messages, one function for each kind (RFC 5040 section 4, RFC 5041 section 4).

use super::send_queue::Slot;
use crate::{SendFlags, SendOp};
use iwarp_proto::ddp::{
    Header, Stag, TAGGED_HEADER_LEN, TaggedHeader, UNTAGGED_HEADER_LEN, UntaggedHeader,
};
use iwarp_proto::rdmap::{Opcode, ReadRequest};

/// Some receivers refuse STag 0 even for zero-length messages, so these carry STag 1.
pub(super) const EMPTY_MESSAGE_STAG: Stag = Stag(1);

/// Returns the peer's STag for a message of `len` octets.
#[inline]
pub(super) const fn peer_stag(rkey: u32, len: u32) -> Stag {
    match (len, rkey) {
        (0, 0) => EMPTY_MESSAGE_STAG,
        _ => Stag(rkey),
    }
}

#[inline]
const fn is_tagged(slot: &Slot) -> bool {
    matches!(slot.op, SendOp::Write { .. } | SendOp::WriteImm { .. })
}

#[inline]
pub(super) const fn payload_header_len(slot: &Slot) -> usize {
    match is_tagged(slot) {
        true => TAGGED_HEADER_LEN,
        false => UNTAGGED_HEADER_LEN,
    }
}

/// Returns the header of the segment of a Send or RDMA Write that starts at `off`. Only Sends use
/// `msn`.
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
#[inline(always)]
pub(super) const fn payload_header(slot: &Slot, msn: u32, off: u32, last: bool) -> Header {
    match slot.op {
        //= rfc5040 section 5.1
        //# An RDMA Write Message MUST reference a Tagged Buffer.
        //= rfc5040 section 5.1
        //# That is, the Data Source RDMAP layer MUST request that the DDP layer
        //# mark the Message as Tagged.
        //= rfc5041 section 4.2
        //# At the Data Source, DDP MUST set the STag field to the value specified
        //# by the ULP.
        SendOp::Write { remote_addr, rkey }
        | SendOp::WriteImm {
            remote_addr, rkey, ..
        } => Header::Tagged(TaggedHeader {
            last,
            opcode: Opcode::WRITE,
            stag: peer_stag(rkey, slot.len),
            //= rfc5041 section 5.2
            //# For each DDP Segment of a Tagged DDP Message, the TO MUST be set to the
            //# octet offset from the first octet in the associated ULP Message to the
            //# first octet in the ULP Payload contained in the DDP Segment, plus the TO
            //# assigned to the first octet in the associated ULP Message.
            to: remote_addr.wrapping_add(off as u64),
        }),
        _ => {
            let (opcode, invalidate_stag) = send_opcode(slot);
            //= rfc5040 section 5.3
            //# A Send Message Type MUST reference an Untagged Buffer.
            //= rfc5040 section 5.3
            //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
            //# mark the Message as Untagged.
            Header::Untagged(UntaggedHeader {
                last,
                opcode,
                invalidate_stag,
                //= rfc5040 section 5.3
                //# For a Send Message Type, the Local Peer's RDMAP layer MUST request that
                //# the DDP layer set the Queue Number field to zero.
                qn: 0,
                msn,
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
    }
}

/// Returns the opcode of a Send, and the STag that it invalidates.
#[inline(always)]
const fn send_opcode(slot: &Slot) -> (Opcode, Stag) {
    let solicited = slot.flags.contains(SendFlags::SOLICITED);
    match (slot.op, solicited) {
        //= rfc5040 section 5.3
        //# A Send with Invalidate or Send with Solicited Event and Invalidate
        //# Message MUST reference an STag.
        //= rfc5040 section 5.3
        //# That is, the Local Peer's RDMAP layer MUST pass the RDMA control field
        //# and the STag that will be Invalidated to the DDP layer.
        (SendOp::SendInv(stag), false) => (Opcode::SEND_INV, Stag(stag)),
        (SendOp::SendInv(stag), true) => (Opcode::SEND_SE_INV, Stag(stag)),
        (_, false) => (Opcode::SEND, NO_STAG),
        (_, true) => (Opcode::SEND_SE, NO_STAG),
    }
}

//= rfc5040 section 4.1
//# For Send, Send with Solicited Event, RDMA Read Request, and Terminate, the
//# Invalidate STag field MUST be set to zero on transmit and ignored by the
//# receiver.
/// The STag of messages that invalidate nothing.
const NO_STAG: Stag = Stag(0);

/// Returns the header of a message that is one untagged segment: a Read Request, an atomic request
/// or response, immediate data, an RTR message by Send, or a Terminate.
#[inline(always)]
pub(super) const fn control_header(opcode: Opcode, qn: u32, msn: u32) -> Header {
    Header::Untagged(UntaggedHeader {
        last: true,
        opcode,
        invalidate_stag: NO_STAG,
        qn,
        msn,
        mo: 0,
    })
}

/// Returns the header of the segment of a Read Response that starts at `off`.
#[inline(always)]
pub(super) const fn response_header(request: &ReadRequest, off: u32, last: bool) -> Header {
    //= rfc5040 section 5.2.2
    //# * A single RDMA Read Response Message MUST write to one remote Tagged
    //# Buffer.
    Header::Tagged(TaggedHeader {
        last,
        //= rfc5040 section 5.2.2
        //# An RDMA Read Response Message MUST reference a Tagged Buffer.
        //= rfc5040 section 5.2.2
        //# That is, the Data Source RDMAP layer MUST request that the DDP mark the
        //# Message as Tagged.
        opcode: Opcode::READ_RESPONSE,
        //= rfc5040 section 4.4
        //# This field MUST be copied, without interpretation, from the RDMA Read
        //# Request into the corresponding RDMA Read Response; this field allows the
        //# Data Sink to place the returning data.
        stag: request.sink_stag,
        to: request.sink_to.wrapping_add(off as u64),
    })
}

/// Returns the header of a zero-length RDMA Write with this tagged offset. No receiver checks the
/// tagged offset of an empty Write.
pub(super) const fn empty_write_header(to: u64) -> Header {
    Header::Tagged(TaggedHeader {
        last: true,
        opcode: Opcode::WRITE,
        stag: EMPTY_MESSAGE_STAG,
        to,
    })
}
