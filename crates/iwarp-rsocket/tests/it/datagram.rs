//! Tests of datagram sockets: addresses, whole datagrams, waiting, options, and unsupported calls.

use crate::common::{Rs, alone, pair, pattern};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

const DOMAINS: [(i32, &str); 2] = [(libc::AF_INET, "127.0.0.1:0"), (libc::AF_INET6, "[::1]:0")];
/// Timeout for events that must occur, so that a lost wake-up does not hang the test.
const TIMEOUT_MS: u64 = 20_000;

fn datagram(domain: i32) -> Rs {
    Rs(rs::socket(domain, libc::SOCK_DGRAM, 0).unwrap())
}

/// Returns a socket bound to a free loopback port, and its address.
fn bound(domain: i32, bind_address: &str) -> (Rs, SocketAddr) {
    let r = datagram(domain);
    rs::bind(r.0, bind_address.parse().unwrap()).unwrap();
    let address = rs::local_address(r.0).unwrap();
    assert_ne!(address.port(), 0);
    (r, address)
}

fn connected(domain: i32, bind_address: &str) -> (Rs, Rs) {
    let ((a, a_address), (b, b_address)) =
        (bound(domain, bind_address), bound(domain, bind_address));
    rs::connect(a.0, b_address).unwrap();
    rs::connect(b.0, a_address).unwrap();
    (a, b)
}

#[test]
fn datagrams_arrive_whole_with_sender() {
    alone("datagrams_arrive_whole_with_sender", || {
        for (domain, bind_address) in DOMAINS {
            let ((a, a_address), (b, b_address)) =
                (bound(domain, bind_address), bound(domain, bind_address));
            for len in [0, 1, 2049, 5000, 65_507] {
                let data = pattern(len, len);
                assert_eq!(rs::send_to(a.0, &data, 0, b_address), Ok(len));
                assert_eq!(b.poll(libc::POLLIN, TIMEOUT_MS), libc::POLLIN);
                let mut out = vec![0; 70_000];
                assert_eq!(rs::recv_from(b.0, &mut out, 0), Ok((len, Some(a_address))));
                assert!(out[..len] == data, "{len} octets differ");
            }
            assert_eq!(rs::peer_address(a.0), Err(Errno::NOTCONN));
            assert_eq!(rs::send(a.0, b"whereto", 0), Err(Errno(libc::EDESTADDRREQ)));
            assert_eq!(
                rs::send_to(a.0, &vec![0; 70_000], 0, b_address),
                Err(Errno(libc::EMSGSIZE))
            );
        }
    });
}

#[test]
fn connected_socket_receives_from_peer_only() {
    alone("connected_socket_receives_from_peer_only", || {
        for (domain, bind_address) in DOMAINS {
            let (a, b) = connected(domain, bind_address);
            let (stranger, _) = bound(domain, bind_address);
            let b_address = rs::local_address(b.0).unwrap();
            assert_eq!(rs::peer_address(a.0), Ok(b_address));
            rs::send_to(stranger.0, b"not you", 0, b_address).unwrap();
            rs::send(a.0, b"you", 0).unwrap();
            let mut out = [0; 16];
            assert_eq!(rs::recv(b.0, &mut out, 0), Ok(3));
            assert_eq!(&out[..3], b"you");
            assert_eq!(
                rs::recv(b.0, &mut out, libc::MSG_DONTWAIT),
                Err(Errno::AGAIN)
            );
            // Each call may still pass another destination.
            let stranger_address = rs::local_address(stranger.0).unwrap();
            rs::send_to(b.0, b"over there", 0, stranger_address).unwrap();
            assert_eq!(
                rs::recv_from(stranger.0, &mut out, 0),
                Ok((10, Some(b_address)))
            );
        }
    });
}

