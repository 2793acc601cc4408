//! Extended reliable connections: the shared receive queue of a message, its protection domain, and
//! refusals.

use super::harness::*;
use super::refused::assert_refused;
use crate::qp::*;
use crate::receive_queue::SharedReceiveQueue;
use crate::{Access, RecvWr, SendFlags, SendOp, SendWr, WcOpcode, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Immediate, Opcode, TerminateCode as Code};
use std::vec::Vec;

const TAG: u64 = u32::from_be_bytes(*b"xsrq") as u64;

/// Returns the note that selects this queue for the next messages.
fn note(number: u32) -> Vec<u8> {
    tagged(Opcode::WRITE, 1, TAG << 32 | u64::from(number), true, &[])
}

fn target_config() -> QpConfig {
    QpConfig {
        shared_receive: true,
        max_send_wr: 0,
        max_recv_wr: 0,
        ..QpConfig::default()
    }
}

/// Returns a target whose domain has the queues 10 and 11, the second in another protection domain.
fn target() -> Rig {
    target_with(target_config())
}

fn target_with(config: QpConfig) -> Rig {
    let other = StreamConfig {
        initiator: false,
        ..STREAM
    };
    let mut rig = Rig::fresh(config);
    rig.qp.set_xrc(XrcEnd::Target);
    rig.start(other);
    for (number, pd) in [(10, PD), (11, PD + 1)] {
        let srq = SharedReceiveQueue::new(4, 2).unwrap();
        rig.host.domain.push((number, pd, srq));
    }
    rig
}

fn initiator_and_target() -> (Rig, Rig) {
    let mut a = Rig::fresh(QpConfig::default());
    a.qp.set_xrc(XrcEnd::Initiator);
    a.start(STREAM);
    (a, target())
}

fn set_up_by_number(rig: &mut Rig) {
    rig.qp.complete_when_placed();
    rig.qp.set_by_number();
}

fn post_srq(rig: &mut Rig, number: u32, wr_id: u64, mr: &Mr) {
    let sges = [mr.sge()];
    let queue = rig.host.domain.iter_mut().find(|q| q.0 == number).unwrap();
    queue.2.post(&RecvWr { wr_id, sges: &sges }).unwrap();
}

fn post(rig: &mut Rig, wr_id: u64, op: SendOp, srq: u32, mr: &Mr) {
    let wr = SendWr {
        wr_id,
        op,
        flags: SendFlags::SIGNALED,
        sges: &[mr.part(0, 8)],
        inline: &[],
    };
    rig.qp.post_send_to(&wr, srq, &mut rig.host).unwrap();
}

fn write_to(mr: &Mr) -> SendOp {
    SendOp::Write {
        remote_addr: mr.at,
        rkey: mr.stag,
    }
}

fn read_from(mr: &Mr) -> SendOp {
    SendOp::Read {
        remote_addr: mr.at,
        rkey: mr.stag,
    }
}

#[test]
fn messages_reach_selected_queues() {
    for by_number in [false, true] {
        let (mut a, mut b) = initiator_and_target();
        if by_number {
            set_up_by_number(&mut a);
            set_up_by_number(&mut b);
        }
        let from = a.mr(64, Access::LOCAL_WRITE);
        let own_domain = b.mr_in(PD, 64, ALL);
        let other_domain = b.mr_in(PD + 1, 64, ALL);
        for wr_id in 0..3 {
            post_srq(&mut b, 10, 100 + wr_id, &own_domain);
            post_srq(&mut b, 11, 200 + wr_id, &other_domain);
        }
        for (wr_id, srq) in [(1, 10), (2, 11), (3, 11), (4, 10)] {
            post(&mut a, wr_id, SendOp::Send, srq, &from);
        }
        post(&mut a, 5, SendOp::SendImm(9), 11, &from);
        shuttle(&mut a, &mut b, 1000);
        let ids: Vec<u64> = b.host.recvs.iter().map(|c| c.wr_id).collect();
        assert_eq!(ids, [100, 200, 201, 101, 202]);
        assert!(b.host.recvs.iter().all(|c| c.status == WcStatus::Success));
        assert_eq!(b.host.recvs[4].imm_or_stag, 9);
        assert_eq!(a.host.sends.len(), 5);
        assert_eq!((a.qp.state(), b.qp.state()), (State::Rts, State::Rts));
    }
}

