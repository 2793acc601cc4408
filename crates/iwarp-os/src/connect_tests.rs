//! Tests of connect and accept, over loopback.

use super::*;
use std::os::fd::AsRawFd as _;
use std::time::Instant;

const LONG: Option<Duration> = Some(Duration::from_secs(10));

fn address(text: &str) -> SocketAddr {
    text.parse().expect("address")
}

fn finish(mut connecting: Connecting) -> io::Result<TcpStream> {
    loop {
        assert!(
            wait_fd(&connecting, Interest::WRITE, LONG).expect("poll"),
            "connect hangs"
        );
        match connecting.try_finish()? {
            Connect::Done(stream, ends) => {
                assert_eq!(ends.local, stream.local_addr()?);
                return Ok(stream);
            }
            Connect::Pending(again) => connecting = again,
        }
    }
}

fn accept(listener: &Listener) -> (TcpStream, SocketAddr) {
    assert!(
        wait_fd(listener, Interest::READ, LONG).expect("poll"),
        "no connection"
    );
    listener.accept().expect("accept").expect("a connection")
}

/// Binds, and retries for 10 s while the port is in use. A child that another test has forked keeps
/// copies of this process's descriptors until it exits, and so the port of a socket that was closed
/// here. A port in TIME-WAIT stays in use for longer than 10 s.
fn retry_while_in_use<T>(bind: impl Fn() -> Result<T, NetError>) -> Result<T, NetError> {
    let end = LONG.map(|long| Instant::now() + long);
    loop {
        match bind() {
            Err(NetError::Io(error))
                if error.kind() == io::ErrorKind::AddrInUse && Some(Instant::now()) < end =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

#[test]
fn connects_from_chosen_address() {
    for (listen, local) in [("127.0.0.1:0", "127.0.0.2:0"), ("[::1]:0", "[::1]:0")] {
        let listener = match Listener::bind(address(listen), 4, None) {
            Ok(listener) => listener,
            Err(error) if listen.starts_with('[') => {
                println!("skipped: no IPv6 loopback here: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        assert!(listener.accept().expect("accept").is_none());
        let target = listener.local_addr().expect("address");
        let stream =
            finish(connect(target, Some(address(local))).expect("connect")).expect("established");
        let (accepted, peer) = accept(&listener);
        assert_eq!(peer.ip(), address(local).ip());
        assert_eq!(peer, stream.local_addr().expect("local"));
        assert_eq!(accepted.peer_addr().expect("peer"), peer);
        assert_eq!(stream.peer_addr().expect("peer"), target);
        let mut byte = [0];
        assert_eq!(
            accepted.recv(&mut byte).expect_err("must not block").kind(),
            io::ErrorKind::WouldBlock
        );
        assert!(
            rustix::io::fcntl_getfd(&accepted)
                .expect("flags")
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        assert!(listener.accept().expect("accept").is_none());
    }
}

#[test]
fn dual_listener_reports_ipv4_peer() {
    let Ok(listener) = Listener::bind(address("[::]:0"), 4, Some(false)) else {
        println!("skipped: no IPv6 here");
        return;
    };
    let port = listener.local_addr().expect("address").port();
    let stream =
        finish(connect(SocketAddr::new([127, 0, 0, 1].into(), port), None).expect("connect"))
            .expect("up");
    let (accepted, peer) = accept(&listener);
    assert!(peer.is_ipv4());
    assert_eq!(
        accepted.peer_addr().expect("peer"),
        stream.local_addr().expect("local")
    );

    let Ok(listener) = Listener::bind(address("[::]:0"), 4, Some(true)) else {
        panic!("v6-only");
    };
    let port = listener.local_addr().expect("address").port();
    let refused = connect(SocketAddr::new([127, 0, 0, 1].into(), port), None)
        .map_err(io::Error::from)
        .and_then(finish);
    assert_eq!(
        refused.expect_err("v6 only").kind(),
        io::ErrorKind::ConnectionRefused
    );
}

/// Programs that only use IPv6 sockets pass the address of an IPv4 peer in this form.
#[test]
fn connects_to_ipv4_mapped_peer() {
    let listener = Listener::bind(address("127.0.0.1:0"), 8, None).expect("listener");
    let port = listener.local_addr().expect("address").port();
    let mapped = SocketAddr::new(address("[::ffff:127.0.0.1]:0").ip(), port);
    let free = |local| connect(mapped, local);
    let bound = |local| Bound::bind(local, None, Sharing::Exclusive)?.connect(mapped);
    let mut attempts = vec![
        free(None),
        free(Some(address("[::ffff:127.0.0.1]:0"))),
        free(Some(address("127.0.0.2:0"))),
        bound(address("127.0.0.2:0")),
    ];
    if Listener::bind(address("[::]:0"), 1, Some(false)).is_ok() {
        attempts.push(bound(address("[::]:0")));
        attempts.push(bound(address("[::ffff:127.0.0.1]:0")));
    }
    for attempt in attempts {
        let connecting = attempt.expect("connect");
        match connecting.send_now(b"first").expect("send") {
            (Connect::Done(stream, ends), 5) => {
                assert_eq!(ends.local, stream.local_addr().expect("local"));
                assert_eq!(ends.peer, stream.peer_addr().expect("peer"));
                assert_eq!(accept(&listener).1, ends.local);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn connect_without_listener_is_refused() {
    // A bound socket that does not listen reserves the port.
    let blocker = tcp_socket(&address("127.0.0.1:0")).expect("socket");
    blocker
        .bind(&SockAddr::from(address("127.0.0.1:0")))
        .expect("bind");
    let target = blocker
        .local_addr()
        .expect("address")
        .as_socket()
        .expect("inet");
    let result = connect(target, None)
        .map_err(io::Error::from)
        .and_then(finish);
    assert_eq!(
        result.expect_err("refused").kind(),
        io::ErrorKind::ConnectionRefused
    );
}

#[test]
fn self_connection_is_refused() {
    // With ports that the kernel chooses, a self-connection is rare. Cause one.
    let connecting = || {
        let socket = tcp_socket(&address("127.0.0.1:0")).expect("socket");
        socket
            .bind(&SockAddr::from(address("127.0.0.1:0")))
            .expect("bind");
        let own = socket.local_addr().expect("address");
        socket.set_nonblocking(false).expect("blocking");
        socket.connect(&own).expect("simultaneous open");
        Connecting {
            stream: TcpStream::from_socket(socket).expect("stream"),
            peer: own.as_socket().expect("inet"),
        }
    };
    let error = finish(connecting()).expect_err("self-connection");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    let error = connecting().send_now(b"x").expect_err("self-connection");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn first_bytes_are_sent_on_loopback() {
    let listener = Listener::bind(address("127.0.0.1:0"), 4, None).expect("listen");
    let target = listener.local_addr().expect("address");
    let connecting = connect(target, None).expect("connect");
    let (stream, ends) = match connecting.send_now(b"first").expect("sent") {
        (Connect::Done(stream, ends), 5) => (stream, ends),
        other => panic!("{other:?}"),
    };
    let (accepted, peer) = accept(&listener);
    assert_eq!((ends.local, ends.peer), (peer, target));
    let mut octets = [0; 8];
    assert_eq!(accepted.recv(&mut octets).expect("there"), 5);
    assert!(accepted.socket().tcp_nodelay().expect("option"));
    assert!(accepted.socket().nonblocking().expect("flags"));
    assert!(stream.socket().nonblocking().expect("flags"));
    drop(listener);
}

/// Tests all combinations of two sockets that bind the same port.
#[test]
fn bound_port_is_exclusive() {
    let any = address("127.0.0.1:0");
    let bind = |at, sharing| Bound::bind(at, None, sharing);
    for (first, second, succeeds) in [
        (Sharing::Exclusive, Sharing::Exclusive, false),
        (Sharing::Exclusive, Sharing::Shared, false),
        // The kernel treats a socket that shares its port like an earlier connection.
        (Sharing::Shared, Sharing::Exclusive, true),
        (Sharing::Shared, Sharing::Shared, true),
    ] {
        let held = bind(any, first).expect("bind");
        let at = held.local_addr().expect("address");
        match bind(at, second) {
            Ok(_) => assert!(succeeds, "{first:?}, {second:?}"),
            Err(error) => {
                assert!(!succeeds, "{first:?}, {second:?}: {error}");
                assert_eq!(io::Error::from(error).kind(), io::ErrorKind::AddrInUse);
            }
        }
        drop(held);
        retry_while_in_use(|| bind(at, second)).expect("free again");
    }
}

/// A socket that binds its port beside an old connection excludes other sockets from then on.
#[test]
fn bind_beside_old_connections_is_exclusive() {
    for second in [Sharing::Exclusive, Sharing::Shared] {
        let listener = Listener::bind(address("127.0.0.1:0"), 8, None).expect("listener");
        let at = listener.local_addr().expect("address");
        let stream = finish(connect(at, None).expect("connect")).expect("up");
        let accepted = accept(&listener).0;
        drop(listener);
        // The accepting side closes first, so it enters TIME-WAIT.
        drop(accepted);
        drop(stream);
        let held = retry_while_in_use(|| Bound::bind(at, None, Sharing::Exclusive))
            .expect("bind beside TIME-WAIT");
        let error = Bound::bind(at, None, second).expect_err("the port is in use");
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::AddrInUse);
        held.listen(8, None).expect("listen");
    }
}

/// A restarted server gets its port back, whether its connections are alive or in TIME-WAIT.
#[test]
fn connections_do_not_reserve_port() {
    let listener = Listener::bind(address("127.0.0.1:0"), 8, None).expect("listener");
    let at = listener.local_addr().expect("address");
    let streams: Vec<_> = (0..2)
        .map(|_| {
            let stream = finish(connect(at, None).expect("connect")).expect("up");
            (accept(&listener).0, stream)
        })
        .collect();
    drop(listener);
    let listen_again = || retry_while_in_use(|| Listener::bind(at, 8, None));
    let listener = listen_again().expect("listen beside established connections");
    drop(listener);
    // The accepting sides close first, so they enter TIME-WAIT.
    let (servers, clients): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    drop(servers);
    drop(clients);
    let listener = listen_again().expect("listen beside TIME-WAIT");
    assert_eq!(listener.local_addr().expect("address"), at);
}

#[test]
fn invalid_local_addresses_fail() {
    let target = address("127.0.0.1:9");
    assert!(
        connect(target, Some(address("192.0.2.77:0"))).is_err(),
        "not an address of this host"
    );
    assert!(
        connect(target, Some(address("[::1]:0"))).is_err(),
        "other family"
    );
}

#[test]
fn port_is_free_after_close() {
    let listener = Listener::bind(address("127.0.0.1:0"), 1, None).expect("listen");
    let taken = listener.local_addr().expect("address");
    match Listener::bind(taken, 1, None) {
        Err(NetError::Io(error)) => assert_eq!(error.kind(), io::ErrorKind::AddrInUse),
        other => panic!("{other:?}"),
    }
    let stream = finish(connect(taken, None).expect("connect")).expect("up");
    let (accepted, _) = accept(&listener);
    drop(accepted);
    drop(listener);
    drop(stream);
    retry_while_in_use(|| Listener::bind(taken, 1, None)).expect("listen again");
}

#[test]
fn descriptor_limit_has_own_error() {
    assert!(matches!(
        NetError::from(io::Error::from_raw_os_error(libc::EMFILE)),
        NetError::TooManyFiles {
            process_limit: true
        }
    ));
    assert!(matches!(
        NetError::from(io::Error::from_raw_os_error(libc::ENFILE)),
        NetError::TooManyFiles {
            process_limit: false
        }
    ));
    let back = io::Error::from(NetError::TooManyFiles {
        process_limit: true,
    });
    assert_eq!(back.raw_os_error(), Some(libc::EMFILE));

    // Lower the limit in a child process, because the other tests run in this one.
    let listener = Listener::bind(address("127.0.0.1:0"), 1, None).expect("listen");
    let target = listener.local_addr().expect("address");
    let _client = finish(connect(target, None).expect("connect")).expect("up");
    assert!(wait_fd(&listener, Interest::READ, LONG).expect("poll"));
    let empty = Listener::bind(address("127.0.0.1:0"), 1, None).expect("listen");
    // SAFETY: the child only makes system calls, and exits by `_exit`. On this path, `accept` does
    // not allocate.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // Allow one descriptor, which is in use: with a limit of 0, `poll` would fail.
        let none = libc::rlimit {
            rlim_cur: 1,
            rlim_max: 1,
        };
        // SAFETY: a system call with valid arguments.
        unsafe { libc::dup2(listener.as_fd().as_raw_fd(), 0) };
        // SAFETY: a system call with valid arguments.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
        let refused = matches!(
            listener.accept(),
            Err(NetError::TooManyFiles {
                process_limit: true
            })
        );
        // If no connection is waiting, the limit is no error.
        let correct = refused && matches!(empty.accept(), Ok(None));
        // SAFETY: `_exit` is async-signal-safe.
        unsafe { libc::_exit(if correct { 9 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` is a valid `int`, and the child was forked above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 9, "status {status:#x}");
    accept(&listener);
}

/// Returns the keep-alive options: seconds before the first probe and between probes, and the
/// number of probes.
fn keep_alive_of(stream: &TcpStream) -> Option<(u64, u64, u32)> {
    let socket = stream.socket();
    socket.keepalive().expect("SO_KEEPALIVE").then(|| {
        let idle = socket.tcp_keepalive_time().expect("TCP_KEEPIDLE");
        let interval = socket.tcp_keepalive_interval().expect("TCP_KEEPINTVL");
        let probes = socket.tcp_keepalive_retries().expect("TCP_KEEPCNT");
        (idle.as_secs(), interval.as_secs(), probes)
    })
}

#[test]
fn accepted_streams_inherit_keep_alive() {
    let minute = Some(Duration::from_secs(60));
    for (limit, set) in [(minute, Some((30, 8, 4))), (None, None)] {
        let bound =
            Bound::bind(address("127.0.0.1:0"), None, Sharing::Exclusive).expect("an address");
        let listener = bound.listen(4, limit).expect("listener");
        let target = listener.local_addr().expect("address");
        let stream = finish(connect(target, None).expect("connect")).expect("established");
        let (accepted, _) = accept(&listener);
        assert_eq!(accepted.inherited_keep_alive(), limit);
        assert_eq!(keep_alive_of(&accepted), set);
        assert_eq!(stream.inherited_keep_alive(), None);
        assert_eq!(keep_alive_of(&stream), None);
        // The listener's setting can be replaced.
        accepted
            .keep_alive(Some(Duration::from_secs(4)))
            .expect("options");
        assert_eq!(keep_alive_of(&accepted), Some((2, 1, 2)));
        accepted.keep_alive(None).expect("options");
        assert_eq!(keep_alive_of(&accepted), None);
    }
}

/// The last segment of the TCP handshake carries the first bytes. If there are none, it is sent
/// without data after a while.
#[test]
fn handshake_ack_carries_first_bytes() {
    let listener = Listener::bind(address("127.0.0.1:0"), 4, None).expect("listener");
    let target = listener.local_addr().expect("address");
    // Try several times: if this thread is preempted for 200 ms, the segment is sent without data.
    let merged = (0..20).any(|_| {
        let stream = finish(connect(target, None).expect("connect")).expect("established");
        let delayed = listener.accept().expect("accept").is_none();
        if delayed {
            assert_eq!(stream.send(b"request").expect("send"), 7);
            let (accepted, _) = accept(&listener);
            assert_eq!(accepted.recv(&mut [0; 16]).expect("octets"), 7);
        }
        delayed
    });
    assert!(merged);
    let _silent = finish(connect(target, None).expect("connect")).expect("established");
    accept(&listener);
}

#[test]
fn listener_reports_backlog_length() {
    let listener = Listener::bind(address("127.0.0.1:0"), 8, None).expect("listener");
    let target = listener.local_addr().expect("address");
    let connected = || {
        let stream = finish(connect(target, None).expect("connect")).expect("established");
        stream.send(b"request").expect("send");
        stream
    };
    // The backlog is empty, but the result is never 0.
    assert_eq!(listener.waiting(), 1);
    let _streams = [connected(), connected(), connected()];
    let start = Instant::now();
    while listener.waiting() < 3 && start.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(listener.waiting(), 3);
    accept(&listener);
    assert_eq!(listener.waiting(), 2);
}
