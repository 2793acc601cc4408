//! Acknowledged mode: Sends and Writes complete when the peer has placed them.

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendFlags, SendOp, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Opcode, ReadRequest, TerminateCode as Code};
use std::vec;
use std::vec::Vec;

fn acknowledged_rig(config: QpConfig, stream: StreamConfig) -> Rig {
    let mut rig = Rig::fresh(config);
    rig.qp.complete_when_placed();
    rig.start(stream);
    rig
}

/// Sends everything that is due. Returns the opcodes, and the Read Requests among the messages.
fn send_all(rig: &mut Rig) -> (Vec<Opcode>, Vec<ReadRequest>) {
    let sent = rig.sent();
    let opcodes = sent.iter().map(|(h, _)| h.opcode()).collect();
    let reads = sent
        .iter()
        .filter(|(h, _)| h.opcode() == Opcode::READ_REQUEST);
    (
        opcodes,
        reads.filter_map(|(_, p)| ReadRequest::parse(p)).collect(),
    )
}

fn answer(rig: &mut Rig, request: &ReadRequest) {
    let ulpdu = tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, &[]);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
}

fn write_to(to: u64, rkey: u32) -> SendOp {
    SendOp::Write {
        remote_addr: to,
        rkey,
    }
}

#[test]
fn write_completes_when_probe_is_answered() {
    let mut rig = acknowledged_rig(QpConfig::default(), STREAM);
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.post(1, write_to(0x1000, 7), &[mr.part(0, 8)]);
    rig.post(2, SendOp::Send, &[mr.part(0, 8)]);
    let (opcodes, probes) = send_all(&mut rig);
    assert_eq!(opcodes, [Opcode::WRITE, Opcode::SEND, Opcode::READ_REQUEST]);
    assert_eq!(probes[0].size, 0);
    assert_eq!(brief(&rig.host.sends), []);
    // Only one probe is in flight at a time.
    rig.post(3, SendOp::Send, &[mr.part(0, 8)]);
    assert_eq!(send_all(&mut rig).0, [Opcode::SEND]);
    answer(&mut rig, &probes[0]);
    assert_eq!(
        brief(&rig.host.sends),
        [(1, WcStatus::Success), (2, WcStatus::Success)]
    );
    let (opcodes, probes) = send_all(&mut rig);
    assert_eq!(opcodes, [Opcode::READ_REQUEST]);
    answer(&mut rig, &probes[0]);
    assert_eq!(brief(&rig.host.sends)[2..], [(3, WcStatus::Success)]);
    assert_eq!(send_all(&mut rig).0, []);
}

#[test]
fn program_read_acknowledges_writes() {
    let mut rig = acknowledged_rig(QpConfig::default(), STREAM);
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.post(1, write_to(0x1000, 7), &[mr.part(0, 8)]);
    let read = SendOp::Read {
        remote_addr: 0x1000,
        rkey: 7,
    };
    rig.post(2, read, &[mr.part(8, 4)]);
    let (opcodes, reads) = send_all(&mut rig);
    assert_eq!(opcodes, [Opcode::WRITE, Opcode::READ_REQUEST]);
    assert_eq!(brief(&rig.host.sends), []);
    let ulpdu = tagged(
        Opcode::READ_RESPONSE,
        reads[0].sink_stag.0,
        0,
        true,
        &[5; 4],
    );
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    assert_eq!(
        brief(&rig.host.sends),
        [(1, WcStatus::Success), (2, WcStatus::Success)]
    );
}

#[test]
fn probe_works_with_zero_ord() {
    let none = StreamConfig {
        ird: 0,
        ord: 0,
        ..STREAM
    };
    let config = QpConfig {
        max_ird: 0,
        max_ord: 0,
        ..QpConfig::default()
    };
    let mut a = acknowledged_rig(config, none);
    let mut b = Rig::with(
        config,
        StreamConfig {
            initiator: false,
            ..none
        },
    );
    let (from, to) = (a.mr(64, ALL), b.mr(64, ALL));
    for id in 0..40 {
        a.post(id, write_to(to.at, to.stag), &[from.part(0, 16)]);
    }
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(a.host.sends.len(), 40);
    assert!(a.host.sends.iter().all(|c| c.status == WcStatus::Success));
}

