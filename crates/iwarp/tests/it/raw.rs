//! Tests of `iwarp::runtime` over loopback in one process: all operations with each framing option,
//! and connection management.

mod identifiers;

use crate::common::words::{Mem, poll};
use iwarp::runtime::cm::{CmEvent, CmEventKind, CmId, ConnectionParameters};
use iwarp::runtime::{
    CompletionQueue, Context, QpAttributes, QueuePair, State, create_event_channel,
};
use iwarp::{Access, Config, Device, Error};
use iwarp_rnic::{Cqe, PostError, RecvWr, SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const WAIT: Option<Duration> = Some(Duration::from_secs(10));

struct End {
    ctx: Context,
    pd: u32,
    cq: CompletionQueue,
    qp: QueuePair,
    id: CmId,
}

fn attributes(pd: u32, cq: &CompletionQueue) -> QpAttributes {
    QpAttributes {
        pd,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        unreliable: false,
        max_send_wr: 128,
        max_recv_wr: 128,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 256,
        signal_all: false,
        max_ird: 16,
        max_ord: 16,
    }
}

fn qp(ctx: &Context, pd: u32, cq: &CompletionQueue) -> QueuePair {
    ctx.create_qp(&attributes(pd, cq)).unwrap()
}

fn expect(channel: &iwarp::runtime::EventQueue<CmEvent>, kind: CmEventKind) -> CmEvent {
    let event = channel.next(WAIT).unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

fn pair(config: &Config) -> (End, End) {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let channel = create_event_channel().unwrap();
    let (sctx, cctx) = (
        Context::open(&device, config.clone()).unwrap(),
        Context::open(&device, config.clone()).unwrap(),
    );
    let listener = CmId::create(&channel, Some(&sctx));
    listener
        .bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .unwrap();
    listener.listen(4).unwrap();
    let address = listener.addresses().0.unwrap();

    let cchannel = create_event_channel().unwrap();
    let id = CmId::create(&cchannel, Some(&cctx));
    id.resolve_addr(None, address).unwrap();
    expect(&cchannel, CmEventKind::AddrResolved);
    id.resolve_route().unwrap();
    expect(&cchannel, CmEventKind::RouteResolved);
    let (cpd, ccq) = (cctx.allocate_pd(), cctx.create_cq(1024, None).unwrap());
    let cqp = qp(&cctx, cpd, &ccq);
    id.set_queue_pair(Some(&cqp));
    id.connect(&ConnectionParameters {
        private_data: b"hello".to_vec(),
        ..Default::default()
    })
    .unwrap();

    let request = expect(&channel, CmEventKind::ConnectRequest);
    assert_eq!(request.private_data, b"hello");
    let (spd, scq) = (sctx.allocate_pd(), sctx.create_cq(1024, None).unwrap());
    let sqp = qp(&sctx, spd, &scq);
    request.id.set_queue_pair(Some(&sqp));
    request
        .id
        .accept(&ConnectionParameters {
            private_data: b"welcome".to_vec(),
            ..Default::default()
        })
        .unwrap();
    let e = expect(&cchannel, CmEventKind::Established);
    assert_eq!(e.private_data, b"welcome");
    expect(&channel, CmEventKind::Established);
    listener.destroy();
    let server = End {
        ctx: sctx,
        pd: spd,
        cq: scq,
        qp: sqp,
        id: request.id,
    };
    let client = End {
        ctx: cctx,
        pd: cpd,
        cq: ccq,
        qp: cqp,
        id,
    };
    (client, server)
}

fn send(end: &End, op: SendOp, sges: &[Sge]) {
    end.qp
        .post_send(&[SendWr {
            wr_id: 7,
            op,
            flags: SendFlags::SIGNALED,
            sges,
            inline: &[],
        }])
        .unwrap();
}

/// Sends `len` octets, then writes others and reads them back.
fn transfer(c: &End, s: &End, (cm, sm): (&Mem, &Mem), len: u32) {
    cm.fill(u64::from(len) + 1);
    sm.fill(0);
    s.qp.post_recv(&[RecvWr {
        wr_id: 9,
        sges: &[sm.sge(1 << 20)],
    }])
    .unwrap();
    send(c, SendOp::Send, &[cm.sge(len)]);
    assert_eq!(poll(&c.cq).status, WcStatus::Success);
    let got = poll(&s.cq);
    assert_eq!(
        (got.status, got.opcode, got.byte_len, got.wr_id),
        (WcStatus::Success, WcOpcode::Recv, len, 9)
    );
    for i in 0..len as usize / 8 {
        assert_eq!(sm.word(i), cm.word(i), "{len} {i}");
    }
    // Write, then Read it back into a cleared buffer.
    cm.fill(u64::from(len) + 2);
    let (remote_addr, rkey) = (sm.addr(), sm.stag);
    send(c, SendOp::Write { remote_addr, rkey }, &[cm.sge(len)]);
    assert_eq!(poll(&c.cq).status, WcStatus::Success);
    let want: Vec<u64> = (0..len as usize / 8).map(|i| cm.word(i)).collect();
    cm.fill(0);
    send(c, SendOp::Read { remote_addr, rkey }, &[cm.sge(len)]);
    let got = poll(&c.cq);
    assert_eq!(
        (got.status, got.opcode),
        (WcStatus::Success, WcOpcode::Read)
    );
    for (i, w) in want.iter().enumerate() {
        assert_eq!(cm.word(i), *w, "{len} {i}");
    }
}

fn all_operations(config: &Config) {
    let (c, s) = pair(config);
    let (cm, sm) = (
        Mem::new(&c.ctx, c.pd, 1 << 20),
        Mem::new(&s.ctx, s.pd, 1 << 20),
    );
    for len in [8u32, 0, 64, 4096, 65536, 200_000, 1 << 20] {
        transfer(&c, &s, (&cm, &sm), len);
    }
    sm.fill(100);
    send(
        &c,
        SendOp::FetchAdd {
            remote_addr: sm.addr(),
            rkey: sm.stag,
            add: 5,
            mask: 0,
        },
        &[cm.sge(8)],
    );
    assert_eq!(poll(&c.cq).status, WcStatus::Success);
    assert_eq!((cm.word(0), sm.word(0)), (100, 105));
    assert!(c.qp.fault().is_none() && s.qp.fault().is_none());
    let (c_ch, s_ch) = (c.id.channel(), s.id.channel());
    c.id.disconnect().unwrap();
    expect(&c_ch, CmEventKind::Disconnected);
    expect(&s_ch, CmEventKind::Disconnected);
    c.qp.destroy();
    s.qp.destroy();
    c.ctx.deregister(cm.stag).unwrap();
    s.ctx.deregister(sm.stag).unwrap();
}

#[test]
fn operations_with_crc() {
    all_operations(&Config::default());
}

#[test]
fn operations_without_crc() {
    //= rfc5044 section 4.4
    //= type=test
    //# The process MUST be invisible to the ULP.
    let mut config = Config::default();
    config.crc = false;
    all_operations(&config);
}

#[test]
fn operations_with_markers() {
    let mut config = Config::default();
    config.markers = true;
    all_operations(&config);
}

#[test]
fn operations_with_small_segments() {
    let mut config = Config::default();
    config.mss = Some(1460);
    all_operations(&config);
}

#[test]
fn placed_writes_complete_after_placement() {
    let mut config = Config::default();
    config.placed = true;
    all_operations(&config);
    let (c, s) = pair(&config);
    let (cm, sm) = (Mem::new(&c.ctx, c.pd, 64), Mem::new(&s.ctx, s.pd, 64));
    for value in 1..200 {
        cm.fill(value);
        let op = SendOp::Write {
            remote_addr: sm.addr(),
            rkey: sm.stag,
        };
        let wr = SendWr {
            wr_id: value,
            op,
            flags: SendFlags::SIGNALED,
            sges: &[cm.sge(8)],
            inline: &[],
        };
        c.qp.post_send(&[wr]).unwrap();
        assert_eq!(poll(&c.cq).status, WcStatus::Success);
        assert_eq!(sm.word(0), value);
    }
    // The responder is notified of the end, as on every connection of the connection manager.
    c.id.disconnect().unwrap();
    let end = Instant::now() + WAIT.unwrap();
    while s.qp.state() != State::Error {
        assert!(Instant::now() < end, "the end was not reported");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn connect_before_listen_succeeds() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let (channel, cchannel) = (
        create_event_channel().unwrap(),
        create_event_channel().unwrap(),
    );
    let bound = || {
        let listener = CmId::create(&channel, Some(&ctx));
        listener
            .bind(SocketAddr::from(([127, 0, 0, 1], 0)))
            .unwrap();
        let address = listener.addresses().0.unwrap();
        (listener, address)
    };
    let start = |address| {
        let id = CmId::create(&cchannel, Some(&ctx));
        id.resolve_addr(None, address).unwrap();
        expect(&cchannel, CmEventKind::AddrResolved);
        id.resolve_route().unwrap();
        expect(&cchannel, CmEventKind::RouteResolved);
        let cq = ctx.create_cq(16, None).unwrap();
        id.set_queue_pair(Some(&qp(&ctx, ctx.allocate_pd(), &cq)));
        id.connect(&ConnectionParameters::default()).unwrap();
        id
    };
    let (listener, address) = bound();
    let refused = start(address);
    // If no socket ever listens, the attempt is refused after a while.
    let e = expect(&cchannel, CmEventKind::Rejected);
    assert_eq!(e.status, 111);
    refused.destroy();
    listener.destroy();
    let succeeds = |_| {
        let (listener, address) = bound();
        let id = start(address);
        std::thread::sleep(Duration::from_millis(1));
        listener.listen(1).unwrap();
        let end = Instant::now() + WAIT.unwrap();
        let event = loop {
            if let Some(event) = channel.try_next().or_else(|| cchannel.try_next()) {
                break event;
            }
            assert!(Instant::now() < end, "no event");
            std::thread::yield_now();
        };
        id.destroy();
        listener.destroy();
        event.kind == CmEventKind::ConnectRequest
    };
    // On a busy machine this thread may listen too late, so one success in some attempts is enough.
    assert!((0..20).any(succeeds));
    // An attempt that is destroyed during a pause between two tries reports no event.
    let (listener, address) = bound();
    let given_up = start(address);
    given_up.destroy();
    listener.destroy();
    assert!(cchannel.next(Some(Duration::from_millis(300))).is_err());
}

#[test]
fn timewait_exit_is_reported_after_disconnected() {
    let (c, s) = pair(&Config::default());
    let (c_ch, s_ch) = (c.id.channel(), s.id.channel());
    let other = pair(&Config::default());
    let (gone_ch, gone) = (other.0.id.channel(), other.0);
    for end in [&c, &gone] {
        end.id.disconnect().unwrap();
    }
    expect(&gone_ch, CmEventKind::Disconnected);
    gone.id.destroy();
    for channel in [&c_ch, &s_ch] {
        expect(channel, CmEventKind::Disconnected);
        let e = expect(channel, CmEventKind::TimewaitExit);
        assert_eq!(e.status, 0);
    }
    // The destroyed identifier must not get a `TimewaitExit`. It would have arrived by now.
    assert!(gone_ch.is_empty());
}

/// The peer sends its next message only after it has received our answer. Therefore the completion
/// of the answer must precede the completion of the receive of that message.
#[test]
fn send_completes_before_its_answer() {
    const ROUNDS: usize = 4000;
    let (c, s) = pair(&Config::default());
    let (cm, sm) = (Mem::new(&c.ctx, c.pd, 64), Mem::new(&s.ctx, s.pd, 64));
    let post = |end: &End, mem: &Mem| {
        let sges = [mem.sge(64)];
        let wr = RecvWr {
            wr_id: 1,
            sges: &sges,
        };
        end.qp.post_recv(&[wr]).unwrap();
    };
    for _ in 0..4 {
        post(&c, &cm);
        post(&s, &sm);
    }
    let next = |end: &End| {
        let mut out = [Cqe::default()];
        assert_eq!(end.cq.wait(&mut out, WAIT).unwrap(), 1);
        assert_eq!(out[0].status, WcStatus::Success);
        out[0].opcode
    };
    send(&c, SendOp::Send, &[cm.sge(64)]);
    let server = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            assert_eq!(next(&s), WcOpcode::Recv, "{round}");
            post(&s, &sm);
            send(&s, SendOp::Send, &[sm.sge(64)]);
            assert_eq!(
                next(&s),
                WcOpcode::Send,
                "round {round}: the answer to this Send arrived before its completion"
            );
        }
    });
    for round in 0..ROUNDS {
        assert_eq!(
            next(&c),
            WcOpcode::Send,
            "round {round}: the answer to this Send arrived before its completion"
        );
        assert_eq!(next(&c), WcOpcode::Recv, "{round}");
        post(&c, &cm);
        if round + 1 < ROUNDS {
            send(&c, SendOp::Send, &[cm.sge(64)]);
        }
    }
    server.join().unwrap();
}

