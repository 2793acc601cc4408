//! Tests of opportunities: when rules inject faults, and what the choice depends on.

use super::plan::{PROCESS, Plan};
use super::qp::QpInjector;
use crate::config::Config;
use crate::conn::qp::QueuePair;
use crate::engine::Source;
use crate::objects::context::ContextInner;
use crate::objects::events::AsyncEventKind;
use crate::objects::hooks::{DeviceFaults, QpFaults, StreamDirection};
use crate::sys::clock::now_ns;
use crate::testing;
use iwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr, WcStatus};
use std::any::Any;
use std::io::{ErrorKind, Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn plan(text: &str) -> Arc<Plan> {
    Plan::of(&text.parse().unwrap()).unwrap()
}

/// Returns the plan of a device that was opened with faults.
pub(super) fn plan_of(ctx: &ContextInner) -> Arc<Plan> {
    let faults: Arc<dyn Any + Send + Sync> = ctx.hooks.faults.clone().unwrap();
    faults.downcast().unwrap()
}

/// Returns at which of a queue pair's first `count` opportunities the first rule injects its fault.
fn injected(plan: &Plan, subject: u32, count: u64) -> Vec<u64> {
    let mut counter = 0;
    let all = (0..count).filter_map(|_| plan.opportunity(0, subject, &mut counter));
    all.map(|injected| injected.n).collect()
}

#[test]
fn rules_select_opportunities() {
    assert_eq!(injected(&plan("seed=100;reset"), 1, 5), [1]);
    assert_eq!(injected(&plan("seed=101;reset,nth=3"), 1, 5), [3]);
    assert_eq!(injected(&plan("seed=102;reset,every=2"), 1, 5), [2, 4]);
    assert_eq!(injected(&plan("seed=103;reset,every=2,times=1"), 1, 5), [2]);
    assert_eq!(injected(&plan("seed=104;reset,p=1"), 1, 3), [1, 2, 3]);
    assert_eq!(injected(&plan("seed=105;reset,p=0"), 1, 300), [0u64; 0]);
    assert_eq!(injected(&plan("seed=106;reset,bytes=1K"), 1, 9), [0u64; 0]);
    assert_eq!(injected(&plan("seed=107;reset,time=1s"), 1, 9), [0u64; 0]);
}

#[test]
fn opportunities_before_time_are_not_counted() {
    assert_eq!(injected(&plan("seed=108;post,time=1000s"), 1, 9), [0u64; 0]);
    assert_eq!(injected(&plan("seed=109;post,nth=2,time=0s"), 1, 9), [2]);
    // Without another condition, a timer injects the fault, and requests are not opportunities.
    assert_eq!(injected(&plan("seed=117;reset,time=0s"), 1, 9), [0u64; 0]);
}

/// The faults of a queue pair do not depend on other queue pairs or other rules.
#[test]
fn faults_depend_on_seed_only() {
    let alone = plan("seed=110;reset,p=10%");
    let both = plan("seed=110;reset,p=10%;crc,p=50%");
    let first = injected(&alone, 1, 1000);
    assert!((50..200).contains(&first.len()), "{}", first.len());
    let mut counts = [0u64; 2];
    let mut hit = [Vec::new(), Vec::new()];
    for _ in 0..1000 {
        for (i, subject) in [2u32, 1].into_iter().enumerate() {
            let found = both.opportunity(0, subject, &mut counts[i]);
            hit[i].extend(found.map(|injected| injected.n));
        }
    }
    assert_eq!(hit[1], first, "the same queue pair, among several");
    assert_ne!(hit[0], first, "another queue pair");
    assert_ne!(injected(&plan("seed=111;reset,p=10%"), 1, 1000), first);
}

#[test]
fn range_is_chosen_per_queue_pair() {
    let plan = plan("seed=112;reset,bytes=1..1G,times=100");
    let chosen: Vec<_> = (1..=8).map(|qp| plan.threshold(0, qp).unwrap()).collect();
    let again: Vec<_> = (1..=8).map(|qp| plan.threshold(0, qp).unwrap()).collect();
    assert_eq!(chosen, again);
    let mut different = chosen;
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), 8);
}

#[test]
fn equal_specifications_share_a_plan() {
    assert!(Arc::ptr_eq(&plan("seed=113;crc"), &plan("seed=113;crc")));
    assert!(!Arc::ptr_eq(&plan("seed=113;crc"), &plan("seed=114;crc")));
}

#[test]
fn times_option_limits_whole_process() {
    let plan = plan("seed=115;reset,nth=1,times=2");
    let acted = (1..=5).filter(|qp| !injected(&plan, *qp, 1).is_empty());
    assert_eq!(acted.count(), 2);
    assert!(!plan.count_injection(0));
    assert!(plan.draw(0, PROCESS, 0, "a") != plan.draw(0, PROCESS, 0, "b"));
}

