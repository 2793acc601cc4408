//! Tests of identifiers for datagrams, over loopback in one process: how a requester gets a queue
//! pair number, how listeners treat invalid messages, and multicast groups. `wire.md` describes the
//! messages that the tests encode by hand.

use crate::common;
use crate::common::{LIMIT, V4, V6, context, expect, until};
use iwarp::runtime::cm::{
    CmEvent, CmEventChannel, CmEventKind, CmId, ConnectionParameters, DEFAULT_QKEY, DatagramEnd,
};
use iwarp::runtime::{Context, UdAttributes, UdQueuePair, create_event_channel};
use iwarp::{Config, Device};
use iwarp_proto::crc32c::append;
use iwarp_proto::sidr::{Answer, Kind, MESSAGE_LEN, Message, REPLY_DATA_MAX, REQUEST_DATA_MAX};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

fn queue_pair(ctx: &Context) -> UdQueuePair {
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = ctx.create_ud_qp(&UdAttributes {
        pd: ctx.allocate_pd(),
        send_cq: cq.clone(),
        recv_cq: cq,
        srq: None,
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        signal_all: false,
    });
    let qp = qp.unwrap();
    qp.set_qkey(DEFAULT_QKEY);
    qp
}

fn data(private_data: &[u8]) -> ConnectionParameters {
    ConnectionParameters {
        private_data: private_data.to_vec(),
        ..Default::default()
    }
}

/// A listener for datagram requests.
struct Listener {
    channel: CmEventChannel,
    id: CmId,
    port: u16,
}

impl Listener {
    fn new(address: impl Into<IpAddr>, backlog: u32) -> Self {
        let channel = create_event_channel().unwrap();
        let id = CmId::create_for_datagrams(&channel, None);
        id.bind(SocketAddr::new(address.into(), 0)).unwrap();
        id.listen(backlog).unwrap();
        let port = id.addresses().0.unwrap().port();
        Self { channel, id, port }
    }

    fn request(&self) -> CmEvent {
        let event = expect(&self.channel, CmEventKind::ConnectRequest);
        assert!(event.listener.as_ref().unwrap().is_same(&self.id));
        assert!(event.id.is_for_datagrams());
        event
    }

    /// Checks that no event has arrived. The listener has read all earlier messages, because it
    /// answers the stranger's next message.
    fn expect_nothing(&self, stranger: &Stranger) {
        stranger.challenge(u64::MAX);
        assert!(self.channel.try_next().is_none());
    }
}

/// An identifier whose route to a listener is resolved.
struct Requester {
    channel: CmEventChannel,
    id: CmId,
}

impl Requester {
    fn new(peer: SocketAddr, ctx: Option<&Context>) -> Self {
        let channel = create_event_channel().unwrap();
        let id = CmId::create_for_datagrams(&channel, ctx);
        id.resolve_addr(None, peer).unwrap();
        expect(&channel, CmEventKind::AddrResolved);
        id.resolve_route().unwrap();
        expect(&channel, CmEventKind::RouteResolved);
        Self { channel, id }
    }

    fn connect(&self, private_data: &[u8]) {
        self.id.connect(&data(private_data)).unwrap();
    }

    /// Waits for a refusal. Returns the errno, the status in the answer, and the private data.
    fn refused(&self) -> (i32, u8, Vec<u8>) {
        let event = expect(&self.channel, CmEventKind::Unreachable);
        assert_eq!(event.datagrams, None);
        assert_eq!(
            event.replied,
            !event.private_data.is_empty() || event.service_status == 2
        );
        (event.status, event.service_status, event.private_data)
    }
}

/// A peer whose messages the test encodes by hand.
struct Stranger(UdpSocket, SocketAddr);

impl Stranger {
    fn new(port: u16) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self(socket, (V4, port).into())
    }

    fn send(&self, octets: &[u8]) {
        self.0.send_to(octets, self.1).unwrap();
    }

    fn ask(&self, id: u64, cookie: u64) {
        self.send(&request(id, cookie));
    }

    fn next(&self) -> [u8; MESSAGE_LEN] {
        let mut octets = [0; MESSAGE_LEN + 1];
        let (len, from) = self.0.recv_from(&mut octets).unwrap();
        assert_eq!((len, from), (MESSAGE_LEN, self.1));
        *octets.first_chunk().unwrap()
    }

    /// Sends a request without a cookie. Returns the cookie of the answer.
    fn challenge(&self, id: u64) -> u64 {
        self.ask(id, 0);
        let octets = self.next();
        let message = Message::open(append, &octets).unwrap();
        assert_eq!((message.kind, message.id), (Kind::Challenge, id));
        message.cookie
    }
}

