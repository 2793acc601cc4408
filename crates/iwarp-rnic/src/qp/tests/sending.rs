//! The send queue: order, fences, limits, flush, drain.

use super::harness::*;
use crate::qp::*;
use crate::{Access, PostError, SendFlags, SendOp, SendWr, WcStatus};
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::rdmap::{Immediate, Opcode, ReadRequest, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

const READ: SendOp = SendOp::Read {
    remote_addr: 0,
    rkey: 7,
};

fn opcodes(sent: &[(Header, Vec<u8>)]) -> Vec<Opcode> {
    sent.iter().map(|(h, _)| h.opcode()).collect()
}

/// Answers a Read Request with `len` octets.
fn answer(rig: &mut Rig, request: &[u8], len: usize) {
    let sink = ReadRequest::parse(request).unwrap().sink_stag.0;
    let ulpdu = tagged(Opcode::READ_RESPONSE, sink, 0, true, &vec![3; len]);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
}

#[test]
fn completions_keep_the_order_of_posting() {
    //= rfc5040 section 5.5
    //= type=test
    //# RDMA Operations MUST be Completed at the Local Peer in the order that
    //# they were submitted by the ULP.
    //= rfc5040 section 5.5
    //= type=test
    //# This simplifies Local Peer Completion processing for RDMA Reads in that
    //# a Delivered RDMA Read Response MUST be sufficient to Complete the RDMA
    //# Read operation.
    //= rfc5040 section 5.5
    //= type=test
    //# An RDMA Read operation MUST NOT be Completed at the Local Peer until the
    //# DDP layer Delivers the associated incoming RDMA Read Response Message.
    //= rfc5040 section 5.5
    //= type=test
    //# RDMA Read Response Messages MUST be Delivered to the ULP at the Remote
    //# Peer after they are Delivered to RDMAP by DDP and in the order that the
    //# they were Delivered to RDMAP.
    //= rfc5040 section 5.3
    //= type=test
    //# The Local Peer MUST issue Send Message Type Messages in the order they
    //# were submitted by the ULP.
    //= rfc5040 section 5.3
    //= type=test
    //# For a Send Message Type, the Local Peer's RDMAP layer MUST request that
    //# the DDP layer set the Queue Number field to zero.
    //= rfc5040 section 5.3
    //= type=test
    //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
    //# mark the Message as Untagged.
    //= rfc5040 section 5.3
    //= type=test
    //# A Send Message Type MUST reference an Untagged Buffer.
    //= rfc5040 section 5.2.2
    //= type=test
    //# The RDMAP layer MUST Deliver the RDMA Read Response Message to the ULP.
    //= rfc5040 section 5.1
    //= type=test
    //# The Data Source RDMAP layer MUST issue RDMA Write Messages to the DDP
    //# layer in the order they were submitted by the ULP.
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.post(1, READ, &[mr.part(0, 4)]);
    rig.post(2, SendOp::Send, &[mr.part(0, 4)]);
    rig.post_flags(3, SendOp::Send, SendFlags::empty(), &[]);
    rig.post(4, SendOp::Send, &[]);
    let sent = rig.sent();
    assert_eq!(sent.len(), 4);
    // The Sends are written, but the earlier Read is not answered.
    assert!(rig.host.sends.is_empty());
    answer(&mut rig, &sent[0].1, 4);
    use WcStatus::Success;
    assert_eq!(
        brief(&rig.host.sends),
        [(1, Success), (2, Success), (4, Success)]
    );
    assert_eq!(rig.host.sends[0].byte_len, 4);
    assert_eq!(&rig.read(&mr)[..5], [3, 3, 3, 3, 4]);
}

#[test]
fn outstanding_reads_are_limited_by_ord() {
    //= rfc5041 section 5.3
    //= type=test
    //# MUST transmit DDP Messages in the order they were submitted to the DDP
    //# layer,
    //= rfc5040 section 6.1
    //= type=test
    //# For outbound RDMA Read Requests, the RDMAP layer MUST NOT exceed the
    //# maximum number of outstanding, outbound RDMA Read Requests that were
    //# negotiated between the ULP and the Local Peer's RDMAP layer.
    //= rfc5040 section 5.5
    //= type=test
    //# The RDMAP layer MUST submit RDMA Messages to the DDP layer in the order
    //# the RDMA Operations are submitted to the RDMAP layer by the ULP.
    //= rfc5040 section 5.2.1
    //= type=test
    //# The Local Peer MUST pass to the DDP layer RDMA Read Request Messages in
    //# the order they were submitted by the ULP.
    //= rfc5040 section 5.2.1
    //= type=test
    //# That is, the Local Peer's RDMAP layer MUST request that the DDP layer
    //# set the Queue Number field to one.
    //= rfc5040 section 5.2.1
    //= type=test
    //# An RDMA Read Request Message MUST reference the RDMA Read Request Queue.
    //= rfc5040 section 5.2.1
    //= type=test
    //# That is, the Local Peer's RDMAP layer MUST request that the DDP mark the
    //# Message as Untagged.
    //= rfc5040 section 5.2.1
    //= type=test
    //# An RDMA Read Request Message MUST reference an Untagged Buffer.
    //= rfc5040 section 5.2
    //= type=test
    //# The RDMA Read operation MUST consist of a single RDMA Read Request
    //# Message and a single RDMA Read Response Message.
    // The ORD of the stream is a limit, and so is that of the queue pair.
    for (max_ord, ord) in [(16, 2), (2, 16)] {
        let config = QpConfig {
            max_ord,
            ..QpConfig::default()
        };
        let mut rig = Rig::with(config, StreamConfig { ord, ..STREAM });
        let mr = rig.mr(64, Access::LOCAL_WRITE);
        for id in 0..4 {
            rig.post(id, READ, &[mr.part(0, 4)]);
        }
        rig.post(9, SendOp::Send, &[]);
        let sent = rig.sent();
        assert_eq!(opcodes(&sent), [Opcode::READ_REQUEST; 2]);
        assert!(!rig.qp.wants_tx());
        answer(&mut rig, &sent[0].1, 4);
        assert!(rig.qp.wants_tx());
        assert_eq!(opcodes(&rig.sent()), [Opcode::READ_REQUEST]);
        answer(&mut rig, &sent[1].1, 4);
        assert_eq!(opcodes(&rig.sent()), [Opcode::READ_REQUEST, Opcode::SEND]);
    }
}

#[test]
fn reads_need_ord() {
    //= rfc5040 section 6.1
    //= type=test
    //# The RDMAP layer MUST provide the maximum number of outstanding, outbound
    //# RDMA Read Requests for the RDMAP Stream direction that were negotiated
    //# between the ULP and the Local Peer's RDMAP layer.
    let config = QpConfig {
        max_ord: 0,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    let refused = rig.try_post(1, READ, SendFlags::empty(), &[]);
    assert_eq!(refused, Err(PostError::InvalidRequest));
    let mut rig = Rig::with(QpConfig::default(), StreamConfig { ord: 0, ..STREAM });
    rig.post(1, READ, &[]);
    assert_eq!(rig.terminate().code, Code::RDMAP_LOCAL_CATASTROPHIC);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalQpOperation)]);
}

