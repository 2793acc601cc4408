//! Tests of rsockets between two processes: exits without `close`, killed processes, forks. The
//! peer process is this test program, which runs only the test `peer_process`. An environment
//! variable contains its role.

use crate::common::alone::path_of;
use crate::common::{Rs, TimeLimit, listener, octet, pattern, time_limit};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;
use std::process::{Child, Command};
use std::time::Duration;

const TOTAL: usize = 64 << 20;

struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the peer process in `role`. Returns it, the connected socket, and a time limit.
fn peer(role: &str) -> (Peer, Rs, TimeLimit) {
    let (l, address) = listener(|_| {});
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &path_of("peer_process"),
            "--nocapture",
            "--test-threads=1",
        ])
        .env("RSOCKET_TEST_ROLE", role)
        .env("RSOCKET_TEST_ADDRESS", address.to_string())
        .spawn()
        .unwrap();
    let child = Peer(child);
    assert_ne!(
        l.poll(libc::POLLIN, 20_000),
        0,
        "the peer process did not connect"
    );
    let (s, _) = rs::accept(l.0).unwrap();
    (child, Rs(s), time_limit(Duration::from_secs(60)))
}

#[test]
fn peer_process() {
    let Ok(role) = std::env::var("RSOCKET_TEST_ROLE") else {
        return;
    };
    let r = Rs::new();
    rs::connect(
        r.0,
        std::env::var("RSOCKET_TEST_ADDRESS")
            .unwrap()
            .parse()
            .unwrap(),
    )
    .unwrap();
    match role.as_str() {
        "exit" => {
            for position in (0..TOTAL).step_by(1 << 20) {
                r.send_all(&pattern(position, 1 << 20));
            }
            std::process::exit(0);
        }
        "echo" => loop {
            let mut out = vec![0; 70_000];
            match rs::recv(r.0, &mut out, 0).unwrap() {
                0 => break,
                n => r.send_all(&out[..n]),
            }
        },
        "hang" => {
            r.send_all(&pattern(0, 1000));
            std::thread::sleep(Duration::from_secs(60));
        }
        "fork" => {
            r.send_all(b"before");
            // SAFETY: the child calls only functions of this crate and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let refused = rs::send(r.0, b"no", 0) == Err(Errno::NOTSUP);
                let closed = rs::close(r.0) == Ok(()) && rs::close(r.0) == Err(Errno::BADF);
                let new_socket =
                    rs::socket(libc::AF_INET, libc::SOCK_STREAM, 0).and_then(rs::close);
                // SAFETY: the child may run the exit handlers.
                unsafe {
                    libc::exit(if refused && closed && new_socket.is_ok() {
                        7
                    } else {
                        1
                    })
                };
            }
            let mut status = 0;
            // SAFETY: `status` is a valid place for the result.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(libc::WEXITSTATUS(status), 7, "{status:#x}");
            r.send_all(b" and after");
            rs::shutdown(r.0, libc::SHUT_WR).unwrap();
            assert_eq!(r.recv_n(1), b"");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn exit_without_close_delivers_data() {
    let (mut child, s, stopwatch) = peer("exit");
    let mut out = vec![0; 1 << 20];
    let mut position = 0;
    loop {
        let n = rs::recv(s.0, &mut out, 0).unwrap();
        if n == 0 {
            break;
        }
        assert!(
            out[..n]
                .iter()
                .enumerate()
                .all(|(i, o)| *o == octet(position + i)),
            "from {position}"
        );
        position += n;
        stopwatch.assert_within();
    }
    assert_eq!(position, TOTAL);
    assert!(child.0.wait().unwrap().success());
}

#[test]
fn data_flows_both_ways() {
    let (mut child, s, stopwatch) = peer("echo");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for position in (0..8 << 20).step_by(1 << 18) {
                s.send_all(&pattern(position, 1 << 18));
            }
            rs::shutdown(s.0, libc::SHUT_WR).unwrap();
        });
        let got = s.recv_n((8 << 20) + 1);
        assert!(got == pattern(0, 8 << 20), "{} octets", got.len());
    });
    assert!(child.0.wait().unwrap().success());
    stopwatch.assert_within();
}

#[test]
fn killed_peer_ends_receive() {
    let (mut child, s, stopwatch) = peer("hang");
    assert_eq!(s.recv_n(1000), pattern(0, 1000));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| rs::recv(s.0, &mut [0; 1], 0));
        std::thread::sleep(Duration::from_millis(100));
        child.0.kill().unwrap();
        // The kernel closes the socket of the killed process with a FIN or a reset.
        let got = waits.join().unwrap();
        assert!([Ok(0), Err(Errno::CONNRESET)].contains(&got), "{got:?}");
    });
    assert_ne!(s.poll(libc::POLLIN, 1000) & libc::POLLIN, 0);
    assert_eq!(rs::send(s.0, b"x", 0), Err(Errno::CONNRESET));
    stopwatch.assert_within();
}

#[test]
fn killed_peer_ends_blocked_send() {
    let (mut child, s, stopwatch) = peer("hang");
    std::thread::scope(|scope| {
        let sends = scope.spawn(|| {
            let data = vec![0; 1 << 20];
            loop {
                if let Err(e) = rs::send(s.0, &data, 0) {
                    return e;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(
            !sends.is_finished(),
            "send did not block although the peer does not read"
        );
        child.0.kill().unwrap();
        assert_eq!(sends.join().unwrap(), Errno::CONNRESET);
    });
    // Data that arrived before the kill can still be read.
    assert_eq!(s.recv_n(1000), pattern(0, 1000));
    stopwatch.assert_within();
}

#[test]
fn child_cannot_use_inherited_stream() {
    let (mut child, s, stopwatch) = peer("fork");
    assert_eq!(s.recv_n(100), b"before and after");
    drop(s);
    assert!(child.0.wait().unwrap().success());
    stopwatch.assert_within();
}
