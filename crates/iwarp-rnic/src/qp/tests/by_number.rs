//! Queue pairs connected by number: notes to the peer (about Sends without a receive, and about the
//! end), absent peers, and queue pairs that are their own peer.

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp, Time, WcStatus};
use core::time::Duration;
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Opcode, TerminateCode as Code};

const MS: Duration = Duration::from_millis(1);

fn set_up_by_number(rig: &mut Rig) {
    rig.qp.complete_when_placed();
    rig.qp.set_by_number();
}

/// Returns two ends connected by number, and a region of the first one.
fn connected_by_number() -> (Rig, Rig, Mr) {
    let (mut a, mut b) = pair(STREAM);
    set_up_by_number(&mut a);
    set_up_by_number(&mut b);
    let mr = a.mr(64, Access::LOCAL_WRITE);
    (a, b, mr)
}

fn write(rig: &mut Rig, wr_id: u64, mr: &Mr, to: &Mr) {
    let op = SendOp::Write {
        remote_addr: to.sge().addr,
        rkey: to.sge().lkey,
    };
    rig.post(wr_id, op, &[mr.part(0, 8)]);
}

/// Returns a queue pair in RTS that is its own peer, with a region of all rights.
fn own_peer() -> (Rig, Mr) {
    let mut rig = Rig::fresh(QpConfig::default());
    set_up_by_number(&mut rig);
    rig.qp.set_own_peer(true);
    rig.start(STREAM);
    let mr = rig.mr(64, Access::all() - Access::ZERO_BASED);
    (rig, mr)
}

/// Moves octets from the queue pair to itself until it sends nothing.
fn circulate(rig: &mut Rig) {
    for _ in 0..100 {
        let octets = rig.octets_out();
        if octets.is_empty() {
            return;
        }
        let _ = rig.rx(&octets);
    }
    panic!("the exchange does not end");
}

#[test]
fn requests_before_held_send_complete() {
    let (mut a, mut b, mr) = connected_by_number();
    let target = b.mr(64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    b.recv(20, &[target.part(0, 8)]);
    write(&mut a, 1, &mr, &target);
    for wr_id in 2..5 {
        a.post(wr_id, SendOp::Send, &[mr.part(0, 8)]);
    }
    shuttle(&mut a, &mut b, 1000);
    let done = |ids: &[u64]| {
        ids.iter()
            .map(|id| (*id, WcStatus::Success))
            .collect::<std::vec::Vec<_>>()
    };
    assert_eq!(brief(&a.host.sends), done(&[1, 2]));
    b.recv(21, &[target.part(0, 8)]);
    assert_eq!(b.offer_again(), RxStatus::Held);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(brief(&a.host.sends), done(&[1, 2, 3]));
    b.recv(22, &[target.part(0, 8)]);
    assert_eq!(b.offer_again(), RxStatus::Ok);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(brief(&a.host.sends), done(&[1, 2, 3, 4]));
}

#[test]
fn send_is_held_until_retries_end() {
    let (mut a, mut b, mr) = connected_by_number();
    b.qp.set_min_rnr_timer(MS);
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    shuttle(&mut a, &mut b, 1000);
    b.qp.on_time(Time::from_nanos(1), &mut b.host);
    assert_eq!(b.qp.poll_at(), None);
    b.qp.sender_closed();
    b.expire_held_send();
    assert_eq!(b.qp.state(), State::Rts);
    let target = b.mr(64, Access::LOCAL_WRITE);
    b.recv(20, &[target.part(0, 8)]);
    assert_eq!(b.offer_again(), RxStatus::Ok);
    assert_eq!(brief(&b.host.recvs), [(20, WcStatus::Success)]);
}

#[test]
fn retries_note_is_sent_once() {
    let (mut a, mut b, mr) = connected_by_number();
    a.qp.set_rnr_retry(3);
    b.qp.set_min_rnr_timer(MS);
    assert!(!a.qp.wants_tx(), "nothing is to be sent before a request");
    for wr_id in 1..3 {
        a.post(wr_id, SendOp::Send, &[mr.part(0, 8)]);
    }
    let octets = a.octets_out();
    let _ = b.rx(&octets);
    let start = Time::from_nanos(1);
    b.qp.on_time(start, &mut b.host);
    assert_eq!(b.qp.poll_at(), Some(start.after(3 * MS)));
    b.qp.on_time(start.after(2 * MS), &mut b.host);
    assert_eq!(b.qp.state(), State::Rts);
    b.qp.on_time(start.after(3 * MS), &mut b.host);
    b.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_NO_BUFFER);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&a.host.sends),
        [(1, WcStatus::ReceiverNotReady), (2, WcStatus::Flushed)]
    );
}

