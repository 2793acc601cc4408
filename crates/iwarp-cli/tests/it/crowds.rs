//! Servers with many idle, silent and greedy clients still serve other clients, and bound their
//! memory.
//!
//! To run larger crowds and print figures:
//! `cargo test --release -p iwarp-cli --test it crowds:: -- --ignored --nocapture`

use crate::common::crowd::{Connect, Crowd, has_ended};
use crate::common::raw::{Raw, Received, resident_bytes};
use crate::common::{
    ClosedPort, LIMIT, Running, Scratch, fail, iwarp, noise, run, serve, serve_as, str, succeed,
    text,
};
use std::any::Any;
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn cp_server(dir: &Path, more: &[&str]) -> (Running, SocketAddr) {
    serve(&[&["cp", "serve", str(dir), "-p", "0", "-q"], more].concat())
}

/// The message `Working` of `cp`.
const WORKING: [u8; 2] = [12, 0];

/// Shorter than the silence that servers tolerate, so within this time no connection ends for that
/// reason.
const SOON: Duration = Duration::from_secs(12);

/// At most the limit of clients is served at a time. Refused clients get the reason.
#[test]
fn clients_are_limited() {
    let t = Scratch::new();
    let dir = t.sub("served");
    for (more, limit) in [
        (&["--max-clients", "3"][..], 3),
        (&["--max-per-address", "2"], 2),
    ] {
        for kind in [
            &["cp", "serve", str(&dir)][..],
            &["ping", "serve", "-a", "127.0.0.1"],
        ] {
            let (_server, at) = serve(&[kind, &["-p", "0"], more].concat());
            let attempts: Vec<_> = (0..8).map(|_| Raw::connect(at)).collect();
            let mut alive = Vec::new();
            for attempt in attempts {
                match attempt {
                    Ok(raw) => alive.push(raw),
                    Err(e) => assert!(e.to_string().starts_with("busy: "), "{e}"),
                }
            }
            let end = Instant::now() + SOON;
            // On a slow machine, an idle client may be evicted for the next one a moment later.
            while alive.len() > limit {
                assert!(Instant::now() < end, "{kind:?} serves {}", alive.len());
                alive.retain_mut(|raw| !has_ended(&mut raw.stream));
            }
            assert!(!alive.is_empty());
        }
    }
}

/// If silent clients hold all places, one of them is evicted for a client with a request.
#[test]
fn idle_clients_are_evicted() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(100_000)).unwrap();
    let (_server, at) = cp_server(&dir, &["--max-clients", "2"]);
    let mut idle: Vec<_> = (0..2).map(|_| Raw::connect(at).unwrap()).collect();
    let port = at.port().to_string();
    succeed(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))]);
    let end = Instant::now() + SOON;
    while !idle.iter_mut().any(|raw| has_ended(&mut raw.stream)) {
        assert!(Instant::now() < end, "no client was evicted");
    }
    let (_server, at) = serve(&[
        "ping",
        "serve",
        "-a",
        "127.0.0.1",
        "-p",
        "0",
        "--max-per-address",
        "2",
    ]);
    let _idle: Vec<_> = (0..2).map(|_| Raw::connect(at).unwrap()).collect();
    let port = at.port().to_string();
    succeed(&["ping", "127.0.0.1", "-p", &port, "-C", "3"]);
}

/// One of the three servers, and its clients.
struct ServerKind {
    name: &'static str,
    serve: Vec<String>,
    /// Connects a client that makes no request.
    connect: Connect,
    /// Runs a well-behaved client.
    client: fn(SocketAddr, &Scratch) -> Output,
}

fn rdma(at: SocketAddr) -> std::io::Result<TcpStream> {
    Raw::connect(at).map(|raw| raw.stream)
}

/// Connects a client of `perf` that sends nothing, not even hello.
fn tcp(at: SocketAddr) -> std::io::Result<TcpStream> {
    TcpStream::connect(at)
}

/// Returns the three servers. `cp` offers a file `f`.
fn kinds(t: &Scratch) -> [ServerKind; 3] {
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(1 << 20)).unwrap();
    let words = |args: &[&str]| args.iter().map(|a| (*a).to_owned()).collect();
    [
        ServerKind {
            name: "cp",
            serve: words(&["cp", "serve", str(&dir), "-p", "0", "-q"]),
            connect: rdma,
            client: |at, t| {
                let port = at.port().to_string();
                run(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))])
            },
        },
        ServerKind {
            name: "ping",
            serve: words(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]),
            connect: rdma,
            client: |at, _| run(&["ping", "127.0.0.1", "-p", &at.port().to_string(), "-C", "3"]),
        },
        ServerKind {
            name: "perf",
            serve: words(&["perf", "serve", "--bind", "127.0.0.1:0"]),
            connect: tcp,
            client: |at, _| {
                let (at, point) = (at.to_string(), ["--op", "tcp", "--size", "4"]);
                let few = ["--iters", "10", "--rounds", "1", "--poll", "event"];
                run(&[&["perf", "connect", &at][..], &point, &few].concat())
            },
        },
    ]
}

