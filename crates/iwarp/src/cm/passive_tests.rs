//! Tests of the responder: the order and limits of requests, and requests whose peer has closed.

use super::super::create_event_channel;
use super::*;
use crate::testing;
use std::io::{Read, Write};

/// A request of revision 1 without private data (RFC 5044 section 7.1.1).
const REQUEST: &[u8; 20] = b"MPA ID Req Frame\x40\x01\x00\x00";

fn half_open_of(listener: &CmId) -> Arc<HalfOpen> {
    match &listener.inner.state.lock().phase {
        Phase::Listening(l) => Arc::clone(&l.half_open),
        _ => unreachable!("the identifier listens"),
    }
}

/// Returns a peer's socket, the accepted socket, and the peer's address.
fn connect(tcp: &std::net::TcpListener) -> (std::net::TcpStream, std::net::TcpStream, SocketAddr) {
    let peer = std::net::TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
    let (accepted, address) = tcp.accept().unwrap();
    accepted.set_nonblocking(true).unwrap();
    (peer, accepted, address)
}

/// Waits until a request can be read from `socket`.
fn wait_for_request(socket: &std::net::TcpStream) {
    let mut frame = [0; REQUEST.len()];
    while socket.peek(&mut frame).ok() != Some(REQUEST.len()) {}
}

/// Returns a peer's socket, the accepted socket, and its connection in start-up, which the poller
/// does not watch.
fn await_request(
    half_open: &Arc<HalfOpen>,
    ctx: &Context,
    tcp: &std::net::TcpListener,
) -> (std::net::TcpStream, std::net::TcpStream, Arc<Pending>) {
    let (peer, accepted, address) = connect(tcp);
    let seen = accepted.try_clone().unwrap();
    let starting = Starting {
        flow: None,
        stream: TcpStream::from_socket(accepted.into()).unwrap(),
        ends: Ends {
            local: tcp.local_addr().unwrap(),
            peer: address,
        },
    };
    // The time limit has passed, because the session started at time 0.
    let pending = Arc::new(Pending {
        half_open: Arc::clone(half_open),
        ctx: ctx.clone(),
        token: half_open.engine.token(),
        address: counted(address.ip()),
        incoming: Mutex::new(Some(Incoming::new(starting, ctx, Time::ZERO))),
    });
    half_open
        .starting
        .lock()
        .push_back(Arc::downgrade(&pending));
    (peer, seen, pending)
}

/// A process that was stopped (SIGSTOP) finds the request and the expired timer at the same time.
#[test]
fn request_beats_expired_timer() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(8).unwrap();
    let half_open = half_open_of(&id);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut silent, _, first) = await_request(&half_open, &ctx, &tcp);
    let (mut asking, seen, second) = await_request(&half_open, &ctx, &tcp);
    asking.write_all(REQUEST).unwrap();
    wait_for_request(&seen);
    first.timer(0);
    second.timer(0);
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(event.id.addresses().1, Some(asking.local_addr().unwrap()));
    let reset = silent.read(&mut [0]).unwrap_err();
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
}

/// Both requests arrive before the first is read. The program gets the request of the first
/// connection first.
#[test]
fn requests_have_order_of_connections() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(8).unwrap();
    let half_open = half_open_of(&id);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut first, accepted, first_address) = connect(&tcp);
    let watched = accepted.try_clone().unwrap();
    let stream = TcpStream::from_socket(accepted.into()).unwrap();
    half_open.accepted(stream, first_address);
    let pending = half_open.starting.lock()[0].upgrade().unwrap();
    // The progress thread cannot read the first request before the second connection is accepted.
    let slot = pending.incoming.lock();
    first.write_all(REQUEST).unwrap();
    wait_for_request(&watched);
    let (mut second, accepted, second_address) = connect(&tcp);
    second.write_all(REQUEST).unwrap();
    wait_for_request(&accepted);
    let stream = TcpStream::from_socket(accepted.into()).unwrap();
    half_open.accepted(stream, second_address);
    drop(slot);
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(event.id.addresses().1, Some(first_address));
    channel.next(Some(Duration::from_secs(10))).unwrap();
}

