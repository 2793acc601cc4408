//! Servers among clients that do nothing, take nothing, or ask for too much: the others are served, and memory is bounded.
//!
//! `cargo test --release -p iwarp-cli --test crowds -- --ignored --nocapture` runs the same on a larger scale and prints figures.

mod common;
#[path = "common/raw.rs"]
mod raw;

use common::{
    LIMIT, Running, Scratch, fail, iwarp, noise, run, serve, serve_as, str, succeed, text,
};
use raw::{Heard, Raw, resident};
use std::fs;
use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn cp_server(dir: &Path, more: &[&str]) -> (Running, SocketAddr) {
    serve(&[&["cp", "serve", str(dir), "-p", "0", "-q"], more].concat())
}

/// Whether the other end has closed; data that come meanwhile are dropped.
fn has_ended(stream: &mut TcpStream) -> bool {
    stream
        .set_read_timeout(Some(Duration::from_millis(1)))
        .unwrap();
    let mut sink = [0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => {
                let waits = matches!(
                    e.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                );
                return !waits;
            }
        }
    }
}

/// Fewer than the silence that servers tolerate: what ends later has not been evicted.
const SOON: Duration = Duration::from_secs(12);

/// However many come, no more than the limit are served at a time. Those that are refused are told why.
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
            let came: Vec<_> = (0..8).map(|_| Raw::connect(at)).collect();
            let mut alive = Vec::new();
            for one in came {
                match one {
                    Ok(raw) => alive.push(raw),
                    Err(e) => assert!(e.to_string().starts_with("busy: "), "{e}"),
                }
            }
            let end = Instant::now() + SOON;
            // A machine that is slow lets the idlest be evicted for the next one, a moment later.
            while alive.len() > limit {
                assert!(Instant::now() < end, "{kind:?} serves {}", alive.len());
                alive.retain_mut(|raw| !has_ended(&mut raw.stream));
            }
            assert!(!alive.is_empty());
        }
    }
}

/// All places are taken by clients that say nothing: one of them leaves for the one that works.
#[test]
fn idle_clients_give_way() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(100_000)).unwrap();
    let (_server, at) = cp_server(&dir, &["--max-clients", "2"]);
    let mut idle: Vec<_> = (0..2).map(|_| Raw::connect(at).unwrap()).collect();
    let port = at.port().to_string();
    succeed(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))]);
    let end = Instant::now() + SOON;
    while !idle.iter_mut().any(|raw| has_ended(&mut raw.stream)) {
        assert!(Instant::now() < end, "nobody was evicted");
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

/// The peer's slots may hold 16 MiB each; how much is sent at once, and so kept in memory, is the server's choice.
#[test]
fn a_peer_with_large_slots_gets_pieces_of_ordinary_size() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(3 << 20)).unwrap();
    let (_server, at) = cp_server(&dir, &[]);
    let mut raw = Raw::connect(at).unwrap();
    raw.greet().unwrap();
    raw.get("f", 16 << 20, 256).unwrap();
    let start = raw.message().unwrap();
    assert_eq!(start[..2], [5, 0]);
    let (mut data, mut announced) = (0, 0);
    while announced < 3 << 20 {
        match raw.hear().unwrap() {
            Heard::Data(n) => data += n,
            Heard::Message(m) => {
                assert_eq!(m[..2], [6, 0], "{m:?}");
                let len = u32::from_be_bytes(m[12..16].try_into().unwrap());
                assert!((1..=512 << 10).contains(&len), "{len} octets at once");
                announced += len;
            }
        }
    }
    assert_eq!(data, 3 << 20);
}

/// Memory is shared: who comes when it is used up is told so, and the others go on.
#[test]
fn memory_for_all_clients_is_bounded() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(2 << 20)).unwrap();
    let source = t.path("source");
    fs::write(&source, noise(2 << 20)).unwrap();
    let (_server, at) = cp_server(&dir, &["--writable", "--memory", "2M"]);
    let port = at.port().to_string();
    // With little memory there are fewer slots, and it works.
    succeed(&["cp", "-p", &port, "-q", str(&source), "127.0.0.1:up"]);
    let mut first = Raw::connect(at).unwrap();
    first.greet().unwrap();
    // Without a place to read to it stays there, with what it has taken.
    first.get("f", 64 << 10, 1).unwrap();
    assert_eq!(first.message().unwrap()[..2], [5, 0]);
    let mut others = Vec::new();
    let refused = loop {
        // Each has messages at least.
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

/// A server, if there is a `prlimit` to start it with.
fn start_limited(command: Command) -> Option<(Running, SocketAddr)> {
    match Command::new("prlimit").arg("--version").output() {
        Ok(_) => Some(serve_as(command)),
        Err(_) => {
            println!("skipped: there is no prlimit");
            None
        }
    }
}

/// The command under a limit of the kernel.
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

/// A server that cannot have more memory refuses clients, and does not end.
#[test]
fn a_server_without_memory_lives_on() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(8 << 20)).unwrap();
    let args = ["cp", "serve", str(&dir), "-p", "0", "-q", "--memory", "8G"];
    // Threads have address space of their own: 2 MiB of stack, and elsewhere 64 MiB for an arena of the C library.
    let mut command = limited("--as=1073741824", &args);
    command.env("MALLOC_ARENA_MAX", "1").stderr(Stdio::null());
    let Some((mut server, at)) = start_limited(command) else {
        return;
    };
    let mut rude = Vec::new();
    for _ in 0..40 {
        let Ok(mut raw) = Raw::connect(at) else {
            continue;
        };
        if raw.greet().is_ok() && raw.get("f", 16 << 20, 256).is_ok() {
            rude.push(raw);
        }
    }
    assert!(!rude.is_empty());
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        server.0.try_wait().unwrap().is_none(),
        "the server has ended"
    );
    drop(rude);
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