#[test]
fn peer_may_be_udp_socket() {
    alone("peer_may_be_udp_socket", || {
        let plain = UdpSocket::bind("127.0.0.1:0").unwrap();
        plain
            .set_read_timeout(Some(Duration::from_millis(TIMEOUT_MS)))
            .unwrap();
        let (r, r_address) = bound(libc::AF_INET, "127.0.0.1:0");
        rs::connect(r.0, plain.local_addr().unwrap()).unwrap();
        rs::send_vectored(r.0, &[b"two ", b"pieces"], 0).unwrap();
        let mut out = [0; 32];
        assert_eq!(plain.recv_from(&mut out).unwrap(), (10, r_address));
        assert_eq!(&out[..10], b"two pieces");
        plain.send_to(b"answer", r_address).unwrap();
        let (mut front, mut back) = ([0; 2], [0; 20]);
        assert_eq!(
            rs::recv_vectored(r.0, &mut [&mut front, &mut back], 0),
            Ok(6)
        );
        assert_eq!((&front, &back[..4]), (b"an", &b"swer"[..]));
        // The kernel reports a closed port to a connected socket.
        drop(plain);
        rs::send(r.0, b"anybody?", 0).unwrap();
        assert_eq!(
            r.poll(libc::POLLIN, TIMEOUT_MS) & libc::POLLERR,
            libc::POLLERR
        );
        assert_eq!(rs::recv(r.0, &mut out, 0), Err(Errno::CONNREFUSED));
    });
}

#[test]
fn peek_keeps_data_and_short_buffer_truncates() {
    alone("peek_keeps_data_and_short_buffer_truncates", || {
        let (a, b) = connected(libc::AF_INET, "127.0.0.1:0");
        for data in [&b"first one"[..], b"second", b"third"] {
            rs::send(a.0, data, 0).unwrap();
        }
        let mut out = [0; 4];
        assert_eq!(b.poll(libc::POLLIN, TIMEOUT_MS), libc::POLLIN);
        assert_eq!(rs::recv(b.0, &mut out, libc::MSG_PEEK), Ok(4));
        assert_eq!(
            rs::recv(b.0, &mut out, libc::MSG_PEEK | libc::MSG_TRUNC),
            Ok(9)
        );
        assert_eq!((rs::recv(b.0, &mut out, 0), &out), (Ok(4), b"firs"));
        assert_eq!((rs::recv(b.0, &mut out, 0), &out), (Ok(4), b"seco"));
        // MSG_WAITALL has no effect, because a datagram is complete.
        let mut out = [0; 40];
        assert_eq!(rs::recv(b.0, &mut out, libc::MSG_WAITALL), Ok(5));
        assert_eq!(
            rs::recv(b.0, &mut out, libc::MSG_DONTWAIT),
            Err(Errno::AGAIN)
        );
    });
}

#[test]
fn receive_obeys_timeout_and_flags() {
    alone("receive_obeys_timeout_and_flags", || {
        let (a, b) = connected(libc::AF_INET, "127.0.0.1:0");
        let mut out = [0; 16];
        let brief = [0i64.to_ne_bytes(), 20_000i64.to_ne_bytes()].concat();
        rs::set_option(b.0, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &brief).unwrap();
        assert_eq!(rs::recv(b.0, &mut out, 0), Err(Errno::AGAIN));
        assert_eq!(
            rs::control(b.0, libc::F_GETFL, 0).unwrap() & libc::O_NONBLOCK,
            0
        );
        b.nonblocking();
        assert_ne!(
            rs::control(b.0, libc::F_GETFL, 0).unwrap() & libc::O_NONBLOCK,
            0
        );
        assert_eq!(rs::recv(b.0, &mut out, 0), Err(Errno::AGAIN));
        assert_eq!(b.poll(libc::POLLIN, 10), 0);
        rs::control(b.0, libc::F_SETFL, 0).unwrap();
        let forever = [0u8; 16];
        rs::set_option(b.0, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &forever).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                rs::send(a.0, b"late", 0).unwrap();
            });
            assert_eq!(rs::recv(b.0, &mut out, 0), Ok(4));
        });
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let r = Rs(rs::socket(libc::AF_INET, libc::SOCK_DGRAM | flags, libc::IPPROTO_UDP).unwrap());
        // A blocking socket would hang in the call below.
        assert_ne!(
            rs::control(r.0, libc::F_GETFL, 0).unwrap() & libc::O_NONBLOCK,
            0
        );
        assert_eq!(rs::recv(r.0, &mut out, 0), Err(Errno::AGAIN));
        assert_eq!(rs::control(r.0, libc::F_GETFD, 0), Ok(libc::FD_CLOEXEC));
        rs::control(r.0, libc::F_SETFD, 0).unwrap();
        assert_eq!(rs::control(r.0, libc::F_GETFD, 0), Ok(0));
        assert_eq!(rs::control(r.0, libc::F_DUPFD, 0), Err(Errno::NOTSUP));
    });
}

