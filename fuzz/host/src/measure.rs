//! Input of a server and of a client of `iwarp perf`.

use std::io::Write as _;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::perf::control::{Control, Reply, Request};
use crate::perf::point::{check_link, check_point, memory_of};

/// The most memory that a checked link may request: two buffers of a gibibyte for each of 64
/// connections.
const MEMORY_MAX: u64 = 64 * 2 * (1 << 30);

/// One line, as a request and as a reply.
pub fn message(data: &[u8]) {
    if let Some(Request::Open { link, .. }) = again::<Request>(data) {
        let checked = check_link(&link);
        if checked.is_ok() {
            assert!(memory_of(&link) <= MEMORY_MAX, "{link:?}");
        }
    }
    let _ = again::<Reply>(data);
    // A point belongs to a link, which is the first half of the input.
    let half = data.len() / 2;
    let (first, second) = data.split_at(half);
    if let (Some(Request::Open { link, .. }), Some(Request::Run { point, .. })) =
        (again(first), again(second))
        && check_link(&link).is_ok()
        && check_point(&point, &link).is_ok()
    {
        assert!(point.size <= link.max_size && point.size > 0);
    }
}

/// Parses a message. What was parsed can be written and parsed again.
fn again<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(data: &[u8]) -> Option<T> {
    let message: T = serde_json::from_slice(data).ok()?;
    let written = serde_json::to_vec(&message).expect("what was read can be written");
    let read: T = serde_json::from_slice(&written).expect("and read again");
    assert_eq!(read, message);
    Some(message)
}

/// A whole control connection: a client sends any bytes and then closes.
pub fn control(data: &[u8]) {
    static LISTENER: OnceLock<TcpListener> = OnceLock::new();
    let listener = LISTENER.get_or_init(|| TcpListener::bind("127.0.0.1:0").expect("loopback"));
    let address = listener.local_addr().expect("bound");
    let mut client = TcpStream::connect(address).expect("loopback");
    let (server, _) = listener.accept().expect("it has connected");
    // Reset it, so that thousands of connections leave no ports in TIME-WAIT.
    rustix::net::sockopt::set_socket_linger(&server, Some(Duration::ZERO)).expect("a socket");
    client.write_all(data).expect("it fits the buffer");
    client.shutdown(Shutdown::Write).expect("connected");
    let mut control = Control::new(server).expect("a TCP socket");
    let lines = data.iter().filter(|octet| **octet == b'\n').count();
    for heard in 0.. {
        assert!(heard <= lines + 1, "more messages than lines");
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