#[test]
fn refused_request_gets_status() {
    // How the blamed request completes, for two kinds of errors.
    for (case, status) in [WcStatus::RemoteAccess, WcStatus::RemoteOperation]
        .iter()
        .enumerate()
    {
        let mut a = acknowledged_rig(QpConfig::default(), STREAM);
        let other = StreamConfig {
            initiator: false,
            ..STREAM
        };
        let mut b = Rig::with(QpConfig::default(), other);
        let (from, to) = (a.mr(64, ALL), b.mr(64, ALL));
        let read_only = b.mr(64, Access::REMOTE_READ);
        b.recv(90, &[to.part(0, 32)]);
        b.recv(91, &[read_only.part(0, 32)]);
        let good = write_to(to.at, to.stag);
        match case {
            0 => {
                a.post(1, SendOp::Send, &[from.part(0, 16)]);
                a.post(2, write_to(to.at, to.stag ^ 1), &[from.part(0, 16)]);
            }
            _ => {
                a.post(1, SendOp::Send, &[from.part(0, 16)]);
                a.post(2, SendOp::SendImm(5), &[from.part(0, 16)]);
            }
        }
        shuttle(&mut a, &mut b, 1000);
        a.try_post(3, good, SendFlags::SIGNALED, &[from.part(0, 16)])
            .unwrap();
        let mut completed = brief(&a.host.sends);
        if case == 1 {
            // If the peer's own memory fails, its Terminate has no header, so the oldest request is
            // blamed.
            assert_eq!(completed.remove(0), (1, *status));
            assert_eq!(completed, [(2, WcStatus::Flushed), (3, WcStatus::Flushed)]);
        } else {
            assert_eq!(
                completed,
                [(1, WcStatus::Success), (2, *status), (3, WcStatus::Flushed)]
            );
        }
    }
}

#[test]
fn refused_send_is_found_by_msn() {
    let mut a = acknowledged_rig(QpConfig::default(), STREAM);
    let mut b = Rig::with(
        QpConfig::default(),
        StreamConfig {
            initiator: false,
            ..STREAM
        },
    );
    let (from, to) = (a.mr(64, ALL), b.mr(64, ALL));
    for id in 90..94 {
        b.recv(id, &[to.part(0, 32)]);
    }
    a.post(1, SendOp::SendImm(7), &[from.part(0, 16)]);
    a.post(2, write_to(to.at, to.stag), &[from.part(0, 16)]);
    // This Send is longer than its receive.
    a.post(3, SendOp::Send, &[from.part(0, 40)]);
    a.post(4, SendOp::Send, &[from.part(0, 8)]);
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&a.host.sends),
        [
            (1, WcStatus::Success),
            (2, WcStatus::Success),
            (3, WcStatus::RemoteInvalidRequest),
            (4, WcStatus::Flushed)
        ]
    );
    assert_eq!(
        a.qp.fault().map(|f| f.code),
        Some(Code::DDP_UNTAGGED_TOO_LONG)
    );
}

/// Orderly ends of a stream.
fn orderly_ends() -> [fn(&mut Rig); 3] {
    [
        |rig| {
            rig.qp.close(&mut rig.host);
            assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
            rig.qp.shutdown_done(&mut rig.host);
        },
        |rig| rig.eof(),
        |rig| {
            // The driver hides the end, and later gives up the pending requests.
            assert!(rig.qp.hides_end());
            rig.qp.stream_failed(&mut rig.host);
        },
    ]
}