#[test]
fn fence_waits_for_reads() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.post(1, READ, &[mr.part(0, 4)]);
    rig.post_flags(2, SendOp::Send, SendFlags::FENCE, &[mr.part(0, 4)]);
    rig.post(3, SendOp::Send, &[]);
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::READ_REQUEST]);
    answer(&mut rig, &sent[0].1, 4);
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::SEND, Opcode::SEND]);
    assert_eq!(sent[0].1, [3, 3, 3, 3]);
}

#[test]
fn failed_request_has_own_status() {
    //= rfc5040 section 7.1
    //= type=test
    //# The Local Peer MUST send a Terminate Message for each of the following
    //# cases:
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.recv(8, &[]);
    rig.post(1, READ, &[mr.part(0, 4)]);
    rig.post_flags(2, SendOp::Send, SendFlags::empty(), &[]);
    let mut bad = mr.sge();
    bad.lkey ^= 1;
    rig.post_flags(3, SendOp::Send, SendFlags::empty(), &[mr.part(0, 4), bad]);
    rig.post(4, SendOp::Send, &[]);
    let sent = rig.sent();
    // Earlier requests are sent; a Terminate replaces the bad one.
    assert_eq!(
        opcodes(&sent),
        [Opcode::READ_REQUEST, Opcode::SEND, Opcode::TERMINATE]
    );
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
    use WcStatus::{Flushed, LocalProtection};
    let expected = [
        (1, Flushed),
        (2, Flushed),
        (3, LocalProtection),
        (4, Flushed),
    ];
    assert_eq!(brief(&rig.host.sends), expected);
    // From now on everything is flushed immediately.
    rig.post(5, SendOp::Send, &[]);
    rig.recv(9, &[]);
    assert_eq!(
        rig.host.sends.last().map(|c| (c.wr_id, c.status)),
        Some((5, Flushed))
    );
    assert_eq!(brief(&rig.host.recvs), [(8, Flushed), (9, Flushed)]);
}

