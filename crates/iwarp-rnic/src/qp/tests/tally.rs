//! Counts of completed operations.

use super::harness::*;
use crate::qp::*;
use crate::tally::{Count, Counted};
use crate::{SendFlags, SendOp};
use iwarp_proto::rdmap::Opcode;

const LEN: u32 = 40;

fn count(succeeded: u64, failed: u64, octets: u64) -> Count {
    Count {
        succeeded,
        failed,
        octets,
    }
}

fn counts(rig: &Rig) -> [Count; 6] {
    Counted::ALL.map(|kind| rig.qp.tally(kind))
}

fn counting_pair() -> ((Rig, Mr), (Rig, Mr)) {
    let (mut a, mut b) = pair(STREAM);
    a.qp.enable_tally().unwrap();
    b.qp.enable_tally().unwrap();
    let (from, to) = (a.mr(64, ALL), b.mr(64, ALL));
    ((a, from), (b, to))
}

/// Each operation is counted once at each end, even if it is unsignaled.
#[test]
fn operations_count_at_both_ends() {
    let remote = |to: &Mr| (to.at, to.stag);
    type Make = fn((u64, u32)) -> SendOp;
    let cases: [(Make, Option<Counted>, Option<Counted>); 6] = [
        (|_| SendOp::Send, Some(Counted::Send), Some(Counted::Recv)),
        (
            |_| SendOp::SendImm(5),
            Some(Counted::Send),
            Some(Counted::Recv),
        ),
        (
            |(remote_addr, rkey)| SendOp::Write { remote_addr, rkey },
            Some(Counted::Write),
            Some(Counted::RemoteWrite),
        ),
        (
            |(remote_addr, rkey)| SendOp::Read { remote_addr, rkey },
            Some(Counted::Read),
            Some(Counted::RemoteRead),
        ),
        (
            |(remote_addr, rkey)| SendOp::FetchAdd {
                remote_addr,
                rkey,
                add: 1,
                mask: 0,
            },
            None,
            None,
        ),
        (
            |(remote_addr, rkey)| SendOp::Flush { remote_addr, rkey },
            None,
            None,
        ),
    ];
    for (make, local, remote_kind) in cases {
        for flags in [SendFlags::empty(), SendFlags::SIGNALED] {
            let ((mut a, from), (mut b, to)) = counting_pair();
            let op = make(remote(&to));
            if op.takes_receive() {
                b.recv(1, &[to.sge()]);
            }
            let sges = [from.part(0, LEN)];
            let none = matches!(op, SendOp::Flush { .. });
            a.post_flags(1, op, flags, if none { &[] } else { &sges });
            shuttle(&mut a, &mut b, 1000);
            let expect = |expected: Option<Counted>| {
                Counted::ALL.map(|kind| match Some(kind) == expected {
                    true => count(1, 0, u64::from(LEN)),
                    false => count(0, 0, 0),
                })
            };
            assert_eq!(counts(&a), expect(local), "{op:?}");
            assert_eq!(counts(&b), expect(remote_kind), "{op:?}");
        }
    }
}

#[test]
fn atomic_write_counts_as_write() {
    let ((mut a, from), (mut b, to)) = counting_pair();
    let op = SendOp::AtomicWrite {
        remote_addr: to.at,
        rkey: to.stag,
    };
    a.post_flags(1, op, SendFlags::empty(), &[from.part(0, 8)]);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(a.qp.tally(Counted::Write), count(1, 0, 8));
    assert_eq!(b.qp.tally(Counted::RemoteWrite), count(1, 0, 8));
}