/// If there are too many connections, the oldest is closed, unless its request has arrived and was
/// not read yet.
#[test]
fn unread_request_is_not_given_up() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(8).unwrap();
    let half_open = half_open_of(&id);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut silent, _, _first) = await_request(&half_open, &ctx, &tcp);
    let (mut asking, seen, _second) = await_request(&half_open, &ctx, &tcp);
    asking.write_all(REQUEST).unwrap();
    wait_for_request(&seen);
    assert!(half_open.give_up_oldest("too many"));
    assert!(half_open.give_up_oldest("too many"));
    assert!(!half_open.give_up_oldest("too many"));
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(
        event.id.addresses().1,
        Some(asking.local_addr().unwrap()),
        "the peer that sent a request"
    );
    let reset = silent.read(&mut [0]).unwrap_err();
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
}

/// Peers that connect while the listener accepts nothing wait in the kernel's queue. If the queue
/// were short, the kernel would drop their SYNs, and they would repeat them only after a second.
#[test]
fn kernel_queues_many_connections() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(1).unwrap();
    // As many requests as the backlog are unanswered, so no connection is accepted.
    half_open_of(&id)
        .waiting
        .store(BACKLOG_MIN, Ordering::Relaxed);
    let somaxconn = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    let count = somaxconn
        .trim()
        .parse()
        .map_or(256, |max: u32| max.min(256));
    let address = id.addresses().0.unwrap();
    let timeout = Duration::from_secs(10);
    let connect = |_| std::net::TcpStream::connect_timeout(&address, timeout);
    let all: Result<Vec<_>, _> = (0..count).map(connect).collect();
    assert_eq!(all.unwrap().len(), count as usize);
}

#[test]
fn reset_request_has_peer_address() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(1).unwrap();
    let half_open = half_open_of(&id);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = std::net::TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
    let (mut accepted, address) = tcp.accept().unwrap();
    peer.write_all(REQUEST).unwrap();
    let mut frame = [0u8; 20];
    accepted.read_exact(&mut frame).unwrap();
    let socket = socket2::SockRef::from(&peer);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    drop(peer);
    let stream = TcpStream::from_socket(accepted.into()).unwrap();
    let reset = std::iter::repeat_with(|| stream.peer_addr().is_err());
    assert!(reset.take(100_000).any(|gone| gone), "no reset arrives");
    let starting = Starting {
        stream,
        ends: Ends {
            local: tcp.local_addr().unwrap(),
            peer: address,
        },
        flow: None,
    };
    let mut incoming = Incoming::new(starting, &ctx, Time::ZERO);
    incoming.session.received(&frame).unwrap();
    half_open.deliver(ctx, incoming);
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(event.kind, CmEventKind::ConnectRequest);
    assert_eq!(event.id.addresses().1, Some(address));
}

/// Returns a listener on 127.0.0.1 with this admission, and a time limit of an hour for start-up.
fn listening(admission: Admission) -> (CmId, crate::cm::CmEventChannel, Arc<HalfOpen>) {
    let channel = create_event_channel().unwrap();
    let patient = testing::context_with(Config {
        handshake_timeout: Duration::from_secs(3600),
        ..Config::default()
    });
    let id = CmId::create(&channel, Some(&patient));
    id.set_admission(admission);
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(8).unwrap();
    let half_open = half_open_of(&id);
    (id, channel, half_open)
}

/// Waits until the connection ends. Returns `true` if `peer` reads the end or an error: if its send
/// has already reported the reset, the read returns 0.
fn is_over(peer: &mut std::net::TcpStream) -> bool {
    peer.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    match peer.read(&mut [0]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    }
}

/// Sends a request from a source address of the loopback network.
fn send_request_from(source: [u8; 4], listener: &CmId) -> std::net::TcpStream {
    use socket2::{Domain, Socket, Type};
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
    let address = listener.addresses().0.unwrap();
    socket.connect(&address.into()).unwrap();
    let mut stream = std::net::TcpStream::from(socket);
    let _ = stream.write_all(REQUEST);
    stream
}

