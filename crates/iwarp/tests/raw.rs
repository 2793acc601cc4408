//! The objects of `iwarp::raw`, end to end over loopback in one process: all operations with each framing option, and connection
//! management.

#[path = "common/words.rs"]
mod words;

use iwarp::raw::cm::{CmEvent, CmEventKind, CmId, ConnectionParameters, create_event_channel};
use iwarp::raw::{CompletionQueue, Context, QpAttributes, QueuePair};
use iwarp::{Config, Device, State};
use iwarp_rnic::{Cqe, RecvWr, SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use words::{Mem, poll};

const WAIT: Option<Duration> = Some(Duration::from_secs(10));

struct End {
    ctx: Context,
    pd: u32,
    cq: CompletionQueue,
    qp: QueuePair,
    id: CmId,
}

fn qp(ctx: &Context, pd: u32, cq: &CompletionQueue) -> QueuePair {
    ctx.create_qp(&QpAttributes {
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
    })
    .unwrap()
}

fn expect(channel: &iwarp::raw::EventQueue<CmEvent>, kind: CmEventKind) -> CmEvent {
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

fn all_operations(config: &Config) {
    let (c, s) = pair(config);
    let (cm, sm) = (
        Mem::new(&c.ctx, c.pd, 1 << 20),
        Mem::new(&s.ctx, s.pd, 1 << 20),
    );
    for len in [8u32, 0, 64, 4096, 65536, 200_000, 1 << 20] {
        cm.fill(u64::from(len) + 1);
        sm.fill(0);
        // Send
        s.qp.post_recv(&[RecvWr {
            wr_id: 9,
            sges: &[sm.sge(1 << 20)],
        }])
        .unwrap();
        send(&c, SendOp::Send, &[cm.sge(len)]);
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
        send(
            &c,
            SendOp::Write {
                remote_addr: sm.addr(),
                rkey: sm.stag,
            },
            &[cm.sge(len)],
        );
        assert_eq!(poll(&c.cq).status, WcStatus::Success);
        let want: Vec<u64> = (0..len as usize / 8).map(|i| cm.word(i)).collect();
        cm.fill(0);
        send(
            &c,
            SendOp::Read {
                remote_addr: sm.addr(),
                rkey: sm.stag,
            },
            &[cm.sge(len)],
        );
        let got = poll(&c.cq);
        assert_eq!(
            (got.status, got.opcode),
            (WcStatus::Success, WcOpcode::Read)
        );
        for (i, w) in want.iter().enumerate() {
            assert_eq!(cm.word(i), *w, "{len} {i}");
        }
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
fn writes_are_placed_when_they_complete_if_that_is_asked_for() {
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
    // The responder sees the end of the connection, as on every connection of the connection manager.
    c.id.disconnect().unwrap();
    let end = Instant::now() + WAIT.unwrap();
    while s.qp.state() != State::Error {
        assert!(Instant::now() < end, "the end was not seen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn connecting_a_moment_before_the_peer_listens_succeeds() {
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
    // No socket ever listens during this attempt, so it is refused after a while.
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
    // An attempt that is destroyed while it pauses between two tries reports no event.
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
    // By now the destroyed identifier would have got its `TimewaitExit`, too. It must not.
    assert!(gone_ch.is_empty());
}

/// The peer sends its next message only after it has our answer. So the completion of the answer must come before the receive
/// completion of that message.
#[test]
fn a_send_completes_before_the_message_that_answers_it() {
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
                "round {round}: the answer to this Send came before its completion"
            );
        }
    });
    for round in 0..ROUNDS {
        assert_eq!(
            next(&c),
            WcOpcode::Send,
            "round {round}: the answer to this Send came before its completion"
        );
        assert_eq!(next(&c), WcOpcode::Recv, "{round}");
        post(&c, &cm);
        if round + 1 < ROUNDS {
            send(&c, SendOp::Send, &[cm.sge(64)]);
        }
    }
    server.join().unwrap();
}

/// An identifier whose route to `peer` is resolved.
fn routed(
    channel: &iwarp::raw::cm::CmEventChannel,
    ctx: Option<&Context>,
    peer: SocketAddr,
) -> CmId {
    let id = CmId::create(channel, ctx);
    id.resolve_addr(None, peer).unwrap();
    expect(channel, CmEventKind::AddrResolved);
    id.resolve_route().unwrap();
    expect(channel, CmEventKind::RouteResolved);
    id
}

fn on_loopback(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

/// The program has no queue pair for it (`CmId::use_stand_in`).
#[test]
fn a_connection_without_a_queue_pair_of_the_program_has_private_data_and_an_end() {
    let (at_listener, at_client) = (
        create_event_channel().unwrap(),
        create_event_channel().unwrap(),
    );
    let listener = CmId::create(&at_listener, None);
    listener.bind(on_loopback(0)).unwrap();
    listener.listen(4).unwrap();
    let address = listener.addresses().0.unwrap();
    let early = CmId::create(&at_client, None);
    assert!(matches!(early.use_stand_in(4), Err(iwarp::Error::NoDevice)));
    let ask = || {
        let id = routed(&at_client, None, address);
        id.use_stand_in(4).unwrap();
        let parameters = ConnectionParameters {
            private_data: b"question".to_vec(),
            ..Default::default()
        };
        id.connect(&parameters).unwrap();
        let request = expect(&at_listener, CmEventKind::ConnectRequest);
        assert_eq!(request.private_data, b"question");
        let reads = (request.responder_resources, request.initiator_depth);
        assert_eq!(reads, (Some(4), Some(4)));
        request.id.use_stand_in(3).unwrap();
        let parameters = ConnectionParameters {
            private_data: b"answer".to_vec(),
            responder_resources: Some(2),
            initiator_depth: Some(1),
        };
        request.id.accept(&parameters).unwrap();
        let event = expect(&at_client, CmEventKind::Established);
        assert_eq!(event.private_data, b"answer");
        let reads = (event.responder_resources, event.initiator_depth);
        // The listener's program serves fewer, but can serve as many as were asked for, up to the depth.
        assert_eq!(reads, (Some(1), Some(3)));
        // The connecting program has not taken the answer yet.
        assert!(at_listener.try_next().is_none());
        (id, request.id)
    };
    let (client, server) = ask();
    client.establish().unwrap();
    let event = expect(&at_listener, CmEventKind::Established);
    assert!(event.id.is_same(&server));
    client.establish().unwrap();
    assert_eq!(client.addresses(), (server.addresses().1, Some(address)));
    server.disconnect().unwrap();
    for channel in [&at_client, &at_listener] {
        let event = expect(channel, CmEventKind::Disconnected);
        assert_eq!(event.status, 0);
        event.id.destroy();
    }
    // An answer that the program does not take.
    let (client, _server) = ask();
    client.disconnect().unwrap();
    assert_eq!(expect(&at_client, CmEventKind::Disconnected).status, 0);
    let event = expect(&at_listener, CmEventKind::ConnectError);
    assert_eq!(event.status, libc::ECONNRESET);
    client.destroy();
    let (client, _server) = ask();
    client.reject(b"not wanted").unwrap();
    expect(&at_listener, CmEventKind::ConnectError);
    assert!(client.disconnect().is_ok() && at_client.try_next().is_none());
}

#[test]
fn a_stand_in_goes_with_its_identifier_or_when_another_one_comes() {
    let channel = create_event_channel().unwrap();
    let id = routed(&channel, None, on_loopback(9));
    let ctx = id.context().unwrap();
    let is_there = |qp: &QueuePair| ctx.queue_pair(qp.num()).is_some();
    id.use_stand_in(1).unwrap();
    let first = id.queue_pair().unwrap();
    assert!(is_there(&first));
    id.use_stand_in(1).unwrap();
    let second = id.queue_pair().unwrap();
    assert!(!is_there(&first) && is_there(&second));
    id.set_queue_pair(None);
    assert!(!is_there(&second) && id.queue_pair().is_none());
    id.use_stand_in(1).unwrap();
    let third = id.queue_pair().unwrap();
    id.destroy();
    assert!(!is_there(&third));
}

#[test]
fn identifiers_have_numbers_of_their_own_and_values_of_the_program() {
    let channel = create_event_channel().unwrap();
    let ids = [(); 3].map(|()| CmId::create(&channel, None));
    for (id, value) in ids.iter().zip(5..) {
        assert_eq!(id.user_data(), 0);
        id.set_user_data(value);
    }
    let values = [0, 1, 2].map(|at: usize| ids[at].user_data());
    assert_eq!(values, [5, 6, 7]);
    let mut numbers = [0, 1, 2].map(|at: usize| ids[at].serial());
    assert_eq!(numbers[0], ids[0].clone().serial());
    numbers.sort_unstable();
    assert!(numbers[0] < numbers[1] && numbers[1] < numbers[2]);
}

#[test]
fn a_program_gives_events_of_its_own_and_no_others() {
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, None);
    let own = [
        CmEventKind::User(5),
        CmEventKind::AddrinfoResolved,
        CmEventKind::AddrinfoError,
    ];
    for (kind, status) in own.into_iter().zip(-1..) {
        id.write_event(kind, status).unwrap();
        let event = expect(&channel, kind);
        assert_eq!(event.status, status);
        assert!(event.id.is_same(&id));
    }
    let refused = |kind| {
        let error = id.write_event(kind, 0).unwrap_err();
        assert!(matches!(error, iwarp::Error::InvalidArgument(_)));
        assert!(channel.try_next().is_none());
    };
    refused(CmEventKind::Established);
    refused(CmEventKind::AddrError);
    id.destroy();
    refused(CmEventKind::User(5));
}

/// Listens at all IPv6 addresses. Returns `true` if somebody else can listen at its port for IPv4.
fn leaves_ipv4(only_v6: bool) -> bool {
    let id = CmId::create(&create_event_channel().unwrap(), None);
    id.set_only_v6(only_v6);
    id.bind("[::]:0".parse().unwrap()).unwrap();
    id.listen(0).unwrap();
    let port = id.addresses().0.unwrap().port();
    let free = std::net::TcpListener::bind(on_loopback(port)).is_ok();
    id.destroy();
    free
}

#[test]
fn a_listener_for_ipv6_alone_leaves_its_port_to_ipv4() {
    // The port may be another program's, for IPv4.
    assert!((0..20).any(|_| leaves_ipv4(true)));
    assert!((0..20).all(|_| !leaves_ipv4(false)));
}

#[test]
fn identifiers_that_allow_it_share_an_address_and_one_listens() {
    let channel = create_event_channel().unwrap();
    let id = |reuse: bool| {
        let id = CmId::create(&channel, None);
        id.set_reuse_address(!reuse);
        id.set_reuse_address(reuse);
        id
    };
    let in_use = |result: iwarp::Result<()>| result.unwrap_err().errno() == libc::EADDRINUSE;
    let (first, second) = (id(true), id(true));
    first.bind(on_loopback(0)).unwrap();
    second.bind(first.addresses().0.unwrap()).unwrap();
    second.listen(0).unwrap();
    assert!(in_use(first.listen(0)));
    let alone = id(false);
    alone.bind(on_loopback(0)).unwrap();
    assert!(in_use(id(true).bind(alone.addresses().0.unwrap())));
}

/// Also when it tries again.
#[test]
fn an_identifier_connects_from_the_port_that_it_is_bound_to() {
    let channel = create_event_channel().unwrap();
    let silent = CmId::create(&channel, None);
    silent.bind(on_loopback(0)).unwrap();
    let listener = CmId::create(&channel, None);
    listener.bind(on_loopback(0)).unwrap();
    listener.listen(1).unwrap();
    let own_channel = create_event_channel().unwrap();
    let id = CmId::create(&own_channel, None);
    id.bind(on_loopback(0)).unwrap();
    let own = id.addresses().0.unwrap();
    let connect = |to: &CmId| {
        id.resolve_addr(None, to.addresses().0.unwrap()).unwrap();
        expect(&own_channel, CmEventKind::AddrResolved);
        id.resolve_route().unwrap();
        expect(&own_channel, CmEventKind::RouteResolved);
        id.use_stand_in(1).unwrap();
        id.connect(&ConnectionParameters::default()).unwrap();
    };
    // Bound, but nobody listens.
    connect(&silent);
    let event = expect(&own_channel, CmEventKind::Rejected);
    assert_eq!(event.status, libc::ECONNREFUSED);
    connect(&listener);
    let request = expect(&channel, CmEventKind::ConnectRequest);
    assert_eq!(request.id.addresses().1, Some(own));
}

#[test]
fn an_identifier_takes_its_events_to_another_channel() {
    let [old, new] = [(); 2].map(|()| create_event_channel().unwrap());
    let [moving, staying] = [(); 2].map(|()| CmId::create(&old, None));
    for value in 1..3 {
        moving.write_event(CmEventKind::User(value), 0).unwrap();
        staying.write_event(CmEventKind::User(10), 0).unwrap();
    }
    // To where it is already.
    moving.migrate(&old);
    moving.migrate(&new);
    moving.write_event(CmEventKind::User(3), 0).unwrap();
    for value in 1..4 {
        let event = expect(&new, CmEventKind::User(value));
        assert!(event.id.is_same(&moving));
    }
    for _ in 0..2 {
        let event = expect(&old, CmEventKind::User(10));
        assert!(event.id.is_same(&staying));
    }
    assert!(old.try_next().is_none() && new.try_next().is_none());
}

#[test]
fn source_and_destination_are_of_one_address_family() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let channel = create_event_channel().unwrap();
    // Bound to, named as the source, resolved; and the address that it has then, if that is possible.
    for (bound, source, peer, wanted) in [
        (None, None, "127.0.0.1:9", Some("127.0.0.1")),
        (None, Some("0.0.0.0:0"), "127.0.0.1:9", Some("127.0.0.1")),
        (None, Some("127.0.0.2:0"), "127.0.0.1:9", Some("127.0.0.2")),
        (None, Some("[::1]:0"), "127.0.0.1:9", None),
        (None, Some("127.0.0.1:0"), "[::1]:9", None),
        (Some("127.0.0.2:0"), None, "127.0.0.1:9", Some("127.0.0.2")),
        (
            Some("127.0.0.2:0"),
            Some("127.0.0.3:0"),
            "127.0.0.1:9",
            Some("127.0.0.2"),
        ),
        (Some("0.0.0.0:0"), None, "127.0.0.1:9", Some("127.0.0.1")),
        (Some("0.0.0.0:0"), None, "[::1]:9", None),
        (Some("[::]:0"), None, "127.0.0.1:9", Some("127.0.0.1")),
        (Some("[::]:0"), None, "[::1]:9", Some("::1")),
        (Some("[::1]:0"), None, "127.0.0.1:9", None),
    ] {
        let case = format!("{bound:?} {source:?} {peer}");
        let id = CmId::create(&channel, Some(&ctx));
        if let Some(bound) = bound {
            id.bind(bound.parse().unwrap()).unwrap();
        }
        let source = source.map(|source| source.parse().unwrap());
        let resolved = id.resolve_addr(source, peer.parse().unwrap());
        let Some(wanted) = wanted else {
            assert!(
                matches!(resolved, Err(iwarp::Error::InvalidArgument(_))),
                "{case}"
            );
            continue;
        };
        resolved.unwrap();
        expect(&channel, CmEventKind::AddrResolved);
        let (local, to) = id.addresses();
        assert_eq!(local.unwrap().ip().to_string(), wanted, "{case}");
        assert_eq!(to, Some(peer.parse().unwrap()), "{case}");
    }
}