#[test]
fn deregistration_during_message_fails_request() {
    let mut rig = Rig::new();
    let mr = rig.mr(600_000, Access::empty());
    rig.post(1, SendOp::Send, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    while !rig.plan.is_done() {
        rig.write_some(50_000);
    }
    rig.table.deregister(Stag(mr.stag)).unwrap();
    // The rest cannot be sent, but the Terminate can.
    let octets = rig.octets_out();
    assert!(octets.len() < 100);
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
}

/// QEMU sends the memory of a running guest, which changes it during the transfer.
#[test]
fn changing_memory_keeps_valid_crc() {
    const LEN: u32 = 9000;
    let stream = StreamConfig {
        emss: 65483,
        ..STREAM
    };
    let mut rig = Rig::with(QpConfig::default(), stream);
    rig.qp.set_snapshot(true);
    let mr = rig.mr(LEN, Access::LOCAL_WRITE);
    let before = rig.read(&mr);
    let write = SendOp::Write {
        remote_addr: 0,
        rkey: 7,
    };
    rig.post(1, write, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.write(&mr, 5000, 99);
    // Decoding checks the CRC.
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::WRITE]);
    assert_eq!(sent[0].1, before);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
}

#[test]
fn inline_data_are_copied_when_posting() {
    let mut rig = Rig::new();
    let flags = SendFlags::INLINE | SendFlags::SIGNALED | SendFlags::SOLICITED;
    {
        // `data` is freed before anything is sent.
        let data = Vec::from(*b"hello, world");
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::SendImm(0x0102_0304),
            flags,
            sges: &[],
            inline: &[&data[..5], &[], &data[5..]],
        };
        rig.qp.post_send(&wr, &mut rig.host).unwrap();
    }
    let sent = rig.sent();
    assert_eq!(opcodes(&sent), [Opcode::IMMEDIATE, Opcode::SEND_SE]);
    assert_eq!(
        Immediate::parse(&sent[0].1).unwrap(),
        Immediate::before_send(0x0102_0304)
    );
    assert_eq!(sent[1].1, b"hello, world");
    assert_eq!(rig.host.sends[0].byte_len, 12);
    let long = [0; 65];
    let wr = SendWr {
        wr_id: 2,
        op: SendOp::Send,
        flags,
        sges: &[],
        inline: &[&long],
    };
    assert_eq!(
        rig.qp.post_send(&wr, &mut rig.host),
        Err(PostError::InlineTooLong)
    );
    let wr = SendWr {
        op: READ,
        inline: &[],
        ..wr
    };
    assert_eq!(
        rig.qp.post_send(&wr, &mut rig.host),
        Err(PostError::InvalidRequest)
    );
}