impl ServerKind {
    fn start(&self) -> (Running, SocketAddr) {
        let args: Vec<_> = self.serve.iter().map(String::as_str).collect();
        serve(&args)
    }

    /// Runs a well-behaved client and returns the time it took.
    fn run_client(&self, at: SocketAddr, t: &Scratch) -> Result<Duration, String> {
        let begin = Instant::now();
        let out = (self.client)(at, t);
        match out.status.success() {
            true => Ok(begin.elapsed()),
            false => Err(format!("{}: {}", self.name, text(&out.stderr))),
        }
    }
}

/// Rows: `--allow`, `IWARP_ALLOW`, and whether a local client is served.
#[test]
fn allow_option_wins_over_environment() {
    let t = Scratch::new();
    let (others, local) = (Some("192.0.2.0/24"), Some("127.0.0.0/8,::1"));
    for kind in kinds(&t) {
        for (option, variable, served) in [
            (others, None, false),
            (local, others, true),
            (others, local, false),
            (None, others, false),
            (None, local, true),
        ] {
            let mut args: Vec<_> = kind.serve.iter().map(String::as_str).collect();
            args.extend(option.iter().flat_map(|list| ["--allow", *list]));
            let mut command = iwarp(&args);
            command.envs(variable.map(|list| ("IWARP_ALLOW", list)));
            let (_server, at) = serve_as(command);
            let outcome = kind.run_client(at, &t);
            let row = (kind.name, option, variable);
            assert_eq!(outcome.is_ok(), served, "{row:?}: {outcome:?}");
        }
    }
}

/// 64 clients of one address connect and send nothing. Each reconnects when it is evicted, and at
/// least once a second, so that none is idle for two seconds. A well-behaved client of the same
/// address is served.
#[test]
fn returning_idle_clients_do_not_block_others() {
    let t = Scratch::new();
    for kind in kinds(&t) {
        let (_server, at) = kind.start();
        let crowd = Crowd::start(at, 64, Duration::from_millis(10), kind.connect);
        while crowd.attempts() < 100 {
            std::thread::sleep(Duration::from_millis(5));
        }
        for _ in 0..3 {
            kind.run_client(at, &t).unwrap();
        }
    }
}

/// A client that has sent hello and other messages, but no request, is evicted for a client with a
/// request.
#[test]
fn data_without_request_keep_no_place() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(100_000)).unwrap();
    let (_server, at) = cp_server(&dir, &["--max-clients", "1"]);
    let mut busy = Raw::connect(at).unwrap();
    busy.exchange_hellos().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Send `Working` as long as the connection lasts.
            while !stop.load(Ordering::Relaxed) && busy.send(&WORKING).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let port = at.port().to_string();
        let out = run(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))]);
        stop.store(true, Ordering::Relaxed);
        assert!(out.status.success(), "{}", text(&out.stderr));
    });
}

/// Clients of `perf serve` that send only hello do not get the right to measure.
#[test]
fn hello_alone_gives_no_turn() {
    let t = Scratch::new();
    let [_, _, kind] = kinds(&t);
    let (_server, at) = kind.start();
    let hello = |at| {
        let mut stream = TcpStream::connect(at)?;
        stream.write_all(b"{\"type\":\"hello\",\"protocol\":2,\"version\":\"0\"}\n")?;
        Ok(stream)
    };
    let crowd = Crowd::start(at, 40, Duration::from_millis(10), hello);
    while crowd.attempts() < 60 {
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..3 {
        kind.run_client(at, &t).unwrap();
    }
}

/// A client may grant slots of 16 MiB, but the server still writes at most 512 KiB at once.
#[test]
fn large_slots_do_not_enlarge_writes() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(3 << 20)).unwrap();
    let (_server, at) = cp_server(&dir, &[]);
    let mut raw = Raw::connect(at).unwrap();
    raw.exchange_hellos().unwrap();
    raw.request_file("f", 16 << 20, 256).unwrap();
    let start = raw.message().unwrap();
    assert_eq!(start[..2], [5, 0]);
    let (mut data, mut announced) = (0, 0);
    while announced < 3 << 20 {
        match raw.receive().unwrap() {
            Received::Data(n) => data += n,
            Received::Message(m) => {
                assert_eq!(m[..2], [6, 0], "{m:?}");
                let len = u32::from_be_bytes(m[12..16].try_into().unwrap());
                assert!((1..=512 << 10).contains(&len), "{len} octets at once");
                announced += len;
            }
        }
    }
    assert_eq!(data, 3 << 20);
}

