//! `iwarp ping` between two processes, and its errors with a missing or foreign server.

use crate::common;
use crate::common::{ClosedPort, Scratch, fail, finish, iwarp, run, serve, start, succeed, text};
use iwarp::Access;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

#[test]
fn all_sizes_over_ipv4_and_ipv6() {
    for ip in ["127.0.0.1", "::1"] {
        let (_server, at) = serve(&["ping", "serve", "-a", ip, "-p", "0", "-v"]);
        let port = at.port().to_string();
        for size in ["16", "17", "64", "1460", "4096", "65535", "65536"] {
            let out = succeed(&["ping", ip, "-p", &port, "-C", "3", "-S", size, "-V"]);
            assert!(
                out.starts_with(&format!("3 pings of {size} octets")),
                "{out}"
            );
        }
        let out = succeed(&["ping", ip, "-p", &port, "-C", "2", "-v"]);
        let lines: Vec<_> = out.lines().collect();
        assert_eq!(
            lines[1],
            "ping data: rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs"
        );
        assert_eq!(lines.len(), 3, "{out}");
    }
}

/// Pings have the size that `-S` requests; checked in the output of the server.
#[test]
fn pings_have_the_requested_size() {
    let mut server = start(&["ping", "serve", "-a", "127.0.0.1", "-p", "0", "-v"]);
    let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
    let mut line = || lines.next().unwrap().unwrap();
    let port = line().rsplit(':').next().unwrap().to_owned();
    // The output must fit into the pipe, because nothing reads it while the client runs.
    for size in [16, 17, 1460, 40_000] {
        let text = size.to_string();
        succeed(&["ping", "127.0.0.1", "-p", &port, "-C", "1", "-S", &text]);
        let shown = line();
        let data = shown.strip_prefix("server ping data: ").unwrap();
        // The last octet is a NUL, which is not shown.
        assert_eq!(data.len(), size - 1, "{shown}");
    }
}

/// A client that implements rping's protocol itself, so that it can announce wrong sizes.
struct RawClient {
    connection: iwarp::verbs::cm::ConnectedId,
    cq: iwarp::verbs::CompletionQueue,
    buffer: iwarp::verbs::MemoryRegion,
    answer: iwarp::verbs::MemoryRegion,
}

impl RawClient {
    fn new(at: std::net::SocketAddr) -> Self {
        let device = iwarp::Device::route_to(at).unwrap();
        let ctx = iwarp::verbs::Context::open(&device, iwarp::Config::default()).unwrap();
        let pd = iwarp::verbs::ProtectionDomain::new(&ctx);
        let cq = ctx.create_cq(16, None).unwrap();
        let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let qp = pd
            .create_qp(&iwarp::verbs::QpInitAttr::new(&cq, &cq).rd_atomic(1, 1))
            .unwrap();
        let connector = iwarp::verbs::cm::Connector::new(&ctx).reads(1, 1);
        Self {
            buffer: pd.reg_mr(128 << 10, all).unwrap(),
            answer: pd.reg_mr(16, Access::LOCAL_WRITE).unwrap(),
            connection: connector.connect(at, qp).unwrap(),
            cq,
        }
    }

    /// Announces a buffer of `size` octets. Returns `true` if the server answers with "go ahead".
    fn announce(&self, size: u32) -> bool {
        let sge = [self.answer.sge(..).unwrap()];
        let wr = iwarp::verbs::RecvWr {
            wr_id: 1,
            sges: &sge,
        };
        self.connection.post_recv(&[wr]).unwrap();
        let mut info = self.buffer.remote().addr.to_be_bytes().to_vec();
        info.extend(self.buffer.remote().rkey.to_be_bytes());
        info.extend(size.to_be_bytes());
        let pieces = [&info[..]];
        let send = iwarp::verbs::SendWr::inline(2, &pieces);
        self.connection.post_send(&[send.signaled()]).unwrap();
        loop {
            let mut done = [iwarp::verbs::Cqe::default()];
            self.cq.wait(&mut done, Some(common::LIMIT)).unwrap();
            if done[0].wr_id == 1 {
                return done[0].status == iwarp::verbs::WcStatus::Success;
            }
        }
    }
}

