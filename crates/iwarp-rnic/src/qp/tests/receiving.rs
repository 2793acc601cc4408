//! Receives: delivery, holding, immediate data, shared receive queues.

use super::harness::*;
use crate::qp::*;
use crate::receive_queue::SharedReceiveQueue;
use crate::{Access, PostError, RecvWr, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Immediate, Opcode, TerminateCode as Code};

fn immediate(msn: u32, imm: Immediate, opcode: Opcode) -> std::vec::Vec<u8> {
    untagged(opcode, 0, msn, 0, true, &imm.octets())
}

#[test]
fn message_fills_elements_in_order() {
    //= rfc5041 section 4.3
    //= type=test
    //# At the Data Sink, DDP MUST provide RsvdULP field to the ULP when the ULP
    //# Message is Delivered.
    //= rfc5041 section 5.4
    //= type=test
    //# At the Data Sink, DDP MUST provide the RsvdULP Field of the DDP Message to
    //# the ULP when the DDP Message is delivered.
    //= rfc5041 section 5.4
    //= type=test
    //# At the Data Sink, DDP MUST provide the ULP Message Length to the ULP
    //# when an Untagged DDP Message is Delivered.
    //= rfc5041 section 5.4
    //= type=test
    //# At the Data Sink, DDP MUST Deliver a DDP Message if and only if all of
    //# the following are true:
    //= rfc5041 section 4.1
    //= type=test
    //# If the Last flag is set to one, the DDP Message payload MUST be
    //# Delivered to the ULP after:
    //= rfc5040 section 5.5
    //= type=test
    //# At the Data Sink, an incoming Send Message MUST be Delivered to the ULP
    //# only after the DDP Message has been Delivered to the RDMAP layer by the
    //# DDP layer.
    //= rfc5040 section 5.5
    //= type=test
    //# Send Messages MUST be Delivered to the ULP at the Remote Peer after they
    //# are Delivered to RDMAP by DDP and in the order that they were Delivered
    //# to RDMAP.
    let mut rig = Rig::new();
    let mr = rig.mr(16, Access::LOCAL_WRITE);
    rig.recv(1, &[mr.part(8, 3), mr.part(0, 0), mr.part(2, 4)]);
    assert_eq!(
        rig.rx_ulpdu(&untagged(Opcode::SEND_SE, 0, 1, 0, false, b"ab")),
        RxStatus::Ok
    );
    assert!(rig.host.recvs.is_empty());
    assert_eq!(
        rig.rx_ulpdu(&untagged(Opcode::SEND_SE, 0, 1, 2, true, b"cdef")),
        RxStatus::Ok
    );
    let cqe = rig.host.recvs[0];
    assert_eq!(
        (cqe.wr_id, cqe.status, cqe.byte_len),
        (1, WcStatus::Success, 6)
    );
    assert_eq!(
        (cqe.opcode, cqe.flags),
        (WcOpcode::Recv, WcFlags::SOLICITED)
    );
    assert_eq!(
        &rig.read(&mr),
        b"\x00\x01def\x05\x06\x07abc\x0b\x0c\x0d\x0e\x0f"
    );
}

#[test]
fn send_without_receive_is_held() {
    let mut rig = Rig::new();
    let mr = rig.mr(4, Access::LOCAL_WRITE);
    assert_eq!(rig.rx_ulpdu(&send(1, b"abcd")), RxStatus::Held);
    assert_eq!(rig.qp.rx_interest(), RxInterest::Held);
    assert_eq!(rig.offer_again(), RxStatus::Held);
    rig.recv(1, &[mr.sge()]);
    assert_eq!(rig.offer_again(), RxStatus::Ok);
    assert_eq!(rig.qp.rx_interest(), RxInterest::Read);
    assert_eq!(&rig.read(&mr), b"abcd");
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
}

#[test]
fn terminate_names_timed_out_message() {
    let messages = [
        send(1, b"abcd"),
        immediate(1, Immediate::plain(1), Opcode::IMMEDIATE),
    ];
    for message in messages {
        let mut rig = Rig::new();
        assert_eq!(rig.rx_ulpdu(&message), RxStatus::Held);
        rig.expire_held_send();
        let terminate = rig.terminate();
        assert_eq!(terminate.ddp_header, Header::decode(&message));
        assert_eq!(terminate.ddp_segment_len, Some(message.len() as u16));
    }
}