/// RFC 5042 section 5.1.1: only peers of the configured networks reach the program.
#[test]
fn only_configured_networks_are_admitted() {
    let admission = Admission {
        peers: "127.0.0.64/26".parse().unwrap(),
        ..Admission::default()
    };
    let (id, channel, _) = listening(admission);
    for outside in [[127, 0, 0, 63], [127, 0, 0, 128], [127, 0, 0, 1]] {
        assert!(is_over(&mut send_request_from(outside, &id)), "{outside:?}");
    }
    let inside = send_request_from([127, 0, 0, 100], &id);
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(event.id.addresses().1, Some(inside.local_addr().unwrap()));
    assert!(channel.try_next().is_none(), "a request of another network");
}

/// RFC 5042 section 6.4.1: if an address opens too many silent connections, its own oldest
/// connections are closed, and no connection of another address.
#[test]
fn half_open_limit_applies_per_address() {
    let admission = Admission {
        half_open: 6,
        half_open_per_address: 3,
        ..Admission::default()
    };
    let (id, _channel, half_open) = listening(admission);
    let silent = |source| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = socket.unwrap();
        socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
        socket.connect(&id.addresses().0.unwrap().into()).unwrap();
        // Waits until the connection is accepted, so that the order of connections is known.
        let seen = || {
            let all = half_open.starting.lock();
            let own = std::net::TcpStream::from(socket.try_clone().unwrap()).local_addr();
            let own = own.unwrap();
            all.iter().filter_map(Weak::upgrade).any(|g| {
                let slot = g.incoming.lock();
                slot.as_ref().is_some_and(|s| s.starting.ends.peer == own)
            })
        };
        while !seen() {
            std::thread::yield_now();
        }
        std::net::TcpStream::from(socket)
    };
    let mut other = silent([127, 0, 0, 2]);
    let mut count: Vec<_> = (0..10).map(|_| silent([127, 0, 0, 3])).collect();
    for (index, peer) in count.iter_mut().enumerate() {
        peer.set_nonblocking(index >= 7).unwrap();
        let end = peer.read(&mut [0]).unwrap_err().kind();
        let want = match index {
            0..7 => std::io::ErrorKind::ConnectionReset,
            _ => std::io::ErrorKind::WouldBlock,
        };
        assert_eq!(end, want, "number {index}");
    }
    other.set_nonblocking(true).unwrap();
    let end = other.read(&mut [0]).unwrap_err().kind();
    assert_eq!(
        end,
        std::io::ErrorKind::WouldBlock,
        "the other address's connection is open"
    );
    // If all addresses together have too many, the oldest connection is closed.
    let _more: Vec<_> = [4, 5, 6].map(|n| silent([127, 0, 0, n])).into();
    other.set_nonblocking(false).unwrap();
    assert!(is_over(&mut other), "the oldest connection is open");
}

/// The limit includes unanswered requests and connections. The rejection's private data is the
/// reason.
#[test]
fn full_listener_rejects_requests() {
    let admission = Admission {
        connections: 2,
        ..Admission::default()
    };
    let (id, channel, half_open) = listening(admission);
    let limit = Some(Duration::from_secs(10));
    let _first = send_request_from([127, 0, 0, 1], &id);
    let first = channel.next(limit).unwrap().id;
    let _second = send_request_from([127, 0, 0, 1], &id);
    let second = channel.next(limit).unwrap().id;
    let mut third = send_request_from([127, 0, 0, 1], &id);
    let mut reply = [0; 20];
    third.read_exact(&mut reply).unwrap();
    assert_eq!(&reply[..17], b"MPA ID Rep Frame\x60", "CRC, rejected");
    let mut reason = vec![0; usize::from(reply[19])];
    third.read_exact(&mut reason).unwrap();
    assert_eq!(reason, TOO_MANY);
    first.reject(&[]).unwrap();
    let _fourth = send_request_from([127, 0, 0, 1], &id);
    let fourth = channel.next(limit).unwrap().id;
    second.destroy();
    fourth.destroy();
    assert_eq!(half_open.connections.load(Ordering::Relaxed), 0);
}