/// More connections than there are descriptors, and none of them says a word: the next one that does is served.
#[test]
fn silent_connections_do_not_use_up_the_descriptors() {
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

/// A listener that has no descriptors left says so, instead of sounding as if nobody listened.
#[test]
fn descriptors_that_are_used_up_are_named() {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port().to_string()
    };
    // The client's own. What it needs before it connects is less than what it needs to connect.
    let mut seen = false;
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
        seen |= err.contains("ulimit -n");
        if err.contains("nobody listens") {
            assert!(seen, "{limit}: {err}");
            return;
        }
    }
    panic!("it never connected");
}

/// The same at the server: with fewer and fewer descriptors there comes a point where it can take a connection, and nothing
/// that belongs to it.
#[test]
fn a_server_without_descriptors_says_so() {
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
    panic!("it always has enough");
}

/// 200 idle clients, 16 that read nothing of a large file, 40 silent connections: figures for each, and for a good client
/// beside them.
#[test]
#[ignore = "prints figures; run it alone, in a release build"]
fn hostile_crowds() {
    let t = Scratch::new();
    let dir = t.sub("served");
    let good = noise(1 << 20);
    fs::write(dir.join("good"), &good).unwrap();
    fs::File::create(dir.join("big"))
        .unwrap()
        .set_len(300 << 20)
        .unwrap();
    let back = t.path("back");
    let figures = |what: &str, crowd: &mut dyn FnMut(SocketAddr) -> Vec<Raw>| {
        let (server, at) = cp_server(&dir, &[]);
        let pid = server.0.id();
        let port = at.port().to_string();
        let copy = || {
            let start = Instant::now();
            succeed(&["cp", "-p", &port, "-q", "127.0.0.1:good", str(&back)]);
            start.elapsed().as_secs_f64() * 1e3
        };
        let alone = copy();
        let before = resident(pid);
        let came = crowd(at);
        let n = came.len();
        std::thread::sleep(Duration::from_millis(2500));
        let mut peak = resident(pid);
        let beside: Vec<f64> = (0..10)
            .map(|_| {
                let ms = copy();
                peak = peak.max(resident(pid));
                ms
            })
            .collect();
        drop(came);
        std::thread::sleep(Duration::from_secs(3));
        let (min, max) = beside
            .iter()
            .fold((f64::MAX, 0f64), |(a, b), x| (a.min(*x), b.max(*x)));
        println!(
            "{what}: {n} got in; a copy of 1 MiB alone {alone:.0} ms, beside them {min:.0} to {max:.0} ms (10 of 10 succeed); \
             VmRSS before {:.1}, peak {:.1}, after {:.1} MiB",
            before as f64 / 1048576.0,
            peak as f64 / 1048576.0,
            resident(pid) as f64 / 1048576.0
        );
    };
    figures("200 idle clients", &mut |at| {
        (0..200).filter_map(|_| Raw::connect(at).ok()).collect()
    });
    figures("16 readers of 300 MiB that read nothing", &mut |at| {
        let rude = (0..16).map(|_| {
            let mut raw = Raw::connect(at).unwrap();
            raw.greet().unwrap();
            raw.get("big", 16 << 20, 256).unwrap();
            raw
        });
        rude.collect()
    });
    let mut silent = Vec::new();
    figures("40 silent connections", &mut |at| {
        silent.extend((0..40).map(|_| TcpStream::connect(at).unwrap()));
        Vec::new()
    });
    let (_server, at) = serve(&["perf", "serve", "--bind", "127.0.0.1:0"]);
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(at).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(2500));
    let start = Instant::now();
    let at = at.to_string();
    let args = [
        "--op", "tcp", "--size", "4", "--iters", "10", "--rounds", "1",
    ];
    succeed(&[&["perf", "connect", &at][..], &args].concat());
    println!(
        "perf serve, 40 silent connections: a short measurement takes {:.0} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    drop(silent);
    fail(&["perf", "connect", "127.0.0.1:1"], 1);
}