#[test]
fn poll_mixes_streams_and_datagrams() {
    alone("poll_mixes_streams_and_datagrams", || {
        let (client, server) = pair();
        let (a, b) = connected(libc::AF_INET, "127.0.0.1:0");
        let entry = |fd, events| libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        let poll_both = |wait_ms| {
            let mut set = [entry(server.0, libc::POLLIN), entry(b.0, libc::POLLIN)];
            let n = rs::poll(&mut set, Some(Duration::from_millis(wait_ms))).unwrap();
            (n, set[0].revents, set[1].revents)
        };
        assert_eq!(poll_both(0), (0, 0, 0));
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                rs::send(a.0, b"datagram", 0).unwrap();
            });
            assert_eq!(poll_both(TIMEOUT_MS), (1, 0, libc::POLLIN));
        });
        rs::recv(b.0, &mut [0; 8], 0).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                client.send_all(b"stream");
            });
            assert_eq!(poll_both(TIMEOUT_MS), (1, libc::POLLIN, 0));
        });
        assert_eq!(a.poll(libc::POLLOUT, TIMEOUT_MS), libc::POLLOUT);
    });
}

#[test]
fn kernel_and_rsocket_options_work() {
    alone("kernel_and_rsocket_options_work", || {
        let r = datagram(libc::AF_INET6);
        assert_eq!(r.get(libc::SOL_SOCKET, libc::SO_TYPE), libc::SOCK_DGRAM);
        assert_eq!(r.get(libc::SOL_SOCKET, libc::SO_DOMAIN), libc::AF_INET6);
        r.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 20_000);
        assert_eq!(r.get(libc::SOL_SOCKET, libc::SO_RCVBUF), 40_000);
        let value = rs::get_option(r.0, libc::SOL_SOCKET, libc::SO_RCVBUF).unwrap();
        assert_eq!(value.len(), 4);
        r.set(libc::SOL_SOCKET, libc::SO_BROADCAST, 1);
        assert_eq!(r.get(libc::SOL_SOCKET, libc::SO_BROADCAST), 1);
        r.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1);
        for option in [rs::RDMA_SQSIZE, rs::RDMA_RQSIZE, rs::RDMA_INLINE] {
            assert_ne!(r.get(rs::SOL_RDMA, option), 128);
            r.set(rs::SOL_RDMA, option, 128);
            assert_eq!(r.get(rs::SOL_RDMA, option), 128);
        }
        let set = |level, name, value: &[u8]| rs::set_option(r.0, level, name, value);
        assert_eq!(set(rs::SOL_RDMA, 99, &[0; 4]), Err(Errno::NOTSUP));
        assert_eq!(
            set(rs::SOL_RDMA, rs::RDMA_SQSIZE, &[0; 3]),
            Err(Errno::INVAL)
        );
        assert_eq!(
            set(libc::IPPROTO_TCP, libc::TCP_NODELAY, &[0; 4]),
            Err(Errno::NOPROTOOPT)
        );
        assert_eq!(rs::get_option(r.0, rs::SOL_RDMA, 99), Err(Errno::NOTSUP));
    });
}

