//! Tests of connecting and accepting, of their errors, and of `poll` and `select` with rsockets and
//! other descriptors.

use crate::common::{Rs, listener, pair, time_limit};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

#[test]
fn nonblocking_connect_and_accept() {
    let (l, address) = listener(Rs::nonblocking);
    assert_eq!(rs::accept(l.0).unwrap_err(), Errno::AGAIN);
    assert_eq!(l.poll(libc::POLLIN, 0), 0);
    let c = Rs::new();
    c.nonblocking();
    assert_eq!(rs::peer_address(c.0), Err(Errno::NOTCONN));
    match rs::connect(c.0, address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(c.poll(libc::POLLOUT, 10_000), libc::POLLOUT);
    assert_eq!(c.get(libc::SOL_SOCKET, libc::SO_ERROR), 0);
    assert_eq!(rs::connect(c.0, address), Err(Errno::ISCONN));
    assert_eq!(l.poll(libc::POLLIN, 10_000), libc::POLLIN);
    let s = Rs(rs::accept(l.0).unwrap().0);
    assert_eq!(
        rs::control(s.0, libc::F_GETFL, 0).unwrap() & libc::O_NONBLOCK,
        0,
        "an accepted socket must not inherit O_NONBLOCK"
    );
    c.send_all(b"!");
    assert_eq!(s.recv_n(1), b"!");
}

#[test]
fn connections_do_not_wait_for_accept() {
    let stopwatch = time_limit(Duration::from_secs(30));
    let (l, address) = listener(|_| {});
    let clients: Vec<_> = (0..8)
        .map(|i| {
            let c = Rs::new();
            rs::connect(c.0, address).unwrap();
            c.send_all(&[i]);
            c
        })
        .collect();
    for i in 0..8 {
        let s = Rs(rs::accept(l.0).unwrap().0);
        assert_eq!(s.recv_n(1), [i]);
    }
    drop(clients);
    stopwatch.assert_within();
}

#[test]
fn full_backlog_refuses_connection() {
    let l = Rs::new();
    rs::bind(l.0, "127.0.0.1:0".parse().unwrap()).unwrap();
    rs::listen(l.0, 2).unwrap();
    let address = rs::local_address(l.0).unwrap();
    let clients: Vec<_> = (0..2).map(|_| Rs::new()).collect();
    for c in &clients {
        rs::connect(c.0, address).unwrap();
    }
    let third = Rs::new();
    assert_eq!(rs::connect(third.0, address), Err(Errno::CONNREFUSED));
    drop(rs::accept(l.0).map(|(s, _)| Rs(s)).unwrap());
    rs::connect(third.0, address).unwrap();
}

#[test]
fn socket_can_reconnect_after_refusal() {
    // The local port of this connection is in use, so no other test can listen on it.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let held = TcpStream::connect(other.local_addr().unwrap()).unwrap();
    let no_listener = held.local_addr().unwrap();
    let c = Rs::new();
    assert_eq!(rs::connect(c.0, no_listener), Err(Errno::CONNREFUSED));
    c.nonblocking();
    assert_eq!(rs::connect(c.0, no_listener), Err(Errno::INPROGRESS));
    let events = c.poll(libc::POLLOUT, 10_000);
    assert_ne!(events & libc::POLLERR, 0);
    assert_eq!(c.get(libc::SOL_SOCKET, libc::SO_ERROR), libc::ECONNREFUSED);
    assert_eq!(
        c.get(libc::SOL_SOCKET, libc::SO_ERROR),
        0,
        "the error was reported twice"
    );
    let (l, address) = listener(|_| {});
    rs::control(c.0, libc::F_SETFL, 0).unwrap();
    rs::connect(c.0, address).unwrap();
    let s = Rs(rs::accept(l.0).unwrap().0);
    s.send_all(b"hello");
    assert_eq!(c.recv_n(5), b"hello");
}

#[test]
fn connect_to_foreign_server_fails() {
    // The first server closes immediately; the second uses another protocol.
    for reply in [
        &b""[..],
        b"HTTP/1.1 400 Bad Request\r\n\r\n and more than enough to fill a frame",
    ] {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            // The rsocket tries again with MPA revision 1, so the server must accept twice.
            tcp.set_nonblocking(true).unwrap();
            let deadline = Instant::now() + Duration::from_secs(2);
            while Instant::now() < deadline {
                if let Ok((mut stream, _)) = tcp.accept() {
                    let _ = stream.write_all(reply);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let c = Rs::new();
        let e = rs::connect(c.0, address).unwrap_err();
        assert!(
            [Errno::CONNREFUSED, Errno::CONNRESET, Errno::PROTO].contains(&e),
            "{e:?}"
        );
        server.join().unwrap();
    }
}

#[test]
fn listener_survives_foreign_clients() {
    let (l, address) = listener(|_| {});
    for junk in [
        &b"GET / HTTP/1.0\r\n\r\n012345678901234567890"[..],
        b"x",
        b"",
    ] {
        let mut tcp = TcpStream::connect(address).unwrap();
        tcp.write_all(junk).unwrap();
    }
    // A peer that uses MPA, but whose private data is not that of an rsocket.
    let channel = iwarp::runtime::create_event_channel().unwrap();
    let id = iwarp::runtime::cm::CmId::create(&channel, None);
    id.resolve_addr(None, address).unwrap();
    id.resolve_route().unwrap();
    let ctx = id.context().unwrap();
    let pd = iwarp::verbs::ProtectionDomain::new(&ctx);
    let qp = {
        let cq = ctx.create_cq(16, None).unwrap();
        ctx.create_qp(&iwarp::runtime::QpAttributes {
            pd: pd.number(),
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            unreliable: false,
            max_send_wr: 8,
            max_recv_wr: 8,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: false,
            max_ird: 1,
            max_ord: 1,
        })
        .unwrap()
    };
    id.set_queue_pair(Some(&qp));
    id.connect(&iwarp::runtime::cm::ConnectionParameters {
        private_data: b"not an rsocket".to_vec(),
        ..Default::default()
    })
    .unwrap();
    use iwarp::runtime::cm::CmEventKind::{AddrResolved, Rejected, RouteResolved};
    for kind in [AddrResolved, RouteResolved, Rejected] {
        let event = channel.next(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(event.kind, kind);
    }
    id.destroy();
    qp.destroy();
    let c = Rs::new();
    rs::connect(c.0, address).unwrap();
    let s = Rs(rs::accept(l.0).unwrap().0);
    s.send_all(b"fine");
    assert_eq!(c.recv_n(4), b"fine");
}

#[test]
fn unsupported_socket_types_are_refused() {
    for (domain, ty, protocol) in [
        (libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_TCP),
        (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_UDP),
        (libc::AF_INET, libc::SOCK_RAW, 0),
        (libc::AF_UNIX, libc::SOCK_STREAM, 0),
    ] {
        let refused = rs::socket(domain, ty, protocol);
        assert_eq!(refused, Err(Errno::NOTSUP), "{domain} {ty} {protocol}");
    }
}

#[test]
fn wrong_descriptors_and_states_fail() {
    let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    for fd in [-1, 987_654, tcp.as_raw_fd()] {
        assert_eq!(rs::close(fd), Err(Errno::BADF));
        assert_eq!(rs::recv(fd, &mut [0], 0), Err(Errno::BADF));
        assert_eq!(rs::connect(fd, address), Err(Errno::BADF));
        assert_eq!(rs::control(fd, libc::F_GETFL, 0), Err(Errno::BADF));
    }
    let r = Rs::new();
    assert_eq!(rs::recv(r.0, &mut [0], 0), Err(Errno::NOTCONN));
    assert_eq!(rs::send(r.0, &[0], 0), Err(Errno::NOTCONN));
    assert_eq!(rs::shutdown(r.0, libc::SHUT_WR), Err(Errno::NOTCONN));
    assert_eq!(rs::accept(r.0).unwrap_err(), Errno::INVAL);
    assert_eq!(
        rs::bind(r.0, "[::1]:0".parse().unwrap()),
        Err(Errno(libc::EAFNOSUPPORT))
    );
    rs::bind(r.0, "127.0.0.1:0".parse().unwrap()).unwrap();
    assert_eq!(
        rs::bind(r.0, "127.0.0.1:0".parse().unwrap()),
        Err(Errno::INVAL)
    );
    let second = Rs::new();
    let (_l, address) = listener(|_| {});
    let result = rs::bind(second.0, address).and_then(|()| rs::listen(second.0, 1));
    assert_eq!(result, Err(Errno(libc::EADDRINUSE)));
    let (l, address) = listener(|_| {});
    assert_eq!(rs::connect(l.0, address), Err(Errno::ISCONN));
    // A listener that was shut down is neither bound nor listening.
    rs::shutdown(l.0, libc::SHUT_RDWR).unwrap();
    rs::bind(l.0, "127.0.0.1:0".parse().unwrap()).unwrap();
}

#[test]
fn ipv6_sockets_connect() {
    let l = Rs(rs::socket(libc::AF_INET6, libc::SOCK_STREAM, 0).unwrap());
    if rs::bind(l.0, "[::1]:0".parse().unwrap()).is_err() {
        eprintln!("skipped: needs IPv6");
        return;
    }
    rs::listen(l.0, 1).unwrap();
    let address = rs::local_address(l.0).unwrap();
    let c = Rs(rs::socket(libc::AF_INET6, libc::SOCK_STREAM, 0).unwrap());
    rs::connect(c.0, address).unwrap();
    let (s, peer) = rs::accept(l.0).unwrap();
    let s = Rs(s);
    assert!(peer.unwrap().is_ipv6());
    c.send_all(b"six");
    assert_eq!(s.recv_n(3), b"six");
    // An IPv6 socket connects to an IPv4-mapped address.
    let (l4, address) = listener(|_| {});
    let c = Rs(rs::socket(libc::AF_INET6, libc::SOCK_STREAM, 0).unwrap());
    let mapped: SocketAddr = format!("[::ffff:127.0.0.1]:{}", address.port())
        .parse()
        .unwrap();
    rs::connect(c.0, mapped).unwrap();
    let _s = Rs(rs::accept(l4.0).unwrap().0);
    assert_eq!(rs::peer_address(c.0), Ok(mapped));
}

#[test]
fn poll_mixes_rsockets_and_descriptors() {
    let (c, s) = pair();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let (l, address) = listener(|_| {});
    let entry = |fd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let mut set = [
        entry(reader.as_raw_fd(), libc::POLLIN),
        entry(s.0, libc::POLLIN),
        entry(-1, libc::POLLIN),
        entry(l.0, libc::POLLIN),
        entry(c.0, libc::POLLIN),
    ];
    let ms = |n| Some(Duration::from_millis(n));
    let start = Instant::now();
    assert_eq!(rs::poll(&mut set, ms(50)), Ok(0));
    assert!(start.elapsed() >= Duration::from_millis(50));
    let revents = |set: &[libc::pollfd]| set.iter().map(|f| f.revents).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            writer.write_all(b"x").unwrap();
        });
        assert_eq!(rs::poll(&mut set, ms(10_000)), Ok(1));
        assert_eq!(revents(&set), [libc::POLLIN, 0, 0, 0, 0]);
    });
    let mut rsockets = set;
    rsockets[0].fd = -1;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            c.send_all(b"y");
        });
        assert_eq!(rs::poll(&mut rsockets, None), Ok(1));
        assert_eq!(revents(&rsockets), [0, libc::POLLIN, 0, 0, 0]);
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            let c = Rs::new();
            rs::connect(c.0, address).unwrap();
        });
        let mut one = [entry(l.0, libc::POLLIN)];
        assert_eq!(rs::poll(&mut one, ms(10_000)), Ok(1));
    });
    assert_eq!(rs::poll(&mut set, ms(0)), Ok(3));
    assert_eq!(
        revents(&set),
        [libc::POLLIN, libc::POLLIN, 0, libc::POLLIN, 0]
    );
    // Sets without rsockets: one ordinary descriptor, and none.
    assert_eq!(rs::poll(&mut set[..1], ms(0)), Ok(1));
    assert_eq!(rs::poll(&mut [], ms(1)), Ok(0));
    // Ordinary descriptors for reading and for writing, and a stream without wanted events.
    let mut ordinary = [
        entry(reader.as_raw_fd(), libc::POLLIN),
        entry(s.0, 0),
        entry(writer.as_raw_fd(), libc::POLLOUT),
    ];
    assert_eq!(rs::poll(&mut ordinary, ms(0)), Ok(2));
    assert_eq!(revents(&ordinary), [libc::POLLIN, 0, libc::POLLOUT]);
    let mut closed = [entry(s.0, 0), entry(987_654, libc::POLLIN)];
    assert_eq!(rs::poll(&mut closed, ms(0)), Ok(1));
    assert_eq!(closed[1].revents, libc::POLLNVAL);
}

