//! The end of a stream, gracefully or by an error, and the states of a queue pair (RFC 5044 §7.2,
//! `ibv_modify_qp(3)`).

use super::harness::*;
use crate::qp::*;
use crate::{SendOp, Time, WcStatus};
use iwarp_proto::ddp::Stag;
use iwarp_proto::rdmap::{Immediate, Opcode, ReadRequest, TerminateCode as Code};
use std::format;
use std::string::String;
use std::vec::Vec;

const READ: SendOp = SendOp::Read {
    remote_addr: 0,
    rkey: 7,
};

#[test]
fn graceful_close_sends_queued_requests() {
    //= rfc5041 section 6.2.1
    //= type=test
    //# If the Local Peer ULP indicates graceful teardown, the DDP layer on the
    //# Local Peer SHOULD ensure that all ULP data would be transferred before
    //# the underlying LLP Stream and Connection are torn down, and any further
    //# data transfer requests by the Local Peer ULP MUST return an error.
    let (mut a, mut b) = pair(STREAM);
    let src = a.mr(5000, ALL);
    let dst = b.mr(5000, ALL);
    b.recv(1, &[dst.sge()]);
    b.recv(2, &[]);
    a.post(1, SendOp::Send, &[src.sge()]);
    a.qp.close(&mut a.host);
    assert_eq!(a.qp.stream_wish(), StreamWish::Keep);
    shuttle(&mut a, &mut b, 100_000);
    assert_eq!(a.qp.stream_wish(), StreamWish::ShutdownWrite);
    a.qp.shutdown_done(&mut a.host);
    assert_eq!(
        (a.qp.state(), a.qp.stream_wish()),
        (State::Error, StreamWish::Keep)
    );
    assert_eq!(a.qp.rx_interest(), RxInterest::Discard);
    b.eof();
    //= rfc5041 section 6.2.1
    //= type=test
    //# Following this event, when the Local Peer ULP requests graceful teardown,
    //# DDP MUST indicate to the LLP that it SHOULD perform a graceful close of the
    //# other half of the LLP Stream.
    assert_eq!(b.qp.stream_wish(), StreamWish::ShutdownWrite);
    use WcStatus::{Flushed, Success};
    assert_eq!(brief(&b.host.recvs), [(1, Success), (2, Flushed)]);
    assert_eq!(
        //= rfc5044 section 7.2
        //= type=test
        //# A mechanism SHOULD be provided by MPA to DDP for DDP to be made aware that a
        //# graceful close of the TCP connection has been received by the TCP (e.g., FIN
        //# is received).
        //= rfc5041 section 3
        //= type=test
        //# 9. For a specific LLP Stream, the LLP MUST provide a mechanism to indicate
        //# that the LLP Stream has been gracefully torn down.
        //= rfc5041 section 3
        //= type=test
        //# For a specific LLP Connection, the LLP MUST provide a mechanism to indicate
        //# that the LLP Connection has been gracefully torn down.
        b.qp.take_events() - Events::ESTABLISHED,
        Events::DISCONNECTED
    );
    assert_eq!((a.qp.fault(), b.qp.fault()), (None, None));
    a.eof();
    assert_eq!(a.qp.rx_interest(), RxInterest::None);
    a.qp.stream_gone(&mut a.host);
    assert!(!a.qp.has_stream());
}

#[test]
fn close_ends_stream_without_messages() {
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    let random = rig.random();
    let mw = rig
        .table
        .allocate_window(crate::memory::WindowType::Type2, PD, random)
        .unwrap();
    let bind = crate::Bind {
        mw_stag: mw,
        new_stag: mw,
        mr_stag: Stag(mr.stag),
        addr: mr.at,
        len: 8,
        access: Access::REMOTE_READ,
    };
    rig.post(1, SendOp::Bind(bind), &[]);
    rig.qp.close(&mut rig.host);
    assert!(rig.octets_out().is_empty());
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    // In SQD the queued requests are never sent, so they do not delay the close.
    let mut rig = Rig::new();
    rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
    rig.post(1, SendOp::Send, &[]);
    rig.qp.close(&mut rig.host);
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    rig.qp.shutdown_done(&mut rig.host);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Flushed)]);
}