#[test]
fn note_precedes_change_of_queue() {
    let (mut a, _) = initiator_and_target();
    let mr = a.mr(64, Access::LOCAL_WRITE);
    for (wr_id, srq) in [(1, 10), (2, 10), (3, 11)] {
        post(&mut a, wr_id, SendOp::Send, srq, &mr);
    }
    // A Write without a queue needs no note.
    post(&mut a, 4, write_to(&mr), 0, &mr);
    post(&mut a, 5, SendOp::Send, 11, &mr);
    let announced: Vec<u64> = a
        .sent()
        .iter()
        .map(|(header, payload)| match header {
            Header::Tagged(h) if payload.is_empty() => h.to & 0xffff_ffff,
            _ => 0,
        })
        .collect();
    assert_eq!(announced, [10, 0, 0, 11, 0, 0, 0]);
}

#[test]
fn write_immediate_uses_selected_queue() {
    let (mut a, mut b) = initiator_and_target();
    let from = a.mr(64, Access::LOCAL_WRITE);
    let target = b.mr_in(PD + 1, 64, ALL);
    post_srq(&mut b, 11, 7, &target);
    let op = SendOp::WriteImm {
        remote_addr: target.at,
        rkey: target.stag,
        imm: 3,
    };
    post(&mut a, 1, op, 11, &from);
    shuttle(&mut a, &mut b, 1000);
    let cqe = b.host.recvs[0];
    assert_eq!((cqe.wr_id, cqe.opcode), (7, WcOpcode::RecvWriteImm));
    assert_eq!((cqe.imm_or_stag, cqe.byte_len), (3, 8));
}

/// The queue selected last determines the target's protection domain for Writes, Reads and
/// receives.
#[test]
fn other_protection_domain_is_refused() {
    for (number, accepted) in [(10, false), (11, true)] {
        let (mut a, mut b) = initiator_and_target();
        let from = a.mr(64, Access::LOCAL_WRITE);
        let other_domain = b.mr_in(PD + 1, 64, ALL);
        post(&mut a, 1, write_to(&other_domain), number, &from);
        shuttle(&mut a, &mut b, 1000);
        match accepted {
            true => assert_eq!(b.qp.state(), State::Rts),
            false => b.assert_ended(Blame::Peer, Code::DDP_TAGGED_NOT_ASSOCIATED),
        }
    }
}

#[test]
fn default_domain_applies_before_note() {
    let (mut a, mut b) = initiator_and_target();
    let from = a.mr(64, Access::LOCAL_WRITE);
    let other_domain = b.mr_in(PD + 1, 64, ALL);
    b.qp.set_default_pd(PD + 1);
    post(&mut a, 1, write_to(&other_domain), 0, &from);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(b.qp.state(), State::Rts);
    let _ = b.rx_ulpdu(&note(10));
    b.qp.set_default_pd(PD + 1);
    assert_eq!(b.qp.accessor().pd, PD);
}

/// The note waits for outstanding responses, because they must be sent with the protection domain
/// of the earlier queue.
#[test]
fn change_of_queue_waits_for_responses() {
    let (mut a, mut b) = initiator_and_target();
    let to = a.mr(64, Access::LOCAL_WRITE);
    let own_domain = b.mr_in(PD, 64, ALL);
    let other_domain = b.mr_in(PD + 1, 64, ALL);
    post_srq(&mut b, 11, 7, &other_domain);
    post(&mut a, 1, read_from(&own_domain), 10, &to);
    post(&mut a, 2, SendOp::Send, 11, &to);
    let sent = a.octets_out();
    let _ = b.rx(&sent);
    assert!(b.host.recvs.is_empty());
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&a.host.sends),
        [(1, WcStatus::Success), (2, WcStatus::Success)]
    );
    assert_eq!(brief(&b.host.recvs), [(7, WcStatus::Success)]);
}

