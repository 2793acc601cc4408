//! Tests of streams between two rsockets of one process: data in both directions, flow control,
//! shutdown, timeouts and options.

use crate::common::{Rs, listener, octet, pair, pair_with, pattern, time_limit};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;
use std::time::{Duration, Instant};

/// Sends `total` bytes in each direction simultaneously, `chunk` bytes per call, and checks them.
fn both_ways(c: &Rs, s: &Rs, total: usize, chunk: usize) {
    std::thread::scope(|scope| {
        for (sender, receiver) in [(c, s), (s, c)] {
            scope.spawn(move || {
                for position in (0..total).step_by(chunk) {
                    sender.send_all(&pattern(position, chunk.min(total - position)));
                }
            });
            scope.spawn(move || {
                let mut out = vec![0; chunk + 13];
                let mut position = 0;
                while position < total {
                    let n = rs::recv(receiver.0, &mut out, 0).unwrap();
                    assert_ne!(n, 0, "the stream ended at {position}");
                    for (i, got) in out[..n].iter().enumerate() {
                        assert_eq!(*got, octet(position + i), "octet {}", position + i);
                    }
                    position += n;
                }
                assert_eq!(position, total);
            });
        }
    });
}

#[test]
fn short_messages_both_ways() {
    let (c, s) = pair();
    c.send_all(b"hello");
    assert_eq!(s.recv_n(5), b"hello");
    s.send_all(b"world, of another length than before");
    assert_eq!(c.recv_n(36), b"world, of another length than before");
    assert_eq!(rs::peer_address(c.0), rs::local_address(s.0));
    assert_eq!(rs::peer_address(s.0), rs::local_address(c.0));
}

#[test]
fn large_transfers_both_ways() {
    let (c, s) = pair();
    both_ways(&c, &s, 64 << 20, 1 << 20);
}

#[test]
fn odd_sizes_and_small_buffers() {
    let (c, s) = pair_with(|r| {
        r.set(libc::SOL_SOCKET, libc::SO_SNDBUF, 2048);
        r.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 3001);
        r.set(rs::SOL_RDMA, rs::RDMA_SQSIZE, 1);
        r.set(rs::SOL_RDMA, rs::RDMA_RQSIZE, 1);
        r.set(rs::SOL_RDMA, rs::RDMA_INLINE, 0);
    });
    assert_eq!(c.get(rs::SOL_RDMA, rs::RDMA_SQSIZE), 16);
    assert_eq!(s.get(libc::SOL_SOCKET, libc::SO_RCVBUF), 6000);
    both_ways(&c, &s, 4 << 20, 7919);
}

#[test]
fn peers_with_different_sizes() {
    let (l, address) = listener(|r| {
        r.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 20);
        r.set(rs::SOL_RDMA, rs::RDMA_RQSIZE, 4000);
        r.set(rs::SOL_RDMA, rs::RDMA_INLINE, 512);
    });
    let c = Rs::new();
    c.set(libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 19);
    c.set(rs::SOL_RDMA, rs::RDMA_RQSIZE, 20);
    rs::connect(c.0, address).unwrap();
    let s = Rs(rs::accept(l.0).unwrap().0);
    assert_eq!(s.get(rs::SOL_RDMA, rs::RDMA_RQSIZE), 4000);
    both_ways(&c, &s, 8 << 20, 100_003);
}

#[test]
fn many_small_messages_return_credits() {
    let (c, s) = pair();
    let n = 50_000usize;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..n {
                c.send_all(&(i as u32).to_be_bytes());
            }
        });
        for i in 0..n {
            assert_eq!(s.recv_n(4), (i as u32).to_be_bytes());
        }
    });
    // Echo single bytes. Both ends must receive credits while they send.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..3000 {
                let got = s.recv_n(1);
                s.send_all(&got);
            }
        });
        for i in 0..3000usize {
            c.send_all(&[octet(i)]);
            assert_eq!(c.recv_n(1), [octet(i)]);
        }
    });
}