fn request(id: u64, cookie: u64) -> [u8; MESSAGE_LEN] {
    let message = Message {
        kind: Kind::Request,
        id,
        cookie,
        private_data: b"by hand",
    };
    message.seal(append).unwrap()
}

#[test]
fn requester_learns_queue_pair() {
    for (at, to) in [
        (V4, V4),
        (V6, V6),
        (Ipv4Addr::UNSPECIFIED.into(), V4),
        (Ipv6Addr::UNSPECIFIED.into(), V4),
        (Ipv6Addr::UNSPECIFIED.into(), V6),
    ] {
        let listener = Listener::new(at, 0);
        let requester = Requester::new((to, listener.port).into(), None);
        requester.connect(b"question");
        let request = listener.request();
        assert_eq!(request.private_data, b"question");
        let (local, peer) = request.id.addresses();
        assert_eq!(local, Some((to, listener.port).into()));
        assert_eq!(peer.unwrap().ip(), to);
        let qp = queue_pair(&request.id.context().unwrap());
        qp.set_qkey(0x1234);
        request.id.set_datagram_queue_pair(Some(&qp)).unwrap();
        request.id.accept(&data(b"answer")).unwrap();
        let event = expect(&requester.channel, CmEventKind::Established);
        assert_eq!((event.status, &event.private_data[..]), (0, &b"answer"[..]));
        let end = event.datagrams.unwrap();
        assert_eq!((end.ip, end.num, end.qkey), (to, qp.num(), 0x1234));
        // There is no connection to disconnect, and a request is answered only once.
        assert!(request.id.disconnect().is_err() && requester.id.disconnect().is_err());
        assert!(request.id.accept(&data(b"")).is_err());
        assert!(requester.id.connect(&data(b"")).is_err());
        assert!(listener.channel.try_next().is_none());
    }
}

#[test]
fn accept_without_qp_gives_infiniband_status() {
    let listener = Listener::new(V4, 0);
    let to = (V4, listener.port).into();
    let requester = Requester::new(to, None);
    requester.connect(b"");
    listener.request().id.reject(b"because").unwrap();
    let refused = (libc::ECONNREFUSED, 2, b"because".to_vec());
    assert_eq!(requester.refused(), refused);
    // The requester may send another request. Destroying the identifier of a request rejects the
    // request.
    requester.connect(b"");
    listener.request().id.destroy();
    assert_eq!(requester.refused(), (libc::ECONNREFUSED, 2, vec![]));
    // Destroying the listener rejects requests whose events were not taken.
    requester.connect(b"");
    until("a request", || !listener.channel.is_empty());
    listener.id.destroy();
    assert_eq!(requester.refused(), (libc::ECONNREFUSED, 2, vec![]));
    drop(listener);
    requester.connect(b"");
    let nobody = (libc::ECONNREFUSED, 1, vec![]);
    assert_eq!(requester.refused(), nobody);
    // An address of this host without a GID is not reachable by datagrams.
    let listener = Listener::new(Ipv4Addr::UNSPECIFIED, 0);
    let other = SocketAddr::from(([127, 0, 0, 2], listener.port));
    let requester = Requester::new(other, None);
    requester.connect(b"");
    let event = expect(&requester.channel, CmEventKind::Unreachable);
    assert_eq!((event.service_status, event.replied), (1, true));
}

#[test]
fn silent_peer_differs_from_slow_program() {
    let device = Device::by_address(V4).unwrap();
    let mut config = Config::default();
    // The listener's challenge arrives within this time, even on a busy machine.
    config.connect_timeout = Duration::from_secs(3);
    let ctx = Context::open(&device, config).unwrap();
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let requester = Requester::new(silent.local_addr().unwrap(), Some(&ctx));
    requester.connect(b"");
    assert_eq!(requester.refused(), (libc::ETIMEDOUT, 0, vec![]));
    // Without an answer, the request is repeated.
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    other.set_read_timeout(Some(LIMIT)).unwrap();
    let patient = Requester::new(other.local_addr().unwrap(), None);
    patient.connect(b"");
    for _ in 0..2 {
        assert_eq!(other.recv(&mut [0; 300]).unwrap(), MESSAGE_LEN);
    }
    patient.id.destroy();
    let listener = Listener::new(V4, 0);
    let requester = Requester::new((V4, listener.port).into(), Some(&ctx));
    requester.connect(b"");
    let request = listener.request();
    std::thread::sleep(Duration::from_secs(4));
    request.id.accept_datagrams(7, 8, b"").unwrap();
    let end = expect(&requester.channel, CmEventKind::Established).datagrams;
    let end = end.unwrap();
    assert_eq!((end.ip, end.num, end.qkey), (V4, 7, 8));
    assert!(
        listener.channel.try_next().is_none(),
        "one request, one event"
    );
}