#[test]
fn missing_queue_is_refused_at_receive() {
    for before in [None, Some(12)] {
        let mut b = target();
        if let Some(number) = before {
            // A note for a missing queue has no effect by itself.
            assert_eq!(b.rx_ulpdu(&note(number)), RxStatus::Ok);
        }
        assert_refused(&mut b, &send(1, b"to whom"), Code::DDP_UNTAGGED_INVALID_QN);
        let mut b = target();
        if let Some(number) = before {
            assert_eq!(b.rx_ulpdu(&note(number)), RxStatus::Ok);
        }
        let imm = Immediate::plain(1).octets();
        let imm = untagged(Opcode::IMMEDIATE, 0, 1, 0, true, &imm);
        assert_refused(&mut b, &imm, Code::DDP_UNTAGGED_INVALID_QN);
    }
}

#[test]
fn sender_is_notified_of_missing_queue() {
    let (mut a, mut b) = initiator_and_target();
    set_up_by_number(&mut a);
    set_up_by_number(&mut b);
    let mr = a.mr(64, Access::LOCAL_WRITE);
    let own_domain = b.mr_in(PD, 64, ALL);
    post_srq(&mut b, 10, 7, &own_domain);
    for (wr_id, srq) in [(1, 10), (2, 99), (3, 10)] {
        post(&mut a, wr_id, SendOp::Send, srq, &mr);
    }
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&a.host.sends),
        [
            (1, WcStatus::Success),
            (2, WcStatus::RemoteInvalidRequest),
            (3, WcStatus::Flushed)
        ]
    );
    b.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_INVALID_QN);
}

/// If the queue of a held Send is destroyed, the Send can never get a receive.
#[test]
fn destroyed_queue_ends_hold() {
    let mut b = target();
    let _ = b.rx_ulpdu(&note(10));
    assert_eq!(b.rx_ulpdu(&send(1, b"hello")), RxStatus::Held);
    assert_eq!(b.offer_again(), RxStatus::Held);
    b.host.domain.clear();
    assert_eq!(b.offer_again(), RxStatus::Failed);
    b.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_INVALID_QN);
}

#[test]
fn held_send_continues_with_next_receive() {
    let (mut a, mut b) = initiator_and_target();
    set_up_by_number(&mut a);
    set_up_by_number(&mut b);
    let mr = a.mr(64, Access::LOCAL_WRITE);
    let own_domain = b.mr_in(PD, 64, ALL);
    let other_domain = b.mr_in(PD + 1, 64, ALL);
    post_srq(&mut b, 11, 8, &other_domain);
    post(&mut a, 1, SendOp::Send, 10, &mr);
    shuttle(&mut a, &mut b, 1000);
    assert!(
        b.host.recvs.is_empty(),
        "the receive belongs to another queue"
    );
    post_srq(&mut b, 10, 7, &own_domain);
    assert_eq!(b.offer_again(), RxStatus::Ok);
    assert_eq!(brief(&b.host.recvs), [(7, WcStatus::Success)]);
}

#[test]
fn note_inside_message_is_refused() {
    let mut b = target();
    let own_domain = b.mr_in(PD, 64, ALL);
    post_srq(&mut b, 10, 7, &own_domain);
    let _ = b.rx_ulpdu(&note(10));
    let begin = untagged(Opcode::SEND, 0, 1, 0, false, b"half");
    assert_eq!(b.rx_ulpdu(&begin), RxStatus::Ok);
    assert_refused(&mut b, &note(11), Code::RDMAP_UNEXPECTED_OPCODE);
    assert_eq!(brief(&b.host.recvs), [(7, WcStatus::Flushed)]);
}

/// A note is also refused after an empty first segment, and inside a dropped message.
#[test]
fn note_inside_started_message_is_refused() {
    for drops_messages in [false, true] {
        let receiver_not_ready = match drops_messages {
            true => ReceiverNotReady::Drop,
            false => ReceiverNotReady::default(),
        };
        let mut b = target_with(QpConfig {
            receiver_not_ready,
            ..target_config()
        });
        let own_domain = b.mr_in(PD, 64, ALL);
        let _ = b.rx_ulpdu(&note(10));
        let payload = match drops_messages {
            true => &b"half"[..],
            false => {
                post_srq(&mut b, 10, 7, &own_domain);
                &[]
            }
        };
        let begin = untagged(Opcode::SEND, 0, 1, 0, false, payload);
        assert_eq!(b.rx_ulpdu(&begin), RxStatus::Ok);
        assert_refused(&mut b, &note(11), Code::RDMAP_UNEXPECTED_OPCODE);
    }
}

