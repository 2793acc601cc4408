//! The farewell of a queue pair connected by number: which requests of the peer it completes, and
//! when it is sent.

use super::harness::*;
use crate::qp::tx::{Job, Stage};
use crate::qp::*;
use crate::{Access, SendOp, WcStatus};
use iwarp_proto::ddp::{Header, TaggedHeader};
use iwarp_proto::rdmap::Opcode;
use std::vec::Vec;

/// Returns two ends connected by number, and a region of each. The second end has posted receives.
fn connected_by_number() -> (Rig, Rig, Mr, Mr) {
    let (mut a, mut b) = pair(STREAM);
    for rig in [&mut a, &mut b] {
        rig.qp.complete_when_placed();
        rig.qp.set_by_number();
    }
    let mr = a.mr(4096, Access::LOCAL_WRITE);
    let target = b.mr(4096, ALL);
    for wr_id in 100..108 {
        b.recv(wr_id, &[target.part(0, 8)]);
    }
    (a, b, mr, target)
}

fn write(to: &Mr) -> SendOp {
    let sge = to.sge();
    SendOp::Write {
        remote_addr: sge.addr,
        rkey: sge.lkey,
    }
}

fn write_imm(to: &Mr) -> SendOp {
    let sge = to.sge();
    SendOp::WriteImm {
        remote_addr: sge.addr,
        rkey: sge.lkey,
        imm: 9,
    }
}

fn receive_segments(rig: &mut Rig, segments: &[(Header, Vec<u8>)]) {
    for (header, payload) in segments {
        assert_eq!(rig.rx_ulpdu(&with_payload(header, payload)), RxStatus::Ok);
    }
}

/// Closes with a farewell if one is possible, and passes the octets to the other end. Returns
/// whether there was a farewell.
fn send_farewell_and_close(rig: &mut Rig, other: &mut Rig) -> bool {
    let sent_farewell = rig.qp.say_farewell(false);
    rig.qp.close(&mut rig.host);
    let octets = rig.octets_out();
    let _ = other.rx(&octets);
    sent_farewell
}

fn completed(rig: &Rig) -> Vec<u64> {
    assert!(
        rig.host
            .sends
            .iter()
            .all(|cqe| cqe.status == WcStatus::Success)
    );
    rig.host.sends.iter().map(|cqe| cqe.wr_id).collect()
}

fn opcodes(segments: &[(Header, Vec<u8>)]) -> Vec<Opcode> {
    segments.iter().map(|(h, _)| h.opcode()).collect()
}

fn farewell(messages: u32) -> Vec<u8> {
    let kind = u64::from(u32::from_be_bytes(*b"done"));
    let to = kind << 32 | u64::from(messages);
    tagged(Opcode::WRITE, 1, to, true, &[])
}

/// Requests complete if all their messages have arrived. The note before them is not counted as a
/// message.
#[test]
fn arrived_messages_complete_requests() {
    let expected: [&[u64]; 11] = [
        &[],
        &[],
        &[1],
        &[1, 2],
        &[1, 2],
        &[1, 2, 3],
        &[1, 2, 3],
        &[1, 2, 3, 4],
        &[1, 2, 3, 4, 5],
        &[1, 2, 3, 4, 5, 6],
        &[1, 2, 3, 4, 5, 6],
    ];
    for (arrived, expected) in expected.iter().enumerate() {
        let (mut a, mut b, mr, target) = connected_by_number();
        a.qp.set_rnr_retry(3);
        let sge = [mr.part(0, 8)];
        a.post(1, write(&target), &sge);
        a.post(2, SendOp::Send, &sge);
        a.post(3, SendOp::SendImm(7), &sge);
        a.post(4, write_imm(&target), &sge);
        // The last two messages have no payload.
        a.post(5, write(&target), &[]);
        a.post(6, SendOp::Send, &[]);
        let segments = a.sent();
        let sent = [
            Opcode::WRITE,
            Opcode::WRITE,
            Opcode::SEND,
            Opcode::IMMEDIATE,
            Opcode::SEND,
            Opcode::WRITE,
            Opcode::IMMEDIATE,
            Opcode::WRITE,
            Opcode::SEND,
            Opcode::READ_REQUEST,
        ];
        assert_eq!(opcodes(&segments), sent);
        receive_segments(&mut b, &segments[..arrived]);
        assert_eq!(
            send_farewell_and_close(&mut b, &mut a),
            arrived > 1,
            "{arrived}"
        );
        assert_eq!(completed(&a), *expected, "{arrived}");
        assert_eq!(a.qp.state(), State::Rts);
    }
}

