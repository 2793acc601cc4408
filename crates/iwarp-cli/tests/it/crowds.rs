//! Servers among clients that do nothing, take nothing, or ask for too much: the others are served, and memory is bounded.
//!
//! `cargo test --release -p iwarp-cli --test it crowds:: -- --ignored --nocapture` runs the same on a larger scale and prints figures.

use crate::common::crowd::{Connect, Crowd, has_ended};
use crate::common::raw::{Heard, Raw, resident};
use crate::common::{
    LIMIT, Nobody, Running, Scratch, fail, iwarp, noise, run, serve, serve_as, str, succeed, text,
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

/// The message of `cp` that says that an end is still working.
const WORKING: [u8; 2] = [12, 0];

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

/// A server, what its clients do before their first request, and a good client.
struct Kind {
    name: &'static str,
    serve: Vec<String>,
    connect: Connect,
    good: fn(SocketAddr, &Scratch) -> Output,
}

fn rdma(at: SocketAddr) -> std::io::Result<TcpStream> {
    Raw::connect(at).map(|raw| raw.stream)
}

/// A client of `perf` that says nothing, not even hello.
fn tcp(at: SocketAddr) -> std::io::Result<TcpStream> {
    TcpStream::connect(at)
}

/// The three servers. `cp` offers a file `f`.
fn kinds(t: &Scratch) -> [Kind; 3] {
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(1 << 20)).unwrap();
    let words = |args: &[&str]| args.iter().map(|a| (*a).to_owned()).collect();
    [
        Kind {
            name: "cp",
            serve: words(&["cp", "serve", str(&dir), "-p", "0", "-q"]),
            connect: rdma,
            good: |at, t| {
                let port = at.port().to_string();
                run(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))])
            },
        },
        Kind {
            name: "ping",
            serve: words(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]),
            connect: rdma,
            good: |at, _| run(&["ping", "127.0.0.1", "-p", &at.port().to_string(), "-C", "3"]),
        },
        Kind {
            name: "perf",
            serve: words(&["perf", "serve", "--bind", "127.0.0.1:0"]),
            connect: tcp,
            good: |at, _| {
                let (at, point) = (at.to_string(), ["--op", "tcp", "--size", "4"]);
                let few = ["--iters", "10", "--rounds", "1", "--poll", "event"];
                run(&[&["perf", "connect", &at][..], &point, &few].concat())
            },
        },
    ]
}

impl Kind {
    fn start(&self) -> (Running, SocketAddr) {
        let args: Vec<_> = self.serve.iter().map(String::as_str).collect();
        serve(&args)
    }

    /// Runs a good client, and returns how long that took, if it succeeded.
    fn good(&self, at: SocketAddr, t: &Scratch) -> Result<Duration, String> {
        let begin = Instant::now();
        let out = (self.good)(at, t);
        match out.status.success() {
            true => Ok(begin.elapsed()),
            false => Err(format!("{}: {}", self.name, text(&out.stderr))),
        }
    }
}

/// A row: `--allow`, `IWARP_ALLOW`, and whether a client of this host is served.
#[test]
fn allow_option_wins_over_environment() {
    let t = Scratch::new();
    let (others, us) = (Some("192.0.2.0/24"), Some("127.0.0.0/8,::1"));
    for kind in kinds(&t) {
        for (option, variable, served) in [
            (others, None, false),
            (us, others, true),
            (others, us, false),
            (None, others, false),
            (None, us, true),
        ] {
            let mut args: Vec<_> = kind.serve.iter().map(String::as_str).collect();
            args.extend(option.iter().flat_map(|list| ["--allow", *list]));
            let mut command = iwarp(&args);
            command.envs(variable.map(|list| ("IWARP_ALLOW", list)));
            let (_server, at) = serve_as(command);
            let outcome = kind.good(at, &t);
            let row = (kind.name, option, variable);
            assert_eq!(outcome.is_ok(), served, "{row:?}: {outcome:?}");
        }
    }
}

/// 64 clients of one address connect and say nothing. Each comes again when it is evicted, and once a second, so that none of them
/// is idle for the two seconds that a client may be idle after it has worked. A good client of the same address is served.
#[test]
fn idle_clients_that_come_again_do_not_shut_out_good_ones() {
    let t = Scratch::new();
    for kind in kinds(&t) {
        let (_server, at) = kind.start();
        let crowd = Crowd::gather(at, 64, Duration::from_millis(10), kind.connect);
        while crowd.tried() < 100 {
            std::thread::sleep(Duration::from_millis(5));
        }
        for _ in 0..3 {
            kind.good(at, &t).unwrap();
        }
    }
}