/// All clients share the server's memory. If it is used up, new clients are refused with that
/// reason, and other clients continue.
#[test]
fn memory_for_all_clients_is_bounded() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(2 << 20)).unwrap();
    let source = t.path("source");
    fs::write(&source, noise(2 << 20)).unwrap();
    let (_server, at) = cp_server(&dir, &["--writable", "--memory", "2M"]);
    let port = at.port().to_string();
    // With little memory the server grants fewer slots, and the copy succeeds.
    succeed(&["cp", "-p", &port, "-q", str(&source), "127.0.0.1:up"]);
    let mut first = Raw::connect(at).unwrap();
    first.exchange_hellos().unwrap();
    // The data cannot be placed, so this copy does not end and keeps its memory.
    first.request_file("f", 64 << 10, 1).unwrap();
    assert_eq!(first.message().unwrap()[..2], [5, 0]);
    let mut others = Vec::new();
    let refused = loop {
        // Each client needs memory for messages.
        match Raw::connect(at) {
            Ok(raw) => others.push(raw),
            Err(e) => break e.to_string(),
        }
        assert!(others.len() < 8, "memory for 8 clients in 2 MiB");
    };
    assert!(refused.starts_with("busy: no memory"), "{refused}");
    drop(others);
    drop(first);
    succeed(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))]);
}

/// Starts a server, unless `prlimit` is missing.
fn start_limited(command: Command) -> Option<(Running, SocketAddr)> {
    match Command::new("prlimit").arg("--version").output() {
        Ok(_) => Some(serve_as(command)),
        Err(_) => {
            println!("skipped: there is no prlimit");
            None
        }
    }
}

fn limited(limit: &str, args: &[&str]) -> Command {
    let mut c = Command::new("prlimit");
    c.arg(limit);
    let inner = iwarp(args);
    c.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => c.env(name, value),
            None => c.env_remove(name),
        };
    }
    c.stdin(Stdio::null());
    c
}

/// A server that cannot allocate memory refuses clients and keeps running.
#[test]
fn server_survives_lack_of_memory() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(8 << 20)).unwrap();
    let args = ["cp", "serve", str(&dir), "-p", "0", "-q", "--memory", "8G"];
    // Each thread needs address space: 2 MiB of stack, and 64 MiB for an arena of the C library.
    let mut command = limited("--as=1073741824", &args);
    command.env("MALLOC_ARENA_MAX", "1").stderr(Stdio::null());
    let Some((mut server, at)) = start_limited(command) else {
        return;
    };
    let mut greedy = Vec::new();
    for _ in 0..40 {
        let Ok(mut raw) = Raw::connect(at) else {
            continue;
        };
        if raw.exchange_hellos().is_ok() && raw.request_file("f", 16 << 20, 256).is_ok() {
            greedy.push(raw);
        }
    }
    assert!(!greedy.is_empty());
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        server.0.try_wait().unwrap().is_none(),
        "the server has ended"
    );
    drop(greedy);
    let port = at.port().to_string();
    let end = Instant::now() + LIMIT;
    loop {
        let out = run(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))]);
        if out.status.success() {
            break;
        }
        assert!(Instant::now() < end, "{}", text(&out.stderr));
    }
}

/// If there are more silent connections than file descriptors, a client with a request is still
/// served.
#[test]
fn silent_connections_leave_descriptors() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(100_000)).unwrap();
    let args = ["cp", "serve", str(&dir), "-p", "0", "-q"];
    let mut command = limited("--nofile=160:160", &args);
    command.stderr(Stdio::null());
    let Some((_server, at)) = start_limited(command) else {
        return;
    };
    let silent: Vec<_> = (0..500).map(|_| TcpStream::connect(at).unwrap()).collect();
    let port = at.port().to_string();
    succeed(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))]);
    drop(silent);
}

/// A client that runs out of file descriptors reports that, and not a missing server.
#[test]
fn client_reports_lack_of_descriptors() {
    let closed = ClosedPort::new();
    let port = closed.port().to_string();
    // Raise the limit until the client has enough descriptors to connect.
    let mut reported = false;
    for limit in 4..16 {
        let mut c = Command::new("prlimit");
        c.arg(format!("--nofile={limit}:{limit}"));
        c.arg(env!("CARGO_BIN_EXE_iwarp"));
        c.args(["ping", "127.0.0.1", "-p", &port, "-C", "1"]);
        let Ok(out) = c.output() else {
            println!("skipped: there is no prlimit");
            return;
        };
        let err = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && !err.contains("panicked"), "{err}");
        reported |= err.contains("ulimit -n");
        if err.contains("nobody listens") {
            assert!(reported, "{limit}: {err}");
            return;
        }
    }
    panic!("the client never tried to connect");
}