/// A sender that has announced its number of retries gets the time for them, even after it has
/// closed.
#[test]
fn closed_sender_keeps_its_retries() {
    let (mut a, mut b, mr) = connected_by_number();
    a.qp.set_rnr_retry(3);
    // The timer is longer than a queue pair holds a Send by default.
    let timer = Duration::from_secs(60);
    b.qp.set_min_rnr_timer(timer);
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let octets = a.octets_out();
    assert_eq!(b.rx(&octets), RxStatus::Held);
    let start = Time::from_nanos(1);
    b.qp.on_time(start, &mut b.host);
    b.qp.sender_closed();
    assert_eq!(b.qp.poll_at(), Some(start.after(3 * timer)));
    b.qp.on_time(start.after(2 * timer), &mut b.host);
    assert_eq!(b.qp.state(), State::Rts);
    b.qp.on_time(start.after(3 * timer), &mut b.host);
    b.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_NO_BUFFER);
}

#[test]
fn sender_without_retries_is_refused_immediately() {
    // The receiver's timer has no effect.
    for timer in [Duration::ZERO, MS, Duration::MAX] {
        let (mut a, mut b, mr) = connected_by_number();
        a.qp.set_rnr_retry(0);
        b.qp.set_min_rnr_timer(timer);
        a.post(1, SendOp::Send, &[mr.part(0, 8)]);
        let sent = a.octets_out();
        assert_eq!(b.rx(&sent), RxStatus::Failed);
        shuttle(&mut a, &mut b, 1000);
        assert_eq!(brief(&a.host.sends), [(1, WcStatus::ReceiverNotReady)]);
    }
}

/// Notes apply to one connection: the next connection may be to another peer.
#[test]
fn new_stream_starts_without_notes() {
    let reset_and_restart = |rig: &mut Rig| {
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        rig.qp.stream_gone(&mut rig.host);
        rig.host = TestHost::default();
        rig.offered.clear();
        rig.start(STREAM);
    };
    // The sender sends its number of retries again.
    let (mut a, mut b, mr) = connected_by_number();
    a.qp.set_rnr_retry(0);
    for _ in 0..2 {
        a.post(1, SendOp::Send, &[mr.part(0, 8)]);
        let opcodes = a.sent();
        assert_eq!(opcodes[0].0.opcode(), Opcode::WRITE, "the note");
        assert_eq!(opcodes[1].0.opcode(), Opcode::SEND);
        reset_and_restart(&mut a);
    }
    // The receiver assumes that a sender without a note retries forever.
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let octets = a.octets_out();
    assert_eq!(b.rx(&octets), RxStatus::Failed);
    reset_and_restart(&mut b);
    assert_eq!(b.rx_ulpdu(&send(1, &[1])), RxStatus::Held);
    // The held Send is only reported on its own stream.
    reset_and_restart(&mut b);
    assert!(!b.qp.wants_tx() && b.sent().is_empty());

    // Message sequence numbers start again, so the same number may be reported again.
    let (mut a, ..) = connected_by_number();
    let mr = a.mr(8, Access::LOCAL_WRITE);
    for _ in 0..2 {
        for wr_id in 1..4 {
            a.post(wr_id, SendOp::Send, &[mr.sge()]);
        }
        a.sent();
        assert!(brief(&a.host.sends).is_empty());
        let held = u64::from(u32::from_be_bytes(*b"held")) << 32 | 3;
        let note = tagged(Opcode::WRITE, 0, held, true, &[]);
        assert_eq!(a.rx_ulpdu(&note), RxStatus::Ok);
        let done = [1, 2].map(|wr_id| (wr_id, WcStatus::Success));
        assert_eq!(brief(&a.host.sends), done);
        reset_and_restart(&mut a);
    }
    // A farewell is accepted on each new stream.
    for _ in 0..2 {
        for wr_id in 1..4 {
            a.post(wr_id, SendOp::Send, &[mr.sge()]);
        }
        a.sent();
        let arrived = u64::from(u32::from_be_bytes(*b"done")) << 32 | 3;
        let note = tagged(Opcode::WRITE, 0, arrived, true, &[]);
        assert_eq!(a.rx_ulpdu(&note), RxStatus::Ok);
        let done = [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success));
        assert_eq!(brief(&a.host.sends), done);
        reset_and_restart(&mut a);
    }
}

