//! `iwarp perf` as a user runs it. Most tests measure only the TCP baseline, which takes little
//! time.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn iwarp(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_iwarp"));
    c.args(args).stdin(Stdio::null()).env_remove("RUST_LOG");
    c
}

fn run(args: &[&str]) -> Output {
    iwarp(args).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

/// A process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts `perf serve` on an ephemeral port and returns its address.
fn serve() -> (Running, String) {
    let mut command = iwarp(&["perf", "serve", "--bind", "127.0.0.1:0"]);
    serve_as(command.stdout(Stdio::piped()))
}

fn serve_as(command: &mut Command) -> (Running, String) {
    let mut child = command.spawn().expect("serve starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("the line with the address");
    let addr = line
        .split_whitespace()
        .find(|w| w.starts_with("127.0.0.1:"))
        .expect("an address");
    let addr = addr.trim_end_matches(';').to_owned();
    (Running(child), addr)
}

const SHORT: [&str; 8] = [
    "--op",
    "tcp",
    "--size",
    "4,64K",
    "--seconds",
    "0.02",
    "--rounds",
    "2",
];

#[test]
fn baseline_prints_tables_and_ends_peer() {
    // `run` waits until stdout and stderr are closed. The peer process inherits stderr, so this
    // test would hang if the peer process did not end.
    let out = run(&[&["perf"][..], &SHORT].concat());
    let (stdout, stderr) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    for piece in [
        "Spinning",
        "Blocking",
        "tcp",
        "64 KiB",
        // The unit's prefix depends on the load of the machine.
        "B/s",
        "tcp-tcp",
        "62.7 / 624.5",
    ] {
        assert!(stdout.contains(piece), "{piece} is missing in\n{stdout}");
    }
    assert_eq!(stderr, "");
}

#[test]
fn json_on_stdout_excludes_other_output() {
    let dir = std::env::temp_dir().join(format!("iwarp-perf-test-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let svg = dir.join("curves.svg");
    let out = run(&[
        &["perf", "--json", "-", "--plot", svg.to_str().unwrap()][..],
        &SHORT,
    ]
    .concat());
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let v: serde_json::Value =
        serde_json::from_slice(&out.stdout).expect("stdout is one JSON document");
    assert_eq!(v["results"].as_array().map(Vec::len), Some(0));
    let tcp = v["tcp"]["results"].as_array().unwrap();
    assert_eq!(tcp.len(), 4, "two sizes, two ways of waiting");
    for t in tcp {
        let (p50, p99) = (
            t["lat_us_p50"].as_f64().unwrap(),
            t["lat_us_p99"].as_f64().unwrap(),
        );
        assert!(p50 > 0.5 && p99 >= p50, "{t}");
        // There is no higher bound: on a busy machine, a short measurement may result in a few
        // thousand bytes per second.
        assert!(t["bw_bytes_per_s"].as_f64().unwrap() > 0.0, "{t}");
    }
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn busy_server_refuses_second_client() {
    let (_server, addr) = serve();
    let args = [&["perf", "connect", &addr][..], &SHORT].concat();
    // A connection that sends nothing must not keep other clients out.
    let _silent = std::net::TcpStream::connect(&addr).unwrap();
    let first = run(&args);
    assert_eq!(first.status.code(), Some(0), "{}", text(&first.stderr));
    assert!(text(&first.stdout).contains("peer: "));
    // While one client measures, the server reports to the next one that it is busy.
    let (busy, to) = open_link(&addr);
    let mut data = std::net::TcpStream::connect(to).unwrap();
    // The index of the connection.
    data.write_all(&[0; 4]).unwrap();
    assert!(line(&busy).contains("\"opened\""));
    // The server would evict a silent client, so this client keeps sending until it is dropped.
    let mut sender = busy.try_clone().unwrap();
    std::thread::spawn(move || {
        let hello = b"{\"type\":\"hello\",\"protocol\":2,\"version\":\"0\"}\n";
        while sender.write_all(hello).is_ok() && sender.read(&mut [0; 512]).is_ok_and(|n| n > 0) {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let second = run(&args);
    assert_eq!(second.status.code(), Some(1));
    assert!(
        text(&second.stderr).contains("another client"),
        "{}",
        text(&second.stderr)
    );
}

fn line(mut stream: &std::net::TcpStream) -> String {
    // Read byte by byte, so that the next line is left in the socket.
    let (mut line, mut octet) = (Vec::new(), [0]);
    while stream.read(&mut octet).unwrap() == 1 && octet != [b'\n'] {
        line.extend(octet);
    }
    text(&line)
}

/// Returns the request for a link of plain TCP.
fn open_request(id: u32, qps: u32, max_size: u64) -> String {
    let link = serde_json::json!({
        "wire": "tcp", "crc": false, "markers": false, "poll": "event", "qps": qps, "depth": 1,
        "max_size": max_size,
    });
    serde_json::json!({ "type": "open", "id": id, "link": link }).to_string()
}

/// Connects a client and requests a link. Returns the control connection, and the address for the
/// connections of the link.
fn open_link(addr: &str) -> (std::net::TcpStream, std::net::SocketAddr) {
    let mut stream = std::net::TcpStream::connect(addr).unwrap();
    let hello = r#"{"type":"hello","protocol":2,"version":"0"}"#;
    writeln!(stream, "{hello}\n{}", open_request(0, 1, 4)).unwrap();
    assert!(line(&stream).contains("\"hello\""));
    let listening = line(&stream);
    let port = listening.split("\"port\":").nth(1);
    let port = port.and_then(|p| p.trim_end_matches('}').parse().ok());
    let port: u16 = port.unwrap_or_else(|| panic!("{listening}"));
    (stream, ([127, 0, 0, 1], port).into())
}

/// Clients that measure replace silent clients, which hold all places, and a client that requests a
/// link and does not open its connections.
#[test]
fn idle_clients_are_replaced() {
    let mut child = iwarp(&[
        "perf",
        "serve",
        "--bind",
        "127.0.0.1:0",
        "--max-clients",
        "2",
    ]);
    let (_server, addr) = serve_as(child.stdout(Stdio::piped()));
    let args = [&["perf", "connect", &addr][..], &SHORT].concat();
    let _silent: Vec<_> = (0..2)
        .map(|_| std::net::TcpStream::connect(&addr).unwrap())
        .collect();
    let out = run(&args);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let _holder = open_link(&addr);
    let out = run(&args);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
}

#[test]
fn server_survives_garbage() {
    let (_server, addr) = serve();
    for junk in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"\0\0\0\0\n",
        b"{\"type\":\"run\",\"id\":0}\n",
        &vec![b'x'; 100_000],
    ] {
        let mut s = std::net::TcpStream::connect(&addr).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        // The server may close before it has read everything.
        let _ = s.write_all(junk);
        let mut answer = Vec::new();
        let _ = s.read_to_end(&mut answer);
    }
    let requests = [
        open_request(0, 1_000_000, 4),
        open_request(0, 1, 99_999_999_999_999),
        // Each number is within its limit, but together they need 8 GiB.
        open_request(0, 64, 64 << 20),
        serde_json::json!({
            "type": "run", "id": 3, "iters": 1,
            "point": {
                "op": "tcp", "size": 4, "crc": false, "poll": "spin", "metric": "latency",
            },
        })
        .to_string(),
    ];
    let mut s = std::net::TcpStream::connect(&addr).unwrap();
    s.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    s.write_all(b"{\"type\":\"hello\",\"protocol\":2,\"version\":\"0\"}\n")
        .unwrap();
    let mut lines = BufReader::new(s.try_clone().unwrap()).lines();
    lines.next().unwrap().unwrap();
    for r in requests {
        writeln!(s, "{r}").unwrap();
        let answer = lines.next().unwrap().unwrap();
        assert!(answer.contains("\"error\""), "{r} → {answer}");
    }
    drop((s, lines));
    let t0 = Instant::now();
    loop {
        let out = run(&[&["perf", "connect", &addr][..], &SHORT].concat());
        if out.status.success() {
            break;
        }
        // The server may not have detected yet that the previous client closed its connection.
        assert!(
            t0.elapsed() < Duration::from_secs(10),
            "{}",
            text(&out.stderr)
        );
    }
}

#[test]
fn peer_process_dies_with_its_parent() {
    let mut parent = Running(
        iwarp(&["perf", "--op", "tcp", "--seconds", "60"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let children = format!("/proc/{0}/task/{0}/children", parent.0.id());
    let t0 = Instant::now();
    let child: u32 = loop {
        match std::fs::read_to_string(&children) {
            Ok(s) if !s.trim().is_empty() => {
                break s.split_whitespace().next().unwrap().parse().unwrap();
            }
            // Without this file, which some kernels lack, the test cannot find the peer process.
            Err(_) => return,
            Ok(_) => assert!(
                t0.elapsed() < Duration::from_secs(10),
                "no peer was started"
            ),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    parent.0.kill().unwrap();
    parent.0.wait().unwrap();
    let alive = || {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        stat.contains("(iwarp)") && !stat.contains(") Z ")
    };
    let t0 = Instant::now();
    while alive() {
        assert!(
            t0.elapsed() < Duration::from_secs(5),
            "process {child} outlived its parent"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn errors_have_short_messages() {
    for (args, code, piece) in [
        (&["perf", "--op", "nothing"][..], 2, "--op"),
        (&["perf", "--size", "0"], 2, "--size"),
        (&["perf", "--iters", "1", "--seconds", "1"], 2, "--seconds"),
        (
            &["perf", "connect", "127.0.0.1:1", "--op", "tcp"],
            1,
            "127.0.0.1:1",
        ),
        (&["perf", "connect", "127.0.0.1:99999"], 1, "99999"),
        (&["perf", "serve", "--bind", "192.0.2.1"], 1, "192.0.2.1"),
        (
            &["perf", "--op", "tcp", "--json", "/nonexistent/x.json"],
            1,
            "/nonexistent",
        ),
    ] {
        let t0 = Instant::now();
        let out = run(args);
        let stderr = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(piece), "{args:?}: {stderr}");
        assert!(
            out.stdout.is_empty() && t0.elapsed() < Duration::from_secs(15),
            "{args:?}"
        );
    }
    for args in [
        &["--help"][..],
        &["perf", "--help"],
        &["cp", "--help"],
        &["ping", "--help"],
        &["devices", "--help"],
        &["--version"],
    ] {
        assert_eq!(run(args).status.code(), Some(0), "{args:?}");
    }
    assert!(text(&run(&["completions", "bash"]).stdout).contains("_iwarp"));
}

/// A message count need not be a multiple of the number of connections.
#[test]
fn uneven_message_counts_are_sent() {
    for (op, iters) in [
        ("send", "100"),
        ("send", "2"),
        ("read", "7"),
        ("tcp", "100"),
    ] {
        let out = run(&[
            "perf", "--op", op, "--size", "64", "--iters", iters, "--qps", "3", "--rounds", "1",
            "--crc", "off", "--poll", "spin", "--json", "-",
        ]);
        assert_eq!(out.status.code(), Some(0), "{op}: {}", text(&out.stderr));
    }
}

/// Requests another link and returns the server's answer.
fn open_another(stream: &mut std::net::TcpStream, id: u32, max_size: u64) -> String {
    writeln!(stream, "{}", open_request(id, 1, max_size)).unwrap();
    line(stream)
}

/// The memory of all links of a client together is limited; an open link keeps its share.
#[test]
fn links_keep_their_memory() {
    let mut child = iwarp(&["perf", "serve", "--bind", "127.0.0.1:0", "--memory", "5M"]);
    let (_server, addr) = serve_as(child.stdout(Stdio::piped()));
    let (mut control, to) = open_link(&addr);
    let connect = |to: std::net::SocketAddr| {
        let mut data = std::net::TcpStream::connect(to).unwrap();
        // The index of the connection.
        data.write_all(&[0; 4]).unwrap();
        data
    };
    let _first = connect(to);
    assert!(line(&control).contains("\"opened\""));
    // Each of these links needs two buffers of 1 MiB; the first link needs little memory.
    let mut connections = Vec::new();
    for id in 1..=2 {
        let answer = open_another(&mut control, id, 1 << 20);
        let port = answer.split("\"port\":").nth(1);
        let port: u16 = port.unwrap().trim_end_matches('}').parse().unwrap();
        connections.push(connect(([127, 0, 0, 1], port).into()));
        assert!(line(&control).contains("\"opened\""));
    }
    let answer = open_another(&mut control, 3, 1 << 20);
    assert!(answer.contains("no memory"), "{answer}");
}