/// Sends until the socket accepts no data for 300 ms. Returns the number of bytes sent.
fn fill(r: &Rs, chunk: usize) -> usize {
    let mut sent = 0;
    let mut idle = Instant::now();
    while idle.elapsed() < Duration::from_millis(300) {
        match rs::send(r.0, &pattern(sent, chunk), libc::MSG_DONTWAIT) {
            Ok(n) => {
                sent += n;
                idle = Instant::now();
            }
            Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            Err(e) => panic!("{e}"),
        }
    }
    sent
}

#[test]
fn exhausted_credits_block_senders() {
    for chunk in [1, 64, 5000, 200_000] {
        let (c, s) = pair_with(|r| {
            r.set(rs::SOL_RDMA, rs::RDMA_RQSIZE, 32);
            r.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 16);
        });
        let (to_s, to_c) = (fill(&c, chunk), fill(&s, chunk));
        // The receiver's buffer limits the bytes. Its receive queue limits the messages, but writes
        // of a busy sender are gathered in one.
        for sent in [to_s, to_c] {
            assert!(sent > 32 && sent <= 1 << 17, "{sent} with {chunk}");
        }
        assert_eq!(c.poll(libc::POLLOUT, 0), 0);
        // A blocking send now waits until the other end reads.
        std::thread::scope(|scope| {
            scope.spawn(|| c.send_all(&pattern(to_s, 100_000)));
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(s.recv_n(to_s + 100_000), pattern(0, to_s + 100_000));
        });
        assert_eq!(c.recv_n(to_c), pattern(0, to_c));
        assert_eq!(s.poll(libc::POLLOUT, 5000), libc::POLLOUT);
        both_ways(&c, &s, 1 << 20, 3333);
    }
}

/// A program that has written may not call again for a long time. What it has written while its
/// peer was busy arrives nevertheless.
#[test]
fn gathered_data_follows_without_calls() {
    for (chunk, total) in [(100, 150_000), (60_000, 360_000)] {
        let (c, s) = pair_with(|r| r.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 18));
        for position in (0..total).step_by(chunk) {
            c.send_all(&pattern(position, chunk));
        }
        // Without the rest, the call fails.
        let timeout = [20i64, 0].map(i64::to_ne_bytes).concat();
        rs::set_option(s.0, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout).unwrap();
        assert!(s.recv_n(total) == pattern(0, total), "{chunk}");
        // The reader's answer arrives before the rest is written.
        s.send_all(b"go on");
        assert_eq!(c.recv_n(5), b"go on");
        c.send_all(b"more");
        assert_eq!(s.recv_n(4), b"more");
    }
}

#[test]
fn nonblocking_calls_and_peek() {
    let (c, s) = pair();
    s.nonblocking();
    assert_eq!(
        rs::control(s.0, libc::F_GETFL, 0).unwrap() & libc::O_NONBLOCK,
        libc::O_NONBLOCK
    );
    let mut out = [0; 10];
    assert_eq!(rs::recv(s.0, &mut out, 0), Err(Errno::AGAIN));
    assert_eq!(
        rs::recv(c.0, &mut out, libc::MSG_DONTWAIT),
        Err(Errno::AGAIN)
    );
    c.send_all(b"0123456789");
    assert_eq!(s.poll(libc::POLLIN, 5000), libc::POLLIN);
    assert_eq!(rs::recv(s.0, &mut out[..4], libc::MSG_PEEK), Ok(4));
    assert_eq!(&out[..4], b"0123");
    assert_eq!(rs::recv(s.0, &mut out[..0], 0), Ok(0));
    assert_eq!(
        rs::recv(s.0, &mut out, libc::MSG_PEEK | libc::MSG_WAITALL),
        Ok(10)
    );
    assert_eq!(rs::recv(s.0, &mut out[..3], 0), Ok(3));
    // A nonblocking socket does not wait for the remainder: it returns the available bytes.
    assert_eq!(rs::recv(s.0, &mut out, libc::MSG_WAITALL), Ok(7));
    assert_eq!(&out[..7], b"3456789");
    assert_eq!(rs::recv(s.0, &mut out, libc::MSG_PEEK), Err(Errno::AGAIN));
    assert_eq!(rs::recv(s.0, &mut out, libc::MSG_OOB), Err(Errno::NOTSUP));
}