/// The peer counts an RTR message that is a Send, but it belongs to no request.
#[test]
fn farewell_counts_rtr_message() {
    for (arrived, completes) in [(0, false), (1, false), (2, true), (3, false)] {
        let mut rig = Rig::fresh(QpConfig::default());
        set_up_by_number(&mut rig);
        rig.start(StreamConfig {
            rtr: Some(Rtr::Send),
            ..STREAM
        });
        rig.post(1, SendOp::Send, &[]);
        let opcodes: std::vec::Vec<_> = rig.sent().iter().map(|(h, _)| h.opcode()).collect();
        assert_eq!(opcodes[..2], [Opcode::SEND, Opcode::SEND]);
        let to = u64::from(u32::from_be_bytes(*b"done")) << 32 | arrived;
        let note = tagged(Opcode::WRITE, 0, to, true, &[]);
        assert_eq!(rig.rx_ulpdu(&note), RxStatus::Ok);
        let done = [(1, WcStatus::Success)];
        assert_eq!(brief(&rig.host.sends), done[..usize::from(completes)]);
    }
}

/// If the stream has failed earlier, an absent peer does not change the statuses.
#[test]
fn earlier_error_outranks_absent_peer() {
    let config = QpConfig {
        max_send_wr: 100,
        budget: Budget {
            completions: 3,
            ..Budget::DEFAULT
        },
        ..QpConfig::default()
    };
    let mut rig = Rig::fresh(config);
    set_up_by_number(&mut rig);
    rig.start(STREAM);
    for wr_id in 0..20 {
        rig.post(wr_id, SendOp::Send, &[]);
    }
    assert_eq!(rig.rx_ulpdu(&send(7, &[])), RxStatus::Failed);
    assert!(rig.qp.completions_due());
    rig.qp.blame_absent_peer();
    while rig.qp.completions_due() {
        let _ = rig.qp.complete_due(&mut rig.host);
    }
    assert_eq!(rig.host.sends.len(), 20);
    assert!(rig.host.sends.iter().all(|c| c.status == WcStatus::Flushed));
}

#[test]
fn note_precedes_request_once() {
    let (mut a, _, mr) = connected_by_number();
    a.qp.set_rnr_retry(3);
    for wr_id in 1..3 {
        a.post(wr_id, SendOp::Send, &[mr.part(0, 8)]);
    }
    let opcodes: std::vec::Vec<_> = a.sent().iter().map(|(h, _)| h.opcode()).collect();
    let expected = [
        Opcode::WRITE,
        Opcode::SEND,
        Opcode::SEND,
        Opcode::READ_REQUEST,
    ];
    assert_eq!(opcodes, expected);
}