/// The end is hidden, even inside a message, if the queue pair is connected by number or
/// [`hide_end`](QueuePair::hide_end) was called.
#[test]
fn end_of_stream_is_hidden() {
    let hidden = |prepare: fn(&mut Rig)| {
        let mut rig = Rig::new();
        let mr = rig.mr(64, ALL);
        rig.recv(1, &[mr.sge()]);
        prepare(&mut rig);
        rig.qp.hides_end()
    };
    assert!(!hidden(|_| ()));
    for hide in [QueuePair::set_by_number, QueuePair::hide_end] {
        let hidden = |prepare: fn(&mut Rig)| {
            let mut rig = Rig::new();
            let mr = rig.mr(64, ALL);
            rig.recv(1, &[mr.sge()]);
            hide(&mut rig.qp);
            prepare(&mut rig);
            rig.qp.hides_end()
        };
        assert!(hidden(|_| ()));
        assert!(hidden(|rig| {
            assert_eq!(rig.rx_ulpdu(&send(1, &[1])), RxStatus::Ok);
        }));
        // The end is hidden inside an FPDU, and inside a message.
        assert!(hidden(|rig| {
            assert_eq!(rig.rx(&[0]), RxStatus::Ok);
        }));
        assert!(hidden(|rig| {
            let part = untagged(Opcode::SEND, 0, 1, 0, false, &[1]);
            assert_eq!(rig.rx_ulpdu(&part), RxStatus::Ok);
        }));
        // It is not hidden after the program has closed, or after the stream has failed.
        assert!(!hidden(|rig| rig.qp.close(&mut rig.host)));
        assert!(!hidden(|rig| rig.qp.stream_failed(&mut rig.host)));
    }
}

/// When the driver gives up the requests, the receive of an incomplete message is flushed once,
/// before the others.
#[test]
fn incomplete_message_keeps_its_receive() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    for id in 1..=3 {
        rig.recv(id, &[mr.sge()]);
    }
    rig.qp.set_by_number();
    let part = untagged(Opcode::SEND, 0, 1, 0, false, &[7]);
    assert_eq!(rig.rx_ulpdu(&part), RxStatus::Ok);
    rig.post(4, SendOp::Send, &[]);
    assert!(rig.qp.hides_end());
    assert_eq!(rig.qp.state(), State::Rts);
    assert!(rig.host.recvs.is_empty());
    rig.qp.fail_absent_peer(&mut rig.host);
    let flushed = WcStatus::Flushed;
    assert_eq!(
        brief(&rig.host.recvs),
        [(1, flushed), (2, flushed), (3, flushed)]
    );
    assert_eq!(
        brief(&rig.host.sends),
        [(4, WcStatus::TransportRetryExceeded)]
    );
    assert!(!rig.qp.take_events().contains(Events::FATAL));
}

#[test]
fn end_of_stream_acknowledges_nothing() {
    for end in orderly_ends() {
        let mut rig = acknowledged_rig(QpConfig::default(), STREAM);
        rig.qp.set_by_number();
        let mr = rig.mr(64, Access::LOCAL_WRITE);
        let read = SendOp::Read {
            remote_addr: 0x1000,
            rkey: 7,
        };
        rig.post(1, SendOp::Send, &[mr.part(0, 8)]);
        let (_, probes) = send_all(&mut rig);
        rig.post(2, write_to(0x1000, 7), &[mr.part(0, 8)]);
        rig.post(3, read, &[mr.part(0, 8)]);
        rig.post(4, SendOp::Send, &[mr.part(0, 8)]);
        let _ = rig.sent();
        // The peer has only answered the probe.
        answer(&mut rig, &probes[0]);
        end(&mut rig);
        use WcStatus::{Flushed, Success};
        assert_eq!(
            brief(&rig.host.sends),
            [(1, Success), (2, Flushed), (3, Flushed), (4, Flushed)]
        );
    }
}

#[test]
fn closing_peer_answers_received_requests() {
    let mut a = acknowledged_rig(QpConfig::default(), STREAM);
    let other = StreamConfig {
        initiator: false,
        ..STREAM
    };
    let mut b = Rig::with(QpConfig::default(), other);
    let (from, to) = (a.mr(64, ALL), b.mr(64, ALL));
    b.recv(9, &[to.sge()]);
    a.post(1, SendOp::Send, &[from.sge()]);
    let octets = a.octets_out();
    assert_eq!(b.rx(&octets), RxStatus::Ok);
    // The peer's program has received the message, and closes.
    b.qp.close(&mut b.host);
    assert_eq!(b.qp.stream_wish(), StreamWish::Keep);
    // Later requests of the peer do not keep the stream open.
    let body = read_request(5, 8, to.stag, to.at);
    let later_requests = untagged(Opcode::READ_REQUEST, 1, 2, 0, true, &body);
    let later_requests = [
        a.fpdu(&later_requests),
        a.fpdu(&untagged(Opcode::READ_REQUEST, 1, 3, 0, true, &body)),
    ];
    assert_eq!(b.fill(), TxFill::Ready);
    assert_eq!(b.rx(&later_requests[0]), RxStatus::Ok);
    let back = b.write_some(100);
    assert_eq!(b.qp.stream_wish(), StreamWish::ShutdownWrite);
    b.qp.shutdown_done(&mut b.host);
    assert_eq!(a.rx(&back), RxStatus::Ok);
    a.eof();
    assert_eq!(brief(&a.host.sends), [(1, WcStatus::Success)]);
}