//= rfc7306 section 6.3
//= type=test
//# The Local Peer MUST issue Immediate Data and Immediate Data with SE
//# Messages in the order they were submitted by the ULP.
//= rfc7306 section 6.3
//= type=test
//# An Immediate Data or Immediate Data with SE Message MUST reference an
//# Untagged Buffer.
//= rfc5044 section 5.1
//= type=test
//# MPA transmitters SHOULD calculate a MULPDU as described in Section 4.5.
//= rfc5044 section 4.5
//= type=test
//# DDP SHOULD provide ULPDUs that are as large as possible, but less than
//# or equal to MULPDU.
//= rfc5044 section 3
//= type=test
//# DDP SHOULD limit each record size to MULPDU.
//= rfc5041 section 5.3
//= type=test
//# SHOULD transmit DDP Segments within a DDP Message in increasing MO order
//# for Untagged DDP Messages, and in increasing TO order for Tagged DDP
//# Messages.
//= rfc5041 section 5.2
//= type=test
//# For each DDP Segment of a Tagged DDP Message, the TO MUST be set to the
//# octet offset from the first octet in the associated ULP Message to the
//# first octet in the ULP Payload contained in the DDP Segment, plus the TO
//# assigned to the first octet in the associated ULP Message.
//= rfc5041 section 5.2
//= type=test
//# At the Data Source, the DDP layer MUST send all the data contained in
//# the ULP message.
//= rfc5041 section 5.2
//= type=test
//# At the Data Source, the DDP layer MUST segment the data contained in a
//# ULP message into a series of DDP Segments, where each DDP Segment
//# contains a DDP Header and ULP Payload, and MUST be no larger than the
//# MULPDU value Advertised by the LLP.
//= rfc5041 section 4.2
//= type=test
//# At the Data Source, DDP MUST set the STag field to the value specified
//# by the ULP.
//= rfc5041 section 4.1
//= type=test
//# The DDP Segment with the L bit set to 1 MUST be posted to the LLP after
//# all other DDP Segments of the associated DDP Message have been posted to
//# the LLP.
//= rfc5041 section 4.1
//= type=test
//# It MUST NOT be set to one on any other DDP Segment.
//= rfc5041 section 4.1
//= type=test
//# It MUST be set to one on the last DDP Segment of every DDP Message.
//= rfc5040 section 5.1
//= type=test
//# That is, the Data Source RDMAP layer MUST request that the DDP layer
//# mark the Message as Tagged.
//= rfc5040 section 5.1
//= type=test
//# An RDMA Write Message MUST reference a Tagged Buffer.
#[test]
fn immediate_data_follow_write() {
    let mut rig = Rig::new();
    let mr = rig.mr(3000, Access::empty());
    let op = SendOp::WriteImm {
        remote_addr: 0x1_0000,
        rkey: 0x77,
        imm: 9,
    };
    rig.post(1, op, &[mr.part(0, 1000), mr.part(1000, 2000)]);
    let sent = rig.sent();
    use Opcode as O;
    assert_eq!(opcodes(&sent), [O::WRITE, O::WRITE, O::WRITE, O::IMMEDIATE]);
    let data: Vec<u8> = sent[..3].iter().flat_map(|s| s.1.clone()).collect();
    assert_eq!(data, rig.read(&mr));
    let Header::Tagged(second) = sent[1].0 else {
        panic!("a Write is tagged");
    };
    assert_eq!(second.to, 0x1_0000 + sent[0].1.len() as u64);
    assert!(!second.last && sent[2].0.last());
    assert_eq!(Immediate::parse(&sent[3].1), Some(Immediate::plain(9)));
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
}

#[test]
fn invalid_requests_are_refused() {
    //= rfc5041 section 5.2
    //= type=test
    //# The ULP Message Length MUST be less than 2^32.
    let config = QpConfig {
        max_send_wr: 2,
        max_send_sge: 1,
        ..QpConfig::default()
    };
    let mut rig = Rig::fresh(config);
    let empty = SendFlags::empty();
    let in_reset = rig.try_post(1, SendOp::Send, empty, &[]);
    assert_eq!(in_reset, Err(PostError::InvalidState));
    rig.start(STREAM);
    let mr = rig.mr(8, ALL);
    let two_elements = [mr.sge(), mr.sge()];
    let too_many = rig.try_post(1, SendOp::Send, empty, &two_elements);
    assert_eq!(too_many, Err(PostError::TooManySges));
    let mut long = mr.sge();
    long.len = (1 << 31) + 1;
    let too_long = rig.try_post(1, SendOp::Send, empty, &[long]);
    assert_eq!(too_long, Err(PostError::MessageTooLong));
    let add = SendOp::FetchAdd {
        remote_addr: 0,
        rkey: 1,
        add: 1,
        mask: 0,
    };
    let atomic = rig.try_post(1, add, empty, &[mr.part(0, 4)]);
    assert_eq!(atomic, Err(PostError::InvalidRequest));
    rig.post(1, SendOp::Send, &[]);
    rig.post(2, SendOp::Send, &[]);
    let full = rig.try_post(3, SendOp::Send, empty, &[]);
    assert_eq!(full, Err(PostError::QueueFull));
}

#[test]
fn draining_waits_for_responses() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.post(1, READ, &[mr.part(0, 4)]);
    let sent = rig.sent();
    rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
    rig.post(2, SendOp::Send, &[]);
    // The Send is queued but not started, and the Read still awaits its response.
    assert!(!rig.qp.wants_tx());
    assert!(!rig.qp.take_events().contains(Events::SQ_DRAINED));
    answer(&mut rig, &sent[0].1, 4);
    assert_eq!(rig.qp.take_events(), Events::SQ_DRAINED);
    rig.qp.modify(State::Rts, &mut rig.host).unwrap();
    assert_eq!(opcodes(&rig.sent()), [Opcode::SEND]);
    assert_eq!(rig.host.sends.len(), 2);
    // An idle send queue is drained at once.
    rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
    assert_eq!(rig.qp.take_events(), Events::SQ_DRAINED);
}

#[test]
fn streamless_queue_is_drained_immediately() {
    let mut rig = Rig::fresh(QpConfig::default());
    for to in [State::Init, State::Rtr, State::Rts, State::Sqd] {
        assert_eq!(rig.qp.take_events(), Events::empty());
        rig.qp.modify(to, &mut rig.host).unwrap();
    }
    assert_eq!(rig.qp.take_events(), Events::SQ_DRAINED);
}