/// A socket may have several entries, and each ready entry is counted.
#[test]
fn poll_counts_each_ready_entry() {
    let (c, s) = pair();
    let entry = libc::pollfd {
        fd: s.0,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut fds = [entry; 3];
    std::thread::scope(|scope| {
        let polls = scope.spawn(|| rs::poll(&mut fds, Some(Duration::from_secs(60))));
        std::thread::sleep(Duration::from_millis(50));
        c.send_all(b"x");
        assert_eq!(polls.join().unwrap(), Ok(3));
    });
    assert!(fds.iter().all(|f| f.revents == libc::POLLIN), "{fds:?}");
}

/// `select` reports the end of a pipe as readable, and a closed descriptor as an error.
#[test]
fn select_reports_eof_and_bad_descriptors() {
    let (_c, s) = pair();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(writer);
    let limit = Some(Duration::from_secs(20));
    let select = |number: i32| {
        // SAFETY: zero is a valid set, the set outlives the call, and descriptors are below
        // `FD_SETSIZE`.
        unsafe {
            let mut read: libc::fd_set = std::mem::zeroed();
            libc::FD_SET(s.0, &raw mut read);
            libc::FD_SET(number, &raw mut read);
            let sets = rs::Sets {
                read: &raw mut read,
                write: std::ptr::null_mut(),
                except: std::ptr::null_mut(),
            };
            let got = rs::select(s.0.max(number) + 1, sets, limit);
            (got, libc::FD_ISSET(number, &raw const read))
        }
    };
    assert_eq!(select(reader.as_raw_fd()), (Ok(1), true));
    // No test of this process opens so many descriptors.
    assert_eq!(select(1020).0, Err(Errno::BADF));
}

#[test]
fn select_mixes_rsockets_and_descriptors() {
    let (c, s) = pair();
    let (reader, _writer) = std::io::pipe().unwrap();
    let fds = [c.0, s.0, reader.as_raw_fd()];
    let top = fds.into_iter().max().unwrap() + 1;
    let timeout = Some(Duration::from_millis(20));
    // SAFETY: zero is a valid set, the sets outlive the calls, and descriptors are below
    // `FD_SETSIZE`.
    unsafe {
        let mut read: libc::fd_set = std::mem::zeroed();
        let mut write: libc::fd_set = std::mem::zeroed();
        for fd in fds {
            libc::FD_SET(fd, &raw mut read);
        }
        let sets = rs::Sets {
            read: &raw mut read,
            write: std::ptr::null_mut(),
            except: std::ptr::null_mut(),
        };
        assert_eq!(rs::select(top, sets, timeout), Ok(0));
        assert!(
            !libc::FD_ISSET(s.0, &raw const read),
            "the set was not cleared after the timeout"
        );
        c.send_all(b"x");
        for fd in fds {
            libc::FD_SET(fd, &raw mut read);
        }
        libc::FD_SET(c.0, &raw mut write);
        libc::FD_SET(s.0, &raw mut write);
        let sets = rs::Sets {
            write: &raw mut write,
            ..sets
        };
        s.poll(libc::POLLIN, 5000);
        assert_eq!(rs::select(top, sets, timeout), Ok(3));
        assert!(libc::FD_ISSET(s.0, &raw const read) && !libc::FD_ISSET(c.0, &raw const read));
        assert!(libc::FD_ISSET(s.0, &raw const write) && libc::FD_ISSET(c.0, &raw const write));
        assert_eq!(rs::select(-1, sets, timeout), Err(Errno::INVAL));
    }
}

/// An accepted socket inherits the options of its listener, but not the descriptor flags.
#[test]
fn accepted_socket_inherits_options() {
    let linger = [1i32.to_ne_bytes(), 7i32.to_ne_bytes()].concat();
    let time = |seconds: i64| [seconds.to_ne_bytes(), 250_000i64.to_ne_bytes()].concat();
    let one = 1i32.to_ne_bytes().to_vec();
    let set = [
        (libc::SOL_SOCKET, libc::SO_LINGER, linger),
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO, time(3)),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO, time(5)),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR, one.clone()),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE, one.clone()),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, one),
        (
            libc::IPPROTO_IP,
            libc::IP_TOS,
            0x48i32.to_ne_bytes().to_vec(),
        ),
        (
            libc::SOL_SOCKET,
            libc::SO_RCVBUF,
            20_000i32.to_ne_bytes().to_vec(),
        ),
        (
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            30_000i32.to_ne_bytes().to_vec(),
        ),
        (rs::SOL_RDMA, rs::RDMA_SQSIZE, 40i32.to_ne_bytes().to_vec()),
        (rs::SOL_RDMA, rs::RDMA_INLINE, 48i32.to_ne_bytes().to_vec()),
    ];
    let (l, address) = listener(|l| {
        for (level, name, value) in &set {
            rs::set_option(l.0, *level, *name, value).unwrap();
        }
        l.nonblocking();
        rs::control(l.0, libc::F_SETFD, libc::FD_CLOEXEC).unwrap();
    });
    let c = Rs::new();
    rs::connect(c.0, address).unwrap();
    assert_eq!(l.poll(libc::POLLIN, 10_000), libc::POLLIN);
    let s = Rs(rs::accept(l.0).unwrap().0);
    for (level, name, _) in set {
        let value = |fd| rs::get_option(fd, level, name).unwrap();
        assert_eq!(value(s.0), value(l.0), "option {name} of level {level}");
        assert_ne!(
            value(s.0),
            value(Rs::new().0),
            "option {name} of level {level} has its default value"
        );
    }
    let flags = rs::control(s.0, libc::F_GETFL, 0).unwrap() & libc::O_NONBLOCK;
    assert_eq!((flags, rs::control(s.0, libc::F_GETFD, 0)), (0, Ok(0)));
}