#[test]
fn vectored_send_and_receive() {
    let (c, s) = pair();
    let data = pattern(0, 300_000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (a, b) = data.split_at(5);
            let (b, d) = b.split_at(100_000);
            assert_eq!(rs::send_vectored(c.0, &[a, &[], b, d], 0), Ok(300_000));
        });
        let (mut a, mut b, mut d) = (vec![0; 99_999], vec![0; 1], vec![0; 200_000]);
        let buffers: &mut [&mut [u8]] = &mut [&mut a, &mut [], &mut b, &mut d];
        assert_eq!(
            rs::recv_vectored(s.0, buffers, libc::MSG_WAITALL),
            Ok(300_000)
        );
        assert_eq!([a, b, d].concat(), data);
    });
}

#[test]
fn shutdown_ends_one_direction() {
    let (c, s) = pair();
    c.send_all(&pattern(0, 70_000));
    rs::shutdown(c.0, libc::SHUT_WR).unwrap();
    assert_eq!(rs::send(c.0, b"x", 0), Err(Errno::PIPE));
    assert_eq!(s.recv_n(100_000), pattern(0, 70_000));
    assert_eq!(s.recv_n(1), b"");
    assert_eq!(
        s.poll(libc::POLLIN | libc::POLLRDHUP, 1000),
        libc::POLLIN | libc::POLLRDHUP
    );
    // The other direction still works.
    std::thread::scope(|scope| {
        scope.spawn(|| s.send_all(&pattern(0, 1 << 20)));
        assert_eq!(c.recv_n(1 << 20), pattern(0, 1 << 20));
    });
    rs::shutdown(s.0, libc::SHUT_WR).unwrap();
    assert_eq!(c.recv_n(1), b"");
    assert_eq!(c.poll(libc::POLLIN, 1000) & libc::POLLHUP, libc::POLLHUP);
    assert_eq!(rs::shutdown(s.0, 77), Err(Errno::INVAL));
}

#[test]
fn close_delivers_sent_data() {
    for len in [1, 1000, 100_000] {
        let (c, s) = pair();
        c.send_all(&pattern(0, len));
        drop(c);
        assert_eq!(s.recv_n(200_000), pattern(0, len));
        assert_eq!(rs::send(s.0, b"x", 0), Err(Errno::CONNRESET));
        assert_eq!(
            s.get(libc::SOL_SOCKET, libc::SO_ERROR),
            0,
            "a close by the peer was reported as an error"
        );
    }
}

#[test]
fn zero_linger_resets_connection() {
    let (c, s) = pair();
    let on: Vec<u8> = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    rs::set_option(c.0, libc::SOL_SOCKET, libc::SO_LINGER, &on).unwrap();
    drop(c);
    let mut out = [0; 1];
    assert_eq!(rs::recv(s.0, &mut out, 0), Err(Errno::CONNRESET));
    assert_eq!(
        rs::recv(s.0, &mut out, 0),
        Ok(0),
        "the reset was reported twice"
    );
}

/// Data that arrived before a reset is received first, even by calls with larger buffers. Then the
/// reset is reported, so that it does not look like a graceful close.
#[test]
fn reset_after_data_is_reported() {
    for (flags, len) in [
        (0, 10),
        (libc::MSG_WAITALL, 10),
        (libc::MSG_PEEK, 10),
        (0, 5),
    ] {
        let (c, s) = pair();
        c.send_all(b"hello");
        assert_ne!(s.poll(libc::POLLIN, 20_000) & libc::POLLIN, 0);
        let on: Vec<u8> = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
        rs::set_option(c.0, libc::SOL_SOCKET, libc::SO_LINGER, &on).unwrap();
        drop(c);
        assert_ne!(s.poll(libc::POLLRDHUP, 20_000) & libc::POLLRDHUP, 0);
        let mut out = vec![0; len];
        assert_eq!(rs::recv(s.0, &mut out, flags), Ok(5), "{flags:#x}");
        assert_eq!(&out[..5], b"hello");
        if flags == libc::MSG_PEEK {
            assert_eq!(rs::recv(s.0, &mut out, 0), Ok(5));
        }
        assert_eq!(
            rs::recv(s.0, &mut out, 0),
            Err(Errno::CONNRESET),
            "{flags:#x}"
        );
        assert_eq!(rs::recv(s.0, &mut out, 0), Ok(0), "{flags:#x}");
    }
}