#[test]
fn completed_requests_need_no_probe() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    for id in 1..20 {
        rig.post(id, SendOp::SendImm(7), &[mr.part(0, 8)]);
    }
    let _ = rig.sent();
    rig.qp.complete_when_placed();
    assert!(!rig.qp.wants_tx());
    assert_eq!(rig.fill(), TxFill::Idle);
    // A request that is still being written needs a probe.
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    rig.post(1, SendOp::SendImm(7), &[mr.part(0, 8)]);
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.qp.complete_when_placed();
    let (opcodes, probes) = send_all(&mut rig);
    assert_eq!(
        opcodes,
        [Opcode::IMMEDIATE, Opcode::SEND, Opcode::READ_REQUEST]
    );
    assert_eq!(brief(&rig.host.sends), []);
    answer(&mut rig, &probes[0]);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
}

/// Found by fuzzing: requests with responses were counted as messages to be acknowledged. When they
/// were done, no request was left that a probe could belong to, and probes never ended.
#[test]
fn requests_with_response_need_no_probe() {
    for answered in [false, true] {
        let mut rig = Rig::new();
        let mr = rig.mr(64, ALL);
        let read = SendOp::Read {
            remote_addr: 0,
            rkey: 7,
        };
        rig.post_flags(1, read, SendFlags::empty(), &[mr.part(0, 8)]);
        let (opcodes, reads) = send_all(&mut rig);
        assert_eq!(opcodes, [Opcode::READ_REQUEST]);
        if !answered {
            rig.qp.complete_when_placed();
            assert!(!rig.qp.wants_tx());
        }
        let sink = reads[0].sink_stag.0;
        let ulpdu = tagged(Opcode::READ_RESPONSE, sink, reads[0].sink_to, true, &[5; 8]);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
        rig.qp.complete_when_placed();
        assert!(!rig.qp.wants_tx());
        assert_eq!(rig.fill(), TxFill::Idle);
        rig.post(2, SendOp::Send, &[mr.part(0, 8)]);
        let (opcodes, probes) = send_all(&mut rig);
        assert_eq!(opcodes, [Opcode::SEND, Opcode::READ_REQUEST]);
        answer(&mut rig, &probes[0]);
        assert_eq!(brief(&rig.host.sends), [(2, WcStatus::Success)]);
    }
}

#[test]
fn response_acknowledges_unwritten_messages() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    rig.post_flags(1, SendOp::Send, SendFlags::empty(), &[mr.part(0, 8)]);
    rig.post(2, read, &[mr.part(8, 8)]);
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.qp.complete_when_placed();
    let (opcodes, reads) = send_all(&mut rig);
    assert_eq!(opcodes, [Opcode::SEND, Opcode::READ_REQUEST]);
    let sink = reads[0].sink_stag.0;
    let ulpdu = tagged(Opcode::READ_RESPONSE, sink, reads[0].sink_to, true, &[5; 8]);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    assert_eq!(brief(&rig.host.sends), [(2, WcStatus::Success)]);
    assert!(!rig.qp.wants_tx());
    assert_eq!(rig.fill(), TxFill::Idle);
}