/// A Send without a queue must not use the queue that an earlier request has selected.
#[test]
fn send_without_queue_is_refused() {
    let (mut a, mut b) = initiator_and_target();
    let mr = a.mr(64, Access::LOCAL_WRITE);
    let own_domain = b.mr_in(PD, 64, ALL);
    for wr_id in 7..10 {
        post_srq(&mut b, 10, wr_id, &own_domain);
    }
    post(&mut a, 1, SendOp::Send, 10, &mr);
    // A Write consumes no receive, so the queue stays selected.
    post(&mut a, 2, write_to(&own_domain), 0, &mr);
    post(&mut a, 3, SendOp::Send, 10, &mr);
    post(&mut a, 4, SendOp::Send, 0, &mr);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&b.host.recvs),
        [(7, WcStatus::Success), (8, WcStatus::Success)]
    );
    b.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_INVALID_QN);
}

#[test]
fn notes_without_messages_change_nothing() {
    let mut b = target();
    let own_domain = b.mr_in(PD, 64, ALL);
    post_srq(&mut b, 10, 7, &own_domain);
    for number in 0..10_000 {
        let _ = b.rx_ulpdu(&note(number));
    }
    assert_eq!(b.rx_ulpdu(&note(10)), RxStatus::Ok);
    assert_eq!(b.rx_ulpdu(&send(1, b"at last")), RxStatus::Ok);
    assert_eq!(brief(&b.host.recvs), [(7, WcStatus::Success)]);
    assert!(b.octets_out().is_empty(), "nothing is answered");
}

#[test]
fn ordinary_queue_pair_ignores_note() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    rig.recv(1, &[mr.sge()]);
    assert_eq!(rig.rx_ulpdu(&note(10)), RxStatus::Ok);
    assert_eq!(rig.rx_ulpdu(&send(1, b"hello")), RxStatus::Ok);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
}

#[test]
fn initiator_accepts_no_messages() {
    let begin = || {
        let (mut a, _) = initiator_and_target();
        set_up_by_number(&mut a);
        a.qp.set_remote_access(Access::all());
        a
    };
    let mut a = begin();
    assert_refused(&mut a, &send(1, b"hello"), Code::DDP_UNTAGGED_NO_BUFFER);
    let mut a = begin();
    let mr = a.mr(64, ALL);
    let write = tagged(Opcode::WRITE, mr.stag, mr.at, true, b"no");
    assert_refused(&mut a, &write, Code::RDMAP_ACCESS);
    let mut a = begin();
    let mr = a.mr(64, ALL);
    let read = read_request(9, 8, mr.stag, mr.at);
    let read = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &read);
    assert_eq!(a.rx_ulpdu(&read), RxStatus::Failed);
    a.assert_ended(Blame::Peer, Code::RDMAP_ACCESS);
}

#[test]
fn new_stream_starts_with_note() {
    let (mut a, mut b) = initiator_and_target();
    let mr = a.mr(64, Access::LOCAL_WRITE);
    post(&mut a, 1, SendOp::Send, 10, &mr);
    let sent = a.octets_out();
    assert_eq!(b.rx(&sent), RxStatus::Held);
    for rig in [&mut a, &mut b] {
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        rig.qp.stream_gone(&mut rig.host);
    }
    a.start(STREAM);
    post(&mut a, 2, SendOp::Send, 10, &mr);
    let first = &a.sent()[0];
    assert!(matches!(first.0, Header::Tagged(h) if h.to == TAG << 32 | 10));
    b.offered.clear();
    b.start(StreamConfig {
        initiator: false,
        ..STREAM
    });
    assert_refused(&mut b, &send(1, b"to whom"), Code::DDP_UNTAGGED_INVALID_QN);
}