/// The port comes up once, after its down time.
#[test]
fn port_up_needs_port_down() {
    let plan = plan("seed=116;crc");
    assert!(!plan.is_port_down() && !plan.end_port_down());
    plan.port_down(u64::MAX);
    assert!(plan.is_port_down() && !plan.end_port_down());
    assert!(plan.is_port_down());
    expire_port_down(&plan);
    assert!(!plan.is_port_down());
    assert!(plan.end_port_down() && !plan.end_port_down());
}

/// Ends the port's down time, as if the timer had not run yet.
pub(super) fn expire_port_down(plan: &Plan) {
    plan.port_down_until.store(now_ns() - 1, Ordering::Relaxed);
}

#[test]
fn plan_numbers_queue_pairs_and_drops_devices() {
    let text = "seed=118;crc";
    let plan = plan(text);
    let ordinals = [0; 3].map(|number| QpInjector::new(&plan, number).ordinal);
    assert_eq!(ordinals, [1, 2, 3]);
    let open = || {
        testing::context_with(Config {
            fault: Some(text.parse().unwrap()),
            ..Config::default()
        })
    };
    let _stays = open();
    for _ in 0..3 {
        drop(open());
    }
    let _last = open();
    assert_eq!(plan.contexts.lock().len(), 2);
}

/// Returns a queue pair with faults that is connected to a TCP socket, and the socket.
fn connected(text: &str) -> (QueuePair, std::net::TcpStream) {
    let config = Config {
        fault: Some(text.parse().unwrap()),
        ..Config::default()
    };
    let ctx = testing::context_with(config);
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let peer = testing::connected(&qp);
    peer.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    (qp, peer)
}

const SEND: SendWr<'static> = SendWr {
    wr_id: 1,
    op: SendOp::Send,
    flags: SendFlags::SIGNALED,
    sges: &[],
    inline: &[],
};