#[test]
fn listener_is_stateless_and_answers_duplicates() {
    let listener = Listener::new(V4, 0);
    let (a, b) = (Stranger::new(listener.port), Stranger::new(listener.port));
    let cookie = a.challenge(5);
    // Another sender, another request, and a request without a cookie are challenged.
    b.ask(5, cookie);
    let octets = b.next();
    let other = Message::open(append, &octets).unwrap();
    assert_eq!(other.kind, Kind::Challenge);
    assert_ne!(other.cookie, cookie);
    assert_ne!(a.challenge(6), cookie);
    listener.expect_nothing(&a);
    // Other messages are not answered.
    let good = request(5, cookie);
    for (at, change) in [(0, 1), (4, 3), (5, 3), (5, 1), (200, 7), (255, 1)] {
        let mut bad = good;
        bad[at] ^= change;
        a.send(&bad);
    }
    a.send(&good[..100]);
    a.send(&[&good[..], &[0]].concat());
    let reply = Message {
        kind: Kind::Reply(Answer::QueuePair { num: 3, qkey: 0 }),
        id: 5,
        cookie,
        private_data: &[],
    };
    a.send(&reply.seal(append).unwrap());
    listener.expect_nothing(&a);
    for _ in 0..3 {
        a.send(&good);
    }
    let event = listener.request();
    assert_eq!(event.private_data, b"by hand");
    listener.expect_nothing(&a);
    event.id.accept_datagrams(0xabcdef, 9, b"yes").unwrap();
    let first = a.next();
    let answer = Message::open(append, &first).unwrap();
    let kind = Kind::Reply(Answer::QueuePair {
        num: 0xabcdef,
        qkey: 9,
    });
    assert_eq!((answer.kind, answer.id), (kind, 5));
    assert_eq!((answer.cookie, answer.private_data), (cookie, &b"yes"[..]));
    for _ in 0..2 {
        a.send(&good);
        assert_eq!(a.next(), first);
    }
    listener.expect_nothing(&a);
}

/// A listener's networks apply to requests of datagrams, too: other peers get no answer.
#[test]
fn other_networks_get_no_answer() {
    let mut config = Config::default();
    config.admission.peers = "127.0.0.2".parse().unwrap();
    let (ctx, channel) = (context(V4, &config), create_event_channel().unwrap());
    let id = CmId::create_for_datagrams(&channel, Some(&ctx));
    id.bind(SocketAddr::new(V4, 0)).unwrap();
    id.listen(0).unwrap();
    let port = id.addresses().0.unwrap().port();
    let stranger = Stranger::new(port);
    stranger.ask(1, 0);
    // The first message was read before the second is answered.
    let friend = UdpSocket::bind("127.0.0.2:0").unwrap();
    friend.set_read_timeout(Some(LIMIT)).unwrap();
    Stranger(friend, stranger.1).challenge(2);
    stranger.0.set_nonblocking(true).unwrap();
    let nothing = stranger.0.recv(&mut [0; MESSAGE_LEN]).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
}

#[test]
fn request_flood_is_bounded() {
    let listener = Listener::new(V4, 1);
    let stranger = Stranger::new(listener.port);
    // The backlog limits the waiting requests. The peers repeat the others later.
    let cookies: Vec<_> = (0..200).map(|id| stranger.challenge(id)).collect();
    for (id, cookie) in (0..).zip(&cookies) {
        stranger.ask(id, *cookie);
        if id % 16 == 0 {
            // Wait until the request is read, so that the socket's buffer does not overflow.
            stranger.challenge(1000);
        }
    }
    stranger.challenge(1000);
    let mut events = vec![];
    while let Some(event) = listener.channel.try_next() {
        events.push(event);
    }
    assert_eq!(events.len(), 128);
    events.pop().unwrap().id.reject(b"").unwrap();
    stranger.next();
    stranger.ask(199, cookies[199]);
    stranger.challenge(1000);
    assert_eq!(listener.request().private_data, b"by hand");
    for event in events {
        event.id.destroy();
    }
}

