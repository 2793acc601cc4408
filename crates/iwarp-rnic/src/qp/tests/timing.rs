//! Timers: reminders, the first FPDU, held Sends, the earliest end of a stream.

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp, Time, WcStatus};
use core::time::Duration;
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Opcode, TerminateCode as Code};

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

const fn at(n: u64) -> Time {
    Time::ZERO.after(ms(n))
}

const TIMES: StreamTimes = StreamTimes {
    reminders: [Some(ms(40)), Some(ms(1000)), None],
    maturity: ms(50),
    speak_first: None,
    first_fpdu: None,
};

fn timed_rig(initiator: bool, rtr: Option<Rtr>, times: StreamTimes) -> Rig {
    let stream = StreamConfig {
        initiator,
        rtr,
        times,
        ..STREAM
    };
    Rig::with(QpConfig::default(), stream)
}

impl Rig {
    fn on_time(&mut self, now: Time) {
        self.qp.on_time(now, &mut self.host);
        assert!(self.qp.poll_at().is_none_or(|next| next > now));
    }
}

#[test]
fn silent_responder_is_reminded() {
    for rounds in [1, 2] {
        let mut rig = timed_rig(true, None, TIMES);
        rig.post(1, SendOp::Send, &[]);
        assert_eq!(rig.sent().len(), 1);
        let mut due = at(40);
        for _ in 0..rounds {
            assert_eq!(rig.qp.poll_at(), Some(due));
            rig.on_time(Time::from_nanos(due.as_nanos() - 1));
            assert!(!rig.qp.wants_tx(), "too early");
            rig.on_time(due);
            let sent = rig.sent();
            let [(Header::Tagged(header), payload)] = &sent[..] else {
                panic!("one Write: {sent:?}");
            };
            assert!(header.opcode == Opcode::WRITE && header.last && header.stag.0 != 0);
            assert!(payload.is_empty());
            // Multiples of a quarter of the interval, so that many queue pairs share a timer.
            due = at(1250);
        }
        if rounds == 2 {
            assert_eq!(rig.qp.poll_at(), None, "there are no more reminders");
        }
        assert_eq!(
            rig.rx_ulpdu(&tagged(Opcode::WRITE, 1, 0, true, &[])),
            RxStatus::Ok
        );
        assert_eq!(rig.qp.poll_at(), None);
        rig.on_time(at(9000));
        assert!(rig.sent().is_empty());
    }
}

#[test]
fn reminders_need_a_sent_message() {
    let mut rig = timed_rig(true, None, TIMES);
    rig.on_time(at(40));
    assert!(rig.sent().is_empty(), "nothing was sent before");
    assert_eq!(rig.qp.poll_at(), Some(at(1250)));
    // A message in flight replaces the reminder.
    let mr = rig.mr(5000, ALL);
    rig.post(1, SendOp::Send, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.qp.on_time(at(1250), &mut rig.host);
    let opcodes: std::vec::Vec<Opcode> = rig.sent().iter().map(|(h, _)| h.opcode()).collect();
    assert_eq!(opcodes.iter().filter(|o| **o == Opcode::WRITE).count(), 1);
    // The rest of an incomplete message also replaces it.
    let mut rig = timed_rig(true, None, TIMES);
    rig.plan = TxPlan::with(TxSizes {
        bytes: 1,
        ..TxSizes::DEFAULT
    })
    .unwrap();
    let mr = rig.mr(5000, ALL);
    rig.post(1, SendOp::Send, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.on_time(at(40));
    let opcodes: std::vec::Vec<Opcode> = rig.sent().iter().map(|(h, _)| h.opcode()).collect();
    assert!(opcodes.len() > 1 && opcodes.iter().all(|o| *o == Opcode::SEND));
    // A responder sends no reminders, and an ending stream needs none.
    assert_eq!(timed_rig(false, None, TIMES).qp.poll_at(), None);
    let mut rig = timed_rig(true, None, TIMES);
    rig.qp.close(&mut rig.host);
    assert_eq!(rig.qp.poll_at(), None);
}

#[test]
fn responder_sends_first_after_timeout() {
    let times = StreamTimes {
        speak_first: Some(ms(200)),
        ..StreamTimes::NONE
    };
    for fpdu_received in [false, true] {
        let mut rig = timed_rig(false, None, times);
        rig.post(1, SendOp::Send, &[]);
        assert_eq!(rig.qp.poll_at(), Some(at(200)));
        rig.on_time(at(199));
        assert!(!rig.qp.wants_tx());
        if fpdu_received {
            let _ = rig.rx_ulpdu(&tagged(Opcode::WRITE, 1, 0, true, &[]));
            assert_eq!(rig.qp.poll_at(), None);
            assert_eq!(rig.qp.take_events(), Events::ESTABLISHED);
            continue;
        }
        rig.on_time(at(200));
        assert_eq!(rig.qp.poll_at(), None);
        assert_eq!(rig.sent().len(), 1);
        assert_eq!(rig.qp.take_events(), Events::empty());
        // The connection is established only after the initiator's first FPDU.
        let _ = rig.rx_ulpdu(&tagged(Opcode::WRITE, 1, 0, true, &[]));
        assert_eq!(rig.qp.take_events(), Events::ESTABLISHED);
    }
    // Without a limit the responder waits, as RFC 5044 section 7.1.2 specifies.
    let mut rig = timed_rig(false, None, StreamTimes::NONE);
    rig.post(1, SendOp::Send, &[]);
    assert_eq!(rig.qp.poll_at(), None);
    rig.on_time(at(1_000_000));
    assert!(!rig.qp.wants_tx());
}

#[test]
fn overdue_first_fpdu_resets_stream() {
    for speak_first in [None, Some(ms(200))] {
        let times = StreamTimes {
            first_fpdu: Some(ms(5000)),
            speak_first,
            ..StreamTimes::NONE
        };
        let mut rig = timed_rig(false, None, times);
        rig.recv(1, &[]);
        assert_eq!(
            rig.qp.poll_at(),
            Some(speak_first.map_or(at(5000), |_| at(200)))
        );
        rig.on_time(at(4999));
        assert_eq!(
            (rig.qp.poll_at(), rig.qp.state()),
            (Some(at(5000)), State::Rts)
        );
        rig.on_time(at(5000));
        assert_eq!(rig.qp.take_events(), Events::FIRST_FPDU_OVERDUE);
        assert_eq!(
            (rig.qp.stream_wish(), rig.qp.poll_at()),
            (StreamWish::Abort, None)
        );
        assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Flushed)]);
    }
    let mut rig = timed_rig(
        false,
        None,
        StreamTimes {
            first_fpdu: Some(ms(5000)),
            ..StreamTimes::NONE
        },
    );
    let _ = rig.rx_ulpdu(&tagged(Opcode::WRITE, 1, 0, true, &[]));
    rig.on_time(at(9000));
    assert_eq!(rig.qp.state(), State::Rts);
}