/// Peeking fills all buffers of the call, also where the receive buffer wraps. It removes no data.
#[test]
fn peek_fills_all_buffers() {
    let (c, s) = pair_with(|r| r.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 2048));
    let mut position = 0;
    for round in 0..9 {
        let data = pattern(position, 1000);
        c.send_all(&data);
        for flags in [libc::MSG_PEEK | libc::MSG_WAITALL, libc::MSG_WAITALL] {
            let (mut a, mut b, mut d) = (vec![0; 7], vec![0; 500], vec![0; 493]);
            let buffers: &mut [&mut [u8]] = &mut [&mut a, &mut [], &mut b, &mut d];
            assert_eq!(rs::recv_vectored(s.0, buffers, flags), Ok(1000), "{round}");
            assert_eq!([a, b, d].concat(), data, "round {round}, flags {flags:#x}");
        }
        position += 1000;
    }
    c.send_all(b"few");
    assert_ne!(s.poll(libc::POLLIN, 20_000) & libc::POLLIN, 0);
    let (mut a, mut b) = ([0; 2], [0; 2]);
    let n = rs::recv_vectored(s.0, &mut [&mut a, &mut b], libc::MSG_PEEK);
    assert_eq!((n, a, b), (Ok(3), *b"fe", *b"w\0"));
}

#[test]
fn shutdown_wakes_waiting_threads() {
    let stopwatch = time_limit(Duration::from_secs(10));
    let (c, s) = pair();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| rs::recv(s.0, &mut [0; 1], 0));
        let polls = scope.spawn(|| s.poll(libc::POLLIN, 8000));
        std::thread::sleep(Duration::from_millis(50));
        rs::shutdown(s.0, libc::SHUT_RDWR).unwrap();
        assert_eq!(waits.join().unwrap(), Ok(0));
        assert_ne!(polls.join().unwrap() & libc::POLLIN, 0);
    });
    assert_eq!(c.recv_n(1), b"");
    stopwatch.assert_within();
}

#[test]
fn receive_and_send_time_out() {
    let (c, _s) = pair();
    let timeout = Duration::from_millis(50);
    let value = [0i64.to_ne_bytes(), 50_000i64.to_ne_bytes()].concat();
    rs::set_option(c.0, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &value).unwrap();
    rs::set_option(c.0, libc::SOL_SOCKET, libc::SO_SNDTIMEO, &value).unwrap();
    let start = Instant::now();
    assert_eq!(rs::recv(c.0, &mut [0; 1], 0), Err(Errno::AGAIN));
    assert!(start.elapsed() >= timeout && start.elapsed() < Duration::from_secs(5));
    let big = vec![0; 32 << 20];
    // The peer does not read, so only a part fits. On a busy machine the first bytes may take
    // longer than the timeout; then more fits afterwards.
    let mut sent = rs::send(c.0, &big, 0).unwrap();
    assert!(sent > 0, "{sent}");
    let error = loop {
        assert!(sent < big.len(), "{sent}");
        match rs::send(c.0, &big, 0) {
            Ok(n) => sent += n,
            Err(e) => break e,
        }
    };
    assert_eq!(error, Errno::AGAIN);
}