#[test]
fn end_inside_message_is_fault() {
    let mut rig = Rig::new();
    let fpdu = rig.fpdu(&send(1, &[]));
    for cut in 1..fpdu.len() {
        let mut rig = Rig::new();
        let _ = rig.rx(&fpdu[..cut]);
        assert!(!rig.buffer.is_empty());
        rig.eof();
        // The buffer is empty, so that another queue pair can use it.
        assert!(rig.buffer.is_empty());
        rig.assert_ended(Blame::Transport, Code::MPA_CONNECTION_LOST);
        assert!(
            rig.qp
                .take_events()
                .contains(Events::FATAL | Events::DISCONNECTED)
        );
    }
    // The stream ends between the FPDUs of one response, or between the two messages of one Send.
    for answer in [true, false] {
        let mut rig = Rig::new();
        let mr = rig.mr(32, ALL);
        rig.recv(1, &[]);
        rig.post(1, READ, &[mr.sge()]);
        let sent = rig.sent();
        let request = ReadRequest::parse(&sent[0].1).unwrap();
        let ulpdu = match answer {
            true => tagged(
                Opcode::READ_RESPONSE,
                request.sink_stag.0,
                0,
                false,
                &[1; 16],
            ),
            false => {
                let immediate = Immediate::before_send(1).octets();
                untagged(Opcode::IMMEDIATE, 0, 1, 0, true, &immediate)
            }
        };
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
        rig.eof();
        rig.assert_ended(Blame::Transport, Code::MPA_CONNECTION_LOST);
        assert!(rig.qp.take_events().contains(Events::FATAL));
    }
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    let write = tagged(Opcode::WRITE, mr.stag, mr.at, false, &[1]);
    assert_eq!(rig.rx_ulpdu(&write), RxStatus::Ok);
    rig.eof();
    rig.assert_ended(Blame::Transport, Code::MPA_CONNECTION_LOST);
    // The stream ends between the FPDUs of one message.
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.recv(1, &[mr.sge()]);
    let _ = rig.rx_ulpdu(&untagged(Opcode::SEND, 0, 1, 0, false, &[1]));
    rig.eof();
    rig.assert_ended(Blame::Transport, Code::MPA_CONNECTION_LOST);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Flushed)]);
}

#[test]
fn broken_stream_flushes_in_order() {
    //= rfc5041 section 3
    //= type=test
    //# 3. The LLP MUST ensure that, if it accepts a DDP Segment, it will transfer
    //# it reliably to the receiver or return with an error stating that the
    //# transfer failed to complete.
    //= rfc5041 section 6.2.2
    //= type=test
    //# Thus, any of the following fatal errors on a DDP Stream MUST cause DDP to
    //# indicate to the ULP that a fatal error has occurred:
    //= rfc5041 section 7
    //= type=test
    //# All LLP errors reported to DDP SHOULD be passed up to the ULP.
    //= rfc5041 section 6.2.2
    //= type=test
    //# If the LLP indicates to the ULP that a fatal error has occurred, the DDP
    //# layer SHOULD report the error to the ULP (see Section 7.2, DDP Error
    //# Numbers) and complete all outstanding ULP requests with an error.
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    for id in 1..=3 {
        rig.recv(id, &[]);
    }
    rig.post(1, READ, &[mr.sge()]);
    rig.post_flags(2, SendOp::Send, crate::SendFlags::empty(), &[]);
    rig.post(3, SendOp::Send, &[]);
    rig.sent();
    rig.qp.stream_failed(&mut rig.host);
    rig.assert_ended(Blame::Transport, Code::MPA_CONNECTION_LOST);
    use WcStatus::Flushed;
    let expected = [(1, Flushed), (2, Flushed), (3, Flushed)];
    assert_eq!(brief(&rig.host.sends), expected);
    assert_eq!(brief(&rig.host.recvs), expected);
    assert!(!rig.qp.has_stream() && !rig.qp.wants_tx());
    assert_eq!(rig.qp.rx_interest(), RxInterest::None);
    // Each request is flushed only once.
    rig.qp.stream_gone(&mut rig.host);
    rig.qp.abort(&mut rig.host);
    assert_eq!(rig.host.sends.len(), 3);
}

#[test]
fn abort_resets_stream_and_err_gives_it_up() {
    for modify in [false, true] {
        let mut rig = Rig::new();
        rig.post(1, SendOp::Send, &[]);
        if modify {
            rig.qp.modify(State::Error, &mut rig.host).unwrap();
        } else {
            rig.qp.abort(&mut rig.host);
        }
        let wish = if modify {
            StreamWish::Leave {
                cut: false,
                not_before: None,
            }
        } else {
            StreamWish::Abort
        };
        assert_eq!(rig.qp.stream_wish(), wish);
        assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Flushed)]);
        assert!(!rig.qp.wants_tx());
        // Further octets are ignored.
        let fpdu = rig.fpdu(&send(1, &[]));
        assert_eq!(rig.rx(&fpdu), RxStatus::Failed);
        rig.qp.stream_gone(&mut rig.host);
        assert_eq!(rig.qp.stream_wish(), StreamWish::Keep);
    }
}

