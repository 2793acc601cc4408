//! Tests of connection identifiers: placeholder queue pairs, options, addresses, and events that
//! move to another channel.

use super::*;

/// Returns an identifier whose route to `peer` is resolved.
fn routed(
    channel: &iwarp::runtime::cm::CmEventChannel,
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

/// The identifier has a placeholder queue pair (`CmId::use_placeholder_qp`).
#[test]
fn connection_without_queue_pair_works() {
    let (at_listener, at_client) = (
        create_event_channel().unwrap(),
        create_event_channel().unwrap(),
    );
    let listener = CmId::create(&at_listener, None);
    listener.bind(on_loopback(0)).unwrap();
    listener.listen(4).unwrap();
    let address = listener.addresses().0.unwrap();
    let early = CmId::create(&at_client, None);
    assert!(matches!(early.use_placeholder_qp(4), Err(Error::NoDevice)));
    let ask = || {
        let id = routed(&at_client, None, address);
        id.use_placeholder_qp(4).unwrap();
        let parameters = ConnectionParameters {
            private_data: b"question".to_vec(),
            ..Default::default()
        };
        id.connect(&parameters).unwrap();
        let request = expect(&at_listener, CmEventKind::ConnectRequest);
        assert_eq!(request.private_data, b"question");
        let reads = (request.responder_resources, request.initiator_depth);
        assert_eq!(reads, (Some(4), Some(4)));
        request.id.use_placeholder_qp(3).unwrap();
        let parameters = ConnectionParameters {
            private_data: b"answer".to_vec(),
            responder_resources: Some(2),
            initiator_depth: Some(1),
            ..Default::default()
        };
        request.id.accept(&parameters).unwrap();
        let event = expect(&at_client, CmEventKind::Established);
        assert_eq!(event.private_data, b"answer");
        let reads = (event.responder_resources, event.initiator_depth);
        // The listener's program wants fewer Reads. The reply contains as many as requested, up to
        // its queue pair's depth.
        assert_eq!(reads, (Some(1), Some(3)));
        // The connecting program has not called `establish` yet.
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
    // The program never calls `establish` for this answer.
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
fn placeholder_qp_is_replaced_or_destroyed() {
    let channel = create_event_channel().unwrap();
    let id = routed(&channel, None, on_loopback(9));
    let ctx = id.context().unwrap();
    let is_there = |qp: &QueuePair| ctx.queue_pair(qp.num()).is_some();
    id.use_placeholder_qp(1).unwrap();
    let first = id.queue_pair().unwrap();
    assert!(is_there(&first));
    id.use_placeholder_qp(1).unwrap();
    let second = id.queue_pair().unwrap();
    assert!(!is_there(&first) && is_there(&second));
    id.set_queue_pair(None);
    assert!(!is_there(&second) && id.queue_pair().is_none());
    id.use_placeholder_qp(1).unwrap();
    let third = id.queue_pair().unwrap();
    id.destroy();
    assert!(!is_there(&third));
}

#[test]
fn identifiers_have_numbers_and_user_values() {
    let channel = create_event_channel().unwrap();
    let ids = [(); 3].map(|()| CmId::create(&channel, None));
    for (id, value) in ids.iter().zip(5..) {
        assert_eq!(id.user_data(), 0);
        id.set_user_data(value);
    }
    let values = [0, 1, 2].map(|index: usize| ids[index].user_data());
    assert_eq!(values, [5, 6, 7]);
    let mut numbers = [0, 1, 2].map(|index: usize| ids[index].serial());
    assert_eq!(numbers[0], ids[0].clone().serial());
    let text = format!("{:?}", ids[1]);
    assert!(text.contains(&numbers[1].to_string()), "{text}");
    numbers.sort_unstable();
    assert!(numbers[0] < numbers[1] && numbers[1] < numbers[2]);
}

/// If two identifiers share a channel, destroying one does not drop the events of the other.
#[test]
fn destroyed_identifier_discards_only_its_events() {
    let channel = create_event_channel().unwrap();
    let [leaving, staying] = [(); 2].map(|()| CmId::create(&channel, None));
    for id in [&leaving, &staying] {
        id.write_event(CmEventKind::User(1), 0).unwrap();
    }
    leaving.destroy();
    let event = expect(&channel, CmEventKind::User(1));
    assert!(event.id.is_same(&staying) && channel.try_next().is_none());
    staying.write_event(CmEventKind::User(2), 0).unwrap();
}

#[test]
fn identifier_is_bound_once() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let channel = create_event_channel().unwrap();
    let refused = |id: &CmId| {
        let again = id.bind(on_loopback(0)).unwrap_err();
        assert!(matches!(again, Error::InvalidState(_)), "{again}");
    };
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(on_loopback(0)).unwrap();
    let bound = id.addresses();
    refused(&id);
    assert_eq!(id.addresses(), bound);
    refused(&routed(&channel, Some(&ctx), on_loopback(9)));
    id.listen(1).unwrap();
    refused(&id);
}

/// A listener that is dropped without being destroyed stops listening.
#[test]
fn dropped_listener_frees_its_port() {
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, None);
    id.bind(on_loopback(0)).unwrap();
    id.listen(0).unwrap();
    let address = id.addresses().0.unwrap();
    drop(id);
    let end = Instant::now() + Duration::from_secs(20);
    while std::net::TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < end, "the listener still accepts");
    }
}