/// A request has the connection's local address, also if the listener is bound to a wildcard.
#[test]
fn request_has_local_address() {
    for (own, index, to) in [
        (true, "127.0.0.1:0", "127.0.0.1"),
        (true, "0.0.0.0:0", "127.0.0.1"),
        (false, "0.0.0.0:0", "127.0.0.1"),
        (true, "[::]:0", "127.0.0.1"),
        (true, "[::ffff:127.0.0.1]:0", "127.0.0.1"),
        (true, "[::1]:0", "::1"),
    ] {
        let channel = create_event_channel().unwrap();
        let ctx = own.then(testing::context);
        let id = CmId::create(&channel, ctx.as_ref());
        id.bind(index.parse().unwrap()).unwrap();
        id.listen(1).unwrap();
        let port = id.addresses().0.unwrap().port();
        let to = SocketAddr::new(to.parse().unwrap(), port);
        let mut peer = std::net::TcpStream::connect(to).unwrap();
        peer.write_all(REQUEST).unwrap();
        let event = channel.next(Some(Duration::from_secs(20))).unwrap();
        let from = peer.local_addr().unwrap();
        assert_eq!(event.id.addresses(), (Some(to), Some(from)), "{index}");
        event.id.reject(&[]).unwrap();
        id.destroy();
    }
}

#[test]
fn requester_is_gone_after_close() {
    let (id, channel, _) = listening(Admission::default());
    let peer = send_request_from([127, 0, 0, 1], &id);
    let request = channel.next(Some(Duration::from_secs(20))).unwrap().id;
    assert!(!request.requester_is_gone() && !id.requester_is_gone());
    drop(peer);
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while !request.requester_is_gone() {
        assert!(std::time::Instant::now() < end, "the close is not noticed");
        std::thread::yield_now();
    }
    assert!(!id.requester_is_gone());
}