/// The test lowers the limit until the server can accept a connection and do nothing else.
#[test]
fn server_reports_lack_of_descriptors() {
    let t = Scratch::new();
    let dir = t.sub("served");
    let args = ["cp", "serve", str(&dir), "-p", "0", "-q"];
    for limit in (8..40).rev() {
        let mut command = limited(&format!("--nofile={limit}:{limit}"), &args);
        command.stderr(Stdio::null());
        let Some((_server, at)) = start_limited(command) else {
            return;
        };
        let port = at.port().to_string();
        let err = fail(
            &["cp", "-p", &port, "127.0.0.1:none", str(&t.path("back"))],
            1,
        );
        if err.contains("the listener has no file descriptors left") {
            return;
        }
        assert!(err.contains("the peer says"), "{limit}: {err}");
    }
    panic!("the server always had enough descriptors");
}

/// Returns the resident memory in MiB.
fn mib(pid: u32) -> f64 {
    resident_bytes(pid) as f64 / 1048576.0
}

/// Prints the times of a well-behaved client beside a crowd, and the server's memory: before, peak
/// and after.
fn print_figures(
    kind: &ServerKind,
    t: &Scratch,
    what: &str,
    start_crowd: &mut dyn FnMut(SocketAddr) -> Box<dyn Any>,
) {
    let (server, at) = kind.start();
    let pid = server.0.id();
    let alone = kind.run_client(at, t).unwrap();
    let before = mib(pid);
    let crowd = start_crowd(at);
    let mut peak = mib(pid);
    let mut times = Vec::new();
    let mut failures = Vec::new();
    for _ in 0..20 {
        match kind.run_client(at, t) {
            Ok(took) => times.push(took.as_secs_f64() * 1e3),
            Err(why) => failures.push(why),
        }
        peak = peak.max(mib(pid));
    }
    let attempts = crowd.downcast_ref::<Crowd>().map_or(0, Crowd::attempts);
    drop(crowd);
    std::thread::sleep(Duration::from_secs(3));
    times.sort_by(f64::total_cmp);
    println!(
        "{} serve, {what}: alone {:.0} ms; beside them {} of 20 succeed, \
         in {:.0} to {:.0} ms, median {:.0} ms; \
         the crowd connected {attempts} times; \
         memory {before:.1}, {peak:.1}, {:.1} MiB {failures:?}",
        kind.name,
        alone.as_secs_f64() * 1e3,
        times.len(),
        times.first().unwrap_or(&f64::NAN),
        times.last().unwrap_or(&f64::NAN),
        times.get(times.len() / 2).unwrap_or(&f64::NAN),
        mib(pid),
    );
}

/// Prints figures of a well-behaved client beside crowds of its own address: 200 idle clients that
/// connect once, 200 that reconnect when they are evicted or refused, 40 silent connections, and 16
/// clients that request a large file and do not read it.
#[test]
#[ignore = "prints figures; run it alone, in a release build"]
fn hostile_crowds() {
    let t = Scratch::new();
    for kind in &kinds(&t) {
        print_figures(kind, &t, "no crowd", &mut |_| Box::new(()));
        print_figures(kind, &t, "200 idle clients that connect once", &mut |at| {
            let idle = (0..200).filter_map(|_| (kind.connect)(at).ok());
            Box::new(idle.collect::<Vec<_>>())
        });
        for (what, pause) in [("every 10 ms", 10), ("immediately", 0)] {
            let what = format!("200 idle clients that reconnect {what}");
            print_figures(kind, &t, &what, &mut |at| {
                let pause = Duration::from_millis(pause);
                let crowd = Crowd::start(at, 200, pause, kind.connect);
                std::thread::sleep(Duration::from_millis(500));
                Box::new(crowd)
            });
        }
        print_figures(kind, &t, "40 silent connections", &mut |at| {
            let silent = (0..40).map(|_| TcpStream::connect(at).unwrap());
            Box::new(silent.collect::<Vec<_>>())
        });
    }
    let [cp, ..] = kinds(&t);
    let big = fs::File::create(t.path("served").join("big")).unwrap();
    big.set_len(300 << 20).unwrap();
    print_figures(
        &cp,
        &t,
        "16 readers of 300 MiB that read nothing",
        &mut |at| {
            let greedy = (0..16).map(|_| {
                let mut raw = Raw::connect(at).unwrap();
                raw.exchange_hellos().unwrap();
                raw.request_file("big", 16 << 20, 256).unwrap();
                raw
            });
            let greedy: Vec<_> = greedy.collect();
            std::thread::sleep(Duration::from_millis(2500));
            Box::new(greedy)
        },
    );
}
