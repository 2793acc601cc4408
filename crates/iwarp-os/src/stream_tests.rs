//! Tests of the data-path socket, over loopback.

use super::*;
use crate::poller::{Events, Interest, Poller, wait_fd};

const LONG: Option<Duration> = Some(Duration::from_secs(10));

fn pair_on(address: &str) -> (TcpStream, TcpStream) {
    let listener = std::net::TcpListener::bind(address).expect("listen");
    let active =
        std::net::TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    let (passive, _) = listener.accept().expect("accept");
    (
        TcpStream::from_socket(Socket::from(active)).expect("stream"),
        TcpStream::from_socket(Socket::from(passive)).expect("stream"),
    )
}

fn pair() -> (TcpStream, TcpStream) {
    pair_on("127.0.0.1:0")
}

fn recv_when_ready(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    assert!(
        wait_fd(stream, Interest::READ, LONG).expect("poll"),
        "no data arrived"
    );
    stream.recv(buffer)
}

#[test]
fn lists_are_gathered_and_scattered() {
    let (a, b) = pair();
    let parts: [&[u8]; 4] = [b"head", b"", b"payload", b"crc"];
    let list: Vec<RawSlice> = parts.iter().map(|part| RawSlice::of(part)).collect();
    // SAFETY: the parts may be read.
    let sent = unsafe { a.send_vectored_raw(&list, true, false) }.expect("send");
    assert_eq!(sent, 14);
    assert!(wait_fd(&b, Interest::READ, LONG).expect("poll"));
    let (mut first, mut second) = ([0u8; 5], [0u8; 20]);
    let list = [RawSlice::of_mut(&mut first), RawSlice::of_mut(&mut second)];
    // SAFETY: nothing else uses the two buffers during the call.
    assert_eq!(unsafe { b.recv_vectored_raw(&list) }.expect("receive"), 14);
    assert_eq!(&first, b"headp");
    assert_eq!(&second[..9], b"ayloadcrc");
    assert_eq!(
        b.recv(&mut first).expect_err("empty").kind(),
        io::ErrorKind::WouldBlock
    );
}

#[test]
fn unmapped_memory_is_an_error() {
    let (a, b) = pair();
    // Nothing is ever mapped at address 8.
    let bad = [RawSlice::new(8, 64)];
    // SAFETY: the kernel refuses the unmapped address.
    let (sent, received) = unsafe {
        let sent = a.send_vectored_raw(&bad, false, false);
        b.send(b"x").expect("send");
        assert!(wait_fd(&a, Interest::READ, LONG).expect("poll"));
        (sent, a.recv_vectored_raw(&bad))
    };
    assert_eq!(
        sent.expect_err("read of 8").raw_os_error(),
        Some(libc::EFAULT)
    );
    assert_eq!(
        received.expect_err("write to 8").raw_os_error(),
        Some(libc::EFAULT)
    );
    let mut byte = [0];
    assert_eq!(a.recv(&mut byte).expect("the byte is still unread"), 1);
}

#[test]
fn long_list_is_sent_in_part() {
    let (a, b) = pair();
    let byte = [7u8];
    let list = vec![RawSlice::of(&byte); MAX_SLICES + 5];
    // SAFETY: `byte` may be read.
    let sent = unsafe { a.send_vectored_raw(&list, true, false) }.expect("send");
    assert_eq!(sent, MAX_SLICES);
    // The end of the record makes TCP send the bytes that wait for more data.
    // SAFETY: as above.
    let sent = unsafe { a.send_vectored_raw(&list[MAX_SLICES..], true, false) }.expect("send");
    assert_eq!(sent, 5);
    let mut got = 0;
    let mut buffer = [0u8; 2048];
    while got < MAX_SLICES + 5 {
        got += recv_when_ready(&b, &mut buffer).expect("receive");
    }
    assert_eq!(got, MAX_SLICES + 5);
}

#[test]
fn full_socket_would_block() {
    let (a, b) = pair();
    let chunk = vec![1u8; 1 << 16];
    let mut total = 0u64;
    let error = loop {
        match a.send(&chunk) {
            Ok(count) => total += count as u64,
            Err(error) => break error,
        }
        assert!(total < 1 << 30, "the socket is never full");
    };
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert!(a.unacknowledged_bytes().expect("SIOCOUTQ") > 0);
    let mut buffer = vec![0u8; 1 << 20];
    let mut read = 0u64;
    while read < total {
        read += recv_when_ready(&b, &mut buffer).expect("receive") as u64;
    }
    assert!(wait_fd(&a, Interest::WRITE, LONG).expect("poll"));
}

