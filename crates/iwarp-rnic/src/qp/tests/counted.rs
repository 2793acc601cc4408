//! Message counters: each complete message received is counted, of any kind.

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp};
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::rdmap::{AtomicRequest, Opcode, Terminate, TerminateCode};
use std::vec::Vec;

/// All kinds of requests, with the length of the element.
fn requests(to: &Mr) -> Vec<(SendOp, u32)> {
    let (remote_addr, rkey) = (to.at, to.stag);
    let (add, mask) = (1, 0);
    std::vec![
        (SendOp::Send, 0),
        (SendOp::Send, 5000),
        (SendOp::SendImm(7), 40),
        (SendOp::Write { remote_addr, rkey }, 5000),
        (
            SendOp::WriteImm {
                remote_addr,
                rkey,
                imm: 7
            },
            5000
        ),
        (SendOp::Read { remote_addr, rkey }, 0),
        (SendOp::Read { remote_addr, rkey }, 5000),
        (
            SendOp::FetchAdd {
                remote_addr,
                rkey,
                add,
                mask
            },
            8
        ),
        (
            SendOp::CmpSwap {
                remote_addr,
                rkey,
                compare: 0,
                swap: 1,
                compare_mask: u64::MAX,
                swap_mask: u64::MAX
            },
            8
        ),
    ]
}

fn complete_messages(segments: &[(Header, Vec<u8>)]) -> u64 {
    segments.iter().filter(|(header, _)| header.last()).count() as u64
}

#[test]
fn complete_messages_are_counted_once() {
    let (mut a, mut b) = pair(STREAM);
    let (from, to) = (a.mr(5000, ALL), b.mr(5000, ALL));
    for (wr_id, (op, len)) in (0..).zip(requests(&to)) {
        b.recv(wr_id, &[to.sge()]);
        a.post(wr_id, op, &[from.part(0, len)]);
        // The request and its response, if any, until both ends send nothing.
        let (mut to_b, mut to_a) = (0, 0);
        let before = (b.qp.counters().rx_messages, a.qp.counters().rx_messages);
        loop {
            let (x, y) = (a.sent(), b.sent());
            if x.is_empty() && y.is_empty() {
                break;
            }
            to_b += complete_messages(&x);
            to_a += complete_messages(&y);
            for (header, payload) in x {
                assert_eq!(b.rx_ulpdu(&with_payload(&header, &payload)), RxStatus::Ok);
            }
            for (header, payload) in y {
                assert_eq!(a.rx_ulpdu(&with_payload(&header, &payload)), RxStatus::Ok);
            }
        }
        let after = (b.qp.counters().rx_messages, a.qp.counters().rx_messages);
        let received = (after.0 - before.0, after.1 - before.1);
        assert_eq!(received, (to_b, to_a), "{op:?}");
        let imm = matches!(op, SendOp::SendImm(_) | SendOp::WriteImm { .. });
        assert_eq!(to_b, 1 + u64::from(imm), "{op:?}");
        assert_eq!(to_a, u64::from(op.has_response()), "{op:?}");
    }
}

/// RTR messages belong to no request.
#[test]
fn protocol_messages_are_counted() {
    for rtr in [Rtr::Send, Rtr::Write, Rtr::Read] {
        let (mut a, mut b) = pair(StreamConfig {
            rtr: Some(rtr),
            ..STREAM
        });
        shuttle(&mut a, &mut b, 9);
        assert_eq!(b.qp.counters().rx_messages, 1, "{rtr:?}");
        let answers = u64::from(rtr == Rtr::Read);
        assert_eq!(a.qp.counters().rx_messages, answers, "{rtr:?}");
        assert_eq!(b.qp.counters().tx_messages, answers, "{rtr:?}");
    }
    let mut rig = Rig::new();
    let mut octets = [0; Terminate::MAX_LEN];
    let len = Terminate::new(TerminateCode::RDMAP_ACCESS).emit(&mut octets);
    let message = untagged(Opcode::TERMINATE, 2, 1, 0, true, &octets[..len]);
    let _ = rig.rx_ulpdu(&message);
    let counters = *rig.qp.counters();
    assert_eq!((counters.rx_messages, counters.terminates_received), (1, 1));
}

#[test]
fn partial_messages_are_not_counted() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let read_only = rig.mr(64, Access::REMOTE_READ);
    rig.recv(1, &[mr.sge()]);
    let first = untagged(Opcode::SEND, 0, 1, 0, false, &[1]);
    assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
    let part = tagged(Opcode::WRITE, mr.stag, mr.at, false, &[1]);
    assert_eq!(rig.rx_ulpdu(&part), RxStatus::Ok);
    assert_eq!(rig.qp.counters().rx_messages, 0);
    let refused = tagged(Opcode::WRITE, read_only.stag, read_only.at, true, &[1]);
    assert_eq!(rig.rx_ulpdu(&refused), RxStatus::Failed);
    assert_eq!(rig.qp.counters().rx_messages, 0);
}

#[test]
fn refused_requests_are_not_served() {
    let size = 8;
    for (refused, asked_before) in [(0, 0), (1, 2), (2, u32::from(STREAM.ird))] {
        let mut rig = Rig::new();
        let mr = rig.mr(64, ALL);
        let local_only = rig.mr(64, Access::LOCAL_WRITE);
        let ask = |rig: &mut Rig, n: u32, body: &[u8], opcode| {
            rig.rx_ulpdu(&untagged(opcode, 1, n + 1, 0, true, body))
        };
        for n in 0..asked_before {
            let body = read_request(9 + n, size, mr.stag, mr.at);
            assert_eq!(ask(&mut rig, n, &body, Opcode::READ_REQUEST), RxStatus::Ok);
        }
        let atomic = AtomicRequest {
            stag: Stag(local_only.stag),
            to: local_only.at,
            ..AtomicRequest::default()
        };
        let mut octets = [0; AtomicRequest::LEN];
        atomic.emit(&mut octets);
        let (body, opcode) = match refused {
            // The memory table refuses a Read, and an atomic.
            0 => (
                read_request(8, size, local_only.stag, local_only.at),
                Opcode::READ_REQUEST,
            ),
            1 => (octets.to_vec(), Opcode::ATOMIC_REQUEST),
            // One request too many.
            _ => (read_request(8, size, mr.stag, mr.at), Opcode::READ_REQUEST),
        };
        let status = ask(&mut rig, asked_before, &body, opcode);
        assert_eq!(status, RxStatus::Failed, "{refused}");
        let counters = *rig.qp.counters();
        let served = (counters.rx_requests, counters.rx_messages);
        assert_eq!(served, (asked_before.into(), asked_before.into()));
    }
}