#[test]
fn missed_receives_are_counted_once() {
    let mut rig = Rig::new();
    let missed = |rig: &Rig| rig.qp.counters().receiver_not_ready;
    let two = [send(1, &[1]), send(2, &[1])].map(|ulpdu| rig.fpdu(&ulpdu));
    let mr = rig.mr(4, Access::LOCAL_WRITE);
    assert_eq!(rig.rx(&two.concat()), RxStatus::Held);
    assert_eq!((rig.offer_again(), missed(&rig)), (RxStatus::Held, 1));
    rig.recv(1, &[mr.sge()]);
    assert_eq!((rig.offer_again(), missed(&rig)), (RxStatus::Held, 2));
    assert_eq!((rig.offer_again(), missed(&rig)), (RxStatus::Held, 2));
    rig.recv(2, &[mr.sge()]);
    assert_eq!((rig.offer_again(), missed(&rig)), (RxStatus::Ok, 2));
}

#[test]
fn terminate_policy_ends_stream() {
    //= rfc5041 section 7.1
    //= type=test
    //# Implementers' note: DDP implementations SHOULD consider lack of an
    //# associated buffer as a system fault.
    let config = QpConfig {
        receiver_not_ready: ReceiverNotReady::Terminate,
        ..QpConfig::default()
    };
    for imm in [false, true] {
        let mut rig = Rig::with(config, STREAM);
        let ulpdu = if imm {
            immediate(1, Immediate::plain(1), Opcode::IMMEDIATE)
        } else {
            send(1, &[])
        };
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_NO_BUFFER);
        assert_eq!(rig.terminate().code, Code::DDP_UNTAGGED_NO_BUFFER);
    }
}

#[test]
fn write_immediate_takes_receive() {
    //= rfc7306 section 6.3
    //= type=test
    //# At the Remote Peer, the Immediate Data and Immediate Data with SE
    //# Messages MUST be Delivered to the Remote Peer's ULP in the order they
    //# were sent.
    //= rfc5040 section 5.1
    //= type=test
    //# A valid RDMA Write Message MUST NOT be delivered to the Data Sink's ULP
    //# (i.e., it is placed by the DDP layer).
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    // The immediate data are held, but the preceding Write is placed.
    assert_eq!(
        rig.rx_ulpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, true, &[7; 8])),
        RxStatus::Ok
    );
    let imm = immediate(1, Immediate::plain(0xdead_beef), Opcode::IMMEDIATE_SE);
    assert_eq!(rig.rx_ulpdu(&imm), RxStatus::Held);
    assert_eq!(rig.read(&mr), [7; 8]);
    rig.recv(3, &[]);
    assert_eq!(rig.offer_again(), RxStatus::Ok);
    //= rfc7306 section 6.3
    //= type=test
    //# One Immediate Data or Immediate Data with SE Message MUST consume
    let cqe = rig.host.recvs[0];
    assert_eq!((cqe.opcode, cqe.byte_len), (WcOpcode::RecvWriteImm, 8));
    assert_eq!(cqe.flags, WcFlags::WITH_IMM | WcFlags::SOLICITED);
    assert_eq!(cqe.imm_or_stag, 0xdead_beef);
}

#[test]
fn send_immediate_arrives_with_send() {
    //= rfc5040 section 5.3
    //= type=test
    //# A zero-length Send Message Type MUST consume an Untagged Buffer at the
    //# Data Sink.
    //= rfc5040 section 5.3
    //= type=test
    //# One Send Message Type MUST consume one Untagged Buffer.
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.recv(3, &[mr.sge()]);
    rig.recv(4, &[mr.sge()]);
    let imm = immediate(1, Immediate::before_send(5), Opcode::IMMEDIATE);
    assert_eq!(rig.rx_ulpdu(&imm), RxStatus::Ok);
    assert!(rig.host.recvs.is_empty());
    let _ = rig.rx_ulpdu(&send(2, &[1]));
    let _ = rig.rx_ulpdu(&send(3, &[1]));
    let (a, b) = (rig.host.recvs[0], rig.host.recvs[1]);
    assert_eq!(
        (a.opcode, a.flags, a.imm_or_stag),
        (WcOpcode::Recv, WcFlags::WITH_IMM, 5)
    );
    assert_eq!(b.flags, WcFlags::empty());
}

