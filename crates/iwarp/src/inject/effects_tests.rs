//! Tests of the effects of each fault on a queue pair, of the targets of rules, and of delays. They
//! do not wait in real time.

use super::act::until;
use super::plan::{PROCESS, Plan};
use super::qp::{Action, QpInjector, op_of, op_of_completion};
use super::tests::expire_port_down;
use crate::config::Config;
use crate::fault::{Event, Ops};
use crate::objects::context::Context;
use crate::objects::events::{AsyncEventKind, PortEvent};
use crate::objects::hooks::{Completion, DeviceFaults, QpFaults, StreamDirection};
use crate::sys::clock::now_ns;
use crate::sys::raw_slice::RawSlice;
use crate::testing;
use iwarp_proto::ddp::Stag;
use iwarp_rnic::qp::Direction;
use iwarp_rnic::{Bind, Cqe, FastRegister, SendOp, WcOpcode, WcStatus};
use std::net::SocketAddr;
use std::sync::Arc;

const READ: SendOp = SendOp::Read {
    remote_addr: 16,
    rkey: 7,
};
const WRITE: SendOp = SendOp::Write {
    remote_addr: 16,
    rkey: 7,
};

fn plan(text: &str) -> Arc<Plan> {
    Plan::of(&text.parse().unwrap()).unwrap()
}

fn peer() -> SocketAddr {
    "192.0.2.7:7471".parse().unwrap()
}

/// Returns the faults of the plan's first queue pair, which has the number 0x77 and is connected.
fn faults(text: &str, crc: bool) -> Box<QpInjector> {
    let faults = QpInjector::new(&plan(text), 0x77);
    faults.connected(peer(), crc);
    faults
}