/// A Write with immediate data is counted as a Write and as a receive, whose completion has the
/// length of the Write.
#[test]
fn write_immediate_counts_twice() {
    let ((mut a, from), (mut b, to)) = counting_pair();
    b.recv(1, &[]);
    let op = SendOp::WriteImm {
        remote_addr: to.at,
        rkey: to.stag,
        imm: 9,
    };
    a.post_flags(1, op, SendFlags::empty(), &[from.part(0, LEN)]);
    shuttle(&mut a, &mut b, 1000);
    let one = count(1, 0, u64::from(LEN));
    assert_eq!(a.qp.tally(Counted::Write), one);
    assert_eq!(b.qp.tally(Counted::RemoteWrite), one);
    assert_eq!(b.qp.tally(Counted::Recv), one);
}

/// A message of several segments is counted once, with all its octets. An incomplete message of the
/// peer is not counted.
#[test]
fn message_is_counted_when_complete() {
    let mut rig = Rig::new();
    rig.qp.enable_tally().unwrap();
    let mr = rig.mr(64, ALL);
    let first = tagged(Opcode::WRITE, mr.stag, mr.at, false, &[1; 24]);
    assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
    assert_eq!(rig.qp.tally(Counted::RemoteWrite), count(0, 0, 0));
    let last = tagged(Opcode::WRITE, mr.stag, mr.at + 24, true, &[2; 16]);
    assert_eq!(rig.rx_ulpdu(&last), RxStatus::Ok);
    assert_eq!(rig.qp.tally(Counted::RemoteWrite), count(1, 0, 40));
    for part in [&first, &last] {
        assert_eq!(rig.rx_ulpdu(part), RxStatus::Ok);
    }
    assert_eq!(rig.qp.tally(Counted::RemoteWrite), count(2, 0, 80));
    // Writes without payload are notes.
    let empty = tagged(Opcode::WRITE, 0, 0, true, &[]);
    assert_eq!(rig.rx_ulpdu(&empty), RxStatus::Ok);
    assert_eq!(rig.qp.tally(Counted::RemoteWrite), count(2, 0, 80));
}

#[test]
fn flushed_requests_count_as_failed() {
    let mut rig = Rig::new();
    rig.qp.enable_tally().unwrap();
    let mr = rig.mr(64, ALL);
    let (remote_addr, rkey) = (0x1000, 7);
    rig.recv(1, &[mr.sge()]);
    rig.recv(2, &[mr.sge()]);
    let none = SendFlags::empty();
    rig.post_flags(1, SendOp::Send, none, &[mr.part(0, 8)]);
    let _ = rig.sent();
    rig.post_flags(
        2,
        SendOp::Read { remote_addr, rkey },
        none,
        &[mr.part(0, 8)],
    );
    rig.post_flags(3, SendOp::Send, none, &[mr.part(0, 8)]);
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(rig.qp.tally(Counted::Send), count(1, 1, 8));
    assert_eq!(rig.qp.tally(Counted::Read), count(0, 1, 0));
    assert_eq!(rig.qp.tally(Counted::Recv), count(0, 2, 0));
    assert_eq!(rig.qp.tally(Counted::Write), count(0, 0, 0));
    // Counting continues after a reset.
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    assert_eq!(rig.qp.tally(Counted::Send), count(1, 1, 8));
    // Enabling the tally again changes nothing.
    rig.qp.enable_tally().unwrap();
    assert_eq!(rig.qp.tally(Counted::Send), count(1, 1, 8));
}

#[test]
fn nothing_is_counted_before_enabling() {
    let (mut a, mut b) = pair(STREAM);
    let (from, to) = (a.mr(64, ALL), b.mr(64, ALL));
    let op = SendOp::Write {
        remote_addr: to.at,
        rkey: to.stag,
    };
    a.post(1, op, &[from.part(0, 8)]);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(counts(&a), [Count::default(); 6]);
    a.qp.enable_tally().unwrap();
    b.qp.enable_tally().unwrap();
    assert_eq!(counts(&a), [Count::default(); 6]);
    a.post(2, op, &[from.part(0, 8)]);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(a.qp.tally(Counted::Write), count(1, 0, 8));
    assert_eq!(b.qp.tally(Counted::RemoteWrite), count(1, 0, 8));
}
