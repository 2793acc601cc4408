//! Errors that only one check detects. The other checks would accept them, or refuse them for
//! another reason.

use super::harness::*;
use super::refused::assert_refused;
use crate::qp::*;
use crate::{Access, PostError, SendFlags, SendOp, SendWr, WcStatus};
use iwarp_proto::ddp::Stag;
use iwarp_proto::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Opcode, ReadRequest, TerminateCode as Code,
};
use std::vec;

/// Each segment fits the receive, but their sum does not.
#[test]
fn message_length_is_sum_of_segments() {
    for (second, fits) in [(40, true), (41, false), (99, false), (100, false)] {
        let mut rig = Rig::new();
        let mr = rig.mr(100, Access::LOCAL_WRITE);
        let before = rig.read(&mr);
        rig.recv(1, &[mr.part(0, 50), mr.part(50, 50)]);
        let first = untagged(Opcode::SEND, 0, 1, 0, false, &[7; 60]);
        assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
        let last = untagged(Opcode::SEND, 0, 1, 60, true, &vec![8; second]);
        if fits {
            assert_eq!(rig.rx_ulpdu(&last), RxStatus::Ok);
            assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
            assert_eq!(rig.host.recvs[0].byte_len, 100);
        } else {
            assert_refused(&mut rig, &last, Code::DDP_UNTAGGED_TOO_LONG);
            assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::LocalLength)]);
            assert_eq!(rig.read(&mr)[60..], before[60..]);
        }
    }
}

/// An atomic has no sink, so the STag of a Read Response is not compared.
#[test]
fn read_response_does_not_answer_atomic() {
    for stag in [0, 1, 0x5100_0001] {
        for octets in [0, 8] {
            let mut rig = Rig::new();
            let mr = rig.mr(8, Access::LOCAL_WRITE);
            let add = SendOp::FetchAdd {
                remote_addr: 0x1000,
                rkey: 7,
                add: 1,
                mask: 0,
            };
            rig.post(1, add, &[mr.sge()]);
            assert_eq!(rig.sent().len(), 1);
            let answer = tagged(Opcode::READ_RESPONSE, stag, 0, true, &vec![9; octets]);
            assert_refused(&mut rig, &answer, Code::RDMAP_UNEXPECTED_OPCODE);
            assert_eq!(brief(&rig.host.sends), [(1, WcStatus::BadResponse)]);
            assert_eq!(rig.read(&mr), [0, 1, 2, 3, 4, 5, 6, 7]);
        }
    }
}

#[test]
fn atomic_beyond_ird_changes_nothing() {
    for ird in [0, 1, 3] {
        let mut rig = Rig::with(QpConfig::default(), StreamConfig { ird, ..STREAM });
        let mr = rig.mr(8, ALL);
        let request = |msn| {
            let mut body = vec![0; AtomicRequest::LEN];
            AtomicRequest {
                op: AtomicOp::FETCH_ADD,
                request_id: msn,
                stag: Stag(mr.stag),
                to: mr.at,
                add_swap: 1,
                add_swap_mask: 0,
                compare: 0,
                compare_mask: 0,
            }
            .emit(&mut body);
            untagged(Opcode::ATOMIC_REQUEST, 1, msn, 0, true, &body)
        };
        let word = |rig: &Rig| u64::from_ne_bytes(rig.read(&mr).try_into().unwrap());
        let before = word(&rig);
        // Nothing is sent, so no request is answered.
        for n in 1..=u32::from(ird) {
            assert_eq!(rig.rx_ulpdu(&request(n)), RxStatus::Ok);
            assert_eq!(word(&rig), before + u64::from(n));
        }
        let beyond = request(u32::from(ird) + 1);
        assert_refused(&mut rig, &beyond, Code::DDP_UNTAGGED_NO_BUFFER);
        assert_eq!(word(&rig), before + u64::from(ird));
    }
}