#[test]
fn unsendable_requests_are_refused() {
    let listener = Listener::new(V4, 0);
    let requester = Requester::new((V4, listener.port).into(), None);
    let long = vec![1; REQUEST_DATA_MAX + 1];
    assert!(requester.id.connect(&data(&long)).is_err());
    requester.connect(&long[1..]);
    let request = listener.request();
    assert_eq!(request.private_data, long[1..]);
    let id = &request.id;
    assert!(id.accept(&data(b"")).is_err(), "no queue pair");
    assert!(id.accept_datagrams(1 << 24, 0, b"").is_err());
    let long = vec![1; REPLY_DATA_MAX + 1];
    assert!(id.accept_datagrams(1, 0, &long).is_err());
    assert!(id.reject(&long).is_err(), "the private data is too long");
    id.reject(&long[1..]).unwrap();
    assert_eq!(requester.refused().2, long[1..]);
    // Calls for datagrams fail on an identifier for connections, and vice versa.
    let channel = create_event_channel().unwrap();
    let of_connections = CmId::create(&channel, None);
    let group = SocketAddr::from(([239, 255, 1, 1], 0));
    assert!(of_connections.join_multicast(group, false, 1).is_err());
    assert!(of_connections.set_datagram_queue_pair(None).is_err());
    assert!(of_connections.accept_datagrams(1, 1, b"").is_err());
}

/// Binds a listener for datagrams, and calls `f` with its port. The UDP port may be in use for TCP;
/// then another port is tried.
fn with_port<T>(f: impl Fn(SocketAddr) -> iwarp::Result<T>) -> (Listener, T) {
    for _ in 0..100 {
        let listener = Listener::new(V4, 0);
        match f((V4, listener.port).into()) {
            Ok(value) => return (listener, value),
            Err(iwarp::Error::Io(e)) if e.kind() == ErrorKind::AddrInUse => {}
            Err(e) => panic!("{e}"),
        }
    }
    panic!("no port is free for TCP");
}

#[test]
fn datagram_and_connection_ports_are_separate() {
    let channel = create_event_channel().unwrap();
    let (listener, tcp) = with_port(|at| {
        let id = CmId::create(&channel, None);
        id.bind(at)?;
        id.listen(0)?;
        Ok(id)
    });
    let at = (V4, listener.port).into();
    let other = CmId::create_for_datagrams(&channel, None);
    let taken = other.bind(at).unwrap_err();
    assert_eq!(taken.errno(), libc::EADDRINUSE);
    drop(tcp);
    listener.id.destroy();
    until("the port is free", || other.bind(at).is_ok());
    assert!(other.bind(at).is_err(), "the port is bound");
    // If two identifiers share a port, only one can listen.
    let shared = || {
        let id = CmId::create_for_datagrams(&channel, None);
        id.set_reuse_address(true);
        id
    };
    other.destroy();
    let (first, second) = (shared(), shared());
    until("the port is free", || first.bind(at).is_ok());
    second.bind(at).unwrap();
    first.listen(0).unwrap();
    assert_eq!(second.listen(0).unwrap_err().errno(), libc::EADDRINUSE);
    let requester = Requester::new(at, None);
    requester.connect(b"");
    let request = expect(&channel, CmEventKind::ConnectRequest);
    assert!(request.listener.unwrap().is_same(&first));
}

#[test]
fn requester_asks_from_bound_port() {
    let listener = Listener::new(V4, 0);
    let channel = create_event_channel().unwrap();
    let id = CmId::create_for_datagrams(&channel, None);
    id.bind((V4, 0).into()).unwrap();
    let own = id.addresses().0.unwrap();
    id.resolve_addr(None, (V4, listener.port).into()).unwrap();
    expect(&channel, CmEventKind::AddrResolved);
    id.resolve_route().unwrap();
    expect(&channel, CmEventKind::RouteResolved);
    for _ in 0..2 {
        id.connect(&data(b"")).unwrap();
        let request = listener.request();
        assert_eq!(request.id.addresses().1, Some(own));
        request.id.reject(b"").unwrap();
        expect(&channel, CmEventKind::Unreachable);
    }
    id.connect(&data(b"")).unwrap();
    // The requester has no answer yet.
    let _request = listener.request();
    // A cancelled attempt adds no event.
    id.destroy();
    assert!(channel.try_next().is_none());
    until("the port is free", || UdpSocket::bind(own).is_ok());
}