#[test]
fn invalid_notes_are_ignored() {
    let note = |to: u64| tagged(Opcode::WRITE, 1, to, true, &[]);
    let kind = |name: &[u8; 4], content: u32| {
        u64::from(u32::from_be_bytes(*name)) << 32 | u64::from(content)
    };
    let (mut a, _, mr) = connected_by_number();
    a.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let _ = a.octets_out();
    // The only message has number 1, and the number of retries is at most seven.
    for to in [
        kind(b"held", 0),
        kind(b"held", 1),
        kind(b"held", 2),
        kind(b"held", u32::MAX),
        kind(b"rnr#", 8),
        kind(b"rnr#", 0x0100_0003),
        kind(b"else", 1),
    ] {
        assert_eq!(a.rx_ulpdu(&note(to)), RxStatus::Ok);
    }
    assert_eq!(brief(&a.host.sends), []);
    assert_eq!(a.rx_ulpdu(&send(1, b"abcd")), RxStatus::Held);
    a.expire_held_send();
    assert_eq!(a.qp.state(), State::Rts);
    // A connection of the connection manager ignores notes.
    let mut rig = Rig::new();
    assert_eq!(rig.rx_ulpdu(&note(kind(b"rnr#", 0))), RxStatus::Ok);
    assert_eq!(rig.rx_ulpdu(&send(1, b"abcd")), RxStatus::Held);
    assert_eq!(rig.sent(), []);
}

#[test]
fn absent_peer_fails_oldest_request() {
    let mut rig = Rig::fresh(QpConfig::default());
    set_up_by_number(&mut rig);
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.qp.modify(State::Init, &mut rig.host).unwrap();
    rig.qp.await_stream().unwrap();
    rig.qp.modify(State::Rts, &mut rig.host).unwrap();
    rig.recv(9, &[mr.part(0, 8)]);
    for wr_id in 1..3 {
        rig.post(wr_id, SendOp::Send, &[mr.part(0, 8)]);
    }
    rig.qp.fail_absent_peer(&mut rig.host);
    assert_eq!(
        brief(&rig.host.sends),
        [
            (1, WcStatus::TransportRetryExceeded),
            (2, WcStatus::Flushed)
        ]
    );
    assert_eq!(brief(&rig.host.recvs), [(9, WcStatus::Flushed)]);
    assert_eq!(rig.qp.state(), State::Error);
}

#[test]
fn own_peer_serves_requests() {
    let (mut rig, mr) = own_peer();
    rig.recv(20, &[mr.part(8, 8)]);
    rig.write(&mr, 0, 7);
    rig.post(1, SendOp::Send, &[mr.part(0, 8)]);
    let read = SendOp::Read {
        remote_addr: mr.part(0, 8).addr,
        rkey: mr.sge().lkey,
    };
    rig.post(2, read, &[mr.part(16, 8)]);
    let add = SendOp::FetchAdd {
        remote_addr: mr.part(24, 8).addr,
        rkey: mr.sge().lkey,
        add: 3,
        mask: 0,
    };
    rig.post(3, add, &[mr.part(32, 8)]);
    circulate(&mut rig);
    let success = WcStatus::Success;
    assert_eq!(brief(&rig.host.recvs), [(20, success)]);
    assert_eq!(
        brief(&rig.host.sends),
        [(1, success), (2, success), (3, success)]
    );
    let memory = rig.read(&mr);
    assert_eq!((memory[8], memory[16]), (7, 7));
    // The region starts with the values 0, 1, 2 …
    assert_eq!((memory[24], memory[32]), (27, 24));
}