/// A word is compared under one mask and swapped under another.
#[test]
fn swap_honors_both_masks() {
    const WORD: u64 = 0x0123_4567_89ab_cdef;
    const ALL_BITS: u64 = u64::MAX;
    let new = 0x1111_2222_3333_4444;
    // Compared value, compare mask, swap mask, and the resulting word.
    let cases = [
        (WORD, ALL_BITS, ALL_BITS, new),
        (WORD ^ 1, ALL_BITS, ALL_BITS, WORD),
        (WORD ^ 1 << 63, ALL_BITS, ALL_BITS, WORD),
        (WORD ^ 1, !1, ALL_BITS, new),
        (WORD ^ 2, !1, ALL_BITS, WORD),
        (!WORD, 0, ALL_BITS, new),
        (WORD, ALL_BITS, 0, WORD),
        (WORD, ALL_BITS, 0xff00, 0x0123_4567_89ab_44ef),
        (WORD ^ 1, ALL_BITS, 0xff00, WORD),
        (0xef, 0xff, 0xffff << 48, 0x1111_4567_89ab_cdef),
        (0xee, 0xff, 0xffff << 48, WORD),
    ];
    for (compare, compare_mask, add_swap_mask, becomes) in cases {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        for (at, octet) in (0..).zip(WORD.to_ne_bytes()) {
            rig.write(&mr, at, octet);
        }
        let mut body = vec![0; AtomicRequest::LEN];
        AtomicRequest {
            op: AtomicOp::CMP_SWAP,
            request_id: 5,
            stag: Stag(mr.stag),
            to: mr.at,
            add_swap: new,
            add_swap_mask,
            compare,
            compare_mask,
        }
        .emit(&mut body);
        let request = untagged(Opcode::ATOMIC_REQUEST, 1, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        let case = (compare, compare_mask, add_swap_mask);
        assert_eq!(rig.read(&mr), becomes.to_ne_bytes(), "{case:x?}");
        let response = AtomicResponse::parse(&rig.sent()[0].1).unwrap();
        assert_eq!((response.request_id, response.original), (5, WORD));
    }
}

#[test]
fn atomic_returns_eight_octets() {
    let add = SendOp::FetchAdd {
        remote_addr: 0x1000,
        rkey: 7,
        add: 1,
        mask: 0,
    };
    let swap = SendOp::CmpSwap {
        remote_addr: 0x1000,
        rkey: 7,
        compare: 1,
        swap: 2,
        compare_mask: u64::MAX,
        swap_mask: u64::MAX,
    };
    for op in [add, swap] {
        for len in [8, 9, 64] {
            let mut rig = Rig::new();
            let mr = rig.mr(64, Access::LOCAL_WRITE);
            rig.post(1, op, &[mr.part(0, len)]);
            let sent = rig.sent();
            let request = AtomicRequest::parse(&sent[0].1).unwrap();
            let mut body = vec![0; AtomicResponse::LEN];
            AtomicResponse {
                request_id: request.request_id,
                original: u64::from_ne_bytes([9; 8]),
            }
            .emit(&mut body);
            let answer = untagged(Opcode::ATOMIC_RESPONSE, 3, 1, 0, true, &body);
            assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
            assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
            assert_eq!(rig.host.sends[0].byte_len, 8);
            assert_eq!(rig.read(&mr)[..10], [9, 9, 9, 9, 9, 9, 9, 9, 8, 9]);
        }
        let mut rig = Rig::new();
        let mr = rig.mr(64, Access::LOCAL_WRITE);
        let flags = SendFlags::SIGNALED;
        let short = rig.try_post(1, op, flags, &[mr.part(0, 7)]);
        assert_eq!(short, Err(PostError::InvalidRequest));
    }
}

/// A placed message needs no probe, although an earlier Read delays its completion.
#[test]
fn placed_message_needs_no_probe() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    rig.post(1, read, &[mr.sge()]);
    rig.post(2, SendOp::Send, &[mr.sge()]);
    let request = ReadRequest::parse(&rig.sent()[0].1).unwrap();
    assert!(brief(&rig.host.sends).is_empty());
    rig.qp.complete_when_placed();
    assert!(!rig.qp.wants_tx());
    assert_eq!(rig.fill(), TxFill::Idle);
    let answer = tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, &[1; 8]);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    assert_eq!(
        brief(&rig.host.sends),
        [(1, WcStatus::Success), (2, WcStatus::Success)]
    );
}

#[test]
fn plan_is_unwritten_until_last_octet() {
    let mut rig = Rig::new();
    let mr = rig.mr(4000, ALL);
    assert!(!rig.qp.has_unwritten() && !rig.qp.is_segmenting());
    rig.post(1, SendOp::Send, &[mr.part(0, 1400)]);
    assert!(!rig.qp.has_unwritten() && !rig.qp.is_segmenting());
    assert_eq!(rig.fill(), TxFill::Ready);
    assert!(rig.qp.has_unwritten());
    let len = rig.plan.remaining();
    rig.write_some(1);
    assert!(rig.qp.has_unwritten());
    rig.write_some(len - 2);
    assert!(rig.qp.has_unwritten());
    rig.write_some(1);
    assert!(!rig.qp.has_unwritten());
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
    rig.post(2, SendOp::Send, &[mr.sge()]);
    assert!(rig.qp.is_segmenting());
    rig.sent();
    assert!(!rig.qp.is_segmenting());
    for (msn, size, long) in [(1, 1400, false), (2, 1500, true)] {
        let body = read_request(9, size, mr.stag, mr.at);
        let request = untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        assert_eq!(rig.qp.is_segmenting(), long, "{size}");
        rig.sent();
    }
}

#[test]
fn broken_stream_is_reported_once() {
    let mut rig = Rig::new();
    rig.qp.stream_failed(&mut rig.host);
    assert_eq!(rig.qp.take_events(), Events::FATAL | Events::DISCONNECTED);
    assert_eq!(rig.qp.fault().map(|f| f.blame), Some(Blame::Transport));
    rig.qp.stream_failed(&mut rig.host);
    assert_eq!(rig.qp.take_events(), Events::empty());
}

#[test]
fn orderly_end_is_reported_once() {
    let mut rig = Rig::new();
    rig.eof();
    assert_eq!(rig.qp.take_events(), Events::DISCONNECTED);
    rig.eof();
    assert_eq!(rig.qp.take_events(), Events::empty());
    assert!(rig.qp.fault().is_none());
}

/// A queue pair in error flushes any number of requests, so a list may exceed its queue.
#[test]
fn error_state_accepts_long_list() {
    let config = QpConfig {
        max_send_wr: 4,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    let wrs = [SendWr::new(1, SendOp::Send, &[]); 5];
    let full = Err((4, PostError::QueueFull));
    assert_eq!(rig.qp.check_sends(wrs.iter()), full);
    assert_eq!(rig.qp.check_sends(wrs[..4].iter()), Ok(()));
    rig.post(1, SendOp::Send, &[]);
    let full = Err((3, PostError::QueueFull));
    assert_eq!(rig.qp.check_sends(wrs[..4].iter()), full);
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(rig.qp.check_sends(wrs.iter()), Ok(()));
    for wr in &wrs {
        rig.qp.post_send(wr, &mut rig.host).unwrap();
    }
    assert!(rig.host.sends.iter().all(|c| c.status == WcStatus::Flushed));
    assert_eq!(rig.host.sends.len(), 6);
}