/// A client may have one message in flight. A second message ends the connection: if the server
/// queued messages, a client could use up its memory.
#[test]
fn second_message_ends_the_connection() {
    let (_server, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let client = RawClient::new(at);
    let sge = [client.answer.sge(..).unwrap()];
    let wr = iwarp::verbs::RecvWr {
        wr_id: 1,
        sges: &sge,
    };
    client.connection.post_recv(&[wr]).unwrap();
    let mut info = client.buffer.remote().addr.to_be_bytes().to_vec();
    info.extend(client.buffer.remote().rkey.to_be_bytes());
    info.extend(64u32.to_be_bytes());
    let pieces = [&info[..]];
    // The second Send is posted before the server can have answered the first.
    let send = || iwarp::verbs::SendWr::inline(2, &pieces).signaled();
    client.connection.post_send(&[send(), send()]).unwrap();
    loop {
        let mut done = [iwarp::verbs::Cqe::default()];
        client.cq.wait(&mut done, Some(common::LIMIT)).unwrap();
        if done[0].wr_id == 1 {
            assert_ne!(
                done[0].status,
                iwarp::verbs::WcStatus::Success,
                "the server answered"
            );
            break;
        }
    }
}

#[test]
fn announced_sizes_are_limits() {
    let mut server = start(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let mut line = String::new();
    let mut out = BufReader::new(server.0.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let at = line.split_whitespace().last().unwrap().parse().unwrap();
    let client = RawClient::new(at);
    // The source is the largest ping, and the sink holds only 16 octets.
    client.buffer.write_at(0, &[b'x'; 128 << 10]).unwrap();
    assert!(client.announce(65536));
    client.buffer.write_at(0, &[0; 128 << 10]).unwrap();
    assert!(client.announce(16));
    let seen = client.buffer.to_vec(..).unwrap();
    assert_eq!(seen.iter().filter(|b| **b == b'x').count(), 16);
    assert_eq!(seen[..16], [b'x'; 16]);
    // A buffer that is too large is refused as the source, and then as the sink.
    assert!(!client.announce(65537), "the source is too large");
    let client = RawClient::new(at);
    assert!(client.announce(64));
    assert!(!client.announce(65537), "the sink is too large");
    // The server logs each refusal a moment after the connection has ended. A thread kills the
    // server after a minute, so that reading ends if a refusal is missing.
    let log = BufReader::new(server.0.stderr.take().unwrap());
    let (done, wait_for_done) = std::sync::mpsc::channel::<()>();
    let killer = std::thread::spawn(move || {
        let _ = wait_for_done.recv_timeout(Duration::from_secs(60));
        drop(server);
    });
    let refusals = log
        .lines()
        .map_while(Result::ok)
        .filter(|line| line.contains("buffer has 65537 octets; the maximum is 65536"));
    assert_eq!(refusals.take(2).count(), 2);
    drop(done);
    killer.join().unwrap();
}

/// As in ping(8): a line for each ping, and statistics after an interrupt.
#[test]
fn pings_without_count_print_lines() {
    let (_server, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let port = at.port().to_string();
    let args = ["ping", "127.0.0.1", "-p", &port];
    let mut client = start(&args);
    let mut lines = BufReader::new(client.0.stdout.take().unwrap()).lines();
    for number in 0..2 {
        let line = lines.next().unwrap().unwrap();
        let expected = format!("64 octets from {at}: seq={number} time=");
        assert!(
            line.starts_with(&expected) && line.ends_with(" us"),
            "{line}"
        );
    }
    let id = rustix::process::Pid::from_child(&client.0);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
    let last = lines.last().unwrap().unwrap();
    assert!(
        last.contains(" answered, 0 % lost, round trip min/avg/p50/p99/max "),
        "{last}"
    );
    assert_eq!(finish(client, &args).status.code(), Some(0));
    // With a count there is no pause by default.
    let out = succeed(&["ping", "127.0.0.1", "-p", &port, "-C", "3", "-i", "0.01"]);
    assert_eq!(out.lines().count(), 4, "{out}");
    let out = succeed(&["ping", "127.0.0.1", "-p", &port, "-C", "3"]);
    assert!(
        out.starts_with("3 pings of 64 octets, 3 answered, 0 % lost"),
        "{out}"
    );
    assert_eq!(out.lines().count(), 1, "{out}");
}

/// The server is killed while the client pings. The unanswered ping counts as lost.
#[test]
fn lost_pings_are_counted() {
    let (server, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let port = at.port().to_string();
    let args = ["ping", "127.0.0.1", "-p", &port, "-i", "0.05"];
    let mut client = start(&args);
    let mut lines = BufReader::new(client.0.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    drop(server);
    let last = lines.last().unwrap().unwrap();
    assert!(
        !last.contains(" 0 % lost") && last.contains("% lost, round trip"),
        "{last}"
    );
    assert_eq!(finish(client, &args).status.code(), Some(1));
}

#[test]
fn server_ends_after_its_count() {
    let (mut server, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0", "-C", "80"]);
    let port = at.port().to_string();
    let args = ["ping", "127.0.0.1", "-p", &port, "-C", "20", "-V"];
    let clients: Vec<_> = (0..4).map(|_| start(&args)).collect();
    for client in clients {
        let out = finish(client, &args);
        assert!(out.status.success(), "{}", text(&out.stderr));
    }
    let status = server
        .wait(Duration::from_secs(20))
        .expect("the server ends after its count");
    assert!(status.success());
}

#[test]
fn capture_is_complete_at_exit() {
    let scratch = Scratch::new();
    let (_server, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let port = at.port().to_string();
    let out = iwarp(&["ping", "127.0.0.1", "-p", &port, "-C", "1"])
        .env("IWARP_CAPTURE", scratch.path("ping-%p.pcapng"))
        .output()
        .unwrap();
    assert!(out.status.success());
    let files: Vec<_> = std::fs::read_dir(scratch.path("")).unwrap().collect();
    let [Ok(file)] = &files[..] else {
        panic!("{files:?}")
    };
    // Only the file's header is written immediately. The packets are buffered until the process
    // ends.
    let octets = std::fs::read(file.path()).unwrap();
    let requests = octets.windows(16).filter(|w| w == b"MPA ID Req Frame");
    assert_eq!(requests.count(), 1, "{} octets", octets.len());
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for args in [
        &["ping"][..],
        &["ping", "127.0.0.1", "-S", "15"],
        &["ping", "127.0.0.1", "-S", "65537"],
        &["ping", "127.0.0.1", "-C", "0"],
        &["ping", "127.0.0.1", "-p", "0"],
        &["ping", "127.0.0.1", "-a", "127.0.0.1"],
        &["ping", "127.0.0.1", "-p", "65536"],
        &["ping", "127.0.0.1", "-i", "11"],
        &["ping", "127.0.0.1", "-i", "-1"],
        &["ping", "127.0.0.1", "--max-clients", "2"],
        &["ping", "serve", "-i", "1"],
    ] {
        fail(args, 2);
    }
}

#[test]
fn unreachable_server_is_named_with_reason() {
    let closed = ClosedPort::new();
    let port = closed.port().to_string();
    for ip in ["127.0.0.1", "::1"] {
        let err = fail(&["ping", ip, "-p", &port, "-C", "1"], 1);
        assert!(
            err.contains("nobody listens there") && err.contains(&port),
            "{err}"
        );
    }
    // TCP cannot connect to the broadcast address, which is detected without sending a packet.
    let err = fail(&["ping", "255.255.255.255", "-C", "1"], 1);
    assert!(
        err.contains("cannot connect to 255.255.255.255:7174"),
        "{err}"
    );
    let err = fail(&["ping", "no such host", "-C", "1"], 1);
    assert!(err.contains("'no such host'"), "{err}");
    let err = fail(&["ping", "serve", "-a", "192.0.2.1", "-p", "0"], 1);
    assert!(err.contains("cannot listen on 192.0.2.1"), "{err}");
}

/// Starts a server of another protocol and returns its port. It reads the request if `reads` is
/// set, answers with `what`, and closes the connection.
fn foreign_server(what: &'static [u8], reads: bool) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            if reads {
                let _ = stream.read(&mut [0; 512]);
            }
            let _ = stream.write_all(what);
            if !what.is_empty() {
                // Stay open until the client closes, so that the client can read the answer.
                let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
                while matches!(stream.read(&mut [0; 512]), Ok(n) if n > 0) {}
            }
        }
    });
    port
}

#[test]
fn foreign_server_is_reported() {
    for (what, reads) in [
        (&b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"[..], false),
        (
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
            true,
        ),
        (b"", false),
        (b"", true),
    ] {
        let port = foreign_server(what, reads).to_string();
        let start = Instant::now();
        let err = fail(&["ping", "127.0.0.1", "-p", &port, "-C", "1"], 1);
        assert!(err.contains("does not speak iWARP"), "{err}");
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn server_survives_foreign_clients() {
    let (mut server, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let mut garbage = TcpStream::connect(at).unwrap();
    garbage.write_all(&[0xff; 4096]).unwrap();
    // A connection that sends nothing and stays open.
    let _silent = TcpStream::connect(at).unwrap();
    drop(TcpStream::connect(at).unwrap());
    let port = at.port().to_string();
    let out = run(&["ping", "127.0.0.1", "-p", &port, "-C", "5", "-V"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(server.0.try_wait().unwrap().is_none());
}