#[test]
fn stream_given_up_inside_plan_is_cut() {
    for to in [State::Error, State::Reset] {
        let mut rig = Rig::new();
        let mr = rig.mr(8, ALL);
        rig.post(1, SendOp::Send, &[mr.sge()]);
        assert_eq!(rig.fill(), TxFill::Ready);
        rig.write_some(5);
        rig.qp.modify(to, &mut rig.host).unwrap();
        assert_eq!(
            rig.qp.stream_wish(),
            StreamWish::Leave {
                cut: true,
                not_before: None
            }
        );
        assert!(!rig.qp.wants_tx(), "the rest of the plan is not written");
    }
}

#[test]
fn err_does_not_change_ongoing_end() {
    // After a graceful close.
    let mut rig = Rig::new();
    rig.qp.close(&mut rig.host);
    rig.qp.shutdown_done(&mut rig.host);
    assert!(rig.qp.is_shut_down());
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(rig.qp.stream_wish(), StreamWish::Keep);
    assert_eq!(rig.qp.rx_interest(), RxInterest::Discard);
    // RESET frees the queue pair for another stream.
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    assert_eq!(
        rig.qp.stream_wish(),
        StreamWish::Leave {
            cut: false,
            not_before: None
        }
    );
    // A Terminate is still sent.
    let mut rig = Rig::new();
    let _ = rig.rx_ulpdu(&send(3, &[]));
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(rig.qp.counters().terminates_sent, 1);
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
}

#[test]
fn reset_queue_pair_accepts_new_stream() {
    for gone_first in [true, false] {
        let mut rig = Rig::new();
        rig.post(1, SendOp::Send, &[]);
        rig.recv(1, &[]);
        rig.sent();
        let _ = rig.rx_ulpdu(&send(7, &[]));
        assert!(rig.qp.fault().is_some());
        rig.sent();
        if gone_first {
            rig.qp.stream_gone(&mut rig.host);
        }
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        if !gone_first {
            // Octets of the old stream are not processed.
            assert_eq!(rig.qp.rx_interest(), RxInterest::None);
            let fpdu = rig.fpdu(&send(1, &[]));
            assert_eq!(rig.rx(&fpdu), RxStatus::Failed);
            rig.qp.stream_gone(&mut rig.host);
        }
        assert_eq!((rig.qp.state(), rig.qp.fault()), (State::Reset, None));
        assert_eq!(rig.qp.take_events(), Events::empty());
        rig.host = TestHost::default();
        rig.start(STREAM);
        rig.recv(2, &[]);
        rig.post(3, SendOp::Send, &[]);
        assert_eq!(rig.sent().len(), 1);
        assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Ok);
        assert_eq!(brief(&rig.host.sends), [(3, WcStatus::Success)]);
        assert_eq!(brief(&rig.host.recvs), [(2, WcStatus::Success)]);
    }
}

#[test]
fn old_stream_end_changes_nothing() {
    let ends: [fn(&mut Rig); 3] = [
        |rig| rig.qp.stream_gone(&mut rig.host),
        |rig| rig.qp.stream_failed(&mut rig.host),
        |rig| {
            rig.qp.modify(State::Reset, &mut rig.host).unwrap();
            rig.qp.stream_gone(&mut rig.host);
            rig.qp.modify(State::Init, &mut rig.host).unwrap();
        },
    ];
    for end in ends {
        let mut rig = Rig::new();
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        rig.qp.modify(State::Init, &mut rig.host).unwrap();
        let wish = rig.qp.stream_wish();
        assert!(matches!(wish, StreamWish::Leave { cut: false, .. }));
        end(&mut rig);
        assert_eq!((rig.qp.state(), rig.qp.fault()), (State::Init, None));
        assert_eq!(rig.qp.take_events(), Events::empty());
        rig.recv(1, &[]);
        rig.start(STREAM);
        assert_eq!(rig.rx_ulpdu(&send(1, &[])), RxStatus::Ok);
        assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
    }
    // The program can move the queue pair to ERR again before the old stream is gone.
    let mut rig = Rig::new();
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.qp.modify(State::Init, &mut rig.host).unwrap();
    rig.recv(1, &[]);
    rig.qp.close(&mut rig.host);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Flushed)]);
    rig.qp.stream_gone(&mut rig.host);
    assert_eq!(rig.qp.state(), State::Error);
}

