//! Tests of listeners with a port mapper. The tests act as the port mapper daemon, and check the
//! messages octet by octet.

use crate::common::*;
use iwarp::runtime::cm::CmEventKind;
use iwarp::runtime::{SendOp, WcStatus};
use std::net::{SocketAddr, UdpSocket};

const REQUEST: u8 = 0x04;
const ACCEPT: u8 = 0x14;
const ACK: u8 = 0x24;
const REJECT: u8 = 0x34;

fn mapper() -> (UdpSocket, u16) {
    let socket = UdpSocket::bind(SocketAddr::new(V4, 0)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let port = socket.local_addr().unwrap().port();
    (socket, port)
}

/// Receives the next message, which must have this kind and length. Returns its octets and its
/// sender.
fn receive(mapper: &UdpSocket, kind: u8, len: usize) -> (Vec<u8>, SocketAddr) {
    let mut octets = vec![0; 100];
    let (n, from) = mapper.recv_from(&mut octets).unwrap();
    octets.truncate(n);
    assert_eq!((octets[0], n), (kind, len));
    (octets, from)
}

fn port_at(octets: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes([octets[offset], octets[offset + 1]])
}

/// Returns an end that is configured with this port of the port mapper.
fn asking(port: u16) -> End {
    let mut config = config();
    config.port_mapper = Some(port);
    End::new(V4, &config)
}

fn works(end: &End, server: &End) {
    end.expect(CmEventKind::Established);
    server.expect(CmEventKind::Established);
    let mem = server.mem(64);
    server.post_recv(1, &[mem.sge(8)]);
    end.post(2, SendOp::Send, &[end.mem(64).sge(8)]);
    end.expect_status(2, WcStatus::Success);
    server.expect_status(1, WcStatus::Success);
}

#[test]
fn mapped_listener_reached_at_mapped_port() {
    let (socket, port) = mapper();
    let server = Server::new(V4, &config());
    // The port that the program connects to. No socket listens there.
    let named = {
        let free = std::net::TcpListener::bind(SocketAddr::new(V4, 0)).unwrap();
        free.local_addr().unwrap()
    };
    let end = asking(port);
    end.connect(named, b"");
    let (request, from) = receive(&socket, REQUEST, 64);
    assert_eq!(port_at(&request, 4), named.port());
    assert_eq!(request[16..20], [127, 0, 0, 1]);
    assert_eq!(request[32..36], [127, 0, 0, 1]);
    let mut accept = request[..48].to_vec();
    accept[0] = ACCEPT;
    accept[2..4].fill(0);
    accept[4..6].copy_from_slice(&server.address.port().to_be_bytes());
    socket.send_to(&accept, from).unwrap();
    let (ack, _) = receive(&socket, ACK, 48);
    assert_eq!(ack[1..], accept[1..]);
    let request_event = server.request();
    // The request contained the port from which the connection came.
    let (_, peer) = request_event.id.addresses();
    assert_eq!(port_at(&request, 6), peer.unwrap().port());
    assert_eq!(port_at(&request, 2), peer.unwrap().port());
    let accepted = server.end(request_event);
    accepted.id.accept(&parameters(b"")).unwrap();
    works(&end, &accepted);
    // The program sees the address that it has passed, and not the mapped address.
    assert_eq!(end.id.addresses().1, Some(named));
}

#[test]
fn unmapped_listener_reached_at_own_port() {
    let (socket, port) = mapper();
    let server = Server::new(V4, &config());
    let end = asking(port);
    end.connect(server.address, b"");
    let (mut octets, from) = receive(&socket, REQUEST, 64);
    octets[0] = REJECT;
    socket.send_to(&octets[..48], from).unwrap();
    works(&end, &server.accept());
}

#[test]
fn mapper_request_is_repeated() {
    let (socket, port) = mapper();
    let server = Server::new(V4, &config());
    let end = asking(port);
    end.connect(server.address, b"");
    let (first, _) = receive(&socket, REQUEST, 64);
    let (mut octets, from) = receive(&socket, REQUEST, 64);
    assert_eq!(octets, first);
    octets[0] = REJECT;
    socket.send_to(&octets[..48], from).unwrap();
    works(&end, &server.accept());
}

#[test]
fn no_mapper_falls_back_to_port() {
    let (socket, port) = mapper();
    drop(socket);
    let server = Server::new(V4, &config());
    let end = asking(port);
    end.connect(server.address, b"");
    works(&end, &server.accept());
}

#[test]
fn destroyed_identifier_ignores_mapper_answer() {
    let (socket, port) = mapper();
    let end = asking(port);
    end.connect(SocketAddr::new(V4, 1), b"");
    let (mut octets, from) = receive(&socket, REQUEST, 64);
    end.id.destroy();
    octets[0] = REJECT;
    let _ = socket.send_to(&octets[..48], from);
}

#[test]
fn no_mapper_is_asked_by_default() {
    assert_eq!(config().port_mapper, None);
}
