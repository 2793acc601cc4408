//! Which messages unreliable connections drop ([`ReceiverNotReady::Drop`]).

use super::harness::*;
use crate::qp::*;
use crate::{Access, PostError, SendOp, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::rdmap::{Immediate, Opcode, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

fn rig() -> Rig {
    let config = QpConfig {
        receiver_not_ready: ReceiverNotReady::Drop,
        max_ird: 0,
        max_ord: 0,
        ..QpConfig::default()
    };
    let stream = StreamConfig {
        ird: 0,
        ord: 0,
        ..STREAM
    };
    Rig::with(config, stream)
}

fn immediate(msn: u32, imm: Immediate) -> Vec<u8> {
    untagged(Opcode::IMMEDIATE, 0, msn, 0, true, &imm.octets())
}

#[test]
fn only_send_without_receive_is_dropped() {
    let mut rig = rig();
    let mr = rig.mr(16, Access::LOCAL_WRITE);
    assert_eq!(rig.rx_ulpdu(&send(1, b"lost")), RxStatus::Ok);
    // A receive posted during a dropped message is used for the next message.
    let begin = untagged(Opcode::SEND, 0, 2, 0, false, b"ab");
    assert_eq!(rig.rx_ulpdu(&begin), RxStatus::Ok);
    rig.recv(7, &[mr.sge()]);
    let end = untagged(Opcode::SEND, 0, 2, 2, true, b"cd");
    assert_eq!(rig.rx_ulpdu(&end), RxStatus::Ok);
    assert!(rig.host.recvs.is_empty());
    assert_eq!(rig.rx_ulpdu(&send(3, b"here")), RxStatus::Ok);
    assert_eq!(brief(&rig.host.recvs), [(7, WcStatus::Success)]);
    assert_eq!(rig.host.recvs[0].byte_len, 4);
    assert_eq!(&rig.read(&mr)[..4], b"here");
    assert_eq!(
        rig.qp.counters().receiver_not_ready,
        2,
        "messages, not segments"
    );
    assert_eq!(rig.qp.state(), State::Rts);
}

#[test]
fn immediate_data_are_dropped_with_message() {
    let mut rig = rig();
    let mr = rig.mr(16, ALL);
    // A Send with immediate data, and the immediate data of a Write, without receives.
    let _ = rig.rx_ulpdu(&immediate(1, Immediate::before_send(5)));
    assert_eq!(rig.rx_ulpdu(&send(2, b"lost")), RxStatus::Ok);
    let _ = rig.rx_ulpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, true, b"wxyz"));
    assert_eq!(
        rig.rx_ulpdu(&immediate(3, Immediate::plain(6))),
        RxStatus::Ok
    );
    assert_eq!(&rig.read(&mr)[..4], b"wxyz", "the Write itself was placed");
    rig.recv(1, &[mr.sge()]);
    assert_eq!(rig.rx_ulpdu(&send(4, b"here")), RxStatus::Ok);
    assert_eq!(rig.host.recvs[0].flags, WcFlags::empty());
    // The next Write does not get the length of the dropped one.
    rig.recv(2, &[]);
    assert_eq!(
        rig.rx_ulpdu(&immediate(5, Immediate::plain(8))),
        RxStatus::Ok
    );
    let cqe = rig.host.recvs[1];
    assert_eq!((cqe.opcode, cqe.byte_len), (WcOpcode::RecvWriteImm, 0));
    assert_eq!((cqe.wr_id, cqe.imm_or_stag), (2, 8));
}

#[test]
fn refused_write_is_dropped_with_immediate() {
    let mut rig = rig();
    let mr = rig.mr(16, ALL);
    rig.recv(1, &[]);
    let write = |to: u64, last: bool| tagged(Opcode::WRITE, mr.stag, mr.at + to, last, &[9; 4]);
    let before = rig.read(&mr);
    assert_eq!(rig.rx_ulpdu(&write(14, true)), RxStatus::Ok);
    assert_eq!(
        rig.rx_ulpdu(&immediate(1, Immediate::plain(1))),
        RxStatus::Ok
    );
    assert_eq!(rig.read(&mr), before);
    assert!(rig.host.recvs.is_empty());
    // A message with a refused segment is dropped.
    let _ = rig.rx_ulpdu(&write(14, false));
    let _ = rig.rx_ulpdu(&write(4, true));
    assert_eq!(
        rig.rx_ulpdu(&immediate(2, Immediate::plain(2))),
        RxStatus::Ok
    );
    assert!(rig.host.recvs.is_empty());
    // A valid message after it is delivered.
    let _ = rig.rx_ulpdu(&write(14, true));
    let _ = rig.rx_ulpdu(&write(0, true));
    assert_eq!(
        rig.rx_ulpdu(&immediate(3, Immediate::plain(3))),
        RxStatus::Ok
    );
    assert_eq!(rig.host.recvs[0].imm_or_stag, 3);
    assert_eq!(rig.host.recvs[0].byte_len, 4);
    assert_eq!(rig.qp.state(), State::Rts);
    // Immediate data without a preceding Write are delivered.
    rig.recv(2, &[]);
    let _ = rig.rx_ulpdu(&immediate(4, Immediate::plain(4)));
    assert_eq!(rig.host.recvs.len(), 2);
}