#[test]
fn transitions_follow_table() {
    use State::*;
    let all = [Reset, Init, Rtr, Rts, Sqd, Sqe, Error];
    let mut table = String::new();
    for from in all {
        let row: String = all
            .map(|to| if from.may_become(to) { 'x' } else { '.' })
            .iter()
            .collect();
        table += &format!("{row}\n");
    }
    let expected = "xx....x\nxxxx..x\nx..x..x\nx..xx.x\nx..xx.x\nx..x..x\nx.....x\n";
    assert_eq!(table, expected);
    let mut rig = Rig::fresh(QpConfig::default());
    assert!(rig.qp.modify(Rts, &mut rig.host).is_err());
    for to in [Init, Rtr, Rts] {
        rig.qp.modify(to, &mut rig.host).unwrap();
        assert_eq!(rig.qp.state(), to);
    }
    rig.qp.start(STREAM, Time::ZERO).unwrap();
    assert!(rig.qp.start(STREAM, Time::ZERO).is_err());
}

#[test]
fn streamless_queue_pair_closes_immediately() {
    let mut rig = Rig::fresh(QpConfig::default());
    rig.qp.modify(State::Init, &mut rig.host).unwrap();
    rig.recv(1, &[]);
    rig.qp.close(&mut rig.host);
    assert_eq!(rig.qp.state(), State::Error);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Flushed)]);
    assert_eq!(rig.qp.stream_wish(), StreamWish::Keep);
}

#[test]
fn terminate_is_sent_last() {
    //= rfc5041 section 6.2.2
    //= type=test
    //# If the underlying LLP Stream is still intact, DDP SHOULD continue to allow
    //# the ULP to transfer additional DDP Messages on the outgoing half connection
    //# after the fatal error was indicated to the ULP.
    //= rfc5041 section 6.2.2
    //= type=test
    //# After indicating to the ULP a fatal error has occurred, the DDP Stream MUST
    //# NOT be terminated until the Local Peer ULP indicates to the DDP layer that
    //# the DDP Stream should be abortively torn down.
    //= rfc5040 section 5.4
    //= type=test
    //# After sending a Terminate Message on an RDMAP Stream, the Local Peer
    //# MUST NOT send any more Messages on that specific RDMAP Stream.
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    for id in 0..5 {
        rig.post(id, SendOp::Send, &[mr.sge()]);
    }
    assert_eq!(rig.fill(), TxFill::Ready);
    // The error occurs while the plan is partially written.
    rig.write_some(5);
    let _ = rig.rx_ulpdu(&send(3, &[]));
    assert!(rig.qp.wants_tx());
    assert_eq!(rig.qp.stream_wish(), StreamWish::Keep);
    let octets = rig.octets_out();
    assert!(octets.len() > 100);
    assert_eq!(rig.qp.counters().terminates_sent, 1);
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
}

/// A program may prepare the queue pair for the next connection before the driver has taken the old
/// stream.
#[test]
fn old_stream_end_keeps_new_state() {
    for to in [State::Reset, State::Init, State::Rtr, State::Rts] {
        for broken in [false, true] {
            let mut rig = Rig::new();
            rig.qp.modify(State::Reset, &mut rig.host).unwrap();
            for step in [State::Init, State::Rtr, State::Rts] {
                if rig.qp.state() != to {
                    rig.qp.modify(step, &mut rig.host).unwrap();
                }
            }
            if to != State::Reset {
                rig.recv(1, &[]);
            }
            assert_eq!(
                rig.qp.stream_wish(),
                StreamWish::Leave {
                    cut: false,
                    not_before: None
                }
            );
            assert!(
                rig.qp.start(STREAM, Time::ZERO).is_err(),
                "the old stream is not gone yet"
            );
            if broken {
                rig.qp.stream_failed(&mut rig.host);
            } else {
                rig.qp.stream_gone(&mut rig.host);
            }
            assert_eq!(rig.qp.state(), to);
            assert_eq!(
                (rig.qp.fault(), rig.qp.take_events()),
                (None, Events::empty())
            );
            assert_eq!(brief(&rig.host.recvs), []);
            assert!(!rig.qp.has_stream());
            rig.start(STREAM);
            assert_eq!(rig.qp.state(), State::Rts);
        }
    }
}