#[test]
fn responses_alternate_with_requests() {
    //= rfc5040 section 5.5
    //= type=test
    //# If more than one outstanding RDMA Read Request Messages are supported by
    //# both peers, the RDMA Read Response Messages MUST be submitted to the DDP
    //# layer on the Remote Peer in the order the RDMA Read Request Messages
    //# were Delivered by DDP, but the actual read of the buffer contents MAY
    //# take place in any order at the Remote Peer.
    //= rfc5040 section 5.2.2
    //= type=test
    //# The Data Source RDMAP layer MUST pass RDMA Read Response Messages to the
    //# DDP layer, in the order that the RDMA Read Request Messages were
    //# received by the RDMAP layer, at the Data Source.
    //= rfc5040 section 5.2.2
    //= type=test
    //# That is, the Data Source RDMAP layer MUST request that the DDP mark the
    //# Message as Tagged.
    //= rfc5040 section 5.2.2
    //= type=test
    //# An RDMA Read Response Message MUST reference a Tagged Buffer.
    //= rfc5040 section 5.2.1
    //= type=test
    //# The Remote Peer MUST process the RDMA Read Request Messages in the order
    //# they were sent.
    //= rfc5040 section 5.2.1
    //= type=test
    //# If the Data Source receives a valid RDMA Read Request Message, it MUST
    //# respond with a valid RDMA Read Response Message.
    //= rfc5040 section 5.2.1
    //= type=test
    //# A valid RDMA Read Request Message MUST NOT be delivered to the Data
    //# Sink's ULP (i.e., it is processed by the RDMAP layer).
    //= rfc5040 section 5.2.1
    //= type=test
    //# The Remote Peer's RDMAP layer MUST process an RDMA Read Request Message.
    let mut rig = Rig::with(
        QpConfig {
            max_ird: 64,
            max_send_wr: 64,
            ..QpConfig::default()
        },
        StreamConfig { ird: 64, ..STREAM },
    );
    let mr = rig.mr(8, ALL);
    for msn in 1..=40 {
        let body = read_request(msn, 8, mr.stag, mr.at);
        let _ = rig.rx_ulpdu(&untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body));
        rig.post(u64::from(msn), SendOp::Send, &[]);
    }
    let sent = opcodes(&rig.sent());
    assert_eq!(sent.len(), 80);
    // Neither kind of message starves the other.
    let first_send = sent.iter().position(|o| *o == Opcode::SEND).unwrap();
    assert!(first_send <= 16);
    assert_eq!(
        sent.iter().filter(|o| **o == Opcode::READ_RESPONSE).count(),
        40
    );
}

#[test]
fn request_list_is_checked_completely() {
    let mut rig = Rig::fresh(QpConfig {
        max_send_wr: 3,
        ..QpConfig::default()
    });
    let mr = rig.mr(64, ALL);
    let sges = [mr.part(0, 8); 5];
    let wr = |sges| SendWr {
        wr_id: 1,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        sges,
        inline: &[],
    };
    let good = wr(&sges[..1]);
    assert_eq!(
        rig.qp.check_sends([good].iter()),
        Err((0, PostError::InvalidState))
    );
    rig.start(STREAM);
    assert_eq!(rig.qp.check_sends([good; 3].iter()), Ok(()));
    assert_eq!(
        rig.qp.check_sends([good; 4].iter()),
        Err((3, PostError::QueueFull))
    );
    assert_eq!(
        rig.qp.check_sends([good, wr(&sges)].iter()),
        Err((1, PostError::TooManySges))
    );
    rig.post(1, SendOp::Send, &sges[..1]);
    assert_eq!(
        rig.qp.check_sends([good; 3].iter()),
        Err((2, PostError::QueueFull))
    );
    // `check_sends` has posted nothing.
    assert_eq!(rig.qp.sends_outstanding(), 1);
}

#[test]
fn sent_requests_are_outstanding() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    // One more than the ORD.
    for wr_id in 0..u64::from(STREAM.ord) + 1 {
        rig.post(wr_id, read, &[mr.part(0, 8)]);
    }
    let all = u32::from(STREAM.ord) + 1;
    assert_eq!(
        (rig.qp.sends_waiting(), rig.qp.sends_outstanding()),
        (all, all)
    );
    let _ = rig.octets_out();
    assert_eq!(
        (rig.qp.sends_waiting(), rig.qp.sends_outstanding()),
        (1, all)
    );
}