#[test]
fn options_are_read_back() {
    let r = Rs::new();
    for (level, name, value, want) in [
        (libc::SOL_SOCKET, libc::SO_RCVBUF, 100_000, 200_000),
        (libc::SOL_SOCKET, libc::SO_SNDBUF, 100_000, 200_000),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR, 1, 1),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1, 1),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE, 1, 1),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5, 5),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1, 1),
        (rs::SOL_RDMA, rs::RDMA_SQSIZE, 100, 100),
        (rs::SOL_RDMA, rs::RDMA_RQSIZE, 200, 200),
        (rs::SOL_RDMA, rs::RDMA_INLINE, 16, 16),
        (rs::SOL_RDMA, rs::RDMA_INLINE, 60_000, 512),
        (rs::SOL_RDMA, rs::RDMA_IOMAPSIZE, 300, 256),
    ] {
        r.set(level, name, value);
        assert_eq!(r.get(level, name), want, "{level} {name}");
    }
    let linger: Vec<u8> = [1i32.to_ne_bytes(), 5i32.to_ne_bytes()].concat();
    let times = [(libc::SO_RCVTIMEO, 3i64), (libc::SO_SNDTIMEO, 4)]
        .map(|(name, seconds)| (name, [seconds.to_ne_bytes(), 7i64.to_ne_bytes()].concat()));
    let negative = [1i32.to_ne_bytes(), (-1i32).to_ne_bytes()].concat();
    assert_eq!(
        rs::set_option(r.0, libc::SOL_SOCKET, libc::SO_LINGER, &negative),
        Err(Errno::INVAL)
    );
    let rest = (libc::SO_LINGER, linger);
    let all = || times.iter().chain([&rest]);
    // Set all options before reading the first, so that an option which changes another is found.
    for (name, value) in all() {
        rs::set_option(r.0, libc::SOL_SOCKET, *name, value).unwrap();
    }
    for (name, value) in all() {
        let got = rs::get_option(r.0, libc::SOL_SOCKET, *name).unwrap();
        assert_eq!(got, *value, "{name}");
    }
    for (command, set, get) in [
        (libc::F_SETFD, libc::FD_CLOEXEC, libc::F_GETFD),
        (libc::F_SETFL, libc::O_NONBLOCK, libc::F_GETFL),
    ] {
        for flag in [set, 0, set, 0] {
            rs::control(r.0, command, flag).unwrap();
            assert_eq!(rs::control(r.0, get, 0).unwrap() & set, flag);
        }
    }
    assert_eq!(r.get(libc::SOL_SOCKET, libc::SO_TYPE), libc::SOCK_STREAM);
    assert_eq!(r.get(libc::SOL_SOCKET, libc::SO_ACCEPTCONN), 0);
    for command in [libc::F_GETLK, libc::F_DUPFD, 9999] {
        assert_eq!(rs::control(r.0, command, 0), Err(Errno::NOTSUP));
    }
    assert_eq!(
        rs::get_option(r.0, libc::SOL_SOCKET, 9999),
        Err(Errno::NOTSUP)
    );
    assert_eq!(rs::set_option(r.0, 4711, 1, &[0; 4]), Err(Errno::NOTSUP));
    assert_eq!(
        rs::set_option(r.0, libc::IPPROTO_TCP, libc::TCP_NODELAY, &[0; 3]),
        Err(Errno::INVAL)
    );
    let (c, _s) = pair();
    let size = rs::set_option(c.0, rs::SOL_RDMA, rs::RDMA_SQSIZE, &100i32.to_ne_bytes());
    assert_eq!(size, Err(Errno::INVAL), "set on a connected socket");
    let info = rs::get_option(c.0, libc::IPPROTO_TCP, libc::TCP_INFO).unwrap();
    assert_eq!(info[0], 1, "established");
}

#[test]
fn keep_alive_is_not_readable() {
    let (c, s) = pair();
    c.set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 1);
    c.set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    assert_eq!(
        s.poll(libc::POLLIN, 2500),
        0,
        "the keep-alive message was readable"
    );
    c.send_all(b"still there");
    assert_eq!(s.recv_n(11), b"still there");
    c.set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0);
}

#[test]
fn threads_share_one_socket() {
    let (c, s) = pair();
    const EACH: usize = 2000;
    std::thread::scope(|scope| {
        for t in 0..4u8 {
            let c = &c;
            scope.spawn(move || (0..EACH).for_each(|_| c.send_all(&[t])));
        }
        let readers: Vec<_> = (0..4)
            .map(|_| {
                let s = &s;
                scope.spawn(move || {
                    let mut seen = [0usize; 4];
                    for _ in 0..EACH {
                        let mut one = [0];
                        assert_eq!(rs::recv(s.0, &mut one, 0), Ok(1));
                        seen[usize::from(one[0])] += 1;
                    }
                    seen
                })
            })
            .collect();
        let mut sum = [0; 4];
        for r in readers {
            for (total, n) in sum.iter_mut().zip(r.join().unwrap()) {
                *total += n;
            }
        }
        assert_eq!(sum, [EACH; 4]);
    });
}