#[test]
fn groups_are_joined_and_left() {
    let group: SocketAddr = ([239, 255, 77, 9], 0).into();
    let channel = create_event_channel().unwrap();
    let id = CmId::create_for_datagrams(&channel, None);
    assert!(id.join_multicast(group, false, 1).is_err(), "no device");
    id.bind((V4, 0).into()).unwrap();
    for bad in ["127.0.0.1:0", "[ff05::1]:0", "0.0.0.0:0"] {
        assert!(id.join_multicast(bad.parse().unwrap(), false, 1).is_err());
    }
    let listener = Listener::new(V4, 0).id;
    let joined = listener.join_multicast(group, false, 1);
    assert!(joined.is_err(), "a listener cannot join");
    let qp = queue_pair(&context(V4, &Config::default()));
    let gid = Ipv4Addr::new(239, 255, 77, 9).to_ipv6_mapped().octets();
    let is_attached = || {
        let was = qp.detach_group(gid).is_ok();
        if was {
            qp.attach_group(gid).unwrap();
        }
        was
    };
    id.join_multicast(group, false, 11).unwrap();
    let event = expect(&channel, CmEventKind::MulticastJoin(11));
    let end = event.datagrams.unwrap();
    let DatagramEnd { ip, num, qkey, .. } = end;
    assert_eq!((ip, num, qkey), (group.ip(), 0xff_ffff, DEFAULT_QKEY));
    // A queue pair that is set later is attached, and remains attached as long as there is a
    // membership.
    id.set_datagram_queue_pair(Some(&qp)).unwrap();
    assert!(is_attached());
    id.join_multicast(group, false, 12).unwrap();
    assert_eq!(id.leave_multicast(group).unwrap(), 12);
    assert!(
        channel.try_next().is_none(),
        "an event of a group that was left"
    );
    assert!(is_attached());
    assert_eq!(id.leave_multicast(group).unwrap(), 11);
    assert!(!is_attached());
    let left = id.leave_multicast(group).unwrap_err();
    assert_eq!(left.errno(), libc::EADDRNOTAVAIL);
    // An identifier that only sends is not attached.
    id.join_multicast(group, true, 13).unwrap();
    expect(&channel, CmEventKind::MulticastJoin(13));
    assert!(!is_attached());
    // Memberships of other groups are not affected, and neither are their events.
    let other: SocketAddr = ([239, 255, 77, 10], 0).into();
    id.join_multicast(other, false, 21).unwrap();
    id.join_multicast(group, false, 22).unwrap();
    id.write_event(CmEventKind::User(22), 0).unwrap();
    let neighbour = CmId::create_for_datagrams(&channel, None);
    neighbour.bind((V4, 0).into()).unwrap();
    neighbour.join_multicast(group, true, 22).unwrap();
    assert!(is_attached());
    assert_eq!(id.leave_multicast(group).unwrap(), 22);
    assert!(!is_attached(), "the identifier only sends to the group now");
    let other_gid = Ipv4Addr::new(239, 255, 77, 10).to_ipv6_mapped().octets();
    qp.detach_group(other_gid).unwrap();
    expect(&channel, CmEventKind::MulticastJoin(21));
    expect(&channel, CmEventKind::User(22));
    let event = expect(&channel, CmEventKind::MulticastJoin(22));
    assert!(event.id.is_same(&neighbour));
    // An impossible join is reported by an event.
    qp.destroy();
    id.join_multicast(group, false, 14).unwrap();
    let event = expect(&channel, CmEventKind::MulticastError(14));
    assert_eq!(event.status, libc::EINVAL);
}

#[test]
fn forked_child_does_not_answer() {
    common::alone("forked_child_does_not_answer", || {
        let listener = Listener::new(V4, 0);
        let requester = Requester::new((V4, listener.port).into(), None);
        requester.connect(b"");
        let request = listener.request();
        // SAFETY: no other thread of this process holds a lock now, because the progress thread
        // sleeps and the harness waits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            drop((request, listener, requester));
            // SAFETY: `_exit` skips the test harness's exit handlers, which belong to the parent.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for writes, and the process is our child.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((ended, status), (child, 0));
        request.id.accept_datagrams(7, 8, b"").unwrap();
        expect(&requester.channel, CmEventKind::Established);
    });
}