/// The queue pair's access flags limit the peer's access, even if the memory region allows more.
#[test]
fn qp_access_flags_limit_peer() {
    let (c, s) = pair(&Config::default());
    let (cm, sm) = (Mem::new(&c.ctx, c.pd, 64), Mem::new(&s.ctx, s.pd, 64));
    let (remote_addr, rkey) = (sm.addr(), sm.stag);
    let write = SendOp::Write { remote_addr, rkey };
    let read = SendOp::Read { remote_addr, rkey };
    s.qp.set_remote_access(Access::REMOTE_READ | Access::REMOTE_WRITE);
    cm.fill(7);
    for op in [write, read] {
        send(&c, op, &[cm.sge(8)]);
        assert_eq!(poll(&c.cq).status, WcStatus::Success);
    }
    s.qp.set_remote_access(Access::REMOTE_READ);
    send(&c, read, &[cm.sge(8)]);
    assert_eq!(poll(&c.cq).status, WcStatus::Success);
    cm.fill(8);
    // The Write may complete when TCP has accepted it. Later requests do not.
    send(&c, write, &[cm.sge(8)]);
    send(&c, read, &[cm.sge(8)]);
    poll(&c.cq);
    assert_ne!(poll(&c.cq).status, WcStatus::Success);
    assert_eq!(sm.word(0), 7);
}