/// A reset in a forked child would end the parent's connection, whose socket both have.
#[test]
fn child_keeps_parents_connection() {
    let ctx = testing::context_with(Config {
        fault: Some("seed=252;log=/dev/null;rnr=1s,nth=2".parse().unwrap()),
        ..Config::default()
    });
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let peer = testing::connected(&qp);
    let link = testing::unwatched_link(&qp);
    let faults = QpInjector::of(&qp.inner).unwrap();
    let reset = || faults.execute(&qp.inner, Action::Reset);
    assert!(crate::sys::fork::check_in_child(|| {
        reset();
        true
    }));
    peer.set_nonblocking(true).unwrap();
    let unread = std::io::Read::read(&mut &peer, &mut [0]);
    assert_eq!(unread.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    assert!(!link.stream.is_hung_up());
    reset();
    testing::until("the connection is not reset", || {
        qp.inner.state.lock().link.is_none()
    });
    qp.destroy();
}

fn actions(faults: &QpInjector) -> Vec<Action> {
    std::mem::take(&mut faults.state.lock().actions)
}

/// Each kind of operation with its name in rules.
fn operations() -> [(SendOp, Ops); 12] {
    let bind = Bind {
        mw_stag: Stag(1),
        new_stag: Stag(1),
        mr_stag: Stag(2),
        addr: 0,
        len: 0,
        access: Default::default(),
    };
    let register = FastRegister {
        new_stag: Stag(1),
        offset: 0,
        len: 0,
        iova: 0,
        access: Default::default(),
        pages: None,
    };
    let (remote_addr, rkey) = (16, 7);
    [
        (SendOp::Send, Ops::SEND),
        (SendOp::SendImm(1), Ops::SEND),
        (SendOp::SendInv(1), Ops::SEND),
        (WRITE, Ops::WRITE),
        (
            SendOp::WriteImm {
                remote_addr,
                rkey,
                imm: 1,
            },
            Ops::WRITE,
        ),
        (SendOp::AtomicWrite { remote_addr, rkey }, Ops::WRITE),
        (READ, Ops::READ),
        (SendOp::ReadInv { remote_addr, rkey }, Ops::READ),
        (
            SendOp::FetchAdd {
                remote_addr,
                rkey,
                add: 1,
                mask: 0,
            },
            Ops::ATOMIC,
        ),
        (SendOp::LocalInvalidate { stag: Stag(1) }, Ops::LOCAL),
        (SendOp::Bind(bind), Ops::LOCAL),
        (SendOp::FastRegister(register), Ops::LOCAL),
    ]
}

#[test]
fn operations_have_rule_names() {
    for (op, name) in operations() {
        assert_eq!(op_of(&op), name, "{op:?}");
    }
    let completions = [
        (WcOpcode::Send, Ops::SEND),
        (WcOpcode::Write, Ops::WRITE),
        (WcOpcode::AtomicWrite, Ops::WRITE),
        (WcOpcode::Read, Ops::READ),
        (WcOpcode::CmpSwap, Ops::ATOMIC),
        (WcOpcode::FetchAdd, Ops::ATOMIC),
        (WcOpcode::Bind, Ops::LOCAL),
        (WcOpcode::LocalInvalidate, Ops::LOCAL),
        (WcOpcode::FastRegister, Ops::LOCAL),
        (WcOpcode::TagAdd, Ops::LOCAL),
        (WcOpcode::Recv, Ops::RECV),
        (WcOpcode::RecvWriteImm, Ops::RECV),
        (WcOpcode::TagRecv, Ops::RECV),
    ];
    for (opcode, name) in completions {
        assert_eq!(op_of_completion(opcode), name, "{opcode:?}");
    }
}

#[test]
fn request_faults_queue_actions() {
    let cases = [
        ("seed=200;reset", Action::Reset),
        ("seed=200;close", Action::Close),
        ("seed=200;delay=5ms", Action::Hold([true, false], 5_000_000)),
        (
            "seed=200;delay=5ms,dir=in",
            Action::Hold([false, true], 5_000_000),
        ),
        ("seed=200;stall", Action::Hold([true, true], u64::MAX)),
        (
            "seed=200;stall=2s,dir=out",
            Action::Hold([true, false], 2_000_000_000),
        ),
        ("seed=200;slow=6400", Action::Slow([true, true], 6400)),
        ("seed=200;event=SQ_DRAINED", Action::Event(Event::SqDrained)),
        ("seed=200;port-down=3ms", Action::PortDown(3_000_000)),
    ];
    for (text, action) in cases {
        let faults = faults(text, true);
        assert!(!faults.is_due(), "{text}");
        faults.posted(&SendOp::Send);
        assert!(faults.is_due(), "{text}");
        assert_eq!(actions(&faults), [action], "{text}");
        assert_eq!(faults.state.lock().flip_pending, [false; 2]);
    }
}

#[test]
fn bit_flip_is_queued_with_crcs() {
    for (text, crc, flip_pending) in [
        ("seed=201;crc,nth=1", true, [true, false]),
        ("seed=201;crc,nth=1,dir=in", true, [false, true]),
        ("seed=201;crc,nth=1,dir=both", true, [true, true]),
        ("seed=201;crc,nth=1,dir=both,qp=0x77", false, [false, false]),
    ] {
        let faults = faults(text, crc);
        faults.posted(&SendOp::Send);
        assert_eq!(faults.state.lock().flip_pending, flip_pending, "{text}");
        assert!(!faults.is_due());
    }
    // If the request is posted before the connection is up, the connection decides.
    for crc in [true, false] {
        let faults = QpInjector::new(
            &plan(&format!(
                "seed=202;crc,nth=1;log=/dev/{}",
                ["null", "zero"][usize::from(crc)]
            )),
            1,
        );
        faults.posted(&SendOp::Send);
        assert_eq!(faults.state.lock().flip_pending, [true, false]);
        faults.connected(peer(), crc);
        assert_eq!(faults.state.lock().flip_pending, [crc, false]);
    }
}

#[test]
fn rule_selects_its_targets() {
    let acts = |text: &str, op: &SendOp| {
        let faults = faults(text, true);
        faults.posted(op);
        !actions(&faults).is_empty()
    };
    // The ordinal numbers of a plan's queue pairs start at 1.
    assert!(acts("seed=203;reset,every=1,qp=1", &READ));
    assert!(!acts("seed=203;reset,every=1,qp=2", &READ));
    assert!(acts("seed=203;reset,every=1,qp=0x77", &READ));
    assert!(!acts("seed=203;reset,every=1,qp=0x78", &READ));
    assert!(acts("seed=203;reset,every=1,peer=192.0.2.7", &READ));
    assert!(!acts("seed=203;reset,every=1,peer=192.0.2.8", &READ));
    assert!(acts("seed=203;reset,every=1,op=write+read", &READ));
    assert!(!acts("seed=203;reset,every=1,op=write+send", &READ));
    assert!(!acts("seed=203;reset,every=1,op=read,qp=0x78", &READ));
    assert!(!acts("seed=203;reset,every=1,op=write,qp=0x77", &READ));
    assert!(!acts(
        "seed=203;reset,every=1,op=read,peer=192.0.2.8",
        &READ
    ));
    // Receives are opportunities only of rules with op=recv.
    for (text, counts) in [
        ("seed=204;reset,every=1", false),
        ("seed=204;reset,every=1,op=recv", true),
        ("seed=204;reset,every=1,op=send", false),
    ] {
        let faults = faults(text, true);
        faults.count_request(Ops::RECV);
        assert_eq!(faults.is_due(), counts, "{text}");
    }
    // A rule with a peer does not select an unconnected queue pair.
    let faults = QpInjector::new(&plan("seed=205;reset,every=1,peer=192.0.2.7"), 1);
    faults.posted(&READ);
    assert!(!faults.is_due());
}

#[test]
fn request_is_refused_or_gets_wrong_key() {
    let refusing = faults("seed=206;post,every=2,op=read+recv", true);
    let sends = [&READ, &WRITE, &READ, &READ, &READ].map(|op| refusing.refuses_send(op));
    assert_eq!(sends, [false, false, true, false, true]);
    assert_eq!([(); 2].map(|()| refusing.refuses_receive()), [false, true]);
    assert!(refusing.changed(&READ).is_none());

    let wrong = faults("seed=207;remote-access,every=1", true);
    for (op, name) in operations() {
        let changed = wrong.changed(&op);
        let has_key = matches!(name, Ops::WRITE | Ops::READ | Ops::ATOMIC);
        // An atomic write is not changed.
        let has_key = has_key && !matches!(op, SendOp::AtomicWrite { .. });
        assert_eq!(changed.is_some(), has_key, "{op:?}");
        assert_ne!(changed, Some(op));
    }
    let Some(SendOp::Read { remote_addr, rkey }) = wrong.changed(&READ) else {
        panic!("the operation is not a Read");
    };
    assert_eq!(remote_addr, 16);
    // The index into the peer's table differs, and not only the 8-bit key.
    assert_ne!(rkey >> 8, 0);
    // The index differs for every key.
    for rkey in [0, 0x5a5a_5a07, !0] {
        let remote_addr = 16;
        let changed = wrong.changed(&SendOp::Read { remote_addr, rkey });
        let Some(SendOp::Read { rkey: other, .. }) = changed else {
            panic!("the operation is not a Read");
        };
        assert_ne!(other >> 8, rkey >> 8, "{rkey:#x}");
    }
    assert!(!wrong.refuses_send(&READ));
    assert!(
        faults("seed=208;remote-access,nth=2", true)
            .changed(&READ)
            .is_none()
    );
}

#[test]
fn failed_completion_flushes_later_ones() {
    use Completion::{Lost, ThenAct, Written};
    use WcStatus::{Flushed, RemoteAccess, RemoteOperation, Success};
    let cqe = |opcode, status| Cqe {
        opcode,
        status,
        ..Cqe::default()
    };
    let complete = |faults: &QpInjector, direction, mut cqe: Cqe| {
        let outcome = faults.completed(direction, &mut cqe);
        (outcome, cqe.status)
    };
    let send = |faults: &QpInjector, opcode, status| {
        complete(faults, Direction::Send, cqe(opcode, status))
    };
    let failing = faults("seed=209;status=REM_ACCESS_ERR,op=write,nth=2", true);
    for (opcode, status, outcome) in [
        (WcOpcode::Send, Success, (Written, Success)),
        (WcOpcode::Write, Success, (Written, Success)),
        // A completion with an error is not an opportunity.
        (WcOpcode::Write, RemoteOperation, (Written, RemoteOperation)),
        (WcOpcode::Write, Success, (ThenAct, RemoteAccess)),
        (WcOpcode::Send, Success, (Written, Flushed)),
    ] {
        assert_eq!(send(&failing, opcode, status), outcome);
    }
    assert_eq!(actions(&failing), [Action::Fail { terminate: false }]);
    // A Terminate is sent only for local failures.
    let notified = [
        ("LOC_LEN_ERR", true),
        ("LOC_PROT_ERR", true),
        ("GENERAL_ERR", true),
        ("REM_INV_REQ_ERR", false),
        ("REM_OP_ERR", false),
        ("RETRY_EXC_ERR", false),
        ("RNR_RETRY_EXC_ERR", false),
        ("RESP_TIMEOUT_ERR", false),
    ];
    for (status, terminate) in notified {
        let faults = faults(&format!("seed=210;status={status}"), true);
        assert_eq!(send(&faults, WcOpcode::Read, Success).0, ThenAct);
        assert_eq!(actions(&faults), [Action::Fail { terminate }], "{status}");
    }
    let lost = faults("seed=211;cq-overflow", true);
    assert_eq!(send(&lost, WcOpcode::Read, Success), (Lost, Success));
    assert_eq!(send(&lost, WcOpcode::Read, Success), (Written, Success));

    // Receives.
    let received =
        |faults: &QpInjector| complete(faults, Direction::Recv, cqe(WcOpcode::Recv, Success));
    let by_receive = faults("seed=212;reset,op=recv,nth=2", true);
    assert_eq!(received(&by_receive), (Written, Success));
    assert_eq!(received(&by_receive), (ThenAct, Success));
    assert_eq!(actions(&by_receive), [Action::Reset]);
    let other = faults("seed=213;status=GENERAL_ERR,op=send", true);
    assert_eq!(received(&other), (Written, Success));
    assert!(!other.is_due());
}

#[test]
fn message_without_receive_is_held() {
    let starved = faults("seed=214;rnr,nth=2,qp=0x77", true);
    assert!(starved.receiver_ready() && !starved.starves());
    assert!(!starved.receiver_ready() && starved.starves());
    assert_eq!(actions(&starved), [Action::Starve(u64::MAX)]);
    // Messages that arrive while the receiver is not ready are not counted.
    assert!(!starved.receiver_ready());
    assert!(!starved.is_due());
    // The time ends.
    starved.state.lock().starved_until = now_ns() - 1;
    assert!(!starved.starves() && starved.receiver_ready());
    let other = faults("seed=215;rnr,every=1,qp=0x78", true);
    assert!(other.receiver_ready() && !other.is_due());
}

/// Returns the lengths to which two slices of 100 and 1000 octets are shortened.
fn limited(faults: &QpInjector, direction: StreamDirection) -> Vec<usize> {
    let (a, b) = ([0u8; 100], [0u8; 1000]);
    let mut runs = vec![RawSlice::of(&a), RawSlice::of(&b)];
    faults.limit(direction, &mut runs);
    runs.iter().map(RawSlice::len).collect()
}

#[test]
fn fault_occurs_after_octet_count() {
    for (text, direction, other) in [
        (
            "seed=216;reset,bytes=250",
            StreamDirection::Out,
            StreamDirection::In,
        ),
        (
            "seed=216;reset,bytes=250,dir=in",
            StreamDirection::In,
            StreamDirection::Out,
        ),
    ] {
        let faults = faults(text, true);
        assert_eq!(limited(&faults, direction), [100, 150]);
        assert_eq!(limited(&faults, other), [100, 1000]);
        faults.passed_octets(other, 1000);
        faults.passed_octets(direction, 170);
        assert_eq!(limited(&faults, direction), [80]);
        faults.passed_octets(direction, 79);
        assert_eq!(limited(&faults, direction), [1]);
        assert!(!faults.is_due());
        faults.passed_octets(direction, 1);
        assert_eq!(actions(&faults), [Action::Reset]);
        // The fault occurs once per connection.
        faults.passed_octets(direction, 1000);
        assert!(!faults.is_due());
        assert_eq!(limited(&faults, direction), [100, 1000]);
    }
    // Before the time of `time=`, the rule does not inject its fault.
    for (time, acts) in [("0s", true), ("1000s", false)] {
        let faults = faults(&format!("seed=228;reset,bytes=250,time={time}"), true);
        faults.passed_octets(StreamDirection::Out, 251);
        assert_eq!(faults.is_due(), acts, "{time}");
    }
    // The next connection counts from zero. The lower of two counts limits a transfer.
    let text = "seed=217;close,bytes=50,times=2;reset,bytes=30,times=1;delay=1s,every=1,op=read";
    let faults = faults(text, true);
    for (first, second) in [(Some(Action::Reset), 30), (None, 30)] {
        assert_eq!(limited(&faults, StreamDirection::Out), [30]);
        faults.passed_octets(StreamDirection::Out, second);
        assert_eq!(actions(&faults), Vec::from_iter(first));
        assert_eq!(limited(&faults, StreamDirection::Out), [20]);
        faults.passed_octets(StreamDirection::Out, 21);
        assert_eq!(actions(&faults), [Action::Close]);
        faults.connected(peer(), true);
    }
}

#[test]
fn slow_connection_moves_data_in_steps() {
    let faults = faults("seed=218;slow=6400,dir=out", true);
    faults.posted(&SendOp::Send);
    let [Action::Slow(directions, rate)] = actions(&faults)[..] else {
        panic!("the rule does not slow the connection");
    };
    assert_eq!((directions, rate), ([true, false], 6400));
    // As `Action::Slow` does.
    faults.state.lock().rate[StreamDirection::Out.index()] = Some(rate);
    assert_eq!(limited(&faults, StreamDirection::Out), [100, 28]);
    assert_eq!(limited(&faults, StreamDirection::In), [100, 1000]);
    let before = until(20_000_000);
    faults.passed_octets(StreamDirection::Out, 128);
    let held = faults.state.lock().held_until;
    assert!((before..=until(20_000_000)).contains(&held[0]), "{held:?}");
    assert_eq!(held[1], 0);
    faults.passed_octets(StreamDirection::In, 128);
    assert_eq!(faults.state.lock().held_until[1], 0);
    // A step has at least 64 octets.
    faults.state.lock().rate[StreamDirection::Out.index()] = Some(100);
    assert_eq!(limited(&faults, StreamDirection::Out), [64]);
}

#[test]
fn delays_apply_per_direction() {
    let faults = faults("seed=219;stall,nth=9", true);
    for (held, expected) in [
        ([0, 0], [false, false]),
        ([u64::MAX, 0], [true, false]),
        ([0, u64::MAX], [false, true]),
        ([1, 1], [false, false]),
    ] {
        faults.state.lock().held_until = held;
        assert_eq!(
            StreamDirection::BOTH.map(|direction| faults.holds(direction)),
            expected
        );
    }
    // Data that is already held is not delayed again.
    let held = |until| {
        let faults = self::faults("seed=220;delay=1s,every=1,dir=both", true);
        faults.state.lock().held_until = until;
        faults.posted(&SendOp::Send);
        !faults.is_due()
    };
    let later = u64::MAX;
    assert!(held([later; 2]));
    assert!(!held([later, 0]) && !held([0, later]) && !held([0; 2]));
}

/// A new connection counts its octets from zero. Pending actions and delays are kept.
#[test]
fn new_connection_resets_counts() {
    let faults = QpInjector::new(&plan("seed=221;reset,nth=1;close,nth=3"), 0x77);
    faults.posted(&READ);
    {
        let mut state = faults.state.lock();
        state.octets = [5, 6];
        state.held_until = [7, 8];
        state.rate = [Some(9), None];
        state.starved_until = u64::MAX;
        state.failing = true;
    }
    faults.connected(peer(), true);
    {
        let state = faults.state.lock();
        assert_eq!(
            (state.counts.as_slice(), state.peer),
            (&[1, 1][..], Some(peer()))
        );
        assert_eq!((state.octets, state.held_until), ([0; 2], [7, 8]));
        assert_eq!((state.rate, state.starved_until), ([Some(9), None], 0));
        assert!(state.crc && !state.failing);
        assert_eq!(state.reached, [false; 2]);
    }
    assert_eq!(actions(&faults), [Action::Reset]);
    faults.posted(&READ);
    faults.posted(&READ);
    assert_eq!(actions(&faults), [Action::Close]);
}

fn context(text: &str) -> Context {
    testing::context_with(Config {
        fault: Some(text.parse().unwrap()),
        ..Config::default()
    })
}

fn port_events(ctx: &Context) -> Vec<PortEvent> {
    let events = std::iter::from_fn(|| ctx.try_async_event());
    let ports = events.map(|event| match event.kind {
        AsyncEventKind::Port(event) => event,
        other => panic!("{other:?}"),
    });
    ports.collect()
}

#[test]
fn port_events_reach_all_devices() {
    let devices = [0; 2].map(|_| context("seed=222;crc"));
    let other = context("seed=223;crc");
    let plan = plan("seed=222;crc");
    let pairs = [
        (Event::PortActive, PortEvent::Active),
        (Event::PortError, PortEvent::Error),
        (Event::LidChange, PortEvent::LidChange),
        (Event::PkeyChange, PortEvent::PkeyChange),
        (Event::SmChange, PortEvent::SmChange),
        (Event::ClientReregister, PortEvent::ClientReregister),
        (Event::GidChange, PortEvent::GidChange),
        (Event::DeviceFatal, PortEvent::DeviceFatal),
    ];
    for (event, notified) in pairs {
        plan.raise_everywhere(event);
        for ctx in &devices {
            assert_eq!(port_events(ctx), [notified]);
        }
    }
    plan.raise_everywhere(Event::SqDrained);
    assert_eq!(port_events(&devices[0]), []);
    // The port goes down, stays down longer, and comes up.
    assert!(devices[0].is_port_up());
    for notified in [&[PortEvent::Error][..], &[]] {
        plan.port_down(u64::MAX);
        for ctx in &devices {
            assert!(!ctx.is_port_up());
            assert_eq!(port_events(ctx), notified);
        }
    }
    assert_eq!(plan.connect(peer()), Some(libc::EHOSTUNREACH));
    expire_port_down(&plan);
    assert!(devices[1].is_port_up() && plan.end_port_down());
    assert_eq!(plan.connect(peer()), None);
    for ctx in &devices {
        assert_eq!(port_events(ctx), [PortEvent::Active]);
    }
    assert!(other.is_port_up() && port_events(&other).is_empty());
}

#[test]
fn connects_and_creations_fail_by_rule() {
    let plan = plan("seed=224;refuse,nth=2,peer=192.0.2.0/24;unreachable,nth=2,peer=192.0.2.7");
    let other = "198.51.100.1:1".parse().unwrap();
    let asked = [peer(), other, peer(), peer()].map(|peer| plan.connect(peer));
    // Where the first rule injects a fault, the second rule does not count an opportunity.
    let expected = [
        None,
        None,
        Some(libc::ECONNREFUSED),
        Some(libc::EHOSTUNREACH),
    ];
    assert_eq!(asked, expected);
    let ctx = context("seed=225;create=cq,nth=2;create=srq,nth=1,errno=EMFILE");
    assert!(ctx.create_cq(1, None).is_ok());
    assert!(matches!(
        ctx.create_cq(1, None),
        Err(crate::Error::OutOfMemory)
    ));
    assert!(ctx.create_cq(1, None).is_ok());
    let pd = ctx.allocate_pd();
    let refused = ctx.create_srq(pd, 4, 1).unwrap_err();
    assert_eq!(refused.errno(), libc::EMFILE);
    assert!(ctx.create_srq(pd, 4, 1).is_ok());
}

#[test]
fn unselective_rules_refuse_shared_receives() {
    for (rule, refuses) in [
        ("post,every=1", true),
        ("post,every=1,op=recv", true),
        ("post,every=1,op=send+recv", true),
        ("post,every=1,op=send", false),
        ("post,every=1,qp=1", false),
        ("post,every=1,peer=192.0.2.7", false),
        ("remote-access,every=1", false),
        ("post,nth=2", false),
    ] {
        let plan = plan(&format!("seed=226;{rule}"));
        assert_eq!(plan.refuses_shared_receive(), refuses, "{rule}");
    }
}

/// A seed has the same effect in every version, so that users can replay results of older versions.
#[test]
fn seed_has_same_effect_in_all_versions() {
    let plan = plan("seed=227;reset,bytes=1..1000000;delay=1ms,time=1s..1000s,p=0.5");
    assert_eq!(plan.threshold(0, 1), Some(THRESHOLD));
    assert_eq!(plan.threshold(1, 1), None);
    let begin = plan.earliest(0, PROCESS);
    assert_eq!(plan.earliest(1, 1) - begin, AFTER);
    assert_eq!(plan.draw(1, 2, 3, "p"), DRAWN);
    let others = [
        plan.draw(0, 2, 3, "p"),
        plan.draw(1, 1, 3, "p"),
        plan.draw(1, 2, 4, "p"),
        plan.draw(1, 2, 3, "q"),
    ];
    assert!(!others.contains(&DRAWN));
}

// Computed by an independent program.
const THRESHOLD: u64 = 514_554;
const AFTER: u64 = 419_043_446_496;
const DRAWN: u64 = 0xd3a8_9f83_e995_ab25;

/// The log starts with the specification and its seed. Each fault then has a line with its target.
#[test]
fn log_names_fault_and_target() {
    let path = std::env::temp_dir().join(format!("iwarp-fault-log-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let text = format!("post,nth=2;reset,bytes=100;rnr=2ms;log={}", path.display());
    let plan = plan(&text);
    let faults = QpInjector::new(&plan, 0x77);
    faults.connected(peer(), true);
    assert!(!faults.refuses_send(&READ) && faults.refuses_send(&READ));
    let pause = std::time::Duration::from_millis(1100);
    std::thread::sleep(pause);
    faults.passed_octets(StreamDirection::Out, 120);
    assert!(!faults.receiver_ready());
    let log = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let lines: Vec<&str> = log.lines().collect();
    let begin = format!("iwarp fault: pid={} t=", std::process::id());
    let seed = format!("seed={}", plan.seed);
    let times = lines.iter().map(|line| {
        assert!(line.starts_with(&begin) && line.contains(&seed), "{line}");
        let time = line[begin.len()..].split(' ').next().unwrap();
        let (s, us) = time.split_once('.').unwrap();
        let (s, us) = (
            s.parse::<u64>().unwrap(),
            us.parse::<u64>().ok().filter(|_| us.len() == 6),
        );
        assert!(s < 600, "{line}");
        s * 1_000_000 + us.expect("six digits")
    });
    let times: Vec<u64> = times.collect();
    assert!(times.is_sorted(), "{log}");
    assert!(
        u128::from(times[2] - times[1]) >= pause.as_micros(),
        "{log}"
    );
    assert_eq!(lines.len(), 4);
    assert!(
        lines[0].ends_with(&format!("spec=\"{seed};{text}\"")),
        "{log}"
    );
    let target = "qp=1 num=0x000077 peer=192.0.2.7:7471";
    for (line, end) in lines[1..].iter().zip([
        format!("rule=1 post {target} op=read n=2"),
        format!("rule=2 reset {target} bytes=120"),
        format!("rule=3 rnr=2000us {target} n=1"),
    ]) {
        assert!(line.ends_with(&end), "{line}\n{end}");
    }
}

/// A fault without a queue pair is logged with the peer, object or operation.
#[test]
fn log_contains_faults_without_queue_pair() {
    let path = std::env::temp_dir().join(format!("iwarp-fault-log-2-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let text = format!(
        "seed=229;unreachable,nth=2;create=cq,nth=1;post,op=recv,nth=1;log={}",
        path.display()
    );
    let ctx = context(&text);
    let plan = super::tests::plan_of(&ctx.inner);
    assert!(plan.connect(peer()).is_none() && plan.connect(peer()).is_some());
    assert!(ctx.create_cq(1, None).is_err());
    assert!(plan.refuses_shared_receive());
    let log = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let rules = log.lines().skip(1).map(|line| {
        let start = line.find("rule=").unwrap();
        &line[start..]
    });
    let expected = [
        "rule=1 unreachable peer=192.0.2.7:7471 n=2",
        "rule=2 create=cq,errno=ENOMEM n=1",
        "rule=3 post op=recv n=1",
    ];
    assert_eq!(rules.collect::<Vec<_>>(), expected);
}

#[test]
fn slow_step_keeps_longer_delay() {
    let faults = faults("seed=230;slow=6400,dir=out", true);
    let end = until(3_600_000_000_000);
    {
        let mut state = faults.state.lock();
        state.rate[StreamDirection::Out.index()] = Some(6400);
        state.held_until[StreamDirection::Out.index()] = end;
    }
    faults.passed_octets(StreamDirection::Out, 128);
    assert_eq!(
        faults.state.lock().held_until[StreamDirection::Out.index()],
        end
    );
}

#[test]
fn port_down_holds_both_directions() {
    let faults = faults("seed=231;stall,nth=9", true);
    assert!(
        !StreamDirection::BOTH
            .iter()
            .any(|direction| faults.holds(*direction))
    );
    faults.plan.port_down(u64::MAX);
    assert!(
        StreamDirection::BOTH
            .iter()
            .all(|direction| faults.holds(*direction))
    );
}