/// Each connection attempt of a bound socket uses its bound address.
#[test]
fn reconnect_keeps_bound_address() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let held = TcpStream::connect(other.local_addr().unwrap()).unwrap();
    let no_listener = held.local_addr().unwrap();
    let (l, address) = listener(|_| {});
    let c = Rs::new();
    c.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
    rs::bind(c.0, "127.0.0.1:0".parse().unwrap()).unwrap();
    let bound = rs::local_address(c.0).unwrap();
    for _ in 0..2 {
        assert_eq!(rs::connect(c.0, no_listener), Err(Errno::CONNREFUSED));
        assert_eq!(rs::local_address(c.0), Ok(bound));
    }
    rs::connect(c.0, address).unwrap();
    assert_eq!(rs::local_address(c.0), Ok(bound));
    let (s, peer) = rs::accept(l.0).unwrap();
    drop(Rs(s));
    assert_eq!(peer, Some(bound));
}

/// The listener's receive timeout limits `accept`, whether it was set before or after `listen`.
#[test]
fn accept_obeys_receive_timeout() {
    let time = |ms: i64| [0i64.to_ne_bytes(), (ms * 1000).to_ne_bytes()].concat();
    let set = |l: &Rs, ms| {
        rs::set_option(l.0, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &time(ms)).unwrap();
    };
    let (l, address) = listener(|l| set(l, 60));
    for ms in [60, 20, 90] {
        set(&l, ms);
        let (begin, fd) = (Instant::now(), l.0);
        let accepted = std::thread::spawn(move || rs::accept(fd));
        while !accepted.is_finished() {
            assert!(
                begin.elapsed() < Duration::from_secs(20),
                "accept did not return after {ms} ms"
            );
            std::thread::yield_now();
        }
        assert_eq!(accepted.join().unwrap().unwrap_err(), Errno::AGAIN);
        assert!(begin.elapsed() >= Duration::from_millis(ms as u64));
    }
    // Zero disables the timeout.
    set(&l, 0);
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| rs::accept(l.0).map(|(s, _)| Rs(s)));
        std::thread::sleep(Duration::from_millis(150));
        assert!(!accepted.is_finished());
        let client = Rs::new();
        rs::connect(client.0, address).unwrap();
        accepted.join().unwrap().unwrap();
    });
}