#[test]
fn send_must_follow_its_immediate() {
    for second in [Immediate::before_send(2), Immediate::plain(2)] {
        let mut rig = Rig::new();
        rig.recv(1, &[]);
        let first = immediate(1, Immediate::before_send(1), Opcode::IMMEDIATE);
        assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
        let second = immediate(2, second, Opcode::IMMEDIATE);
        assert_eq!(rig.rx_ulpdu(&second), RxStatus::Failed);
        rig.assert_ended(Blame::Peer, Code::RDMAP_UNEXPECTED_OPCODE);
        assert_eq!(rig.terminate().ddp_header, Header::decode(&second));
        assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Flushed)]);
    }
}

#[test]
fn send_is_limited_to_4_gib() {
    //= rfc5041 section 5.2
    //= type=test
    //# The ULP Message Length MUST be less than 2^32.
    // Length of the second segment, which starts at 2^32 - 8, and whether that is too long.
    for (len, refused) in [(7, false), (8, true), (16, true)] {
        let mut rig = Rig::new();
        let mr = rig.mr(8, Access::LOCAL_WRITE);
        // Only elements that are written are checked.
        let longest_element = crate::Sge {
            len: u32::MAX,
            ..mr.sge()
        };
        rig.recv(1, &[longest_element, mr.sge(), longest_element]);
        let first = untagged(Opcode::SEND, 0, 1, 0, false, &[1; 8]);
        assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
        rig.qp.rx.message_off = u32::MAX - 7;
        let ulpdu = untagged(Opcode::SEND, 0, 1, u32::MAX - 7, true, &std::vec![2; len]);
        let status = rig.rx_ulpdu(&ulpdu);
        assert_eq!(status, RxStatus::Failed);
        let code = match refused {
            true => Code::DDP_UNTAGGED_TOO_LONG,
            // The length is accepted, but the destination is not registered.
            false => Code::RDMAP_LOCAL_CATASTROPHIC,
        };
        assert_eq!(rig.qp.fault().map(|f| f.code), Some(code), "{len}");
        let status = match refused {
            true => WcStatus::LocalLength,
            false => WcStatus::LocalProtection,
        };
        assert_eq!(brief(&rig.host.recvs), [(1, status)]);
    }
}

#[test]
fn bad_receive_key_is_local_error() {
    let mut rig = Rig::new();
    let read_only = rig.mr(8, Access::empty());
    rig.recv(1, &[read_only.sge()]);
    rig.recv(2, &[]);
    assert_eq!(rig.rx_ulpdu(&send(1, &[1])), RxStatus::Failed);
    rig.assert_ended(Blame::Local, Code::RDMAP_LOCAL_CATASTROPHIC);
    use WcStatus::{Flushed, LocalProtection};
    assert_eq!(brief(&rig.host.recvs), [(1, LocalProtection), (2, Flushed)]);
    assert_eq!(rig.read(&read_only)[0], 0);
}