#[test]
fn program_posts_only_user_events() {
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
        assert!(matches!(error, Error::InvalidArgument(_)));
        assert!(channel.try_next().is_none());
    };
    refused(CmEventKind::Established);
    refused(CmEventKind::AddrError);
    id.destroy();
    refused(CmEventKind::User(5));
}

/// Listens at the IPv6 wildcard address. Returns `true` if another socket can use the port for
/// IPv4.
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
fn ipv6_only_listener_leaves_ipv4_port() {
    // Another program may use the port for IPv4.
    assert!((0..20).any(|_| leaves_ipv4(true)));
    assert!((0..20).all(|_| !leaves_ipv4(false)));
}

#[test]
fn reuseaddr_shares_address_one_listens() {
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

#[test]
fn identifier_connects_from_bound_port() {
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
        id.use_placeholder_qp(1).unwrap();
        id.connect(&ConnectionParameters::default()).unwrap();
    };
    // Bound, but not listening.
    connect(&silent);
    let event = expect(&own_channel, CmEventKind::Rejected);
    assert_eq!(event.status, libc::ECONNREFUSED);
    connect(&listener);
    let request = expect(&channel, CmEventKind::ConnectRequest);
    assert_eq!(request.id.addresses().1, Some(own));
}

#[test]
fn migrated_identifier_moves_its_events() {
    let [old, new] = [(); 2].map(|()| create_event_channel().unwrap());
    let [moving, staying] = [(); 2].map(|()| CmId::create(&old, None));
    for value in 1..3 {
        moving.write_event(CmEventKind::User(value), 0).unwrap();
        staying.write_event(CmEventKind::User(10), 0).unwrap();
    }
    // Migrating to the current channel has no effect.
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
fn source_and_destination_share_family() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let channel = create_event_channel().unwrap();
    // The bound address, the source, the peer, and the resulting local address if resolving
    // succeeds.
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
            assert!(matches!(resolved, Err(Error::InvalidArgument(_))), "{case}");
            continue;
        };
        resolved.unwrap();
        expect(&channel, CmEventKind::AddrResolved);
        let (local, to) = id.addresses();
        assert_eq!(local.unwrap().ip().to_string(), wanted, "{case}");
        assert_eq!(to, Some(peer.parse().unwrap()), "{case}");
    }
}

/// The peer sees the source address that the program has passed, with a context of the program and
/// with the shared one.
#[test]
fn connection_comes_from_named_address() {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    let ctx = Context::open(&device, Config::default()).unwrap();
    let at_listener = create_event_channel().unwrap();
    let listener = CmId::create(&at_listener, None);
    listener.bind(on_loopback(0)).unwrap();
    listener.listen(4).unwrap();
    for own in [None, Some(&ctx)] {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, own);
        let source = "127.0.0.2:0".parse().unwrap();
        id.resolve_addr(Some(source), listener.addresses().0.unwrap())
            .unwrap();
        expect(&channel, CmEventKind::AddrResolved);
        id.resolve_route().unwrap();
        expect(&channel, CmEventKind::RouteResolved);
        id.use_placeholder_qp(1).unwrap();
        id.connect(&ConnectionParameters::default()).unwrap();
        let request = expect(&at_listener, CmEventKind::ConnectRequest).id;
        let from = request.addresses().1.unwrap();
        assert_eq!(from.ip(), source.ip(), "own context: {}", own.is_some());
        request.destroy();
        id.destroy();
    }
}