/// If the backlog is full, further connections wait in the kernel.
#[test]
fn full_backlog_pauses_the_listener() {
    let (id, channel, half_open) = listening(Admission::default());
    let listening = match &id.inner.state.lock().phase {
        Phase::Listening(listening) => Arc::clone(listening),
        _ => unreachable!("the identifier listens"),
    };
    half_open
        .waiting
        .store(listening.backlog, Ordering::Relaxed);
    let peer = send_request_from([127, 0, 0, 1], &id);
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while !*listening.paused.lock() {
        assert!(
            std::time::Instant::now() < end,
            "the listener does not pause"
        );
        std::thread::yield_now();
    }
    assert!(channel.try_next().is_none());
    half_open.waiting.store(0, Ordering::Relaxed);
    let event = channel.next(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(event.id.addresses().1, Some(peer.local_addr().unwrap()));
    assert!(!*listening.paused.lock());
}

/// The backlog limits unanswered requests, not connections.
#[test]
fn backlog_ignores_connections() {
    let (id, channel, half_open) = listening(Admission::default());
    let count = 2 * BACKLOG_MIN;
    half_open.connections.fetch_add(count, Ordering::Relaxed);
    let peers = [(); 3].map(|()| send_request_from([127, 0, 0, 1], &id));
    for _ in &peers {
        channel.next(Some(Duration::from_secs(20))).unwrap();
    }
    half_open.connections.fetch_sub(count, Ordering::Relaxed);
}

#[test]
fn ended_connections_are_not_counted() {
    use crate::conn::qp::CmSink;
    use iwarp_rnic::qp::Events;
    type End = fn(&CmId);
    let ends: [(Phase, End); 9] = [
        (Phase::Connected(true), |id| {
            id.inner.qp_event(Events::DISCONNECTED, None);
        }),
        (Phase::Connected(true), |id| {
            id.inner.qp_event(Events::FATAL, None);
        }),
        (Phase::Connected(false), |id| {
            id.inner.qp_event(Events::FATAL, None);
        }),
        (Phase::Connected(false), |id| {
            let both = Events::ESTABLISHED | Events::DISCONNECTED;
            id.inner.qp_event(both, None);
        }),
        (Phase::Connected(false), |id| {
            id.inner.first_message_overdue();
        }),
        // The connection ends before the event Established.
        (Phase::Accepting, |id| {
            id.inner.qp_event(Events::DISCONNECTED, None);
            id.established(super::super::notify::Reply::default());
        }),
        (Phase::Connected(true), CmId::destroy),
        (Phase::Connected(false), CmId::destroy),
        (Phase::Accepting, CmId::destroy),
    ];
    for (index, (phase, end)) in ends.into_iter().enumerate() {
        let connections = Arc::new(AtomicU32::new(7));
        let id = CmId::create(&create_event_channel().unwrap(), None);
        {
            let mut s = id.inner.state.lock();
            s.phase = phase;
            s.counted = Some(Count::new(&connections));
        }
        assert_eq!(connections.load(Ordering::Relaxed), 8);
        end(&id);
        assert_eq!(connections.load(Ordering::Relaxed), 7, "number {index}");
        id.destroy();
    }
}

#[test]
fn accept_fails_after_peer_reset() {
    use iwarp_rnic::qp::State;
    let (listener, channel, half_open) = listening(Admission::default());
    let peer = send_request_from([127, 0, 0, 1], &listener);
    let id = channel.next(Some(Duration::from_secs(20))).unwrap().id;
    let ctx = id.context().unwrap();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    qp.modify(State::Init).unwrap();
    id.set_queue_pair(Some(&qp));
    let socket = socket2::SockRef::from(&peer);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    drop(peer);
    testing::until("the reset has not arrived", || id.requester_is_gone());
    let refused = id.accept(&ConnectionParameters::default()).unwrap_err();
    assert!(matches!(refused, crate::Error::ConnectionLost(_)));
    assert!(matches!(id.inner.state.lock().phase, Phase::Disconnected));
    assert_eq!(half_open.connections.load(Ordering::Relaxed), 0);
    assert_eq!((qp.state(), qp.addresses()), (State::Init, None));
    id.destroy();
    listener.destroy();
    qp.destroy();
}

/// If a listener migrates to another channel, its pending request events move with it.
#[test]
fn requests_move_with_their_listener() {
    let (id, before, half_open) = listening(Admission::default());
    let (other, ..) = listening(Admission::default());
    other.migrate(&before);
    let peers = [&id, &other, &id].map(|to| send_request_from([127, 0, 0, 1], to));
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while before.len() < 3 {
        assert!(
            std::time::Instant::now() < end,
            "three requests have not arrived"
        );
        std::thread::yield_now();
    }
    let after = create_event_channel().unwrap();
    id.migrate(&after);
    assert_eq!((before.len(), after.len()), (1, 2));
    let remaining = before.try_next().expect("the other listener's event");
    assert_eq!(
        remaining.id.addresses().1,
        Some(peers[1].local_addr().unwrap())
    );
    assert!(
        remaining
            .listener
            .is_some_and(|listener| listener.is_same(&other))
    );
    drop(after);
    id.destroy();
    assert_eq!(half_open.waiting.load(Ordering::Relaxed), 0);
}

/// Returns a listener that notifies the program if an initiator closes before the answer.
fn listening_strictly() -> (CmId, crate::cm::CmEventChannel, Arc<HalfOpen>) {
    let channel = create_event_channel().unwrap();
    let ctx = testing::context_with(Config {
        face: Face::Roce,
        ..Config::default()
    });
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen_strictly(8).unwrap();
    let half_open = half_open_of(&id);
    (id, channel, half_open)
}

/// A destroyed listener takes its pending requests with it, and their further events.
#[test]
fn destroyed_listener_leaves_no_events() {
    let (id, channel, half_open) = listening_strictly();
    drop(send_request_from([127, 0, 0, 1], &id));
    testing::until("the close is not reported", || channel.len() == 2);
    let _peer = send_request_from([127, 0, 0, 1], &id);
    testing::until("the second request is not reported", || channel.len() == 3);
    id.destroy();
    assert!(channel.is_empty());
    assert_eq!(half_open.waiting.load(Ordering::Relaxed), 0);
}

/// If the initiator closes before the program has answered, the request stops counting.
#[test]
fn withdrawn_request_is_not_counted() {
    let (id, channel, half_open) = listening_strictly();
    let peer = send_request_from([127, 0, 0, 1], &id);
    let limit = Some(Duration::from_secs(20));
    let _request = channel.next(limit).unwrap();
    assert_eq!(half_open.connections.load(Ordering::Relaxed), 1);
    drop(peer);
    let event = channel.next(limit).unwrap();
    let withdrawn = (CmEventKind::Rejected, libc::ECONNABORTED);
    assert_eq!((event.kind, event.status), withdrawn);
    assert_eq!(half_open.connections.load(Ordering::Relaxed), 0);
}
