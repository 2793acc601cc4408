//! Requests whose peer has gone, and the order of requests.

use super::super::super::testing;
use super::super::create_event_channel;
use super::*;
use std::io::{Read, Write};

/// A request of revision 1 without private data (RFC 5044 section 7.1.1).
const REQUEST: &[u8; 20] = b"MPA ID Req Frame\x40\x01\x00\x00";

fn hall_of(listener: &CmId) -> Arc<Hall> {
    match &listener.inner.state.lock().phase {
        Phase::Listening(l) => Arc::clone(&l.hall),
        _ => unreachable!("it listens"),
    }
}

/// A peer's socket, and what is accepted for it, with the peer's address.
fn connect(
    nursery: &std::net::TcpListener,
) -> (std::net::TcpStream, std::net::TcpStream, SocketAddr) {
    let peer = std::net::TcpStream::connect(nursery.local_addr().unwrap()).unwrap();
    let (accepted, address) = nursery.accept().unwrap();
    accepted.set_nonblocking(true).unwrap();
    (peer, accepted, address)
}

/// Waits until a request can be read.
fn has_come(at: &std::net::TcpStream) {
    let mut frame = [0; REQUEST.len()];
    while at.peek(&mut frame).ok() != Some(REQUEST.len()) {}
}

/// A peer's socket, what is accepted for it, and the connection in start-up, which the poller does not know.
fn greet(
    hall: &Arc<Hall>,
    ctx: &Context,
    nursery: &std::net::TcpListener,
) -> (std::net::TcpStream, std::net::TcpStream, Arc<Greeting>) {
    let (peer, accepted, address) = connect(nursery);
    let seen = accepted.try_clone().unwrap();
    let greeting = Arc::new(Greeting {
        hall: Arc::clone(hall),
        ctx: ctx.clone(),
        token: hall.engine.token(),
        starting: Mutex::new(Some(Starting {
            flow: None,
            stream: TcpStream::from_socket(accepted.into()).unwrap(),
            ends: Ends {
                local: nursery.local_addr().unwrap(),
                peer: address,
            },
            reader: FrameReader::new(FrameKind::Request),
        })),
    });
    hall.starting.lock().push_back(Arc::downgrade(&greeting));
    (peer, seen, greeting)
}

/// A process that was stopped finds the request and the expired timer at the same moment.
#[test]
fn a_request_that_has_come_counts_although_its_time_is_over() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(8).unwrap();
    let hall = hall_of(&id);
    let nursery = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut silent, _, first) = greet(&hall, &ctx, &nursery);
    let (mut asking, seen, second) = greet(&hall, &ctx, &nursery);
    asking.write_all(REQUEST).unwrap();
    has_come(&seen);
    first.timer(0);
    second.timer(0);
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(event.id.addresses().1, Some(asking.local_addr().unwrap()));
    let reset = silent.read(&mut [0]).unwrap_err();
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
}

/// Two requests have come before either is read, and the second connection is accepted only now. The program gets the first one first.
#[test]
fn a_request_does_not_overtake_that_of_an_older_connection() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(8).unwrap();
    let hall = hall_of(&id);
    let nursery = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut first, accepted, first_address) = connect(&nursery);
    let watched = accepted.try_clone().unwrap();
    let stream = TcpStream::from_socket(accepted.into()).unwrap();
    hall.welcome(stream, first_address);
    let greeting = hall.starting.lock()[0].upgrade().unwrap();
    // The progress thread cannot read the first request before the second connection is accepted.
    let slot = greeting.starting.lock();
    first.write_all(REQUEST).unwrap();
    has_come(&watched);
    let (mut second, accepted, second_address) = connect(&nursery);
    second.write_all(REQUEST).unwrap();
    has_come(&accepted);
    let stream = TcpStream::from_socket(accepted.into()).unwrap();
    hall.welcome(stream, second_address);
    drop(slot);
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(event.id.addresses().1, Some(first_address));
    channel.next(Some(Duration::from_secs(10))).unwrap();
}

/// The oldest connection is given up where there are too many, but not if its request has come and only nobody has read it.
#[test]
fn a_connection_whose_request_has_come_is_not_given_up() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(8).unwrap();
    let hall = hall_of(&id);
    let nursery = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut silent, _, _first) = greet(&hall, &ctx, &nursery);
    let (mut asking, seen, _second) = greet(&hall, &ctx, &nursery);
    asking.write_all(REQUEST).unwrap();
    has_come(&seen);
    assert!(hall.give_up_oldest("there are too many"));
    assert!(hall.give_up_oldest("there are too many"));
    assert!(!hall.give_up_oldest("there are too many"));
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(
        event.id.addresses().1,
        Some(asking.local_addr().unwrap()),
        "the one that asks"
    );
    let reset = silent.read(&mut [0]).unwrap_err();
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
}

/// A peer that asks and resets at once: its request is an event like any other, and says who it was.
#[test]
fn a_request_names_its_peer_even_if_that_has_gone() {
    let ctx = testing::context();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.bind(([127, 0, 0, 1], 0).into()).unwrap();
    id.listen(1).unwrap();
    let hall = hall_of(&id);
    let nursery = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = std::net::TcpStream::connect(nursery.local_addr().unwrap()).unwrap();
    let (mut accepted, address) = nursery.accept().unwrap();
    peer.write_all(REQUEST).unwrap();
    let mut frame = [0u8; 20];
    accepted.read_exact(&mut frame).unwrap();
    let mut reader = FrameReader::new(FrameKind::Request);
    reader.push(&frame).unwrap();
    let socket = socket2::SockRef::from(&peer);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    drop(peer);
    let stream = TcpStream::from_socket(accepted.into()).unwrap();
    let reset = std::iter::repeat_with(|| stream.peer_addr().is_err());
    assert!(reset.take(100_000).any(|gone| gone), "a reset arrives");
    let starting = Starting {
        stream,
        ends: Ends {
            local: nursery.local_addr().unwrap(),
            peer: address,
        },
        flow: None,
        reader,
    };
    hall.deliver(ctx, starting);
    let event = channel.next(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(event.kind, CmEventKind::ConnectRequest);
    assert_eq!(event.id.addresses().1, Some(address));
}
