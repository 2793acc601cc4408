//! Two connected rsockets, and calls on both with arbitrary arguments.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::time::Duration;

use iwarp_rsocket as rs;

/// Flags that make calls non-blocking.
const DONTWAIT: i32 = 0x40;
const PEEK: i32 = 2;
/// Maximum number of calls of one input.
const CALLS_MAX: usize = 60;
/// `AF_INET` and `SOCK_STREAM`.
const INET: i32 = 2;
const STREAM: i32 = 1;
/// `F_SETFL` and `O_NONBLOCK`.
const SETFL: i32 = 4;
const NONBLOCK: i32 = 0x800;
/// `O_NONBLOCK` connects in the background (`EINPROGRESS`).
const IN_PROGRESS: i32 = 115;

fn listener() -> RawFd {
    static LISTENER: OnceLock<RawFd> = OnceLock::new();
    *LISTENER.get_or_init(|| {
        let fd = rs::socket(INET, STREAM, 0).expect("a socket");
        rs::bind(fd, ([127, 0, 0, 1], 0).into()).expect("loopback");
        rs::listen(fd, 64).expect("bound");
        fd
    })
}

/// One endpoint of the connection.
struct End {
    fd: RawFd,
    /// Bytes that the peer has sent and this endpoint has not read.
    to_read: VecDeque<u8>,
    /// This endpoint has shut down its sending direction.
    send_shut: bool,
    /// This endpoint has shut down its receiving direction. It is unspecified which data it can
    /// still read.
    receive_shut: bool,
}

/// The input: a byte of socket options that are set before the connection, and calls of four bytes
/// each. The first byte of a call selects the call and the endpoint; the others are arguments. Each
/// endpoint must read exactly the data that its peer has sent.
pub fn calls(data: &[u8]) {
    let Some((&how, calls)) = data.split_first() else {
        return;
    };
    let client = rs::socket(INET, STREAM, 0).expect("a socket");
    // Small queues and buffers become full sooner.
    for (bit, (level, name, value)) in [
        (1, (rs::SOL_RDMA, rs::RDMA_SQSIZE, 4)),
        (2, (rs::SOL_RDMA, rs::RDMA_RQSIZE, 4)),
        (4, (rs::SOL_RDMA, rs::RDMA_INLINE, 0)),
        (8, (1, 8, 4096)),
    ] {
        if how & bit != 0 {
            let value: i32 = value;
            let _ = rs::set_option(client, level, name, &value.to_ne_bytes());
        }
    }
    rs::control(client, SETFL, NONBLOCK).expect("a socket");
    let address = rs::local_address(listener()).expect("bound");
    match rs::connect(client, address) {
        Ok(()) => {}
        Err(error) => assert_eq!(error.0, IN_PROGRESS, "connect"),
    }
    let (server, _) = rs::accept(listener()).expect("the client is connecting");
    rs::control(server, SETFL, NONBLOCK).expect("a socket");
    // Wait until the client's connection is established.
    let mut ready = [rs_poll(client, 4)];
    let _ = rs::poll(&mut ready, Some(Duration::from_secs(5)));
    let mut ends = [client, server].map(|fd| End {
        fd,
        to_read: VecDeque::new(),
        send_shut: false,
        receive_shut: false,
    });
    let mut sent = 0_u32;
    for arguments in calls.chunks_exact(4).take(CALLS_MAX) {
        if let [what, a, b, c] = *arguments {
            call(&mut ends, what, [a, b, c], &mut sent);
        }
    }
    finish(&mut ends);
}

fn rs_poll(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}

/// Returns the next `len` bytes of a pseudorandom stream. `sent` is the position in the stream.
fn content(sent: &mut u32, len: usize) -> Vec<u8> {
    let data = (0..len as u32).map(|i| (*sent + i).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]);
    let data = data.collect();
    *sent += len as u32;
    data
}

fn call(ends: &mut [End; 2], what: u8, [a, b, c]: [u8; 3], sent: &mut u32) {
    let side = usize::from(what >> 7);
    let len = usize::from(u16::from_be_bytes([a, b])) % 20_000;
    let flags = DONTWAIT | i32::from(c & 4);
    match what & 15 {
        0..=4 => {
            let data = content(sent, len);
            let (head, tail) = data.split_at(len / 3);
            let fd = ends[side].fd;
            let taken = match c & 1 {
                0 => rs::send(fd, &data, flags),
                _ => rs::send_vectored(fd, &[head, &[], tail], flags),
            };
            if let Ok(n) = taken {
                assert!(n <= len && !ends[side].send_shut, "sent after the shutdown");
                ends[side ^ 1].to_read.extend(&data[..n]);
            }
        }
        5..=9 => read(&mut ends[side], len, c),
        10 => {
            let value = [a, b, c, what].repeat(usize::from(c % 5));
            let (level, name) = (i32::from(a) + 200 * i32::from(c & 64 != 0), i32::from(b));
            let _ = rs::set_option(ends[side].fd, level, name, &value);
        }
        11 => {
            let level = if c & 1 == 0 {
                i32::from(a)
            } else {
                rs::SOL_RDMA
            };
            let _ = rs::get_option(ends[side].fd, level, i32::from(b));
        }
        12 => {
            let events = i16::from_be_bytes([a, b]);
            let mut polled = [
                rs_poll(ends[side].fd, events),
                rs_poll(ends[side ^ 1].fd, events),
            ];
            let count = rs::poll(&mut polled, Some(Duration::ZERO)).unwrap_or(0);
            let raised = polled.iter().filter(|p| p.revents != 0).count();
            assert_eq!(count, raised, "poll");
        }
        13 if c < 32 => {
            let how = i32::from(a % 4);
            if rs::shutdown(ends[side].fd, how).is_ok() && how != 0 {
                ends[side].send_shut = true;
            }
            ends[side].receive_shut |= how != 1;
        }
        14 => {
            let _ = rs::iowrite(
                ends[side].fd,
                &content(&mut 0, len % 500),
                u64::from(c),
                flags,
            );
        }
        _ => {
            let _ = rs::control(ends[side].fd, i32::from(a % 16), NONBLOCK);
        }
    }
}

/// Reads, and compares the data with those that the peer has sent.
fn read(end: &mut End, len: usize, how: u8) {
    let mut out = vec![0; len];
    let peek = how & 8 != 0;
    let flags = DONTWAIT | if peek { PEEK } else { 0 };
    let Ok(n) = rs::recv(end.fd, &mut out, flags) else {
        return;
    };
    if end.receive_shut || end.to_read.is_empty() && n == 0 {
        return;
    }
    let wanted: Vec<u8> = end.to_read.iter().copied().take(n).collect();
    assert_eq!(
        out[..n],
        wanted,
        "the received data differ from the sent data"
    );
    if !peek {
        end.to_read.drain(..n);
    }
}

/// Reads all data that were sent, then closes both sockets.
fn finish(ends: &mut [End; 2]) {
    let both_open = ends.iter().all(|end| !end.send_shut && !end.receive_shut);
    for turn in 0.. {
        if !both_open || ends.iter().all(|end| end.to_read.is_empty()) {
            break;
        }
        assert!(turn < 2000, "sent octets do not arrive");
        for end in ends.iter_mut() {
            let mut polled = [rs_poll(end.fd, 1)];
            let pause = match end.to_read.is_empty() {
                true => Duration::ZERO,
                false => Duration::from_millis(5),
            };
            let _ = rs::poll(&mut polled, Some(pause));
            read(end, 20_000, 0);
        }
    }
    for end in ends {
        rs::close(end.fd).expect("an open socket");
    }
}