#[test]
fn shared_queue_raises_limit_and_last_wqe() {
    //= rfc5040 section 5.3
    //= type=test
    //# At the Remote Peer, the Send Message Type MUST be Delivered to the
    //# Remote Peer's ULP in the order they were sent.
    let config = QpConfig {
        shared_receive: true,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    let mr = rig.mr(8, Access::LOCAL_WRITE);
    let wr = RecvWr {
        wr_id: 1,
        sges: &[mr.sge()],
    };
    let refused_post = rig.qp.post_recv(&wr, &mut rig.host);
    assert_eq!(refused_post, Err(PostError::UsesSharedReceiveQueue));
    let mut srq = SharedReceiveQueue::new(4, 1).unwrap();
    srq.post(&wr).unwrap();
    srq.post(&RecvWr { wr_id: 2, ..wr }).unwrap();
    srq.set_limit(1).unwrap();
    rig.host.srq = Some(srq);
    let _ = rig.rx_ulpdu(&send(1, &[1]));
    assert_eq!(rig.host.limit_events, 0);
    // The stream ends inside the second message, so its receive is flushed.
    let _ = rig.rx_ulpdu(&untagged(Opcode::SEND, 0, 2, 0, false, &[1]));
    assert_eq!(rig.host.limit_events, 1);
    rig.qp.abort(&mut rig.host);
    use WcStatus::{Flushed, Success};
    assert_eq!(brief(&rig.host.recvs), [(1, Success), (2, Flushed)]);
    assert!(rig.qp.take_events().contains(Events::LAST_WQE));
    // The event is raised only once before the next RESET.
    rig.post(1, crate::SendOp::Send, &[]);
    rig.qp.stream_gone(&mut rig.host);
    assert!(!rig.qp.take_events().contains(Events::LAST_WQE));
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.start(STREAM);
    rig.qp.abort(&mut rig.host);
    assert!(rig.qp.take_events().contains(Events::LAST_WQE));
}

#[test]
fn held_send_uses_shared_receive() {
    let config = QpConfig {
        shared_receive: true,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    rig.host.srq = Some(SharedReceiveQueue::new(4, 1).unwrap());
    assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Held);
    let wr = RecvWr {
        wr_id: 1,
        sges: &[],
    };
    rig.host.srq.as_mut().unwrap().post(&wr).unwrap();
    assert_eq!(rig.offer_again(), RxStatus::Ok);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
}

/// The shared queue alone determines the elements of its receives.
#[test]
fn shared_receive_has_all_elements() {
    const ELEMENTS: u32 = 9;
    for max_recv_sge in [0, 1, ELEMENTS] {
        let config = QpConfig {
            shared_receive: true,
            max_recv_sge,
            ..QpConfig::default()
        };
        let mut rig = Rig::with(config, STREAM);
        let mr = rig.mr(2 * ELEMENTS, Access::LOCAL_WRITE);
        let sges: std::vec::Vec<_> = (0..ELEMENTS).map(|i| mr.part(2 * i, 2)).collect();
        let mut srq = SharedReceiveQueue::new(4, ELEMENTS).unwrap();
        let wr = RecvWr {
            wr_id: 1,
            sges: &sges,
        };
        srq.post(&wr).unwrap();
        rig.host.srq = Some(srq);
        assert_eq!(
            rig.rx_ulpdu(&send(1, &[9; 18])),
            RxStatus::Ok,
            "{max_recv_sge}"
        );
        assert_eq!(
            brief(&rig.host.recvs),
            [(1, WcStatus::Success)],
            "{max_recv_sge}"
        );
        assert_eq!(rig.read(&mr), [9; 18], "{max_recv_sge}");
    }
}

#[test]
fn write_may_interrupt_send() {
    //= rfc5041 section 4.1
    //= type=test
    //# If set to zero, the ULP Payload carried in this DDP Segment MUST be
    //# Placed into an Untagged Buffer.
    //= rfc5041 section 4.1
    //= type=test
    //# If set to one, the ULP Payload carried in this DDP Segment MUST be
    //# Placed into a Tagged Buffer.
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.recv(1, &[mr.part(0, 4)]);
    let _ = rig.rx_ulpdu(&untagged(Opcode::SEND, 0, 1, 0, false, b"ab"));
    let _ = rig.rx_ulpdu(&tagged(Opcode::WRITE, mr.stag, mr.at + 4, true, b"wxyz"));
    let _ = rig.rx_ulpdu(&untagged(Opcode::SEND, 0, 1, 2, true, b"cd"));
    assert_eq!(&rig.read(&mr), b"abcdwxyz");
    // Immediate data may not interrupt it, because they share the queue with the Send.
    rig.recv(2, &[mr.part(0, 4)]);
    let _ = rig.rx_ulpdu(&untagged(Opcode::SEND, 0, 2, 0, false, &[]));
    let imm = immediate(2, Immediate::plain(0), Opcode::IMMEDIATE);
    assert_eq!(rig.rx_ulpdu(&imm), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_INVALID_MSN);
}
