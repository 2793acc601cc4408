//! Queries about a queue pair and its stream, and prefetching.

use super::harness::*;
use crate::qp::*;
use crate::{SendOp, WcStatus};
use iwarp_proto::rdmap::Opcode;
use std::cell::RefCell;
use std::string::ToString;
use std::vec::Vec;

/// Returns whether the queue pair has a stream, is ending it, has shut down its direction, and has
/// to send a Terminate.
fn stream(rig: &Rig) -> [bool; 4] {
    let qp = &rig.qp;
    [
        qp.has_stream(),
        qp.is_ending(),
        qp.is_shut_down(),
        qp.owes_terminate(),
    ]
}

const NO_STREAM: [bool; 4] = [false; 4];
const IN_OPERATION: [bool; 4] = [true, false, false, false];
const ENDING: [bool; 4] = [true, true, false, false];
const SHUT_DOWN: [bool; 4] = [true, true, true, false];
const OWING: [bool; 4] = [true, true, false, true];

#[test]
fn queries_follow_stream() {
    let mut rig = Rig::fresh(QpConfig::default());
    assert_eq!(stream(&rig), NO_STREAM);
    rig.start(STREAM);
    assert_eq!(stream(&rig), IN_OPERATION);
    // A graceful end.
    rig.post(1, SendOp::Send, &[]);
    rig.qp.close(&mut rig.host);
    assert_eq!(stream(&rig), ENDING);
    let _ = rig.sent();
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    assert_eq!(stream(&rig), ENDING);
    rig.qp.shutdown_done(&mut rig.host);
    assert_eq!(stream(&rig), SHUT_DOWN);
    rig.eof();
    assert_eq!(stream(&rig), SHUT_DOWN);
    rig.qp.stream_gone(&mut rig.host);
    assert_eq!(stream(&rig), NO_STREAM);
    let mut rig = Rig::new();
    assert_eq!(rig.rx_ulpdu(&send(7, &[])), RxStatus::Failed);
    assert_eq!(stream(&rig), OWING);
    assert_eq!(rig.fill(), TxFill::Ready);
    assert_eq!(stream(&rig), ENDING);
    assert_eq!(rig.terminate().code.layer, 1);
    assert_eq!(stream(&rig), ENDING);
    // A stream that was given up.
    let mut rig = Rig::new();
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    assert_eq!(stream(&rig), ENDING);
    rig.qp.stream_gone(&mut rig.host);
    assert_eq!(stream(&rig), NO_STREAM);
}

#[test]
fn posted_receives_are_counted() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    for posted in 1..=3 {
        rig.recv(u64::from(posted), &[mr.sge()]);
        assert_eq!(rig.qp.receives_posted(), posted);
    }
    // The first receive is being filled, and is no longer posted.
    let first = untagged(Opcode::SEND, 0, 1, 0, false, &[1]);
    assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
    assert_eq!(rig.qp.receives_posted(), 2);
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(rig.qp.receives_posted(), 0);
    let flushed = [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Flushed));
    assert_eq!(brief(&rig.host.recvs), flushed);
}

#[test]
fn reset_clears_alignment() {
    let mut rig = Rig::new();
    assert_eq!(rig.qp.alignment(), None);
    // FPDUs are built for segments of 1460 octets.
    rig.qp.align(1459);
    assert_eq!(rig.qp.alignment(), None);
    for segment in [1460, 9000] {
        rig.qp.align(segment);
        assert_eq!(rig.qp.alignment(), Some(segment));
    }
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.qp.stream_gone(&mut rig.host);
    rig.start(STREAM);
    assert_eq!(rig.qp.alignment(), None);
}

/// A changed segment size matters only to messages of several segments.
#[test]
fn only_long_messages_are_segmenting() {
    // MULPDU is 1454, and the header of a Send has 18 octets.
    for (len, segmented) in [(0, false), (1436, false), (1437, true), (5000, true)] {
        let mut rig = Rig::new();
        let mr = rig.mr(5000, ALL);
        assert!(!rig.qp.is_segmenting());
        rig.post(1, SendOp::Send, &[mr.part(0, len)]);
        assert_eq!(rig.qp.is_segmenting(), segmented, "a Send of {len}");
        let _ = rig.sent();
        assert!(!rig.qp.is_segmenting());
        let request = read_request(9, len, mr.stag, mr.at);
        let request = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &request);
        assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        assert_eq!(rig.qp.is_segmenting(), segmented, "a response of {len}");
        let _ = rig.sent();
        assert!(!rig.qp.is_segmenting());
    }
}

/// The next slots to be posted to, and the receive for the next message, are prefetched.
#[test]
fn next_requests_are_prefetched() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    for wr_id in 0..3 {
        let fetched = RefCell::new(Vec::new());
        rig.qp.prefetch(|at| fetched.borrow_mut().push(at));
        let fetched = fetched.into_inner();
        rig.post(wr_id, SendOp::Send, &[mr.sge()]);
        rig.recv(wr_id, &[mr.sge()]);
        let (_, slot, place) = rig.qp.sq.next_with_place().unwrap();
        let sge = rig.qp.sq.sge_at(place).unwrap();
        assert!(fetched.contains(&core::ptr::from_ref(slot).cast()));
        assert!(fetched.contains(&core::ptr::from_ref(sge).cast()));
        // Slot and element of the next request, and of the receives at both ends of their queue.
        assert_eq!(fetched.len(), 6);
        let _ = rig.sent();
    }
}

#[test]
fn invalid_transition_message() {
    let mut rig = Rig::fresh(QpConfig::default());
    let refused = rig.qp.modify(State::Rts, &mut rig.host).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the verbs do not allow this change of state"
    );
}