#[test]
fn stream_end_waits_for_maturity() {
    let ends: [fn(&mut Rig); 2] = [
        |rig| rig.qp.close(&mut rig.host),
        // A request that fails: the Terminate is sent, and the end waits.
        |rig| {
            let sge = crate::Sge {
                addr: 0,
                len: 8,
                lkey: 99,
            };
            rig.post(1, SendOp::Send, &[sge]);
        },
    ];
    for end in ends {
        let mut rig = timed_rig(true, Some(Rtr::Write), TIMES);
        rig.sent();
        end(&mut rig);
        rig.sent();
        assert_eq!(rig.qp.stream_wish(), StreamWish::Keep);
        assert_eq!(rig.qp.poll_at(), Some(at(50)));
        rig.on_time(at(50));
        assert_eq!(rig.qp.stream_wish(), StreamWish::ShutdownWrite);
        assert_eq!(rig.qp.poll_at(), None);
        rig.qp.shutdown_done(&mut rig.host);
        assert!(rig.qp.is_shut_down());
    }
    for (rtr, fpdu_received, after_maturity, not_before) in [
        (Some(Rtr::Write), false, false, Some(at(50))),
        (Some(Rtr::Write), false, true, None),
        (Some(Rtr::Write), true, false, None),
        (None, false, false, None),
    ] {
        let mut rig = timed_rig(true, rtr, TIMES);
        rig.sent();
        if fpdu_received {
            let _ = rig.rx_ulpdu(&tagged(Opcode::WRITE, 1, 0, true, &[]));
        }
        if after_maturity {
            rig.on_time(at(60));
            rig.sent();
        }
        rig.qp.leave(&mut rig.host);
        let cut = false;
        assert_eq!(rig.qp.stream_wish(), StreamWish::Leave { cut, not_before });
    }
}

/// Returns a rig that holds a Send. The limit is 2 s, and 200 ms after the sender has closed.
fn held_send() -> Rig {
    let mut rig = Rig::new();
    assert_eq!(rig.rx_ulpdu(&send(1, b"abcd")), RxStatus::Held);
    // The time limit starts with the next call of `on_time`.
    assert_eq!(rig.qp.poll_at(), Some(Time::ZERO));
    rig.on_time(at(1000));
    assert_eq!(rig.qp.poll_at(), Some(at(1200)));
    rig
}

#[test]
fn held_send_times_out() {
    //= rfc5041 section 7.1
    //= type=test
    //# DDP implementations SHOULD NOT permit system faults to occur repeatedly or
    //# frequently.
    let mut rig = held_send();
    for check_at in [1200, 1400, 2900] {
        rig.on_time(at(check_at));
        assert_eq!(rig.qp.poll_at(), Some(at(check_at + 200).min(at(3000))));
        // No receive was posted: the same Send waits, and keeps its deadline.
        assert_eq!(rig.offer_again(), RxStatus::Held);
    }
    rig.on_time(at(2999));
    assert_eq!(rig.qp.rx_interest(), RxInterest::Held);
    rig.on_time(at(3000));
    rig.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_NO_BUFFER);
    assert_eq!(rig.terminate().code, Code::DDP_UNTAGGED_NO_BUFFER);
    assert_eq!(rig.qp.rx_interest(), RxInterest::Discard);
    assert_eq!(rig.qp.poll_at(), None);
}