#[test]
fn reset_clears_acknowledgements() {
    let mut rig = acknowledged_rig(QpConfig::default(), STREAM);
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    // A probe for the first Send is in flight; the second Send needs another probe.
    for id in 1..=2 {
        rig.post(id, SendOp::Send, &[mr.part(0, 8)]);
        let _ = rig.sent();
    }
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.qp.stream_gone(&mut rig.host);
    rig.start(STREAM);
    assert!(!rig.qp.wants_tx());
    assert_eq!(rig.fill(), TxFill::Idle);
    assert_eq!(brief(&rig.host.sends), []);
    rig.post(3, SendOp::Send, &[mr.part(0, 8)]);
    let (opcodes, probes) = send_all(&mut rig);
    assert_eq!(opcodes, [Opcode::SEND, Opcode::READ_REQUEST]);
    answer(&mut rig, &probes[0]);
    assert_eq!(brief(&rig.host.sends), [(3, WcStatus::Success)]);
}

#[test]
fn queue_pair_rights_are_enforced() {
    type Case = (Access, fn(&Mr) -> Vec<u8>);
    let cases: [Case; 3] = [
        (Access::REMOTE_WRITE, |mr| {
            tagged(Opcode::WRITE, mr.stag, mr.at, true, &[9; 8])
        }),
        (Access::REMOTE_READ, |mr| {
            let body = read_request(5, 8, mr.stag, mr.at);
            untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body)
        }),
        (Access::REMOTE_ATOMIC, |mr| {
            let mut body = vec![0; 52];
            iwarp_proto::rdmap::AtomicRequest {
                op: iwarp_proto::rdmap::AtomicOp::FETCH_ADD,
                request_id: 1,
                stag: iwarp_proto::ddp::Stag(mr.stag),
                to: mr.at,
                add_swap: 1,
                add_swap_mask: 0,
                compare: 0,
                compare_mask: 0,
            }
            .emit(&mut body);
            untagged(Opcode::ATOMIC_REQUEST, 1, 1, 0, true, &body)
        }),
    ];
    for (right, message) in cases {
        for allowed in [true, false] {
            let mut rig = Rig::new();
            let mr = rig.mr(64, ALL);
            let rights = if allowed {
                right
            } else {
                ALL.difference(right)
            };
            rig.qp.set_remote_access(rights);
            let status = rig.rx_ulpdu(&message(&mr));
            if allowed {
                assert_eq!(status, RxStatus::Ok, "{right:?}");
                continue;
            }
            assert_eq!(status, RxStatus::Failed, "{right:?}");
            rig.assert_ended(Blame::Peer, Code::RDMAP_ACCESS);
            assert!(rig.qp.take_events().contains(Events::ACCESS_ERROR));
            let untouched: Vec<u8> = (0..64).collect();
            assert_eq!(rig.read(&mr), untouched);
        }
    }
    // A zero-length Read accesses no memory, so a peer's probe is answered.
    let mut rig = Rig::new();
    rig.qp.set_remote_access(Access::empty());
    let body = read_request(5, 0, 1, 0);
    let ulpdu = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    let sent = rig.sent();
    assert!(matches!(sent[0].0, Header::Tagged(h) if h.opcode == Opcode::READ_RESPONSE));
}

#[test]
fn enabling_mode_twice_changes_nothing() {
    let mut rig = acknowledged_rig(QpConfig::default(), STREAM);
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.post(1, write_to(0x1000, 7), &[mr.part(0, 8)]);
    rig.qp.complete_when_placed();
    let (opcodes, probes) = send_all(&mut rig);
    assert_eq!(opcodes, [Opcode::WRITE, Opcode::READ_REQUEST]);
    rig.qp.complete_when_placed();
    assert_eq!(send_all(&mut rig).0, []);
    answer(&mut rig, &probes[0]);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
    assert_eq!(send_all(&mut rig).0, []);
    rig.qp.complete_when_placed();
    assert_eq!(send_all(&mut rig).0, []);
}

#[test]
fn rtr_message_needs_no_probe() {
    for (rtr, opcode) in [
        (Rtr::Send, Opcode::SEND),
        (Rtr::Write, Opcode::WRITE),
        (Rtr::Read, Opcode::READ_REQUEST),
    ] {
        let stream = StreamConfig {
            rtr: Some(rtr),
            ..STREAM
        };
        let mut rig = acknowledged_rig(QpConfig::default(), stream);
        let sent: Vec<_> = rig.sent().iter().map(|(h, _)| h.opcode()).collect();
        assert_eq!(sent, [opcode], "{rtr:?}");
    }
}