fn wait_until(failure: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end, "{failure}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// During a stall the engine does not watch the socket, because it would report it as readable all
/// the time.
#[test]
fn stalled_socket_is_not_watched() {
    let (qp, mut peer) = connected("seed=120;stall");
    qp.post_send(&[SEND]).unwrap();
    peer.write_all(&[0; 64]).unwrap();
    let interest = || testing::open(&mut qp.inner.state.lock()).interest;
    assert!(!interest().readable && !interest().writable);
    qp.inner.drive_rx();
    qp.inner.drive_tx();
    peer.set_nonblocking(true).unwrap();
    let nothing = peer.read(&mut [0; 64]).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
    assert!(!interest().readable && !interest().writable);
    // The engine must not leave the socket to a driving thread, which would not read it.
    assert!(!Source::pause_watch(&*qp.inner));
    // The peer's reset is handled even so, because the poller would report the hang-up all the
    // time.
    socket2::SockRef::from(&peer)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(peer);
    wait_until("the reset is not noticed", || {
        qp.inner.state.lock().link.is_none()
    });
    qp.destroy();
}

#[test]
fn delayed_data_is_sent_after_delay() {
    let (qp, mut peer) = connected("seed=121;delay=30ms,nth=1");
    let begin = Instant::now();
    qp.post_send(&[SEND]).unwrap();
    let n = peer.read(&mut [0; 64]).unwrap();
    assert!(n > 0 && begin.elapsed() >= Duration::from_millis(30));
    wait_until("the socket is not watched", || {
        testing::open(&mut qp.inner.state.lock()).interest.readable
    });
    assert!(Source::pause_watch(&*qp.inner));
    qp.destroy();
}

/// Without CRCs the peer would not detect a flipped bit, so none is flipped.
#[test]
fn bit_flip_needs_crcs() {
    let (qp, mut peer) = connected("seed=122;crc,every=1");
    qp.post_send(&[SEND]).unwrap();
    let mut with = [0; 64];
    let n = peer.read(&mut with).unwrap();
    let (other, mut peer) = connected("seed=123;crc,nth=100");
    other.post_send(&[SEND]).unwrap();
    let mut without = [0; 64];
    assert_eq!(peer.read(&mut without).unwrap(), n);
    assert_eq!(with, without);
    qp.destroy();
    other.destroy();
}

/// `post_send` accepts the requests before the refused one. `post_send_all` accepts no request of
/// the list.
#[test]
fn refused_request_fails_once() {
    let (qp, _peer) = connected("seed=124;post,nth=2");
    let sends = [SEND, SEND];
    let failed = qp.post_send(&sends).unwrap_err();
    assert_eq!(
        (failed.accepted(), failed.error().errno()),
        (1, libc::ENOMEM)
    );
    qp.destroy();
    let (qp, _peer) = connected("seed=125;post,nth=1");
    let error = crate::Error::from(qp.post_send_all(&[SEND]).unwrap_err());
    assert_eq!(error.errno(), libc::ENOMEM);
    assert_eq!(qp.counters().completions, 0);
    qp.post_send_all(&[SEND]).unwrap();
    qp.destroy();
    // Each request of `post_send_all` is one opportunity.
    let (qp, _peer) = connected("seed=127;post,nth=2");
    qp.post_send_all(&[SEND]).unwrap();
    qp.destroy();
}

#[test]
fn timed_fault_needs_no_request() {
    // On a busy machine the time may pass before the connection is up. Then a later time is tried.
    for (seed, millis) in (126..).zip([20, 400, 8000, 60_000]) {
        let (qp, mut peer) = connected(&format!("seed={seed};reset,time={millis}ms"));
        let age = QpInjector::of(&qp.inner).map(|faults| faults.plan.age());
        if age.is_none_or(|age| age >= millis * 1_000_000) {
            qp.destroy();
            continue;
        }
        let end = peer.read(&mut [0; 64]);
        assert!(end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
        wait_until("no error state", || {
            qp.state() == iwarp_rnic::qp::State::Error
        });
        qp.post_send(&[SEND]).unwrap();
        let mut out = [iwarp_rnic::Cqe::default(); 1];
        wait_until("the request is not flushed", || qp.inner.send_cq.len() == 1);
        assert_eq!(qp.inner.send_cq.poll(&mut out), Ok(1));
        assert_eq!(out[0].status, WcStatus::Flushed);
        qp.destroy();
        return;
    }
    panic!("no connection was up within a minute");
}

/// A timed rule hits the selected queue pairs in order of creation, up to its maximum. Unconnected
/// queue pairs are skipped.
#[test]
fn timed_rule_hits_connected_queue_pairs() {
    for (seed, options, hit) in [
        (150, "", [false, true, true]),
        (151, ",times=1", [false, true, false]),
        (152, ",qp=1", [false; 3]),
        (153, ",qp=2", [false, true, false]),
        (154, ",qp=3,times=1", [false, false, true]),
        (155, ",peer=192.0.2.7", [false; 3]),
        (156, ",peer=127.0.0.1", [false, true, true]),
    ] {
        let text = format!("seed={seed};delay=1000s,time=1000s,dir=both{options}");
        let (ctx, [waiting, first, second]) = three_queue_pairs(&text);
        let _peers = [&first, &second].map(testing::connected);
        let plan = plan_of(&ctx.inner);
        plan.clock().unwrap().timer(0);
        let all = [waiting, first, second];
        let held = all.each_ref().map(|qp| {
            let faults = QpInjector::of(&qp.inner).unwrap();
            assert!(!faults.is_due(), "{text}");
            let held = StreamDirection::BOTH.map(|direction| faults.holds(direction));
            assert_eq!(held[0], held[1], "{text}");
            held[0]
        });
        assert_eq!(held, hit, "{text}");
        all.iter().for_each(QueuePair::destroy);
    }
}

#[test]
fn actions_wait_for_the_connection() {
    for (text, reset) in [
        ("seed=158;reset,nth=1", true),
        ("seed=159;close,nth=1", false),
    ] {
        let (_ctx, [qp, ..]) = three_queue_pairs(text);
        let faults = QpInjector::of(&qp.inner).unwrap();
        faults.posted(&SendOp::Send);
        faults.execute_all(&qp.inner);
        assert!(faults.is_due(), "{text}");
        let mut peer = testing::connected(&qp);
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        faults.execute_all(&qp.inner);
        assert!(!faults.is_due(), "{text}");
        let end = peer.read(&mut [0; 64]).map_err(|e| e.kind());
        let wanted = match reset {
            true => Err(ErrorKind::ConnectionReset),
            false => Ok(0),
        };
        assert_eq!(end, wanted, "{text}");
        qp.destroy();
    }
}

fn three_queue_pairs(text: &str) -> (crate::objects::context::Context, [QueuePair; 3]) {
    let ctx = testing::context_with(Config {
        fault: Some(text.parse().unwrap()),
        ..Config::default()
    });
    let cq = ctx.create_cq(8, None).unwrap();
    let all = [(); 3].map(|()| testing::queue_pair(&ctx, &cq, &cq));
    (ctx, all)
}

#[test]
fn only_device_fatal_ends_connections() {
    use crate::fault::Event::{DeviceFatal, LidChange, PortError};
    let (qp, mut peer) = connected("seed=157;crc");
    let plan = plan_of(&qp.inner.ctx);
    for event in [PortError, LidChange] {
        plan.raise_everywhere(event);
        assert_eq!(qp.state(), iwarp_rnic::qp::State::Rts);
    }
    plan.raise_everywhere(DeviceFatal);
    wait_until("the queue pair has not failed", || {
        qp.state() == iwarp_rnic::qp::State::Error
    });
    let end = peer.read(&mut [0; 64]);
    assert!(!matches!(end, Ok(1..)), "the peer reads no data");
    qp.destroy();
}

/// The peer receives a wrong rkey; the rest of the request is unchanged.
#[test]
fn only_the_sent_key_is_wrong() {
    let key_of = |text: &str| {
        let (qp, mut peer) = connected(text);
        let write = SendWr {
            op: SendOp::Write {
                remote_addr: 0x1122_3344_5566_7788,
                rkey: 0x0a0b_0c0d,
            },
            ..SEND
        };
        qp.post_send(&[write]).unwrap();
        let mut octets = [0; 16];
        peer.read_exact(&mut octets).unwrap();
        // After the length and the control octets of DDP and RDMAP: the STag and the tagged offset.
        assert_eq!(octets[8..16], 0x1122_3344_5566_7788_u64.to_be_bytes());
        qp.destroy();
        u32::from_be_bytes([octets[4], octets[5], octets[6], octets[7]])
    };
    assert_eq!(key_of("seed=130;remote-access,nth=2"), 0x0a0b_0c0d);
    let wrong = key_of("seed=131;remote-access,nth=1");
    assert_ne!(wrong >> 8, 0x000a_0b0c);
}

/// A reset, a close and a rate limit take effect before the request that triggered them is sent.
#[test]
fn actions_precede_their_request() {
    for (text, reset) in [
        ("seed=132;reset,nth=1", true),
        ("seed=133;close,nth=1", false),
    ] {
        let (qp, mut peer) = connected(text);
        let _ = qp.post_send(&[SEND]);
        let end = peer.read_to_end(&mut Vec::new());
        match reset {
            true => assert!(end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset)),
            false => assert!(end.is_ok()),
        }
        qp.destroy();
    }
    let (qp, mut peer) = connected("seed=134;slow=1M,nth=1,dir=in");
    qp.post_send(&[SEND]).unwrap();
    assert!(peer.read(&mut [0; 64]).unwrap() > 0);
    let rate = QpInjector::of(&qp.inner).map(|faults| faults.state.lock().rate);
    assert_eq!(rate, Some([None, Some(1 << 20)]));
    qp.destroy();
}

#[test]
fn timed_device_fault_needs_no_opportunity() {
    use crate::objects::events::PortEvent::{Active, Error, LidChange};
    for (fault, notified) in [
        ("seed=140;port-down=20ms,time=1ms", &[Error, Active][..]),
        ("seed=141;port-down,time=1ms", &[Error]),
        ("seed=142;event=LID_CHANGE,time=1ms", &[LidChange]),
    ] {
        let ctx = testing::context_with(Config {
            fault: Some(fault.parse().unwrap()),
            ..Config::default()
        });
        for notified in notified {
            let event = ctx.async_event(Some(Duration::from_secs(20))).unwrap();
            match event.kind {
                AsyncEventKind::Port(event) => assert_eq!(event, *notified, "{fault}"),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(ctx.is_port_up(), notified.last() != Some(&Error), "{fault}");
        assert!(ctx.try_async_event().is_none(), "{fault}");
    }
}

/// The message waits although a receive is posted, and consumes it after the time. No thread polls
/// in the meantime.
#[test]
fn message_waits_while_receiver_not_ready() {
    // The control octets of DDP and RDMAP; the messages have no CRC and different numbers.
    let send = |number| {
        let mut octets = [0; 24];
        (octets[1], octets[2], octets[3], octets[15]) = (18, 0x41, 0x43, number);
        octets
    };
    let config = Config {
        fault: Some("seed=143;rnr=30ms,nth=2".parse().unwrap()),
        receiver_not_ready: crate::ReceiverNotReady::Hold(Duration::from_secs(60)),
        ..Config::default()
    };
    let ctx = testing::context_with(config);
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let mut peer = testing::connected(&qp);
    for number in 1..=3 {
        let wr_id = u64::from(number);
        qp.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap();
        let begin = Instant::now();
        peer.write_all(&send(number)).unwrap();
        wait_until("the message does not arrive", || !cq.is_empty());
        assert!(number != 2 || begin.elapsed() >= Duration::from_millis(30));
        let mut out = [iwarp_rnic::Cqe::default(); 2];
        assert_eq!(cq.take_ready(&mut out), Ok(1));
        assert_eq!((out[0].wr_id, out[0].status), (wr_id, WcStatus::Success));
    }
    qp.destroy();
}