#[test]
fn stream_calls_are_refused() {
    alone("stream_calls_are_refused", || {
        let r = datagram(libc::AF_INET);
        assert_eq!(rs::listen(r.0, 1), Err(Errno::NOTSUP));
        assert_eq!(rs::accept(r.0), Err(Errno::NOTSUP));
        assert_eq!(rs::iowrite(r.0, b"data", 0, 0), Err(Errno::NOTSUP));
        let mut buffer = [0u8; 64];
        // SAFETY: nothing is mapped.
        let mapped = unsafe { rs::iomap(r.0, buffer.as_mut_ptr(), 64, true, None) };
        assert_eq!(mapped, Err(Errno::NOTSUP));
        assert_eq!(
            rs::iounmap(r.0, buffer.as_mut_ptr(), 64),
            Err(Errno::NOTSUP)
        );
        assert_eq!(rs::shutdown(r.0, libc::SHUT_WR), Err(Errno::NOTCONN));
        assert_eq!(rs::shutdown(r.0, 77), Err(Errno::INVAL));
    });
}

#[test]
fn shutdown_ends_one_direction_of_datagrams() {
    alone("shutdown_ends_one_direction_of_datagrams", || {
        let (a, b) = connected(libc::AF_INET, "127.0.0.1:0");
        rs::shutdown(a.0, libc::SHUT_RD).unwrap();
        let timeout = [20i64.to_ne_bytes(), [0; 8]].concat();
        rs::set_option(a.0, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout).unwrap();
        assert_eq!(rs::recv(a.0, &mut [0], 0), Ok(0));
        rs::send(a.0, b"out", 0).unwrap();
        assert_eq!(rs::recv(b.0, &mut [0; 8], 0), Ok(3));
        rs::shutdown(a.0, libc::SHUT_WR).unwrap();
        assert_eq!(rs::send(a.0, b"no", 0), Err(Errno::PIPE));
    });
}

#[test]
fn close_frees_number_and_port() {
    alone("close_frees_number_and_port", || {
        let (r, bind_address) = bound(libc::AF_INET, "127.0.0.1:0");
        assert!(rs::is_rsocket(r.0));
        rs::close(r.0).unwrap();
        assert!(!rs::is_rsocket(r.0));
        assert_eq!(rs::recv(r.0, &mut [0], 0), Err(Errno::BADF));
        assert_eq!(rs::close(r.0), Err(Errno::BADF));
        std::mem::forget(r);
        let again = datagram(libc::AF_INET);
        rs::bind(again.0, bind_address).unwrap();
        let other = datagram(libc::AF_INET);
        assert_eq!(
            rs::bind(other.0, bind_address),
            Err(Errno(libc::EADDRINUSE))
        );
    });
}

#[test]
fn child_uses_inherited_datagram_socket() {
    alone("child_uses_inherited_datagram_socket", || {
        let (a, b) = connected(libc::AF_INET, "127.0.0.1:0");
        // SAFETY: the child calls only lock-free functions of this crate, and skips exit handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let sent = rs::send(a.0, b"from the child", 0) == Ok(14);
            let closed = rs::close(a.0) == Ok(()) && rs::close(a.0) == Err(Errno::BADF);
            // SAFETY: always safe; the child ends without destructors and exit handlers.
            unsafe { libc::_exit(if sent && closed { 7 } else { 1 }) };
        }
        let mut out = [0; 32];
        assert_eq!(rs::recv(b.0, &mut out, 0), Ok(14));
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 7, "{status:#x}");
        // The parent's socket is still open.
        rs::send(a.0, b"parent", 0).unwrap();
        assert_eq!(rs::recv(b.0, &mut out, 0), Ok(6));
    });
}