/// A set may contain all descriptors below `FD_SETSIZE`, but `select` refuses a larger count.
#[test]
fn select_accepts_last_descriptor() {
    let (c, s) = pair();
    c.send_all(b"x");
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"x").unwrap();
    const LAST: i32 = libc::FD_SETSIZE as i32 - 1;
    // SAFETY: duplicates the descriptor to an unused number; no pointers.
    let last = unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LAST) };
    assert_eq!(last, LAST, "descriptor {LAST} is in use");
    let limit = Some(Duration::from_secs(10));
    for count in [LAST, LAST + 1] {
        // SAFETY: all zero is an empty set, and the numbers fit.
        let mut set: libc::fd_set = unsafe { std::mem::zeroed() };
        // SAFETY: the set is valid, and the numbers are below `FD_SETSIZE`.
        unsafe {
            libc::FD_SET(s.0, &raw mut set);
            libc::FD_SET(LAST, &raw mut set);
        }
        let sets = rs::Sets {
            read: &raw mut set,
            write: std::ptr::null_mut(),
            except: std::ptr::null_mut(),
        };
        // SAFETY: the set is valid.
        let found = unsafe { rs::select(count, sets, limit) };
        assert_eq!(found, Ok(if count > LAST { 2 } else { 1 }), "{count}");
        // SAFETY: the set is valid, and the numbers are below `FD_SETSIZE`.
        let is_set = |fd| unsafe { libc::FD_ISSET(fd, &raw const set) };
        assert_eq!((is_set(s.0), is_set(LAST)), (true, count > LAST));
    }
    let none = rs::Sets {
        read: std::ptr::null_mut(),
        write: std::ptr::null_mut(),
        except: std::ptr::null_mut(),
    };
    // SAFETY: null sets are allowed.
    let refused = unsafe { rs::select(LAST + 2, none, limit) };
    assert_eq!(refused, Err(Errno::INVAL));
    // SAFETY: this test owns the descriptor.
    unsafe { libc::close(last) };
}