#[test]
fn reset_clears_await_stream() {
    let mut rig = Rig::fresh(QpConfig::default());
    rig.qp.modify(State::Init, &mut rig.host).unwrap();
    rig.qp.await_stream().unwrap();
    assert_eq!(rig.qp.state(), State::Rtr);
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.start(STREAM);
    assert_eq!(rig.qp.state(), State::Rts);
}

#[test]
fn reset_may_change_to_err() {
    let mut rig = Rig::fresh(QpConfig::default());
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(rig.qp.state(), State::Error);
    rig.post(1, SendOp::Send, &[]);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Flushed)]);
}

#[test]
fn close_waits_for_rest_of_message() {
    // The message is longer than a plan.
    let len = 1 << 20;
    let mut rig = Rig::new();
    let mr = rig.mr(len, ALL);
    rig.post(1, SendOp::Send, &[mr.sge()]);
    rig.qp.close(&mut rig.host);
    let mut sent = 0;
    while rig.qp.wants_tx() {
        assert_eq!(
            rig.qp.stream_wish(),
            StreamWish::Keep,
            "after {sent} octets"
        );
        assert_eq!(rig.fill(), TxFill::Ready);
        let octets = rig.write_some(len as usize);
        assert!(rig.plan.is_done() && octets.len() < len as usize);
        sent += octets.len();
    }
    assert!(sent > len as usize);
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
}

#[test]
fn second_close_keeps_response_mark() {
    let mut rig = Rig::with(
        QpConfig::default(),
        StreamConfig {
            initiator: false,
            ..STREAM
        },
    );
    let mr = rig.mr(8, ALL);
    let ask = |rig: &mut Rig, msn| {
        let body = read_request(msn, 8, mr.stag, mr.at);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    };
    ask(&mut rig, 1);
    rig.qp.close(&mut rig.host);
    assert_eq!(rig.fill(), TxFill::Ready);
    // While the response is being sent, the peer sends another request, and the program closes
    // again.
    ask(&mut rig, 2);
    rig.qp.close(&mut rig.host);
    rig.write_some(1000);
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
}

#[test]
fn reset_drops_message_in_progress() {
    let mut rig = Rig::new();
    let mr = rig.mr(1 << 20, ALL);
    rig.post(1, SendOp::Send, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.write_some(1 << 20);
    assert!(rig.qp.wants_tx());
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.qp.stream_gone(&mut rig.host);
    for to in [State::Init, State::Rtr, State::Rts, State::Sqd] {
        rig.qp.modify(to, &mut rig.host).unwrap();
    }
    assert_eq!(rig.qp.take_events(), Events::SQ_DRAINED);
}

/// When a queue pair is destroyed, the driver itself sends the unsent octets. They are the same
/// octets that the queue pair would have sent.
#[test]
fn unsent_rest_includes_terminate() {
    let mut rig = Rig::new();
    let src = rig.mr(100_000, ALL);
    rig.post(1, SendOp::Send, &[src.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    let begin = rig.write_some(5000);
    assert!(rig.qp.has_unwritten() && !rig.plan.has_terminate());
    assert!(!rig.qp.owes_terminate());
    let wrong = tagged(Opcode::WRITE, 0x1234_5678, 0, true, b"octets");
    let _ = rig.rx_ulpdu(&wrong);
    assert!(rig.qp.owes_terminate() && !rig.plan.has_terminate());
    let mut rest = Vec::new();
    for terminate in [false, true] {
        if terminate {
            assert_eq!(rig.fill(), TxFill::Ready);
        }
        assert_eq!(rig.plan.has_terminate(), terminate);
        assert!(!terminate || !rig.qp.owes_terminate());
        let remaining = rig.plan.remaining();
        let octets = rig.all_unwritten();
        assert_eq!(octets.len(), remaining);
        rest.extend(octets);
        rig.qp.tx_written(&mut rig.plan, remaining, &mut rig.host);
    }
    assert!(!rig.plan.has_terminate() && !rig.qp.has_unwritten());
    assert_eq!(rig.qp.counters().terminates_sent, 1);
    assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
    let mut other = Rig::new();
    let src = other.mr(100_000, ALL);
    other.post(1, SendOp::Send, &[src.sge()]);
    assert_eq!(other.fill(), TxFill::Ready);
    let mut octets = other.write_some(5000);
    assert_eq!(octets, begin);
    let _ = other.rx_ulpdu(&wrong);
    octets.extend(other.octets_out());
    assert_eq!(octets[begin.len()..], rest);
}