#[test]
fn next_held_send_has_own_deadline() {
    let mut rig = held_send();
    let mr = rig.mr(8, ALL);
    let second = rig.fpdu(&send(2, b"efgh"));
    assert_eq!(rig.rx(&second), RxStatus::Held);
    assert_eq!(rig.qp.poll_at(), Some(at(1200)), "the first still waits");
    rig.recv(1, &[mr.sge()]);
    assert_eq!(rig.offer_again(), RxStatus::Held);
    assert_eq!(rig.qp.poll_at(), Some(Time::ZERO), "the second waits now");
    rig.on_time(at(2500));
    rig.on_time(at(4499));
    assert_eq!(rig.qp.rx_interest(), RxInterest::Held);
    rig.recv(2, &[mr.sge()]);
    assert_eq!(rig.offer_again(), RxStatus::Ok);
    assert_eq!(rig.qp.poll_at(), None);
    // An old deadline has no effect later.
    rig.on_time(at(99_000));
    assert_eq!(rig.qp.state(), State::Rts);
}

#[test]
fn closed_sender_shortens_hold() {
    for closed_at in [1100, 1200, 2000] {
        let mut rig = held_send();
        rig.on_time(at(closed_at));
        rig.qp.sender_closed();
        assert_eq!(rig.qp.poll_at(), Some(at(1200)));
        rig.qp.on_time(at(closed_at), &mut rig.host);
        let has_ended = closed_at >= 1200;
        assert_eq!(rig.qp.state() == State::Error, has_ended, "{closed_at} ms");
        rig.qp.on_time(at(1200), &mut rig.host);
        rig.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_NO_BUFFER);
    }
    // Without a held Send this has no effect.
    let mut rig = Rig::new();
    rig.qp.sender_closed();
    assert_eq!(rig.qp.poll_at(), None);
}

/// If the end is hidden, a Send stays held after its sender has closed: it has arrived, and the
/// program may still post a receive.
#[test]
fn hidden_end_keeps_held_send() {
    let mut rig = held_send();
    rig.qp.hide_end();
    rig.on_time(at(1100));
    rig.qp.sender_closed();
    assert_eq!(rig.qp.poll_at(), None);
    rig.on_time(at(1_000_000));
    assert_eq!(rig.qp.state(), State::Rts);
    let mr = rig.mr(64, Access::LOCAL_WRITE);
    rig.recv(1, &[mr.sge()]);
    assert_eq!(rig.offer_again(), RxStatus::Ok);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
}

/// `rnr_retry` 7 means no limit. The driver still checks whether the sender has closed.
#[test]
fn hold_for_ever_has_no_limit() {
    let mut rig = Rig::new();
    rig.qp.hold_for_ever();
    assert_eq!(rig.rx_ulpdu(&send(1, b"abcd")), RxStatus::Held);
    rig.on_time(at(1000));
    for check_at in 1..4 {
        assert_eq!(rig.qp.poll_at(), Some(at(1000 + 200 * check_at)));
        rig.on_time(at(1000 + 200 * check_at));
    }
    rig.on_time(at(100_000_000));
    assert_eq!(rig.qp.rx_interest(), RxInterest::Held);

    for policy in [ReceiverNotReady::Drop, ReceiverNotReady::Terminate] {
        let mut rig = Rig::with(
            QpConfig {
                receiver_not_ready: policy,
                ..QpConfig::default()
            },
            STREAM,
        );
        rig.qp.hold_for_ever();
        let status = rig.rx_ulpdu(&send(1, b"abcd"));
        match policy {
            ReceiverNotReady::Drop => assert_eq!(status, RxStatus::Ok),
            _ => assert_eq!(status, RxStatus::Held),
        }
    }
}

#[test]
fn closed_sender_does_not_prolong_hold() {
    let config = QpConfig {
        receiver_not_ready: ReceiverNotReady::Hold {
            limit: Duration::from_millis(100),
            after_close: Duration::from_millis(300),
        },
        ..QpConfig::default()
    };
    for closed in [false, true] {
        let mut rig = Rig::with(config, STREAM);
        assert_eq!(rig.rx_ulpdu(&send(1, b"abcd")), RxStatus::Held);
        rig.on_time(at(1000));
        if closed {
            rig.qp.sender_closed();
        }
        assert_eq!(rig.qp.poll_at(), Some(at(1100)));
        rig.qp.on_time(at(1100), &mut rig.host);
        rig.assert_ended(Blame::Peer, Code::DDP_UNTAGGED_NO_BUFFER);
    }
}
