//! `iwarp ping` between two processes, and what it says when there is nobody to answer.

mod common;

use common::{Scratch, fail, finish, iwarp, run, serve, start, succeed, text};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

#[test]
fn pings_of_every_size_over_ipv4_and_ipv6() {
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

#[test]
fn several_clients_at_once_and_a_server_that_counts() {
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
        .expect("it has answered enough");
    assert!(status.success());
}

#[test]
fn a_recording_has_its_end_when_the_process_ends() {
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
    // The head of the file is written at once; all else fits into its buffer.
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
    ] {
        fail(args, 2);
    }
}

#[test]
fn nobody_there_is_said_clearly() {
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let port = port.to_string();
    for ip in ["127.0.0.1", "::1"] {
        let err = fail(&["ping", ip, "-p", &port, "-C", "1"], 1);
        assert!(
            err.contains("nobody listens there") && err.contains(&port),
            "{err}"
        );
    }
    // The broadcast address cannot be reached by TCP, and no packet is sent to find out.
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

/// A peer that greets like a server of another protocol, closes at once, or closes after the request.
fn stranger(what: &'static [u8], reads: bool) -> u16 {
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
                // Until the client has seen enough.
                let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
                while matches!(stream.read(&mut [0; 512]), Ok(n) if n > 0) {}
            }
        }
    });
    port
}

#[test]
fn peers_that_do_not_speak_mpa_are_named_so() {
    for (what, reads) in [
        (&b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"[..], false),
        (
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
            true,
        ),
        (b"", false),
        (b"", true),
    ] {
        let port = stranger(what, reads).to_string();
        let start = Instant::now();
        let err = fail(&["ping", "127.0.0.1", "-p", &port, "-C", "1"], 1);
        assert!(err.contains("does not speak iWARP"), "{err}");
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn a_server_outlives_strangers() {
    let (mut server, at) = serve(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]);
    let mut garbage = TcpStream::connect(at).unwrap();
    garbage.write_all(&[0xff; 4096]).unwrap();
    // Says nothing, and stays.
    let _silent = TcpStream::connect(at).unwrap();
    drop(TcpStream::connect(at).unwrap());
    let port = at.port().to_string();
    let out = run(&["ping", "127.0.0.1", "-p", &port, "-C", "5", "-V"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(server.0.try_wait().unwrap().is_none());
}
