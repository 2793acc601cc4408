//! Input from the peer of a server and of a client of `iwarp perf`.

use std::io::Write as _;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::perf::control::{Control, Reply, Request};
use crate::perf::point::{check_link, check_point, memory_of};

/// The maximum memory of a valid link: two buffers of 1 GiB for each of 64 connections.
const MEMORY_MAX: u64 = 64 * 2 * (1 << 30);

/// A line of the control connection, parsed as a request and as a reply.
pub fn message(data: &[u8]) {
    if let Some(Request::Open { link, .. }) = parse_and_reencode::<Request>(data) {
        let checked = check_link(&link);
        if checked.is_ok() {
            assert!(memory_of(&link) <= MEMORY_MAX, "{link:?}");
        }
    }
    let _ = parse_and_reencode::<Reply>(data);
    // Also parse the first half of the input as a link, and the second half as a point on this
    // link.
    let half = data.len() / 2;
    let (first, second) = data.split_at(half);
    if let (Some(Request::Open { link, .. }), Some(Request::Run { point, .. })) =
        (parse_and_reencode(first), parse_and_reencode(second))
        && check_link(&link).is_ok()
        && check_point(&point, &link).is_ok()
    {
        assert!(point.size <= link.max_size && point.size > 0);
    }
}

/// Parses a message, and checks that it can be encoded and parsed again.
fn parse_and_reencode<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
    data: &[u8],
) -> Option<T> {
    let message: T = serde_json::from_slice(data).ok()?;
    let written = serde_json::to_vec(&message).expect("a parsed message can be encoded");
    let read: T = serde_json::from_slice(&written).expect("an encoded message can be parsed");
    assert_eq!(read, message);
    Some(message)
}

/// A whole control connection: the client sends the input and then closes.
pub fn control(data: &[u8]) {
    static LISTENER: OnceLock<TcpListener> = OnceLock::new();
    let listener = LISTENER.get_or_init(|| TcpListener::bind("127.0.0.1:0").expect("loopback"));
    let address = listener.local_addr().expect("bound");
    let mut client = TcpStream::connect(address).expect("loopback");
    let (server, _) = listener.accept().expect("the client has connected");
    // Close with a reset, so that thousands of connections do not leave ports in TIME-WAIT.
    rustix::net::sockopt::set_socket_linger(&server, Some(Duration::ZERO)).expect("a socket");
    client
        .write_all(data)
        .expect("the input fits into the socket buffer");
    client.shutdown(Shutdown::Write).expect("connected");
    let mut control = Control::new(server).expect("a TCP socket");
    let lines = data.iter().filter(|octet| **octet == b'\n').count();
    for received in 0.. {
        assert!(received <= lines + 1, "more messages than lines");
        match control.receive::<Request>(Duration::from_secs(10)) {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) => {
                let text = error.to_string();
                assert!(!text.contains("no answer within"), "{text}");
                break;
            }
        }
    }
}