#[test]
fn completions_have_requested_timestamps() {
    let (c, s) = pair(&Config::default());
    let (cm, sm) = (Mem::new(&c.ctx, c.pd, 64), Mem::new(&s.ctx, s.pd, 64));
    let write = SendOp::Write {
        remote_addr: sm.addr(),
        rkey: sm.stag,
    };
    let stamp = || {
        send(&c, write, &[cm.sge(8)]);
        poll(&c.cq).timestamp_ns
    };
    assert_eq!([stamp(), stamp()], [0, 0]);
    c.cq.enable_timestamps();
    let [first, second] = [stamp(), stamp()];
    assert!(0 < first && first <= second, "{first} {second}");
    // Its answer proves that all Writes are placed, so the memory may be freed.
    let read = SendOp::Read {
        remote_addr: sm.addr(),
        rkey: sm.stag,
    };
    send(&c, read, &[cm.sge(8)]);
    assert_eq!(poll(&c.cq).status, WcStatus::Success);
}

/// A list that is longer than the queue is posted in parts. Each poll makes room for further
/// requests, and each request is executed once.
#[test]
fn polling_makes_room_for_long_lists() {
    const LEN: usize = 300;
    let (c, s) = pair(&Config::default());
    let sm = Mem::new(&s.ctx, s.pd, 8 * LEN);
    let values: Vec<[u8; 8]> = (1..=LEN as u64).map(u64::to_ne_bytes).collect();
    let inline: Vec<[&[u8]; 1]> = values.iter().map(|value| [value.as_slice()]).collect();
    let write = |i: usize| {
        let op = SendOp::Write {
            remote_addr: sm.addr() + 8 * i as u64,
            rkey: sm.stag,
        };
        SendWr {
            wr_id: i as u64,
            op,
            flags: match i + 1 == LEN || i % 16 == 15 {
                true => SendFlags::INLINE | SendFlags::SIGNALED,
                false => SendFlags::INLINE,
            },
            sges: &[],
            inline: &inline[i],
        }
    };
    let list: Vec<SendWr<'_>> = (0..LEN).map(write).collect();
    for round in 1..=20 {
        let (mut rest, mut last) = (list.as_slice(), 0);
        let next = || {
            let done = poll(&c.cq);
            assert_eq!(done.status, WcStatus::Success);
            done.wr_id
        };
        while let Err(failed) = c.qp.post_send(rest) {
            assert!(matches!(failed.error(), Error::Post(PostError::QueueFull)));
            rest = &rest[failed.accepted()..];
            last = next();
        }
        assert!(rest.len() < LEN, "the queue has accepted the whole list");
        while last != LEN as u64 - 1 {
            last = next();
        }
        assert_eq!(c.qp.counters().tx_messages, round * LEN as u64);
    }
    send(
        &c,
        SendOp::Read {
            remote_addr: sm.addr(),
            rkey: sm.stag,
        },
        &[],
    );
    assert_eq!(poll(&c.cq).status, WcStatus::Success);
    for (i, value) in values.iter().enumerate() {
        assert_eq!(sm.word(i).to_ne_bytes(), *value);
    }
}