/// The refused request gets the same status as with another peer, although requester and responder
/// are one queue pair.
#[test]
fn own_peer_reports_refusal() {
    for kind in 0..3 {
        let (mut rig, mr) = own_peer();
        let wrong = mr.sge().lkey ^ 0x100;
        write(&mut rig, 1, &mr, &mr);
        let remote_addr = mr.sge().addr;
        let (op, status) = match kind {
            0 => (
                SendOp::Write {
                    remote_addr,
                    rkey: wrong,
                },
                WcStatus::RemoteAccess,
            ),
            1 => (
                SendOp::Read {
                    remote_addr,
                    rkey: wrong,
                },
                WcStatus::RemoteAccess,
            ),
            _ => {
                rig.recv(20, &[mr.part(0, 4)]);
                (SendOp::Send, WcStatus::RemoteInvalidRequest)
            }
        };
        rig.post(2, op, &[mr.part(0, 8)]);
        write(&mut rig, 3, &mr, &mr);
        circulate(&mut rig);
        assert_eq!(
            brief(&rig.host.sends),
            [(1, WcStatus::Success), (2, status), (3, WcStatus::Flushed)]
        );
        if kind == 2 {
            assert_eq!(brief(&rig.host.recvs), [(20, WcStatus::LocalLength)]);
        }
        assert_eq!(rig.qp.state(), State::Error);
    }
}

#[test]
fn own_held_send_completes_earlier_requests() {
    let (mut rig, mr) = own_peer();
    write(&mut rig, 1, &mr, &mr);
    rig.post(2, SendOp::Send, &[mr.part(0, 8)]);
    circulate(&mut rig);
    assert_eq!(rig.qp.rx_interest(), RxInterest::Held);
    // The driver calls this when a hold starts.
    rig.qp.on_time(Time::from_nanos(1), &mut rig.host);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
    assert!(
        rig.sent()
            .iter()
            .all(|(h, _)| matches!(h, Header::Untagged(_)))
    );
    rig.recv(20, &[mr.part(8, 8)]);
    assert_eq!(rig.offer_again(), RxStatus::Ok);
    circulate(&mut rig);
    assert_eq!(brief(&rig.host.sends)[1..], [(2, WcStatus::Success)]);
    assert_eq!(brief(&rig.host.recvs), [(20, WcStatus::Success)]);
}

/// Seven or more retries mean forever, which is the receiver's default, so no note is sent.
#[test]
fn endless_retries_send_no_note() {
    for (count, noted) in [
        (0, true),
        (1, true),
        (6, true),
        (7, false),
        (8, false),
        (255, false),
    ] {
        let (mut a, _, mr) = connected_by_number();
        a.qp.set_rnr_retry(count);
        a.post(1, SendOp::Send, &[mr.part(0, 8)]);
        let (first, _) = a.sent()[0];
        assert_eq!(first.opcode() == Opcode::WRITE, noted, "{count}");
        let Header::Tagged(note) = first else {
            continue;
        };
        let content = u64::from(u32::from_be_bytes(*b"rnr#")) << 32 | u64::from(count);
        assert_eq!(note.to, content);
    }
}

#[test]
fn held_message_is_searched_once() {
    let (mut a, _, mr) = connected_by_number();
    let held = |msn: u64| {
        let to = u64::from(u32::from_be_bytes(*b"held")) << 32 | msn;
        tagged(Opcode::WRITE, 0, to, true, &[])
    };
    // The note is about a message that is not sent yet, so nothing is found.
    assert_eq!(a.rx_ulpdu(&held(3)), RxStatus::Ok);
    for wr_id in 1..5 {
        a.post(wr_id, SendOp::Send, &[mr.part(0, 8)]);
    }
    let _ = a.sent();
    for msn in [3, 3, 2, 1, 0] {
        assert_eq!(a.rx_ulpdu(&held(msn)), RxStatus::Ok);
        assert_eq!(brief(&a.host.sends), [], "{msn}");
    }
    assert_eq!(a.rx_ulpdu(&held(4)), RxStatus::Ok);
    let done = [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success));
    assert_eq!(brief(&a.host.sends), done);
}
