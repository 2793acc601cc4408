//! Slots that are held until the driver reports that their completions were polled
//! ([`QpConfig::hold_slots`]).

use super::harness::*;
use crate::qp::*;
use crate::{PostError, SendFlags, SendOp, WcStatus};
use std::vec::Vec;

const DEPTH: u32 = 4;

fn rig_holding_slots(signal_all: bool) -> Rig {
    let config = QpConfig {
        max_send_wr: DEPTH,
        max_recv_wr: DEPTH,
        signal_all,
        hold_slots: true,
        ..QpConfig::default()
    };
    Rig::with(config, STREAM)
}

/// Posts Sends with these flags and sends them. Returns how many were accepted.
fn send_all(rig: &mut Rig, flags: &[SendFlags]) -> usize {
    let mut posted = 0;
    for flags in flags {
        match rig.try_post(1, SendOp::Send, *flags, &[]) {
            Ok(()) => posted += 1,
            Err(e) => {
                assert_eq!(e, PostError::QueueFull);
                break;
            }
        }
    }
    rig.sent();
    posted
}

/// Takes the completions of the send queue. Returns how many slots each one frees; `from` is the
/// position before the first.
fn freed(rig: &mut Rig, from: &mut u32) -> Vec<u32> {
    let sends = core::mem::take(&mut rig.host.sends);
    let more = |position: u32| position.wrapping_sub(core::mem::replace(from, position));
    sends.iter().map(|cqe| cqe.position).map(more).collect()
}

const SIGNALED: SendFlags = SendFlags::SIGNALED;
const UNSIGNALED: SendFlags = SendFlags::empty();

#[test]
fn sent_requests_hold_their_slots() {
    let mut rig = rig_holding_slots(true);
    let mut from = rig.qp.send_position();
    assert_eq!(send_all(&mut rig, &[UNSIGNALED; 9]), 4);
    assert_eq!(freed(&mut rig, &mut from), [1; 4]);
    assert_eq!(send_all(&mut rig, &[UNSIGNALED; 9]), 0);
    assert!(rig.qp.has_send_room(0) && !rig.qp.has_send_room(1));
    rig.qp.release_sends(3);
    assert!(rig.qp.has_send_room(3) && !rig.qp.has_send_room(4));
    assert_eq!(send_all(&mut rig, &[UNSIGNALED; 9]), 3);
    // No more slots are freed than were held.
    rig.qp.release_sends(100);
    assert_eq!(send_all(&mut rig, &[UNSIGNALED; 9]), 4);
}

#[test]
fn completion_frees_unsignaled_requests_before_it() {
    let mut rig = rig_holding_slots(false);
    let mut from = rig.qp.send_position();
    assert_eq!(
        send_all(&mut rig, &[UNSIGNALED, UNSIGNALED, SIGNALED, UNSIGNALED]),
        4
    );
    assert_eq!(freed(&mut rig, &mut from), [3]);
    rig.qp.release_sends(3);
    assert_eq!(
        send_all(&mut rig, &[SIGNALED, SIGNALED, UNSIGNALED, SIGNALED]),
        3
    );
    assert_eq!(freed(&mut rig, &mut from), [2, 1]);
    rig.qp.release_sends(3);
    assert_eq!(send_all(&mut rig, &[UNSIGNALED; 9]), 3);
    assert_eq!(freed(&mut rig, &mut from), []);
    assert_eq!(send_all(&mut rig, &[SIGNALED]), 0);
}

/// A flush completes the unsent requests, and the first of them frees the unsignaled ones before
/// it.
#[test]
fn flushed_requests_hold_their_slots() {
    let mut rig = rig_holding_slots(false);
    let mut from = rig.qp.send_position();
    assert_eq!(send_all(&mut rig, &[UNSIGNALED, UNSIGNALED]), 2);
    rig.post_flags(1, SendOp::Send, UNSIGNALED, &[]);
    rig.post_flags(2, SendOp::Send, UNSIGNALED, &[]);
    rig.recv(7, &[]);
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(freed(&mut rig, &mut from), [3, 1]);
    assert_eq!(
        rig.try_post(3, SendOp::Send, SIGNALED, &[]),
        Err(PostError::QueueFull)
    );
    let wr = crate::SendWr::send(3, &[]);
    let refused = Err((0, PostError::QueueFull));
    assert_eq!(rig.qp.check_sends([wr].iter()), refused);
    rig.qp.release_sends(4);
    assert_eq!(rig.qp.check_sends([wr; 4].iter()), Ok(()));
    assert_eq!(
        rig.qp.check_sends([wr; 5].iter()),
        Err((4, PostError::QueueFull))
    );
    assert_eq!(send_all(&mut rig, &[SIGNALED; 9]), 4);
    assert_eq!(freed(&mut rig, &mut from), [1; 4]);
    // Receives also hold their slots. One of them was flushed.
    let receive = |rig: &mut Rig| {
        let wr = crate::RecvWr {
            wr_id: 1,
            sges: &[],
        };
        rig.qp.post_recv(&wr, &mut rig.host)
    };
    for _ in 0..3 {
        assert_eq!(receive(&mut rig), Ok(()));
    }
    assert_eq!(receive(&mut rig), Err(PostError::QueueFull));
    rig.qp.release_receives(1);
    assert_eq!(receive(&mut rig), Ok(()));
    assert_eq!(receive(&mut rig), Err(PostError::QueueFull));
    let recvs = brief(&rig.host.recvs);
    assert_eq!(recvs.len(), 5);
    assert!(recvs.iter().all(|(_, status)| *status == WcStatus::Flushed));
}

#[test]
fn taken_receives_hold_their_slots() {
    let mut rig = rig_holding_slots(false);
    for wr_id in 0..4 {
        rig.recv(wr_id, &[]);
    }
    let full = |rig: &Rig| !rig.qp.has_receive_room(1);
    assert!(full(&rig));
    for msn in 1..=3 {
        assert_eq!(rig.rx_ulpdu(&send(msn, &[])), RxStatus::Ok);
        assert!(full(&rig));
    }
    rig.qp.release_receives(2);
    assert!(rig.qp.has_receive_room(2) && !rig.qp.has_receive_room(3));
}

#[test]
fn reset_frees_all_slots() {
    let mut rig = rig_holding_slots(false);
    assert_eq!(send_all(&mut rig, &[UNSIGNALED; 4]), 4);
    for wr_id in 0..4 {
        rig.recv(wr_id, &[]);
    }
    assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Ok);
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    assert!(rig.qp.has_send_room(4) && rig.qp.has_receive_room(4));
    rig.host.sends.clear();
    let mut from = rig.qp.send_position();
    rig.qp.modify(State::Init, &mut rig.host).unwrap();
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(send_all(&mut rig, &[SIGNALED]), 1);
    assert_eq!(freed(&mut rig, &mut from), [1]);
}

#[test]
fn slots_are_freed_without_hold_option() {
    let config = QpConfig {
        max_send_wr: DEPTH,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    for _ in 0..9 {
        assert_eq!(send_all(&mut rig, &[UNSIGNALED; 3]), 3);
        assert!(rig.qp.has_send_room(4));
    }
}