#[test]
fn shutdown_delivers_last_bytes() {
    let (a, b) = pair();
    a.send(b"last").expect("send");
    a.shutdown_write().expect("shutdown");
    let mut buffer = [0u8; 16];
    assert_eq!(recv_when_ready(&b, &mut buffer).expect("receive"), 4);
    assert_eq!(recv_when_ready(&b, &mut buffer).expect("end"), 0);
    let end = b.has_octets().expect_err("the end");
    assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    // The call returns an error and raises no SIGPIPE.
    assert_eq!(
        a.send(b"late").expect_err("closed").kind(),
        io::ErrorKind::BrokenPipe
    );
    b.send(b"reply").expect("other direction");
    assert_eq!(recv_when_ready(&a, &mut buffer).expect("receive"), 5);
}

#[test]
fn abort_fails_calls_on_both_sides() {
    let (a, b) = pair();
    let poller = Poller::new().expect("epoll");
    poller.add(&a, 1, Interest::NONE).expect("add");
    a.send(b"lost").expect("send");
    a.abort();
    let mut buffer = [0u8; 16];
    // The bytes may have arrived before the reset.
    let mut result = recv_when_ready(&b, &mut buffer);
    if matches!(result, Ok(4)) {
        result = recv_when_ready(&b, &mut buffer);
    }
    assert_eq!(
        result.expect_err("reset").kind(),
        io::ErrorKind::ConnectionReset
    );
    let mut events = Events::with_capacity(2);
    assert_eq!(poller.wait(&mut events, LONG).expect("wait"), 1);
    assert!(events.iter().all(|event| event.broken));
    assert!(a.send(b"x").is_err());
    assert!(!matches!(a.recv(&mut buffer), Ok(1..)));
    assert!(a.peer_addr().is_err());
    a.abort();
}

#[test]
fn addresses_and_mss_are_reported() {
    for address in ["127.0.0.1:0", "[::1]:0"] {
        if address.starts_with('[') && std::net::TcpListener::bind(address).is_err() {
            println!("skipped: no IPv6 loopback here");
            continue;
        }
        let (a, b) = pair_on(address);
        assert_eq!(a.local_addr().expect("local"), b.peer_addr().expect("peer"));
        assert_eq!(a.peer_addr().expect("peer"), b.local_addr().expect("local"));
        let mss = a.mss().expect("mss");
        assert!((500..=65_535).contains(&mss), "{mss}");
        assert!(a.take_error().expect("SO_ERROR").is_none());
        assert!(a.socket().tcp_nodelay().expect("nodelay"));
    }
}

#[test]
fn keep_alive_probes_within_limit() {
    let (a, _b) = pair();
    // In seconds: the limit, the time before the first probe, and the interval of the probes.
    for (limit, idle, interval, probes) in [
        (0, 1, 1, 1),
        (2, 1, 1, 1),
        (3, 1, 1, 2),
        (60, 30, 8, 4),
        (u64::MAX, 16_383, 4096, 4),
    ] {
        a.keep_alive(Some(Duration::from_secs(limit)))
            .expect("options");
        let socket = a.socket();
        assert!(socket.keepalive().expect("SO_KEEPALIVE"));
        let set = (
            socket.tcp_keepalive_time().expect("TCP_KEEPIDLE").as_secs(),
            socket
                .tcp_keepalive_interval()
                .expect("TCP_KEEPINTVL")
                .as_secs(),
            socket.tcp_keepalive_retries().expect("TCP_KEEPCNT"),
        );
        assert_eq!(set, (idle, interval, probes), "{limit}");
    }
}

#[test]
fn acknowledgement_is_an_answer() {
    for (retransmits, probes, sent_ms, acknowledged_ms, silent) in [
        (0, 0, 5000, 9000, false),
        (1, 0, 5000, 5000, false),
        (1, 0, 5000, 5001, true),
        (0, 1, 0, 2000, false),
        (0, 1, 0, 2001, true),
        (0, 2, 0, 1, true),
    ] {
        let info = TcpInfo {
            retransmits_in_a_row: retransmits,
            unanswered_probes: probes,
            last_data_sent_ms: sent_ms,
            last_ack_received_ms: acknowledged_ms,
            ..TcpInfo::default()
        };
        assert_eq!(is_silent(&info), silent, "{info:?}");
    }
}

#[test]
fn full_receive_buffer_is_not_silence() {
    let (a, _b) = pair();
    assert_eq!(a.unanswered().expect("TCP_INFO"), None);
    while a.send(&[1; 1 << 16]).is_ok() {}
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(1500) {
        // A probe may be in flight, but not for long.
        if let Some(time) = a.unanswered().expect("TCP_INFO") {
            assert!(time < Duration::from_secs(5), "{time:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(a.unacknowledged_bytes().expect("SIOCOUTQ") > 0);
    // Linux waits at least a millisecond before it retransmits.
    assert!(a.detection_time().expect("TCP_INFO") >= Duration::from_millis(2));
}