#[test]
fn destroyed_queue_drops_its_events() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let (pd, channel) = (ctx.allocate_pd(), ctx.create_channel().unwrap());
    let cqs = [(); 2].map(|()| ctx.create_cq(4, Some(&channel)).unwrap());
    let qps = cqs.each_ref().map(|cq| qp(&ctx, pd, cq));
    for (qp, cq) in qps.iter().zip(&cqs) {
        cq.arm(false);
        qp.modify(State::Init).unwrap();
        qp.post_recv(&[RecvWr {
            wr_id: 1,
            sges: &[],
        }])
        .unwrap();
        qp.modify(State::Error).unwrap();
    }
    cqs[0].forget_events();
    assert!(channel.try_event().is_some_and(|cq| cq.is_same(&cqs[1])));
    assert!(channel.try_event().is_none());
    qps.iter().for_each(QueuePair::destroy);
}

/// The queue has more receives than one step of the flush completes.
#[test]
fn all_receives_are_flushed_in_order() {
    const LEN: u32 = 5000;
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let cq = ctx.create_cq(LEN, None).unwrap();
    let attributes = QpAttributes {
        max_recv_wr: LEN,
        ..attributes(ctx.allocate_pd(), &cq)
    };
    let qp = ctx.create_qp(&attributes).unwrap();
    qp.modify(State::Init).unwrap();
    let receives = (0..LEN).map(|n| RecvWr {
        wr_id: n.into(),
        sges: &[],
    });
    qp.post_recv(&receives.collect::<Vec<_>>()).unwrap();
    qp.modify(State::Error).unwrap();
    assert_eq!(cq.len(), LEN as usize);
    let mut out = vec![Cqe::default(); LEN as usize];
    assert_eq!(cq.poll(&mut out), Ok(LEN as usize));
    for (n, cqe) in (0..).zip(&out) {
        assert_eq!((cqe.wr_id, cqe.status), (n, WcStatus::Flushed));
    }
    qp.destroy();
}