#[test]
fn large_messages_are_dropped() {
    let mut rig = rig();
    rig = {
        let config = *rig.qp.config();
        let stream = StreamConfig {
            crc: false,
            ird: 0,
            ord: 0,
            emss: 60000,
            ..STREAM
        };
        Rig::with(config, stream)
    };
    let mr = rig.mr(40000, ALL);
    let before = rig.read(&mr);
    let large = vec![0x55; 40000];
    for ulpdu in [
        send(1, &large),
        tagged(Opcode::WRITE, mr.stag ^ 0x100, mr.at, true, &large),
    ] {
        let fpdu = rig.fpdu(&ulpdu);
        for piece in fpdu.chunks(3000) {
            assert_eq!(rig.rx(piece), RxStatus::Ok);
        }
    }
    assert_eq!(rig.read(&mr), before);
    let good = tagged(Opcode::WRITE, mr.stag, mr.at, true, &large);
    let fpdu = rig.fpdu(&good);
    for piece in fpdu.chunks(3000) {
        assert_eq!(rig.rx(piece), RxStatus::Ok);
    }
    assert_eq!(rig.read(&mr), large);
}

#[test]
fn dropped_payload_is_not_counted() {
    let mut rig = rig();
    let mr = rig.mr(16, ALL);
    let placed = |rig: &Rig| rig.qp.counters().rx_payload;
    let write = |to: u64, last: bool| tagged(Opcode::WRITE, mr.stag, mr.at + to, last, &[9; 4]);
    let begin = untagged(Opcode::SEND, 0, 2, 0, false, b"ab");
    let end = untagged(Opcode::SEND, 0, 2, 2, true, b"cd");
    for dropped in [send(1, b"lost"), begin, end, write(14, true)] {
        assert_eq!(rig.rx_ulpdu(&dropped), RxStatus::Ok);
        assert_eq!(placed(&rig), 0);
    }
    // A Write of two segments, of which the first is placed.
    assert_eq!(rig.rx_ulpdu(&write(0, false)), RxStatus::Ok);
    assert_eq!(rig.rx_ulpdu(&write(14, true)), RxStatus::Ok);
    assert_eq!(placed(&rig), 4);
    rig.recv(1, &[mr.sge()]);
    assert_eq!(rig.rx_ulpdu(&send(3, b"here it is")), RxStatus::Ok);
    assert_eq!(placed(&rig), 14);
}

#[test]
fn unreliable_connection_has_no_reads() {
    let mut rig = rig();
    let mr = rig.mr(16, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 1,
    };
    let posted = rig.try_post(1, read, crate::SendFlags::empty(), &[mr.sge()]);
    assert_eq!(posted, Err(PostError::InvalidRequest));
    let body = read_request(9, 8, mr.stag, mr.at);
    let request = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&request), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_NO_BUFFER);
}

#[test]
fn end_inside_message_is_fatal() {
    let mut rig = rig();
    let begin = untagged(Opcode::SEND, 0, 1, 0, false, b"ab");
    assert_eq!(rig.rx_ulpdu(&begin), RxStatus::Ok);
    rig.eof();
    assert!(rig.qp.take_events().contains(Events::FATAL));
}

#[test]
fn too_long_message_ends_stream() {
    let mut rig = rig();
    let mr = rig.mr(16, Access::LOCAL_WRITE);
    rig.recv(1, &[mr.part(0, 2)]);
    assert_eq!(rig.rx_ulpdu(&send(1, b"abc")), RxStatus::Failed);
    rig.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_TOO_LONG);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::LocalLength)]);
}