/// A client has said hello and goes on sending, but asks for nothing. It is evicted for one that asks.
#[test]
fn octets_without_a_request_keep_no_place() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), noise(100_000)).unwrap();
    let (_server, at) = cp_server(&dir, &["--max-clients", "1"]);
    let mut busy = Raw::connect(at).unwrap();
    busy.greet().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // "I am still working", for as long as the server listens.
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

/// Clients of `perf serve` that say hello and then nothing do not hold the right to measure.
#[test]
fn a_hello_alone_gives_no_right_to_measure() {
    let t = Scratch::new();
    let [_, _, kind] = kinds(&t);
    let (_server, at) = kind.start();
    let hello = |at| {
        let mut stream = TcpStream::connect(at)?;
        stream.write_all(b"{\"type\":\"hello\",\"protocol\":2,\"version\":\"0\"}\n")?;
        Ok(stream)
    };
    let crowd = Crowd::gather(at, 40, Duration::from_millis(10), hello);
    while crowd.tried() < 60 {
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..3 {
        kind.good(at, &t).unwrap();
    }
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
    let nobody = Nobody::new();
    let port = nobody.port().to_string();
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

/// Resident memory in MiB.
fn mib(pid: u32) -> f64 {
    resident(pid) as f64 / 1048576.0
}

/// Prints the figures of a server beside a crowd: the good client's times, and memory before, at most and after.
fn figures(
    kind: &Kind,
    t: &Scratch,
    what: &str,
    gather: &mut dyn FnMut(SocketAddr) -> Box<dyn Any>,
) {
    let (server, at) = kind.start();
    let pid = server.0.id();
    let alone = kind.good(at, t).unwrap();
    let before = mib(pid);
    let crowd = gather(at);
    let mut peak = mib(pid);
    let mut times = Vec::new();
    let mut failures = Vec::new();
    for _ in 0..20 {
        match kind.good(at, t) {
            Ok(took) => times.push(took.as_secs_f64() * 1e3),
            Err(why) => failures.push(why),
        }
        peak = peak.max(mib(pid));
    }
    let tried = crowd.downcast_ref::<Crowd>().map_or(0, Crowd::tried);
    drop(crowd);
    std::thread::sleep(Duration::from_secs(3));
    times.sort_by(f64::total_cmp);
    println!(
        "{} serve, {what}: alone {:.0} ms; beside them {} of 20 succeed, in {:.0} to {:.0} ms, median {:.0} ms; \
         the crowd connected {tried} times; memory {before:.1}, {peak:.1}, {:.1} MiB {failures:?}",
        kind.name,
        alone.as_secs_f64() * 1e3,
        times.len(),
        times.first().unwrap_or(&f64::NAN),
        times.last().unwrap_or(&f64::NAN),
        times.get(times.len() / 2).unwrap_or(&f64::NAN),
        mib(pid),
    );
}

/// Crowds of the good client's own address: 200 idle clients, young ones and some that come again at once when they are evicted or
/// refused; 16 that read nothing of a large file; 40 silent connections. Prints figures of a good client beside each.
#[test]
#[ignore = "prints figures; run it alone, in a release build"]
fn hostile_crowds() {
    let t = Scratch::new();
    for kind in &kinds(&t) {
        figures(kind, &t, "nobody", &mut |_| Box::new(()));
        figures(
            kind,
            &t,
            "200 idle clients that have just come",
            &mut |at| {
                let idle = (0..200).filter_map(|_| (kind.connect)(at).ok());
                Box::new(idle.collect::<Vec<_>>())
            },
        );
        for (what, pause) in [("each 10 ms", 10), ("at once", 0)] {
            let what = format!("200 idle clients that come again {what}");
            figures(kind, &t, &what, &mut |at| {
                let pause = Duration::from_millis(pause);
                let crowd = Crowd::gather(at, 200, pause, kind.connect);
                std::thread::sleep(Duration::from_millis(500));
                Box::new(crowd)
            });
        }
        figures(kind, &t, "40 silent connections", &mut |at| {
            let silent = (0..40).map(|_| TcpStream::connect(at).unwrap());
            Box::new(silent.collect::<Vec<_>>())
        });
    }
    let [cp, ..] = kinds(&t);
    let big = fs::File::create(t.path("served").join("big")).unwrap();
    big.set_len(300 << 20).unwrap();
    figures(
        &cp,
        &t,
        "16 readers of 300 MiB that read nothing",
        &mut |at| {
            let rude = (0..16).map(|_| {
                let mut raw = Raw::connect(at).unwrap();
                raw.greet().unwrap();
                raw.get("big", 16 << 20, 256).unwrap();
                raw
            });
            let rude: Vec<_> = rude.collect();
            std::thread::sleep(Duration::from_millis(2500));
            Box::new(rude)
        },
    );
}