/// Messages acknowledged by probes are not counted twice.
#[test]
fn farewell_continues_after_probes() {
    let (mut a, mut b, mr, target) = connected_by_number();
    for wr_id in 1..4 {
        a.post(wr_id, write(&target), &[mr.part(0, 8)]);
        a.post(wr_id + 10, SendOp::Send, &[mr.part(0, 8)]);
        shuttle(&mut a, &mut b, 1000);
    }
    assert_eq!(completed(&a), [1, 11, 2, 12, 3, 13]);
    a.post(4, write(&target), &[mr.part(0, 8)]);
    a.post(14, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    receive_segments(&mut b, &segments[..1]);
    assert!(send_farewell_and_close(&mut b, &mut a));
    assert_eq!(completed(&a)[6..], [4]);
}

#[test]
fn partial_message_is_not_completed() {
    let (mut a, mut b, _, _) = connected_by_number();
    let (mr, target) = (a.mr(1 << 20, Access::LOCAL_WRITE), b.mr(1 << 20, ALL));
    a.post(1, write(&target), &[mr.part(0, 8)]);
    a.post(2, write(&target), &[mr.sge()]);
    // The second Write does not fit into one plan.
    assert_eq!(a.fill(), TxFill::Ready);
    let octets = a.write_some(1 << 20);
    assert_eq!(b.rx(&octets), RxStatus::Ok);
    assert!(send_farewell_and_close(&mut b, &mut a));
    assert_eq!(completed(&a), [1]);
}

/// A Send or Write with immediate data is two messages. If only the first one has arrived, the
/// request does not complete.
#[test]
fn half_sent_request_is_not_completed() {
    type Make = fn(&Mr) -> SendOp;
    let cases: [(Make, Opcode, Stage); 2] = [
        (|_| SendOp::SendImm(7), Opcode::IMMEDIATE, Stage::Body),
        (write_imm, Opcode::WRITE, Stage::ImmediateLast),
    ];
    for (make, first, next) in cases {
        // The requests that complete if 0, 1 or 2 messages have arrived.
        let completed_ids: [&[u64]; 3] = [&[], &[1], &[1]];
        for (arrived, expected) in (0..).zip(completed_ids) {
            let (mut a, _, mr, target) = connected_by_number();
            // Each plan holds one FPDU.
            a.plan = TxPlan::with(TxSizes {
                bytes: 1,
                ..TxSizes::DEFAULT
            })
            .unwrap();
            a.post(1, SendOp::Send, &[mr.part(0, 8)]);
            a.post(2, make(&target), &[mr.part(0, 8)]);
            for opcode in [Opcode::SEND, first] {
                assert_eq!(a.fill(), TxFill::Ready);
                let octets = a.write_some(1000);
                let header = Header::parse(&octets[2..]).unwrap();
                assert_eq!(header.opcode(), opcode);
            }
            assert!(
                matches!(a.qp.tx.job, Some(Job::Request { seq: 1, stage, .. }) if stage == next)
            );
            assert_eq!(a.rx_ulpdu(&farewell(arrived)), RxStatus::Ok);
            assert_eq!(completed(&a), *expected, "{arrived} of {first:?}");
        }
    }
}

#[test]
fn unanswered_read_limits_farewell() {
    let (mut a, mut b, mr, target) = connected_by_number();
    let read = SendOp::Read {
        remote_addr: target.at,
        rkey: target.stag,
    };
    a.post(1, write(&target), &[mr.part(0, 8)]);
    a.post(2, read, &[mr.part(8, 8)]);
    a.post(3, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    assert_eq!(a.rx_ulpdu(&farewell(2)), RxStatus::Ok);
    assert_eq!(completed(&a), [1], "the response may still arrive");
    receive_segments(&mut b, &segments[..3]);
    assert!(b.qp.say_farewell(false));
    let response_and_note = b.sent();
    let expected = [Opcode::READ_RESPONSE, Opcode::WRITE];
    assert_eq!(opcodes(&response_and_note), expected);
    receive_segments(&mut a, &response_and_note[..1]);
    assert_eq!(completed(&a), [1, 2]);
}

#[test]
fn nothing_follows_final_farewell() {
    let (mut a, mut b, mr, target) = connected_by_number();
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    receive_segments(&mut b, &segments);
    assert!(b.qp.say_farewell(true));
    b.post(7, SendOp::Send, &[target.part(0, 8)]);
    assert_eq!(
        opcodes(&b.sent()),
        [Opcode::READ_RESPONSE, Opcode::WRITE],
        "the request is not sent"
    );
    assert!(!b.qp.wants_tx());
    b.qp.modify(State::Error, &mut b.host).unwrap();
    assert_eq!(brief(&b.host.sends), [(7, WcStatus::Flushed)]);
    // After a reset, the queue pair sends requests again.
    b.qp.stream_gone(&mut b.host);
    b.qp.modify(State::Reset, &mut b.host).unwrap();
    b.qp.modify(State::Init, &mut b.host).unwrap();
    b.host.sends.clear();
    b.start(STREAM);
    b.post(8, SendOp::Send, &[target.part(0, 8)]);
    let segments = b.sent();
    assert_eq!(opcodes(&segments), [Opcode::SEND, Opcode::READ_REQUEST]);
    assert_eq!(b.rx_ulpdu(&farewell(1)), RxStatus::Ok);
    assert_eq!(brief(&b.host.sends), [(8, WcStatus::Success)]);
}

#[test]
fn queued_requests_follow_farewell() {
    let (mut a, mut b, mr, target) = connected_by_number();
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    receive_segments(&mut b, &segments[..1]);
    b.post(7, SendOp::Send, &[target.part(0, 8)]);
    assert!(b.qp.say_farewell(false));
    b.qp.close(&mut b.host);
    let sent = opcodes(&b.sent());
    assert_eq!(sent[..2], [Opcode::WRITE, Opcode::SEND]);
    assert_eq!(b.qp.stream_wish(), StreamWish::ShutdownWrite);
}

#[test]
fn graceful_end_waits_for_farewell() {
    let (mut a, mut b, mr, _) = connected_by_number();
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    receive_segments(&mut b, &segments[..1]);
    assert!(b.qp.say_farewell(false));
    b.qp.close(&mut b.host);
    assert_eq!(b.qp.stream_wish(), StreamWish::Keep);
    assert_eq!(opcodes(&b.sent()), [Opcode::WRITE]);
    assert_eq!(b.qp.stream_wish(), StreamWish::ShutdownWrite);
}

#[test]
fn false_farewells_complete_nothing() {
    for claim in [0, 3, 4, 1 << 31, u32::MAX] {
        let (mut a, _, mr, _) = connected_by_number();
        for wr_id in 1..3 {
            a.post(wr_id, SendOp::Send, &[mr.part(0, 8)]);
        }
        let _ = a.sent();
        assert_eq!(a.rx_ulpdu(&farewell(claim)), RxStatus::Ok);
        assert_eq!(completed(&a), [], "{claim}");
        // A stream has only one farewell, so that a peer cannot cause repeated searches of the
        // queue.
        assert_eq!(a.rx_ulpdu(&farewell(2)), RxStatus::Ok);
        assert_eq!(completed(&a), [], "{claim}");
    }
    // A farewell may claim all messages that were sent.
    let (mut a, _, mr, _) = connected_by_number();
    for wr_id in 1..3 {
        a.post(wr_id, SendOp::Send, &[mr.part(0, 8)]);
    }
    let _ = a.sent();
    assert_eq!(a.rx_ulpdu(&farewell(2)), RxStatus::Ok);
    assert_eq!(completed(&a), [1, 2]);
}

#[test]
fn farewell_requires_connection_by_number() {
    let (mut a, mut b) = pair(STREAM);
    a.qp.complete_when_placed();
    b.qp.complete_when_placed();
    let (mr, target) = (a.mr(64, Access::LOCAL_WRITE), b.mr(64, ALL));
    b.recv(100, &[target.part(0, 8)]);
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    receive_segments(&mut b, &segments[..1]);
    assert!(!b.qp.say_farewell(false));
    // Queue pairs that are not connected by number also ignore farewells.
    assert_eq!(a.rx_ulpdu(&farewell(1)), RxStatus::Ok);
    assert_eq!(completed(&a), []);
    // A queue pair that is its own peer sends no farewell.
    let (mut a, mut b, mr, _) = connected_by_number();
    b.qp.set_own_peer(true);
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    receive_segments(&mut b, &segments[..1]);
    assert!(!b.qp.say_farewell(false));
}

/// The driver would have to send the rest of the message first, which may be long.
#[test]
fn no_farewell_inside_message() {
    let (mut a, mut b, mr, _) = connected_by_number();
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let segments = a.sent();
    receive_segments(&mut b, &segments[..1]);
    let (from, to) = (b.mr(1 << 20, Access::LOCAL_WRITE), a.mr(1 << 20, ALL));
    b.post(2, write(&to), &[from.sge()]);
    assert_eq!(b.fill(), TxFill::Ready);
    assert!(!b.qp.say_farewell(true));
}

/// The protocol's own zero-length Writes use the reserved STag.
#[test]
fn only_writes_of_program_are_counted() {
    let (_, mut b, _, target) = connected_by_number();
    let header = |stag: u32| {
        Header::Tagged(TaggedHeader {
            last: true,
            opcode: Opcode::WRITE,
            stag: iwarp_proto::ddp::Stag(stag),
            to: 0,
        })
    };
    receive_segments(&mut b, &[(header(1), Vec::new())]);
    assert!(!b.qp.say_farewell(false), "nothing has arrived");
    receive_segments(&mut b, &[(header(target.stag), Vec::new())]);
    assert!(b.qp.say_farewell(false));
    let Header::Tagged(note) = b.sent()[0].0 else {
        panic!("no note");
    };
    assert_eq!(note.to as u32, 1);
}
